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
use crate::spec::is_bind;

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
    let with = match data(failed).as_str() {
        "" => String::new(),
        data => format!(" with {data:?}"),
    };
    Some(format!(
        "error mounting {:?} to rootfs at {:?}{with}: {cause}",
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
    let flags = if is_bind(failed) {
        MsFlags::MS_BIND
    } else {
        MsFlags::empty()
    };
    let data = data(failed);
    mount(
        failed.source().as_deref(),
        target,
        failed.typ().as_deref(),
        flags,
        Some(data.as_str()),
    )?;
    Ok(())
}

/// The options that are the file system's own.
fn data(mount: &Mount) -> String {
    let options = mount.options().iter().flatten().map(String::as_str);
    let own: Vec<_> = options
        .filter(|option| !MOUNT_FLAGS.contains(option))
        .collect();
    own.join(",")
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
    fn the_options_that_a_file_system_may_not_know_are_its_own() {
        let json = serde_json::json!({"destination": "/m", "options": ["ro", "mode=755", "nosuid", "fast"]});
        assert_eq!(
            data(&serde_json::from_value(json).unwrap()),
            "mode=755,fast"
        );
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
