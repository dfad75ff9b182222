//! The MP table (Intel MultiProcessor Specification 1.4), which tells the guest of its processors
//! and of the IOAPIC where there is no ACPI.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::memory::{IOAPIC, LOCAL_APIC, MP_TABLE};
use crate::virtio::Memory;

/// The most processors: APIC identifiers have 8 bits here, 255 is the broadcast and one is the IOAPIC's.
pub const MAX_VCPUS: u8 = 254;

/// Version 1.4 in the specification's notation.
const SPECIFICATION: u8 = 4;
/// The version that local APICs and the IOAPIC report; what matters is that it is no 82489DX.
const APIC_VERSION: u8 = 0x14;
const FLOATING_POINTER_SIZE: u64 = 16;
const HEADER_SIZE: usize = 44;

/// Entry types, section 4.3.
const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const IO_APIC: u8 = 2;
const IO_INTERRUPT: u8 = 3;
const LOCAL_INTERRUPT: u8 = 4;

/// Interrupt types, table 4-11.
const INTERRUPT_INT: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTINT: u8 = 3;

/// The destination that means every local APIC.
const EVERY_APIC: u8 = 0xff;

/// Writes the table for `vcpus` processors and an IOAPIC whose `pins` carry edge-triggered interrupts.
pub fn write(
    memory: &Memory,
    vcpus: u8,
    pins: impl IntoIterator<Item = u8>,
) -> Result<(), GuestMemoryError> {
    let table = floating_pointer_and_table(vcpus, pins);
    memory.write_slice(&table, GuestAddress(MP_TABLE))
}

fn floating_pointer_and_table(vcpus: u8, pins: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut bytes = floating_pointer().to_vec();
    bytes.extend(configuration_table(vcpus, pins));
    bytes
}

/// Section 4.1.
fn floating_pointer() -> [u8; FLOATING_POINTER_SIZE as usize] {
    let mut pointer = [0; FLOATING_POINTER_SIZE as usize];
    pointer[..4].copy_from_slice(b"_MP_");
    pointer[4..8].copy_from_slice(&((MP_TABLE + FLOATING_POINTER_SIZE) as u32).to_le_bytes());
    pointer[8] = 1;
    pointer[9] = SPECIFICATION;
    pointer[10] = checksum(&pointer);
    pointer
}

/// Sections 4.2 and 4.3.
fn configuration_table(vcpus: u8, pins: impl IntoIterator<Item = u8>) -> Vec<u8> {
    // The identifiers of processors are 0 to vcpus - 1.
    let io_apic_id = vcpus;
    let mut entries = Vec::with_capacity(HEADER_SIZE + 20 * usize::from(vcpus) + 256);
    let mut count = 0u16;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };

    for id in 0..vcpus {
        let mut processor = [0; 20];
        processor[..4].copy_from_slice(&[
            PROCESSOR,
            id,
            APIC_VERSION,
            // Usable; the first one boots.
            if id == 0 { 0b11 } else { 0b01 },
        ]);
        // Signature and features are for processors without CPUID.
        add(&processor);
    }
    add(&[BUS, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let mut io_apic = [IO_APIC, io_apic_id, APIC_VERSION, 1, 0, 0, 0, 0];
    io_apic[4..].copy_from_slice(&(IOAPIC as u32).to_le_bytes());
    add(&io_apic);
    // Flags of 0: polarity and trigger mode of the bus, which for ISA are high and edge.
    for pin in pins {
        add(&[IO_INTERRUPT, INTERRUPT_INT, 0, 0, 0, pin, io_apic_id, pin]);
    }
    add(&[LOCAL_INTERRUPT, INTERRUPT_EXTINT, 0, 0, 0, 0, EVERY_APIC, 0]);
    add(&[LOCAL_INTERRUPT, INTERRUPT_NMI, 0, 0, 0, 0, EVERY_APIC, 1]);

    let mut table = Vec::with_capacity(HEADER_SIZE + entries.len());
    table.extend_from_slice(b"PCMP");
    table.extend_from_slice(&((HEADER_SIZE + entries.len()) as u16).to_le_bytes());
    table.extend_from_slice(&[SPECIFICATION, 0]);
    table.extend_from_slice(b"CUBE    MICROVM     ");
    table.extend_from_slice(&[0; 6]); // no OEM table
    table.extend_from_slice(&count.to_le_bytes());
    table.extend_from_slice(&(LOCAL_APIC as u32).to_le_bytes());
    table.extend_from_slice(&[0; 4]); // no extended table
    table.extend_from_slice(&entries);
    table[7] = checksum(&table);
    table
}

/// What makes the bytes add up to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0u8, |sum, byte| sum.wrapping_add(*byte))
        .wrapping_neg()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::HIGH_MEMORY;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    /// Walks the table's entries as a kernel does.
    fn entries(table: &[u8]) -> Vec<&[u8]> {
        let mut rest = &table[HEADER_SIZE..];
        let mut entries = Vec::new();
        while let Some(kind) = rest.first() {
            let (entry, tail) = rest.split_at(if *kind == PROCESSOR { 20 } else { 8 });
            entries.push(entry);
            rest = tail;
        }
        entries
    }

    proptest! {
        #[test]
        fn both_structures_add_up_to_zero_and_name_their_lengths(vcpus in 1..=MAX_VCPUS, pins in 0u8..=24) {
            let bytes = floating_pointer_and_table(vcpus, 0..pins);
            let (pointer, table) = bytes.split_at(16);
            prop_assert_eq!(sum(pointer), 0);
            prop_assert_eq!(sum(table), 0);
            prop_assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            prop_assert_eq!(usize::from(u16::from_le_bytes([table[34], table[35]])), entries(table).len());
            prop_assert!(MP_TABLE + (bytes.len() as u64) < HIGH_MEMORY);
        }
    }

    #[test]
    fn the_pointer_leads_to_the_table() {
        let pointer = floating_pointer();
        let address = u32::from_le_bytes(pointer[4..8].try_into().unwrap());
        assert_eq!(u64::from(address), MP_TABLE + 16);
    }

    #[test]
    fn the_first_processor_boots_and_no_identifier_is_used_twice() {
        let table = configuration_table(3, [5, 6]);
        let all = entries(&table);
        let processors: Vec<_> = all.iter().filter(|e| e[0] == PROCESSOR).collect();
        assert_eq!(
            processors.iter().map(|e| (e[1], e[3])).collect::<Vec<_>>(),
            [(0, 3), (1, 1), (2, 1)]
        );
        let io_apic = all.iter().find(|e| e[0] == IO_APIC).unwrap();
        assert_eq!(io_apic[1], 3);
        let interrupts: Vec<_> = all.iter().filter(|e| e[0] == IO_INTERRUPT).collect();
        assert_eq!(
            interrupts.iter().map(|e| (e[6], e[7])).collect::<Vec<_>>(),
            [(3, 5), (3, 6)]
        );
    }
}
