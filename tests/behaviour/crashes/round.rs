//! One round: a container's life, what is done to it, and what must be true afterwards.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cube_tests::*;

use super::plan::{Moment, Plan, Victim};

/// How soon the end of a task is told of when something that it needs was killed.
const SOON: Duration = Duration::from_secs(2);

/// What takes longer hangs.
const HANGS: Duration = Duration::from_secs(60);

/// The container's program.
const PROGRAM: [&str; 2] = ["sleep", "1000"];

/// How long the parts of a container's life take here if nobody disturbs them.
#[derive(Debug)]
pub struct Durations {
    start: Duration,
    exec: Duration,
    delete: Duration,
}

impl Durations {
    /// Of a container that is started now; the first one, which finds nothing in any cache, does not count.
    pub fn measured() -> Self {
        let measure = || {
            let clock = Instant::now();
            let running = Container::new().start(&PROGRAM);
            let start = clock.elapsed();
            running.exec(&["true"]).success();
            let exec = clock.elapsed() - start;
            running.task("delete", &["--force"]);
            let delete = clock.elapsed() - start - exec;
            Self {
                start,
                exec,
                delete,
            }
        };
        measure();
        measure()
    }
}

/// A round that is played.
pub struct Round<'a> {
    plan: &'a Plan,
    containerd: &'a Containerd,
    durations: &'a mut Durations,
    id: String,
    keeper: Option<Keeper>,
    struck: Option<Instant>,
}

impl<'a> Round<'a> {
    /// A round that has not begun.
    pub fn new(plan: &'a Plan, containerd: &'a Containerd, durations: &'a mut Durations) -> Self {
        Self {
            plan,
            containerd,
            durations,
            id: unique("c"),
            keeper: None,
            struck: None,
        }
    }

    /// Whether somebody was killed.
    pub fn has_struck(&self) -> bool {
        self.struck.is_some()
    }

    /// Its containers, the sandbox's namesake last.
    pub fn ids(&self) -> Vec<String> {
        let keeper = self.keeper.iter().map(|keeper| keeper.id.clone());
        std::iter::once(self.id.clone()).chain(keeper).collect()
    }

    fn sandbox(&self) -> &str {
        self.keeper.as_ref().map_or(&self.id, |keeper| &keeper.id)
    }

    /// The containers whose exit may be told of twice: a shim that was killed in the middle of a delete has told of it,
    /// and containerd, which cannot know, tells of it as well.
    pub fn excused(&self) -> Vec<String> {
        match (self.plan.victim, self.plan.moment) {
            (Victim::Shim, Moment::Delete) => self.ids(),
            _ => Vec::new(),
        }
    }

    /// Plays it; panics if something is wrong.
    pub fn run(&mut self, events: &mut Events) {
        if self.plan.group {
            self.keeper = Some(Keeper::start());
        }
        self.live(events);
        self.delete_all(events);
        for id in self.ids() {
            assert_no_traces_of(&id);
        }
        self.check_events(events);
    }

    fn live(&mut self, events: &mut Events) {
        let usual = match self.plan.moment {
            Moment::Start => self.durations.start,
            Moment::Run | Moment::Exec => self.durations.exec,
            Moment::Delete => self.durations.delete,
        };
        let mut client = match self.plan.moment {
            Moment::Start => self.client(&["--detach"], &PROGRAM),
            Moment::Run | Moment::Exec | Moment::Delete => {
                let clock = Instant::now();
                let ended = Ended::from(self.client(&["--detach"], &PROGRAM).output().unwrap());
                ended.success();
                // The machine may be busier than a while ago, or less.
                if self.keeper.is_none() {
                    self.durations.start = clock.elapsed();
                }
                let exec = unique("e");
                let exec = ["task", "exec", "--exec-id", &exec, &self.id];
                match self.plan.moment {
                    Moment::Delete => ctr(&["task", "delete", "--force", &self.id]),
                    Moment::Exec if self.plan.short_exec => ctr(&[&exec[..], &["true"]].concat()),
                    Moment::Exec => ctr(&[&exec[..], &["cat"]].concat()),
                    _ => Command::new("true"),
                }
            }
        };
        client
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut client = client.spawn().unwrap();
        // This is the moment: there is no event in what it is to hit.
        std::thread::sleep(self.plan.after(usual));
        self.strike(events);
        if self.struck.is_some() && matches!(self.plan.moment, Moment::Run | Moment::Exec) {
            self.check_soon(events);
        }
        // An exec of `cat` that nobody has ended ends now.
        drop(client.stdin.take());
        assert!(
            End::of(client.id()).is_none_or(|end| end.comes_within(HANGS)),
            "a client hangs: {:?}",
            self.plan
        );
        let _ = client.wait_with_output();
    }

    /// The client that makes the container and starts it.
    fn client(&self, how: &[&str], program: &[&str]) -> Command {
        let mut container = Container::new();
        container.id.clone_from(&self.id);
        in_group(container, self.keeper.as_ref().map(|keeper| &*keeper.id)).command(how, program)
    }

