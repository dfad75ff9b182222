//! Where a vCPU's port and memory accesses go.
//!
//! There are few places: the IOAPIC, the virtio devices' windows, the serial port, and what is left
//! of a PC's keyboard controller, by which Linux resets the machine. What nobody claims reads as
//! all ones, and writes to it vanish.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::VmFd;

use crate::exits::ExitKind;
use crate::io_apic::IoApic;
use crate::memory::{GAP_START, IOAPIC};
use crate::serial::{SERIAL_PORT, SERIAL_PORTS, SerialPort};
use crate::virtio::mmio::{MmioTransport, WINDOW_SIZE};
use crate::vm::{VmError, set_routes};

/// The keyboard controller's status and command port.
const KEYBOARD: u16 = 0x64;
/// The command that pulses the processor's reset line.
const PULSE_RESET: u8 = 0xfe;
/// Status: no command under way (bit 1 is clear), so that a reset is not waited for, and a byte to
/// be read (bit 0), of which there is no end: a driver that probes for a controller gives up at once.
const KEYBOARD_STATUS: u8 = 0xfd;
/// System control port B. Reading it, Linux asks after an NMI whether the hardware failed (bits 6
/// and 7), and whether timer 2 of the PIT that is not there has run down (bit 5).
const SYSTEM_CONTROL_B: u16 = 0x61;
const TIMER_2_OUT: u8 = 1 << 5;

/// The size of the IOAPIC's register window.
const IO_APIC_WINDOW: u64 = 0x1000;

/// What an access leads to, beyond its data.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The vCPU goes on.
    Continue(ExitKind),
    /// The guest resets the machine.
    Reset,
}

/// The machine as its vCPUs see it.
pub struct Bus {
    vm: Arc<VmFd>,
    io_apic: Mutex<IoApic>,
    serial: Mutex<SerialPort>,
    virtio: Vec<Mutex<MmioTransport>>,
}

impl Bus {
    /// A bus with these devices, the first virtio device in the first window.
    pub fn new(
        vm: Arc<VmFd>,
        serial: SerialPort,
        io_apic: IoApic,
        virtio: Vec<MmioTransport>,
    ) -> Self {
        Self {
            vm,
            io_apic: Mutex::new(io_apic),
            serial: Mutex::new(serial),
            virtio: virtio.into_iter().map(Mutex::new).collect(),
        }
    }

    /// The guest-physical address of a device's register window.
    pub fn window(index: usize) -> u64 {
        GAP_START + index as u64 * WINDOW_SIZE
    }

    /// The guest reads from a port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) -> Outcome {
        if let Some(register) = serial_register(port) {
            data.fill(lock(&self.serial).read(register));
            return Outcome::Continue(ExitKind::Serial);
        }
        let (value, kind) = match port {
            KEYBOARD => (KEYBOARD_STATUS, ExitKind::Keyboard),
            SYSTEM_CONTROL_B => (TIMER_2_OUT, ExitKind::PortRead),
            _ => (0xff, ExitKind::PortRead),
        };
        data.fill(value);
        Outcome::Continue(kind)
    }

    /// The guest writes to a port.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Outcome {
        if let Some(register) = serial_register(port) {
            let mut serial = lock(&self.serial);
            // More than one byte comes from a string instruction: one register, byte after byte.
            for byte in data {
                serial.write(register, *byte);
            }
            return Outcome::Continue(ExitKind::Serial);
        }
        match port {
            KEYBOARD if data == [PULSE_RESET] => Outcome::Reset,
            KEYBOARD => Outcome::Continue(ExitKind::Keyboard),
            _ => Outcome::Continue(ExitKind::PortWrite),
        }
    }

    /// The guest reads from an address that is no RAM.
    pub fn memory_read(&self, address: u64, data: &mut [u8]) -> Outcome {
        if let Some((device, offset)) = self.virtio_at(address) {
            device.read(offset, data);
            return Outcome::Continue(ExitKind::VirtioRead);
        }
        if let Some(offset) = io_apic_offset(address) {
            lock(&self.io_apic).read(offset, data);
            return Outcome::Continue(ExitKind::IoApic);
        }
        data.fill(0xff);
        Outcome::Continue(ExitKind::Memory)
    }

    /// The guest writes to an address that is no RAM.
    ///
    /// # Errors
    ///
    /// KVM does not take the interrupt routes that follow from the write.
    pub fn memory_write(&self, address: u64, data: &[u8]) -> Result<Outcome, VmError> {
        if let Some((mut device, offset)) = self.virtio_at(address) {
            device.write(offset, data);
            return Ok(Outcome::Continue(ExitKind::VirtioWrite));
        }
        if let Some(offset) = io_apic_offset(address) {
            let mut io_apic = lock(&self.io_apic);
            if io_apic.write(offset, data) {
                set_routes(&self.vm, &io_apic)?;
            }
            return Ok(Outcome::Continue(ExitKind::IoApic));
        }
        Ok(Outcome::Continue(ExitKind::Memory))
    }

    fn virtio_at(&self, address: u64) -> Option<(MutexGuard<'_, MmioTransport>, u64)> {
        let offset = address.checked_sub(GAP_START)?;
        let device = self.virtio.get((offset / WINDOW_SIZE) as usize)?;
        Some((lock(device), offset % WINDOW_SIZE))
    }
}

fn serial_register(port: u16) -> Option<u8> {
    let register = port.checked_sub(SERIAL_PORT)?;
    (register < SERIAL_PORTS).then_some(register as u8)
}

fn io_apic_offset(address: u64) -> Option<u64> {
    address
        .checked_sub(IOAPIC)
        .filter(|offset| *offset < IO_APIC_WINDOW)
}

/// Each access leaves its device whole, so a poisoned lock guards a good one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
