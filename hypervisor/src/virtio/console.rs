//! The virtio console (virtio 1.2, section 5.3): one port, hvc0 in the guest.
//!
//! Output goes to the [`Console`]; while that is congested the guest's chains stay in the queue. Input comes from
//! standard input, if at all, and is read only when the guest has a buffer for it. There is no configuration space: columns,
//! rows, ports and the emergency write each belong to a feature that is not offered.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::queue::QueueError;
use super::queue_state::ActiveState;
use super::served::Served;
use super::{ActivateError, Activation, VirtioDevice};
use crate::console::{Console, Input};

/// The device type (virtio 1.2, section 5.3.1).
const TYPE_CONSOLE: u32 = 3;

/// Elements of the receive and the transmit queue.
const QUEUE_SIZES: [u16; 2] = [64, 64];

/// The most chains of one queue served in a row before other devices get their turn.
const BUDGET: usize = 64;

/// The most bytes taken from or put into one chain: more would not survive in the ring anyway.
const CHAIN_LIMIT: usize = crate::console::RING_SIZE;

/// The device.
pub struct ConsoleDevice {
    console: Arc<Console>,
    input: Option<Input>,
    events: [EventFd; 2],
    /// Readable when the device has become active.
    wake: EventFd,
    active: Option<Served<2>>,
}

/// What a snapshot keeps of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// The driver's choices and queues, if the device was active.
    pub active: Option<ActiveState>,
}

impl ConsoleDevice {
    /// A device that writes to `console` and reads from `input`.
    ///
    /// # Errors
    ///
    /// The host has no eventfd left.
    pub fn new(console: Arc<Console>, input: Option<Input>) -> io::Result<Self> {
        Ok(Self {
            console,
            input,
            events: [
                EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
                EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            ],
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            active: None,
        })
    }

    /// For a snapshot. A restored device is a new one, made active by [`ActiveState::activation`].
    pub fn save(&self) -> ConsoleState {
        ConsoleState {
            active: Served::save(self.active.as_ref()),
        }
    }

    fn transmit(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let console = &self.console;
        let [_, queue] = &mut active.queues;
        let result = queue.serve(&mut active.buffers, BUDGET, |buffers| {
            if console.is_congested() {
                return None;
            }
            buffers.readable.truncate(CHAIN_LIMIT);
            let mut chunk = [0; 512];
            loop {
                match buffers.readable.read(&mut chunk) {
                    0 => return Some(0),
                    count => console.write(chunk.get(..count).unwrap_or(&chunk)),
                }
            }
        });
        self.go_on(result, 1);
    }

