//! The agent with real containers, on this machine instead of in a guest: its service over Unix
//! sockets, its helpers, cgroups, namespaces and streams are what they are in a guest.
//!
//! Needs root. The agent collects every orphan, so it runs in a process of its own: this program
//! once more. It has its own mount and PID namespaces, so that nothing is left when it has ended.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::time::{Duration, Instant};

use cube_agent_protocol::agent::{ConfigureRequest, Dns, Interface, Neighbour, Route};
use rig::{Agent, exec_process, spec};
use serde_json::json;
use ttrpc::Code;

/// A list of tests: names and functions.
macro_rules! tests {
    ($($name:ident = $test:ident,)*) => {
        [$((stringify!($name), |harness| harness.block($test)),)*]
    };
}

/// Here, and in a guest too if there is KVM.
const TESTS: [rig::Test; 21] = tests![
    a_container_says_hello_and_exits_with_its_code = hello,
    signals_end_a_container_with_128_and_the_number = signals,
    a_missing_program_fails_in_create_in_runcs_words = missing_program,
    create_refuses_what_it_cannot_do = refused,
    identity_environment_and_limits_are_the_specs = identity,
    stdin_ends_by_shutdown_and_by_close_stdin = stdin_ends,
    sixty_four_mebibytes_arrive_on_both_outputs_and_through_stdin = big_streams,
    a_process_that_ignores_its_streams_does_no_harm = careless_streams,
    an_exec_runs_in_the_container = exec,
    an_exec_with_a_background_child_ends_and_its_output_with_delete = background,
    what_init_leaves_behind_ends_with_it = leftovers,
    an_execs_exit_comes_before_its_containers = exec_exit_first,
    a_terminal_has_size_owner_and_job_control = terminal,
    pause_stops_and_resume_goes_on = pause,
    processes_and_figures_are_those_of_the_container = figures,
    devices_are_filtered = devices,
    seccomp_filters_init_and_exec = seccomp,
    a_user_namespace_is_the_containers_and_its_execs = user_namespace,
    every_call_answers_wrong_names_and_states = wrong_calls,
    fifty_containers_at_once_leave_nothing = many,
    past_its_memory_limit_a_container_is_killed = memory_limit,
];

/// In a guest only.
const GUEST_TESTS: [rig::Test; 2] = tests![
    guest_wide_settings_take_effect = settings,
    settings_that_cannot_be_made_are_refused_by_name = bad_settings,
];

fn main() -> std::process::ExitCode {
    rig::run(&TESTS, &GUEST_TESTS)
}

