//! A container starts, sees what it was promised, and ends as it should.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cube_tests::*;

#[test]
fn a_container_runs_under_a_kernel_of_its_own() {
    let inside = Container::new().run(&["uname", "-r"]).success();
    let outside = Command::new("uname").arg("-r").output().unwrap().stdout;
    assert!(!inside.trim().is_empty());
    assert_ne!(inside.as_bytes(), outside);
}

#[test]
fn exit_statuses_come_back_as_they_are() {
    for status in [0, 7, 255] {
        assert_eq!(
            Container::new().sh(&format!("exit {status}")).status,
            status
        );
    }
}

#[test]
fn a_signal_that_ends_the_container_is_told_by_its_status() {
    for (signal, status) in [("SIGKILL", 137), ("SIGTERM", 143)] {
        // A shell as PID 1 gets only signals that it handles: sleep is its child, the trap its answer.
        let script = "trap 'exit 143' TERM; echo ready; sleep 1000 & wait";
        let running = Container::new().start(&["sh", "-c", script]);
        running.exec(&["true"]).success();
        let mut waiter = running.attach();
        running.task("kill", &["--signal", signal]).success();
        assert_eq!(waiter.wait().unwrap().code(), Some(status), "{signal}");
    }
}

#[test]
fn environment_directory_and_arguments_arrive() {
    let script = r#"echo "$GREETING|$(pwd)|$0|$1|$2""#;
    let text = Container::new()
        .option("--env", "GREETING=good day")
        .option("--cwd", "/tmp")
        .run(&["sh", "-c", script, "zero", "a b", ""])
        .success();
    assert_eq!(text, "good day|/tmp|zero|a b|\n");
}

#[test]
fn an_exec_runs_as_the_user_in_the_directory_that_was_asked_for() {
    let running = Container::new().start(&["sleep", "1000"]);
    let options = ["--user", "33:33", "--cwd", "/tmp"];
    let script = "id -u; id -g; pwd";
    let ended = running
        .exec_command(&options, &["sh", "-c", script])
        .output();
    assert_eq!(Ended::from(ended.unwrap()).success(), "33\n33\n/tmp\n");
}

#[test]
fn two_vcpus_and_512_mb_are_there_and_both_processors_work() {
    // Two busy loops on two processors take less wall time than processor time.
    let script = "nproc; grep MemTotal /proc/meminfo; \
        f() { i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; }; \
        f & f & wait; grep -c ^cpu[01] /proc/stat; \
        awk '/^cpu[01] /{print ($2+$3+$4 > 20)}' /proc/stat";
    let text = Container::new()
        .option("--cpus", "2")
        .option("--memory-limit", &(512u64 << 20).to_string())
        .sh(script)
        .success();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "2");
    let kib: u64 = lines[1].split_whitespace().nth(1).unwrap().parse().unwrap();
    // What the guest kernel itself takes is missing from the total; the limit must fit in.
    assert!((512 << 10..700 << 10).contains(&kib), "{text}");
    assert_eq!(lines[2..], ["2", "1", "1"], "{text}");
}

#[test]
fn a_container_that_asks_for_nothing_gets_the_defaults() {
    let text = Container::new()
        .sh("nproc; grep MemTotal /proc/meminfo")
        .success();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("1"));
    let kib: u64 = lines
        .next()
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    assert!((200 << 10..=256 << 10).contains(&kib), "{text}");
}

#[test]
fn annotations_size_the_sandbox() {
    let text = Container::new()
        .setting("default_vcpus", "2")
        .setting("default_memory_mib", "384")
        .sh("nproc; grep MemTotal /proc/meminfo")
        .success();
    assert!(text.starts_with("2\n"), "{text}");
    let kib: u64 = text.split_whitespace().nth(2).unwrap().parse().unwrap();
    assert!((320 << 10..=384 << 10).contains(&kib), "{text}");
}

