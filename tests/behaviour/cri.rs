//! Pods as Kubernetes has them: containerd's CRI plugin, spoken to by crictl.
//!
//! Each test is played by two runtime handlers at a time. One has a pause container for the pod, and standard streams by
//! FIFOs. With the other the shim is the controller of the pod (`sandboxer = "shim"`), and standard streams go over
//! containerd's own connections to it (`ttrpc+unix://`), of which the CRI plugin is the only client. What happens
//! while containerd is away is compared with runc too.

#[path = "cri/pod.rs"]
mod pod;
#[path = "cri/told.rs"]
mod told;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cube_tests::{Containerd, End, Ended, Follower, assert_no_traces_of, runtime};
use pod::{Container, Output, Pod};
use serde_json::{Value, json};

/// Runtime handlers of tests/containerd/start.
const FIFOS: &str = "cube";
const STREAMS: &str = "cube-streaming";
const RUNC: &str = "runc";

/// Goes past the test harness, which keeps what a test prints to itself unless it fails.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Does the same with each handler at a time.
fn with_each<T: Send>(handlers: &[&str], test: impl Fn(&str) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let test = &test;
        let start = |handler: &&str| {
            let handler = (*handler).to_owned();
            let run = move || test(&handler);
            scope.spawn(run)
        };
        let running: Vec<_> = handlers.iter().map(start).collect();
        let mut done = Vec::new();
        for (thread, handler) in running.into_iter().zip(handlers) {
            done.push(thread.join().unwrap_or_else(|_| panic!("with {handler}")));
        }
        done
    })
}

/// Those under test; runc's, to see whether a test is right.
fn tested() -> Vec<&'static str> {
    match runtime().as_str() {
        "io.containerd.runc.v2" => vec![RUNC],
        _ => vec![FIFOS, STREAMS],
    }
}

/// Those under test, and runc's to compare.
fn compared() -> Vec<&'static str> {
    let mut handlers = tested();
    handlers.push(RUNC);
    handlers.dedup();
    handlers
}

/// Stops and removes a pod, of which nothing may be left, even before containerd calls upon the shim to clean up.
fn remove(pod: Pod, handler: &str) {
    let id = pod.id.clone();
    pod.remove();
    assert_no_traces_of(&id);
    let said = Containerd::of_the_tests().log_about(&[id]);
    assert!(!said.contains("Cannot remove"), "{handler}: {said}");
}

/// Lines with a number, a second time with so many digits.
fn numbered(count: usize, digits: usize) -> String {
    (1..=count)
        .map(|n| numbered_line(n, digits) + "\n")
        .collect()
}

fn numbered_line(n: usize, digits: usize) -> String {
    format!("{n} {n:0digits$}")
}

/// A command that writes the same.
fn print_numbered(count: usize, digits: usize) -> String {
    format!("awk 'BEGIN {{ for (n = 1; n <= {count}; n++) printf \"%d %0{digits}d\\n\", n, n }}'")
}

#[test]
fn a_log_has_all_lines_in_order_of_either_stream_megabytes_included() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let (out, err) = (print_numbered(2000, 1000), print_numbered(1000, 1000));
        // The last line but one is longer than a log's may be.
        let long = "head -c 100000 /dev/zero | tr '\\0' x";
        let script =
            format!("{out} & {err} >&2; wait; {long}; echo; echo end; echo end >&2; exit 7");
        let container = pod.start(&script);
        assert_eq!(container.wait(), 7);
        let output = container.output_with(&["stdout F end", "stderr F end"]);
        let long = "x".repeat(100_000);
        assert!(
            output.stdout == format!("{}{long}\nend\n", numbered(2000, 1000)),
            "{handler}: stdout has {} bytes",
            output.stdout.len()
        );
        assert!(
            output.stderr == numbered(1000, 1000) + "end\n",
            "{handler}: stderr"
        );
        remove(pod, handler);
    });
}

