//! The registers of the vCPU that boots.
//!
//! KVM leaves a new vCPU in the state after reset, with what firmware would leave to do: the FPU
//! has its power-on control words, LINT0 of the first local APIC is ExtINT. Linux programs LINT1
//! itself. So only PVH's entry state and the memory types are set here; the other vCPUs wait for
//! the kernel's INIT and SIPI.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use crate::boot::Entry;
use crate::memory::START_INFO;

/// CR0: protected mode, and the bit that is always set.
const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;

const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;

/// Why a vCPU cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// KVM refused registers.
    #[error("Cannot set {0} of a vCPU")]
    Set(&'static str, #[source] kvm_ioctls::Error),
    /// No memory for a list of two.
    #[error("Cannot make a list of MSRs")]
    Allocate,
    /// KVM took some of the MSRs only.
    #[error("KVM refuses MSR {0:#x} of a vCPU")]
    Msr(u32),
}

/// Makes the vCPU start at `entry` as PVH wants it (Xen's `docs/misc/pvh.pandoc`): 32-bit
/// protected mode, flat segments, no paging, no interrupts, EBX pointing to the start info.
pub fn set_boot_registers(vcpu: &VcpuFd, entry: Entry) -> Result<(), RegisterError> {
    let regs = kvm_regs {
        rip: entry.address,
        rbx: START_INFO,
        // The bit that is always set.
        rflags: 1 << 1,
        ..Default::default()
    };
    vcpu.set_regs(&regs)
        .map_err(|e| RegisterError::Set("the registers", e))?;

    let mut sregs = vcpu
        .get_sregs()
        .map_err(|e| RegisterError::Set("the system registers", e))?;
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.cs = flat(SegmentType::Code, 0x08);
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = flat(SegmentType::Data, 0x10);
    }
    sregs.tr = task_state(0x18);
    vcpu.set_sregs(&sregs)
        .map_err(|e| RegisterError::Set("the system registers", e))
}

/// Memory is write-back by default, without which Linux does not use the page attribute table, and
/// string instructions are fast.
pub fn set_boot_msrs(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    let msr = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let entries = [
        msr(MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        msr(MSR_MTRR_DEF_TYPE, MTRR_ENABLE | MTRR_WRITE_BACK),
    ];
    let msrs = Msrs::from_entries(&entries).map_err(|_| RegisterError::Allocate)?;
    let set = vcpu
        .set_msrs(&msrs)
        .map_err(|e| RegisterError::Set("the model-specific registers", e))?;
    match entries.get(set) {
        Some(refused) => Err(RegisterError::Msr(refused.index)),
        None => Ok(()),
    }
}

/// Types of segments (Intel SDM volume 3, section 3.4.5.1).
#[derive(Clone, Copy)]
enum SegmentType {
    /// Read and write, accessed.
    Data = 3,
    /// Execute and read, accessed.
    Code = 11,
}

fn flat(kind: SegmentType, selector: u16) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind as u8,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// A busy 32-bit task state segment, which VMX wants in TR.
fn task_state(selector: u16) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0x67,
        selector,
        type_: 11,
        present: 1,
        ..Default::default()
    }
}
