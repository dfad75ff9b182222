//! The network device (virtio 1.2, section 5.1): a pair of queues between the guest and a TAP.
//!
//! Checksums and segmentation are offloaded in both directions as far as the driver agrees: between guests of one host a
//! packet then never has its checksum computed. A device without a TAP is a spare slot: its link is down until
//! [`Net::attach`] fills it. A TAP that vanishes takes the link down, nothing else.

mod receive;
mod tap;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
    VIRTIO_NET_S_LINK_UP,
};
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use receive::{Failure, Receiver, Stop};
pub use tap::{Tap, TapError};

use super::queue::{Buffers, DeviceQueue, FEATURE_INDIRECT_DESC, QueueError};
use super::queue_state::ActiveState;
use super::{ActivateError, Activation, COMMON_FEATURES, Interrupt, VirtioDevice, config_space};

/// The device type (virtio 1.2, section 5.1.1).
const TYPE_NETWORK: u32 = 1;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// The most packets of one direction in a row before the other and other devices get their turn.
const BUDGET: usize = 64;

/// The longest packet that is sent: nothing that a driver may ask to be segmented is longer.
const LONGEST_SENT: usize = 65535 + 40 + 18 + tap::HEADER;

/// A hardware address.
pub type Mac = [u8; 6];

/// The device.
pub struct Net {
    tap: Option<Tap>,
    /// Whether the TAP is in the event loop.
    watched: bool,
    /// Whether the TAP may have a packet.
    readable: bool,
    /// Whether the TAP had no room for a packet.
    congested: bool,
    mac: Mac,
    mtu: Option<u16>,
    events: [EventFd; 2],
    /// Readable when the device became active or got a TAP.
    wake: EventFd,
    active: Option<Active>,
}

struct Active {
    receiver: Receiver,
    transmit: DeviceQueue,
    buffers: Buffers,
    features: u64,
    interrupt: Arc<Interrupt>,
}

/// What a snapshot keeps of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The driver's choices and queues, if the device was active.
    pub active: Option<ActiveState>,
    /// The hardware address.
    pub mac: Mac,
    /// The MTU that the driver was told.
    pub mtu: Option<u16>,
}

/// Why a TAP cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The slot has a TAP.
    #[error("The slot has the TAP {0} already")]
    Occupied(String),
    /// The host refuses the offloads that the driver asked for.
    #[error("Cannot set the offloads of the TAP {0}")]
    Offloads(String, #[source] io::Error),
}

/// Reads `aa:bb:cc:dd:ee:ff`; `None` if it is something else, or no address of a single device.
pub fn parse_mac(text: &str) -> Option<Mac> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next()?;
        if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    let [first, ..] = mac;
    (parts.next().is_none() && first & 1 == 0 && mac != [0; 6]).then_some(mac)
}

/// A random, locally administered address.
fn random_mac() -> io::Result<Mac> {
    let mut mac = [0; 6];
    // SAFETY: the buffer is valid for its length; so few bytes are never cut short (getrandom(2)).
    let got = unsafe { libc::getrandom(mac.as_mut_ptr().cast(), mac.len(), 0) };
    if got != mac.len() as isize {
        return Err(io::Error::last_os_error());
    }
    let [first, ..] = &mut mac;
    *first = *first & 0xfc | 2;
    Ok(mac)
}

impl Net {
    /// A device with `tap`, or a spare slot. Without `mac` it gets a random address; without `mtu` the driver is told
    /// that of the TAP.
    ///
    /// # Errors
    ///
    /// The host has no eventfd or no random bytes left.
    pub fn new(tap: Option<Tap>, mac: Option<Mac>, mtu: Option<u16>) -> io::Result<Self> {
        let mac = match mac {
            Some(mac) => mac,
            None => random_mac()?,
        };
        let mtu = mtu.or_else(|| tap.as_ref().and_then(Tap::mtu));
        Ok(Self {
            tap,
            watched: false,
            readable: false,
            congested: false,
            mac,
            mtu,
            events: [
                EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
                EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            ],
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            active: None,
        })
    }

    /// Fills a spare slot, or one whose TAP has vanished; the guest sees the link come up.
    ///
    /// # Errors
    ///
    /// The slot is not spare, or the host refuses the offloads.
    pub fn attach(&mut self, tap: Tap) -> Result<(), AttachError> {
        if let Some(tap) = &self.tap {
            return Err(AttachError::Occupied(tap.name().to_owned()));
        }
        if let Some(active) = &self.active {
            tap.set_offloads(active.features)
                .map_err(|e| AttachError::Offloads(tap.name().to_owned(), e))?;
            active.interrupt.signal_config();
        }
        self.tap = Some(tap);
        let _ = self.wake.write(1);
        Ok(())
    }

    /// For a snapshot.
    pub fn save(&self) -> NetState {
        NetState {
            active: self
                .active
                .as_ref()
                .and_then(|active| ActiveState::new(active.features, self.queue_states())),
            mac: self.mac,
            mtu: self.mtu,
        }
    }

    /// A device as it was, to be made active by [`ActiveState::activation`]; without a TAP the link is down.
    ///
    /// # Errors
    ///
    /// The host has no eventfd left.
    pub fn restore(state: &NetState, tap: Option<Tap>) -> io::Result<Self> {
        let mut net = Self::new(tap, Some(state.mac), state.mtu)?;
        // What the driver was not told then it cannot be told now.
        net.mtu = state.mtu;
        Ok(net)
    }

