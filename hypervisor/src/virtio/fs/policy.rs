//! For how long the guest may believe what it was told.

use std::ffi::CStr;
use std::time::Duration;

use virtiofsd::filesystem::OpenOptions;

/// As good as for ever, and small enough for the guest's clock arithmetic.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// How old a guest's idea of what the host may change can get.
const A_WHILE: Duration = Duration::from_secs(1);

/// Who changes a file or the entries of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// The share's root: the host mounts and unmounts there.
    Root,
    /// A directory below the root where the host mounts what the guest then has for itself.
    OwnedRoots,
    /// Guest and host.
    Shared,
    /// This guest alone.
    Owned,
}

impl Cache {
    /// Of the entry `name` in a directory of this kind.
    pub fn of_child(self, name: &CStr, guest_owned: &[String]) -> Self {
        match self {
            Self::Root => {
                let owned = guest_owned.iter().any(|o| o.as_bytes() == name.to_bytes());
                if owned {
                    Self::OwnedRoots
                } else {
                    Self::Shared
                }
            }
            Self::OwnedRoots => Self::Owned,
            Self::Shared => Self::Shared,
            Self::Owned => Self::Owned,
        }
    }

    /// For how long a name in a directory of this kind stays what it is, or stays missing.
    pub fn names(self) -> Duration {
        match self {
            // What is mounted there must be seen at once.
            Self::Root | Self::OwnedRoots => Duration::ZERO,
            Self::Shared => A_WHILE,
            Self::Owned => FOR_EVER,
        }
    }

    /// For how long the attributes of a file of this kind hold.
    pub fn attributes(self) -> Duration {
        match self {
            Self::Root | Self::OwnedRoots | Self::Shared => A_WHILE,
            Self::Owned => FOR_EVER,
        }
    }

    /// How an open file of this kind may be cached. The host's own file systems have nothing to do when a file is closed
    /// (only network file systems do, and those are not the guest's alone), so there the guest need not say so.
    pub fn opened(self, directory: bool) -> OpenOptions {
        match (self, directory) {
            (Self::Owned, true) => OpenOptions::KEEP_CACHE | OpenOptions::CACHE_DIR,
            (Self::Owned, false) => OpenOptions::KEEP_CACHE | OpenOptions::NOFLUSH,
            _ => OpenOptions::empty(),
        }
    }
}
