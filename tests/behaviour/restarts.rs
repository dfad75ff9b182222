//! Containers run on while containerd is away, and it finds them as they are when it comes back.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use cube_tests::*;

/// A file's lines, also those that come later.
struct Follower {
    client: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Follower {
    fn of(file: &Path) -> Self {
        let mut tail = Command::new("tail");
        tail.args(["-n", "+1", "-f"])
            .arg(file)
            .stdout(Stdio::piped());
        let mut client = tail.spawn().unwrap();
        let lines = BufReader::new(client.stdout.take().unwrap()).lines();
        Self { client, lines }
    }

    fn wait_for(&mut self, line: &str) {
        let found = self.lines.by_ref().map(Result::unwrap).any(|l| l == line);
        assert!(found, "tail has ended before {line:?}");
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// A container whose outputs go to `log`, which exists afterwards.
fn start(log: &Path, options: &[(&str, &str)], script: &str) -> Running {
    let uri = format!("file://{}", log.display());
    let mut container = Container::new().option("--log-uri", &uri);
    for (name, value) in options {
        container = container.option(name, value);
    }
    container.start(&["sh", "-c", script])
}

fn state_of(running: &Running) -> String {
    let list = must_ctr(&["task", "list"]);
    let line = list
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first() == Some(&running.id.as_str()));
    line.unwrap_or_else(|| panic!("no task {}: {list}", running.id))[2].to_owned()
}

#[test]
fn output_flows_on_while_containerd_is_away_and_none_is_lost() {
    const LINES: usize = 3000;
    let containerd = Containerd::of_the_tests();
    let dir = TestDir::new();
    let log = dir.path().join("log");
    let script = format!(
        "i=0; while [ $i -lt {LINES} ]; do i=$((i + 1)); echo $i; usleep 1000; done; exit 5"
    );
    let running = start(&log, &[], &script);
    let mut output = Follower::of(&log);
    output.wait_for("100");
    containerd.kill();
    // What may have been under way, and what was written since.
    let far = fs::read_to_string(&log).unwrap().lines().count() + 200;
    output.wait_for(&far.to_string());
    assert!(far < LINES, "the container was too fast for this test");
    containerd.start_again();
    assert_eq!(running.attach().wait().unwrap().code(), Some(5));
    let expected: String = (1..=LINES).map(|n| format!("{n}\n")).collect();
    output.wait_for(&LINES.to_string());
    assert!(fs::read_to_string(&log).unwrap() == expected);
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn a_running_container_is_found_again_and_serves_as_before() {
    let containerd = Containerd::of_the_tests();
    let running = Container::new().start(&["sleep", "1000"]);
    let pid = running.pid();
    running.exec(&["touch", "/mine"]).success();
    containerd.kill();
    containerd.start_again();
    assert_eq!(state_of(&running), "RUNNING");
    assert_eq!(running.pid(), pid);
    running.exec(&["ls", "/mine"]).success();
    let mut waiter = running.attach();
    running.task("kill", &["--signal", "SIGTERM"]).success();
    assert_eq!(waiter.wait().unwrap().code(), Some(143));
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn a_container_that_ends_while_containerd_is_away_is_found_with_its_status() {
    let containerd = Containerd::of_the_tests();
    let dir = TestDir::new();
    let log = dir.path().join("log");
    let gate = dir.path().join("gate");
    fs::create_dir(&gate).unwrap();
    let mount = format!(
        "type=bind,src={},dst=/gate,options=rbind:ro",
        gate.display()
    );
    // What the host does in a volume raises no event in the guest, so this asks.
    let script = "echo up; until [ -e /gate/open ]; do usleep 20000; done; echo bye; exit 6";
    let running = start(&log, &[("--mount", &mount)], script);
    let mut output = Follower::of(&log);
    output.wait_for("up");
    containerd.kill();
    fs::write(gate.join("open"), "").unwrap();
    output.wait_for("bye");
    containerd.start_again();
    assert_eq!(running.attach().wait().unwrap().code(), Some(6));
    assert_eq!(state_of(&running), "STOPPED");
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}
