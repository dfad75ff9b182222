//! Mounts on the host: what containerd hands over as a container's root file system, and binds of
//! volumes into the directory that the guest sees.

use std::ffi::CString;
use std::fs::FileType;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A mount as containerd describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// The file system's type, or `bind`.
    pub kind: String,
    /// Its source.
    pub source: String,
    /// A directory below the one that it is mounted on; empty for that one itself.
    pub target: String,
    /// Options as in fstab(5).
    pub options: Vec<String>,
}

/// Why something could not be mounted. The words are those that runc's users know.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel refused.
    #[error(
        "failed to mount rootfs component: mount source: {source_path:?}, target: {target:?}, fstype: {kind}, data: {data:?}: {error}"
    )]
    Rootfs {
        /// What was to be mounted.
        source_path: String,
        /// Where.
        target: PathBuf,
        /// The type.
        kind: String,
        /// The file system's own options.
        data: String,
        /// Why not.
        error: Errno,
    },
    /// More options than the kernel takes, with no common directory to shorten them by.
    #[error("failed to mount rootfs component: the options of {0:?} are longer than a page")]
    TooManyOptions(PathBuf),
    /// The mount point cannot be made.
    #[error("Cannot make the mount point {0:?}: {1}")]
    MountPoint(PathBuf, io::Error),
    /// The mount point would lie outside of the root file system.
    #[error("failed to mount rootfs component: the target {0:?} leads out of the root file system")]
    Outside(String),
    /// A volume's source is not there.
    #[error("error mounting {0:?} to rootfs at {1:?}: stat {0}: {2}")]
    NoSource(PathBuf, PathBuf, Errno),
    /// A volume cannot be bound.
    #[error("error mounting {0:?} to rootfs at {1:?}: {2}")]
    Bind(PathBuf, PathBuf, Errno),
    /// A volume that is only what it is in the kernel that made it.
    #[error(
        "error mounting {0:?} to rootfs at {1:?}: it is a {2} of the host, which does not reach into a VM: {3}"
    )]
    OfTheHost(PathBuf, PathBuf, &'static str, &'static str),
}

/// What the options of a mount mean.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    flags: MsFlags,
    data: String,
    lowerdirs: Vec<String>,
}

/// Options of mount(8) that are flags of mount(2): name, flag, whether it is set or cleared.
const FLAGS: [(&str, MsFlags, bool); 26] = [
    ("async", MsFlags::MS_SYNCHRONOUS, false),
    ("atime", MsFlags::MS_NOATIME, false),
    ("bind", MsFlags::MS_BIND, true),
    ("defaults", MsFlags::empty(), true),
    ("dev", MsFlags::MS_NODEV, false),
    ("diratime", MsFlags::MS_NODIRATIME, false),
    ("dirsync", MsFlags::MS_DIRSYNC, true),
    ("exec", MsFlags::MS_NOEXEC, false),
    ("lazytime", MsFlags::MS_LAZYTIME, true),
    ("mand", MsFlags::MS_MANDLOCK, true),
    ("noatime", MsFlags::MS_NOATIME, true),
    ("nodev", MsFlags::MS_NODEV, true),
    ("nodiratime", MsFlags::MS_NODIRATIME, true),
    ("noexec", MsFlags::MS_NOEXEC, true),
    ("nomand", MsFlags::MS_MANDLOCK, false),
    ("norelatime", MsFlags::MS_RELATIME, false),
    ("nostrictatime", MsFlags::MS_STRICTATIME, false),
    ("nosuid", MsFlags::MS_NOSUID, true),
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC), true),
    ("relatime", MsFlags::MS_RELATIME, true),
    ("ro", MsFlags::MS_RDONLY, true),
    ("rw", MsFlags::MS_RDONLY, false),
    ("strictatime", MsFlags::MS_STRICTATIME, true),
    ("suid", MsFlags::MS_NOSUID, false),
    ("sync", MsFlags::MS_SYNCHRONOUS, true),
    (
        "nosymfollow",
        MsFlags::from_bits_retain(libc::MS_NOSYMFOLLOW),
        true,
    ),
];

