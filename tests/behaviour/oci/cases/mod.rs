//! The bundles.

pub mod cgroups;
pub mod linux;
pub mod mounts;
pub mod pairs;
pub mod process;
pub mod seccomp;

use crate::bundle::Case;

/// All of them.
pub fn all() -> Vec<Case> {
    [
        process::cases(),
        mounts::cases(),
        cgroups::cases(),
        seccomp::cases(),
        linux::cases(),
        pairs::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
