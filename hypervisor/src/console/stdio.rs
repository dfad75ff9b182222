//! Standard streams that never block this process.
//!
//! `O_NONBLOCK` on an inherited descriptor would change the parent's too: the flag belongs to the open file,
//! not to the descriptor. So a pipe or terminal is opened once more where /proc allows that, a socket is
//! asked by each call, and for the rest `poll` says whether a little can be written.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// What a pipe that polls as writable takes at least without blocking (pipe(7), `PIPE_BUF`).
const SAFE_WRITE: usize = 4096;

/// A stream to write to.
pub struct Output {
    file: File,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `write` does not block: a regular file, or an open file of our own.
    Plain,
    /// `send` with `MSG_DONTWAIT` does not block.
    Socket,
    /// `write` may block unless `poll` says otherwise.
    Polled,
}

impl Output {
    /// The stream that `fd` is. The descriptor stays the caller's.
    ///
    /// # Errors
    ///
    /// The descriptor is closed, or no more can be opened.
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let file = File::from(fd.try_clone_to_owned()?);
        let file_type = file.metadata()?.file_type();
        if file_type.is_socket() {
            return Ok(Self {
                file,
                kind: Kind::Socket,
            });
        }
        if file_type.is_fifo() || file_type.is_char_device() {
            let own = OpenOptions::new()
                .write(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            return Ok(match own {
                Ok(own) => Self {
                    file: own,
                    kind: Kind::Plain,
                },
                Err(_) => Self {
                    file,
                    kind: Kind::Polled,
                },
            });
        }
        Ok(Self {
            file,
            kind: Kind::Plain,
        })
    }

    /// Writes some of `bytes`.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing can be written now, otherwise what the system says.
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let result = match self.kind {
                Kind::Plain => (&self.file).write(bytes),
                Kind::Socket => self.send(bytes),
                Kind::Polled if !poll(self.file.as_fd(), libc::POLLOUT, 0)? => {
                    Err(io::ErrorKind::WouldBlock.into())
                }
                Kind::Polled => (&self.file).write(bytes.get(..SAFE_WRITE).unwrap_or(bytes)),
            };
            match result {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    /// Waits until something can be written.
    ///
    /// # Errors
    ///
    /// What `poll` says.
    pub fn wait(&self) -> io::Result<()> {
        poll(self.file.as_fd(), libc::POLLOUT, -1).map(drop)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the buffer is valid for its length.
        let sent = unsafe {
            libc::send(
                self.file.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

impl AsRawFd for Output {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// A stream to read from: standard input.
pub struct Input {
    file: File,
}

impl Input {
    /// The stream that `fd` is.
    pub fn new(fd: OwnedFd) -> Self {
        Self {
            file: File::from(fd),
        }
    }

    /// Standard input.
    ///
    /// # Errors
    ///
    /// It is closed, or no more descriptors can be had.
    pub fn stdin() -> io::Result<Self> {
        Ok(Self::new(io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// Reads what is there; `Ok(0)` at the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing is there now, otherwise what the system says.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !poll(self.file.as_fd(), libc::POLLIN, 0)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match (&self.file).read(buffer) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl AsRawFd for Input {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Whether `fd` has one of `events`, or an error to tell, within `timeout` milliseconds (-1: for ever).
fn poll(fd: BorrowedFd<'_>, events: libc::c_short, timeout: libc::c_int) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    loop {
        // SAFETY: one pollfd, valid for the call.
        match unsafe { libc::poll(&mut poll, 1, timeout) } {
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            ready => return Ok(ready > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn fill(output: &Output) -> usize {
        let mut count = 0;
        loop {
            match output.write(&[7; 1000]) {
                Ok(written) => count += written,
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                    return count;
                }
            }
        }
    }

    #[test]
    fn a_full_pipe_does_not_block_and_its_other_users_are_not_disturbed() {
        let (_reader, writer) = io::pipe().unwrap();
        let output = Output::new(writer.as_fd()).unwrap();
        assert!(output.kind == Kind::Plain);
        assert!(fill(&output) > 4096);
        // SAFETY: the descriptor is open.
        let flags = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_GETFL) };
        assert_eq!(flags & libc::O_NONBLOCK, 0);
    }

    #[test]
    fn a_full_pipe_that_cannot_be_opened_again_does_not_block() {
        let (_reader, writer) = io::pipe().unwrap();
        let output = Output {
            file: File::from(OwnedFd::from(writer)),
            kind: Kind::Polled,
        };
        assert!(fill(&output) >= 4096);
    }

    #[test]
    fn a_full_socket_does_not_block() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let output = Output::new(ours.as_fd()).unwrap();
        assert!(output.kind == Kind::Socket);
        assert!(fill(&output) > 0);
    }

    #[test]
    fn a_file_is_appended_to_where_it_stands() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before ").unwrap();
        let output = Output::new(file.as_fd()).unwrap();
        assert_eq!(output.write(b"after").unwrap(), 5);
        let mut text = String::new();
        io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "before after");
    }

    #[test]
    fn input_says_what_is_there_nothing_yet_and_the_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let input = Input::new(OwnedFd::from(reader));
        let mut buffer = [0; 8];
        let error = input.read(&mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        writer.write_all(b"hi").unwrap();
        assert_eq!(input.read(&mut buffer).unwrap(), 2);
        drop(writer);
        assert_eq!(input.read(&mut buffer).unwrap(), 0);
    }
}
