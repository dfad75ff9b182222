//! From create to delete, and what goes wrong on the way.

use std::time::{Duration, Instant};

use serde_json::json;
use ttrpc::Code;

use crate::rig::{Agent, exec_process, spec};

pub async fn hello(agent: Agent) {
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

pub async fn signals(agent: Agent) {
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

pub async fn missing_program(agent: Agent) {
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

pub async fn hooks(agent: Agent) {
    let shell = |path: String, script: &str| json!({"path": path, "args": ["sh", "-c", script]});
    let rootfs = agent.rootfs();
    // A createContainer hook runs before the container's root is its root, in the container's namespaces.
    let outside = |script: &str| {
        let mut hook = shell(format!("{rootfs}/bin/busybox"), script);
        hook["env"] = json!([format!("ROOT={rootfs}"), "PATH=/nowhere"]);
        hook
    };
    let inside = |script: &str| shell("/bin/sh".into(), script);
    let state = "read -r state; echo \"$state\"";
    let mut hooked = spec(&["cat", "/tmp/created", "/tmp/started"]);
    hooked["annotations"] = json!({"k": "v"});
    hooked["hooks"] = json!({
        "createContainer": [outside(&format!("({state}; echo $$) >$ROOT/tmp/created"))],
        "startContainer": [inside(&format!("({state}; echo $B $$) >/tmp/started"))],
    });
    let io = agent.streams(false);
    agent.create("hooked", &hooked, &io).await.unwrap();
    assert!(agent.has_file("tmp/created"));
    assert!(!agent.has_file("tmp/started"));
    let output = io.stdout().await.collect();
    agent.start("hooked").await.unwrap();
    let output = String::from_utf8(output.await).unwrap();
    assert_eq!(agent.wait("hooked", "").await.unwrap(), 0, "{output}");
    let lines: Vec<_> = output.lines().collect();
    for line in [lines[0], lines[2]] {
        let state: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(state["id"], "hooked");
        assert_eq!(state["annotations"]["k"], "v");
    }
    let state: serde_json::Value = serde_json::from_str(lines[2]).unwrap();
    assert_eq!(
        (&state["pid"], &state["status"]),
        (&json!(1), &json!("created"))
    );
    // Their numbers are those of the container's PID namespace; without an environment the second
    // has the program's.
    assert_eq!(lines[1].len(), 1, "{output}");
    assert!(
        lines[3].starts_with("2 ") && lines[3].len() == 3,
        "{output}"
    );
    agent.delete("hooked", "").await.unwrap();
    agent.remove_file("tmp/created");
    agent.remove_file("tmp/started");

    // One that fails fails the create, or ends the container before its program runs.
    hooked["hooks"] = json!({"createContainer": [outside("exit 3")]});
    let (_, message) = agent
        .create("failing", &hooked, &agent.no_streams())
        .await
        .unwrap_err();
    assert!(message.contains("hooks.createContainer"), "{message}");
    let mut hooked = spec(&["touch", "/tmp/ran"]);
    hooked["hooks"] = json!({"startContainer": [inside("exit 3")]});
    agent
        .create("failing", &hooked, &agent.no_streams())
        .await
        .unwrap();
    agent.start("failing").await.unwrap();
    assert_ne!(agent.wait("failing", "").await.unwrap(), 0);
    assert!(!agent.has_file("tmp/ran"));
    agent.delete("failing", "").await.unwrap();
}

pub async fn refused(agent: Agent) {
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

pub async fn leftovers(agent: Agent) {
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

pub async fn exec_exit_first(agent: Agent) {
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
        agent.signal("c", "", 9, false).await.unwrap();
        assert_eq!(agent.wait("c", "").await.unwrap(), 137);
        // An exec that ran still could not be deleted.
        for exec in ["a", "b", "c"] {
            assert_eq!(agent.delete("c", exec).await.unwrap(), 137);
        }
        agent.delete("c", "").await.unwrap();
    }
}

pub async fn exec_before_start(agent: Agent) {
    for starts in [true, false] {
        let init = spec(&["sh", "-c", "read line </fifo; exit 4"]);
        agent.create("c", &init, &agent.no_streams()).await.unwrap();
        let (status, text) = agent
            .exec_collect(
                "c",
                "e",
                &exec_process(&["sh", "-c", "mkfifo /fifo; echo made"]),
            )
            .await;
        assert_eq!((status, text.as_str()), (0, "made\n"));
        agent.delete("c", "e").await.unwrap();
        let sleep = exec_process(&["sleep", "1000"]);
        agent
            .exec("c", "stays", &sleep, &agent.no_streams())
            .await
            .unwrap();
        if starts {
            agent.start("c").await.unwrap();
            // The init may end, and this with it, before it has.
            let tell = exec_process(&["sh", "-c", "echo go >/fifo"]);
            agent
                .exec("c", "tells", &tell, &agent.no_streams())
                .await
                .unwrap();
            assert_eq!(agent.wait("c", "").await.unwrap(), 4);
            assert_eq!(agent.delete("c", "stays").await.unwrap(), 137);
            assert_eq!(agent.delete("c", "").await.unwrap(), 4);
        } else {
            let stays = agent.wait("c", "stays");
            let (stayed, deleted) = tokio::join!(stays, agent.delete("c", ""));
            assert_eq!((stayed.unwrap(), deleted.unwrap()), (137, 137));
        }
        agent.remove_file("fifo");
    }
}

pub async fn pause(agent: Agent) {
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

pub async fn figures(agent: Agent) {
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
    // For a moment, while the exec is made, there may be another process of the agent's in the container.
    let settled = async || {
        let counted = agent.stats("f").await.unwrap().pids.current;
        agent.list("f").await.len() == 3 && (counted == 3 || !agent.has_controllers())
    };
    agent.until(settled).await;
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

pub async fn wrong_calls(agent: Agent) {
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
    agent.signal("x", "", 9, false).await.unwrap();
    assert_eq!(agent.wait("x", "").await.unwrap(), 137);
    let exec = agent
        .exec("x", "e", &exec_process(&["true"]), &agent.no_streams())
        .await;
    assert_eq!(exec.unwrap_err().0, Code::FAILED_PRECONDITION);
    agent.delete("x", "").await.unwrap();
}

pub async fn many(agent: Agent) {
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

pub async fn costs(agent: Agent) {
    const STEPS: [&str; 4] = ["create", "start to exit", "delete", "exec of true"];
    let mut least = [u128::MAX; STEPS.len()];
    for _ in 0..6 {
        let mut before = Instant::now();
        let mut lap = |step: usize| {
            least[step] = least[step].min(before.elapsed().as_nanos());
            before = Instant::now();
        };
        agent
            .create("c", &spec(&["true"]), &agent.no_streams())
            .await
            .unwrap();
        lap(0);
        agent.start("c").await.unwrap();
        agent.wait("c", "").await.unwrap();
        lap(1);
        agent.delete("c", "").await.unwrap();
        lap(2);
        agent.running("c", &["sleep", "1000"]).await;
        let process = exec_process(&["true"]);
        let start = Instant::now();
        agent
            .exec("c", "e", &process, &agent.no_streams())
            .await
            .unwrap();
        agent.wait("c", "e").await.unwrap();
        least[3] = least[3].min(start.elapsed().as_nanos());
        agent.end("c").await;
    }
    for (step, ns) in STEPS.into_iter().zip(least) {
        println!("{step}: {ns} ns");
    }
}
