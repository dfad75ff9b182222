//! Building a container.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::container::{ContainerStatus, State};
use libcontainer::syscall::syscall::SyscallType;
use nix::unistd::Uid;
use oci_spec::runtime::{LinuxIdMapping, Mount, Spec};

use super::child::{ChildError, Control};
use super::executor::{InitExecutor, StartHooks, in_words};
use super::{
    BlockNumbers, CreateOrder, EXEC_BASE, id_map, limits, mount_error, mount_flags, nodes, priority,
};
use crate::cgroup::Cgroup;
use crate::renumber;
use crate::spec::{self, Adapted, clean, is_bind};

/// The directory below the container's in which libcontainer keeps its state, in a directory with the
/// container's name.
pub const STATE: &str = "state";

/// The socket below the container's directory on which a terminal's master is handed over.
pub const CONSOLE_SOCKET: &str = "console.sock";

/// How libcontainer's line in its log begins when a hook that it runs before a container's start has failed.
const HOOK_FAILED: &str = "failed to run create container hooks err=";

/// Builds a container up to where its init waits to be started. Returns the init's PID. What a
/// failure leaves is the agent's to clean up.
pub fn create(order: &CreateOrder, document: &[u8], control: &Control) -> Result<i32, ChildError> {
    let spec = read(document, &order.block_devices)
        .map_err(|e| ChildError::Invalid(format!("cannot read the runtime specification: {e}")))?;
    let adapted = spec::adapt(spec, &order.rootfs, &order.cgroup, order.terminal)
        .map_err(|e| ChildError::Invalid(e.to_string()))?;
    check_sources(&adapted.spec)?;
    set_pod_names(&adapted)?;
    let cgroup = Cgroup::create(&order.cgroup)
        .map_err(|e| ChildError::failed("cannot make the cgroup", crate::error::chain(&e)))?;
    build(order, adapted, &cgroup, control)
}

/// The specification, with the numbers that its disks have here.
fn read(document: &[u8], disks: &[BlockNumbers]) -> Result<Spec, spec::DocumentError> {
    if disks.is_empty() {
        return spec::read(document);
    }
    let mut renumbered = serde_json::from_slice(document)?;
    renumber::specification(&mut renumbered, disks);
    Ok(spec::of_tree(renumbered)?)
}

