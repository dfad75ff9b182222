//! The exit statuses of the hypervisor process.

use serde::{Deserialize, Serialize};

/// Why the hypervisor process ended. The discriminant is the process's exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum ExitStatus {
    /// The guest reset or powered itself off through the keyboard controller (port 0x64): the
    /// normal end of a machine. Also a stop asked for on the control socket.
    GuestReset = 0,
    /// The hypervisor or the host failed: KVM, memory, a device's backend.
    VmmError = 1,
    /// The configuration or the command line cannot be used; nothing was started.
    BadConfiguration = 2,
    /// The guest kernel reported a panic on its console and reset.
    GuestPanic = 3,
    /// The guest's processor shut down (triple fault) or entered a state KVM cannot run.
    GuestCrash = 4,
}

impl ExitStatus {
    /// The process exit status.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The meaning of a process exit status; `None` for one that the hypervisor never uses, for
    /// instance after a signal ended it.
    pub fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::GuestReset,
            1 => Self::VmmError,
            2 => Self::BadConfiguration,
            3 => Self::GuestPanic,
            4 => Self::GuestCrash,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_survives_the_trip_through_its_code() {
        for code in 0..=4 {
            let status = ExitStatus::from_code(code).expect("a known code");
            assert_eq!(i32::from(status.code()), code);
        }
        assert_eq!(ExitStatus::from_code(5), None);
        assert_eq!(ExitStatus::from_code(-1), None);
    }
}
