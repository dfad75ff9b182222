//! The Unix sockets on the host.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, bind, connect, listen, recv, sendmsg, socket_with,
};

use super::VsockError;
use super::line::{self, LONGEST_LINE, Line};
use crate::virtio::queue::Segments;

/// The longest path of the listening socket in bytes: `_4294967295` and the terminating zero still
/// fit behind it into the 108 bytes of `sockaddr_un`.
pub const LONGEST_PATH: usize = 90;

/// Clients that may wait to be accepted (the kernel cuts it to `net.core.somaxconn`).
const LISTEN_BACKLOG: i32 = 4096;

/// The most parts of one system call (`UIO_MAXIOV`).
const MAX_PARTS: usize = 1024;

/// Where clients on the host connect to. Its file goes when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`, which only the user of this process may connect to (mode 0600).
    ///
    /// # Errors
    ///
    /// The path is too long, taken, or cannot be created.
    pub fn bind(path: &Path) -> Result<Self, VsockError> {
        let length = path.as_os_str().len();
        if length > LONGEST_PATH {
            return Err(VsockError::PathTooLong {
                path: path.to_owned(),
                length,
            });
        }
        let failed = |error: Errno| match error {
            Errno::ADDRINUSE => VsockError::PathTaken(path.to_owned()),
            error => VsockError::Listen {
                path: path.to_owned(),
                source: error.into(),
            },
        };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let socket = stream_socket().map_err(failed)?;
        // The file takes over the socket's mode when it is bound, so it never has another one.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        bind(&socket, &address).map_err(failed)?;
        // From here on the file is removed on failure as well.
        let listener = Self {
            socket,
            path: path.to_owned(),
        };
        listen(&listener.socket, LISTEN_BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    /// The next client; `None` when none is waiting.
    ///
    /// # Errors
    ///
    /// The process has no descriptors left, or the client left already.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match accept_with(&self.socket, flags) {
            Ok(client) => Ok(Some(client)),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Connects to the service that stands for `port` of the host: the socket `<path>_<port>`.
    ///
    /// # Errors
    ///
    /// Nobody listens there. Also when more clients wait there than the service lets wait: a Unix
    /// socket has no event for that, and Linux's vsock refuses in the same case.
    pub fn connect_service(&self, port: u32) -> io::Result<OwnedFd> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        let socket = stream_socket()?;
        connect(&socket, &SocketAddrUnix::new(Path::new(&path))?)?;
        Ok(socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::debug!("Cannot remove {}: {error}", self.path.display());
        }
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )
}

/// Reads the line that a new client writes first. What follows it stays in the socket, and so does
/// an unfinished line: a client that is slow to write it costs no memory.
pub fn read_line(client: BorrowedFd<'_>) -> Line {
    let mut bytes = [0; LONGEST_LINE];
    let count = match recv(client, &mut bytes, RecvFlags::PEEK) {
        Ok((_, 0)) => return Line::Malformed,
        Ok((_, count)) => count,
        Err(Errno::AGAIN | Errno::INTR) => return Line::Unfinished,
        Err(_) => return Line::Malformed,
    };
    let line = line::parse(&bytes[..count]);
    if let Line::Connect { len, .. } = line {
        match recv(client, &mut bytes[..len], RecvFlags::empty()) {
            Ok((_, count)) if count == len => {}
            _ => return Line::Malformed,
        }
    }
    line
}

/// Sends what guest memory holds, as much as the socket takes now: 0 when it is full.
///
/// # Errors
///
/// The socket takes nothing any more.
pub fn send_segments(socket: BorrowedFd<'_>, data: &Segments) -> io::Result<usize> {
    let parts = data.iovecs();
    let message = message(parts.as_ptr().cast_mut(), parts.len().min(MAX_PARTS));
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: `parts` are `msg_iovlen` parts or more, each of guest memory that `data` keeps mapped; the
    // kernel only reads them.
    let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    usize::try_from(count).or_else(|_| would_block_is_zero(io::Error::last_os_error()))
}

