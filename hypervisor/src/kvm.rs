//! The way into KVM: `/dev/kvm` and what it must be able to do.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use kvm_ioctls::{Cap, Kvm};

/// Where KVM is.
pub const DEVICE: &str = "/dev/kvm";

/// The version of KVM's interface, the same since Linux 2.6.22 (`Documentation/virt/kvm/api.rst`, section 4.1).
const API_VERSION: i32 = 12;

/// What the machine is built on, and the names that an error gives it.
const NEEDED: [(Cap, &str); 5] = [
    (Cap::SplitIrqchip, "KVM_CAP_SPLIT_IRQCHIP"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
];

/// Why there is no KVM. Each is the host's fault.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device node is missing.
    #[error(
        "There is no {0}: load kvm_intel or kvm_amd, and enable virtualization in the firmware or the outer hypervisor"
    )]
    Missing(String),
    /// The device node may not be opened.
    #[error("Not allowed to open {0}: run as root or as a member of the group that owns it")]
    Denied(String),
    /// Opening failed otherwise.
    #[error("Cannot open {0}: check that the kvm module works")]
    Open(String, #[source] io::Error),
    /// The file is something else.
    #[error("{0} is not the KVM device: it should be a character device with numbers 10, 232")]
    NotKvm(String),
    /// The host's KVM lacks something.
    #[error("The host's KVM lacks {0}: use Linux 5.10 or newer")]
    Capability(&'static str),
}

/// Opens KVM.
pub fn open() -> Result<Kvm, KvmError> {
    open_at(Path::new(DEVICE))
}

fn open_at(path: &Path) -> Result<Kvm, KvmError> {
    let name = || path.display().to_string();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => KvmError::Missing(name()),
            io::ErrorKind::PermissionDenied => KvmError::Denied(name()),
            _ => KvmError::Open(name(), e),
        })?;
    // SAFETY: The descriptor is open and belongs to nobody else. That it is KVM's is checked next.
    let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
    if kvm.get_api_version() != API_VERSION {
        return Err(KvmError::NotKvm(name()));
    }
    for (capability, name) in NEEDED {
        if !kvm.check_extension(capability) {
            return Err(KvmError::Capability(name));
        }
    }
    Ok(kvm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_told_from_one_that_is_something_else() {
        let dir = tempfile::tempdir().unwrap();
        let missing = open_at(&dir.path().join("kvm")).unwrap_err();
        assert!(matches!(missing, KvmError::Missing(_)), "{missing}");
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = open_at(file.path()).unwrap_err();
        assert!(matches!(other, KvmError::NotKvm(_)), "{other}");
        let directory = open_at(dir.path()).unwrap_err();
        assert!(matches!(directory, KvmError::Open(..)), "{directory}");
    }
}
