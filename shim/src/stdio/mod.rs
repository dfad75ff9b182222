//! The standard streams of a process, containerd's side: FIFOs, files, logging programs and
//! streams over containerd's own connections, and the relays between them and the streams from the guest.
//!
//! A relay ends with end-of-file from where it reads, and passes it on by closing where it
//! writes. A reader on containerd's side that is slow, or not there yet, holds the guest's writer
//! up; nothing is dropped and nothing piles up here.

mod logger;
mod streaming;
mod target;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_buf};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use logger::Logger;
use streaming::Stream;
pub use streaming::Streams;
use target::{Input, Output};
pub use target::{StdioError, Uris};

/// How much a relay takes at once, in bytes: what a pipe holds.
const CHUNK: usize = 64 * 1024;

/// The opened streams of containerd's side.
pub struct HostStdio {
    stdin: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    logger: Option<Logger>,
}

/// The streams of the process in the guest. The ones that containerd does not want are `None`.
#[derive(Default)]
pub struct GuestStdio {
    /// What the process reads.
    pub stdin: Option<UnixStream>,
    /// What it writes, a terminal's output included.
    pub stdout: Option<UnixStream>,
    /// What it writes to its standard error; `None` with a terminal.
    pub stderr: Option<UnixStream>,
}

impl HostStdio {
    /// Opens what `uris` name. FIFOs need no peer; a logging program is started, and is ready on return.
    ///
    /// `container` and `namespace` are what a logging program is told; `streams` are those that
    /// containerd opens to this shim.
    pub async fn open(
        uris: &Uris,
        container: &str,
        namespace: &str,
        streams: &Arc<Streams>,
    ) -> Result<Self, StdioError> {
        target::open(uris, container, namespace, streams).await
    }

    /// Whether containerd gives the process a standard input.
    pub fn has_stdin(&self) -> bool {
        self.stdin.is_some()
    }

    /// Whether containerd takes the process's standard output.
    pub fn has_stdout(&self) -> bool {
        self.stdout.is_some()
    }

    /// Whether containerd takes the process's standard error.
    pub fn has_stderr(&self) -> bool {
        self.stderr.is_some()
    }
}

/// The running relays of one process.
pub struct Relays {
    outputs: Vec<JoinHandle<()>>,
    news: OutputNews,
    input: Option<JoinHandle<()>>,
    /// Keeps the standard input from ending when a client goes away, until CloseIO.
    stdin_keeper: Option<Keeper>,
    logger: Option<Logger>,
}

/// News of a process's output: how many of its outputs wait for their client, a change for each piece that was taken, and
/// the end with the last of them.
#[derive(Clone)]
pub struct OutputNews(watch::Receiver<usize>);

/// How long output may take that is to end.
#[derive(Clone, Copy, Debug)]
pub struct OutputLimits {
    /// For a client to take some of it.
    pub client: Duration,
    /// For the guest to send more, or the end.
    pub guest: Duration,
    /// For all.
    pub all: Duration,
}

impl OutputNews {
    /// Waits until all output was taken. False if that takes longer than it may.
    pub async fn all_taken(mut self, limits: OutputLimits) -> bool {
        let last = Instant::now() + limits.all;
        loop {
            // A client may take one stream after the other: both have time while either moves.
            let limit = match *self.0.borrow_and_update() {
                0 => limits.guest,
                _ => limits.client,
            };
            match timeout_at(last.min(Instant::now() + limit), self.0.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return true,
                Err(_) => return false,
            }
        }
    }
}

/// What a standard input goes on by. Dropping it lets it end.
enum Keeper {
    Fifo { _writer: pipe::Sender },
    Stream { _open: oneshot::Sender<()> },
}

