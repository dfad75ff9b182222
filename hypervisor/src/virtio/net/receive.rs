//! Receiving: one packet of the host goes straight into one or more chains of the guest.
//!
//! The size of a packet is known only when it is there. So chains are loaded ahead until they hold the
//! largest one, the packet is read into all of them at once, and those that it did not reach wait for the next.

use std::collections::VecDeque;
use std::io;

use virtio_queue::QueueState;

use super::tap::{HEADER, Tap};
use crate::virtio::queue::{Buffers, DeviceQueue, MAX_SEGMENTS, QueueError};

/// The largest packet that a TAP gives: an IPv6 packet of 65535 bytes behind its fixed header, an Ethernet header with
/// a VLAN tag, and the virtio header.
const LARGEST: usize = 65535 + 40 + 18 + HEADER;

/// Where `num_buffers` lies in the header (virtio 1.2, section 5.1.6).
const NUM_BUFFERS: usize = 10;

/// The receive queue.
pub struct Receiver {
    queue: DeviceQueue,
    buffers: Buffers,
    /// The chains in `buffers`: head and length.
    chains: VecDeque<(u16, usize)>,
    /// Whether a packet may lie in several chains (`VIRTIO_NET_F_MRG_RXBUF`).
    mergeable: bool,
}

/// Why receiving stopped.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// The host has no packet: it will tell.
    Empty,
    /// The guest has no buffer: it will kick.
    NoBuffers,
    /// Enough for now.
    Budget,
}

/// What went wrong while receiving.
pub enum Failure {
    /// The driver broke the queue.
    Queue(QueueError),
    /// The TAP is gone.
    Tap(io::Error),
}

impl From<QueueError> for Failure {
    fn from(error: QueueError) -> Self {
        Self::Queue(error)
    }
}

impl Receiver {
    /// Receives into `queue`.
    pub fn new(queue: DeviceQueue, mergeable: bool) -> Self {
        Self {
            buffers: Buffers::new(queue.memory().clone()),
            queue,
            chains: VecDeque::new(),
            mergeable,
        }
    }

    /// Receives up to `budget` packets from `tap`; one interrupt for all.
    pub fn receive(&mut self, tap: &Tap, budget: usize) -> Result<Stop, Failure> {
        let result = self.receive_all(tap, budget);
        self.queue.notify()?;
        result
    }

    fn receive_all(&mut self, tap: &Tap, budget: usize) -> Result<Stop, Failure> {
        for _ in 0..budget {
            if !self.load()? {
                return Ok(Stop::NoBuffers);
            }
            match tap.receive(&self.buffers.writable) {
                Ok(0) => return Err(Failure::Tap(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.hand_over(len)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Stop::Empty),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Failure::Tap(e)),
            }
        }
        Ok(Stop::Budget)
    }

    /// Loads chains until they hold any packet. `false` if there are too few; the guest kicks when it adds one.
    fn load(&mut self) -> Result<bool, QueueError> {
        loop {
            let enough = match self.mergeable {
                // A guest whose whole queue is smaller gets packets that are cut off, which is better than none.
                true => {
                    self.buffers.writable.len() >= LARGEST
                        || self.buffers.writable.iovecs().len() >= MAX_SEGMENTS
                        || self.chains.len() >= usize::from(self.queue.size())
                }
                false => !self.chains.is_empty(),
            };
            if enough {
                return Ok(true);
            }
            match self.queue.pop_behind(&mut self.buffers)? {
                // It holds nothing; the driver may have it back.
                Some((head, 0)) => {
                    self.queue.add_used(head, 0)?;
                }
                Some(chain) => self.chains.push_back(chain),
                None if !self.queue.enable_notification()? => return Ok(false),
                None => self.queue.disable_notification()?,
            }
        }
    }

    /// Hands the chains over that a packet of `len` bytes, with its header, lies in.
    fn hand_over(&mut self, len: usize) -> Result<(), QueueError> {
        let mut left = len;
        let mut count = 0u16;
        let mut bytes = 0;
        for &(_, room) in &self.chains {
            count = count.saturating_add(1);
            bytes += room;
            left = left.saturating_sub(room);
            if left == 0 {
                break;
            }
        }
        // Without merging it is always 1; a chain too short for a header has nothing that could be told.
        self.buffers
            .writable
            .write_at(NUM_BUFFERS, &count.to_le_bytes());
        let mut left = len;
        let chains = self
            .chains
            .drain(..usize::from(count).min(self.chains.len()));
        self.queue.add_used_together(chains.map(|(head, room)| {
            let written = left.min(room);
            left -= written;
            (head, u32::try_from(written).unwrap_or(u32::MAX))
        }))?;
        self.buffers.writable.advance(bytes);
        self.buffers.writable.compact();
        Ok(())
    }

    /// For a snapshot: chains that are loaded count as not taken.
    pub fn state(&self) -> QueueState {
        let mut state = self.queue.state();
        let loaded = u16::try_from(self.chains.len()).unwrap_or(u16::MAX);
        state.next_avail = state.next_avail.wrapping_sub(loaded);
        state
    }
}
