//! What containerd's stdio URIs name, and how it is opened.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWrite;
use tokio::net::unix::pipe;

use super::HostStdio;
use super::logger::{Logger, LoggerError};

/// The stdio fields of a Create or Exec request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uris {
    /// A FIFO's path, or empty.
    pub stdin: String,
    /// A path, `fifo://`, `file://` or `binary://`, or empty.
    pub stdout: String,
    /// As `stdout`. A file or a logging program named by `stdout` takes both streams.
    pub stderr: String,
    /// Whether the process has a terminal: its output is all in `stdout`.
    pub terminal: bool,
}

/// Why a stream cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    /// A scheme that is not served.
    #[error(
        "The stdio URI {0} has a scheme that is not supported: use a FIFO's path, file:// or binary://"
    )]
    Scheme(String),
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
pub(super) struct Input {
    pub(super) reader: pipe::Receiver,
    /// A writer of our own: without it the FIFO would end with its first client.
    pub(super) keeper: pipe::Sender,
}

/// A standard output.
pub(super) struct Output {
    pub(super) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// A reader of our own: without it a FIFO whose client goes away (containerd restarts) would
    /// break the process's pipe.
    _keeper: Option<pipe::Receiver>,
}

impl Output {
    pub(super) fn pipe(writer: pipe::Sender) -> Self {
        Self {
            writer: Box::new(writer),
            _keeper: None,
        }
    }

    fn file(file: File) -> Self {
        Self {
            writer: Box::new(file),
            _keeper: None,
        }
    }
}

/// What an output's URI names.
enum Target<'a> {
    Nothing,
    Path(&'a Path),
    File(PathBuf),
    Binary(&'a str),
}

pub(super) async fn open(
    uris: &Uris,
    container: &str,
    namespace: &str,
) -> Result<HostStdio, StdioError> {
    let stdin = match uris.stdin.as_str() {
        "" => None,
        path => Some(open_input(Path::new(path))?),
    };
    let mut stdio = HostStdio {
        stdin,
        stdout: None,
        stderr: None,
        logger: None,
    };
    // One file or one program takes both streams, as with runc's shim: the URIs are the same then.
    match parse(&uris.stdout)? {
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
        Target::Nothing => {}
    }
    if stdio.stderr.is_none() && !uris.terminal {
        stdio.stderr = match parse(&uris.stderr)? {
            Target::Path(path) => Some(open_output("standard error", path).await?),
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

fn parse(uri: &str) -> Result<Target<'_>, StdioError> {
    if uri.is_empty() {
        return Ok(Target::Nothing);
    }
    let Some((scheme, rest)) = uri.split_once("://") else {
        return Ok(Target::Path(Path::new(uri)));
    };
    match scheme {
        "fifo" => Ok(Target::Path(Path::new(rest))),
        "file" => Ok(Target::File(decode_path(uri, rest)?)),
        "binary" => Ok(Target::Binary(uri)),
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
    Ok(Input { reader, keeper })
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
    Ok(Output {
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