fn build(
    order: &CreateOrder,
    mut adapted: Adapted,
    cgroup: &Cgroup,
    control: &Control,
) -> Result<i32, ChildError> {
    let process = adapted
        .spec
        .process()
        .clone()
        .ok_or_else(|| ChildError::Invalid("the specification has no process".into()))?;
    cgroup
        .apply(&adapted.resources)
        .and_then(|()| cgroup.allow_devices(adapted.resources.devices().as_deref()))
        .map_err(|e| {
            let message = crate::error::chain(&e);
            if e.is_invalid() {
                ChildError::Invalid(message)
            } else {
                ChildError::Failed(message)
            }
        })?;
    priority::try_out(&process).map_err(during_init)?;
    limits::raise(&process).map_err(during_init)?;
    make_working_directory(&adapted.spec, &order.rootfs, process.cwd())?;
    nodes::provide(&mut adapted.spec, &order.rootfs, &order.dir)?;
    if let Some(mounts) = adapted.spec.mounts_mut() {
        keep_modes(mounts, &order.rootfs);
    }
    let owner = guest_id(adapted.base.uid_mappings.as_deref(), process.user().uid());
    give_streams(owner)?;
    // libcontainer looks a missing HOME up by getpwuid(3), which in a static program loads the
    // container's own NSS modules into this process. The executor has the real environment.
    if let Some(process) = adapted.spec.process_mut() {
        process.set_env(Some(vec!["HOME=/".into()]));
    }
    let start_hooks = take_start_hooks(&mut adapted.spec, order);
    write(&order.dir.join("config.json"), &adapted.spec)?;
    write(&order.dir.join(EXEC_BASE), &adapted.base)?;
    if has_many_ranges(&adapted.spec) {
        id_map::provide(&order.dir)
            .map_err(|e| ChildError::failed("cannot make newuidmap and newgidmap", e))?;
    }
    let state = order.dir.join(STATE);
    fs::create_dir(&state).map_err(|e| ChildError::failed("cannot make a directory", e))?;

    if order.terminal {
        control
            .building(owner)
            .map_err(|e| ChildError::failed("cannot report", e))?;
    }
    let console = order.terminal.then(|| order.dir.join(CONSOLE_SOCKET));
    let container = ContainerBuilder::new(order.id.clone(), SyscallType::Linux)
        .with_executor(InitExecutor::new(process, start_hooks, control.clone()))
        .with_console_socket(console)
        .with_root_path(&state)
        .map(|builder| {
            builder
                .as_init(&order.dir)
                .with_systemd(false)
                .with_detach(true)
        })
        .and_then(|builder| builder.build())
        .map_err(|e| {
            let message = crate::error::chain(&e);
            let Some(first) = crate::logger::first_error() else {
                return during_init(ChildError::Failed(message));
            };
            let mounts = adapted.spec.mounts().as_deref().unwrap_or_default();
            if let Some(cause) = first.strip_prefix(HOOK_FAILED) {
                return during_init(ChildError::Failed(format!(
                    "error running a hook of hooks.createContainer: {cause}"
                )));
            }
            let told = format!("{first} ({message})");
            during_init(match mount_error::explain(&first, mounts, &order.dir) {
                Some(message) => ChildError::Invalid(message),
                None => match field_of(&first) {
                    Some(field) => ChildError::Invalid(format!("{field} cannot be had: {told}")),
                    None => ChildError::Failed(told),
                },
            })
        })?;
    let init = container
        .pid()
        .map(nix::unistd::Pid::as_raw)
        .ok_or_else(|| ChildError::Failed("the container has no init".into()))?;
    mount_flags::settle(&adapted.spec, &adapted.late, init).map_err(during_init)?;
    Ok(init)
}

/// Takes the hooks that the executor runs out of the specification.
fn take_start_hooks(spec: &mut Spec, order: &CreateOrder) -> StartHooks {
    let mut state = State::new(&order.id, ContainerStatus::Created, None, order.dir.clone());
    state.annotations.clone_from(spec.annotations());
    let mut list = Vec::new();
    if let Some(hooks) = spec.hooks_mut() {
        list = hooks.start_container().clone().unwrap_or_default();
        hooks.set_start_container(None);
    }
    StartHooks { list, state }
}

/// The field that an error of libcontainer's log is about, which does not say so.
fn field_of(error: &str) -> Option<&'static str> {
    const FIELDS: [(&str, &str); 5] = [
        ("error setting scheduler", "process.scheduler"),
        ("failed to set io_priority", "process.ioPriority"),
        ("failed to set rlimit", "process.rlimits"),
        ("failed to chdir", "process.cwd"),
        (
            "gid is specified as supplementary group",
            "process.user.additionalGids",
        ),
    ];
    let found = FIELDS.iter().find(|(line, _)| error.starts_with(line));
    found.map(|(_, field)| *field)
}

/// Whether libcontainer needs programs to map the user namespace's users or groups.
fn has_many_ranges(spec: &Spec) -> bool {
    let linux = spec.linux().as_ref();
    let many = |mappings: Option<&Vec<LinuxIdMapping>>| mappings.is_some_and(|m| m.len() > 1);
    linux.is_some_and(|linux| {
        many(linux.uid_mappings().as_ref()) || many(linux.gid_mappings().as_ref())
    })
}

/// An error as runc words it.
pub fn during_init(error: ChildError) -> ChildError {
    const WHERE: &str = "unable to start container process: error during container init";
    match error {
        ChildError::Invalid(message) => ChildError::Invalid(format!("{WHERE}: {message}")),
        ChildError::Failed(message) => ChildError::Failed(format!("{WHERE}: {message}")),
        ChildError::Reported => error,
    }
}

fn write(path: &Path, document: &impl serde::Serialize) -> Result<(), ChildError> {
    let write = || -> io::Result<()> {
        let mut file = io::BufWriter::new(fs::File::create(path)?);
        serde_json::to_writer(&mut file, document)?;
        file.flush()
    };
    write().map_err(|e| ChildError::failed(format_args!("cannot write {}", path.display()), e))
}

