//! The running machine as the tasks see it: the agent to call, the streams that it connects, and
//! the news that it has ended.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cube_agent_protocol::STREAM_TOKEN_LEN;
use cube_agent_protocol::agent::Stdio;
use cube_agent_protocol::agent_ttrpc::AgentClient;
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use ttrpc::r#async::transport::Socket;
use ttrpc::asynchronous::Client;

use crate::hypervisor::{Ended, end_of};
use crate::stdio::{GuestStdio, HostStdio};

/// Why the agent did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GuestError {
    /// It refused.
    #[error("{}", .0.message)]
    Refused(ttrpc::Status),
    /// The machine has ended.
    #[error("The sandbox's machine has ended: {0}")]
    Ended(Arc<Ended>),
    /// It cannot be worked with, although the machine runs.
    #[error("The agent in the guest cannot be used: {0}")]
    Broken(String),
    /// No random bytes.
    #[error("Cannot get random bytes: {0}")]
    Random(Arc<io::Error>),
}

/// A machine with its agent.
pub struct Guest {
    /// The hypervisor's process id on the host, which stands for every process in the guest.
    pub pid: u32,
    agent: AgentClient,
    streams: Streams,
    ended: watch::Receiver<Option<Arc<Ended>>>,
    power: Power,
    power_is_cut: AtomicBool,
}

/// Ends the machine as if its power were cut.
pub type Power = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

impl Guest {
    /// A machine whose agent serves on `connection` and connects its streams to `streams`.
    pub fn new(
        pid: u32,
        connection: UnixStream,
        streams: Streams,
        ended: watch::Receiver<Option<Arc<Ended>>>,
        power: Power,
    ) -> Self {
        let agent = AgentClient::new(Client::new(Socket::from(connection)));
        Self {
            pid,
            agent,
            streams,
            ended,
            power,
            power_is_cut: AtomicBool::new(false),
        }
    }

    /// Ends a machine that cannot be reasoned with. Its tasks end with it.
    pub fn cut_off(&self, why: &str) {
        log::error!("The sandbox's machine is ended: {why}");
        self.cut_power();
    }

    /// Ends the machine.
    pub fn cut_power(&self) {
        self.power_is_cut.store(true, Ordering::Relaxed);
        if let Err(e) = (self.power)() {
            log::error!("Cannot end the machine: {e}");
        }
    }

    /// Calls the agent. Fails at once when the machine ends meanwhile.
    pub async fn call<'a, T, F>(
        &'a self,
        call: impl FnOnce(&'a AgentClient) -> F,
    ) -> Result<T, GuestError>
    where
        F: Future<Output = ttrpc::Result<T>> + 'a,
    {
        tokio::select! {
            // An answer that is there counts, also if the machine has ended since.
            biased;
            answer = call(&self.agent) => match answer {
                Ok(answer) => Ok(answer),
                Err(ttrpc::Error::RpcStatus(status)) => Err(GuestError::Refused(status)),
                Err(error) => Err(self.broken(error).await),
            },
            ended = self.end() => Err(GuestError::Ended(ended)),
        }
    }

    /// A broken connection is usually the first sign of a machine that is ending, however long that takes on a busy host. A
    /// machine that goes on has lost its agent, which comes once: it is of no use any more, and ended.
    async fn broken(&self, error: ttrpc::Error) -> GuestError {
        const GRACE: Duration = Duration::from_secs(2);
        if timeout(GRACE, self.end()).await.is_err() && !self.power_is_cut.load(Ordering::Relaxed) {
            self.cut_off(&format!("the connection to its agent broke: {error}"));
        }
        GuestError::Ended(self.end().await)
    }

    /// Waits for the machine's end.
    pub async fn end(&self) -> Arc<Ended> {
        end_of(self.ended.clone()).await
    }

