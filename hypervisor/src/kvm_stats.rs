//! What KVM itself counts of a vCPU: all exits, also those that it deals with alone
//! (`Documentation/virt/kvm/api.rst`, section 4.133, `KVM_GET_STATS_FD`, since Linux 5.14).

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl;

mod ioctls {
    vmm_sys_util::ioctl_io_nr!(KVM_GET_STATS_FD, kvm_bindings::KVMIO, 0xce);
}

/// A descriptor without its name: flags, exponent, size, offset, bucket size (`struct kvm_stats_desc`).
const DESCRIPTOR: usize = 16;
/// The most names that are believed: KVM has some fifty.
const MOST: u32 = 1024;
const LONGEST_NAME: u32 = 256;

/// A vCPU's counters.
pub struct KvmStats(File);

impl KvmStats {
    /// Asks KVM for the counters' file.
    pub fn new(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: The ioctl has no argument; it returns a new descriptor or an error.
        let fd = unsafe { ioctl(vcpu, ioctls::KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: The descriptor is new.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// The counters that are one number each, by name.
    pub fn read(&self) -> io::Result<Vec<(String, u64)>> {
        let mut header = [0; 24];
        self.0.read_exact_at(&mut header, 0)?;
        let [_, name_size, count, _, descriptors, data] = words(&header);
        let entry = DESCRIPTOR + name_size.min(LONGEST_NAME) as usize;
        let mut table = vec![0; entry * count.min(MOST) as usize];
        self.0.read_exact_at(&mut table, descriptors.into())?;
        let mut counters = Vec::new();
        for descriptor in table.chunks_exact(entry) {
            let (fields, name) = descriptor.split_at(DESCRIPTOR);
            let [_, exponent_and_size, offset, _] = words(fields);
            // Histograms have more than one value, times an exponent.
            if exponent_and_size != 1 << 16 {
                continue;
            }
            let mut value = [0; 8];
            let at = u64::from(data) + u64::from(offset);
            self.0.read_exact_at(&mut value, at)?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            let name = String::from_utf8_lossy(name).into_owned();
            counters.push((name, u64::from_le_bytes(value)));
        }
        Ok(counters)
    }
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        if let Ok(bytes) = bytes.try_into() {
            *word = u32::from_le_bytes(bytes);
        }
    }
    words
}
