//! A pod, as containerd's CRI plugin describes it where the shim is the sandbox's controller (`sandboxer = "shim"`).
//!
//! No container stands for the pod then, and no specification says what its machine is to be. So this writes down
//! the one that a pause container of the same pod would have, and the machine is made from it as from any other.

mod files;

/// The messages of `proto/cri.proto`.
#[allow(clippy::all, clippy::restriction, missing_docs, unused)]
mod cri {
    include!(concat!(env!("OUT_DIR"), "/mod.rs"));
}

use std::path::Path;

use containerd_shim_protos::sandbox_api::CreateSandboxRequest;
use cri::cri::{LinuxPodSandboxConfig, NamespaceMode, PodSandboxConfig};
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use serde_json::{Map, Value, json};

use crate::config::ANNOTATION_PREFIX;
use crate::spec::Spec;
pub use files::{Files, FilesError};

/// The message that describes a pod.
const CONFIG: &str = "runtime.v1.PodSandboxConfig";

/// What the CRI plugin gives a pod's pause container: it is among the last to be ended for want of memory.
const OOM_SCORE_ADJ: i64 = -998;

/// Why there cannot be such a pod.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// The options are of another kind.
    #[error("The sandbox's options are of the type {0:?}: cube takes {CONFIG}, or none")]
    Unknown(String),
    /// They are not what their type says.
    #[error("Cannot decode the sandbox's options ({CONFIG}): {0}")]
    Decode(protobuf::Error),
    /// A root file system.
    #[error(
        "A sandbox boots from cube's own kernel: it cannot have a root file system, only its containers can"
    )]
    Rootfs,
    /// A user namespace for all of the pod.
    #[error(
        "linux.security_context.namespace_options.userns_options: the containers of a pod cannot share a user namespace \
         of the host (hostUsers: false), since they run in a VM"
    )]
    UserNamespace,
    /// A name server, search domain or option of `dns_config` that would be another line.
    #[error("dns_config has {0:?}, which is not a word")]
    Dns(String),
    /// A host name that would be another line.
    #[error("The host name {0:?} has characters that no host name has")]
    Hostname(String),
}

/// A pod.
pub struct Pod {
    /// What its machine is made from.
    pub spec: Spec,
    /// Files of the host that its containers share; none for a sandbox that no CRI plugin has asked for.
    pub files: Option<Files>,
}

impl Pod {
    /// The pod of a request to make it.
    pub fn of(request: &CreateSandboxRequest) -> Result<Self, PodError> {
        if !request.rootfs.is_empty() {
            return Err(PodError::Rootfs);
        }
        let config = config(request.options.as_ref())?;
        let mut root = Map::new();
        let mut annotations = Map::new();
        let mut linux = json!({"namespaces": namespaces(&request.netns_path)});
        let mut files = None;
        if let Some(config) = &config {
            let pods = config.linux.get_or_default();
            let options = pods.security_context.get_or_default();
            let options = options.namespace_options.get_or_default();
            if let Some(user) = options.userns_options.as_ref()
                && user.mode.enum_value() == Ok(NamespaceMode::POD)
            {
                return Err(PodError::UserNamespace);
            }
            // Of an annotation that is not cube's a container learns from its own specification.
            annotations.extend(ours(&config.annotations));
            annotations.extend(size_hints(pods));
            root.insert("hostname".into(), config.hostname.clone().into());
            root.insert("process".into(), json!({"oomScoreAdj": OOM_SCORE_ADJ}));
            linux["sysctl"] = pods.sysctls.clone().into_iter().collect();
            if !pods.cgroup_parent.is_empty() {
                linux["cgroupsPath"] =
                    cgroups_path(&pods.cgroup_parent, &request.sandbox_id).into();
            }
            let own_shm = options.ipc.enum_value() != Ok(NamespaceMode::NODE);
            files = Some(Files::of(config, own_shm)?);
        }
        annotations.extend(ours(&request.annotations));
        // With its sandbox's name it is a group, which others may join.
        annotations.insert("io.kubernetes.cri.container-type".into(), "sandbox".into());
        annotations.insert(
            "io.kubernetes.cri.sandbox-id".into(),
            request.sandbox_id.clone().into(),
        );
        root.insert("annotations".into(), annotations.into());
        root.insert("linux".into(), linux);
        Ok(Self {
            spec: Spec::from(root),
            files,
        })
    }
}

fn config(options: Option<&Any>) -> Result<Option<PodSandboxConfig>, PodError> {
    let Some(any) = options.filter(|any| !any.type_url.is_empty()) else {
        return Ok(None);
    };
    // Go writes the bare name, others put a host before it.
    if any.type_url.rsplit('/').next() != Some(CONFIG) {
        return Err(PodError::Unknown(any.type_url.clone()));
    }
    PodSandboxConfig::parse_from_bytes(&any.value)
        .map(Some)
        .map_err(PodError::Decode)
}

/// Without a path the pod is to have the host's network.
fn namespaces(network: &str) -> Value {
    match network {
        "" => json!([]),
        path => json!([{"type": "network", "path": path}]),
    }
}

fn ours(
    annotations: &std::collections::HashMap<String, String>,
) -> impl Iterator<Item = (String, Value)> {
    annotations
        .iter()
        .filter(|(name, _)| name.starts_with(ANNOTATION_PREFIX))
        .map(|(name, value)| (name.clone(), value.clone().into()))
}