async fn hello(agent: Agent) {
    let io = agent.streams(false);
    agent
        .create(
            "hello",
            &spec(&["sh", "-c", "echo out; echo err >&2; exit 7"]),
            &io,
        )
        .await
        .unwrap();
    let (stdout, stderr) = tokio::join!(io.stdout(), io.stderr());
    let (stdout, stderr) = (stdout.collect(), stderr.collect());
    let wait = agent.wait("hello", "");
    agent.start("hello").await.unwrap();
    let (status, out, err) = tokio::join!(wait, stdout, stderr);
    assert_eq!(status.unwrap(), 7);
    assert_eq!(
        (out.as_slice(), err.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    // Once more at once; then it is forgotten.
    assert_eq!(agent.wait("hello", "").await.unwrap(), 7);
    assert_eq!(agent.delete("hello", "").await.unwrap(), 7);
    assert_eq!(
        agent.wait("hello", "").await.unwrap_err().0,
        Code::NOT_FOUND
    );
    assert_eq!(
        agent.delete("hello", "").await.unwrap_err().0,
        Code::NOT_FOUND
    );
}

async fn signals(agent: Agent) {
    for (signal, status) in [(9, 137), (15, 143)] {
        let io = agent.no_streams();
        // As PID 1 of its namespace a shell ignores signals that it has no handler for.
        let script = "trap 'trap - TERM; kill -TERM $$; exit 143' TERM; echo > /ready; while :; do sleep 1; done";
        agent
            .create("s", &spec(&["sh", "-c", script]), &io)
            .await
            .unwrap();
        agent.start("s").await.unwrap();
        agent.wait_for_file("ready").await;
        agent.signal("s", "", signal, false).await.unwrap();
        assert_eq!(agent.wait("s", "").await.unwrap(), status);
        assert_eq!(
            agent.signal("s", "", 9, false).await.unwrap_err().0,
            Code::NOT_FOUND
        );
        agent.delete("s", "").await.unwrap();
        agent.remove_file("ready");
    }
    // Created and never started.
    agent
        .create("s", &spec(&["true"]), &agent.no_streams())
        .await
        .unwrap();
    assert_eq!(agent.delete("s", "").await.unwrap(), 137);
}

async fn missing_program(agent: Agent) {
    for (program, words) in [
        (
            "nosuch",
            r#"exec: "nosuch": executable file not found in $PATH"#,
        ),
        (
            "/no/such",
            r#"exec: "/no/such": stat /no/such: no such file or directory"#,
        ),
        ("/etc/passwd", r#"exec: "/etc/passwd": permission denied"#),
        ("/etc", r#"exec: "/etc": is a directory"#),
    ] {
        let (code, message) = agent
            .create("m", &spec(&[program]), &agent.no_streams())
            .await
            .unwrap_err();
        assert_eq!(code, Code::INVALID_ARGUMENT, "{message}");
        assert!(message.contains(words), "{message}");
        assert!(
            message.starts_with("unable to start container process"),
            "{message}"
        );
    }
    // The same id is free again.
    agent
        .create("m", &spec(&["true"]), &agent.no_streams())
        .await
        .unwrap();
    agent.delete("m", "").await.unwrap();
}

async fn refused(agent: Agent) {
    let io = agent.no_streams();
    let with = |pointer: &str, value: serde_json::Value| {
        let mut spec = spec(&["true"]);
        *spec.pointer_mut(pointer).unwrap() = value;
        spec
    };
    let mut missing_mount = spec(&["true"]);
    missing_mount["mounts"].as_array_mut().unwrap().push(json!(
        {"destination": "/data", "type": "bind", "source": "/no/such", "options": ["rbind"]}
    ));
    let mut bad_mount = spec(&["true"]);
    bad_mount["mounts"].as_array_mut().unwrap().push(json!(
        {"destination": "/data", "type": "nosuchfs", "source": "x"}
    ));
    for (spec, words) in [
        (with("/process/cwd", json!("relative")), "process.cwd"),
        (
            with("/linux/resources", json!({"memory": {"swappiness": 1}})),
            "swappiness",
        ),
        (
            missing_mount,
            r#"error mounting "/no/such" to rootfs at "/data": stat /no/such: no such file or directory"#,
        ),
        (
            bad_mount,
            r#"error mounting "x" to rootfs at "/data": no such device"#,
        ),
    ] {
        let (code, message) = agent.create("r", &spec, &io).await.unwrap_err();
        assert!(message.contains(words), "{code:?} {message}");
    }
    let (code, _) = agent
        .create("../x", &spec(&["true"]), &io)
        .await
        .unwrap_err();
    assert_eq!(code, Code::INVALID_ARGUMENT);
}

async fn identity(agent: Agent) {
    let mut spec = spec(&[
        "sh",
        "-c",
        "id -u; id -G; pwd; echo $A $HOME; ulimit -n; umask; grep -h -E 'Cap(Eff|Bnd|Amb)|NoNewPrivs|SigIgn|SigBlk' /proc/self/status; cat /proc/self/oom_score_adj; echo to-stdout > /dev/stdout; cat /proc/1/comm; hostname",
    ]);
    spec["process"]["user"] =
        json!({"uid": 33, "gid": 34, "umask": 0o27, "additionalGids": [35, 36]});
    spec["process"]["env"] = json!(["PATH=/bin", "A=1", "A=2"]);
    spec["process"]["cwd"] = json!("/made/for/me");
    spec["process"]["noNewPrivileges"] = json!(true);
    spec["process"]["oomScoreAdj"] = json!(500);
    spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "hard": 99, "soft": 88}]);
    spec["process"]["capabilities"] = json!({
        "bounding": ["CAP_NET_BIND_SERVICE", "CAP_CHOWN"], "effective": ["CAP_NET_BIND_SERVICE"],
        "permitted": ["CAP_NET_BIND_SERVICE"], "inheritable": ["CAP_NET_BIND_SERVICE"], "ambient": ["CAP_NET_BIND_SERVICE"]
    });
    spec["hostname"] = json!("pod-name");
    let (status, out) = agent.run("identity", &spec).await;
    let expected = "33\n34 35 36\n/made/for/me\n2 /var/www\n88\n0027\n\
        CapEff:\t0000000000000400\nCapBnd:\t0000000000000401\nCapAmb:\t0000000000000400\n\
        NoNewPrivs:\t1\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n500\nto-stdout\nsh\npod-name\n";
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&out), sorted(expected));
    assert_eq!(status, 0);
}

