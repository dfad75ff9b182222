//! Watching for a socket that a server makes when it starts.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Tells when something at a path has changed, also when directories of the path are missing yet.
pub struct SocketWatch {
    path: PathBuf,
    inotify: AsyncFd<Source>,
    /// Each directory that is there and the name that matters in it.
    directories: Vec<(WatchDescriptor, PathBuf)>,
}

/// inotify(7) as the event loop wants it.
struct Source(Inotify);

impl AsRawFd for Source {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl SocketWatch {
    /// Watches from now on.
    pub fn new(path: &Path) -> io::Result<Self> {
        let source = Source(Inotify::init(
            InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK,
        )?);
        // SAFETY: the source owns its descriptor and keeps it open as long as it lives.
        let inotify = unsafe { AsyncFd::register_with_interest(source, Interest::READABLE) }?;
        let mut watch = Self {
            path: path.to_owned(),
            inotify,
            directories: Vec::new(),
        };
        watch.add_directories()?;
        Ok(watch)
    }

    /// Resolves when something has happened since the watch began, or since the last time: a
    /// socket, or a directory on the way to it, has come, or has got another mode.
    pub async fn changed(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.inotify.readable().await?;
            match ready.get_inner().0.read_events() {
                Ok(events) if events.iter().any(|event| self.matters(event)) => break,
                Ok(_) => {}
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.add_directories()
    }

    fn matters(&self, event: &InotifyEvent) -> bool {
        let lost_some = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
        let is_on_the_way = |name: &OsStr| {
            self.directories
                .iter()
                .any(|(wd, path)| *wd == event.wd && path.file_name() == Some(name))
        };
        lost_some || event.name.as_deref().is_some_and(is_on_the_way)
    }

    /// From the root down, so that a directory that is not there yet cannot come unseen: its parent
    /// is watched already.
    fn add_directories(&mut self) -> io::Result<()> {
        // A server makes its socket before it listens, and nothing tells of the latter; but then
        // it gives the socket its mode.
        let mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_ONLYDIR;
        self.directories.clear();
        let mut steps: Vec<_> = self.path.ancestors().collect();
        steps.reverse();
        for pair in steps.windows(2) {
            match self.inotify.get_ref().0.add_watch(pair[0], mask) {
                // The same directory has the same descriptor as before.
                Ok(wd) => self.directories.push((wd, pair[1].to_owned())),
                Err(Errno::ENOENT | Errno::ENOTDIR) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    /// Long enough for what is bound to come, and for what must not.
    const SOON: Duration = Duration::from_secs(5);
    const A_WHILE: Duration = Duration::from_millis(50);

    async fn expect_change(watch: &mut SocketWatch) {
        let changed = tokio::time::timeout(SOON, watch.changed()).await;
        changed.expect("a change is seen").unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_comes_or_gets_its_mode_is_seen_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let mut watch = SocketWatch::new(&path).unwrap();
        fs::write(dir.path().join("other.sock"), "").unwrap();
        let seen = tokio::time::timeout(A_WHILE, watch.changed()).await;
        assert!(seen.is_err(), "another file is seen");
        fs::write(&path, "").unwrap();
        expect_change(&mut watch).await;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(&path, mode).unwrap();
        expect_change(&mut watch).await;
        fs::write(dir.path().join("new"), "").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        expect_change(&mut watch).await;
    }

    #[tokio::test]
    async fn directories_that_come_later_are_watched_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/containerd/c.sock");
        let mut watch = SocketWatch::new(&path).unwrap();
        for missing in ["run", "run/containerd"] {
            fs::create_dir(dir.path().join(missing)).unwrap();
            expect_change(&mut watch).await;
        }
        fs::write(&path, "").unwrap();
        expect_change(&mut watch).await;
        // Removed and made again.
        fs::remove_dir_all(dir.path().join("run")).unwrap();
        fs::create_dir_all(dir.path().join("run/containerd")).unwrap();
        expect_change(&mut watch).await;
        fs::write(&path, "").unwrap();
        expect_change(&mut watch).await;
    }
}
