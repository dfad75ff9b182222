//! What of a specification goes to the guest: mounts led through the share, namespaces of the guest's own for those of the
//! host, and a sentence for what no VM can do.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Spec, SpecError, kind, path};
use crate::mount::{Access, Volume};

/// The part of a specification that goes to the guest, and what the host does for it.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestSpec {
    /// The edited specification, JSON.
    pub json: Vec<u8>,
    /// The N-th is to be bound to `N` in the container's directory of volumes.
    pub volumes: Vec<Volume>,
}

impl Spec {
    /// Splits the specification into what the guest does and what the host does for it.
    /// `shared` is the container's directory of volumes as the guest sees it.
    pub fn translate(
        mut self,
        id: &str,
        bundle: &Path,
        shared: &str,
    ) -> Result<GuestSpec, SpecError> {
        self.refuse_what_no_vm_can_do()?;
        let mut volumes = Vec::new();
        if let Some(mounts) = self.root.get_mut("mounts") {
            let mounts = mounts
                .as_array_mut()
                .ok_or_else(|| SpecError::Malformed("mounts".into(), "a list"))?;
            for mount in mounts {
                translate_mount(mount, bundle, shared, &mut volumes)?;
            }
        }
        if let Some(Value::Object(hooks)) = self.root.get_mut("hooks") {
            crate::hooks::guest::translate(hooks, shared, &mut volumes)?;
        }
        if let Some(Value::Object(linux)) = self.root.get_mut("linux") {
            translate_namespaces(linux)?;
            // The host's cgroup holds the VM; the guest has a tree of its own.
            linux.insert("cgroupsPath".into(), Value::from(format!("/{id}")));
        }
        let json = serde_json::to_vec(&self.root)
            .map_err(|e| SpecError::Unsupported(format!("Cannot encode the specification: {e}")))?;
        Ok(GuestSpec { json, volumes })
    }

    fn refuse_what_no_vm_can_do(&self) -> Result<(), SpecError> {
        let refuse = |sentence: String| Err(SpecError::Unsupported(sentence));
        for system in ["freebsd", "solaris", "vm", "windows", "zos"] {
            if self.get(&[system]).is_some_and(|v| !v.is_null()) {
                return refuse(format!(
                    "{system} is for another system: the guest is Linux"
                ));
            }
        }
        if self
            .get(&["linux", "intelRdt"])
            .is_some_and(|v| !v.is_null())
        {
            return refuse(
                "linux.intelRdt is about the host's caches: a container in a VM cannot have it"
                    .into(),
            );
        }
        let profile = self.text(&["process", "apparmorProfile"]);
        if !matches!(profile, "" | "unconfined") {
            return refuse(format!(
                "The guest's kernel has no AppArmor: use the profile \"unconfined\" instead of {profile:?}"
            ));
        }
        for path in [["process", "selinuxLabel"], ["linux", "mountLabel"]] {
            if !self.text(&path).is_empty() {
                return refuse(format!(
                    "The guest's kernel has no SELinux: {}.{} must be empty",
                    path[0], path[1]
                ));
            }
        }
        if !self.text(&["linux", "seccomp", "listenerPath"]).is_empty() {
            return refuse(
                "linux.seccomp.listenerPath is a socket of the host, which a guest's seccomp filter cannot notify".into(),
            );
        }
        Ok(())
    }
}

/// The kinds of namespaces (runtime-spec, config-linux.md).
const NAMESPACES: [&str; 8] = [
    "cgroup", "ipc", "mount", "network", "pid", "time", "user", "uts",
];

/// The guest's own namespaces stand for those of the pod on the host. A network namespace always
/// does: the hypervisor is in it. Any other that is joined by path is the pod's, so the container
/// joins the guest's; a new one is made in the guest.
fn translate_namespaces(linux: &mut Map<String, Value>) -> Result<(), SpecError> {
    let Some(namespaces) = linux.get_mut("namespaces") else {
        return Ok(());
    };
    let namespaces = namespaces
        .as_array_mut()
        .ok_or_else(|| SpecError::Malformed("linux.namespaces".into(), "a list"))?;
    for (n, namespace) in namespaces.iter().enumerate() {
        // Here, since the guest's list is another.
        if !NAMESPACES.contains(&kind(namespace)) {
            let field = format!("linux.namespaces[{n}].type");
            return Err(SpecError::Malformed(field, "a kind of namespace"));
        }
        if matches!(kind(namespace), "user" | "time" | "mount" | "cgroup")
            && !path(namespace).is_empty()
        {
            return Err(SpecError::Unsupported(format!(
                "The {} namespace {:?} is the host's: a container in a VM cannot join it",
                kind(namespace),
                path(namespace)
            )));
        }
    }
    namespaces.retain(|n| kind(n) != "network" && path(n).is_empty());
    Ok(())
}

