//! The device around the share: configuration, threads, restore, reset.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use virtiofsd::fuse::{Opcode, OpenIn, SetxattrIn};

use super::super::fake_guest::{Guest, bytes, config, name};
use super::super::{Fs, FsError, VirtioDevice};
use super::*;

#[test]
fn the_configuration_space_has_the_tag_and_one_request_queue() {
    let dir = directory();
    let guest = Guest::new(&config(dir.path()));
    let mut space = [0xff; 44];
    guest.device.read_config(0, &mut space);
    assert_eq!(&space[..6], b"share\0");
    assert_eq!(&space[36..], [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn what_cannot_be_shared_is_named() {
    let dir = directory();
    fs::write(dir.path().join("file"), "").unwrap();
    let attempt = |change: &dyn Fn(&mut cube_hypervisor_api::config::ShareConfig)| {
        let mut config = config(dir.path());
        change(&mut config);
        Fs::new(&config, 1 << 20, Box::new(|_| {})).err().unwrap()
    };
    let tag = attempt(&|c| c.tag = "x".repeat(37));
    assert!(matches!(tag, FsError::Tag(_)));
    assert!(matches!(attempt(&|c| c.tag.clear()), FsError::Tag(_)));
    for missing in ["missing", "file"] {
        let error = attempt(&|c| c.path = dir.path().join(missing));
        assert!(matches!(error, FsError::Directory { .. }));
        assert!(error.to_string().contains(missing), "{error}");
    }
    let owned = attempt(&|c| c.guest_owned = vec!["a/b".into()]);
    assert!(matches!(owned, FsError::GuestOwned(_)));
}

/// `fcntl` command: which signal tells of the lease (include/uapi/asm-generic/fcntl.h).
const F_SETSIG: i32 = 10;

/// Keeps everybody else from opening a file, until dropped: an open blocks until the lease ends.
struct Lease(File);

impl Lease {
    fn new(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        // SAFETY: plain calls on an open file. SIGURG, which is ignored, instead of SIGIO, which kills.
        unsafe {
            assert_eq!(libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG), 0);
            let taken = libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK);
            assert_eq!(taken, 0, "{}", std::io::Error::last_os_error());
        }
        Self(file)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

#[test]
fn one_request_at_a_time_takes_two_threads() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    for _ in 0..100 {
        guest.attributes(1).unwrap();
    }
    let workers = guest.device.workers.as_ref().unwrap();
    assert_eq!(workers.count(), 2);
}

#[test]
fn requests_that_block_hold_up_nobody_else_and_never_what_is_forgotten() {
    let dir = directory();
    fs::write(dir.path().join("slow"), "slow").unwrap();
    fs::write(dir.path().join("fast"), "fast").unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    let slow = guest.walk("slow").unwrap();
    let fast = guest.walk("fast").unwrap();
    let lease = Lease::new(&dir.path().join("slow"));
    let open = bytes(OpenIn::default());
    let before = guest.finished();
    let blocked = super::super::workers::MOST_REQUESTS as u16;
    for n in 0..blocked - 1 {
        guest.post(n, Opcode::Open, slow, &open);
    }
    // One is left for others.
    guest.post(blocked, Opcode::Getattr, fast, &[0; 16]);
    guest.wait_for(before + 1);
    // Now none is, except for the high-priority queue.
    guest.post(blocked + 1, Opcode::Open, slow, &open);
    guest.post(blocked + 2, Opcode::Getattr, fast, &[0; 16]);
    forget(&mut guest, fast, 1);
    assert_eq!(guest.device.share.nodes().count(), 2);
    assert_eq!(guest.finished(), before + 1);
    drop(lease);
    guest.wait_for(before + 1 + blocked + 1);
}

#[test]
fn a_restored_share_knows_the_nodes_and_open_files_of_the_saved_one() {
    let dir = directory();
    many_files(dir.path(), 2, 3);
    let mut guest = Guest::mounted(&config(dir.path()));
    let sub = guest.walk("d1").unwrap();
    let file = guest.look_up(sub, "f2").unwrap().nodeid;
    let fh = guest.open(file, libc::O_RDWR).unwrap();
    let gone = guest.look_up(sub, "f0").unwrap().nodeid;
    let lost = guest.look_up(sub, "f1").unwrap().nodeid;
    guest.call(Opcode::Unlink, sub, &name("f0")).unwrap();
    let state = guest.device.save();
    let text = serde_json::to_string(&state).unwrap();
    fs::remove_file(dir.path().join("d1/f1")).unwrap();
    let again = serde_json::from_str(&text).unwrap();
    assert_eq!(state, again);
    let active = state.active.as_ref().unwrap();
    assert_eq!(active.queues.len(), 2);

    let ignore = || Box::new(|_| {});
    let restored = Fs::restore(&config(dir.path()), 1 << 30, ignore(), &again).unwrap();
    // The saved one has ended when the restored one runs: its workers would take requests off the same queues.
    guest.device.reset();
    guest.device = restored;
    guest.activate();
    assert_eq!(guest.read(file, fh, 0, 10).unwrap(), b"1/2");
    write(&mut guest, file, fh, 0, b"new", 0).unwrap();
    assert_eq!(guest.walk("d1/f2").unwrap(), file);
    assert_eq!(guest.content("d1/f2").unwrap(), b"new");
    // SETXATTR has the long form that was agreed on.
    let body = SetxattrIn {
        size: 1,
        ..Default::default()
    };
    let body = [bytes(body), name("trusted.a"), b"x".to_vec()].concat();
    guest.call(Opcode::Setxattr, file, &body).unwrap();
    for node in [gone, lost] {
        assert_eq!(guest.attributes(node).err(), Some(libc::ESTALE));
    }
    // No number is used twice.
    create(&mut guest, sub, "f9", libc::S_IFREG | 0o600, libc::O_RDWR);
    let fresh = guest.walk("d1/f9").unwrap();
    assert!(![sub, file, gone, lost].contains(&fresh));
    let saved = guest.device.save();
    assert_eq!(saved.share.handles.len(), 3);

    let mut other = config(dir.path());
    other.tag = "other".into();
    let refused = Fs::restore(&other, 1 << 30, ignore(), &saved);
    assert!(matches!(refused, Err(FsError::OtherTag { .. })));
}

#[test]
fn a_reset_forgets_everything_and_the_device_starts_again() {
    let dir = directory();
    many_files(dir.path(), 1, 3);
    let mut guest = Guest::mounted(&config(dir.path()));
    let node = guest.walk("d0/f0").unwrap();
    guest.open(node, libc::O_RDONLY).unwrap();
    guest.device.reset();
    assert!(guest.device.queue_states().is_empty());
    assert_eq!(guest.device.share.nodes().count(), 1);
    guest.activate();
    guest.init();
    assert_eq!(guest.attributes(node).err(), Some(libc::ESTALE));
    assert_ne!(guest.walk("d0/f0").unwrap(), node);
    assert_eq!(guest.content("d0/f1").unwrap(), b"0/1");
}
