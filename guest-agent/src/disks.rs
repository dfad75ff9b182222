//! Disks that the host puts into the machine's slots: which device they are.
//!
//! Each slot is a virtio-blk device that is there from the beginning, the N-th one the N-th slot. What is in it tells its
//! serial number. Only the slot that is meant is asked: a disk that does not answer, since the host's does not, must
//! hold up nobody who wants another. Linux learns of a new disk in a slot by an interrupt, at a time of its own and
//! without an event for us, and looks at its being read-only only when a driver is bound. So where the kernel does
//! not show the disk as it is to be, or showed another one there before, the driver is bound again: that asks the
//! device, and is done when the write to sysfs returns.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use cube_agent_protocol::agent;

/// A disk that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The request names none.
    #[error("The request names no disk")]
    Unnamed,
    /// There are fewer slots.
    #[error("The machine has no slot {0} for a disk")]
    NoSlot(u32),
    /// Another one is in the slot.
    #[error("Slot {slot} has the disk {found:?} instead of {wanted:?}")]
    Other {
        /// The slot.
        slot: u32,
        /// The serial number of what is in it.
        found: String,
        /// The one that was said to be.
        wanted: String,
    },
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
    sectors: u64,
    read_only: bool,
}

/// The machine's disks.
pub struct Disks {
    sys: PathBuf,
    dev: PathBuf,
    slots: OnceLock<Vec<Slot>>,
}

struct Slot {
    /// Its device on the virtio bus.
    device: String,
    /// Whether it had a disk before. Held while the driver is bound.
    used: Mutex<bool>,
}

