//! The machine's virtio devices, from its configuration.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cube_hypervisor_api::{VmConfig, config};

use crate::console::{Console, Input};
use crate::virtio::console::ConsoleDevice;
use crate::virtio::fs::{Fs, FsError};
use crate::virtio::mmio::SharedDevice;
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
}

/// The devices in the order of their windows, which is the order in which Linux finds them.
pub struct Devices {
    /// All of them.
    pub all: Vec<SharedDevice>,
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
        Ok(Self { all, leftovers })
    }
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
