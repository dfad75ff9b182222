//! `delete`: cleans up after a daemon that is gone.
//!
//! containerd calls it after a normal delete as well, and for each container of a pod: what a
//! living daemon holds is left alone, what is gone already is no error.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::DeleteResponse;
use protobuf::{Message, MessageField};

use crate::bootstrap::{BootstrapError, check_name};
use crate::container::Exit;
use crate::flags::Flags;
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
    let group = Spec::read(bundle)
        .ok()
        .and_then(|spec| spec.group().map(str::to_owned));
    // A group that is no name is one that nothing was ever started for.
    let sandbox = group.filter(|group| check_name("group", group).is_ok());
    let path = StateDir::path_of(namespace, sandbox.as_deref().unwrap_or(id));
    match state::remove_dead(&path) {
        // The daemon lives, and cleans up itself when its tasks are deleted.
        Ok(()) | Err(StateError::InUse(_)) => {}
        Err(e) => return Err(e.into()),
    }
    let rootfs = bundle.join("rootfs");
    unmount(&rootfs).map_err(|e| DeleteError::Unmount(rootfs, e))
}
