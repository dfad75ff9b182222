//! The owner's end of the machine: requests from the control socket, answers and events to it.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use cube_hypervisor_api::control::{
    ControlError, Event, FromHypervisor, Reply, Request, receive, send,
};
use cube_hypervisor_api::{ExitStatus, VmConfig};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use crate::console::Console;
use crate::devices::OnCrowd;
use crate::ending::{End, Ending};
use crate::machine::Machine;
use crate::one_line;
use crate::slots::{SlotError, Slots};
use crate::vcpu::Vcpu;

/// How much of the console an answer carries, in bytes; escaped as JSON it still fits into a packet.
const CONSOLE_TAIL: usize = 16 << 10;

/// Why there is no owner to serve.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// The descriptor is something else.
    #[error(
        "Descriptor {0} is no SOCK_SEQPACKET socket: --control-fd takes one that the parent process made and left open"
    )]
    NotASocket(RawFd),
    /// The first message could not be had.
    #[error("Cannot receive the machine's description from the owner")]
    Receive(#[source] ControlError),
    /// The first message is not the machine's description.
    #[error("The first request on the control socket has to be boot")]
    NotBoot,
    /// The owner cannot be answered.
    #[error("Cannot answer the owner")]
    Answer(#[source] ControlError),
    /// The socket cannot be set up.
    #[error("Cannot prepare the control socket")]
    Prepare(#[source] io::Error),
}

impl OwnerError {
    /// The exit status of a process that ends for this reason.
    pub fn status(&self) -> ExitStatus {
        match self {
            Self::NotASocket(_) | Self::NotBoot | Self::Receive(ControlError::Malformed(_)) => {
                ExitStatus::BadConfiguration
            }
            _ => ExitStatus::VmmError,
        }
    }
}

/// An owner that waits for its machine.
pub struct Owner {
    socket: Arc<OwnedFd>,
}

/// The conversation with the owner of a running machine.
pub struct Control {
    socket: Arc<OwnedFd>,
    console: Arc<Console>,
    slots: Arc<Slots>,
    vcpus: Arc<[Vcpu]>,
    ending: Arc<Ending>,
}

impl Control {
    /// Takes the inherited socket over and waits for the first request, which describes the
    /// machine. From here on this process does not outlive its parent.
    pub fn accept(fd: RawFd) -> Result<(Owner, VmConfig), OwnerError> {
        die_with_parent();
        let owner = Owner {
            socket: Arc::new(seqpacket_socket(fd)?),
        };
        // The owner may be gone already: then its end is closed, and this does not wait.
        match receive(&*owner.socket) {
            Ok(Some((Request::Boot(config), _))) => Ok((owner, *config)),
            Ok(_) => {
                let e = OwnerError::NotBoot;
                owner.refuse(e.status(), &one_line(&e));
                Err(e)
            }
            Err(e) => {
                let e = OwnerError::Receive(e);
                owner.refuse(e.status(), &one_line(&e));
                Err(e)
            }
        }
    }

    /// The last packet: why the machine has ended.
    pub fn tell_end(&self, end: &End) {
        tell_end(&self.socket, end, self.console.tail(CONSOLE_TAIL));
    }

    fn answer(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::Boot(_) => Reply::Failed("The machine runs already".into()),
            Request::Console => Reply::Console(self.console.tail(CONSOLE_TAIL)),
            Request::InjectNmi => match self.vcpus.first().map(Vcpu::inject_nmi) {
                Some(Ok(())) => Reply::Done,
                Some(Err(e)) => Reply::Failed(format!("Cannot interrupt the first vCPU: {e}")),
                None => Reply::Failed("The machine has no vCPU".into()),
            },
            Request::Stop => {
                self.ending
                    .announce(ExitStatus::GuestReset, "Stopped by the owner");
                Reply::Done
            }
            Request::AttachDisk {
                slot,
                read_only,
                serial,
            } => done(self.slots.attach_disk(slot, read_only, &serial, fds)),
            Request::DetachDisk { slot } => {
                let socket = Arc::clone(&self.socket);
                let closed = move || {
                    let event = FromHypervisor::Event(Event::DiskClosed { slot });
                    // An owner that is gone needs no answer.
                    let _ = send(&*socket, &event, &[]);
                };
                done(self.slots.detach_disk(slot, closed))
            }
            Request::AttachNetwork { slot } => done(self.slots.attach_network(slot, fds)),
        }
    }

    /// Answers one request, if there is one.
    fn serve_one(&self) -> Result<bool, ControlError> {
        let Some((request, fds)) = receive(&*self.socket)? else {
            return Ok(false);
        };
        let reply = FromHypervisor::Reply(self.answer(request, fds));
        send(&*self.socket, &reply, &[])?;
        Ok(true)
    }

    fn serve(&self) {
        loop {
            match self.serve_one() {
                Ok(true) => {}
                Ok(false) => return,
                Err(ControlError::Malformed(e)) => {
                    let reply = Reply::Failed(format!("Cannot read the request: {e}"));
                    if let Err(e) = send(&*self.socket, &FromHypervisor::Reply(reply), &[]) {
                        return self.lose_owner(&e);
                    }
                }
                Err(e) => return self.lose_owner(&e),
            }
        }
    }

    /// Without its owner the machine ends.
    fn lose_owner(&self, error: &ControlError) {
        match error {
            ControlError::Closed => self.ending.announce(
                ExitStatus::GuestReset,
                "The owner closed the control socket",
            ),
            error => self.ending.announce(ExitStatus::VmmError, one_line(error)),
        }
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(&self.socket.as_raw_fd(), EventSet::IN)) {
            self.ending.announce(
                ExitStatus::VmmError,
                format!("Cannot watch the control socket: {e}"),
            );
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps) {
        self.serve();
    }
}

impl Owner {
    /// Tells the owner that there is no machine, and why.
    pub fn refuse(&self, status: ExitStatus, message: &str) {
        let reply = FromHypervisor::Reply(Reply::Failed(message.into()));
        // An owner that is gone knows already.
        let _ = send(&*self.socket, &reply, &[]);
        let end = End {
            status,
            message: message.into(),
        };
        tell_end(&self.socket, &end, String::new());
    }

    /// What tells the owner of a crowded share. An owner that does not read misses it: nothing here waits.
    pub fn on_crowd(&self) -> OnCrowd {
        let socket = Arc::clone(&self.socket);
        Arc::new(move |tag, inodes| {
            let event = Event::ShareCrowded {
                tag: tag.into(),
                inodes,
            };
            let _ = send(&*socket, &FromHypervisor::Event(event), &[]);
        })
    }

    /// Tells the owner that the machine runs. Nothing is waited for on this socket from here on.
    pub fn start(
        self,
        machine: &Machine,
        ending: &Arc<Ending>,
    ) -> Result<Arc<Mutex<Control>>, OwnerError> {
        send(&*self.socket, &FromHypervisor::Reply(Reply::Done), &[])
            .map_err(OwnerError::Answer)?;
        set_nonblocking(&self.socket).map_err(OwnerError::Prepare)?;
        Ok(Arc::new(Mutex::new(Control {
            socket: self.socket,
            console: Arc::clone(machine.console()),
            slots: Arc::clone(machine.slots()),
            vcpus: Arc::clone(machine.vcpus()),
            ending: Arc::clone(ending),
        })))
    }
}

fn done(result: Result<(), SlotError>) -> Reply {
    match result {
        Ok(()) => Reply::Done,
        Err(e) => Reply::Failed(one_line(&e)),
    }
}

fn tell_end(socket: &OwnedFd, end: &End, console: String) {
    let event = Event::Ended {
        status: end.status,
        message: end.message.clone(),
        console,
    };
    // An owner that is gone, or does not read, learns it from the exit status.
    let _ = send(socket, &FromHypervisor::Event(event), &[]);
}

/// Asks for SIGKILL when the parent's thread that started us ends. Should it have ended before, the
/// other end of the control socket is closed, which ends us too.
fn die_with_parent() {
    // SAFETY: The call takes integers only. It cannot fail with a valid signal.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

fn seqpacket_socket(fd: RawFd) -> Result<OwnedFd, OwnerError> {
    let mut kind: libc::c_int = 0;
    let mut length = size_of_val(&kind) as libc::socklen_t;
    // SAFETY: Both pointers are to live variables of the sizes that the call expects.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast(),
            &raw mut length,
        )
    };
    if result < 0 || kind != libc::SOCK_SEQPACKET {
        return Err(OwnerError::NotASocket(fd));
    }
    // SAFETY: The descriptor is an open socket, which the parent left for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set_nonblocking(socket: &OwnedFd) -> io::Result<()> {
    let mut on: libc::c_int = 1;
    // SAFETY: FIONBIO reads one integer, which lives.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONBIO, &raw mut on) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
