//! Several containers in one sandbox: one shim and one machine for all of them, and each has a life
//! of its own.

use std::process::Command;

use cube_tests::*;

fn sleeper(group: &str) -> Running {
    Container::new().in_group(group).start(&["sleep", "1000"])
}

/// How many machines of this sandbox there are: the hypervisor's directory is the sandbox's.
fn machines_of(group: &str) -> usize {
    let all = Command::new("pgrep")
        .args(["-x", "cube-hypervisor"])
        .output()
        .unwrap();
    let all = Ended::from(all).text();
    all.split_whitespace()
        .filter_map(|pid| std::fs::read_link(format!("/proc/{pid}/cwd")).ok())
        .filter(|directory| directory.ends_with(group))
        .count()
}

#[test]
fn containers_of_a_group_share_a_machine_and_come_and_go_in_any_order() {
    let first = Container::new();
    let group = first.id.clone();
    let first = first.in_group(&group).start(&["sleep", "1000"]);
    let second = sleeper(&group);
    assert_eq!(first.pid(), second.pid());
    assert_eq!(machines_of(&group), 1);
    // They see the same host name, and each its own processes and files.
    first.exec(&["touch", "/mine"]).success();
    assert_eq!(second.exec(&["ls", "/mine"]).status, 1);
    let processes = second.exec(&["ps", "-o", "args"]).success();
    assert_eq!(processes.matches("sleep 1000").count(), 1, "{processes}");

    // One ends by itself while the others run, and with its own status.
    let third = Container::new().in_group(&group);
    assert_eq!(third.run(&["sh", "-c", "exit 7"]).status, 7);

    // One is started again: a new task of the same container, with the files that it had.
    second.exec(&["touch", "/kept"]).success();
    second.task("kill", &["--signal", "SIGKILL"]).success();
    let _ = second.attach().wait();
    second.task("delete", &[]);
    second.task("start", &["--detach"]).success();
    second.exec(&["ls", "/kept"]).success();
    assert_eq!(first.pid(), second.pid());

    // The first one, whose name the sandbox has, goes; the others stay, and more come.
    let ids = [first.id.clone(), second.id.clone(), third.id.clone()];
    drop(first);
    second.exec(&["true"]).success();
    let fourth = sleeper(&group);
    assert_eq!(second.pid(), fourth.pid());
    drop(second);
    fourth.exec(&["true"]).success();
    assert_eq!(machines_of(&group), 1);
    let last = fourth.id.clone();
    drop(fourth);
    for id in ids.iter().chain([&last]) {
        assert_no_traces_of(id);
    }
    assert_eq!(machines_of(&group), 0);

    // The name is free for another sandbox.
    let again = sleeper(&group);
    again.exec(&["true"]).success();
    let id = again.id.clone();
    drop(again);
    assert_no_traces_of(&id);
    assert_no_traces_of(&group);
}

#[test]
fn a_machine_that_dies_ends_every_container_of_its_group() {
    let first = Container::new();
    let group = first.id.clone();
    let first = first.in_group(&group).start(&["sleep", "1000"]);
    let second = sleeper(&group);
    let pid = first.pid().to_string();
    let mut waiters = [first.attach(), second.attach()];
    let mut kill = Command::new("kill");
    assert!(kill.args(["-KILL", &pid]).status().unwrap().success());
    for waiter in &mut waiters {
        assert_eq!(waiter.wait().unwrap().code(), Some(137));
    }
    let ids = [first.id.clone(), second.id.clone()];
    drop((first, second));
    for id in &ids {
        assert_no_traces_of(id);
    }
}