/// How much all containers may have together, as the CRI plugin writes it into a pause container's specification.
fn size_hints(linux: &LinuxPodSandboxConfig) -> impl Iterator<Item = (String, Value)> {
    let resources = linux.resources.get_or_default();
    [
        ("cpu-period", resources.cpu_period),
        ("cpu-quota", resources.cpu_quota),
        ("memory", resources.memory_limit_in_bytes),
    ]
    .into_iter()
    .filter(|(_, value)| *value > 0)
    .map(|(name, value)| {
        let name = format!("io.kubernetes.cri.sandbox-{name}");
        (name, value.to_string().into())
    })
}

/// The cgroup that the CRI plugin gives a pod's pause container below the pod's own.
fn cgroups_path(parent: &str, id: &str) -> String {
    match Path::new(parent).file_name().and_then(|name| name.to_str()) {
        Some(slice) if slice.ends_with(".slice") => format!("{slice}:cri-containerd:{id}"),
        _ => format!("{}/{id}", parent.trim_end_matches('/')),
    }
}

#[cfg(test)]
mod tests {
    use protobuf::MessageField;

    use super::*;
    use crate::spec::NetworkNamespace;
    use cri::cri::{
        LinuxContainerResources, LinuxSandboxSecurityContext, NamespaceOption, UserNamespace,
    };

    fn request(config: &PodSandboxConfig) -> CreateSandboxRequest {
        CreateSandboxRequest {
            sandbox_id: "pod".into(),
            netns_path: "/run/netns/pod".into(),
            options: MessageField::some(Any {
                type_url: CONFIG.into(),
                value: config.write_to_bytes().unwrap(),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn linux() -> LinuxPodSandboxConfig {
        LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/pod1".into(),
            sysctls: [("net.core.somaxconn".to_owned(), "1024".to_owned())].into(),
            resources: MessageField::some(LinuxContainerResources {
                cpu_period: 100_000,
                cpu_quota: 250_000,
                memory_limit_in_bytes: 1 << 30,
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn a_pods_configuration_says_of_the_machine_what_its_pause_containers_specification_would() {
        let config = PodSandboxConfig {
            hostname: "web-0".into(),
            annotations: [
                (format!("{ANNOTATION_PREFIX}default_vcpus"), "3".to_owned()),
                ("io.containerd.runc.v2.group".into(), "another".into()),
            ]
            .into(),
            linux: MessageField::some(linux()),
            ..Default::default()
        };
        let pod = Pod::of(&request(&config)).unwrap();
        let spec = &pod.spec;
        assert_eq!(spec.hostname(), "web-0");
        assert_eq!(spec.group(), Some("pod"), "whatever the pod's user writes");
        assert_eq!(
            (spec.wanted_cpus(), spec.wanted_memory()),
            (Some(3), Some(1 << 30))
        );
        assert_eq!(spec.cgroups_path(), "/kubepods/pod1/pod");
        assert_eq!(spec.oom_score_adj(), Some(OOM_SCORE_ADJ));
        assert_eq!(
            spec.network_namespace(),
            NetworkNamespace::Existing("/run/netns/pod".into())
        );
        assert_eq!(spec.pod_sysctls()["net.core.somaxconn"], "1024");
        let ours = format!("{ANNOTATION_PREFIX}default_vcpus");
        assert_eq!(spec.annotations()[&ours], "3");
        assert!(pod.files.is_some());
    }

    #[test]
    fn a_slice_is_systemds() {
        let parent = "/kubepods.slice/kubepods-pod1.slice";
        assert_eq!(
            cgroups_path(parent, "pod"),
            "kubepods-pod1.slice:cri-containerd:pod"
        );
        assert_eq!(cgroups_path("/", "pod"), "/pod");
    }

    #[test]
    fn a_sandbox_of_which_nothing_is_said_has_the_defaults() {
        let request = CreateSandboxRequest {
            sandbox_id: "s".into(),
            ..Default::default()
        };
        let pod = Pod::of(&request).unwrap();
        assert!(pod.spec.wants_host_network() && pod.files.is_none());
        assert_eq!((pod.spec.group(), pod.spec.hostname()), (Some("s"), ""));
        assert_eq!(
            (pod.spec.wanted_cpus(), pod.spec.wanted_memory()),
            (None, None)
        );
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_its_name() {
        let refused = |request: CreateSandboxRequest| Pod::of(&request).err().unwrap().to_string();
        let mut other = request(&PodSandboxConfig::default());
        other.options.as_mut().unwrap().type_url = "a.b/other.Options".into();
        assert!(refused(other).contains("other.Options"));
        let mut broken = request(&PodSandboxConfig::default());
        broken.options.as_mut().unwrap().value = vec![0xff];
        assert!(refused(broken).contains("Cannot decode"));
        let mut rootfs = request(&PodSandboxConfig::default());
        rootfs.rootfs = vec![Default::default()];
        assert!(refused(rootfs).contains("root file system"));
        let user = PodSandboxConfig {
            linux: MessageField::some(LinuxPodSandboxConfig {
                security_context: MessageField::some(LinuxSandboxSecurityContext {
                    namespace_options: MessageField::some(NamespaceOption {
                        userns_options: MessageField::some(UserNamespace::default()),
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert!(refused(request(&user)).contains("userns_options"));
    }
}
