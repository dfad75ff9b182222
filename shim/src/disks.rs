//! Disks of the machine: files and block devices of the host in the machine's slots.
//!
//! A machine is built with a number of slots. A container's disks are put into free ones when it is
//! created, and taken out when it is deleted. The guest finds a disk by its slot, and tells it from what was there before
//! by its serial number, which no other disk of the machine ever has.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cube_agent_protocol::agent;
use cube_hypervisor_api::control::Request;
use tokio::sync::oneshot;

use crate::hypervisor::{Hypervisor, HypervisorError, Sent};

/// The most slots of a machine: its IOAPIC has 19 pins for devices, of which console, vsock, share and random
/// numbers take four, and networks are to have three.
pub const MAX_SLOTS: u8 = 12;

/// What the guest counts a disk's size in, in bytes.
const SECTOR: u64 = 512;

/// How devices come into a specification that nobody named.
const PRIVILEGED: &str = "a privileged container is to have all of the host's devices, unless it is started without them (ctr run --privileged-without-host-devices; privileged_without_host_devices of CRI)";

/// Why a disk cannot be given to the machine.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error("Cannot open the disk {0:?}: {1}")]
    Open(PathBuf, io::Error),
    /// The host uses it.
    #[error(
        "The block device {0:?} is in use on the host: a VM that writes to it would destroy what is mounted there; {PRIVILEGED}"
    )]
    InUse(PathBuf),
    /// It is no disk.
    #[error("{0:?} is neither a file nor a block device: it cannot be a disk of a VM")]
    Kind(PathBuf),
    /// There is no such device.
    #[error(
        "The host has no block device {major}:{minor}, which is to be {path:?} in the container"
    )]
    NoDevice {
        /// Its major number.
        major: i64,
        /// Its minor number.
        minor: i64,
        /// The container's path for it.
        path: String,
    },
    /// There is nothing in it.
    #[error(
        "The block device {0:?} is a loop device without a file or a drive without a medium: it cannot be a disk of a VM; {PRIVILEGED}"
    )]
    Empty(PathBuf),
    /// It has no whole sectors.
    #[error("The disk {0:?} has {1} bytes, which is not a multiple of {SECTOR} above 0")]
    Size(PathBuf, u64),
    /// More disks than any machine has.
    #[error("The container needs {0} disks, a VM has at most {MAX_SLOTS}; {PRIVILEGED}")]
    TooMany(usize),
    /// The slots are used up.
    #[error(
        "The sandbox's VM has no slot left for a disk ({0} in all, each used until its container is deleted): set spare_disks higher, at most {MAX_SLOTS}, for new sandboxes"
    )]
    NoSlot(u8),
    /// The hypervisor refused.
    #[error("Cannot attach the disk {0:?}: {1}")]
    Attach(PathBuf, HypervisorError),
}

/// A disk that is open, and not attached.
#[derive(Debug)]
pub struct OpenDisk {
    path: PathBuf,
    file: File,
    sectors: u64,
    read_only: bool,
}

impl OpenDisk {
    /// Opens a file or a block device. A block device that is to be written to is claimed: it must not be
    /// mounted on the host, and cannot be as long as the machine has it.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let failed = |e| DiskError::Open(path.to_owned(), e);
        let is_device = std::fs::metadata(path)
            .map_err(failed)?
            .file_type()
            .is_block_device();
        let exclusive = if is_device && !read_only {
            libc::O_EXCL
        } else {
            0
        };
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            // A FIFO in its place must not hold us up.
            .custom_flags(libc::O_NONBLOCK | exclusive)
            .open(path)
            .map_err(|e| match e.raw_os_error() {
                Some(libc::EBUSY) if is_device => DiskError::InUse(path.to_owned()),
                _ => failed(e),
            })?;
        let metadata = file.metadata().map_err(failed)?;
        // What was looked at before may have been replaced.
        let size = if metadata.is_file() {
            metadata.len()
        } else if metadata.file_type().is_block_device() && is_device {
            size_of_device(&file).map_err(failed)?
        } else {
            return Err(DiskError::Kind(path.to_owned()));
        };
        if size == 0 && is_device {
            return Err(DiskError::Empty(path.to_owned()));
        }
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(DiskError::Size(path.to_owned(), size));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            sectors: size / SECTOR,
            read_only,
        })
    }

    /// Opens the host's block device with these numbers, which the container calls `called`.
    pub fn device(
        major: i64,
        minor: i64,
        called: &str,
        read_only: bool,
    ) -> Result<Self, DiskError> {
        let path = device_path(major, minor, called)?;
        let disk = Self::open(&path, read_only)?;
        // The path may have got another device meanwhile.
        let metadata = disk.file.metadata().map_err(|e| DiskError::Open(path, e))?;
        match is_device(&metadata, major, minor) {
            true => Ok(disk),
            false => Err(no_device(major, minor, called)),
        }
    }
}

