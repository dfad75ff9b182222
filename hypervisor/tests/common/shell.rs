//! A machine whose init is a shell: commands go in by its console, what they print comes out of it.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::process::{ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use cube_hypervisor_api::control::{Event, FromHypervisor, Reply, Request};
use cube_hypervisor_api::{ExitStatus as End, VmConfig};
use serde_json::json;

use super::{Files, Initramfs, Owned, hypervisor, linux};

/// A nested host is slow, and so may its disk be; a machine that hangs ends the test all the same.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs what it reads, line by line.
const LOOP: &str = r#"
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
pub struct Shell {
    machine: Owned,
    input: ChildStdin,
    lines: Receiver<String>,
    errors: Option<thread::JoinHandle<String>>,
    _files: Files,
}

impl Shell {
    /// A machine of 256 MiB with the kernel of the tests.
    pub fn config() -> VmConfig {
        let config = json!({
            "kernel": linux(),
            "cmdline": "console=hvc0 reboot=k panic=-1 quiet",
            "memory_mib": 256,
            "console": "stdio",
        });
        serde_json::from_value(config).unwrap()
    }

    /// Boots the machine and waits for its shell.
    pub fn boot(mut config: VmConfig) -> Self {
        let files = Files::new();
        config.initramfs = Some(files.put("initramfs", &Initramfs::busybox(LOOP)));
        let mut command = hypervisor();
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut machine = Owned::spawn(command);
        let (sender, lines) = channel();
        let output = machine.child.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n') {
                let line = String::from_utf8_lossy(&line.unwrap()).into_owned();
                let line = line.trim_end_matches('\r').to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let stderr = machine.child.stderr.take().unwrap();
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
        let mut shell = Self {
            input: machine.child.stdin.take().unwrap(),
            machine,
            lines,
            errors: Some(errors),
            _files: files,
        };
        shell.done(&Request::Boot(Box::new(config)), &[]);
        while shell.line() != "@ready" {}
        shell
    }

    /// Asks the hypervisor for something that has to work.
    #[track_caller]
    pub fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) {
        self.machine.done(request, fds);
    }

    /// Asks the hypervisor for something.
    pub fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        self.machine.ask(request, fds)
    }

    /// Takes the disk out of `slot` and waits until it is closed.
    #[track_caller]
    pub fn detach(&self, slot: u8) {
        self.machine.detach(slot);
    }

    /// Waits for what the hypervisor says unasked.
    pub fn event(&self) -> Event {
        match self.machine.packet() {
            FromHypervisor::Event(event) => event,
            reply => panic!("{reply:?} to no request"),
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
        let status = self.machine.child.wait().unwrap();
        assert_eq!(status.code(), Some(End::GuestReset.code().into()));
        self.errors.take().unwrap().join().unwrap()
    }

    fn line(&mut self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .expect("the guest says nothing any more")
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // After `end` there is nothing left to be killed.
        let _ = self.machine.child.kill();
        let _: Option<ExitStatus> = self.machine.child.wait().ok();
    }
}
