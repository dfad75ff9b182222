//! What a process is and may do.

use serde_json::{Value, json};
use ttrpc::Code;

use crate::rig::{Agent, exec_process, spec};

pub async fn identity(agent: Agent) {
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

pub async fn exec(agent: Agent) {
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

    // Without any of its own an exec has its container's.
    let mut process = exec_process(&["grep", "CapEff", "/proc/self/status"]);
    process.as_object_mut().unwrap().remove("capabilities");
    let (_, out) = agent.exec_collect("c", "e", &process).await;
    assert_eq!(out, "CapEff:\t00000000000000e1\n");
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

pub async fn devices(agent: Agent) {
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

pub async fn seccomp(agent: Agent) {
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

/// A container in a user namespace with these ranges of users and groups.
fn in_user_namespace(agent: &Agent, args: &[&str], users: Value, groups: Value) -> Value {
    let mut spec = spec(args);
    spec["linux"]["uidMappings"] = users;
    spec["linux"]["gidMappings"] = groups;
    spec["linux"]["namespaces"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "user"}));
    if !agent.in_guest && !std::path::Path::new("/dev/mqueue").exists() {
        // Such a container gets the machine's, and this machine has none.
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.retain(|mount| mount["type"] != "mqueue");
    }
    spec
}

pub async fn user_namespace(agent: Agent) {
    let range = json!([{"containerID": 0, "hostID": 100_000, "size": 1000}]);
    let args = [
        "sh",
        "-c",
        "id -u; cat /proc/self/uid_map | tr -s ' '; ls -d /sys/class/net/lo; echo > /dev/shm/x && echo made; read line",
    ];
    let spec = in_user_namespace(&agent, &args, range.clone(), range);
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

    let ranges = |own: u32, others: u32| {
        json!([
            {"containerID": 0, "hostID": 0, "size": own},
            {"containerID": own, "hostID": others, "size": 65_535},
        ])
    };
    let args = [
        "sh",
        "-c",
        "cat /proc/self/uid_map /proc/self/gid_map | tr -s ' '",
    ];
    let spec = in_user_namespace(&agent, &args, ranges(10, 1000), ranges(20, 2000));
    let (status, out) = agent.run("r", &spec).await;
    assert_eq!(
        (status, out.as_str()),
        (0, " 0 0 10\n 10 1000 65535\n 0 0 20\n 20 2000 65535\n")
    );
}