    /// Whether the machine has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// Prepares the streams of a process that containerd wants: what the agent is told of them,
    /// and what they become.
    pub fn offer_streams(
        &self,
        host: &HostStdio,
        terminal: bool,
        (width, height): (u32, u32),
    ) -> Result<(Stdio, OfferedStreams), GuestError> {
        let offer = |wanted: bool| -> Result<_, GuestError> {
            if !wanted {
                return Ok((Vec::new(), None));
            }
            let (token, stream) = self
                .streams
                .expect()
                .map_err(|e| GuestError::Random(Arc::new(e)))?;
            Ok((token.to_vec(), Some(stream)))
        };
        let (stdin_token, stdin) = offer(host.has_stdin())?;
        let (stdout_token, stdout) = offer(host.has_stdout())?;
        let (stderr_token, stderr) = offer(host.has_stderr() && !terminal)?;
        let stdio = Stdio {
            terminal,
            width,
            height,
            stdin: stdin_token,
            stdout: stdout_token,
            stderr: stderr_token,
            ..Default::default()
        };
        Ok((
            stdio,
            OfferedStreams {
                stdin,
                stdout,
                stderr,
            },
        ))
    }

    /// Waits for the offered streams. The agent has connected them before it answers, but on
    /// another socket, so they may still be on their way.
    pub async fn accept_streams(&self, offered: OfferedStreams) -> Result<GuestStdio, GuestError> {
        let arrive = async |stream: Option<ExpectedStream>| match stream {
            None => Ok(None),
            Some(mut expected) => tokio::select! {
                biased;
                stream = &mut expected.arrival => match stream {
                    Ok(stream) => Ok(Some(stream)),
                    Err(_) => Err(GuestError::Broken("the listener for streams is gone".into())),
                },
                ended = self.end() => Err(GuestError::Ended(ended)),
            },
        };
        Ok(GuestStdio {
            stdin: arrive(offered.stdin).await?,
            stdout: arrive(offered.stdout).await?,
            stderr: arrive(offered.stderr).await?,
        })
    }
}

/// The streams of one process that the agent is about to connect.
pub struct OfferedStreams {
    stdin: Option<ExpectedStream>,
    stdout: Option<ExpectedStream>,
    stderr: Option<ExpectedStream>,
}

type Token = [u8; STREAM_TOKEN_LEN];
type Expected = Arc<Mutex<HashMap<Token, oneshot::Sender<UnixStream>>>>;

/// Matches the guest's connections to the streams that were promised to it.
pub struct Streams {
    expected: Expected,
    acceptor: JoinHandle<()>,
}

/// A stream that the guest is to connect; forgotten when dropped.
struct ExpectedStream {
    token: Token,
    arrival: oneshot::Receiver<UnixStream>,
    expected: Expected,
}

impl Drop for ExpectedStream {
    fn drop(&mut self) {
        lock(&self.expected).remove(&self.token);
    }
}

fn lock(expected: &Expected) -> MutexGuard<'_, HashMap<Token, oneshot::Sender<UnixStream>>> {
    expected.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Streams {
    /// Takes the guest's connections from `listener`.
    pub fn listen(listener: StdUnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let expected = Expected::default();
        let acceptor = tokio::spawn(accept(listener, expected.clone()));
        Ok(Self { expected, acceptor })
    }

    /// Promises a stream to the guest, by a token that cannot be guessed.
    fn expect(&self) -> io::Result<(Token, ExpectedStream)> {
        let mut token = Token::default();
        random(&mut token)?;
        let (arrived, arrival) = oneshot::channel();
        lock(&self.expected).insert(token, arrived);
        Ok((
            token,
            ExpectedStream {
                token,
                arrival,
                expected: self.expected.clone(),
            },
        ))
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

/// Fills `bytes` from the host's random source.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: pointer and length are those of a slice that is borrowed for the call.
        let n = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(n) {
            Ok(n) => filled += n,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Connections that have not said their token yet; a guest that opens more loses the oldest.
const MAX_UNNAMED: usize = 64;

async fn accept(listener: UnixListener, expected: Expected) {
    let mut unnamed = JoinSet::new();
    let mut oldest = std::collections::VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                log::error!("Cannot accept a stream from the guest: {e}");
                return;
            }
        };
        while unnamed.try_join_next().is_some() {}
        oldest.retain(|task: &tokio::task::AbortHandle| !task.is_finished());
        if oldest.len() >= MAX_UNNAMED
            && let Some(task) = oldest.pop_front()
        {
            task.abort();
        }
        oldest.push_back(unnamed.spawn(name(stream, expected.clone())));
    }
}

