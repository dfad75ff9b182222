//! Standard streams: bytes between a process's pipes or terminal and the host's connections.
//!
//! Each stream is a connection of its own (see `Stdio` in the protocol) and a task that copies. A
//! full pipe or a full connection stops the copying, nothing is buffered beyond one chunk, and an
//! idle stream holds no buffer at all.
//!
//! A chunk is what virtio-vsock carries in one packet and what a pipe holds: 64 KiB. splice(2) was
//! left out on purpose: up to Linux 6.4 it sends a pipe's pages to a vsock one by one, a packet each.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use cube_agent_protocol::{STREAM_PORT, STREAM_TOKEN_LEN, agent};
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::sync::watch;

use crate::transport::{Connection, Connector, read_fd, write_fd};

/// The size of a chunk in bytes, VIRTIO_VSOCK_MAX_PKT_BUF_SIZE of Linux.
const CHUNK: usize = 64 * 1024;

/// A failure around a standard stream.
#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    /// A token of the wrong length.
    #[error("The token of {0} has {1} bytes, it must have {STREAM_TOKEN_LEN}")]
    Token(&'static str, usize),
    /// The connection to the host failed.
    #[error("Cannot connect {0} to the host")]
    Connect(&'static str, #[source] io::Error),
    /// A pipe, a terminal or /dev/null could not be had.
    #[error("Cannot open {0}")]
    Open(&'static str, #[source] io::Error),
}

/// What is to become of a process's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub enum Stage {
    /// Copy.
    Open,
    /// Standard input ends after what has arrived.
    StdinClosed,
    /// The process is gone and forgotten: pass on what it wrote, then close.
    Finished,
}

/// The host's connections for a process, before the process exists.
#[derive(Debug)]
pub struct Connections {
    stdin: Option<Connection>,
    stdout: Option<Connection>,
    stderr: Option<Connection>,
}

impl Connections {
    /// Connects the streams that have a token.
    pub async fn open(connect: &Connector, stdio: &agent::Stdio) -> Result<Self, StdioError> {
        // With a terminal there is one output.
        let stderr: &[u8] = if stdio.terminal { &[] } else { &stdio.stderr };
        Ok(Self {
            stdin: stream(connect, "stdin", &stdio.stdin).await?,
            stdout: stream(connect, "stdout", &stdio.stdout).await?,
            stderr: stream(connect, "stderr", stderr).await?,
        })
    }

    /// Makes the pipes and starts copying. Returns the process's ends: stdin, stdout, stderr.
    pub fn pipes(self, stage: &watch::Receiver<Stage>) -> Result<[OwnedFd; 3], StdioError> {
        let stdin = match self.stdin {
            None => null()?,
            Some(from) => {
                let (theirs, ours) = pipe("the pipe for stdin")?;
                let ours = ours_async(ours, Interest::WRITABLE)?;
                tokio::spawn(copy_stdin(from, Arc::new(ours), stage.clone()));
                theirs
            }
        };
        let [stdout, stderr] =
            [(self.stdout, "stdout"), (self.stderr, "stderr")].map(|(to, name)| {
                let Some(to) = to else { return null() };
                let (ours, theirs) = pipe(name)?;
                let ours = ours_async(ours, Interest::READABLE)?;
                tokio::spawn(copy_output(Arc::new(ours), to, stage.clone()));
                Ok(theirs)
            });
        Ok([stdin, stdout?, stderr?])
    }

    /// Starts copying between the connections and a terminal. Returns the terminal, for resizing.
    pub fn terminal(
        self,
        master: OwnedFd,
        stage: &watch::Receiver<Stage>,
    ) -> Result<Arc<AsyncFd<OwnedFd>>, StdioError> {
        let master = Arc::new(ours_async(master, Interest::READABLE | Interest::WRITABLE)?);
        if let Some(from) = self.stdin {
            // The end of the host's input does not end a terminal: its master stays open.
            tokio::spawn(copy_stdin(from, master.clone(), stage.clone()));
        }
        if let Some(to) = self.stdout {
            tokio::spawn(copy_output(master.clone(), to, stage.clone()));
        }
        Ok(master)
    }
}

async fn stream(
    connect: &Connector,
    name: &'static str,
    token: &[u8],
) -> Result<Option<Connection>, StdioError> {
    if token.is_empty() {
        return Ok(None);
    }
    if token.len() != STREAM_TOKEN_LEN {
        return Err(StdioError::Token(name, token.len()));
    }
    let connected = async {
        let connection = Connection::establish(connect(STREAM_PORT)?).await?;
        connection.write_all(token).await?;
        Ok(connection)
    };
    connected
        .await
        .map(Some)
        .map_err(|e| StdioError::Connect(name, e))
}

/// /dev/null as all three streams.
pub fn nulls() -> Result<[OwnedFd; 3], StdioError> {
    Ok([null()?, null()?, null()?])
}

fn null() -> Result<OwnedFd, StdioError> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map(OwnedFd::from)
        .map_err(|e| StdioError::Open("/dev/null", e))
}

