//! A directory of the host as a FUSE file system: what each request does.
//!
//! The guest's kernel resolves paths, checks permissions and keeps locks; it names files by nodes and
//! single names. A name never has a slash here and is never `.` or `..`, and nothing follows a symbolic
//! link, so the guest stays inside the share. Only regular files and directories are ever opened; FIFOs,
//! sockets and devices are the guest kernel's own business and exist here as names.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Statx, Timespec,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::path::DecInt;
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{ATTR_SUBMOUNT, Attr, SetattrIn};
use virtiofsd::oslib::WritevFlags;
use virtiofsd::read_dir::ReadDir;
use virtiofsd::soft_idmap::Id;

use super::credentials::{ActingAs, WithUmask, WithoutFsetid};
use super::descriptors::{Budget, Descriptor};
use super::handles::{Handle, Handles};
use super::identity::{attributes, device_number, stat};
use super::nodes::{Claim, Limits, Nodes};
use super::policy::Cache;

/// What a guest may ask for when it opens a file; the rest of `O_*` is its own business. `O_DIRECT` is not here: the
/// guest bypasses its own cache, not the host's.
const OPEN_FLAGS: u32 = (libc::O_ACCMODE
    | libc::O_TRUNC
    | libc::O_SYNC
    | libc::O_NOATIME
    | libc::O_DIRECTORY
    | libc::O_NONBLOCK) as u32;

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

const ACL_XATTRS: &[u8] = b"system.posix_acl_";
const ACL_ACCESS_XATTR: &[u8] = b"system.posix_acl_access";

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

/// Called with the number of nodes when the guest knows very many.
pub type OnCrowd = Box<dyn Fn(u64) + Send + Sync>;

/// A shared directory, as virtiofsd's protocol code serves it and as the device saves it.
#[derive(Clone)]
pub struct Share(Arc<Directory>);

impl Deref for Share {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        &self.0
    }
}

/// A shared directory and what the guest knows of it.
pub struct Directory {
    nodes: Nodes,
    handles: Handles,
    /// `/proc/self/fd`, through which a reference (`O_PATH`) becomes an open file.
    by_number: OwnedFd,
    budget: &'static Budget,
    read_only: bool,
    guest_owned: Vec<String>,
    on_crowd: OnCrowd,
    /// No more favours: the guest knows enough nodes.
    crowded: AtomicBool,
    /// What the guest's kernel offered at INIT; zero before it.
    offered: AtomicU64,
}

impl Share {
    /// See [`Directory::new`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn new(
        root: Descriptor,
        read_only: bool,
        guest_owned: Vec<String>,
        limits: Limits,
        on_crowd: OnCrowd,
    ) -> io::Result<Self> {
        let directory = Directory::new(root, read_only, guest_owned, limits, on_crowd)?;
        Ok(Self(Arc::new(directory)))
    }
}

