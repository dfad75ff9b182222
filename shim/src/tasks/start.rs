//! From create to a process that runs.

use std::mem::take;
use std::sync::Arc;

use containerd_shim_protos::events::task::TaskCreate;
use cube_agent_protocol::agent::{CreateContainerRequest, ExecRequest};
use protobuf::MessageField;
use ttrpc::context::Context;

use super::{Entry, Killed, NewContainer, Tasks, container_request};
use crate::container::{Container, PendingExec, Start};
use crate::disks::Disks;
use crate::guest::Guest;
use crate::publisher::Event;
use crate::stdio::{HostStdio, Relays, Uris};
use crate::task_error::TaskError;

/// The error of a create whose container was deleted before it was there.
pub fn given_up() -> TaskError {
    TaskError::host("The container was deleted while it was being created")
}

impl Tasks {
    /// Creates a container in the guest.
    pub async fn create(
        self: &Arc<Self>,
        mut new: NewContainer,
        guest: Arc<Guest>,
    ) -> Result<u32, TaskError> {
        let mut disks = take(&mut new.disks);
        let created = match disks.ready().await {
            Ok(()) => self.create_in_guest(&mut new, guest, &mut disks).await,
            Err(e) => Err(TaskError::host(format!("OCI runtime create failed: {e}"))),
        };
        match &created {
            Ok(_) => {}
            // Dropped, they leave their slots taken.
            Err(error) if error.leaves_disks_in_use() => drop(disks),
            // What the guest has mounted of them it has unmounted before it said so.
            Err(_) => disks.detach(&[]).await,
        }
        if created.is_err() {
            new.give_up().await;
        }
        created
    }

    /// Deletes what the guest has made, when the create fails afterwards, and takes out its disks.
    async fn take_back(&self, id: &str, guest: &Guest, mut disks: Disks) -> Result<(), TaskError> {
        // Without an answer nobody knows whether the guest is done with the disks: dropped, they leave their slots taken.
        let (_, in_use) = self.delete_in_guest(id, "", guest).await?;
        disks.detach(&in_use).await;
        Ok(())
    }

    async fn create_in_guest(
        self: &Arc<Self>,
        new: &mut NewContainer,
        guest: Arc<Guest>,
        disks: &mut Disks,
    ) -> Result<u32, TaskError> {
        let id = new.reservation.id().to_owned();
        let failed = |source| TaskError::Guest {
            context: "OCI runtime create failed: ",
            source,
        };
        let host = HostStdio::open(&new.uris, &id, &self.namespace, &self.streams)
            .await
            .map_err(TaskError::host)?;
        let (stdio, offered) = guest
            .offer_streams(&host, new.uris.terminal, new.console_size)
            .map_err(failed)?;
        let request = CreateContainerRequest {
            id: id.clone(),
            spec: take(&mut new.spec),
            rootfs: take(&mut new.rootfs),
            rootfs_mounts: take(&mut new.rootfs_mounts),
            block_devices: take(&mut new.block_devices),
            stdio: MessageField::some(stdio),
            ..Default::default()
        };
        let created = guest
            .call(|agent| agent.create_container(Context::default(), &request))
            .await
            .map_err(failed)?;
        let streams = match guest.accept_streams(offered).await {
            Ok(streams) => streams,
            Err(error) => {
                if let Err(error) = self.take_back(&id, &guest, take(disks)).await {
                    log::warn!("Cannot delete {id}, whose create failed: {error}");
                }
                return Err(failed(error));
            }
        };
        let relays = Relays::start(host, streams);

        let pid = guest.pid;
        let container = Container::new(
            id.clone(),
            take(&mut new.bundle),
            pid,
            take(&mut new.uris),
            Some(relays),
            created.pid,
            self.publisher.clone(),
        );
        let mut table = self.lock();
        if *new.reservation.unwanted.borrow() {
            drop(table);
            self.take_back(&id, &guest, take(disks)).await?;
            return Err(given_up());
        }
        let entry = Entry {
            container,
            guest,
            hooks: new.hooks.clone(),
            disks: take(disks),
            undo: take(&mut new.undo),
            killed: Killed::No,
            is_own_sandbox: new.is_own_sandbox,
            released: false,
            last_figures: None,
        };
        table.entries.insert(id.clone(), entry);
        let event = take(&mut new.event);
        self.publisher
            .publish(Event::Create(TaskCreate { pid, ..event }));
        drop(table);
        self.watch(&id, "");
        Ok(pid)
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
            Ok(None) => self.finish_start(id).await,
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

    /// The user's program runs. If a hook that is to run now fails, it is ended.
    async fn finish_start(self: &Arc<Self>, id: &str) -> Result<u32, TaskError> {
        let (hooks, pid) = self.with(id, |entry| Ok((entry.hooks.clone(), entry.container.pid)))?;
        let hooked = hooks.running(pid).await;
        self.with(id, |entry| {
            entry.container.finish_start("", None);
            Ok(())
        })?;
        let Err(error) = hooked else { return Ok(pid) };
        match self.kill(id, "", libc::SIGKILL as u32, false).await {
            Ok(()) | Err(TaskError::NotFound(_)) => {}
            Err(e) => log::error!("Cannot end {id}, whose hook failed: {e}"),
        }
        Err(TaskError::host(format!(
            "OCI runtime start failed: {error}"
        )))
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
        let host = HostStdio::open(uris, id, &self.namespace, &self.streams)
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
}