    fn strike(&mut self, events: &mut Events) {
        let is_hit = match self.plan.victim {
            Victim::Shim => kill_all(&shims_of(self.sandbox())),
            Victim::Hypervisor => kill_all(&hypervisors_of(self.sandbox())),
            Victim::GuestPanics => self.tell_keeper("c"),
            Victim::GuestResets => self.tell_keeper("b"),
            Victim::Init => {
                let killed = try_ctr(&["task", "kill", "--signal", "SIGKILL", &self.id]);
                killed.status == 0
            }
            Victim::Containerd => {
                self.containerd.kill();
                self.containerd.start_again();
                events.listen_again();
                true
            }
        };
        self.struck = is_hit.then(Instant::now);
    }

    fn tell_keeper(&mut self, what: &str) -> bool {
        let keeper = self.keeper.as_mut().unwrap();
        writeln!(keeper.stdin, "{what}").is_ok()
    }

    /// Whether the other container of the sandbox ends too.
    fn ends_all(&self) -> bool {
        !matches!(self.plan.victim, Victim::Init | Victim::Containerd)
    }

    /// It was killed while it ran: the end comes at once, or there is none.
    fn check_soon(&self, events: &Events) {
        if self.plan.victim == Victim::Containerd {
            for id in self.ids() {
                let list = must_ctr(&["task", "list"]);
                let line = list
                    .lines()
                    .find(|l| l.split_whitespace().next() == Some(&id));
                assert!(line.is_some_and(|l| l.contains("RUNNING")), "{id}: {list}");
                let exec = unique("e");
                must_ctr(&["task", "exec", "--exec-id", &exec, &id, "true"]);
            }
            return;
        }
        // An emulated host on a busy machine may need longer for anything.
        let soon = SOON.max(self.durations.start);
        for id in self.ids().iter().take(if self.ends_all() { 2 } else { 1 }) {
            let told = events.wait_no_longer_than(HANGS, "/tasks/exit", id);
            let told = told.unwrap_or_else(|| panic!("nobody has told of the exit of {id}"));
            let took = told.at.saturating_duration_since(self.struck.unwrap());
            assert!(took <= soon, "the exit of {id} was told of after {took:?}");
        }
    }

    fn delete_all(&mut self, events: &Events) {
        for id in self.ids() {
            let clock = Instant::now();
            // The other container's client deletes its task when that ends. Of two deletes at once containerd may take one
            // for the end of the shim, and tell of the exit itself.
            if let Some(keeper) = self.keeper.as_ref().filter(|keeper| keeper.id == id) {
                try_ctr(&["task", "kill", "--signal", "SIGKILL", &id]);
                let end = End::of(keeper.client.id());
                let has_ended = end.is_none_or(|end| end.comes_within(HANGS));
                assert!(has_ended, "the other container's client hangs");
            }
            let is_there = delete(&["task", "delete", "--force", &id]);
            if is_there && self.plan.victim != Victim::Shim {
                let told = events.wait_no_longer_than(HANGS, "/tasks/delete", &id);
                assert!(told.is_some(), "nobody has told of the delete of {id}");
            }
            delete(&["container", "delete", &id]);
            let took = clock.elapsed();
            assert!(took < HANGS, "the delete of {id} took {took:?}");
        }
    }

    /// A containerd that is killed takes events with it, and one that has just started may have told of some before
    /// this test listens again: of an exit in the middle of a delete, for one.
    fn loses_events(&self) -> bool {
        let is_quiet = matches!(self.plan.moment, Moment::Run | Moment::Exec);
        self.plan.victim == Victim::Containerd && !is_quiet
    }

    /// As many exits as there were creates, one at most.
    fn check_events(&self, events: &Events) {
        for id in self.ids() {
            let created = events.of_init(&id, "/tasks/create").len();
            if created > 0 && !self.loses_events() {
                let told = events.wait_no_longer_than(HANGS, "/tasks/exit", &id);
                assert!(
                    told.is_some(),
                    "{id} was created, and nobody has told of its exit"
                );
            }
            let exits = events.of_init(&id, "/tasks/exit").len();
            let (started, ended) = (
                events.of_execs(&id, "/tasks/exec-started"),
                events.of_execs(&id, "/tasks/exit"),
            );
            match (self.plan.victim, self.plan.moment) {
                _ if self.loses_events() => assert!(exits <= 1, "{id}: {exits} exits"),
                (Victim::Containerd, _) => assert_eq!(exits, 1, "{id}"),
                // See excused().
                (Victim::Shim, Moment::Delete) => {
                    assert!((1..=2).contains(&exits), "{id}: {exits} exits")
                }
                // containerd tells of the exit, whether it had heard of a create or not.
                (Victim::Shim, _) => assert!(
                    (created..=1).contains(&exits),
                    "{id}: {created} creates, {exits} exits"
                ),
                _ => assert_eq!(
                    (exits, ended),
                    (created, started),
                    "{id}: exits and creates, of execs too"
                ),
            }
        }
    }
}

