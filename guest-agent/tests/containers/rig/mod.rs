//! The agent in a process of its own, and the host's side of its conversation.

mod agent;
mod place;
mod spec;
mod streams;

use std::cell::RefCell;
use std::future::Future;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};

pub use agent::Agent;
pub use place::MAC;
use place::{AGENT_DIR, Guest, cgroup_of, run_agent};
pub use spec::{exec_process, spec};

/// A test and its name.
pub type Test = (&'static str, fn(&Harness));

/// Runs tests one after the other, or the agent if that is what this process is for.
pub fn run(tests: &[Test], guest_tests: &[Test]) -> ExitCode {
    if let Some(dir) = std::env::var_os(AGENT_DIR) {
        return run_agent(Path::new(&dir));
    }
    let filter = filter_of(std::env::args().skip(1));
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
    let wanted = |name: &str| filter.as_ref().is_none_or(|filter| name.contains(filter));
    let mut failed = 0;
    if std::env::var_os("CUBE_TEST_KVM").is_none() {
        for (name, test) in tests.iter().filter(|(name, _)| wanted(name)) {
            let harness = Harness::new(None);
            let passed = report(name, || {
                test(&harness);
                harness.end();
            });
            failed += usize::from(!passed);
        }
    } else {
        let guest = Guest::new();
        // A guest takes longer to boot than most tests take: it is for all of them, until one fails.
        let mut shared = None;
        let all = tests.iter().chain(guest_tests);
        for (name, test) in all.filter(|(name, _)| wanted(name)) {
            let harness = shared.get_or_insert_with(|| Harness::new(Some(&guest)));
            if !report(name, || test(harness)) {
                failed += 1;
                shared = None;
            }
        }
        if let Some(harness) = shared {
            let ended = report("the_guest_ends_with_its_connection", || harness.end());
            failed += usize::from(!ended);
        }
    }
    println!("{failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Runs a test and says how it went.
fn report(name: &str, test: impl FnOnce()) -> bool {
    let start = Instant::now();
    let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).is_ok();
    let word = if passed { "ok" } else { "FAILED" };
    println!(
        "test {name} ... {word} ({:.1} s)",
        start.elapsed().as_secs_f64()
    );
    passed
}

/// The name to look for: what is neither an option nor, behind `--test-threads`, an option's value.
fn filter_of(arguments: impl Iterator<Item = String>) -> Option<String> {
    let mut arguments = arguments;
    loop {
        match arguments.next()?.as_str() {
            "--test-threads" => drop(arguments.next()),
            option if option.starts_with('-') => {}
            name => return Some(name.to_owned()),
        }
    }
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

/// A directory with a root file system, and the agent, here or in a guest.
pub struct Harness<'a> {
    dir: tempfile::TempDir,
    guest: Option<&'a Guest>,
    running: RefCell<Option<Running>>,
}

/// An agent that runs, and what it is talked to by.
struct Running {
    runtime: tokio::runtime::Runtime,
    agent: Agent,
    child: Child,
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
        Self {
            dir,
            guest,
            running: RefCell::new(None),
        }
    }

    /// Runs a test with the agent, which the first one starts.
    pub fn block<F: Future<Output = ()>>(&self, test: impl Fn(Agent) -> F) {
        let mut running = self.running.borrow_mut();
        let running = running.get_or_insert_with(|| self.start());
        running.runtime.block_on(async {
            let test = tokio::time::timeout(Duration::from_secs(600), test(running.agent.clone()));
            test.await.expect("the test takes too long");
        });
    }

    fn start(&self) -> Running {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let (agent, child) = runtime.block_on(Agent::launch(self.dir.path(), self.guest));
        Running {
            runtime,
            agent,
            child,
        }
    }

    /// The agent ends with its connection, and leaves nothing.
    fn end(&self) {
        let running = self.running.take().unwrap();
        drop((running.agent, running.runtime));
        let mut child = running.child;
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || ended.send(child.wait().unwrap()));
        let status = end.recv_timeout(Duration::from_secs(60));
        assert!(status.expect("the agent lives on").success());
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
        if let Some(mut running) = self.running.take() {
            // A test has failed.
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
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
