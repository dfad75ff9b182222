//! What a snapshot keeps of KVM's objects comes back as it was. They need KVM.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use cube_hypervisor::cpu::cpuid::Template;
use cube_hypervisor::cpu::registers;
use cube_hypervisor::cpu::state::{StateError, StateLayout, VcpuState};
use cube_hypervisor::io_apic::IoApic;
use cube_hypervisor::kvm_stats::KvmStats;
use cube_hypervisor::vm::{self, ClockState};
use cube_hypervisor::{kvm, memory};
use kvm_ioctls::{VcpuFd, VmFd};
use serde_json::{Value, json};
use vmm_sys_util::eventfd::EventFd;

struct Machine {
    layout: StateLayout,
    vcpu: VcpuFd,
    vm: VmFd,
}

fn machine() -> Machine {
    let kvm = kvm::open().unwrap();
    let vm = vm::create(&kvm).unwrap();
    vm::map_memory(&vm, &memory::allocate(2).unwrap()).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    Machine {
        layout: StateLayout::new(&kvm, &vm).unwrap(),
        vcpu,
        vm,
    }
}

impl Machine {
    fn save(&self) -> Value {
        serde_json::to_value(VcpuState::save(&self.vcpu, &self.layout).unwrap()).unwrap()
    }

    fn restore(&self, state: &Value) -> Result<(), StateError> {
        let state: VcpuState = serde_json::from_str(&state.to_string()).unwrap();
        state.restore(&self.vcpu, &self.layout)
    }
}

/// The state without the time stamp counter, which goes on while two of them are taken.
fn comparable(mut state: Value) -> Value {
    let msrs = state["msrs"].as_array_mut().unwrap();
    msrs.retain(|msr| msr[0] != 0x10);
    state
}

#[test]
fn a_vcpu_survives_save_json_and_restore() {
    let old = machine();
    let kvm = kvm::open().unwrap();
    let mut cpuid = Template::new(&kvm, 1).unwrap();
    old.vcpu.set_cpuid2(cpuid.for_vcpu(0)).unwrap();
    registers::set_boot_msrs(&old.vcpu).unwrap();
    let mut regs = old.vcpu.get_regs().unwrap();
    (regs.rax, regs.rip, regs.r15) = (0x1234_5678_9abc, 0x10_0000, u64::MAX);
    old.vcpu.set_regs(&regs).unwrap();
    let mut debug = old.vcpu.get_debug_regs().unwrap();
    debug.db[1] = 0x7777;
    old.vcpu.set_debug_regs(&debug).unwrap();

    let saved = old.save();
    let new = machine();
    new.restore(&saved).unwrap();
    let (again, saved) = (comparable(new.save()), comparable(saved));
    for (part, expected) in saved.as_object().unwrap() {
        assert_eq!(again[part], *expected, "{part}");
    }
    assert_eq!(new.vcpu.get_regs().unwrap().r15, u64::MAX);
}

#[test]
fn an_msr_that_kvm_does_not_know_fails_the_restore() {
    let machine = machine();
    let mut state = machine.save();
    let msrs = state["msrs"].as_array_mut().unwrap();
    msrs.insert(0, json!([0xdead_0000u32, 1]));
    let error = machine.restore(&state).unwrap_err();
    assert!(matches!(error, StateError::Msr(0xdead_0000)), "{error}");
}

#[test]
fn the_clock_goes_on_from_where_it_was_saved() {
    let machine = machine();
    let read: ClockState = serde_json::from_value(json!({"nanoseconds": 1u64 << 50})).unwrap();
    read.restore(&machine.vm).unwrap();
    let later = serde_json::to_value(ClockState::save(&machine.vm).unwrap()).unwrap();
    let nanoseconds = later["nanoseconds"].as_u64().unwrap();
    assert!((1 << 50..(1 << 50) + 60_000_000_000).contains(&nanoseconds));
}

#[test]
fn routes_follow_the_io_apic() {
    let machine = machine();
    let mut io_apic = IoApic::new(8);
    vm::set_routes(&machine.vm, &io_apic).unwrap();
    let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    vm::connect_line(&machine.vm, &line, 5).unwrap();
    io_apic.write(0, &[0x10 + 2 * 5]);
    assert!(io_apic.write(0x10, &[0x31, 0, 0, 0]));
    vm::set_routes(&machine.vm, &io_apic).unwrap();
}

#[test]
fn a_new_vcpu_has_not_come_out_yet() {
    let machine = machine();
    let counters = KvmStats::new(&machine.vcpu).unwrap().read().unwrap();
    let exits = counters.iter().find(|(name, _)| name == "exits").unwrap();
    assert_eq!(exits.1, 0);
    assert!(counters.iter().any(|(name, _)| name == "mmio_exits"));
}
