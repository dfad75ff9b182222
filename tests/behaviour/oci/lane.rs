//! Running bundles with one of the two runtimes.

use std::fmt;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cube_tests::*;
use serde_json::{Value, json};

use crate::bundle::{Case, small};
use crate::tell;

/// No bundle takes longer, in seconds; one that hangs ends with 124.
const LIMIT: &str = "90";

/// What became of a bundle.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its container, or the exec in it, has ended with this status and printed this.
    Ran(i32, String),
    /// There never was one.
    Refused(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran(status, output) => write!(f, "{status}\n{}", output.trim_end()),
            Self::Refused(message) => write!(f, "refused: {}", message.trim_end()),
        }
    }
}

/// A runtime.
pub struct Lane {
    dir: TestDir,
    runtime: Runtime,
}

/// How bundles are run.
enum Runtime {
    /// By `ctr`, most of them in the sandbox of one container.
    Cube(Running),
    /// By this program itself: with no client, daemon and shim between, ten times as fast.
    Runc(PathBuf),
}

impl Lane {
    /// cube.
    pub fn cube() -> Self {
        let dir = TestDir::new();
        make_root(&dir.path().join("template"));
        let id = unique("o");
        let mut config = small();
        config["process"]["args"] = json!(["sleep", "100000"]);
        config["root"]["path"] = json!(dir.path().join("template"));
        // A machine with two processors, for the bundles that name them.
        config["linux"]["resources"]["cpu"] = json!({"quota": 200_000, "period": 100_000});
        let path = dir.path().join("config.json");
        write_config(&path, config, &id, &id);
        must_ctr(
            &[
                &CTR_RUN[..],
                &["--detach", "--config", path.to_str().unwrap(), &id],
            ]
            .concat(),
        );
        Self {
            dir,
            runtime: Runtime::Cube(Running { id }),
        }
    }

    /// The runc that `tests/tools/build-runc` makes.
    pub fn runc() -> Self {
        let dir = TestDir::new();
        make_root(&dir.path().join("template"));
        // Beside the bundles: in the nested host its own place is a slow one.
        let program = dir.path().join("runc");
        fs::copy(setting("CUBE_TEST_RUNC"), &program).unwrap();
        Self {
            dir,
            runtime: Runtime::Runc(program),
        }
    }

    /// Runs the bundles, with cube several at a time: there is much waiting in it.
    pub fn run_all(&self, cases: &[Case]) -> Vec<Outcome> {
        let workers = match self.runtime {
            Runtime::Cube(_) => 4,
            Runtime::Runc(_) => 1,
        };
        let next = AtomicUsize::new(0);
        let work = || -> Vec<(usize, Outcome)> {
            let take = || next.fetch_add(1, Ordering::Relaxed);
            let mine = std::iter::repeat_with(take).take_while(|&n| n < cases.len());
            mine.map(|n| (n, self.run_told(&cases[n]))).collect()
        };
        let mut outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            threads
                .into_iter()
                .flat_map(|t| t.join().unwrap())
                .collect()
        });
        outcomes.sort_by_key(|(n, _)| *n);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn run_told(&self, case: &Case) -> Outcome {
        let begin = Instant::now();
        let outcome = self.run(case);
        if std::env::var_os("CUBE_TEST_CASE").is_some() {
            let (name, seconds) = (case.name, begin.elapsed().as_secs_f32());
            let runtime = match self.runtime {
                Runtime::Cube(_) => "cube",
                Runtime::Runc(_) => "runc",
            };
            tell(&format!("{runtime}: {name}: {seconds:.1} s: {outcome}"));
        }
        outcome
    }

    fn run(&self, case: &Case) -> Outcome {
        let id = unique("o");
        let bundle = Bundle::new(&self.dir, &id);
        if !case.host.is_empty() {
            bundle.prepare(case.host);
        }
        let path = bundle.0.display().to_string();
        let group = match &self.runtime {
            Runtime::Cube(leader) if !case.alone => &leader.id,
            _ => &id,
        };
        write_config(
            &bundle.0.join("config.json"),
            case.config(&path),
            group,
            &id,
        );
        let ended = match &self.runtime {
            Runtime::Cube(_) => run_by_ctr(case, &id, &path),
            Runtime::Runc(program) => run_by_runc(program, case, &id, &path),
        };
        let tidy = |text: String| {
            text.replace(&path, "@")
                .replace(&id, "ID")
                .replace('\r', "")
        };
        let stderr = tidy(ended.stderr.clone());
        // What the client, or runc, says itself; the probe's errors are on its standard output.
        let is_refused = |line: &&str| line.contains("ctr: ") || line.contains("level=error");
        match stderr.lines().find(is_refused) {
            Some(line) => Outcome::Refused(line.to_owned()),
            None => Outcome::Ran(ended.status, tidy(ended.text())),
        }
    }
}

/// The beginning of `ctr run`.
const CTR_RUN: [&str; 3] = ["run", "--runtime", "io.containerd.cube.v1"];

