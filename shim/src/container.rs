//! A container's processes and what may happen to them: a state machine without any waiting.
//!
//! ```text
//! created ──start──▶ running ◀─pause/resume─▶ paused
//!    └──────────────exit─┴───────exit───────────┴──▶ stopped ──delete──▶ (gone)
//! ```
//!
//! Each change puts its event into the publisher's queue itself, so that no event can be out of
//! order: none before the change, an exec's exit before its init's, an exit never before its start.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use containerd_shim_protos::events::task::{
    TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskPaused, TaskResumed, TaskStart,
};
use protobuf::MessageField;
use tokio::sync::watch;

use crate::publisher::{Event, Publisher, timestamp};
use crate::stdio::{Relays, Uris};
use crate::task_error::TaskError;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its exit status, 128 + signal for one that a signal ended.
    pub status: u32,
    /// When.
    pub at: SystemTime,
}

impl Exit {
    /// The end of a process whose machine is gone: as if by SIGKILL.
    pub fn killed() -> Self {
        Self {
            status: 137,
            at: SystemTime::now(),
        }
    }
}

/// What a process is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits to be started.
    Created,
    /// It runs.
    Running,
    /// It is frozen.
    Paused,
    /// It has ended.
    Stopped,
}

/// A container's init or an exec.
pub struct Process {
    /// What it is doing.
    pub phase: Phase,
    /// Where containerd wants its standard streams.
    pub uris: Uris,
    /// The running relays of its standard streams.
    pub relays: Option<Relays>,
    /// Its process id in the guest; 0 before it is started.
    pub guest_pid: u32,
    /// A start is on its way.
    starting: bool,
    /// A delete is on its way.
    deleting: bool,
    /// The exit that came before the start's own answer.
    early_exit: Option<Exit>,
    /// For an exec that was not started: what to start, and what was asked of it meanwhile.
    pending: Option<PendingExec>,
    exit: watch::Sender<Option<Exit>>,
}

/// An exec that is to be started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PendingExec {
    /// The OCI `process` object, JSON.
    pub process: Vec<u8>,
    /// The terminal's first size, width and height.
    pub size: (u32, u32),
    /// Whether its standard input was closed already.
    pub stdin_closed: bool,
}

impl Process {
    fn new(uris: Uris) -> Self {
        Self {
            phase: Phase::Created,
            uris,
            relays: None,
            guest_pid: 0,
            starting: false,
            deleting: false,
            early_exit: None,
            pending: None,
            exit: watch::Sender::new(None),
        }
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Tells of its end.
    pub fn exit_receiver(&self) -> watch::Receiver<Option<Exit>> {
        self.exit.subscribe()
    }

    /// An exec that was not started yet.
    pub fn pending_mut(&mut self) -> Option<&mut PendingExec> {
        self.pending.as_mut()
    }

    /// Whether something of it is in the guest, or about to be.
    fn is_active(&self) -> bool {
        self.starting || matches!(self.phase, Phase::Running | Phase::Paused)
    }
}

/// What a start has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Start {
    /// Start the init.
    Init,
    /// Start an exec with these streams.
    Exec(PendingExec, Uris),
}

/// A container of the sandbox.
pub struct Container {
    id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// The host process that stands for all of its processes: the hypervisor.
    pub pid: u32,
    init: Process,
    execs: BTreeMap<String, Process>,
    /// The init's exit, held back until the execs have ended.
    init_exit: Option<Exit>,
    publisher: Publisher,
}

impl Container {
    /// A container that was created in the guest. The caller publishes the create event, whose
    /// content is the request's.
    pub fn new(
        id: String,
        bundle: PathBuf,
        pid: u32,
        uris: Uris,
        relays: Option<Relays>,
        guest_pid: u32,
        publisher: Publisher,
    ) -> Self {
        let mut init = Process::new(uris);
        init.relays = relays;
        init.guest_pid = guest_pid;
        Self {
            id,
            bundle,
            pid,
            init,
            execs: BTreeMap::new(),
            init_exit: None,
            publisher,
        }
    }

    /// Its init.
    pub fn init(&self) -> &Process {
        &self.init
    }

    /// A process: the init if `exec` is empty.
    pub fn process(&self, exec: &str) -> Result<&Process, TaskError> {
        if exec.is_empty() {
            return Ok(&self.init);
        }
        self.execs
            .get(exec)
            .ok_or_else(|| TaskError::NotFound(format!("exec {exec} of container {}", self.id)))
    }

    /// The same, to be changed.
    pub fn process_mut(&mut self, exec: &str) -> Result<&mut Process, TaskError> {
        if exec.is_empty() {
            return Ok(&mut self.init);
        }
        self.execs
            .get_mut(exec)
            .ok_or_else(|| TaskError::NotFound(format!("exec {exec} of container {}", self.id)))
    }

