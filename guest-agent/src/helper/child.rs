//! The helper's half: its main, and how it reports.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, IoSlice, Read, Seek};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::ExitCode;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};

use super::parent::MAX_REPORT;
use super::{Order, Report, create, exec};

/// Why a helper could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The request cannot be carried out as it is.
    #[error("{0}")]
    Invalid(String),
    /// Something broke.
    #[error("{0}")]
    Failed(String),
    /// The process that was being made has reported why it ended.
    #[error("The new process has reported")]
    Reported,
}

impl ChildError {
    /// Something broke while doing `what`.
    pub fn failed(what: impl Display, error: impl Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }
}

/// The socket to the agent, shared by all processes of a helper.
#[derive(Clone, Debug)]
pub struct Control(std::rc::Rc<OwnedFd>);

impl Control {
    fn send(&self, report: &Report, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(report)?;
        let iov = [IoSlice::new(&bytes)];
        let raw = fd.map(|fd| [fd.as_raw_fd()]);
        let rights: Vec<_> = raw
            .iter()
            .map(|raw| ControlMessage::ScmRights(raw))
            .collect();
        sendmsg::<()>(
            self.0.as_raw_fd(),
            &iov,
            &rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )?;
        Ok(())
    }

    /// The init is about to be made; `owner` is to own its terminal.
    pub fn building(&self, owner: u32) -> io::Result<()> {
        self.send(&Report::Building { owner }, None)
    }

    /// The process is there.
    pub fn made(&self, pid: i32) -> io::Result<()> {
        self.send(&Report::Made { pid }, None)
    }

    /// Here is the terminal's master.
    pub fn terminal(&self, master: BorrowedFd<'_>) -> io::Result<()> {
        self.send(&Report::Terminal, Some(master))
    }

    /// It did not work. Whether the agent can still be told is beyond our reach.
    pub fn failed(&self, error: &ChildError) {
        let (invalid, mut message) = match error {
            ChildError::Invalid(message) => (true, message.clone()),
            ChildError::Failed(message) => (false, message.clone()),
            ChildError::Reported => return,
        };
        // One line, and short enough for a packet even if every character needs an escape.
        message = message.replace('\n', "; ");
        let mut end = message.len().min(MAX_REPORT / 8);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        if let Err(error) = self.send(&Report::Failed { invalid, message }, None) {
            log::error!("Cannot report a failure: {error}");
        }
    }

    /// Waits for the agent's word, or for the agent's end.
    pub fn wait(&self) -> io::Result<()> {
        let mut byte = [0];
        loop {
            match recv(self.0.as_raw_fd(), &mut byte, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The helper's main. Its arguments are the numbers of the descriptors that it inherited.
pub fn main(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    crate::logger::start_in_helper();
    let mut inherited = || -> Option<OwnedFd> {
        let raw: i32 = arguments.next()?.parse().ok()?;
        nix::fcntl::fcntl(
            raw,
            nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
        )
        .ok()?;
        // SAFETY: the agent made the descriptor inheritable for this process alone, and each number
        // is taken once.
        Some(unsafe { OwnedFd::from_raw_fd(raw) })
    };
    let (Some(order), Some(control)) = (inherited(), inherited()) else {
        log::error!("The helper is for the agent's own use");
        return ExitCode::FAILURE;
    };
    let init = inherited();
    let control = Control(std::rc::Rc::new(control));
    let made = restore_signals().and_then(|()| match read_order(order)? {
        (Order::Create(order), document) => create::create(&order, &document, &control),
        (Order::Exec(order), document) => {
            let init =
                init.ok_or_else(|| ChildError::Failed("no descriptor of the init".into()))?;
            exec::exec(&order, &document, init, &control)
        }
    });
    let told = match made {
        Ok(pid) => control.made(pid).and_then(|()| control.wait()),
        Err(error) => {
            control.failed(&error);
            return ExitCode::FAILURE;
        }
    };
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The new process starts with default signals: neither the agent's mask nor Rust's SIGPIPE.
fn restore_signals() -> Result<(), ChildError> {
    let restore = || -> nix::Result<()> {
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
        // SAFETY: the default action runs no code of ours.
        unsafe { nix::sys::signal::signal(Signal::SIGPIPE, nix::sys::signal::SigHandler::SigDfl) }?;
        // glibc's posix_spawn ignores its two internal signals in the child, and will not have them
        // changed by its own functions. The kernel's struct sigaction begins with the handler; all
        // zeroes is the default action without flags.
        let default = [0_u64; 4];
        for signal in [32, 33] {
            // SAFETY: the kernel reads one struct sigaction of 32 bytes with a mask of 8.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_rt_sigaction,
                    signal,
                    default.as_ptr(),
                    std::ptr::null_mut::<u64>(),
                    8,
                )
            };
            nix::errno::Errno::result(result)?;
        }
        Ok(())
    };
    restore().map_err(|e| ChildError::failed("cannot restore signals", e))
}

fn read_order(order: OwnedFd) -> Result<(Order, Vec<u8>), ChildError> {
    let mut file = File::from(order);
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .map_err(|e| ChildError::failed("cannot read the order", e))?;
    let head = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(0);
    let order = serde_json::from_slice(&bytes[..head])
        .map_err(|e| ChildError::failed("cannot understand the order", e))?;
    bytes.drain(..=head);
    Ok((order, bytes))
}