    fn receive(&mut self, ops: &mut EventOps<'_>) {
        let (Some(active), Some(input)) = (&mut self.active, &self.input) else {
            return;
        };
        let mut ended = false;
        let [queue, _] = &mut active.queues;
        let result = queue.serve(&mut active.buffers, BUDGET, |buffers| {
            let mut chunk = [0; 512];
            let room = buffers.writable.len().min(chunk.len());
            if room == 0 {
                return Some(0);
            }
            match input.read(chunk.get_mut(..room)?) {
                Ok(count) if count > 0 => {
                    let count = buffers.writable.write(chunk.get(..count)?);
                    u32::try_from(count).ok()
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
                Ok(_) | Err(_) => {
                    ended = true;
                    None
                }
            }
        });
        if ended {
            // A file was never in the event loop, which then says so.
            let _ = ops.remove(Events::new(input, EventSet::IN));
            self.input = None;
        }
        self.go_on(result, 0);
    }

    /// Comes back to `queue` when its budget ran out; gives up when the driver broke it.
    fn go_on(&mut self, result: Result<bool, QueueError>, queue: usize) {
        match result {
            Ok(false) => {}
            Ok(true) => {
                if let Some(event) = self.events.get(queue) {
                    // It fails only when it is readable anyway.
                    let _ = event.write(1);
                }
            }
            Err(error) => {
                log::warn!("The guest broke its console: {error}");
                if let Some(active) = self.active.take() {
                    active.queues[0].interrupt().signal_needs_reset();
                }
            }
        }
    }
}

impl MutEventSubscriber for ConsoleDevice {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for event in self.events.iter().chain([&self.wake]) {
            if let Err(error) = ops.add(Events::new(event, EventSet::IN)) {
                log::error!("The console is dead: cannot wait for the guest: {error:?}");
            }
        }
        // Files cannot be waited for, and need not be.
        if let Some(fd) = self.console.output_fd() {
            let _ = ops.add(Events::new_raw(
                fd,
                EventSet::OUT | EventSet::EDGE_TRIGGERED,
            ));
        }
        if let Some(input) = &self.input {
            let _ = ops.add(Events::new(input, EventSet::IN | EventSet::EDGE_TRIGGERED));
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let fd = events.fd();
        let [receive, transmit] = &self.events;
        if fd == transmit.as_raw_fd() {
            let _ = transmit.read();
            self.transmit();
        } else if fd == receive.as_raw_fd() {
            let _ = receive.read();
            self.receive(ops);
        } else if fd == self.wake.as_raw_fd() {
            let _ = self.wake.read();
            self.transmit();
            self.receive(ops);
        } else if self.input.as_ref().map(AsRawFd::as_raw_fd) == Some(fd) {
            self.receive(ops);
        } else {
            self.console.pump();
            self.transmit();
        }
    }
}

impl VirtioDevice for ConsoleDevice {
    fn device_type(&self) -> u32 {
        TYPE_CONSOLE
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.events
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.active = Some(Served::new(activation)?);
        // What came before the device was active is to be looked at.
        self.wake.write(1).map_err(ActivateError::Host)
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        Served::states(self.active.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::{AsFd, OwnedFd};

    use cube_hypervisor_api::config;
    use proptest::prelude::*;

    use super::super::FEATURE_VERSION_1;
    use super::super::testing::{BUFFERS, Driver, Used, hostile_queue};
    use super::*;

    fn silent() -> Arc<Console> {
        Arc::new(Console::new(config::Console::Ring))
    }

    #[test]
    fn what_the_guest_writes_is_on_the_console() {
        let console = silent();
        let mut driver = Driver::active(ConsoleDevice::new(console.clone(), None).unwrap());
        driver.write(BUFFERS, b"hello, world\n");
        let head = driver.add(1, &[(BUFFERS, 7, false), (BUFFERS + 7, 6, false)]);
        driver.kick(1);
        assert_eq!(driver.used(1), [Used { head, written: 0 }]);
        assert_eq!(console.tail(100), "hello, world\n");
    }

    #[test]
    fn output_from_before_the_device_was_active_is_not_forgotten() {
        let console = silent();
        let mut driver = Driver::new(ConsoleDevice::new(console.clone(), None).unwrap());
        driver.write(BUFFERS, b"early");
        driver.add(1, &[(BUFFERS, 5, false)]);
        driver.kick(1);
        assert_eq!(console.tail(100), "");
        driver.activate(FEATURE_VERSION_1);
        driver.run();
        assert_eq!(console.tail(100), "early");
    }

    /// Sends `chunks` of 4 KiB as the guest does, each when the one before was used.
    fn transmit(driver: &mut Driver<ConsoleDevice>, chunks: usize) {
        for chunk in 0..chunks {
            driver.write(BUFFERS, &[chunk as u8; 4096]);
            driver.add(1, &[(BUFFERS, 4096, false)]);
            driver.kick(1);
            while driver.used(1).is_empty() {
                driver.run_for(10_000);
            }
        }
    }

    #[test]
    fn a_slow_reader_of_standard_output_holds_the_guest_back_and_misses_nothing() {
        let (mut reader, writer) = io::pipe().unwrap();
        let console = Arc::new(Console::raw(writer.as_fd()));
        let mut driver = Driver::active(ConsoleDevice::new(console.clone(), None).unwrap());
        let reader = std::thread::spawn(move || {
            let mut all: Vec<u8> = Vec::new();
            let mut some = [0; 777];
            while all.len() < 256 * 4096 {
                let count = reader.read(&mut some).unwrap();
                all.extend(&some[..count]);
            }
            all
        });
        transmit(&mut driver, 256);
        console.finish();
        let all = reader.join().unwrap();
        assert!(
            all.chunks(4096)
                .zip(0u8..=255)
                .all(|(chunk, number)| chunk == [number; 4096])
        );
    }

    #[test]
    fn standard_output_may_be_a_file() {
        let mut file = tempfile::tempfile().unwrap();
        let (reader, mut input) = io::pipe().unwrap();
        let console = Arc::new(Console::raw(file.as_fd()));
        let device = ConsoleDevice::new(console, Some(Input::new(OwnedFd::from(reader)))).unwrap();
        let mut driver = Driver::active(device);
        transmit(&mut driver, 100);
        assert_eq!(file.stream_position().unwrap(), 100 * 4096);
        driver.add(0, &[(BUFFERS, 16, true)]);
        driver.kick(0);
        input.write_all(b"hello").unwrap();
        driver.run();
        assert_eq!(driver.used(0).len(), 1);
    }

    #[test]
    fn input_waits_until_the_guest_has_buffers() {
        let (reader, mut writer) = io::pipe().unwrap();
        let input = Input::new(OwnedFd::from(reader));
        let mut driver = Driver::active(ConsoleDevice::new(silent(), Some(input)).unwrap());
        writer.write_all(b"abcdef").unwrap();
        driver.run();
        let first = driver.add(0, &[(BUFFERS, 4, true)]);
        driver.kick(0);
        assert_eq!(
            driver.used(0),
            [Used {
                head: first,
                written: 4
            }]
        );
        let second = driver.add(0, &[(BUFFERS + 4, 4, true)]);
        let third = driver.add(0, &[(BUFFERS + 6, 4, true)]);
        driver.kick(0);
        assert_eq!(
            driver.used(0),
            [Used {
                head: second,
                written: 2
            }]
        );
        writer.write_all(b"gh").unwrap();
        driver.run();
        assert_eq!(
            driver.used(0),
            [Used {
                head: third,
                written: 2
            }]
        );
        assert_eq!(driver.read(BUFFERS, 8), b"abcdefgh");
        drop(writer);
        driver.add(0, &[(BUFFERS, 4, true)]);
        driver.kick(0);
        assert!(driver.device().input.is_none());
    }

    #[test]
    fn the_state_survives_json_and_goes_on_where_it_was() {
        let mut driver = Driver::active(ConsoleDevice::new(silent(), None).unwrap());
        driver.write(BUFFERS, b"12");
        driver.add(1, &[(BUFFERS, 1, false)]);
        driver.kick(1);
        let json = serde_json::to_string(&driver.device().save()).unwrap();
        let state: ConsoleState = serde_json::from_str(&json).unwrap();
        driver.add(1, &[(BUFFERS + 1, 1, false)]);

        let console = silent();
        let mut restored = ConsoleDevice::new(console.clone(), None).unwrap();
        driver.make_active(&mut restored, state.active.as_ref());
        assert_eq!(restored.save(), state);
        Driver::new(restored).run();
        assert_eq!(console.tail(10), "2");
    }

    proptest! {
        #[test]
        fn a_hostile_driver_gets_a_reset_at_most(
            queues in proptest::array::uniform2(hostile_queue(any::<[u8; 16]>().prop_map(Vec::from))),
        ) {
            let (reader, mut writer) = io::pipe().unwrap();
            writer.write_all(&[7; 4096]).unwrap();
            let input = Input::new(OwnedFd::from(reader));
            let mut driver = Driver::new(ConsoleDevice::new(silent(), Some(input)).unwrap());
            queues[0].install(&driver, 0);
            queues[1].install(&driver, 1);
            let features = driver.device().offered_features();
            driver.activate(features);
            driver.kick(0);
            driver.kick(1);
            let broken = driver.interrupt.needs_reset();
            prop_assert_eq!(broken, driver.device().active.is_none());
            driver.device().reset();
            prop_assert!(driver.device().queue_states().is_empty());
        }
    }
}
