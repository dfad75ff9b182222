//! Why the machine ends: whoever finds out says so here, and the device thread acts on it.

use std::io;
use std::sync::{Mutex, PoisonError};

use cube_hypervisor_api::ExitStatus;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The end of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The status for the process.
    pub status: ExitStatus,
    /// One line for a person.
    pub message: String,
}

/// Where the end is announced. The first reason counts.
pub struct Ending {
    end: Mutex<Option<End>>,
    event: EventFd,
}

impl Ending {
    /// A machine without an end yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            end: Mutex::new(None),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// The machine ends because of this, unless it already does for another reason.
    pub fn announce(&self, status: ExitStatus, message: impl Into<String>) {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.get_or_insert_with(|| End {
            status,
            message: message.into(),
        });
        // Readable already is as good as written.
        let _ = self.event.write(1);
    }

    /// Readable once there is an end.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The end, if there is one.
    pub fn get(&self) -> Option<End> {
        self.end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_counts() {
        let ending = Ending::new().unwrap();
        assert_eq!(ending.get(), None);
        ending.announce(ExitStatus::GuestCrash, "first");
        ending.announce(ExitStatus::GuestReset, "second");
        assert_eq!(ending.get().unwrap().message, "first");
        assert_eq!(ending.event().read().unwrap(), 2);
    }
}
