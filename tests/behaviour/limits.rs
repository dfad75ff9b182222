//! What a container may have of its machine and of the host's processors.

use std::fs;

use cube_tests::*;

/// The host's processors that the thread of a vCPU may run on, as the kernel lists them.
fn processors_of(hypervisor: u32, vcpu: usize) -> String {
    let threads = fs::read_dir(format!("/proc/{hypervisor}/task")).unwrap();
    let mut found = threads.map(|thread| thread.unwrap().path()).filter(|path| {
        let name = fs::read_to_string(path.join("comm")).unwrap();
        name.trim() == format!("vcpu{vcpu}")
    });
    let status = fs::read_to_string(found.next().unwrap().join("status")).unwrap();
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap().trim().to_owned()
}

/// The last of the host's processors: not the one that a machine with one vCPU would call so.
fn last_processor() -> String {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let last = online.trim().rsplit(['-', ',']).next().unwrap();
    assert_ne!(last, "0", "this host has one processor alone");
    last.to_owned()
}

#[test]
fn a_container_that_is_bound_to_processors_of_the_host_has_vcpus_that_run_there() {
    let last = last_processor();
    let bound = |container: Container| container.option("--cpuset-cpus", &last);
    let running = bound(Container::new()).start(&["sleep", "1000"]);
    assert_eq!(running.exec(&["nproc"]).success(), "1\n");
    assert_eq!(processors_of(running.pid(), 0), last);
    drop(running);

    // In a machine that others share they are bound as long as the container is there.
    let first = Container::new().option("--cpus", "2");
    let group = first.id.clone();
    let first = first.in_group(&group).start(&["sleep", "1000"]);
    assert_eq!(first.exec(&["nproc"]).success(), "2\n");
    let free = processors_of(first.pid(), 1);
    assert_ne!(free, last);
    let second = bound(Container::new())
        .in_group(&group)
        .start(&["sleep", "1000"]);
    assert_eq!(second.exec(&["nproc"]).success(), "1\n");
    let threads = [0, 1].map(|vcpu| processors_of(first.pid(), vcpu));
    let bound: Vec<_> = threads.iter().filter(|cpus| **cpus == last).collect();
    assert_eq!(bound.len(), 1, "{threads:?}");
    drop(second);
    assert_eq!(
        [0, 1].map(|vcpu| processors_of(first.pid(), vcpu)),
        [&free, &free].map(String::as_str)
    );
}

#[test]
fn processors_that_the_host_does_not_have_are_refused_by_number() {
    let container = Container::new().option("--cpuset-cpus", "0,4000");
    let refused = container.run(&["true"]);
    assert_ne!(refused.status, 0);
    assert!(
        refused
            .stderr
            .contains("names processor 4000, which the host does not have"),
        "{}",
        refused.stderr
    );
    assert_no_traces_of(&container.id);
}

#[test]
fn a_limit_beyond_the_machine_of_the_group_is_refused_and_one_within_it_is_not() {
    let first = Container::new().option("--memory-limit", &(96 << 20).to_string());
    let group = first.id.clone();
    let first = first.in_group(&group).start(&["sleep", "1000"]);
    let join = |option: &str, value: &str| {
        Container::new()
            .option(option, value)
            .in_group(&group)
            .run(&["true"])
    };
    for (option, value, words) in [
        (
            "--memory-limit",
            (512 << 20).to_string(),
            "MiB of the sandbox's VM",
        ),
        (
            "--cpus",
            "2".to_owned(),
            "worth 2 processors, more than the 1",
        ),
    ] {
        let refused = join(option, &value);
        assert_ne!(refused.status, 0);
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
    join("--memory-limit", &(96 << 20).to_string()).success();
    join("--cpus", "1").success();
    first.exec(&["true"]).success();
}
