//! The virtio devices and what carries them.
//!
//! A device model is a [`VirtioDevice`]: it knows its queues and its configuration space, and not
//! how the guest reaches them. A transport (`mmio`) does that: it negotiates features, collects the queues'
//! addresses and hands them over in [`VirtioDevice::activate`].
//!
//! Threads: vCPU threads call everything of [`VirtioDevice`] through the transport, with the
//! device locked; the one device thread calls [`MutEventSubscriber::process`] when a queue's
//! eventfd, or a backend's descriptor, becomes ready. A device that may block on the host has a
//! worker of its own instead.

pub mod block;
pub mod config_space;
pub mod console;
pub mod fs;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod queue_state;
pub mod rng;
mod served;
#[cfg(test)]
mod testing;
pub mod vsock;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use event_manager::MutEventSubscriber;
use virtio_queue::{Queue, QueueState};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use queue::{FEATURE_EVENT_IDX, FEATURE_VERSION_1};

/// The guest's memory, as every device sees it.
pub type Memory = GuestMemoryMmap<()>;

/// The feature bits of every device here.
pub const COMMON_FEATURES: u64 = FEATURE_VERSION_1 | FEATURE_EVENT_IDX;

/// A virtio device, without its transport.
pub trait VirtioDevice: MutEventSubscriber + Send {
    /// The device type (virtio 1.2, section 5: 1 network, 2 block, 3 console, 4 entropy, 19 socket, 26 file system).
    fn device_type(&self) -> u32;

    /// The most elements of each queue, which is also how many queues there are.
    fn queue_max_sizes(&self) -> &[u16];

    /// One eventfd for each queue, made with the device: the guest's notification of a queue
    /// makes it readable. A device gets such notifications before it is active as well, and ignores them.
    fn queue_events(&self) -> &[EventFd];

    /// The feature bits that the device offers, those that all devices have ([`COMMON_FEATURES`]) among them.
    fn offered_features(&self) -> u64 {
        COMMON_FEATURES
    }

    /// Reads the configuration space. What lies beyond its end reads as zero. None, unless the device says otherwise.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&[], offset, data);
    }

    /// Writes the configuration space. Writes to where nothing is writable are ignored: all, unless the device
    /// says otherwise.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver is ready (`DRIVER_OK`): take the queues over. The queues that the driver did not
    /// set up have `ready() == false`; the others' addresses are not checked beyond their alignment.
    ///
    /// # Errors
    ///
    /// One line for the log. The transport then sets `DEVICE_NEEDS_RESET`.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// The driver resets the device: give up queues and requests. Backends stay.
    fn reset(&mut self);

    /// What the reset has left under way and the driver has to wait for, since it would write to memory that the
    /// guest uses otherwise by then. Waited for without the device's lock.
    fn under_way(&mut self) -> Option<UnderWay> {
        None
    }

    /// The queues' present state, for a snapshot; empty while the device is not active. The
    /// machine is paused, and a device with a worker of its own has it paused on return.
    fn queue_states(&self) -> Vec<QueueState>;

    /// The machine goes on after [`queue_states`](Self::queue_states): a worker that was paused may start again.
    fn resume(&mut self) {}
}

/// Waits for requests that are under way.
pub type UnderWay = Box<dyn FnOnce() + Send>;

/// What an active device works with.
pub struct Activation {
    /// The guest's memory.
    pub memory: Memory,
    /// The queues, as many as [`VirtioDevice::queue_max_sizes`] names.
    pub queues: Vec<Queue>,
    /// The feature bits that both sides agreed on.
    pub features: u64,
    /// How to tell the driver that something happened.
    pub interrupt: Arc<Interrupt>,
}

/// Why a device cannot become active.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver did not set up a queue that the device cannot do without.
    #[error("The driver did not set up queue {0}")]
    QueueMissing(usize),
    /// A queue's rings do not lie in guest memory.
    #[error("The rings of queue {0} lie outside of guest memory or are misaligned")]
    QueueInvalid(usize),
    /// The host refused what the device needs.
    #[error("Cannot start the device's worker")]
    Host(#[source] std::io::Error),
    /// The device's backend cannot do what both sides agreed on.
    #[error("The device's backend on the host refuses what the driver accepted")]
    Backend(#[source] std::io::Error),
}

/// The device's interrupt line and what the driver reads to learn its cause
/// (virtio 1.2, section 4.2.2, `InterruptStatus`).
pub struct Interrupt {
    status: AtomicU32,
    needs_reset: AtomicBool,
    config_generation: AtomicU32,
    line: EventFd,
}

/// `InterruptStatus`: the device used a buffer of at least one queue.
pub const INTERRUPT_USED_RING: u32 = 1;
/// `InterruptStatus`: the configuration or the device status changed.
pub const INTERRUPT_CONFIG: u32 = 2;

impl Interrupt {
    /// An interrupt that makes `line` (an irqfd) readable.
    pub fn new(line: EventFd) -> Self {
        Self {
            status: AtomicU32::new(0),
            needs_reset: AtomicBool::new(false),
            config_generation: AtomicU32::new(0),
            line,
        }
    }

    /// The device used buffers of a queue.
    pub fn signal_used(&self) {
        self.signal(INTERRUPT_USED_RING);
    }

    /// The configuration space changed. To be called before the lock on the device, under which
    /// it changed, is given up: a driver that reads it in parts then sees a new generation.
    pub fn signal_config(&self) {
        self.config_generation.fetch_add(1, Ordering::AcqRel);
        self.signal(INTERRUPT_CONFIG);
    }

    /// The driver broke the rules in a way that the device cannot go on from
    /// (virtio 1.2, section 2.1.2): it must reset the device.
    pub fn signal_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.signal(INTERRUPT_CONFIG);
    }

    /// The pending causes, a mask of `INTERRUPT_*`.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// The driver has seen these causes.
    pub fn acknowledge(&self, causes: u32) {
        self.status.fetch_and(!causes, Ordering::AcqRel);
    }

    /// Whether `DEVICE_NEEDS_RESET` is to be read from the device status.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Back to the state after power-on, when the driver has reset the device; also how a
    /// snapshot's causes are put back.
    pub fn restore(&self, causes: u32, needs_reset: bool) {
        self.status.store(causes, Ordering::Release);
        self.needs_reset.store(needs_reset, Ordering::Release);
    }

    /// How often the configuration space has changed (virtio 1.2, section 4.2.2, `ConfigGeneration`).
    pub fn config_generation(&self) -> u32 {
        self.config_generation.load(Ordering::Acquire)
    }

    /// Puts a snapshot's generation back.
    pub fn restore_config_generation(&self, generation: u32) {
        self.config_generation.store(generation, Ordering::Release);
    }

    /// The irqfd.
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    fn signal(&self, cause: u32) {
        self.status.fetch_or(cause, Ordering::AcqRel);
        // An eventfd's write fails only when its counter is full: the interrupt is pending then.
        let _ = self.line.write(1);
    }
}