#[test]
fn a_terminal_has_the_right_size() {
    let container = Container::new().flag("--tty");
    let inner = container.command(&["--rm"], &["sh", "-c", "tty && stty size"]);
    let words: Vec<_> = std::iter::once(inner.get_program())
        .chain(inner.get_args())
        .map(|w| format!("'{}'", w.to_string_lossy().replace('\'', r"'\''")))
        .collect();
    // `script` gives the client a terminal; timeout(1) must leave the client in its foreground.
    let words = words
        .join(" ")
        .replacen("'timeout'", "'timeout' '--foreground'", 1);
    let line = format!("stty rows 33 cols 101; {words}");
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .output()
        .unwrap();
    let ended = Ended::from(output);
    assert_eq!(ended.status, 0, "{ended:?}");
    let text = ended.text();
    assert!(
        text.contains("/dev/pts/0") || text.contains("/dev/console"),
        "{text}"
    );
    assert!(text.contains("33 101"), "{text}");
}

#[test]
fn exec_runs_beside_the_first_process_and_tells_its_own_status() {
    let running = Container::new().start(&["sleep", "1000"]);
    assert_eq!(running.exec(&["echo", "hello"]).success(), "hello\n");
    assert_eq!(running.exec(&["sh", "-c", "exit 9"]).status, 9);
    let processes = running.exec(&["ps"]).success();
    assert!(processes.contains("sleep 1000"), "{processes}");
}

#[test]
fn a_signal_that_ends_an_exec_is_told_by_its_status() {
    let running = Container::new().start(&["sleep", "1000"]);
    for (signal, status) in [("SIGKILL", 137), ("SIGTERM", 143)] {
        let (exec_id, mut exec) = running.sleeping_exec();
        running.kill_exec(&exec_id, signal);
        assert_eq!(exec.wait().unwrap().code(), Some(status), "{signal}");
    }
}

#[test]
fn a_container_that_is_killed_for_want_of_memory_ends_with_137_and_an_oom_event() {
    let events = Events::listen();
    let limit = (32 << 20).to_string();
    let container = Container::new().option("--memory-limit", &limit);
    // tail keeps the last line, and there is no end of one.
    assert_eq!(container.run(&["tail", "/dev/zero"]).status, 137);
    assert_eq!(
        events.of_container_until(&container.id, "/tasks/delete"),
        [
            "/tasks/create",
            "/tasks/start",
            "/tasks/oom",
            "/tasks/exit",
            "/tasks/delete"
        ]
    );
    // What a container survives is told while it runs.
    let running = Container::new()
        .option("--memory-limit", &limit)
        .start(&["sleep", "1000"]);
    assert_eq!(running.exec(&["tail", "/dev/zero"]).status, 137);
    running.exec(&["true"]).success();
    let until_oom = events.of_container_until(&running.id, "/tasks/oom");
    assert_eq!(until_oom.len(), 5, "{until_oom:?}");
}

#[test]
fn a_paused_container_stands_still_and_goes_on() {
    // Two beat in one machine, one of them in spite of the other's pause: its beats are the clock.
    const BEATS: usize = 500;
    let shared = Shared::new();
    let (clock_file, file) = (shared.file("clock"), shared.file("paused"));
    let beat = |name: &str| {
        format!("n=0; while :; do n=$((n + 1)); echo $n >>/host/{name}; usleep 1000; done")
    };
    let start =
        |container: Container, name: &str| shared.of(container).start(&["sh", "-c", &beat(name)]);
    let first = Container::new();
    let group = first.id.clone();
    let _clock = start(first.in_group(&group), "clock");
    let running = start(Container::new().in_group(&group), "paused");
    let mut beats = Follower::of(&file);
    beats.wait_for("10");

    running.task("pause", &[]).success();
    let list = must_ctr(&["task", "list"]);
    assert!(
        list.lines()
            .any(|l| l.contains(&running.id) && l.contains("PAUSED")),
        "{list}"
    );
    let count = |file: &Path| fs::read_to_string(file).unwrap().lines().count();
    let (paused_at, clock_at) = (count(&file), count(&clock_file));
    Follower::of(&clock_file).wait_for(&(clock_at + BEATS).to_string());
    assert_eq!(
        count(&file),
        paused_at,
        "beats of a container that is paused"
    );

    running.task("resume", &[]).success();
    beats.wait_for(&(paused_at + BEATS / 10).to_string());
}

