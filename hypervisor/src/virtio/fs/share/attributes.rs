//! The attributes of files, extended ones among them.

use std::ffi::CStr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::path::DecInt;
use virtiofsd::filesystem::{GetxattrReply, ListxattrReply, SetattrValid, SetxattrFlags};
use virtiofsd::fuse::{Attr, SetattrIn};
use virtiofsd::soft_idmap::Id;

use super::Directory;
use crate::virtio::fs::credentials::WithoutFsetid;
use crate::virtio::fs::descriptors::Descriptor;
use crate::virtio::fs::identity::{attributes, stat};

const ACL_XATTRS: &[u8] = b"system.posix_acl_";
const ACL_ACCESS_XATTR: &[u8] = b"system.posix_acl_access";

impl Directory {
    pub(super) fn stat_node(
        &self,
        node: u64,
        handle: Option<u64>,
    ) -> Result<(Attr, Duration), Errno> {
        let (cache, _) = self.nodes.nature(node)?;
        let found = match self.handle_of(handle, node) {
            Some(open) => stat(&open.file, c"")?,
            None => self.nodes.stat(node)?,
        };
        Ok((attributes(&found, 0), cache.attributes()))
    }

    pub(super) fn set_attributes(
        &self,
        node: u64,
        new: &SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> Result<(), Errno> {
        self.changes(node)?;
        let open = self.handle_of(handle, node);
        let reference = self.nodes.file(node)?;
        if valid.contains(SetattrValid::MODE) {
            let mode = Mode::from_raw_mode(new.mode & 0o7777);
            let number = DecInt::from_fd(&*reference);
            rustix::fs::chmodat(&self.by_number, number, mode, AtFlags::empty())?;
        }
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            let id = |wanted, value: u32| valid.contains(wanted).then_some(value);
            let owner = id(SetattrValid::UID, new.uid.into_inner()).filter(|&id| id != u32::MAX);
            let group = id(SetattrValid::GID, new.gid.into_inner()).filter(|&id| id != u32::MAX);
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(
                &*reference,
                c"",
                owner.map(Uid::from_raw),
                group.map(Gid::from_raw),
                flags,
            )?;
        }
        if valid.contains(SetattrValid::SIZE) {
            let _bits_go = WithoutFsetid::new(valid.contains(SetattrValid::KILL_SUIDGID));
            match open {
                Some(open) => rustix::fs::ftruncate(&open.file, new.size)?,
                None => {
                    if self.nodes.nature(node)?.1 != libc::S_IFREG {
                        return Err(Errno::INVAL);
                    }
                    let file = self.reopen(&*reference, libc::O_WRONLY as u32)?;
                    rustix::fs::ftruncate(&file, new.size)?;
                }
            }
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            let time = |given, now, seconds, nanoseconds: u32| Timespec {
                tv_sec: seconds as i64,
                tv_nsec: match (valid.contains(given), valid.contains(now)) {
                    (true, true) => rustix::fs::UTIME_NOW,
                    (true, false) => nanoseconds.min(999_999_999).into(),
                    (false, _) => rustix::fs::UTIME_OMIT,
                },
            };
            let times = Timestamps {
                last_access: time(
                    SetattrValid::ATIME,
                    SetattrValid::ATIME_NOW,
                    new.atime,
                    new.atimensec,
                ),
                last_modification: time(
                    SetattrValid::MTIME,
                    SetattrValid::MTIME_NOW,
                    new.mtime,
                    new.mtimensec,
                ),
            };
            let number = DecInt::from_fd(&*reference);
            rustix::fs::utimensat(&self.by_number, number, &times, AtFlags::empty())?;
        }
        Ok(())
    }

    /// Sets the extended attribute `name` of `node`.
    pub(super) fn set_xattr(
        &self,
        node: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        more: SetxattrFlags,
    ) -> Result<(), Errno> {
        self.changes(node)?;
        let reference = self.nodes.file(node)?;
        let flags = XattrFlags::from_bits_retain(flags);
        rustix::fs::setxattr(path_of(&reference), name, value, flags)?;
        if more.contains(SetxattrFlags::SETXATTR_ACL_KILL_SGID)
            && name.to_bytes() == ACL_ACCESS_XATTR
        {
            let mode = u32::from(stat(&*reference, c"")?.stx_mode) & 0o7777 & !libc::S_ISGID;
            let number = DecInt::from_fd(&*reference);
            let mode = Mode::from_raw_mode(mode);
            rustix::fs::chmodat(&self.by_number, number, mode, AtFlags::empty())?;
        }
        Ok(())
    }

    /// The extended attribute `name` of `node`, or its length when `size` is zero.
    pub(super) fn get_xattr(
        &self,
        node: u64,
        name: &CStr,
        size: u32,
    ) -> Result<GetxattrReply, Errno> {
        let reference = self.nodes.file(node)?;
        let mut value = vec![0; size as usize];
        let path = path_of(&reference);
        let found = match size {
            0 => rustix::fs::getxattr_query(path, name),
            _ => rustix::fs::getxattr(path, name, value.as_mut_slice()),
        };
        match found {
            Ok(length) if size == 0 => Ok(GetxattrReply::Count(length as u32)),
            Ok(length) => {
                value.truncate(length);
                Ok(GetxattrReply::Value(value))
            }
            // A file system without ACLs. The guest's kernel takes ENODATA for "the mode says it all", and
            // any other error as a refusal.
            Err(Errno::OPNOTSUPP) if name.to_bytes().starts_with(ACL_XATTRS) => Err(Errno::NODATA),
            Err(e) => Err(e),
        }
    }

    /// The names of `node`'s extended attributes, or their length when `size` is zero.
    pub(super) fn list_xattrs(&self, node: u64, size: u32) -> Result<ListxattrReply, Errno> {
        let reference = self.nodes.file(node)?;
        if size == 0 {
            let length = rustix::fs::listxattr_query(path_of(&reference))?;
            return Ok(ListxattrReply::Count(length as u32));
        }
        let mut names = vec![0; size as usize];
        let length = rustix::fs::listxattr(path_of(&reference), names.as_mut_slice())?;
        names.truncate(length);
        Ok(ListxattrReply::Names(names))
    }

    /// Removes the extended attribute `name` of `node`.
    pub(super) fn remove_xattr(&self, node: u64, name: &CStr) -> Result<(), Errno> {
        self.changes(node)?;
        let reference = self.nodes.file(node)?;
        rustix::fs::removexattr(path_of(&reference), name)
    }
}

/// A path to the file of `reference`, whatever its type; for calls that take no descriptor of such a reference.
fn path_of(reference: &Descriptor) -> String {
    format!("/proc/self/fd/{}", reference.as_raw_fd())
}