#[test]
fn execs_bring_back_output_and_status_and_take_input() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let container = pod.start("exec sleep 1000");
        // crictl prints one after the other, each with an end of line.
        let ended = container.exec_sync(&["sh", "-c", "echo out; echo err >&2"]);
        assert_eq!(ended.success(), "out\n\nerr\n\n");
        let ended = container.exec_sync(&["sh", "-c", "echo why >&2; exit 3"]);
        assert!(ended.stderr.contains("exited with 3: why"), "{ended:?}");
        let output = container.output_of(&["sh", "-c", &print_numbered(1000, 1000)]);
        assert!(output == numbered(1000, 1000));
        let ended = container.exec_sync(&["/no/such/program"]);
        assert!(ended.stderr.contains("no such file"), "{ended:?}");

        let input = numbered(300, 1000);
        let mut command = container.exec(&["--interactive"], &["cat"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut client = command.spawn().unwrap();
        let mut stdin = client.stdin.take().unwrap();
        let text = input.clone();
        let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
        let ended = Ended::from(client.wait_with_output().unwrap());
        writer.join().unwrap().unwrap();
        assert!(ended.success() == input);
        let ended = container.exec(&[], &["sh", "-c", "exit 4"]).output();
        let ended = Ended::from(ended.unwrap());
        assert!(ended.stderr.contains("exit code 4"), "{ended:?}");
        remove(pod, handler);
    });
}

#[test]
fn a_pods_name_files_settings_and_size_are_those_of_its_machine_and_its_containers_share_memory() {
    with_each(&tested(), |handler| {
        let pod = Pod::run_with(
            handler,
            json!({
                "hostname": "web-0",
                "dns_config": {"servers": ["10.96.0.10"], "searches": ["svc.cluster.local"], "options": ["ndots:5"]},
                "linux": {
                    "sysctls": {"kernel.shm_rmid_forced": "1", "net.core.somaxconn": "1234"},
                    "resources": {"cpu_period": 100_000, "cpu_quota": 150_000, "memory_limit_in_bytes": 400 << 20},
                },
            }),
        );
        let first = pod.start("echo shared >/dev/shm/file; exec sleep 1000");
        let script = "hostname; cat /etc/hostname /etc/resolv.conf /proc/sys/kernel/shm_rmid_forced \
            /proc/sys/net/core/somaxconn; nproc; until [ -e /dev/shm/file ]; do usleep 20000; done; cat /dev/shm/file; \
            awk '/^MemTotal/ { print \"MiB\", int($2 / 1024) }' /proc/meminfo; df -k /dev/shm | awk 'END { print $2 }'";
        let second = pod.start(script);
        assert_eq!(second.wait(), 0);
        let output = second.output_with(&["stdout F 65536"]).stdout;
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(
            lines[..9],
            [
                "web-0",
                "web-0",
                "search svc.cluster.local",
                "nameserver 10.96.0.10",
                "options ndots:5",
                "1",
                "1234",
                "2",
                "shared"
            ],
            "{handler}"
        );
        // The guest's kernel keeps some of what the machine has.
        let memory: u64 = lines[9].strip_prefix("MiB ").unwrap().parse().unwrap();
        assert!((400..=464).contains(&memory), "{handler}: {memory} MiB");
        let hosts = first.output_of(&["cat", "/etc/hosts"]);
        assert_eq!(
            hosts,
            fs::read_to_string("/etc/hosts").unwrap(),
            "{handler}"
        );
        remove(pod, handler);
    });
}

/// Waits until containerd tells of the end of a pod and of a container in it, which has this status then.
fn assert_is_over(pod: &Pod, container: &Container, status: i64, handler: &str) {
    assert_eq!(container.wait(), status, "{handler}");
    told::wait_for(&pod.id, "CONTAINER_STOPPED_EVENT");
    assert_eq!(
        pod.inspect()["status"]["state"],
        "SANDBOX_NOTREADY",
        "{handler}"
    );
}

#[test]
fn a_pod_whose_machine_is_killed_is_not_ready_and_can_be_removed() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let container = pod.start("exec sleep 1000");
        kill(pod.hypervisor());
        assert_is_over(&pod, &container, 137, handler);
        remove(pod, handler);
    });
}

#[test]
fn a_pod_whose_shim_is_killed_is_not_ready_and_can_be_removed() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let container = pod.start("exec sleep 1000");
        // Every container of a pod has the same one; those that containerd began for others have ended.
        let shims = Command::new("pgrep")
            .args(["-f", &format!("shim-cube.*{}", pod.id)])
            .output();
        let shims = String::from_utf8(shims.unwrap().stdout).unwrap();
        for shim in shims.lines() {
            kill(shim.parse().unwrap());
        }
        // Nobody knows how it ended.
        assert_is_over(&pod, &container, 255, handler);
        let id = pod.id.clone();
        pod.remove();
        assert_no_traces_of(&id);
    });
}