async fn stdin_ends(agent: Agent) {
    let io = agent.streams(false);
    agent.create("c", &spec(&["cat"]), &io).await.unwrap();
    agent.start("c").await.unwrap();
    let mut stdin = io.stdin().await;
    stdin.write(b"123\n").await;
    stdin.end().await;
    assert_eq!(io.stdout().await.collect().await, b"123\n");
    assert_eq!(agent.wait("c", "").await.unwrap(), 0);
    agent.delete("c", "").await.unwrap();

    let io = agent.streams(false);
    agent.create("c", &spec(&["cat"]), &io).await.unwrap();
    agent.start("c").await.unwrap();
    let mut stdin = io.stdin().await;
    stdin.write(b"456\n").await;
    let mut stdout = io.stdout().await;
    assert_eq!(stdout.read_exact(4).await, b"456\n");
    agent.close_stdin("c", "").await.unwrap();
    assert_eq!(stdout.collect().await, b"");
    assert_eq!(agent.wait("c", "").await.unwrap(), 0);
    agent.delete("c", "").await.unwrap();
}

async fn big_streams(agent: Agent) {
    const SIZE: usize = 64 << 20;
    let io = agent.streams(false);
    let script = "head -c 67108864 /dev/zero & head -c 67108864 /dev/zero | tr '\\0' 'e' >&2; wait";
    agent
        .create("big", &spec(&["sh", "-c", script]), &io)
        .await
        .unwrap();
    agent.start("big").await.unwrap();
    let (stdout, stderr) = (io.stdout().await, io.stderr().await);
    let (out, err) = tokio::join!(stdout.collect(), stderr.collect());
    assert!(out.len() == SIZE && out.iter().all(|byte| *byte == 0));
    assert!(err.len() == SIZE && err.iter().all(|byte| *byte == b'e'));
    assert_eq!(agent.wait("big", "").await.unwrap(), 0);
    agent.delete("big", "").await.unwrap();

    let io = agent.streams(false);
    agent
        .create("big", &spec(&["sha256sum"]), &io)
        .await
        .unwrap();
    agent.start("big").await.unwrap();
    let mut stdin = io.stdin().await;
    stdin.write(&vec![0; SIZE]).await;
    stdin.end().await;
    let out = String::from_utf8(io.stdout().await.collect().await).unwrap();
    assert!(
        out.starts_with("3b6a07d0d404fab4e23b6d34bc6696a6a312dd92821332385e5af7c01c421351"),
        "{out}"
    );
    agent.wait("big", "").await.unwrap();
    agent.delete("big", "").await.unwrap();
}

async fn careless_streams(agent: Agent) {
    let io = agent.streams(false);
    let script = "exec 1>&- 2>&-; echo > /closed; read line";
    agent
        .create("c", &spec(&["sh", "-c", script]), &io)
        .await
        .unwrap();
    agent.start("c").await.unwrap();
    // Its outputs end while it lives.
    assert_eq!(io.stdout().await.collect().await, b"");
    assert_eq!(io.stderr().await.collect().await, b"");
    let mut stdin = io.stdin().await;
    stdin.write(b"go\n").await;
    assert_eq!(agent.wait("c", "").await.unwrap(), 0);
    agent.delete("c", "").await.unwrap();
    agent.remove_file("closed");

    // More than a pipe holds, for somebody who never reads.
    let io = agent.streams(false);
    agent
        .create("c", &spec(&["sleep", "1000"]), &io)
        .await
        .unwrap();
    agent.start("c").await.unwrap();
    let mut stdin = io.stdin().await;
    let written =
        tokio::time::timeout(Duration::from_millis(300), stdin.write(&vec![0; 4 << 20])).await;
    assert!(
        written.is_err(),
        "the pipe, the socket and the agent hold no 4 MiB"
    );
    agent.signal("c", "", 9, false).await.unwrap();
    assert_eq!(agent.wait("c", "").await.unwrap(), 137);
    agent.delete("c", "").await.unwrap();
}

