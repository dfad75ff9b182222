//! What KVM says of a guest that it cannot go on with, and when to try again all the same.

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, kvm_run,
    kvm_run__bindgen_ty_1__bindgen_ty_13 as InternalError,
};
use kvm_ioctls::VcpuFd;

/// How often in a row one instruction of a program is tried that KVM cannot emulate.
///
/// It takes as many as pass before another vCPU, which is about to flush this one's TLB, was given a processor.
const MOST_TRIES: u32 = 1000;

/// The instruction that KVM could not emulate the last time, and how often in a row.
///
/// KVM fetches an instruction by the guest's page tables, after the processor has taken it from its TLB. Where another
/// vCPU has unmapped the page in between and not flushed the TLBs yet, nothing is to be fetched. KVM leaves the guest's
/// registers as they were, so entered again the program takes the page fault that it would have had
/// (`handle_emulation_failure` of arch/x86/kvm/x86.c). Only processors that do not tell where the next instruction is
/// (SVM without NRIPS, as a nested host has it) need the fetch for so little as CPUID.
#[derive(Default)]
pub struct Retries {
    instruction: u64,
    tries: u32,
}

impl Retries {
    /// Whether the vCPU is to be entered again after the KVM_EXIT_INTERNAL_ERROR of the last KVM_RUN.
    ///
    /// The kernel of a guest is not: it does not unmap itself, and KVM may have given it an exception that it is not
    /// to see.
    pub fn again(&mut self, fd: &mut VcpuFd) -> bool {
        if internal(fd).suberror != KVM_INTERNAL_ERROR_EMULATION {
            return false;
        }
        match (fd.get_sregs(), fd.get_regs()) {
            (Ok(system), Ok(regs)) => self.allow(system.cs.selector & 3 == 3, regs.rip),
            _ => false,
        }
    }

    /// Forgets the instruction: the guest has gone on.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    fn allow(&mut self, in_program: bool, instruction: u64) -> bool {
        if self.instruction != instruction {
            *self = Self {
                instruction,
                tries: 0,
            };
        }
        self.tries += 1;
        in_program && self.tries <= MOST_TRIES
    }
}

/// KVM_EXIT_INTERNAL_ERROR of the last KVM_RUN, for a message: what KVM failed at and its figures, which are the
/// hardware's (Documentation/virt/kvm/api.rst, 5).
pub fn describe(fd: &mut VcpuFd) -> String {
    let error = internal(fd);
    let data = &error.data[..(error.ndata as usize).min(error.data.len())];
    words(error.suberror, data)
}

fn internal(fd: &mut VcpuFd) -> InternalError {
    let run: &kvm_run = fd.get_kvm_run();
    // SAFETY: All variants of the union are integers, for which each pattern of bits is a value; it is as large as the
    // largest of them.
    unsafe { run.__bindgen_anon_1.internal }
}

fn words(suberror: u32, data: &[u64]) -> String {
    let what = match suberror {
        KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction".to_owned(),
        KVM_INTERNAL_ERROR_SIMUL_EX => "one exception came upon another".to_owned(),
        KVM_INTERNAL_ERROR_DELIVERY_EV => "an event could not be delivered".to_owned(),
        KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => {
            "the processor gave an exit reason that KVM does not know".to_owned()
        }
        other => format!("internal error {other}"),
    };
    let data: Vec<_> = data.iter().map(|figure| format!("{figure:#x}")).collect();
    match data.as_slice() {
        [] => what,
        data => format!("{what} ({})", data.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_internal_error_is_told_with_its_figures() {
        let told = words(KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, &[0x4e, 1]);
        assert_eq!(
            told,
            "the processor gave an exit reason that KVM does not know (0x4e, 0x1)"
        );
        let told = words(KVM_INTERNAL_ERROR_DELIVERY_EV, &[]);
        assert_eq!(told, "an event could not be delivered");
        assert_eq!(words(77, &[]), "internal error 77");
    }

    #[test]
    fn an_instruction_of_a_program_is_tried_again_for_as_long_as_it_is_the_same_one_and_not_forever()
     {
        let mut retries = Retries::default();
        for _ in 0..MOST_TRIES {
            assert!(retries.allow(true, 0x40_f2e8));
        }
        assert!(!retries.allow(true, 0x40_f2e8));
        assert!(retries.allow(true, 0x40_f2ea), "another instruction");
        assert!(retries.allow(true, 0x40_f2e8), "a new row");
        retries.reset();
        for _ in 0..MOST_TRIES {
            assert!(retries.allow(true, 0x40_f2e8), "the guest went on between");
        }
    }

    #[test]
    fn an_instruction_of_the_guests_kernel_is_not_tried_again() {
        assert!(!Retries::default().allow(false, 0xffff_ffff_8100_0000));
    }
}
