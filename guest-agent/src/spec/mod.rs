//! Fitting a container's runtime specification to the guest.
//!
//! The guest is one pod: its network, IPC and UTS namespaces are the pod's, so a container gets
//! none of its own, and what the specification wants to set in them is set guest-wide. Cgroups are
//! the agent's own work (see `cgroup`), so their settings are taken out here. What the guest cannot
//! do is refused by the name of its field; nothing is dropped in silence.

mod document;
mod mounts;
mod namespaces;
mod process;
mod seccomp;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use nix::mount::MsFlags;
use oci_spec::runtime::{
    Linux, LinuxDeviceType, LinuxNamespaceType, LinuxResources, RootBuilder, Spec,
};

use crate::helper::ExecBase;
pub use document::{DocumentError, of_tree, read};
pub use mounts::{clean, is_bind};
use namespaces::{clone_flags, has, own_namespaces};
pub use process::{MOST_FILES, adapt_process};

/// A specification that the guest cannot carry out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    /// A part that every Linux container has is missing.
    #[error("The specification has no {0}")]
    Missing(&'static str),
    /// A field that does not work in a guest.
    #[error("{field} cannot be used in a microVM: {reason}")]
    Unsupported {
        /// The field's name in the specification.
        field: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// A kernel setting that is not the pod's own.
    #[error("sysctl \"{0}\" is not in a separate kernel namespace")]
    Sysctl(String),
    /// A working directory, a path or a size that is not one.
    #[error("{0} is not valid: {1}")]
    Invalid(&'static str, String),
}

/// A specification that fits, and what was taken out of it.
#[derive(Debug)]
pub struct Adapted {
    /// What libcontainer builds.
    pub spec: Spec,
    /// The pod's host name, to be set guest-wide; empty: unchanged.
    pub hostname: String,
    /// The pod's NIS domain name, to be set guest-wide; empty: unchanged.
    pub domainname: String,
    /// Settings below /proc/sys, with slashes, to be set guest-wide.
    pub sysctls: Sysctls,
    /// Limits and device rules for the container's cgroup.
    pub resources: LinuxResources,
    /// What is to be done to the mounts once they are there.
    pub late: LateMounts,
    /// What execs will need.
    pub base: ExecBase,
}

/// What libcontainer would do to mounts too early, or to too few of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LateMounts {
    /// Those by their place in the list that become read-only, since something is made in them before.
    pub read_only: Vec<usize>,
    /// The propagation of the root and of all mounts below.
    pub propagation: Option<MsFlags>,
}

/// Fits `spec`. `rootfs` and `cgroup` are paths in the guest.
pub fn adapt(
    mut spec: Spec,
    rootfs: &Path,
    cgroup: &str,
    terminal: bool,
) -> Result<Adapted, SpecError> {
    refuse_foreign(&spec)?;
    let mut process = spec
        .process()
        .clone()
        .ok_or(SpecError::Missing("process"))?;
    adapt_process(&mut process, terminal)?;
    if process.capabilities().is_none() {
        process.set_capabilities(Some(process::no_capabilities()));
    }
    let mut linux = spec.linux().clone().ok_or(SpecError::Missing("linux"))?;

    let namespaces = own_namespaces(linux.namespaces().as_deref().unwrap_or_default())?;
    let user_namespace = has(&namespaces, LinuxNamespaceType::User);
    namespaces::check_users(&linux, process.user(), user_namespace)?;
    namespaces::check_clocks(&linux, has(&namespaces, LinuxNamespaceType::Time))?;
    if let Some(mut filter) = linux.seccomp().clone() {
        seccomp::fit(&mut filter)?;
        linux.set_seccomp(Some(filter));
    }
    let base = ExecBase {
        namespaces: clone_flags(&namespaces),
        capabilities: process.capabilities().clone(),
        seccomp: linux.seccomp().clone(),
        uid_mappings: linux.uid_mappings().clone().filter(|_| user_namespace),
        personality: linux.personality().clone(),
    };
    let (sysctls, own_sysctls) = sysctls(linux.sysctl().as_ref(), user_namespace)?;
    let resources = linux.resources().clone().unwrap_or_default();

    let mut late = LateMounts::default();
    if let Some(kind) = linux.rootfs_propagation().clone() {
        late.propagation = match kind.as_str() {
            "rshared" => Some(MsFlags::MS_SHARED | MsFlags::MS_REC),
            "runbindable" => Some(MsFlags::MS_UNBINDABLE | MsFlags::MS_REC),
            _ => None,
        };
        linux.set_rootfs_propagation(plain_propagation(&kind)?);
    }
    linux
        .set_namespaces(Some(namespaces))
        .set_cgroups_path(Some(PathBuf::from(cgroup)))
        .set_resources(None)
        .set_sysctl(Some(own_sysctls.into_iter().collect()));
    let read_only = spec.root().as_ref().and_then(|root| root.readonly());
    // The builder's own default is read-only, the specification's is not.
    let root = RootBuilder::default()
        .path(rootfs)
        .readonly(read_only.unwrap_or(false))
        .build()
        .map_err(|e| SpecError::Invalid("root", e.to_string()))?;
    let hostname = spec.hostname().clone().unwrap_or_default();
    let domainname = spec.domainname().clone().unwrap_or_default();
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    late.read_only = mounts::fit(&mut mounts, user_namespace)?;
    spec.set_root(Some(root))
        .set_process(Some(process))
        .set_linux(Some(linux))
        .set_mounts(Some(mounts))
        .set_hostname(None)
        .set_domainname(None);
    Ok(Adapted {
        spec,
        hostname,
        domainname,
        sysctls,
        resources,
        late,
        base,
    })
}

/// What belongs to another kind of system, or to the host.
fn refuse_foreign(spec: &Spec) -> Result<(), SpecError> {
    let unsupported = |field, reason| Err(SpecError::Unsupported { field, reason });
    if spec.solaris().is_some() || spec.windows().is_some() || spec.zos().is_some() {
        return unsupported("solaris, windows, zos", "the guest is Linux");
    }
    if spec.vm().is_some() {
        return unsupported("vm", "the machine is described elsewhere");
    }
    if let Some(hooks) = spec.hooks() {
        let none = |hooks: &Option<Vec<_>>| hooks.as_ref().is_none_or(Vec::is_empty);
        #[allow(deprecated, reason = "a prestart hook would be ignored otherwise")]
        let prestart = hooks.prestart();
        let of_the_host = [
            prestart,
            hooks.create_runtime(),
            hooks.poststart(),
            hooks.poststop(),
        ];
        if !of_the_host.into_iter().all(none) {
            return unsupported(
                "hooks",
                "prestart, createRuntime, poststart and poststop hooks run on the host",
            );
        }
    }
    let Some(linux) = spec.linux() else {
        return Ok(());
    };
    if linux.mount_label().as_ref().is_some_and(|l| !l.is_empty()) {
        return unsupported("linux.mountLabel", "the guest kernel has no SELinux");
    }
    if linux.intel_rdt().is_some() {
        return unsupported("linux.intelRdt", "the guest has no resctrl");
    }
    if linux.memory_policy().is_some() {
        return unsupported("linux.memoryPolicy", "the guest's memory has no nodes");
    }
    if linux.net_devices().as_ref().is_some_and(|d| !d.is_empty()) {
        return unsupported("linux.netDevices", "the guest's network is the pod's");
    }
    let personality = linux.personality().as_ref();
    if personality.is_some_and(|p| p.flags().as_ref().is_some_and(|flags| !flags.is_empty())) {
        return unsupported("linux.personality.flags", "there are none to choose from");
    }
    if let Some(seccomp) = linux.seccomp() {
        seccomp::check(seccomp)?;
    }
    check_devices(linux)
}

/// Whether /dev/null, which a container's programs rely on, is not to be something else.
fn check_devices(linux: &Linux) -> Result<(), SpecError> {
    let mut devices = linux.devices().iter().flatten();
    let null = devices.find(|device| clean(device.path()) == Path::new("/dev/null"));
    match null {
        Some(device)
            if (device.typ(), device.major(), device.minor()) != (LinuxDeviceType::C, 1, 3) =>
        {
            Err(SpecError::Invalid(
                "linux.devices",
                "/dev/null has the type c and the numbers 1 and 3".into(),
            ))
        }
        _ => Ok(()),
    }
}

/// Settings and their values.
type Sysctls = Vec<(String, String)>;

/// The settings of the pod, with slashes, and those of the container's own user namespace, with dots, which its init makes
/// there. Which ones there may be is what runc allows to a container with namespaces of its own.
fn sysctls(
    asked: Option<&HashMap<String, String>>,
    user_namespace: bool,
) -> Result<(Sysctls, Sysctls), SpecError> {
    const IPC: [&str; 8] = [
        "kernel/msgmax",
        "kernel/msgmnb",
        "kernel/msgmni",
        "kernel/sem",
        "kernel/shmall",
        "kernel/shmmax",
        "kernel/shmmni",
        "kernel/shm_rmid_forced",
    ];
    let (mut of_the_pod, mut own) = (Sysctls::new(), Sysctls::new());
    for (key, value) in asked.into_iter().flatten() {
        let path = sysctl_path(key);
        let of_users = path.starts_with("user/");
        let allowed = IPC.contains(&path.as_str())
            || path == "kernel/domainname"
            || path.starts_with("fs/mqueue/")
            || path.starts_with("net/")
            || (of_users && user_namespace);
        if !allowed || path.split('/').any(|part| part.is_empty() || part == "..") {
            return Err(SpecError::Sysctl(key.clone()));
        }
        if of_users {
            own.push((path.replace('/', "."), value.clone()));
        } else {
            of_the_pod.push((path, value.clone()));
        }
    }
    Ok((of_the_pod, own))
}

/// A key as a path below /proc/sys: as in sysctl(8), the first separator decides, and in a key with
/// dots a slash stands for a dot in a name (`net.ipv4.conf.eth0/100.forwarding`).
pub fn sysctl_path(key: &str) -> String {
    match key.find(['.', '/']) {
        Some(at) if key.as_bytes()[at] == b'.' => key
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                other => other,
            })
            .collect(),
        _ => key.to_owned(),
    }
}

