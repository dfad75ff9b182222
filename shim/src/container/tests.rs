//! Orders of events, whatever happens.

use proptest::prelude::*;

use super::*;
use crate::publisher::{Queue, queue};

fn container() -> (Container, Queue) {
    let (publisher, queue) = queue();
    let container = Container::new(
        "c".into(),
        "/b".into(),
        7,
        Uris::default(),
        None,
        1,
        publisher,
    );
    (container, queue)
}

fn exit(status: u32) -> Exit {
    Exit {
        status,
        at: SystemTime::UNIX_EPOCH,
    }
}

fn add(container: &mut Container, exec: &str) -> Result<(), TaskError> {
    container.add_exec(exec, Uris::default(), PendingExec::default())
}

fn start(container: &mut Container, exec: &str) {
    container.begin_start(exec).unwrap();
    let _ = container.finish_start(exec, (!exec.is_empty()).then_some((2, None)));
}

/// Event names with the process they are about.
fn names(events: &[Event]) -> Vec<String> {
    events
        .iter()
        .map(|event| match event {
            Event::Create(_) => "create".into(),
            Event::Start(_) => "start".into(),
            Event::ExecAdded(e) => format!("added {}", e.exec_id),
            Event::ExecStarted(e) => format!("started {}", e.exec_id),
            Event::Exit(e) => format!("exit {} {}", e.id, e.exit_status),
            Event::Delete(e) => format!("delete {}", e.exit_status),
            Event::Paused(_) => "paused".into(),
            Event::Resumed(_) => "resumed".into(),
            Event::Oom(_) => "oom".into(),
        })
        .collect()
}

#[test]
fn an_exec_that_outlives_its_init_exits_first() {
    let (mut container, mut queue) = container();
    start(&mut container, "");
    add(&mut container, "e").unwrap();
    start(&mut container, "e");
    container.exited("", exit(3));
    assert_eq!(container.init().phase, Phase::Running);
    assert!(container.begin_delete("").is_err());
    container.exited("e", exit(137));
    assert_eq!(
        names(&queue.drain()),
        ["start", "added e", "started e", "exit e 137", "exit c 3"]
    );
}

#[test]
fn an_exit_that_overtakes_the_start_is_published_after_it() {
    let (mut container, mut queue) = container();
    container.begin_start("").unwrap();
    container.exited("", exit(0));
    assert_eq!(container.init().phase, Phase::Created);
    container.finish_start("", None);
    assert_eq!(names(&queue.drain()), ["start", "exit c 0"]);
    assert_eq!(container.init().exit(), Some(exit(0)));
}

#[test]
fn an_init_that_ended_while_its_start_failed_does_not_start_again() {
    let (mut container, mut queue) = container();
    container.begin_start("").unwrap();
    container.exited("", exit(3));
    add(&mut container, "e").unwrap();
    start(&mut container, "e");
    container.fail_start("");
    // Its end waits for that of the exec.
    assert_eq!(
        container.begin_start("").map(drop).unwrap_err().code(),
        ttrpc::Code::FAILED_PRECONDITION
    );
    container.exited("e", exit(0));
    assert_eq!(
        names(&queue.drain()),
        ["added e", "started e", "exit e 0", "exit c 3"]
    );
}

#[test]
fn a_failed_exec_wakes_its_waiters_without_an_event() {
    let (mut container, mut queue) = container();
    start(&mut container, "");
    add(&mut container, "e").unwrap();
    container.begin_start("e").unwrap();
    container.fail_start("e");
    assert_eq!(container.process("e").unwrap().exit().unwrap().status, 255);
    assert_eq!(names(&queue.drain()), ["start", "added e"]);
    container.begin_delete("e").unwrap();
    assert!(container.remove_exec("e").is_some());
}

#[test]
fn the_codes_are_those_of_the_contract() {
    use ttrpc::Code;
    let (mut container, _queue) = container();
    let code = |result: Result<(), TaskError>| result.unwrap_err().code();
    assert_eq!(code(container.check_kill("e")), Code::NOT_FOUND);
    start(&mut container, "");
    add(&mut container, "e").unwrap();
    assert_eq!(code(add(&mut container, "e")), Code::ALREADY_EXISTS);
    assert_eq!(code(container.check_kill("e")), Code::FAILED_PRECONDITION);
    assert_eq!(code(container.begin_delete("")), Code::FAILED_PRECONDITION);
    assert_eq!(
        code(container.begin_start("").map(drop)),
        Code::FAILED_PRECONDITION
    );
    container.exited("", exit(0));
    assert_eq!(code(container.check_kill("")), Code::NOT_FOUND);
    assert_eq!(
        code(container.begin_start("e").map(drop)),
        Code::FAILED_PRECONDITION
    );
    assert_eq!(code(add(&mut container, "f")), Code::FAILED_PRECONDITION);
    container.begin_delete("").unwrap();
    assert_eq!(code(container.begin_delete("")), Code::NOT_FOUND);
}

#[test]
fn an_oom_is_told_once_and_before_the_exit_that_it_caused() {
    let (mut container, mut queue) = container();
    start(&mut container, "");
    assert!(!container.oom_killed(0));
    assert!(container.oom_killed(1));
    // The same one again, by another process's end.
    assert!(!container.oom_killed(1));
    assert!(container.oom_killed(4));
    container.exited("", exit(137));
    assert_eq!(names(&queue.drain()), ["start", "oom", "oom", "exit c 137"]);
}