/// What is missing outside of the container is said before anything is built.
fn check_sources(spec: &Spec) -> Result<(), ChildError> {
    let root = spec.root().as_ref().map(|root| root.path().clone());
    let root = root.unwrap_or_default();
    if !root.is_dir() {
        return Err(ChildError::Invalid(format!(
            "rootfs {} does not exist or is not a directory",
            root.display()
        )));
    }
    for mount in spec.mounts().iter().flatten().filter(|m| is_bind(m)) {
        let Some(source) = mount.source() else {
            continue;
        };
        if let Err(error) = fs::metadata(source) {
            return Err(during_init(ChildError::Invalid(format!(
                "error mounting {:?} to rootfs at {:?}: stat {}: {}",
                source.display().to_string(),
                mount.destination().display().to_string(),
                source.display(),
                in_words(&error)
            ))));
        }
    }
    Ok(())
}

/// A tmpfs that names no mode has that of the directory it is mounted over, as runc has it, if it is the
/// root file system's.
fn keep_modes(mounts: &mut [Mount], rootfs: &Path) {
    let places: Vec<_> = mounts.iter().map(|m| m.destination().clone()).collect();
    for (at, mount) in mounts.iter_mut().enumerate() {
        let mut options = mount.options().clone().unwrap_or_default();
        let place = mount.destination();
        let covered = places[..at]
            .iter()
            .any(|p| place.starts_with(p) && place != p);
        let named = options.iter().any(|option| option.starts_with("mode="));
        if mount.typ().as_deref() != Some("tmpfs") || is_bind(mount) || covered || named {
            continue;
        }
        if let Ok(mode) = crate::inside::mode_of(rootfs, place) {
            options.push(format!("mode={mode:o}"));
            mount.set_options(Some(options));
        }
    }
}

/// Host name, domain name and sysctls of the pod.
fn set_pod_names(adapted: &Adapted) -> Result<(), ChildError> {
    if !adapted.hostname.is_empty() {
        nix::unistd::sethostname(&adapted.hostname)
            .map_err(|e| ChildError::failed("cannot set the host name", e))?;
    }
    if !adapted.domainname.is_empty() {
        crate::configure::set_domainname(&adapted.domainname)
            .map_err(|e| ChildError::failed("cannot set the domain name", e))?;
    }
    for (key, value) in &adapted.sysctls {
        crate::configure::set_sysctl(key, value).map_err(|e| {
            ChildError::Invalid(format!("cannot set sysctl {key} to {value:?}: {e}"))
        })?;
    }
    Ok(())
}

/// runc makes a missing working directory, and images rely on it. It is made in the root file
/// system, or in what will be mounted over it, by root of the container.
fn make_working_directory(spec: &Spec, rootfs: &Path, cwd: &Path) -> Result<(), ChildError> {
    let mounts = spec.mounts().iter().flatten();
    let covering = mounts
        .filter(|mount| cwd.starts_with(mount.destination()))
        .max_by_key(|mount| mount.destination().components().count());
    let (root, path) = match covering {
        None => (rootfs, cwd),
        Some(mount) if mount.typ().as_deref() == Some("tmpfs") && !is_bind(mount) => {
            let mut places = spec.mounts().iter().flatten().map(Mount::destination);
            if places.any(|place| place.starts_with(cwd))
                || clean(cwd) == clean(mount.destination())
            {
                return Ok(());
            }
            return Err(ChildError::Invalid(format!(
                "process.cwd is not valid: {} is not in the new tmpfs at {}",
                cwd.display(),
                mount.destination().display()
            )));
        }
        // What another fresh file system holds is up to the kernel.
        Some(mount) if !is_bind(mount) => return Ok(()),
        Some(mount) => match (mount.source(), cwd.strip_prefix(mount.destination())) {
            (Some(source), Ok(rest)) => (source.as_path(), rest),
            _ => return Ok(()),
        },
    };
    let relative: PathBuf = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_)))
        .collect();
    if relative.as_os_str().is_empty() || !root.is_dir() {
        return Ok(());
    }
    let linux = spec.linux().as_ref();
    let root_of = |mappings: Option<&Vec<LinuxIdMapping>>| guest_id(mappings.map(Vec::as_slice), 0);
    let owner = (
        root_of(linux.and_then(|l| l.uid_mappings().as_ref())),
        root_of(linux.and_then(|l| l.gid_mappings().as_ref())),
    );
    match crate::inside::make_directories(root, &relative, owner) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(ChildError::Invalid(format!(
                "process.cwd is not valid: {} is not a directory, or not in one",
                cwd.display()
            )))
        }
        // Another path that cannot be made shows when the container's init changes to it.
        made => {
            if let Err(error) = made {
                log::debug!("the working directory {}: {error}", path.display());
            }
            Ok(())
        }
    }
}