    /// The configuration space (virtio 1.2, section 5.1.4): address, status, queue pairs (1), MTU.
    fn config(&self) -> [u8; 12] {
        let [a, b, c, d, e, f] = self.mac;
        let status = match &self.tap {
            Some(_) => VIRTIO_NET_S_LINK_UP as u16,
            None => 0,
        };
        let [status_low, status_high] = status.to_le_bytes();
        let [mtu_low, mtu_high] = self.mtu.unwrap_or(0).to_le_bytes();
        [
            a,
            b,
            c,
            d,
            e,
            f,
            status_low,
            status_high,
            1,
            0,
            mtu_low,
            mtu_high,
        ]
    }

    fn receive(&mut self, ops: &mut EventOps<'_>) {
        let (Some(active), Some(tap), true) = (&mut self.active, &self.tap, self.readable) else {
            return;
        };
        match active.receiver.receive(tap, BUDGET) {
            Ok(Stop::Empty) => self.readable = false,
            Ok(Stop::NoBuffers) => {}
            Ok(Stop::Budget) => self.come_back(RECEIVE),
            Err(Failure::Queue(error)) => self.broken(&error),
            Err(Failure::Tap(error)) => self.lost(&error, ops),
        }
    }

    fn transmit(&mut self, ops: &mut EventOps<'_>) {
        let Some(active) = &mut self.active else {
            return;
        };
        let tap = self.tap.as_ref();
        let congested = &mut self.congested;
        *congested = false;
        let mut lost = None;
        let result = active
            .transmit
            .serve(&mut active.buffers, BUDGET, |buffers| {
                // Without a link packets go nowhere, as with a cable pulled out.
                let (Some(tap), None) = (tap, &lost) else {
                    return Some(0);
                };
                if buffers.readable.len() > LONGEST_SENT {
                    return Some(0);
                }
                match tap.send(&buffers.readable) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        *congested = true;
                        return None;
                    }
                    Err(e) if e.raw_os_error() == Some(libc::EBADFD) => lost = Some(e),
                    // The host does not want this packet: too short, a header that makes no sense, interface down.
                    Ok(()) | Err(_) => {}
                }
                Some(0)
            });
        match result {
            Ok(false) => {}
            Ok(true) => self.come_back(TRANSMIT),
            Err(error) => self.broken(&error),
        }
        if let Some(error) = lost {
            self.lost(&error, ops);
        }
    }

    /// The budget of `queue` ran out: come back after the others.
    fn come_back(&self, queue: usize) {
        if let Some(event) = self.events.get(queue) {
            // It fails only when it is readable anyway.
            let _ = event.write(1);
        }
    }

    /// The driver broke a queue.
    fn broken(&mut self, error: &QueueError) {
        log::warn!("The guest broke a network device: {error}");
        if let Some(active) = self.active.take() {
            active.interrupt.signal_needs_reset();
        }
    }

    /// The TAP is gone.
    fn lost(&mut self, error: &io::Error, ops: &mut EventOps<'_>) {
        let Some(tap) = self.tap.take() else { return };
        log::warn!("The TAP {} is gone, the link is down: {error}", tap.name());
        let _ = ops.remove(Events::new(&tap, EventSet::IN));
        self.watched = false;
        self.readable = false;
        if let Some(active) = &self.active {
            active.interrupt.signal_config();
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let Some(tap) = &self.tap else { return };
        if self.watched {
            return;
        }
        let interest = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
        match ops.add(Events::new(tap, interest)) {
            Ok(()) => self.watched = true,
            Err(error) => log::error!("Cannot wait for the TAP {}: {error:?}", tap.name()),
        }
    }
}

impl MutEventSubscriber for Net {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for event in self.events.iter().chain([&self.wake]) {
            if let Err(error) = ops.add(Events::new(event, EventSet::IN)) {
                log::error!("A network device is dead: cannot wait for the guest: {error:?}");
            }
        }
        self.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let fd = events.fd();
        let [receive, transmit] = &self.events;
        if fd == receive.as_raw_fd() {
            let _ = receive.read();
            self.receive(ops);
        } else if fd == transmit.as_raw_fd() {
            let _ = transmit.read();
            self.transmit(ops);
        } else if fd == self.wake.as_raw_fd() {
            let _ = self.wake.read();
            self.watch(ops);
            self.receive(ops);
            self.transmit(ops);
        } else if self.tap.as_ref().map(AsRawFd::as_raw_fd) == Some(fd) {
            // Reading tells what an error or a hang-up means.
            let only_out = events.event_set() == EventSet::OUT;
            if !only_out {
                self.readable = true;
                self.receive(ops);
            }
            if self.congested {
                self.transmit(ops);
            }
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        TYPE_NETWORK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.events
    }

    fn offered_features(&self) -> u64 {
        let mtu = self.mtu.map_or(0, |_| 1 << VIRTIO_NET_F_MTU);
        [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_GUEST_ECN,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_HOST_ECN,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_STATUS,
        ]
        .iter()
        .fold(mtu, |all, feature| all | 1 << feature)
            | COMMON_FEATURES
            | FEATURE_INDIRECT_DESC
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let accepted = activation.accept()?;
        let features = accepted.features;
        let [receive, transmit] = accepted.queues;
        if let Some(tap) = &self.tap {
            tap.set_offloads(features).map_err(ActivateError::Backend)?;
        }
        self.active = Some(Active {
            receiver: Receiver::new(receive, features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0),
            buffers: Buffers::new(accepted.memory),
            transmit,
            features,
            interrupt: accepted.interrupt,
        });
        // What came before the device was active is to be looked at.
        self.readable = true;
        self.wake.write(1).map_err(ActivateError::Host)
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.active.as_ref().map_or_else(Vec::new, |active| {
            vec![active.receiver.state(), active.transmit.state()]
        })
    }
}

#[cfg(test)]
mod tests;
