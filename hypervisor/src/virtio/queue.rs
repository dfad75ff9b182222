//! A queue as a device works with it, and the buffers of one request.
//!
//! The guest writes every byte of a queue. [`DeviceQueue`] and [`Buffers`] are where that is
//! checked, once for all devices: whatever the driver does, a device gets a chain that lies
//! wholly in guest memory, readable parts before writable ones, of at most [`MAX_SEGMENTS`] parts,
//! or a [`QueueError`]. A device answers such an error with
//! [`Interrupt::signal_needs_reset`] and leaves the queue alone until the driver resets it. What is
//! well-formed as a chain and wrong as a request is the device's own business.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::{ActivateError, Activation, Interrupt, Memory};

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

impl Activation {
    /// The device's `N` queues, each of which it needs.
    ///
    /// # Errors
    ///
    /// The driver did not set one up, or its rings do not lie in guest memory.
    pub fn into_queues<const N: usize>(self) -> Result<[DeviceQueue; N], ActivateError> {
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
        queues
            .try_into()
            .map_err(|_| ActivateError::QueueMissing(found))
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
    fn load(
        &mut self,
        index: usize,
        chain: DescriptorChain<Arc<Memory>>,
    ) -> Result<(), QueueError> {
        self.clear();
        self.append(index, chain).inspect_err(|_| self.clear())
    }

    /// Adds `chain`'s parts behind those loaded.
    fn append(
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
        match whole {
            true => Ok(()),
            false => Err(QueueError::Endless(index)),
        }
    }
}

/// One direction of a chain: parts of guest memory, in order, none of them empty.
pub struct Segments {
    // Every part, and the reserved byte, lie in it: it keeps them mapped.
    memory: Arc<Memory>,
    parts: Vec<libc::iovec>,
    // Parts before this one are consumed.
    first: usize,
    len: usize,
    reserved: Option<*mut u8>,
}

// SAFETY: the addresses are of guest memory, which every thread of the process may access, and
// which `memory` keeps mapped.
unsafe impl Send for Segments {}

impl Segments {
    fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            parts: Vec::new(),
            first: 0,
            len: 0,
            reserved: None,
        }
    }

    fn clear(&mut self) {
        self.parts.clear();
        self.first = 0;
        self.len = 0;
        self.reserved = None;
    }

    /// Adds `len` bytes at `address`, which may reach over more than one region of memory.
    fn push(&mut self, address: GuestAddress, len: usize) -> Result<(), GuestMemoryError> {
        for slice in self.memory.get_slices(address, len) {
            let slice = slice?;
            self.len += slice.len();
            self.parts.push(libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: slice.len(),
            });
        }
        Ok(())
    }

    /// Bytes left.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left, for a system call. Valid while the [`Buffers`] are not loaded again.
    pub fn iovecs(&self) -> &[libc::iovec] {
        self.parts.get(self.first..).unwrap_or(&[])
    }

    /// Consumes `count` bytes from the front, or all there are.
    pub fn advance(&mut self, count: usize) {
        let mut left = count.min(self.len);
        self.len -= left;
        while let Some(part) = self.parts.get_mut(self.first) {
            if left < part.iov_len {
                part.iov_base = part.iov_base.cast::<u8>().wrapping_add(left).cast();
                part.iov_len -= left;
                return;
            }
            left -= part.iov_len;
            self.first += 1;
        }
    }

    /// Forgets the parts that are consumed: for segments to which chains are added again and again.
    pub fn compact(&mut self) {
        self.parts.drain(..self.first);
        self.first = 0;
    }

    /// Copies `data` to `offset` bytes from the front, consuming nothing. `false` if it does not all fit.
    pub fn write_at(&self, mut offset: usize, data: &[u8]) -> bool {
        let mut data = data;
        for part in self.iovecs() {
            let Some(room) = part.iov_len.checked_sub(offset).filter(|room| *room > 0) else {
                offset -= part.iov_len;
                continue;
            };
            let (now, later) = data.split_at(room.min(data.len()));
            // SAFETY: `offset + now.len()` bytes lie within the part, which is guest memory (see `push`); it
            // cannot overlap with `data`.
            unsafe {
                let to = part.iov_base.cast::<u8>().add(offset);
                std::ptr::copy_nonoverlapping(now.as_ptr(), to, now.len());
            }
            (data, offset) = (later, 0);
            if data.is_empty() {
                return true;
            }
        }
        data.is_empty()
    }

    /// Cuts the end off, so that `len` bytes are left.
    pub fn truncate(&mut self, len: usize) {
        while self.len > len {
            let excess = self.len - len;
            match self.parts.last_mut() {
                Some(part) if part.iov_len > excess => {
                    part.iov_len -= excess;
                    self.len = len;
                }
                Some(part) => {
                    self.len -= part.iov_len;
                    self.parts.pop();
                }
                None => return,
            }
        }
    }

    /// Sets the last byte aside for [`set_reserved_byte`](Self::set_reserved_byte). `false` when there is none.
    pub fn reserve_last_byte(&mut self) -> bool {
        let last = self.iovecs().last().and_then(|part| {
            let offset = part.iov_len.checked_sub(1)?;
            Some(part.iov_base.cast::<u8>().wrapping_add(offset))
        });
        if last.is_some() {
            self.reserved = last;
            self.truncate(self.len - 1);
        }
        last.is_some()
    }

    /// Writes the byte that was set aside, if one was.
    pub fn set_reserved_byte(&mut self, value: u8) {
        if let Some(address) = self.reserved.take() {
            // SAFETY: the address is of a byte of guest memory, which `memory` keeps mapped. The guest may
            // access it at the same time, hence volatile.
            unsafe { address.write_volatile(value) };
        }
    }

    /// Copies from the guest, consuming, until `data` is full or nothing is left. Returns the bytes copied.
    pub fn read(&mut self, data: &mut [u8]) -> usize {
        let mut done = 0;
        while let (Some(part), Some(rest)) = (self.parts.get(self.first), data.get_mut(done..)) {
            let count = part.iov_len.min(rest.len());
            if count == 0 {
                break;
            }
            // SAFETY: the part is `iov_len >= count` bytes of guest memory (see `push`), `rest`
            // has as many, and the two cannot overlap: `data` is not guest memory.
            unsafe {
                std::ptr::copy_nonoverlapping(part.iov_base.cast(), rest.as_mut_ptr(), count);
            }
            done += count;
            self.advance(count);
        }
        done
    }

    /// Copies an array from the guest, consuming; `None`, with the rest consumed, when too little is left.
    pub fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut data = [0; N];
        (self.read(&mut data) == N).then_some(data)
    }

    /// Copies to the guest, consuming, until all of `data` is there or no room is left. Returns the bytes copied.
    pub fn write(&mut self, data: &[u8]) -> usize {
        let mut done = 0;
        while let (Some(part), Some(rest)) = (self.parts.get(self.first), data.get(done..)) {
            let count = part.iov_len.min(rest.len());
            if count == 0 {
                break;
            }
            // SAFETY: the part is `iov_len >= count` bytes of guest memory (see `push`), `rest`
            // has as many, and the two cannot overlap: `data` is not guest memory.
            unsafe {
                std::ptr::copy_nonoverlapping(rest.as_ptr(), part.iov_base.cast(), count);
            }
            done += count;
            self.advance(count);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_bindings::virtio_ring::{
        VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    };
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::GuestMemoryMmap;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    const WRITE: u16 = VRING_DESC_F_WRITE as u16;
    const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
    const SIZE: u16 = 16;

    // Two regions that touch, a gap, and a third.
    fn memory() -> Memory {
        GuestMemoryMmap::from_ranges(&[
            (GuestAddress(0), 0x8000),
            (GuestAddress(0x8000), 0x8000),
            (GuestAddress(0x2_0000), 0x1000),
        ])
        .unwrap()
    }

    fn device_queue(memory: &Memory, mock: &MockSplitQueue<'_, Memory>) -> DeviceQueue {
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![mock.create_queue().unwrap()],
            features: FEATURE_VERSION_1,
            interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
        };
        let [queue] = activation.into_queues().unwrap();
        queue
    }

    fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
        Descriptor::new(address, len, flags, next).into()
    }

    /// Makes the descriptors one chain available and loads it.
    fn load(descriptors: &[RawDescriptor]) -> Result<(Option<u16>, Buffers), QueueError> {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        for (index, descriptor) in (0..).zip(descriptors) {
            mock.desc_table().store(index, *descriptor).unwrap();
        }
        mock.avail().ring().ref_at(0).unwrap().store(0);
        mock.avail().idx().store(1);
        let mut queue = device_queue(&memory, &mock);
        let mut buffers = Buffers::new(queue.memory().clone());
        let head = queue.pop_into(&mut buffers)?;
        Ok((head, buffers))
    }

    #[test]
    fn a_chain_over_two_regions_is_read_and_written_through() {
        let (head, mut buffers) = load(&[
            descriptor(0x7ffe, 4, NEXT, 1),
            descriptor(0x4000, 0, NEXT, 2),
            descriptor(0x4000, 3, WRITE | NEXT, 3),
            descriptor(0x7fff, 2, WRITE, 0),
        ])
        .unwrap();
        assert_eq!(head, Some(0));
        assert_eq!(
            (buffers.readable.len(), buffers.readable.iovecs().len()),
            (4, 2)
        );
        assert_eq!(buffers.readable.read_array::<3>(), Some([0; 3]));
        assert_eq!(buffers.readable.read_array::<2>(), None);
        assert!(buffers.writable.reserve_last_byte());
        assert_eq!(buffers.writable.len(), 4);
        assert_eq!(buffers.writable.write(b"abcdef"), 4);
        buffers.writable.set_reserved_byte(b'!');
        let memory = buffers.writable.memory.clone();
        let mut got = [0; 2];
        memory.read_slice(&mut got, GuestAddress(0x7fff)).unwrap();
        assert_eq!(&got, b"d!");
    }

    #[test]
    fn each_way_to_break_a_chain_is_told() {
        use QueueError::*;
        let broken = |descriptors: &[RawDescriptor]| load(descriptors).err().unwrap();
        assert!(matches!(
            broken(&[descriptor(0x4000, 1, NEXT, 0)]),
            Endless(0)
        ));
        assert!(matches!(
            broken(&[descriptor(0x4000, 1, NEXT, SIZE)]),
            Endless(0)
        ));
        assert!(matches!(
            broken(&[descriptor(0x4000, 24, INDIRECT, 0)]),
            Endless(0)
        ));
        assert!(matches!(
            broken(&[descriptor(0x4000, 0, INDIRECT, 0)]),
            Endless(0)
        ));
        assert!(matches!(
            broken(&[descriptor(u64::MAX, 2, 0, 0)]),
            OutsideMemory(0)
        ));
        assert!(matches!(
            broken(&[descriptor(0xffff, 2, 0, 0)]),
            OutsideMemory(0)
        ));
        assert!(matches!(
            broken(&[descriptor(0x4000, u32::MAX, WRITE, 0)]),
            OutsideMemory(0)
        ));
        let wrong = [
            descriptor(0x4000, 1, WRITE | NEXT, 1),
            descriptor(0x4000, 1, 0, 0),
        ];
        assert!(matches!(broken(&wrong), Order(0)));
    }

    #[test]
    fn an_indirect_table_may_not_be_longer_than_a_system_call_takes() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        for (length, fits) in [
            (MAX_SEGMENTS as u16, true),
            (MAX_SEGMENTS as u16 + 1, false),
        ] {
            for index in 0..length {
                let flags = if index + 1 < length { NEXT } else { 0 };
                memory
                    .write_obj(
                        descriptor(0x2_0000, 1, flags, index + 1),
                        GuestAddress(0x4000 + u64::from(index) * 16),
                    )
                    .unwrap();
            }
            let head = descriptor(0x4000, u32::from(length) * 16, INDIRECT, 0);
            mock.desc_table().store(0, head).unwrap();
            mock.avail().ring().ref_at(0).unwrap().store(0);
            mock.avail().idx().store(1);
            let mut queue = device_queue(&memory, &mock);
            let mut buffers = Buffers::new(queue.memory().clone());
            match queue.pop_into(&mut buffers) {
                Ok(head) => {
                    assert!(fits && head == Some(0));
                    assert_eq!(buffers.readable.len(), MAX_SEGMENTS);
                }
                Err(e) => assert!(!fits && matches!(e, QueueError::TooLong(0)), "{e}"),
            }
        }
    }

    #[test]
    fn an_available_index_that_jumps_is_an_error_and_no_endless_loop() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        mock.avail().idx().store(SIZE + 1);
        let mut queue = device_queue(&memory, &mock);
        assert!(matches!(queue.pop(), Err(QueueError::AvailableIndex(0))));
    }

    #[test]
    fn a_queue_whose_rings_have_a_hole_is_an_error_and_no_endless_loop() {
        // The available ring's begin and end are memory, what lies between is not.
        let memory: Memory = GuestMemoryMmap::from_ranges(&[
            (GuestAddress(0), 0x4004),
            (GuestAddress(0x4020), 0x1000),
        ])
        .unwrap();
        let mock = MockSplitQueue::new(&memory, SIZE);
        memory.write_obj(1u16, GuestAddress(0x4002)).unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        queue.set_avail_ring_address(Some(0x4000), None);
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![queue],
            features: FEATURE_VERSION_1,
            interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
        };
        let [mut queue] = activation.into_queues().unwrap();
        let mut buffers = Buffers::new(queue.memory().clone());
        let result = queue.serve(&mut buffers, 64, |_| Some(0));
        assert!(matches!(result, Err(QueueError::Ring(0))));
    }

    #[test]
    fn a_queue_that_the_driver_did_not_set_up_is_named() {
        let activation = |queues| Activation {
            memory: memory(),
            queues,
            features: 0,
            interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
        };
        let result = activation(vec![Queue::new(SIZE).unwrap()]).into_queues::<1>();
        assert!(matches!(result, Err(ActivateError::QueueMissing(0))));
        assert!(matches!(
            activation(vec![]).into_queues::<1>(),
            Err(ActivateError::QueueMissing(0))
        ));
        let mut outside = Queue::new(SIZE).unwrap();
        outside.set_ready(true);
        outside.set_desc_table_address(Some(0x10_0000), None);
        let result = activation(vec![outside]).into_queues::<1>();
        assert!(matches!(result, Err(ActivateError::QueueInvalid(0))));
    }

    #[test]
    fn serving_stops_at_the_budget_and_interrupts_once() {
        let memory = memory();
        let mut mock = MockSplitQueue::new(&memory, SIZE);
        for _ in 0..5 {
            mock.add_chain(1).unwrap();
        }
        let mut queue = device_queue(&memory, &mock);
        let mut buffers = Buffers::new(queue.memory().clone());
        assert!(queue.serve(&mut buffers, 3, |_| Some(7)).unwrap());
        assert_eq!(mock.used().idx().load(), 3);
        assert_eq!(queue.interrupt().line().read().unwrap(), 1);
        let mut taken = 0;
        let stop_after_one = |_: &mut Buffers| {
            taken += 1;
            (taken == 1).then_some(0)
        };
        assert!(!queue.serve(&mut buffers, 3, stop_after_one).unwrap());
        assert_eq!(mock.used().idx().load(), 4);
        assert!(!queue.serve(&mut buffers, 3, |_| Some(0)).unwrap());
        assert_eq!(mock.used().idx().load(), 5);
    }

    #[test]
    fn the_driver_is_interrupted_exactly_when_it_wants_to_be() {
        for event_idx in [false, true] {
            let memory = memory();
            let mock = MockSplitQueue::new(&memory, SIZE);
            let mut queue = device_queue(&memory, &mock);
            queue.queue.set_event_idx(event_idx);
            // The mock's rings overlap where the used event lies.
            let used = 0x6000;
            queue.queue.set_used_ring_address(Some(used), None);
            let told = |queue: &DeviceQueue| queue.interrupt().line().read().is_ok();
            let available = GuestAddress(queue.queue.avail_ring());
            let used_event = GuestAddress(available.0 + 4 + 2 * u64::from(SIZE));
            // Nothing used, nothing told.
            queue.notify().unwrap();
            assert!(!told(&queue));
            // Without VIRTIO_F_EVENT_IDX the flag counts, with it the index.
            let wishes: [(u16, u16, bool); 3] = match event_idx {
                false => [(0, 9, true), (1, 2, false), (0, 0, true)],
                true => [(1, 1, true), (0, 4, false), (1, 4, true)],
            };
            for (flags, index, wanted) in wishes {
                memory.write_obj(flags, available).unwrap();
                memory.write_obj(index, used_event).unwrap();
                queue.add_used_together([(3, 1), (4, 2)]).unwrap();
                queue.notify().unwrap();
                assert_eq!(told(&queue), wanted, "{event_idx} {flags} {index}");
            }
            let index: u16 = memory.read_obj(GuestAddress(u64::from(used) + 2)).unwrap();
            let last: [u32; 2] = [0, 4].map(|offset| {
                let address = u64::from(used) + 4 + 5 * 8 + offset;
                memory.read_obj(GuestAddress(address)).unwrap()
            });
            assert_eq!((index, last), (6, [4, 2]));
            assert!(queue.add_used(SIZE, 0).is_err());
        }
    }

    #[test]
    fn bytes_can_be_written_in_the_middle() {
        let (_, buffers) = load(&[
            descriptor(0x4000, 3, WRITE | NEXT, 1),
            descriptor(0x5000, 2, WRITE, 0),
        ])
        .unwrap();
        assert!(buffers.writable.write_at(2, b"ab"));
        assert!(buffers.writable.write_at(5, b""));
        assert!(!buffers.writable.write_at(4, b"xy"));
        let memory = &buffers.writable.memory;
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x4002)).unwrap(), b'a');
        assert_eq!(
            memory.read_obj::<[u8; 2]>(GuestAddress(0x5000)).unwrap(),
            *b"bx"
        );
    }

    proptest! {
        #[test]
        fn whatever_the_tables_hold_a_chain_is_sound_or_refused(
            table in proptest::collection::vec((0u64..0x2_2000, 0u32..0x3000, 0u16..8, 0u16..20), 32),
            heads in proptest::collection::vec(0u16..20, 16),
            ahead in 0u16..20,
        ) {
            let memory = memory();
            let mock = MockSplitQueue::new(&memory, SIZE);
            for (index, &(address, len, flags, next)) in table.iter().enumerate() {
                let raw = descriptor(address, len, flags, next);
                if index < 16 {
                    mock.desc_table().store(index as u16, raw).unwrap();
                } else {
                    memory.write_obj(raw, GuestAddress(0x4000 + index as u64 * 16)).unwrap();
                }
            }
            for (index, &head) in heads.iter().enumerate() {
                mock.avail().ring().ref_at(index).unwrap().store(head);
            }
            mock.avail().idx().store(ahead);
            let mut queue = device_queue(&memory, &mock);
            let mut buffers = Buffers::new(queue.memory().clone());
            let _ = queue.serve(&mut buffers, 64, |buffers| {
                for segments in [&mut buffers.readable, &mut buffers.writable] {
                    let sum: usize = segments.iovecs().iter().map(|part| part.iov_len).sum();
                    assert_eq!(sum, segments.len());
                    assert!(segments.iovecs().len() <= MAX_SEGMENTS * 3);
                    segments.truncate(sum / 2);
                    assert_eq!(segments.len(), sum / 2);
                    segments.advance(sum);
                    assert!(segments.is_empty() && segments.iovecs().is_empty());
                }
                Some(0)
            });
        }
    }
}
