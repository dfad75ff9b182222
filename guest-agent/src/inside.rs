//! Paths inside another root: symbolic links in them never lead out of it.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

/// Opens a directory below `root` as if `root` were `/`.
fn open_directory(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    open(root, path, libc::O_DIRECTORY)
}

/// Opens a path below `root` as if `root` were `/` (openat2(2), RESOLVE_IN_ROOT).
fn open(root: BorrowedFd<'_>, path: &Path, flags: libc::c_int) -> io::Result<OwnedFd> {
    let path = c_path(path.as_os_str())?;
    // SAFETY: open_how is plain integers, for which all zeroes is a value.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_PATH | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the path ends with NUL, and the pointer and the length describe `how`.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The permissions of a directory below `root`.
pub fn mode_of(root: &Path, path: &Path) -> io::Result<u32> {
    let root = std::fs::File::open(root)?;
    let directory = std::fs::File::from(open_directory(root.as_fd(), path)?);
    Ok(directory.metadata()?.permissions().mode() & 0o7777)
}

/// Whether something is at a path below `root`, if only a link that leads nowhere.
pub fn exists(root: &Path, path: &Path) -> io::Result<bool> {
    let root = std::fs::File::open(root)?;
    match open(root.as_fd(), path, libc::O_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the directories of `path` below `root` that are missing, mode 0755, for this user and group.
pub fn make_directories(root: &Path, path: &Path, owner: (u32, u32)) -> io::Result<()> {
    let root = std::fs::File::open(root)?;
    let mut done = PathBuf::from(".");
    let mut parent = open_directory(root.as_fd(), &done)?;
    for part in path.components() {
        let Component::Normal(name) = part else {
            continue;
        };
        done.push(name);
        parent = match open_directory(root.as_fd(), &done) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let c_name = c_path(name)?;
                // SAFETY: the name ends with NUL.
                if unsafe { libc::mkdirat(parent.as_raw_fd(), c_name.as_ptr(), 0o755) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                let made = open_directory(root.as_fd(), &done)?;
                give(&made, owner)?;
                made
            }
            opened => opened?,
        };
    }
    Ok(())
}

/// Gives what this process has made to a user and a group.
fn give(made: &OwnedFd, owner: (u32, u32)) -> io::Result<()> {
    if owner == (0, 0) {
        return Ok(());
    }
    // SAFETY: the empty path ends with NUL.
    let result = unsafe {
        libc::fchownat(
            made.as_raw_fd(),
            c"".as_ptr(),
            owner.0,
            owner.1,
            libc::AT_EMPTY_PATH,
        )
    };
    Ok(nix::errno::Errno::result(result).map(drop)?)
}

fn c_path(path: &OsStr) -> io::Result<CString> {
    CString::new(path.as_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn directories_are_made_below_the_root_whatever_the_links_say() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("real")).unwrap();
        symlink("/real", root.join("absolute")).unwrap();
        symlink("../../../real", root.join("climbing")).unwrap();
        make_directories(&root, Path::new("absolute/a/b"), (0, 0)).unwrap();
        make_directories(&root, Path::new("climbing/c"), (0, 0)).unwrap();
        assert!(root.join("real/a/b").is_dir());
        assert!(root.join("real/c").is_dir());
        // Only root may give them away.
        if nix::unistd::geteuid().is_root() {
            make_directories(&root, Path::new("real/d"), (7, 8)).unwrap();
            let of = |path: &str| {
                let metadata = std::fs::metadata(root.join(path)).unwrap();
                (metadata.uid(), metadata.gid())
            };
            assert_eq!((of("real/d"), of("real/c")), ((7, 8), (0, 0)));
        }
        // Once more is no error; a file in the way is.
        make_directories(&root, Path::new("absolute/a/b"), (0, 0)).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        assert!(make_directories(&root, Path::new("file/x"), (0, 0)).is_err());
        assert_eq!(mode_of(&root, Path::new("/climbing/c")).unwrap(), 0o755);
        assert!(mode_of(&root, Path::new("file")).is_err());
        symlink("nowhere", root.join("dangling")).unwrap();
        for (path, there) in [
            ("/absolute/a", true),
            ("dangling", true),
            ("absolute/x/y", false),
        ] {
            assert_eq!(exists(&root, Path::new(path)).unwrap(), there, "{path}");
        }
    }
}
