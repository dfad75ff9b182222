//! What of filters for system calls a guest cannot do.

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompArgBuilder,
    LinuxSeccompFilterFlag, LinuxSeccompOperator, LinuxSyscall,
};

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
    if !lets_wait(seccomp) {
        return unsupported(
            "linux.seccomp.syscalls",
            "accept4 must be allowed: by it a container waits for its start, after the filter is in place",
        );
    }
    Ok(())
}

/// The system call by which libcontainer's init waits.
const WAIT: &str = "accept4";

fn lets_wait(seccomp: &LinuxSeccomp) -> bool {
    let unconditional = |call: &&LinuxSyscall| call.args().as_ref().is_none_or(Vec::is_empty);
    let mut rules = seccomp.syscalls().iter().flatten().filter(unconditional);
    let rule = rules.find(|call| call.names().iter().any(|name| name == WAIT));
    matches!(
        rule.map_or(seccomp.default_action(), LinuxSyscall::action),
        LinuxSeccompAction::ScmpActAllow | LinuxSeccompAction::ScmpActLog
    )
}

/// Puts comparisons in libcontainer's order: with `SCMP_CMP_MASKED_EQ` it takes the mask for what is to be left, and that
/// for the mask.
pub(super) fn fit(seccomp: &mut LinuxSeccomp) -> Result<(), SpecError> {
    let Some(mut calls) = seccomp.syscalls().clone() else {
        return Ok(());
    };
    for call in &mut calls {
        if let Some(arguments) = call.args() {
            let arguments: Result<_, _> = arguments.iter().map(turned).collect();
            let arguments = arguments
                .map_err(|e| SpecError::Invalid("linux.seccomp.syscalls[].args", e.to_string()))?;
            call.set_args(Some(arguments));
        }
    }
    seccomp.set_syscalls(Some(calls));
    Ok(())
}

fn turned(argument: &LinuxSeccompArg) -> Result<LinuxSeccompArg, OciSpecError> {
    if argument.op() != LinuxSeccompOperator::ScmpCmpMaskedEq {
        return Ok(*argument);
    }
    LinuxSeccompArgBuilder::default()
        .index(argument.index())
        .op(argument.op())
        .value(argument.value_two().unwrap_or(0))
        .value_two(argument.value())
        .build()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{adapted, small};
    use super::*;

    #[test]
    fn a_filter_lets_a_container_wait_for_its_start() {
        let rule = |action: &str, names: &[&str]| json!({"names": names, "action": action});
        for (default, rules, waits) in [
            ("SCMP_ACT_ALLOW", json!([]), true),
            (
                "SCMP_ACT_ERRNO",
                json!([rule("SCMP_ACT_ALLOW", &["read", "accept"])]),
                false,
            ),
            (
                "SCMP_ACT_ERRNO",
                json!([rule("SCMP_ACT_ALLOW", &["accept4"])]),
                true,
            ),
            (
                "SCMP_ACT_ALLOW",
                json!([rule("SCMP_ACT_KILL", &["accept4"])]),
                false,
            ),
        ] {
            let filter = json!({"defaultAction": default, "syscalls": rules});
            let filter: LinuxSeccomp = serde_json::from_value(filter).unwrap();
            assert_eq!(check(&filter).is_ok(), waits, "{filter:?}");
        }
    }

    #[test]
    fn a_mask_comes_second() {
        let argument =
            json!({"index": 1, "value": 255, "valueTwo": 100, "op": "SCMP_CMP_MASKED_EQ"});
        let other = json!({"index": 0, "value": 7, "valueTwo": 8, "op": "SCMP_CMP_GE"});
        let mut filter: LinuxSeccomp = serde_json::from_value(json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "args": [argument, other]}],
        }))
        .unwrap();
        fit(&mut filter).unwrap();
        let calls = filter.syscalls().clone().unwrap();
        let values: Vec<_> = calls[0]
            .args()
            .iter()
            .flatten()
            .map(|a| (a.value(), a.value_two()))
            .collect();
        assert_eq!(values, [(100, Some(255)), (7, Some(8))]);
    }

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
