//! The device: queues and events.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use cube_hypervisor_api::config::VsockConfig;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::VsockError;
use super::mux::{Limits, Mux, Outgoing};
use super::packet::{HEADER_SIZE, Header};
use super::rx::RxBatch;
use crate::virtio::queue::{Buffers, DeviceQueue, QueueError};
use crate::virtio::queue_state::ActiveState;
use crate::virtio::{
    ActivateError, Activation, COMMON_FEATURES, Interrupt, VirtioDevice, config_space,
};

const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// Elements of the queues. Linux before 6.2 takes two for each of its receive buffers of 4 KiB,
/// and fills the first queue with them, so its length costs the guest memory; twice as many
/// made no MiB cheaper (`vm_vsock --measure`). Linux uses 8 elements of the last.
const QUEUE_SIZES: [u16; 3] = [64, 128, 8];

/// `VIRTIO_VSOCK_F_STREAM`: stream sockets, the only ones here.
const FEATURE_STREAM: u64 = 1 << 0;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`: all connections are gone, the CID may be another.
const EVENT_TRANSPORT_RESET: u32 = 0;

/// The most packets and bytes that go one way before the device thread's other work gets its turn.
const MAX_PACKETS: usize = 128;
const MAX_BYTES: usize = 512 * 1024;

// What `Events::data` tells of the sockets; the queues have their indices.
const SOCKETS: u32 = 3;

/// What a snapshot keeps. Connections are not kept: the guest is told that they are gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The guest's context identifier.
    pub cid: u32,
    /// The host port of the next connection from the host: those before may still be known to the guest.
    pub next_port: u32,
    /// Whether the guest is still to be told of an earlier restore.
    pub transport_reset: bool,
    /// The queues, if the driver has set them up.
    pub active: Option<ActiveState>,
}

/// The socket device.
pub struct Vsock {
    cid: u32,
    queue_events: [EventFd; QUEUE_SIZES.len()],
    mux: Mux,
    active: Option<Active>,
    // The guest has not been told yet that its connections are gone.
    transport_reset: bool,
}

struct Active {
    features: u64,
    rx: DeviceQueue,
    tx: DeviceQueue,
    event: DeviceQueue,
    interrupt: Arc<Interrupt>,
    // Of the packet that is being taken from the guest.
    packet: Buffers,
    batch: RxBatch,
    // Packets were left in the queue, and no kick will come for them.
    tx_left: bool,
    broken: bool,
}

impl Vsock {
    /// A device that listens at `config.path`.
    ///
    /// # Errors
    ///
    /// The configuration or the host does not allow it.
    pub fn new(config: &VsockConfig) -> Result<Self, VsockError> {
        Self::build(config, 0, false)
    }

    /// A device in `state`, to be activated with `state.active`; the guest is then told that all its
    /// connections are gone. The configuration may differ from the saved machine's.
    ///
    /// # Errors
    ///
    /// The configuration or the host does not allow it.
    pub fn restore(config: &VsockConfig, state: &VsockState) -> Result<Self, VsockError> {
        let told = state.active.is_none();
        Self::build(config, state.next_port, !told)
    }

    /// What a snapshot keeps.
    pub fn save(&self) -> VsockState {
        VsockState {
            cid: self.cid,
            next_port: self.mux.next_port(),
            transport_reset: self.transport_reset,
            active: self
                .active
                .as_ref()
                .and_then(|active| ActiveState::new(active.features, self.queue_states())),
        }
    }

    fn build(
        config: &VsockConfig,
        next_port: u32,
        transport_reset: bool,
    ) -> Result<Self, VsockError> {
        if config.cid < 3 || config.cid == u32::MAX {
            return Err(VsockError::Cid(config.cid));
        }
        let event =
            || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(VsockError::Host);
        Ok(Self {
            cid: config.cid,
            queue_events: [event()?, event()?, event()?],
            mux: Mux::new(config.cid, &config.path, next_port, Limits::of_process())?,
            active: None,
            transport_reset,
        })
    }

    /// Handles one source's readiness: a queue's notification, or [`SOCKETS`].
    pub(super) fn handle(&mut self, source: u32) {
        if let Some(event) = self.queue_events.get(source as usize) {
            // Nothing to read is no error: a notification and a reset may cross.
            let _ = event.read();
        }
        let clients_left = match source {
            SOCKETS => self.mux.handle_events(),
            _ => self.mux.accept_clients(),
        };
        if clients_left {
            self.kick(RX);
        }
        let Some(active) = self.active.as_mut().filter(|active| !active.broken) else {
            return;
        };
        let result = match source as usize {
            EVENT => active.tell_transport_reset(&mut self.transport_reset),
            source => active.run(&mut self.mux, source == TX),
        };
        match result {
            Ok(Left { rx, tx }) => {
                if rx {
                    self.kick(RX);
                }
                if tx {
                    self.kick(TX);
                }
            }
            Err(error) => self.fail(&error),
        }
    }

    /// What becomes readable when [`handle`](Self::handle) is to be called with [`SOCKETS`].
    pub(super) fn sockets_fd(&self) -> RawFd {
        self.mux.event_fd()
    }

    /// Makes the device thread come back.
    fn kick(&self, queue: usize) {
        if let Some(event) = self.queue_events.get(queue) {
            // A full counter is a notification as well.
            let _ = event.write(1);
        }
    }

    fn fail(&mut self, error: &QueueError) {
        log::warn!("The guest's vsock driver must reset the device: {error}");
        self.mux.reset();
        if let Some(active) = &mut self.active {
            active.broken = true;
            active.interrupt.signal_needs_reset();
        }
    }
}

/// What is left to do after a turn, for which nothing else will call.
#[derive(Default)]
struct Left {
    rx: bool,
    tx: bool,
}

/// What may still be done in this turn.
struct Budget {
    packets: usize,
    bytes: usize,
}

impl Budget {
    fn new() -> Self {
        Self {
            packets: MAX_PACKETS,
            bytes: MAX_BYTES,
        }
    }

    fn spend(&mut self, bytes: usize) {
        self.packets = self.packets.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn is_spent(&self) -> bool {
        self.packets == 0 || self.bytes == 0
    }
}

impl Active {
    fn new(activation: Activation) -> Result<Self, ActivateError> {
        let accepted = activation.accept()?;
        let [rx, tx, event] = accepted.queues;
        let memory = accepted.memory;
        Ok(Self {
            features: accepted.features,
            rx,
            tx,
            event,
            interrupt: accepted.interrupt,
            packet: Buffers::new(memory.clone()),
            batch: RxBatch::new(memory),
            tx_left: false,
            broken: false,
        })
    }

    /// Takes the guest's packets, if `kicked`, and gives it what there is for it.
    fn run(&mut self, mux: &mut Mux, kicked: bool) -> Result<Left, QueueError> {
        let mut left = Left::default();
        let (tx_used, rx_used) = (self.tx.state().next_used, self.rx.state().next_used);
        if kicked || self.tx_left {
            left.tx = self.take_packets(mux)?;
        }
        left.rx = self.give_packets(mux)?;
        // One interrupt for both.
        let mut notify = self.tx.state().next_used != tx_used && self.tx.must_notify()?;
        notify |= self.rx.state().next_used != rx_used && self.rx.must_notify()?;
        if notify {
            self.interrupt.signal_used();
        }
        // The guest took its refusals: on with what had to wait for that.
        left.tx |= self.tx_left && mux.takes_packets();
        Ok(left)
    }

    /// `true` when the turn ended before the packets did.
    fn take_packets(&mut self, mux: &mut Mux) -> Result<bool, QueueError> {
        let mut budget = Budget::new();
        self.tx.disable_notification()?;
        self.tx_left = loop {
            if budget.is_spent() || !mux.takes_packets() {
                break true;
            }
            let Some(head) = self.tx.pop_into(&mut self.packet)? else {
                if self.tx.enable_notification()? {
                    continue;
                }
                break false;
            };
            budget.spend(self.packet.readable.len());
            take_packet(mux, &mut self.packet);
            self.tx.add_used(head, 0)?;
        };
        Ok(self.tx_left && mux.takes_packets())
    }

    /// `true` when the turn ended before the packets and the buffers did.
    fn give_packets(&mut self, mux: &mut Mux) -> Result<bool, QueueError> {
        if !mux.has_outgoing() {
            return Ok(false);
        }
        let mut budget = Budget::new();
        self.rx.disable_notification()?;
        loop {
            if !mux.has_outgoing() {
                return Ok(false);
            }
            if budget.is_spent() {
                return Ok(true);
            }
            if !self.batch.load_first(&mut self.rx)? {
                if self.rx.enable_notification()? {
                    budget.spend(0);
                    continue;
                }
                return Ok(false);
            }
            let count = match mux.next() {
                Some(Outgoing::Packet(header)) => {
                    self.batch.hand_over_header(&mut self.rx, header)?;
                    0
                }
                Some(Outgoing::Data(connection)) => {
                    let count = connection.send_data(&mut self.batch, &mut self.rx)?;
                    mux.served();
                    count
                }
                None => {
                    self.batch.put_back(&mut self.rx);
                    return Ok(false);
                }
            };
            budget.spend(count);
        }
    }

    /// Tells the driver that its connections are gone, once it has a buffer for that.
    fn tell_transport_reset(&mut self, due: &mut bool) -> Result<Left, QueueError> {
        if *due && let Some(head) = self.event.pop_into(&mut self.packet)? {
            let event = EVENT_TRANSPORT_RESET.to_le_bytes();
            let written = self.packet.writable.write(&event);
            self.event.add_used(head, written as u32)?;
            self.event.notify()?;
            *due = written != event.len();
        }
        Ok(Left::default())
    }
}

/// Takes one packet from the guest. Its header is copied before anything in it is looked at.
fn take_packet(mux: &mut Mux, packet: &mut Buffers) {
    let Some(header) = packet.readable.read_array::<HEADER_SIZE>() else {
        log::debug!("Dropped a vsock packet without a whole header");
        return;
    };
    let header = Header::from_bytes(&header);
    let len = header.len as usize;
    if packet.readable.len() < len {
        mux.receive_malformed(&header);
    } else {
        packet.readable.truncate(len);
        mux.receive(&header, &mut packet.readable);
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.queue_events
    }

    fn offered_features(&self) -> u64 {
        COMMON_FEATURES | FEATURE_STREAM
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // `guest_cid`, the only field (section 5.10.4).
        config_space::read(&u64::from(self.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.active = Some(Active::new(activation)?);
        self.mux.start();
        // This may be a vCPU's thread; the device thread goes on.
        self.kick(EVENT);
        self.kick(RX);
        self.kick(TX);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.transport_reset = false;
        self.mux.reset();
    }

    fn queue_states(&self) -> Vec<QueueState> {
        match &self.active {
            Some(active) => [&active.rx, &active.tx, &active.event]
                .map(DeviceQueue::state)
                .to_vec(),
            None => Vec::new(),
        }
    }
}

impl MutEventSubscriber for Vsock {
    fn process(&mut self, events: Events, _: &mut EventOps) {
        self.handle(events.data());
    }

    fn init(&mut self, ops: &mut EventOps) {
        let queues = (0..).zip(self.queue_events.iter().map(AsRawFd::as_raw_fd));
        for (data, fd) in queues.chain([(SOCKETS, self.sockets_fd())]) {
            let events = Events::with_data_raw(fd, data, EventSet::IN);
            if let Err(error) = ops.add(events) {
                log::error!("Cannot watch the vsock device's events: {error}");
            }
        }
    }
}

#[cfg(test)]
impl Vsock {
    /// The connections.
    pub(super) fn mux(&mut self) -> &mut Mux {
        &mut self.mux
    }
}
