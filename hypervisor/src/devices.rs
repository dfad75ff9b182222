//! The machine's virtio devices, from its configuration.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cube_hypervisor_api::{VmConfig, config};

use crate::console::{Console, Input};
use crate::slots::{Slots, is_serial};
use crate::virtio::block::{Block, Disk, DiskError};
use crate::virtio::console::ConsoleDevice;
use crate::virtio::fs::{Fs, FsError};
use crate::virtio::mmio::SharedDevice;
use crate::virtio::net::{Mac, Net, Tap, TapError, parse_mac};
use crate::virtio::rng::Rng;
use crate::virtio::vsock::{Vsock, VsockError};

/// Told which share is crowded, and by how many inodes the guest holds. Called by the share's workers.
pub type OnCrowd = Arc<dyn Fn(&str, u64) + Send + Sync>;

/// A device that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The console has no eventfd, or standard input cannot be read.
    #[error("Cannot connect the guest's console")]
    Console(#[source] io::Error),
    /// See [`VsockError`].
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// See [`FsError`].
    #[error(transparent)]
    Share(#[from] FsError),
    /// See [`DiskError`].
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A serial number that the guest cannot be told.
    #[error("The serial number {0:?} of a disk has to have at most 20 ASCII characters")]
    Serial(String),
    /// See [`TapError`].
    #[error(transparent)]
    Network(#[from] TapError),
    /// Not an address of one network device.
    #[error("The MAC address {0:?} is none: it is like 02:00:00:00:00:01, with an even first byte")]
    Mac(String),
    /// An MTU that no network has.
    #[error("The MTU {0} of the TAP {1} has to be 68 to 65535")]
    Mtu(u16, String),
    /// The host has no eventfd left for a device.
    #[error("Cannot create a virtio device: raise the limit of open files")]
    EventFd(#[source] io::Error),
}

/// The devices in the order of their windows, which is the order in which Linux finds them.
pub struct Devices {
    /// All of them.
    pub all: Vec<SharedDevice>,
    /// Those of them that a backend can be attached to while the machine runs.
    pub slots: Slots,
    /// What the devices leave in the file system while they are there.
    pub leftovers: Leftovers,
}

/// Files that are removed at the end.
#[derive(Default)]
pub struct Leftovers(Vec<PathBuf>);

impl Drop for Leftovers {
    fn drop(&mut self) {
        for path in &self.0 {
            // Whoever removed it before us wanted the same.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Devices {
    /// Opens all that the configuration names.
    pub fn open(
        config: &VmConfig,
        console: &Arc<Console>,
        on_crowd: &OnCrowd,
    ) -> Result<Self, DeviceError> {
        let mut all = vec![console_device(config, console)?];
        let mut leftovers = Leftovers::default();
        if let Some(vsock) = &config.vsock {
            all.push(shared(Vsock::new(vsock)?));
            leftovers.0.push(vsock.path.clone());
        }
        for share in &config.shares {
            let (tag, on_crowd) = (share.tag.clone(), Arc::clone(on_crowd));
            let tell = Box::new(move |inodes| on_crowd(&tag, inodes));
            all.push(shared(Fs::new(share, config.memory_mib << 20, tell)?));
        }
        let slots = open_slots(config)?;
        all.extend(slots.disks.iter().map(|disk| disk.clone() as SharedDevice));
        all.extend(slots.networks.iter().map(|net| net.clone() as SharedDevice));
        if config.entropy {
            all.push(shared(Rng::new().map_err(DeviceError::EventFd)?));
        }
        Ok(Self {
            all,
            slots,
            leftovers,
        })
    }
}

/// Disks and networks, those of the configuration first.
fn open_slots(config: &VmConfig) -> Result<Slots, DeviceError> {
    let mut slots = Slots::default();
    for disk in &config.disks {
        if !is_serial(&disk.serial) {
            return Err(DeviceError::Serial(disk.serial.clone()));
        }
        let backend = Disk::open(&disk.path, disk.read_only)?;
        slots.disks.push(block(Some(backend), &disk.serial)?);
    }
    for _ in 0..config.spare_disks {
        slots.disks.push(block(None, "")?);
    }
    for network in &config.networks {
        slots.networks.push(open_network(network)?);
    }
    for _ in 0..config.spare_networks {
        slots.networks.push(net(None, None, None)?);
    }
    Ok(slots)
}

fn open_network(network: &config::NetworkConfig) -> Result<Arc<Mutex<Net>>, DeviceError> {
    let mac = match &network.mac {
        Some(text) => Some(parse_mac(text).ok_or_else(|| DeviceError::Mac(text.clone()))?),
        None => None,
    };
    if let Some(mtu) = network.mtu.filter(|mtu| *mtu < 68) {
        return Err(DeviceError::Mtu(mtu, network.tap.clone()));
    }
    net(Some(Tap::open(&network.tap)?), mac, network.mtu)
}

fn block(disk: Option<Disk>, serial: &str) -> Result<Arc<Mutex<Block>>, DeviceError> {
    let block = Block::new(disk, serial).map_err(DeviceError::EventFd)?;
    Ok(Arc::new(Mutex::new(block)))
}

fn net(
    tap: Option<Tap>,
    mac: Option<Mac>,
    mtu: Option<u16>,
) -> Result<Arc<Mutex<Net>>, DeviceError> {
    let net = Net::new(tap, mac, mtu).map_err(DeviceError::EventFd)?;
    Ok(Arc::new(Mutex::new(net)))
}

fn console_device(config: &VmConfig, console: &Arc<Console>) -> Result<SharedDevice, DeviceError> {
    let input = match config.console {
        config::Console::Stdio => Some(Input::stdin().map_err(DeviceError::Console)?),
        config::Console::Ring | config::Console::Log => None,
    };
    ConsoleDevice::new(Arc::clone(console), input)
        .map(shared)
        .map_err(DeviceError::Console)
}

fn shared<D: crate::virtio::VirtioDevice + 'static>(device: D) -> SharedDevice {
    Arc::new(Mutex::new(device))
}
