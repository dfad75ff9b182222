//! A vCPU and its thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::thread::{Builder, JoinHandle};

use cube_hypervisor_api::ExitStatus;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::bus::{Bus, Outcome};
use crate::ending::Ending;
use crate::exits::{ExitCounts, ExitKind};
use crate::internal_error::{self, Retries};
use crate::kvm_stats::KvmStats;

/// What a vCPU's thread has on its stack: device models and their logging, no more.
const STACK_SIZE: usize = 256 << 10;

/// Why a vCPU cannot run.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// No handler for the signal that makes KVM_RUN return.
    #[error("Cannot handle the signal that interrupts a vCPU")]
    Signal(#[source] vmm_sys_util::errno::Error),
    /// No thread.
    #[error("Cannot start the thread of vCPU {0}: raise the host's limit of processes")]
    Thread(u8, #[source] io::Error),
}

/// A running vCPU, from outside of its thread.
pub struct Vcpu {
    thread: JoinHandle<()>,
    shared: Arc<Shared>,
    stats: Option<KvmStats>,
}

/// What the thread and the rest of the process share.
struct Shared {
    /// `kvm_run.immediate_exit`, which makes the next KVM_RUN return at once.
    immediate_exit: ImmediateExit,
    nmi: AtomicBool,
    counts: ExitCounts,
}

/// A byte of the page that KVM shares with the vCPU's owner.
struct ImmediateExit(*mut u8);

// SAFETY: The byte is only ever accessed atomically, and its page stays mapped (`run` does not drop the vCPU).
unsafe impl Send for ImmediateExit {}
// SAFETY: As above.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    fn set(&self, value: bool) {
        // SAFETY: The pointer is that of a byte in a mapping that is never unmapped, and every access after the
        // thread's start is atomic.
        let byte = unsafe { AtomicU8::from_ptr(self.0) };
        byte.store(value.into(), Ordering::SeqCst);
    }
}

/// Makes the signal that interrupts KVM_RUN harmless. Once, before the first vCPU starts.
pub fn handle_kick_signal() -> Result<(), VcpuError> {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), nothing).map_err(VcpuError::Signal)
}

impl Vcpu {
    /// Starts the thread of the vCPU with this index. Its exits are counted by KVM as well if `count` says so, and
    /// KVM can.
    pub fn start(
        index: u8,
        mut fd: VcpuFd,
        bus: Arc<Bus>,
        ending: Arc<Ending>,
        count: bool,
    ) -> Result<Self, VcpuError> {
        let stats = count.then(|| KvmStats::new(&fd).ok()).flatten();
        let shared = Arc::new(Shared {
            immediate_exit: ImmediateExit(&raw mut fd.get_kvm_run().immediate_exit),
            nmi: AtomicBool::new(false),
            counts: ExitCounts::default(),
        });
        let theirs = Arc::clone(&shared);
        let thread = Builder::new()
            .name(format!("vcpu{index}"))
            .stack_size(STACK_SIZE)
            .spawn(move || {
                run(&mut fd, &bus, &theirs, &ending);
                // The page with `immediate_exit` stays, whoever may still write to it. The process ends soon.
                std::mem::forget(fd);
            })
            .map_err(|e| VcpuError::Thread(index, e))?;
        Ok(Self {
            thread,
            shared,
            stats,
        })
    }

    /// Injects a non-maskable interrupt.
    pub fn inject_nmi(&self) -> Result<(), vmm_sys_util::errno::Error> {
        self.shared.nmi.store(true, Ordering::SeqCst);
        self.kick()
    }

    /// The exits so far.
    pub fn counts(&self) -> &ExitCounts {
        &self.shared.counts
    }

    /// What KVM counts, if it was to count.
    pub fn stats(&self) -> Option<&KvmStats> {
        self.stats.as_ref()
    }

    /// Makes the thread look at what it is asked for. Should the signal come before KVM_RUN, that returns at once.
    fn kick(&self) -> Result<(), vmm_sys_util::errno::Error> {
        self.shared.immediate_exit.set(true);
        self.thread.kill(SIGRTMIN())
    }
}

/// Runs the vCPU until the machine ends.
fn run(fd: &mut VcpuFd, bus: &Bus, shared: &Shared, ending: &Ending) {
    let mut retries = Retries::default();
    loop {
        let outcome = match fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => Ok(bus.port_read(port, data)),
            Ok(VcpuExit::IoOut(port, data)) => Ok(bus.port_write(port, data)),
            Ok(VcpuExit::MmioRead(address, data)) => Ok(bus.memory_read(address, data)),
            Ok(VcpuExit::MmioWrite(address, data)) => bus.memory_write(address, data),
            Ok(VcpuExit::IoapicEoi(_) | VcpuExit::Intr) => Ok(Outcome::Continue(ExitKind::Other)),
            Ok(VcpuExit::Shutdown) => {
                // Where it was is not known any more: KVM has reset the registers.
                let message = "The guest's processor shut down (triple fault)";
                return ending.announce(ExitStatus::GuestCrash, message);
            }
            Ok(VcpuExit::InternalError) => {
                if retries.again(fd) {
                    shared.counts.count(ExitKind::Other);
                    // For the vCPU that unmaps the page, should it wait for this processor.
                    std::thread::yield_now();
                    continue;
                }
                let what = internal_error::describe(fd);
                return ending.announce(ExitStatus::GuestCrash, cannot_run(&what, fd));
            }
            Ok(exit) => {
                let what = format!("{exit:?}");
                return ending.announce(ExitStatus::GuestCrash, cannot_run(&what, fd));
            }
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {
                answer_kick(fd, shared);
                Ok(Outcome::Continue(ExitKind::Signal))
            }
            Err(e) => {
                let message = format!("KVM failed to run the guest: {e}{}", place(fd));
                return ending.announce(ExitStatus::VmmError, message);
            }
        };
        retries.reset();
        match outcome {
            Ok(Outcome::Continue(kind)) => shared.counts.count(kind),
            Ok(Outcome::Reset) => {
                shared.counts.count(ExitKind::Keyboard);
                return ending.announce(ExitStatus::GuestReset, "The guest reset the machine");
            }
            Err(e) => return ending.announce(ExitStatus::VmmError, crate::one_line(&e)),
        }
    }
}

fn answer_kick(fd: &VcpuFd, shared: &Shared) {
    shared.immediate_exit.set(false);
    // What is asked for is read after the flag is down: a kick from here on raises it again.
    fence(Ordering::SeqCst);
    if shared.nmi.swap(false, Ordering::SeqCst)
        && let Err(e) = fd.nmi()
    {
        log::error!("Cannot inject an NMI: {e}");
    }
}

fn cannot_run(what: &str, fd: &VcpuFd) -> String {
    format!("KVM cannot run the guest: {what}{}", place(fd))
}

/// Where the guest was, for a message.
fn place(fd: &VcpuFd) -> String {
    match fd.get_regs() {
        Ok(regs) => format!(" at instruction {:#x}", regs.rip),
        Err(_) => String::new(),
    }
}
