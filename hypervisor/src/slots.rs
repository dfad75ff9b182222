//! The slots for disks and networks that come while the machine runs.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::virtio::block::{self, Block, Disk, DiskError};
use crate::virtio::net::{self, Net, Tap, TapError};

/// All disks and networks of a machine, those with a backend and those without, each kind counted from 0.
#[derive(Default)]
pub struct Slots {
    /// The disks: vda, vdb, … in the guest.
    pub disks: Vec<Arc<Mutex<Block>>>,
    /// The networks: eth0, eth1, … in the guest.
    pub networks: Vec<Arc<Mutex<Net>>>,
}

/// Why something is not attached.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// Too few or too many descriptors came with the request.
    #[error("The request needs one file descriptor, {0} came with it")]
    Descriptors(usize),
    /// The machine was built with fewer.
    #[error(
        "There is no slot {slot} for a {kind}: the machine has {count}, set {field} to have more"
    )]
    NoSlot {
        /// The slot asked for.
        slot: u8,
        /// What it is for.
        kind: &'static str,
        /// How many there are.
        count: usize,
        /// What makes more.
        field: &'static str,
    },
    /// A serial number that the guest cannot be told.
    #[error("The serial number {0:?} of a disk has to have at most 20 ASCII characters")]
    Serial(String),
    /// See [`DiskError`].
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// See [`TapError`].
    #[error(transparent)]
    Tap(#[from] TapError),
    /// See [`block::AttachError`].
    #[error(transparent)]
    AttachDisk(#[from] block::AttachError),
    /// See [`block::DetachError`].
    #[error(transparent)]
    DetachDisk(#[from] block::DetachError),
    /// See [`net::AttachError`].
    #[error(transparent)]
    AttachNetwork(#[from] net::AttachError),
}

impl Slots {
    /// Puts the disk behind the one descriptor into `slot`, with this serial number.
    pub fn attach_disk(
        &self,
        slot: u8,
        read_only: bool,
        serial: &str,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), SlotError> {
        let device = self.disk(slot)?;
        if !is_serial(serial) {
            return Err(SlotError::Serial(serial.to_owned()));
        }
        let disk = Disk::from_fd(one(descriptors)?, read_only)?;
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(device.attach(disk, serial)?)
    }

    /// Takes the disk out of `slot`; calls `closed` when it is closed, from another thread.
    pub fn detach_disk(
        &self,
        slot: u8,
        closed: impl FnOnce() + Send + 'static,
    ) -> Result<(), SlotError> {
        let device = self.disk(slot)?;
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(device.detach(closed)?)
    }

    fn disk(&self, slot: u8) -> Result<&Mutex<Block>, SlotError> {
        match self.disks.get(usize::from(slot)) {
            Some(device) => Ok(device),
            None => Err(SlotError::NoSlot {
                slot,
                kind: "disk",
                count: self.disks.len(),
                field: "spare_disks",
            }),
        }
    }

    /// Puts the TAP behind the one descriptor into `slot`.
    pub fn attach_network(&self, slot: u8, descriptors: Vec<OwnedFd>) -> Result<(), SlotError> {
        let device = self
            .networks
            .get(usize::from(slot))
            .ok_or(SlotError::NoSlot {
                slot,
                kind: "network",
                count: self.networks.len(),
                field: "spare_networks",
            })?;
        let tap = Tap::from_fd(one(descriptors)?)?;
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(device.attach(tap)?)
    }
}

/// Whether the guest can be told this serial number.
pub fn is_serial(text: &str) -> bool {
    text.is_ascii() && text.len() <= block::ID_LEN
}

fn one(descriptors: Vec<OwnedFd>) -> Result<OwnedFd, SlotError> {
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors)
        .map_err(|descriptors| SlotError::Descriptors(descriptors.len()))?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn image() -> OwnedFd {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1024).unwrap();
        file.into()
    }

    fn spare_disk() -> Slots {
        Slots {
            disks: vec![Arc::new(Mutex::new(Block::new(None, "").unwrap()))],
            networks: Vec::new(),
        }
    }

    #[test]
    fn a_slot_takes_one_disk() {
        let slots = spare_disk();
        slots.attach_disk(0, false, "", vec![image()]).unwrap();
        let error = slots.attach_disk(0, false, "", vec![image()]).unwrap_err();
        assert!(matches!(error, SlotError::AttachDisk(_)), "{error}");
    }

    #[test]
    fn a_slot_whose_disk_was_taken_out_takes_another() {
        let slots = spare_disk();
        for serial in ["first", "second"] {
            slots.attach_disk(0, false, serial, vec![image()]).unwrap();
            slots.detach_disk(0, || {}).unwrap();
        }
        let error = slots.detach_disk(0, || {}).unwrap_err().to_string();
        assert_eq!(error, "The slot has no disk");
        let error = slots.detach_disk(1, || {}).unwrap_err();
        assert!(matches!(error, SlotError::NoSlot { .. }), "{error}");
    }

    #[test]
    fn a_serial_number_that_the_guest_cannot_be_told_is_refused() {
        let slots = spare_disk();
        for serial in ["ä", "012345678901234567890"] {
            let error = slots.attach_disk(0, true, serial, vec![image()]);
            assert!(matches!(error, Err(SlotError::Serial(s)) if s == serial));
        }
        slots
            .attach_disk(0, true, "01234567890123456789", vec![image()])
            .unwrap();
    }

    #[test]
    fn what_does_not_fit_a_slot_is_told() {
        let slots = spare_disk();
        let refused = |result: Result<(), SlotError>| result.unwrap_err().to_string();
        let error = refused(slots.attach_disk(1, false, "", vec![image()]));
        assert_eq!(
            error,
            "There is no slot 1 for a disk: the machine has 1, set spare_disks to have more"
        );
        for descriptors in [vec![], vec![image(), image()]] {
            let error = slots.attach_disk(0, false, "", descriptors).unwrap_err();
            assert!(matches!(error, SlotError::Descriptors(0 | 2)));
        }
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(refused(slots.attach_disk(0, true, "", vec![null()])).contains("neither a file"));
        assert!(refused(slots.attach_network(0, vec![null()])).contains("spare_networks"));
        let slots = Slots {
            disks: Vec::new(),
            networks: vec![Arc::new(Mutex::new(Net::new(None, None, None).unwrap()))],
        };
        assert!(refused(slots.attach_network(0, vec![null()])).contains("not that of a TAP"));
    }
}
