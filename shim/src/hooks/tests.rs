//! Hooks that are shell scripts.

use serde_json::{Value, json};

use super::*;

/// A bundle whose hooks append to a log.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A hook that is this shell script.
    fn hook(&self, script: &str) -> Value {
        json!({"path": "/bin/sh", "args": ["hook", "-c", script]})
    }

    fn hooks(&self, hooks: Value) -> Result<Hooks, HookError> {
        let spec = json!({
            "ociVersion": "1.2.0",
            "annotations": {"nerdctl/name": "web"},
            "hooks": hooks,
        });
        let spec = Spec::parse(spec.to_string().as_bytes()).unwrap();
        Hooks::of(&spec, "c1", self.path())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }
}

#[tokio::test]
async fn each_kind_runs_at_its_time_with_the_state_and_poststop_once() {
    let bench = Bench::new();
    let write = |kind: &str| bench.hook(&format!("printf '{kind} ' >>log; cat >>log; echo >>log"));
    let hooks = bench
        .hooks(json!({
            "prestart": [write("prestart")],
            "createRuntime": [write("createRuntime")],
            "createContainer": [write("createContainer")],
            "startContainer": [write("startContainer")],
            "poststart": [write("poststart")],
            "poststop": [write("first"), write("second")],
        }))
        .unwrap();
    // Nothing is owed yet.
    hooks.stopped().await;
    hooks.creating(42).await.unwrap();
    hooks.running(42).await.unwrap();
    hooks.stopped().await;
    hooks.stopped().await;
    let bundle = bench.path().display();
    let state = |status: &str, pid: &str| {
        format!(
            "{{\"ociVersion\":\"1.2.0\",\"id\":\"c1\",\"status\":\"{status}\",{pid}\"bundle\":\"{bundle}\",\
             \"annotations\":{{\"nerdctl/name\":\"web\"}}}}"
        )
    };
    let wanted = [
        format!("prestart {}", state("creating", "\"pid\":42,")),
        format!("createRuntime {}", state("creating", "\"pid\":42,")),
        format!("poststart {}", state("running", "\"pid\":42,")),
        format!("first {}", state("stopped", "")),
        format!("second {}", state("stopped", "")),
    ];
    assert_eq!(bench.log().lines().collect::<Vec<_>>(), wanted);
}

#[tokio::test]
async fn arguments_and_environment_are_those_of_the_specification() {
    let bench = Bench::new();
    let script = "echo \"$0|$1|$A|$B|${PATH-none}|$(pwd)\" >log";
    let hook = json!({
        "path": "/bin/sh",
        "args": ["sh", "-c", script, "zero", "one two"],
        "env": ["A=1", "B=x=y", "PATH="],
    });
    let hooks = bench.hooks(json!({"createRuntime": [hook]})).unwrap();
    hooks.creating(1).await.unwrap();
    let bundle = fs::canonicalize(bench.path()).unwrap();
    assert_eq!(
        bench.log(),
        format!("zero|one two|1|x=y||{}\n", bundle.display())
    );
    // Without an environment of its own it is the shim's.
    let hooks = bench
        .hooks(json!({"createRuntime": [bench.hook("echo $PATH >log")]}))
        .unwrap();
    hooks.creating(1).await.unwrap();
    assert_eq!(bench.log().trim(), std::env::var("PATH").unwrap());
}

#[tokio::test]
async fn the_first_failure_ends_a_create_and_says_what_the_hook_said() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"createRuntime": [
            bench.hook("true"),
            bench.hook("echo out; echo no >&2; echo network >&2; exit 3"),
            bench.hook("echo never >>log"),
        ]}))
        .unwrap();
    let error = hooks.creating(1).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "error running createRuntime hook #1: exit status 3, stdout: out, stderr: no; network"
    );
    assert_eq!(bench.log(), "");
}

#[tokio::test]
async fn a_poststop_hook_that_fails_does_not_stop_the_next() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"poststop": [bench.hook("exit 1"), bench.hook("echo next >>log")]}))
        .unwrap();
    hooks.creating(1).await.unwrap();
    hooks.stopped().await;
    assert_eq!(bench.log(), "next\n");
}

