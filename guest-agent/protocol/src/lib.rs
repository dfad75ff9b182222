//! What the shim and the agent in the guest say to each other: the messages and the ttrpc service
//! of `proto/agent.proto`, and the constants that both sides must agree on.

/// The vsock port of the host that the agent connects to once, to serve the ttrpc service there.
pub const AGENT_PORT: u32 = 1024;

/// The vsock port of the host that the agent connects to for each standard stream.
pub const STREAM_PORT: u32 = 1025;

/// The length of a stream's token, in bytes. It is random, so that no process in the guest can
/// claim another's stream.
pub const STREAM_TOKEN_LEN: usize = 16;

/// The tag of the sandbox's virtio-fs share.
pub const SHARE_TAG: &str = "cube";

/// Where the agent mounts the sandbox's share in the guest.
pub const SHARE_PATH: &str = "/run/cube/shared";

/// The directory in the guest with a directory for each container whose root file system is on disks.
pub const IMAGES_PATH: &str = "/run/cube/images";

/// The key on the kernel's command line whose value is the agent's log level (`error`, `warn`,
/// `info`, `debug`, `trace`; default `warn`). The agent logs to the console.
pub const LOG_LEVEL_KEY: &str = "cube.log";

/// The options of mounts in the guest that are flags there, and not handed to the file system: those that
/// libcontainer knows. Binds of the host know fewer kinds of propagation.
pub const MOUNT_FLAGS: [&str; 50] = [
    "async",
    "atime",
    "bind",
    "defaults",
    "dev",
    "diratime",
    "dirsync",
    "exec",
    "mand",
    "noatime",
    "nodev",
    "nodiratime",
    "noexec",
    "nomand",
    "norelatime",
    "nostrictatime",
    "nosuid",
    "private",
    "ratime",
    "rbind",
    "rdev",
    "rdiratime",
    "relatime",
    "rexec",
    "rnoatime",
    "rnodev",
    "rnodiratime",
    "rnoexec",
    "rnorelatime",
    "rnostrictatime",
    "rnosuid",
    "rnosymfollow",
    "ro",
    "rprivate",
    "rrelatime",
    "rro",
    "rrw",
    "rshared",
    "rslave",
    "rstrictatime",
    "rsuid",
    "rsymfollow",
    "runbindable",
    "rw",
    "shared",
    "slave",
    "strictatime",
    "suid",
    "sync",
    "unbindable",
];

#[allow(clippy::all, clippy::restriction, missing_docs, unused)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/protocol.rs"));
}

pub use generated::*;
