//! Names, and the files behind them.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

use virtiofsd::fuse::{
    ATTR_SUBMOUNT, AttrOut, CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, Opcode, Rename2In,
    SetattrIn,
};

use super::super::fake_guest::{Guest, bytes, config, name, parse};
use super::*;

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