/// Reads a connection's token and hands it to whoever expects it.
async fn name(mut stream: UnixStream, expected: Expected) {
    let mut token = Token::default();
    if stream.read_exact(&mut token).await.is_err() {
        return;
    }
    match lock(&expected).remove(&token) {
        Some(arrived) => drop(arrived.send(stream)),
        None => log::warn!("The guest connected a stream that nobody expects"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn streams() -> (tempfile::TempDir, std::path::PathBuf, Streams) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock_1025");
        let streams = Streams::listen(StdUnixListener::bind(&path).unwrap()).unwrap();
        (dir, path, streams)
    }

    /// A machine whose agent has gone away, what ends it, and whether somebody has cut its power.
    fn without_agent() -> (Guest, watch::Sender<Option<Arc<Ended>>>, Arc<AtomicBool>) {
        let (_dir, _, streams) = streams();
        let (connection, _) = UnixStream::pair().unwrap();
        let (end, ended) = watch::channel(None);
        let cut = Arc::new(AtomicBool::new(false));
        let (machine, knob) = (end.clone(), cut.clone());
        let power = Box::new(move || {
            knob.store(true, Ordering::Relaxed);
            machine.send_replace(Some(end_by("its power was cut")));
            Ok(())
        });
        (Guest::new(1, connection, streams, ended, power), end, cut)
    }

    fn end_by(message: &str) -> Arc<Ended> {
        Arc::new(Ended {
            message: message.to_owned(),
            console: String::new(),
        })
    }

    async fn call(guest: &Guest) -> String {
        let request = cube_agent_protocol::agent::ContainerRequest::default();
        let answer = guest.call(|agent| agent.stats(ttrpc::context::Context::default(), &request));
        answer.await.unwrap_err().to_string()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_whose_connection_breaks_tells_how_the_machine_ended_however_long_that_takes() {
        let (guest, end, cut) = without_agent();
        // Somebody has done so: the host takes its time.
        guest.power_is_cut.store(true, Ordering::Relaxed);
        let late = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            end.send_replace(Some(end_by("late")));
        };
        let (error, ()) = tokio::join!(call(&guest), late);
        assert_eq!(error, "The sandbox's machine has ended: late");
        assert!(!cut.load(Ordering::Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_has_lost_its_agent_is_ended() {
        let (guest, _end, cut) = without_agent();
        let error = call(&guest).await;
        assert_eq!(error, "The sandbox's machine has ended: its power was cut");
        assert!(cut.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn a_stream_reaches_whoever_expects_its_token() {
        let (_dir, path, streams) = streams();
        let (first, expected_first) = streams.expect().unwrap();
        let (second, mut expected_second) = streams.expect().unwrap();
        assert_ne!(first, second);
        let mut guest = UnixStream::connect(&path).await.unwrap();
        guest.write_all(&second).await.unwrap();
        guest.write_all(b"data").await.unwrap();
        let mut arrived = (&mut expected_second.arrival).await.unwrap();
        let mut data = [0; 4];
        arrived.read_exact(&mut data).await.unwrap();
        assert_eq!(&data, b"data");
        drop((expected_first, expected_second));
        assert!(lock(&streams.expected).is_empty());
    }

    #[tokio::test]
    async fn a_guest_that_opens_connections_without_end_holds_no_more_than_a_few() {
        let (_dir, path, streams) = streams();
        let mut connections = Vec::new();
        for _ in 0..MAX_UNNAMED + 10 {
            connections.push(UnixStream::connect(&path).await.unwrap());
        }
        // The first ones are closed by us, and an honest stream still gets through.
        let (token, mut expected) = streams.expect().unwrap();
        let mut honest = UnixStream::connect(&path).await.unwrap();
        honest.write_all(&token).await.unwrap();
        (&mut expected.arrival).await.unwrap();
        assert_eq!(connections[0].read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_wrong_token_closes_the_connection() {
        let (_dir, path, streams) = streams();
        let (_token, _expected) = streams.expect().unwrap();
        let mut guest = UnixStream::connect(&path).await.unwrap();
        guest.write_all(&[7; STREAM_TOKEN_LEN]).await.unwrap();
        assert_eq!(guest.read(&mut [0]).await.unwrap(), 0);
    }
}
