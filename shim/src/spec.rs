//! The container's OCI specification: what the host must know of it, and what of it goes to the
//! guest.
//!
//! It is edited as a JSON tree: a field that this program has never heard of reaches the guest's
//! runtime, which knows more of them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::mount::{Access, Volume};
use crate::processors;
use crate::sizing::processors_of;

/// Why a specification cannot be carried out in a VM.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The bundle has none.
    #[error("Cannot read the specification {0:?}: {1}")]
    Read(PathBuf, std::io::Error),
    /// It is no JSON object.
    #[error("The specification {0:?} is not a JSON object: {1}")]
    Parse(PathBuf, String),
    /// Something in it has a type that the OCI specification does not allow.
    #[error("The specification's {0} is not {1}")]
    Malformed(String, &'static str),
    /// Something that a VM cannot do.
    #[error("{0}")]
    Unsupported(String),
}

/// A network namespace for the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkNamespace {
    /// One that exists.
    Existing(PathBuf),
    /// A new one of the sandbox's own.
    New,
}

/// A container's specification.
#[derive(Clone, Debug)]
pub struct Spec {
    root: Map<String, Value>,
}

/// A block device of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// The first path that the container has it by.
    pub path: String,
    /// Its major number on the host.
    pub major: i64,
    /// Its minor number.
    pub minor: i64,
    /// Whether the container's device rules forbid writes.
    pub read_only: bool,
}

/// The part of a specification that goes to the guest, and what the host does for it.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestSpec {
    /// The edited specification, JSON.
    pub json: Vec<u8>,
    /// The N-th is to be bound to `N` in the container's directory of volumes.
    pub volumes: Vec<Volume>,
}

impl Spec {
    /// Reads `config.json` of a bundle.
    pub fn read(bundle: &Path) -> Result<Self, SpecError> {
        let path = bundle.join("config.json");
        let text = std::fs::read(&path).map_err(|e| SpecError::Read(path.clone(), e))?;
        Self::parse(&text).map_err(|e| SpecError::Parse(path, e.to_string()))
    }