async fn exec(agent: Agent) {
    agent.running("c", &["sleep", "1000"]).await;
    let (status, out) = agent
        .exec_collect("c", "e", &exec_process(&["sh", "-c", "echo $B; id -u; grep ^0:: /proc/self/cgroup; grep -c . /proc/self/mounts; cat /proc/1/comm; exit 3"]))
        .await;
    assert_eq!(status, 3);
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        (lines[0], lines[1], lines[2], lines[4]),
        ("2", "0", "0::/", "sleep"),
        "{out}"
    );
    assert_eq!(agent.delete("c", "e").await.unwrap(), 3);

    for (program, words) in [
        (
            "nosuch",
            r#"exec failed: unable to start container process: exec: "nosuch": executable file not found in $PATH"#,
        ),
        ("/etc/passwd", r#"exec: "/etc/passwd": permission denied"#),
    ] {
        let (code, message) = agent
            .exec("c", "e", &exec_process(&[program]), &agent.no_streams())
            .await
            .unwrap_err();
        assert_eq!(code, Code::INVALID_ARGUMENT);
        assert!(message.contains(words), "{message}");
    }
    let mut process = exec_process(&[
        "sh",
        "-c",
        "id -u; id -G; pwd; echo $HOME; grep CapEff /proc/self/status; echo again > /dev/stdout",
    ]);
    process["user"] = json!({"uid": 33, "gid": 33, "additionalGids": [40]});
    process["cwd"] = json!("/etc");
    process["capabilities"] =
        json!({"bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "permitted": ["CAP_CHOWN"]});
    let (status, out) = agent.exec_collect("c", "e", &process).await;
    assert_eq!(
        (status, out.as_str()),
        (
            0,
            "33\n33 40\n/etc\n/var/www\nCapEff:\t0000000000000000\nagain\n"
        )
    );
    agent.delete("c", "e").await.unwrap();

    for (signal, status) in [(9, 137), (15, 143)] {
        agent
            .exec(
                "c",
                "e",
                &exec_process(&["sleep", "1000"]),
                &agent.no_streams(),
            )
            .await
            .unwrap();
        let (code, _) = agent.delete("c", "e").await.unwrap_err();
        assert_eq!(code, Code::FAILED_PRECONDITION);
        let (code, _) = agent
            .exec("c", "e", &exec_process(&["true"]), &agent.no_streams())
            .await
            .unwrap_err();
        assert_eq!(code, Code::ALREADY_EXISTS);
        agent.signal("c", "e", signal, false).await.unwrap();
        assert_eq!(agent.wait("c", "e").await.unwrap(), status);
        agent.delete("c", "e").await.unwrap();
    }
    agent.end("c").await;
}

async fn background(agent: Agent) {
    agent.running("c", &["sleep", "1000"]).await;
    let io = agent.streams(false);
    let script = "echo before; (sleep 1000; echo never) & exit 0";
    agent
        .exec("c", "e", &exec_process(&["sh", "-c", script]), &io)
        .await
        .unwrap();
    assert_eq!(agent.wait("c", "e").await.unwrap(), 0);
    let mut stdout = io.stdout().await;
    assert_eq!(stdout.read_exact(7).await, b"before\n");
    agent.delete("c", "e").await.unwrap();
    assert_eq!(stdout.collect().await, b"");
    // The child lives on in the container.
    agent.until(async || agent.list("c").await.len() == 3).await;
    agent.end("c").await;
}

async fn leftovers(agent: Agent) {
    // With a PID namespace of its own, and without.
    for own in [true, false] {
        let mut spec = spec(&["sh", "-c", "sleep 1000 & exit 5"]);
        if !own {
            let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
            namespaces.retain(|namespace| namespace["type"] != "pid");
        }
        let before = Instant::now();
        agent.create("l", &spec, &agent.no_streams()).await.unwrap();
        agent.start("l").await.unwrap();
        assert_eq!(agent.wait("l", "").await.unwrap(), 5);
        assert!(agent.list("l").await.is_empty());
        agent.delete("l", "").await.unwrap();
        assert!(before.elapsed() < Duration::from_secs(20));
    }
}

async fn exec_exit_first(agent: Agent) {
    for own in [true, false] {
        let mut spec = spec(&["sleep", "1000"]);
        if !own {
            let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
            namespaces.retain(|namespace| namespace["type"] != "pid");
        }
        agent.create("c", &spec, &agent.no_streams()).await.unwrap();
        agent.start("c").await.unwrap();
        for exec in ["a", "b", "c"] {
            agent
                .exec(
                    "c",
                    exec,
                    &exec_process(&["sleep", "1000"]),
                    &agent.no_streams(),
                )
                .await
                .unwrap();
        }
        let init = agent.wait("c", "");
        let order = std::sync::Mutex::new(Vec::new());
        let note = |name: &'static str, wait| {
            let order = &order;
            async move {
                let status: Result<u32, _> = std::future::IntoFuture::into_future(wait).await;
                order.lock().unwrap().push((name, status.unwrap()));
            }
        };
        agent.signal("c", "", 9, false).await.unwrap();
        tokio::join!(
            note("init", init),
            note("a", agent.wait("c", "a")),
            note("b", agent.wait("c", "b")),
            note("c", agent.wait("c", "c")),
        );
        let order = order.into_inner().unwrap();
        assert_eq!(order.last(), Some(&("init", 137)), "{order:?}");
        assert!(order.iter().all(|(_, status)| *status == 137));
        agent.delete("c", "").await.unwrap();
    }
}

async fn terminal(agent: Agent) {
    let mut spec = spec(&[
        "sh",
        "-c",
        "stty size; stat -c %u /dev/pts/0; test -t 0 && test -t 1 && test -t 2 && echo three; read line; echo got $line; stty size; exit 4",
    ]);
    spec["process"]["user"] = json!({"uid": 33, "gid": 33});
    let io = agent.streams(true);
    agent.create("t", &spec, &io).await.unwrap();
    agent.start("t").await.unwrap();
    let mut stdout = io.stdout().await;
    assert_eq!(
        stdout.read_until("three\r\n").await,
        "24 80\r\n33\r\nthree\r\n"
    );
    agent.resize("t", "", 132, 43).await.unwrap();
    let mut stdin = io.stdin().await;
    stdin.write(b"line\n").await;
    let rest = String::from_utf8(stdout.collect().await).unwrap();
    assert_eq!(rest, "line\r\ngot line\r\n43 132\r\n");
    assert_eq!(agent.wait("t", "").await.unwrap(), 4);
    agent.delete("t", "").await.unwrap();

    // In an exec, whose user may open its terminal by name; ^C goes to the foreground.
    agent.running("t", &["sleep", "1000"]).await;
    let mut process = exec_process(&[
        "sh",
        "-c",
        "stty size; echo opened > $(readlink /proc/self/fd/0); sleep 1000; echo not reached",
    ]);
    process["user"] = json!({"uid": 33, "gid": 33});
    let io = agent.streams(true);
    agent.exec("t", "e", &process, &io).await.unwrap();
    let mut stdout = io.stdout().await;
    assert_eq!(stdout.read_until("opened\r\n").await, "24 80\r\nopened\r\n");
    io.stdin().await.write(&[3]).await;
    assert_eq!(agent.wait("t", "e").await.unwrap(), 130);
    agent.delete("t", "e").await.unwrap();
    assert_eq!(stdout.collect().await, b"^C");
    agent.end("t").await;
}

async fn pause(agent: Agent) {
    let io = agent.streams(false);
    agent.create("p", &spec(&["cat"]), &io).await.unwrap();
    agent.start("p").await.unwrap();
    let (mut stdin, mut stdout) = (io.stdin().await, io.stdout().await);
    agent.pause("p").await.unwrap();
    stdin.write(b"later\n").await;
    let read = tokio::time::timeout(Duration::from_millis(200), stdout.read_exact(6)).await;
    assert!(read.is_err());
    assert_eq!(
        agent.pause("p").await.unwrap_err().0,
        Code::FAILED_PRECONDITION
    );
    let exec = agent
        .exec("p", "e", &exec_process(&["true"]), &agent.no_streams())
        .await;
    assert_eq!(exec.unwrap_err().0, Code::FAILED_PRECONDITION);
    agent.resume("p").await.unwrap();
    assert_eq!(stdout.read_exact(6).await, b"later\n");
    // A paused container can be killed.
    agent.pause("p").await.unwrap();
    agent.signal("p", "", 9, false).await.unwrap();
    assert_eq!(agent.wait("p", "").await.unwrap(), 137);
    agent.delete("p", "").await.unwrap();
}

async fn figures(agent: Agent) {
    let pid = agent.running("f", &["sh", "-c", "sleep 1000 & wait"]).await;
    let exec = agent
        .exec(
            "f",
            "e",
            &exec_process(&["sleep", "1000"]),
            &agent.no_streams(),
        )
        .await
        .unwrap();
    agent.until(async || agent.list("f").await.len() == 3).await;
    let processes = agent.list("f").await;
    let ids: Vec<_> = processes
        .iter()
        .filter(|p| p.exec_id == "e")
        .map(|p| p.pid)
        .collect();
    assert_eq!(ids, [exec]);
    assert!(processes.iter().any(|process| process.pid == pid));
    let stats = agent.stats("f").await.unwrap();
    assert!(stats.cpu.usage_usec > 0);
    if agent.has_controllers() {
        assert_eq!(stats.pids.current, 3);
        assert!(stats.memory.current > 0);
        agent
            .update(
                "f",
                &json!({"pids": {"limit": 77}, "memory": {"limit": 64 << 20}}),
            )
            .await
            .unwrap();
        let stats = agent.stats("f").await.unwrap();
        assert_eq!((stats.pids.limit, stats.memory.max), (77, 64 << 20));
    }
    assert_eq!(
        agent
            .update("f", &json!({"memory": {"swappiness": 1}}))
            .await
            .unwrap_err()
            .0,
        Code::INVALID_ARGUMENT
    );
    agent.end("f").await;
}

async fn devices(agent: Agent) {
    let mut spec = spec(&[
        "sh",
        "-c",
        "mknod /kmsg c 1 11 && head -c 1 /kmsg; cat /dev/null && head -c 2 /dev/zero | od -An -tx1; rm /kmsg",
    ]);
    spec["linux"]["resources"] = json!({"devices": [{"allow": false, "access": "rwm"}]});
    spec["process"]["capabilities"] = json!({
        "bounding": ["CAP_MKNOD"], "effective": ["CAP_MKNOD"], "permitted": ["CAP_MKNOD"]
    });
    let io = agent.streams(false);
    agent.create("d", &spec, &io).await.unwrap();
    agent.start("d").await.unwrap();
    let (out, err) = (io.stdout().await, io.stderr().await);
    let (out, err) = tokio::join!(out.collect(), err.collect());
    let err = String::from_utf8(err).unwrap();
    assert!(err.contains("Operation not permitted"), "{err}");
    assert_eq!(String::from_utf8(out).unwrap(), " 00 00\n", "{err}");
    agent.wait("d", "").await.unwrap();
    agent.delete("d", "").await.unwrap();
}

async fn seccomp(agent: Agent) {
    for no_new_privileges in [false, true] {
        let mut spec = spec(&["sh", "-c", "mkdir /denied || echo denied; read line"]);
        spec["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]
        });
        spec["process"]["noNewPrivileges"] = json!(no_new_privileges);
        let io = agent.streams(false);
        agent.create("s", &spec, &io).await.unwrap();
        agent.start("s").await.unwrap();
        let mut stdout = io.stdout().await;
        assert_eq!(stdout.read_exact(7).await, b"denied\n");
        let mut process = exec_process(&[
            "sh",
            "-c",
            "grep '^Seccomp:' /proc/self/status; mkdir /denied || echo denied",
        ]);
        process["noNewPrivileges"] = json!(no_new_privileges);
        let (_, out) = agent.exec_collect("s", "e", &process).await;
        assert_eq!(out, "Seccomp:\t2\ndenied\n");
        agent.end("s").await;
    }
}

