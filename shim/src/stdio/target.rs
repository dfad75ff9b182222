//! What containerd's stdio URIs name, and how it is opened.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;

use super::HostStdio;
use super::logger::{Logger, LoggerError};
use super::streaming::{Stream, Streams};

/// The stdio fields of a Create or Exec request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uris {
    /// A FIFO's path, a stream's URI, or empty.
    pub stdin: String,
    /// A path, `fifo://`, `file://`, `binary://`, `binary-v2://`, a stream's URI, or empty.
    pub stdout: String,
    /// As `stdout`. A file or a logging program named by `stdout` takes both streams.
    pub stderr: String,
    /// Whether the process has a terminal: its output is all in `stdout`.
    pub terminal: bool,
}

impl Uris {
    /// Whether output goes over containerd's own connections.
    pub fn has_output_streams(&self) -> bool {
        [&self.stdout, &self.stderr]
            .iter()
            .filter_map(|uri| uri.split_once("://"))
            .any(|(scheme, _)| is_stream(scheme))
    }
}

fn is_stream(scheme: &str) -> bool {
    scheme.starts_with("ttrpc+") || scheme.starts_with("grpc+")
}

/// Why a stream cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    /// A scheme that is not served.
    #[error(
        "The stdio URI {0} has a scheme that is not supported: use a FIFO's path, file://, binary:// or binary-v2://"
    )]
    Scheme(String),
    /// A stream without a name.
    #[error("The stdio URI {0} names no stream: its streaming_id is missing")]
    NoStream(String),
    /// A stream of another server. containerd names streams by the address that this shim has
    /// answered, so there is no other in practice.
    #[error(
        "The stdio URI {0} is a stream of another server: this shim has streams at ttrpc+unix://{path} only", path = .1.display()
    )]
    ForeignStream(String, PathBuf),
    /// A stream that another process has.
    #[error("The stream {0} is another process's already")]
    StreamInUse(String),
    /// A file:// or binary:// URI without an absolute path.
    #[error("The stdio URI {0} names no absolute path")]
    NoPath(String),
    /// The FIFO or file cannot be opened.
    #[error("Cannot open {path} for the process's {stream}: {source}")]
    Open {
        /// Which stream.
        stream: &'static str,
        /// What was to be opened.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The logging program does not run.
    #[error(transparent)]
    Logger(#[from] LoggerError),
}

/// A standard input.
pub(super) enum Input {
    Fifo {
        reader: pipe::Receiver,
        /// A writer of our own: without it the FIFO would end with its first client.
        keeper: pipe::Sender,
    },
    Stream(Stream),
}

/// A standard output.
pub(super) enum Output {
    Writer {
        writer: Box<dyn AsyncWrite + Send + Unpin>,
        /// A reader of our own: without it a FIFO whose client goes away (containerd restarts) would
        /// break the process's pipe.
        _keeper: Option<pipe::Receiver>,
    },
    Stream(Stream),
}

impl Output {
    pub(super) fn pipe(writer: pipe::Sender) -> Self {
        Self::Writer {
            writer: Box::new(writer),
            _keeper: None,
        }
    }

    fn file(file: File) -> Self {
        Self::Writer {
            writer: Box::new(file),
            _keeper: None,
        }
    }

    /// Writes some of `piece`; how much.
    pub(super) async fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        match self {
            Self::Writer { writer, .. } => writer.write(piece).await,
            Self::Stream(stream) => stream.write(piece).await,
        }
    }

    /// Makes sure of what was written. What reads it sees end-of-file when it is dropped.
    pub(super) async fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Writer { writer, .. } => writer.shutdown().await,
            Self::Stream(_) => Ok(()),
        }
    }
}

