//! The buffers of one request, out of the chains that the driver made available.

use std::sync::Arc;

use virtio_queue::DescriptorChain;

use super::{MAX_SEGMENTS, Memory, QueueError, Segments};
use crate::memory;

/// The buffers of one chain: addresses in this process, for `readv` and friends. Reused from
/// request to request.
pub struct Buffers {
    /// What the driver wrote for the device.
    pub readable: Segments,
    /// Where the device writes for the driver.
    pub writable: Segments,
}

impl Buffers {
    /// Room for chains in `memory`.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            readable: Segments::new(memory.clone()),
            writable: Segments::new(memory),
        }
    }

    /// Drops what is loaded.
    pub fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    /// Takes `chain` of queue `index` instead of what was loaded.
    ///
    /// # Errors
    ///
    /// See [`QueueError`]; the buffers are empty then.
    pub(super) fn load(
        &mut self,
        index: usize,
        chain: DescriptorChain<Arc<Memory>>,
    ) -> Result<(), QueueError> {
        self.clear();
        self.append(index, chain).inspect_err(|_| self.clear())
    }

    /// Adds `chain`'s parts behind those loaded.
    pub(super) fn append(
        &mut self,
        index: usize,
        chain: DescriptorChain<Arc<Memory>>,
    ) -> Result<(), QueueError> {
        // The iterator stops in silence at what it cannot follow: the chain is whole only if the last
        // descriptor says so.
        let mut whole = false;
        let mut writable = false;
        let mut count = 0;
        for descriptor in chain {
            count += 1;
            if count > MAX_SEGMENTS {
                return Err(QueueError::TooLong(index));
            }
            if writable && !descriptor.is_write_only() {
                return Err(QueueError::Order(index));
            }
            writable = descriptor.is_write_only();
            let segments = match writable {
                true => &mut self.writable,
                false => &mut self.readable,
            };
            segments
                .push(descriptor.addr(), descriptor.len() as usize)
                .map_err(|_| QueueError::OutsideMemory(index))?;
            whole = !descriptor.has_next();
        }
        if !self.readable.is_empty() {
            memory::note_request();
        }
        match whole {
            true => Ok(()),
            false => Err(QueueError::Endless(index)),
        }
    }
}