    fn init_has_ended(&self) -> bool {
        self.init.phase == Phase::Stopped || self.init_exit.is_some()
    }

    /// Adds an exec, to be started later.
    pub fn add_exec(
        &mut self,
        exec: &str,
        uris: Uris,
        pending: PendingExec,
    ) -> Result<(), TaskError> {
        if exec.is_empty() {
            return Err(TaskError::InvalidArgument("the exec id is empty".into()));
        }
        if self.execs.contains_key(exec) {
            return Err(TaskError::AlreadyExists(format!("exec {exec}")));
        }
        if self.init_has_ended() || self.init.deleting {
            return Err(TaskError::FailedPrecondition(
                "cannot exec in a stopped container".into(),
            ));
        }
        if self.init.phase == Phase::Paused {
            return Err(TaskError::FailedPrecondition(
                "cannot exec in a paused container".into(),
            ));
        }
        let mut process = Process::new(uris);
        process.pending = Some(pending);
        self.execs.insert(exec.to_owned(), process);
        self.publisher.publish(Event::ExecAdded(TaskExecAdded {
            container_id: self.id.clone(),
            exec_id: exec.to_owned(),
            ..Default::default()
        }));
        Ok(())
    }

    /// A start begins; [`Self::finish_start`] must follow.
    pub fn begin_start(&mut self, exec: &str) -> Result<Start, TaskError> {
        let init_has_ended = self.init_has_ended();
        let paused = self.init.phase == Phase::Paused;
        let process = self.process_mut(exec)?;
        if process.phase != Phase::Created || process.starting || process.deleting {
            let what = if process.phase == Phase::Stopped {
                "stopped"
            } else {
                "running"
            };
            return Err(TaskError::FailedPrecondition(format!(
                "cannot start a {what} process"
            )));
        }
        if !exec.is_empty() && (init_has_ended || paused) {
            let what = if paused { "paused" } else { "stopped" };
            return Err(TaskError::FailedPrecondition(format!(
                "cannot start an exec in a {what} container"
            )));
        }
        process.starting = true;
        if exec.is_empty() {
            return Ok(Start::Init);
        }
        // It stays, so that what is asked of the exec while it starts has a place.
        Ok(Start::Exec(
            process.pending.clone().unwrap_or_default(),
            process.uris.clone(),
        ))
    }

    /// A start has ended well; for an exec with its process id in the guest and its streams.
    /// Returns what an exec was asked by now.
    pub fn finish_start(
        &mut self,
        exec: &str,
        exec_started: Option<(u32, Option<Relays>)>,
    ) -> PendingExec {
        let (id, pid) = (self.id.clone(), self.pid);
        let Ok(process) = self.process_mut(exec) else {
            return PendingExec::default();
        };
        process.starting = false;
        process.phase = Phase::Running;
        let pending = process.pending.take().unwrap_or_default();
        if let Some((guest_pid, relays)) = exec_started {
            process.guest_pid = guest_pid;
            process.relays = relays;
            if let Some(relays) = process.relays.as_mut().filter(|_| pending.stdin_closed) {
                relays.close_stdin();
            }
        }
        let early_exit = process.early_exit.take();
        self.publisher.publish(if exec.is_empty() {
            Event::Start(TaskStart {
                container_id: id,
                pid,
                ..Default::default()
            })
        } else {
            Event::ExecStarted(TaskExecStarted {
                container_id: id,
                exec_id: exec.to_owned(),
                pid,
                ..Default::default()
            })
        });
        if let Some(exit) = early_exit {
            self.exited(exec, exit);
        }
        pending
    }

    /// A start has failed. An exec counts as ended, without an event, since it never was started;
    /// an init stays as it was, unless it has ended meanwhile.
    pub fn fail_start(&mut self, exec: &str) {
        /// What a shell says of a command that could not be run is 126 or 127; runc's shim uses this.
        const FAILED: u32 = 255;
        let Ok(process) = self.process_mut(exec) else {
            return;
        };
        process.starting = false;
        if exec.is_empty() {
            if let Some(exit) = process.early_exit.take() {
                self.exited(exec, exit);
            }
            return;
        }
        process.phase = Phase::Stopped;
        process.pending = None;
        process.exit.send_replace(Some(Exit {
            status: FAILED,
            at: SystemTime::now(),
        }));
        self.settle_init();
    }

    /// A process has ended in the guest.
    pub fn exited(&mut self, exec: &str, exit: Exit) {
        let Ok(process) = self.process_mut(exec) else {
            return;
        };
        if process.phase == Phase::Stopped {
            return;
        }
        if process.starting {
            process.early_exit = Some(exit);
            return;
        }
        if exec.is_empty() {
            self.init_exit.get_or_insert(exit);
        } else {
            self.stop(exec, exit);
        }
        self.settle_init();
    }

    /// Whether the init has ended and execs have not: they are to be ended, for containers whose
    /// PID namespace does not do that.
    pub fn has_survivors(&self) -> bool {
        self.init_exit.is_some()
    }

