//! What is in a file and about it.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use virtiofsd::fuse::{
    CreateIn, FallocateIn, LinkIn, LseekIn, LseekOut, MkdirIn, MknodIn, Opcode, OpenIn, Rename2In,
    SetattrIn, SetxattrIn, WRITE_KILL_PRIV, WriteIn, WriteOut,
};

use super::super::fake_guest::{Guest, bytes, config, name, parse};
use super::*;

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
    every_change_is_refused(&mut Guest::mounted(&read_only));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_share_of_mounts_refuses_every_change_outside_of_them() {
    let dir = directory();
    fs::write(dir.path().join("a"), "data").unwrap();
    let point = dir.path().join("rootfs/c1");
    fs::create_dir_all(&point).unwrap();
    let mut mounts_only = config(dir.path());
    mounts_only.mounts_only = true;
    let mut guest = Guest::mounted(&mounts_only);
    let before = guest.walk("rootfs/c1").unwrap();
    let mounted = Tmpfs::mount(&point);
    every_change_is_refused(&mut guest);
    // In a mount everything goes on, also where the guest has been before there was one.
    let root = guest.walk("rootfs/c1").unwrap();
    create(
        &mut guest,
        root,
        "file",
        libc::S_IFREG | 0o600,
        libc::O_RDWR,
    );
    guest
        .call(
            Opcode::Mkdir,
            root,
            &[bytes(MkdirIn::default()), name("sub")].concat(),
        )
        .unwrap();
    let mkdir = [bytes(MkdirIn::default()), name("sub")].concat();
    let refused = Err(libc::EROFS);
    assert_eq!(guest.call(Opcode::Mkdir, before, &mkdir), refused);
    // And nothing leads out of it or into it.
    let file = guest.walk("rootfs/c1/file").unwrap();
    let out = [bytes(LinkIn { oldnodeid: file }), name("new")].concat();
    assert_eq!(guest.call(Opcode::Link, 1, &out), refused);
    for (from, to, old) in [(root, 1, "file"), (1, root, "a")] {
        let rename = Rename2In {
            newdir: to,
            ..Default::default()
        };
        let body = [bytes(rename), name(old), name("new")].concat();
        assert_eq!(guest.call(Opcode::Rename2, from, &body), refused);
    }
    let names: Vec<_> = fs::read_dir(&point).unwrap().flatten().collect();
    assert_eq!(names.len(), 2, "{names:?}");
    drop(mounted);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// A file system for a test, gone with it.
struct Tmpfs(CString);

impl Tmpfs {
    fn mount(point: &Path) -> Self {
        let target = CString::new(point.to_str().unwrap()).unwrap();
        let (name, no_data) = (c"cube-test".as_ptr(), std::ptr::null());
        // SAFETY: all are valid strings.
        let done = unsafe { libc::mount(name, target.as_ptr(), c"tmpfs".as_ptr(), 0, no_data) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        Self(target)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // SAFETY: a valid string. The share may still have files of it open.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Of the file `a` in the share's root, and in the root.
fn every_change_is_refused(guest: &mut Guest) {
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
    // struct fuse_copy_file_range_in, whose third field is the node to be written.
    let mut copy = vec![0; 56];
    copy[16..24].copy_from_slice(&node.to_le_bytes());
    refused(Opcode::CopyFileRange, node, copy);
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"data");
}
