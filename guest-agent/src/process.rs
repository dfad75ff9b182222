//! A process that the host knows: a container's init or an exec.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::helper::terminal;
use crate::reaper::{Exit, ExitReceiver, Reaper};
use crate::stdio::Stage;

/// A process that the host knows.
#[derive(Debug)]
pub struct Process {
    /// Its PID, as PID 1 sees it.
    pub pid: i32,
    collected: ExitReceiver,
    exit: watch::Sender<Option<Exit>>,
    stage: watch::Sender<Stage>,
    terminal: Option<Arc<AsyncFd<OwnedFd>>>,
}

impl Process {
    /// A process that the reaper has registered.
    pub fn new(
        pid: i32,
        collected: ExitReceiver,
        stage: watch::Sender<Stage>,
        terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    ) -> Self {
        Self {
            pid,
            collected,
            exit: watch::Sender::new(None),
            stage,
            terminal,
        }
    }

    /// What resolves when the process has been collected, which others may not be told yet.
    pub fn collected(&self) -> ExitReceiver {
        self.collected.clone()
    }

    /// Tells everybody who waits.
    pub fn publish(&self, exit: Exit) {
        self.exit.send_replace(Some(exit));
    }

    /// What resolves when the exit is published.
    pub fn exit(&self) -> ExitReceiver {
        self.exit.subscribe()
    }

    /// The published exit.
    pub fn exited(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Sends a signal. False if the process has ended.
    pub fn signal(&self, reaper: &Reaper, signal: i32) -> std::io::Result<bool> {
        let sent = reaper.while_alive(self.pid, || {
            // SAFETY: kill(2) has no memory arguments.
            match unsafe { libc::kill(self.pid, signal) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
        sent.transpose().map(|sent| sent.is_some())
    }

    /// Ends standard input after what has arrived.
    pub fn close_stdin(&self) {
        self.advance(Stage::StdinClosed);
    }

    /// Passes on what is left of the output, and closes the streams.
    pub fn finish_streams(&self) {
        self.advance(Stage::Finished);
    }

    fn advance(&self, to: Stage) {
        self.stage.send_if_modified(|stage| {
            let later = *stage < to;
            if later {
                *stage = to;
            }
            later
        });
    }

    /// Sets the terminal's size. Without a terminal it does nothing, and that is no error.
    pub fn resize(&self, columns: u16, rows: u16) -> std::io::Result<()> {
        let Some(terminal) = &self.terminal else {
            return Ok(());
        };
        terminal::set_size(terminal.get_ref().as_fd(), columns, rows)
    }
}
