//! The tasks of a sandbox: what containerd asks of them, carried out in the guest.
//!
//! The table's lock is held for single changes only, never while something is waited for: a slow
//! call about one process does not delay another.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::{ProcessInfo, StateResponse, Status};
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use containerd_shim_protos::shim::oci::ProcessDetails;
use cube_agent_protocol::agent::{
    ContainerRequest, CreateContainerRequest, ExecRequest, ProcessRequest, ResizePtyRequest,
    SignalRequest, StatsResponse, UpdateRequest, WaitResponse,
};
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};
use ttrpc::context::Context;

use crate::container::{Container, Exit, PendingExec, Phase, Start};
use crate::guest::{Guest, GuestError};
use crate::publisher::{Event, Publisher, timestamp};
use crate::stdio::{HostStdio, Relays, Uris};
use crate::task_error::TaskError;
use crate::undo::Undo;

/// How long output that nobody reads may hold up a delete.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// How long the agent may take to answer to SIGKILL of an init. A guest that does not is cut off.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// How long execs may survive the init that they were started in.
const SURVIVOR_LIMIT: Duration = Duration::from_secs(10);

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
    /// Where containerd wants its streams.
    pub uris: Uris,
    /// The terminal's first size.
    pub console_size: (u32, u32),
    /// Whether its processes end with its init, by its PID namespace.
    pub own_pid_namespace: bool,
    /// What removes its mounts and directories from the host.
    pub undo: Undo,
    /// The event, but for the process id.
    pub event: TaskCreate,
}

/// A container's entry.
struct Entry {
    container: Container,
    guest: Arc<Guest>,
    own_pid_namespace: bool,
    undo: Undo,
}

#[derive(Default)]
struct Table {
    entries: HashMap<String, Entry>,
    reserved: HashSet<String>,
}

/// All tasks.
pub struct Tasks {
    namespace: String,
    publisher: Publisher,
    table: Mutex<Table>,
}

/// A container's name that is taken before the container is there; free again when dropped.
pub struct Reservation {
    id: String,
    tasks: Arc<Tasks>,
}

