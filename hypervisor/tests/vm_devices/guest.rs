//! A machine whose init is a shell: commands go in by its console, what they print comes out of it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use cube_hypervisor_api::config::Console;
use cube_hypervisor_api::control::{FromHypervisor, Reply, Request, receive, send};
use cube_hypervisor_api::{ExitStatus as End, VmConfig};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tempfile::TempDir;

/// A nested host is slow, and so may its disk be; a machine that hangs ends the test all the same.
const PATIENCE: Duration = Duration::from_secs(300);

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
stty -echo -onlcr
echo "@ready"
while IFS= read -r line; do
    eval "$line"
    status=$?
    # What was printed may have ended within a line.
    printf '\n@status %s\n' $status
done
"#;

/// A running machine.
pub struct Guest {
    process: Child,
    control: OwnedFd,
    input: ChildStdin,
    lines: Receiver<String>,
    errors: Option<thread::JoinHandle<String>>,
}

/// Whether there is a KVM to run on; a test that needs one says so and ends otherwise.
pub fn has_kvm(test: &str) -> bool {
    let has = std::env::var_os("CUBE_TEST_KVM").is_some();
    if !has {
        println!("{test}: not run, it needs CUBE_TEST_KVM=1 and CUBE_KERNEL");
    }
    has
}

/// A machine of 256 MiB with the kernel of the tests and the shell as init.
pub fn config() -> VmConfig {
    let kernel = std::env::var_os("CUBE_KERNEL").expect("CUBE_KERNEL names the guest kernel");
    let mut config: VmConfig = serde_json::from_str(r#"{"kernel": "/"}"#).unwrap();
    config.kernel = PathBuf::from(kernel);
    config.memory_mib = 256;
    config.cmdline = "console=hvc0 reboot=k panic=-1 quiet".into();
    config.console = Console::Stdio;
    config
}

pub fn hypervisor() -> Command {
    let installed = std::env::var_os("CUBE_HYPERVISOR").map(PathBuf::from);
    let built = || PathBuf::from(env!("CARGO_BIN_EXE_cube-hypervisor"));
    Command::new(installed.unwrap_or_else(built))
}

impl Guest {
    /// Boots the machine and waits for its shell.
    pub fn boot(mut config: VmConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        config.initramfs = Some(initramfs(&dir));
        let (control, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut command = hypervisor();
        command
            .arg("--control-fd")
            .arg(theirs.as_raw_fd().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let inherited = theirs.as_raw_fd();
        // SAFETY: fcntl may be called between fork and exec; it touches no memory.
        unsafe {
            command.pre_exec(move || match libc::fcntl(inherited, libc::F_SETFD, 0) {
                0.. => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut process = command.spawn().unwrap();
        drop(theirs);
        let (sender, lines) = channel();
        let output = process.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n') {
                let line = String::from_utf8_lossy(&line.unwrap()).into_owned();
                let line = line.trim_end_matches('\r').to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let stderr = process.stderr.take().unwrap();
        let errors = thread::spawn(move || {
            let mut all = String::new();
            for line in BufReader::new(stderr).lines() {
                let line = line.unwrap();
                println!("hypervisor: {line}");
                all.push_str(&line);
                all.push('\n');
            }
            all
        });
        let mut guest = Self {
            input: process.stdin.take().unwrap(),
            process,
            control,
            lines,
            errors: Some(errors),
        };
        guest.ask(&Request::Boot(Box::new(config)), &[]);
        while guest.line() != "@ready" {}
        guest
    }

    /// Asks the hypervisor for something that has to work.
    pub fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.request(request, fds), Reply::Done);
    }

    /// Asks the hypervisor for something.
    pub fn request(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        send(&self.control, request, fds).unwrap();
        match receive(&self.control).unwrap() {
            Some((FromHypervisor::Reply(reply), _)) => reply,
            other => panic!("no reply but {other:?}"),
        }
    }

    /// Runs a command line in the guest: what it printed, and its status.
    pub fn run(&mut self, command: &str) -> (String, i32) {
        self.start(command);
        self.finish()
    }

    /// Begins a command line in the guest, to be ended by [`finish`](Self::finish).
    pub fn start(&mut self, command: &str) {
        println!("# {command}");
        writeln!(self.input, "{command}").unwrap();
    }

    pub fn finish(&mut self) -> (String, i32) {
        let mut text = String::new();
        loop {
            let line = self.line();
            println!("{line}");
            if let Some(status) = line.strip_prefix("@status ") {
                return (text.trim_end().to_owned(), status.parse().unwrap());
            }
            text.push_str(&line);
            text.push('\n');
        }
    }

    /// Runs a command line that has to succeed: what it printed.
    pub fn ok(&mut self, command: &str) -> String {
        let (text, status) = self.run(command);
        assert_eq!(status, 0, "{command}: {text}");
        text
    }

    /// Runs a command line that has to fail.
    pub fn fails(&mut self, command: &str) -> String {
        let (text, status) = self.run(command);
        assert_ne!(status, 0, "{command}: {text}");
        text
    }

    /// Waits in the guest until `condition`, a test without side effects, holds.
    pub fn wait_for(&mut self, condition: &str) {
        self.ok(&format!(
            "for i in $(seq 200); do {condition} && break; usleep 50000; done; {condition}"
        ));
    }

    /// Lets the guest reset itself. What the hypervisor wrote to standard error.
    pub fn end(mut self) -> String {
        writeln!(self.input, "reboot -f").unwrap();
        let status = self.process.wait().unwrap();
        assert_eq!(status.code(), Some(End::GuestReset.code().into()));
        self.errors.take().unwrap().join().unwrap()
    }

    fn line(&mut self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .expect("the guest says nothing any more")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // After `end` there is nothing left to be killed.
        let _ = self.process.kill();
        let _: Option<ExitStatus> = self.process.wait().ok();
    }
}

/// An initramfs of a busybox and the script above. Written here, without any process: a nested host is slow at starting them.
fn initramfs(dir: &TempDir) -> PathBuf {
    let busybox = fs::read("/bin/busybox").expect("Debian's busybox-static is installed");
    let mut archive = Vec::new();
    for directory in ["bin", "dev", "proc", "sys", "tmp"] {
        member(&mut archive, directory, 0o040_755, &[]);
    }
    member(&mut archive, "bin/busybox", 0o100_755, &busybox);
    member(&mut archive, "init", 0o100_755, INIT.as_bytes());
    member(&mut archive, "TRAILER!!!", 0, &[]);
    let image = dir.path().join("initramfs");
    fs::write(&image, archive).unwrap();
    image
}

/// A member of a newc archive (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
fn member(archive: &mut Vec<u8>, name: &str, mode: u32, bytes: &[u8]) {
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        bytes.len() as u32,
        0,
        0,
        0,
        0,
        name.len() as u32 + 1,
        0,
    ];
    archive.extend(b"070701");
    for field in fields {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(bytes);
    archive.resize(archive.len().next_multiple_of(4), 0);
}