    /// Parses the text of a `config.json`.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        Ok(Self {
            root: serde_json::from_slice(text)?,
        })
    }

    fn get(&self, path: &[&str]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        rest.iter()
            .try_fold(self.root.get(*first)?, |value, key| value.get(key))
    }

    fn text(&self, path: &[&str]) -> &str {
        self.get(path).and_then(Value::as_str).unwrap_or_default()
    }

    /// The version of the runtime specification that it is written to.
    pub fn oci_version(&self) -> &str {
        self.text(&["ociVersion"])
    }

    /// Hooks of all kinds.
    pub fn hooks(&self) -> Option<&Value> {
        self.root.get("hooks").filter(|hooks| !hooks.is_null())
    }

    /// All annotations.
    pub fn annotations(&self) -> HashMap<String, String> {
        let Some(Value::Object(annotations)) = self.get(&["annotations"]) else {
            return HashMap::new();
        };
        annotations
            .iter()
            .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
            .collect()
    }

    /// The sandbox that the container belongs to, if it is not its own.
    pub fn group(&self) -> Option<&str> {
        [
            "io.containerd.runc.v2.group",
            "io.kubernetes.cri.sandbox-id",
        ]
        .iter()
        .map(|key| self.text(&["annotations", key]))
        .find(|id| !id.is_empty())
    }

    /// The container's cgroup on the host; empty if it names none.
    pub fn cgroups_path(&self) -> &str {
        self.text(&["linux", "cgroupsPath"])
    }

    /// The host name; empty if it names none.
    pub fn hostname(&self) -> &str {
        self.text(&["hostname"])
    }

    /// The domain name; empty if it names none.
    pub fn domainname(&self) -> &str {
        self.text(&["domainname"])
    }

    /// `process.oomScoreAdj`.
    pub fn oom_score_adj(&self) -> Option<i64> {
        self.get(&["process", "oomScoreAdj"])?.as_i64()
    }

    /// The root file system's directory, seen from the bundle.
    pub fn root_path(&self, bundle: &Path) -> PathBuf {
        let path = self.text(&["root", "path"]);
        bundle.join(if path.is_empty() { "rootfs" } else { path })
    }

    /// The terminal's first size, width and height in characters; zeros if there is none.
    pub fn console_size(&self) -> (u32, u32) {
        self.get(&["process"]).map(console_size).unwrap_or_default()
    }

    /// The network namespace for the hypervisor. A VM cannot use the host's own network: where
    /// the specification names none, it gets one of its own.
    pub fn network_namespace(&self) -> NetworkNamespace {
        self.namespaces()
            .iter()
            .find(|n| kind(n) == "network" && !path(n).is_empty())
            .map_or(NetworkNamespace::New, |n| {
                NetworkNamespace::Existing(path(n).into())
            })
    }

    /// Whether the specification asks for the host's network.
    pub fn wants_host_network(&self) -> bool {
        !self.namespaces().iter().any(|n| kind(n) == "network")
    }

    fn namespaces(&self) -> &[Value] {
        self.get(&["linux", "namespaces"])
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }

    /// What the CPU limit means in processors, rounded up. The sandbox's hint, which is for all of
    /// its containers, comes before this container's own.
    pub fn wanted_cpus(&self) -> Option<u64> {
        let hint = |name: &str| {
            let key = format!("io.kubernetes.cri.sandbox-cpu-{name}");
            self.text(&["annotations", &key]).parse::<i64>().ok()
        };
        if let Some(cpus) = processors_of(hint("quota"), hint("period")) {
            return Some(cpus);
        }
        let cpu = ["linux", "resources", "cpu"];
        let own = |name| self.get(&[cpu[0], cpu[1], cpu[2], name])?.as_i64();
        let limit = processors_of(own("quota"), own("period"));
        // A list that is none is refused later.
        let bound = processors::parse(self.text(&[cpu[0], cpu[1], cpu[2], "cpus"]))
            .ok()
            .map(|cpus| cpus.len() as u64);
        match (limit, bound) {
            (Some(limit), Some(bound)) => Some(limit.min(bound)),
            (limit, bound) => limit.or(bound),
        }
    }

    /// `linux.resources`.
    pub fn resources_mut(&mut self) -> Option<&mut Value> {
        self.root.get_mut("linux")?.get_mut("resources")
    }

    /// The memory limit in bytes, the sandbox's hint before this container's own.
    pub fn wanted_memory(&self) -> Option<u64> {
        let hint = self
            .text(&["annotations", "io.kubernetes.cri.sandbox-memory"])
            .parse()
            .ok();
        let own = || {
            self.get(&["linux", "resources", "memory", "limit"])?
                .as_i64()
        };
        hint.filter(|&bytes: &i64| bytes > 0)
            .or_else(own)
            .and_then(|bytes| u64::try_from(bytes).ok())
            .filter(|&bytes| bytes > 0)
    }

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

    /// The host's block devices that are to be devices of the container, each once, however often it is named.
    pub fn block_devices(&self) -> Result<Vec<BlockDevice>, SpecError> {
        let mut found: Vec<BlockDevice> = Vec::new();
        let devices = self.get(&["linux", "devices"]).and_then(Value::as_array);
        for device in devices.into_iter().flatten() {
            if device.get("type").and_then(Value::as_str) != Some("b") {
                continue;
            }
            let path = device.get("path").and_then(Value::as_str);
            let path = path.unwrap_or_default().to_owned();
            let number = |key| device.get(key).and_then(Value::as_i64);
            let (Some(major), Some(minor)) = (number("major"), number("minor")) else {
                return Err(SpecError::Malformed(
                    format!("block device {path:?}"),
                    "one with a major and a minor number",
                ));
            };
            if found.iter().any(|d| (d.major, d.minor) == (major, minor)) {
                continue;
            }
            found.push(BlockDevice {
                read_only: !self.may_write(major, minor),
                path,
                major,
                minor,
            });
        }
        Ok(found)
    }

    /// Whether the device rules allow to write to a block device: each rule changes what those before it say.
    fn may_write(&self, major: i64, minor: i64) -> bool {
        let rules = self.get(&["linux", "resources", "devices"]);
        let Some(rules) = rules.and_then(Value::as_array).filter(|r| !r.is_empty()) else {
            return true;
        };
        let mut writable = false;
        for rule in rules {
            let text = |key| rule.get(key).and_then(Value::as_str).unwrap_or_default();
            let all = matches!(text("type"), "" | "a");
            // Without a number, or with a negative one, every number.
            let is = |key, number| {
                let wanted = rule.get(key).and_then(Value::as_i64);
                wanted.is_none_or(|n| n < 0 || n == number)
            };
            let matches = all || (text("type") == "b" && is("major", major) && is("minor", minor));
            if matches && (all || text("access").is_empty() || text("access").contains('w')) {
                writable = rule.get("allow").and_then(Value::as_bool) == Some(true);
            }
        }
        writable
    }
}

