//! How big a sandbox's machine is.
//!
//! vCPUs: the CPU limit rounded up to whole processors, or as many as the container is bound to, the fewer of both; else
//! `default_vcpus`. Never more than `max_vcpus` (or the host's processors).
//!
//! Memory: a container's limit is what its processes may use, so the machine has
//! [`GUEST_OVERHEAD_MIB`] more for the guest's kernel and agent; without a limit it has
//! `default_memory_mib`. Never more than `max_memory_mib` (or the host's memory): a limit beyond
//! that is no request for so much.

use crate::config::Config;
use crate::spec::Spec;

/// What the guest's kernel and agent need for themselves, in MiB.
pub const GUEST_OVERHEAD_MIB: u64 = 64;

/// A machine's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory in MiB.
    pub memory_mib: u64,
}

impl Size {
    /// The size for a sandbox whose first container has this specification.
    pub fn of(spec: &Spec, config: &Config) -> Self {
        let most = Self::most(config);
        let vcpus = spec
            .wanted_cpus()
            .map_or(config.default_vcpus, |n| u8::try_from(n).unwrap_or(u8::MAX));
        let memory_mib = spec
            .wanted_memory()
            .map_or(config.default_memory_mib, |bytes| {
                bytes.div_ceil(1 << 20).saturating_add(GUEST_OVERHEAD_MIB)
            });
        Self {
            vcpus: vcpus.clamp(1, most.vcpus),
            memory_mib: memory_mib.min(most.memory_mib),
        }
    }

    /// The largest that there may be.
    pub fn most(config: &Config) -> Self {
        Self {
            vcpus: config.max_vcpus.unwrap_or_else(host_processors).max(1),
            memory_mib: config.max_memory_mib.unwrap_or_else(host_memory_mib),
        }
    }
}

/// How many whole processors a quota of microseconds in each period is worth; none where it is no limit.
pub fn processors_of(quota: Option<i64>, period: Option<i64>) -> Option<u64> {
    let quota = u64::try_from(quota?).ok().filter(|&q| q > 0)?;
    let period = u64::try_from(period.unwrap_or(100_000))
        .ok()
        .filter(|&p| p > 0)?;
    Some(quota.div_ceil(period))
}

fn host_processors() -> u8 {
    std::thread::available_parallelism().map_or(1, |n| u8::try_from(n.get()).unwrap_or(u8::MAX))
}

fn host_memory_mib() -> u64 {
    // SAFETY: an all-zero sysinfo is a valid value of this plain structure.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a structure of the right type that lives during the call.
    if unsafe { libc::sysinfo(&raw mut info) } != 0 {
        return u64::MAX;
    }
    info.totalram.saturating_mul(u64::from(info.mem_unit)) >> 20
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn config() -> Config {
        Config {
            kernel: "/k".into(),
            initramfs: "/i".into(),
            hypervisor: "/h".into(),
            kernel_params: String::new(),
            default_vcpus: 1,
            max_vcpus: Some(8),
            default_memory_mib: 256,
            max_memory_mib: Some(4096),
            spare_disks: None,
            erofs_in_guest: false,
            boot_timeout: Duration::from_secs(30),
            log_level: log::LevelFilter::Warn,
            debug_console: false,
        }
    }

    fn size(spec: &str) -> (u8, u64) {
        let size = Size::of(&Spec::parse(spec.as_bytes()).unwrap(), &config());
        (size.vcpus, size.memory_mib)
    }

    #[test]
    fn a_container_without_limits_has_the_default_size() {
        assert_eq!(size("{}"), (1, 256));
    }

    #[test]
    fn a_limit_leaves_room_for_the_guest_itself() {
        let spec = r#"{"linux": {"resources": {"cpu": {"quota": 200000, "period": 100000},
            "memory": {"limit": 67108864}}}}"#;
        assert_eq!(size(spec), (2, 128));
    }

    #[test]
    fn a_container_that_is_bound_to_processors_has_as_many() {
        let bound = |quota: i64| {
            format!(
                r#"{{"linux": {{"resources": {{"cpu": {{"cpus": "4-5,9", "quota": {quota}}}}}}}}}"#
            )
        };
        assert_eq!(size(&bound(-1)), (3, 256));
        assert_eq!(size(&bound(200_000)), (2, 256));
        assert_eq!(size(&bound(600_000)), (3, 256));
    }

    #[test]
    fn a_limit_that_means_none_is_cut_to_the_most_allowed() {
        let spec = r#"{"linux": {"resources": {"cpu": {"quota": 9900000, "period": 100000},
            "memory": {"limit": 9223372036854771712}}}}"#;
        assert_eq!(size(spec), (8, 4096));
    }

    #[test]
    fn the_host_is_the_bound_where_none_is_configured() {
        assert!(host_processors() >= 1);
        assert!(host_memory_mib() > 64);
    }
}