impl Options {
    /// Reads them.
    pub fn parse(options: &[String]) -> Self {
        let mut parsed = Self {
            flags: MsFlags::empty(),
            data: String::new(),
            lowerdirs: Vec::new(),
        };
        for option in options {
            // Notes of containerd's mount manager to itself.
            if option.starts_with("X-containerd.") {
                continue;
            }
            if let Some(&(_, flag, set)) = FLAGS.iter().find(|(name, ..)| name == option) {
                parsed.flags.set(flag, set);
            } else if let Some(dirs) = option.strip_prefix("lowerdir=") {
                parsed.lowerdirs = dirs.split(':').map(str::to_owned).collect();
            } else {
                if !parsed.data.is_empty() {
                    parsed.data.push(',');
                }
                parsed.data.push_str(option);
            }
        }
        parsed
    }

    /// The flags for mount(2).
    pub fn flags(&self) -> u64 {
        self.flags.bits()
    }

    /// Whether nothing is to be written.
    pub fn is_read_only(&self) -> bool {
        self.flags.contains(MsFlags::MS_RDONLY)
    }

    /// The string for mount(2), however long.
    pub fn whole_data(&self) -> String {
        self.join(&self.lowerdirs.join(":"))
    }

    fn join(&self, lowerdirs: &str) -> String {
        match (lowerdirs.is_empty(), self.data.is_empty()) {
            (true, _) => self.data.clone(),
            (_, true) => format!("lowerdir={lowerdirs}"),
            _ => format!("{},lowerdir={lowerdirs}", self.data),
        }
    }

    /// The string for mount(2), and the directory to be in while it is mounted.
    fn data(&self) -> Option<(String, Option<&Path>)> {
        let data = self.whole_data();
        if data.len() < PAGE {
            return Some((data, None));
        }
        let prefix = common_directory(&self.lowerdirs)?;
        let relative: Vec<_> = self
            .lowerdirs
            .iter()
            .map(|dir| &dir[prefix.len() + 1..])
            .collect();
        let data = self.join(&relative.join(":"));
        (data.len() < PAGE).then_some((data, Some(Path::new(prefix))))
    }
}

/// mount(2) copies one page of options, with the end of the string.
const PAGE: usize = 4096;

/// The longest directory that all paths lie in.
fn common_directory(paths: &[String]) -> Option<&str> {
    let mut prefix = paths.first()?.rsplit_once('/')?.0;
    while !paths.iter().all(|p| {
        p.strip_prefix(prefix)
            .is_some_and(|rest| rest.len() > 1 && rest.starts_with('/'))
    }) {
        prefix = prefix.rsplit_once('/')?.0;
    }
    (!prefix.is_empty()).then_some(prefix)
}

/// Mounts containerd's list on `target`, an existing directory. What was mounted before a failure
/// stays for [`unmount`].
pub fn mount_rootfs(mounts: &[Mount], target: &Path) -> Result<(), MountError> {
    for component in mounts {
        mount_component(component, target)?;
    }
    Ok(())
}

