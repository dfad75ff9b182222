use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use virtiofsd::fuse::{
    ATTR_SUBMOUNT, AttrOut, CreateIn, EntryOut, FallocateIn, ForgetIn, InHeader, LinkIn, LseekIn,
    LseekOut, MkdirIn, MknodIn, Opcode, OpenIn, OpenOut, ReadIn, ReleaseIn, Rename2In, SetattrIn,
    SetxattrIn, WRITE_KILL_PRIV, WriteIn, WriteOut,
};

use super::fake_guest::{Guest, Reply, bytes, config, name, parse};
use super::{Budget, Fs, FsError, Limits, VirtioDevice};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn create(guest: &mut Guest, parent: u64, entry: &str, mode: u32, flags: i32) -> (EntryOut, u64) {
    let body = CreateIn {
        flags: flags as u32,
        mode,
        umask: 0o22,
        open_flags: 0,
    };
    let reply = guest
        .call(Opcode::Create, parent, &[bytes(body), name(entry)].concat())
        .unwrap();
    let open: OpenOut = parse(&reply[size_of::<EntryOut>()..]);
    (parse(&reply), open.fh)
}

fn write(guest: &mut Guest, node: u64, fh: u64, offset: u64, data: &[u8], flags: u32) -> Reply {
    let body = WriteIn {
        fh,
        offset,
        size: data.len() as u32,
        write_flags: flags,
        ..Default::default()
    };
    guest.call(Opcode::Write, node, &[bytes(body), data.to_vec()].concat())
}

fn rename(guest: &mut Guest, from: (u64, &str), to: (u64, &str), flags: u32) -> Reply {
    let body = Rename2In {
        newdir: to.0,
        flags,
        padding: 0,
    };
    let body = [bytes(body), name(from.1), name(to.1)].concat();
    guest.call(Opcode::Rename2, from.0, &body)
}

fn release(guest: &mut Guest, node: u64, fh: u64) {
    let body = bytes(ReleaseIn {
        fh,
        ..Default::default()
    });
    guest.call(Opcode::Release, node, &body).unwrap();
}

fn forget(guest: &mut Guest, node: u64, nlookup: u64) {
    guest.tell(Opcode::Forget, node, &bytes(ForgetIn { nlookup }));
}

#[test]
fn a_guest_mounts_and_reads() {
    let dir = directory();
    fs::write(dir.path().join("hello"), "world").unwrap();
    let mut guest = Guest::new(&config(dir.path()));
    let init = guest.init();
    assert_eq!((init.major, init.max_write), (7, 1 << 20));
    let root = guest.attributes(1).unwrap();
    assert_eq!(root.attr.mode & libc::S_IFMT, libc::S_IFDIR);
    assert_eq!(guest.content("hello").unwrap(), b"world");
    assert_eq!(guest.call(Opcode::Getattr, 99, &[0; 16]), Err(libc::ESTALE));
}

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

#[test]
fn no_name_leads_out_of_the_share() {
    let outer = directory();
    let path = outer.path().join("share");
    fs::create_dir_all(path.join("sub")).unwrap();
    fs::write(outer.path().join("secret"), "secret").unwrap();
    symlink("../secret", path.join("link")).unwrap();
    let mut guest = Guest::mounted(&config(&path));
    let sub = guest.walk("sub").unwrap();
    for bad in [
        "..",
        ".",
        "",
        "../secret",
        "a/b",
        "/etc/passwd",
        "sub/../../x",
    ] {
        let mut refused = |opcode, body: Vec<u8>| {
            let reply = guest.call(opcode, 1, &[body, name(bad)].concat());
            assert_eq!(reply, Err(libc::EINVAL), "{opcode:?} of {bad:?}");
        };
        refused(Opcode::Lookup, vec![]);
        refused(Opcode::Unlink, vec![]);
        refused(Opcode::Rmdir, vec![]);
        refused(Opcode::Mkdir, bytes(MkdirIn::default()));
        let mode = libc::S_IFREG | 0o644;
        refused(
            Opcode::Mknod,
            bytes(MknodIn {
                mode,
                ..Default::default()
            }),
        );
        refused(Opcode::Create, bytes(CreateIn::default()));
        refused(Opcode::Link, bytes(LinkIn { oldnodeid: sub }));
        // As the new name, and as the old one.
        refused(
            Opcode::Rename2,
            [
                bytes(Rename2In {
                    newdir: 1,
                    ..Default::default()
                }),
                name("sub"),
            ]
            .concat(),
        );
        let body = [name(bad), name("target")].concat();
        assert_eq!(guest.call(Opcode::Symlink, 1, &body), Err(libc::EINVAL));
        assert_eq!(
            rename(&mut guest, (1, bad), (1, "new"), 0),
            Err(libc::EINVAL)
        );
    }
    // A symbolic link is a name and no way.
    let link = guest.look_up(1, "link").unwrap();
    assert_eq!(link.attr.mode & libc::S_IFMT, libc::S_IFLNK);
    let target = guest.call(Opcode::Readlink, link.nodeid, &[]);
    assert_eq!(target.unwrap(), b"../secret");
    assert_eq!(guest.open(link.nodeid, libc::O_RDONLY), Err(libc::ENXIO));
    assert_eq!(guest.look_up(link.nodeid, "x").err(), Some(libc::ENOTDIR));
}

