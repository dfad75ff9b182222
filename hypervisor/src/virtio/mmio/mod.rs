//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2).

mod state;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE as ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER as DRIVER,
    VIRTIO_CONFIG_S_DRIVER_OK as DRIVER_OK, VIRTIO_CONFIG_S_FAILED as FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK as FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET as NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueState, QueueT};

use super::{ActivateError, Activation, Interrupt, Memory, VirtioDevice};
pub use state::{MmioState, RestoreError};

/// The size of a device's register window, its configuration space included, in bytes.
pub const WINDOW_SIZE: u64 = 0x1000;
/// The register that a driver writes a queue's index to when it has made buffers available.
pub const QUEUE_NOTIFY: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// `virt` in little-endian ASCII.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// `CUBE` in little-endian ASCII. Linux shows it and does nothing with it.
const VENDOR: u32 = 0x4542_5543;
/// Where the device's own configuration space starts.
const CONFIG: u64 = VIRTIO_MMIO_CONFIG as u64;

/// The device as its transport, its event loop and its worker share it.
pub type SharedDevice = Arc<Mutex<dyn VirtioDevice>>;

/// A transport with its device.
pub struct MmioTransport {
    device: SharedDevice,
    memory: Memory,
    interrupt: Arc<Interrupt>,
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<Queue>,
}

impl MmioTransport {
    /// Puts a transport in front of `device`.
    ///
    /// # Errors
    ///
    /// The device names a queue size that is no power of two up to 32768.
    pub fn new(
        device: SharedDevice,
        memory: Memory,
        interrupt: Arc<Interrupt>,
    ) -> Result<Self, virtio_queue::Error> {
        let queues = fresh_queues(&*lock(&device))?;
        Ok(Self {
            device,
            memory,
            interrupt,
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues,
        })
    }