#[tokio::test]
async fn a_hook_that_takes_too_long_is_killed_with_its_children() {
    let bench = Bench::new();
    let mut hook = bench.hook("sleep 1000 & echo $! >log; wait");
    hook["timeout"] = json!(1);
    let hooks = bench.hooks(json!({"prestart": [hook]})).unwrap();
    let error = hooks.creating(1).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "error running prestart hook #0: hook ran past specified timeout of 1.0s"
    );
    let child = bench.log().trim().parse().unwrap();
    // An orphan that was killed may still be there as a zombie, until its new parent looks.
    let handle = crate::process_id::open(child);
    if let Ok(handle) = handle {
        let mut fds = [nix::poll::PollFd::new(
            std::os::fd::AsFd::as_fd(&handle),
            nix::poll::PollFlags::POLLIN,
        )];
        assert_eq!(nix::poll::poll(&mut fds, 5000u16).unwrap(), 1);
    }
}

#[tokio::test]
async fn a_hook_may_leave_a_process_behind_that_holds_its_streams_and_need_not_read() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"prestart": [bench.hook("exec <&-; sleep 1000 & echo $! >log")]}))
        .unwrap();
    hooks.creating(1).await.unwrap();
    let left: i32 = bench.log().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), nix::sys::signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_hook_that_writes_without_end_costs_no_memory_and_its_last_words_are_kept() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"prestart": [
            bench.hook("head -c 10000000 /dev/zero | tr '\\0' x; echo last; exit 1")
        ]}))
        .unwrap();
    let error = hooks.creating(1).await.unwrap_err().to_string();
    assert!(error.len() < 3000, "{}", error.len());
    assert!(error.contains("xlast, stderr"), "{error}");
}

#[tokio::test]
async fn a_program_that_is_missing_is_named() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"createRuntime": [{"path": "/no/such/hook"}]}))
        .unwrap();
    let error = hooks.creating(1).await.unwrap_err().to_string();
    assert!(error.contains("/no/such/hook"), "{error}");
}

#[test]
fn what_a_shim_that_died_owed_is_paid_once() {
    let bench = Bench::new();
    let hooks = bench
        .hooks(json!({"poststop": [bench.hook("echo gone >>log")]}))
        .unwrap();
    hooks.stopped_after_a_crash().unwrap();
    assert_eq!(bench.log(), "");
    fs::write(bench.path().join(NOTE), "").unwrap();
    hooks.stopped_after_a_crash().unwrap();
    hooks.stopped_after_a_crash().unwrap();
    assert_eq!(bench.log(), "gone\n");
}

#[test]
fn what_the_specification_forbids_is_refused_by_kind_and_number() {
    let bench = Bench::new();
    let refused = |hooks: Value| bench.hooks(hooks).err().unwrap().to_string();
    assert_eq!(
        refused(json!({"poststart": [{"path": "/bin/true"}, {"path": "true"}]})),
        "The path \"true\" of the poststart hook #1 is not absolute"
    );
    assert_eq!(
        refused(json!({"prestart": [{"path": "/bin/true", "timeout": 0}]})),
        "The timeout of the prestart hook #0 is not greater than zero"
    );
    assert_eq!(
        refused(json!({"prestart": [{"path": "/bin/true", "env": ["A"]}]})),
        "The prestart hook #0 has \"A\" in its environment, which has no \"=\""
    );
    assert!(refused(json!({"poststop": [{"args": ["x"]}]})).contains("path"));
    assert!(bench.hooks(json!({"poststop": null})).unwrap().is_empty());
}

#[test]
fn a_note_that_cannot_be_written_fails_the_create() {
    let bench = Bench::new();
    let mut hooks = bench
        .hooks(json!({"poststop": [bench.hook("true")]}))
        .unwrap();
    hooks.bundle = "/proc/no-such-bundle".into();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let error = runtime.block_on(hooks.creating(1)).unwrap_err();
    assert!(matches!(error, HookError::Note(..)));
}
