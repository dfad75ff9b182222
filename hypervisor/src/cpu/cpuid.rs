//! What CPUID tells the guest: all that KVM supports here but performance counters, with the machine's own topology.
//!
//! The topology is one package of as many cores as there are vCPUs, one thread each; a vCPU's APIC
//! identifier is its index.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

/// `KVM_CPUID_FLAG_SIGNIFCANT_INDEX`: the sub-leaf in ECX matters.
const SIGNIFICANT_INDEX: u32 = 1;

/// Leaf 1, ECX.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the count of logical processors in EBX holds.
const HTT: u32 = 1 << 28;

/// What tells of performance counters, which the guest does not have: Intel's leaf 0xa and capabilities register; AMD's
/// counters of the core, of the northbridge and of the third-level cache, and the second version of all of them.
const INTEL_COUNTERS: u32 = 0xa;
const AMD_COUNTERS: u32 = 0x8000_0022;
/// Leaf 1, ECX.
const PERFORMANCE_CAPABILITIES: u32 = 1 << 15;
/// Leaf 0x8000_0001, ECX.
const AMD_COUNTER_EXTENSIONS: u32 = 1 << 23 | 1 << 24 | 1 << 28;

/// Levels of leaf 0xb, ECX[15:8].
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Why there is no CPUID for the guest.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    /// KVM does not tell.
    #[error("Cannot ask KVM for the CPUID that it supports")]
    Supported(#[source] kvm_ioctls::Error),
    /// KVM tells more than it takes.
    #[error("The host's CPUID has more than {KVM_MAX_CPUID_ENTRIES} entries")]
    TooMany,
}

/// CPUID for a machine, from which that of each vCPU is made. Asking KVM is costly: it happens once.
pub struct Template {
    cpuid: CpuId,
}

impl Template {
    /// Asks KVM what it supports and shapes it for a machine of `vcpus` vCPUs.
    pub fn new(kvm: &Kvm, vcpus: u8) -> Result<Self, CpuidError> {
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(CpuidError::Supported)?;
        Ok(Self {
            cpuid: shape(supported.as_slice(), vcpus)?,
        })
    }

    /// CPUID of the vCPU with this index.
    pub fn for_vcpu(&mut self, index: u8) -> &CpuId {
        for entry in self.cpuid.as_mut_slice() {
            set_identity(entry, index);
        }
        &self.cpuid
    }
}

/// What is the same for every vCPU.
fn shape(supported: &[kvm_cpuid_entry2], vcpus: u8) -> Result<CpuId, CpuidError> {
    let mut entries = Vec::with_capacity(supported.len() + 3);
    let has_topology_leaf = supported.iter().any(|e| e.function == 0 && e.eax >= 0xb);
    for entry in supported {
        // The host's topology: replaced below by the machine's.
        if matches!(entry.function, 0xb | 0x1f) {
            continue;
        }
        let mut entry = *entry;
        leave_counters_out(&mut entry);
        set_topology(&mut entry, u32::from(vcpus));
        entries.push(entry);
    }
    if has_topology_leaf {
        let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
            function: 0xb,
            index,
            flags: SIGNIFICANT_INDEX,
            eax: shift,
            ebx: count,
            ecx: kind << 8 | index,
            ..Default::default()
        };
        entries.push(level(0, 0, 1, LEVEL_THREAD));
        entries.push(level(1, id_bits(vcpus), vcpus.into(), LEVEL_CORE));
        entries.push(level(2, 0, 0, 0));
    }
    CpuId::from_entries(&entries).map_err(|_| CpuidError::TooMany)
}

fn leave_counters_out(entry: &mut kvm_cpuid_entry2) {
    match entry.function {
        1 => entry.ecx &= !PERFORMANCE_CAPABILITIES,
        0x8000_0001 => entry.ecx &= !AMD_COUNTER_EXTENSIONS,
        INTEL_COUNTERS | AMD_COUNTERS => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        _ => {}
    }
}

fn set_topology(entry: &mut kvm_cpuid_entry2, vcpus: u32) {
    match entry.function {
        1 => {
            entry.ecx |= TSC_DEADLINE | HYPERVISOR;
            entry.ebx = entry.ebx & !0x00ff_0000 | vcpus << 16;
            set_bit(&mut entry.edx, HTT, vcpus > 1);
        }
        // Intel's caches: cores in the package, and who shares each.
        4 if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & 0x3fff | (vcpus - 1).min(63) << 26 | sharing(entry.eax, vcpus);
        }
        // AMD's caches.
        0x8000_001d if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & !0x03ff_c000 | sharing(entry.eax, vcpus);
        }
        // AMD: threads in the package, and how many bits of the identifier they take.
        0x8000_0008 => {
            entry.ecx = entry.ecx & !0xf0ff | (vcpus - 1) | id_bits(vcpus as u8) << 12;
        }
        _ => {}
    }
}

