//! How often a vCPU came out to the hypervisor, and for what.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What made a vCPU come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ExitKind {
    /// The serial port.
    Serial,
    /// The keyboard controller.
    Keyboard,
    /// A read of a port that nobody claims.
    PortRead,
    /// A write to a port that nobody claims.
    PortWrite,
    /// The IOAPIC's registers.
    IoApic,
    /// A read of a virtio device's registers.
    VirtioRead,
    /// A write to a virtio device's registers.
    VirtioWrite,
    /// Memory that nobody claims.
    Memory,
    /// A signal of our own.
    Signal,
    /// The rest.
    Other,
}

const KINDS: [(ExitKind, &str); 10] = [
    (ExitKind::Serial, "serial"),
    (ExitKind::Keyboard, "keyboard"),
    (ExitKind::PortRead, "port_read"),
    (ExitKind::PortWrite, "port_write"),
    (ExitKind::IoApic, "io_apic"),
    (ExitKind::VirtioRead, "virtio_read"),
    (ExitKind::VirtioWrite, "virtio_write"),
    (ExitKind::Memory, "memory"),
    (ExitKind::Signal, "signal"),
    (ExitKind::Other, "other"),
];

/// One vCPU's counters. They are its own: nobody else writes them.
#[derive(Default)]
pub struct ExitCounts([AtomicU64; KINDS.len()]);

impl ExitCounts {
    /// Counts an exit.
    pub fn count(&self, kind: ExitKind) {
        let counter = &self.0[kind as usize];
        // One writer: no locked instruction is needed.
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// The table of all vCPUs' exits: a line a kind, name and count.
pub struct ExitTable<'a>(pub &'a [&'a ExitCounts]);

impl fmt::Display for ExitTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut total = 0;
        for (kind, name) in KINDS {
            let counts = self
                .0
                .iter()
                .map(|c| c.0[kind as usize].load(Ordering::Relaxed));
            let sum: u64 = counts.sum();
            total += sum;
            writeln!(f, "{name} {sum}")?;
        }
        write!(f, "total {total}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_line() {
        for (i, (kind, _)) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
        }
    }

    #[test]
    fn the_table_adds_the_vcpus_up() {
        let (a, b) = (ExitCounts::default(), ExitCounts::default());
        a.count(ExitKind::IoApic);
        b.count(ExitKind::IoApic);
        b.count(ExitKind::Other);
        let table = ExitTable(&[&a, &b]).to_string();
        assert!(table.contains("io_apic 2\n"), "{table}");
        assert!(table.ends_with("other 1\ntotal 3"), "{table}");
    }
}
