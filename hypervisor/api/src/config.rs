//! The machine's configuration.
//!
//! Unknown fields are errors, every optional field has the default that its comment names.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A whole machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// The guest kernel: an x86-64 ELF image (`vmlinux`) with a PVH entry note.
    pub kernel: PathBuf,
    /// A newc cpio archive, compressed or not, that the kernel unpacks as its first root. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line; the hypervisor appends what describes its devices. Default: empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cmdline: String,
    /// Number of vCPUs, at least 1. Default: 1.
    #[serde(default = "default_vcpus")]
    pub vcpus: u8,
    /// Guest memory in MiB. Default: 128.
    #[serde(default = "default_memory_mib")]
    pub memory_mib: u64,
    /// virtio-blk devices, in the guest's order vda, vdb, …. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskConfig>,
    /// virtio-blk devices without a backend after those in `disks`, to be filled while the machine runs. Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spare_disks: u8,
    /// virtio-net devices, in the guest's order eth0, eth1, …. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NetworkConfig>,
    /// virtio-net devices without a backend (link down) after those in `networks`. Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spare_networks: u8,
    /// Directories shared with the guest by virtio-fs. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareConfig>,
    /// The vsock device. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// Whether the guest gets a virtio-rng device. Default: true.
    #[serde(default = "default_true")]
    pub entropy: bool,
    /// What to do with the guest's console. Default: keep its end in memory only.
    #[serde(default, skip_serializing_if = "Console::is_default")]
    pub console: Console,
}

/// A virtio-blk device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// A raw image file or a block device; its size is a multiple of 512 bytes.
    pub path: PathBuf,
    /// Refuse writes. Default: false.
    #[serde(default)]
    pub read_only: bool,
    /// What the guest reads as the disk's serial number (`/sys/block/vdX/serial`), at most 20 ASCII characters. Default: empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub serial: String,
}

/// A virtio-net device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkConfig {
    /// The name of an existing TAP interface, or of one to create.
    pub tap: String,
    /// The guest's MAC address, `aa:bb:cc:dd:ee:ff`. Default: a random, locally administered one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The MTU that the guest is told, 68 to 65535. Default: the TAP's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
}

/// A directory shared by virtio-fs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// The name by which the guest mounts it (`mount -t virtiofs TAG DIR`), 1 to 36 bytes.
    pub tag: String,
    /// The directory on the host.
    pub path: PathBuf,
    /// Refuse everything that would change it. Default: false.
    #[serde(default)]
    pub read_only: bool,
    /// Names of directories directly below `path`. What is mounted on their subdirectories, now or later, is
    /// changed by this guest alone (containers' root filesystems), and the guest may cache it for as long as
    /// it likes. Everywhere else the guest sees what the host changes after at most one second. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guest_owned: Vec<String>,
    /// The guest changes only what is mounted below `path`, now or later. The directories in which the mounts lie are the
    /// host's: what it makes, mounts and removes there by its path cannot be led elsewhere by the guest. Default: false.
    #[serde(default)]
    pub mounts_only: bool,
}

/// The vsock device. The guest's connections to port P of the host (CID 2) go to the Unix socket
/// `<path>_P`; a client on the host connects to `path`, writes `CONNECT P\n` and, once the guest
/// has accepted, reads `OK <host port>\n`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// The guest's context identifier, 3 or more. Default: 3. It need not be unique on the host.
    #[serde(default = "default_cid")]
    pub cid: u32,
    /// The Unix socket that the hypervisor listens on; at most 90 bytes.
    pub path: PathBuf,
}

/// What happens with what the guest writes to its console (hvc0, and ttyS0 before it).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Console {
    /// Its last 64 KiB stay in memory, for boot errors and the control socket.
    #[default]
    Ring,
    /// It goes to the hypervisor's standard output as well, and standard input goes to the guest.
    Stdio,
    /// It goes to the hypervisor's standard error as well, a whole line at a time.
    Log,
}

impl Console {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

fn default_vcpus() -> u8 {
    1
}

fn default_memory_mib() -> u64 {
    128
}

fn default_cid() -> u32 {
    3
}

fn default_true() -> bool {
    true
}

fn is_zero(n: &u8) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_machine_is_a_kernel() {
        let config: VmConfig = serde_json::from_str(r#"{"kernel": "/vmlinux"}"#).unwrap();
        assert_eq!((config.vcpus, config.memory_mib), (1, 128));
        assert!(config.entropy);
        assert_eq!(config.console, Console::Ring);
    }

    #[test]
    fn an_unknown_field_is_named() {
        let error = serde_json::from_str::<VmConfig>(r#"{"kernel": "/k", "memroy_mib": 5}"#)
            .unwrap_err()
            .to_string();
        assert!(error.contains("memroy_mib"), "{error}");
    }

    #[test]
    fn a_configuration_survives_json() {
        let text = r#"{"kernel":"/k","initramfs":"/i","cmdline":"quiet","vcpus":2,"memory_mib":512,
            "disks":[{"path":"/d","read_only":true,"serial":"a"}],"spare_disks":4,
            "networks":[{"tap":"tap0","mac":"02:00:00:00:00:01","mtu":1400}],"spare_networks":1,
            "shares":[{"tag":"cube","path":"/s","guest_owned":["rootfs"]}],"vsock":{"path":"/v"},"entropy":false,"console":"stdio"}"#;
        let config: VmConfig = serde_json::from_str(text).unwrap();
        let again: VmConfig =
            serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(config, again);
        assert_eq!(config.vsock.unwrap().cid, 3);
    }
}