/// The guest's number of a container's user or group.
pub fn guest_id(mappings: Option<&[LinuxIdMapping]>, id: u32) -> u32 {
    mappings
        .unwrap_or_default()
        .iter()
        .find_map(|m| {
            let offset = id.checked_sub(m.container_id())?;
            (offset < m.size()).then(|| m.host_id().checked_add(offset))?
        })
        .unwrap_or(id)
}

/// Gives the pipes among the standard streams to the process's user, who may want to open
/// /dev/stdout again. /dev/null stays everybody's.
pub fn give_streams(owner: u32) -> Result<(), ChildError> {
    if owner == 0 {
        return Ok(());
    }
    let give = |stream| -> io::Result<()> {
        if fs::metadata(format!("/proc/self/fd/{stream}"))?
            .file_type()
            .is_fifo()
        {
            nix::unistd::fchown(stream, Some(Uid::from_raw(owner)), None)?;
        }
        Ok(())
    };
    (0..3)
        .try_for_each(give)
        .map_err(|e| ChildError::failed("cannot give a stream away", e))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use oci_spec::runtime::LinuxIdMappingBuilder;

    use super::*;

    #[test]
    fn a_tmpfs_without_a_mode_has_that_of_the_directory_below() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        fs::set_permissions(dir.path().join("tmp"), PermissionsExt::from_mode(0o1750)).unwrap();
        let mut mounts: Vec<Mount> = serde_json::from_value(serde_json::json!([
            {"destination": "/tmp", "type": "tmpfs"},
            {"destination": "/tmp", "type": "tmpfs", "options": ["mode=700"]},
            {"destination": "/new", "type": "tmpfs"},
            {"destination": "/tmp", "type": "bind", "options": ["bind"]},
        ]))
        .unwrap();
        keep_modes(&mut mounts, dir.path());
        let options: Vec<_> = mounts
            .iter()
            .map(|m| m.options().iter().flatten().collect::<Vec<_>>())
            .collect();
        assert_eq!(
            options,
            [vec!["mode=1750"], vec!["mode=700"], vec![], vec!["bind"]]
        );
    }

    #[test]
    fn a_working_directory_is_made_unless_a_file_is_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let spec = Spec::default();
        let make = |cwd: &str| make_working_directory(&spec, dir.path(), Path::new(cwd));
        make("/a/b").unwrap();
        assert!(dir.path().join("a/b").is_dir());
        for cwd in ["/file", "/file/below"] {
            let message = make(cwd).unwrap_err().to_string();
            assert!(message.starts_with("process.cwd "), "{message}");
        }
    }

    #[test]
    fn a_containers_user_has_a_number_in_the_guest() {
        let mapping = |container: u32, host: u32, size: u32| {
            LinuxIdMappingBuilder::default()
                .container_id(container)
                .host_id(host)
                .size(size)
                .build()
                .unwrap()
        };
        let mappings = [mapping(0, 1000, 1), mapping(1, 100_000, 65_535)];
        assert_eq!(guest_id(None, 33), 33);
        assert_eq!(guest_id(Some(&mappings), 0), 1000);
        assert_eq!(guest_id(Some(&mappings), 33), 100_032);
        assert_eq!(guest_id(Some(&mappings), 70_000), 70_000);
        assert_eq!(guest_id(Some(&[mapping(0, u32::MAX, 5)]), 3), 3);
    }
}
