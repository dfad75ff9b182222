//! SIGINT and SIGTERM end the machine in good order.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;

use cube_hypervisor_api::ExitStatus;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use crate::ending::Ending;

/// The signals, as a descriptor of the event loop.
pub struct Signals {
    fd: OwnedFd,
    ending: Arc<Ending>,
}

impl Signals {
    /// Takes the signals over: from here on they are delivered to the event loop only. To be called
    /// before there is another thread.
    pub fn take_over(ending: Arc<Ending>) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: The first call initialises the set that the others work on; all pointers are to live variables.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: The descriptor is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, ending })
    }
}

impl MutEventSubscriber for Signals {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(&self.fd.as_raw_fd(), EventSet::IN)) {
            log::error!("Cannot watch for signals: {e}");
        }
    }

    /// The loop ends with the machine, so which signal it was need not be read.
    fn process(&mut self, _: Events, _: &mut EventOps) {
        self.ending
            .announce(ExitStatus::GuestReset, "Stopped by a signal");
    }
}
