//! Guest memory as a request's parts, for system calls and for copying.

use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemory, GuestMemoryError};

use super::Memory;

/// One direction of a chain: parts of guest memory, in order, none of them empty.
pub struct Segments {
    // Every part, and the reserved byte, lie in it: it keeps them mapped.
    pub(super) memory: Arc<Memory>,
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
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            parts: Vec::new(),
            first: 0,
            len: 0,
            reserved: None,
        }
    }

    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.first = 0;
        self.len = 0;
        self.reserved = None;
    }

    /// Adds `len` bytes at `address`, which may reach over more than one region of memory.
    pub(super) fn push(
        &mut self,
        address: GuestAddress,
        len: usize,
    ) -> Result<(), GuestMemoryError> {
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
