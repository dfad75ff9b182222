//! Processes of the host by handle: a pidfd cannot come to mean another process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Opens a handle for a process (pidfd_open(2)), close-on-exec.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers and returns a new descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    let fd = Errno::result(fd)?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just given us this descriptor, nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends SIGKILL. A process that has ended is no error.
pub fn kill(handle: &impl AsFd) -> io::Result<()> {
    let no_info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open while it is borrowed; a null pointer stands for no siginfo.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            handle.as_fd().as_raw_fd(),
            libc::SIGKILL,
            no_info,
            0,
        )
    };
    match Errno::result(result) {
        Ok(_) | Err(Errno::ESRCH) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// A line that names a process for good: its id and the time it was started.
pub fn note(pid: u32) -> Option<String> {
    Some(format!("{pid} {}", start_time(pid)?))
}

/// Kills the process that [`note`] described, if it is still that one, and waits for its end.
pub fn kill_noted(note: &str) {
    /// containerd gives `delete` five seconds.
    const LIMIT: Duration = Duration::from_secs(4);
    let Some((pid, started)) = note.trim().split_once(' ') else {
        return;
    };
    let Ok(pid) = pid.parse::<u32>() else { return };
    let Ok(handle) = open(pid) else { return };
    // Looked at after the handle was opened: now it is this process or none.
    if start_time(pid).as_deref() != Some(started) {
        return;
    }
    if let Err(e) = kill(&handle) {
        log::warn!("Cannot kill the hypervisor {pid}: {e}");
        return;
    }
    if !matches!(one_ends(&[handle], LIMIT), Ok(true)) {
        log::warn!("The hypervisor {pid} has not ended {LIMIT:?} after SIGKILL");
    }
}

/// Waits no longer than `limit` until one of these processes has ended.
///
/// # Errors
///
/// Those of poll(2).
pub fn one_ends(handles: &[OwnedFd], limit: Duration) -> io::Result<bool> {
    let mut fds: Vec<_> = handles
        .iter()
        .map(|handle| PollFd::new(handle.as_fd(), PollFlags::POLLIN))
        .collect();
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    Ok(poll(&mut fds, limit)? > 0)
}

/// The 22nd field of /proc/PID/stat: clock ticks from boot to the process's start.
fn start_time(pid: u32) -> Option<String> {
    let stat =
        io::read_to_string(File::open(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?)
            .ok()?;
    // The second field is a name in parentheses, which may hold anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_noted_process_is_killed_and_another_with_its_number_is_not() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let noted = note(child.id()).unwrap();
        kill_noted(&format!("{} 1", child.id()));
        assert!(child.try_wait().unwrap().is_none());
        kill_noted(&noted);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        kill_noted(&noted);
    }
}