#[test]
fn what_a_user_creates_belongs_to_the_user() {
    let dir = directory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    (guest.uid, guest.gid) = (1000, 1001);
    let flags = libc::O_RDWR;
    create(&mut guest, 1, "file", libc::S_IFREG | 0o666, flags);
    let body = MkdirIn {
        mode: 0o777,
        umask: 0o22,
    };
    let reply = guest.call(Opcode::Mkdir, 1, &[bytes(body), name("dir")].concat());
    assert!(reply.is_ok());
    let body = [name("link"), name("to")].concat();
    guest.call(Opcode::Symlink, 1, &body).unwrap();
    (guest.uid, guest.gid) = (0, 0);
    create(&mut guest, 1, "root", libc::S_IFREG | 0o4755, flags);
    let of = |entry: &str| {
        let found = fs::symlink_metadata(dir.path().join(entry)).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    assert_eq!(of("file"), (1000, 1001, 0o644));
    assert_eq!(of("dir"), (1000, 1001, 0o755));
    assert_eq!(of("link"), (1000, 1001, 0o777));
    assert_eq!(of("root"), (0, 0, 0o4755));
}

#[test]
fn special_files_are_names_that_the_host_never_opens() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    for (entry, kind) in [("fifo", libc::S_IFIFO), ("socket", libc::S_IFSOCK)] {
        let body = MknodIn {
            mode: kind | 0o600,
            ..Default::default()
        };
        let reply = guest
            .call(Opcode::Mknod, 1, &[bytes(body), name(entry)].concat())
            .unwrap();
        let made: EntryOut = parse(&reply);
        assert_eq!(made.attr.mode & libc::S_IFMT, kind);
        assert_eq!(guest.open(made.nodeid, libc::O_RDWR), Err(libc::ENXIO));
        let body = bytes(SetattrIn {
            valid: 1 << 3,
            ..Default::default()
        });
        let cut = guest.call(Opcode::Setattr, made.nodeid, &body);
        assert_eq!(cut, Err(libc::EINVAL));
    }
    let kind = fs::metadata(dir.path().join("fifo")).unwrap().file_type();
    assert!(kind.is_fifo());
}

#[test]
fn a_file_without_a_name_stays_what_it_is() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    fs::write(dir.path().join("a"), "data").unwrap();
    let node = guest.walk("a").unwrap();
    guest.call(Opcode::Unlink, 1, &name("a")).unwrap();
    let found = guest.attributes(node).unwrap();
    assert_eq!((found.attr.nlink, found.attr.size), (0, 4));
    let cut = bytes(SetattrIn {
        valid: 1 << 3,
        size: 2,
        ..Default::default()
    });
    let reply = guest.call(Opcode::Setattr, node, &cut).unwrap();
    assert_eq!(parse::<AttrOut>(&reply).attr.size, 2);
    let fh = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"da");
    release(&mut guest, node, fh);
    forget(&mut guest, node, 1);
    assert_eq!(guest.attributes(node).err(), Some(libc::ESTALE));
    assert_eq!(guest.device.share.nodes().count(), 1);
}