fn kill(pid: u32) {
    // SAFETY: kill(2) has no memory arguments.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
}

#[test]
fn a_pod_that_cannot_be_is_refused_with_a_reason_and_leaves_nothing() {
    if runtime() == "io.containerd.runc.v2" {
        return;
    }
    for (changes, reason) in [
        (
            json!({"annotations": {"io.cube.default_vcpus": "many"}}),
            "io.cube.default_vcpus",
        ),
        (
            json!({"annotations": {"io.cube.kernel": "/dev/null"}}),
            "/dev/null",
        ),
        (
            json!({"annotations": {"io.cube.kernel_params": "rdinit=/nothing"}}),
            "ended while it booted",
        ),
        (json!({"dns_config": {"servers": ["a b"]}}), "dns_config"),
        (
            json!({"linux": {"sysctls": {"kernel.nothing": "1"}}}),
            "kernel.nothing",
        ),
        (
            json!({"linux": {"security_context": {"namespace_options": {"userns_options": {"mode": 0}}}}}),
            "userns_options",
        ),
    ] {
        let refusal = Pod::refusal(STREAMS, changes);
        assert!(refusal.contains(reason), "{reason}: {refusal}");
        // No other test runs meanwhile.
        assert!(!Path::new("/run/cube/k8s.io").exists(), "{reason}");
        let shims = Command::new("pgrep")
            .args(["-f", "shim-cube.*-namespace k8s.io"])
            .output();
        for shim in String::from_utf8(shims.unwrap().stdout).unwrap().lines() {
            let end = End::of(shim.parse().unwrap());
            assert!(
                end.is_none_or(|end| end.comes_within(Duration::from_secs(10))),
                "{reason}: the shim stays"
            );
        }
    }
}

#[test]
fn what_is_asked_of_pods_and_containers_is_answered() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let script = "trap 'exit 5' TERM; x=$(head -c 20000000 /dev/zero | tr '\\0' x); echo up; sleep 1000 & wait";
        let container = pod.start(script);
        Follower::of(&container.log).wait_for_end_of_line("up");
        assert_eq!(pod.inspect()["status"]["state"], "SANDBOX_READY");
        assert_eq!(container.status()["state"], "CONTAINER_RUNNING");
        let figure = |figures: &Value, path: &str| -> u64 {
            let value = figures.pointer(path).and_then(|v| v["value"].as_str());
            let value = value.unwrap_or_else(|| panic!("no {path}: {figures}"));
            value.parse().unwrap()
        };
        let figures = container.stats();
        assert!(figure(&figures, "/memory/workingSetBytes") > 20_000_000);
        assert!(figure(&figures, "/cpu/usageCoreNanoSeconds") > 1_000_000);
        let figures = pod.stats();
        assert!(figure(&figures, "/linux/cpu/usageCoreNanoSeconds") > 1_000_000);
        assert_eq!(
            figures["linux"]["containers"][0]["attributes"]["id"],
            container.id
        );

        container.stop(60);
        let status = container.status();
        assert_eq!(status["state"], "CONTAINER_EXITED");
        assert_eq!(
            (&status["exitCode"], &status["reason"]),
            (&json!(5), &json!("Error"))
        );
        let deaf = pod.start("trap '' TERM; sleep 1000 & wait");
        deaf.stop(1);
        assert_eq!(deaf.status()["exitCode"], 137);
        let done = pod.start("true");
        assert_eq!(done.wait(), 0);
        assert_eq!(done.status()["reason"], "Completed");
        assert_eq!(pod.inspect()["status"]["state"], "SANDBOX_READY");
        remove(pod, handler);
    });
}

