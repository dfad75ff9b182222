//! One container: its state, and its end.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::RwLock;

use super::{ContainerError, Result, Settings};
use crate::cgroup::Cgroup;
use crate::helper::BlockNumbers;
use crate::helper::create::STATE;
use crate::process::Process;
use crate::reaper::{Exit, exited};
use crate::rootfs::Mounted;

/// A container.
pub struct Container {
    pub(super) id: String,
    pub(super) dir: PathBuf,
    pub(super) cgroup_path: String,
    pub(super) cgroup: Cgroup,
    pub(super) inner: Mutex<Inner>,
    /// Read while an exec is made, written when the init has ended.
    pub(super) making: RwLock<()>,
}

/// What changes in a container's life.
#[derive(Default)]
pub(super) struct Inner {
    pub(super) phase: Phase,
    pub(super) init: Option<Init>,
    /// None while an exec is being made.
    pub(super) execs: HashMap<String, Option<Arc<Process>>>,
    /// What is mounted for it from disks.
    pub(super) mounted: Option<Mounted>,
    /// The disks among its devices.
    pub(super) block_devices: Vec<BlockNumbers>,
}

/// A container's first process.
#[derive(Clone)]
pub(super) struct Init {
    pub(super) process: Arc<Process>,
    pub(super) pidfd: Arc<OwnedFd>,
}

/// Where a container is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Creating,
    Created,
    Running,
    Pausing,
    Paused,
    Stopped,
    Deleting,
}

impl Phase {
    fn word(self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Created => "not started",
            Self::Running => "running",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Deleting => "being deleted",
        }
    }
}

impl Container {
    /// A container of which there is nothing but the name.
    pub(super) fn new(id: &str, settings: &Settings) -> Self {
        let cgroup_path = format!("{}/{id}", settings.cgroup);
        Self {
            id: id.to_owned(),
            dir: settings.dir.join(id),
            cgroup: Cgroup::existing(&cgroup_path),
            cgroup_path,
            inner: Mutex::default(),
            making: RwLock::default(),
        }
    }

    /// After the init's end: ends what is left in the container, and publishes the init's exit when
    /// nothing is. So an exec's exit always comes before its container's.
    pub(super) async fn watch_init(self: Arc<Self>, init: Arc<Process>) {
        let Some(exit) = exited(init.collected()).await else {
            return;
        };
        {
            let mut inner = lock(&self.inner);
            if inner.phase != Phase::Deleting {
                inner.phase = Phase::Stopped;
            }
        }
        self.end_rest().await;
        // An exec in the making finds its process killed, and comes to an end.
        let _no_more = self.making.write().await;
        self.end_rest().await;
        for process in self.processes() {
            if process.pid != init.pid {
                exited(process.exit()).await;
            }
        }
        init.publish(exit);
    }

    /// Unmounts what is on disks, when nothing of the container runs. Returns the serial numbers of disks that are still
    /// in use.
    pub(super) async fn unmount(&self) -> Vec<String> {
        let mounted = lock(&self.inner).mounted.take();
        let Some(mounted) = mounted else {
            return Vec::new();
        };
        // On a thread of its own: it waits for the disks.
        match tokio::task::spawn_blocking(move || mounted.undo()).await {
            Ok(in_use) => in_use,
            Err(error) => {
                log::error!("Cannot unmount the disks of {}: {error}", self.id);
                Vec::new()
            }
        }
    }

    /// After a failed create: whatever there is of it.
    pub(super) async fn clean_up(&self) {
        if !self.cgroup.exists() {
            return;
        }
        self.end_rest().await;
        if let Err(error) = self.cgroup.remove() {
            log::warn!("Container {}: {}", self.id, crate::error::chain(&error));
        }
    }

    async fn end_rest(&self) {
        let ended = match self.cgroup.kill() {
            Ok(()) => self.cgroup.empty().await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            log::error!(
                "Container {}: cannot end what its init left: {}",
                self.id,
                crate::error::chain(&error)
            );
        }
    }

    /// The init and all execs.
    pub(super) fn processes(&self) -> Vec<Arc<Process>> {
        let inner = lock(&self.inner);
        let init = inner.init.iter().map(|init| &init.process);
        init.chain(inner.execs.values().flatten())
            .cloned()
            .collect()
    }

    pub(super) fn process(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = lock(&self.inner);
        let found = match exec {
            "" => inner.init.as_ref().map(|init| init.process.clone()),
            exec => inner.execs.get(exec).cloned().flatten(),
        };
        found.ok_or_else(|| no_process(&self.id, exec))
    }

    pub(super) fn delete_exec(&self, exec: &str) -> Result<Exit> {
        let process = self.process(exec)?;
        let Some(exit) = process.exited() else {
            return Err(ContainerError::State {
                action: "delete a process of",
                id: self.id.clone(),
                state: "running",
            });
        };
        // Whoever takes it out has deleted it.
        if lock(&self.inner).execs.remove(exec).is_none() {
            return Err(no_process(&self.id, exec));
        }
        process.finish_streams();
        Ok(exit)
    }

    pub(super) fn signal_all(&self, signal: i32) -> Result<()> {
        if lock(&self.inner).phase == Phase::Stopped {
            return Err(ContainerError::Finished);
        }
        if signal == libc::SIGKILL {
            return Ok(self.cgroup.kill()?);
        }
        for pid in self.cgroup.processes()? {
            // SAFETY: kill(2) has no memory arguments. A process that has ended since is no harm:
            // its number comes round only after all others.
            unsafe { libc::kill(pid as i32, signal) };
        }
        Ok(())
    }

    pub(super) fn change_phase(&self, action: &'static str, from: Phase, to: Phase) -> Result<()> {
        let mut inner = lock(&self.inner);
        if inner.phase != from {
            return Err(self.wrong_state(action, inner.phase));
        }
        inner.phase = to;
        Ok(())
    }

    pub(super) fn wrong_state(&self, action: &'static str, phase: Phase) -> ContainerError {
        ContainerError::State {
            action,
            id: self.id.clone(),
            state: phase.word(),
        }
    }

    /// Resolves when the init has been collected.
    pub(super) async fn init_exit(&self) {
        let collected = lock(&self.inner)
            .init
            .as_ref()
            .map(|init| init.process.collected());
        if let Some(collected) = collected {
            exited(collected).await;
        }
    }

    /// libcontainer's init waits for a connection to this socket, and its end.
    pub(super) fn notify_init(&self) -> io::Result<()> {
        let state = fs::File::open(self.dir.join(STATE).join(&self.id))?;
        // The path may be longer than a socket's address can be; the descriptor's is not.
        let path = format!("/proc/self/fd/{}/notify.sock", state.as_raw_fd());
        std::os::unix::net::UnixStream::connect(path).map(drop)
    }
}

/// The error for a process that is not there.
pub(super) fn no_process(container: &str, exec: &str) -> ContainerError {
    ContainerError::NoProcess {
        container: container.to_owned(),
        exec: exec.to_owned(),
    }
}

/// Locks; a panic elsewhere would have ended the agent.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
