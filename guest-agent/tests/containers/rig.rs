//! The agent in a process of its own, and the host's side of its conversation.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::{Arc, Mutex};

use cube_agent::container::Settings;
use cube_agent::helper::parent::Launcher;
use cube_agent_protocol::agent::{
    ConfigureRequest, ContainerRequest, CreateContainerRequest, Empty, ExecRequest, Process,
    ProcessRequest, ResizePtyRequest, Share, SignalRequest, StatsResponse, Stdio, UpdateRequest,
};
use cube_agent_protocol::agent_ttrpc::AgentClient;
use cube_agent_protocol::{AGENT_PORT, SHARE_PATH, SHARE_TAG, STREAM_PORT, STREAM_TOKEN_LEN};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use ttrpc::Code;

const AGENT_DIR: &str = "CUBE_AGENT_TEST_DIR";

pub type Failure = (Code, String);

/// The address of a guest's network interface.
pub const MAC: &str = "02:00:00:00:00:01";

/// A test and its name.
pub type Test = (&'static str, fn(&Harness));

/// Runs tests one after the other, or the agent if that is what this process is for.
pub fn run(tests: &[Test], guest_tests: &[Test]) -> ExitCode {
    if let Some(dir) = std::env::var_os(AGENT_DIR) {
        return run_agent(Path::new(&dir));
    }
    let filter = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    if std::env::args().any(|argument| argument == "--list") {
        for (name, _) in tests {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    assert!(
        nix::unistd::geteuid().is_root(),
        "These tests make containers: run them as root"
    );
    prepare_mounts();
    let guest = std::env::var_os("CUBE_TEST_KVM").map(|_| Guest::new());
    let here = tests.iter().map(|test| (None, test, ""));
    let there = guest.iter().flat_map(|guest| {
        let tests = tests.iter().chain(guest_tests);
        tests.map(move |test| (Some(guest), test, " in a guest"))
    });
    let mut failed = 0;
    for (guest, (name, test), place) in here.chain(there) {
        let name = format!("{name}{place}");
        if filter
            .as_ref()
            .is_some_and(|filter| !name.contains(filter.as_str()))
        {
            continue;
        }
        let harness = Harness::new(guest);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&harness)));
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {word}");
        failed += usize::from(outcome.is_err());
    }
    println!("{failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// A mount namespace of our own, with the cgroup v2 tree where the agent expects it.
fn prepare_mounts() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        mount(
            Some("cgroup2"),
            "/sys/fs/cgroup",
            Some("cgroup2"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
    }
}

fn run_agent(dir: &Path) -> ExitCode {
    // What PID 1 is without asking.
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    cube_agent::logger::start(log::LevelFilter::Warn);
    cube_agent::cgroup::Cgroup::create(&cgroup_of(dir))
        .unwrap()
        .delegate()
        .unwrap();
    let sockets = dir.to_owned();
    let settings = Settings {
        dir: dir.join("containers"),
        cgroup: cgroup_of(dir),
        launcher: Launcher {
            program: agent_program(),
        },
        connect: Box::new(move |port| {
            let stream =
                std::os::unix::net::UnixStream::connect(sockets.join(format!("v_{port}")))?;
            stream.set_nonblocking(true)?;
            Ok(stream.into())
        }),
    };
    cube_agent::serve::run(settings).unwrap();
    ExitCode::SUCCESS
}

fn agent_program() -> PathBuf {
    std::env::var_os("CUBE_TEST_AGENT")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_cube-agent").into())
        .into()
}

fn cgroup_of(dir: &Path) -> String {
    format!(
        "/cube-{}",
        dir.file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .trim_start_matches('.')
    )
}

/// What guests are made of: `CUBE_KERNEL`, `CUBE_HYPERVISOR`, and an initramfs of this agent.
pub struct Guest {
    kernel: PathBuf,
    hypervisor: PathBuf,
    initramfs: tempfile::NamedTempFile,
}

impl Guest {
    fn new() -> Self {
        let needed = |name: &str| {
            PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")))
        };
        let initramfs = tempfile::NamedTempFile::new().unwrap();
        let agent = tempfile::NamedTempFile::new().unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new("strip")
            .arg("-o")
            .args([agent.path(), &agent_program()]));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("initramfs");
        run(Command::new(script).args([agent.path(), initramfs.path()]));
        Self {
            kernel: needed("CUBE_KERNEL"),
            hypervisor: needed("CUBE_HYPERVISOR"),
            initramfs,
        }
    }

    fn boot(&self, dir: &Path) -> Child {
        let config = json!({
            "kernel": self.kernel,
            "initramfs": self.initramfs.path(),
            "cmdline": "console=hvc0 reboot=k panic=-1 quiet maxcpus=1",
            "vcpus": 2,
            "networks": [{"tap": "cube-test0", "mac": MAC}],
            "memory_mib": 512,
            "vsock": {"path": dir.join("v")},
            "shares": [{"tag": SHARE_TAG, "path": dir}],
            "console": "log",
        });
        let file = dir.join("vm.json");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = Command::new(&self.hypervisor);
        command.arg("--config").arg(&file).spawn().unwrap()
    }
}

/// A directory with a root file system, and the agent, here or in a guest.
pub struct Harness<'a> {
    dir: tempfile::TempDir,
    guest: Option<&'a Guest>,
}

