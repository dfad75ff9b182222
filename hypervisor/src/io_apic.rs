//! The IOAPIC (Intel 82093AA), with up to 24 pins, each with a redirection entry that says which vector goes
//! to which local APIC.
//!
//! KVM keeps the local APICs and leaves this to user space (`KVM_CAP_SPLIT_IRQCHIP`). A pin is
//! never raised here: each unmasked entry becomes an MSI route in KVM, and a device's irqfd takes
//! that route. So pins are edge-triggered whatever the entry says.

use serde::{Deserialize, Serialize};

/// The most pins.
pub const MAX_PINS: usize = 24;

const REGISTER_SELECT: u64 = 0x00;
const REGISTER_WINDOW: u64 = 0x10;

const ID: u8 = 0x00;
const VERSION: u8 = 0x01;
const ARBITRATION: u8 = 0x02;
const REDIRECTION: u8 = 0x10;

/// An 82093AA. The number of its last entry is in bits 16 to 23.
const VERSION_82093AA: u32 = 0x11;

const MASKED: u64 = 1 << 16;
const LOGICAL: u64 = 1 << 11;
/// Delivery status and remote IRR.
const READ_ONLY: u64 = 1 << 12 | 1 << 14;
const DELIVERY_MODE_SHIFT: u32 = 8;
const LOWEST_PRIORITY: u64 = 1;

/// The state, which is also what a snapshot keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoApic {
    selected: u8,
    id: u32,
    entries: Vec<u64>,
}

/// Where an interrupt of a pin goes (Intel SDM volume 3, section 11.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msi {
    /// The address that the message is written to.
    pub address: u32,
    /// The message.
    pub data: u32,
}

impl IoApic {
    /// An IOAPIC with `pins` pins, 1 to [`MAX_PINS`]. On its way down Linux goes through all of them, with twenty exits each:
    /// there should not be more than are used.
    pub fn new(pins: usize) -> Self {
        Self {
            selected: 0,
            id: 0,
            entries: vec![MASKED; pins.clamp(1, MAX_PINS)],
        }
    }

    /// Reads `data.len()` bytes at `offset` from the start of the register window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            REGISTER_SELECT => u32::from(self.selected),
            REGISTER_WINDOW => self.register(),
            _ => u32::MAX,
        };
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = value.to_le_bytes().get(i).copied().unwrap_or(0);
        }
    }

    /// Writes `data` at `offset`. Returns whether the routes are other ones now.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut bytes = [0; 4];
        let length = data.len().min(4);
        bytes[..length].copy_from_slice(&data[..length]);
        let value = u32::from_le_bytes(bytes);
        match offset {
            REGISTER_SELECT => self.selected = value as u8,
            REGISTER_WINDOW => return self.set_register(value),
            _ => {}
        }
        false
    }

    /// The message of each pin that is not masked.
    pub fn routes(&self) -> impl Iterator<Item = (u32, Msi)> {
        (0..)
            .zip(&self.entries)
            .filter_map(|(pin, entry)| message(*entry).map(|msi| (pin, msi)))
    }

    fn register(&self) -> u32 {
        match self.selected {
            ID | ARBITRATION => self.id,
            VERSION => VERSION_82093AA | (self.entries.len() as u32 - 1) << 16,
            selected => match self.entry_half(selected) {
                Some((pin, false)) => self.entries[pin] as u32,
                Some((pin, true)) => (self.entries[pin] >> 32) as u32,
                None => 0,
            },
        }
    }

    fn set_register(&mut self, value: u32) -> bool {
        if self.selected == ID {
            self.id = value & 0x0f00_0000;
            return false;
        }
        let Some((pin, high)) = self.entry_half(self.selected) else {
            return false;
        };
        let old = self.entries[pin];
        let value = u64::from(value);
        self.entries[pin] = if high {
            value << 32 | old & 0xffff_ffff
        } else {
            old & !0xffff_ffff | value & !READ_ONLY
        };
        message(old) != message(self.entries[pin])
    }

    /// The pin, and whether it is the upper half, that a register number stands for.
    fn entry_half(&self, register: u8) -> Option<(usize, bool)> {
        let index = usize::from(register.checked_sub(REDIRECTION)?);
        (index / 2 < self.entries.len()).then_some((index / 2, index % 2 == 1))
    }
}

