//! Finding out why a mount failed.
//!
//! libcontainer says in its log which mount failed, but not why. So the mount is tried once more, in
//! a mount namespace that goes away with this helper, and the kernel is asked again.

use std::io;
use std::path::Path;

use cube_agent_protocol::MOUNT_FLAGS;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use oci_spec::runtime::Mount;

use super::executor::in_words;

/// If `log` is libcontainer's line about one of the mounts: the words of runc for it, with the
/// kernel's reason. `target` is a directory to try the mount on.
pub fn explain(log: &str, mounts: &[Mount], target: &Path) -> Option<String> {
    let failed = log
        .strip_prefix("failed to mount Mount { destination: ")
        .and_then(|rest| mounts.iter().find(|m| names(rest, m)))?;
    let source = failed.source().clone().unwrap_or_default();
    let cause = match try_again(failed, target) {
        Err(error) => in_words(&error),
        // What failed was not the mount itself but its place in the container.
        Ok(()) => "the destination cannot be used".into(),
    };
    Some(format!(
        "error mounting {:?} to rootfs at {:?}: {cause}",
        source.display().to_string(),
        failed.destination().display().to_string(),
    ))
}

fn names(rest: &str, mount: &Mount) -> bool {
    let destination = format!("{:?},", mount.destination());
    rest.starts_with(&destination)
}

fn try_again(failed: &Mount, target: &Path) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let options = failed.options().as_deref().unwrap_or_default();
    let data: Vec<&str> = options
        .iter()
        .map(String::as_str)
        .filter(|option| !MOUNT_FLAGS.contains(option))
        .collect();
    let bind = options
        .iter()
        .any(|option| option == "bind" || option == "rbind");
    let flags = if bind {
        MsFlags::MS_BIND
    } else {
        MsFlags::empty()
    };
    let data = data.join(",");
    mount(
        failed.source().as_deref(),
        target,
        failed.typ().as_deref(),
        flags,
        Some(data.as_str()),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use libcontainer::syscall::linux::{MountOption, MountRecursive};

    use super::*;

    #[test]
    fn the_options_that_are_flags_are_those_that_libcontainer_takes_for_flags() {
        for option in MOUNT_FLAGS {
            let known =
                MountOption::from_str(option).is_ok() || MountRecursive::from_str(option).is_ok();
            assert!(known, "{option}");
        }
        for option in ["iversion", "silent", "size=1m", "idmap"] {
            assert!(!MOUNT_FLAGS.contains(&option), "{option}");
            assert!(MountOption::from_str(option).is_err(), "{option}");
            assert!(MountRecursive::from_str(option).is_err(), "{option}");
        }
    }

    #[test]
    fn only_a_line_about_a_mount_is_explained() {
        let mounts: Vec<Mount> = serde_json::from_value(serde_json::json!([
            {"destination": "/data", "type": "tmpfs", "source": "x"}
        ]))
        .unwrap();
        let line = |destination: &str| {
            format!("failed to mount Mount {{ destination: {destination:?}, typ: None")
        };
        let named = |line: &str| {
            line.strip_prefix("failed to mount Mount { destination: ")
                .is_some_and(|rest| names(rest, &mounts[0]))
        };
        assert!(named(&line("/data")));
        assert!(!named(&line("/data2")));
        assert!(explain("failed to pivot root", &mounts, Path::new("/")).is_none());
        assert!(explain(&line("/other"), &mounts, Path::new("/")).is_none());
    }
}
