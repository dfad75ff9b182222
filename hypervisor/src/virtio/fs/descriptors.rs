//! What the shares of this process may take of its file descriptors.
//!
//! Every open file of a guest is a descriptor here, and so is every inode that a share holds on to.
//! The rest of the process must always find free ones, whatever a guest does, so shares take theirs
//! from a budget, which [`Parts`] sets.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::descriptors::Parts;

/// How many descriptors may still be taken.
pub struct Budget(AtomicU64);

impl Budget {
    /// The process's: the [part of the shares](Parts::shares).
    pub fn of_process() -> &'static Self {
        static BUDGET: OnceLock<Budget> = OnceLock::new();
        BUDGET.get_or_init(|| Self(AtomicU64::new(Parts::of_process().shares)))
    }

    /// One of its own, of `left` descriptors.
    #[cfg(test)]
    pub fn of(left: u64) -> &'static Self {
        Box::leak(Box::new(Self(AtomicU64::new(left))))
    }

    /// Counts `file`.
    ///
    /// # Errors
    ///
    /// `ENFILE` when the budget is used up; `file` is closed then.
    pub fn count(&'static self, file: OwnedFd) -> Result<Descriptor, Errno> {
        let taken = |left: u64| left.checked_sub(1);
        match self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, taken)
        {
            Ok(_) => Ok(Descriptor(file.into(), self)),
            Err(_) => Err(Errno::NFILE),
        }
    }
}

/// A file descriptor that counts against its budget until it is dropped.
pub struct Descriptor(File, &'static Budget);

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.1.0.fetch_add(1, Ordering::AcqRel);
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
