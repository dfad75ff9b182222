//! OCI hooks of the runtime's namespaces: programs of the host that are run at points of a
//! container's life, with the container's state as JSON on standard input.
//!
//! The process id in that state is the hypervisor's: a real process that lives in the pod's network
//! namespace, which is what hooks that set up a network look for. Hooks of the container's namespaces
//! (`createContainer`, `startContainer`) are the guest's: see [`guest`].
//!
//! Once the first hook of a container may have run its `poststop` hooks are owed, and a note in the
//! bundle says so: `delete` pays what a shim that died owed.

pub mod guest;
mod run;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::spec::Spec;
use run::run;

/// The note in a bundle that the container's `poststop` hooks are to be run.
const NOTE: &str = "poststop-hooks-are-due";

/// Why a hook failed, or cannot be run at all.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// `hooks` is not what the specification says.
    #[error("The specification's hooks cannot be read: {0}")]
    Malformed(serde_json::Error),
    /// A path that is not absolute.
    #[error("The path {path:?} of the {kind} hook #{number} is not absolute")]
    NotAbsolute {
        /// The list that it is in.
        kind: &'static str,
        /// Its place there.
        number: usize,
        /// Its path.
        path: PathBuf,
    },
    /// A time-out that is no time.
    #[error("The timeout of the {kind} hook #{number} is not greater than zero")]
    NoTime {
        /// The list that it is in.
        kind: &'static str,
        /// Its place there.
        number: usize,
    },
    /// A variable without a value.
    #[error("The {kind} hook #{number} has {variable:?} in its environment, which has no \"=\"")]
    Variable {
        /// The list that it is in.
        kind: &'static str,
        /// Its place there.
        number: usize,
        /// What stands there.
        variable: String,
    },
    /// The note cannot be made.
    #[error("Cannot write {0:?}, the note that poststop hooks are due: {1}")]
    Note(PathBuf, io::Error),
    /// It ran and failed, or did not run. In the words of runc's users.
    #[error("error running {kind} hook #{number}: {cause}")]
    Failed {
        /// The list that it is in.
        kind: &'static str,
        /// Its place there.
        number: usize,
        /// What happened, with the end of what it wrote.
        cause: String,
    },
}

/// One hook, as the specification has it.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Hook {
    path: PathBuf,
    /// With the name that the program sees itself by as the first; empty: its path.
    #[serde(default)]
    args: Vec<String>,
    /// `NAME=VALUE`; without any the shim's own environment, as with runc.
    #[serde(default)]
    env: Vec<String>,
    /// In seconds.
    #[serde(default)]
    timeout: Option<i64>,
}

impl Hook {
    fn limit(&self) -> Option<Duration> {
        let seconds = u64::try_from(self.timeout?).ok()?;
        Some(Duration::from_secs(seconds))
    }

    fn check(&self, kind: &'static str, number: usize) -> Result<(), HookError> {
        if !self.path.is_absolute() {
            let path = self.path.clone();
            return Err(HookError::NotAbsolute { kind, number, path });
        }
        if self.timeout.is_some_and(|seconds| seconds <= 0) {
            return Err(HookError::NoTime { kind, number });
        }
        match self.env.iter().find(|variable| !variable.contains('=')) {
            None => Ok(()),
            Some(variable) => Err(HookError::Variable {
                kind,
                number,
                variable: variable.clone(),
            }),
        }
    }
}

/// The lists of the runtime's namespaces, in the order of a container's life.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Lists {
    prestart: Option<Vec<Hook>>,
    create_runtime: Option<Vec<Hook>>,
    poststart: Option<Vec<Hook>>,
    poststop: Option<Vec<Hook>>,
}

/// The container's state as hooks get it (the runtime specification's "State").
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct State<'a> {
    oci_version: &'a str,
    id: &'a str,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    bundle: &'a Path,
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    annotations: &'a HashMap<String, String>,
}

/// A container's hooks on the host.
#[derive(Debug, Default)]
pub struct Hooks {
    prestart: Vec<Hook>,
    create_runtime: Vec<Hook>,
    poststart: Vec<Hook>,
    poststop: Vec<Hook>,
    oci_version: String,
    id: String,
    bundle: PathBuf,
    annotations: HashMap<String, String>,
}