#[test]
fn containers_of_a_pod_share_one_machine_in_which_each_may_be_made_again() {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    let machines = with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let first = pod.start("exec sleep 1000");
        let second = pod.start("exec sleep 1000");
        let boot_id = || first.output_of(&["cat", BOOT_ID]);
        let machine = boot_id();
        assert_eq!(second.output_of(&["cat", BOOT_ID]), machine);
        let started = first.status()["startedAt"].clone();

        // As the kubelet does it: a container is never started twice, a new one takes its place.
        second.stop(0);
        assert_eq!(second.status()["exitCode"], 137);
        let again = pod.start(&format!("cat {BOOT_ID}; exec sleep 1000"));
        Follower::of(&again.log).wait_for_end_of_line(machine.trim());
        assert_eq!(boot_id(), machine);
        assert_eq!(first.status()["startedAt"], started);
        remove(pod, handler);
        machine
    });
    let host = fs::read_to_string(BOOT_ID).unwrap();
    match &machines[..] {
        [with_fifos, with_streams] => {
            assert!(!machines.contains(&host) && with_fifos != with_streams)
        }
        with_runc => assert_eq!(with_runc, [host]),
    }
}

#[test]
fn a_pod_that_is_stopped_and_removed_leaves_nothing_of_its_containers_whatever_they_do() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let running = pod.start("exec sleep 1000");
        let created = pod.create("true", json!({}));
        let ended = pod.start("exit 1");
        assert_eq!(ended.wait(), 1);
        let mut exec = running.exec(&[], &["sh", "-c", "echo up; exec sleep 1000"]);
        exec.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut client = exec.spawn().unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(client.stdout.as_mut().unwrap(), &mut up).unwrap();
        let ids = [&running, &created, &ended].map(|container| container.id.clone());
        remove(pod, handler);
        assert!(!client.wait().unwrap().success());
        for id in ids {
            assert_no_traces_of(&id);
        }
    });
}

#[test]
fn a_container_has_a_terminal_or_a_standard_input_if_it_asks_for_one() {
    with_each(&tested(), |handler| {
        let pod = Pod::run(handler);
        let script = "test -t 0 && test -t 1 && test -t 2 && echo terminal; echo error >&2; exit 3";
        let terminal = pod.create(script, json!({"tty": true}));
        terminal.start();
        assert_eq!(terminal.wait(), 3);
        assert_eq!(
            terminal.output_with(&["stdout F error"]).stdout,
            "terminal\nerror\n"
        );

        let reader = pod.create("cat; echo end", json!({"stdin": true, "stdin_once": true}));
        reader.start();
        let mut command = pod::crictl(&["attach", "--stdin", &reader.id]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut client = command.spawn().unwrap();
        let input = numbered(200, 1000);
        let mut stdin = client.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).unwrap();
        drop(stdin);
        assert_eq!(reader.wait(), 0);
        assert!(reader.output_with(&["stdout F end"]).stdout == input + "end\n");
        client.wait().unwrap();
        remove(pod, handler);
    });
}

/// A containerd that was killed. It comes back when this is dropped.
struct Away(Containerd);

impl Away {
    fn of_containerd() -> Self {
        let containerd = Containerd::of_the_tests();
        containerd.kill();
        Self(containerd)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        self.0.start_again();
        told::listen_again();
    }
}

/// What the host does in a volume raises no event in the guest, so this asks.
fn until(name: &str) -> String {
    format!("until [ -e /host/{name} ]; do usleep 20000; done")
}

