//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE as ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER as DRIVER,
    VIRTIO_CONFIG_S_DRIVER_OK as DRIVER_OK, VIRTIO_CONFIG_S_FAILED as FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK as FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET as NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueState, QueueT};

use super::queue_state::SavedQueue;
use super::{ActivateError, Activation, Interrupt, Memory, VirtioDevice};
use crate::memory::use_pages_of_hosts_choice;

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

/// What a snapshot keeps of a transport. The device keeps its own state, and once it is active
/// that of the queues' rings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmioState {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<SavedQueue>,
    interrupt_status: u32,
    needs_reset: bool,
    config_generation: u32,
}

/// A transport's state that cannot be put back.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state is that of a device with other queues.
    #[error("The snapshot has {found} queues for a device that has {expected}")]
    QueueCount {
        /// In the snapshot.
        found: usize,
        /// The device's.
        expected: usize,
    },
    /// A queue of the snapshot is none that the device offers.
    #[error("Queue {0} of the snapshot is none of this device's")]
    Queue(usize),
    /// A queue's size or addresses are impossible.
    #[error("Queue {0} of the snapshot cannot be used")]
    Invalid(usize, #[source] virtio_queue::Error),
    /// The device does not start.
    #[error("The device of the snapshot cannot become active")]
    Activate(#[source] ActivateError),
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

    /// What a snapshot keeps. The machine is paused.
    pub fn save(&self) -> MmioState {
        MmioState {
            status: self.status,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            queues: self.queue_states().into_iter().map(Into::into).collect(),
            interrupt_status: self.interrupt.status(),
            needs_reset: self.interrupt.needs_reset(),
            config_generation: self.interrupt.config_generation(),
        }
    }

    /// Puts a fresh transport, in front of a device whose own state is restored, into `state`,
    /// and makes the device active if it was.
    ///
    /// # Errors
    ///
    /// The state belongs to another device, or the device cannot start here.
    pub fn restore(&mut self, state: &MmioState) -> Result<(), RestoreError> {
        if state.queues.len() != self.queues.len() {
            return Err(RestoreError::QueueCount {
                found: state.queues.len(),
                expected: self.queues.len(),
            });
        }
        for (index, (queue, saved)) in self.queues.iter_mut().zip(&state.queues).enumerate() {
            if saved.max_size != queue.max_size() {
                return Err(RestoreError::Queue(index));
            }
            *queue = Queue::try_from(QueueState::from(*saved))
                .map_err(|e| RestoreError::Invalid(index, e))?;
        }
        self.status = state.status;
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.interrupt
            .restore(state.interrupt_status, state.needs_reset);
        self.interrupt
            .restore_config_generation(state.config_generation);
        if self.is_active() {
            let activation = self.activation().map_err(RestoreError::Activate)?;
            lock(&self.device)
                .activate(activation)
                .map_err(RestoreError::Activate)?;
        }
        Ok(())
    }

    /// The queues as they are now: the device's view once it has them, the driver's before.
    fn queue_states(&self) -> Vec<QueueState> {
        let own = || self.queues.iter().map(Queue::state).collect();
        if !self.is_active() {
            return own();
        }
        let states = lock(&self.device).queue_states();
        if states.is_empty() { own() } else { states }
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
        // A kernel that finds its devices has set its memory up.
        use_pages_of_hosts_choice();
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
        lock(&self.device).reset();
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

#[cfg(test)]
mod tests {
    use event_manager::{EventOps, Events, MutEventSubscriber};
    use proptest::prelude::*;
    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
    const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

    /// A device that remembers what its transport did to it.
    struct Probe {
        events: Vec<EventFd>,
        config: [u8; 8],
        refuses: bool,
        active: Option<(u64, Vec<QueueState>)>,
        resets: u32,
    }

    impl Probe {
        fn shared(refuses: bool) -> Arc<Mutex<Self>> {
            let event = || EventFd::new(EFD_NONBLOCK).unwrap();
            Arc::new(Mutex::new(Self {
                events: vec![event(), event()],
                config: *b"config!!",
                refuses,
                active: None,
                resets: 0,
            }))
        }
    }

    impl MutEventSubscriber for Probe {
        fn init(&mut self, _: &mut EventOps) {}
        fn process(&mut self, _: Events, _: &mut EventOps) {}
    }

    impl VirtioDevice for Probe {
        fn device_type(&self) -> u32 {
            4
        }

        fn queue_max_sizes(&self) -> &[u16] {
            &[256, 16]
        }

        fn queue_events(&self) -> &[EventFd] {
            &self.events
        }

        fn offered_features(&self) -> u64 {
            VERSION_1 | EVENT_IDX | 1
        }

        fn read_config(&self, offset: u64, data: &mut [u8]) {
            for (i, byte) in (0..).zip(data) {
                let at = offset
                    .checked_add(i)
                    .and_then(|at| usize::try_from(at).ok());
                *byte = at.and_then(|at| self.config.get(at)).copied().unwrap_or(0);
            }
        }

        fn write_config(&mut self, offset: u64, data: &[u8]) {
            for (i, byte) in (0..).zip(data) {
                if let Some(slot) = self.config.get_mut(offset as usize + i) {
                    *slot = *byte;
                }
            }
        }

        fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
            if self.refuses {
                return Err(ActivateError::QueueMissing(0));
            }
            let states = activation.queues.iter().map(Queue::state).collect();
            self.active = Some((activation.features, states));
            Ok(())
        }

        fn reset(&mut self) {
            self.active = None;
            self.resets += 1;
        }

        fn queue_states(&self) -> Vec<QueueState> {
            self.active
                .as_ref()
                .map_or(Vec::new(), |(_, states)| states.clone())
        }
    }

    fn transport(device: &Arc<Mutex<Probe>>) -> MmioTransport {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let interrupt = Arc::new(Interrupt::new(line));
        MmioTransport::new(device.clone() as SharedDevice, memory, interrupt).unwrap()
    }

    fn read(transport: &MmioTransport, register: u32) -> u32 {
        let mut data = [0; 4];
        transport.read(register.into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(transport: &mut MmioTransport, register: u32, value: u32) {
        transport.write(register.into(), &value.to_le_bytes());
    }

    /// What Linux does until the features are settled.
    fn negotiate(transport: &mut MmioTransport, features: u64) {
        write(transport, VIRTIO_MMIO_STATUS, 0);
        write(transport, VIRTIO_MMIO_STATUS, ACKNOWLEDGE);
        write(transport, VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER);
        for half in 0..2 {
            write(transport, VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            write(
                transport,
                VIRTIO_MMIO_DRIVER_FEATURES,
                (features >> (32 * half)) as u32,
            );
        }
        write(
            transport,
            VIRTIO_MMIO_STATUS,
            ACKNOWLEDGE | DRIVER | FEATURES_OK,
        );
    }

    fn set_up_queue(transport: &mut MmioTransport, index: u32, size: u32) {
        write(transport, VIRTIO_MMIO_QUEUE_SEL, index);
        write(transport, VIRTIO_MMIO_QUEUE_NUM, size);
        write(
            transport,
            VIRTIO_MMIO_QUEUE_DESC_LOW,
            0x1000 + 0x1000 * index,
        );
        write(transport, VIRTIO_MMIO_QUEUE_DESC_HIGH, 0);
        write(
            transport,
            VIRTIO_MMIO_QUEUE_AVAIL_LOW,
            0x4000 + 0x1000 * index,
        );
        write(
            transport,
            VIRTIO_MMIO_QUEUE_USED_LOW,
            0x8000 + 0x1000 * index,
        );
        write(transport, VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn start(transport: &mut MmioTransport) {
        negotiate(transport, VERSION_1 | EVENT_IDX);
        set_up_queue(transport, 0, 128);
        set_up_queue(transport, 1, 16);
        write(
            transport,
            VIRTIO_MMIO_STATUS,
            ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK,
        );
    }

    #[test]
    fn the_window_says_what_it_is() {
        let transport = transport(&Probe::shared(false));
        assert_eq!(
            read(&transport, VIRTIO_MMIO_MAGIC_VALUE).to_le_bytes(),
            *b"virt"
        );
        assert_eq!(read(&transport, VIRTIO_MMIO_VERSION), 2);
        assert_eq!(read(&transport, VIRTIO_MMIO_DEVICE_ID), 4);
        assert_eq!(
            read(&transport, VIRTIO_MMIO_VENDOR_ID).to_le_bytes(),
            *b"CUBE"
        );
        assert_eq!(read(&transport, VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
        assert_eq!(read(&transport, VIRTIO_MMIO_SHM_LEN_HIGH), u32::MAX);
    }

    #[test]
    fn a_driver_by_the_book_makes_the_device_active() {
        let device = Probe::shared(false);
        let mut transport = transport(&device);
        start(&mut transport);
        let (features, queues) = device.lock().unwrap().active.clone().unwrap();
        assert_eq!(features, VERSION_1 | EVENT_IDX);
        assert_eq!((queues[0].size, queues[1].size), (128, 16));
        assert!(queues.iter().all(|q| q.ready && q.event_idx_enabled));
        assert_eq!(
            (
                queues[1].desc_table,
                queues[1].avail_ring,
                queues[1].used_ring
            ),
            (0x2000, 0x5000, 0x9000)
        );
        assert_eq!(read(&transport, VIRTIO_MMIO_QUEUE_READY), 1);
    }

    #[test]
    fn features_that_were_not_offered_or_lack_version_1_are_refused() {
        let mut transport = transport(&Probe::shared(false));
        for features in [VERSION_1 | 2, EVENT_IDX, 0] {
            negotiate(&mut transport, features);
            assert_eq!(read(&transport, VIRTIO_MMIO_STATUS) & FEATURES_OK, 0);
        }
    }

    #[test]
    fn a_status_bit_cannot_be_skipped_or_taken_back() {
        let device = Probe::shared(false);
        let mut transport = transport(&device);
        write(
            &mut transport,
            VIRTIO_MMIO_STATUS,
            DRIVER | FEATURES_OK | DRIVER_OK,
        );
        assert_eq!(read(&transport, VIRTIO_MMIO_STATUS), 0);
        write(&mut transport, VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER);
        write(
            &mut transport,
            VIRTIO_MMIO_STATUS,
            ACKNOWLEDGE | DRIVER | DRIVER_OK,
        );
        write(&mut transport, VIRTIO_MMIO_STATUS, DRIVER);
        assert_eq!(read(&transport, VIRTIO_MMIO_STATUS), ACKNOWLEDGE | DRIVER);
        assert!(device.lock().unwrap().active.is_none());
    }

    #[test]
    fn a_queue_takes_only_sizes_that_the_device_offers() {
        let mut transport = transport(&Probe::shared(false));
        negotiate(&mut transport, VERSION_1);
        for size in [0, 3, 512, 0x1_0010] {
            write(&mut transport, VIRTIO_MMIO_QUEUE_NUM, size);
        }
        assert_eq!(transport.queues[0].size(), 256);
        write(&mut transport, VIRTIO_MMIO_QUEUE_NUM, 64);
        assert_eq!(transport.queues[0].size(), 64);
        write(&mut transport, VIRTIO_MMIO_QUEUE_SEL, 2);
        assert_eq!(read(&transport, VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
        write(&mut transport, VIRTIO_MMIO_QUEUE_READY, 1);
        assert_eq!(read(&transport, VIRTIO_MMIO_QUEUE_READY), 0);
    }

    #[test]
    fn a_device_that_cannot_start_asks_for_a_reset_and_a_reset_clears_everything() {
        let device = Probe::shared(true);
        let mut transport = transport(&device);
        start(&mut transport);
        assert_ne!(read(&transport, VIRTIO_MMIO_STATUS) & NEEDS_RESET, 0);
        assert_eq!(read(&transport, VIRTIO_MMIO_INTERRUPT_STATUS), 2);
        let resets = device.lock().unwrap().resets;
        write(&mut transport, VIRTIO_MMIO_STATUS, 0);
        assert_eq!(device.lock().unwrap().resets, resets + 1);
        assert_eq!(read(&transport, VIRTIO_MMIO_STATUS), 0);
        assert_eq!(read(&transport, VIRTIO_MMIO_INTERRUPT_STATUS), 0);
        assert_eq!(read(&transport, VIRTIO_MMIO_QUEUE_READY), 0);
    }

    #[test]
    fn an_interrupt_is_seen_and_acknowledged() {
        let mut transport = transport(&Probe::shared(false));
        transport.interrupt.signal_used();
        transport.interrupt.signal_config();
        assert_eq!(read(&transport, VIRTIO_MMIO_INTERRUPT_STATUS), 3);
        assert_eq!(read(&transport, VIRTIO_MMIO_CONFIG_GENERATION), 1);
        write(&mut transport, VIRTIO_MMIO_INTERRUPT_ACK, 1);
        assert_eq!(read(&transport, VIRTIO_MMIO_INTERRUPT_STATUS), 2);
        assert_eq!(transport.interrupt.line().read().unwrap(), 2);
    }

    #[test]
    fn a_notification_that_kvm_did_not_take_reaches_the_queue() {
        let device = Probe::shared(false);
        let mut transport = transport(&device);
        write(&mut transport, VIRTIO_MMIO_QUEUE_NOTIFY, 1);
        write(&mut transport, VIRTIO_MMIO_QUEUE_NOTIFY, 2);
        let device = device.lock().unwrap();
        assert!(device.events[0].read().is_err());
        assert_eq!(device.events[1].read().unwrap(), 1);
    }

    #[test]
    fn the_configuration_space_takes_every_width() {
        let mut transport = transport(&Probe::shared(false));
        let mut data = [0xaa; 8];
        transport.read(CONFIG + 4, &mut data);
        assert_eq!(data, *b"ig!!\0\0\0\0");
        transport.write(CONFIG + 1, b"X");
        transport.read(CONFIG, &mut data[..2]);
        assert_eq!(&data[..2], b"cX");
    }

    /// Puts the state through JSON into a new transport, and saves that again.
    fn moved(state: &MmioState, device: &Arc<Mutex<Probe>>) -> MmioState {
        let text = serde_json::to_string(state).unwrap();
        let read: MmioState = serde_json::from_str(&text).unwrap();
        let mut transport = transport(device);
        transport.restore(&read).unwrap();
        transport.save()
    }

    #[test]
    fn an_active_device_is_active_after_a_restore() {
        let mut transport = transport(&Probe::shared(false));
        start(&mut transport);
        transport.interrupt.signal_config();
        let state = transport.save();
        let device = Probe::shared(false);
        assert_eq!(moved(&state, &device), state);
        assert!(device.lock().unwrap().active.is_some());
    }

    #[test]
    fn a_state_of_another_device_is_refused() {
        let mut transport = transport(&Probe::shared(false));
        let mut state = transport.save();
        state.queues[1].max_size = 32;
        assert!(matches!(
            transport.restore(&state),
            Err(RestoreError::Queue(1))
        ));
        state.queues.pop();
        assert!(matches!(
            transport.restore(&state),
            Err(RestoreError::QueueCount { .. })
        ));
    }

    /// Registers more often than any offset, plausible values more often than any.
    fn access() -> impl Strategy<Value = (bool, u64, Vec<u8>)> {
        let offset = prop_oneof![
            4 => (0u64..0x40).prop_map(|register| register * 4),
            1 => 0u64..WINDOW_SIZE,
        ];
        let value = prop_oneof![
            2 => prop::sample::select(vec![0u32, 1, 2, 3, 11, 15, 16, 128, 0x1000, 0x8000_0000])
                .prop_map(|value| value.to_le_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 0..=8),
        ];
        (any::<bool>(), offset, value)
    }

    proptest! {
        #[test]
        fn whatever_a_driver_does_the_state_can_be_moved(accesses in prop::collection::vec(access(), 0..200), sane: bool) {
            let device = Probe::shared(false);
            let mut transport = transport(&device);
            if sane {
                start(&mut transport);
            }
            for (is_write, offset, mut data) in accesses {
                if is_write {
                    transport.write(offset, &data);
                } else {
                    transport.read(offset, &mut data);
                }
                let active = device.lock().unwrap().active.is_some();
                prop_assert_eq!(active, transport.is_active());
            }
            let state = transport.save();
            prop_assert_eq!(moved(&state, &Probe::shared(false)), state);
        }
    }
}
