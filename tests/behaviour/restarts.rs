//! Containers run on while containerd is away, and it finds them as they are when it comes back.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use cube_tests::*;

/// What the host does in a volume raises no event in the guest, so this asks.
const UNTIL_OPEN: &str = "until [ -e /host/open ]; do usleep 20000; done";

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
    let shared = Shared::new();
    let log = shared.file("log");
    let uri = format!("file://{}", log.display());
    let script = format!(
        "i=0; while [ $i -lt {LINES} ]; do i=$((i + 1)); echo $i; usleep 1000; done; {UNTIL_OPEN}; exit 5"
    );
    let running = shared
        .of(Container::new())
        .option("--log-uri", &uri)
        .start(&["sh", "-c", &script]);
    let mut output = Follower::of(&log);
    output.wait_for("100");
    containerd.kill();
    let far = fs::read_to_string(&log).unwrap().lines().count() + 200;
    assert!(far < LINES, "the container was too fast for this test");
    output.wait_for(&far.to_string());
    containerd.start_again();
    let events = Events::listen();
    shared.file("open");
    let exit = events.wait_for("/tasks/exit", &running.id);
    assert_eq!(exit.status(), Some(5));
    let id = running.id.clone();
    drop(running);
    let expected: String = (1..=LINES).map(|n| format!("{n}\n")).collect();
    assert!(fs::read_to_string(&log).unwrap() == expected);
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
    running.task("kill", &["--signal", "SIGKILL"]).success();
    assert_eq!(waiter.wait().unwrap().code(), Some(137));
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn a_container_that_ends_while_containerd_is_away_is_found_with_its_status() {
    let containerd = Containerd::of_the_tests();
    let shared = Shared::new();
    let log = shared.file("log");
    let script = format!("echo up >/host/log; {UNTIL_OPEN}; echo bye >>/host/log; exit 6");
    // Without outputs of its own, so that a client can attach later.
    let running = shared
        .of(Container::new())
        .flag("--null-io")
        .start(&["sh", "-c", &script]);
    let mut output = Follower::of(&log);
    output.wait_for("up");
    containerd.kill();
    shared.file("open");
    output.wait_for("bye");
    containerd.start_again();
    // The client deletes the task with that.
    assert_eq!(running.attach().wait().unwrap().code(), Some(6));
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

/// A container without outputs of its own, and an exec that runs in it.
fn with_an_exec(container: Container, script: &str) -> Running {
    let running = container.flag("--null-io").start(&["sh", "-c", script]);
    let mut exec = running.exec_command(&["--detach"], &["sleep", "1000"]);
    Ended::from(exec.output().unwrap()).success();
    running
}

// The next two hold for an absence of any length: containerd's socket, not a clock, tells the shim when to try again.

#[test]
fn what_happens_while_containerd_stands_still_is_told_once_and_in_order_when_it_goes_on() {
    let containerd = Containerd::of_the_tests();
    let events = Events::listen();
    let running = with_an_exec(Container::new(), "exec sleep 1000");
    let pid = running.pid();
    let end = End::of(pid).unwrap();
    containerd.stop();
    // SAFETY: kill(2) has no memory arguments.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
    assert!(end.comes_within(Duration::from_secs(60)));
    containerd.go_on();
    let exit = events.wait_for("/tasks/exit", &running.id);
    assert_eq!(exit.status(), Some(137));
    let id = running.id.clone();
    drop(running);
    assert_eq!(
        events.of_container_until(&id, "/tasks/delete"),
        [
            "/tasks/create",
            "/tasks/start",
            "/tasks/exec-added",
            "/tasks/exec-started",
            "/tasks/exit",
            "/tasks/exit",
            "/tasks/delete"
        ]
    );
    let exits = events.all_of(&id, "/tasks/exit");
    assert_eq!(exits.last().map(|told| &told.process), Some(&id));
}

#[test]
fn what_happens_while_containerd_is_away_is_told_once_and_in_order_when_it_comes_back() {
    let containerd = Containerd::of_the_tests();
    let shared = Shared::new();
    let log = shared.file("log");
    let container = shared.of(Container::new());
    let container = container.option("--memory-limit", &(32 << 20).to_string());
    // tail keeps the last line, and there is no end of one.
    let script = format!("{UNTIL_OPEN}; echo bye >/host/log; exec tail /dev/zero");
    let running = with_an_exec(container, &script);
    containerd.kill();
    let start = fs::metadata(containerd.log()).unwrap().len();
    shared.file("open");
    Follower::of(&log).wait_for("bye");
    // No client listens as early as events come: what the shim told is what containerd says that it was told.
    let mut said = Follower::from(&containerd.log(), start);
    containerd.start_again();
    assert_eq!(running.attach().wait().unwrap().code(), Some(137));
    let id = running.id.clone();
    drop(running);
    let mut told = Vec::new();
    while told.last().is_none_or(|topic| topic != "/tasks/delete") {
        let line = said.next_line();
        let topic = line.split("topic=").nth(1);
        let topic = topic.and_then(|rest| rest.split_whitespace().next());
        if let (true, Some(topic)) = (line.contains("\"event forwarded\""), topic) {
            told.push(topic.trim_matches('"').to_owned());
        }
    }
    assert_eq!(
        told,
        ["/tasks/oom", "/tasks/exit", "/tasks/exit", "/tasks/delete"]
    );
    assert_no_traces_of(&id);
}

#[test]
fn a_containerd_that_is_killed_in_the_middle_of_a_create_leaves_nothing_of_it() {
    let containerd = Containerd::of_the_tests();
    let container = Container::new();
    let id = container.id.clone();
    // When it is back it finds a shim without a task, and deletes it. 1.6 does not: there the create's own end has to come.
    let limit = if must_ctr(&["version"]).contains("1.6.") {
        "20"
    } else {
        "1000"
    };
    // A guest without an agent.
    let image = setting("CUBE_TEST_HANGING_INITRAMFS");
    let container = container
        .setting("initramfs", &image)
        .setting("boot_timeout_s", limit)
        .setting("log_level", "debug");
    let start = fs::metadata(containerd.log()).unwrap().len();
    let mut said = Follower::from(&containerd.log(), start);
    let mut client = container.command(&["--detach"], &["true"]);
    let mut client = client.stderr(Stdio::null()).spawn().unwrap();
    let pid = loop {
        let line = said.next_line();
        if let (true, Some((_, pid))) = (
            mentions(&line, &id),
            line.split_once("The hypervisor is process "),
        ) {
            let digits = pid.split(|c: char| !c.is_ascii_digit()).next().unwrap();
            break digits.parse().unwrap();
        }
    };
    let hypervisor = End::of(pid).expect("the hypervisor has ended by itself");
    containerd.kill();
    assert!(!client.wait().unwrap().success());
    containerd.start_again();

    assert!(
        hypervisor.comes_within(Duration::from_secs(60)),
        "the machine of a create that nobody waits for runs on"
    );
    let ended = try_ctr(&["task", "delete", "--force", &id]);
    assert!(
        ended.status == 0 || ended.stderr.contains("not found"),
        "{ended:?}"
    );
    must_ctr(&["container", "delete", &id]);
    assert_no_traces_of(&id);

    // The name is free.
    let mut again = Container::new();
    again.id.clone_from(&id);
    assert_eq!(again.sh("exit 3").status, 3);
    assert_no_traces_of(&id);
}