impl Relays {
    /// Starts to copy. A stream that only one side has is closed.
    pub fn start(host: HostStdio, guest: GuestStdio) -> Self {
        let (moves, news) = watch::channel(0);
        let (mut outputs, moves) = (Vec::new(), Arc::new(moves));
        for (target, stream) in [(host.stdout, guest.stdout), (host.stderr, guest.stderr)] {
            if let (Some(target), Some(stream)) = (target, stream) {
                let relay = relay_output(stream, target, moves.clone());
                outputs.push(tokio::spawn(relay));
            }
        }
        let (mut input, mut stdin_keeper) = (None, None);
        if let (Some(source), Some(stream)) = (host.stdin, guest.stdin) {
            match source {
                Input::Fifo { reader, keeper } => {
                    stdin_keeper = Some(Keeper::Fifo { _writer: keeper });
                    input = Some(tokio::spawn(relay_input(reader, stream)));
                }
                Input::Stream(source) => {
                    let (open, closed) = oneshot::channel();
                    stdin_keeper = Some(Keeper::Stream { _open: open });
                    input = Some(tokio::spawn(relay_input_stream(source, stream, closed)));
                }
            }
        }
        Self {
            outputs,
            news: OutputNews(news),
            input,
            stdin_keeper,
            logger: host.logger,
        }
    }

    /// The client has written all of the standard input: once it has closed the FIFO too, the
    /// process reads end-of-file. Without a standard input, or a second time, this does nothing.
    pub fn close_stdin(&mut self) {
        self.stdin_keeper = None;
    }

    /// News of the output.
    pub fn news(&self) -> OutputNews {
        self.news.clone()
    }

    /// The process is gone: passes on what it still has written and closes everything. Output of
    /// which nobody has taken anything for `limit` is given up, since a client may never open its
    /// FIFO. A client that is only slow gets all that it takes within `most`.
    pub async fn drain(mut self, limit: Duration, most: Duration) {
        self.stdin_keeper = None;
        if let Some(input) = self.input.take() {
            input.abort();
        }
        let limits = OutputLimits {
            client: limit,
            guest: limit,
            all: most,
        };
        if !self.news.all_taken(limits).await {
            log::warn!("Output of a process was given up: nobody reads it, or too slowly");
            for output in &self.outputs {
                output.abort();
            }
        }
        if let Some(logger) = self.logger.take() {
            logger.finish().await;
        }
    }
}

/// Copies what the process writes to `target`, and counts in `moves` while it waits for that.
async fn relay_output(stream: UnixStream, mut target: Output, moves: Arc<watch::Sender<usize>>) {
    let mut reader = BufReader::with_capacity(CHUNK, stream);
    let copied: io::Result<()> = async {
        loop {
            let piece = reader.fill_buf().await?;
            if piece.is_empty() {
                return Ok(());
            }
            moves.send_modify(|waiting| *waiting += 1);
            let taken = target.write(piece).await;
            moves.send_modify(|waiting| *waiting -= 1);
            let taken = taken?;
            if taken == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            reader.consume(taken);
        }
    }
    .await;
    if let Err(e) = copied {
        log::debug!("A standard output ended early: {e}");
    }
    if let Err(e) = target.finish().await {
        log::debug!("Cannot close a standard output: {e}");
    }
    // Its reader sees the end before anybody hears that all was taken.
    drop(target);
    drop(moves);
}

/// Copies what the client writes to the process's standard input. A process that does not read,
/// or is gone, ends it.
async fn relay_input(reader: pipe::Receiver, mut stream: UnixStream) {
    let mut reader = BufReader::with_capacity(CHUNK, reader);
    if let Err(e) = copy_buf(&mut reader, &mut stream).await {
        log::debug!("A standard input ended early: {e}");
    }
    // Half a close: the process reads end-of-file.
    if let Err(e) = stream.shutdown().await {
        log::debug!("Cannot close a standard input: {e}");
    }
}

/// The same from a stream, which ends when the client closes it, or has said that it has written all.
async fn relay_input_stream(
    mut source: Stream,
    mut stream: UnixStream,
    mut closed: oneshot::Receiver<()>,
) {
    let copied: io::Result<()> = async {
        loop {
            let data = tokio::select! {
                // What has arrived is passed on first.
                biased;
                data = source.read() => data?,
                _ = &mut closed => return Ok(()),
            };
            if data.is_empty() {
                return Ok(());
            }
            stream.write_all(&data).await?;
        }
    }
    .await;
    if let Err(e) = copied {
        log::debug!("A standard input ended early: {e}");
    }
    if let Err(e) = stream.shutdown().await {
        log::debug!("Cannot close a standard input: {e}");
    }
}

#[cfg(test)]
mod tests;
