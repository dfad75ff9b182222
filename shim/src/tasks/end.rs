//! From a process's exit to its delete.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cube_agent_protocol::agent::{ProcessExit, WaitRequest};
use tokio::task::JoinSet;
use ttrpc::context::Context;

use super::{Deleted, Tasks, no_container, process_request};
use crate::container::{Exit, Phase};
use crate::guest::{Guest, GuestError};
use crate::task_error::TaskError;

/// How long output that nobody reads may hold up a delete.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// How long output may hold up a delete at all, although somebody takes a little of it now and then.
const DRAIN_MOST: Duration = Duration::from_secs(10);

fn exit_of(exit: &ProcessExit) -> Exit {
    let at = u64::try_from(exit.exited_at_ns)
        .ok()
        .filter(|&ns| ns > 0)
        .map_or_else(SystemTime::now, |ns| {
            SystemTime::UNIX_EPOCH + Duration::from_nanos(ns)
        });
    Exit {
        status: exit.exit_status,
        at,
    }
}

impl Tasks {
    /// Follows a process to its end.
    pub(super) fn watch(self: &Arc<Self>, id: &str, exec: &str) {
        let Ok(guest) = self.guest(id) else { return };
        let (tasks, id, exec) = (self.clone(), id.to_owned(), exec.to_owned());
        tokio::spawn(async move {
            let exit = match tasks.follow(&id, &exec, &guest).await {
                Ok(exit) => exit,
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
            let held = exec.is_empty() && tasks.hold_exit(&id);
            let _ = tasks.with(&id, |entry| {
                entry.container.exited(&exec, exit);
                Ok(())
            });
            if held {
                tasks.release(&id, &guest).await;
            }
        });
    }

    /// Waits for a process's end. Of what the guest's kernel kills for want of memory meanwhile
    /// containerd is told first: the same answers carry both.
    async fn follow(&self, id: &str, exec: &str, guest: &Guest) -> Result<Exit, GuestError> {
        loop {
            // The wait for the init alone is to end by OOM kills too.
            let known = self.with(id, |entry| Ok(entry.container.oom_kills()));
            let oom_kills = match known {
                Ok(kills) if exec.is_empty() => kills,
                _ => u64::MAX,
            };
            let request = WaitRequest {
                container_id: id.to_owned(),
                exec_id: exec.to_owned(),
                oom_kills,
                ..Default::default()
            };
            let response = guest
                .call(|agent| agent.wait(Context::default(), &request))
                .await?;
            let told = self.with(id, |entry| {
                Ok(entry.container.oom_killed(response.oom_kills))
            });
            if let Some(exit) = response.exit.as_ref() {
                return Ok(exit_of(exit));
            }
            if response.oom_kills <= oom_kills {
                return Err(GuestError::Broken("it answers without news".into()));
            }
            // However often a container is killed while containerd is away, one event waits.
            if told.is_ok_and(|told| told) {
                self.publisher.sent().await;
            }
        }
    }

    /// Deletes an exec, or a container.
    pub async fn delete(&self, id: &str, exec: &str) -> Result<Deleted, TaskError> {
        if exec.is_empty() {
            self.give_up_create(id).await;
        }
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

    /// Ends a create that is under way, and waits for its end. Whoever asked for it is not there any more: a containerd
    /// that was started again, for instance, lists no processes of such a container, takes it for leaked,
    /// deletes it and forgets it.
    async fn give_up_create(&self, id: &str) {
        let gone = self.lock().reserved.get(id).map(|unwanted| {
            unwanted.send_replace(true);
            unwanted.subscribe()
        });
        if let Some(mut gone) = gone {
            // The sender goes with the reservation.
            while gone.changed().await.is_ok() {}
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
            relays.drain(DRAIN_LIMIT, DRAIN_MOST).await;
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
        let (exit, in_use) = self.delete_in_guest(id, "", guest).await?;
        let (relays, hooks) = self.with(id, |entry| {
            Ok((entry.container.take_relays(), entry.hooks.clone()))
        })?;
        // All at once: each may take its time.
        let mut drains: JoinSet<()> = relays
            .into_iter()
            .map(|relays| relays.drain(DRAIN_LIMIT, DRAIN_MOST))
            .collect();
        while drains.join_next().await.is_some() {}
        // While its name is taken, and its root file system there.
        hooks.stopped().await;
        let mut disks = self.with(id, |entry| Ok(std::mem::take(&mut entry.disks)))?;
        disks.detach(&in_use).await;
        // Nothing on the host is left when the event says so, nor when the name is free again.
        let undo = self.with(id, |entry| Ok(std::mem::take(&mut entry.undo)))?;
        undo.run_aside().await;
        let mut entry = self
            .lock()
            .entries
            .remove(id)
            .ok_or_else(|| no_container(id))?;
        let exit = entry.container.deleted(exit);
        Ok(Deleted {
            pid: entry.container.pid,
            exit,
        })
    }

    /// Deletes a process in the guest; also returned are the disks that it leaves in use. One that is not there
    /// is as good as deleted.
    pub(super) async fn delete_in_guest(
        &self,
        id: &str,
        exec: &str,
        guest: &Guest,
    ) -> Result<(Exit, Vec<String>), TaskError> {
        let request = process_request(id, exec);
        match guest
            .call(|agent| agent.delete(Context::default(), &request))
            .await
        {
            Ok(response) => Ok((exit_of(&response), response.disks_in_use)),
            Err(GuestError::Ended(_)) => Ok((Exit::killed(), Vec::new())),
            Err(GuestError::Refused(status)) if status.code() == ttrpc::Code::NOT_FOUND => {
                Ok((Exit::killed(), Vec::new()))
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
}
