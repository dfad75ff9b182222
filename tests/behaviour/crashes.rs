//! Something that a sandbox needs is killed at a random moment of its life: the shim, the hypervisor, the guest, the
//! container's init, containerd. Whatever it was and whenever: exits are told of once and soon, deletes work,
//! and nothing is left.
//!
//! `CUBE_TEST_ROUNDS` says how often (10), `CUBE_TEST_SEED` repeats what a run has printed, from round
//! `CUBE_TEST_FIRST_ROUND` on (0).

#[path = "crashes/plan.rs"]
mod plan;
#[path = "crashes/round.rs"]
mod round;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cube_tests::{Containerd, Events};
use plan::{Plan, Random};
use round::{Durations, Round};

/// Goes past the test harness, which keeps what a test prints to itself unless it fails.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {value:?}")),
    )
}

#[test]
fn whatever_is_killed_and_whenever_exits_are_told_once_deletes_work_and_nothing_is_left() {
    let rounds = number("CUBE_TEST_ROUNDS").unwrap_or(10);
    let first = number("CUBE_TEST_FIRST_ROUND").unwrap_or(0);
    let seed = number("CUBE_TEST_SEED").unwrap_or_else(Random::seed);
    tell(&format!(
        "crashes: {rounds} rounds, CUBE_TEST_SEED={seed} repeats them"
    ));
    let containerd = Containerd::of_the_tests();
    let mut events = Events::listen();
    let mut durations = Durations::measured();
    tell(&format!("crashes: {durations:?}"));
    let before = round::host();
    let (mut failed, mut excused, mut struck) = (Vec::new(), Vec::new(), 0);
    for number in first..first + rounds {
        let plan = Plan::of(seed, number);
        let mut round = Round::new(&plan, &containerd, &mut durations);
        let result = catch_unwind(AssertUnwindSafe(|| round.run(&mut events)));
        let outcome = match &result {
            Ok(()) if round.has_struck() => "",
            Ok(()) => ": too early or too late",
            Err(_) => ": FAILED",
        };
        tell(&format!("crashes: round {number}, {plan:?}{outcome}"));
        struck += u64::from(round.has_struck());
        if let Err(panic) = result {
            let why = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            let text = format!(
                "round {number}, {plan:?}: {}\n{}{}",
                why.unwrap_or_default(),
                events.lines_about(&round.ids()),
                containerd.log_about(&round.ids())
            );
            tell(&text);
            failed.push(text);
        }
        excused.extend(round.excused());
        drop(round);
    }
    // What is told twice may be told late.
    failed.extend(events.told_twice(&excused));
    if failed.is_empty() {
        assert_eq!(round::host(), before, "left after {rounds} rounds");
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    // A moment may be before there is anything to kill, or after; most are not.
    assert!(struck * 2 >= rounds, "{struck} of {rounds} struck");
}
