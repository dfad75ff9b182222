//! The block device (virtio 1.2, section 5.2).
//!
//! A device without a disk is a spare slot: it has the capacity 0 until [`Block::attach`]
//! fills it, and again after [`Block::detach`]; the guest learns of both by a configuration interrupt. The disk's
//! worker starts with the first request for it, so a slot that is never filled costs no thread.
//!
//! The host may let a disk's requests, and its closing, wait for as long as it likes. So nothing that holds the
//! device's lock waits for them: the device thread, which serves the owner too, must not.

mod closing;
mod disk;
mod request;
mod worker;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use closing::Closing;
use disk::SECTOR;
pub use disk::{Disk, DiskError};
pub use request::ID_LEN;
use request::{MAX_RANGE_SECTORS, MAX_RANGES};
use worker::{Ring, Worker};

use super::queue::{Buffers, FEATURE_INDIRECT_DESC};
use super::queue_state::ActiveState;
use super::{
    ActivateError, Activation, COMMON_FEATURES, Interrupt, UnderWay, VirtioDevice, config_space,
};

/// The device type (virtio 1.2, section 5.2.1).
const TYPE_BLOCK: u32 = 2;

const QUEUE_SIZE: u16 = 128;
const QUEUE_SIZES: [u16; 1] = [QUEUE_SIZE];

/// The most parts of a request's data: the header and the status take two descriptors.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// The device.
pub struct Block {
    disk: Option<Arc<Disk>>,
    id: [u8; ID_LEN],
    kick: [EventFd; 1],
    /// Readable when the device thread has to take up the kick again.
    wake: Arc<EventFd>,
    /// Whether the kick is in the device thread's event loop, not in a worker's.
    watched: bool,
    active: Option<Active>,
    /// What a reset has left under way.
    under_way: Option<UnderWay>,
}

struct Active {
    features: u64,
    interrupt: Arc<Interrupt>,
    // A snapshot stops the worker through a shared reference.
    queue: Mutex<QueueOwner>,
}

/// Who has the queue.
enum QueueOwner {
    /// The device: nothing was asked for yet, or there is no disk, or the machine is paused.
    Device(Box<Ring>),
    Worker(Worker),
    /// The worker of a disk that was detached; it comes back when that one is closed.
    Closing(Closing),
    /// Nobody: the driver broke it, or the host has no thread left.
    Broken,
}

/// What a snapshot keeps of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// The driver's choices and queue, if the device was active.
    pub active: Option<ActiveState>,
    /// The serial number.
    pub serial: String,
    /// The disk's size in sectors of 512 bytes; `None` for a slot without one.
    pub sectors: Option<u64>,
}

/// Why a disk cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The slot has a disk.
    #[error("The slot has a disk already")]
    Occupied,
    /// The last one is not closed yet.
    #[error("The host has not closed the disk yet that was detached from the slot")]
    Closing,
}

/// Why no disk can be detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// The slot has none.
    #[error("The slot has no disk")]
    Empty,
    /// The host has no thread that waits for it.
    #[error("Cannot start a thread that closes the disk: it stays attached")]
    Host(#[source] io::Error),
}

/// Why a device cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The host refuses an eventfd.
    #[error("Cannot create an eventfd")]
    Host(#[from] io::Error),
    /// The disk is not the one that the guest knows.
    #[error("The disk has {found:?} sectors, in the snapshot it had {saved:?}")]
    OtherDisk {
        /// Its size in the snapshot.
        saved: Option<u64>,
        /// Its size now.
        found: Option<u64>,
    },
}

