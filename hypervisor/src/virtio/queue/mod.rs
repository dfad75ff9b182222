//! A queue as a device works with it, and the buffers of one request.
//!
//! The guest writes every byte of a queue. [`DeviceQueue`] and [`Buffers`] are where that is
//! checked, once for all devices: whatever the driver does, a device gets a chain that lies
//! wholly in guest memory, readable parts before writable ones, of at most [`MAX_SEGMENTS`] parts,
//! or a [`QueueError`]. A device answers such an error with
//! [`Interrupt::signal_needs_reset`] and leaves the queue alone until the driver resets it. What is
//! well-formed as a chain and wrong as a request is the device's own business.

mod buffers;
mod segments;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress};

use super::{ActivateError, Activation, Interrupt, Memory};
pub use buffers::Buffers;
pub use segments::Segments;

/// The most parts of one chain, readable and writable together: what one `preadv` takes (`UIO_MAXIOV`).
pub const MAX_SEGMENTS: usize = 1024;

/// `VIRTIO_F_VERSION_1` as a mask: not a legacy device.
pub const FEATURE_VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// `VIRTIO_F_EVENT_IDX` as a mask: each side names the index at which it wants to be told.
pub const FEATURE_EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
/// `VIRTIO_F_INDIRECT_DESC` as a mask: a chain may lie in a table of its own.
pub const FEATURE_INDIRECT_DESC: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// How the driver broke a queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The available index ran ahead of what the queue can hold.
    #[error("The available index of queue {0} is further ahead than the queue is long")]
    AvailableIndex(usize),
    /// A ring cannot be read or written any more.
    #[error("A ring of queue {0} cannot be reached")]
    Ring(usize),
    /// The chain loops, leaves the descriptor table, or has an indirect table that is none.
    #[error("A descriptor chain of queue {0} has no end")]
    Endless(usize),
    /// The chain has more than [`MAX_SEGMENTS`] descriptors.
    #[error("A descriptor chain of queue {0} has more than {MAX_SEGMENTS} descriptors")]
    TooLong(usize),
    /// A part of the chain is not guest memory.
    #[error("A descriptor of queue {0} points outside of guest memory")]
    OutsideMemory(usize),
    /// A readable descriptor follows a writable one.
    #[error("A descriptor chain of queue {0} has a readable part after a writable one")]
    Order(usize),
}

/// A queue that its device has taken over.
pub struct DeviceQueue {
    index: usize,
    queue: Queue,
    memory: Arc<Memory>,
    interrupt: Arc<Interrupt>,
    /// Chains handed back since the driver was last told, or did not want to be.
    added: u16,
}

/// What an active device works with, its queues checked.
pub struct Accepted<const N: usize> {
    /// The queues, in order.
    pub queues: [DeviceQueue; N],
    /// The guest's memory, in which their rings lie.
    pub memory: Arc<Memory>,
    /// The feature bits that both sides agreed on.
    pub features: u64,
    /// How to tell the driver that something happened.
    pub interrupt: Arc<Interrupt>,
}

impl Activation {
    /// For a device with `N` queues, each of which it needs.
    ///
    /// # Errors
    ///
    /// The driver did not set one up, or its rings do not lie in guest memory.
    pub fn accept<const N: usize>(self) -> Result<Accepted<N>, ActivateError> {
        let memory = Arc::new(self.memory);
        let mut queues = Vec::with_capacity(N);
        for (index, mut queue) in self.queues.into_iter().enumerate().take(N) {
            if !queue.ready() {
                return Err(ActivateError::QueueMissing(index));
            }
            if !queue.is_valid(&*memory) {
                return Err(ActivateError::QueueInvalid(index));
            }
            queue.set_event_idx(self.features & FEATURE_EVENT_IDX != 0);
            queues.push(DeviceQueue {
                index,
                queue,
                memory: memory.clone(),
                interrupt: self.interrupt.clone(),
                added: 0,
            });
        }
        let found = queues.len();
        Ok(Accepted {
            queues: queues
                .try_into()
                .map_err(|_| ActivateError::QueueMissing(found))?,
            memory,
            features: self.features,
            interrupt: self.interrupt,
        })
    }
}

