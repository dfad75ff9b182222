//! Many pods on one node.
//!
//! `CUBE_TEST_PODS` says how many, 200 by default.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use cube_tests::*;

/// How many are started, and ended, at once.
const AT_ONCE: usize = 2;

/// How many times what the first start costs a later one may: what one pod costs each that is started after it must be
/// less than the two hundredth part of a start. That is far above what it should be, which is nothing, but a processor that is
/// emulated counts what its own host takes from it as used: the same start was seen to take 1.5 times as long.
const BOUND: u32 = 2;

/// Does something `count` times, [`AT_ONCE`] at a time, and returns what that gives.
fn many<T: Send + 'static>(count: usize, what: impl Fn() -> T + Copy + Send + 'static) -> Vec<T> {
    let share = move |worker| (worker..count).step_by(AT_ONCE).map(move |_| what());
    let workers: Vec<_> = (0..AT_ONCE)
        .map(|worker| thread::spawn(move || share(worker).collect::<Vec<_>>()))
        .collect();
    let done = workers.into_iter().map(|worker| worker.join().unwrap());
    done.flatten().collect()
}

/// What the kernel counts of a process.
struct Counted {
    parent: u32,
    /// What it has used of the processors, the time of a guest included.
    used: Duration,
    /// What the children have that it has waited for.
    used_by_children: Duration,
}

impl Counted {
    /// Up to now.
    fn of(pid: u32) -> Self {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // The name before may have blanks. What follows begins with the third field.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<_> = fields.split_whitespace().collect();
        let number = |field: usize| fields[field - 3].parse::<u32>().unwrap();
        // SAFETY: sysconf(3) has no memory arguments.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let time =
            |field| Duration::from_secs(number(field).into()) / u32::try_from(ticks).unwrap();
        Self {
            parent: number(4),
            used: time(14) + time(15),
            used_by_children: time(16) + time(17),
        }
    }
}

/// A pod of the smallest kind, so that a nested host holds them all.
struct Pod {
    running: Running,
    hypervisor: u32,
}

impl Pod {
    fn start() -> Self {
        let dir = TestDir::new();
        let file = dir.path().join("pid");
        let running = Container::new()
            .option("--memory-limit", &(48 << 20).to_string())
            // A list of tasks would ask all of them.
            .option("--pid-file", &file.display().to_string())
            .start(&["sleep", "100000"]);
        let hypervisor = fs::read_to_string(file).unwrap().parse().unwrap();
        Self {
            running,
            hypervisor,
        }
    }

    /// What its shim and its hypervisor have used of the processors.
    fn used(&self) -> Duration {
        let hypervisor = Counted::of(self.hypervisor);
        hypervisor.used + Counted::of(hypervisor.parent).used
    }
}

/// What a start costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// Of the processors: what the pod's shim and hypervisor have used when the client is back, and containerd in the
    /// meantime, with the children that it has waited for, such as the program that starts the shim. What idle pods use
    /// is not in it.
    processors: Duration,
    /// The time that has passed, which they make longer.
    time: Duration,
}

/// What the start of a pod costs: the least of some, each of which is ended before the next. What else happens on the host
/// only adds to it.
fn cost_of_start() -> Cost {
    let containerd = Containerd::of_the_tests().pid();
    let used_by_containerd = || {
        let counted = Counted::of(containerd);
        counted.used + counted.used_by_children
    };
    let cost = || {
        let (clock, before) = (Instant::now(), used_by_containerd());
        let pod = Pod::start();
        let (time, after) = (clock.elapsed(), used_by_containerd());
        Cost {
            processors: pod.used() + (after - before),
            time,
        }
    };
    (0..9).map(|_| cost()).min().unwrap()
}

/// How many pods are to be there.
fn wanted() -> usize {
    std::env::var("CUBE_TEST_PODS").map_or(200, |count| count.parse().unwrap())
}

#[test]
fn the_201st_pod_starts_as_fast_as_the_first() {
    let count = wanted();
    let first = cost_of_start();
    let mut pods = many(count, Pod::start);

    let used = || {
        pods.iter()
            .map(|pod| Counted::of(pod.hypervisor).used)
            .sum()
    };
    let (clock, before): (_, Duration) = (Instant::now(), used());
    let last = cost_of_start();
    let idle = (used() - before).div_duration_f64(clock.elapsed());
    // Past the test harness, which keeps what a test prints to itself.
    let _ = writeln!(
        std::io::stderr(),
        "density: of {count} pods: a start of the first took {first:.2?}, with all there {last:.2?}; \
         the hypervisors of the idle ones used {idle:.2} processors, {:.2} % each",
        100. * idle / count as f64
    );
    assert!(
        last.processors < first.processors * BOUND,
        "a start cost {first:?} with no pods there, {last:?} with {count}"
    );
    for pod in [&pods[0], &pods[count - 1]] {
        pod.running.exec(&["true"]).success();
    }

    let ids: Vec<_> = pods.iter().map(|pod| pod.running.id.clone()).collect();
    let others = pods.split_off(count / AT_ONCE);
    let ending = thread::spawn(move || drop(others));
    drop(pods);
    ending.join().unwrap();
    ids.iter().for_each(|id| assert_no_traces_of(id));
    assert_eq!(
        fs::read_dir("/run/cube/default").map_or(0, Iterator::count),
        0
    );
}
