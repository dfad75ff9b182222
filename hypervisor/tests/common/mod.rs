//! Guests for the tests, and the hypervisor as its users start it.

#![allow(dead_code, missing_docs)]

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use cube_hypervisor_api::control::{Event, FromHypervisor, Reply, Request, receive, send};
use cube_hypervisor_api::{ExitStatus, VmConfig};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Where the tests' kernels are loaded and entered.
const KERNEL_ADDRESS: u32 = 0x10_0000;

/// Machine code for 32-bit protected mode, as PVH starts it.
pub mod code {
    /// Resets the machine by the keyboard controller.
    pub const RESET: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    /// An invalid instruction without an interrupt table: a triple fault.
    pub const TRIPLE_FAULT: &[u8] = &[0x0f, 0x0b];
    /// Jumps to itself.
    pub const SPIN: &[u8] = &[0xeb, 0xfe];

    /// Writes `text` to the serial port.
    pub fn print(text: &str) -> Vec<u8> {
        let mut code = vec![0xba, 0xf8, 0x03, 0, 0]; // mov edx, 0x3f8
        for byte in text.bytes() {
            code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
        }
        code
    }
}

/// An ELF image that runs `code`; with a PVH note if it is to be entered.
pub fn kernel(code: &[u8], pvh: bool) -> Vec<u8> {
    const HEADERS: usize = 64 + 2 * 56;
    const CODE: usize = 256;
    let mut elf = vec![0; CODE];
    elf[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    elf[16..20].copy_from_slice(&[2, 0, 62, 0]); // executable, x86-64
    put(&mut elf, 24, &u64::from(KERNEL_ADDRESS).to_le_bytes());
    put(&mut elf, 32, &64u64.to_le_bytes()); // program headers
    put(&mut elf, 54, &56u16.to_le_bytes());
    put(&mut elf, 56, &2u16.to_le_bytes());
    program_header(&mut elf, 64, 1, CODE, code.len());
    program_header(&mut elf, 120, 4, HEADERS, 20);
    let kind: u32 = if pvh { 18 } else { 1 };
    put(&mut elf, HEADERS, &4u32.to_le_bytes());
    put(&mut elf, HEADERS + 4, &4u32.to_le_bytes());
    put(&mut elf, HEADERS + 8, &kind.to_le_bytes());
    put(&mut elf, HEADERS + 12, b"Xen\0");
    put(&mut elf, HEADERS + 16, &KERNEL_ADDRESS.to_le_bytes());
    elf.extend_from_slice(code);
    elf
}

fn program_header(elf: &mut [u8], at: usize, kind: u32, offset: usize, size: usize) {
    put(elf, at, &kind.to_le_bytes());
    put(elf, at + 8, &(offset as u64).to_le_bytes());
    put(elf, at + 24, &u64::from(KERNEL_ADDRESS).to_le_bytes());
    put(elf, at + 32, &(size as u64).to_le_bytes());
    put(elf, at + 40, &(size as u64).to_le_bytes());
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

/// Linux, which `tests/run-all` names.
pub fn linux() -> PathBuf {
    std::env::var_os("CUBE_KERNEL")
        .expect("CUBE_KERNEL names the guest kernel; tests/run-all sets it")
        .into()
}

/// An initramfs (newc cpio) whose /init is this script for busybox's shell, with /proc and /sys mounted.
pub fn initramfs(script: &str) -> Vec<u8> {
    let busybox = std::fs::read("/bin/busybox").expect("busybox-static is installed");
    let init = format!(
        "#!/bin/busybox sh\nexport PATH=/bin\n\
         for name in cat dd grep mount reboot sh sleep ip head wc sync uname; do /bin/busybox ln -s busybox /bin/$name; done\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n{script}\n"
    );
    let mut archive = Vec::new();
    for name in ["bin", "dev", "proc", "sys", "mnt"] {
        entry(&mut archive, name, 0o40755, (0, 0), &[]);
    }
    entry(&mut archive, "dev/console", 0o20600, (5, 1), &[]);
    entry(&mut archive, "bin/busybox", 0o100755, (0, 0), &busybox);
    entry(&mut archive, "init", 0o100755, (0, 0), init.as_bytes());
    entry(&mut archive, "TRAILER!!!", 0, (0, 0), &[]);
    archive
}

fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        content.len() as u32,
        0,
        0,
        device.0,
        device.1,
        name.len() as u32 + 1,
        0,
    ];
    archive.extend_from_slice(b"070701");
    for field in fields {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// The program under test: the installed one, if there is one.
pub fn hypervisor() -> Command {
    let program = std::env::var_os("CUBE_HYPERVISOR")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_cube-hypervisor").into());
    Command::new(program)
}

/// A directory with the files of a machine in it.
pub struct Files {
    dir: TempDir,
}

impl Files {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn put(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// A configuration for a kernel that runs `code`, with `more` fields.
    pub fn config(&self, code: &[u8], more: Value) -> Value {
        let path = self.put("kernel", &kernel(code, true));
        merged(json!({"kernel": path, "memory_mib": 16}), more)
    }

    /// A configuration for Linux with this script.
    pub fn linux(&self, cmdline: &str, script: &str, more: Value) -> Value {
        let initramfs = self.put("initramfs", &initramfs(script));
        let cmdline = format!("quiet console=hvc0 reboot=k panic=-1 {cmdline}");
        let config = json!({
            "kernel": linux(), "initramfs": initramfs, "cmdline": cmdline,
            "memory_mib": 256, "console": "stdio",
        });
        merged(config, more)
    }

    /// Runs the machine alone.
    pub fn run(&self, config: &Value) -> Ended {
        self.start(config).wait()
    }

    /// Starts the machine alone. What it reads is empty.
    pub fn start(&self, config: &Value) -> Alone {
        let path = self.put("vm.json", config.to_string().as_bytes());
        let child = hypervisor()
            .arg("--config")
            .arg(path)
            .current_dir(self.dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Alone(child)
    }
}

pub fn merged(mut config: Value, more: Value) -> Value {
    let (Some(config_fields), Value::Object(more)) = (config.as_object_mut(), more) else {
        panic!("both are objects");
    };
    config_fields.extend(more);
    config
}

/// A machine that runs alone.
pub struct Alone(pub Child);

impl Alone {
    pub fn wait(self) -> Ended {
        self.0.wait_with_output().unwrap().into()
    }

    /// Waits until the guest has written `text`.
    pub fn read_until(&mut self, text: &str) {
        let mut got = Vec::new();
        let output = self.0.stdout.as_mut().unwrap();
        while !String::from_utf8_lossy(&got).contains(text) {
            let mut byte = [0];
            let count = output.read(&mut byte).unwrap();
            assert_eq!(count, 1, "ended after {:?}", String::from_utf8_lossy(&got));
            got.push(byte[0]);
        }
    }
}

/// How a machine that ran alone ended.
#[derive(Debug)]
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).replace('\r', ""),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// Wants this status, with one line on stderr that has all of `needles`.
    #[track_caller]
    pub fn fails(&self, status: ExitStatus, needles: &[&str]) {
        assert_eq!(self.status, Some(status.code().into()), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("cube-hypervisor: "), "{self:?}");
        for needle in needles {
            assert!(self.stderr.contains(needle), "no {needle:?} in {self:?}");
        }
    }

    /// Wants a reset by the guest, without a word on stderr.
    #[track_caller]
    pub fn resets(&self) {
        assert_eq!(self.status, Some(0), "{self:?}");
        assert_eq!(self.stderr, "", "{self:?}");
    }
}

/// A machine with an owner: the test.
pub struct Owned {
    pub socket: Option<OwnedFd>,
    pub child: Child,
}

impl Owned {
    /// Starts the hypervisor, and sends nothing.
    pub fn start() -> Self {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut command = hypervisor();
        let fd = theirs.as_raw_fd();
        command.arg("--control-fd").arg(fd.to_string());
        command.stderr(Stdio::null());
        // SAFETY: The closure only makes one system call.
        unsafe {
            command.pre_exec(move || {
                let result = libc::fcntl(fd, libc::F_SETFD, 0);
                if result < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
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
        assert_eq!(
            machine.ask(Request::Boot(Box::new(config)), &[]),
            Reply::Done
        );
        machine
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().unwrap()
    }

    pub fn ask(&self, request: Request, fds: &[&OwnedFd]) -> Reply {
        let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
        send(self.socket(), &request, &fds).unwrap();
        match receive(self.socket()).unwrap().unwrap().0 {
            FromHypervisor::Reply(reply) => reply,
            FromHypervisor::Event(event) => panic!("{event:?} and no reply"),
        }
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
        let exit = self.child.wait().unwrap();
        assert_eq!(exit.code(), Some(status.code().into()));
        (status, message, console)
    }
}
