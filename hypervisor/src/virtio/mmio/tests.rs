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