impl Hooks {
    /// The hooks of the container `id`, whose specification is `spec`.
    pub fn of(spec: &Spec, id: &str, bundle: &Path) -> Result<Self, HookError> {
        let Some(hooks) = spec.hooks() else {
            return Ok(Self::default());
        };
        let lists = Lists::deserialize(hooks).map_err(HookError::Malformed)?;
        let checked = |kind, list: Option<Vec<Hook>>| -> Result<_, HookError> {
            let list = list.unwrap_or_default();
            for (number, hook) in list.iter().enumerate() {
                hook.check(kind, number)?;
            }
            Ok(list)
        };
        Ok(Self {
            prestart: checked("prestart", lists.prestart)?,
            create_runtime: checked("createRuntime", lists.create_runtime)?,
            poststart: checked("poststart", lists.poststart)?,
            poststop: checked("poststop", lists.poststop)?,
            oci_version: spec.oci_version().to_owned(),
            id: id.to_owned(),
            bundle: bundle.to_owned(),
            annotations: spec.annotations(),
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        [
            &self.prestart,
            &self.create_runtime,
            &self.poststart,
            &self.poststop,
        ]
        .iter()
        .all(|list| list.is_empty())
    }

    /// The container's namespaces are there, its root file system is not yet its own. From now on
    /// the `poststop` hooks are owed. `pid` is a process in the pod's network namespace.
    pub async fn creating(&self, pid: u32) -> Result<(), HookError> {
        if !self.poststop.is_empty() {
            let note = self.note();
            fs::write(&note, "").map_err(|e| HookError::Note(note, e))?;
        }
        let state = self.state("creating", Some(pid));
        self.run_all("prestart", &self.prestart, &state).await?;
        self.run_all("createRuntime", &self.create_runtime, &state)
            .await
    }

    /// The user's program runs.
    pub async fn running(&self, pid: u32) -> Result<(), HookError> {
        let state = self.state("running", Some(pid));
        self.run_all("poststart", &self.poststart, &state).await
    }

    /// The container is gone: runs the `poststop` hooks, if they are owed. What fails of them is
    /// logged and stops nothing.
    pub async fn stopped(&self) {
        let note = self.note();
        if self.poststop.is_empty() || !note.exists() {
            return;
        }
        let state = self.state("stopped", None);
        for (number, hook) in self.poststop.iter().enumerate() {
            if let Err(e) = self.run_one("poststop", number, hook, &state).await {
                log::warn!("Container {}: {e}", self.id);
            }
        }
        // Afterwards: they rather run twice than never, should this process be killed meanwhile.
        if let Err(e) = fs::remove_file(&note) {
            log::warn!("Cannot remove {}: {e}", note.display());
        }
    }

    /// The same for a shim that died, in a process without an event loop.
    pub fn stopped_after_a_crash(&self) -> io::Result<()> {
        if self.poststop.is_empty() || !self.note().exists() {
            return Ok(());
        }
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(self.stopped());
        Ok(())
    }

    fn note(&self) -> PathBuf {
        self.bundle.join(NOTE)
    }

    fn state(&self, status: &'static str, pid: Option<u32>) -> Vec<u8> {
        let state = State {
            oci_version: &self.oci_version,
            id: &self.id,
            status,
            pid,
            bundle: &self.bundle,
            annotations: &self.annotations,
        };
        // Strings and a number: nothing in it can fail to be written.
        serde_json::to_vec(&state).unwrap_or_default()
    }

    /// Runs a list up to the first that fails.
    async fn run_all(
        &self,
        kind: &'static str,
        list: &[Hook],
        state: &[u8],
    ) -> Result<(), HookError> {
        for (number, hook) in list.iter().enumerate() {
            self.run_one(kind, number, hook, state).await?;
        }
        Ok(())
    }

    async fn run_one(
        &self,
        kind: &'static str,
        number: usize,
        hook: &Hook,
        state: &[u8],
    ) -> Result<(), HookError> {
        log::debug!("{kind} hook #{number} of {}: {:?}", self.id, hook.path);
        run(hook, state, &self.bundle)
            .await
            .map_err(|cause| HookError::Failed {
                kind,
                number,
                cause,
            })
    }
}

#[cfg(test)]
mod tests;
