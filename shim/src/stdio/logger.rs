//! Logging programs: `binary://PATH?ARGUMENTS`, `binary-v2://PATH?ARGUMENTS`.
//!
//! The program reads the standard output on descriptor 3 and the standard error on 4, and closes
//! descriptor 5 once it is ready (containerd's `runtime/v2/logging` package is its other half). By `binary-v2`
//! it has to write a byte there before: one that has crashed is told from one that is ready.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping, FdMappingCollision};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::target::{StdioError, decode_path};

/// The scheme by which a program must say that it is ready.
const STRICT: &str = "binary-v2://";

/// How long the program may take until it is ready.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// How long it may take to end after SIGTERM; containerd's own shim gives it as long.
const END_LIMIT: Duration = Duration::from_secs(12);

/// Why there is no logging program.
#[derive(Debug, thiserror::Error)]
pub enum LoggerError {
    /// The URI names no program.
    #[error("The logging URI {0} names no absolute path of a program")]
    NoProgram(String),
    /// No pipes, or no process.
    #[error("Cannot start the logging program {program}: {source}")]
    Start {
        /// Its path.
        program: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Two descriptors of the child have the same number.
    #[error("Cannot pass descriptors to the logging program: {0}")]
    Descriptors(#[from] FdMappingCollision),
    /// It neither got ready nor ended.
    #[error(
        "The logging program {0} did not close descriptor 5, its sign that it is ready, within 10 s"
    )]
    NotReady(PathBuf),
    /// It has closed its sign without giving it.
    #[error(
        "The logging program {0} closed descriptor 5 without writing a byte there, its sign by binary-v2:// that it is ready: it may have crashed"
    )]
    GaveUp(PathBuf),
}

/// A running logging program.
pub(super) struct Logger {
    program: PathBuf,
    child: Child,
}

impl Logger {
    /// Starts the program that `uri` names and waits until it is ready. Returns it with the
    /// writers of its two streams.
    pub(super) async fn start(
        uri: &str,
        container: &str,
        namespace: &str,
    ) -> Result<(Self, pipe::Sender, pipe::Sender), LoggerError> {
        let (program, arguments) = parse(uri)?;
        let fail = |source| LoggerError::Start {
            program: program.clone(),
            source,
        };
        let (stdout, stdout_end) = pipe::pipe().map_err(fail)?;
        let (stderr, stderr_end) = pipe::pipe().map_err(fail)?;
        let (ready_end, mut ready) = pipe::pipe().map_err(fail)?;
        let mut command = Command::new(&program);
        command
            .args(arguments)
            .env_clear()
            .env("CONTAINER_ID", container)
            .env("CONTAINER_NAMESPACE", namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .fd_mappings(vec![
                mapping(stdout_end.into_blocking_fd().map_err(fail)?, 3),
                mapping(stderr_end.into_blocking_fd().map_err(fail)?, 4),
                mapping(ready_end.into_blocking_fd().map_err(fail)?, 5),
            ])?;
        let child = command.spawn().map_err(fail)?;
        // The command holds our copies of the child's ends.
        drop(command);
        let logger = Self {
            program: program.clone(),
            child,
        };
        let error = match timeout(READY_LIMIT, ready.read_u8()).await {
            // End-of-file or a byte, either will do, unless a byte was agreed on.
            Ok(sign) if sign.is_ok() || !uri.starts_with(STRICT) => {
                return Ok((logger, stdout, stderr));
            }
            Ok(_) => LoggerError::GaveUp(program),
            Err(_) => LoggerError::NotReady(program),
        };
        logger.kill().await;
        Err(error)
    }

    /// Its streams are closed: asks it to end, and ends it if it does not.
    pub(super) async fn finish(mut self) {
        self.signal(Signal::SIGTERM);
        match timeout(END_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) => log::debug!("{} ended with {status}", self.program.display()),
            Ok(Err(e)) => log::warn!("Cannot wait for {}: {e}", self.program.display()),
            Err(_) => {
                log::warn!("{} did not end on SIGTERM", self.program.display());
                self.kill().await;
            }
        }
    }

    async fn kill(mut self) {
        if let Err(e) = self.child.kill().await {
            log::warn!("Cannot end {}: {e}", self.program.display());
        }
    }

    fn signal(&self, signal: Signal) {
        // No pid any more: it has ended already.
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}

fn mapping(parent_fd: OwnedFd, child_fd: i32) -> FdMapping {
    FdMapping {
        parent_fd,
        child_fd,
    }
}

/// The program and its arguments: each key of the query and, where it has one, its value.
fn parse(uri: &str) -> Result<(PathBuf, Vec<String>), LoggerError> {
    let rest = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let program = decode_path(uri, rest).map_err(|e| match e {
        StdioError::NoPath(uri) => LoggerError::NoProgram(uri),
        _ => LoggerError::NoProgram(uri.to_owned()),
    })?;
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let query = query.split('#').next().unwrap_or_default();
    let mut arguments = Vec::new();
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        arguments.push(key.into_owned());
        if !value.is_empty() {
            arguments.push(value.into_owned());
        }
    }
    Ok((program, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_becomes_the_arguments_in_order() {
        let (program, arguments) = parse("binary:///bin/log%20it?--level=a%2Fb&-v&id=7").unwrap();
        assert_eq!(program, PathBuf::from("/bin/log it"));
        assert_eq!(arguments, ["--level", "a/b", "-v", "id", "7"]);
    }

    #[test]
    fn a_uri_without_a_program_is_refused() {
        for uri in ["binary://", "binary://?a=b", "binary://relative"] {
            assert!(
                matches!(parse(uri), Err(LoggerError::NoProgram(_))),
                "{uri}"
            );
        }
    }
}
