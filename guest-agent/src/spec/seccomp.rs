//! What of filters for system calls a guest cannot do.

use oci_spec::runtime::{LinuxSeccomp, LinuxSeccompAction, LinuxSeccompFilterFlag};

use super::SpecError;

/// The arguments that a system call may have.
const ARGUMENTS: usize = 6;

/// Refuses what is for a process of the host, and what libseccomp would refuse without saying where.
pub(super) fn check(seccomp: &LinuxSeccomp) -> Result<(), SpecError> {
    let unsupported = |field, reason| Err(SpecError::Unsupported { field, reason });
    let mut calls = seccomp.syscalls().iter().flatten();
    let notifies = calls.any(|call| call.action() == LinuxSeccompAction::ScmpActNotify);
    if notifies || seccomp.listener_path().is_some() {
        return unsupported(
            "linux.seccomp.listenerPath",
            "a listener cannot be reached from the guest",
        );
    }
    let waits = LinuxSeccompFilterFlag::SeccompFilterFlagWaitKillableRecv;
    if seccomp.flags().iter().flatten().any(|flag| *flag == waits) {
        return unsupported(
            "linux.seccomp.flags",
            "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV is about listeners, which cannot be reached from the guest",
        );
    }
    for call in seccomp.syscalls().iter().flatten() {
        for argument in call.args().iter().flatten() {
            if argument.index() >= ARGUMENTS {
                return Err(SpecError::Invalid(
                    "linux.seccomp.syscalls[].args[].index",
                    format!(
                        "{} of {}: a system call has {ARGUMENTS} arguments, the first of which is 0",
                        argument.index(),
                        call.names().join(", "),
                    ),
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{adapted, small};

    #[test]
    fn listeners_and_arguments_that_no_call_has_are_refused() {
        let rule = |action: &str, index: u32| {
            let argument = json!({"index": index, "value": 1, "op": "SCMP_CMP_EQ"});
            json!({"syscalls": [{"names": ["read"], "action": action, "args": [argument]}]})
        };
        for (change, word) in [
            (rule("SCMP_ACT_ERRNO", 5), ""),
            (
                rule("SCMP_ACT_ERRNO", 6),
                "linux.seccomp.syscalls[].args[].index",
            ),
            (rule("SCMP_ACT_NOTIFY", 0), "listenerPath"),
            (json!({"listenerPath": "/x"}), "listenerPath"),
            (json!({"flags": ["SECCOMP_FILTER_FLAG_LOG"]}), ""),
            (
                json!({"flags": ["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]}),
                "WAIT_KILLABLE_RECV",
            ),
        ] {
            let mut json = small();
            json["linux"]["seccomp"] = change.clone();
            json["linux"]["seccomp"]["defaultAction"] = "SCMP_ACT_ALLOW".into();
            let message = adapted(json)
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default();
            assert_eq!(message.is_empty(), word.is_empty(), "{change}: {message}");
            assert!(message.contains(word), "{change}: {message}");
        }
    }
}