fn run_by_ctr(case: &Case, id: &str, path: &str) -> Ended {
    let config = format!("{path}/config.json");
    let run = |how: &[&str]| ctr(&[&CTR_RUN[..], how, &["--config", &config, id]].concat());
    let ended = if !case.exec {
        output(&run(&["--rm"]))
    } else {
        let started = if case.has_terminal() {
            output(&on_a_terminal(&run(&["--detach", "--tty"])))
        } else {
            output(&run(&["--detach"]))
        };
        if started.status == 0 {
            let running = Running { id: id.to_owned() };
            return output(&running.exec_command(&[], &["sh", "-c", &case.script()]));
        }
        started
    };
    // What could not be created is still a container.
    if ended.status != 0 {
        try_ctr(&["task", "delete", "--force", id]);
        try_ctr(&["container", "delete", id]);
    }
    ended
}

fn run_by_runc(program: &Path, case: &Case, id: &str, path: &str) -> Ended {
    let runc = |arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(path);
        command
    };
    if !case.exec {
        return output(&runc(&["run", id]));
    }
    // Its streams would keep those of a detached runc open.
    let socket = case.has_terminal().then(|| ConsoleSocket::new(path));
    let mut run = runc(&["run", "--detach", id]);
    if socket.is_some() {
        run = runc(&["run", "--detach", "--console-socket", "console", id]);
    }
    let errors = fs::File::create(format!("{path}/errors")).unwrap();
    let status = run
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .status();
    let ended = if status.unwrap().success() {
        let master = socket.map(ConsoleSocket::receive);
        let ended = output(&runc(&["exec", id, "sh", "-c", &case.script()]));
        drop(master);
        ended
    } else {
        Ended {
            status: 1,
            stdout: Vec::new(),
            stderr: fs::read_to_string(format!("{path}/errors")).unwrap(),
        }
    };
    output(&runc(&["delete", "--force", id]));
    ended
}

/// Where runc hands the terminal over: it is kept for as long as the container runs.
struct ConsoleSocket(UnixListener);

impl ConsoleSocket {
    fn new(path: &str) -> Self {
        Self(UnixListener::bind(format!("{path}/console")).unwrap())
    }

    /// The connection: the descriptor in it stays open until it is closed.
    fn receive(self) -> UnixStream {
        self.0.accept().unwrap().0
    }
}

/// Runs the command to its end, or to the limit.
fn output(command: &Command) -> Ended {
    let mut limited = Command::new("timeout");
    limited.arg(LIMIT).arg(command.get_program());
    limited.args(command.get_args()).stdin(Stdio::null());
    if let Some(directory) = command.get_current_dir() {
        limited.current_dir(directory);
    }
    Ended::from(limited.output().unwrap())
}

/// The same command below a program that gives it a terminal.
fn on_a_terminal(command: &Command) -> Command {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let mut script = Command::new("script");
    script.args(["-qec", &words.join(" "), "/dev/null"]);
    script
}

fn write_config(path: &Path, mut config: Value, group: &str, id: &str) {
    config["annotations"]["io.containerd.runc.v2.group"] = json!(group);
    // Without one runc would make it below its own cgroup, which has processes.
    let linux = &mut config["linux"];
    if linux.get("cgroupsPath").is_none() {
        linux["cgroupsPath"] = json!(format!("/corpus/{id}"));
    }
    fs::write(path, config.to_string()).unwrap();
}

/// A case's directory, with a root file system of its own.
struct Bundle(PathBuf);

impl Bundle {
    fn new(lane: &TestDir, id: &str) -> Self {
        let dir = lane.path().join(id);
        fs::create_dir(&dir).unwrap();
        let copied = Command::new("cp")
            .arg("-a")
            .arg(lane.path().join("template"))
            .arg(dir.join("rootfs"))
            .status();
        assert!(copied.unwrap().success());
        Self(dir)
    }

    fn prepare(&self, script: &str) {
        let mut sh = Command::new("sh");
        let ended = sh.args(["-ec", script]).current_dir(&self.0).output();
        Ended::from(ended.unwrap()).success();
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // What a script of the host has mounted, the last first.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        let below: Vec<_> = points
            .filter(|p| Path::new(p).starts_with(&self.0))
            .collect();
        for point in below.iter().rev() {
            let _ = Command::new("umount").args(["-l", point]).status();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A root file system of busybox alone, with a few files to mount over, to mask and to look at.
fn make_root(root: &Path) {
    for name in [
        "bin", "dev", "proc", "sys", "mnt", "tmp", "etc", "home/app", "data/sub", "real", "work",
    ] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    let set_mode = |name: &str, mode| {
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).unwrap()
    };
    set_mode("tmp", 0o1777);
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    let list = Command::new("/bin/busybox").arg("--list").output().unwrap();
    for name in Ended::from(list)
        .success()
        .lines()
        .filter(|&n| n != "busybox")
    {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    for (name, text) in [
        (
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n",
        ),
        ("etc/group", "root:x:0:\naudio:x:29:app\napp:x:1001:\n"),
        ("data/file", "of the root\n"),
        ("data/sub/file", "below it\n"),
    ] {
        fs::write(root.join(name), text).unwrap();
    }
    symlink("/real", root.join("link")).unwrap();
    symlink("../../../../../../real", root.join("data/up")).unwrap();
}
