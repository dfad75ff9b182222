//! Connections to the host.
//!
//! Everything the agent says to the host goes over connections that the agent opens: over vsock in
//! the guest, over Unix sockets in the tests. A [`Connector`] starts a connection and hands over a
//! non-blocking socket; the code that uses it does not know which kind it is.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// Starts a connection to a port of the host: returns a non-blocking stream socket that is
/// connected or is connecting.
pub type Connector = Box<dyn Fn(u32) -> io::Result<OwnedFd> + Send + Sync>;

/// Starts a vsock connection to `port` of the host (CID 2, vsock(7)).
pub fn vsock(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: socket(2) has no memory arguments.
    let fd = unsafe {
        libc::socket(
            libc::AF_VSOCK,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_vm is plain integers, for which all zeroes is a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_HOST;
    address.svm_port = port;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    let result = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as libc::socklen_t,
        )
    };
    if result < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINPROGRESS) {
            return Err(error);
        }
    }
    Ok(socket)
}

/// Registers a descriptor with the event loop.
pub fn watch<T: AsFd + AsRawFd>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: a type with AsFd owns its descriptor and keeps it open as long as it lives.
    Ok(unsafe { AsyncFd::register_with_interest(inner, interest) }?)
}

/// A connected stream.
#[derive(Debug)]
pub struct Connection {
    fd: AsyncFd<OwnedFd>,
}

impl Connection {
    /// Completes the connection that a [`Connector`] started.
    pub async fn establish(socket: OwnedFd) -> io::Result<Self> {
        let fd = watch(socket, Interest::READABLE | Interest::WRITABLE)?;
        // Writable is what a socket becomes when its connect has ended, either way.
        let _ = fd.writable().await?;
        let pending = nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::SocketError)?;
        if pending != 0 {
            return Err(io::Error::from_raw_os_error(pending));
        }
        Ok(Self { fd })
    }

    /// The socket, for waiting.
    pub fn fd(&self) -> &AsyncFd<OwnedFd> {
        &self.fd
    }

    /// Writes all of `bytes`.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self
                .fd
                .async_io(Interest::WRITABLE, |fd| send(fd.as_fd(), bytes))
                .await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Tells the peer that nothing more comes.
    pub fn end_writing(&self) -> io::Result<()> {
        shutdown_write(self.fd.as_fd())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.fd.poll_read_ready(cx))?;
            let space = buf.initialize_unfilled();
            match guard.try_io(|fd| read_fd(fd.as_fd(), space)) {
                Ok(Ok(n)) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_would_block) => continue,
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.fd.poll_write_ready(cx))?;
            match guard.try_io(|fd| send(fd.as_fd(), bytes)) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => continue,
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.end_writing())
    }
}

/// A stream of exactly one connection, then silence: what a server that wants a listener gets.
pub struct Once<T>(Option<T>);

impl<T> Once<T> {
    /// The one item.
    pub fn new(item: T) -> Self {
        Self(Some(item))
    }
}

impl<T: Unpin> futures_core::Stream for Once<T> {
    type Item = io::Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.0.take() {
            Some(item) => Poll::Ready(Some(Ok(item))),
            // An ended stream would end the server's accept task; that it stays costs nothing.
            None => Poll::Pending,
        }
    }
}

/// A connection that says when it has ended: the peer closed it, it broke, or it was dropped.
pub struct Watched {
    inner: Connection,
    ended: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Watched {
    /// The connection and what resolves at its end.
    pub fn new(inner: Connection) -> (Self, tokio::sync::oneshot::Receiver<()>) {
        let (ended, end) = tokio::sync::oneshot::channel();
        let watched = Self {
            inner,
            ended: Some(ended),
        };
        (watched, end)
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let result = ready!(Pin::new(&mut self.inner).poll_read(cx, buf));
        if room && (result.is_err() || buf.filled().len() == before) {
            // Dropping the sender is the message, also when the whole connection is dropped.
            self.ended = None;
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// read(2), repeated when a signal interrupts it.
pub fn read_fd(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: the pointer and the length describe `buffer`.
        let n = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// write(2), repeated when a signal interrupts it.
pub fn write_fd(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        // SAFETY: the pointer and the length describe `bytes`.
        let n = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// send(2) without SIGPIPE.
fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        // SAFETY: the pointer and the length describe `bytes`.
        let n = unsafe {
            libc::send(
                fd.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_NOSIGNAL,
            )
        };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn shutdown_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: shutdown(2) has no memory arguments.
    if unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