fn is_device(metadata: &std::fs::Metadata, major: i64, minor: i64) -> bool {
    metadata.file_type().is_block_device()
        && i64::from(libc::major(metadata.rdev())) == major
        && i64::from(libc::minor(metadata.rdev())) == minor
}

fn no_device(major: i64, minor: i64, called: &str) -> DiskError {
    DiskError::NoDevice {
        major,
        minor,
        path: called.to_owned(),
    }
}

/// A block device's size in bytes: lseek(2) knows it as it does a file's.
fn size_of_device(file: &File) -> io::Result<u64> {
    use std::io::Seek;
    let mut file = file;
    file.seek(io::SeekFrom::End(0))
}

/// A block device by its numbers: a path of the host, whatever it is called there.
fn device_path(major: i64, minor: i64, called: &str) -> Result<PathBuf, DiskError> {
    let number = format!("{major}:{minor}");
    let by_kernel = std::fs::read_to_string(format!("/sys/dev/block/{number}/uevent"))
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("DEVNAME="))
        .map(|name| Path::new("/dev").join(name));
    let is_it = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|m| is_device(&m, major, minor));
    let places = [
        by_kernel,
        Some(Path::new("/dev/block").join(&number)),
        Some(called.into()),
    ];
    let found = places.into_iter().flatten().find(is_it);
    found.ok_or_else(|| no_device(major, minor, called))
}

/// The slots of a running machine.
pub struct Slots {
    hypervisor: Arc<Hypervisor>,
    table: Arc<Mutex<Table>>,
}

/// Which slots are free.
#[derive(Debug)]
struct Table {
    free: Vec<u8>,
    count: u8,
    /// How many disks there have been.
    serials: u64,
}

impl Table {
    fn new(count: u8) -> Self {
        Self {
            // The first one comes first.
            free: (0..count).rev().collect(),
            count,
            serials: 0,
        }
    }

    /// Whether there are so many free ones.
    fn must_have(&self, wanted: usize) -> Result<(), DiskError> {
        match self.free.len() >= wanted {
            true => Ok(()),
            false => Err(DiskError::NoSlot(self.count)),
        }
    }

    fn take(&mut self) -> Result<(u8, String), DiskError> {
        let slot = self.free.pop().ok_or(DiskError::NoSlot(self.count))?;
        self.serials += 1;
        Ok((slot, format!("cube-{}", self.serials)))
    }
}

/// How many slots a machine gets for others where nothing is said, and its first container has disks itself.
const SPARE: u8 = 4;

/// How many slots a machine gets whose first container has so many disks. Where nothing is said of `spare` ones, there are
/// some only if that one has disks: what its sandbox's others have is mostly of the same snapshotter, and an empty
/// slot is one more device that the guest's kernel probes when it boots.
pub fn slots_for(needed: usize, may_grow: bool, spare: Option<u8>) -> Result<u8, DiskError> {
    let count = u8::try_from(needed)
        .ok()
        .filter(|n| *n <= MAX_SLOTS)
        .ok_or(DiskError::TooMany(needed))?;
    // Nothing can join a sandbox that is one container's own.
    let spare = match (may_grow, spare) {
        (false, _) => 0,
        (true, Some(spare)) => spare,
        (true, None) if count > 0 => SPARE,
        (true, None) => 0,
    };
    Ok(count.saturating_add(spare).min(MAX_SLOTS))
}