fn mount_component(component: &Mount, root: &Path) -> Result<(), MountError> {
    let options = Options::parse(&component.options);
    let bind = options.flags.contains(MsFlags::MS_BIND) || component.kind == "bind";
    let inside = component.target.trim_start_matches('/');
    if Path::new(inside)
        .components()
        .any(|c| c == std::path::Component::ParentDir)
    {
        return Err(MountError::Outside(component.target.clone()));
    }
    let target = root.join(inside);
    let error = |data: &str, error: Errno| MountError::Rootfs {
        source_path: component.source.clone(),
        target: target.clone(),
        kind: component.kind.clone(),
        data: data.to_owned(),
        error,
    };
    if bind {
        let recursive = options.flags & MsFlags::MS_REC;
        let source = Some(component.source.as_str());
        let none = None::<&str>;
        mount(source, &target, none, MsFlags::MS_BIND | recursive, none)
            .map_err(|e| error("", e))?;
        let rest = options.flags - MsFlags::MS_REC - MsFlags::MS_BIND;
        if !rest.is_empty() {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | rest;
            mount(none, &target, none, flags, none).map_err(|e| error("", e))?;
        }
        return Ok(());
    }
    let (data, directory) = options
        .data()
        .ok_or_else(|| MountError::TooManyOptions(target.clone()))?;
    let mount_it = || {
        let data = Some(data.as_str()).filter(|d| !d.is_empty());
        let (source, kind) = (component.source.as_str(), component.kind.as_str());
        mount(Some(source), &target, Some(kind), options.flags, data)
    };
    match directory {
        None => mount_it(),
        Some(directory) => in_directory(directory, mount_it),
    }
    .map_err(|e| error(&data, e))
}

/// Runs `work` in a thread whose working directory is its own.
fn in_directory(
    directory: &Path,
    work: impl FnOnce() -> Result<(), Errno> + Send,
) -> Result<(), Errno> {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS)?;
                nix::unistd::chdir(directory)?;
                work()
            })
            .join()
            .unwrap_or(Err(Errno::EIO))
    })
}

/// How far a volume is read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Not at all.
    ReadWrite,
    /// The volume itself, not what is mounted below it (`ro`).
    ReadOnly,
    /// With all that is mounted below it (`rro`).
    RecursivelyReadOnly,
}

/// A volume of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// A file or directory on the host.
    pub source: PathBuf,
    /// Where the container sees it; for error messages.
    pub destination: PathBuf,
    /// Whether what is mounted below the source comes along.
    pub recursive: bool,
    /// Whether it may be written.
    pub access: Access,
    /// Whether mounts that the host makes below the source later are seen (`rslave`, `rshared`).
    pub follows_host: bool,
}

impl Volume {
    /// The source cannot be looked at.
    pub fn no_source(&self, error: &io::Error) -> MountError {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
        MountError::NoSource(self.source.clone(), self.destination.clone(), errno)
    }

    /// Binds the volume on `target`, which is made as a file or a directory like the source.
    pub fn bind(&self, target: &Path) -> Result<(), MountError> {
        let failed = |e: Errno| MountError::Bind(self.source.clone(), self.destination.clone(), e);
        let metadata = std::fs::metadata(&self.source).map_err(|e| self.no_source(&e))?;
        if let Some((what, cure)) = only_on_the_host(metadata.file_type()) {
            return Err(MountError::OfTheHost(
                self.source.clone(),
                self.destination.clone(),
                what,
                cure,
            ));
        }
        let made = if metadata.is_dir() {
            std::fs::create_dir(target)
        } else {
            std::fs::File::create_new(target).map(drop)
        };
        made.map_err(|e| MountError::MountPoint(target.to_owned(), e))?;
        let none = None::<&str>;
        let recursive = if self.recursive {
            MsFlags::MS_REC
        } else {
            MsFlags::empty()
        };
        mount(
            Some(&self.source),
            target,
            none,
            MsFlags::MS_BIND | recursive,
            none,
        )
        .map_err(failed)?;
        let finish = || {
            // Never a peer of the source: what happens to this mount, its removal above all, must
            // not happen to the host's.
            let propagation = if self.follows_host {
                MsFlags::MS_SLAVE
            } else {
                MsFlags::MS_PRIVATE
            };
            mount(none, target, none, propagation | MsFlags::MS_REC, none)?;
            match self.access {
                Access::ReadWrite => Ok(()),
                Access::ReadOnly => set_read_only(target, 0),
                Access::RecursivelyReadOnly => set_read_only(target, libc::AT_RECURSIVE),
            }
        };
        finish().map_err(|e| {
            let _ = umount2(target, MntFlags::MNT_DETACH);
            failed(e)
        })
    }
}