    /// Reads `data.len()` bytes at `offset` of the window. What is no register, or is not read as
    /// a driver must read it, is all ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return lock(&self.device).read_config(offset, data);
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(register) => *register = self.register(offset as u32).to_le_bytes(),
            Err(_) => data.fill(0xff),
        }
    }

    /// Writes `data` at `offset` of the window. What is no register, or is not written as a driver
    /// must write it, is ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return lock(&self.device).write_config(offset, data);
        }
        if let Ok(register) = <[u8; 4]>::try_from(data) {
            self.set_register(offset as u32, u32::from_le_bytes(register));
        }
    }

    fn is_active(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    fn register(&self, offset: u32) -> u32 {
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => lock(&self.device).device_type(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => {
                let features = lock(&self.device).offered_features();
                half(features, self.device_features_select)
            }
            VIRTIO_MMIO_QUEUE_NUM_MAX => self.queue().map_or(0, |q| q.max_size().into()),
            VIRTIO_MMIO_QUEUE_READY => self.queue().map_or(0, |q| q.ready().into()),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status(),
            VIRTIO_MMIO_STATUS => {
                let needs_reset = self.interrupt.needs_reset();
                self.status | if needs_reset { NEEDS_RESET } else { 0 }
            }
            VIRTIO_MMIO_CONFIG_GENERATION => self.interrupt.config_generation(),
            // No shared memory region, which a length of all ones says, and no register:
            _ => u32::MAX,
        }
    }

    fn set_register(&mut self, offset: u32, value: u32) {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.set_driver_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => self.notify(value),
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt.acknowledge(value),
            VIRTIO_MMIO_STATUS => self.set_status(value),
            VIRTIO_MMIO_QUEUE_NUM..=VIRTIO_MMIO_QUEUE_USED_HIGH => {
                self.set_queue_register(offset, value);
            }
            _ => {}
        }
    }

    /// The registers that describe the selected queue. They hold still once the queue is ready.
    fn set_queue_register(&mut self, offset: u32, value: u32) {
        // Section 3.1.1: queues are set up after the features are settled and before DRIVER_OK.
        if self.status & (FEATURES_OK | DRIVER_OK | FAILED) != FEATURES_OK {
            return;
        }
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return;
        };
        if offset == VIRTIO_MMIO_QUEUE_READY {
            return queue.set_ready(value == 1);
        }
        if queue.ready() {
            return;
        }
        match offset {
            // The queue ignores, and logs, a size that is too large or no power of two. A larger value than 16 bits hold is one.
            VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(u16::MAX)),
            VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn queue(&self) -> Option<&Queue> {
        self.queues.get(self.queue_select as usize)
    }

    fn set_driver_features(&mut self, value: u32) {
        if self.status & (DRIVER | FEATURES_OK) != DRIVER {
            return;
        }
        let value = u64::from(value);
        match self.driver_features_select {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | value,
            1 => self.driver_features = self.driver_features & 0xffff_ffff | value << 32,
            // Bits beyond 63 are never offered; the driver may set them to zero only.
            _ => {}
        }
    }

    /// The driver's way to DRIVER_OK (section 3.1.1), one bit after the other.
    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        // Section 2.1.1: the driver must not clear a bit. NEEDS_RESET is the device's.
        let known = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        let value = value & known;
        if self.status & !value != 0 || self.status & FAILED != 0 {
            return;
        }
        let new = value & !self.status;
        self.status |= new & (ACKNOWLEDGE | FAILED);
        if new & DRIVER != 0 && self.status & ACKNOWLEDGE != 0 {
            self.status |= DRIVER;
        }
        if new & FEATURES_OK != 0 && self.status & DRIVER != 0 && self.features_agree() {
            self.status |= FEATURES_OK;
        }
        if new & DRIVER_OK != 0 && self.status & (FEATURES_OK | FAILED) == FEATURES_OK {
            self.status |= DRIVER_OK;
            self.activate();
        }
    }

    fn features_agree(&self) -> bool {
        let offered = lock(&self.device).offered_features();
        self.driver_features & !offered == 0
            && self.driver_features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn activate(&mut self) {
        let activation = self.activation();
        let mut device = lock(&self.device);
        if let Err(e) = activation.and_then(|activation| device.activate(activation)) {
            log::error!("virtio device {}: {e}", device.device_type());
            self.interrupt.signal_needs_reset();
        }
    }

    /// The device gets queues of its own; those here stay as the driver set them up.
    fn activation(&self) -> Result<Activation, ActivateError> {
        let event_idx_enabled = self.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let copy = |(index, queue): (usize, &Queue)| {
            let state = QueueState {
                event_idx_enabled,
                ..queue.state()
            };
            Queue::try_from(state).map_err(|_| ActivateError::QueueInvalid(index))
        };
        Ok(Activation {
            memory: self.memory.clone(),
            queues: self
                .queues
                .iter()
                .enumerate()
                .map(copy)
                .collect::<Result<_, _>>()?,
            features: self.driver_features,
            interrupt: Arc::clone(&self.interrupt),
        })
    }

    fn reset(&mut self) {
        let under_way = {
            let mut device = lock(&self.device);
            device.reset();
            device.under_way()
        };
        // The host may take its time. Only the driver waits, not the device thread.
        if let Some(wait) = under_way {
            wait();
        }
        self.interrupt.restore(0, false);
        self.status = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        for queue in &mut self.queues {
            queue.reset();
        }
    }

    /// KVM takes notifications by ioeventfd. This is for what it does not take: nothing at all
    /// that a driver does by the book.
    fn notify(&self, queue: u32) {
        if let Some(event) = lock(&self.device).queue_events().get(queue as usize) {
            // Full means that the device is about to look.
            let _ = event.write(1);
        }
    }
}

fn fresh_queues(device: &dyn VirtioDevice) -> Result<Vec<Queue>, virtio_queue::Error> {
    device
        .queue_max_sizes()
        .iter()
        .map(|size| Queue::new(*size))
        .collect()
}

/// The 32 bits of `features` that a selector names.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// A device whose lock is poisoned has no invariant that the transport relies on.
fn lock<'a>(
    device: &'a Mutex<dyn VirtioDevice + 'static>,
) -> MutexGuard<'a, dyn VirtioDevice + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}