async fn wrong_calls(agent: Agent) {
    let not_found =
        |result: Result<u32, (Code, String)>| assert_eq!(result.unwrap_err().0, Code::NOT_FOUND);
    not_found(agent.wait("x", "").await);
    not_found(agent.delete("x", "").await);
    not_found(agent.signal("x", "", 9, false).await.map(|()| 0));
    not_found(agent.start("x").await.map(|()| 0));
    not_found(
        agent
            .exec("x", "e", &exec_process(&["true"]), &agent.no_streams())
            .await,
    );
    agent
        .create("x", &spec(&["cat"]), &agent.streams(false))
        .await
        .unwrap();
    let (code, _) = agent
        .create("x", &spec(&["cat"]), &agent.no_streams())
        .await
        .unwrap_err();
    assert_eq!(code, Code::ALREADY_EXISTS);
    let exec = agent
        .exec("x", "e", &exec_process(&["true"]), &agent.no_streams())
        .await;
    assert_eq!(exec.unwrap_err().0, Code::FAILED_PRECONDITION);
    agent.start("x").await.unwrap();
    assert_eq!(
        agent.start("x").await.unwrap_err().0,
        Code::FAILED_PRECONDITION
    );
    assert_eq!(
        agent.delete("x", "").await.unwrap_err().0,
        Code::FAILED_PRECONDITION
    );
    not_found(agent.wait("x", "e").await);
    agent.resize("x", "", 80, 24).await.unwrap();
    assert_eq!(
        agent.signal("x", "", 99, false).await.unwrap_err().0,
        Code::INVALID_ARGUMENT
    );
    agent.end("x").await;
}

