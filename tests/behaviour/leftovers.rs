//! After a container's end nothing of it is left on the host, however it ended.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use cube_tests::*;

#[test]
fn nothing_is_left_after_a_run() {
    let container = Container::new();
    container.run(&["true"]).success();
    assert_no_traces_of(&container.id);
}

#[test]
fn nothing_is_left_after_fifty_runs_in_a_row() {
    let (mounts, directories) = (mounts(), run_directories());
    for _ in 0..50 {
        let container = Container::new();
        container.run(&["true"]).success();
        assert_no_traces_of(&container.id);
    }
    assert_eq!((mounts, directories), (self::mounts(), run_directories()));
}

#[test]
fn ten_at_once_run_and_leave_nothing() {
    let containers: Vec<_> = (0..10).map(|_| Container::new()).collect();
    let children: Vec<_> = containers
        .iter()
        .map(|c| {
            c.command(&["--rm"], &["echo", &c.id])
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for (child, container) in children.into_iter().zip(&containers) {
        let text = Ended::from(child.wait_with_output().unwrap()).success();
        assert_eq!(text.trim(), container.id);
    }
    for container in &containers {
        assert_no_traces_of(&container.id);
    }
}

#[test]
fn a_hypervisor_that_is_killed_ends_the_task_within_two_seconds() {
    // A client needs its time to start here, so one listens already: it has told of the start.
    let events = Events::listen();
    let running = Container::new().start(&["sleep", "1000"]);
    events.wait_for("/tasks/start", &running.id);
    let hypervisor = hypervisor_of(&running.id);
    let start = Instant::now();
    assert!(
        Command::new("kill")
            .args(["-KILL", &hypervisor])
            .status()
            .unwrap()
            .success()
    );
    let exit = events.wait_for("/tasks/exit", &running.id);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(exit.status().is_some_and(|status| status != 0), "{exit:?}");
    let list = must_ctr(&["task", "list"]);
    let line = list.lines().find(|l| l.contains(&running.id));
    assert!(line.is_some_and(|l| l.contains("STOPPED")), "{list}");
    let id = running.id.clone();
    running.task("delete", &[]);
    must_ctr(&["container", "delete", &id]);
    std::mem::forget(running);
    assert_no_traces_of(&id);
}

#[test]
fn a_shim_that_is_killed_takes_its_virtual_machine_with_it() {
    let running = Container::new().start(&["sleep", "1000"]);
    let id = running.id.clone();
    let shims = Command::new("pgrep")
        .args(["-f", &format!("containerd-shim-cube.* -id {id}( |$)")])
        .output()
        .unwrap();
    let shims = Ended::from(shims).success();
    assert_eq!(shims.lines().count(), 1, "{shims}");
    assert!(
        Command::new("kill")
            .args(["-KILL", shims.trim()])
            .status()
            .unwrap()
            .success()
    );
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn background_processes_end_with_the_container() {
    let container = Container::new();
    container.sh("sleep 1800 & exit 0").success();
    assert_no_traces_of(&container.id);
}

#[test]
fn a_shim_whose_start_is_not_heard_of_does_not_begin() {
    let bundle = TestDir::new();
    let id = unique("unheard");
    // containerd was killed while it waited for the answer.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = shim(NO_CONTAINERD, &id, bundle.path(), "start")
        .stdin(std::process::Stdio::null())
        .stdout(writer)
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
    let address = fs::read_to_string(bundle.path().join("address")).unwrap();
    let socket = address.strip_prefix("unix://").unwrap();
    assert!(!std::path::Path::new(socket).exists(), "{socket}");
    assert_no_traces_of(&id);
}

/// The hypervisor's pid, which is the task's.
fn hypervisor_of(id: &str) -> String {
    let running = std::mem::ManuallyDrop::new(Running { id: id.to_owned() });
    let pid = running.pid().to_string();
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    assert!(program.ends_with("cube-hypervisor"), "{program:?}");
    pid
}

fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .lines()
        .count()
}

fn run_directories() -> usize {
    let mut found = Vec::new();
    fn walk(path: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            found.push(entry.path());
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                walk(&entry.path(), found);
            }
        }
    }
    walk(std::path::Path::new("/run/cube"), &mut found);
    found.len()
}