impl Block {
    /// A device with `disk`, or a spare slot, and the serial number `serial`, of which the first 20 bytes count.
    ///
    /// # Errors
    ///
    /// The host has no eventfd left.
    pub fn new(disk: Option<Disk>, serial: &str) -> io::Result<Self> {
        Ok(Self {
            disk: disk.map(Arc::new),
            id: id_of(serial),
            kick: [EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?],
            wake: Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?),
            watched: false,
            active: None,
            under_way: None,
        })
    }

    /// Fills a spare slot with a disk that has the serial number `serial`, of which the first 20 bytes count; the
    /// guest sees the new capacity at once. Linux looks at a disk's being read-only only when it finds the device: a
    /// guest that writes to a read-only disk in a spare slot gets errors.
    ///
    /// # Errors
    ///
    /// The slot is not spare, or the disk that was in it is not closed yet.
    pub fn attach(&mut self, disk: Disk, serial: &str) -> Result<(), AttachError> {
        if self.disk.is_some() {
            return Err(AttachError::Occupied);
        }
        self.take_back();
        if self.is_closing() {
            return Err(AttachError::Closing);
        }
        self.change(Some(Arc::new(disk)), serial);
        Ok(())
    }

    /// Makes the slot spare again: what the guest asks for from now on fails. The requests that the worker is at end
    /// first, then the disk is closed, and `closed` is called, both on another thread.
    ///
    /// # Errors
    ///
    /// The slot has no disk, or the host has no thread.
    pub fn detach(&mut self, closed: impl FnOnce() + Send + 'static) -> Result<(), DetachError> {
        let disk = self.disk.take().ok_or(DetachError::Empty)?;
        disk.on_close(Some(Box::new(closed)));
        let mut owner = self.active.as_ref().map(Active::owner);
        let worker = owner.as_mut().and_then(|owner| owner.take_worker());
        let has_worker = worker.is_some();
        match Closing::start(disk, worker, self.wake.clone()) {
            Ok(closing) => {
                if let (true, Some(owner)) = (has_worker, &mut owner) {
                    **owner = QueueOwner::Closing(closing);
                }
            }
            Err((disk, worker, error)) => {
                if let (Some(worker), Some(owner)) = (worker, &mut owner) {
                    **owner = QueueOwner::Worker(worker);
                }
                drop(owner);
                disk.on_close(None);
                self.disk = Some(disk);
                return Err(DetachError::Host(error));
            }
        }
        drop(owner);
        self.change(None, "");
        Ok(())
    }

    /// Takes the queue back if the disk that was detached is closed.
    fn take_back(&mut self) {
        let Some(active) = &self.active else { return };
        let mut owner = active.owner();
        let QueueOwner::Closing(closing) = &*owner else {
            return;
        };
        if let Some(ring) = closing.ended() {
            *owner = match ring {
                Some(mut ring) => {
                    ring.id = self.id;
                    ring.complained = false;
                    // What the guest asked for meanwhile is to be looked at.
                    let _ = self.kick[0].write(1);
                    QueueOwner::Device(ring)
                }
                None => QueueOwner::Broken,
            };
        }
    }

    fn is_closing(&self) -> bool {
        let active = self.active.as_ref();
        active.is_some_and(|active| matches!(*active.owner(), QueueOwner::Closing(_)))
    }

    /// No worker has the queue.
    fn change(&mut self, disk: Option<Arc<Disk>>, serial: &str) {
        self.disk = disk;
        self.id = id_of(serial);
        if let Some(active) = &self.active {
            if let QueueOwner::Device(ring) = &mut *active.owner() {
                ring.id = self.id;
                ring.complained = false;
            }
            active.interrupt.signal_config();
        }
    }

    /// For a snapshot; the worker has stopped on return and starts again with [`resume`](VirtioDevice::resume).
    pub fn save(&self) -> BlockState {
        let end = self.id.iter().position(|&byte| byte == 0);
        let serial = self.id.get(..end.unwrap_or(ID_LEN)).unwrap_or(&self.id);
        BlockState {
            active: self
                .active
                .as_ref()
                .and_then(|active| ActiveState::new(active.features, self.queue_states())),
            serial: String::from_utf8_lossy(serial).into_owned(),
            sectors: self.disk.as_ref().map(|disk| disk.sectors()),
        }
    }

    /// A device as it was, to be made active by [`ActiveState::activation`].
    ///
    /// # Errors
    ///
    /// The disk has another size than then.
    pub fn restore(state: &BlockState, disk: Option<Disk>) -> Result<Self, RestoreError> {
        let found = disk.as_ref().map(Disk::sectors);
        if found != state.sectors {
            return Err(RestoreError::OtherDisk {
                saved: state.sectors,
                found,
            });
        }
        Ok(Self::new(disk, &state.serial)?)
    }

    /// The configuration space (virtio 1.2, section 5.2.4) up to `write_zeroes_may_unmap` and its padding.
    fn config(&self) -> [u8; 60] {
        let sectors = self.disk.as_ref().map_or(0, |disk| disk.sectors());
        let mut space = [0; 60];
        let fields: [(usize, &[u8]); 8] = [
            (0, &sectors.to_le_bytes()),
            (12, &SEG_MAX.to_le_bytes()),
            (20, &self.block_size().to_le_bytes()),
            (36, &MAX_RANGE_SECTORS.to_le_bytes()),
            (40, &MAX_RANGES.to_le_bytes()),
            (44, &(self.block_size() / SECTOR as u32).to_le_bytes()),
            (48, &MAX_RANGE_SECTORS.to_le_bytes()),
            (52, &MAX_RANGES.to_le_bytes()),
        ];
        for (offset, bytes) in fields {
            for (to, from) in space.iter_mut().skip(offset).zip(bytes) {
                *to = *from;
            }
        }
        // write_zeroes_may_unmap
        space[56] = 1;
        space
    }

    fn block_size(&self) -> u32 {
        self.disk
            .as_ref()
            .map_or(SECTOR as u32, |disk| disk.block_size())
    }

    /// The guest has kicked: the queue goes to a worker, or is answered here if there is no disk.
    fn kicked(&mut self, ops: &mut EventOps<'_>) {
        let Some(active) = &mut self.active else {
            let _ = self.kick[0].read();
            return;
        };
        let owner = active
            .queue
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(owner, QueueOwner::Broken) {
            QueueOwner::Device(mut ring) => match &self.disk {
                Some(disk) => {
                    // From here on the kick is the worker's alone.
                    let _ = ops.remove(Events::new(&self.kick[0], EventSet::IN));
                    self.watched = false;
                    let started = self.kick[0]
                        .try_clone()
                        .and_then(|kick| Worker::start(ring, disk.clone(), kick));
                    match started {
                        Ok(worker) => *owner = QueueOwner::Worker(worker),
                        Err(error) => {
                            log::error!("Cannot start a disk's worker: {error}");
                            active.interrupt.signal_needs_reset();
                        }
                    }
                }
                None => {
                    let _ = self.kick[0].read();
                    match ring.serve(None) {
                        Ok(more) => {
                            if more {
                                let _ = self.kick[0].write(1);
                            }
                            *owner = QueueOwner::Device(ring);
                        }
                        Err(error) => {
                            log::warn!("The guest broke a spare disk's queue: {error}");
                            active.interrupt.signal_needs_reset();
                        }
                    }
                }
            },
            other => {
                let _ = self.kick[0].read();
                *owner = other;
            }
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let worker_has_it = self.active.as_ref().is_some_and(|active| {
            matches!(
                *active.owner(),
                QueueOwner::Worker(_) | QueueOwner::Closing(_)
            )
        });
        if self.watched || worker_has_it {
            return;
        }
        match ops.add(Events::new(&self.kick[0], EventSet::IN)) {
            Ok(()) => self.watched = true,
            Err(error) => log::error!("A disk is dead: cannot wait for the guest: {error:?}"),
        }
    }
}