/// File systems that need nothing of the host: the guest makes its own.
const GUEST_FILE_SYSTEMS: [&str; 14] = [
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "mqueue",
    "proc",
    "securityfs",
    "sysfs",
    "tmpfs",
    "tracefs",
];

fn translate_mount(
    mount: &mut Value,
    bundle: &Path,
    shared: &str,
    volumes: &mut Vec<Volume>,
) -> Result<(), SpecError> {
    let text = |key: &str| mount.get(key).and_then(Value::as_str).unwrap_or_default();
    let destination = PathBuf::from(text("destination"));
    let options: Vec<&str> = mount
        .get("options")
        .and_then(Value::as_array)
        .map(|list| list.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let has = |names: &[&str]| options.iter().any(|option| names.contains(option));

    for key in ["uidMappings", "gidMappings"] {
        if mount
            .get(key)
            .and_then(Value::as_array)
            .is_some_and(|l| !l.is_empty())
        {
            return Err(SpecError::Unsupported(format!(
                "The mount at {destination:?} has {key}: id-mapped mounts are not supported"
            )));
        }
    }
    if !has(&["bind", "rbind"]) && text("type") != "bind" {
        let kind = text("type");
        if GUEST_FILE_SYSTEMS.contains(&kind) {
            return Ok(());
        }
        return Err(SpecError::Unsupported(format!(
            "The mount at {destination:?} of type {kind:?} needs the host's kernel: mount it on the host and bind it"
        )));
    }
    if has(&["idmap", "ridmap"]) {
        return Err(SpecError::Unsupported(format!(
            "The mount at {destination:?} is id-mapped, which is not supported"
        )));
    }
    let source = text("source");
    if source.is_empty() {
        return Err(SpecError::Malformed(
            format!("mount at {destination:?}"),
            "a bind with a source",
        ));
    }
    let last = |names: &[&str]| options.iter().rposition(|o| names.contains(o));
    let volume = Volume {
        source: bundle.join(source),
        recursive: has(&["rbind"]),
        access: match (last(&["rro"]), last(&["ro"]), last(&["rw"])) {
            (rro, ..) if rro > last(&["rrw"]) => Access::RecursivelyReadOnly,
            (_, ro, rw) if ro > rw => Access::ReadOnly,
            _ => Access::ReadWrite,
        },
        follows_host: has(&["rslave", "slave", "rshared", "shared"]),
        destination,
    };
    let in_guest = format!("{shared}/{}", volumes.len());
    volumes.push(volume);
    match mount.as_object_mut() {
        Some(mount) => mount.insert("source".into(), Value::from(in_guest)),
        None => return Err(SpecError::Malformed("mounts".into(), "a list of objects")),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::NetworkNamespace;
    use super::*;

    fn translate(value: Value) -> Result<(Value, Vec<Volume>), SpecError> {
        let guest = Spec::parse(value.to_string().as_bytes())
            .unwrap()
            .translate("web", Path::new("/bundle"), "/shared/web")?;
        Ok((serde_json::from_slice(&guest.json).unwrap(), guest.volumes))
    }

    #[test]
    fn binds_are_led_through_the_share_and_the_rest_stays_the_guests() {
        let (guest, volumes) = translate(json!({
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "rw", "rslave"]},
                {"destination": "/etc/hosts", "source": "hosts", "options": ["bind", "ro"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["size=64k"]},
                {"destination": "/all", "source": "/all", "options": ["rbind", "rro"]}
            ],
            "futureField": {"kept": true}
        }))
        .unwrap();
        assert_eq!(guest["futureField"]["kept"], true);
        assert_eq!(guest["mounts"][0]["source"], "proc");
        assert_eq!(guest["mounts"][1]["source"], "/shared/web/0");
        assert_eq!(guest["mounts"][2]["source"], "/shared/web/1");
        assert_eq!(guest["mounts"][2]["options"], json!(["bind", "ro"]));
        assert_eq!(guest["mounts"][3]["source"], "shm");
        assert_eq!(
            volumes,
            [
                Volume {
                    source: "/srv/data".into(),
                    destination: "/data".into(),
                    recursive: true,
                    access: Access::ReadWrite,
                    follows_host: true,
                },
                Volume {
                    source: "/bundle/hosts".into(),
                    destination: "/etc/hosts".into(),
                    recursive: false,
                    access: Access::ReadOnly,
                    follows_host: false,
                },
                Volume {
                    source: "/all".into(),
                    destination: "/all".into(),
                    recursive: true,
                    access: Access::RecursivelyReadOnly,
                    follows_host: false,
                },
            ]
        );
    }

    #[test]
    fn the_last_of_ro_and_rw_counts() {
        let access = |options: Value| {
            translate(json!({"mounts": [{"destination": "/d", "source": "/s", "type": "bind", "options": options}]}))
                .unwrap()
                .1[0]
                .access
        };
        assert_eq!(access(json!(["ro", "rw"])), Access::ReadWrite);
        assert_eq!(access(json!(["rw", "ro"])), Access::ReadOnly);
        assert_eq!(access(json!([])), Access::ReadWrite);
    }

    #[test]
    fn the_pods_namespaces_become_the_guests_own() {
        let value = json!({"linux": {"cgroupsPath": "/default/web", "namespaces": [
            {"type": "pid"},
            {"type": "ipc", "path": "/proc/7/ns/ipc"},
            {"type": "uts", "path": "/proc/7/ns/uts"},
            {"type": "mount"},
            {"type": "network", "path": "/var/run/netns/a"}
        ]}});
        let parsed = Spec::parse(value.to_string().as_bytes()).unwrap();
        assert_eq!(
            parsed.network_namespace(),
            NetworkNamespace::Existing("/var/run/netns/a".into())
        );
        let (guest, _) = translate(value).unwrap();
        assert_eq!(
            guest["linux"]["namespaces"],
            json!([{"type": "pid"}, {"type": "mount"}])
        );
        assert_eq!(guest["linux"]["cgroupsPath"], "/web");
    }

    #[test]
    fn what_no_vm_can_do_is_refused_with_a_sentence() {
        for (value, word) in [
            (
                json!({"hooks": {"createContainer": [{"path": "h"}]}}),
                "hook",
            ),
            (json!({"freebsd": {}}), "freebsd"),
            (json!({"linux": {"intelRdt": {}}}), "intelRdt"),
            (
                json!({"process": {"apparmorProfile": "docker-default"}}),
                "AppArmor",
            ),
            (json!({"process": {"selinuxLabel": "a:b:c"}}), "SELinux"),
            (json!({"linux": {"mountLabel": "a:b:c"}}), "SELinux"),
            (
                json!({"linux": {"seccomp": {"listenerPath": "/s"}}}),
                "listenerPath",
            ),
            (
                json!({"linux": {"namespaces": [{"type": "user", "path": "/p"}]}}),
                "user",
            ),
            (
                json!({"linux": {"namespaces": [{"type": "network"}, {"type": "dream"}]}}),
                "linux.namespaces[1].type",
            ),
            (
                json!({"mounts": [{"destination": "/n", "type": "nfs", "source": "a:/b"}]}),
                "nfs",
            ),
            (
                json!({"mounts": [{"destination": "/n", "type": "bind", "source": "/b", "options": ["idmap"]}]}),
                "id-mapped",
            ),
            (
                json!({"mounts": [{"destination": "/n", "type": "bind", "source": "/b", "uidMappings": [{}]}]}),
                "uidMappings",
            ),
        ] {
            let error = translate(value.clone()).unwrap_err().to_string();
            assert!(error.contains(word), "{value}: {error}");
        }
        assert!(
            translate(
                json!({"hooks": {"prestart": []}, "process": {"apparmorProfile": "unconfined"}})
            )
            .is_ok()
        );
    }
}
