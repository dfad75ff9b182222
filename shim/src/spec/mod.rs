//! The container's OCI specification: what the host must know of it, and what of it goes to the
//! guest.
//!
//! It is edited as a JSON tree: a field that this program has never heard of reaches the guest's
//! runtime, which knows more of them.

mod devices;
mod translate;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::processors;
use crate::sizing::processors_of;
pub use devices::BlockDevice;

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

impl From<Map<String, Value>> for Spec {
    fn from(root: Map<String, Value>) -> Self {
        Self { root }
    }
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
        text_values(self.get(&["annotations"]))
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

    /// Makes the container one of this sandbox, if it names no other.
    pub fn join(&mut self, sandbox: &str) {
        if self.group().is_some() {
            return;
        }
        let annotations = self.root.entry("annotations");
        let annotations = annotations.or_insert(Value::Null);
        if !annotations.is_object() {
            *annotations = Map::new().into();
        }
        annotations["io.containerd.runc.v2.group"] = sandbox.into();
    }

    /// The kernel settings that are for a whole pod: those of the container that stands for it.
    pub fn pod_sysctls(&self) -> HashMap<String, String> {
        if self.text(&["annotations", "io.kubernetes.cri.container-type"]) != "sandbox" {
            return HashMap::new();
        }
        text_values(self.get(&["linux", "sysctl"]))
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

    /// Whether the root file system is for reading only.
    pub fn has_readonly_root(&self) -> bool {
        self.get(&["root", "readonly"]) == Some(&Value::Bool(true))
    }

    /// Adds a mount where there is none yet, or one that may be replaced.
    pub fn add_mount(&mut self, mount: Value, may_replace: impl Fn(&Value) -> bool) {
        let mounts = self
            .root
            .entry("mounts")
            .or_insert_with(|| Value::from(Vec::<Value>::new()));
        // What is no list is refused later.
        let Some(mounts) = mounts.as_array_mut() else {
            return;
        };
        let destination = |mount: &Value| {
            let text = mount["destination"].as_str().unwrap_or_default();
            Path::new(text).components().collect::<PathBuf>()
        };
        let place = destination(&mount);
        match mounts.iter_mut().find(|old| destination(old) == place) {
            Some(old) if may_replace(old) => *old = mount,
            Some(_) => {}
            None => mounts.push(mount),
        }
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
}

/// The size in a `process` object, width and height.
pub fn console_size(process: &Value) -> (u32, u32) {
    let side = |name| {
        let size = process.get("consoleSize")?.get(name)?.as_u64()?;
        u32::try_from(size).ok()
    };
    (side("width").unwrap_or(0), side("height").unwrap_or(0))
}

/// The entries of an object whose values are text.
fn text_values(object: Option<&Value>) -> HashMap<String, String> {
    let Some(Value::Object(object)) = object else {
        return HashMap::new();
    };
    object
        .iter()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(value: Value) -> Spec {
        Spec::parse(value.to_string().as_bytes()).unwrap()
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
    fn the_group_annotation_of_runc_comes_before_that_of_cri() {
        let both = spec(json!({"annotations": {
            "io.kubernetes.cri.sandbox-id": "b", "io.containerd.runc.v2.group": "a"
        }}));
        assert_eq!(both.group(), Some("a"));
        assert_eq!(spec(json!({})).group(), None);
    }

    #[test]
    fn a_container_joins_a_sandbox_unless_it_names_another() {
        for (before, after) in [
            (json!({}), "pod"),
            (json!({"annotations": null}), "pod"),
            (json!({"annotations": {"a": "b"}}), "pod"),
            (
                json!({"annotations": {"io.kubernetes.cri.sandbox-id": "b"}}),
                "b",
            ),
        ] {
            let mut spec = spec(before);
            spec.join("pod");
            assert_eq!(spec.group(), Some(after));
        }
    }

    #[test]
    fn settings_of_the_kernel_are_a_pods_if_its_own_container_names_them() {
        let sysctl = json!({"sysctl": {"net.core.somaxconn": "1024"}});
        let kind = |kind: &str| json!({"io.kubernetes.cri.container-type": kind});
        let pod = spec(json!({"annotations": kind("sandbox"), "linux": sysctl}));
        assert_eq!(pod.pod_sysctls()["net.core.somaxconn"], "1024");
        let other = spec(json!({"annotations": kind("container"), "linux": sysctl}));
        assert!(other.pod_sysctls().is_empty());
    }
}