impl Directory {
    /// The directory `root`. `on_crowd` is called when there are `limits.crowd` nodes.
    ///
    /// # Errors
    ///
    /// `root` cannot be read, or there is no `/proc`.
    pub fn new(
        root: Descriptor,
        read_only: bool,
        guest_owned: Vec<String>,
        limits: Limits,
        on_crowd: OnCrowd,
    ) -> io::Result<Self> {
        let root_stat = stat(&root, c"")?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            nodes: Nodes::new(root, &root_stat, limits),
            handles: Handles::default(),
            by_number: rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?,
            budget: limits.budget,
            read_only,
            guest_owned,
            on_crowd,
            crowded: AtomicBool::new(false),
            offered: AtomicU64::new(0),
        })
    }

    pub(super) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(super) fn handles(&self) -> &Handles {
        &self.handles
    }

    pub(super) fn offered(&self) -> &AtomicU64 {
        &self.offered
    }

    fn changes(&self) -> Result<(), Errno> {
        match self.read_only {
            true => Err(Errno::ROFS),
            false => Ok(()),
        }
    }

    /// Opens the file that `reference` refers to.
    pub(super) fn reopen(&self, reference: impl AsFd, flags: u32) -> Result<Descriptor, Errno> {
        let flags = OFlags::from_bits_retain(flags & OPEN_FLAGS) | OFlags::CLOEXEC;
        let open = |flags| {
            let number = DecInt::from_fd(&reference);
            rustix::fs::openat(&self.by_number, number, flags, Mode::empty())
        };
        let opened = match open(flags) {
            // Only a file's owner may leave its access time alone.
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => open(flags - OFlags::NOATIME),
            other => other,
        };
        self.budget.count(opened?)
    }

    fn open_node(&self, node: u64, flags: u32, kill: bool) -> Result<(u64, OpenOptions), Errno> {
        let (cache, kind) = self.nodes.nature(node)?;
        let directory = flags & libc::O_DIRECTORY as u32 != 0;
        match (kind, directory) {
            (libc::S_IFDIR, _) | (libc::S_IFREG, false) => {}
            (_, true) => return Err(Errno::NOTDIR),
            // The guest's kernel opens everything else itself.
            _ => return Err(Errno::NXIO),
        }
        if flags & (libc::O_ACCMODE | libc::O_TRUNC) as u32 != 0 {
            self.changes()?;
        }
        let reference = self.nodes.file(node)?;
        let _bits_go = WithoutFsetid::new(kill);
        let file = self.reopen(&*reference, flags)?;
        Ok((
            self.handles.add(node, file, flags & OPEN_FLAGS),
            cache.opened(directory),
        ))
    }

    fn claim(&self, parent: u64, name: &CStr, found: &Statx) -> Result<Entry, Errno> {
        let Claim {
            id,
            cache,
            name_cache,
            other_mount,
            crowded,
        } = self
            .nodes
            .claim(parent, name, found, |p| p.of_child(name, &self.guest_owned))?;
        if let Some(nodes) = crowded {
            self.crowded.store(true, Ordering::Relaxed);
            (self.on_crowd)(nodes as u64);
        }
        let is_directory = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFDIR;
        let flags = match is_directory && other_mount {
            true => ATTR_SUBMOUNT,
            false => 0,
        };
        Ok(Entry {
            inode: id,
            generation: 0,
            attr: attributes(found, flags),
            attr_timeout: cache.attributes(),
            entry_timeout: name_cache.names(),
        })
    }

    fn look_up(&self, parent: u64, name: &CStr) -> Result<Entry, Errno> {
        checked(name)?;
        let directory = self.nodes.file(parent)?;
        match stat(&*directory, name) {
            Ok(found) => self.claim(parent, name, &found),
            Err(Errno::NOENT) => {
                let (cache, _) = self.nodes.nature(parent)?;
                match cache {
                    Cache::Owned => Ok(nothing(cache.names())),
                    _ => Err(Errno::NOENT),
                }
            }
            Err(e) => Err(e),
        }
    }

    /// Makes `name` in `parent` with `make`, as the user in `context`.
    fn make(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        umask: u32,
        make: impl FnOnce(&Descriptor) -> Result<(), Errno>,
    ) -> Result<Entry, Errno> {
        self.changes()?;
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

    fn remove(&self, parent: u64, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
        self.changes()?;
        checked(name)?;
        let directory = self.nodes.file(parent)?;
        let victim = self.nodes.hold_named(&directory, name);
        rustix::fs::unlinkat(&*directory, name, flags)?;
        if let Some(victim) = victim {
            self.nodes.unnamed(victim, parent, name);
        }
        Ok(())
    }

    fn handle_of(&self, handle: Option<u64>, node: u64) -> Option<Arc<Handle>> {
        handle.and_then(|number| self.handles.get(number, node).ok())
    }

    fn stat_node(&self, node: u64, handle: Option<u64>) -> Result<(Attr, Duration), Errno> {
        let (cache, _) = self.nodes.nature(node)?;
        let found = match self.handle_of(handle, node) {
            Some(open) => stat(&open.file, c"")?,
            None => self.nodes.stat(node)?,
        };
        Ok((attributes(&found, 0), cache.attributes()))
    }

    fn set_attributes(
        &self,
        node: u64,
        new: &SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> Result<(), Errno> {
        self.changes()?;
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

    fn rename_checked(
        &self,
        (old_parent, old_name): (u64, &CStr),
        (new_parent, new_name): (u64, &CStr),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        self.changes()?;
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

    fn create_file(
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
}

/// A path to the file of `reference`, whatever its type; for calls that take no descriptor of such a reference.
fn path_of(reference: &Descriptor) -> String {
    format!("/proc/self/fd/{}", reference.as_raw_fd())
}

/// A negative entry: the guest may believe for `how_long` that there is no such name.
fn nothing(how_long: Duration) -> Entry {
    Entry {
        inode: 0,
        generation: 0,
        attr: Attr::default(),
        attr_timeout: Duration::ZERO,
        entry_timeout: how_long,
    }
}

/// A name is one component of a path.
fn checked(name: &CStr) -> Result<(), Errno> {
    match name.to_bytes() {
        b"" | b"." | b".." => Err(Errno::INVAL),
        bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
        _ => Ok(()),
    }
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
        self.changes()?;
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
        self.changes()?;
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
        self.changes()?;
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
        self.changes()?;
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
        self.changes()?;
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

    fn getxattr(&self, _: Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
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
            Err(Errno::OPNOTSUPP) if name.to_bytes().starts_with(ACL_XATTRS) => {
                Err(Errno::NODATA.into())
            }
            Err(e) => Err(e.into()),
        }
    }

    fn listxattr(&self, _: Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
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

    fn removexattr(&self, _: Context, node: u64, name: &CStr) -> io::Result<()> {
        self.changes()?;
        let reference = self.nodes.file(node)?;
        Ok(rustix::fs::removexattr(path_of(&reference), name)?)
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
        self.changes()?;
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

/// Whether the file `name` can be shared at all: a directory that the process may list.
///
/// # Errors
///
/// Why not.
pub fn open_root(path: &Path, budget: &'static Budget) -> io::Result<Descriptor> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    Ok(budget.count(directory)?)
}
