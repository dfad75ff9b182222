//! The requests of the protocol, one function each.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, RenameFlags, SeekFrom};
use rustix::io::Errno;
use rustix::path::DecInt;
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{Attr, SetattrIn};
use virtiofsd::oslib::WritevFlags;
use virtiofsd::read_dir::ReadDir;

use super::{OPEN_FLAGS, Share, checked, nothing};
use crate::virtio::fs::credentials::WithoutFsetid;
use crate::virtio::fs::identity::{device_number, stat};

/// What the guest's kernel must be able to do; Linux 5.15 and later can.
const REQUIRED: FsOptions = FsOptions::from_bits_truncate(
    FsOptions::SUBMOUNTS.bits()
        | FsOptions::HANDLE_KILLPRIV_V2.bits()
        | FsOptions::POSIX_ACL.bits()
        | FsOptions::DONT_MASK.bits()
        | FsOptions::SETXATTR_EXT.bits(),
);

/// What is used when the guest's kernel offers it.
const WELCOME: FsOptions = FsOptions::from_bits_truncate(
    FsOptions::DO_READDIRPLUS.bits()
        | FsOptions::READDIRPLUS_AUTO.bits()
        | FsOptions::CACHE_SYMLINKS.bits(),
);

thread_local! {
    /// Whether this thread serves READDIRPLUS: the look-ups of that request are a favour.
    static LISTING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `request` as one that lists a directory with its entries' attributes.
pub fn listing<T>(request: impl FnOnce() -> T) -> T {
    LISTING.set(true);
    let result = request();
    LISTING.set(false);
    result
}

/// `offset` and the `size` bytes behind it can be in a file.
fn in_file(offset: u64, size: u32) -> Result<(), Errno> {
    match offset.checked_add(size.into()) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

impl FileSystem for Share {
    type Inode = u64;

    type Handle = u64;

    type DirIter = ReadDir<Vec<u8>>;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        self.destroy();
        if !capable.contains(REQUIRED) {
            return Err(Errno::PROTO.into());
        }
        self.offered.store(capable.bits(), Ordering::Relaxed);
        Ok(REQUIRED | (capable & WELCOME))
    }

    fn destroy(&self) {
        self.handles.clear();
        self.nodes.clear();
        self.crowded.store(false, Ordering::Relaxed);
        self.offered.store(0, Ordering::Relaxed);
    }

    fn lookup(&self, _: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        if !LISTING.get() {
            return Ok(self.look_up(parent, name)?);
        }
        // An entry without a node is one that the guest looks up when it needs it. So it is no failure
        // of the listing when something vanishes meanwhile.
        if self.crowded.load(Ordering::Relaxed) {
            return Ok(nothing(Duration::ZERO));
        }
        Ok(self
            .look_up(parent, name)
            .unwrap_or_else(|_| nothing(Duration::ZERO)))
    }

    fn forget(&self, _: Context, node: u64, count: u64) {
        self.nodes.forget(&[(node, count)]);
    }

    fn batch_forget(&self, _: Context, requests: Vec<(u64, u64)>) {
        self.nodes.forget(&requests);
    }

    fn getattr(&self, _: Context, node: u64, handle: Option<u64>) -> io::Result<(Attr, Duration)> {
        Ok(self.stat_node(node, handle)?)
    }

    fn setattr(
        &self,
        _: Context,
        node: u64,
        new: SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(Attr, Duration)> {
        self.set_attributes(node, &new, handle, valid)?;
        Ok(self.stat_node(node, handle)?)
    }

    fn readlink(&self, _: Context, node: u64) -> io::Result<Vec<u8>> {
        if self.nodes.nature(node)?.1 != libc::S_IFLNK {
            return Err(Errno::INVAL.into());
        }
        let reference = self.nodes.file(node)?;
        let target = rustix::fs::readlinkat(&*reference, c"", Vec::new())?;
        Ok(target.into_bytes())
    }

    fn symlink(
        &self,
        context: Context,
        target: &CStr,
        parent: u64,
        name: &CStr,
        _: Extensions,
    ) -> io::Result<Entry> {
        Ok(self.make(&context, parent, name, 0, |directory| {
            rustix::fs::symlinkat(target, directory, name)
        })?)
    }

    fn mknod(
        &self,
        context: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
        _: Extensions,
    ) -> io::Result<Entry> {
        Ok(self.make(&context, parent, name, umask, |directory| {
            let kind = FileType::from_raw_mode(mode);
            let bits = Mode::from_raw_mode(mode & 0o7777);
            rustix::fs::mknodat(directory, name, kind, bits, device_number(rdev))
        })?)
    }

    fn mkdir(
        &self,
        context: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
        _: Extensions,
    ) -> io::Result<Entry> {
        Ok(self.make(&context, parent, name, umask, |directory| {
            rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(mode & 0o7777))
        })?)
    }

    fn unlink(&self, _: Context, parent: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove(parent, name, AtFlags::empty())?)
    }

    fn rmdir(&self, _: Context, parent: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove(parent, name, AtFlags::REMOVEDIR)?)
    }

    fn rename(
        &self,
        _: Context,
        old_parent: u64,
        old_name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let flags = RenameFlags::from_bits_truncate(flags);
        Ok(self.rename_checked((old_parent, old_name), (new_parent, new_name), flags)?)
    }

    fn link(&self, _: Context, node: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        self.changes(parent)?;
        checked(name)?;
        let reference = self.nodes.file(node)?;
        let directory = self.nodes.file(parent)?;
        let number = DecInt::from_fd(&*reference);
        let flags = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(&self.by_number, number, &*directory, name, flags)?;
        let made = stat(&*directory, name)?;
        Ok(self.claim(parent, name, &made)?)
    }

    fn open(
        &self,
        _: Context,
        node: u64,
        kill: bool,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        let (handle, options) = self.open_node(node, flags, kill)?;
        Ok((Some(handle), options))
    }

    fn create(
        &self,
        context: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        kill: bool,
        flags: u32,
        umask: u32,
        _: Extensions,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        self.changes(parent)?;
        match self.create_file(&context, parent, name, mode, flags, umask) {
            Ok((entry, file)) => {
                let (cache, _) = self.nodes.nature(entry.inode)?;
                let handle = self.handles.add(entry.inode, file, flags & OPEN_FLAGS);
                Ok((entry, Some(handle), cache.opened(false)))
            }
            Err(Errno::EXIST) if flags & libc::O_EXCL as u32 == 0 => {
                let entry = self.look_up(parent, name)?;
                match self.open_node(entry.inode, flags, kill) {
                    Ok((handle, options)) => Ok((entry, Some(handle), options)),
                    Err(e) => {
                        self.nodes.forget(&[(entry.inode, 1)]);
                        Err(e.into())
                    }
                }
            }
            Err(e) => Err(e.into()),
        }
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        _: Context,
        node: u64,
        handle: u64,
        mut to: W,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        in_file(offset, size)?;
        let open = self.handles.get(handle, node)?;
        to.read_from_file_at(&open.file, size as usize, offset, None)
    }

    fn write<R: ZeroCopyReader>(
        &self,
        _: Context,
        node: u64,
        handle: u64,
        mut from: R,
        size: u32,
        offset: u64,
        _: Option<u64>,
        delayed: bool,
        kill: bool,
        flags: u32,
    ) -> io::Result<usize> {
        in_file(offset, size)?;
        self.changes(node)?;
        let open = self.handles.get(handle, node)?;
        let _bits_go = WithoutFsetid::new(kill);
        // The guest's idea of the end of the file may be old; not so for pages that it mapped.
        let append = !delayed && flags & libc::O_APPEND as u32 != 0;
        let flags = append.then_some(WritevFlags::RWF_APPEND);
        from.write_to_file_at(&open.file, size as usize, offset, flags)
    }

    fn flush(&self, _: Context, node: u64, handle: u64, _: u64) -> io::Result<()> {
        // Network file systems write back, and report errors, whenever one of a file's descriptors is closed.
        let open = self.handles.get(handle, node)?;
        let copy = open.file.try_clone()?;
        // SAFETY: the descriptor is owned by nobody else.
        match unsafe { libc::close(std::os::fd::IntoRawFd::into_raw_fd(copy)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn fsync(&self, _: Context, node: u64, data_only: bool, handle: u64) -> io::Result<()> {
        let open = self.handles.get(handle, node)?;
        match data_only {
            true => rustix::fs::fdatasync(&open.file)?,
            false => rustix::fs::fsync(&open.file)?,
        }
        Ok(())
    }

    fn fallocate(
        &self,
        _: Context,
        node: u64,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        self.changes(node)?;
        let open = self.handles.get(handle, node)?;
        let mode = FallocateFlags::from_bits_retain(mode);
        Ok(rustix::fs::fallocate(&open.file, mode, offset, length)?)
    }

    fn release(
        &self,
        _: Context,
        node: u64,
        _: u32,
        handle: u64,
        _: bool,
        _: bool,
        _: Option<u64>,
    ) -> io::Result<()> {
        Ok(self.handles.close(handle, node)?)
    }

    fn statfs(&self, _: Context, node: u64) -> io::Result<libc::statvfs64> {
        let reference = self.nodes.file(node)?;
        let mut out = std::mem::MaybeUninit::<libc::statvfs64>::zeroed();
        // SAFETY: the descriptor is open, and `out` is what the call fills.
        if unsafe { libc::fstatvfs64(reference.as_raw_fd(), out.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it has only integer fields, and was zeroed and filled.
        Ok(unsafe { out.assume_init() })
    }

    fn setxattr(
        &self,
        _: Context,
        node: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        more: SetxattrFlags,
    ) -> io::Result<()> {
        Ok(self.set_xattr(node, name, value, flags, more)?)
    }

    fn getxattr(&self, _: Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        Ok(self.get_xattr(node, name, size)?)
    }

    fn listxattr(&self, _: Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
        Ok(self.list_xattrs(node, size)?)
    }

    fn removexattr(&self, _: Context, node: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove_xattr(node, name)?)
    }

    fn opendir(&self, _: Context, node: u64, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        let flags = flags & !(libc::O_ACCMODE as u32) | libc::O_DIRECTORY as u32;
        let (handle, options) = self.open_node(node, flags, false)?;
        Ok((Some(handle), options))
    }

    fn readdir(
        &self,
        _: Context,
        node: u64,
        handle: u64,
        size: u32,
        offset: u64,
    ) -> io::Result<Self::DirIter> {
        let open = self.handles.get(handle, node)?;
        // An entry with attributes takes six times the space: do not read what does not fit. One entry always does.
        let size = match LISTING.get() {
            true => (size / 4).max(1024),
            false => size,
        };
        let _position = open.position.lock().unwrap_or_else(PoisonError::into_inner);
        ReadDir::new(&*open.file, offset, vec![0; size as usize])
    }

    fn fsyncdir(
        &self,
        context: Context,
        node: u64,
        data_only: bool,
        handle: u64,
    ) -> io::Result<()> {
        self.fsync(context, node, data_only, handle)
    }

    fn releasedir(&self, _: Context, node: u64, _: u32, handle: u64) -> io::Result<()> {
        Ok(self.handles.close(handle, node)?)
    }

    fn lseek(
        &self,
        _: Context,
        node: u64,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> io::Result<u64> {
        let open = self.handles.get(handle, node)?;
        let to = match whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        Ok(rustix::fs::seek(&open.file, to)?)
    }

    fn copyfilerange(
        &self,
        _: Context,
        node_in: u64,
        handle_in: u64,
        mut offset_in: u64,
        node_out: u64,
        handle_out: u64,
        mut offset_out: u64,
        length: u64,
        _: u64,
    ) -> io::Result<usize> {
        self.changes(node_out)?;
        let from = self.handles.get(handle_in, node_in)?;
        let to = self.handles.get(handle_out, node_out)?;
        // The reply has 32 bits for the number of bytes.
        let length = length.min(1 << 30) as usize;
        Ok(rustix::fs::copy_file_range(
            &from.file,
            Some(&mut offset_in),
            &to.file,
            Some(&mut offset_out),
            length,
        )?)
    }

    fn syncfs(&self, _: Context, node: u64) -> io::Result<()> {
        if self.nodes.nature(node)?.1 != libc::S_IFDIR {
            return Err(Errno::INVAL.into());
        }
        let reference = self.nodes.file(node)?;
        let directory = self.reopen(&*reference, libc::O_DIRECTORY as u32)?;
        Ok(rustix::fs::syncfs(&directory)?)
    }
}
