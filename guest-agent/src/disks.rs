//! Disks that the host puts into the machine's slots: which device they are.
//!
//! Each slot is a virtio-blk device that is there from the beginning. What is in it tells its serial
//! number. Linux learns of a new disk in it by an interrupt, at a time of its own and without an event
//! for us, and looks at its being read-only only when a driver is bound. So where the kernel does not
//! show the disk as it is to be, or showed another one there before, the driver is bound again: that
//! asks the device, and is done when the write to sysfs returns.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cube_agent_protocol::agent;

/// A disk that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The request names none.
    #[error("The request names no disk")]
    Unnamed,
    /// None has the serial number.
    #[error("No disk of the machine has the serial number {0:?}")]
    Missing(String),
    /// It is not what the host says.
    #[error("The disk {serial:?} has {found} sectors instead of {wanted}")]
    Size {
        /// Its serial number.
        serial: String,
        /// Its size.
        found: u64,
        /// What was said of it.
        wanted: u64,
    },
    /// What was in the slot before is still mounted, or open.
    #[error("The slot of the disk {0:?} is still in use in the guest")]
    InUse(String),
    /// A file of sysfs.
    #[error("Cannot use {}", .0.display())]
    Sysfs(PathBuf, #[source] io::Error),
}

/// A disk as the guest has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its serial number.
    pub serial: String,
    /// Its node in /dev.
    pub node: PathBuf,
    /// Its major number.
    pub major: i64,
    /// Its minor number.
    pub minor: i64,
    /// Its device on the virtio bus.
    device: String,
    sectors: u64,
    read_only: bool,
}

/// The machine's disks.
pub struct Disks {
    sys: PathBuf,
    dev: PathBuf,
    /// The devices that had a disk before. Held while a driver is bound: names change meanwhile.
    used: Mutex<HashSet<String>>,
}

impl Default for Disks {
    fn default() -> Self {
        Self::below("/sys", "/dev")
    }
}

impl Disks {
    fn below(sys: impl Into<PathBuf>, dev: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            dev: dev.into(),
            used: Mutex::default(),
        }
    }

    /// Finds a disk that the host has attached. It may take a while: not in the event loop.
    pub fn find(&self, wanted: Option<&agent::Disk>) -> Result<Disk, DiskError> {
        let wanted = wanted
            .filter(|disk| !disk.serial.is_empty())
            .ok_or(DiskError::Unnamed)?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let mut disk = self.by_serial(&wanted.serial)?;
        let is_it =
            |disk: &Disk| (disk.sectors, disk.read_only) == (wanted.sectors, wanted.read_only);
        if used.contains(&disk.device) || !is_it(&disk) {
            if is_in_use(&disk.node) {
                return Err(DiskError::InUse(disk.serial));
            }
            self.bind_again(&disk.device)?;
            disk = self.by_serial(&wanted.serial)?;
        }
        if disk.sectors != wanted.sectors {
            return Err(DiskError::Size {
                serial: disk.serial,
                found: disk.sectors,
                wanted: wanted.sectors,
            });
        }
        used.insert(disk.device.clone());
        Ok(disk)
    }

    fn by_serial(&self, serial: &str) -> Result<Disk, DiskError> {
        let block = self.sys.join("block");
        let failed = |e| DiskError::Sysfs(block.clone(), e);
        for entry in fs::read_dir(&block).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let directory = block.join(&name);
            // Other kinds of disks have none.
            let Ok(found) = fs::read_to_string(directory.join("serial")) else {
                continue;
            };
            if found.trim_end() == serial {
                return self.disk_at(&directory, serial);
            }
        }
        Err(DiskError::Missing(serial.to_owned()))
    }

    fn disk_at(&self, directory: &Path, serial: &str) -> Result<Disk, DiskError> {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path).map_err(|e| DiskError::Sysfs(path, e))
        };
        let number = |name: &str, text: &str| {
            text.trim().parse().map_err(|_| {
                let error = io::Error::other(format!("{text:?} is no number"));
                DiskError::Sysfs(directory.join(name), error)
            })
        };
        let numbers = read("dev")?;
        let (major, minor) = numbers.split_once(':').unwrap_or_default();
        let link = directory.join("device");
        let device = fs::read_link(&link).map_err(|e| DiskError::Sysfs(link, e))?;
        let name = directory.file_name().unwrap_or_default();
        Ok(Disk {
            serial: serial.to_owned(),
            node: self.dev.join(name),
            major: number("dev", major)?,
            minor: number("dev", minor)?,
            device: device
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            // Not negative, as no size is.
            sectors: u64::try_from(number("size", &read("size")?)?).unwrap_or(0),
            read_only: read("ro")?.trim() == "1",
        })
    }

    fn bind_again(&self, device: &str) -> Result<(), DiskError> {
        let driver = self.sys.join("bus/virtio/drivers/virtio_blk");
        for action in ["unbind", "bind"] {
            let path = driver.join(action);
            fs::write(&path, device).map_err(|e| DiskError::Sysfs(path, e))?;
        }
        Ok(())
    }
}

