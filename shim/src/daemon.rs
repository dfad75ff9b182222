//! The daemon of a sandbox: serves containerd until the sandbox has ended.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use ttrpc::r#async::Server;
use ttrpc::r#async::transport::Listener;

use crate::options::Options;
use crate::publisher;
use crate::sandbox::Sandbox;
use crate::sandbox_service;
use crate::service;
use crate::stdio::Streams;
use crate::tasks::Tasks;

/// How long events and answers may hold up the end.
const END_LIMIT: Duration = Duration::from_secs(2);

/// What a daemon is told by the process that started it.
pub struct Daemon {
    /// containerd's namespace.
    pub namespace: String,
    /// The sandbox, named by its first container or by its group.
    pub sandbox: String,
    /// The runtime's options, which are the sandbox's if containerd asks for the sandbox itself.
    pub options: Options,
    /// Where events go.
    pub ttrpc_address: String,
    /// The socket to serve on.
    pub listener: StdUnixListener,
    /// Its path, removed at the end.
    pub socket: PathBuf,
}

impl Daemon {
    /// Serves until the end.
    pub fn run(self) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // What may take its time on a slow disk: files for output (file://), the mounts of a container that joins the
            // sandbox, and what is undone. One for each, so that none waits for another.
            .max_blocking_threads(3)
            .build()?;
        let result = runtime.block_on(self.serve());
        runtime.shutdown_background();
        result
    }

    async fn serve(self) -> io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (publisher, queue) = publisher::queue();
        tokio::spawn(queue.forward(self.ttrpc_address, self.namespace.clone()));
        let streams = Streams::new(self.socket.clone());
        let tasks = Tasks::new(self.namespace.clone(), publisher.clone(), streams.clone());
        let sandbox = Arc::new(Sandbox::new(
            self.namespace,
            self.sandbox,
            self.options,
            tasks,
            self.socket,
        ));

        self.listener.set_nonblocking(true)?;
        let (open, mut closed) = mpsc::channel(1);
        let listener = OwnPeers {
            listener: UnixListener::from_std(self.listener)?,
            open,
        };
        let mut server = Server::new()
            .register_service(service::services(&sandbox))
            .register_service(sandbox_service::services(&sandbox))
            .register_service(HashMap::from([streams.service()]))
            .add_listener(Listener::new(listener));
        server.start().await.map_err(io::Error::other)?;

        tokio::select! {
            () = sandbox.left() => {}
            _ = terminate.recv() => sandbox.end().await,
            _ = interrupt.recv() => sandbox.end().await,
        }
        // containerd waits for three seconds.
        let answers = async {
            let _ = server.shutdown().await;
            drop(server);
            // The answers have been handed to the connections by now, and each closes when it has written its last.
            while closed.recv().await.is_some() {}
        };
        let ((), answered) = tokio::join!(
            publisher.flush(END_LIMIT),
            tokio::time::timeout(END_LIMIT, answers),
        );
        if answered.is_err() {
            log::warn!("A call was still being answered when the shim ended");
        }
        Ok(())
    }
}

/// Connections from processes of this process's own user only.
struct OwnPeers {
    listener: UnixListener,
    /// Each connection has one.
    open: mpsc::Sender<()>,
}

impl Stream for OwnPeers {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let (stream, _) = ready!(self.listener.poll_accept(context))?;
            let own = nix::unistd::geteuid().as_raw();
            match stream.peer_cred() {
                Ok(peer) if peer.uid() == own => {
                    return Poll::Ready(Some(Ok(Connection {
                        stream,
                        _open: self.open.clone(),
                    })));
                }
                Ok(peer) => log::warn!("A connection of user {} was refused", peer.uid()),
                Err(e) => log::warn!("A connection was refused: {e}"),
            }
        }
    }
}

/// A connection that tells when it is closed.
struct Connection {
    stream: UnixStream,
    _open: mpsc::Sender<()>,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