#[test]
fn a_rename_over_an_open_file_leaves_both_readable() {
    let dir = directory();
    fs::write(dir.path().join("old"), "old").unwrap();
    fs::write(dir.path().join("new"), "new").unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    let old = guest.walk("old").unwrap();
    let fh = guest.open(old, libc::O_RDONLY).unwrap();
    let new = guest.walk("new").unwrap();
    rename(&mut guest, (1, "new"), (1, "old"), 0).unwrap();
    assert_eq!(guest.read(old, fh, 0, 10).unwrap(), b"old");
    assert_eq!(guest.attributes(old).unwrap().attr.nlink, 0);
    assert_eq!(guest.walk("old").unwrap(), new);
    assert_eq!(guest.content("old").unwrap(), b"new");
    let exchange = libc::RENAME_EXCHANGE;
    fs::write(dir.path().join("third"), "third").unwrap();
    let third = guest.walk("third").unwrap();
    rename(&mut guest, (1, "old"), (1, "third"), exchange).unwrap();
    assert_eq!(guest.walk("old").unwrap(), third);
    assert_eq!(guest.walk("third").unwrap(), new);
}

#[test]
fn hard_links_are_one_node() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    let (made, _) = create(&mut guest, 1, "a", libc::S_IFREG | 0o644, libc::O_RDWR);
    let body = bytes(LinkIn {
        oldnodeid: made.nodeid,
    });
    let reply = guest
        .call(Opcode::Link, 1, &[body, name("b")].concat())
        .unwrap();
    let linked: EntryOut = parse(&reply);
    assert_eq!(linked.nodeid, made.nodeid);
    assert_eq!(linked.attr.nlink, 2);
    guest.call(Opcode::Unlink, 1, &name("b")).unwrap();
    assert_eq!(guest.walk("a").unwrap(), made.nodeid);
}

#[test]
fn holes_copies_and_allocation_reach_the_host() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    let (file, fh) = create(&mut guest, 1, "a", libc::S_IFREG | 0o644, libc::O_RDWR);
    let node = file.nodeid;
    let reply = write(&mut guest, node, fh, 1 << 20, b"tail", 0).unwrap();
    assert_eq!(parse::<WriteOut>(&reply).size, 4);
    let body = bytes(LseekIn {
        fh,
        offset: 0,
        whence: libc::SEEK_DATA as u32,
        padding: 0,
    });
    let reply = guest.call(Opcode::Lseek, node, &body).unwrap();
    assert_eq!(parse::<LseekOut>(&reply).offset, 1 << 20);
    let body = bytes(FallocateIn {
        fh,
        offset: 0,
        length: 2 << 20,
        mode: 0,
        padding: 0,
    });
    guest.call(Opcode::Fallocate, node, &body).unwrap();
    assert_eq!(guest.attributes(node).unwrap().attr.size, 2 << 20);
    let found = fs::metadata(dir.path().join("a")).unwrap();
    assert!(found.blocks() * 512 >= 2 << 20);
    // O_APPEND: at the end, wherever the guest thinks it is.
    let body = WriteIn {
        fh,
        size: 3,
        flags: libc::O_APPEND as u32,
        ..Default::default()
    };
    let body = [bytes(body), b"end".to_vec()].concat();
    guest.call(Opcode::Write, node, &body).unwrap();
    assert_eq!(guest.attributes(node).unwrap().attr.size, (2 << 20) + 3);
}

#[test]
fn writing_clears_set_user_id_when_the_guest_says_so() {
    let dir = directory();
    let mut guest = Guest::mounted(&config(dir.path()));
    let mode = libc::S_IFREG | 0o4755;
    let (file, fh) = create(&mut guest, 1, "a", mode, libc::O_RDWR);
    let bits = |dir: &Path| fs::metadata(dir.join("a")).unwrap().mode() & 0o7777;
    write(&mut guest, file.nodeid, fh, 0, b"x", 0).unwrap();
    assert_eq!(bits(dir.path()), 0o4755);
    let flags = WRITE_KILL_PRIV;
    write(&mut guest, file.nodeid, fh, 0, b"x", flags).unwrap();
    assert_eq!(bits(dir.path()), 0o755);
}