/// Another container in the sandbox, which bears its name; it can bring the guest down.
struct Keeper {
    id: String,
    client: Child,
    stdin: std::process::ChildStdin,
}

impl Keeper {
    fn start() -> Self {
        let container = Container::new().option("--cap-add", "CAP_SYS_ADMIN");
        let id = container.id.clone();
        // The /proc that it has is read-only where it matters.
        let script = "mkdir /p && mount -t proc proc /p && echo ready; \
            read how; echo $how >/p/sysrq-trigger; sleep 1000";
        let mut client = in_group(container, Some(&id))
            .command(&[], &["sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let mut stdout = BufReader::new(client.stdout.take().unwrap());
        stdout.read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        let stdin = client.stdin.take().unwrap();
        Self { id, client, stdin }
    }
}

impl Drop for Round<'_> {
    /// After a failure, so that the next round finds a clean host.
    fn drop(&mut self) {
        if !std::thread::panicking() && traces_of(&self.id).is_empty() && self.keeper.is_none() {
            return;
        }
        for id in self.ids() {
            try_ctr(&["task", "delete", "--force", &id]);
            try_ctr(&["container", "delete", &id]);
        }
        if let Some(mut keeper) = self.keeper.take() {
            // SAFETY: kill(2) has no memory arguments; the process is a child that was not waited for.
            unsafe { libc::kill(keeper.client.id() as i32, libc::SIGTERM) };
            let _ = keeper.client.wait();
        }
    }
}

fn in_group(container: Container, group: Option<&str>) -> Container {
    match group {
        Some(group) => container.option(
            "--annotation",
            &format!("io.containerd.runc.v2.group={group}"),
        ),
        None => container,
    }
}

/// Deletes a task or a container; whether it was there.
fn delete(arguments: &[&str]) -> bool {
    let ended = try_ctr(arguments);
    let complaint = ended.stderr.trim();
    // The client warns of a task that was killed.
    let is_done = complaint.is_empty() || complaint.contains("exit with non-zero exit code");
    assert!(
        is_done || complaint.contains("not found"),
        "{arguments:?}: {complaint}"
    );
    is_done
}

fn kill_all(pids: &[u32]) -> bool {
    // SAFETY: kill(2) has no memory arguments.
    let killed = |&pid: &u32| unsafe { libc::kill(pid as i32, libc::SIGKILL) } == 0;
    pids.iter().filter(|pid| killed(pid)).count() > 0
}

/// The processes whose arguments and directory of /proc pass a test.
fn processes(is_wanted: impl Fn(&[String], &Path) -> bool) -> Vec<u32> {
    let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(pid);
    all.filter(|pid: &u32| {
        let directory = Path::new("/proc").join(pid.to_string());
        let arguments = fs::read(directory.join("cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments);
        let arguments: Vec<_> = arguments
            .split_terminator('\0')
            .map(str::to_owned)
            .collect();
        is_wanted(&arguments, &directory)
    })
    .collect()
}

/// The sandbox's daemon: it leads a session, unlike the process that starts it and the one that cleans up.
fn shims_of(sandbox: &str) -> Vec<u32> {
    processes(|arguments, directory| {
        let program = arguments
            .first()
            .is_some_and(|a| a.ends_with("containerd-shim-cube-v1"));
        let is_ours = arguments
            .windows(2)
            .any(|w| w[0] == "-id" && w[1] == sandbox);
        let pid = directory
            .file_name()
            .and_then(|n| n.to_str()?.parse::<i32>().ok());
        // SAFETY: getsid(2) has no memory arguments.
        program && is_ours && pid.is_some_and(|pid| unsafe { libc::getsid(pid) } == pid)
    })
}

/// The sandbox's hypervisor, whose directory is the sandbox's.
fn hypervisors_of(sandbox: &str) -> Vec<u32> {
    processes(|arguments, directory| {
        let program = arguments
            .first()
            .is_some_and(|a| a.ends_with("cube-hypervisor"));
        let cwd = fs::read_link(directory.join("cwd"));
        program && cwd.is_ok_and(|cwd| cwd.ends_with(sandbox))
    })
}

/// What sandboxes have on the host, whatever its name: mounts, files in the directories for state, cgroups.
pub fn host() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut all: Vec<_> = mounts.lines().map(|line| format!("mount {line}")).collect();
    for (directory, files) in [
        ("/run/cube", true),
        ("/run/containerd/s", true),
        ("/sys/fs/cgroup", false),
    ] {
        walk(Path::new(directory), files, &mut all);
    }
    all.sort();
    all
}

fn walk(directory: &Path, files: bool, all: &mut Vec<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
        if files || is_directory {
            all.push(entry.path().display().to_string());
        }
        if is_directory {
            walk(&entry.path(), files, all);
        }
    }
}