/// The size in a `process` object, width and height.
pub fn console_size(process: &Value) -> (u32, u32) {
    let side = |name| {
        let size = process.get("consoleSize")?.get(name)?.as_u64()?;
        u32::try_from(size).ok()
    };
    (side("width").unwrap_or(0), side("height").unwrap_or(0))
}

fn kind(namespace: &Value) -> &str {
    namespace
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn path(namespace: &Value) -> &str {
    namespace
        .get("path")
        .and_then(Value::as_str)
        .unwrap_or_default()
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

    use super::*;

    fn spec(value: Value) -> Spec {
        Spec::parse(value.to_string().as_bytes()).unwrap()
    }

    fn translate(value: Value) -> Result<(Value, Vec<Volume>), SpecError> {
        let guest = spec(value).translate("web", Path::new("/bundle"), "/shared/web")?;
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
        let parsed = spec(value.clone());
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
    fn the_network_namespace_is_new_where_none_is_named() {
        assert_eq!(
            spec(json!({"linux": {"namespaces": [{"type": "network"}]}})).network_namespace(),
            NetworkNamespace::New
        );
        let host = spec(json!({"linux": {"namespaces": []}}));
        assert_eq!(host.network_namespace(), NetworkNamespace::New);
        assert!(host.wants_host_network());
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

    #[test]
    fn limits_are_read_from_the_hints_of_the_sandbox_first() {
        let own = json!({"linux": {"resources": {
            "cpu": {"quota": 150_000, "period": 100_000}, "memory": {"limit": 536_870_912}
        }}});
        assert_eq!(spec(own.clone()).wanted_cpus(), Some(2));
        assert_eq!(spec(own.clone()).wanted_memory(), Some(536_870_912));
        let mut pod = own;
        pod["annotations"] = json!({
            "io.kubernetes.cri.sandbox-cpu-quota": "400000",
            "io.kubernetes.cri.sandbox-cpu-period": "100000",
            "io.kubernetes.cri.sandbox-memory": "1073741824"
        });
        assert_eq!(spec(pod.clone()).wanted_cpus(), Some(4));
        assert_eq!(spec(pod).wanted_memory(), Some(1 << 30));
        let none =
            spec(json!({"linux": {"resources": {"cpu": {"quota": -1}, "memory": {"limit": -1}}}}));
        assert_eq!((none.wanted_cpus(), none.wanted_memory()), (None, None));
    }

    #[test]
    fn block_devices_are_found_once_each_and_written_to_as_far_as_the_rules_allow() {
        let device =
            |path, major, minor| json!({"type": "b", "path": path, "major": major, "minor": minor});
        let devices = json!([
            device("/dev/data", 7, 0),
            {"type": "c", "path": "/dev/null", "major": 1, "minor": 3},
            device("/dev/same", 7, 0),
            device("/dev/log", 7, 1)
        ]);
        let with = |rules: Value| {
            let value = json!({"linux": {"devices": &devices, "resources": {"devices": rules}}});
            let found = spec(value).block_devices().unwrap();
            let names: Vec<_> = found.iter().map(|d| &*d.path).collect();
            assert_eq!(names, ["/dev/data", "/dev/log"]);
            found.iter().map(|d| d.read_only).collect::<Vec<_>>()
        };
        let none = json!({"allow": false, "access": "rwm"});
        let rule = |minor: i64, access: &str| json!({"allow": true, "type": "b", "major": 7, "minor": minor, "access": access});
        assert_eq!(with(json!([])), [false, false]);
        assert_eq!(with(json!([none])), [true, true]);
        assert_eq!(
            with(json!([none, rule(0, "rwm"), rule(1, "r")])),
            [false, true]
        );
        assert_eq!(with(json!([none, rule(-1, "rw")])), [false, false]);
        assert_eq!(
            with(json!([none, {"allow": true, "type": "c", "access": "rwm"}])),
            [true, true]
        );
        assert_eq!(
            with(json!([none, {"allow": true, "type": "a", "access": "rwm"}])),
            [false, false]
        );
        let nameless = json!({"linux": {"devices": [{"type": "b", "path": "/dev/sda"}]}});
        let error = spec(nameless).block_devices().unwrap_err().to_string();
        assert!(error.contains("/dev/sda"), "{error}");
    }

    #[test]
    fn the_group_annotation_of_runc_comes_before_that_of_cri() {
        let both = spec(json!({"annotations": {
            "io.kubernetes.cri.sandbox-id": "b", "io.containerd.runc.v2.group": "a"
        }}));
        assert_eq!(both.group(), Some("a"));
        assert_eq!(spec(json!({})).group(), None);
    }
}