#[test]
fn extended_attributes_of_all_kinds_of_files() {
    let dir = directory();
    symlink("nowhere", dir.path().join("link")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    for entry in ["file", "link"] {
        let node = guest.walk(entry).unwrap();
        let attribute = name("trusted.cube");
        let body = SetxattrIn {
            size: 5,
            ..Default::default()
        };
        let body = [bytes(body), attribute.clone(), b"value".to_vec()].concat();
        guest.call(Opcode::Setxattr, node, &body).unwrap();
        let query = |size: u32| [size.to_le_bytes(), [0; 4]].concat();
        let body = [query(64), attribute.clone()].concat();
        let value = guest.call(Opcode::Getxattr, node, &body).unwrap();
        assert_eq!(value, b"value");
        let body = [query(0), attribute.clone()].concat();
        let length = guest.call(Opcode::Getxattr, node, &body).unwrap();
        assert_eq!(length[..4], 5u32.to_le_bytes());
        let length = guest.call(Opcode::Listxattr, node, &query(0)).unwrap();
        assert!(length[0] as usize >= attribute.len());
        let body = [query(64), attribute.clone()].concat();
        let names = guest.call(Opcode::Listxattr, node, &query(256)).unwrap();
        assert!(names.ends_with(&attribute), "{names:?}");
        guest.call(Opcode::Removexattr, node, &attribute).unwrap();
        let gone = guest.call(Opcode::Getxattr, node, &body);
        assert_eq!(gone, Err(libc::ENODATA));
    }
}

#[test]
fn a_read_only_share_refuses_every_change() {
    let dir = directory();
    fs::write(dir.path().join("a"), "data").unwrap();
    let mut read_only = config(dir.path());
    read_only.read_only = true;
    let mut guest = Guest::mounted(&read_only);
    let node = guest.walk("a").unwrap();
    let fh = guest.open(node, libc::O_RDONLY).unwrap();
    let mut refused = |opcode, node, body: Vec<u8>| {
        let reply = guest.call(opcode, node, &body);
        assert_eq!(reply, Err(libc::EROFS), "{opcode:?}");
    };
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC] {
        let flags = flags as u32;
        refused(
            Opcode::Open,
            node,
            bytes(OpenIn {
                flags,
                ..Default::default()
            }),
        );
    }
    let new = name("new");
    refused(
        Opcode::Create,
        1,
        [bytes(CreateIn::default()), new.clone()].concat(),
    );
    refused(
        Opcode::Mkdir,
        1,
        [bytes(MkdirIn::default()), new.clone()].concat(),
    );
    refused(
        Opcode::Mknod,
        1,
        [bytes(MknodIn::default()), new.clone()].concat(),
    );
    refused(Opcode::Symlink, 1, [new.clone(), name("to")].concat());
    refused(
        Opcode::Link,
        1,
        [bytes(LinkIn { oldnodeid: node }), new.clone()].concat(),
    );
    refused(Opcode::Unlink, 1, name("a"));
    refused(Opcode::Rmdir, 1, name("a"));
    let to_root = Rename2In {
        newdir: 1,
        ..Default::default()
    };
    refused(
        Opcode::Rename2,
        1,
        [bytes(to_root), name("a"), new.clone()].concat(),
    );
    refused(Opcode::Setattr, node, bytes(SetattrIn::default()));
    let attribute = SetxattrIn {
        size: 1,
        ..Default::default()
    };
    refused(
        Opcode::Setxattr,
        node,
        [bytes(attribute), name("user.a"), vec![1]].concat(),
    );
    refused(Opcode::Removexattr, node, name("user.a"));
    let data = WriteIn {
        fh,
        size: 1,
        ..Default::default()
    };
    refused(Opcode::Write, node, [bytes(data), vec![1]].concat());
    let space = FallocateIn {
        fh,
        length: 1,
        ..Default::default()
    };
    refused(Opcode::Fallocate, node, bytes(space));
    refused(Opcode::CopyFileRange, node, vec![0; 56]);
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"data");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_only_the_guest_changes_is_cached_and_what_is_missing_too() {
    let dir = directory();
    fs::create_dir_all(dir.path().join("rootfs/c1/etc")).unwrap();
    fs::create_dir_all(dir.path().join("volume")).unwrap();
    fs::write(dir.path().join("volume/f"), "").unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    let rootfs = guest.look_up(1, "rootfs").unwrap();
    assert_eq!(rootfs.entry_valid, 0);
    let container = guest.look_up(rootfs.nodeid, "c1").unwrap();
    assert_eq!(container.entry_valid, 0);
    assert!(container.attr_valid > 1_000_000);
    let etc = guest.look_up(container.nodeid, "etc").unwrap();
    assert!(etc.entry_valid > 1_000_000 && etc.attr_valid > 1_000_000);
    let missing = guest.look_up(etc.nodeid, "missing").unwrap();
    assert_eq!(missing.nodeid, 0);
    assert!(missing.entry_valid > 1_000_000);
    let volume = guest.look_up(1, "volume").unwrap();
    assert_eq!((volume.entry_valid, volume.attr_valid), (0, 1));
    let file = guest.look_up(volume.nodeid, "f").unwrap();
    assert_eq!((file.entry_valid, file.attr_valid), (1, 1));
    let missing = guest.look_up(volume.nodeid, "missing").err();
    assert_eq!(missing, Some(libc::ENOENT));
    assert_eq!(guest.look_up(1, "missing").err(), Some(libc::ENOENT));
}

