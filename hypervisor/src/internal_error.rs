//! What KVM says of a guest that it cannot go on with.

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, kvm_run,
};
use kvm_ioctls::VcpuFd;

/// KVM_EXIT_INTERNAL_ERROR of the last KVM_RUN, for a message: what KVM failed at and its figures, which are the
/// hardware's (Documentation/virt/kvm/api.rst, 5).
pub fn describe(fd: &mut VcpuFd) -> String {
    let run: &kvm_run = fd.get_kvm_run();
    // SAFETY: All variants of the union are integers, for which each pattern of bits is a value; it is as large as the
    // largest of them.
    let error = unsafe { run.__bindgen_anon_1.internal };
    let data = &error.data[..(error.ndata as usize).min(error.data.len())];
    words(error.suberror, data)
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
}
