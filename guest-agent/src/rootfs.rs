//! Root file systems on disks: mounted for a container, unmounted when it is gone.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use cube_agent_protocol::agent::{BlockDevice, RootfsMount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::disks::{Disk, DiskError, Disks, is_in_use};
use crate::helper::BlockNumbers;

/// A root file system that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// A disk of it.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A path elsewhere than in the container's directory.
    #[error("{} is not below {}", .0.display(), .1.display())]
    Outside(PathBuf, PathBuf),
    /// A directory cannot be made.
    #[error("Cannot make {}", .0.display())]
    Make(PathBuf, #[source] io::Error),
    /// The kernel refuses.
    #[error("failed to mount rootfs component: cannot mount {kind:?} at {} with {data:?}", .target.display())]
    Mount {
        /// The file system's type.
        kind: String,
        /// Where.
        target: PathBuf,
        /// Its options.
        data: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// What a container has of disks; undone by [`Mounted::undo`].
#[derive(Debug, Default)]
pub struct Mounted {
    base: PathBuf,
    targets: Vec<PathBuf>,
    disks: Vec<Disk>,
}

/// In a container with a user namespace nobody is the guest's root: everybody may pass through to what is its own.
const PASSABLE: u32 = 0o711;

impl Mounted {
    /// Nothing yet; everything is to be below `base`, a directory that need not be there.
    pub fn new(base: impl Into<PathBuf>) -> Self {
        Self {
            base: base.into(),
            ..Default::default()
        }
    }

    /// Mounts a root file system. What was mounted before a failure stays, to be undone.
    pub fn mount(&mut self, disks: &Disks, mounts: &[RootfsMount]) -> Result<(), RootfsError> {
        for mount in mounts {
            self.mount_one(disks, mount)?;
        }
        Ok(())
    }

    fn mount_one(&mut self, disks: &Disks, order: &RootfsMount) -> Result<(), RootfsError> {
        let target = self.inside(&order.target)?;
        make(&target, PASSABLE)?;
        for directory in &order.directories {
            let path = self.inside(&directory.path)?;
            if !path.is_dir() {
                make(&path, directory.mode)?;
                // Whatever the umask is.
                let mode = Permissions::from_mode(directory.mode & 0o777);
                fs::set_permissions(&path, mode).map_err(|e| RootfsError::Make(path, e))?;
            }
        }
        let mut data = order.data.clone();
        let source = match order.disk.as_ref() {
            Some(disk) => self.take(disks.find(Some(disk))?),
            None => PathBuf::from(&order.source),
        };
        for device in &order.devices {
            let node = self.take(disks.find(Some(device))?);
            let comma = if data.is_empty() { "" } else { "," };
            data = format!("{data}{comma}device={}", node.display());
        }
        let flags = MsFlags::from_bits_retain(order.flags);
        let done = if flags.contains(MsFlags::MS_BIND) {
            bind(&source, &target, flags)
        } else {
            let data = Some(data.as_str()).filter(|data| !data.is_empty());
            mount(
                Some(&source),
                &target,
                Some(order.type_.as_str()),
                flags,
                data,
            )
        };
        done.map_err(|e| RootfsError::Mount {
            kind: order.type_.clone(),
            target: target.clone(),
            data,
            source: e.into(),
        })?;
        self.targets.push(target);
        Ok(())
    }

    /// Finds the disks that are devices of the container, and which numbers they have here.
    pub fn devices(
        &mut self,
        disks: &Disks,
        devices: &[BlockDevice],
    ) -> Result<Vec<BlockNumbers>, RootfsError> {
        let mut numbers = Vec::with_capacity(devices.len());
        for device in devices {
            let disk = disks.find(device.disk.as_ref())?;
            numbers.push(BlockNumbers {
                host: (device.major, device.minor),
                guest: (disk.major, disk.minor),
            });
            self.take(disk);
        }
        Ok(numbers)
    }

    fn take(&mut self, disk: Disk) -> PathBuf {
        let node = disk.node.clone();
        self.disks.push(disk);
        node
    }

    fn inside(&self, path: &str) -> Result<PathBuf, RootfsError> {
        let path = Path::new(path);
        let rest = path.strip_prefix(&self.base);
        let normal =
            rest.is_ok_and(|rest| rest.components().all(|c| matches!(c, Component::Normal(_))));
        match normal {
            true => Ok(path.to_owned()),
            false => Err(RootfsError::Outside(path.to_owned(), self.base.clone())),
        }
    }

    /// Unmounts everything, once nothing of the container runs. What was written is on the disks then. Returns the
    /// serial numbers of disks that something still uses. It may take a while: not in the event loop.
    pub fn undo(self) -> Vec<String> {
        for target in self.targets.iter().rev() {
            if let Err(error) = unmount(target) {
                log::error!("Cannot unmount {}: {error}", target.display());
            }
        }
        for target in self.targets.iter().rev() {
            // Those in an image were removed with it.
            let _ = fs::remove_dir(target);
        }
        let _ = fs::remove_dir(&self.base);
        let in_use = self.disks.into_iter().filter(|disk| is_in_use(&disk.node));
        in_use.map(|disk| disk.serial).collect()
    }
}

fn make(path: &Path, mode: u32) -> Result<(), RootfsError> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    made.map_err(|e| RootfsError::Make(path.to_owned(), e))
}

fn bind(source: &Path, target: &Path, flags: MsFlags) -> nix::Result<()> {
    let none = None::<&str>;
    let how = flags & (MsFlags::MS_BIND | MsFlags::MS_REC);
    mount(Some(source), target, none, how, none)?;
    let rest = flags - how;
    if rest.is_empty() {
        return Ok(());
    }
    let remount = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | rest;
    mount(none, target, none, remount, none)
}

/// Writes a file system out and takes its mount away. What another mount namespace holds of it ends with that.
fn unmount(target: &Path) -> io::Result<()> {
    if let Ok(directory) = File::open(target) {
        // SAFETY: syncfs(2) has no memory arguments; the descriptor is open.
        if unsafe { libc::syncfs(directory.as_raw_fd()) } < 0 {
            log::error!(
                "Cannot write {} out: {}",
                target.display(),
                io::Error::last_os_error()
            );
        }
    }
    match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
        Err(nix::Error::EBUSY) => {
            umount2(target, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)?;
        }
        done => done?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cube_agent_protocol::agent::Directory;

    use super::*;

    fn directory(path: &str) -> Directory {
        Directory {
            path: path.into(),
            mode: 0o755,
            ..Default::default()
        }
    }

    #[test]
    fn a_path_outside_of_the_containers_directory_is_refused_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("c");
        let elsewhere = dir.path().join("elsewhere");
        let mut mounted = Mounted::new(&base);
        for path in [
            elsewhere.display().to_string(),
            format!("{}/../elsewhere", base.display()),
            "rootfs".to_owned(),
        ] {
            let order = RootfsMount {
                type_: "tmpfs".into(),
                target: path.clone(),
                ..Default::default()
            };
            let error = mounted.mount(&Disks::default(), &[order]).unwrap_err();
            assert!(matches!(error, RootfsError::Outside(..)), "{error}");
            let order = RootfsMount {
                type_: "tmpfs".into(),
                target: base.join("rootfs").display().to_string(),
                directories: vec![directory(&path)],
                ..Default::default()
            };
            let error = mounted.mount(&Disks::default(), &[order]).unwrap_err();
            assert!(matches!(error, RootfsError::Outside(..)), "{error}");
        }
        assert!(!elsewhere.exists());
        fs::remove_dir(base.join("rootfs")).unwrap();
        assert!(mounted.undo().is_empty());
        assert!(!base.exists());
    }

    /// In a mount namespace of its own; `false` where that is not allowed.
    fn in_own_namespace(work: impl FnOnce() + Send) -> bool {
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).is_err() {
                    return false;
                }
                let none = None::<&str>;
                let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
                mount(none, "/", none, private, none).unwrap();
                work();
                true
            });
            worker.join().unwrap()
        })
    }

    #[test]
    fn layers_are_mounted_in_order_and_leave_nothing_when_they_are_undone() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("images/c");
        let at = |name: &str| base.join(name).display().to_string();
        let ran = in_own_namespace(|| {
            let layer = RootfsMount {
                type_: "tmpfs".into(),
                source: "layer".into(),
                target: at("0"),
                data: "mode=755".into(),
                ..Default::default()
            };
            let root = RootfsMount {
                source: at("0/upper"),
                target: at("rootfs"),
                flags: (MsFlags::MS_BIND | MsFlags::MS_RDONLY).bits(),
                directories: vec![directory(&at("0/upper"))],
                ..Default::default()
            };
            let mut mounted = Mounted::new(&base);
            mounted.mount(&Disks::default(), &[layer, root]).unwrap();
            fs::write(at("0/upper/file"), "text").unwrap();
            assert_eq!(fs::read(at("rootfs/file")).unwrap(), b"text");
            let refused = fs::write(at("rootfs/other"), "").unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
            assert!(mounted.undo().is_empty());
            assert!(!base.exists());

            // The second one fails: the first one is undone all the same.
            let layer = RootfsMount {
                type_: "tmpfs".into(),
                target: at("0"),
                ..Default::default()
            };
            let wrong = RootfsMount {
                type_: "no-such-fs".into(),
                target: at("rootfs"),
                data: "size=1".into(),
                ..Default::default()
            };
            let mut mounted = Mounted::new(&base);
            let error = mounted
                .mount(&Disks::default(), &[layer, wrong])
                .unwrap_err();
            assert!(error.to_string().contains("no-such-fs"), "{error}");
            mounted.undo();
            let left = fs::read_to_string("/proc/thread-self/mounts").unwrap();
            assert!(!left.contains(base.to_str().unwrap()), "{left}");
        });
        if !ran {
            eprintln!("left out: no mount namespace of its own here");
        }
    }
}
