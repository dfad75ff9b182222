//! `process.rlimits` that only the guest's root may have.

use std::io;

use nix::errno::Errno;
use oci_spec::runtime::{PosixRlimit, Process};

use super::child::ChildError;
use super::executor::in_words;

/// Raises the hard limits of this process to those of the container's. libcontainer sets them in the container's user
/// namespace, where nobody may raise one; what is inherited from here it does not have to raise.
pub fn raise(process: &Process) -> Result<(), ChildError> {
    for limit in process.rlimits().iter().flatten() {
        raise_one(limit).map_err(|e| {
            ChildError::Invalid(format!(
                "process.rlimits: cannot set {} to {}: {}",
                limit.typ(),
                limit.hard(),
                in_words(&e)
            ))
        })?;
    }
    Ok(())
}

fn raise_one(limit: &PosixRlimit) -> io::Result<()> {
    let resource = limit.typ() as libc::__rlimit_resource_t;
    let mut now = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure lives until the call returns.
    Errno::result(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    if limit.hard() <= now.rlim_max {
        return Ok(());
    }
    now.rlim_max = limit.hard();
    // SAFETY: as above.
    Errno::result(unsafe { libc::setrlimit(resource, &raw const now) })?;
    Ok(())
}
