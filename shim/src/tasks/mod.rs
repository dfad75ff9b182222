//! The tasks of a sandbox: what containerd asks of them, carried out in the guest.
//!
//! The table's lock is held for single changes only, never while something is waited for: a slow
//! call about one process does not delay another.

mod control;
mod end;
mod release;
mod start;

pub use start::given_up;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::api::{ProcessInfo, StateResponse, Status};
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use containerd_shim_protos::shim::oci::ProcessDetails;
use cube_agent_protocol::agent::{
    BlockDevice, ContainerRequest, ProcessRequest, RootfsMount, StatsResponse,
};
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};
use tokio::sync::watch;
use ttrpc::context::Context;

use crate::container::{Container, Exit, Phase};
use crate::disks::Disks;
use crate::guest::Guest;
use crate::hooks::Hooks;
use crate::publisher::{Publisher, timestamp};
use crate::stdio::{Streams, Uris};
use crate::task_error::TaskError;
use crate::undo::Undo;

/// A container that is ready to be created in the guest.
pub struct NewContainer {
    /// The name that was reserved for it.
    pub reservation: Reservation,
    /// Its bundle on the host.
    pub bundle: PathBuf,
    /// The edited specification, JSON.
    pub spec: Vec<u8>,
    /// Its root file system, as the guest sees it.
    pub rootfs: String,
    /// How the guest makes it, where it is on disks.
    pub rootfs_mounts: Vec<RootfsMount>,
    /// The disks that are devices of the container.
    pub block_devices: Vec<BlockDevice>,
    /// All of its disks.
    pub disks: Disks,
    /// Where containerd wants its streams.
    pub uris: Uris,
    /// The terminal's first size.
    pub console_size: (u32, u32),
    /// Whether its sandbox was made for it alone: it names no group.
    pub is_own_sandbox: bool,
    /// What the host runs at points of its life.
    pub hooks: Arc<Hooks>,
    /// What removes its mounts and directories from the host.
    pub undo: Undo,
    /// The event, but for the process id.
    pub event: TaskCreate,
}

impl NewContainer {
    /// Removes what it has on the host; then its name is free.
    pub async fn give_up(self) {
        self.undo.run_aside().await;
    }
}

/// A container's entry.
struct Entry {
    container: Container,
    guest: Arc<Guest>,
    hooks: Arc<Hooks>,
    disks: Disks,
    undo: Undo,
    killed: Killed,
    is_own_sandbox: bool,
    /// Whether its machine has ended with it.
    released: bool,
    /// Its figures of then.
    last_figures: Option<StatsResponse>,
}

/// What became of SIGKILL to a container's init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    /// Nobody has sent it.
    No,
    /// It is to end.
    Waiting,
    /// It has not.
    Outlived,
}

#[derive(Default)]
struct Table {
    entries: HashMap<String, Entry>,
    /// Names taken by creates that are under way, and what tells each that nobody wants the container any more.
    reserved: HashMap<String, watch::Sender<bool>>,
}

/// All tasks.
pub struct Tasks {
    namespace: String,
    publisher: Publisher,
    streams: Arc<Streams>,
    table: Mutex<Table>,
}

/// A container's name that is taken before the container is there; free again when dropped.
pub struct Reservation {
    id: String,
    tasks: Arc<Tasks>,
    unwanted: watch::Receiver<bool>,
}

impl Reservation {
    /// The name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Becomes true when the container is deleted before it is there.
    pub fn unwanted(&self) -> watch::Receiver<bool> {
        self.unwanted.clone()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.tasks.lock().reserved.remove(&self.id);
    }
}

/// What is known of a deleted process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deleted {
    /// The host process that stood for it.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
}

fn no_container(id: &str) -> TaskError {
    TaskError::NotFound(format!("container {id}"))
}

fn process_request(id: &str, exec: &str) -> ProcessRequest {
    ProcessRequest {
        container_id: id.to_owned(),
        exec_id: exec.to_owned(),
        ..Default::default()
    }
}

fn container_request(id: &str) -> ContainerRequest {
    ContainerRequest {
        id: id.to_owned(),
        ..Default::default()
    }
}