/// What an output's URI names.
enum Target<'a> {
    Nothing,
    Path(&'a Path),
    File(PathBuf),
    Binary(&'a str),
    Stream(Stream),
}

pub(super) async fn open(
    uris: &Uris,
    container: &str,
    namespace: &str,
    streams: &Arc<Streams>,
) -> Result<HostStdio, StdioError> {
    let stdin = match parse(&uris.stdin, streams)? {
        Target::Nothing => None,
        Target::Path(path) => Some(open_input(path)?),
        Target::Stream(stream) => Some(Input::Stream(stream)),
        Target::File(_) | Target::Binary(_) => return Err(StdioError::Scheme(uris.stdin.clone())),
    };
    let mut stdio = HostStdio {
        stdin,
        stdout: None,
        stderr: None,
        logger: None,
    };
    // One file or one program takes both streams, as with runc's shim: the URIs are the same then.
    match parse(&uris.stdout, streams)? {
        Target::Binary(uri) => {
            let (logger, stdout, stderr) = Logger::start(uri, container, namespace).await?;
            stdio.logger = Some(logger);
            stdio.stdout = Some(Output::pipe(stdout));
            stdio.stderr = (!uris.terminal).then(|| Output::pipe(stderr));
        }
        Target::File(path) => {
            stdio.stdout = Some(open_file("standard output", &path).await?);
            if !uris.terminal {
                stdio.stderr = Some(open_file("standard error", &path).await?);
            }
        }
        Target::Path(path) => stdio.stdout = Some(open_output("standard output", path).await?),
        Target::Stream(stream) => stdio.stdout = Some(Output::Stream(stream)),
        Target::Nothing => {}
    }
    if stdio.stderr.is_none() && !uris.terminal {
        stdio.stderr = match parse(&uris.stderr, streams)? {
            Target::Path(path) => Some(open_output("standard error", path).await?),
            Target::Stream(stream) => Some(Output::Stream(stream)),
            Target::File(path) => Some(open_file("standard error", &path).await?),
            // A program for the standard error alone: its first stream stays empty.
            Target::Binary(uri) => {
                let (logger, _stdout, stderr) = Logger::start(uri, container, namespace).await?;
                stdio.logger = Some(logger);
                Some(Output::pipe(stderr))
            }
            Target::Nothing => None,
        };
    }
    Ok(stdio)
}

fn parse<'a>(uri: &'a str, streams: &Arc<Streams>) -> Result<Target<'a>, StdioError> {
    if uri.is_empty() {
        return Ok(Target::Nothing);
    }
    let Some((scheme, rest)) = uri.split_once("://") else {
        return Ok(Target::Path(Path::new(uri)));
    };
    match scheme {
        "fifo" => Ok(Target::Path(Path::new(rest))),
        "file" => Ok(Target::File(decode_path(uri, rest)?)),
        "binary" | "binary-v2" => Ok(Target::Binary(uri)),
        // Of what form they are is for the streams to judge: those of others are refused there.
        _ if is_stream(scheme) => Ok(Target::Stream(streams.take(uri, scheme, rest)?)),
        _ => Err(StdioError::Scheme(uri.to_owned())),
    }
}

/// The path of a URI: what stands before a query or a fragment, percent-decoded.
pub(super) fn decode_path(uri: &str, rest: &str) -> Result<PathBuf, StdioError> {
    let encoded = rest.split(['?', '#']).next().unwrap_or_default();
    let bytes: Vec<u8> = percent_encoding::percent_decode_str(encoded).collect();
    let path = PathBuf::from(OsString::from_vec(bytes));
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(StdioError::NoPath(uri.to_owned()))
    }
}

fn open_input(path: &Path) -> Result<Input, StdioError> {
    let fail = |source| StdioError::Open {
        stream: "standard input",
        path: path.to_owned(),
        source,
    };
    // In this order: a non-blocking writer needs a reader to be there.
    let reader = pipe::OpenOptions::new().open_receiver(path).map_err(fail)?;
    let keeper = pipe::OpenOptions::new().open_sender(path).map_err(fail)?;
    Ok(Input::Fifo { reader, keeper })
}

async fn open_output(stream: &'static str, path: &Path) -> Result<Output, StdioError> {
    let fail = |source| StdioError::Open {
        stream,
        path: path.to_owned(),
        source,
    };
    let kind = std::fs::metadata(path).map_err(fail)?.file_type();
    if !kind.is_fifo() {
        return open_file(stream, path).await;
    }
    let keeper = pipe::OpenOptions::new().open_receiver(path).map_err(fail)?;
    let writer = pipe::OpenOptions::new().open_sender(path).map_err(fail)?;
    Ok(Output::Writer {
        writer: Box::new(writer),
        _keeper: Some(keeper),
    })
}

async fn open_file(stream: &'static str, path: &Path) -> Result<Output, StdioError> {
    let fail = |source| StdioError::Open {
        stream,
        path: path.to_owned(),
        source,
    };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(fail)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o644);
    Ok(Output::file(options.open(path).await.map_err(fail)?))
}
