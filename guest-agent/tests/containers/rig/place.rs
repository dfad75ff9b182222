//! Where an agent runs: in a process of this machine, or in a guest.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

use cube_agent::container::Settings;
use cube_agent::helper::parent::Launcher;
use cube_agent_protocol::SHARE_TAG;
use serde_json::json;

/// The variable that makes this program an agent, and names its directory.
pub const AGENT_DIR: &str = "CUBE_AGENT_TEST_DIR";

/// The address of a guest's network interface.
pub const MAC: &str = "02:00:00:00:00:01";

/// What an agent with the sockets and containers in `dir` is started by.
pub fn agent_process(dir: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(AGENT_DIR, dir).spawn().unwrap()
}

/// The agent that [`agent_process`] starts.
pub fn run_agent(dir: &Path) -> ExitCode {
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

/// The cgroup of an agent's containers, when it runs on this machine.
pub fn cgroup_of(dir: &Path) -> String {
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
    /// Takes what the variables name.
    pub fn new() -> Self {
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

    /// Boots one, whose sockets and share are in `dir`.
    pub fn boot(&self, dir: &Path) -> Child {
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
