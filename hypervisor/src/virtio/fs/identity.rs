//! Which file a file is.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use virtiofsd::fuse::Attr;

use super::descriptors::{Budget, Descriptor};

/// What tells a file from all others that exist on the host at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identity {
    dev: u64,
    ino: u64,
    /// Two mounts of one filesystem are two trees for the guest.
    mount: u64,
}

/// When the file came into being: what tells it from a later one that got its inode number.
/// `None` where the filesystem does not say.
pub type Birth = Option<(i64, u32)>;

impl Identity {
    /// Of the file that `stat` is of.
    pub fn of(stat: &Statx) -> Self {
        Self {
            dev: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
            mount: stat.stx_mnt_id,
        }
    }

    /// Whether both lie in the same mount of the same filesystem.
    pub fn same_mount(&self, other: &Self) -> bool {
        (self.dev, self.mount) == (other.dev, other.mount)
    }
}

/// See [`Birth`].
pub fn birth(stat: &Statx) -> Birth {
    let known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    known.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}

/// What is known of a file that was seen earlier, to recognise it by.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Its identity.
    pub identity: Identity,
    /// Its birth.
    pub birth: Birth,
    /// One of `S_IFMT`.
    pub kind: u32,
    /// Whether nothing but the guest changes the tree that it is in.
    pub owned: bool,
}

impl Seen {
    /// Whether `stat`, found where the file was, is of the same file.
    ///
    /// A directory's birth does not count: overlayfs changes it when it copies a directory up, which
    /// happens to all parents of a file that is written. Where an overlay's layers lie in different
    /// file systems, a directory's inode number does not stay either; in a tree of the guest's own the
    /// place says enough.
    pub fn is(&self, stat: &Statx) -> bool {
        let identity = Identity::of(stat);
        match (self.kind == libc::S_IFDIR, self.owned) {
            (true, true) => kind(stat) == self.kind && self.identity.same_mount(&identity),
            (true, false) => self.identity == identity,
            (false, _) => self.identity == identity && self.birth == birth(stat),
        }
    }
}

/// The type of the file, one of `S_IFMT`.
pub fn kind(stat: &Statx) -> u32 {
    u32::from(stat.stx_mode) & libc::S_IFMT
}

/// Asks for the file `name` in `dir`, without following it; `dir` itself if the name is empty.
pub fn stat(dir: impl AsFd, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    rustix::fs::statx(dir, name, flags, mask)
}

/// Opens the file `name` in `dir`, whatever its type, as a reference only (`O_PATH`).
pub fn refer(dir: impl AsFd, name: &CStr, budget: &'static Budget) -> Result<Descriptor, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    budget.count(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// What FUSE calls the attributes of the file that `stat` is of, with `flags` (`ATTR_*`).
pub fn attributes(stat: &Statx, flags: u32) -> Attr {
    // Linux's 32-bit encoding of a device number (include/linux/kdev_t.h, new_encode_dev).
    let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
    let rdev = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
    Attr {
        ino: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: stat.stx_atime.tv_sec as u64,
        mtime: stat.stx_mtime.tv_sec as u64,
        ctime: stat.stx_ctime.tv_sec as u64,
        atimensec: stat.stx_atime.tv_nsec,
        mtimensec: stat.stx_mtime.tv_nsec,
        ctimensec: stat.stx_ctime.tv_nsec,
        mode: stat.stx_mode.into(),
        nlink: stat.stx_nlink,
        uid: stat.stx_uid.into(),
        gid: stat.stx_gid.into(),
        rdev,
        blksize: stat.stx_blksize,
        flags,
    }
}

/// The device number that FUSE's `rdev` means.
pub fn device_number(rdev: u32) -> u64 {
    let minor = (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00);
    rustix::fs::makedev((rdev >> 8) & 0xfff, minor)
}
