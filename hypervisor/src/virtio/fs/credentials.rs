//! On whose behalf a worker thread acts.
//!
//! The guest's kernel has checked permissions before it asks, so a worker keeps all of its rights
//! and only takes the user's identity where the host's kernel writes it down: as the owner of what is
//! created. All of this is state of one thread; nothing changes for the others in the process.

use rustix::fs::Mode;
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, UnshareFlags};

/// Makes the calling thread one that can serve a share: a umask of its own, zero, and rights that do
/// not depend on the user whose identity it takes.
///
/// # Errors
///
/// The kernel refuses a thread its own umask.
pub fn prepare_thread() -> std::io::Result<()> {
    // SAFETY: only CLONE_FS is unshared: the umask and the working directory, not the descriptors,
    // so every descriptor stays valid in this thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS)? };
    rustix::process::umask(Mode::empty());
    let bits = CapabilitiesSecureBits::NO_SETUID_FIXUP;
    if let Err(e) = rustix::thread::set_capabilities_secure_bits(bits) {
        // Without the right to do this the process cannot take another identity either.
        log::debug!("Files created in shares belong to the hypervisor's user: {e}");
    }
    Ok(())
}

/// The identity of a user of the guest, until dropped.
pub struct ActingAs(());

impl ActingAs {
    /// Takes the identity of `uid` and `gid`. Without the right to do so the thread stays what it is.
    pub fn new(uid: u32, gid: u32) -> Option<Self> {
        (uid != 0 || gid != 0).then(|| {
            set_fs_ids(uid, gid);
            Self(())
        })
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        // SAFETY: both only return a number.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        set_fs_ids(uid, gid);
    }
}

fn set_fs_ids(uid: u32, gid: u32) {
    // SAFETY: the system calls change the calling thread's file system identity and touch no memory. The
    // group goes first: nothing depends on the order while capabilities stay.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
    }
}

/// The absence of the right to keep set-user-ID and set-group-ID bits (CAP_FSETID), until dropped:
/// the host's kernel then clears them as it does for an unprivileged writer.
pub struct WithoutFsetid(CapabilitySets);

impl WithoutFsetid {
    /// Gives the right up if `wanted` and if the thread has it.
    pub fn new(wanted: bool) -> Option<Self> {
        if !wanted {
            return None;
        }
        let all = rustix::thread::capabilities(None).ok()?;
        let mut fewer = all;
        fewer.effective.remove(CapabilitySet::FSETID);
        rustix::thread::set_capabilities(None, fewer).ok()?;
        Some(Self(all))
    }
}

impl Drop for WithoutFsetid {
    fn drop(&mut self) {
        if let Err(e) = rustix::thread::set_capabilities(None, self.0) {
            log::error!("Cannot take CAP_FSETID again: {e}");
        }
    }
}

/// A umask other than zero, until dropped: where ACLs are in use the host applies it, unless the
/// directory has a default ACL.
pub struct WithUmask(());

impl WithUmask {
    /// Sets `umask` if it is not zero.
    pub fn new(umask: u32) -> Option<Self> {
        (umask & 0o777 != 0).then(|| {
            rustix::process::umask(Mode::from_raw_mode(umask & 0o777));
            Self(())
        })
    }
}

impl Drop for WithUmask {
    fn drop(&mut self) {
        rustix::process::umask(Mode::empty());
    }
}
