//! The socket that the daemon of a sandbox serves on: its name, and who binds it.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

/// The longest path that containerd's clients connect to, in bytes (`sun_path` without its end).
const MAX_PATH: usize = 106;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The directory makes the path too long.
    #[error(
        "The socket path {0:?} is longer than {MAX_PATH} bytes: containerd's socket directory must have a shorter name"
    )]
    TooLong(PathBuf),
    /// The directory cannot be made or locked.
    #[error("Cannot use the socket directory {0:?}: {1}")]
    Directory(PathBuf, io::Error),
    /// The socket cannot be bound.
    #[error("Cannot listen on {0:?}: {1}")]
    Bind(PathBuf, io::Error),
}

/// Where a sandbox's daemon listens: one name for each containerd, namespace and sandbox.
pub fn path(
    dir: &str,
    grpc_address: &str,
    namespace: &str,
    sandbox: &str,
) -> Result<PathBuf, SocketError> {
    let digest = Sha256::digest(format!("{grpc_address}/{namespace}/{sandbox}"));
    let mut name = String::with_capacity(64);
    for byte in digest {
        name.push_str(&format!("{byte:02x}"));
    }
    let path = Path::new(dir).join(name);
    if path.as_os_str().len() > MAX_PATH {
        return Err(SocketError::TooLong(path));
    }
    Ok(path)
}

/// The outcome of [`bind_or_join`].
pub enum Bound {
    /// Nobody served there; now this process does.
    Here(UnixListener),
    /// The sandbox's daemon is there already.
    Elsewhere,
}

/// Binds the socket, unless a daemon answers there. A socket that nobody serves is replaced.
///
/// The directory is locked meanwhile: of two containers of a pod that come at once one binds and
/// the other finds it listening.
pub fn bind_or_join(path: &Path) -> Result<Bound, SocketError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let lock = lock_directory(dir).map_err(|e| SocketError::Directory(dir.to_owned(), e))?;
    let bind_error = |e| SocketError::Bind(path.to_owned(), e);
    let bound = match UnixListener::bind(path) {
        Ok(listener) => Bound::Here(listener),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            if UnixStream::connect(path).is_ok() {
                return Ok(Bound::Elsewhere);
            }
            std::fs::remove_file(path).map_err(bind_error)?;
            Bound::Here(UnixListener::bind(path).map_err(bind_error)?)
        }
        Err(e) => return Err(bind_error(e)),
    };
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(bind_error)?;
    drop(lock);
    Ok(bound)
}

fn lock_directory(dir: &Path) -> io::Result<Flock<File>> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    Flock::lock(File::open(dir)?, FlockArg::LockExclusive).map_err(|(_, e)| e.into())
}

/// The address in the form that containerd connects to.
pub fn address(path: &Path) -> String {
    format!("unix://{}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_containerd_namespace_and_sandbox_has_its_own_short_path() {
        let paths = [
            path("/run/containerd/s", "/a.sock", "default", "x").unwrap(),
            path("/run/containerd/s", "/b.sock", "default", "x").unwrap(),
            path("/run/containerd/s", "/a.sock", "k8s.io", "x").unwrap(),
            path("/run/containerd/s", "/a.sock", "default", "y").unwrap(),
        ];
        for (i, path) in paths.iter().enumerate() {
            assert_eq!(path.as_os_str().len(), 82);
            assert!(!paths[..i].contains(path));
        }
        assert!(path(&format!("/{}", "d".repeat(60)), "", "", "").is_err());
    }

    #[test]
    fn the_second_container_of_a_sandbox_finds_the_first_ones_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s/socket");
        let Bound::Here(listener) = bind_or_join(&path).unwrap() else {
            panic!("nobody else listens there");
        };
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(
            std::fs::metadata(path.parent().unwrap())
                .unwrap()
                .permissions()
                .mode()
                & 0o777,
            0o700
        );
        assert!(matches!(bind_or_join(&path).unwrap(), Bound::Elsewhere));
        drop(listener);
        assert!(matches!(bind_or_join(&path).unwrap(), Bound::Here(_)));
    }
}
