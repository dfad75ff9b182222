//! What may be asked of a process that runs.

use std::sync::Arc;
use std::time::Duration;

use cube_agent_protocol::agent::{ResizePtyRequest, SignalRequest, StatsResponse, UpdateRequest};
use ttrpc::context::Context;

use super::{Entry, Killed, Tasks, container_request};
use crate::container::{Phase, already_finished};
use crate::guest::GuestError;
use crate::task_error::TaskError;

/// How long the agent may take to answer to SIGKILL of an init. A guest that does not is cut off.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// How long an init may outlive SIGKILL: a disk or a share may hold it up in the guest's kernel.
const DEATH_LIMIT: Duration = Duration::from_secs(30);

impl Tasks {
    /// Signals a process, or every process of a container.
    pub async fn kill(
        self: &Arc<Self>,
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
        let kills = signal == libc::SIGKILL as u32;
        if kills && exec.is_empty() {
            self.expect_death(id);
        }
        let answer = if kills && exec.is_empty() {
            match tokio::time::timeout(KILL_LIMIT, call).await {
                Ok(answer) => answer,
                Err(_) => {
                    guest.cut_off("it does not answer to SIGKILL");
                    return Ok(());
                }
            }
        } else {
            call.await
        };
        match answer {
            Ok(_) => Ok(()),
            // The machine is gone, and the process with it, although its exit is not told yet.
            Err(GuestError::Ended(_)) if kills => Ok(()),
            Err(GuestError::Ended(_)) => Err(already_finished()),
            Err(error) => Err(error.into()),
        }
    }

    /// Cuts a guest off whose containers all outlive SIGKILL: it could keep the pod for ever, whatever it answers.
    fn expect_death(self: &Arc<Self>, id: &str) {
        let expected = self.with(id, |entry| {
            let watched = std::mem::replace(&mut entry.killed, Killed::Waiting) != Killed::No;
            let exit = entry.container.init().exit_receiver();
            Ok((!watched).then(|| (exit, entry.guest.clone())))
        });
        let Ok(Some((mut exit, guest))) = expected else {
            return;
        };
        let (tasks, id) = (self.clone(), id.to_owned());
        tokio::spawn(async move {
            if tokio::time::timeout(DEATH_LIMIT, exit.wait_for(Option::is_some))
                .await
                .is_ok()
            {
                return;
            }
            log::warn!("{id} outlives SIGKILL");
            let mut table = tasks.lock();
            if let Some(entry) = table.entries.get_mut(&id) {
                entry.killed = Killed::Outlived;
            }
            let is_well = |entry: &Entry| {
                entry.container.init().phase != Phase::Stopped && entry.killed != Killed::Outlived
            };
            if table.reserved.is_empty() && !table.entries.values().any(is_well) {
                guest.cut_off("no container of it ends by SIGKILL");
            }
        });
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

    /// Whether a container's limits can be changed.
    pub fn check_update(&self, id: &str) -> Result<(), TaskError> {
        self.with(id, |entry| entry.container.check_update())
    }

    /// Changes a container's limits to those of `resources`, an OCI `LinuxResources` object.
    pub async fn update(&self, id: &str, resources: Vec<u8>) -> Result<(), TaskError> {
        let guest = self.with(id, |entry| {
            entry.container.check_update()?;
            Ok(entry.guest.clone())
        })?;
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
        let (guest, last) = self.with(id, |entry| {
            Ok((entry.guest.clone(), entry.last_figures.clone()))
        })?;
        if let Some(figures) = last {
            return Ok(figures);
        }
        let request = container_request(id);
        Ok(guest
            .call(|agent| agent.stats(Context::default(), &request))
            .await?)
    }

    /// The figures of every container; those of one that is deleted meanwhile are left out.
    pub async fn all_stats(&self) -> Result<Vec<StatsResponse>, TaskError> {
        let ids: Vec<String> = self.lock().entries.keys().cloned().collect();
        let mut figures = Vec::with_capacity(ids.len());
        for id in ids {
            match self.stats(&id).await {
                Ok(stats) => figures.push(stats),
                Err(error) if error.code() == ttrpc::Code::NOT_FOUND => {}
                Err(error) => return Err(error),
            }
        }
        Ok(figures)
    }

    /// Asks the init of every container to end, and waits until all have.
    pub async fn terminate_all(self: &Arc<Self>) {
        let ids: Vec<String> = self.lock().entries.keys().cloned().collect();
        for id in &ids {
            // One that has ended, or that ends just now, needs no signal.
            if let Err(e) = self.kill(id, "", libc::SIGTERM as u32, false).await {
                log::debug!("SIGTERM to {id}: {e}");
            }
        }
        for id in &ids {
            let _ = self.wait(id, "").await;
        }
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
