//! What PID 1 does before it serves: from a bare initramfs to a machine that containers can run in.

use std::ffi::CStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::ExitCode;

use cube_agent_protocol::SHARE_PATH;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::stat::Mode;

use crate::cgroup::{Cgroup, CgroupError};
use crate::container::Settings;
use crate::error::chain;
use crate::helper::parent::Launcher;
use crate::serve::{self, ServeError};
use crate::spec::MOST_FILES;
use crate::{logger, transport};

/// Where containers' directories are.
const CONTAINERS: &str = "/run/cube/containers";

/// The cgroup of all containers.
const CONTAINERS_CGROUP: &str = "/pod";

/// Why the guest could not become what it should be.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A directory, link or file could not be made.
    #[error("Cannot make {}", .0.display())]
    Make(PathBuf, #[source] io::Error),
    /// A file system could not be mounted.
    #[error("Cannot mount {0}")]
    Mount(&'static str, #[source] io::Error),
    /// The root could not be changed.
    #[error("Cannot move off the initial ramfs")]
    Move(#[source] io::Error),
    /// The resource limits could not be raised.
    #[error("Cannot raise the resource limits")]
    Limits(#[source] io::Error),
    /// The controllers could not be switched on.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The loopback interface could not be brought up.
    #[error("Cannot bring up the loopback interface")]
    Loopback(#[source] io::Error),
    /// The service ended.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// PID 1's main. It never returns to the kernel: the end of the service is the end of the machine.
pub fn main() -> ExitCode {
    if let Err(error) = set_up().and_then(|()| Ok(serve::run(settings())?)) {
        logger::last_words(&chain(&error));
        // The host sees a panic with these last words; a reset would look like a proper end.
        return ExitCode::FAILURE;
    }
    log::info!("the host has closed the connection");
    reset();
    ExitCode::FAILURE
}

fn settings() -> Settings {
    Settings {
        dir: CONTAINERS.into(),
        cgroup: CONTAINERS_CGROUP.into(),
        launcher: Launcher {
            program: "/proc/self/exe".into(),
        },
        connect: Box::new(transport::vsock),
    }
}

fn set_up() -> Result<(), InitError> {
    move_off_initramfs()?;
    mount_all()?;
    link_all()?;
    open_standard_streams();
    logger::start(logger::level_of_kernel());
    raise_limits().map_err(InitError::Limits)?;
    Cgroup::existing("/").delegate()?;
    Cgroup::create(CONTAINERS_CGROUP)?.delegate()?;
    crate::configure::bring_up_loopback().map_err(InitError::Loopback)?;
    for dir in [CONTAINERS, SHARE_PATH, "/etc"] {
        make_dir(dir)?;
    }
    Ok(())
}

/// A container's init changes its root by pivot_root(2), which the kernel's initial ramfs refuses
/// to be left by: so the root becomes a tmpfs of our own. The ramfs holds nothing but this binary,
/// whose pages are in use as long as the machine runs, so there is nothing to free.
fn move_off_initramfs() -> Result<(), InitError> {
    make_dir("/root")?;
    mount_one(
        "root",
        "tmpfs",
        "/root",
        MsFlags::empty(),
        c"mode=755,size=50%",
    )?;
    let change = || -> nix::Result<()> {
        nix::unistd::chdir("/root")?;
        mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
        nix::unistd::chroot(".")?;
        nix::unistd::chdir("/")
    };
    change().map_err(|e| InitError::Move(e.into()))
}

fn mount_all() -> Result<(), InitError> {
    let hard = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    let dev = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let shared = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let mounts: [(&'static str, &str, MsFlags, &CStr); 9] = [
        ("/proc", "proc", hard, c""),
        ("/sys", "sysfs", hard, c""),
        ("/dev", "devtmpfs", MsFlags::MS_NOSUID, c"mode=755"),
        ("/dev/pts", "devpts", dev, c"mode=620,gid=5,ptmxmode=666"),
        ("/dev/shm", "tmpfs", hard, c"mode=1777"),
        ("/dev/mqueue", "mqueue", hard, c""),
        (
            "/sys/fs/cgroup",
            "cgroup2",
            hard,
            c"nsdelegate,memory_recursiveprot",
        ),
        ("/run", "tmpfs", shared, c"mode=755"),
        ("/tmp", "tmpfs", shared, c"mode=1777"),
    ];
    for (target, kind, flags, data) in mounts {
        // sysfs makes its own directories.
        if !target.starts_with("/sys/") {
            make_dir(target)?;
        }
        mount_one(kind, kind, target, flags, data)?;
    }
    Ok(())
}

fn mount_one(
    source: &str,
    kind: &str,
    target: &'static str,
    flags: MsFlags,
    data: &CStr,
) -> Result<(), InitError> {
    mount(Some(source), target, Some(kind), flags, Some(data))
        .map_err(|e| InitError::Mount(target, e.into()))
}

fn link_all() -> Result<(), InitError> {
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, link).map_err(|e| InitError::Make(link.into(), e))?;
    }
    // devtmpfs has a ptmx that belongs to no mount of devpts.
    let ptmx = "/dev/ptmx";
    let _ = fs::remove_file(ptmx);
    symlink("pts/ptmx", ptmx).map_err(|e| InitError::Make(ptmx.into(), e))
}

/// The kernel opens the console for init only if the initramfs has it; what is missing becomes
/// /dev/null, so that no other file ever gets these numbers.
fn open_standard_streams() {
    for stream in 0..3 {
        // SAFETY: fcntl(2) with F_GETFD has no memory arguments.
        let open = unsafe { libc::fcntl(stream, libc::F_GETFD) } >= 0;
        if !open && let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") {
            if null.as_raw_fd() == stream {
                let _ = null.into_raw_fd();
            } else {
                let _ = nix::unistd::dup2(null.as_raw_fd(), stream);
            }
        }
    }
}

/// The kernel gives its init the limits of a small machine (1024 files, processes by the size of
/// memory), and containers that ask for none inherit them: raise them to what containerd's own
/// service has on a host. The one for core dumps stays (none, unless a process asks): here a file in the
/// container's working directory is all that could become of them.
fn raise_limits() -> io::Result<()> {
    use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
    setrlimit(Resource::RLIMIT_NOFILE, MOST_FILES, MOST_FILES)?;
    setrlimit(Resource::RLIMIT_NPROC, RLIM_INFINITY, RLIM_INFINITY)?;
    Ok(())
}

fn make_dir(path: &str) -> Result<(), InitError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, Mode::from_bits_truncate(0o755).bits());
    builder
        .create(path)
        .map_err(|e| InitError::Make(path.into(), e))
}

/// Syncs and resets the machine.
pub fn reset() {
    nix::unistd::sync();
    let Err(error) = reboot(RebootMode::RB_AUTOBOOT);
    log::error!("Cannot reset the machine: {error}");
}
