//! What a snapshot keeps of a device's queues.
//!
//! A device's own state struct (`BlockState`, `NetState`, …) stands beside the device and has an
//! `Option<ActiveState>`: `None` when the driver had not made the device active.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState};

use super::{Activation, Interrupt, Memory};

/// A queue, as a snapshot keeps it: [`virtio_queue::QueueState`] has no serde of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    /// The most elements that the device offers.
    pub max_size: u16,
    /// The number of elements that the driver chose.
    pub size: u16,
    /// Whether the driver set the queue up.
    pub ready: bool,
    /// Whether `VIRTIO_F_EVENT_IDX` holds.
    pub event_idx: bool,
    /// The next entry of the available ring to be looked at.
    pub next_avail: u16,
    /// The next entry of the used ring to be filled.
    pub next_used: u16,
    /// Guest physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest physical address of the available ring.
    pub avail_ring: u64,
    /// Guest physical address of the used ring.
    pub used_ring: u64,
}

impl From<QueueState> for SavedQueue {
    fn from(state: QueueState) -> Self {
        Self {
            max_size: state.max_size,
            size: state.size,
            ready: state.ready,
            event_idx: state.event_idx_enabled,
            next_avail: state.next_avail,
            next_used: state.next_used,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        }
    }
}

impl From<SavedQueue> for QueueState {
    fn from(saved: SavedQueue) -> Self {
        Self {
            max_size: saved.max_size,
            size: saved.size,
            ready: saved.ready,
            event_idx_enabled: saved.event_idx,
            next_avail: saved.next_avail,
            next_used: saved.next_used,
            desc_table: saved.desc_table,
            avail_ring: saved.avail_ring,
            used_ring: saved.used_ring,
        }
    }
}

/// A snapshot's queue that no device could have had.
#[derive(Debug, thiserror::Error)]
#[error("Queue {index} of the snapshot cannot be used: {cause}")]
pub struct SavedQueueError {
    index: usize,
    cause: virtio_queue::Error,
}

/// What a snapshot keeps of an active device, whatever its type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActiveState {
    /// The feature bits that both sides agreed on.
    pub features: u64,
    /// The queues, in order.
    pub queues: Vec<SavedQueue>,
}

impl ActiveState {
    /// The state of a device with these features and queues; `None` when there are no queues,
    /// since then the device is not active.
    pub fn new(features: u64, queues: Vec<QueueState>) -> Option<Self> {
        (!queues.is_empty()).then(|| Self {
            features,
            queues: queues.into_iter().map(SavedQueue::from).collect(),
        })
    }

    /// What makes a restored device active again.
    ///
    /// # Errors
    ///
    /// A queue's size or alignment is one that no device could have accepted. Whether its rings lie in
    /// memory is checked by the device.
    pub fn activation(
        &self,
        memory: Memory,
        interrupt: Arc<Interrupt>,
    ) -> Result<Activation, SavedQueueError> {
        let queues = self
            .queues
            .iter()
            .enumerate()
            .map(|(index, saved)| {
                Queue::try_from(QueueState::from(*saved))
                    .map_err(|cause| SavedQueueError { index, cause })
            })
            .collect::<Result<_, _>>()?;
        Ok(Activation {
            memory,
            queues,
            features: self.features,
            interrupt,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::QueueT;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    fn interrupt() -> Arc<Interrupt> {
        Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()))
    }

    proptest! {
        #[test]
        fn a_queue_survives_json(
            exponent in 0u32..=8, max_exponent in 8u32..=15, ready: bool, event_idx: bool,
            next_avail: u16, next_used: u16, desc: u32, avail: u32, used: u32,
        ) {
            let mut queue = Queue::new(1 << max_exponent).unwrap();
            queue.set_size(1 << exponent);
            queue.set_ready(ready);
            queue.set_event_idx(event_idx);
            queue.set_next_avail(next_avail);
            queue.set_next_used(next_used);
            queue.set_desc_table_address(Some(desc & !15), Some(1));
            queue.set_avail_ring_address(Some(avail & !1), Some(2));
            queue.set_used_ring_address(Some(used & !3), Some(3));
            let state = ActiveState::new(7, vec![queue.state()]).unwrap();
            let again: ActiveState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
            prop_assert_eq!(&again, &state);
            let activation = again.activation(Memory::new(), interrupt()).unwrap();
            prop_assert_eq!(activation.features, 7);
            prop_assert_eq!(&activation.queues, &vec![queue]);
        }
    }

    #[test]
    fn a_queue_that_no_device_could_have_had_is_named() {
        let good = SavedQueue::from(Queue::new(16).unwrap().state());
        let state = ActiveState {
            features: 0,
            queues: vec![good, SavedQueue { size: 3, ..good }],
        };
        let error = state
            .activation(Memory::new(), interrupt())
            .err()
            .unwrap()
            .to_string();
        assert!(error.starts_with("Queue 1 of the snapshot"), "{error}");
    }

    #[test]
    fn a_device_without_queues_is_not_active() {
        assert_eq!(ActiveState::new(1, Vec::new()), None);
    }
}
