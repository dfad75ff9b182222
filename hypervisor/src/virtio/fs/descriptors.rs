//! What the shares of this process may take of its file descriptors.
//!
//! Every open file of a guest is a descriptor here, and so is every inode that a share holds on to.
//! The rest of the process must always find free ones, whatever a guest does, so shares take theirs
//! from a budget that leaves [`RESERVE`] of the limit (`RLIMIT_NOFILE`) alone.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that shares leave to everybody else in the process.
pub const RESERVE: u64 = 512;

/// How many more a share may take now. The limit is the process's, and so is this.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// The limit that `LEFT` was made of.
static LIMIT: AtomicU64 = AtomicU64::new(0);

/// Raises the process's limit as far as it goes and sets the budget accordingly. Every call after the
/// first one changes nothing.
pub fn open_budget() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::from(u32::MAX));
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(e) = setrlimit(Resource::Nofile, raised) {
            log::warn!("Cannot raise the limit of open files to {most}: {e}");
        }
    }
    let usable = getrlimit(Resource::Nofile).current.unwrap_or(most);
    if LIMIT
        .compare_exchange(0, usable, Ordering::AcqRel, Ordering::Acquire)
        .is_ok()
    {
        LEFT.fetch_add(usable.saturating_sub(RESERVE), Ordering::AcqRel);
    }
}

/// A file descriptor that counts against the budget until it is dropped.
pub struct Descriptor(File);

impl Descriptor {
    /// Counts `file`.
    ///
    /// # Errors
    ///
    /// `ENFILE` when the budget is used up; `file` is closed then.
    pub fn new(file: OwnedFd) -> Result<Self, Errno> {
        LEFT.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| {
            left.checked_sub(1)
        })
        .map_err(|_| Errno::NFILE)?;
        Ok(Self(file.into()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        LEFT.fetch_add(1, Ordering::AcqRel);
    }
}

impl Deref for Descriptor {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
