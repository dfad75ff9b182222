//! A sandbox's directory on the host, `/run/cube/NAMESPACE/SANDBOX` (0700):
//!
//! ```text
//! lock            held by the shim as long as it lives
//! hypervisor      process id and start time of the hypervisor
//! cgroup          the hypervisor's cgroup, a directory a line
//! vsock, vsock_N  the VM's sockets
//! pod/            what all containers of a pod have (only where the shim is its controller)
//!   hostname, hosts, resolv.conf
//!   shm/                  mounted there
//! shared/         what the guest sees
//!   rootfs/CONTAINER      mounted there, changed by the guest alone
//!   volumes/CONTAINER/N   what the host may change, too
//! ```
//!
//! Nothing in it is ever removed recursively: what is mounted below is the user's.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::{Flock, FlockArg};

use crate::host_cgroup;
use crate::mount;
use crate::undo::Undo;

/// Where the directories of all sandboxes are.
pub const ROOT: &str = "/run/cube";

/// The directory for a pod's files.
pub const POD: &str = "pod";

/// The directory in the shared one for root file systems.
pub const ROOTFS: &str = "rootfs";

/// The directory in the shared one for all else.
pub const VOLUMES: &str = "volumes";

/// The directory in that one for what several containers have, beside those of the containers, whose names begin with a
/// letter or a digit.
pub const COMMON: &str = ".common";

/// The name of the VM's vsock socket in the sandbox's directory.
pub const VSOCK: &str = "vsock";

/// The mode of directories that the guest sees. In a container with a user namespace nobody is the host's root, so
/// everybody may pass through them to what is the container's; on the host the sandbox's directory is in front.
pub const SHARED_MODE: u32 = 0o711;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another shim has it.
    #[error("The sandbox {0:?} is in use by another shim")]
    InUse(PathBuf),
    /// A file or directory in it cannot be made.
    #[error("Cannot make {0:?}: {1}")]
    Make(PathBuf, io::Error),
    /// A dead sandbox's remains cannot be removed.
    #[error("Cannot remove what is left of the sandbox in {0:?}: {1}")]
    Remove(PathBuf, io::Error),
}

/// The directory of a sandbox, held by this process.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// The same, by a path that is short however long the names are: sockets have short paths only.
    handle: File,
}

impl StateDir {
    /// The path of a sandbox's directory.
    pub fn path_of(namespace: &str, sandbox: &str) -> PathBuf {
        Path::new(ROOT).join(namespace).join(sandbox)
    }

