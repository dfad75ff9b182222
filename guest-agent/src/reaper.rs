//! Collecting the statuses of dead processes.
//!
//! PID 1 inherits every orphan of the guest. One task waits for all of them and hands the status
//! of a process that somebody waits for to that one; the others are just gone.
//!
//! A process must be registered before it can become PID 1's child and die: a helper is registered
//! between its start and the next turn of the event loop, and what a helper made stays the helper's
//! child until the agent has registered it and lets the helper go (see `helper`). So no status is
//! ever lost, however early a process exits, and no list of unclaimed ones is needed.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 and the number of the signal that ended it.
    pub status: u32,
    /// Wall clock, nanoseconds since the epoch.
    pub at_ns: i64,
}

impl Exit {
    /// An exit now.
    pub fn now(status: u32) -> Self {
        Self {
            status,
            at_ns: wall_clock_ns(),
        }
    }
}

/// Nanoseconds since the epoch.
pub fn wall_clock_ns() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        })
}

/// What resolves to a process's exit.
pub type ExitReceiver = watch::Receiver<Option<Exit>>;

/// Waits for the exit. `None` only if the reaper has ended.
pub async fn exited(mut exit: ExitReceiver) -> Option<Exit> {
    exit.wait_for(Option::is_some).await.ok().and_then(|e| *e)
}

/// The processes whose statuses somebody wants.
#[derive(Debug, Default)]
pub struct Reaper {
    wanted: Mutex<HashMap<i32, watch::Sender<Option<Exit>>>>,
}

impl Reaper {
    /// Registers a child, or a child of a helper that has not been let go yet.
    pub fn register(&self, pid: i32) -> ExitReceiver {
        let (sender, receiver) = watch::channel(None);
        self.wanted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pid, sender);
        receiver
    }

    /// Runs `act` only if the process has not been collected yet: until then its PID is its own.
    pub fn while_alive<T>(&self, pid: i32, act: impl FnOnce() -> T) -> Option<T> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.contains_key(&pid).then(act)
    }

    /// Routes SIGCHLD to a descriptor. To be called before there is another thread: they inherit
    /// this thread's mask, and one that did not block the signal would swallow it.
    pub fn listen(&self) -> io::Result<AsyncFd<SignalFd>> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        crate::transport::watch(signals, tokio::io::Interest::READABLE)
    }

    /// Collects whatever has died, for ever.
    pub async fn run(&self, signals: AsyncFd<SignalFd>) -> io::Result<()> {
        loop {
            self.collect();
            let mut ready = signals.readable().await?;
            // One record is pending at most, since SIGCHLD does not queue.
            let mut record = [0; size_of::<libc::signalfd_siginfo>()];
            match crate::transport::read_fd(signals.as_fd(), &mut record) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) => return Err(error),
            }
        }
    }

    fn collect(&self) {
        while let Some((pid, status)) = wait_any() {
            let sender = self
                .wanted
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&pid);
            log::debug!("process {pid} ended with {status}");
            if let Some(sender) = sender {
                sender.send_replace(Some(Exit::now(status)));
            }
        }
    }
}

/// The PID and the status (see [`Exit`]) of a dead child. Not nix's waitpid, which consumes the
/// status of a process that a real-time signal ended and then has no name for it.
fn wait_any() -> Option<(i32, u32)> {
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a local integer.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid > 0 {
            return Some((pid, exit_status(status)));
        }
        if pid == 0 || Errno::last() != Errno::EINTR {
            return None;
        }
    }
}

/// A wait status as shells and containerd count it.
fn exit_status(status: i32) -> u32 {
    if libc::WIFSIGNALED(status) {
        128 + libc::WTERMSIG(status) as u32
    } else {
        libc::WEXITSTATUS(status) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_counted_as_shells_count_them() {
        assert_eq!(exit_status(7 << 8), 7);
        assert_eq!(exit_status(libc::SIGKILL), 137);
        assert_eq!(exit_status(libc::SIGTERM), 143);
        // With a core dump, and by a real-time signal.
        assert_eq!(exit_status(libc::SIGSEGV | 0x80), 139);
        assert_eq!(exit_status(40), 168);
    }

    #[test]
    fn a_process_that_was_collected_is_not_signalled() {
        let reaper = Reaper::default();
        assert_eq!(reaper.while_alive(1, || ()), None);
        let _exit = reaper.register(1);
        assert_eq!(reaper.while_alive(1, || 5), Some(5));
    }
}
