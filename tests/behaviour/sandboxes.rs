//! Sandboxes that containerd asks for themselves (`containerd.runtime.sandbox.v1`): what its CRI plugin does not ask, or does
//! not tell of. So the shim is spoken to without it.

use std::fs;
use std::time::Duration;

use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::sandbox_api::{
    CreateSandboxRequest, PingRequest, SandboxMetricsRequest, SandboxStatusRequest,
    SandboxStatusResponse, ShutdownSandboxRequest, StartSandboxRequest, StopSandboxRequest,
    WaitSandboxRequest,
};
use cube_tests::*;

/// A request of any kind about the sandbox.
macro_rules! about {
    ($request:ident, $sandbox:expr) => {
        $request {
            sandbox_id: $sandbox.id().to_owned(),
            ..Default::default()
        }
    };
}

fn status(sandbox: &Sandbox) -> SandboxStatusResponse {
    let request = about!(SandboxStatusRequest, sandbox);
    sandbox
        .controller
        .sandbox_status(context(), &request)
        .unwrap()
}

/// How many processes its containers have, and how much memory, by its figures.
fn figures(sandbox: &Sandbox) -> (u64, u64) {
    let request = about!(SandboxMetricsRequest, sandbox);
    let answer = sandbox.controller.sandbox_metrics(context(), &request);
    let metric = answer.unwrap().metrics;
    assert_eq!(metric.id, sandbox.id());
    let metrics = Metrics::parse_from_bytes(&metric.data.value).unwrap();
    (metrics.pids.current, metrics.memory.usage)
}

#[test]
fn a_sandbox_runs_from_its_start_to_its_stop_whatever_containers_come_and_go() {
    let (dir, id) = (TestDir::new(), unique("s"));
    let bundle = dir.path().join("sandbox");
    fs::create_dir(&bundle).unwrap();
    let sandbox = Sandbox::start(&bundle, &id).unwrap();
    let controller = &sandbox.controller;
    let create = about!(CreateSandboxRequest, sandbox);
    controller.create_sandbox(context(), &create).unwrap();
    assert_eq!(status(&sandbox).state, "SANDBOX_NOTREADY");
    let start = about!(StartSandboxRequest, sandbox);
    let started = controller.start_sandbox(context(), &start).unwrap();
    let machine = End::of(started.pid).expect("the process that stands for the sandbox");
    let told = status(&sandbox);
    assert_eq!(
        (told.state.as_str(), told.pid),
        ("SANDBOX_READY", started.pid)
    );
    controller
        .ping_sandbox(context(), &about!(PingRequest, sandbox))
        .unwrap();
    assert_eq!(figures(&sandbox), (0, 0));
    controller.start_sandbox(context(), &start).unwrap_err();

    // The containers' specifications name no group: containerd knows whose they are.
    let run = |name: &str, script: &str| {
        let id = format!("{id}-{name}");
        let bundle = shell_bundle(&dir, &id, "", script);
        let up = bundle.join("rootfs/up");
        fs::write(&up, "").unwrap();
        let pid = sandbox.launch(&bundle, &id, &Streams::default()).unwrap();
        assert_eq!(pid, started.pid);
        Follower::of(&up).wait_for("up");
        id
    };
    let first = run("first", "echo up >/up; exit 3");
    assert_eq!(sandbox.end(&first, "").unwrap(), 3);
    // The machine of a container that is alone would be gone by now.
    assert!(!machine.comes_within(Duration::ZERO));
    assert_eq!(status(&sandbox).state, "SANDBOX_READY");
    let script = "trap 'exit 5' TERM; echo up >/up; sleep 1000 & wait";
    let second = run("second", script);
    let third = run("third", "echo up >/up; exec sleep 1000");
    let (processes, memory) = figures(&sandbox);
    assert!(
        processes >= 2 && memory > 0,
        "{processes} processes, {memory} bytes"
    );

    let waits = std::thread::scope(|scope| {
        let request = about!(WaitSandboxRequest, sandbox);
        let waits = scope.spawn(move || controller.wait_sandbox(context(), &request));
        // With time to end by themselves: one does, the other has no handler, being the first process of its namespace.
        let stop = StopSandboxRequest {
            timeout_secs: 5,
            ..about!(StopSandboxRequest, sandbox)
        };
        controller.stop_sandbox(context(), &stop).unwrap();
        waits.join().unwrap()
    });
    assert_eq!(waits.unwrap().exit_status, 137);
    assert!(machine.comes_within(Duration::ZERO));
    let told = status(&sandbox);
    assert_eq!(told.state, "SANDBOX_NOTREADY");
    assert!(told.exited_at.seconds >= told.created_at.seconds);
    controller
        .ping_sandbox(context(), &about!(PingRequest, sandbox))
        .unwrap_err();
    assert_eq!(sandbox.end(&second, "").unwrap(), 5);
    assert_eq!(sandbox.end(&third, "").unwrap(), 137);

    let shim = End::of(sandbox.pid().unwrap()).unwrap();
    let shutdown = about!(ShutdownSandboxRequest, sandbox);
    controller.shutdown_sandbox(context(), &shutdown).unwrap();
    assert!(shim.comes_within(Duration::from_secs(20)));
    drop(sandbox);
    assert_no_traces_of(&id);
}