fn message(entry: u64) -> Option<Msi> {
    if entry & MASKED != 0 {
        return None;
    }
    let destination = (entry >> 56) as u32;
    let delivery_mode = entry >> DELIVERY_MODE_SHIFT & 7;
    let logical = u32::from(entry & LOGICAL != 0);
    let hint = u32::from(delivery_mode == LOWEST_PRIORITY);
    Some(Msi {
        address: 0xfee0_0000 | destination << 12 | hint << 3 | logical << 2,
        // Vector and delivery mode; edge-triggered.
        data: (entry & 0x7ff) as u32,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn write_register(apic: &mut IoApic, register: u8, value: u32) -> bool {
        apic.write(REGISTER_SELECT, &u32::from(register).to_le_bytes());
        apic.write(REGISTER_WINDOW, &value.to_le_bytes())
    }

    fn read_register(apic: &mut IoApic, register: u8) -> u32 {
        apic.write(REGISTER_SELECT, &u32::from(register).to_le_bytes());
        let mut bytes = [0; 4];
        apic.read(REGISTER_WINDOW, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn all_pins_are_masked_at_first() {
        let mut apic = IoApic::new(MAX_PINS);
        assert_eq!(read_register(&mut apic, VERSION), 0x0017_0011);
        assert_eq!(apic.routes().count(), 0);
    }

    #[test]
    fn unmasking_a_pin_routes_its_vector_to_its_destination() {
        let mut apic = IoApic::new(MAX_PINS);
        assert!(!write_register(
            &mut apic,
            REDIRECTION + 2 * 5 + 1,
            0x0300_0000
        ));
        assert!(write_register(&mut apic, REDIRECTION + 2 * 5, 0x31));
        assert!(!write_register(&mut apic, REDIRECTION + 2 * 5, 0x31));
        let msi = Msi {
            address: 0xfee0_3000,
            data: 0x31,
        };
        assert_eq!(apic.routes().collect::<Vec<_>>(), [(5, msi)]);
        assert!(write_register(
            &mut apic,
            REDIRECTION + 2 * 5,
            0x31 | 1 << 16
        ));
        assert_eq!(apic.routes().count(), 0);
    }

    #[test]
    fn lowest_priority_and_logical_destinations_reach_the_message() {
        let mut apic = IoApic::new(MAX_PINS);
        write_register(&mut apic, REDIRECTION + 1, 0xff00_0000);
        write_register(&mut apic, REDIRECTION, 1 << 11 | 1 << 8 | 0x40);
        let msi = Msi {
            address: 0xfeef_f00c,
            data: 0x140,
        };
        assert_eq!(apic.routes().collect::<Vec<_>>(), [(0, msi)]);
    }

    #[test]
    fn a_level_triggered_pin_sends_an_edge() {
        let mut apic = IoApic::new(MAX_PINS);
        write_register(&mut apic, REDIRECTION, 1 << 15 | 0x50);
        assert_eq!(apic.routes().next().unwrap().1.data, 0x50);
    }

    proptest! {
        #[test]
        fn any_access_ends_and_the_state_survives_json(
            accesses in prop::collection::vec((any::<bool>(), 0u64..0x1100, prop::collection::vec(any::<u8>(), 0..=8)), 0..64)
        ) {
            let mut apic = IoApic::new(MAX_PINS);
            for (write, offset, mut data) in accesses {
                if write {
                    let before: Vec<_> = apic.routes().collect();
                    let changed = apic.write(offset, &data);
                    prop_assert_eq!(changed, before != apic.routes().collect::<Vec<_>>());
                } else {
                    apic.read(offset, &mut data);
                }
            }
            let again: IoApic = serde_json::from_str(&serde_json::to_string(&apic).unwrap()).unwrap();
            prop_assert_eq!(again, apic);
        }
    }
}
