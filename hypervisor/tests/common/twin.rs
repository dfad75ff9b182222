//! A machine whose init is the test's own program. Both sides are here: the host's, which starts the machine, and the
//! guest's, which says by vsock what it saw.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Initramfs, hypervisor, linux, merged};

/// On the host: the port where the guest reports and takes its orders.
pub const HOST_LINES: u32 = 100;

const HOST_CID: u32 = 2;

/// The machine, seen from the host.
pub struct Twin {
    pub child: Child,
    lines: BufReader<UnixStream>,
    dir: TempDir,
}

impl Twin {
    /// Boots a machine with its files in `dir` and `more` in its configuration, and waits for its guest to connect.
    pub fn start(dir: TempDir, more: Value) -> Self {
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("initramfs"), Initramfs::this_program()).unwrap();
        let config = json!({
            "kernel": linux(),
            "initramfs": at("initramfs"),
            "cmdline": "quiet panic=-1 reboot=k",
            "memory_mib": 256,
            "vsock": { "path": at("v") },
            "console": "log",
        });
        std::fs::write(at("vm.json"), merged(config, more).to_string()).unwrap();
        let service = UnixListener::bind(at(&format!("v_{HOST_LINES}"))).unwrap();
        let child = hypervisor()
            .arg("--config")
            .arg(at("vm.json"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(accept_unless_it_ends(&service, &child));
        Self { child, lines, dir }
    }

    /// The directory of all its files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The socket of its vsock.
    pub fn socket(&self) -> PathBuf {
        self.dir().join("v")
    }

    /// What the guest says next.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end_matches('\n').to_owned()
    }

    /// Says `line` to the guest.
    pub fn say(&mut self, line: &str) {
        writeln!(self.lines.get_mut(), "{line}").unwrap();
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn accept_unless_it_ends(service: &UnixListener, child: &Child) -> UnixStream {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    let watch = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut fds = [watch(service.as_fd()), watch(process.as_fd())];
    poll(&mut fds, None).unwrap();
    assert!(
        fds[1].revents().is_empty(),
        "the machine ended before its guest was there"
    );
    service.accept().unwrap().0
}

/// In the guest: runs `serve`, says how it failed, and resets the machine.
pub fn guest(serve: impl FnOnce() -> io::Result<()>) -> ! {
    if let Err(error) = serve() {
        println!("The guest of the test fails: {error}");
    }
    reset()
}

/// In the guest: resets the machine.
pub fn reset() -> ! {
    // SAFETY: no pointers are passed.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    loop {
        std::thread::park();
    }
}

/// In the guest: a connection to the host's `port`. It reads, writes and shuts down as any stream, so a `UnixStream`
/// serves.
pub fn connect(port: u32) -> io::Result<UnixStream> {
    let socket = socket()?;
    let address = address(HOST_CID, port);
    // SAFETY: the pointer is to an address of the length given.
    let result =
        unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_LEN) };
    match result {
        0 => Ok(UnixStream::from(socket)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// In the guest: a listener on `port`.
pub fn listen(port: u32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let address = address(libc::VMADDR_CID_ANY, port);
    // SAFETY: the pointer is to an address of the length given.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_LEN) };
    if bound != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::listen(&socket, 1024)?;
    Ok(socket)
}

/// In the guest: the next connection to a listener.
pub fn accept(listener: impl AsFd) -> io::Result<UnixStream> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket = rustix::net::accept_with(listener, flags)?;
    Ok(UnixStream::from(socket))
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all bytes zero are a valid address.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

const ADDRESS_LEN: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed; the descriptor is nobody else's.
    match unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: see above.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}