/// Sends slices, as much as the socket takes now: 0 when it is full.
///
/// # Errors
///
/// The socket takes nothing any more.
pub fn send_slices(socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut no_descriptors = SendAncillaryBuffer::default();
    sendmsg(socket, slices, &mut no_descriptors, flags)
        .or_else(|error| would_block_is_zero(error.into()))
}

fn would_block_is_zero(error: io::Error) -> io::Result<usize> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}

/// What [`receive`] got.
pub struct Received {
    /// Bytes; 0 at the end of the stream.
    pub count: usize,
    /// Whether there were descriptors beside the data. They are closed. The kernel ends a read there,
    /// so it may be shorter than what is waiting.
    pub stopped_at_descriptors: bool,
}

/// Receives into `parts` what the socket has.
///
/// # Errors
///
/// Of kind `WouldBlock` when it has nothing now; otherwise the stream has ended badly.
///
/// # Safety
///
/// `parts` are addresses of guest memory, which stays mapped during the call.
pub unsafe fn receive(socket: BorrowedFd<'_>, parts: &mut [libc::iovec]) -> io::Result<Received> {
    let mut message = message(parts.as_mut_ptr(), parts.len().min(MAX_PARTS));
    // SAFETY: the caller vouches for the parts, of which there are `msg_iovlen` or more; the
    // message has no other pointers.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    match usize::try_from(count) {
        Ok(count) => Ok(Received {
            count,
            stopped_at_descriptors: message.msg_flags & libc::MSG_CTRUNC != 0,
        }),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

fn message(parts: *mut libc::iovec, count: usize) -> libc::msghdr {
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: parts,
        msg_iovlen: count,
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn the_socket_is_private_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let listener = Listener::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(listener.accept().unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_is_taken_too_long_or_nowhere_is_told_from_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        std::fs::write(&path, "").unwrap();
        let error = Listener::bind(&path).unwrap_err();
        assert!(matches!(error, VsockError::PathTaken(_)), "{error}");
        assert!(path.exists(), "somebody else's file stays");
        let long = dir.path().join("v".repeat(LONGEST_PATH));
        let error = Listener::bind(&long).unwrap_err();
        assert!(matches!(error, VsockError::PathTooLong { .. }), "{error}");
        let error = Listener::bind(&dir.path().join("no/v.sock")).unwrap_err();
        assert!(matches!(error, VsockError::Listen { .. }), "{error}");
    }

    #[test]
    fn a_service_has_the_port_behind_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let listener = Listener::bind(&path).unwrap();
        assert!(listener.connect_service(u32::MAX - 1).is_err());
        let service = UnixListener::bind(dir.path().join("v.sock_4294967294")).unwrap();
        let ours = listener.connect_service(u32::MAX - 1).unwrap();
        send_slices(ours.as_fd(), &[IoSlice::new(b"hello")]).unwrap();
        drop(ours);
        let mut text = String::new();
        service
            .accept()
            .unwrap()
            .0
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "hello");
    }

    #[test]
    fn a_line_is_taken_once_it_is_whole_and_nothing_behind_it() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        assert_eq!(read_line(ours.as_fd()), Line::Unfinished);
        theirs.write_all(b"CONNECT").unwrap();
        assert_eq!(read_line(ours.as_fd()), Line::Unfinished);
        theirs.write_all(b" 77\nCONNECT 5\n").unwrap();
        let line = Line::Connect { port: 77, len: 11 };
        assert_eq!(read_line(ours.as_fd()), line);
        let line = Line::Connect { port: 5, len: 10 };
        assert_eq!(read_line(ours.as_fd()), line);
        theirs.write_all(b"CONN").unwrap();
        drop(theirs);
        assert_eq!(read_line(ours.as_fd()), Line::Unfinished);
    }
}
