//! Mounts of a specification, in libcontainer's words.

use std::path::{Component, Path, PathBuf};

use cube_agent_protocol::MOUNT_FLAGS;
use oci_spec::runtime::Mount;

use super::SpecError;

/// Checks and fits the mounts of a container. Returns the places in the list of those that are to become read-only when
/// all is made in them.
pub(super) fn fit(mounts: &mut [Mount], user_namespace: bool) -> Result<Vec<usize>, SpecError> {
    let mut read_only = Vec::new();
    for (at, mount) in mounts.iter_mut().enumerate() {
        check_place(mount)?;
        fit_options(mount)?;
        if take_read_only(mount) {
            read_only.push(at);
        }
        if user_namespace {
            bind_the_pods(mount);
        }
    }
    Ok(read_only)
}

/// Whether a mount is read-only in which places of other mounts may have to be made, or devices: it is not so any more.
/// libcontainer would make a tmpfs read-only at once, and `/dev` never.
fn take_read_only(mount: &mut Mount) -> bool {
    let is_fresh = mount.typ().as_deref() == Some("tmpfs") && !is_bind(mount);
    if !is_fresh && clean(mount.destination()) != Path::new("/dev") {
        return false;
    }
    let mut options = mount.options().clone().unwrap_or_default();
    let access = options.iter().rfind(|o| matches!(o.as_str(), "ro" | "rw"));
    let is_read_only = access.is_some_and(|access| access == "ro");
    options.retain(|option| option != "ro");
    mount.set_options(Some(options));
    is_read_only
}

/// Whether a mount binds what is there already.
pub fn is_bind(mount: &Mount) -> bool {
    let mut options = mount.options().iter().flatten();
    mount.typ().as_deref() == Some("bind") || options.any(|o| o == "bind" || o == "rbind")
}

/// A path without dots.
pub fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            _ => {}
        }
    }
    clean
}

/// Files of /proc that may be mounted over, as lxcfs does: those that runc allows.
const IN_PROC: [&str; 11] = [
    "cpuinfo",
    "diskstats",
    "loadavg",
    "meminfo",
    "net/dev",
    "slabinfo",
    "stat",
    "swaps",
    "sys/crypto/fips_enabled",
    "sys/kernel/ns_last_pid",
    "uptime",
];

fn check_place(mount: &Mount) -> Result<(), SpecError> {
    let destination = mount.destination();
    let refuse = |why: String| Err(SpecError::Invalid("mounts[].destination", why));
    if !destination.is_absolute() {
        return refuse(format!("{} is not absolute", destination.display()));
    }
    if clean(destination) == Path::new("/") {
        return refuse("the root is where root.path is mounted".into());
    }
    if is_bind(mount) && clean(destination) == Path::new("/dev") {
        return refuse("/dev cannot be bound: what all containers have there is made in it".into());
    }
    // What a container believes of processes must not come from somebody else.
    let is_proc = mount.typ().as_deref() == Some("proc");
    let place = clean(destination);
    if let Ok(inside) = place.strip_prefix("/proc")
        && !(is_proc && inside.as_os_str().is_empty())
        && !IN_PROC.iter().any(|name| inside == Path::new(name))
    {
        return refuse(format!(
            "{} cannot be mounted over in /proc",
            place.display()
        ));
    }
    Ok(())
}

/// Recursive options that take each other back.
const RECURSIVE: [[&str; 2]; 6] = [
    ["rro", "rrw"],
    ["rnosuid", "rsuid"],
    ["rnodev", "rdev"],
    ["rnoexec", "rexec"],
    ["rnodiratime", "rdiratime"],
    ["rnosymfollow", "rsymfollow"],
];

/// Puts options in libcontainer's words: what it does not know it would hand to the file system, or drop
/// with a bind; and of recursive options that contradict each other it does not take the last.
fn fit_options(mount: &mut Mount) -> Result<(), SpecError> {
    let Some(options) = mount.options() else {
        return Ok(());
    };
    let refuse = |option: &str, why: &str| {
        let place = mount.destination().display();
        Err(SpecError::Invalid(
            "mounts[].options",
            format!("{option:?} at {place} {why}"),
        ))
    };
    let is_bind = is_bind(mount);
    // libcontainer drops flags of a file system that it knows. With a value it does not know them, and hands them to
    // fsconfig(2), which looks at no value of a flag.
    const FLAGS: [(&str, &str, bool); 5] = [
        ("sync", "sync=1", true),
        ("async", "sync=1", false),
        ("dirsync", "dirsync=1", true),
        ("mand", "mand=1", true),
        ("nomand", "mand=1", false),
    ];
    let mut fitted: Vec<String> = Vec::with_capacity(options.len());
    let mut flags: Vec<&str> = Vec::new();
    let mut add = |option: &str| {
        if let Some(pair) = RECURSIVE.iter().find(|pair| pair.contains(&option)) {
            fitted.retain(|o| !pair.contains(&o.as_str()));
        }
        fitted.push(option.to_owned());
    };
    for option in options {
        if let Some((_, flag, on)) = FLAGS.iter().find(|(name, ..)| name == option) {
            flags.retain(|known| known != flag);
            // A bind has none of its own.
            if *on && !is_bind {
                flags.push(flag);
            }
            continue;
        }
        match option.as_str() {
            "nosymfollow" => add("rnosymfollow"),
            "symfollow" => add("rsymfollow"),
            // They change nothing of what the guest mounts: its file systems keep no versions of
            // inodes, and the kernel writes of mounts into its log alone.
            "iversion" | "noiversion" | "silent" | "loud" => {}
            // A bind has no such flags of its own.
            "lazytime" | "nolazytime" if is_bind => {}
            "lazytime" | "nolazytime" => add(option),
            "tmpcopyup" | "remount" => return refuse(option, "is not supported in a microVM"),
            other if is_bind && !MOUNT_FLAGS.contains(&other) => {
                return refuse(other, "is a file system's option, and a bind has none");
            }
            other => add(other),
        }
    }
    fitted.extend(flags.into_iter().map(str::to_owned));
    mount.set_options(Some(fitted));
    Ok(())
}

