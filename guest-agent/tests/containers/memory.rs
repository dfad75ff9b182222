//! What happens when memory runs out.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{Agent, exec_process, spec};

/// Allocates until somebody stops it: it keeps the last line, and there is no end of one.
const GREEDY: [&str; 2] = ["tail", "/dev/zero"];

fn limited(args: &[&str]) -> Value {
    let mut spec = spec(args);
    spec["linux"]["resources"]["memory"] = json!({"limit": 32 << 20});
    spec
}

pub async fn limit(agent: Agent) {
    if !agent.has_controllers() {
        // A guest has all controllers; on this machine another tree may have them.
        return;
    }
    for _ in 0..3 {
        let spec = limited(&GREEDY);
        agent.create("o", &spec, &agent.no_streams()).await.unwrap();
        agent.start("o").await.unwrap();
        // The kill may be told of before the exit, or with it.
        let mut news = agent.wait_for_news("o", "", 0).await.unwrap();
        if news.exit.is_none() {
            assert_eq!(news.oom_kills, 1);
            news = agent.wait_for_news("o", "", 1).await.unwrap();
        }
        assert_eq!(news.oom_kills, 1);
        assert_eq!(news.exit.unwrap().exit_status, 137);
        let stats = agent.stats("o").await.unwrap();
        assert_eq!(stats.memory.events["oom_kill"], 1, "{stats:?}");
        agent.delete("o", "").await.unwrap();
    }
}

pub async fn survived(agent: Agent) {
    if !agent.has_controllers() {
        return;
    }
    let io = agent.streams(false);
    let spec = limited(&["sh", "-c", "while read line; do tail /dev/zero; done"]);
    agent.create("o", &spec, &io).await.unwrap();
    agent.start("o").await.unwrap();
    let mut stdin = io.stdin().await;
    for kills in 1..4 {
        let mut news = Box::pin(agent.wait_for_news("o", "", kills - 1));
        let early = tokio::time::timeout(Duration::from_millis(50), &mut news).await;
        assert!(early.is_err(), "there is news before the kill: {early:?}");
        stdin.write(b"once more\n").await;
        let news = news.await.unwrap();
        assert!(news.exit.is_none());
        assert_eq!(news.oom_kills, kills);
    }
    // An exec's end says whether it was killed so; its wait does not end before.
    let exec = exec_process(&GREEDY);
    agent
        .exec("o", "e", &exec, &agent.no_streams())
        .await
        .unwrap();
    let news = agent.wait_for_news("o", "e", u64::MAX).await.unwrap();
    assert_eq!(news.exit.unwrap().exit_status, 137);
    assert_eq!(news.oom_kills, 4);
    agent.end("o").await;
}