async fn many(agent: Agent) {
    let agent = std::sync::Arc::new(agent);
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let agent = agent.clone();
            tokio::spawn(async move {
                let id = format!("m{n}");
                let (status, out) = agent
                    .run(&id, &spec(&["sh", "-c", &format!("echo {n}; exit {n}")]))
                    .await;
                assert_eq!((status, out), (n, format!("{n}\n")));
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    agent.nothing_left().await;
}

async fn memory_limit(agent: Agent) {
    if !agent.has_controllers() {
        // Only the nested host and the guest have the controllers in one tree.
        return;
    }
    for _ in 0..3 {
        let mut spec = spec(&["tail", "/dev/zero"]);
        spec["linux"]["resources"]["memory"] = json!({"limit": 32 << 20});
        agent.create("o", &spec, &agent.no_streams()).await.unwrap();
        agent.start("o").await.unwrap();
        assert_eq!(agent.wait("o", "").await.unwrap(), 137);
        let stats = agent.stats("o").await.unwrap();
        assert_eq!(stats.memory.events["oom_kill"], 1, "{stats:?}");
        agent.delete("o", "").await.unwrap();
    }
}

async fn settings(agent: Agent) {
    let mut request = ConfigureRequest::new();
    request.hostname = "pod-1".into();
    request.domainname = "cluster".into();
    request.online_vcpus = 2;
    let mut dns = Dns::new();
    dns.servers = vec!["10.0.0.53".into()];
    dns.options = vec!["ndots:5".into()];
    request.dns = Some(dns).into();
    let mut interface = Interface::new();
    interface.mac = rig::MAC.into();
    interface.name = "net0".into();
    interface.addresses = vec!["10.9.0.2/24".into(), "fd09::2/64".into()];
    interface.mtu = 1400;
    request.interfaces = vec![interface];
    let route = |destination: &str, gateway: &str| {
        let mut route = Route::new();
        route.destination = destination.into();
        route.gateway = gateway.into();
        route.interface = "net0".into();
        route
    };
    let mut near = route("10.7.0.0/16", "");
    near.scope = 253;
    request.routes = vec![route("", "10.9.0.1"), route("", "fd09::1"), near];
    let mut neighbour = Neighbour::new();
    neighbour.address = "10.9.0.1".into();
    neighbour.mac = "02:00:00:00:00:09".into();
    neighbour.interface = "net0".into();
    neighbour.state = 0x80;
    request.neighbours = vec![neighbour];
    request
        .sysctls
        .insert("net.ipv4.ip_unprivileged_port_start".into(), "0".into());
    request.wall_clock_ns = 1_900_000_000_000_000_000;
    agent.configure(&request).await.unwrap();
    // Once more is no error.
    agent.configure(&request).await.unwrap();

    let mut spec = spec(&[
        "sh",
        "-c",
        "hostname; cat /etc/resolv.conf; nproc; ip -o addr show net0 | awk '{print $4}'; cat /sys/class/net/net0/mtu; \
        ip route; ip -6 route show default; ip neigh show dev net0; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; date +%s | cut -c1-5; ping -c1 -W1 127.0.0.1 | grep -c ttl",
    ]);
    spec["mounts"].as_array_mut().unwrap().push(json!(
        {"destination": "/etc/resolv.conf", "type": "bind", "source": "/etc/resolv.conf", "options": ["rbind", "ro"]}
    ));
    spec["process"]["capabilities"] = json!({
        "bounding": ["CAP_NET_RAW"], "effective": ["CAP_NET_RAW"], "permitted": ["CAP_NET_RAW"]
    });
    let (_, out) = agent.run("s", &spec).await;
    for line in [
        "pod-1",
        "nameserver 10.0.0.53",
        "options ndots:5",
        "2",
        "10.9.0.2/24",
        "fd09::2/64",
        "1400",
        "10.7.0.0/16 dev net0 scope link ",
        "0",
        "19000",
        "1",
    ] {
        assert!(
            out.lines().any(|found| found == line),
            "{line:?} is not in {out}"
        );
    }
    for part in [
        "default via 10.9.0.1 dev net0",
        "default via fd09::1 dev net0",
        "10.9.0.1 lladdr 02:00:00:00:00:09 ",
        "PERMANENT",
    ] {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
    // A container's own settings are the pod's.
    let mut spec = rig::spec(&[
        "sh",
        "-c",
        "hostname; cat /proc/sys/net/core/somaxconn; cat /sys/fs/cgroup/cgroup.controllers; cat /proc/mounts | grep -c virtiofs",
    ]);
    spec["hostname"] = json!("pod-2");
    spec["linux"]["sysctl"] = json!({"net.core.somaxconn": "99"});
    let (_, out) = agent.run("s", &spec).await;
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        (lines[0], lines[1], lines[3]),
        ("pod-2", "99", "1"),
        "{out}"
    );
    for controller in ["cpu", "memory", "pids", "io", "cpuset"] {
        assert!(lines[2].contains(controller), "{out}");
    }
    agent.drop_caches().await.unwrap();
    // Back to one vCPU.
    let mut request = ConfigureRequest::new();
    request.online_vcpus = 1;
    agent.configure(&request).await.unwrap();
    assert_eq!(agent.run("s", &rig::spec(&["nproc"])).await.1, "1\n");
    agent.shutdown().await;
}

async fn bad_settings(agent: Agent) {
    let mut requests = Vec::new();
    let mut request = ConfigureRequest::new();
    request.online_vcpus = 65;
    requests.push((request, "65 vCPUs"));
    let mut interface = Interface::new();
    interface.mac = "02:11:22:33:44:55".into();
    let mut request = ConfigureRequest::new();
    request.interfaces = vec![interface];
    requests.push((request, "02:11:22:33:44:55"));
    let mut route = Route::new();
    route.destination = "10.0.0.0/8".into();
    route.interface = "nosuch0".into();
    let mut request = ConfigureRequest::new();
    request.routes = vec![route];
    requests.push((request, "nosuch0"));
    for (request, words) in requests {
        let (code, message) = agent.configure(&request).await.unwrap_err();
        assert_eq!(code, Code::INVALID_ARGUMENT, "{message}");
        assert!(message.contains(words), "{message}");
    }
    let mut request = ConfigureRequest::new();
    request.sysctls.insert("net.no.such".into(), "1".into());
    let (_, message) = agent.configure(&request).await.unwrap_err();
    assert!(message.contains("net.no.such"), "{message}");
}

async fn user_namespace(agent: Agent) {
    let mut spec = spec(&[
        "sh",
        "-c",
        "id -u; cat /proc/self/uid_map | tr -s ' '; ls -d /sys/class/net/lo; echo > /dev/shm/x && echo made; read line",
    ]);
    let mappings = json!([{"containerID": 0, "hostID": 100_000, "size": 1000}]);
    spec["linux"]["uidMappings"] = mappings.clone();
    spec["linux"]["gidMappings"] = mappings;
    spec["linux"]["namespaces"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "user"}));
    if !agent.in_guest && !std::path::Path::new("/dev/mqueue").exists() {
        // Such a container gets the machine's, and this machine has none.
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.retain(|mount| mount["type"] != "mqueue");
    }
    let io = agent.streams(false);
    agent.create("u", &spec, &io).await.unwrap();
    agent.start("u").await.unwrap();
    let mut stdout = io.stdout().await;
    assert_eq!(
        stdout.read_until("made\n").await,
        "0\n 0 100000 1000\n/sys/class/net/lo\nmade\n"
    );
    let mut process = exec_process(&[
        "sh",
        "-c",
        "id -u; cat /proc/self/uid_map | tr -s ' '; echo again > /dev/stdout",
    ]);
    process["user"] = json!({"uid": 33, "gid": 33});
    let (status, out) = agent.exec_collect("u", "e", &process).await;
    assert_eq!((status, out.as_str()), (0, "33\n 0 100000 1000\nagain\n"));
    agent.end("u").await;
}
