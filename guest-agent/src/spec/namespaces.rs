//! Namespaces, and what is to be in them.

use nix::sched::CloneFlags;
use oci_spec::runtime::{Linux, LinuxIdMapping, LinuxNamespace, LinuxNamespaceType, User};

use super::SpecError;

/// The namespaces that a container gets for itself. A PID namespace with a path is one shared by
/// the pod, and that is the guest's own.
pub(super) fn own_namespaces(asked: &[LinuxNamespace]) -> Result<Vec<LinuxNamespace>, SpecError> {
    let mut own = Vec::with_capacity(asked.len());
    for namespace in asked {
        match namespace.typ() {
            LinuxNamespaceType::Network | LinuxNamespaceType::Ipc | LinuxNamespaceType::Uts => {}
            LinuxNamespaceType::Pid if namespace.path().is_some() => {}
            _ if namespace.path().is_some() => {
                return Err(SpecError::Unsupported {
                    field: "linux.namespaces[].path",
                    reason: "the guest does not have the host's namespaces",
                });
            }
            kind if has(&own, kind) => {
                return Err(SpecError::Invalid(
                    "linux.namespaces",
                    format!("there are two of type {kind}"),
                ));
            }
            _ => own.push(namespace.clone()),
        }
    }
    if !has(&own, LinuxNamespaceType::Mount) {
        return Err(SpecError::Unsupported {
            field: "linux.namespaces",
            reason: "a container without a mount namespace would share the agent's",
        });
    }
    Ok(own)
}

pub(super) fn has(namespaces: &[LinuxNamespace], kind: LinuxNamespaceType) -> bool {
    namespaces.iter().any(|namespace| namespace.typ() == kind)
}

pub(super) fn clone_flags(namespaces: &[LinuxNamespace]) -> i32 {
    let flags = namespaces
        .iter()
        .fold(CloneFlags::empty(), |flags, namespace| {
            flags
                | match namespace.typ() {
                    LinuxNamespaceType::Mount => CloneFlags::CLONE_NEWNS,
                    LinuxNamespaceType::Cgroup => CloneFlags::CLONE_NEWCGROUP,
                    LinuxNamespaceType::Uts => CloneFlags::CLONE_NEWUTS,
                    LinuxNamespaceType::Ipc => CloneFlags::CLONE_NEWIPC,
                    LinuxNamespaceType::User => CloneFlags::CLONE_NEWUSER,
                    LinuxNamespaceType::Pid => CloneFlags::CLONE_NEWPID,
                    LinuxNamespaceType::Network => CloneFlags::CLONE_NEWNET,
                    LinuxNamespaceType::Time => CloneFlags::from_bits_retain(0x80),
                }
        });
    flags.bits()
}

/// Whether the users of a user namespace, if there is one, are said, and the process's is among them.
pub(super) fn check_users(linux: &Linux, user: &User, own: bool) -> Result<(), SpecError> {
    for (field, mappings, id) in [
        ("linux.uidMappings", linux.uid_mappings(), user.uid()),
        ("linux.gidMappings", linux.gid_mappings(), user.gid()),
    ] {
        let invalid = |why: String| Err(SpecError::Invalid(field, why));
        let mappings = mappings.as_deref().unwrap_or_default();
        // containerd sends empty lists.
        match (own, mappings.is_empty()) {
            (false, true) => {}
            (false, false) => return invalid("there is no user namespace".into()),
            (true, true) => return invalid("a user namespace has nobody without them".into()),
            (true, false) if !mappings.iter().any(|m| has_number(m, id)) => {
                return invalid(format!("{id} of process.user is not among them"));
            }
            (true, false) => {}
        }
    }
    Ok(())
}

fn has_number(mapping: &LinuxIdMapping, id: u32) -> bool {
    id.checked_sub(mapping.container_id())
        .is_some_and(|offset| offset < mapping.size())
}

/// Whether offsets are those of clocks that have one, in a time namespace.
pub(super) fn check_clocks(linux: &Linux, own: bool) -> Result<(), SpecError> {
    for clock in linux
        .time_offsets()
        .iter()
        .flatten()
        .map(|(clock, _)| clock)
    {
        let why = if !own {
            "there is no time namespace".into()
        } else if !matches!(clock.as_str(), "monotonic" | "boottime") {
            format!("{clock:?} is neither monotonic nor boottime")
        } else {
            continue;
        };
        return Err(SpecError::Invalid("linux.timeOffsets", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{adapted, small};

    #[test]
    fn namespaces_and_what_is_to_be_in_them_agree() {
        let mapping = json!([{"containerID": 0, "hostID": 1000, "size": 10}]);
        for (change, field) in [
            (
                json!({"namespaces": ["pid", "mount", "pid"]}),
                "linux.namespaces",
            ),
            (
                json!({"namespaces": ["mount", "user"]}),
                "linux.uidMappings",
            ),
            (
                json!({"namespaces": ["mount", "user"], "uidMappings": mapping, "user": 10}),
                "linux.uidMappings",
            ),
            (
                json!({"namespaces": ["mount", "user"], "uidMappings": mapping}),
                "linux.gidMappings",
            ),
            (
                json!({"namespaces": ["mount"], "gidMappings": mapping}),
                "linux.gidMappings",
            ),
            (
                json!({"namespaces": ["mount", "user"], "uidMappings": mapping, "gidMappings": mapping, "user": 9}),
                "",
            ),
            (
                json!({"namespaces": ["mount"], "timeOffsets": {"boottime": {"secs": 1}}}),
                "linux.timeOffsets",
            ),
            (
                json!({"namespaces": ["mount", "time"], "timeOffsets": {"realtime": {"secs": 1}}}),
                "linux.timeOffsets",
            ),
            (
                json!({"namespaces": ["mount", "time"], "timeOffsets": {"monotonic": {"secs": 1}}}),
                "",
            ),
        ] {
            let mut json = small();
            let list = change["namespaces"].as_array().unwrap();
            json["linux"]["namespaces"] = list.iter().map(|kind| json!({"type": kind})).collect();
            for field in ["uidMappings", "gidMappings", "timeOffsets"] {
                if let Some(value) = change.get(field) {
                    json["linux"][field] = value.clone();
                }
            }
            if let Some(user) = change.get("user") {
                json["process"]["user"]["uid"] = user.clone();
            }
            let message = adapted(json)
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default();
            assert_eq!(message.is_empty(), field.is_empty(), "{change}: {message}");
            assert!(message.starts_with(field), "{change}: {message}");
        }
    }
}