    /// Gives up waiting for execs that survive their init.
    pub fn abandon_survivors(&mut self) {
        if self.init_exit.is_none() {
            return;
        }
        let survivors: Vec<_> = self
            .execs
            .iter()
            .filter(|(_, process)| process.is_active() && !process.starting)
            .map(|(id, _)| id.clone())
            .collect();
        for exec in survivors {
            log::warn!("The exec {exec} of {} does not end with its init", self.id);
            self.stop(&exec, Exit::killed());
        }
        self.settle_init();
    }

    /// Ends the init once no exec is left.
    fn settle_init(&mut self) {
        if self.execs.values().any(Process::is_active) {
            return;
        }
        if let Some(exit) = self.init_exit.take() {
            self.stop("", exit);
        }
    }

    fn stop(&mut self, exec: &str, exit: Exit) {
        let (id, pid) = (self.id.clone(), self.pid);
        let Ok(process) = self.process_mut(exec) else {
            return;
        };
        process.phase = Phase::Stopped;
        self.publisher.publish(Event::Exit(TaskExit {
            id: if exec.is_empty() {
                id.clone()
            } else {
                exec.to_owned()
            },
            container_id: id,
            pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        }));
        if let Ok(process) = self.process_mut(exec) {
            process.exit.send_replace(Some(exit));
        }
    }

    /// Whether a process can be signalled.
    pub fn check_kill(&self, exec: &str) -> Result<(), TaskError> {
        let process = self.process(exec)?;
        match process.phase {
            Phase::Stopped => Err(TaskError::NotFound("process already finished".into())),
            Phase::Created if !exec.is_empty() => Err(TaskError::FailedPrecondition(format!(
                "the exec {exec} is not started"
            ))),
            _ => Ok(()),
        }
    }

    /// A delete begins; [`Self::abort_delete`] or the process's removal must follow.
    pub fn begin_delete(&mut self, exec: &str) -> Result<(), TaskError> {
        let id = self.id.clone();
        let process = self.process_mut(exec)?;
        if process.deleting {
            return Err(TaskError::NotFound(format!("{id} {exec} is being deleted")));
        }
        if process.is_active() {
            return Err(TaskError::FailedPrecondition(
                "cannot delete a running process".into(),
            ));
        }
        process.deleting = true;
        Ok(())
    }

    /// The delete has failed: it may be tried again.
    pub fn abort_delete(&mut self, exec: &str) {
        if let Ok(process) = self.process_mut(exec) {
            process.deleting = false;
        }
    }

    /// Forgets an exec.
    pub fn remove_exec(&mut self, exec: &str) -> Option<Process> {
        self.execs.remove(exec)
    }

    /// The init is deleted in the guest: publishes its exit, if it was never seen, and the delete.
    /// Returns the exit.
    pub fn deleted(&mut self, exit: Exit) -> Exit {
        for exec in self.execs.keys().cloned().collect::<Vec<_>>() {
            let Some(process) = self.execs.get(&exec) else {
                continue;
            };
            if process.starting {
                self.fail_start(&exec);
            } else if process.is_active() {
                self.stop(&exec, exit);
            }
        }
        self.init.starting = false;
        self.exited("", exit);
        let exit = self.init.exit().unwrap_or(exit);
        self.publisher.publish(Event::Delete(TaskDelete {
            container_id: self.id.clone(),
            pid: self.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        }));
        exit
    }

    /// All relays that still run, to be drained.
    pub fn take_relays(&mut self) -> Vec<Relays> {
        std::iter::once(&mut self.init)
            .chain(self.execs.values_mut())
            .filter_map(|process| process.relays.take())
            .collect()
    }

    /// Whether the container can be paused or resumed.
    pub fn check_phase(&self, wanted: Phase) -> Result<(), TaskError> {
        if self.init.phase == wanted && !self.init_has_ended() {
            return Ok(());
        }
        Err(TaskError::FailedPrecondition(format!(
            "container {} is {:?}, not {:?}",
            self.id, self.init.phase, wanted
        )))
    }

    /// The container is frozen.
    pub fn paused(&mut self) {
        if self.init.phase == Phase::Running {
            self.init.phase = Phase::Paused;
            self.publisher.publish(Event::Paused(TaskPaused {
                container_id: self.id.clone(),
                ..Default::default()
            }));
        }
    }

    /// The container runs again.
    pub fn resumed(&mut self) {
        if self.init.phase == Phase::Paused {
            self.init.phase = Phase::Running;
            self.publisher.publish(Event::Resumed(TaskResumed {
                container_id: self.id.clone(),
                ..Default::default()
            }));
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert!(container.has_survivors());
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
        Abandon,
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
            Just(Op::Abandon),
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
                    Op::Abandon => container.abandon_survivors(),
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
}