fn id_of(serial: &str) -> [u8; ID_LEN] {
    let mut id = [0; ID_LEN];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    id
}

impl Active {
    fn owner(&self) -> MutexGuard<'_, QueueOwner> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the queue back from the worker, if one has it.
    fn stop_worker(&self) {
        let mut owner = self.owner();
        let ring = match std::mem::replace(&mut *owner, QueueOwner::Broken) {
            QueueOwner::Worker(worker) => worker.stop(),
            QueueOwner::Closing(closing) => closing.wait(),
            QueueOwner::Device(ring) => Some(ring),
            QueueOwner::Broken => None,
        };
        if let Some(ring) = ring {
            *owner = QueueOwner::Device(ring);
        }
    }
}

impl QueueOwner {
    /// The worker, if one has the queue, which is nobody's then.
    fn take_worker(&mut self) -> Option<Worker> {
        match std::mem::replace(self, Self::Broken) {
            Self::Worker(worker) => Some(worker),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl MutEventSubscriber for Block {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&*self.wake, EventSet::IN)) {
            log::error!("A disk is dead: cannot wait for events: {error:?}");
        }
        self.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.fd() == self.wake.as_raw_fd() {
            let _ = self.wake.read();
            self.take_back();
            self.watch(ops);
        } else {
            self.kicked(ops);
        }
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        TYPE_BLOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.kick
    }

    fn offered_features(&self) -> u64 {
        let common = COMMON_FEATURES
            | FEATURE_INDIRECT_DESC
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_FLUSH;
        match self.disk.as_ref().is_some_and(|disk| disk.read_only()) {
            true => common | 1 << VIRTIO_BLK_F_RO,
            false => common | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let accepted = activation.accept()?;
        let features = accepted.features;
        let [queue] = accepted.queues;
        self.active = Some(Active {
            features,
            interrupt: accepted.interrupt,
            queue: Mutex::new(QueueOwner::Device(Box::new(Ring {
                buffers: Buffers::new(accepted.memory),
                queue,
                id: self.id,
                write_through: features & 1 << VIRTIO_BLK_F_FLUSH == 0,
                complained: false,
            }))),
        });
        Ok(())
    }

    fn reset(&mut self) {
        if let Some(active) = self.active.take() {
            let owner = active.queue.into_inner();
            self.under_way = match owner.unwrap_or_else(PoisonError::into_inner) {
                QueueOwner::Worker(worker) => {
                    worker.ask_to_stop();
                    Some(Box::new(|| drop(worker.stop())))
                }
                QueueOwner::Closing(closing) => Some(Box::new(|| drop(closing.wait()))),
                QueueOwner::Device(_) | QueueOwner::Broken => None,
            };
        }
        let _ = self.wake.write(1);
    }

    fn under_way(&mut self) -> Option<UnderWay> {
        self.under_way.take()
    }

    fn queue_states(&self) -> Vec<QueueState> {
        let Some(active) = &self.active else {
            return Vec::new();
        };
        active.stop_worker();
        match &*active.owner() {
            QueueOwner::Device(ring) => vec![ring.queue.state()],
            QueueOwner::Worker(_) | QueueOwner::Closing(_) | QueueOwner::Broken => Vec::new(),
        }
    }

    fn resume(&mut self) {
        let _ = self.wake.write(1);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(active) = &self.active {
            active.stop_worker();
        }
    }
}

#[cfg(test)]
mod tests;