    /// Makes the directory and takes it. One that a dead shim left is cleaned up first.
    pub fn create(path: PathBuf, undo: &mut Undo) -> Result<Self, StateError> {
        if path.exists() {
            remove_dead(&path)?;
        }
        let error = |e| StateError::Make(path.clone(), e);
        make_directory(&path).map_err(error)?;
        let at = path.clone();
        undo.push(format!("remove {}", path.display()), move || {
            remove_empty(&at)
        });

        let lock_path = path.join("lock");
        let lock = Flock::lock(
            File::create_new(&lock_path).map_err(error)?,
            FlockArg::LockExclusiveNonblock,
        )
        .map_err(|_| StateError::InUse(path.clone()))?;
        undo.push(format!("remove {}", lock_path.display()), move || {
            let removed = std::fs::remove_file(&lock_path);
            drop(lock);
            removed
        });

        let shared = path.join("shared");
        let (rootfs, volumes) = (shared.join(ROOTFS), shared.join(VOLUMES));
        let common = volumes.join(COMMON);
        for directory in [shared, rootfs, volumes, common] {
            DirBuilder::new()
                .mode(SHARED_MODE)
                .create(&directory)
                .map_err(error)?;
            undo.push(format!("remove {}", directory.display()), move || {
                std::fs::remove_dir(&directory)
            });
        }
        let handle = File::open(&path).map_err(error)?;
        Ok(Self { path, handle })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that the guest sees.
    pub fn shared(&self) -> PathBuf {
        self.path.join("shared")
    }

    /// Where a pod's files are to be.
    pub fn pod(&self) -> PathBuf {
        self.path.join(POD)
    }

    /// Writes a note for whoever cleans up after a crash.
    pub fn note(&self, name: &str, text: &str, undo: &mut Undo) -> Result<(), StateError> {
        let path = self.path.join(name);
        std::fs::write(&path, text).map_err(|e| StateError::Make(path.clone(), e))?;
        undo.push(format!("remove {}", path.display()), move || {
            remove_file(&path)
        });
        Ok(())
    }

    /// Listens where the hypervisor leads the guest's connections to a vsock port of the host.
    pub fn listen(&self, port: u32, undo: &mut Undo) -> Result<UnixListener, StateError> {
        let name = format!("{VSOCK}_{port}");
        let path = self.path.join(&name);
        let listener = UnixListener::bind(mount::fd_path(&self.handle).join(name))
            .map_err(|e| StateError::Make(path.clone(), e))?;
        undo.push(format!("remove {}", path.display()), move || {
            remove_file(&path)
        });
        Ok(listener)
    }

    /// Removes the socket of a port that is not needed any more.
    pub fn forget_socket(&self, port: u32) {
        let path = self.path.join(format!("{VSOCK}_{port}"));
        if let Err(e) = remove_file(&path) {
            log::warn!("Cannot remove {}: {e}", path.display());
        }
    }

    /// Registers the removal of the socket that the hypervisor will make.
    pub fn expect_vsock(&self, undo: &mut Undo) {
        let path = self.path.join(VSOCK);
        undo.push(format!("remove {}", path.display()), move || {
            remove_file(&path)
        });
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    // The namespace's directory may be removed by another sandbox that ends just now.
    for _ in 0..100 {
        if let Some(parent) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            result => return result,
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Removes the sandbox's directory, and its namespace's if it was the last.
fn remove_empty(path: &Path) -> io::Result<()> {
    std::fs::remove_dir(path)?;
    if let Some(parent) = path.parent() {
        let _ = std::fs::remove_dir(parent);
    }
    Ok(())
}

/// Removes a file; one that is gone is no error.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Whether a shim is alive and holds the directory.
fn is_held(path: &Path) -> bool {
    let Ok(lock) = File::open(path.join("lock")) else {
        return false;
    };
    Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_err()
}

/// Cleans up after a shim that died: kills its hypervisor, unmounts, removes the cgroup and the
/// directory. A sandbox whose shim lives is left alone, one that is gone is no error.
pub fn remove_dead(path: &Path) -> Result<(), StateError> {
    if !path.exists() {
        return Ok(());
    }
    if is_held(path) {
        return Err(StateError::InUse(path.to_owned()));
    }
    let error = |e| StateError::Remove(path.to_owned(), e);
    if let Ok(note) = std::fs::read_to_string(path.join("hypervisor")) {
        crate::process_id::kill_noted(&note);
    }
    for point in mount::mounts_below(path).map_err(error)? {
        mount::unmount(&point).map_err(|e| error(e.into()))?;
    }
    // One for all: with cgroup v1 each controller has its own.
    let deadline = Instant::now() + host_cgroup::PATIENCE;
    for cgroup in std::fs::read_to_string(path.join("cgroup"))
        .unwrap_or_default()
        .lines()
    {
        if let Err(e) = host_cgroup::remove(Path::new(cgroup), deadline) {
            log::warn!("Cannot remove the cgroup {cgroup}: {e}");
        }
    }
    let shared = path.join("shared");
    for rootfs in entries(&shared.join(ROOTFS)).map_err(error)? {
        std::fs::remove_dir(&rootfs).map_err(error)?;
    }
    for volumes in entries(&shared.join(VOLUMES)).map_err(error)? {
        remove_volumes(&volumes).map_err(error)?;
    }
    for directory in [shared.join(ROOTFS), shared.join(VOLUMES), shared] {
        remove_directory(&directory).map_err(error)?;
    }
    let pod = path.join(POD);
    for file in entries(&pod).map_err(error)? {
        // The one directory is where something was mounted.
        remove_directory(&file)
            .or_else(|_| remove_file(&file))
            .map_err(error)?;
    }
    remove_directory(&pod).map_err(error)?;
    // What is left are our own notes and sockets.
    for file in entries(path).map_err(error)? {
        remove_file(&file).map_err(error)?;
    }
    remove_empty(path).map_err(error)
}

/// Removes a container's directory of volumes once nothing is mounted there: mount points are empty
/// directories and empty files, volumes of several containers have links.
pub fn remove_volumes(volumes: &Path) -> io::Result<()> {
    for point in entries(volumes)? {
        let metadata = std::fs::symlink_metadata(&point)?;
        if metadata.is_dir() {
            std::fs::remove_dir(&point)?;
        } else if metadata.len() == 0 || metadata.is_symlink() {
            std::fs::remove_file(&point)?;
        }
    }
    remove_directory(volumes)
}

/// Removes an empty directory; one that is gone is no error.
pub fn remove_directory(directory: &Path) -> io::Result<()> {
    match std::fs::remove_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The paths in a directory; none if it is not there.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(directory) {
        Ok(list) => list.map(|entry| entry.map(|e| e.path())).collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_sandbox_leaves_nothing_when_it_ends() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ns/web");
        let mut undo = Undo::new();
        let state = StateDir::create(path.clone(), &mut undo).unwrap();
        state.note("cgroup", "/c", &mut undo).unwrap();
        let _listener = state.listen(1024, &mut undo).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let shared = std::fs::metadata(path.join("shared/rootfs")).unwrap();
        assert_eq!(shared.permissions().mode() & 0o777, SHARED_MODE);
        assert!(path.join("vsock_1024").exists());
        drop(undo);
        assert!(!root.path().join("ns").exists());
    }

    #[test]
    fn a_living_sandbox_is_left_alone_and_a_dead_one_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ns/web");
        let mut undo = Undo::new();
        let state = StateDir::create(path.clone(), &mut undo).unwrap();
        assert!(matches!(remove_dead(&path), Err(StateError::InUse(_))));
        assert!(matches!(
            StateDir::create(path.clone(), &mut Undo::new()),
            Err(StateError::InUse(_))
        ));

        // As after kill -9: the lock is gone, the files are there.
        std::fs::remove_file(path.join("lock")).unwrap();
        std::fs::write(path.join("lock"), "").unwrap();
        let shared = state.shared();
        std::fs::create_dir_all(shared.join("volumes/web/1")).unwrap();
        std::fs::write(shared.join("volumes/web/0"), "").unwrap();
        std::fs::create_dir(shared.join("rootfs/web")).unwrap();
        std::fs::create_dir_all(state.pod().join("shm")).unwrap();
        std::fs::write(state.pod().join("hosts"), "127.0.0.1 localhost").unwrap();
        remove_dead(&path).unwrap();
        assert!(!path.exists());
        remove_dead(&path).unwrap();
        std::mem::forget(undo);
    }

    #[test]
    fn files_of_the_user_are_never_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ns/web");
        let precious = path.join("shared/rootfs/web/precious");
        std::fs::create_dir_all(precious.parent().unwrap()).unwrap();
        std::fs::write(&precious, "data").unwrap();
        assert!(remove_dead(&path).is_err());
        let volume = path.join("shared/volumes/web/0");
        std::fs::create_dir_all(volume.parent().unwrap()).unwrap();
        std::fs::write(&volume, "data").unwrap();
        assert!(remove_volumes(volume.parent().unwrap()).is_err());
        assert!(precious.exists() && volume.exists());
    }

    #[test]
    fn long_names_do_not_hinder_sockets() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("n".repeat(76)).join("s".repeat(76));
        let mut undo = Undo::new();
        let state = StateDir::create(path, &mut undo).unwrap();
        state.listen(1025, &mut undo).unwrap();
    }
}
