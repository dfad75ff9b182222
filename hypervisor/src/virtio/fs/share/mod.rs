//! A directory of the host as a FUSE file system: what each request does.
//!
//! The guest's kernel resolves paths, checks permissions and keeps locks; it names files by nodes and
//! single names. A name never has a slash here and is never `.` or `..`, and nothing follows a symbolic
//! link, so the guest stays inside the share. Only regular files and directories are ever opened; FIFOs,
//! sockets and devices are the guest kernel's own business and exist here as names.

mod attributes;
mod names;
mod requests;

use std::ffi::CStr;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, Statx};
use rustix::io::Errno;
use rustix::path::DecInt;
use virtiofsd::filesystem::{Entry, OpenOptions};
use virtiofsd::fuse::{ATTR_SUBMOUNT, Attr};

use super::credentials::WithoutFsetid;
use super::descriptors::{Budget, Descriptor};
use super::handles::{Handle, Handles};
use super::identity::{attributes as attributes_of, stat};
use super::nodes::{Claim, Limits, Nodes};
use super::policy::Cache;
pub use requests::listing;

/// What a guest may ask for when it opens a file; the rest of `O_*` is its own business. `O_DIRECT` is not here: the
/// guest bypasses its own cache, not the host's.
const OPEN_FLAGS: u32 = (libc::O_ACCMODE
    | libc::O_TRUNC
    | libc::O_SYNC
    | libc::O_NOATIME
    | libc::O_DIRECTORY
    | libc::O_NONBLOCK) as u32;

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

/// What the guest may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    Full,
    /// What is mounted below the directory, but not the directory itself: see [`ShareConfig::mounts_only`].
    ///
    /// [`ShareConfig::mounts_only`]: cube_hypervisor_api::config::ShareConfig::mounts_only
    MountsOnly,
    /// Nothing.
    ReadOnly,
}

/// A shared directory and what the guest knows of it.
pub struct Directory {
    nodes: Nodes,
    handles: Handles,
    /// `/proc/self/fd`, through which a reference (`O_PATH`) becomes an open file.
    by_number: OwnedFd,
    budget: &'static Budget,
    access: Access,
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
        access: Access,
        guest_owned: Vec<String>,
        limits: Limits,
        on_crowd: OnCrowd,
    ) -> io::Result<Self> {
        let directory = Directory::new(root, access, guest_owned, limits, on_crowd)?;
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
        access: Access,
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
            access,
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

    /// Whether the guest may change node `node`, or the names in it.
    fn changes(&self, node: u64) -> Result<(), Errno> {
        let may = match self.access {
            Access::Full => true,
            Access::MountsOnly => !self.nodes.is_in_roots_mount(node)?,
            Access::ReadOnly => false,
        };
        may.then_some(()).ok_or(Errno::ROFS)
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
            self.changes(node)?;
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
            attr: attributes_of(found, flags),
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

    fn handle_of(&self, handle: Option<u64>, node: u64) -> Option<Arc<Handle>> {
        handle.and_then(|number| self.handles.get(number, node).ok())
    }
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
