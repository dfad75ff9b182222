//! The host's ends of standard streams.

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Mutex};

use cube_agent_protocol::STREAM_TOKEN_LEN;
use cube_agent_protocol::agent::Stdio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// The streams that the agent has connected and that nobody has taken yet, by their tokens.
#[derive(Clone, Default)]
pub struct Arrivals {
    streams: Arc<Mutex<HashMap<Vec<u8>, UnixStream>>>,
    news: Arc<tokio::sync::Notify>,
}

impl Arrivals {
    /// Those of a socket.
    pub fn listen(listener: UnixListener) -> Self {
        let arrivals = Self::default();
        let this = arrivals.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut token = [0; STREAM_TOKEN_LEN];
                stream.read_exact(&mut token).await.unwrap();
                this.streams.lock().unwrap().insert(token.to_vec(), stream);
                this.news.notify_waiters();
            }
        });
        arrivals
    }

    async fn take(&self, token: &[u8]) -> Stream {
        loop {
            let news = self.news.notified();
            if let Some(stream) = self.streams.lock().unwrap().remove(token) {
                return Stream(stream);
            }
            news.await;
        }
    }
}

/// The streams of one process.
pub struct Io {
    /// What the agent is told of them.
    pub stdio: Stdio,
    arrivals: Arrivals,
}

impl Io {
    /// All of them; those of a terminal.
    pub fn new(arrivals: &Arrivals, terminal: bool) -> Self {
        let mut stdio = Stdio::new();
        stdio.stdin = random(STREAM_TOKEN_LEN);
        stdio.stdout = random(STREAM_TOKEN_LEN);
        stdio.stderr = random(STREAM_TOKEN_LEN);
        stdio.terminal = terminal;
        if terminal {
            (stdio.width, stdio.height) = (80, 24);
        }
        Self {
            stdio,
            arrivals: arrivals.clone(),
        }
    }

    /// None.
    pub fn none(arrivals: &Arrivals) -> Self {
        Self {
            stdio: Stdio::new(),
            arrivals: arrivals.clone(),
        }
    }

    pub async fn stdin(&self) -> Stream {
        self.arrivals.take(&self.stdio.stdin).await
    }

    pub async fn stdout(&self) -> Stream {
        self.arrivals.take(&self.stdio.stdout).await
    }

    pub async fn stderr(&self) -> Stream {
        self.arrivals.take(&self.stdio.stderr).await
    }
}

/// Random bytes.
pub fn random(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut source = std::fs::File::open("/dev/urandom").unwrap();
    source.read_exact(&mut bytes).unwrap();
    bytes
}

/// One stream.
pub struct Stream(UnixStream);

impl Stream {
    /// Everything until its end.
    pub async fn collect(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.0.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    pub async fn read_exact(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    pub async fn read_until(&mut self, end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let byte = self
                .0
                .read_u8()
                .await
                .unwrap_or_else(|e| panic!("{e} after {text:?}"));
            text.push(byte.into());
        }
        text
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    pub async fn end(mut self) {
        self.0.shutdown().await.unwrap();
    }
}
