//! Many pods on one node.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use cube_tests::*;

/// How many are started, and ended, at once.
const AT_ONCE: usize = 2;

/// Starts a pod of the smallest kind, so that a nested host holds them all.
fn start() -> Running {
    Container::new()
        .option("--memory-limit", &(48 << 20).to_string())
        .start(&["sleep", "100000"])
}

/// Does something `count` times, [`AT_ONCE`] at a time, and returns what that gives.
fn many<T: Send + 'static>(count: usize, what: impl Fn() -> T + Copy + Send + 'static) -> Vec<T> {
    let share = move |worker| (worker..count).step_by(AT_ONCE).map(move |_| what());
    let workers: Vec<_> = (0..AT_ONCE)
        .map(|worker| thread::spawn(move || share(worker).collect::<Vec<_>>()))
        .collect();
    let done = workers.into_iter().map(|worker| worker.join().unwrap());
    done.flatten().collect()
}

/// How long the start of a pod takes: the median of some, each of which is ended before the next.
fn time_to_start() -> Duration {
    let mut times: Vec<_> = (0..9)
        .map(|_| {
            let clock = Instant::now();
            let _running = start();
            clock.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

#[test]
fn the_201st_pod_starts_as_fast_as_the_first() {
    const PODS: usize = 200;
    let first = time_to_start();
    let mut pods = many(PODS, start);
    let last = time_to_start();
    // Past the test harness, which keeps what a test prints to itself.
    let _ = writeln!(
        std::io::stderr(),
        "density: the first pods took {first:?}, the 201st {last:?}"
    );
    // An emulated host does not keep time well; what grows with the number of pods would show by a multiple.
    assert!(
        last < first * 2,
        "the first took {first:?}, the 201st {last:?}"
    );
    for running in [&pods[0], &pods[PODS - 1]] {
        running.exec(&["true"]).success();
    }

    let ids: Vec<_> = pods.iter().map(|running| running.id.clone()).collect();
    let others = pods.split_off(PODS / AT_ONCE);
    let ending = thread::spawn(move || drop(others));
    drop(pods);
    ending.join().unwrap();
    ids.iter().for_each(|id| assert_no_traces_of(id));
    assert_eq!(
        fs::read_dir("/run/cube/default").map_or(0, Iterator::count),
        0
    );
}
