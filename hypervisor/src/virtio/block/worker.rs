//! The thread that carries a disk's requests out: the host may let them wait.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use vmm_sys_util::eventfd::EventFd;

use super::disk::Disk;
use super::request::{ID_LEN, Target};
use crate::virtio::queue::{Buffers, DeviceQueue};

/// Reserved for the worker's stack; only what is touched is memory.
const STACK: usize = 128 * 1024;

/// The most requests between two interrupts.
const BATCH: usize = 32;

/// A queue with what its requests are carried out on; goes to the worker and comes back.
pub struct Ring {
    pub queue: DeviceQueue,
    pub buffers: Buffers,
    pub id: [u8; ID_LEN],
    pub write_through: bool,
    /// Whether an error of the host was logged: one is enough.
    pub complained: bool,
}

impl Ring {
    /// Carries out what is in the queue, up to a batch. `true` when there may be more.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn serve(&mut self, disk: Option<&Disk>) -> Result<bool, crate::virtio::queue::QueueError> {
        let Self {
            queue,
            buffers,
            id,
            write_through,
            complained,
        } = self;
        let target = Target {
            disk,
            id,
            write_through: *write_through,
        };
        queue.serve(buffers, BATCH, |buffers| {
            let (written, error) = target.serve(buffers);
            if let Some(error) = error
                && !std::mem::replace(complained, true)
            {
                log::warn!("A disk of the guest fails (told once): {error}");
            }
            Some(written)
        })
    }
}

/// A running worker.
pub struct Worker {
    thread: JoinHandle<Option<Box<Ring>>>,
    stop: Arc<EventFd>,
}

impl Worker {
    /// Starts a worker that takes kicks from `kick`.
    ///
    /// # Errors
    ///
    /// The host has no thread or eventfd left; the ring is lost then.
    pub fn start(ring: Box<Ring>, disk: Arc<Disk>, kick: EventFd) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("block".to_owned())
            .stack_size(STACK)
            .spawn(move || work(ring, &disk, &kick, &stopped))?;
        Ok(Self { thread, stop })
    }

    /// Lets the worker finish its batch and end. Returns the ring, or `None` if the driver broke it. If requests are
    /// left, the kick is readable.
    pub fn stop(self) -> Option<Box<Ring>> {
        self.ask_to_stop();
        self.thread.join().ok().flatten()
    }

    /// The same without waiting for it.
    pub fn ask_to_stop(&self) {
        // It fails only when it is readable anyway.
        let _ = self.stop.write(1);
    }
}

fn work(mut ring: Box<Ring>, disk: &Disk, kick: &EventFd, stop: &EventFd) -> Option<Box<Ring>> {
    loop {
        let more = match ring.serve(Some(disk)) {
            Ok(more) => more,
            Err(error) => {
                log::warn!("The guest broke a disk's queue: {error}");
                ring.queue.interrupt().signal_needs_reset();
                return None;
            }
        };
        match wait(kick, stop, more) {
            Ok(false) => {
                // Resets the counter; it is not readable when there is more and no kick.
                let _ = kick.read();
            }
            Ok(true) => {
                if more {
                    let _ = kick.write(1);
                }
                return Some(ring);
            }
            Err(error) => {
                log::error!("A disk's worker cannot wait for the guest: {error}");
                ring.queue.interrupt().signal_needs_reset();
                return None;
            }
        }
    }
}

/// Waits for a kick, or looks only if there is `more` to do. `true` for the order to stop.
fn wait(kick: &EventFd, stop: &EventFd, more: bool) -> io::Result<bool> {
    let mut polls = [kick, stop].map(|event| libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    let timeout = if more { 0 } else { -1 };
    loop {
        // SAFETY: two pollfds, valid for the call.
        let result = unsafe { libc::poll(polls.as_mut_ptr(), 2, timeout) };
        if result >= 0 {
            return Ok(polls[1].revents != 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
