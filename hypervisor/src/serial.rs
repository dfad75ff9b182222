//! The early serial port: an 8250 at I/O port 0x3f8 without an interrupt, transmit only.
//!
//! The kernel writes to it (`earlycon=uart8250,io,0x3f8` or `console=ttyS0`) until the virtio console is there.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial, SerialState};

use crate::console::Console;

/// The first of its I/O ports.
pub const SERIAL_PORT: u16 = 0x3f8;
/// How many I/O ports it has.
pub const SERIAL_PORTS: u16 = 8;

/// The serial port.
pub struct SerialPort {
    serial: Serial<NoInterrupt, NoEvents, ToConsole>,
}

/// What a snapshot keeps of the serial port: the registers by their names in the 16550's data sheet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialPortState {
    divisor_low: u8,
    divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    received: Vec<u8>,
}

/// A snapshot's serial port that cannot have been one.
#[derive(Debug, thiserror::Error)]
#[error("The snapshot's serial port has more received bytes than its FIFO holds")]
pub struct SerialStateError;

struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        Ok(())
    }
}

struct ToConsole(Arc<Console>);

impl io::Write for ToConsole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SerialPort {
    /// A port that writes to `console`.
    pub fn new(console: Arc<Console>) -> Self {
        Self {
            serial: Serial::with_events(NoInterrupt, NoEvents, ToConsole(console)),
        }
    }

    /// Reads the register at `offset` from the first port, 0 to 7.
    pub fn read(&mut self, offset: u8) -> u8 {
        self.serial.read(offset)
    }

    /// Writes the register at `offset` from the first port, 0 to 7.
    pub fn write(&mut self, offset: u8, value: u8) {
        // Neither the console nor the missing interrupt can fail.
        let _ = self.serial.write(offset, value);
    }

    /// For a snapshot.
    pub fn save(&self) -> SerialPortState {
        let state = self.serial.state();
        SerialPortState {
            divisor_low: state.baud_divisor_low,
            divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }

    /// A port as it was.
    ///
    /// # Errors
    ///
    /// No port can have been in this state.
    pub fn restore(
        state: &SerialPortState,
        console: Arc<Console>,
    ) -> Result<Self, SerialStateError> {
        let state = SerialState {
            baud_divisor_low: state.divisor_low,
            baud_divisor_high: state.divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.received.clone(),
        };
        Serial::from_state(&state, NoInterrupt, NoEvents, ToConsole(console))
            .map(|serial| Self { serial })
            .map_err(|_| SerialStateError)
    }
}

#[cfg(test)]
mod tests {
    use cube_hypervisor_api::config;
    use proptest::prelude::*;

    use super::*;

    fn console() -> Arc<Console> {
        Arc::new(Console::new(config::Console::Ring))
    }

    #[test]
    fn what_the_guest_transmits_is_on_the_console() {
        let console = console();
        let mut port = SerialPort::new(console.clone());
        for byte in b"early\n" {
            // Line status: the transmitter is empty.
            assert_eq!(port.read(5) & 0x60, 0x60);
            port.write(0, *byte);
        }
        assert_eq!(console.tail(100), "early\n");
    }

    proptest! {
        #[test]
        fn the_port_survives_json_and_takes_anything(
            accesses in proptest::collection::vec((any::<bool>(), any::<u8>(), any::<u8>()), 0..300),
        ) {
            let mut port = SerialPort::new(console());
            for (write, offset, value) in accesses {
                match write {
                    true => port.write(offset, value),
                    false => drop(port.read(offset)),
                }
            }
            let state = port.save();
            prop_assert!(state.received.len() <= 64);
            let json = serde_json::to_string(&state).unwrap();
            let mut again = SerialPort::restore(&serde_json::from_str(&json).unwrap(), console()).unwrap();
            prop_assert_eq!(again.save(), state);
            for offset in 0..8 {
                prop_assert_eq!(again.read(offset), port.read(offset));
            }
        }
    }

    #[test]
    fn a_state_with_too_many_bytes_is_refused() {
        let mut state = SerialPort::new(console()).save();
        state.received = vec![0; 65];
        assert!(SerialPort::restore(&state, console()).is_err());
    }
}