impl DeviceQueue {
    /// The next chain, unchecked: for packet layers that walk it themselves.
    ///
    /// # Errors
    ///
    /// The driver broke the available ring.
    pub fn pop(&mut self) -> Result<Option<DescriptorChain<Arc<Memory>>>, QueueError> {
        let mut chains = self
            .queue
            .iter(self.memory.clone())
            .map_err(|_| QueueError::AvailableIndex(self.index))?;
        if let Some(chain) = chains.next() {
            return Ok(Some(chain));
        }
        // The iterator ends likewise when it cannot read an entry; without this check a device would ask for ever.
        let available = self
            .queue
            .avail_idx(&*self.memory, Ordering::Acquire)
            .map_err(|_| QueueError::Ring(self.index))?
            .0;
        match available.wrapping_sub(self.queue.next_avail()) {
            0 => Ok(None),
            _ => match self.queue.iter(self.memory.clone()) {
                // The driver added a chain in between, or the entry is out of reach.
                Ok(mut chains) => chains.next().map(Some).ok_or(QueueError::Ring(self.index)),
                Err(_) => Err(QueueError::AvailableIndex(self.index)),
            },
        }
    }

    /// Loads the next chain into `buffers` and returns its head; `None` when there is none now.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn pop_into(&mut self, buffers: &mut Buffers) -> Result<Option<u16>, QueueError> {
        match self.pop()? {
            Some(chain) => {
                let head = chain.head_index();
                buffers.load(self.index, chain)?;
                Ok(Some(head))
            }
            None => Ok(None),
        }
    }

    /// Loads the next chain behind what `buffers` hold already. Returns its head and the length of its writable part.
    ///
    /// # Errors
    ///
    /// The driver broke the queue; the buffers are of no use then.
    pub fn pop_behind(
        &mut self,
        buffers: &mut Buffers,
    ) -> Result<Option<(u16, usize)>, QueueError> {
        let Some(chain) = self.pop()? else {
            return Ok(None);
        };
        let head = chain.head_index();
        let before = buffers.writable.len();
        buffers.append(self.index, chain)?;
        Ok(Some((head, buffers.writable.len() - before)))
    }

    /// Puts the chain that came last from [`pop`](Self::pop) back: it will come again.
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Hands the chain that starts at `head` back, with `written` bytes in its writable part.
    ///
    /// # Errors
    ///
    /// The used ring is out of reach, or the head is no descriptor's index.
    pub fn add_used(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        self.add_used_together([(head, written)])
    }

    /// Hands chains back, each with its head and the bytes written, so that the driver sees all of them or none: a
    /// received packet may lie in several.
    ///
    /// # Errors
    ///
    /// The used ring is out of reach, or a head is no descriptor's index.
    pub fn add_used_together(
        &mut self,
        chains: impl IntoIterator<Item = (u16, u32)>,
    ) -> Result<(), QueueError> {
        let size = self.queue.size();
        let ring = GuestAddress(self.queue.used_ring());
        let mut next = self.queue.next_used();
        for (head, written) in chains {
            if head >= size {
                return Err(QueueError::Ring(self.index));
            }
            // The ring: flags and index of 2 bytes each, then elements of a head and a length of 4.
            let element = (u64::from(written) << 32 | u64::from(head)).to_le();
            ring.checked_add(4 + 8 * u64::from(next % size))
                .and_then(|address| self.memory.write_obj(element, address).ok())
                .ok_or(QueueError::Ring(self.index))?;
            next = next.wrapping_add(1);
        }
        self.added = self
            .added
            .wrapping_add(next.wrapping_sub(self.queue.next_used()));
        self.queue.set_next_used(next);
        // Release: the driver that sees the index sees the elements and the data.
        ring.checked_add(2)
            .and_then(|address| {
                self.memory
                    .store(next.to_le(), address, Ordering::Release)
                    .ok()
            })
            .ok_or(QueueError::Ring(self.index))
    }

    /// Interrupts the driver if it wants to know of what was used since the last call; once for a batch.
    ///
    /// # Errors
    ///
    /// The available ring is out of reach.
    pub fn notify(&mut self) -> Result<(), QueueError> {
        if self.must_notify()? {
            self.interrupt.signal_used();
        }
        Ok(())
    }

    /// Whether the driver wants to know of what was used since the last call: for a device that
    /// interrupts once for more than one queue.
    ///
    /// # Errors
    ///
    /// The available ring is out of reach.
    pub fn must_notify(&mut self) -> Result<bool, QueueError> {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return Ok(false);
        }
        // The used index is to be visible before the driver's wish is read (virtio 1.2, section 2.7.10).
        fence(Ordering::SeqCst);
        let used = self.queue.next_used();
        Ok(match self.queue.event_idx_enabled() {
            // Wanted when `used_event` is one of the indices used since the last call.
            true => {
                let end = 4 + 2 * u64::from(self.queue.size());
                let event = self.load_available(end)?;
                used.wrapping_sub(event).wrapping_sub(1) < added
            }
            false => self.load_available(0)? & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0,
        })
    }

    /// The 16 bits at `offset` of the available ring.
    fn load_available(&self, offset: u64) -> Result<u16, QueueError> {
        GuestAddress(self.queue.avail_ring())
            .checked_add(offset)
            .and_then(|address| self.memory.load(address, Ordering::Relaxed).ok())
            .map(u16::from_le)
            .ok_or(QueueError::Ring(self.index))
    }

    /// Asks the driver to kick again. `true` when chains came meanwhile, without a kick.
    ///
    /// # Errors
    ///
    /// A ring is out of reach.
    pub fn enable_notification(&mut self) -> Result<bool, QueueError> {
        self.queue
            .enable_notification(&*self.memory)
            .map_err(|_| QueueError::Ring(self.index))
    }

    /// Asks the driver not to kick.
    ///
    /// # Errors
    ///
    /// A ring is out of reach.
    pub fn disable_notification(&mut self) -> Result<(), QueueError> {
        self.queue
            .disable_notification(&*self.memory)
            .map_err(|_| QueueError::Ring(self.index))
    }

    /// Serves up to `budget` chains with `serve`, which returns how many bytes it wrote, or `None` to leave
    /// the chain in the queue and stop. One interrupt for all. `true` when the budget ran out
    /// before the chains did: the caller must come back by itself, there will be no kick.
    ///
    /// # Errors
    ///
    /// The driver broke the queue. Chains served before that are handed back.
    pub fn serve(
        &mut self,
        buffers: &mut Buffers,
        budget: usize,
        mut serve: impl FnMut(&mut Buffers) -> Option<u32>,
    ) -> Result<bool, QueueError> {
        let mut left = budget;
        let result = (|| {
            self.disable_notification()?;
            loop {
                while left > 0 {
                    let Some(head) = self.pop_into(buffers)? else {
                        break;
                    };
                    let Some(written) = serve(buffers) else {
                        self.undo_pop();
                        return Ok(false);
                    };
                    self.add_used(head, written)?;
                    left -= 1;
                }
                if left == 0 {
                    return Ok(true);
                }
                if !self.enable_notification()? {
                    return Ok(false);
                }
            }
        })();
        self.notify()?;
        result
    }

    /// The number of elements that the driver chose.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The device's interrupt.
    pub fn interrupt(&self) -> &Arc<Interrupt> {
        &self.interrupt
    }

    /// For a snapshot.
    pub fn state(&self) -> QueueState {
        self.queue.state()
    }
}