impl Reservation {
    /// The name.
    pub fn id(&self) -> &str {
        &self.id
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

fn exit_of(response: &WaitResponse) -> Exit {
    let at = u64::try_from(response.exited_at_ns)
        .ok()
        .filter(|&ns| ns > 0)
        .map_or_else(SystemTime::now, |ns| {
            SystemTime::UNIX_EPOCH + Duration::from_nanos(ns)
        });
    Exit {
        status: response.exit_status,
        at,
    }
}

impl Tasks {
    /// No tasks yet.
    pub fn new(namespace: String, publisher: Publisher) -> Arc<Self> {
        Arc::new(Self {
            namespace,
            publisher,
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
        if table.entries.contains_key(id) || !table.reserved.insert(id.to_owned()) {
            return Err(TaskError::AlreadyExists(format!("container {id}")));
        }
        Ok(Reservation {
            id: id.to_owned(),
            tasks: self.clone(),
        })
    }

    /// Creates a container in the guest.
    pub async fn create(
        self: &Arc<Self>,
        new: NewContainer,
        guest: Arc<Guest>,
    ) -> Result<u32, TaskError> {
        let id = new.reservation.id().to_owned();
        let failed = |source| TaskError::Guest {
            context: "OCI runtime create failed: ",
            source,
        };
        let host = HostStdio::open(&new.uris, &id, &self.namespace)
            .await
            .map_err(TaskError::host)?;
        let (stdio, offered) = guest
            .offer_streams(&host, new.uris.terminal, new.console_size)
            .map_err(failed)?;
        let request = CreateContainerRequest {
            id: id.clone(),
            spec: new.spec,
            rootfs: new.rootfs,
            stdio: MessageField::some(stdio),
            ..Default::default()
        };
        let created = guest
            .call(|agent| agent.create_container(Context::default(), &request))
            .await
            .map_err(failed)?;
        let streams = guest.accept_streams(offered).await.map_err(failed)?;
        let relays = Relays::start(host, streams);

        let pid = guest.pid;
        let container = Container::new(
            id.clone(),
            new.bundle,
            pid,
            new.uris,
            Some(relays),
            created.pid,
            self.publisher.clone(),
        );
        let entry = Entry {
            container,
            guest,
            own_pid_namespace: new.own_pid_namespace,
            undo: new.undo,
        };
        let mut table = self.lock();
        table.entries.insert(id.clone(), entry);
        self.publisher
            .publish(Event::Create(TaskCreate { pid, ..new.event }));
        drop(table);
        self.watch(&id, "");
        Ok(pid)
    }

    /// Follows a process to its end.
    fn watch(self: &Arc<Self>, id: &str, exec: &str) {
        let Ok(guest) = self.guest(id) else { return };
        let (tasks, id, exec) = (self.clone(), id.to_owned(), exec.to_owned());
        tokio::spawn(async move {
            let request = process_request(&id, &exec);
            let exit = match guest
                .call(|agent| agent.wait(Context::default(), &request))
                .await
            {
                Ok(response) => exit_of(&response),
                Err(GuestError::Ended(_)) => Exit::killed(),
                Err(error) => {
                    // The answer of a delete that came before says how it ended.
                    log::debug!("Waiting for {id} {exec}: {error}");
                    if !matches!(error, GuestError::Refused(_)) {
                        guest.cut_off("its agent is gone");
                    }
                    Exit::killed()
                }
            };
            tasks.exited(&id, &exec, exit);
        });
    }

    fn exited(self: &Arc<Self>, id: &str, exec: &str, exit: Exit) {
        let survivors = self.with(id, |entry| {
            entry.container.exited(exec, exit);
            let survive = entry.container.has_survivors();
            Ok(survive.then(|| (entry.guest.clone(), entry.own_pid_namespace)))
        });
        if let Ok(Some((guest, own_pid_namespace))) = survivors
            && exec.is_empty()
        {
            let (tasks, id) = (self.clone(), id.to_owned());
            tokio::spawn(async move {
                // A PID namespace of its own ends with its init; in a shared one nothing does.
                if !own_pid_namespace {
                    let request = SignalRequest {
                        container_id: id.clone(),
                        signal: libc::SIGKILL as u32,
                        all: true,
                        ..Default::default()
                    };
                    let _ = guest
                        .call(|agent| agent.signal(Context::default(), &request))
                        .await;
                }
                tokio::time::sleep(SURVIVOR_LIMIT).await;
                let _ = tasks.with(&id, |entry| {
                    entry.container.abandon_survivors();
                    Ok(())
                });
            });
        }
    }

    /// Starts the init, or an exec.
    pub async fn start(self: &Arc<Self>, id: &str, exec: &str) -> Result<u32, TaskError> {
        let (guest, start) = self.with(id, |entry| {
            Ok((entry.guest.clone(), entry.container.begin_start(exec)?))
        })?;
        let started = match start {
            Start::Init => self.start_init(id, &guest).await.map(|()| None),
            Start::Exec(pending, uris) => {
                let size = pending.size;
                self.start_exec(id, exec, &guest, pending, &uris)
                    .await
                    .map(|(pid, relays)| Some((size, pid, relays)))
            }
        };
        match started {
            Err(error) => {
                let _ = self.with(id, |entry| {
                    entry.container.fail_start(exec);
                    Ok(())
                });
                Err(error)
            }
            Ok(None) => self.with(id, |entry| {
                entry.container.finish_start(exec, None);
                Ok(entry.container.pid)
            }),
            Ok(Some((size, guest_pid, relays))) => {
                let (pid, now_wanted) = self.with(id, |entry| {
                    let asked = entry
                        .container
                        .finish_start(exec, Some((guest_pid, Some(relays))));
                    Ok((entry.container.pid, asked.size))
                })?;
                self.watch(id, exec);
                if now_wanted != size {
                    self.resize(id, exec, now_wanted).await?;
                }
                Ok(pid)
            }
        }
    }

    async fn start_init(&self, id: &str, guest: &Guest) -> Result<(), TaskError> {
        let request = container_request(id);
        guest
            .call(|agent| agent.start_container(Context::default(), &request))
            .await
            .map_err(|source| TaskError::Guest {
                context: "OCI runtime start failed: ",
                source,
            })?;
        Ok(())
    }

    async fn start_exec(
        &self,
        id: &str,
        exec: &str,
        guest: &Guest,
        pending: PendingExec,
        uris: &Uris,
    ) -> Result<(u32, Relays), TaskError> {
        let failed = |source| TaskError::Guest {
            context: "OCI runtime exec failed: ",
            source,
        };
        let host = HostStdio::open(uris, id, &self.namespace)
            .await
            .map_err(TaskError::host)?;
        let (stdio, offered) = guest
            .offer_streams(&host, uris.terminal, pending.size)
            .map_err(failed)?;
        let request = ExecRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            process: pending.process,
            stdio: MessageField::some(stdio),
            ..Default::default()
        };
        let created = guest
            .call(|agent| agent.exec(Context::default(), &request))
            .await
            .map_err(failed)?;
        let streams = guest.accept_streams(offered).await.map_err(failed)?;
        Ok((created.pid, Relays::start(host, streams)))
    }

    /// Adds an exec.
    pub fn exec(
        &self,
        id: &str,
        exec: &str,
        uris: Uris,
        process: Vec<u8>,
    ) -> Result<(), TaskError> {
        let object: serde_json::Value = serde_json::from_slice(&process)
            .map_err(|e| TaskError::InvalidArgument(format!("the exec's process object: {e}")))?;
        let pending = PendingExec {
            size: crate::spec::console_size(&object),
            process,
            stdin_closed: false,
        };
        self.with(id, |entry| entry.container.add_exec(exec, uris, pending))
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

    /// Signals a process, or every process of a container.
    pub async fn kill(
        &self,
        id: &str,
        exec: &str,
        signal: u32,
        all: bool,
    ) -> Result<(), TaskError> {
        let guest = self.with(id, |entry| {
            entry.container.check_kill(exec)?;
            Ok(entry.guest.clone())
        })?;
        let request = SignalRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            signal,
            all: all && exec.is_empty(),
            ..Default::default()
        };
        let call = guest.call(|agent| agent.signal(Context::default(), &request));
        if signal != libc::SIGKILL as u32 || !exec.is_empty() {
            call.await?;
            return Ok(());
        }
        match tokio::time::timeout(KILL_LIMIT, call).await {
            // The machine is gone, and the process with it.
            Ok(Ok(_) | Err(GuestError::Ended(_))) => Ok(()),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => {
                guest.cut_off("it does not answer to SIGKILL");
                Ok(())
            }
        }
    }

    /// Deletes an exec, or a container.
    pub async fn delete(&self, id: &str, exec: &str) -> Result<Deleted, TaskError> {
        let guest = self.with(id, |entry| {
            entry.container.begin_delete(exec)?;
            Ok(entry.guest.clone())
        })?;
        if exec.is_empty() {
            self.delete_container(id, &guest).await
        } else {
            self.delete_exec(id, exec, &guest).await
        }
    }

    async fn delete_exec(&self, id: &str, exec: &str, guest: &Guest) -> Result<Deleted, TaskError> {
        let (relays, started) = self.with(id, |entry| {
            let process = entry.container.process_mut(exec)?;
            Ok((process.relays.take(), process.phase == Phase::Stopped))
        })?;
        if started {
            self.delete_in_guest(id, exec, guest).await?;
        }
        if let Some(relays) = relays {
            relays.drain(DRAIN_LIMIT).await;
        }
        self.with(id, |entry| {
            let process = entry
                .container
                .remove_exec(exec)
                .ok_or_else(|| no_container(exec))?;
            Ok(Deleted {
                pid: entry.container.pid,
                exit: process.exit().unwrap_or(Exit {
                    status: 0,
                    at: SystemTime::now(),
                }),
            })
        })
    }

    async fn delete_container(&self, id: &str, guest: &Guest) -> Result<Deleted, TaskError> {
        let exit = self.delete_in_guest(id, "", guest).await?;
        let relays = self.with(id, |entry| Ok(entry.container.take_relays()))?;
        for relays in relays {
            relays.drain(DRAIN_LIMIT).await;
        }
        let mut entry = self
            .lock()
            .entries
            .remove(id)
            .ok_or_else(|| no_container(id))?;
        // Nothing on the host is left when the event says so.
        entry.undo.run();
        let exit = entry.container.deleted(exit);
        Ok(Deleted {
            pid: entry.container.pid,
            exit,
        })
    }

    /// Deletes a process in the guest. One that is not there is as good as deleted.
    async fn delete_in_guest(
        &self,
        id: &str,
        exec: &str,
        guest: &Guest,
    ) -> Result<Exit, TaskError> {
        let request = process_request(id, exec);
        match guest
            .call(|agent| agent.delete(Context::default(), &request))
            .await
        {
            Ok(response) => Ok(exit_of(&response)),
            Err(GuestError::Ended(_)) => Ok(Exit::killed()),
            Err(GuestError::Refused(status)) if status.code() == ttrpc::Code::NOT_FOUND => {
                Ok(Exit::killed())
            }
            Err(error) => {
                let _ = self.with(id, |entry| {
                    entry.container.abort_delete(exec);
                    Ok(())
                });
                Err(error.into())
            }
        }
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
        let processes = guest
            .call(|agent| agent.list_processes(Context::default(), &request))
            .await?
            .processes;
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

    /// Freezes a container.
    pub async fn pause(&self, id: &str) -> Result<(), TaskError> {
        let guest = self.with(id, |entry| {
            entry.container.check_phase(Phase::Running)?;
            Ok(entry.guest.clone())
        })?;
        let request = container_request(id);
        guest
            .call(|agent| agent.pause(Context::default(), &request))
            .await?;
        self.with(id, |entry| {
            entry.container.paused();
            Ok(())
        })
    }

    /// Lets a frozen container run.
    pub async fn resume(&self, id: &str) -> Result<(), TaskError> {
        let guest = self.with(id, |entry| {
            entry.container.check_phase(Phase::Paused)?;
            Ok(entry.guest.clone())
        })?;
        let request = container_request(id);
        guest
            .call(|agent| agent.resume(Context::default(), &request))
            .await?;
        self.with(id, |entry| {
            entry.container.resumed();
            Ok(())
        })
    }

    /// Changes a container's limits to those of `resources`, an OCI `LinuxResources` object.
    pub async fn update(&self, id: &str, resources: Vec<u8>) -> Result<(), TaskError> {
        let guest = self.guest(id)?;
        let request = UpdateRequest {
            id: id.to_owned(),
            resources,
            ..Default::default()
        };
        guest
            .call(|agent| agent.update(Context::default(), &request))
            .await?;
        Ok(())
    }

    /// The figures of a container's cgroup.
    pub async fn stats(&self, id: &str) -> Result<StatsResponse, TaskError> {
        let guest = self.guest(id)?;
        let request = container_request(id);
        Ok(guest
            .call(|agent| agent.stats(Context::default(), &request))
            .await?)
    }

    /// Gives a process's terminal another size, width and height. Without a terminal nothing
    /// happens.
    pub async fn resize(&self, id: &str, exec: &str, size: (u32, u32)) -> Result<(), TaskError> {
        let guest = self.with(id, |entry| {
            let guest = entry.guest.clone();
            let process = entry.container.process_mut(exec)?;
            if !process.uris.terminal || process.phase == Phase::Stopped {
                return Ok(None);
            }
            if let Some(pending) = process.pending_mut() {
                pending.size = size;
                return Ok(None);
            }
            Ok(Some(guest))
        })?;
        let Some(guest) = guest else { return Ok(()) };
        let request = ResizePtyRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            width: size.0,
            height: size.1,
            ..Default::default()
        };
        guest
            .call(|agent| agent.resize_pty(Context::default(), &request))
            .await?;
        Ok(())
    }

    /// Ends a process's standard input once what is in it was read.
    pub fn close_stdin(&self, id: &str, exec: &str) -> Result<(), TaskError> {
        self.with(id, |entry| {
            let process = entry.container.process_mut(exec)?;
            if let Some(relays) = &mut process.relays {
                relays.close_stdin();
            } else if let Some(pending) = process.pending_mut() {
                pending.stdin_closed = true;
            }
            Ok(())
        })
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
mod tests;
