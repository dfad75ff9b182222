//! Making processes in a process of its own.
//!
//! Building a container forks, waits, changes namespaces and blocks; PID 1 must do none of that.
//! So the agent runs its own binary once more for each create and each exec: the helper. It reads
//! its [`Order`] from a memory file, does the work with the new process's streams as its own, and
//! reports over a packet socket. Then it waits for a word, and exits: what it made becomes a child
//! of PID 1 only after PID 1 has registered it (see `reaper`).
//!
//! [`parent`] is the agent's half, [`child`] the helper's.

pub mod child;
pub mod create;
mod exec;
mod executor;
pub mod id_map;
mod limits;
mod mount_error;
mod mount_flags;
mod nodes;
pub mod parent;
mod priority;
pub mod terminal;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The name under which the agent's binary is a helper.
pub const HELPER_NAME: &str = "cube-agent-helper";

/// What a helper is to do. The JSON document that belongs to it follows in the same file.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Build a container from a runtime specification.
    Create(CreateOrder),
    /// Start a process in a container from a process object.
    Exec(ExecOrder),
}

impl Order {
    /// The helper's PATH. It is libcontainer's, which finds the programs of [`id_map`] by it; the container's
    /// processes have the one of their specification.
    pub fn search_path(&self) -> Option<(&'static str, &Path)> {
        match self {
            Self::Create(order) => Some(("PATH", &order.dir)),
            Self::Exec(_) => None,
        }
    }
}

/// The particulars of a create.
#[derive(Debug, Serialize, Deserialize)]
pub struct CreateOrder {
    /// The container's name.
    pub id: String,
    /// The container's directory (see `container`), empty.
    pub dir: PathBuf,
    /// The root file system.
    pub rootfs: PathBuf,
    /// The path of the container's cgroup below the root cgroup, absolute.
    pub cgroup: String,
    /// Whether the process gets a terminal.
    pub terminal: bool,
    /// The disks among its devices.
    pub block_devices: Vec<BlockNumbers>,
}

/// A disk's device numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockNumbers {
    /// Major and minor on the host, which the specification has.
    pub host: (i64, i64),
    /// Major and minor here.
    pub guest: (i64, i64),
}

/// The particulars of an exec. The descriptor of the container's init comes by inheritance.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExecOrder {
    /// The container's directory.
    pub dir: PathBuf,
    /// The path of the container's cgroup below the root cgroup, absolute.
    pub cgroup: String,
    /// The init's PID.
    pub init: i32,
    /// The terminal's size in columns and rows, if there is to be one.
    pub terminal: Option<(u16, u16)>,
}

/// What a helper, or the process it makes, reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// A container's init with a terminal is about to be made.
    Building {
        /// The guest's UID of the terminal's owner.
        owner: u32,
    },
    /// The terminal's master is beside this message.
    Terminal,
    /// The process is there.
    Made {
        /// Its PID as PID 1 sees it.
        pid: i32,
    },
    /// It did not work.
    Failed {
        /// Whether the request cannot be carried out as it is, or else something broke.
        invalid: bool,
        /// One line, in the words that runc's users know.
        message: String,
    },
}

/// What of a container its later execs must know; `exec.json` in its directory.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ExecBase {
    /// `CLONE_NEW*` flags of the namespaces that are not the guest's own.
    pub namespaces: i32,
    /// The capabilities of the container's init, for processes that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<oci_spec::runtime::LinuxCapabilities>,
    /// The container's filter for system calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<oci_spec::runtime::LinuxSeccomp>,
    /// The users of the container's user namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid_mappings: Option<Vec<oci_spec::runtime::LinuxIdMapping>>,
    /// The container's execution domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub personality: Option<oci_spec::runtime::LinuxPersonality>,
}

/// The file of an [`ExecBase`].
pub const EXEC_BASE: &str = "exec.json";