impl Tasks {
    /// No tasks yet.
    pub fn new(namespace: String, publisher: Publisher, streams: Arc<Streams>) -> Arc<Self> {
        Arc::new(Self {
            namespace,
            publisher,
            streams,
            table: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on a container's entry.
    fn with<T>(
        &self,
        id: &str,
        work: impl FnOnce(&mut Entry) -> Result<T, TaskError>,
    ) -> Result<T, TaskError> {
        work(
            self.lock()
                .entries
                .get_mut(id)
                .ok_or_else(|| no_container(id))?,
        )
    }

    fn guest(&self, id: &str) -> Result<Arc<Guest>, TaskError> {
        self.with(id, |entry| Ok(entry.guest.clone()))
    }

    /// Whether there is no task, nor one about to be.
    pub fn is_empty(&self) -> bool {
        let table = self.lock();
        table.entries.is_empty() && table.reserved.is_empty()
    }

    /// Forgets all tasks, without an event: containerd tells of the end of a shim that leaves it
    /// itself. The result removes what they have on the host.
    pub fn forget_all(&self) -> Vec<Undo> {
        let entries = std::mem::take(&mut self.lock().entries);
        entries.into_values().map(|entry| entry.undo).collect()
    }

    /// The process id that stands for a task; 0 if there is no such task.
    pub fn pid(&self, id: &str) -> u32 {
        self.lock()
            .entries
            .get(id)
            .map_or(0, |entry| entry.container.pid)
    }

    /// Takes a container's name.
    pub fn reserve(self: &Arc<Self>, id: &str) -> Result<Reservation, TaskError> {
        let mut table = self.lock();
        if table.entries.contains_key(id) || table.reserved.contains_key(id) {
            return Err(TaskError::AlreadyExists(format!("container {id}")));
        }
        if let Some(ended) = table.released() {
            return Err(TaskError::FailedPrecondition(format!(
                "the sandbox's machine has ended with its container {ended}: delete that first"
            )));
        }
        let (sender, unwanted) = watch::channel(false);
        table.reserved.insert(id.to_owned(), sender);
        Ok(Reservation {
            id: id.to_owned(),
            tasks: self.clone(),
            unwanted,
        })
    }

    /// What is known of a process.
    pub fn state(&self, id: &str, exec: &str) -> Result<StateResponse, TaskError> {
        self.with(id, |entry| {
            let process = entry.container.process(exec)?;
            let status = match process.phase {
                Phase::Created => Status::CREATED,
                Phase::Running => Status::RUNNING,
                Phase::Paused => Status::PAUSED,
                Phase::Stopped => Status::STOPPED,
            };
            let exit = process.exit();
            Ok(StateResponse {
                id: id.to_owned(),
                exec_id: exec.to_owned(),
                bundle: entry.container.bundle.display().to_string(),
                // Before its start an exec has no process.
                pid: if exec.is_empty() || process.phase != Phase::Created {
                    entry.container.pid
                } else {
                    0
                },
                status: EnumOrUnknown::new(status),
                stdin: process.uris.stdin.clone(),
                stdout: process.uris.stdout.clone(),
                stderr: process.uris.stderr.clone(),
                terminal: process.uris.terminal,
                exit_status: exit.map_or(0, |exit| exit.status),
                exited_at: exit.map(|exit| timestamp(exit.at)).into(),
                ..Default::default()
            })
        })
    }

    /// Waits for a process's end.
    pub async fn wait(&self, id: &str, exec: &str) -> Result<Exit, TaskError> {
        let mut exit = self.with(id, |entry| {
            Ok(entry.container.process(exec)?.exit_receiver())
        })?;
        let exit = exit.wait_for(Option::is_some).await;
        // Without a sender it was deleted before it ended.
        exit.ok()
            .and_then(|exit| *exit)
            .ok_or_else(|| no_container(id))
    }

    /// The processes of a container. The init has the process id that Create returned, a process
    /// of the host; the others have their id in the guest, since no process of the host is theirs.
    pub async fn pids(&self, id: &str) -> Result<Vec<ProcessInfo>, TaskError> {
        let (guest, pid, init, alive) = self.with(id, |entry| {
            let init = entry.container.init();
            let alive = init.phase != Phase::Stopped;
            Ok((
                entry.guest.clone(),
                entry.container.pid,
                init.guest_pid,
                alive,
            ))
        })?;
        let mut list = vec![ProcessInfo {
            pid,
            ..Default::default()
        }];
        if !alive || guest.has_ended() {
            return Ok(list);
        }
        let request = container_request(id);
        let answer = guest
            .call(|agent| agent.list_processes(Context::default(), &request))
            .await;
        let processes = match answer {
            Ok(answer) => answer.processes,
            Err(error) => {
                // containerd takes a shim that lists nothing for leaked, and removes it.
                log::debug!("The processes of {id} in the guest: {error}");
                return Ok(list);
            }
        };
        for process in processes.iter().filter(|process| process.pid != init) {
            let info = if process.exec_id.is_empty() {
                MessageField::none()
            } else {
                let details = ProcessDetails {
                    exec_id: process.exec_id.clone(),
                    ..Default::default()
                };
                MessageField::some(Any {
                    type_url: "containerd.runc.v1.ProcessDetails".into(),
                    value: details.write_to_bytes().map_err(TaskError::host)?,
                    ..Default::default()
                })
            };
            list.push(ProcessInfo {
                pid: process.pid,
                info,
                ..Default::default()
            });
        }
        Ok(list)
    }
}

/// The part of a create event that the request says.
pub fn create_event(request: &containerd_shim_protos::api::CreateTaskRequest) -> TaskCreate {
    TaskCreate {
        container_id: request.id.clone(),
        bundle: request.bundle.clone(),
        rootfs: request.rootfs.clone(),
        io: MessageField::some(TaskIO {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
            ..Default::default()
        }),
        checkpoint: request.checkpoint.clone(),
        ..Default::default()
    }
}

#[cfg(test)]
pub(crate) mod tests;
