//! Hooks at the points of a container's life that the tasks know.

use super::*;

/// A container whose hooks are these shell scripts, with its bundle in the bench's directory.
async fn create_hooked(bench: &Bench, hooks: &[(&str, &str)]) {
    let list =
        |script: &str| serde_json::json!([{"path": "/bin/sh", "args": ["sh", "-c", script]}]);
    let hooks: serde_json::Map<_, _> = hooks
        .iter()
        .map(|(kind, script)| ((*kind).to_owned(), list(script)))
        .collect();
    let spec = serde_json::json!({"hooks": hooks}).to_string();
    let spec = crate::spec::Spec::parse(spec.as_bytes()).unwrap();
    let hooks = Hooks::of(&spec, "c", bench.dir.path()).unwrap();
    hooks.creating(PID).await.unwrap();
    let mut new = bench.new_container("c", Uris::default());
    new.hooks = Arc::new(hooks);
    bench.tasks.create(new, bench.guest.clone()).await.unwrap();
}

#[tokio::test]
async fn a_start_hook_runs_before_the_start_is_answered_and_a_stop_hook_before_the_delete() {
    let mut bench = bench().await;
    let hooks = [("poststart", "cat >>log"), ("poststop", "cat >>log")];
    create_hooked(&bench, &hooks).await;
    let log = || std::fs::read_to_string(bench.dir.path().join("log")).unwrap_or_default();
    assert_eq!(log(), "");
    bench.tasks.start("c", "").await.unwrap();
    assert!(log().contains("\"status\":\"running\",\"pid\":4242"));
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    assert!(!log().contains("stopped"));
    bench.tasks.delete("c", "").await.unwrap();
    assert_eq!(log().matches("\"status\":\"stopped\"").count(), 1);
    assert_eq!(bench.events().await, ["create", "start", "exit", "delete"]);
}

#[tokio::test]
async fn a_start_hook_that_fails_fails_the_start_and_ends_the_container() {
    let mut bench = bench().await;
    create_hooked(&bench, &[("poststart", "echo no >&2; exit 2")]).await;
    let error = bench.tasks.start("c", "").await.unwrap_err().to_string();
    assert_eq!(
        error,
        "OCI runtime start failed: error running poststart hook #0: exit status 2, stdout: , stderr: no"
    );
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 137);
    bench.tasks.delete("c", "").await.unwrap();
    assert_eq!(bench.events().await, ["create", "start", "exit", "delete"]);
}

#[tokio::test]
async fn a_container_that_ends_while_its_start_hooks_run_exits_after_its_start() {
    let mut bench = bench().await;
    create_hooked(
        &bench,
        &[("poststart", "until [ -e go ]; do sleep 0.01; done")],
    )
    .await;
    let tasks = bench.tasks.clone();
    let start = tokio::spawn(async move { tasks.start("c", "").await });
    bench.agent.exit("c", "", 5);
    tokio::task::yield_now().await;
    std::fs::write(bench.dir.path().join("go"), "").unwrap();
    start.await.unwrap().unwrap();
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 5);
    assert_eq!(bench.events().await, ["create", "start", "exit"]);
}