impl<'a> Harness<'a> {
    fn new(guest: Option<&'a Guest>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("containers")).unwrap();
        // A file system of its own, for others than root as well.
        std::fs::create_dir(dir.path().join("rootfs")).unwrap();
        mount(
            Some("rootfs"),
            &dir.path().join("rootfs"),
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )
        .unwrap();
        make_rootfs(&dir.path().join("rootfs"));
        Self { dir, guest }
    }

    /// Runs a test with an agent.
    pub fn block<F: Future<Output = ()>>(&self, test: impl Fn(Agent) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (agent, mut child) = Agent::launch(self.dir.path(), self.guest).await;
            let test = tokio::time::timeout(std::time::Duration::from_secs(600), test(agent));
            test.await.expect("the test takes too long");
            // Its connection has ended with the test.
            let status = tokio::task::spawn_blocking(move || child.wait().unwrap());
            let status = tokio::time::timeout(std::time::Duration::from_secs(60), status);
            assert!(status.await.expect("the agent lives on").unwrap().success());
        });
        let left = std::fs::read_dir(self.dir.path().join("containers"))
            .unwrap()
            .count();
        assert_eq!(left, 0, "directories of containers are left");
        let cgroup =
            Path::new("/sys/fs/cgroup").join(cgroup_of(self.dir.path()).trim_start_matches('/'));
        if cgroup.exists() {
            std::fs::remove_dir(&cgroup).expect("cgroups are left");
        }
    }
}

impl Drop for Harness<'_> {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(
            &self.dir.path().join("rootfs"),
            nix::mount::MntFlags::MNT_DETACH,
        );
    }
}

fn make_rootfs(root: &Path) {
    for dir in ["bin", "etc", "proc", "sys", "dev", "tmp"] {
        std::fs::create_dir(root.join(dir)).unwrap();
    }
    std::fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\n",
    )
    .unwrap();
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    let list = Command::new("/bin/busybox").arg("--list").output().unwrap();
    for applet in String::from_utf8(list.stdout)
        .unwrap()
        .lines()
        .filter(|name| *name != "busybox")
    {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    // For everybody to write.
    std::os::unix::fs::symlink("/bin", root.join("usr")).unwrap();
}

/// A specification like containerd's for a lone container.
pub fn spec(args: &[&str]) -> Value {
    json!({
        "ociVersion": "1.1.0",
        "root": {"path": "rootfs"},
        "process": exec_process(args),
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro", "nosuid", "noexec", "nodev"]}
        ],
        "linux": {
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "cgroupsPath": "/default/x",
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}, {"type": "cgroup"}],
            "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
        }
    })
}

