//! What a snapshot keeps of a vCPU.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, Xsave, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

/// The deadline is meant on the TSC, which has to be right first.
const MSR_IA32_TSC_DEADLINE: u32 = 0x6e0;

/// Hyper-V's synthetic MSRs (Hyper-V TLFS, appendix F).
const HYPERV_MSRS: std::ops::Range<u32> = 0x4000_0000..0x4000_0200;

/// All of a vCPU.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    /// `None` where the host cannot tell.
    tsc_khz: Option<u32>,
    cpuid: CpuId,
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// What a vCPU's state is made of and the machine knows: the same for all of its vCPUs.
pub struct StateLayout {
    xsave_words: usize,
    msrs: Vec<u32>,
}

/// Why a state cannot be taken or put back.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// KVM refused to tell.
    #[error("Cannot get {0} of a vCPU")]
    Get(&'static str, #[source] kvm_ioctls::Error),
    /// KVM refused what the snapshot says.
    #[error("Cannot set {0} of a vCPU")]
    Set(&'static str, #[source] kvm_ioctls::Error),
    /// KVM refused a model-specific register.
    #[error("KVM refuses MSR {0:#x} of a vCPU: the snapshot is of another kind of processor")]
    Msr(u32),
    /// A list is longer than KVM takes.
    #[error("The snapshot has too many {0} for a vCPU")]
    TooMany(&'static str),
    /// The snapshot's FPU state does not fit this host.
    #[error("The snapshot's FPU state has {found} words, this host's has {expected}")]
    Xsave {
        /// In the snapshot.
        found: usize,
        /// What KVM takes here.
        expected: usize,
    },
}

impl StateLayout {
    /// Asks KVM.
    pub fn new(kvm: &Kvm, vm: &VmFd) -> Result<Self, StateError> {
        let xsave_bytes = vm.check_extension_int(Cap::Xsave2) as usize;
        let list = kvm
            .get_msr_index_list()
            .map_err(|e| StateError::Get("the list of MSRs", e))?;
        let mut msrs = list.as_slice().to_vec();
        // The guest is told of KVM, not of Hyper-V; some of these are clocks of their own.
        msrs.retain(|index| !HYPERV_MSRS.contains(index));
        msrs.sort_by_key(|index| *index == MSR_IA32_TSC_DEADLINE);
        Ok(Self {
            xsave_words: xsave_bytes
                .saturating_sub(size_of::<kvm_xsave>())
                .div_ceil(size_of::<u32>()),
            msrs,
        })
    }
}

impl VcpuState {
    /// Takes the state of a vCPU that does not run. The order matters: `KVM_GET_MP_STATE` may
    /// deliver a pending INIT or SIPI, which changes registers, and events come last because
    /// everything before may still change them.
    pub fn save(vcpu: &VcpuFd, layout: &StateLayout) -> Result<Self, StateError> {
        let get = StateError::Get;
        let mp_state = vcpu.get_mp_state().map_err(|e| get("the run state", e))?;
        let regs = vcpu.get_regs().map_err(|e| get("the registers", e))?;
        let sregs = vcpu
            .get_sregs()
            .map_err(|e| get("the system registers", e))?;
        let mut xsave =
            Xsave::new(layout.xsave_words).map_err(|_| StateError::TooMany("FPU words"))?;
        // SAFETY: `xsave` is as long as KVM_CAP_XSAVE2 says.
        unsafe { vcpu.get_xsave2(&mut xsave) }.map_err(|e| get("the FPU state", e))?;
        let xcrs = vcpu
            .get_xcrs()
            .map_err(|e| get("the extended control registers", e))?;
        let debug_regs = vcpu
            .get_debug_regs()
            .map_err(|e| get("the debug registers", e))?;
        let lapic = vcpu.get_lapic().map_err(|e| get("the local APIC", e))?;
        let tsc_khz = vcpu.get_tsc_khz().ok();
        let cpuid = vcpu
            .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| get("CPUID", e))?;
        let msrs = get_msrs(vcpu, &layout.msrs)?;
        let events = vcpu.get_vcpu_events().map_err(|e| get("the events", e))?;
        Ok(Self {
            mp_state,
            regs,
            sregs,
            xsave,
            xcrs,
            debug_regs,
            lapic,
            tsc_khz,
            cpuid,
            msrs,
            events,
        })
    }

    /// Puts the state into a new vCPU. CPUID comes before the MSRs, whose meaning depends on it,
    /// and the system registers before the local APIC, whose mode is in `apic_base`.
    pub fn restore(&self, vcpu: &VcpuFd, layout: &StateLayout) -> Result<(), StateError> {
        let set = StateError::Set;
        if let Some(khz) = self.tsc_khz
            && vcpu.get_tsc_khz().ok() != Some(khz)
        {
            vcpu.set_tsc_khz(khz)
                .map_err(|e| set("the TSC's frequency", e))?;
        }
        vcpu.set_cpuid2(&self.cpuid).map_err(|e| set("CPUID", e))?;
        vcpu.set_mp_state(self.mp_state)
            .map_err(|e| set("the run state", e))?;
        vcpu.set_regs(&self.regs)
            .map_err(|e| set("the registers", e))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(|e| set("the system registers", e))?;
        let found = self.xsave.as_slice().len();
        if found != layout.xsave_words {
            return Err(StateError::Xsave {
                found,
                expected: layout.xsave_words,
            });
        }
        // SAFETY: `xsave` is as long as KVM_CAP_XSAVE2 says here.
        unsafe { vcpu.set_xsave2(&self.xsave) }.map_err(|e| set("the FPU state", e))?;
        vcpu.set_xcrs(&self.xcrs)
            .map_err(|e| set("the extended control registers", e))?;
        vcpu.set_debug_regs(&self.debug_regs)
            .map_err(|e| set("the debug registers", e))?;
        vcpu.set_lapic(&self.lapic)
            .map_err(|e| set("the local APIC", e))?;
        set_msrs(vcpu, &self.msrs)?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(|e| set("the events", e))
    }
}

/// Reads those of the MSRs that this vCPU has: the list is what KVM may know, not what the guest's
/// CPUID gives it.
fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, StateError> {
    let mut values = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let wanted: Vec<_> = rest
            .iter()
            .map(|index| kvm_msr_entry {
                index: *index,
                ..Default::default()
            })
            .collect();
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| StateError::TooMany("MSRs"))?;
        // KVM stops at the first that it does not have.
        let got = vcpu
            .get_msrs(&mut msrs)
            .map_err(|e| StateError::Get("the model-specific registers", e))?;
        values.extend(msrs.as_slice()[..got].iter().map(|m| (m.index, m.data)));
        rest = rest.get(got + 1..).unwrap_or_default();
    }
    Ok(values)
}

fn set_msrs(vcpu: &VcpuFd, values: &[(u32, u64)]) -> Result<(), StateError> {
    let entries: Vec<_> = values
        .iter()
        .map(|(index, data)| kvm_msr_entry {
            index: *index,
            data: *data,
            ..Default::default()
        })
        .collect();
    let msrs = Msrs::from_entries(&entries).map_err(|_| StateError::TooMany("MSRs"))?;
    let set = vcpu
        .set_msrs(&msrs)
        .map_err(|e| StateError::Set("the model-specific registers", e))?;
    match values.get(set) {
        Some((refused, _)) => Err(StateError::Msr(*refused)),
        None => Ok(()),
    }
}
