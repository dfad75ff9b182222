//! What changes the names in a directory: making, removing, renaming.

use std::ffi::CStr;

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use virtiofsd::filesystem::{Context, Entry};
use virtiofsd::soft_idmap::Id;

use super::{Directory, OPEN_FLAGS, checked};
use crate::virtio::fs::credentials::{ActingAs, WithUmask};
use crate::virtio::fs::descriptors::Descriptor;
use crate::virtio::fs::identity::stat;

impl Directory {
    /// Makes `name` in `parent` with `make`, as the user in `context`.
    pub(super) fn make(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        umask: u32,
        make: impl FnOnce(&Descriptor) -> Result<(), Errno>,
    ) -> Result<Entry, Errno> {
        self.changes(parent)?;
        checked(name)?;
        let directory = self.nodes.file(parent)?;
        {
            let _acting = ActingAs::new(context.uid.into_inner(), context.gid.into_inner());
            let _umask = WithUmask::new(umask);
            make(&directory)?;
        }
        let made = stat(&*directory, name)?;
        self.claim(parent, name, &made)
    }

    pub(super) fn create_file(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        flags: u32,
        umask: u32,
    ) -> Result<(Entry, Descriptor), Errno> {
        checked(name)?;
        let directory = self.nodes.file(parent)?;
        let file = {
            let _acting = ActingAs::new(context.uid.into_inner(), context.gid.into_inner());
            let _umask = WithUmask::new(umask);
            // O_EXCL: only what did not exist is opened by its name; what exists may be no regular file.
            let flags = OFlags::from_bits_retain(flags & OPEN_FLAGS)
                | OFlags::CREATE
                | OFlags::EXCL
                | OFlags::NOFOLLOW
                | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(mode & 0o7777);
            self.budget
                .count(rustix::fs::openat(&*directory, name, flags, mode)?)?
        };
        let made = stat(&file, c"")?;
        Ok((self.claim(parent, name, &made)?, file))
    }

    pub(super) fn remove(&self, parent: u64, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
        self.changes(parent)?;
        checked(name)?;
        let directory = self.nodes.file(parent)?;
        let victim = self.nodes.hold_named(&directory, name);
        rustix::fs::unlinkat(&*directory, name, flags)?;
        if let Some(victim) = victim {
            self.nodes.unnamed(victim, parent, name);
        }
        Ok(())
    }

    pub(super) fn rename_checked(
        &self,
        (old_parent, old_name): (u64, &CStr),
        (new_parent, new_name): (u64, &CStr),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        self.changes(old_parent)?;
        self.changes(new_parent)?;
        checked(old_name)?;
        checked(new_name)?;
        let old = self.nodes.file(old_parent)?;
        let new = self.nodes.file(new_parent)?;
        let moved = self.nodes.hold_named(&old, old_name);
        let replaced = self.nodes.hold_named(&new, new_name);
        rustix::fs::renameat_with(&*old, old_name, &*new, new_name, flags)?;
        if moved == replaced {
            // Two names of one file: nothing happened. Or neither is known.
            return Ok(());
        }
        if let Some(replaced) = replaced {
            match flags.contains(RenameFlags::EXCHANGE) {
                true => self.nodes.renamed(replaced, old_parent, old_name),
                false => self.nodes.unnamed(replaced, new_parent, new_name),
            }
        }
        if let Some(moved) = moved {
            self.nodes.renamed(moved, new_parent, new_name);
        }
        Ok(())
    }
}