impl Slots {
    /// The slots of a machine that was built with `count`, all free.
    pub fn new(hypervisor: Arc<Hypervisor>, count: u8) -> Self {
        Self {
            hypervisor,
            table: Arc::new(Mutex::new(Table::new(count))),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Asks the machine to give a disk back. Its slot is free when it is closed, unless the guest is not done with it.
    fn detach(
        &self,
        attached: &Attached,
        in_use: bool,
    ) -> Result<(Sent, oneshot::Receiver<()>), HypervisorError> {
        let (tell, closed) = oneshot::channel();
        let (table, slot) = (self.table.clone(), attached.slot);
        let on_closed = move || {
            if !in_use {
                lock(&table).free.push(slot);
            }
            // Nobody need wait for it.
            let _ = tell.send(());
        };
        let sent = self.hypervisor.detach_disk(slot, on_closed)?;
        Ok((sent, closed))
    }

    /// Asks the machine to take a disk; [`Disks::ready`] waits for the answer.
    fn attach(&self, disk: &OpenDisk) -> Result<Attached, DiskError> {
        let (slot, serial) = self.table().take()?;
        let request = Request::AttachDisk {
            slot,
            read_only: disk.read_only,
            serial: serial.clone(),
        };
        let sent = self
            .hypervisor
            .send_with(&request, &[disk.file.as_fd()])
            .map_err(|e| DiskError::Attach(disk.path.clone(), e))?;
        Ok(Attached {
            path: disk.path.clone(),
            slot,
            disk: agent::Disk {
                serial,
                sectors: disk.sectors,
                read_only: disk.read_only,
                slot: slot.into(),
                ..Default::default()
            },
            sent: Some(sent),
        })
    }
}

struct Attached {
    path: PathBuf,
    slot: u8,
    disk: agent::Disk,
    /// The request, until it is answered.
    sent: Option<Sent>,
}

/// The disks of one container. Dropping them takes them out of the machine; their slots are free again only if the guest
/// was not told of them, since nobody has said that it is done with them.
#[derive(Default)]
pub struct Disks {
    slots: Option<Arc<Slots>>,
    attached: Vec<Attached>,
    /// Whether the guest may know of them.
    told: bool,
}

impl Disks {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.attached.is_empty()
    }

    /// Attaches disks in this order.
    pub fn attach(slots: &Arc<Slots>, disks: &[OpenDisk]) -> Result<Self, DiskError> {
        slots.table().must_have(disks.len())?;
        let mut attached = Self {
            slots: Some(slots.clone()),
            attached: Vec::with_capacity(disks.len()),
            told: false,
        };
        for disk in disks {
            attached.attached.push(slots.attach(disk)?);
        }
        Ok(attached)
    }

    /// What the guest is told of the N-th.
    pub fn of_guest(&self, n: usize) -> Option<agent::Disk> {
        self.attached.get(n).map(|attached| attached.disk.clone())
    }

    /// Waits until the machine has them, so that the guest may be told.
    pub async fn ready(&mut self) -> Result<(), DiskError> {
        let Some(slots) = &self.slots else {
            return Ok(());
        };
        for n in 0..self.attached.len() {
            let Some(sent) = self.attached[n].sent.take() else {
                continue;
            };
            if let Err(e) = slots.hypervisor.answer(sent).await {
                let refused = self.attached.remove(n);
                // Nothing is in it.
                slots.table().free.push(refused.slot);
                return Err(DiskError::Attach(refused.path, e));
            }
        }
        self.told = true;
        Ok(())
    }

    /// Takes them out of the machine, and frees their slots but for those that the guest still uses: `in_use`
    /// are their serial numbers. On return the host has closed them, for which it takes its time.
    pub async fn detach(&mut self, in_use: &[String]) {
        let Some(slots) = &self.slots else {
            return;
        };
        // All at once: each answer is a round trip.
        let asked: Vec<_> = self
            .attached
            .drain(..)
            .map(|attached| {
                let in_use = in_use.contains(&attached.disk.serial);
                if in_use {
                    log::warn!(
                        "The guest still uses {:?}, which is taken from it: slot {} stays empty",
                        attached.path,
                        attached.slot
                    );
                }
                (slots.detach(&attached, in_use), attached.path)
            })
            .collect();
        for (asked, path) in asked {
            let done = match asked {
                Ok((sent, closed)) => match slots.hypervisor.answer(sent).await {
                    Ok(_) => {
                        // The machine's end is the end of this as well.
                        let _ = closed.await;
                        Ok(())
                    }
                    Err(e) => Err(e),
                },
                Err(e) => Err(e),
            };
            match done {
                Ok(()) | Err(HypervisorError::Ended(_)) => {}
                Err(e) => log::warn!("Cannot detach the disk {path:?}: {e}"),
            }
        }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let Some(slots) = &self.slots else {
            return;
        };
        for attached in &self.attached {
            // The machine carries out one request after the other, so this one comes after the attaching.
            if let Err(e) = slots.detach(attached, self.told) {
                log::debug!("Cannot detach the disk {:?}: {e}", attached.path);
            }
        }
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_run_out_with_a_sentence_and_come_back() {
        let mut table = Table::new(2);
        assert_eq!(table.take().unwrap(), (0, "cube-1".into()));
        assert_eq!(table.take().unwrap(), (1, "cube-2".into()));
        let error = table.take().unwrap_err().to_string();
        assert!(
            error.contains("spare_disks") && error.contains("2 in all"),
            "{error}"
        );
        table.free.push(0);
        // Never the serial number of another disk.
        assert_eq!(table.take().unwrap(), (0, "cube-3".into()));
    }

    /// An image of eight sectors.
    fn image() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(4096).unwrap();
        (dir, image)
    }

    /// The slots of a machine for which a script stands in.
    fn slots(directory: &Path, script: &str, count: u8) -> Arc<Slots> {
        let launch = crate::hypervisor::tests::script(directory, script);
        let events = tokio::sync::mpsc::unbounded_channel().0;
        let hypervisor = Arc::new(Hypervisor::spawn(launch, events).unwrap());
        Arc::new(Slots::new(hypervisor, count))
    }

    /// Notes each request and answers that it is done.
    const STAND_IN: &str = r#"#!/usr/bin/perl
open(my $control, "+<&=", $ARGV[1]) or die; open(my $log, ">", "log") or die;
while (sysread($control, my $request, 65536)) {
    syswrite($log, "$request\n");
    syswrite($control, '{"reply":"done"}');
    syswrite($control, '{"event":{"disk_closed":{"slot":' . $1 . '}}}') if $request =~ /detach.*:(\d+)/;
}
"#;

    #[tokio::test]
    async fn disks_go_into_free_slots_and_leave_them_when_the_guest_is_done_with_them() {
        let (dir, image) = image();
        let disks = |accesses: &[bool]| {
            let open = accesses
                .iter()
                .map(|ro| OpenDisk::open(&image, *ro).unwrap());
            open.collect::<Vec<_>>()
        };
        let slots = slots(dir.path(), STAND_IN, 2);

        let mut both = Disks::attach(&slots, &disks(&[true, false])).unwrap();
        both.ready().await.unwrap();
        let told = both.of_guest(1).unwrap();
        assert_eq!(
            (told.slot, &*told.serial, told.sectors, told.read_only),
            (1, "cube-2", 8, false)
        );
        assert_eq!(both.of_guest(2), None);
        // Too many: the slots stay as they are.
        let error = Disks::attach(&slots, &disks(&[true])).err().unwrap();
        assert!(matches!(error, DiskError::NoSlot(2)), "{error}");

        // The guest still uses one of them, so its slot is not used again.
        both.detach(&["cube-1".into()]).await;
        let none = Disks::attach(&slots, &disks(&[true, true])).err().unwrap();
        assert!(matches!(none, DiskError::NoSlot(2)), "{none}");
        let mut last = Disks::attach(&slots, &disks(&[true])).unwrap();
        last.ready().await.unwrap();
        last.detach(&[]).await;

        // What the guest was never told of gives its slot back, even if nobody waits for it.
        drop(Disks::attach(&slots, &disks(&[true])).unwrap());
        slots.hypervisor.request(&Request::Console).await.unwrap();
        let told = Disks::attach(&slots, &disks(&[true]));
        told.unwrap().ready().await.unwrap();
        slots.hypervisor.request(&Request::Console).await.unwrap();
        let none = Disks::attach(&slots, &disks(&[true])).err().unwrap();
        assert!(matches!(none, DiskError::NoSlot(2)), "{none}");

        let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
        let attach = |slot: u8, read_only: bool, serial: u8| {
            format!(
                r#"{{"attach_disk":{{"slot":{slot},"read_only":{read_only},"serial":"cube-{serial}"}}}}"#
            )
        };
        let detach = |slot: u8| format!(r#"{{"detach_disk":{{"slot":{slot}}}}}"#);
        let expected = [
            attach(0, true, 1),
            attach(1, false, 2),
            detach(0),
            detach(1),
            attach(1, true, 3),
            detach(1),
            attach(1, true, 4),
            detach(1),
            "\"console\"".into(),
            attach(1, true, 5),
            detach(1),
            "\"console\"".into(),
        ];
        assert_eq!(log.lines().collect::<Vec<_>>(), expected);
    }

    /// Refuses disks that can be written.
    const REFUSING: &str = r#"#!/usr/bin/perl
open(my $control, "+<&=", $ARGV[1]) or die;
while (sysread($control, my $request, 65536)) {
    syswrite($control, $request =~ /false/ ? '{"reply":{"failed":"It is full"}}' : '{"reply":"done"}');
    syswrite($control, '{"event":{"disk_closed":{"slot":' . $1 . '}}}') if $request =~ /detach.*:(\d+)/;
}
"#;

    #[tokio::test]
    async fn when_one_disk_is_refused_all_slots_are_free_again() {
        let (dir, image) = image();
        let slots = slots(dir.path(), REFUSING, 3);
        let open = |read_only| OpenDisk::open(&image, read_only).unwrap();

        let mut disks = Disks::attach(&slots, &[open(true), open(false), open(true)]).unwrap();
        let error = disks.ready().await.unwrap_err().to_string();
        assert!(error.contains("It is full"), "{error}");
        drop(disks);
        slots.hypervisor.request(&Request::Console).await.unwrap();
        let all = Disks::attach(&slots, &[open(true), open(true), open(true)]);
        all.unwrap().ready().await.unwrap();
    }

    #[test]
    fn a_machine_has_the_slots_that_its_first_container_needs_and_spare_ones_for_others() {
        let slots = |needed, may_grow| slots_for(needed, may_grow, Some(4));
        assert_eq!(slots(0, false).unwrap(), 0);
        assert_eq!(slots(3, false).unwrap(), 3);
        assert_eq!(slots(0, true).unwrap(), 4);
        assert_eq!(slots(10, true).unwrap(), MAX_SLOTS);
        for needed in [13, 300] {
            let error = slots(needed, true).unwrap_err().to_string();
            assert!(error.contains(&needed.to_string()), "{error}");
        }

        // Nothing is said: who has no disks pays for none.
        assert_eq!(slots_for(0, true, None).unwrap(), 0);
        assert_eq!(slots_for(1, true, None).unwrap(), 5);
        assert_eq!(slots_for(1, false, None).unwrap(), 1);
        assert_eq!(slots_for(1, true, Some(0)).unwrap(), 1);
    }

    #[test]
    fn a_file_is_opened_as_it_is_to_be_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        File::create(&path).unwrap().set_len(8192).unwrap();
        for read_only in [true, false] {
            let disk = OpenDisk::open(&path, read_only).unwrap();
            assert_eq!((disk.sectors, disk.read_only), (16, read_only));
            let written = std::io::Write::write(&mut &disk.file, b"x");
            assert_eq!(written.is_err(), read_only);
        }
    }

    #[test]
    fn what_is_no_disk_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [
            &fifo,
            dir.path(),
            &dir.path().join("missing"),
            Path::new("/dev/null"),
        ] {
            let error = OpenDisk::open(path, true).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        let odd = dir.path().join("odd");
        for size in [0, 511, 513] {
            File::create(&odd).unwrap().set_len(size).unwrap();
            let error = OpenDisk::open(&odd, true).unwrap_err().to_string();
            assert!(error.contains(&format!("has {size} bytes")), "{error}");
        }
        let error = device_path(4095, 77, "/dev/data").unwrap_err().to_string();
        assert!(
            error.contains("4095:77") && error.contains("/dev/data"),
            "{error}"
        );
    }
}
