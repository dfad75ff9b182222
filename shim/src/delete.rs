//! `delete`: cleans up after a daemon that is gone.
//!
//! containerd calls it after a normal delete as well, and for each container of a pod: what a
//! living daemon holds is left alone, what is gone already is no error.

use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::DeleteResponse;
use protobuf::{Message, MessageField};

use crate::bootstrap::{BootstrapError, check_name};
use crate::container::Exit;
use crate::flags::Flags;
use crate::hooks::Hooks;
use crate::logger;
use crate::mount::unmount;
use crate::publisher::timestamp;
use crate::spec::Spec;
use crate::state::{self, StateDir, StateError};

/// Why the clean-up is not complete.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// The container is not named.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The sandbox's directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// A mount in the bundle.
    #[error("Cannot unmount {0:?}: {1}")]
    Unmount(PathBuf, nix::errno::Errno),
    /// The answer.
    #[error("Cannot write the answer to standard output: {0}")]
    Answer(io::Error),
}

/// Carries out `delete` and prints the answer that containerd expects.
pub fn delete(flags: &Flags) -> Result<(), DeleteError> {
    check_name("id", &flags.id)?;
    check_name("namespace", &flags.namespace)?;
    logger::to_stderr(&flags.namespace, &flags.id, flags.debug);
    let bundle = flags
        .bundle
        .clone()
        .or_else(|| std::env::current_dir().ok())
        .unwrap_or_else(|| PathBuf::from("/"));
    clean_up(&flags.namespace, &flags.id, &bundle)?;
    let exit = Exit::killed();
    let answer = DeleteResponse {
        exit_status: exit.status,
        exited_at: MessageField::some(timestamp(exit.at)),
        ..Default::default()
    };
    answer
        .write_to_writer(&mut io::stdout().lock())
        .map_err(io::Error::from)
        .and_then(|()| io::stdout().flush())
        .map_err(DeleteError::Answer)
}

fn clean_up(namespace: &str, id: &str, bundle: &Path) -> Result<(), DeleteError> {
    let spec = Spec::read(bundle).ok();
    let group = spec
        .as_ref()
        .and_then(|spec| spec.group().map(str::to_owned));
    // A group that is no name is one that nothing was ever started for.
    let sandbox = group.filter(|group| check_name("group", group).is_ok());
    let path = StateDir::path_of(namespace, sandbox.as_deref().unwrap_or(id));
    match state::remove_dead(&path) {
        Ok(()) => {
            remove_socket(bundle);
            if let Some(spec) = &spec {
                run_hooks(spec, id, bundle);
            }
        }
        // The daemon lives, and cleans up itself when its tasks are deleted.
        Err(StateError::InUse(_)) => {}
        Err(e) => return Err(e.into()),
    }
    let rootfs = bundle.join("rootfs");
    unmount(&rootfs).map_err(|e| DeleteError::Unmount(rootfs, e))
}

/// Runs the hooks for a container's end that the daemon did not come to. What fails of them must not
/// keep the rest from being cleaned up.
fn run_hooks(spec: &Spec, id: &str, bundle: &Path) {
    let ran = Hooks::of(spec, id, bundle)
        .map_err(io::Error::other)
        .and_then(|hooks| hooks.stopped_after_a_crash());
    if let Err(e) = ran {
        log::warn!("Cannot run the poststop hooks of {id}: {e}");
    }
}

/// Removes the socket that the bundle's daemon served on, unless it is served on.
fn remove_socket(bundle: &Path) {
    let Ok(address) = std::fs::read_to_string(bundle.join("address")) else {
        return;
    };
    let Some(path) = address.strip_prefix("unix://").map(Path::new) else {
        return;
    };
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_dead_daemons_socket_is_removed_and_a_living_ones_is_not() {
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::write(bundle.path().join("address"), crate::socket::address(&path)).unwrap();
        remove_socket(bundle.path());
        assert!(path.exists());
        drop(listener);
        remove_socket(bundle.path());
        assert!(!path.exists());
        // Again, as containerd may.
        remove_socket(bundle.path());
    }

    #[test]
    fn poststop_hooks_that_a_dead_daemon_owed_run_and_those_that_ran_do_not_run_again() {
        let bundle = tempfile::tempdir().unwrap();
        let spec = serde_json::json!({"hooks": {"poststop": [
            {"path": "/bin/sh", "args": ["sh", "-c", "cat >>log"]}
        ]}});
        std::fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();
        let clean_up = || {
            clean_up("cube-test-namespace", "hooked", bundle.path()).unwrap();
            std::fs::read_to_string(bundle.path().join("log")).unwrap_or_default()
        };
        assert_eq!(clean_up(), "");
        std::fs::write(bundle.path().join("poststop-hooks-are-due"), "").unwrap();
        let log = clean_up();
        assert!(log.contains("\"status\":\"stopped\""), "{log}");
        assert_eq!(clean_up(), log);
    }

    #[test]
    fn a_clean_up_of_what_never_was_is_no_error() {
        let bundle = tempfile::tempdir().unwrap();
        clean_up("cube-test-namespace", "never-was", bundle.path()).unwrap();
        clean_up(
            "cube-test-namespace",
            "never-was",
            &bundle.path().join("gone"),
        )
        .unwrap();
    }
}
