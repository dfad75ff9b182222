//! What a snapshot keeps of a transport.

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};

use super::{MmioTransport, lock};
use crate::virtio::ActivateError;
use crate::virtio::queue_state::SavedQueue;

/// What a snapshot keeps of a transport. The device keeps its own state, and once it is active
/// that of the queues' rings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmioState {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    pub(super) queues: Vec<SavedQueue>,
    interrupt_status: u32,
    needs_reset: bool,
    config_generation: u32,
}

/// A transport's state that cannot be put back.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state is that of a device with other queues.
    #[error("The snapshot has {found} queues for a device that has {expected}")]
    QueueCount {
        /// In the snapshot.
        found: usize,
        /// The device's.
        expected: usize,
    },
    /// A queue of the snapshot is none that the device offers.
    #[error("Queue {0} of the snapshot is none of this device's")]
    Queue(usize),
    /// A queue's size or addresses are impossible.
    #[error("Queue {0} of the snapshot cannot be used")]
    Invalid(usize, #[source] virtio_queue::Error),
    /// The device does not start.
    #[error("The device of the snapshot cannot become active")]
    Activate(#[source] ActivateError),
}

impl MmioTransport {
    /// What a snapshot keeps. The machine is paused.
    pub fn save(&self) -> MmioState {
        MmioState {
            status: self.status,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            queues: self.queue_states().into_iter().map(Into::into).collect(),
            interrupt_status: self.interrupt.status(),
            needs_reset: self.interrupt.needs_reset(),
            config_generation: self.interrupt.config_generation(),
        }
    }

    /// Puts a fresh transport, in front of a device whose own state is restored, into `state`,
    /// and makes the device active if it was.
    ///
    /// # Errors
    ///
    /// The state belongs to another device, or the device cannot start here.
    pub fn restore(&mut self, state: &MmioState) -> Result<(), RestoreError> {
        if state.queues.len() != self.queues.len() {
            return Err(RestoreError::QueueCount {
                found: state.queues.len(),
                expected: self.queues.len(),
            });
        }
        for (index, (queue, saved)) in self.queues.iter_mut().zip(&state.queues).enumerate() {
            if saved.max_size != queue.max_size() {
                return Err(RestoreError::Queue(index));
            }
            *queue = Queue::try_from(QueueState::from(*saved))
                .map_err(|e| RestoreError::Invalid(index, e))?;
        }
        self.status = state.status;
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.interrupt
            .restore(state.interrupt_status, state.needs_reset);
        self.interrupt
            .restore_config_generation(state.config_generation);
        if self.is_active() {
            let activation = self.activation().map_err(RestoreError::Activate)?;
            lock(&self.device)
                .activate(activation)
                .map_err(RestoreError::Activate)?;
        }
        Ok(())
    }

    /// The queues as they are now: the device's view once it has them, the driver's before.
    fn queue_states(&self) -> Vec<QueueState> {
        let own = || self.queues.iter().map(Queue::state).collect();
        if !self.is_active() {
            return own();
        }
        let states = lock(&self.device).queue_states();
        if states.is_empty() { own() } else { states }
    }
}
