//! The entropy device (virtio 1.2, section 5.4): bytes from the host's `getrandom(2)`.

use std::io;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::queue::Buffers;
use super::queue_state::ActiveState;
use super::served::Served;
use super::{ActivateError, Activation, VirtioDevice};

/// The device type (virtio 1.2, section 5.4.1).
const TYPE_ENTROPY: u32 = 4;

const QUEUE_SIZES: [u16; 1] = [16];

/// The most requests served in a row, and the most bytes for each: what bounds the time that one
/// event takes. The guest asks again if it wants more.
const BUDGET: usize = 16;
const MOST_BYTES: usize = 1024;

/// The device.
pub struct Rng {
    kick: [EventFd; 1],
    active: Option<Served<1>>,
}

/// What a snapshot keeps of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngState {
    /// The driver's choices and queue, if the device was active.
    pub active: Option<ActiveState>,
}

impl Rng {
    /// A device.
    ///
    /// # Errors
    ///
    /// The host has no eventfd left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            kick: [EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?],
            active: None,
        })
    }

    /// For a snapshot. A restored device is a new one, made active by [`ActiveState::activation`].
    pub fn save(&self) -> RngState {
        RngState {
            active: Served::save(self.active.as_ref()),
        }
    }
}

/// Fills what the guest offers, up to the bound.
fn fill(buffers: &mut Buffers) -> u32 {
    let mut bytes = [0; MOST_BYTES];
    let count = buffers.writable.len().min(MOST_BYTES);
    let wanted = bytes.get_mut(..count).unwrap_or_default();
    // SAFETY: the buffer is valid for its length. For up to 256 bytes the call is never cut short or interrupted,
    // for more it may be (getrandom(2)).
    let got = unsafe { libc::getrandom(wanted.as_mut_ptr().cast(), wanted.len(), 0) };
    let got = usize::try_from(got).unwrap_or(0);
    let written = buffers
        .writable
        .write(wanted.get(..got).unwrap_or_default());
    u32::try_from(written).unwrap_or(0)
}

impl MutEventSubscriber for Rng {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&self.kick[0], EventSet::IN)) {
            log::error!("The entropy device is dead: cannot wait for the guest: {error:?}");
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let _ = self.kick[0].read();
        let Some(active) = &mut self.active else {
            return;
        };
        let [queue] = &mut active.queues;
        let result = queue.serve(&mut active.buffers, BUDGET, |buffers| Some(fill(buffers)));
        match result {
            Ok(false) => {}
            Ok(true) => {
                let _ = self.kick[0].write(1);
            }
            Err(error) => {
                log::warn!("The guest broke its entropy device: {error}");
                queue.interrupt().signal_needs_reset();
                self.active = None;
            }
        }
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u32 {
        TYPE_ENTROPY
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_events(&self) -> &[EventFd] {
        &self.kick
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.active = Some(Served::new(activation)?);
        Ok(())
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
    use proptest::prelude::*;

    use super::{Rng, *};
    use crate::virtio::testing::{BUFFERS, Driver, Used, hostile_queue};

    #[test]
    fn the_guest_gets_random_bytes_and_only_where_it_asked() {
        let mut driver = Driver::active(Rng::new().unwrap());
        let head = driver.add(0, &[(BUFFERS, 64, true), (BUFFERS + 0x100, 64, true)]);
        driver.kick(0);
        assert_eq!(driver.used(0), [Used { head, written: 128 }]);
        let (first, second) = (driver.read(BUFFERS, 64), driver.read(BUFFERS + 0x100, 64));
        assert_ne!(first, second);
        assert!(first.iter().any(|&byte| byte != 0) && second.iter().any(|&byte| byte != 0));
        assert_eq!(driver.read(BUFFERS + 64, 64), [0; 64]);
    }

    #[test]
    fn a_huge_request_gets_a_bounded_answer_and_one_without_room_none() {
        let mut driver = Driver::active(Rng::new().unwrap());
        let huge = driver.add(0, &[(BUFFERS, 0x8_0000, true)]);
        let none = driver.add(0, &[(BUFFERS, 8, false)]);
        driver.kick(0);
        let written = MOST_BYTES as u32;
        let expected = [
            Used {
                head: huge,
                written,
            },
            Used {
                head: none,
                written: 0,
            },
        ];
        assert_eq!(driver.used(0), expected);
    }

    #[test]
    fn the_state_survives_json() {
        let mut driver = Driver::active(Rng::new().unwrap());
        driver.add(0, &[(BUFFERS, 8, true)]);
        driver.kick(0);
        let state = driver.device().save();
        let json = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<RngState>(&json).unwrap(), state);
        let mut restored = Rng::new().unwrap();
        driver.make_active(&mut restored, state.active.as_ref());
        assert_eq!(restored.save(), state);
    }

    proptest! {
        #[test]
        fn a_hostile_driver_gets_a_reset_at_most(queue in hostile_queue(any::<[u8; 16]>().prop_map(Vec::from))) {
            let mut driver = Driver::new(Rng::new().unwrap());
            queue.install(&driver, 0);
            let features = driver.device().offered_features();
            driver.activate(features);
            driver.kick(0);
            prop_assert_eq!(driver.interrupt.needs_reset(), driver.device().active.is_none());
        }
    }
}