fn many_files(dir: &Path, directories: usize, files: usize) {
    for d in 0..directories {
        let sub = dir.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..files {
            fs::write(sub.join(format!("f{f}")), format!("{d}/{f}")).unwrap();
        }
    }
}

#[test]
fn a_walk_over_many_files_takes_few_descriptors_and_every_file_can_be_used_after() {
    let dir = directory();
    many_files(dir.path(), 40, 50);
    let mut guest = Guest::mounted(&config(dir.path()));
    guest.device.share.nodes().hold_at_most(8);
    let mut files = Vec::new();
    for d in 0..40 {
        let sub = guest.walk(&format!("d{d}")).unwrap();
        for f in 0..50 {
            let file = guest.look_up(sub, &format!("f{f}")).unwrap();
            files.push((file.nodeid, format!("{d}/{f}")));
        }
    }
    assert_eq!(guest.device.share.nodes().count(), 1 + 40 + 40 * 50);
    assert!(guest.device.share.nodes().count_held() <= 10);
    for (node, content) in &files {
        assert_eq!(
            guest.attributes(*node).unwrap().attr.size,
            content.len() as u64
        );
        let fh = guest.open(*node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(*node, fh, 0, 100).unwrap(), content.as_bytes());
        release(&mut guest, *node, fh);
    }
    assert!(guest.device.share.nodes().count_held() <= 10);
    for (node, _) in &files {
        forget(&mut guest, *node, 1);
    }
    // Every directory was looked up once.
    assert_eq!(guest.device.share.nodes().count(), 1 + 40);
}

#[test]
fn parked_files_are_found_again_wherever_the_guest_moved_them() {
    let dir = directory();
    many_files(dir.path(), 3, 20);
    let mut guest = Guest::mounted(&config(dir.path()));
    guest.device.share.nodes().hold_at_most(0);
    let [d0, d1, d2] = [0, 1, 2].map(|d| guest.walk(&format!("d{d}")).unwrap());
    let f0 = guest.look_up(d0, "f0").unwrap().nodeid;
    let f1 = guest.look_up(d0, "f1").unwrap().nodeid;
    let f2 = guest.look_up(d0, "f2").unwrap().nodeid;
    // Into another directory, which then moves itself; over another file; and away.
    rename(&mut guest, (d0, "f0"), (d1, "moved"), 0).unwrap();
    rename(&mut guest, (1, "d1"), (d2, "inner"), 0).unwrap();
    rename(&mut guest, (d0, "f1"), (d0, "f3"), 0).unwrap();
    guest.call(Opcode::Unlink, d0, &name("f2")).unwrap();
    guest.attributes(d0).unwrap();
    for (node, size, links) in [(f0, 3, 1), (f1, 3, 1), (f2, 3, 0)] {
        let found = guest.attributes(node).unwrap().attr;
        assert_eq!((found.size, found.nlink), (size, links));
        guest.open(node, libc::O_RDONLY).unwrap();
    }
    assert_eq!(guest.walk("d2/inner/moved").unwrap(), f0);
    assert_eq!(guest.content("d0/f3").unwrap(), b"0/1");
}

#[test]
fn a_file_that_the_host_moved_is_stale_until_it_is_looked_up_again() {
    let dir = directory();
    many_files(dir.path(), 1, 3);
    let mut guest = Guest::mounted(&config(dir.path()));
    let sub = guest.walk("d0").unwrap();
    let node = guest.look_up(sub, "f0").unwrap().nodeid;
    fs::rename(dir.path().join("d0/f0"), dir.path().join("d0/g")).unwrap();
    assert_eq!(guest.attributes(node).err(), Some(libc::ESTALE));
    assert_eq!(guest.open(node, libc::O_RDONLY), Err(libc::ESTALE));
    assert_eq!(guest.look_up(sub, "g").unwrap().nodeid, node);
    assert!(guest.attributes(node).is_ok());
    // Another file in its place, even with the same inode number, is another file.
    fs::remove_file(dir.path().join("d0/g")).unwrap();
    fs::write(dir.path().join("d0/g"), "another").unwrap();
    assert_eq!(guest.open(node, libc::O_RDONLY), Err(libc::ESTALE));
    let other = guest.look_up(sub, "g").unwrap();
    assert_ne!(other.nodeid, node);
    assert_eq!(guest.content("d0/g").unwrap(), b"another");
}

