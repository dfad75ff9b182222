//! Volumes that the containers of a sandbox have in common.
//!
//! Each mount below the shared directory is a file system of its own in the guest, with inodes of its own, and by its
//! inode a kernel finds what is behind a socket or a FIFO. So a source that several containers bind in the same way
//! is bound once, and each container's directory of volumes has a symbolic link to it.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::mount::{self, Access, MountError, Volume};
use crate::state::COMMON;

/// The volumes of one sandbox.
#[derive(Default)]
pub struct Volumes {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    bound: HashMap<Key, Weak<Bound>>,
    /// How many there have been: the guest may remember a name.
    count: u64,
}

/// What makes two binds the same one.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    source: PathBuf,
    dev: u64,
    ino: u64,
    /// What is mounted below the source: a later bind has to have what came since.
    below: Vec<String>,
    recursive: bool,
    access: Access,
    follows_host: bool,
}

/// A bind, gone when the last container is that has it.
#[derive(Debug)]
pub struct Bound {
    point: PathBuf,
    name: String,
}

impl Volumes {
    /// Binds a volume below `directory`, that of the sandbox's volumes, unless it is bound there in the same way.
    pub fn bind(&self, volume: &Volume, directory: &Path) -> Result<Arc<Bound>, MountError> {
        let failed = |e: io::Error| volume.no_source(&e);
        let source = volume.source.canonicalize().map_err(failed)?;
        let metadata = source.metadata().map_err(failed)?;
        let key = Key {
            dev: metadata.dev(),
            ino: metadata.ino(),
            below: mount::table_below(&source).map_err(failed)?,
            source,
            recursive: volume.recursive,
            access: volume.access,
            follows_host: volume.follows_host,
        };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.bound.retain(|_, bound| bound.strong_count() > 0);
        if let Some(bound) = table.bound.get(&key).and_then(Weak::upgrade) {
            return Ok(bound);
        }
        table.count += 1;
        let name = table.count.to_string();
        let point = directory.join(COMMON).join(&name);
        volume.bind(&point)?;
        let bound = Arc::new(Bound { point, name });
        table.bound.insert(key, Arc::downgrade(&bound));
        Ok(bound)
    }
}

impl Bound {
    /// Makes `link`, in a container's directory of volumes, lead to it.
    pub fn link(&self, link: &Path) -> io::Result<()> {
        let target = Path::new("..").join(COMMON).join(&self.name);
        std::os::unix::fs::symlink(target, link)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let removed = mount::unmount(&self.point)
            .map_err(io::Error::from)
            .and_then(|()| match self.point.is_dir() {
                true => std::fs::remove_dir(&self.point),
                false => std::fs::remove_file(&self.point),
            });
        if let Err(e) = removed {
            log::warn!("Cannot unmount {}: {e}", self.point.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::mount::{MsFlags, mount};

    use super::*;

    #[test]
    fn what_is_bound_in_the_same_way_is_bound_once_until_nobody_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let [source, other, directory] = ["source", "other", "volumes"].map(|n| dir.path().join(n));
        for made in [
            &source.join("sub"),
            &other,
            &directory.join("web"),
            &directory.join(COMMON),
        ] {
            std::fs::create_dir_all(made).unwrap();
        }
        let volume = |source: &Path, access| Volume {
            source: source.to_owned(),
            destination: "/data".into(),
            recursive: true,
            access,
            follows_host: false,
        };
        let test = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
            let volumes = Volumes::default();
            let bind = |source: &Path, access| {
                let volume = volume(source, access);
                volumes.bind(&volume, &directory).unwrap()
            };
            let first = bind(&source, Access::ReadWrite);
            // By another path, for another destination.
            let same = bind(&source.join("../source"), Access::ReadWrite);
            assert!(Arc::ptr_eq(&first, &same));
            let separate = [
                bind(&source, Access::ReadOnly),
                bind(&other, Access::ReadWrite),
            ];
            assert!(separate.iter().all(|bound| !Arc::ptr_eq(bound, &first)));

            let link = directory.join("web/0");
            first.link(&link).unwrap();
            std::fs::write(link.join("file"), "text").unwrap();
            assert_eq!(std::fs::read(source.join("file")).unwrap(), b"text");
            drop(first);
            assert!(link.join("file").exists());

            // What the host has mounted since is there for who comes later.
            mount(
                Some("late"),
                &source.join("sub"),
                Some("tmpfs"),
                MsFlags::empty(),
                none,
            )?;
            std::fs::write(source.join("sub/late"), "").unwrap();
            let later = bind(&source, Access::ReadWrite);
            assert!(later.point.join("sub/late").exists());
            assert!(!same.point.join("sub/late").exists());

            drop((same, later, separate));
            let left = std::fs::read_dir(directory.join(COMMON)).unwrap();
            assert_eq!(left.count(), 0);
            assert!(source.join("file").exists());
            let error = volumes.bind(
                &volume(&dir.path().join("none"), Access::ReadWrite),
                &directory,
            );
            assert!(matches!(error, Err(MountError::NoSource(..))));
            Ok::<_, Errno>(())
        };
        let done = std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
        match done {
            Err(Errno::EPERM) => eprintln!("left out: no mount namespace of its own here"),
            done => done.unwrap(),
        }
    }
}