/// libcontainer knows only the names without an `r`. What containerd sends has one.
fn plain_propagation(kind: &str) -> Result<Option<String>, SpecError> {
    match kind.strip_prefix('r').unwrap_or(kind) {
        "" => Ok(None),
        known @ ("private" | "shared" | "slave" | "unbindable") => Ok(Some(known.to_owned())),
        _ => Err(SpecError::Invalid(
            "linux.rootfsPropagation",
            format!(
                "{kind:?} is neither of private, shared, slave and unbindable nor one of them with an r before"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: serde_json::Value) -> Spec {
        serde_json::from_value(json).unwrap()
    }

    pub fn small() -> serde_json::Value {
        serde_json::json!({
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs", "readonly": true},
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "env": ["PATH=/bin"],
                        "cwd": "/", "noNewPrivileges": false},
            "hostname": "web-0",
            "linux": {
                "cgroupsPath": "/default/x",
                "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"},
                               {"type": "mount"}, {"type": "network", "path": "/proc/7/ns/net"}],
                "sysctl": {"net.core.somaxconn": "256", "kernel.shm_rmid_forced": "1"},
                "resources": {"pids": {"limit": 10}}
            }
        })
    }

    pub fn adapted(json: serde_json::Value) -> Result<Adapted, SpecError> {
        adapt(spec(json), Path::new("/run/rootfs"), "/pod/x", true)
    }

    #[test]
    fn network_ipc_and_uts_are_the_guests_own() {
        let adapted = adapted(small()).unwrap();
        let linux = adapted.spec.linux().as_ref().unwrap();
        let kinds: Vec<_> = linux
            .namespaces()
            .iter()
            .flatten()
            .map(oci_spec::runtime::LinuxNamespace::typ)
            .collect();
        assert_eq!(kinds, [LinuxNamespaceType::Pid, LinuxNamespaceType::Mount]);
        assert_eq!(
            adapted.base.namespaces,
            libc::CLONE_NEWPID | libc::CLONE_NEWNS
        );
        assert_eq!(adapted.hostname, "web-0");
        assert!(adapted.spec.hostname().is_none());
    }

    #[test]
    fn a_pid_namespace_with_a_path_is_the_pods() {
        let mut json = small();
        json["linux"]["namespaces"][0]["path"] = "/proc/9/ns/pid".into();
        assert_eq!(adapted(json).unwrap().base.namespaces, libc::CLONE_NEWNS);
    }

    #[test]
    fn root_cgroup_and_terminal_are_the_guests() {
        let adapted = adapted(small()).unwrap();
        let root = adapted.spec.root().as_ref().unwrap();
        assert_eq!(root.path(), Path::new("/run/rootfs"));
        assert_eq!(root.readonly(), Some(true));
        let linux = adapted.spec.linux().as_ref().unwrap();
        assert_eq!(linux.cgroups_path().as_deref(), Some(Path::new("/pod/x")));
        assert!(linux.resources().is_none());
        assert_eq!(adapted.resources.pids().as_ref().unwrap().limit(), 10);
        let process = adapted.spec.process().as_ref().unwrap();
        assert_eq!(process.terminal(), Some(true));
        assert_eq!(process.no_new_privileges(), None);
    }

    #[test]
    fn a_root_is_writable_unless_the_spec_says_otherwise() {
        let mut json = small();
        json["root"].as_object_mut().unwrap().remove("readonly");
        let adapted = adapted(json).unwrap();
        let root = adapted.spec.root().as_ref().unwrap();
        assert_eq!(root.readonly(), Some(false));
    }

    #[test]
    fn propagation_of_the_root_is_that_of_all_mounts_if_it_says_so() {
        for (asked, given, late) in [
            ("rslave", "slave", None),
            (
                "rshared",
                "shared",
                Some(MsFlags::MS_SHARED | MsFlags::MS_REC),
            ),
            ("shared", "shared", None),
            ("private", "private", None),
            (
                "runbindable",
                "unbindable",
                Some(MsFlags::MS_UNBINDABLE | MsFlags::MS_REC),
            ),
        ] {
            let mut json = small();
            json["linux"]["rootfsPropagation"] = asked.into();
            let adapted = adapted(json).unwrap();
            let linux = adapted.spec.linux().clone().unwrap();
            assert_eq!(linux.rootfs_propagation().as_deref(), Some(given));
            assert_eq!(adapted.late.propagation, late);
        }
    }

    #[test]
    fn the_pods_sysctls_are_set_guest_wide_and_others_refused() {
        let adapted_spec = adapted(small()).unwrap();
        let mut sysctls = adapted_spec.sysctls;
        sysctls.sort();
        assert_eq!(
            sysctls,
            [
                ("kernel/shm_rmid_forced".to_owned(), "1".to_owned()),
                ("net/core/somaxconn".to_owned(), "256".to_owned()),
            ]
        );
        for bad in [
            "kernel.core_pattern",
            "net.../../kernel/panic",
            "vm.swappiness",
        ] {
            let mut json = small();
            json["linux"]["sysctl"] = serde_json::json!({ bad: "1" });
            assert_eq!(adapted(json).unwrap_err(), SpecError::Sysctl(bad.into()));
        }
    }

    #[test]
    fn a_user_namespaces_settings_are_made_in_it() {
        let mut json = small();
        for key in ["user.max_uts_namespaces", "user/max_uts_namespaces"] {
            json["linux"]["sysctl"] = serde_json::json!({ key: "17" });
            let refusal = adapted(json.clone()).unwrap_err();
            assert_eq!(refusal, SpecError::Sysctl(key.into()));
        }
        let mapping = serde_json::json!([{"containerID": 0, "hostID": 1000, "size": 10}]);
        json["linux"]["namespaces"] = serde_json::json!([{"type": "mount"}, {"type": "user"}]);
        json["linux"]["uidMappings"] = mapping.clone();
        json["linux"]["gidMappings"] = mapping;
        let adapted = adapted(json).unwrap();
        assert!(adapted.sysctls.is_empty());
        let linux = adapted.spec.linux().clone().unwrap();
        let own = linux.sysctl().clone().unwrap();
        assert_eq!(own.get("user.max_uts_namespaces"), Some(&"17".to_owned()));
    }

    #[test]
    fn a_slash_in_a_dotted_key_is_a_dot_of_a_name() {
        assert_eq!(
            sysctl_path("net.ipv4.conf.eth0/1.forwarding"),
            "net/ipv4/conf/eth0.1/forwarding"
        );
        assert_eq!(
            sysctl_path("net/ipv4/conf/eth0.1/forwarding"),
            "net/ipv4/conf/eth0.1/forwarding"
        );
    }

    #[test]
    fn what_the_guest_cannot_do_is_refused_by_name() {
        let cases = [
            (
                "/process/apparmorProfile",
                serde_json::json!("p"),
                "process.apparmorProfile",
            ),
            (
                "/process/selinuxLabel",
                serde_json::json!("l"),
                "process.selinuxLabel",
            ),
            (
                "/linux/mountLabel",
                serde_json::json!("l"),
                "linux.mountLabel",
            ),
            (
                "/linux/intelRdt",
                serde_json::json!({"closID": "a"}),
                "linux.intelRdt",
            ),
            (
                "/linux/memoryPolicy",
                serde_json::json!({"mode": "MPOL_DEFAULT", "nodes": ""}),
                "linux.memoryPolicy",
            ),
            (
                "/linux/netDevices",
                serde_json::json!({"eth0": {}}),
                "linux.netDevices",
            ),
            (
                "/hooks",
                serde_json::json!({"poststop": [{"path": "/x"}]}),
                "hooks",
            ),
            (
                "/linux/personality",
                serde_json::json!({"domain": "LINUX", "flags": ["ADDR_NO_RANDOMIZE"]}),
                "linux.personality.flags",
            ),
            (
                "/linux/rootfsPropagation",
                serde_json::json!("wide"),
                "linux.rootfsPropagation",
            ),
            ("/process/cwd", serde_json::json!("x"), "process.cwd"),
            ("/process/args", serde_json::json!([]), "process.args"),
            ("/process/env", serde_json::json!(["X"]), "process.env"),
        ];
        for (pointer, value, name) in cases {
            let mut json = small();
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = value;
            let message = adapted(json).unwrap_err().to_string();
            assert!(message.contains(name), "{pointer}: {message}");
        }
    }
}
