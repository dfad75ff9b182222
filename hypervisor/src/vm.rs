//! The virtual machine as KVM sees it: memory slots, the interrupt controller's user-space half,
//! and the descriptors by which devices and guest wake each other.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_SPLIT_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_PMU_CAP_DISABLE,
    KvmIrqRouting, kvm_clock_data, kvm_enable_cap, kvm_irq_routing_entry,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use serde::{Deserialize, Serialize};
use vm_memory::{Address, GuestMemory, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::io_apic::{IoApic, MAX_PINS};
use crate::memory::KVM_TSS;
use crate::virtio::Memory;
use crate::virtio::mmio::QUEUE_NOTIFY;

/// Why KVM does not give the machine what it needs.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// An ioctl failed.
    #[error("KVM cannot {0}")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// More routes than KVM takes: there are far fewer pins.
    #[error("KVM does not take as many interrupt routes as the IOAPIC has pins")]
    TooManyRoutes,
}

/// Makes a machine without memory and, in KVM, with local APICs only: no PIT, no PIC, no IOAPIC.
///
/// That takes KVM long, waiting: it starts a thread, moves that to the caller's cgroup, and the host's kernel lets every
/// processor come to rest first (`kvm_vm_worker_thread`, `cgroup_attach_task_all`; 11 ms at 250 Hz).
pub fn create(kvm: &Kvm) -> Result<VmFd, VmError> {
    let vm = loop {
        match kvm.create_vm() {
            // A signal came: it is a long call.
            Err(e) if e.errno() == libc::EINTR => continue,
            other => break other.map_err(|e| VmError::Ioctl("create a machine", e))?,
        }
    };
    without_counters(&vm)?;
    // Costs nothing where the processor runs real mode by itself, and where it does not KVM needs it.
    vm.set_tss_address(KVM_TSS as usize)
        .map_err(|e| VmError::Ioctl("place its task state segment", e))?;
    split_irqchip(&vm)?;
    Ok(vm)
}

/// Keeps the processor's performance counters to the host: by them a guest could watch what shares the processor with it. CPUID
/// leaves them out as well (`cpu::cpuid`). Before Linux 5.18 KVM goes by CPUID alone.
fn without_counters(vm: &VmFd) -> Result<(), VmError> {
    if vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) as u32 & KVM_PMU_CAP_DISABLE == 0 {
        return Ok(());
    }
    let mut capability = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    capability.args[0] = KVM_PMU_CAP_DISABLE.into();
    vm.enable_cap(&capability)
        .map_err(|e| VmError::Ioctl("leave its performance counters out", e))
}

/// Gives the machine its memory.
pub fn map_memory(vm: &VmFd, memory: &Memory) -> Result<(), VmError> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: The region stays mapped as long as the process lives, and belongs to the guest alone.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(|e| VmError::Ioctl("map the guest's memory", e))?;
    }
    Ok(())
}

/// Leaves everything but the local APICs to user space, with interrupt numbers 0 to 23 for the
/// IOAPIC's pins.
pub fn split_irqchip(vm: &VmFd) -> Result<(), VmError> {
    let mut capability = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..Default::default()
    };
    capability.args[0] = MAX_PINS as u64;
    vm.enable_cap(&capability)
        .map_err(|e| VmError::Ioctl("split its interrupt controller", e))
}

/// Makes KVM raise `pin` when `line` is written.
pub fn connect_line(vm: &VmFd, line: &EventFd, pin: u32) -> Result<(), VmError> {
    vm.register_irqfd(line, pin)
        .map_err(|e| VmError::Ioctl("connect an interrupt line", e))
}

/// Makes KVM write to a queue's eventfd when the guest notifies that queue of the device whose
/// registers start at `window`.
pub fn connect_queues(vm: &VmFd, window: u64, events: &[EventFd]) -> Result<(), VmError> {
    let address = IoEventAddress::Mmio(window + QUEUE_NOTIFY);
    for (index, event) in (0u32..).zip(events) {
        vm.register_ioevent(event, &address, index)
            .map_err(|e| VmError::Ioctl("take a queue's notifications", e))?;
    }
    Ok(())
}

/// Makes KVM deliver the pins' interrupts as the IOAPIC says now.
pub fn set_routes(vm: &VmFd, io_apic: &IoApic) -> Result<(), VmError> {
    let entries: Vec<_> = io_apic
        .routes()
        .map(|(gsi, msi)| {
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            entry.u.msi.address_lo = msi.address;
            entry.u.msi.data = msi.data;
            entry
        })
        .collect();
    let routing = KvmIrqRouting::from_entries(&entries).map_err(|_| VmError::TooManyRoutes)?;
    vm.set_gsi_routing(&routing)
        .map_err(|e| VmError::Ioctl("route interrupts", e))
}

/// The guest's kvm-clock, as a snapshot keeps it: nanoseconds since the machine's start, which do
/// not go on while the machine is a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    nanoseconds: u64,
}

impl ClockState {
    /// Reads the clock.
    pub fn save(vm: &VmFd) -> Result<Self, VmError> {
        let clock = vm
            .get_clock()
            .map_err(|e| VmError::Ioctl("read the guest's clock", e))?;
        Ok(Self {
            nanoseconds: clock.clock,
        })
    }

    /// Sets the clock, from which moment on it runs.
    pub fn restore(self, vm: &VmFd) -> Result<(), VmError> {
        let clock = kvm_clock_data {
            clock: self.nanoseconds,
            ..Default::default()
        };
        vm.set_clock(&clock)
            .map_err(|e| VmError::Ioctl("set the guest's clock", e))
    }
}
