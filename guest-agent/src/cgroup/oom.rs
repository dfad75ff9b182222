//! The kernel's kills for want of memory ("OOM kills") in a cgroup, as they happen.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Cgroup;

/// memory.events of a cgroup, whose changes the kernel announces (cgroup-v2.rst, "memory.events").
/// It counts what happens in the cgroups below as well.
#[derive(Debug)]
pub struct OomKills {
    // None without the memory controller.
    file: Option<fs::File>,
}

impl OomKills {
    /// Those of a cgroup. What cannot be watched is logged and has none: a process can be waited
    /// for all the same.
    pub fn of(cgroup: &Cgroup) -> Self {
        let path = cgroup.file("memory.events");
        let opened = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path);
        let file = match opened {
            Ok(file) => Some(file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => {
                log::error!("Cannot watch {}: {e}", path.display());
                None
            }
        };
        Self { file }
    }

    /// How many there were. The kernel counts one before the process dies, so who has collected a
    /// process finds its kill counted. None any more when the cgroup was removed.
    pub fn count(&self) -> u64 {
        let count = self.file.as_ref().map(read);
        count.and_then(io::Result::ok).unwrap_or(0)
    }

    /// Resolves when there were more than `known`. Never resolves if none can be told of any more.
    pub async fn more_than(&self, known: u64) {
        if let Some(file) = &self.file
            && known != u64::MAX
        {
            let watched = async {
                let announced = crate::transport::watch(file.as_fd(), Interest::PRIORITY)?;
                exceeds(&announced, known, || read(file)).await
            };
            match watched.await {
                Ok(()) => return,
                Err(e) => log::error!("Cannot watch a container's memory.events: {e}"),
            }
        }
        std::future::pending().await
    }
}

/// Resolves when `count` is more than `known`; it is looked at now and at each announcement.
async fn exceeds<T: AsRawFd>(
    announced: &AsyncFd<T>,
    known: u64,
    count: impl Fn() -> io::Result<u64>,
) -> io::Result<()> {
    while count()? <= known {
        announced.ready(Interest::PRIORITY).await?.clear_ready();
    }
    Ok(())
}

fn read(file: &fs::File) -> io::Result<u64> {
    // A few lines of a word and a number.
    let mut text = [0; 1024];
    let length = file.read_at(&mut text, 0)?;
    Ok(parse(&String::from_utf8_lossy(&text[..length])))
}

fn parse(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use nix::sys::socket::{MsgFlags, recv, send};

    use super::*;

    #[test]
    fn the_kills_are_counted_and_nothing_that_is_named_like_them() {
        let text = "low 0\nhigh 1\nmax 21\noom 5\noom_kill 3\noom_group_kill 2\n";
        assert_eq!(parse(text), 3);
        assert_eq!(parse("low 0\noom 5\noom_group_kill 2\n"), 0);
        assert_eq!(parse(""), 0);
    }

    /// Urgent data makes a TCP socket ready in the way in which the kernel announces a change.
    fn announcer() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    #[tokio::test]
    async fn a_wait_ends_by_the_announcement_of_one_more_and_not_by_another() {
        let (announcing, announced) = announcer();
        let kills = Cell::new(2);
        let looks = Cell::new(0);
        let announce = || send(announcing.as_raw_fd(), b"!", MsgFlags::MSG_OOB).unwrap();
        let watched = crate::transport::watch(announced.as_fd(), Interest::PRIORITY).unwrap();
        let count = || {
            looks.set(looks.get() + 1);
            // Taken back, so that the next one is news.
            let _ = recv(watched.as_raw_fd(), &mut [0], MsgFlags::MSG_OOB);
            Ok(kills.get())
        };
        // What is there already ends a wait at once.
        exceeds(&watched, 1, count).await.unwrap();
        let soon = Duration::from_secs(5);
        let steps = async {
            // A change of something else in the file.
            announce();
            while looks.get() < 3 {
                tokio::task::yield_now().await;
            }
            kills.set(3);
            announce();
        };
        let both = async { tokio::join!(exceeds(&watched, 2, count), steps).0 };
        tokio::time::timeout(soon, both).await.unwrap().unwrap();
        assert_eq!(looks.get(), 4);
    }

    #[tokio::test]
    async fn without_the_memory_controller_there_are_none_and_never_will_be() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup {
            dir: dir.path().to_owned(),
        };
        let kills = OomKills::of(&cgroup);
        assert_eq!(kills.count(), 0);
        let more = tokio::time::timeout(Duration::from_millis(20), kills.more_than(0));
        assert!(more.await.is_err());
    }
}