/// What virtio-fs shows to the guest as a name only: behind it would be the guest's own kernel, where nobody
/// listens, or another disk has its number. (A character device is the guest's own, as `linux.devices` are.)
fn only_on_the_host(kind: FileType) -> Option<(&'static str, &'static str)> {
    if kind.is_socket() {
        Some((
            "socket",
            "bind the directory that it is in if both ends are containers of one pod",
        ))
    } else if kind.is_fifo() {
        Some((
            "FIFO",
            "bind the directory that it is in if both ends are containers of one pod",
        ))
    } else if kind.is_block_device() {
        Some((
            "block device",
            "name it in linux.devices, which makes it a disk of the VM",
        ))
    } else {
        None
    }
}

/// Makes a mount read-only without touching its other flags, which a remount would clear.
fn set_read_only(target: &Path, recursive: i32) -> Result<(), Errno> {
    let path = CString::new(target.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path ends with a zero byte, and the structure is as long as its size says; both
    // live until the call returns.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            recursive,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    Errno::result(result).map(drop)
}

/// Takes a mount and all that is mounted in it out of the tree at once. What still uses it keeps
/// it until it is done. What is no mount is no error.
pub fn unmount(target: &Path) -> Result<(), Errno> {
    loop {
        match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // Several mounts may lie on one another.
            Ok(()) => continue,
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(e) => return Err(e),
        }
    }
}

/// The lines of the mount table that are of `directory` or below, up to the mount points.
pub fn table_below(directory: &Path) -> io::Result<Vec<String>> {
    let table = std::fs::read("/proc/thread-self/mountinfo")?;
    let lines = table.split(|&b| b == b'\n').filter_map(|line| {
        let fields: Vec<_> = line.splitn(6, |&b| b == b' ').take(5).collect();
        let point = unescape(fields.get(4)?);
        let line = || String::from_utf8_lossy(&fields.join(&b' ')).into_owned();
        point.starts_with(directory).then(line)
    });
    Ok(lines.collect())
}

/// All mount points below `directory`, the deepest first.
pub fn mounts_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut found: Vec<PathBuf> = table
        .split(|&b| b == b'\n')
        .filter_map(|line| line.split(|&b| b == b' ').nth(4))
        .map(unescape)
        .filter(|point| point.starts_with(directory))
        .collect();
    // Later mounts may hide earlier ones: last first.
    found.reverse();
    found.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    Ok(found)
}