#[test]
fn deleting_what_was_never_started_publishes_its_end() {
    let (mut container, mut queue) = container();
    container.begin_delete("").unwrap();
    assert_eq!(container.deleted(exit(137)).status, 137);
    assert_eq!(names(&queue.drain()), ["exit c 137", "delete 137"]);
}

#[test]
fn an_exit_status_is_kept_until_the_delete() {
    let (mut container, mut queue) = container();
    start(&mut container, "");
    container.exited("", exit(7));
    container.exited("", exit(9));
    container.begin_delete("").unwrap();
    assert_eq!(container.deleted(exit(0)).status, 7);
    assert_eq!(names(&queue.drain()), ["start", "exit c 7", "delete 7"]);
}

#[derive(Clone, Debug)]
enum Op {
    Add(u8),
    BeginStart(u8),
    FinishStart(u8),
    FailStart(u8),
    Exit(u8),
    Pause,
    Resume,
    OomKilled(u8),
    DeleteExec(u8),
    Delete,
}

/// Process 0 is the init, the others are execs.
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (1_u8..4).prop_map(Op::Add),
        (0_u8..4).prop_map(Op::BeginStart),
        (0_u8..4).prop_map(Op::FinishStart),
        (0_u8..4).prop_map(Op::FailStart),
        (0_u8..4).prop_map(Op::Exit),
        Just(Op::Pause),
        Just(Op::Resume),
        (0_u8..4).prop_map(Op::OomKilled),
        (1_u8..4).prop_map(Op::DeleteExec),
        Just(Op::Delete),
    ]
}

fn name(n: u8) -> String {
    if n == 0 {
        String::new()
    } else {
        format!("e{n}")
    }
}

proptest! {
    /// Whatever is asked in whatever order: events of each process come in their order and
    /// once, and the init's exit is the last exit.
    #[test]
    fn events_are_in_order_whatever_happens(ops in prop::collection::vec(op(), 0..60)) {
        let (mut container, mut queue) = container();
        let mut starting = [false; 4];
        let mut gone = false;
        for op in ops {
            if gone {
                break;
            }
            match op {
                Op::Add(n) => drop(add(&mut container, &name(n))),
                Op::BeginStart(n) => {
                    if container.begin_start(&name(n)).is_ok() {
                        starting[usize::from(n)] = true;
                    }
                }
                Op::FinishStart(n) if starting[usize::from(n)] => {
                    starting[usize::from(n)] = false;
                    container.finish_start(&name(n), (n > 0).then_some((2, None)));
                }
                Op::FailStart(n) if starting[usize::from(n)] => {
                    starting[usize::from(n)] = false;
                    container.fail_start(&name(n));
                }
                Op::FinishStart(_) | Op::FailStart(_) => {}
                Op::Exit(n) => {
                    // Only what was started, or is the init, is in the guest.
                    let known = container.process(&name(n)).is_ok_and(|p| {
                        n == 0 || p.phase != Phase::Created || starting[usize::from(n)]
                    });
                    if known {
                        container.exited(&name(n), exit(u32::from(n)));
                    }
                }
                Op::Pause => if container.check_phase(Phase::Running).is_ok() { container.paused() },
                Op::Resume => if container.check_phase(Phase::Paused).is_ok() { container.resumed() },
                Op::OomKilled(n) => {
                    container.oom_killed(n.into());
                }
                Op::DeleteExec(n) => {
                    if container.begin_delete(&name(n)).is_ok() {
                        container.remove_exec(&name(n));
                    }
                }
                Op::Delete => {
                    if container.begin_delete("").is_ok() {
                        container.deleted(exit(99));
                        gone = true;
                    }
                }
            }
        }
        let events = names(&queue.drain());
        let at = |what: &str| events.iter().position(|e| e.starts_with(what));
        let count = |what: &str| events.iter().filter(|e| e.starts_with(what)).count();
        prop_assert!(count("exit c") <= 1 && count("start") - count("started") <= 1);
        if let Some(init_exit) = at("exit c") {
            prop_assert!(events[init_exit..].iter().all(|e| !e.starts_with("exit e") && !e.starts_with("started")));
            prop_assert!(at("start").is_none_or(|start| start < init_exit || events[start].starts_with("started")));
        }
        if gone {
            prop_assert!(events.last().is_some_and(|e| e.starts_with("delete")));
            prop_assert_eq!(count("exit c"), 1);
        }
        for n in 1..4 {
            // An exec may be added again after it was deleted: rounds of added, started, exit.
            let mut state = 0;
            for event in &events {
                state = match (state, event.as_str()) {
                    (0, e) if e == format!("added e{n}") => 1,
                    (1, e) if e == format!("started e{n}") => 2,
                    (2, e) if e.starts_with(&format!("exit e{n} ")) => 0,
                    // Deleted without having run, or failed: added anew.
                    (1, e) if e == format!("added e{n}") => 1,
                    (s, e) if !e.contains(&format!("e{n}")) => s,
                    (s, e) => { prop_assert!(false, "exec {n}: {e} in state {s}: {events:?}"); s }
                };
            }
        }
    }
}
