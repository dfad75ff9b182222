//! The guest's receive buffers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::{io, ptr};

use super::packet::{HEADER_SIZE, Header};
use super::socket;
use crate::virtio::Memory;
use crate::virtio::queue::{Buffers, DeviceQueue, QueueError};

/// The most parts of guest memory that one read fills; what goes beyond is left empty.
const MAX_PARTS: usize = 64;

/// Buffers that are filled together, in order.
pub struct RxBatch {
    memory: Arc<Memory>,
    // The first `loaded` are in use; the others keep their allocations.
    chains: Vec<Chain>,
    loaded: usize,
    room: usize,
}

/// What a read put into the buffers.
pub struct Filled {
    /// Bytes; 0 at the end of the stream.
    pub count: usize,
    /// Whether the socket had no more than that.
    pub drained: bool,
}

struct Chain {
    head: u16,
    buffers: Buffers,
    // Bytes of data that fit behind the header.
    room: usize,
}

impl RxBatch {
    /// An empty one.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            chains: Vec::new(),
            loaded: 0,
            room: 0,
        }
    }

    /// Drops what is loaded and takes the next buffer of `rx` that a header fits into; the others
    /// go back empty. `false` when there is none now.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn load_first(&mut self, rx: &mut DeviceQueue) -> Result<bool, QueueError> {
        self.loaded = 0;
        self.room = 0;
        // No more than a queue of them: the driver may add new ones all the time.
        for _ in 0..rx.size() {
            if self.load_another(rx)? {
                return Ok(true);
            }
            match rx.pop()? {
                Some(chain) => rx.add_used(chain.head_index(), 0)?,
                None => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Takes one buffer more. `false` when there is none now or, if it is not the first, no data fits
    /// into it; likewise for the first if no header does.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn load_another(&mut self, rx: &mut DeviceQueue) -> Result<bool, QueueError> {
        if self.loaded == self.chains.len() {
            self.chains.push(Chain {
                head: 0,
                buffers: Buffers::new(self.memory.clone()),
                room: 0,
            });
        }
        let Some(chain) = self.chains.get_mut(self.loaded) else {
            return Ok(false);
        };
        let Some(head) = rx.pop_into(&mut chain.buffers)? else {
            return Ok(false);
        };
        match chain.buffers.writable.len().checked_sub(HEADER_SIZE) {
            Some(room) if room > 0 || self.loaded == 0 => {
                chain.head = head;
                chain.room = room;
                self.loaded += 1;
                self.room += room;
                Ok(true)
            }
            _ => {
                rx.undo_pop();
                Ok(false)
            }
        }
    }

    /// Buffers loaded.
    pub fn count(&self) -> usize {
        self.loaded
    }

    /// Bytes of data that fit in.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Reads up to `limit` bytes from `socket` to where data stands in the buffers.
    ///
    /// # Errors
    ///
    /// See [`socket::receive`].
    pub fn receive(&self, socket: BorrowedFd<'_>, limit: usize) -> io::Result<Filled> {
        let mut parts = [libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        }; MAX_PARTS];
        let mut used = 0;
        let mut left = limit;
        'all: for chain in self.chains.iter().take(self.loaded) {
            let mut header_left = HEADER_SIZE;
            for part in chain.buffers.writable.iovecs() {
                let skip = header_left.min(part.iov_len);
                header_left -= skip;
                let len = (part.iov_len - skip).min(left);
                if len == 0 {
                    continue;
                }
                let Some(slot) = parts.get_mut(used) else {
                    break 'all;
                };
                slot.iov_base = part.iov_base.cast::<u8>().wrapping_add(skip).cast();
                slot.iov_len = len;
                used += 1;
                left -= len;
            }
        }
        // SAFETY: each part lies in one of the writable parts of a chain, which is guest memory that
        // the chain's buffers keep mapped.
        let received = unsafe { socket::receive(socket, &mut parts[..used]) }?;
        let filled = received.count == limit - left;
        Ok(Filled {
            count: received.count,
            drained: !filled && !received.stopped_at_descriptors,
        })
    }

    /// Hands the first buffer back empty: it has no room for data.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn hand_back(&mut self, rx: &mut DeviceQueue) -> Result<(), QueueError> {
        match self.chains.first() {
            Some(chain) if self.loaded > 0 => rx.add_used(chain.head, 0)?,
            _ => {}
        }
        self.loaded = 0;
        Ok(())
    }

    /// Hands a packet without data over in the first buffer.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn hand_over_header(
        &mut self,
        rx: &mut DeviceQueue,
        header: Header,
    ) -> Result<(), QueueError> {
        if let Some(chain) = self
            .chains
            .get_mut(..self.loaded)
            .and_then(|c| c.first_mut())
        {
            chain.buffers.writable.write(&header.to_bytes());
            rx.add_used(chain.head, HEADER_SIZE as u32)?;
        }
        self.loaded = 0;
        Ok(())
    }

    /// Hands `count` bytes over that [`receive`](Self::receive) put in place, each buffer as a packet
    /// with `header`, and puts the buffers back that stayed empty.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn hand_over(
        &mut self,
        rx: &mut DeviceQueue,
        header: Header,
        count: usize,
    ) -> Result<(), QueueError> {
        let mut left = count;
        for chain in self.chains.iter_mut().take(self.loaded) {
            if left == 0 {
                rx.undo_pop();
                continue;
            }
            let len = chain.room.min(left) as u32;
            left -= len as usize;
            let header = Header { len, ..header };
            chain.buffers.writable.write(&header.to_bytes());
            rx.add_used(chain.head, HEADER_SIZE as u32 + len)?;
        }
        self.loaded = 0;
        Ok(())
    }

    /// Puts all buffers back.
    pub fn put_back(&mut self, rx: &mut DeviceQueue) {
        for _ in 0..self.loaded {
            rx.undo_pop();
        }
        self.loaded = 0;
    }
}
