//! Waiting for the end of a process that is not a child.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The end of a process, by a pidfd: the number may be another's afterwards, this is not.
pub struct End(OwnedFd);

impl End {
    /// Of the process `pid`; nothing if it has ended and was waited for.
    pub fn of(pid: u32) -> Option<Self> {
        // SAFETY: pidfd_open(2) takes numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::ESRCH), "{pid}: {error}");
            return None;
        }
        // SAFETY: the descriptor was just made and has no other owner.
        Some(Self(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Waits for it, for no longer than `limit`; whether it comes.
    pub fn comes_within(&self, limit: Duration) -> bool {
        let mut event = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer is to one pollfd that outlives the call.
        unsafe { libc::poll(&mut event, 1, limit.as_millis() as i32) == 1 }
    }
}