fn set_identity(entry: &mut kvm_cpuid_entry2, index: u8) {
    let id = u32::from(index);
    match entry.function {
        1 => entry.ebx = entry.ebx & 0x00ff_ffff | id << 24,
        0xb => entry.edx = id,
        // AMD: one thread a core, one node.
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id & 0xff, 0),
        _ => {}
    }
}

/// Which vCPUs share a cache, in EAX[25:14]: all of them the third level, none the others.
fn sharing(eax: u32, vcpus: u32) -> u32 {
    let level = eax >> 5 & 7;
    if level >= 3 { (vcpus - 1) << 14 } else { 0 }
}

/// How many bits number `vcpus` vCPUs.
fn id_bits(vcpus: u8) -> u32 {
    u8::BITS - (vcpus - 1).leading_zeros()
}

fn set_bit(register: &mut u32, bit: u32, value: bool) {
    *register = *register & !bit | if value { bit } else { 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32, eax: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ..Default::default()
        }
    }

    fn find(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid
            .as_slice()
            .iter()
            .find(|e| e.function == function && e.index == index)
            .unwrap()
    }

    fn template(vcpus: u8) -> Template {
        let supported = [
            leaf(0, 0, 0x10),
            leaf(1, 0, 0),
            // A first-level data cache and a third-level one, as seen on a host with 32 threads.
            leaf(4, 0, 0x7c00_4021),
            leaf(4, 3, 0x7c0f_c063),
            leaf(0xb, 0, 1),
            leaf(0x1f, 0, 1),
            leaf(0x4000_0001, 0, 0x1234),
            leaf(0x8000_0008, 0, 0),
            leaf(0x8000_001d, 3, 0x001f_c163),
            leaf(0x8000_001e, 0, 99),
        ];
        Template {
            cpuid: shape(&supported, vcpus).unwrap(),
        }
    }

    #[test]
    fn the_deadline_timer_is_there_and_kvms_leaves_are_kept() {
        let mut template = template(1);
        let cpuid = template.for_vcpu(0);
        assert_eq!(find(cpuid, 1, 0).ecx, TSC_DEADLINE | HYPERVISOR);
        assert_eq!(find(cpuid, 1, 0).edx & HTT, 0);
        assert_eq!(find(cpuid, 0x4000_0001, 0).eax, 0x1234);
    }

    #[test]
    fn no_leaf_tells_of_performance_counters() {
        for function in [1, INTEL_COUNTERS, 0x8000_0001, AMD_COUNTERS] {
            let everything = kvm_cpuid_entry2 {
                function,
                eax: u32::MAX,
                ebx: u32::MAX,
                ecx: u32::MAX,
                edx: u32::MAX,
                ..Default::default()
            };
            let cpuid = shape(&[everything], 1).unwrap();
            let left = find(&cpuid, function, 0);
            match function {
                1 => assert_eq!(left.ecx, !PERFORMANCE_CAPABILITIES),
                0x8000_0001 => assert_eq!(left.ecx, !AMD_COUNTER_EXTENSIONS),
                _ => assert_eq!([left.eax, left.ebx, left.ecx, left.edx], [0; 4]),
            }
        }
    }

    #[test]
    fn every_leaf_agrees_on_who_a_vcpu_is() {
        let mut template = template(6);
        for index in [5, 2] {
            let cpuid = template.for_vcpu(index);
            let id = u32::from(index);
            assert_eq!(find(cpuid, 1, 0).ebx >> 24, id);
            for level in 0..3 {
                assert_eq!(find(cpuid, 0xb, level).edx, id);
            }
            assert_eq!(find(cpuid, 0x8000_001e, 0).eax, id);
        }
    }

    #[test]
    fn every_leaf_agrees_on_how_many_vcpus_there_are() {
        let mut template = template(6);
        let cpuid = template.for_vcpu(0);
        assert_eq!(find(cpuid, 1, 0).ebx >> 16 & 0xff, 6);
        assert_ne!(find(cpuid, 1, 0).edx & HTT, 0);
        assert_eq!(find(cpuid, 0xb, 1).ebx, 6);
        assert_eq!(find(cpuid, 0xb, 1).eax, 3);
        assert_eq!(find(cpuid, 0x8000_0008, 0).ecx, 3 << 12 | 5);
        assert_eq!(find(cpuid, 4, 0).eax >> 26, 5);
        assert_eq!(find(cpuid, 4, 0).eax >> 14 & 0xfff, 0);
        assert_eq!(find(cpuid, 4, 3).eax >> 14 & 0xfff, 5);
        assert_eq!(find(cpuid, 0x8000_001d, 3).eax >> 14 & 0xfff, 5);
        assert!(!cpuid.as_slice().iter().any(|e| e.function == 0x1f));
    }

    #[test]
    fn identifiers_take_as_many_bits_as_needed() {
        for (vcpus, bits) in [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (254, 8)] {
            assert_eq!(id_bits(vcpus), bits);
        }
    }
}
