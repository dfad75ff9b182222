//! Containers that are created and not started yet, and containers that have ended and are not deleted yet.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use cube_tests::*;
use serde_json::json;

fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn a_container_takes_execs_before_its_start() {
    for others_may_join in [false, true] {
        let (dir, id) = (TestDir::new(), unique("s"));
        let group = if others_may_join { &id } else { "" };
        let bundle = shell_bundle(&dir, &id, group, "read line </fifo; exit 4");
        let sandbox = Sandbox::start(&bundle, &id).unwrap();
        sandbox.create(&bundle, &id, &Streams::default()).unwrap();
        let run = |exec: &str, script: &str| {
            let process = json!({"args": ["sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
            sandbox
                .add_exec(&id, exec, process.to_string(), "")
                .unwrap();
            sandbox.begin(&id, exec).unwrap();
        };
        run("makes", "mkfifo /fifo; exit 3");
        assert_eq!(sandbox.end(&id, "makes").unwrap(), 3);
        run("stays", "exec sleep 1000");
        sandbox.begin(&id, "").unwrap();
        run("tells", "echo go >/fifo");
        assert_eq!(sandbox.wait(&id, "").unwrap(), 4);
        assert_eq!(sandbox.end(&id, "stays").unwrap(), 137);
        sandbox.delete(&id, "").unwrap();
        sandbox.shut_down().unwrap();
        assert_no_traces_of(&id);
    }
}

#[test]
fn a_container_that_is_deleted_without_a_start_takes_its_execs_along() {
    let (dir, id) = (TestDir::new(), unique("s"));
    let bundle = shell_bundle(&dir, &id, "", "exit 4");
    let sandbox = Sandbox::start(&bundle, &id).unwrap();
    sandbox.create(&bundle, &id, &Streams::default()).unwrap();
    let process = json!({"args": ["sleep", "1000"], "env": ["PATH=/bin"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    sandbox
        .add_exec(&id, "stays", process.to_string(), "")
        .unwrap();
    sandbox.begin(&id, "stays").unwrap();
    sandbox.delete(&id, "").unwrap();
    sandbox.shut_down().unwrap();
    assert_no_traces_of(&id);
}

#[test]
fn a_container_that_has_ended_holds_no_machine_and_answers_as_before() {
    let events = Events::listen();
    let container = Container::new().start(&["sleep", "1000"]);
    let pid = container.pid();
    assert!(is_there(pid));
    container.task("kill", &["--signal", "SIGKILL"]).success();
    let told = events.wait_for("/tasks/exit", &container.id);
    assert_eq!(told.status(), Some(137));
    assert!(!is_there(pid), "the hypervisor is there after the exit");
    let list = must_ctr(&["task", "list"]);
    let line = list
        .lines()
        .find(|line| mentions(line, &container.id))
        .unwrap();
    assert!(line.ends_with("STOPPED"), "{line}");
    let figures = container.task("metrics", &[]).success();
    assert!(figures.contains("memory"), "{figures}");
    assert_ne!(container.exec(&["true"]).status, 0);
    // ctr only tells of the status.
    let deleted = container.task("delete", &[]);
    assert_eq!(deleted.status, 0);
    assert!(deleted.stderr.contains("137"), "{}", deleted.stderr);
    assert_no_traces_of(&container.id);
}

#[test]
fn a_machine_ends_once_all_output_was_taken_and_not_before() {
    for held_up in [false, true] {
        let (dir, id) = (TestDir::new(), unique("s"));
        // Less than a FIFO holds, which counts as taken; or for ever, so that a client has to make room.
        let script = if held_up {
            "n=0; while :; do head -c 1024 /dev/zero; n=$((n + 1)); echo $n >>/said; done"
        } else {
            "head -c 30000 /dev/zero"
        };
        let bundle = shell_bundle(&dir, &id, "", script);
        let said = bundle.join("rootfs/said");
        fs::write(&said, "").unwrap();
        let streams = Streams {
            stdout: make_fifo(&dir, "stdout"),
            ..Streams::default()
        };
        let sandbox = Sandbox::start(&bundle, &id).unwrap();
        // What is in a FIFO that nobody has open is lost with the process.
        let mut client = File::options()
            .read(true)
            .write(true)
            .open(&streams.stdout)
            .unwrap();
        let pid = sandbox.launch(&bundle, &id, &streams).unwrap();
        if held_up {
            Follower::of(&said).wait_for("128");
            sandbox.kill(&id).unwrap();
        }
        let status = sandbox.wait(&id, "").unwrap();
        assert_eq!(status, if held_up { 137 } else { 0 });
        assert_eq!(is_there(pid), held_up);
        let mut reader = File::open(&streams.stdout).unwrap();
        let mut first = vec![1; 1024];
        client.read_exact(&mut first).unwrap();
        // It is a writer, too: without it the end of the output is to be seen.
        drop(client);
        let rest = std::thread::spawn(move || {
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            rest.len()
        });
        sandbox.delete(&id, "").unwrap();
        let all = rest.join().unwrap() + first.len();
        let _ = writeln!(std::io::stderr(), "states: {all} bytes arrived");
        let written = fs::read_to_string(&said).unwrap().lines().count() * 1024;
        if held_up {
            assert!(all >= written, "{all} bytes of {written}");
        } else {
            assert_eq!(all, 30000);
        }
        sandbox.shut_down().unwrap();
        assert_no_traces_of(&id);
    }
}
