//! What the guest may believe, and many files.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtiofsd::fuse::{EntryOut, Opcode, OpenOut, ReadIn};

use super::super::fake_guest::{Guest, bytes, config, name, parse};
use super::super::{Budget, Fs, Limits};
use super::*;

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