/// The kernel writes blanks and backslashes in paths as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = |d: &[u8]| {
            d.iter().try_fold(0_u8, |n, &c| match c {
                b'0'..=b'7' => n.checked_mul(8)?.checked_add(c - b'0'),
                _ => None,
            })
        };
        match tail.get(..3).filter(|_| byte == b'\\').and_then(octal) {
            Some(decoded) => {
                path.push(decoded);
                rest = &tail[3..];
            }
            None => {
                path.push(byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsStr::from_bytes(&path))
}

/// The path of an open directory that another path can be put behind, however long its own is.
pub fn fd_path(directory: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(options: &[&str]) -> Vec<String> {
        options.iter().map(|&s| s.to_owned()).collect()
    }

    #[test]
    fn options_are_told_from_data_and_the_mount_managers_notes_are_dropped() {
        let options = Options::parse(&strings(&[
            "rbind",
            "ro",
            "X-containerd.mkdir.path=/x",
            "index=off",
            "lowerdir=/a/1:/a/2",
            "userxattr",
        ]));
        assert_eq!(
            options.flags,
            MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY
        );
        assert_eq!(options.data, "index=off,userxattr");
        assert_eq!(
            options.data().unwrap(),
            ("index=off,userxattr,lowerdir=/a/1:/a/2".to_owned(), None)
        );
    }

    #[test]
    fn many_layers_are_named_relative_to_their_common_directory() {
        let dirs: Vec<_> = (0..120)
            .map(|n| {
                format!(
                    "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/{n}/fs"
                )
            })
            .collect();
        let options =
            Options::parse(&[format!("lowerdir={}", dirs.join(":")), "upperdir=/u".into()]);
        let (data, directory) = options.data().unwrap();
        assert_eq!(
            directory.unwrap(),
            Path::new("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots")
        );
        assert!(data.starts_with("upperdir=/u,lowerdir=0/fs:1/fs:"));
        assert!(data.len() < PAGE);
    }

    #[test]
    fn layers_that_stay_too_long_are_refused() {
        let dirs: Vec<_> = (0..2000).map(|n| format!("/layers/{n}/fs")).collect();
        assert!(
            Options::parse(&[format!("lowerdir={}", dirs.join(":"))])
                .data()
                .is_none()
        );
    }

    #[test]
    fn the_common_directory_is_one_that_all_lie_below() {
        let common = |paths: &[&str]| common_directory(&strings(paths)).map(str::to_owned);
        assert_eq!(common(&["/a/b/1", "/a/b/2"]).as_deref(), Some("/a/b"));
        assert_eq!(common(&["/a/b", "/a/bc/d"]).as_deref(), Some("/a"));
        assert_eq!(common(&["/a/1", "/b/1"]), None);
        assert_eq!(common(&["/a/b/c", "/a/b"]).as_deref(), Some("/a"));
    }

    #[test]
    fn escaped_paths_are_read_as_they_were() {
        assert_eq!(unescape(br"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescape(br"/a\9"), Path::new(r"/a\9"));
    }

    #[test]
    fn a_mount_that_the_host_makes_later_is_seen_below_a_slave_and_never_the_other_way_round() {
        let dir = tempfile::tempdir().unwrap();
        let [source, private, slave] =
            ["source", "private", "slave"].map(|name| dir.path().join(name));
        std::fs::create_dir(&source).unwrap();
        let tmpfs = |target: &Path| {
            std::fs::create_dir_all(target).unwrap();
            let none = None::<&str>;
            mount(Some("late"), target, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            std::fs::write(target.join("mounted"), "").unwrap();
        };
        let test = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
            tmpfs(&source);
            mount(none, &source, none, MsFlags::MS_SHARED, none)?;
            for (target, follows_host) in [(&private, false), (&slave, true)] {
                let volume = Volume {
                    source: source.clone(),
                    destination: "/data".into(),
                    recursive: true,
                    access: Access::ReadWrite,
                    follows_host,
                };
                volume.bind(target).unwrap();
            }
            tmpfs(&source.join("later"));
            assert!(slave.join("later/mounted").exists());
            assert!(private.join("later").exists() && !private.join("later/mounted").exists());
            tmpfs(&slave.join("own"));
            assert!(!source.join("own/mounted").exists());
            Ok::<_, Errno>(())
        };
        let done = std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
        match done {
            Err(Errno::EPERM) => eprintln!("left out: no mount namespace of its own here"),
            done => done.unwrap(),
        }
    }

    #[test]
    fn sockets_and_fifos_and_disks_of_the_host_are_refused_and_character_devices_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        let mode = nix::sys::stat::Mode::S_IRWXU;
        nix::unistd::mkfifo(&dir.path().join("fifo"), mode).unwrap();
        for (name, word) in [("socket", "socket"), ("fifo", "FIFO")] {
            let volume = Volume {
                source: dir.path().join(name),
                destination: "/run/it".into(),
                recursive: false,
                access: Access::ReadWrite,
                follows_host: false,
            };
            let target = dir.path().join("target");
            let error = volume.bind(&target).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(name), "{error}");
            assert!(!target.exists());
        }
        let null = std::fs::metadata("/dev/null").unwrap().file_type();
        assert_eq!(only_on_the_host(null), None);
    }

    #[test]
    fn a_target_outside_of_the_root_is_refused() {
        let mount = Mount {
            kind: "bind".into(),
            source: "/".into(),
            target: "../../etc".into(),
            options: vec![],
        };
        assert!(matches!(
            mount_rootfs(&[mount], Path::new("/nonexistent")),
            Err(MountError::Outside(_))
        ));
    }
}
