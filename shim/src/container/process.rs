//! A process that containerd knows: a container's init or an exec.

use std::time::SystemTime;

use tokio::sync::watch;

use crate::stdio::{Relays, Uris};

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
    pub(super) starting: bool,
    /// A delete is on its way.
    pub(super) deleting: bool,
    /// The exit that came before the start's own answer.
    pub(super) early_exit: Option<Exit>,
    /// For an exec that was not started: what to start, and what was asked of it meanwhile.
    pub(super) pending: Option<PendingExec>,
    pub(super) exit: watch::Sender<Option<Exit>>,
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
    pub(super) fn new(uris: Uris) -> Self {
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
    pub(super) fn is_active(&self) -> bool {
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
