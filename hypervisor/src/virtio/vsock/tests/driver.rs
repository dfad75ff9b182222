//! The driver's side of a split queue, with `VIRTIO_F_EVENT_IDX`.

use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::virtio::Memory;

/// Descriptors that one buffer may have.
const PARTS: u16 = 4;

/// A queue of fixed buffers, `size / 4` of them.
pub struct Ring {
    base: u64,
    size: u16,
    buffers: u64,
    buffer_size: u64,
    next_avail: u16,
    kicked: u16,
    next_used: u16,
    free: Vec<u16>,
}

impl Ring {
    pub fn new(memory: &Memory, base: u64, size: u16, buffers: u64, buffer_size: u64) -> Self {
        memory
            .write_slice(&[0; 0x4000], GuestAddress(base))
            .unwrap();
        Self {
            base,
            size,
            buffers,
            buffer_size,
            next_avail: 0,
            kicked: 0,
            next_used: 0,
            free: (0..size / PARTS).rev().collect(),
        }
    }

    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.set_desc_table_address(Some(self.base as u32), None);
        queue.set_avail_ring_address(Some(self.avail() as u32), None);
        queue.set_used_ring_address(Some(self.used() as u32), None);
        queue.set_ready(true);
        queue
    }

    fn avail(&self) -> u64 {
        self.base + 0x1000
    }

    fn used(&self) -> u64 {
        self.base + 0x2000
    }

    fn buffer(&self, slot: u16) -> u64 {
        self.buffers + u64::from(slot) * self.buffer_size
    }

    pub fn free_slot(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// A free buffer; what the device is done with is free.
    pub fn free_slot_or_reap(&mut self, memory: &Memory) -> Option<u16> {
        while self.take(memory).is_some() {}
        self.free.last().copied()
    }

    pub fn fill(&mut self, memory: &Memory, slot: u16, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.buffer_size);
        memory
            .write_slice(bytes, GuestAddress(self.buffer(slot)))
            .unwrap();
    }

    /// Makes a buffer available: offset, length and whether the device writes, for each part.
    pub fn offer(&mut self, memory: &Memory, slot: u16, parts: &[(u64, u32, bool)]) {
        self.free.retain(|&other| other != slot);
        let head = slot * PARTS;
        for (index, &(offset, len, write)) in (0..).zip(parts) {
            let last = usize::from(index) + 1 == parts.len();
            let next = if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            let write = if write { VRING_DESC_F_WRITE as u16 } else { 0 };
            self.set_descriptor(
                memory,
                head + index,
                (
                    self.buffer(slot) + offset,
                    len,
                    next | write,
                    head + index + 1,
                ),
            );
        }
        self.make_available(memory, head);
    }

    pub fn set_descriptor(
        &self,
        memory: &Memory,
        index: u16,
        (address, len, flags, next): (u64, u32, u16, u16),
    ) {
        let descriptor = RawDescriptor::from(Descriptor::new(address, len, flags, next));
        let address = self.base + u64::from(index) * 16;
        memory.write_obj(descriptor, GuestAddress(address)).unwrap();
    }

    pub fn make_available(&mut self, memory: &Memory, head: u16) {
        let entry = self.avail() + 4 + 2 * u64::from(self.next_avail % self.size);
        memory.write_obj(head, GuestAddress(entry)).unwrap();
        self.next_avail = self.next_avail.wrapping_add(1);
        self.set_avail_idx(memory, self.next_avail);
    }

    pub fn set_avail_idx(&self, memory: &Memory, index: u16) {
        memory
            .write_obj(index, GuestAddress(self.avail() + 2))
            .unwrap();
    }

    /// Whether the device wants to hear of what was made available since the last call
    /// (virtio 1.2, section 2.7.10).
    pub fn must_kick(&mut self, memory: &Memory) -> bool {
        let address = self.used() + 4 + 8 * u64::from(self.size);
        let event: u16 = memory.read_obj(GuestAddress(address)).unwrap();
        let added = self.next_avail.wrapping_sub(self.kicked);
        let kick = self.next_avail.wrapping_sub(event).wrapping_sub(1) < added;
        self.kicked = self.next_avail;
        kick
    }

    pub fn used_idx(&self, memory: &Memory) -> u16 {
        memory.read_obj(GuestAddress(self.used() + 2)).unwrap()
    }

    pub fn has_news(&self, memory: &Memory) -> bool {
        self.used_idx(memory) != self.next_used
    }

    /// The next buffer that the device is done with, and what it wrote; the buffer is free then.
    pub fn take(&mut self, memory: &Memory) -> Option<(u16, Vec<u8>)> {
        if !self.has_news(memory) {
            return None;
        }
        let entry = self.used() + 4 + 8 * u64::from(self.next_used % self.size);
        let [head, len]: [u32; 2] = memory.read_obj(GuestAddress(entry)).unwrap();
        self.next_used = self.next_used.wrapping_add(1);
        // `used_event`: tell of the next one.
        let address = self.avail() + 4 + 2 * u64::from(self.size);
        memory
            .write_obj(self.next_used, GuestAddress(address))
            .unwrap();
        let slot = head as u16 / PARTS;
        let mut bytes = vec![0; len as usize];
        memory
            .read_slice(&mut bytes, GuestAddress(self.buffer(slot)))
            .unwrap();
        self.free.push(slot);
        Some((slot, bytes))
    }
}
