//! A container's processes and what may happen to them: a state machine without any waiting.
//!
//! ```text
//! created ──start──▶ running ◀─pause/resume─▶ paused
//!    └──────────────exit─┴───────exit───────────┴──▶ stopped ──delete──▶ (gone)
//! ```
//!
//! Each change puts its event into the publisher's queue itself, so that no event can be out of
//! order: none before the change, an exec's exit before its init's, an exit never before its start.

mod process;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use containerd_shim_protos::events::task::{
    TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused, TaskResumed,
    TaskStart,
};
use protobuf::MessageField;
use tokio::sync::watch;

use crate::publisher::{Event, Publisher, timestamp};
use crate::stdio::{OutputNews, Relays, Uris};
use crate::task_error::TaskError;
pub use process::{Exit, PendingExec, Phase, Process, Start};

/// A container of the sandbox.
pub struct Container {
    id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// The host process that stands for all of its processes: the hypervisor.
    pub pid: u32,
    init: Process,
    execs: BTreeMap<String, Process>,
    /// The init's exit, held back until the execs' exits have come: the agent ends them before it
    /// tells of the init's, but its answers may be taken in another order.
    init_exit: Option<Exit>,
    /// Whether it is held back for its machine's end, too.
    held: bool,
    /// Told when something of a process has come to an end: its start, itself, its delete.
    settled: watch::Sender<()>,
    /// How many OOM kills were told of.
    oom_kills: u64,
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
            held: false,
            settled: watch::Sender::new(()),
            oom_kills: 0,
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
        // An init that has ended, but for an exec that outlives it, still counts as what it was.
        let ended = exec.is_empty() && init_has_ended;
        if process.phase != Phase::Created || process.starting || process.deleting || ended {
            let what = if process.phase == Phase::Stopped || ended {
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
        self.settled.send_replace(());
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
            self.settled.send_replace(());
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

    /// Holds the init's exit back, when it comes, until [`Self::tell_exit`].
    pub fn hold_exit(&mut self) {
        self.held = true;
    }

    /// The init's exit may be told.
    pub fn tell_exit(&mut self) {
        self.held = false;
        self.settle_init();
    }

    /// Told when something of a process has come to an end: its start, itself, its delete.
    pub fn settled(&self) -> watch::Receiver<()> {
        self.settled.subscribe()
    }

    /// Whether nothing of it is on its way, but for its init's exit.
    pub fn is_quiet(&self) -> bool {
        let is_busy = |exec: &Process| exec.is_active() || exec.deleting;
        !self.init.starting && !self.init.deleting && !self.execs.values().any(is_busy)
    }

    /// Whether a delete of it is on its way.
    pub fn is_being_deleted(&self) -> bool {
        self.init.deleting
    }

    /// News of the output of all its processes.
    pub fn output(&self) -> Vec<OutputNews> {
        std::iter::once(&self.init)
            .chain(self.execs.values())
            .filter_map(|process| Some(process.relays.as_ref()?.news()))
            .collect()
    }

    /// How many OOM kills were told of.
    pub fn oom_kills(&self) -> u64 {
        self.oom_kills
    }

    /// The guest's kernel has killed so many of its processes for want of memory by now. Kills that
    /// come to be known together are one occurrence, as with runc. Whether there was one.
    pub fn oom_killed(&mut self, kills: u64) -> bool {
        let is_news = kills > self.oom_kills;
        if is_news {
            self.oom_kills = kills;
            self.publisher.publish(Event::Oom(TaskOOM {
                container_id: self.id.clone(),
                ..Default::default()
            }));
        }
        is_news
    }

    /// Ends the init once no exec is left.
    fn settle_init(&mut self) {
        self.settled.send_replace(());
        if self.held || self.execs.values().any(Process::is_active) {
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
            Phase::Stopped => Err(already_finished()),
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
        self.settled.send_replace(());
    }

    /// Forgets an exec.
    pub fn remove_exec(&mut self, exec: &str) -> Option<Process> {
        let removed = self.execs.remove(exec);
        self.settled.send_replace(());
        removed
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
        self.held = false;
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

    /// Whether the container's limits can be changed. runc's shim refuses it with no code of its own
    /// (`stoppedState` in cmd/containerd-shim-runc-v2/process/init_state.go).
    pub fn check_update(&self) -> Result<(), TaskError> {
        if self.init_has_ended() {
            return Err(TaskError::host("cannot update a stopped container"));
        }
        Ok(())
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

/// The error of a signal that comes too late.
pub fn already_finished() -> TaskError {
    TaskError::NotFound("process already finished".into())
}

#[cfg(test)]
mod tests;
