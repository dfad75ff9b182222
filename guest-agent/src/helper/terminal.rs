//! Pseudo-terminals.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Opens a new terminal's master in the container that this process is in. The container's /dev is
/// the container's to change: make sure of what was opened.
pub fn open_master() -> io::Result<fs::File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    /// Of /dev/ptmx (Documentation/admin-guide/devices.txt).
    const PTMX: u64 = libc::makedev(5, 2);
    let master = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open("/dev/ptmx")?;
    if master.metadata()?.rdev() != PTMX {
        return Err(io::Error::other(
            "/dev/ptmx of the container is something else",
        ));
    }
    Ok(master)
}

/// The terminal behind a master, without a path that could lead elsewhere (ioctl_tty(2)).
pub fn slave_of(master: &impl AsRawFd) -> io::Result<OwnedFd> {
    let unlocked: i32 = 0;
    // SAFETY: the ioctl reads one integer.
    if unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the ioctl takes an integer.
    let fd = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets a terminal's size; its foreground processes get SIGWINCH.
pub fn set_size(terminal: BorrowedFd<'_>, columns: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the ioctl reads one winsize.
    match unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
