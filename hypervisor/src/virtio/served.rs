//! The queues of an active device that the device thread serves, one request after the other.

use virtio_queue::QueueState;

use super::queue::{Accepted, Buffers, DeviceQueue};
use super::queue_state::ActiveState;
use super::{ActivateError, Activation};

/// The `N` queues, and room for one request.
pub struct Served<const N: usize> {
    pub queues: [DeviceQueue; N],
    pub buffers: Buffers,
    features: u64,
}

impl<const N: usize> Served<N> {
    /// Takes the queues over. See [`Activation::accept`] for the errors.
    pub fn new(activation: Activation) -> Result<Self, ActivateError> {
        let accepted: Accepted<N> = activation.accept()?;
        Ok(Self {
            queues: accepted.queues,
            buffers: Buffers::new(accepted.memory),
            features: accepted.features,
        })
    }

    /// The queues' present state; empty for a device that is not active.
    pub fn states(active: Option<&Self>) -> Vec<QueueState> {
        active.map_or_else(Vec::new, |active| {
            active.queues.iter().map(DeviceQueue::state).collect()
        })
    }

    /// What a snapshot keeps.
    pub fn save(active: Option<&Self>) -> Option<ActiveState> {
        active.and_then(|it| ActiveState::new(it.features, Self::states(active)))
    }
}