/// A process object.
pub fn exec_process(args: &[&str]) -> Value {
    let capabilities = ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID", "CAP_SETGID"];
    json!({
        "user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/usr/bin:/bin", "B=2"], "cwd": "/",
        "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities}
    })
}

/// The host's side.
pub struct Agent {
    client: AgentClient,
    dir: PathBuf,
    /// Whether it is PID 1 of a guest.
    pub in_guest: bool,
    streams: Arc<Mutex<HashMap<Vec<u8>, UnixStream>>>,
    arrived: Arc<tokio::sync::Notify>,
}

impl Agent {
    async fn launch(dir: &Path, guest: Option<&Guest>) -> (Self, Child) {
        let bind = |port: u32| {
            let path = dir.join(format!("v_{port}"));
            UnixListener::bind(path).unwrap()
        };
        let control = bind(AGENT_PORT);
        let listener = bind(STREAM_PORT);
        let mut child = match guest {
            Some(guest) => guest.boot(dir),
            None => Command::new(std::env::current_exe().unwrap())
                .env(AGENT_DIR, dir)
                .spawn()
                .unwrap(),
        };
        let accepted = tokio::time::timeout(std::time::Duration::from_secs(60), control.accept());
        let Ok(Ok((connection, _))) = accepted.await else {
            child.kill().unwrap();
            panic!("the agent does not connect");
        };
        let socket = ttrpc::asynchronous::transport::Socket::from(connection);
        let streams: Arc<Mutex<HashMap<_, _>>> = Arc::default();
        let arrived = Arc::new(tokio::sync::Notify::new());
        tokio::spawn({
            let (streams, arrived) = (streams.clone(), arrived.clone());
            async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let mut token = [0; STREAM_TOKEN_LEN];
                    stream.read_exact(&mut token).await.unwrap();
                    streams.lock().unwrap().insert(token.to_vec(), stream);
                    arrived.notify_waiters();
                }
            }
        });
        let agent = Self {
            client: AgentClient::new(ttrpc::asynchronous::Client::new(socket)),
            dir: dir.to_owned(),
            in_guest: guest.is_some(),
            streams,
            arrived,
        };
        if agent.in_guest {
            agent.configure(&base_configuration()).await.unwrap();
        }
        (agent, child)
    }

    /// Streams for a process.
    pub fn streams(&self, terminal: bool) -> Io {
        let token = || {
            (0..STREAM_TOKEN_LEN)
                .map(|_| random_byte())
                .collect::<Vec<u8>>()
        };
        let mut stdio = Stdio::new();
        stdio.stdin = token();
        stdio.stdout = token();
        stdio.stderr = token();
        stdio.terminal = terminal;
        if terminal {
            (stdio.width, stdio.height) = (80, 24);
        }
        Io {
            stdio,
            streams: self.streams.clone(),
            arrived: self.arrived.clone(),
        }
    }

    /// Nothing but /dev/null.
    pub fn no_streams(&self) -> Io {
        Io {
            stdio: Stdio::new(),
            ..self.streams(false)
        }
    }

    pub async fn create(&self, id: &str, spec: &Value, io: &Io) -> Result<u32, Failure> {
        let mut request = CreateContainerRequest::new();
        request.id = id.into();
        request.spec = serde_json::to_vec(spec).unwrap();
        request.rootfs = if self.in_guest {
            format!("{SHARE_PATH}/rootfs")
        } else {
            self.dir.join("rootfs").to_str().unwrap().into()
        };
        request.stdio = Some(io.stdio.clone()).into();
        let created = self.client.create_container(context(), &request).await;
        created.map(|created| created.pid).map_err(failure)
    }

    pub async fn configure(&self, request: &ConfigureRequest) -> Result<(), Failure> {
        self.client
            .configure(context(), request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn start(&self, id: &str) -> Result<(), Failure> {
        self.client
            .start_container(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn exec(
        &self,
        id: &str,
        exec: &str,
        process: &Value,
        io: &Io,
    ) -> Result<u32, Failure> {
        let mut request = ExecRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        request.process = serde_json::to_vec(process).unwrap();
        request.stdio = Some(io.stdio.clone()).into();
        let created = self.client.exec(context(), &request).await;
        created.map(|created| created.pid).map_err(failure)
    }

    pub async fn wait(&self, id: &str, exec: &str) -> Result<u32, Failure> {
        let exit = self.client.wait(context(), &process(id, exec)).await;
        exit.map(|exit| exit.exit_status).map_err(failure)
    }

    pub async fn delete(&self, id: &str, exec: &str) -> Result<u32, Failure> {
        let exit = self.client.delete(context(), &process(id, exec)).await;
        exit.map(|exit| exit.exit_status).map_err(failure)
    }

    pub async fn signal(
        &self,
        id: &str,
        exec: &str,
        signal: u32,
        all: bool,
    ) -> Result<(), Failure> {
        let mut request = SignalRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        request.signal = signal;
        request.all = all;
        self.client
            .signal(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn close_stdin(&self, id: &str, exec: &str) -> Result<(), Failure> {
        self.client
            .close_stdin(context(), &process(id, exec))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn resize(
        &self,
        id: &str,
        exec: &str,
        width: u32,
        height: u32,
    ) -> Result<(), Failure> {
        let mut request = ResizePtyRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        (request.width, request.height) = (width, height);
        self.client
            .resize_pty(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn pause(&self, id: &str) -> Result<(), Failure> {
        self.client
            .pause(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn resume(&self, id: &str) -> Result<(), Failure> {
        self.client
            .resume(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn list(&self, id: &str) -> Vec<Process> {
        self.client
            .list_processes(context(), &container(id))
            .await
            .unwrap()
            .processes
    }

    pub async fn stats(&self, id: &str) -> Result<StatsResponse, Failure> {
        self.client
            .stats(context(), &container(id))
            .await
            .map_err(failure)
    }

    pub async fn update(&self, id: &str, resources: &Value) -> Result<(), Failure> {
        let mut request = UpdateRequest::new();
        request.id = id.into();
        request.resources = serde_json::to_vec(resources).unwrap();
        self.client
            .update(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn drop_caches(&self) -> Result<(), Failure> {
        let empty = Empty::new();
        self.client
            .drop_caches(context(), &empty)
            .await
            .map(drop)
            .map_err(failure)
    }

    /// The answer may be lost with the machine.
    pub async fn shutdown(&self) {
        let _ = self.client.shutdown(context(), &Empty::new()).await;
    }

    /// Creates and starts a container without streams.
    pub async fn running(&self, id: &str, args: &[&str]) -> u32 {
        let pid = self
            .create(id, &spec(args), &self.no_streams())
            .await
            .unwrap();
        self.start(id).await.unwrap();
        pid
    }

    /// Kills and deletes a container.
    pub async fn end(&self, id: &str) {
        self.signal(id, "", 9, true).await.unwrap();
        assert_eq!(self.wait(id, "").await.unwrap(), 137);
        self.delete(id, "").await.unwrap();
    }

    /// A container from its create to its delete; its status and its output.
    pub async fn run(&self, id: &str, spec: &Value) -> (u32, String) {
        let io = self.streams(false);
        self.create(id, spec, &io).await.unwrap();
        self.start(id).await.unwrap();
        let (out, err) = (io.stdout().await, io.stderr().await);
        let (out, err) = tokio::join!(out.collect(), err.collect());
        assert_eq!(String::from_utf8_lossy(&err), "");
        let status = self.wait(id, "").await.unwrap();
        self.delete(id, "").await.unwrap();
        (status, String::from_utf8(out).unwrap())
    }

    /// An exec from its start to its end.
    pub async fn exec_collect(&self, id: &str, exec: &str, process: &Value) -> (u32, String) {
        let io = self.streams(false);
        self.exec(id, exec, process, &io).await.unwrap();
        let out = io.stdout().await.collect().await;
        let status = self.wait(id, exec).await.unwrap();
        (status, String::from_utf8(out).unwrap())
    }

    /// Waits until a file is in the root file system.
    pub async fn wait_for_file(&self, name: &str) {
        self.until(async || self.dir.join("rootfs").join(name).exists())
            .await;
    }

    pub fn remove_file(&self, name: &str) {
        std::fs::remove_file(self.dir.join("rootfs").join(name)).unwrap();
    }

    /// Waits for a state of the container that nothing announces.
    pub async fn until(&self, reached: impl AsyncFn() -> bool) {
        while !reached().await {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Whether limits can be set on this machine.
    pub fn has_controllers(&self) -> bool {
        if self.in_guest {
            return true;
        }
        let text = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap();
        text.contains("memory") && text.contains("pids")
    }

    /// Of containers, in the file system and among processes.
    pub async fn nothing_left(&self) {
        let containers = std::fs::read_dir(self.dir.join("containers"))
            .unwrap()
            .count();
        assert_eq!(containers, 0);
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("/containers/"), "{mounts}");
    }
}

/// What a shim tells a fresh guest.
fn base_configuration() -> ConfigureRequest {
    let mut share = Share::new();
    share.tag = SHARE_TAG.into();
    share.path = SHARE_PATH.into();
    let mut request = ConfigureRequest::new();
    request.shares = vec![share];
    request.entropy = (0..32).map(|_| random_byte()).collect();
    request.wall_clock_ns = cube_agent::reaper::wall_clock_ns();
    request
}

fn random_byte() -> u8 {
    use std::io::Read;
    let mut byte = [0];
    std::fs::File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut byte)
        .unwrap();
    byte[0]
}

fn context() -> ttrpc::context::Context {
    ttrpc::context::with_duration(std::time::Duration::ZERO)
}

fn container(id: &str) -> ContainerRequest {
    let mut request = ContainerRequest::new();
    request.id = id.into();
    request
}

fn process(id: &str, exec: &str) -> ProcessRequest {
    let mut request = ProcessRequest::new();
    request.container_id = id.into();
    request.exec_id = exec.into();
    request
}

fn failure(error: ttrpc::Error) -> Failure {
    match error {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message),
        other => panic!("{other}"),
    }
}

/// The streams of one process.
pub struct Io {
    stdio: Stdio,
    streams: Arc<Mutex<HashMap<Vec<u8>, UnixStream>>>,
    arrived: Arc<tokio::sync::Notify>,
}

impl Io {
    pub async fn stdin(&self) -> Stream {
        self.take(&self.stdio.stdin).await
    }

    pub async fn stdout(&self) -> Stream {
        self.take(&self.stdio.stdout).await
    }

    pub async fn stderr(&self) -> Stream {
        self.take(&self.stdio.stderr).await
    }

    async fn take(&self, token: &[u8]) -> Stream {
        loop {
            let arrived = self.arrived.notified();
            if let Some(stream) = self.streams.lock().unwrap().remove(token) {
                return Stream(stream);
            }
            arrived.await;
        }
    }
}

/// One stream.
pub struct Stream(UnixStream);

impl Stream {
    /// Everything until its end.
    pub async fn collect(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.0.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    pub async fn read_exact(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    pub async fn read_until(&mut self, end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let byte = self
                .0
                .read_u8()
                .await
                .unwrap_or_else(|e| panic!("{e} after {text:?}"));
            text.push(byte.into());
        }
        text
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    pub async fn end(mut self) {
        self.0.shutdown().await.unwrap();
    }
}
