//! The agent's half of a helper.

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MemFdCreateFlag, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, socketpair,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{HELPER_NAME, Order, Report};
use crate::reaper::{ExitReceiver, Reaper, exited};

/// The longest report in bytes.
pub const MAX_REPORT: usize = 16 * 1024;

/// A helper that could not do its work, or could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// The order could not be written.
    #[error("Cannot write the order for a helper process")]
    Order(#[source] io::Error),
    /// The process could not be started.
    #[error("Cannot start a helper process")]
    Spawn(#[source] io::Error),
    /// The conversation broke.
    #[error("Cannot talk with a helper process")]
    Talk(#[source] io::Error),
    /// The helper is gone without a report.
    #[error("A helper process ended with status {0} and without a report")]
    Died(u32),
    /// The helper reported that the request cannot be carried out as it is.
    #[error("{0}")]
    Invalid(String),
    /// The helper reported that something broke.
    #[error("{0}")]
    Failed(String),
}

/// A running helper.
pub struct Helper {
    control: AsyncFd<OwnedFd>,
    exit: ExitReceiver,
}

/// How helpers are started.
#[derive(Debug)]
pub struct Launcher {
    /// The agent's own binary.
    pub program: PathBuf,
}

impl Launcher {
    /// Starts a helper with an order, its document, the new process's streams and, for an exec, a
    /// pidfd of the container's init.
    pub fn start(
        &self,
        reaper: &Reaper,
        order: &Order,
        document: &[u8],
        [stdin, stdout, stderr]: [OwnedFd; 3],
        init: Option<BorrowedFd<'_>>,
    ) -> Result<Helper, HelperError> {
        let file = order_file(order, document).map_err(HelperError::Order)?;
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|e| HelperError::Spawn(e.into()))?;

        let mut command = Command::new(&self.program);
        command
            .arg0(HELPER_NAME)
            .env_clear()
            .envs(order.search_path())
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(stdout))
            .stderr(Stdio::from(stderr));
        // Only this thread starts processes, so nothing else inherits these meanwhile.
        let inherited = [Some(file.as_fd()), Some(theirs.as_fd()), init];
        for fd in inherited.into_iter().flatten() {
            command.arg(fd.as_raw_fd().to_string());
            set_cloexec(fd, false).map_err(HelperError::Spawn)?;
        }
        let child = command.spawn();
        if let Some(init) = init {
            set_cloexec(init, true).map_err(HelperError::Spawn)?;
        }
        let child = child.map_err(HelperError::Spawn)?;
        let exit = reaper.register(child.id() as i32);

        nix::fcntl::fcntl(
            ours.as_raw_fd(),
            FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
        )
        .map_err(|e| HelperError::Talk(e.into()))?;
        let control =
            crate::transport::watch(ours, Interest::READABLE).map_err(HelperError::Talk)?;
        Ok(Helper { control, exit })
    }
}

impl Helper {
    /// The PID that the helper reports, without its other news.
    pub async fn made(&self) -> Result<i32, HelperError> {
        loop {
            if let (Report::Made { pid }, _) = self.report().await? {
                return Ok(pid);
            }
        }
    }

    /// The next report that is not a failure, with the descriptor beside it.
    pub async fn report(&self) -> Result<(Report, Option<OwnedFd>), HelperError> {
        let packet = tokio::select! {
            biased;
            packet = self.control.async_io(Interest::READABLE, |fd| receive(fd.as_fd())) => {
                packet.map_err(HelperError::Talk)?
            }
            exit = exited(self.exit.clone()) => match receive(self.control.as_fd()) {
                // It may have reported just before its end.
                Ok(packet) => packet,
                Err(_) => return Err(HelperError::Died(exit.map_or(0, |e| e.status))),
            },
        };
        let failure = match packet {
            (Some(Report::Failed { invalid, message }), _) => {
                if invalid {
                    HelperError::Invalid(message)
                } else {
                    HelperError::Failed(message)
                }
            }
            (Some(report), fd) => return Ok((report, fd)),
            (None, _) => {
                let exit = exited(self.exit.clone()).await;
                return Err(HelperError::Died(exit.map_or(0, |e| e.status)));
            }
        };
        // The report may come from the process that was being made, and the helper still has to
        // clean up: what has the same name next must not meet it.
        exited(self.exit.clone()).await;
        Err(failure)
    }

    /// Lets whoever waits for it go on: a new init with its terminal, or the helper to its end.
    pub fn go_on(&self) -> Result<(), HelperError> {
        nix::sys::socket::send(
            self.control.as_raw_fd(),
            &[1],
            MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        )
        .map(drop)
        .map_err(|e| HelperError::Talk(e.into()))
    }
}

/// One packet; no report at the end of the conversation.
fn receive(socket: BorrowedFd<'_>) -> io::Result<(Option<Report>, Option<OwnedFd>)> {
    let mut bytes = [0; MAX_REPORT];
    let (length, fd) = receive_with_fd(socket, &mut bytes)?;
    if length == 0 {
        return Ok((None, fd));
    }
    let report = serde_json::from_slice(&bytes[..length]).map_err(io::Error::other)?;
    Ok((Some(report), fd))
}

/// A descriptor; an error if what comes has none beside it.
pub fn receive_fd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut bytes = [0; 64];
    let (_, fd) = receive_with_fd(socket, &mut bytes)?;
    fd.ok_or_else(|| io::Error::other("no descriptor came"))
}

fn receive_with_fd(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = nix::cmsg_space!([i32; 1]);
    let mut iov = [IoSliceMut::new(bytes)];
    let message = recvmsg::<()>(
        socket.as_raw_fd(),
        &mut iov,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT,
    )?;
    let mut fd = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(rights) = control {
            for raw in rights {
                // SAFETY: the kernel has just made this descriptor for us.
                fd = Some(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
    }
    Ok((message.bytes, fd))
}

/// A memory file with the order, a newline (JSON on one line has none) and the document.
fn order_file(order: &Order, document: &[u8]) -> io::Result<OwnedFd> {
    let fd = memfd_create(c"order", MemFdCreateFlag::MFD_CLOEXEC)?;
    let mut file = File::from(fd);
    let mut head = serde_json::to_vec(order)?;
    head.push(b'\n');
    file.write_all(&head)?;
    file.write_all(document)?;
    Ok(file.into())
}

fn set_cloexec(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let flag = if on {
        FdFlag::FD_CLOEXEC
    } else {
        FdFlag::empty()
    };
    fcntl(fd.as_raw_fd(), FcntlArg::F_SETFD(flag))?;
    Ok(())
}
