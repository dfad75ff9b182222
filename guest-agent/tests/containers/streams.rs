//! Standard streams and terminals.

use std::time::Duration;

use serde_json::json;

use crate::rig::{Agent, exec_process, spec};

pub async fn stdin_ends(agent: Agent) {
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

pub async fn big_streams(agent: Agent) {
    // Many times what pipes and sockets hold. Through containerd it is 64 MiB: behaviour/stdio.rs.
    const SIZE: usize = 8 << 20;
    let io = agent.streams(false);
    let script = "head -c 8388608 /dev/zero & head -c 8388608 /dev/zero | tr '\\0' 'e' >&2; wait";
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
        out.starts_with("2daeb1f36095b44b318410b3f4e8b5d989dcc7bb023d1426c492dab0a3053e74"),
        "{out}"
    );
    agent.wait("big", "").await.unwrap();
    agent.delete("big", "").await.unwrap();
}

pub async fn careless_streams(agent: Agent) {
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

pub async fn background(agent: Agent) {
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

pub async fn terminal(agent: Agent) {
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
