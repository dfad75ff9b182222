//! Machines with an owner: the test.

use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use cube_hypervisor_api::control::{Event, FromHypervisor, Reply, Request, receive, send};
use cube_hypervisor_api::{ExitStatus, VmConfig};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::Value;

use super::alone::read_until;
use super::hypervisor;

pub struct Owned {
    pub socket: Option<OwnedFd>,
    pub child: Child,
}

impl Owned {
    /// Starts the hypervisor, and sends nothing. The console may be read.
    pub fn start() -> Self {
        let mut command = hypervisor();
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        Self::spawn(command)
    }

    /// Starts `command` with a control socket.
    pub fn spawn(mut command: Command) -> Self {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let fd = theirs.as_raw_fd();
        command.arg("--control-fd").arg(fd.to_string());
        // SAFETY: The closure only makes one system call.
        unsafe {
            command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
                0.. => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().unwrap();
        Self {
            socket: Some(ours),
            child,
        }
    }

    /// Starts a machine.
    pub fn boot(config: Value) -> Self {
        let machine = Self::start();
        let config: VmConfig = serde_json::from_value(config).unwrap();
        machine.done(&Request::Boot(Box::new(config)), &[]);
        machine
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().unwrap()
    }

    /// Asks for something.
    pub fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        send(self.socket(), request, fds).unwrap();
        match self.packet() {
            FromHypervisor::Reply(reply) => reply,
            FromHypervisor::Event(event) => panic!("{event:?} and no reply"),
        }
    }

    /// Asks for something that has to work.
    #[track_caller]
    pub fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.ask(request, fds), Reply::Done);
    }

    /// Takes the disk out of `slot` and waits until it is closed.
    #[track_caller]
    pub fn detach(&self, slot: u8) {
        send(self.socket(), &Request::DetachDisk { slot }, &[]).unwrap();
        // The disk may be closed before the request is answered.
        let mut packets = [self.packet(), self.packet()];
        packets.sort_by_key(|packet| matches!(packet, FromHypervisor::Event(_)));
        let expected = [
            FromHypervisor::Reply(Reply::Done),
            FromHypervisor::Event(Event::DiskClosed { slot }),
        ];
        assert_eq!(packets, expected);
    }

    /// Waits for the next thing that the hypervisor says.
    pub fn packet(&self) -> FromHypervisor {
        receive(self.socket()).unwrap().unwrap().0
    }

    /// Waits until the guest has written `text` to a console that goes to standard output.
    pub fn read_until(&mut self, text: &str) {
        read_until(self.child.stdout.as_mut().unwrap(), text);
    }

    /// Waits for the machine's last words and the process's end.
    pub fn end(mut self) -> (ExitStatus, String, String) {
        let (packet, _) = receive(self.socket()).unwrap().unwrap();
        let FromHypervisor::Event(Event::Ended {
            status,
            message,
            console,
        }) = packet
        else {
            panic!("{packet:?}");
        };
        // It waits until its standard output has been taken.
        let mut rest = Vec::new();
        if let Some(output) = &mut self.child.stdout {
            output.read_to_end(&mut rest).unwrap();
        }
        let exit = self.child.wait().unwrap();
        assert_eq!(exit.code(), Some(status.code().into()));
        (status, message, console)
    }
}
