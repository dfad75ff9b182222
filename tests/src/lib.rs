//! What the behaviour tests have in common: containers run through `ctr`, and a look at what
//! is left of them on the host.
//!
//! `tests/run-all` starts containerd and sets `CUBE_TEST_CTR` (the client), `CUBE_TEST_ADDRESS` (its
//! socket) and `CUBE_TEST_DIR` (a directory for files of the tests).

mod bundle;
mod containerd;
mod end;
mod events;
mod sandbox;
mod shared;
mod terminal;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub use bundle::{make_bundle, make_fifo, make_root, place, shell_bundle, small, write_config};
pub use containerd::Containerd;
pub use end::End;
pub use events::{Events, Told};
pub use sandbox::{Answer, CALL_LIMIT_SECONDS, Failure, Sandbox, Streams, context};
pub use shared::{Follower, Shared};
pub use terminal::Terminal;

/// The small image: busybox.
pub const BUSYBOX: &str = "localhost/cube/busybox:latest";

/// Debian's minimal system with git, sqlite3 and python3, for programs that want glibc.
pub const DEBIAN: &str = "localhost/cube/debian:latest";

/// Debian with systemd, runc, iproute2 and nftables, and a bundle of busybox for runc in /bundle.
pub const SYSTEM: &str = "localhost/cube/system:latest";

/// No command of a test takes longer; one that hangs ends with 124 or 137.
const LIMIT: &str = "400";

/// The value of a variable that `tests/run-all` sets.
pub fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this by tests/run-all"))
}

/// A directory of one test's own, removed when dropped.
pub struct TestDir(PathBuf);

