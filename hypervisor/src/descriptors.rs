//! Who may have how many of the process's file descriptors.
//!
//! A guest that opens files of a share, or connections, takes descriptors of this process. Each kind has its
//! own part of the limit (`RLIMIT_NOFILE`), so that one does not starve the other, and neither the rest.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What is left to everything but shares and vsock's sockets, if the limit is not very low.
const OTHERS: u64 = 512;

/// What vsock's sockets get, if the limit is not very low.
const SOCKETS: u64 = 4608;

/// The parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// For the files and inodes of shares.
    pub shares: u64,
    /// For vsock's sockets.
    pub sockets: u64,
}

impl Parts {
    /// The process's. The first call raises the process's limit as far as it goes.
    pub fn of_process() -> Self {
        static PARTS: OnceLock<Parts> = OnceLock::new();
        *PARTS.get_or_init(|| {
            raise_limit();
            // Without any limit the system's own is nearer than this.
            Self::of(getrlimit(Resource::Nofile).current.unwrap_or(1 << 30))
        })
    }

    fn of(limit: u64) -> Self {
        let others = OTHERS.min(limit / 4);
        let sockets = SOCKETS.min(limit / 4);
        Self {
            shares: limit - others - sockets,
            sockets,
        }
    }
}

fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(e) = setrlimit(Resource::Nofile, raised) {
            log::warn!("Cannot raise the limit of open files: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_gets_a_part_whatever_the_limit() {
        let parts = |shares, sockets| Parts { shares, sockets };
        assert_eq!(Parts::of(1 << 20), parts((1 << 20) - 5120, 4608));
        assert_eq!(Parts::of(1024), parts(512, 256));
        assert_eq!(Parts::of(0), parts(0, 0));
    }

    #[test]
    fn the_limit_is_raised_once_and_for_all() {
        Parts::of_process();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
