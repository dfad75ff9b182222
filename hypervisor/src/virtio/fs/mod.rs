//! virtio-fs: directories of the host, shared with the guest (virtio 1.2, section 5.11).
//!
//! The whole file server is in this process, so guest memory need not be shared with another one. From
//! the guest's side inwards:
//! - [`Fs`] is the device, [`workers`] the threads that take requests off its queues;
//! - [`request`] makes FUSE messages of descriptor chains, with virtiofsd's protocol code;
//! - [`share`] carries them out, [`nodes`] and [`handles`] know the guest's inodes and open files;
//! - [`policy`] says for how long the guest may believe what it is told, [`credentials`] on whose behalf a
//!   thread acts, [`descriptors`] how many files may be open, [`state`] what a snapshot keeps.
//!
//! Locks (POSIX and `flock`) stay in the guest: nobody else uses the share while it does, or cares for locks.

mod credentials;
mod descriptors;
#[cfg(test)]
mod fake_guest;
mod handles;
mod identity;
mod nodes;
mod policy;
mod request;
mod share;
mod state;
#[cfg(test)]
mod tests;
mod workers;

use std::io;
use std::sync::Arc;

use cube_hypervisor_api::config::ShareConfig;
use event_manager::{EventOps, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;
use virtiofsd::server::Server;
use vmm_sys_util::eventfd::EventFd;

use super::config_space;
use super::queue_state::ActiveState;
use super::{ActivateError, Activation, VirtioDevice};
use descriptors::Budget;
use nodes::Limits;
use request::Requests;
pub use share::OnCrowd;
use share::{Access, Share};
pub use state::{RestoreError, ShareState};
use workers::Workers;

/// The device type (virtio 1.2, section 5.11.1).
const TYPE_FILE_SYSTEM: u32 = 26;
/// The high-priority queue, and one for requests: Linux's driver has used no more until 6.10. The latter is long
/// enough for a request of 1 MiB in pages, twice over less headers.
const QUEUE_SIZES: [u16; 2] = [128, 512];
/// The length of a tag in the configuration space.
const TAG_LENGTH: usize = 36;
/// `struct virtio_fs_config`: the tag, and the number of request queues.
const CONFIG_LENGTH: usize = TAG_LENGTH + 4;

/// The number of inodes of a share from which on the guest is asked to forget some ([`OnCrowd`]), and gets no
/// more of them unasked. Each takes some 200 bytes here.
pub const FORGET_THRESHOLD: usize = 50_000;
/// What the guest's kernel needs at least to remember an inode, in bytes: more nodes than fit into its memory it
/// cannot honestly know.
const BYTES_PER_INODE: u64 = 1024;

/// A share that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// The tag does not fit.
    #[error("The tag {0:?} of a share must have 1 to {TAG_LENGTH} bytes")]
    Tag(String),
    /// The directory cannot be opened.
    #[error("Cannot share the directory {path:?}: it must exist and be readable")]
    Directory {
        /// The directory.
        path: std::path::PathBuf,
        /// Why not.
        #[source]
        cause: io::Error,
    },
    /// An entry of `guest_owned` is no name.
    #[error("{0:?} in guest_owned of a share must be the name of a directory, without slashes")]
    GuestOwned(String),
    /// The host has no eventfd left.
    #[error("Cannot make the eventfd of a share")]
    EventFd(#[source] io::Error),
    /// The snapshot is of another share.
    #[error("The snapshot is of a share with the tag {saved:?}, and this one is {configured:?}")]
    OtherTag {
        /// In the snapshot.
        saved: String,
        /// In the configuration.
        configured: String,
    },
    /// The snapshot's state cannot be put back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

/// What a snapshot keeps of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsState {
    /// The name by which the guest mounts it.
    pub tag: String,
    /// What the guest knows of the directory.
    pub share: ShareState,
    /// The driver's choices and queues, if the device was active.
    pub active: Option<ActiveState>,
}

/// A virtio-fs device.
pub struct Fs {
    tag: String,
    config: [u8; CONFIG_LENGTH],
    share: Share,
    server: Arc<Server<Share>>,
    features: u64,
    /// Both are the same eventfd, so one worker can wait for either queue.
    kicks: [EventFd; 2],
    workers: Option<Workers>,
}

impl Fs {
    /// A device for `config`. `guest_memory` is the most memory that the guest can have, in bytes. `on_crowd` is called
    /// by a worker, with the number of inodes, when the guest holds very many.
    ///
    /// # Errors
    ///
    /// The configuration cannot be used, see [`FsError`].
    pub fn new(
        config: &ShareConfig,
        guest_memory: u64,
        on_crowd: OnCrowd,
    ) -> Result<Self, FsError> {
        let most = usize::try_from(guest_memory / BYTES_PER_INODE).unwrap_or(usize::MAX);
        let limits = Limits {
            nodes: most.max(1024),
            crowd: FORGET_THRESHOLD,
            budget: Budget::of_process(),
        };
        Self::with_limits(config, limits, on_crowd)
    }

    fn with_limits(
        config: &ShareConfig,
        limits: Limits,
        on_crowd: OnCrowd,
    ) -> Result<Self, FsError> {
        let tag = config.tag.clone();
        if tag.is_empty() || tag.len() > TAG_LENGTH || tag.contains('\0') {
            return Err(FsError::Tag(tag));
        }
        let is_name = |name: &&String| {
            !name.is_empty() && !name.contains(['/', '\0']) && *name != "." && *name != ".."
        };
        if let Some(wrong) = config.guest_owned.iter().find(|name| !is_name(name)) {
            return Err(FsError::GuestOwned(wrong.clone()));
        }
        let wrong_directory = |cause| FsError::Directory {
            path: config.path.clone(),
            cause,
        };
        let root = share::open_root(&config.path, limits.budget).map_err(wrong_directory)?;
        let access = match (config.read_only, config.mounts_only) {
            (true, _) => Access::ReadOnly,
            (false, true) => Access::MountsOnly,
            (false, false) => Access::Full,
        };
        let share = Share::new(root, access, config.guest_owned.clone(), limits, on_crowd)
            .map_err(wrong_directory)?;
        // Blocking: a worker waits by reading.
        let kick = EventFd::new(libc::EFD_CLOEXEC).map_err(FsError::EventFd)?;
        let other = kick.try_clone().map_err(FsError::EventFd)?;
        let mut space = [0; CONFIG_LENGTH];
        space[..tag.len()].copy_from_slice(tag.as_bytes());
        space[TAG_LENGTH..].copy_from_slice(&1u32.to_le_bytes());
        Ok(Self {
            tag,
            config: space,
            server: Arc::new(Server::new(share.clone())),
            share,
            features: 0,
            kicks: [kick, other],
            workers: None,
        })
    }

    /// A device in `state`, to be activated with `state.active`. The directory may be another one; see [`ShareState`].
    ///
    /// # Errors
    ///
    /// The configuration cannot be used, or the state does not fit it.
    pub fn restore(
        config: &ShareConfig,
        guest_memory: u64,
        on_crowd: OnCrowd,
        state: &FsState,
    ) -> Result<Self, FsError> {
        if state.tag != config.tag {
            return Err(FsError::OtherTag {
                saved: state.tag.clone(),
                configured: config.tag.clone(),
            });
        }
        let device = Self::new(config, guest_memory, on_crowd)?;
        state.share.restore(&device.share, &device.server)?;
        Ok(device)
    }

    /// For a snapshot. Waits for requests that are under way; the driver does not run meanwhile.
    pub fn save(&self) -> FsState {
        let queues = self.queue_states();
        FsState {
            tag: self.tag.clone(),
            share: ShareState::of(&self.share),
            active: ActiveState::new(self.features, queues),
        }
    }

    /// The name by which the guest mounts it.
    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl MutEventSubscriber for Fs {
    // The workers wait for the queues themselves.
    fn process(&mut self, _: Events, _: &mut EventOps) {}

    fn init(&mut self, _: &mut EventOps) {}
}

impl VirtioDevice for Fs {
    fn device_type(&self) -> u32 {
        TYPE_FILE_SYSTEM
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.kicks
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.reset();
        let accepted = activation.accept::<2>()?;
        let requests = Requests::new(self.server.clone(), accepted.memory)
            .map_err(|e| ActivateError::Host(io::Error::other(e)))?;
        let kick = self.kicks[0].try_clone().map_err(ActivateError::Host)?;
        // Requests that wait already, after a restore, are looked at without a kick.
        let workers = Workers::start(self.tag.clone(), accepted.queues, kick, requests);
        self.workers = Some(workers.map_err(ActivateError::Host)?);
        self.features = accepted.features;
        Ok(())
    }

    fn reset(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.stop();
            self.server.destroy();
        }
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.workers
            .as_ref()
            .map(Workers::settle)
            .unwrap_or_default()
    }
}
