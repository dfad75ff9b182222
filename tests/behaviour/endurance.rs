//! What is done often costs no more the last time than the first, and what is slow or fails delays nothing else.

use std::fs;
use std::time::{Duration, Instant};

use cube_tests::*;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holdings {
    descriptors: u64,
    threads: u64,
    /// Memory of its own without the guest's, KiB.
    memory: u64,
}

/// A process of the host.
fn of_host(pid: u32) -> Holdings {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    Holdings {
        descriptors: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64,
        threads: field(&status, "Threads:"),
        memory: own_memory(&fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap()),
    }
}

/// PID 1 of the guest, seen from a container in the guest's own PID namespace.
fn of_agent(running: &Running) -> Holdings {
    let script = "ls /proc/1/fd | wc -l; cat /proc/1/status";
    let text = running.exec(&["sh", "-c", script]).success();
    assert!(
        text.contains("Name:\tcube-agent\n") || text.contains("Name:\tinit\n"),
        "{text}"
    );
    Holdings {
        descriptors: text.lines().next().unwrap().trim().parse().unwrap(),
        threads: field(&text, "Threads:"),
        memory: field(&text, "RssAnon:"),
    }
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Private anonymous memory of all mappings but the guest's, each of which is larger than all else together.
fn own_memory(smaps: &str) -> u64 {
    const GUEST_KIB: u64 = 16 << 10;
    let (mut sum, mut size) = (0, 0);
    for line in smaps.lines() {
        let value = || line.split_whitespace().nth(1).unwrap().parse().unwrap();
        if line.starts_with("Size:") {
            size = value();
        } else if line.starts_with("Anonymous:") && size < GUEST_KIB {
            sum += value();
        }
    }
    sum
}

#[test]
fn two_hundred_execs_in_a_row_leave_nothing_in_shim_hypervisor_and_agent() {
    // In 200 execs: a leak of half a kilobyte each would be seen.
    const GROWTH: u64 = 100;
    let running = Container::new()
        .option("--cap-add", "CAP_SYS_PTRACE")
        .option("--with-ns", "pid:/proc/1/ns/pid")
        .start(&["sleep", "1000"]);
    let hypervisor = running.pid();
    let status = fs::read_to_string(format!("/proc/{hypervisor}/status")).unwrap();
    let shim = field(&status, "PPid:") as u32;
    let holdings = || {
        // The agent's first: asking it is an exec too.
        let agent = of_agent(&running);
        [agent, of_host(shim), of_host(hypervisor)]
    };
    // Memory allocators and caches come to their usual size.
    for _ in 0..20 {
        running.exec(&["true"]).success();
    }
    let before = holdings();
    for _ in 0..200 {
        running.exec(&["true"]).success();
    }
    let after = holdings();
    for (before, after) in before.iter().zip(&after) {
        let text = format!("agent, shim, hypervisor before: {before:?}, after: {after:?}");
        assert_eq!(after.descriptors, before.descriptors, "{text}");
        assert_eq!(after.threads, before.threads, "{text}");
        assert!(after.memory <= before.memory + GROWTH, "{text}");
    }
}

#[test]
fn an_exec_of_a_missing_program_fails_as_fast_as_one_that_succeeds() {
    let running = Container::new().start(&["sleep", "1000"]);
    let time = |program: &str, status: i32| {
        let clock = Instant::now();
        let ended = running.exec(&[program]);
        assert_eq!(ended.status == 0, status == 0, "{ended:?}");
        clock.elapsed()
    };
    let median = |program: &str, status: i32| {
        let mut times: Vec<_> = (0..5).map(|_| time(program, status)).collect();
        times.sort_unstable();
        times[2]
    };
    time("true", 0);
    let (succeeds, fails) = (median("true", 0), median("nosuch", 1));
    // A second on a machine; an emulated one may need as long for a client alone.
    let limit = Duration::from_secs(1).max(succeeds * 2);
    assert!(fails < limit, "{fails:?}, and {succeeds:?} for `true`");
}

/// `ctr task metrics` without end.
struct MetricsLoop {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<u32>>,
}

impl MetricsLoop {
    fn of(id: &str) -> Self {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (stopped, id) = (stop.clone(), id.to_owned());
        let thread = std::thread::spawn(move || {
            let mut asked = 0;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                must_ctr(&["task", "metrics", &id]);
                asked += 1;
            }
            asked
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// How often it has asked.
    fn end(mut self) -> u32 {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// How long it takes from the kill of an exec to its client's end, the client that kills included.
fn time_to_kill(running: &Running) -> Duration {
    let (exec_id, mut exec) = running.sleeping_exec();
    let clock = Instant::now();
    running.kill_exec(&exec_id, "SIGKILL");
    assert_eq!(exec.wait().unwrap().code(), Some(137));
    clock.elapsed()
}

#[test]
fn metrics_in_a_loop_do_not_delay_a_kill() {
    let running = Container::new().start(&["sleep", "1000"]);
    let median = || {
        let mut times: Vec<_> = (0..5).map(|_| time_to_kill(&running)).collect();
        times.sort_unstable();
        times[2]
    };
    time_to_kill(&running);
    let alone = median();
    let metrics = MetricsLoop::of(&running.id);
    let beside = median();
    assert!(metrics.end() > 0);
    // The loop's clients take a processor; that they take it is not what is asked here.
    let limit = Duration::from_secs(1).max(alone * 3);
    assert!(beside < limit, "{beside:?}, and {alone:?} without metrics");
}