/// The type of virtio-blk devices, as sysfs has it.
const TYPE_BLOCK: &str = "0x0002";

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
            slots: OnceLock::new(),
        }
    }

    /// Finds a disk that the host has attached. It may take a while: not in the event loop.
    pub fn find(&self, wanted: Option<&agent::Disk>) -> Result<Disk, DiskError> {
        let wanted = wanted
            .filter(|disk| !disk.serial.is_empty())
            .ok_or(DiskError::Unnamed)?;
        let slot = self.slot(wanted.slot)?;
        let mut used = slot.used.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |disk: &Disk| {
            let is = (&disk.serial, disk.sectors, disk.read_only);
            is == (&wanted.serial, wanted.sectors, wanted.read_only)
        };
        let disk = match self.disk_of(&slot.device)? {
            Some(disk) if !*used && is_it(&disk) => disk,
            shown => {
                if shown.is_some_and(|disk| is_in_use(&disk.node)) {
                    return Err(DiskError::InUse(wanted.serial.clone()));
                }
                self.bind_again(&slot.device)?;
                self.disk_of(&slot.device)?
                    .ok_or_else(|| DiskError::Other {
                        slot: wanted.slot,
                        found: String::new(),
                        wanted: wanted.serial.clone(),
                    })?
            }
        };
        if disk.serial != wanted.serial {
            return Err(DiskError::Other {
                slot: wanted.slot,
                found: disk.serial,
                wanted: wanted.serial.clone(),
            });
        }
        if disk.sectors != wanted.sectors {
            return Err(DiskError::Size {
                serial: disk.serial,
                found: disk.sectors,
                wanted: wanted.sectors,
            });
        }
        *used = true;
        Ok(disk)
    }

    fn slot(&self, number: u32) -> Result<&Slot, DiskError> {
        if self.slots.get().is_none() {
            // Devices neither come nor go.
            let _ = self.slots.set(self.read_slots()?);
        }
        let slots = self.slots.get().map_or(&[][..], Vec::as_slice);
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        slots.get(index).ok_or(DiskError::NoSlot(number))
    }

    /// The slots in the order in which the kernel has found their devices, which it counts.
    fn read_slots(&self) -> Result<Vec<Slot>, DiskError> {
        let devices = self.sys.join("bus/virtio/devices");
        let failed = |e| DiskError::Sysfs(devices.clone(), e);
        let mut found = Vec::new();
        for entry in fs::read_dir(&devices).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_string_lossy().into_owned();
            let Some(number) = name.strip_prefix("virtio").and_then(|n| n.parse().ok()) else {
                continue;
            };
            let number: u32 = number;
            if read(&devices.join(&name).join("device"))?.trim() == TYPE_BLOCK {
                found.push((number, name));
            }
        }
        found.sort_unstable();
        let slots = found.into_iter().map(|(_, device)| Slot {
            device,
            used: Mutex::default(),
        });
        Ok(slots.collect())
    }

    /// The disk that the kernel shows, if the driver is bound.
    fn disk_of(&self, device: &str) -> Result<Option<Disk>, DiskError> {
        let block = self
            .sys
            .join("bus/virtio/devices")
            .join(device)
            .join("block");
        let mut entries = match fs::read_dir(&block) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(|e| DiskError::Sysfs(block.clone(), e))?,
        };
        let Some(entry) = entries.next() else {
            return Ok(None);
        };
        let name = entry
            .map_err(|e| DiskError::Sysfs(block.clone(), e))?
            .file_name();
        let directory = block.join(&name);
        let number = |name: &str, text: &str| {
            text.trim().parse().map_err(|_| {
                let error = io::Error::other(format!("{text:?} is no number"));
                DiskError::Sysfs(directory.join(name), error)
            })
        };
        let numbers = read(&directory.join("dev"))?;
        let (major, minor) = numbers.split_once(':').unwrap_or_default();
        Ok(Some(Disk {
            serial: read(&directory.join("serial"))?.trim_end().to_owned(),
            node: self.dev.join(&name),
            major: number("dev", major)?,
            minor: number("dev", minor)?,
            // Not negative, as no size is.
            sectors: u64::try_from(number("size", &read(&directory.join("size"))?)?).unwrap_or(0),
            read_only: read(&directory.join("ro"))?.trim() == "1",
        }))
    }

    fn bind_again(&self, device: &str) -> Result<(), DiskError> {
        let driver = self.sys.join("bus/virtio/drivers/virtio_blk");
        for action in ["unbind", "bind"] {
            let path = driver.join(action);
            match fs::write(&path, device) {
                // It is not bound, since the last attempt to do so failed.
                Err(e) if action == "unbind" && e.raw_os_error() == Some(libc::ENODEV) => {}
                done => done.map_err(|e| DiskError::Sysfs(path, e))?,
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<String, DiskError> {
    fs::read_to_string(path).map_err(|e| DiskError::Sysfs(path.to_owned(), e))
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
    use super::*;

    /// A sysfs with disks in it: name, number of the virtio device, serial number, sectors, read-only.
    fn sysfs(disks: &[(&str, u32, &str, u64, bool)]) -> (tempfile::TempDir, Disks) {
        let dir = tempfile::tempdir().unwrap();
        let device = |number: u32, kind: &str| {
            let device = dir
                .path()
                .join(format!("bus/virtio/devices/virtio{number}"));
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("device"), kind).unwrap();
            device
        };
        device(0, "0x001a\n");
        for (name, number, serial, sectors, read_only) in disks {
            let disk = device(*number, "0x0002\n").join("block").join(name);
            fs::create_dir_all(&disk).unwrap();
            for (file, text) in [
                ("serial", format!("{serial}\n")),
                ("size", format!("{sectors}\n")),
                ("ro", format!("{}\n", u8::from(*read_only))),
                ("dev", format!("254:{}\n", 16 * number)),
            ] {
                fs::write(disk.join(file), text).unwrap();
            }
        }
        fs::create_dir_all(dir.path().join("bus/virtio/drivers/virtio_blk")).unwrap();
        let disks = Disks::below(dir.path(), dir.path().join("dev"));
        (dir, disks)
    }

    fn wanted(slot: u32, serial: &str, sectors: u64, read_only: bool) -> agent::Disk {
        agent::Disk {
            slot,
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
    fn a_disk_is_found_in_its_slot_and_no_other_slot_is_asked() {
        let (dir, disks) = sysfs(&[
            ("vda", 10, "cube-2", 8, false),
            ("vdb", 9, "cube-1", 16, true),
        ]);
        // To read it would end in an error, as it would wait on a disk that does not answer.
        let other = dir
            .path()
            .join("bus/virtio/devices/virtio10/block/vda/serial");
        fs::remove_file(other).unwrap();
        let disk = disks.find(Some(&wanted(0, "cube-1", 16, true))).unwrap();
        assert_eq!(disk.node, dir.path().join("dev/vdb"));
        assert_eq!((disk.major, disk.minor), (254, 144));
        // It was there before the driver was.
        assert_eq!(bound_again(&dir), None);
        let error = disks
            .find(Some(&wanted(1, "cube-2", 8, false)))
            .unwrap_err();
        assert!(error.to_string().contains("vda/serial"), "{error}");
    }

    #[test]
    fn a_slot_that_had_another_disk_or_does_not_show_this_one_yet_is_looked_at_again() {
        let one = [("vda", 3, "cube-1", 16, false)];
        let (dir, disks) = sysfs(&one);
        disks.find(Some(&wanted(0, "cube-1", 16, false))).unwrap();
        disks.find(Some(&wanted(0, "cube-1", 16, false))).unwrap();
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));

        let (dir, disks) = sysfs(&one);
        disks.find(Some(&wanted(0, "cube-1", 16, true))).unwrap();
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));

        let (dir, disks) = sysfs(&[("vda", 3, "cube-1", 0, false)]);
        let error = disks.find(Some(&wanted(0, "cube-1", 16, false)));
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));
        let size = DiskError::Size {
            serial: "cube-1".into(),
            found: 0,
            wanted: 16,
        };
        assert_eq!(error.unwrap_err().to_string(), size.to_string());

        // The driver is not bound, since that failed the last time.
        let (dir, disks) = sysfs(&one);
        fs::remove_dir_all(dir.path().join("bus/virtio/devices/virtio3/block")).unwrap();
        let error = disks.find(Some(&wanted(0, "cube-1", 16, false)));
        assert_eq!(bound_again(&dir).as_deref(), Some("virtio3"));
        assert!(matches!(error, Err(DiskError::Other { .. })));
    }

    #[test]
    fn a_disk_that_is_not_there_is_named() {
        let (_dir, disks) = sysfs(&[("vda", 3, "cube-1", 16, false)]);
        let error = disks.find(Some(&wanted(0, "cube-12", 16, false)));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("cube-12") && error.contains("\"cube-1\""),
            "{error}"
        );
        let none = disks.find(Some(&wanted(1, "cube-1", 16, false)));
        assert!(matches!(none, Err(DiskError::NoSlot(1))));
        for unnamed in [None, Some(&wanted(0, "", 16, false))] {
            assert!(matches!(disks.find(unnamed), Err(DiskError::Unnamed)));
        }
    }
}