#[test]
fn what_is_written_while_containerd_is_away_is_in_the_log_when_it_is_back() {
    const LINES: usize = 300;
    let lines = |part: usize| format!("seq {} {}", part * LINES + 1, (part + 1) * LINES);
    let whole = |parts: usize| Output {
        stdout: (1..=parts * LINES).map(|n| format!("{n}\n")).collect(),
        stderr: "end\n".to_owned(),
    };
    let handlers = compared();
    let pods = with_each(&handlers, |handler| {
        let pod = Pod::run(handler);
        let said = pod.file("said");
        let (first, second, third) = (lines(0), lines(1), lines(2));
        let (away, back) = (until("away"), until("back"));
        let stays = pod.start(&format!(
            "{first}; {away}; {second}; echo stays >>/host/said; {back}; {third}; echo end >&2; exit 5"
        ));
        // runc's shim closes the FIFOs, which then forget what nobody has read, and containerd takes it for a leaked one:
        // output and status of a container that ends meanwhile are lost.
        let goes = (handler != RUNC).then(|| {
            pod.start(&format!(
                "{first}; {away}; {second}; echo end >&2; echo goes >>/host/said; exit 6"
            ))
        });
        for container in goes.iter().chain([&stays]) {
            // All of it is in the log: nothing is in containerd's memory alone.
            Follower::of(&container.log).wait_for_end_of_line(&LINES.to_string());
        }
        (pod, Follower::of(&said), stays, goes)
    });
    let away = Away::of_containerd();
    let pods = pods.into_iter().map(|(pod, mut said, stays, goes)| {
        pod.file("away");
        // Nobody is held up.
        let count = 1 + goes.iter().count();
        let mut told: Vec<_> = (0..count).map(|_| said.next_line()).collect();
        told.sort();
        assert_eq!(told, &["goes", "stays"][2 - count..]);
        (pod, stays, goes)
    });
    let pods: Vec<_> = pods.collect();
    drop(away);
    for ((pod, stays, goes), handler) in pods.into_iter().zip(handlers) {
        pod.file("back");
        assert_eq!(stays.wait(), 5, "{handler}");
        let output = |container: &Container, parts: usize| {
            let last = format!("stdout F {}", parts * LINES);
            container.output_with(&[&last, "stderr F end"])
        };
        assert_eq!(output(&stays, 3), whole(3), "{handler}");
        if let Some(goes) = goes {
            let status = goes.status();
            assert_eq!(status["state"], "CONTAINER_EXITED", "{handler}: {status}");
            assert_eq!(status["exitCode"], 6, "{handler}: {status}");
            // cube's shim closes the FIFOs of what has ended, too.
            if handler == STREAMS {
                assert_eq!(output(&goes, 2), whole(2), "{handler}");
            }
        }
        // What is made now works as before.
        let more = pod.start("echo more");
        assert_eq!(more.wait(), 0, "{handler}");
        assert_eq!(
            more.output_with(&["stdout F more"]).stdout,
            "more\n",
            "{handler}"
        );
        remove(pod, handler);
    }
}

/// What is lost with a containerd that is killed: what it has read and not yet written to the log, 32 KiB here and there. Of a
/// FIFO it is no more, since a FIFO keeps the rest. A stream has no receipts: what was sent into the windows that
/// containerd has granted, two of 64 KiB at most, is lost too.
const ON_ITS_WAY: usize = 256 << 10;

#[test]
fn a_containerd_that_is_killed_while_output_flows_loses_no_more_than_was_on_its_way() {
    const DIGITS: usize = 500;
    let handlers = compared();
    let pods = with_each(&handlers, |handler| {
        let pod = Pod::run(handler);
        let batch = format!(
            "awk -v n=$n 'BEGIN {{ for (e = n + 100; n < e; n++) printf \"%d %0{DIGITS}d\\n\", n, n }}'"
        );
        let container = pod.start(&format!(
            "n=1; until [ -e /host/stop ]; do {batch}; n=$((n + 100)); done; echo $((n - 1)) >/host/last; exit 4"
        ));
        (pod, container)
    });
    for (_, container) in &pods {
        let mut log = Follower::of(&container.log);
        for _ in 0..500 {
            log.next_line();
        }
    }
    drop(Away::of_containerd());
    for (pod, _) in &pods {
        pod.file("stop");
    }
    for ((pod, container), handler) in pods.into_iter().zip(handlers) {
        assert_eq!(container.wait(), 4, "{handler}");
        let lines = fs::read_to_string(pod.host().join("last")).unwrap();
        let lines: usize = lines.trim().parse().unwrap();
        let (mut last, mut whole, mut gaps, mut torn) = (0, 0, 0, 0);
        let end = format!("stdout F {}", numbered_line(lines, DIGITS));
        for line in container.output_with(&[&end]).stdout.lines() {
            let n = line.split(' ').next().and_then(|word| word.parse().ok());
            let Some(n) = n.filter(|&n| line == numbered_line(n, DIGITS)) else {
                torn += 1;
                continue;
            };
            assert!(n > last, "{handler}: {n} after {last}");
            gaps += usize::from(n > last + 1);
            (last, whole) = (n, whole + 1);
        }
        let figures = format!("{handler}: {whole} of {lines} lines, {gaps} gaps, {torn} torn");
        tell(&figures);
        assert_eq!(last, lines, "{figures}");
        assert!(gaps <= 1 && torn <= 1, "{figures}");
        assert!((lines - whole) * DIGITS <= ON_ITS_WAY, "{figures}");
        remove(pod, handler);
    }
}
