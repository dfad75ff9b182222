//! What went wrong for users of other VM runtimes, by their public bug reports, goes right here.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use cube_tests::*;

#[test]
fn a_line_that_is_piped_to_an_exec_comes_back() {
    let running = Container::new().start(&["sleep", "1000"]);
    let mut command = running.exec_command(&[], &["cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = command.spawn().unwrap();
    let mut input = client.stdin.take().unwrap();
    input.write_all(b"123\n").unwrap();
    drop(input);
    let output = Ended::from(client.wait_with_output().unwrap());
    assert_eq!(output.success(), "123\n");
}

#[test]
fn a_process_left_in_a_shared_pid_namespace_ends_with_its_container() {
    let first = Container::new();
    let group = first.id.clone();
    let in_group = |container: Container| container.in_group(&group);
    let pod = in_group(first).start(&["sleep", "1000"]);
    let shared = format!("pid:/proc/{}/ns/pid", pod.pid());
    let container = in_group(Container::new().option("--with-ns", &shared));
    container.sh("sleep 1800 & exit 0").success();
    let watcher = in_group(Container::new().option("--with-ns", &shared));
    let seen = watcher.run(&["ps", "-o", "args"]).success();
    assert!(
        seen.contains("ps -o args") && seen.contains("sleep 1000"),
        "{seen}"
    );
    assert!(!seen.contains("sleep 1800"), "{seen}");
    assert_no_traces_of(&container.id);
}

#[test]
fn fifty_kills_for_want_of_memory_are_told_fifty_times() {
    let events = Events::listen();
    let limit = (32 << 20).to_string();
    let running = Container::new()
        .option("--memory-limit", &limit)
        .start(&["sleep", "1000"]);
    for _ in 0..50 {
        // tail keeps the last line, and there is no end of one.
        assert_eq!(running.exec(&["tail", "/dev/zero"]).status, 137);
    }
    let id = running.id.clone();
    drop(running);
    let topics = events.of_container_until(&id, "/tasks/delete");
    let told = topics.iter().filter(|topic| *topic == "/tasks/oom").count();
    assert_eq!(told, 50, "{topics:?}");
}

#[test]
fn an_exec_that_runs_when_init_ends_is_told_of_before_it() {
    let events = Events::listen();
    let running = Container::new().start(&["sleep", "1000"]);
    let (exec_id, mut client) = running.sleeping_exec();
    running.task("kill", &["--signal", "SIGKILL"]).success();
    assert_eq!(client.wait().unwrap().code(), Some(137));
    let id = running.id.clone();
    drop(running);
    events.wait_for("/tasks/delete", &id);
    let exits = events.all_of(&id, "/tasks/exit");
    let of: Vec<_> = exits.iter().map(|told| told.process.as_str()).collect();
    assert_eq!(of, [exec_id.as_str(), id.as_str()]);
}

#[test]
fn a_container_with_64_mib_starts() {
    let limit = (64 << 20).to_string();
    let running = Container::new()
        .option("--memory-limit", &limit)
        .start(&["sleep", "1000"]);
    running.exec(&["true"]).success();
    let metrics = running.task("metrics", &[]).success();
    let line = metrics.lines().find(|l| l.contains("memory.usage_limit"));
    let line = line.unwrap_or_else(|| panic!("no limit: {metrics}"));
    assert_eq!(line.split_whitespace().last(), Some(limit.as_str()));
}

#[test]
fn a_find_over_600_000_files_and_2_000_open_ones_leave_the_hosts_descriptors_alone() {
    const DIRECTORIES: usize = 600;
    // As many as a hypervisor holds for speed alone, and its own.
    const BOUND: usize = 1200;
    let files = TestDir::new();
    for d in 0..DIRECTORIES {
        let directory = files.path().join(d.to_string());
        fs::create_dir(&directory).unwrap();
        for f in 0..1000 {
            fs::File::create(directory.join(f.to_string())).unwrap();
        }
    }
    let mount = format!(
        "type=bind,src={},dst=/many,options=rbind:rw",
        files.path().display()
    );
    let running = Container::new()
        .image(DEBIAN)
        .option("--mount", &mount)
        .start(&["sleep", "100000"]);
    let open = || {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", running.pid()));
        descriptors.unwrap().count()
    };
    let found = running.exec(&["sh", "-c", "find /many -type f | wc -l"]);
    assert_eq!(found.success(), format!("{}\n", DIRECTORIES * 1000));
    running.exec(&["true"]).success();
    assert!(open() < BOUND, "{} are open after the find", open());

    // ctr lets a process open no more than 1024: four of them, which say when theirs are open and wait until all are.
    let program = "import os
told, tell = os.pipe()
wait, end = os.pipe()
for p in range(4):
    if os.fork() == 0:
        os.close(end)
        held = [open(f'/many/{p}/{f}') for f in range(500)]
        os.write(tell, b'.')
        os.read(wait, 1)
        os._exit(0)
print(sum(len(os.read(told, 1)) for _ in range(4)) * 500)
os.close(end)
for p in range(4): assert os.wait()[1] == 0";
    let said = running.exec(&["python3", "-c", program]).success();
    assert_eq!(said, "2000\n");
    running.exec(&["true"]).success();
    assert!(
        open() < BOUND,
        "{} are open when the files are closed",
        open()
    );
}