/// The reading and the writing end. Both block: a process expects that of its standard streams.
fn pipe(name: &'static str) -> Result<(OwnedFd, OwnedFd), StdioError> {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|e| StdioError::Open(name, e.into()))
}

/// Our end, non-blocking. An end of a pipe is a file description of its own, so the process's end
/// goes on blocking; the master of a terminal is only ours.
fn ours_async(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>, StdioError> {
    let set = || -> io::Result<AsyncFd<OwnedFd>> {
        nix::fcntl::fcntl(
            fd.as_raw_fd(),
            nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
        )?;
        crate::transport::watch(fd, interest)
    };
    set().map_err(|e| StdioError::Open("a stream of a process", e))
}

/// Host to process, until either side ends. Dropping the end of a pipe is the process's end-of-file.
async fn copy_stdin(
    from: Connection,
    to: Arc<AsyncFd<OwnedFd>>,
    mut stage: watch::Receiver<Stage>,
) {
    let result: io::Result<()> = async {
        loop {
            let closed = tokio::select! {
                ready = from.fd().readable() => match read_some(ready?)? {
                    Some((chunk, n)) => Some((chunk, n)),
                    None => continue,
                },
                () = reached(&mut stage, Stage::StdinClosed) => {
                    let mut chunk = Chunk::take();
                    match read_fd(from.fd().as_fd(), chunk.bytes()) {
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
                        read => Some((chunk, read?)),
                    }
                }
            };
            let Some((mut chunk, n)) = closed.filter(|(_, n)| *n > 0) else {
                return Ok(());
            };
            // A process that does not read stops us here, until it ends or is forgotten.
            tokio::select! {
                written = write_all(&to, &chunk.bytes()[..n]) => written?,
                () = reached(&mut stage, Stage::Finished) => return Ok(()),
            }
        }
    }
    .await;
    if let Err(error) = result {
        log::debug!("a standard input ends: {error}");
    }
}

/// Process to host, until the last writer has closed, or the process is forgotten.
async fn copy_output(
    from: Arc<AsyncFd<OwnedFd>>,
    to: Connection,
    mut stage: watch::Receiver<Stage>,
) {
    let result: io::Result<()> = async {
        loop {
            tokio::select! {
                biased;
                () = reached(&mut stage, Stage::Finished) => return drain(&from, &to).await,
                ready = from.readable() => match read_some(ready?) {
                    Ok(None) => {}
                    Ok(Some((_, 0))) => return Ok(()),
                    // Nobody has the terminal open any more.
                    Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(()),
                    Err(e) => return Err(e),
                    Ok(Some((mut chunk, n))) => to.write_all(&chunk.bytes()[..n]).await?,
                },
            }
        }
    }
    .await;
    if let Err(error) = result {
        log::debug!("an output ends: {error}");
    }
    if let Err(error) = to.end_writing() {
        log::debug!("an output was closed by the host: {error}");
    }
}

/// Reads what has been announced: nothing if it was a false alarm, no bytes at the end.
fn read_some(mut ready: AsyncFdReadyGuard<'_, OwnedFd>) -> io::Result<Option<(Chunk, usize)>> {
    let mut chunk = Chunk::take();
    match ready.try_io(|fd| read_fd(fd.as_fd(), chunk.bytes())) {
        Ok(read) => read.map(|n| Some((chunk, n))),
        Err(_would_block) => Ok(None),
    }
}

/// Passes on what is in the pipe now. What lives on with the other end of the pipe gets EPIPE, as
/// with any container runtime that closes an exec's streams.
async fn drain(from: &AsyncFd<OwnedFd>, to: &Connection) -> io::Result<()> {
    let mut chunk = Chunk::take();
    // A background process may write for ever: what the pipe could hold is what may be left.
    let mut left = pipe_size(from);
    while left > 0 {
        match read_fd(from.as_fd(), chunk.bytes()) {
            Ok(0) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(()),
            Err(e) => return Err(e),
            Ok(n) => {
                left = left.saturating_sub(n);
                to.write_all(&chunk.bytes()[..n]).await?;
            }
        }
    }
    Ok(())
}

fn pipe_size(fd: &AsyncFd<OwnedFd>) -> usize {
    nix::fcntl::fcntl(fd.as_raw_fd(), nix::fcntl::FcntlArg::F_GETPIPE_SZ)
        .ok()
        .and_then(|size| usize::try_from(size).ok())
        .unwrap_or(CHUNK)
}

async fn write_all(to: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = to
            .async_io(Interest::WRITABLE, |fd| write_fd(fd.as_fd(), bytes))
            .await?;
        bytes = &bytes[written..];
    }
    Ok(())
}

/// Resolves once the streams are at `stage` or later, or the process is dropped.
async fn reached(current: &mut watch::Receiver<Stage>, stage: Stage) {
    let _ = current.wait_for(|now| *now >= stage).await;
}

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer, borrowed from the spare ones. Two are kept: what two busy streams need.
struct Chunk(Vec<u8>);

impl Chunk {
    fn take() -> Self {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        Self(spare.unwrap_or_else(|| vec![0; CHUNK]))
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.0);
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < 2 {
                spare.push(bytes);
            }
        });
    }
}
