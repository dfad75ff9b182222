//! What is written is there: holes, mappings, locks, copies.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;

use super::*;

pub fn holes_and_allocation_work(dir: &Path) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(dir.join("file"))
        .unwrap();
    let fd = file.as_raw_fd();
    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    // SAFETY: plain calls on an open file.
    let allocate = |mode, offset, length| ok(unsafe { libc::fallocate(fd, mode, offset, length) });
    // SAFETY: lseek takes no pointer.
    let seek = |offset, whence| unsafe { libc::lseek(fd, offset, whence) };
    allocate(
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        256 << 10,
        256 << 10,
    );
    let mut byte = [1];
    file.read_exact_at(&mut byte, 300 << 10).unwrap();
    assert_eq!(byte, [0]);
    file.sync_all().unwrap();
    assert_eq!(seek(0, libc::SEEK_HOLE), 256 << 10);
    assert_eq!(seek(256 << 10, libc::SEEK_DATA), 512 << 10);
    allocate(0, 0, 2 << 20);
    let found = file.metadata().unwrap();
    assert_eq!(found.len(), 2 << 20);
    assert!(found.blocks() * 512 >= 2 << 20);
    allocate(libc::FALLOC_FL_KEEP_SIZE, 2 << 20, 1 << 20);
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    allocate(libc::FALLOC_FL_ZERO_RANGE, 0, 4096);
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0]);
    file.set_len(8 << 30).unwrap();
    file.write_all_at(b"end", (8 << 30) - 3).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 8 << 30);
}

pub fn shared_mappings_are_one_memory(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, vec![0; 8192]).unwrap();
    let map = |file: &File| {
        // SAFETY: the file is open and has this length; the mapping stays until the end.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        address.cast::<u8>()
    };
    let open = || OpenOptions::new().read(true).write(true).open(&path);
    let (one, two) = (open().unwrap(), open().unwrap());
    let (first, second) = (map(&one), map(&two));
    // SAFETY: within the mappings.
    unsafe {
        first.add(5000).write_volatile(1);
        assert_eq!(second.add(5000).read_volatile(), 1);
        two.write_all_at(&[2], 5001).unwrap();
        assert_eq!(first.add(5001).read_volatile(), 2);
        let mut byte = [0];
        one.read_exact_at(&mut byte, 5000).unwrap();
        assert_eq!(byte, [1]);
        assert_eq!(libc::msync(first.cast(), 8192, libc::MS_SYNC), 0);
        // Unmapped and closed without a word; the host looks at it afterwards.
        first.add(1).write_volatile(b'!');
        assert_eq!(libc::munmap(first.cast(), 8192), 0);
        assert_eq!(libc::munmap(second.cast(), 8192), 0);
    }
}

pub fn locks_exclude_others(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "0123456789").unwrap();
    let open = || OpenOptions::new().read(true).write(true).open(&path);
    let (one, two) = (open().unwrap(), open().unwrap());
    // SAFETY: plain calls on open files.
    let flock = |file: &File, how| unsafe { libc::flock(file.as_raw_fd(), how) };
    assert_eq!(flock(&one, libc::LOCK_EX), 0);
    assert_eq!(flock(&two, libc::LOCK_EX | libc::LOCK_NB), -1);
    assert_eq!(flock(&one, libc::LOCK_UN), 0);
    assert_eq!(flock(&two, libc::LOCK_SH | libc::LOCK_NB), 0);
    // Of open files, so that two of one process exclude each other.
    let lock = |file: &File, kind: libc::c_int, start, wait| {
        // SAFETY: it has only integer fields.
        let mut range: libc::flock = unsafe { std::mem::zeroed() };
        range.l_type = kind as i16;
        range.l_start = start;
        range.l_len = 2;
        let command = if wait {
            libc::F_OFD_SETLKW
        } else {
            libc::F_OFD_SETLK
        };
        // SAFETY: the structure is valid.
        unsafe { libc::fcntl(file.as_raw_fd(), command, &range) }
    };
    assert_eq!(lock(&one, libc::F_WRLCK, 2, false), 0);
    assert_eq!(lock(&two, libc::F_WRLCK, 0, false), 0);
    assert_eq!(lock(&two, libc::F_WRLCK, 3, false), -1);
    let waiter = open().unwrap();
    let waits = thread::spawn(move || {
        // SAFETY: it has only integer fields.
        let mut range: libc::flock = unsafe { std::mem::zeroed() };
        range.l_type = libc::F_WRLCK as i16;
        // SAFETY: the structure is valid.
        unsafe { libc::fcntl(waiter.as_raw_fd(), libc::F_OFD_SETLKW, &range) }
    });
    drop(one);
    drop(two);
    assert_eq!(waits.join().unwrap(), 0);
}

pub fn appends_do_not_overwrite(dir: &Path) {
    let path = dir.join("log");
    let open = || OpenOptions::new().append(true).create(true).open(&path);
    let mut files = [open().unwrap(), open().unwrap()];
    for round in 0..50 {
        for (number, file) in files.iter_mut().enumerate() {
            writeln!(file, "{round} {number}").unwrap();
        }
    }
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 100);
    files[0].set_len(0).unwrap();
    files[1].write_all(b"x").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"x");
}

pub fn direct_and_synchronous_writes_work(dir: &Path) {
    for flags in [libc::O_DIRECT, libc::O_SYNC, libc::O_DSYNC] {
        let path = dir.join(format!("{flags:x}"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(flags)
            .open(&path)
            .unwrap();
        let layout = std::alloc::Layout::from_size_align(8192, 4096).unwrap();
        // SAFETY: the layout has a size; the memory is initialised and never freed.
        let block = unsafe {
            let start = std::alloc::alloc_zeroed(layout);
            std::slice::from_raw_parts_mut(start, 8192)
        };
        block.fill(7);
        file.write_all_at(block, 4096).unwrap();
        file.read_exact_at(block, 4096).unwrap();
        assert!(block.iter().all(|byte| *byte == 7));
        assert_eq!(fs::read(&path).unwrap().len(), 3 * 4096);
    }
}

pub fn ranges_are_copied(dir: &Path) {
    let data: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
    fs::write(dir.join("from"), &data).unwrap();
    let from = File::open(dir.join("from")).unwrap();
    let to = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(dir.join("to"))
        .unwrap();
    let (mut in_offset, mut out_offset) = (100i64, 0i64);
    while (in_offset as usize) < data.len() {
        // SAFETY: open files and two offsets.
        let copied = unsafe {
            libc::copy_file_range(
                from.as_raw_fd(),
                &mut in_offset,
                to.as_raw_fd(),
                &mut out_offset,
                data.len(),
                0,
            )
        };
        assert!(copied > 0, "{}", io::Error::last_os_error());
    }
    assert!(fs::read(dir.join("to")).unwrap() == data[100..]);
}

pub fn file_system_sizes_are_told(dir: &Path) {
    // SAFETY: it has only integer fields.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid string and structure.
    ok(unsafe { libc::statvfs(text(dir).as_ptr(), &mut found) });
    assert!(found.f_blocks > 0 && found.f_bfree > 0 && found.f_namemax == 255);
}
