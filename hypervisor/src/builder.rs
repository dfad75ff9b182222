//! How a machine is put together, from top to bottom.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use cube_hypervisor_api::{ExitStatus, VmConfig};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::boot::{self, BootError, Entry, mp_table};
use crate::bus::Bus;
use crate::console::Console;
use crate::cpu::cpuid::{CpuidError, Template};
use crate::cpu::registers::{self, RegisterError};
use crate::devices::{DeviceError, Devices, OnCrowd};
use crate::ending::Ending;
use crate::io_apic::{IoApic, MAX_PINS};
use crate::kvm::{self, KvmError};
use crate::machine::Machine;
use crate::memory::{self, MemoryError};
use crate::serial::SerialPort;
use crate::vcpu::{self, Vcpu, VcpuError};
use crate::virtio::mmio::{MmioTransport, SharedDevice, WINDOW_SIZE};
use crate::virtio::{Interrupt, Memory};
use crate::vm::{self, VmError};

/// The first of the IOAPIC's pins that belongs to a virtio device: those before it are a PC's timer, keyboard and serial ports.
const FIRST_PIN: u8 = 5;
/// The most virtio devices: one pin each.
const MAX_DEVICES: usize = MAX_PINS - FIRST_PIN as usize;

/// The stack of the thread that creates the machine: ioctls, no more.
const CREATOR_STACK: usize = 64 << 10;

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A machine without a processor, or with more than KVM runs.
    #[error("The machine cannot have {found} vCPUs: set vcpus to 1 to {most}")]
    Vcpus {
        /// Asked for.
        found: u8,
        /// Possible on this host.
        most: usize,
    },
    /// More devices than interrupt pins.
    #[error(
        "The machine cannot have {0} virtio devices: lower spare_disks or spare_networks, at most {MAX_DEVICES} in all are possible"
    )]
    Devices(usize),
    /// See [`MemoryError`].
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// See [`BootError`].
    #[error(transparent)]
    Boot(#[from] BootError),
    /// See [`DeviceError`].
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// See [`KvmError`].
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// See [`VmError`].
    #[error(transparent)]
    Vm(#[from] VmError),
    /// See [`CpuidError`].
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// A vCPU cannot be made.
    #[error("Cannot create vCPU {0}")]
    CreateVcpu(u8, #[source] kvm_ioctls::Error),
    /// A vCPU's CPUID is refused.
    #[error("Cannot set CPUID of vCPU {0}")]
    SetCpuid(u8, #[source] kvm_ioctls::Error),
    /// See [`RegisterError`].
    #[error(transparent)]
    Registers(#[from] RegisterError),
    /// See [`VcpuError`].
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// No thread.
    #[error("Cannot start a thread: raise the host's limit of processes")]
    Thread(#[source] io::Error),
    /// No eventfd.
    #[error("Cannot create an eventfd: raise the limit of open files")]
    EventFd(#[source] io::Error),
    /// No epoll instance.
    #[error("Cannot create the event loop: raise the limit of open files")]
    EventLoop(#[source] event_manager::Error),
    /// A device model contradicts itself.
    #[error("Cannot put a transport in front of a virtio device")]
    Transport(#[source] virtio_queue::Error),
}

impl BuildError {
    /// The exit status of a process that ends for this reason.
    pub fn status(&self) -> ExitStatus {
        let configuration = match self {
            Self::Vcpus { .. } | Self::Devices(_) | Self::Boot(_) | Self::Device(_) => true,
            Self::Memory(e) => e.is_configuration(),
            _ => false,
        };
        if configuration {
            ExitStatus::BadConfiguration
        } else {
            ExitStatus::VmmError
        }
    }
}

/// What handles events in the device thread.
pub type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// Builds the machine and starts its vCPUs. What the configuration names is opened first, so that
/// a mistake there is found before anything runs.
pub fn build(
    config: &VmConfig,
    ending: &Arc<Ending>,
    on_crowd: &OnCrowd,
    count_exits: bool,
) -> Result<Machine, BuildError> {
    if config.vcpus == 0 || config.vcpus > mp_table::MAX_VCPUS {
        return Err(too_many_vcpus(config, mp_table::MAX_VCPUS.into()));
    }
    let creating = start_creating()?;
    let console = Arc::new(Console::new(config.console));
    let devices = Devices::open(config, &console, on_crowd)?;
    let count = devices.all.len();
    if count > MAX_DEVICES {
        return Err(BuildError::Devices(count));
    }
    let (memory, entry) = load_guest(config, count)?;

    let (kvm, vm) = created(creating)?;
    let vm = Arc::new(vm);
    vm::map_memory(&vm, &memory)?;
    check_vcpus(config, &vm)?;
    let transports = connect(&vm, &memory, &devices.all)?;
    let io_apic = IoApic::new(usize::from(FIRST_PIN) + count);
    let serial = SerialPort::new(Arc::clone(&console));
    let bus = Arc::new(Bus::new(Arc::clone(&vm), serial, io_apic, transports));

    let mut events = EventManager::new().map_err(BuildError::EventLoop)?;
    for device in devices.all {
        events.add_subscriber(device as Subscriber);
    }
    let vcpus = start_vcpus(config.vcpus, &kvm, &vm, entry, |index, fd| {
        let (bus, ending) = (Arc::clone(&bus), Arc::clone(ending));
        Vcpu::start(index, fd, bus, ending, count_exits)
    })?;
    Ok(Machine::new(
        vcpus,
        events,
        console,
        devices.slots,
        devices.leftovers,
    ))
}

/// A machine without memory and vCPUs, and the KVM that it comes from.
type Creating = JoinHandle<Result<(Kvm, VmFd), BuildError>>;

/// Has KVM create the machine, which is mostly waiting, while the guest's memory is filled.
fn start_creating() -> Result<Creating, BuildError> {
    Builder::new()
        .name("create".into())
        .stack_size(CREATOR_STACK)
        .spawn(|| {
            let kvm = kvm::open()?;
            let vm = vm::create(&kvm)?;
            Ok((kvm, vm))
        })
        .map_err(BuildError::Thread)
}

fn created(creating: Creating) -> Result<(Kvm, VmFd), BuildError> {
    creating
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The guest's memory, with all that boot hands over in it. Pages that are got first are written to: nothing may lie there yet.
fn load_guest(config: &VmConfig, devices: usize) -> Result<(Memory, Entry), BuildError> {
    let memory = memory::allocate(config.memory_mib)?;
    if config.memory_mib <= memory::SMALL_MIB {
        memory::use_small_pages_until_first_request();
        memory::back_top_with_huge_pages(&memory, config.memory_mib);
    }
    let cmdline = cmdline(config, devices);
    let initramfs = config.initramfs.as_deref();
    let entry = boot::load(&memory, &config.kernel, initramfs, &cmdline)?;
    mp_table::write(&memory, config.vcpus, pins(devices))
        .map_err(|e| BootError::Table("the MP table", e))?;
    Ok((memory, entry))
}

/// The configured command line and, for each device, where it is
/// (Linux, `drivers/virtio/virtio_mmio.c`: `virtio_mmio.device=SIZE@ADDRESS:INTERRUPT`).
fn cmdline(config: &VmConfig, devices: usize) -> String {
    use std::fmt::Write;

    let mut line = config.cmdline.trim_end().to_owned();
    for (index, pin) in pins(devices).enumerate() {
        let space = if line.is_empty() { "" } else { " " };
        let window = Bus::window(index);
        // Writing to a string does not fail.
        let _ = write!(
            line,
            "{space}virtio_mmio.device={}K@{window:#x}:{pin}",
            WINDOW_SIZE >> 10
        );
    }
    line
}

fn pins(devices: usize) -> impl Iterator<Item = u8> {
    (FIRST_PIN..).take(devices)
}

/// KVM's limit is known once there is a machine.
fn check_vcpus(config: &VmConfig, vm: &VmFd) -> Result<(), BuildError> {
    let kvm_most = vm.check_extension_int(Cap::MaxVcpus).max(1) as usize;
    let most = kvm_most.min(mp_table::MAX_VCPUS.into());
    if usize::from(config.vcpus) > most {
        return Err(too_many_vcpus(config, most));
    }
    Ok(())
}

fn too_many_vcpus(config: &VmConfig, most: usize) -> BuildError {
    BuildError::Vcpus {
        found: config.vcpus,
        most,
    }
}

/// Puts a transport in front of each device, its interrupt line on a pin and its queues'
/// notifications on their eventfds.
fn connect(
    vm: &VmFd,
    memory: &Memory,
    devices: &[SharedDevice],
) -> Result<Vec<MmioTransport>, BuildError> {
    let mut transports = Vec::with_capacity(devices.len());
    for (index, (device, pin)) in devices.iter().zip(pins(devices.len())).enumerate() {
        let line = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(BuildError::EventFd)?;
        vm::connect_line(vm, &line, pin.into())?;
        {
            let device = device
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            vm::connect_queues(vm, Bus::window(index), device.queue_events())?;
        }
        let interrupt = Arc::new(Interrupt::new(line));
        let transport = MmioTransport::new(Arc::clone(device), memory.clone(), interrupt)
            .map_err(BuildError::Transport)?;
        transports.push(transport);
    }
    Ok(transports)
}

/// Makes all vCPUs before the first one runs: a vCPU may start another.
fn start_vcpus(
    count: u8,
    kvm: &Kvm,
    vm: &VmFd,
    entry: Entry,
    start: impl Fn(u8, VcpuFd) -> Result<Vcpu, VcpuError>,
) -> Result<Vec<Vcpu>, BuildError> {
    let mut cpuid = Template::new(kvm, count)?;
    let mut fds = Vec::with_capacity(count.into());
    for index in 0..count {
        let fd = vm
            .create_vcpu(index.into())
            .map_err(|e| BuildError::CreateVcpu(index, e))?;
        fd.set_cpuid2(cpuid.for_vcpu(index))
            .map_err(|e| BuildError::SetCpuid(index, e))?;
        registers::set_boot_msrs(&fd)?;
        if index == 0 {
            registers::set_boot_registers(&fd, entry)?;
        }
        fds.push(fd);
    }
    vcpu::handle_kick_signal()?;
    (0..)
        .zip(fds)
        .map(|(index, fd)| start(index, fd).map_err(Into::into))
        .collect()
}

#[cfg(test)]
#[path = "../tests/common/tiny_kernel.rs"]
#[allow(dead_code, reason = "the tests with a guest use the rest")]
mod tiny_kernel;

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    /// Bytes of which none is zero, and none is like its neighbours.
    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i % 251) as u8 + 1).collect()
    }

    #[test]
    fn kernel_and_initramfs_are_in_memory_byte_for_byte_in_machines_of_all_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let (kernel, initramfs) = (dir.path().join("kernel"), dir.path().join("initramfs"));
        // Larger than what comes in huge pages at once, and ending amid one.
        let code = pattern((9 << 20) + 1234);
        let archive = pattern((7 << 20) + 4321);
        std::fs::write(&kernel, tiny_kernel::kernel(&code, true)).unwrap();
        std::fs::write(&initramfs, &archive).unwrap();
        for mib in [20, 63, 256, 512, 513, 2048] {
            let config = json!({"kernel": kernel, "initramfs": initramfs, "memory_mib": mib});
            let config = serde_json::from_value(config).unwrap();
            let (memory, entry) = load_guest(&config, 3).unwrap();
            let mut found = vec![0; code.len()];
            memory
                .read_slice(&mut found, GuestAddress(entry.address))
                .unwrap();
            assert!(found == code, "the kernel of a machine of {mib} MiB");
            let mut found = vec![0; archive.len()];
            let start = ((mib << 20) - archive.len() as u64) & !0xfff;
            memory.read_slice(&mut found, GuestAddress(start)).unwrap();
            assert!(found == archive, "the initramfs of a machine of {mib} MiB");
        }
    }
}