#[test]
fn a_listing_tells_attributes_until_the_guest_knows_too_much() {
    let dir = directory();
    many_files(dir.path(), 1, 60);
    let told = Arc::new(AtomicU64::new(0));
    let seen = told.clone();
    let limits = Limits {
        nodes: 1000,
        crowd: 50,
        budget: Budget::of(100),
    };
    let device = Fs::with_limits(
        &config(dir.path()),
        limits,
        Box::new(move |inodes| seen.store(inodes, Ordering::SeqCst)),
    )
    .unwrap();
    let mut guest = Guest::with_device(device);
    guest.init();
    let sub = guest.walk("d0").unwrap();
    let reply = guest.call(Opcode::Opendir, sub, &[0; 8]).unwrap();
    let fh = parse::<OpenOut>(&reply).fh;
    let mut offset = 0;
    let mut entries = Vec::new();
    loop {
        let body = bytes(ReadIn {
            fh,
            offset,
            size: 4096,
            ..Default::default()
        });
        let mut reply = guest.call(Opcode::Readdirplus, sub, &body).unwrap();
        if reply.is_empty() {
            break;
        }
        while !reply.is_empty() {
            let entry: EntryOut = parse(&reply);
            let dirent: virtiofsd::fuse::Dirent = parse(&reply[size_of::<EntryOut>()..]);
            let start = size_of::<EntryOut>() + size_of::<virtiofsd::fuse::Dirent>();
            let text = reply[start..start + dirent.namelen as usize].to_vec();
            entries.push((String::from_utf8(text).unwrap(), entry.nodeid));
            offset = dirent.off;
            let used = (start + dirent.namelen as usize).next_multiple_of(8);
            reply.drain(..used);
        }
    }
    assert_eq!(entries.len(), 62);
    let nodes = entries.iter().filter(|(_, node)| *node != 0).count();
    assert!((40..50).contains(&nodes), "{nodes}");
    assert_eq!(told.load(Ordering::SeqCst), 50);
    // What is asked for is still told.
    for (entry, _) in entries.iter().filter(|(text, _)| text.starts_with('f')) {
        assert!(guest.look_up(sub, entry).is_ok());
    }
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
    let blocked = super::workers::MOST_REQUESTS as u16;
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

#[test]
fn at_the_limit_a_guest_gets_an_error_and_the_process_keeps_its_reserve() {
    let dir = directory();
    many_files(dir.path(), 1, 1);
    let limits = Limits {
        nodes: 1000,
        crowd: 1000,
        budget: Budget::of(6),
    };
    let device = Fs::with_limits(&config(dir.path()), limits, Box::new(|_| {}));
    let mut guest = Guest::with_device(device.unwrap());
    guest.init();
    let node = guest.walk("d0/f0").unwrap();
    let mut opened = Vec::new();
    let error = loop {
        match guest.open(node, libc::O_RDONLY) {
            Ok(fh) => opened.push(fh),
            Err(e) => break e,
        }
    };
    assert_eq!(error, libc::ENFILE);
    // The root, the directory, and the reference to the file took the rest.
    assert_eq!(opened.len(), 3);
    release(&mut guest, node, opened[0]);
    assert!(guest.open(node, libc::O_RDONLY).is_ok());
}

#[test]
fn a_mount_that_comes_later_is_seen_and_can_go_away() {
    let dir = directory();
    let point = dir.path().join("rootfs/c1");
    fs::create_dir_all(&point).unwrap();
    let mut guest = Guest::mounted(&config(dir.path()));
    let before = guest.walk("rootfs/c1").unwrap();
    let target = CString::new(point.to_str().unwrap()).unwrap();
    let mount = || {
        // SAFETY: all are valid strings.
        let done = unsafe {
            libc::mount(
                c"cube-test".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                std::ptr::null(),
            )
        };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    // SAFETY: as above.
    let unmount = || assert_eq!(unsafe { libc::umount2(target.as_ptr(), 0) }, 0);
    mount();
    fs::write(point.join("inside"), "mounted").unwrap();
    let rootfs = guest.walk("rootfs").unwrap();
    let found = guest.look_up(rootfs, "c1").unwrap();
    assert_ne!(found.nodeid, before);
    assert_eq!(found.attr.flags & ATTR_SUBMOUNT, ATTR_SUBMOUNT);
    assert_eq!(guest.content("rootfs/c1/inside").unwrap(), b"mounted");
    let inside = guest.look_up(found.nodeid, "inside").unwrap().nodeid;
    // The guest unmounts, that is, forgets; then the host can.
    let state = guest.device.save();
    for handle in state.share.handles {
        release(&mut guest, handle.node, handle.number);
    }
    forget(&mut guest, inside, 100);
    forget(&mut guest, found.nodeid, 100);
    unmount();
    assert_eq!(guest.walk("rootfs/c1").unwrap(), before);
    mount();
    let again = guest.look_up(rootfs, "c1").unwrap();
    assert_ne!(again.nodeid, found.nodeid);
    assert_eq!(guest.look_up(again.nodeid, "inside").unwrap().nodeid, 0);
    forget(&mut guest, again.nodeid, 1);
    unmount();
}

/// Requests as a hostile kernel sends them: nearly right, or not at all.
fn hostile_request() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![0u32..55, any::<u32>()];
    let node = prop_oneof![0u64..6, Just(u64::MAX), any::<u64>()];
    let length = prop_oneof![
        Just(None),
        any::<u32>().prop_map(Some),
        (0u32..200).prop_map(Some)
    ];
    let number = prop_oneof![
        0u64..6,
        Just(u64::MAX),
        Just(i64::MAX as u64),
        Just(1 << 32),
        any::<u64>()
    ];
    let part = prop_oneof![
        number.prop_map(|n| n.to_le_bytes().to_vec()),
        (0u32..5000).prop_map(|n| n.to_le_bytes().to_vec()),
        prop_oneof![
            Just("a"),
            Just("d0"),
            Just("f0"),
            Just(".."),
            Just("x/y"),
            Just("")
        ]
        .prop_map(name),
        proptest::collection::vec(any::<u8>(), 0..20),
    ];
    let body = proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat());
    (opcode, node, length, body, any::<u16>(), 0usize..200).prop_map(
        |(opcode, nodeid, length, body, extra, cut)| {
            let header = InHeader {
                len: length.unwrap_or((size_of::<InHeader>() + body.len()) as u32),
                opcode,
                unique: 7,
                nodeid,
                total_extlen: extra,
                ..Default::default()
            };
            let mut request = [bytes(header), body].concat();
            if cut < 20 {
                request.truncate(cut * 4);
            }
            request
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_guest_sends_the_share_goes_on(
        requests in proptest::collection::vec((hostile_request(), prop_oneof![0u32..40, Just(5000u32)]), 1..60),
        mounted: bool,
    ) {
        let outer = directory();
        let path = outer.path().join("share");
        fs::create_dir(&path).unwrap();
        many_files(&path, 1, 3);
        let mut guest = Guest::new(&config(&path));
        if mounted {
            guest.init();
            guest.device.share.nodes().hold_at_most(1);
            let node = guest.walk("d0/f0").unwrap();
            guest.open(node, libc::O_RDWR).unwrap();
        }
        for (request, room) in &requests {
            if let Some((header, _)) = guest.call_raw(request, *room) {
                prop_assert!(header.error <= 0 && header.error > -4096, "{header:?}");
            }
        }
        guest.init();
        prop_assert!(guest.attributes(1).is_ok());
        prop_assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 1);
    }

    #[test]
    fn whatever_chain_a_guest_queues_the_device_goes_on_or_asks_for_a_reset(
        chains in proptest::collection::vec((0usize..2, proptest::collection::vec(
            (prop_oneof![0x10_0000u64..0x11_0000, any::<u64>()], prop_oneof![0u32..100, any::<u32>()], 0u16..8),
            1..6,
        )), 1..20),
    ) {
        let dir = directory();
        let mut guest = Guest::mounted(&config(dir.path()));
        for (queue, chain) in &chains {
            if guest.submit(*queue, chain).is_none() {
                break;
            }
        }
        guest.device.reset();
    }
}