/// Whether a disk's node is mounted, or claimed otherwise.
pub fn is_in_use(node: &Path) -> bool {
    let claimed = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_CLOEXEC)
        .open(node);
    claimed.is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs with disks in it: name, virtio device, serial number, sectors, read-only.
    fn sysfs(disks: &[(&str, &str, &str, u64, bool)]) -> (tempfile::TempDir, Disks) {
        let dir = tempfile::tempdir().unwrap();
        for (name, device, serial, sectors, read_only) in disks {
            let disk = dir.path().join("block").join(name);
            fs::create_dir_all(&disk).unwrap();
            symlink(format!("../../devices/{device}"), disk.join("device")).unwrap();
            for (file, text) in [
                ("serial", format!("{serial}\n")),
                ("size", format!("{sectors}\n")),
                ("ro", format!("{}\n", u8::from(*read_only))),
                ("dev", format!("254:{}\n", 16 * disks.len())),
            ] {
                fs::write(disk.join(file), text).unwrap();
            }
        }
        // A loop device has no serial number.
        fs::create_dir_all(dir.path().join("block/loop0")).unwrap();
        fs::create_dir_all(dir.path().join("bus/virtio/drivers/virtio_blk")).unwrap();
        let disks = Disks::below(dir.path(), dir.path().join("dev"));
        (dir, disks)
    }

    fn wanted(serial: &str, sectors: u64, read_only: bool) -> agent::Disk {
        agent::Disk {
            serial: serial.into(),
            sectors,
            read_only,
            ..Default::default()
        }
    }

    fn bound_again(dir: &tempfile::TempDir) -> Option<String> {
        let path = dir.path().join("bus/virtio/drivers/virtio_blk/bind");
        let device = fs::read_to_string(&path).ok();
        let _ = fs::remove_file(path);
        device
    }

    #[test]
    fn a_disk_is_found_by_its_serial_number() {
        let (dir, disks) = sysfs(&[
            ("vda", "virtio3", "cube-2", 8, false),
            ("vdb", "virtio4", "cube-1", 16, true),
        ]);
        let disk = disks.find(Some(&wanted("cube-1", 16, true))).unwrap();
        assert_eq!(disk.node, dir.path().join("dev/vdb"));
        assert_eq!((disk.major, disk.minor), (254, 32));
        // It was there before the driver was.
        assert_eq!(bound_again(&dir), None);
    }

    #[test]
    fn a_slot_that_had_another_disk_or_does_not_show_this_one_yet_is_looked_at_again() {
        let (dir, disks) = sysfs(&[("vda", "virtio3", "cube-1", 16, false)]);
        disks.find(Some(&wanted("cube-1", 16, false))).unwrap();
        disks.find(Some(&wanted("cube-1", 16, false))).unwrap();
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));

        let (dir, disks) = sysfs(&[("vda", "virtio3", "cube-1", 16, false)]);
        disks.find(Some(&wanted("cube-1", 16, true))).unwrap();
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));

        let (dir, disks) = sysfs(&[("vda", "virtio3", "cube-1", 0, false)]);
        let error = disks.find(Some(&wanted("cube-1", 16, false))).unwrap_err();
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));
        assert!(
            matches!(
                error,
                DiskError::Size {
                    found: 0,
                    wanted: 16,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn a_disk_that_is_not_there_is_named() {
        let (_dir, disks) = sysfs(&[("vda", "virtio3", "cube-1", 16, false)]);
        let error = disks.find(Some(&wanted("cube-12", 16, false))).unwrap_err();
        assert!(error.to_string().contains("cube-12"), "{error}");
        for unnamed in [None, Some(&wanted("", 16, false))] {
            assert!(matches!(disks.find(unnamed), Err(DiskError::Unnamed)));
        }
    }
}
