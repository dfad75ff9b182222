//! A machine that one container has for itself ends with the container, not only with its delete: a container that has
//! run and that nobody deletes holds no memory, and the process that stood for it is gone when its exit is told.
//!
//! Nothing is lost by it. The output is taken first; where nobody takes it the machine stays until the delete. So does
//! one with disks, which the guest is to unmount. The figures are kept. What was written to the host's
//! directories is there already.
//!
//! Output over containerd's own connections is taken before the exit is told in any case, for as long: as soon as containerd's
//! CRI plugin hears of an exit it gives up the streams with what is still on its way in them (2.4.2).

use std::time::Duration;

use tokio::time::timeout;
use ttrpc::context::Context;

use super::{Entry, Table, Tasks, container_request};
use crate::guest::Guest;
use crate::stdio::OutputLimits;
use crate::task_error::TaskError;

/// How long output that nobody takes may hold up an exit.
const STALL_LIMIT: Duration = Duration::from_millis(250);

/// How long output may hold up an exit at all, and how long the guest's last answer and its end may.
const LIMIT: Duration = Duration::from_secs(2);

impl Table {
    /// Whether a machine is this container's and nobody else's, and may end with it.
    fn is_alone(&self, id: &str) -> bool {
        let others = self.reserved.len() + self.entries.keys().filter(|other| *other != id).count();
        let may_end = self.entries.get(id).is_some_and(|entry| {
            entry.is_own_sandbox
                && entry.disks.is_empty()
                && !entry.container.is_being_deleted()
                && !entry.guest.has_ended()
        });
        others == 0 && may_end
    }

    /// The container with which the machine has ended.
    pub(super) fn released(&self) -> Option<&str> {
        let mut entries = self.entries.iter();
        let (id, _) = entries.find(|(_, entry)| entry.released)?;
        Some(id)
    }
}

impl Tasks {
    /// Holds the exit of a container's init back, if the machine is to end before it is told, or output to be taken.
    pub(super) fn hold_exit(&self, id: &str) -> bool {
        let mut table = self.lock();
        let has_streams = |entry: &Entry| entry.container.init().uris.has_output_streams();
        let held = table.is_alone(id) || table.entries.get(id).is_some_and(has_streams);
        if let Some(entry) = table.entries.get_mut(id).filter(|_| held) {
            entry.container.hold_exit();
        }
        held
    }

    /// Ends the machine of a container whose init has ended, if nothing is lost by it, and tells of the exit.
    pub(super) async fn release(&self, id: &str, guest: &Guest) {
        if !self.lock().is_alone(id) {
            let _ = timeout(LIMIT, self.output_is_taken(id)).await;
        } else if let Ok(Ok(true)) = timeout(LIMIT, self.nothing_is_left(id)).await {
            self.end_machine(id, guest).await;
        }
        let _ = self.with(id, |entry| {
            entry.container.tell_exit();
            Ok(())
        });
    }

    /// Waits until nothing goes on in the container and its output is taken. False if somebody does not take it.
    async fn nothing_is_left(&self, id: &str) -> Result<bool, TaskError> {
        let mut settled = self.with(id, |entry| Ok(entry.container.settled()))?;
        while !self.with(id, |entry| Ok(entry.container.is_quiet()))? {
            // The sender goes with the entry.
            if settled.changed().await.is_err() {
                return Ok(false);
            }
        }
        self.output_is_taken(id).await
    }

    /// Waits until the output is taken. False if somebody does not take it.
    async fn output_is_taken(&self, id: &str) -> Result<bool, TaskError> {
        for output in self.with(id, |entry| Ok(entry.container.output()))? {
            let limits = OutputLimits {
                client: STALL_LIMIT,
                guest: LIMIT,
                all: LIMIT,
            };
            if !output.all_taken(limits).await {
                log::debug!(
                    "Nobody takes the output of {id}: what was to come after it does not wait"
                );
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn end_machine(&self, id: &str, guest: &Guest) {
        let request = container_request(id);
        let stats = guest.call(|agent| agent.stats(Context::default(), &request));
        let figures = match timeout(LIMIT, stats).await {
            Ok(Ok(figures)) => Some(figures),
            Ok(Err(e)) => {
                log::debug!("The last figures of {id}: {e}");
                None
            }
            Err(_) => None,
        };
        {
            let mut table = self.lock();
            let alone = table.is_alone(id);
            let Some(entry) = table.entries.get_mut(id).filter(|_| alone) else {
                return;
            };
            entry.released = true;
            entry.last_figures = figures;
        }
        log::debug!("The machine ends with {id}");
        guest.cut_power();
        if timeout(LIMIT, guest.end()).await.is_err() {
            log::warn!("The hypervisor of {id} does not end");
        }
    }
}