/// A user namespace may only mount the file systems of namespaces that are its own, and the pod's
/// network and IPC are not: it gets the guest's mounts of them.
fn bind_the_pods(mount: &mut Mount) {
    let source = match mount.typ().as_deref() {
        Some("sysfs") => "/sys",
        Some("mqueue") => "/dev/mqueue",
        _ => return,
    };
    let mut options = mount.options().clone().unwrap_or_default();
    options.push("rbind".into());
    mount
        .set_typ(Some("bind".into()))
        .set_source(Some(source.into()))
        .set_options(Some(options));
}

#[cfg(test)]
mod tests {
    use super::super::tests::{adapted, small};

    #[test]
    fn options_of_mounts_are_put_in_libcontainers_words() {
        let fitted = |options: &[&str]| {
            let mut json = small();
            json["mounts"] =
                serde_json::json!([{"destination": "/m", "type": "tmpfs", "options": options}]);
            adapted(json).map(|a| {
                a.spec.mounts().as_ref().unwrap()[0]
                    .options()
                    .clone()
                    .unwrap()
            })
        };
        assert_eq!(fitted(&["size=4k", "loud"]).unwrap(), ["size=4k"]);
        assert_eq!(
            fitted(&["nosymfollow", "ro", "rro", "rrw", "symfollow"]).unwrap(),
            ["rrw", "rsymfollow"]
        );
        assert_eq!(
            fitted(&["sync", "dirsync", "mand", "ro", "nomand", "async", "sync"]).unwrap(),
            ["dirsync=1", "sync=1"]
        );
        assert_eq!(fitted(&["rbind", "sync", "mand"]).unwrap(), ["rbind"]);
        for (options, word) in [
            (&["tmpcopyup"][..], "tmpcopyup"),
            (&["remount", "ro"], "remount"),
            (&["rbind", "size=4k"], "size=4k"),
        ] {
            let message = fitted(options).unwrap_err().to_string();
            assert!(
                message.contains(word) && message.contains("/m "),
                "{message}"
            );
        }
    }

    #[test]
    fn what_things_are_made_in_becomes_read_only_late() {
        for (destination, kind, options, is_late) in [
            ("/m", "tmpfs", &["ro"][..], true),
            ("/m", "tmpfs", &["ro", "rw"], false),
            ("/m", "tmpfs", &["rw", "ro", "size=4k"], true),
            ("/dev/", "devtmpfs", &["ro"], true),
            ("/sys", "sysfs", &["ro"], false),
            ("/m", "bind", &["rbind", "ro"], false),
        ] {
            let mut json = small();
            json["mounts"] = serde_json::json!([
                {"destination": "/first", "type": "tmpfs"}, {"destination": destination, "type": kind, "options": options},
            ]);
            let adapted = adapted(json).unwrap();
            let late: &[usize] = if is_late { &[1] } else { &[] };
            assert_eq!(adapted.late.read_only, late, "{destination} {options:?}");
            let mounts = adapted.spec.mounts().clone().unwrap();
            let options = mounts[1].options().clone().unwrap();
            assert!(!is_late || !options.contains(&"ro".to_owned()));
        }
    }

    #[test]
    fn the_root_and_what_tells_of_processes_is_not_mounted_over() {
        for (place, kind, fits) in [
            ("/proc", "proc", true),
            ("/proc/cpuinfo", "bind", true),
            ("/process", "tmpfs", true),
            ("/a/..", "tmpfs", false),
            ("/proc", "bind", false),
            ("/x/../dev", "bind", false),
            ("/dev", "tmpfs", true),
            ("/x/../proc/self", "tmpfs", false),
            ("/proc/sys", "proc", false),
        ] {
            let mut json = small();
            json["mounts"] = serde_json::json!([{"destination": place, "type": kind}]);
            assert_eq!(adapted(json).is_ok(), fits, "{place}");
        }
    }
}
