//! Checking and fitting a process object.

use oci_spec::runtime::{Capabilities, LinuxCapabilities, PosixRlimitType, Process};

use super::SpecError;

/// Checks and fits a process object, of a container or of an exec.
pub fn adapt_process(process: &mut Process, terminal: bool) -> Result<(), SpecError> {
    if process.args().as_ref().is_none_or(Vec::is_empty) {
        return Err(SpecError::Missing("process.args"));
    }
    if !process.cwd().is_absolute() {
        return Err(SpecError::Invalid(
            "process.cwd",
            format!("{} is not absolute", process.cwd().display()),
        ));
    }
    if process
        .apparmor_profile()
        .as_ref()
        .is_some_and(|p| !matches!(p.as_str(), "" | "unconfined"))
    {
        return Err(SpecError::Unsupported {
            field: "process.apparmorProfile",
            reason: "the guest kernel has no AppArmor",
        });
    }
    if process
        .selinux_label()
        .as_ref()
        .is_some_and(|l| !l.is_empty())
    {
        return Err(SpecError::Unsupported {
            field: "process.selinuxLabel",
            reason: "the guest kernel has no SELinux",
        });
    }
    check_limits(process)?;
    for variable in process.env().iter().flatten() {
        if !variable.contains('=') {
            return Err(SpecError::Invalid(
                "process.env",
                format!("{variable:?} has no '='"),
            ));
        }
    }
    process
        .set_terminal(Some(terminal))
        .set_apparmor_profile(None)
        .set_selinux_label(None);
    // A set that is not mentioned is empty, as runc has it. libcontainer would leave it as it is, and
    // the agent's are full. (Its inheritable and ambient sets are empty.)
    if let Some(mut capabilities) = process.capabilities().clone() {
        let empty = || Some(Capabilities::default());
        if capabilities.effective().is_none() {
            capabilities.set_effective(empty());
        }
        if capabilities.permitted().is_none() {
            capabilities.set_permitted(empty());
        }
        process.set_capabilities(Some(capabilities));
    }
    // libcontainer takes "false" for "set": it would load a filter without the right to.
    if process.no_new_privileges() == Some(false) {
        process.set_no_new_privileges(None);
    }
    Ok(())
}

/// What the kernel would refuse when libcontainer, which does not say of which field it speaks, is at work.
fn check_limits(process: &Process) -> Result<(), SpecError> {
    let invalid = |field, why: String| Err(SpecError::Invalid(field, why));
    if let Some(score) = process.oom_score_adj()
        && !(-1000..=1000).contains(&score)
    {
        return invalid(
            "process.oomScoreAdj",
            format!("{score} is not between -1000 and 1000"),
        );
    }
    for limit in process.rlimits().iter().flatten() {
        let (soft, hard) = (limit.soft(), limit.hard());
        if soft > hard {
            return invalid(
                "process.rlimits",
                format!(
                    "the soft limit of {}, {soft}, is above the hard one, {hard}",
                    limit.typ()
                ),
            );
        }
        if limit.typ() == PosixRlimitType::RlimitNofile && hard > MOST_FILES {
            return invalid(
                "process.rlimits",
                format!(
                    "{hard} for RLIMIT_NOFILE is above {MOST_FILES}, the most that the guest's kernel lets a process open"
                ),
            );
        }
    }
    Ok(())
}

/// The kernel's default of fs.nr_open, which nobody changes in the guest.
pub const MOST_FILES: u64 = 1 << 20;

/// What a container gets that names none.
pub(super) fn no_capabilities() -> LinuxCapabilities {
    let mut capabilities = LinuxCapabilities::default();
    capabilities
        .set_bounding(Some(Capabilities::default()))
        .set_effective(Some(Capabilities::default()))
        .set_permitted(Some(Capabilities::default()))
        .set_inheritable(None)
        .set_ambient(None);
    capabilities
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{adapted, small};
    use super::*;

    #[test]
    fn capabilities_that_are_not_mentioned_are_none() {
        let capabilities = |value: Option<serde_json::Value>| {
            let mut json = small();
            if let Some(value) = value {
                json["process"]["capabilities"] = value;
            }
            let process = adapted(json).unwrap().spec.process().clone().unwrap();
            process.capabilities().clone().unwrap()
        };
        for capabilities in [
            capabilities(None),
            capabilities(Some(serde_json::json!({"bounding": ["CAP_CHOWN"]}))),
        ] {
            assert_eq!(capabilities.effective(), &Some(Capabilities::default()));
            assert_eq!(capabilities.permitted(), &Some(Capabilities::default()));
            assert!(capabilities.inheritable().is_none() && capabilities.ambient().is_none());
        }
    }

    #[test]
    fn a_process_without_a_profile_needs_no_apparmor() {
        for profile in ["", "unconfined"] {
            let mut json = small();
            json["process"]["apparmorProfile"] = profile.into();
            let adapted = adapted(json).unwrap();
            let process = adapted.spec.process().clone().unwrap();
            assert_eq!(*process.apparmor_profile(), None);
        }
    }

    #[test]
    fn limits_that_the_kernel_would_refuse_are_refused_by_name() {
        let limit =
            |kind: &str, soft: u64, hard: u64| json!([{"type": kind, "soft": soft, "hard": hard}]);
        for (field, value, fits) in [
            ("oomScoreAdj", json!(-1000), true),
            ("oomScoreAdj", json!(1001), false),
            ("rlimits", limit("RLIMIT_STACK", 1, u64::MAX), true),
            ("rlimits", limit("RLIMIT_STACK", 2, 1), false),
            ("rlimits", limit("RLIMIT_NOFILE", 1, 1 << 20), true),
            ("rlimits", limit("RLIMIT_NOFILE", 1, (1 << 20) + 1), false),
        ] {
            let mut json = small();
            json["process"][field] = value.clone();
            match adapted(json) {
                Ok(_) => assert!(fits, "{field}: {value}"),
                Err(error) => {
                    let message = error.to_string();
                    assert!(
                        !fits && message.starts_with(&format!("process.{field} ")),
                        "{message}"
                    );
                }
            }
        }
    }
}
