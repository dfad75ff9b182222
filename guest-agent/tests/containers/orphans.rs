//! Processes that nobody waits for but PID 1.

use serde_json::Value;

use crate::rig::{Agent, exec_process, spec};

/// A container whose orphans are the agent's, not its own init's.
fn without_pid_namespace(args: &[&str]) -> Value {
    let mut spec = spec(args);
    let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
    namespaces.retain(|namespace| namespace["type"] != "pid");
    spec
}

/// A shell function: a process that names itself so dies as an orphan.
const ORPHAN: &str = "orphan() { (echo -n cube-orphan >/proc/self/comm &); }";

/// Dead ones that were not collected, as a container sees them.
async fn zombies(agent: &Agent) -> String {
    let script = "cat /proc/[0-9]*/stat 2>/dev/null | grep '(cube-orphan) Z' || true";
    let spec = without_pid_namespace(&["sh", "-c", script]);
    agent.run("z", &spec).await.1
}

pub async fn thousand(agent: Agent) {
    // While they die, the statuses of others reach those who wait for them.
    let script =
        format!("{ORPHAN}; read go; i=0; while [ $i -lt 1000 ]; do orphan; i=$((i+1)); done");
    let io = agent.streams(false);
    let spec = without_pid_namespace(&["sh", "-c", &script]);
    agent.create("o", &spec, &io).await.unwrap();
    agent.start("o").await.unwrap();
    agent.running("c", &["sleep", "1000"]).await;
    io.stdin().await.write(b"go\n").await;
    for status in 1..20 {
        let exit = exec_process(&["sh", "-c", &format!("exit {status}")]);
        agent
            .exec("c", "e", &exit, &agent.no_streams())
            .await
            .unwrap();
        assert_eq!(agent.wait("c", "e").await.unwrap(), status);
        agent.delete("c", "e").await.unwrap();
    }
    assert_eq!(agent.wait("o", "").await.unwrap(), 0);
    agent.delete("o", "").await.unwrap();
    agent.end("c").await;
    assert_eq!(zombies(&agent).await, "");
}

pub async fn daemons(agent: Agent) {
    for own in [true, false] {
        let script = "(setsid sh -c 'echo >/a; exec sleep 1000' &); \
            (setsid sh -c '(sleep 1000 &); echo >/b; exec sleep 1000' &); \
            until [ -e /a ] && [ -e /b ]; do usleep 1000; done; rm /a /b; exit 6";
        let args = ["sh", "-c", script];
        let spec = if own {
            spec(&args)
        } else {
            without_pid_namespace(&args)
        };
        agent.create("d", &spec, &agent.no_streams()).await.unwrap();
        agent.start("d").await.unwrap();
        assert_eq!(agent.wait("d", "").await.unwrap(), 6);
        assert!(agent.list("d").await.is_empty());
        agent.delete("d", "").await.unwrap();
    }
    agent.nothing_left().await;
}