impl TestDir {
    /// Makes it.
    pub fn new() -> Self {
        let path = Path::new(&setting("CUBE_TEST_DIR")).join(unique("dir"));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Default for TestDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A name that no other test uses.
pub fn unique(kind: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{kind}-{}-{n}", std::process::id())
}

/// A `ctr` command line, which fails if it takes too long.
pub fn ctr<S: AsRef<str>>(arguments: &[S]) -> Command {
    let mut command = Command::new("timeout");
    // A client that hands signals on to its container does not end by SIGTERM.
    command.args(["--kill-after=10", LIMIT]);
    command.args(client());
    command.args(arguments.iter().map(AsRef::as_ref));
    command.stdin(Stdio::null());
    command
}

/// The words that a `ctr` command line begins with.
fn client() -> [String; 3] {
    let (ctr, address) = (setting("CUBE_TEST_CTR"), setting("CUBE_TEST_ADDRESS"));
    [ctr, "--address".to_owned(), address]
}

/// Runs `ctr` with these arguments; its result, whatever it is.
pub fn try_ctr<S: AsRef<str>>(arguments: &[S]) -> Ended {
    Ended::from(ctr(arguments).output().unwrap())
}

/// Runs `ctr` with these arguments, successfully; what it printed.
pub fn must_ctr<S: AsRef<str>>(arguments: &[S]) -> String {
    try_ctr(arguments).success()
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: i32,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it complained of.
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// What it printed, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// What it printed, and that it ended well.
    pub fn success(self) -> String {
        assert_eq!(
            self.status,
            0,
            "stdout: {}\nstderr: {}",
            self.text(),
            self.stderr
        );
        self.text()
    }
}

/// A container to be run.
pub struct Container {
    /// Its id, also its task's and, without a group, its sandbox's.
    pub id: String,
    image: &'static str,
    options: Vec<String>,
    runtime: String,
    snapshotter: Option<String>,
}

impl Container {
    /// A container of the small image.
    pub fn new() -> Self {
        Self {
            id: unique("c"),
            image: BUSYBOX,
            options: Vec::new(),
            runtime: runtime(),
            snapshotter: None,
        }
    }

    /// Of another image.
    pub fn image(mut self, image: &'static str) -> Self {
        self.image = image;
        self
    }

    /// On another snapshotter than containerd's own choice.
    pub fn snapshotter(mut self, name: &str) -> Self {
        self.snapshotter = Some(name.to_owned());
        self
    }

    /// By another runtime than that under test.
    pub fn runtime(mut self, name: &str) -> Self {
        self.runtime = name.to_owned();
        self
    }

    /// With another option of `ctr run`.
    pub fn option(mut self, name: &str, value: &str) -> Self {
        self.options.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// In the sandbox of this name, which is that of its first container.
    pub fn in_group(self, group: &str) -> Self {
        let annotation = format!("io.containerd.runc.v2.group={group}");
        self.option("--annotation", &annotation)
    }

    /// With another option of `ctr run` that has no value.
    pub fn flag(mut self, name: &str) -> Self {
        self.options.push(name.to_owned());
        self
    }

    /// With a setting of cube for this sandbox.
    pub fn setting(self, key: &str, value: &str) -> Self {
        self.option("--annotation", &format!("io.cube.{key}={value}"))
    }

    /// The `ctr run` command line, `--rm` or `--detach` or neither being `how`.
    pub fn command(&self, how: &[&str], arguments: &[&str]) -> Command {
        let mut all = vec![
            "run".to_owned(),
            "--runtime".to_owned(),
            self.runtime.clone(),
        ];
        all.extend(
            self.snapshotter
                .iter()
                .flat_map(|s| ["--snapshotter".to_owned(), s.clone()]),
        );
        all.extend(self.options.clone());
        all.extend(
            how.iter()
                .chain([self.image, &self.id].iter())
                .chain(arguments)
                .map(|s| (*s).to_owned()),
        );
        ctr(&all)
    }

    /// Runs it to its end and removes it.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        Ended::from(self.command(&["--rm"], arguments).output().unwrap())
    }

    /// Runs a shell script in it to its end and removes it.
    pub fn sh(&self, script: &str) -> Ended {
        self.run(&["sh", "-c", script])
    }

    /// Runs it to its end with this standard input, and removes it.
    pub fn run_with_input(&self, arguments: &[&str], input: Vec<u8>) -> Ended {
        let mut command = self.command(&["--rm"], arguments);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A container that does not read it all breaks the pipe: that is for the test to judge.
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let ended = Ended::from(child.wait_with_output().unwrap());
        let _ = writer.join();
        ended
    }

    /// Starts it in the background.
    pub fn start(self, arguments: &[&str]) -> Running {
        let ended = Ended::from(self.command(&["--detach"], arguments).output().unwrap());
        ended.success();
        Running { id: self.id }
    }
}

impl Default for Container {
    fn default() -> Self {
        Self::new()
    }
}

/// The runtime under test; a peer's, to see whether a test is right.
pub fn runtime() -> String {
    std::env::var("CUBE_TEST_RUNTIME").unwrap_or_else(|_| "io.containerd.cube.v1".to_owned())
}

/// A running container, killed and removed when dropped.
pub struct Running {
    /// Its id.
    pub id: String,
}

impl Running {
    /// `ctr task ACTION … ID`.
    pub fn task(&self, action: &str, options: &[&str]) -> Ended {
        let mut arguments = vec!["task", action];
        arguments.extend(options);
        arguments.push(&self.id);
        try_ctr(&arguments)
    }

    /// The `ctr task exec` command line.
    pub fn exec_command(&self, options: &[&str], arguments: &[&str]) -> Command {
        let exec_id = unique("e");
        let mut all = vec!["task", "exec", "--exec-id", &exec_id];
        all.extend(options);
        all.push(&self.id);
        all.extend(arguments);
        ctr(&all)
    }

    /// Runs another program in it to its end.
    pub fn exec(&self, arguments: &[&str]) -> Ended {
        Ended::from(self.exec_command(&[], arguments).output().unwrap())
    }

    /// Starts an exec that sleeps, and waits until it runs: its id and its client.
    pub fn sleeping_exec(&self) -> (String, Child) {
        let exec_id = unique("e");
        let mut arguments = vec!["task", "exec", "--exec-id", &exec_id, &self.id];
        arguments.extend(["sh", "-c", "echo up; exec sleep 1000"]);
        let mut client = ctr(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut up = [0; 3];
        client.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        (exec_id, client)
    }

    /// Sends an exec a signal.
    pub fn kill_exec(&self, exec_id: &str, signal: &str) {
        let to = ["--exec-id", exec_id, "--signal", signal, &self.id];
        must_ctr(&[&["task", "kill"], &to[..]].concat());
    }

    /// Waits for its end in the background, as `ctr task attach` does.
    pub fn attach(&self) -> Child {
        let mut command = ctr(&["task", "attach", &self.id]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    /// The task's process on the host.
    pub fn pid(&self) -> u32 {
        let list = must_ctr(&["task", "list"]);
        let line = list
            .lines()
            .find(|l| l.split_whitespace().next() == Some(&self.id));
        let line = line.unwrap_or_else(|| panic!("no task {}: {list}", self.id));
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        try_ctr(&["task", "delete", "--force", &self.id]);
        try_ctr(&["container", "delete", &self.id]);
    }
}

/// Where no containerd is.
pub const NO_CONTAINERD: &str = "/no/such/containerd";

/// The shim's program as the containerd at `address` starts it for the sandbox `id`, with an action.
pub fn shim(address: &str, id: &str, bundle: &Path, action: &str) -> Command {
    let hypervisor = setting("CUBE_HYPERVISOR");
    let mut shim = Command::new(hypervisor.replace("cube-hypervisor", "containerd-shim-cube-v1"));
    shim.args(["-namespace", "default", "-address", address])
        .args(["-publish-binary", "containerd", "-id", id, "-bundle"])
        .arg(bundle)
        .arg(action)
        .current_dir(bundle)
        .env("TTRPC_ADDRESS", format!("{address}.ttrpc"))
        .env("GRPC_ADDRESS", address)
        .stdin(Stdio::null());
    shim
}

/// Everything on the host that has the sandbox's id in its name: processes (by command line),
/// mounts, sockets, directories of state, cgroups.
pub fn traces_of(id: &str) -> Vec<String> {
    let mut traces = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let is_ours = pid == std::process::id().to_string();
        let command_line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command_line = String::from_utf8_lossy(&command_line).replace('\0', " ");
        if !is_ours && pid.bytes().all(|b| b.is_ascii_digit()) && mentions(&command_line, id) {
            traces.push(format!("process {pid}: {command_line}"));
        }
    }
    for (kind, list) in [
        ("mount", "/proc/self/mountinfo"),
        ("socket", "/proc/net/unix"),
    ] {
        let list = fs::read_to_string(list).unwrap();
        traces.extend(
            list.lines()
                .filter(|l| mentions(l, id))
                .map(|l| format!("{kind}: {l}")),
        );
    }
    for root in [
        "/run/cube",
        "/run/containerd",
        "/sys/fs/cgroup",
        "/run/netns",
    ] {
        find(Path::new(root), id, &mut traces);
    }
    traces
}

/// Waits for the sandbox's processes to end, whose end is an event, and then wants nothing left.
pub fn assert_no_traces_of(id: &str) {
    let shims = Command::new("pgrep")
        .args(["-f", &format!("{id}( |$|/)")])
        .output()
        .unwrap();
    for pid in String::from_utf8_lossy(&shims.stdout).split_whitespace() {
        // The shim goes after it has answered.
        let end = End::of(pid.parse().unwrap());
        assert!(
            end.is_none_or(|end| end.comes_within(Duration::from_secs(10))),
            "process {pid} of {id} does not end"
        );
    }
    let traces = traces_of(id);
    assert!(traces.is_empty(), "left of {id}: {traces:#?}");
}

fn find(directory: &Path, id: &str, traces: &mut Vec<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        // A detached client's FIFOs are its own, and stay when a shim is gone before it: with runc too.
        if entry.path() == Path::new("/run/containerd/fifo") {
            continue;
        }
        if mentions(&entry.file_name().to_string_lossy(), id) {
            traces.push(format!("file {}", entry.path().display()));
        } else if entry.file_type().is_ok_and(|t| t.is_dir()) {
            find(&entry.path(), id, traces);
        }
    }
}

/// Whether `text` has the id as a word: c-1-1 is not part of c-1-10.
pub fn mentions(text: &str, id: &str) -> bool {
    text.match_indices(id).any(|(at, _)| {
        let next = text[at + id.len()..].bytes().next();
        !next.is_some_and(|b| b.is_ascii_digit())
    })
}
