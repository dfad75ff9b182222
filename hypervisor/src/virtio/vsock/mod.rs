//! The socket device (virtio 1.2, section 5.10) with Unix sockets on the host in place of a
//! kernel's vsock, so that it can be saved and restored, needs no privilege, and a guest's
//! context identifier need not be unique.
//!
//! | file | what it knows |
//! |---|---|
//! | `device` | the queues, events, saving and restoring |
//! | `mux` | all connections, who is next, who comes and goes |
//! | `connection` | one connection: its states, its two directions |
//! | `credit` | who may send how much |
//! | `backlog` | what the guest sent and the socket did not take yet |
//! | `rx` | the guest's receive buffers |
//! | `socket`, `line` | Unix sockets, the `CONNECT` line |
//! | `packet` | the packet header |
//!
//! The packet type of the crate virtio-vsock is not used: it wants the header and all data in one
//! or two descriptors each in one piece, which the specification does not promise (section 2.7.4.2) and Linux since
//! 6.7 does not keep, and it would read each data packet from its socket by itself.

mod backlog;
mod connection;
mod credit;
mod device;
mod line;
mod mux;
mod packet;
mod rx;
mod socket;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

pub use device::{Vsock, VsockState};

/// Why there can be no vsock device.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The context identifier is one that no guest has.
    #[error("The vsock CID {0} cannot be a guest's: choose one from 3 to 4294967294")]
    Cid(u32),
    /// The socket's path is too long.
    #[error(
        "The vsock path {} has {length} bytes: it may have {}, so that a port fits behind it",
        path.display(), socket::LONGEST_PATH
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// There is a file already.
    #[error(
        "The vsock path {} exists already: if no other hypervisor uses it, remove it",
        .0.display()
    )]
    PathTaken(PathBuf),
    /// The socket cannot be created there.
    #[error("Cannot listen on the vsock path {}", path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The host refuses a descriptor.
    #[error("Cannot set up the vsock device's events")]
    Host(#[source] io::Error),
}