#[test]
fn metrics_tell_what_the_container_uses() {
    let running = Container::new().start(&["sleep", "1000"]);
    let text = running.task("metrics", &[]).success();
    let value = |name: &str| -> Option<u64> {
        text.lines()
            .find(|l| l.starts_with(name))?
            .split_whitespace()
            .last()?
            .parse()
            .ok()
    };
    let memory = value("memory.usage").or_else(|| value("memory.usage_in_bytes"));
    assert!(memory.is_some_and(|m| m > 0), "{text}");
    assert!(value("pids.current").is_some_and(|n| n == 1), "{text}");
}

#[test]
fn processes_and_state_are_listed() {
    let running = Container::new().start(&["sleep", "1000"]);
    let pid = running.pid();
    let processes = running.task("ps", &[]).success();
    assert!(processes.contains(&pid.to_string()), "{processes}");
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn the_hypervisor_lives_in_the_cgroup_that_containerd_named() {
    let running = Container::new().start(&["sleep", "1000"]);
    let named = format!("/default/{}", running.id);
    assert_eq!(cgroups_of(running.pid()), [named]);
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn the_shim_lives_in_the_cgroup_that_the_runtimes_options_name() {
    let bundle = TestDir::new();
    let id = unique("shim");
    let named = format!("/shims-of-tests/{id}");
    let shim = |action: &str| {
        let mut shim = shim(NO_CONTAINERD, &id, bundle.path(), action);
        shim.stdin(Stdio::piped()).stdout(Stdio::piped());
        shim
    };
    let mut start = shim("start").spawn().unwrap();
    // google.protobuf.Any of containerd.runc.v1.Options, whose third field is shim_cgroup.
    let options = [
        field(1, b"containerd.runc.v1.Options"),
        field(2, &field(3, named.as_bytes())),
    ];
    start
        .stdin
        .take()
        .unwrap()
        .write_all(&options.concat())
        .unwrap();
    let started = start.wait_with_output().unwrap();
    assert!(started.status.success(), "{started:?}");

    let found = Command::new("pgrep").args(["-f", &id]).output().unwrap();
    let pid: u32 = String::from_utf8(found.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(cgroups_of(pid), std::slice::from_ref(&named));

    let end = End::of(pid).unwrap();
    Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status()
        .unwrap();
    assert!(end.comes_within(Duration::from_secs(10)));
    assert!(shim("delete").output().unwrap().status.success());
    // The cgroup belongs to whoever named it.
    for hierarchy in hierarchies() {
        fs::remove_dir(format!("{hierarchy}{named}")).unwrap();
        fs::remove_dir(format!("{hierarchy}/shims-of-tests")).unwrap();
    }
    assert_no_traces_of(&id);
}

/// A field of a protobuf message that has fewer than 128 bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [
        &[number << 3 | 2, u8::try_from(bytes.len()).unwrap()],
        bytes,
    ]
    .concat()
}

/// In which cgroups the process is: one, if it is the same in each hierarchy.
fn cgroups_of(pid: u32) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let paths = table
        .lines()
        .map(|line| line.splitn(3, ':').nth(2).unwrap().to_owned());
    let mut paths: Vec<_> = paths.collect();
    paths.dedup();
    paths
}

/// The mount point of each hierarchy of cgroups.
fn hierarchies() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let cgroups = mounts
        .lines()
        .filter(|line| line.split(' ').nth(2).unwrap().starts_with("cgroup"));
    cgroups
        .map(|line| line.split(' ').nth(1).unwrap().to_owned())
        .collect()
}
