//! What a snapshot keeps of a share.
//!
//! The guest's nodes by their places, and its open files. A restored share finds them again by name below
//! its directory, which need not be the saved machine's. What is not there is stale for the guest; a template's
//! snapshot knows nothing but the root, and any directory will do.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtiofsd::fuse::{
    InHeader, InitInCompat, InitInExt, KERNEL_MINOR_VERSION, KERNEL_VERSION, Opcode, OutHeader,
};
use virtiofsd::server::Server;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError};

use super::super::Memory;
use super::handles::SavedHandle;
use super::nodes::SavedNode;
use super::request::Requests;
use super::share::Share;

/// What a snapshot keeps of a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareState {
    /// What the guest's kernel offered when it mounted the share (`FUSE_INIT`); zero if it had not.
    pub offered: u64,
    /// The inodes that the guest knows.
    pub nodes: Vec<SavedNode>,
    /// The files that it has open.
    pub handles: Vec<SavedHandle>,
}

/// A share that cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The numbers in the state contradict each other.
    #[error("The saved state of a share cannot be right")]
    State(#[source] Errno),
    /// The protocol code does not accept what it once did.
    #[error("The share cannot be mounted again as it was")]
    Mount,
    /// No memory to talk to the protocol code.
    #[error("Cannot set up the restore of a share")]
    Memory(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl ShareState {
    /// Of `share`, which nobody uses meanwhile.
    pub fn of(share: &Share) -> Self {
        Self {
            offered: share.offered().load(Ordering::Relaxed),
            nodes: share.nodes().save(),
            handles: share.handles().save(),
        }
    }

    /// Brings `share`, a new one, and the protocol code that serves it into this state.
    ///
    /// # Errors
    ///
    /// See [`RestoreError`].
    pub fn restore(&self, share: &Share, server: &Arc<Server<Share>>) -> Result<(), RestoreError> {
        if self.offered == 0 {
            return Ok(());
        }
        mount_again(server, self.offered)?;
        share
            .nodes()
            .restore(&self.nodes)
            .map_err(RestoreError::State)?;
        let open = |saved: &SavedHandle| {
            let reference = share.nodes().file(saved.node)?;
            share.reopen(&*reference, saved.flags & !(libc::O_TRUNC as u32))
        };
        share
            .handles()
            .restore(&self.handles, open)
            .map_err(RestoreError::State)
    }
}

/// Has `server` agree on the same features again: it keeps them to itself. There is one way to tell
/// it, a FUSE_INIT request, so this sends one, from a page of memory made for it.
fn mount_again(server: &Arc<Server<Share>>, offered: u64) -> Result<(), RestoreError> {
    const RINGS: u64 = 0;
    const REQUEST: u64 = 0x400;
    const REPLY: u64 = 0x800;
    let header = InHeader {
        len: (size_of::<InHeader>() + size_of::<InitInCompat>() + size_of::<InitInExt>()) as u32,
        opcode: Opcode::Init as u32,
        ..Default::default()
    };
    let init = InitInCompat {
        major: KERNEL_VERSION,
        minor: KERNEL_MINOR_VERSION,
        max_readahead: 0,
        flags: offered as u32,
    };
    let more = InitInExt {
        flags2: (offered >> 32) as u32,
        ..Default::default()
    };
    let request = [header.as_slice(), init.as_slice(), more.as_slice()].concat();
    let memory = Memory::from_ranges(&[(GuestAddress(0), 0x1000)])
        .map_err(|e| RestoreError::Memory(e.into()))?;
    let write = || -> Result<(), GuestMemoryError> {
        let request_part = Descriptor::new(REQUEST, request.len() as u32, 1, 1);
        let reply_part = Descriptor::new(REPLY, 0x800, 2, 0);
        memory.write_obj(RawDescriptor::from(request_part), GuestAddress(RINGS))?;
        memory.write_obj(RawDescriptor::from(reply_part), GuestAddress(RINGS + 16))?;
        memory.write_slice(&request, GuestAddress(REQUEST))?;
        // The available ring: one entry, descriptor 0.
        memory.write_obj(1u16, GuestAddress(RINGS + 0x102))
    };
    write().map_err(|e| RestoreError::Memory(e.into()))?;
    let mut queue = Queue::new(2).map_err(|e| RestoreError::Memory(e.into()))?;
    queue.set_desc_table_address(Some(RINGS as u32), None);
    queue.set_avail_ring_address(Some(RINGS as u32 + 0x100), None);
    queue.set_ready(true);
    let memory = Arc::new(memory);
    let chain = queue
        .iter(memory.clone())
        .map_err(|e| RestoreError::Memory(e.into()))?
        .next()
        .ok_or(RestoreError::Mount)?;
    let requests = Requests::new(server.clone(), memory.clone())
        .map_err(|e| RestoreError::Memory(e.into()))?;
    requests.serve(chain);
    let reply: OutHeader = memory
        .read_obj(GuestAddress(REPLY))
        .map_err(|e| RestoreError::Memory(e.into()))?;
    match (reply.len > 0, reply.error) {
        (true, 0) => Ok(()),
        _ => Err(RestoreError::Mount),
    }
}
