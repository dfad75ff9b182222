//! Running bundles with one of the two runtimes.

use std::fmt;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cube_tests::*;
use serde_json::json;

use crate::bundle::Case;
use crate::sandbox::play;
use crate::tell;

/// No bundle takes longer; one that hangs ends with 124.
const LIMIT_SECONDS: i64 = CALL_LIMIT_SECONDS;

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

/// How bundles are run: without a client and a daemon between.
enum Runtime {
    /// Most of them in one sandbox. One whose machine has ended is replaced.
    Cube(Mutex<Arc<Sandbox>>),
    /// By this program.
    Runc(PathBuf),
}

impl Lane {
    /// cube.
    pub fn cube() -> Self {
        let dir = common_dir();
        let leader = Mutex::new(Arc::new(start_leader(&dir)));
        Self {
            dir,
            runtime: Runtime::Cube(leader),
        }
    }

    /// The runc that `tests/tools/build-runc` makes.
    pub fn runc() -> Self {
        let dir = common_dir();
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
            Runtime::Cube(_) => 3,
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

    /// Gives the bundles that follow another sandbox, unless somebody else has done so.
    fn replace(&self, leader: &Mutex<Arc<Sandbox>>, ended: &Arc<Sandbox>) {
        let mut leader = leader.lock().unwrap();
        if Arc::ptr_eq(&leader, ended) {
            *leader = Arc::new(start_leader(&self.dir));
        }
    }

    fn run(&self, case: &Case) -> Outcome {
        let id = unique("o");
        let bundle = Bundle::new(&self.dir, &id, case);
        if !case.host.is_empty() {
            bundle.prepare(case.host);
        }
        let path = bundle.0.display().to_string();
        let write = |group: &str| {
            let file = bundle.0.join("config.json");
            write_config(&file, case.config(&path), group, &id);
        };
        let outcome = match &self.runtime {
            Runtime::Cube(_) if case.alone => {
                write(&id);
                match Sandbox::start(&bundle.0, &id) {
                    Ok(sandbox) => play(&sandbox, case, &bundle.0, &id),
                    Err(failure) => failure.into(),
                }
            }
            Runtime::Cube(leader) => {
                let sandbox = Arc::clone(&leader.lock().unwrap());
                write(sandbox.id());
                let outcome = play(&sandbox, case, &bundle.0, &id);
                if sandbox.has_ended() {
                    tell(&format!(
                        "oci: the machine has ended at {}: {outcome}",
                        case.name
                    ));
                    self.replace(leader, &sandbox);
                }
                outcome
            }
            Runtime::Runc(program) => {
                write(&id);
                outcome_of(&run_by_runc(program, case, &id, &path))
            }
        };
        let tidy = |text: String| {
            text.replace(&path, "@")
                .replace(&id, "ID")
                .replace('\r', "")
        };
        match outcome {
            Outcome::Ran(status, output) => Outcome::Ran(status, tidy(output)),
            Outcome::Refused(message) => Outcome::Refused(tidy(message)),
        }
    }
}

/// The file in a lane's directory that most root file systems are links to.
const COMMON: &str = "busybox";

fn common_dir() -> TestDir {
    let dir = TestDir::new();
    fs::copy("/bin/busybox", dir.path().join(COMMON)).unwrap();
    dir
}

/// A sandbox whose container sleeps, for the others to be in.
fn start_leader(dir: &TestDir) -> Sandbox {
    let id = unique("o");
    let common = dir.path().join(COMMON);
    let bundle = make_bundle(dir.path(), &id, &id, Some(&common), |config| {
        config["process"]["args"] = json!(["sleep", "100000"]);
        // A machine with two processors, for the bundles that name them.
        config["linux"]["resources"]["cpu"] = json!({"quota": 200_000, "period": 100_000});
    });
    let sandbox = Sandbox::start(&bundle, &id).and_then(|sandbox| {
        sandbox
            .launch(&bundle, &id, &Streams::default())
            .map(|_| sandbox)
    });
    sandbox.map_err(Outcome::from).unwrap()
}

/// What became of a bundle of runc's, which writes why it refuses it where the container would write its errors.
fn outcome_of(ended: &Ended) -> Outcome {
    let refusal = ended
        .stderr
        .lines()
        .find(|line| line.contains("level=error"));
    match refusal {
        Some(line) => Outcome::Refused(line.to_owned()),
        None => Outcome::Ran(ended.status, ended.text()),
    }
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
        let ended = update(&runc, case, id, path)
            .unwrap_or_else(|| output(&runc(&["exec", id, "sh", "-c", &case.script()])));
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

/// Updates the container, if the case says so; how that failed.
fn update(runc: &dyn Fn(&[&str]) -> Command, case: &Case, id: &str, path: &str) -> Option<Ended> {
    let file = format!("{path}/update");
    fs::write(&file, case.update.as_ref()?.to_string()).unwrap();
    let ended = output(&runc(&["update", "--resources", &file, id]));
    (ended.status != 0).then_some(ended)
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
    limited
        .arg(LIMIT_SECONDS.to_string())
        .arg(command.get_program());
    limited.args(command.get_args()).stdin(Stdio::null());
    if let Some(directory) = command.get_current_dir() {
        limited.current_dir(directory);
    }
    Ended::from(limited.output().unwrap())
}

/// A case's directory, with a root file system of its own.
struct Bundle(PathBuf);

impl Bundle {
    fn new(lane: &TestDir, id: &str, case: &Case) -> Self {
        let dir = lane.path().join(id);
        fs::create_dir(&dir).unwrap();
        let common = lane.path().join(COMMON);
        let owned = case.host.contains("chown");
        make_root(&dir.join("rootfs"), (!owned).then_some(&common));
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
