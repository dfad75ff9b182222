//! What a file system promises to those who use it. Each check has an empty directory; it passes on the
//! host's ext4 as well (`vm_fs --here DIRECTORY`).

use std::ffi::CString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::thread;

type Check = fn(&Path);

macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        /// All of them, by name.
        pub const CHECKS: &[(&str, Check)] = &[$((stringify!($name), $name)),*];
    };
}

checks![
    owners_modes_and_times_are_kept,
    extended_attributes_are_kept,
    writing_takes_capabilities_and_set_user_id_away,
    links_are_what_they_are,
    a_rename_replaces_an_open_file,
    a_file_without_a_name_works_on,
    holes_and_allocation_work,
    shared_mappings_are_one_memory,
    locks_exclude_others,
    fifos_and_sockets_connect,
    device_nodes_work,
    appends_do_not_overwrite,
    direct_and_synchronous_writes_work,
    ranges_are_copied,
    ten_thousand_small_files,
    two_thousand_files_are_open_at_once,
    other_users_are_kept_out,
    access_control_lists_hold,
    default_access_control_lists_are_inherited,
    group_directories_hand_their_group_down,
    programs_run_from_here,
    file_system_sizes_are_told,
    deep_trees_and_long_names_work,
    many_threads_write_their_own_files,
];

fn ok(result: libc::c_int) -> libc::c_int {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

fn text(path: impl AsRef<Path>) -> CString {
    CString::new(path.as_ref().to_str().unwrap()).unwrap()
}

fn error<T>(result: io::Result<T>) -> i32 {
    result.err().expect("an error").raw_os_error().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Runs `work` as an ordinary user.
fn as_user(id: u32, work: impl FnOnce() + Send + 'static) {
    let done = thread::spawn(move || {
        // SAFETY: the system calls change this thread alone, which ends after the work.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, 0), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, id, id, id), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, id, id, id), 0);
        }
        work();
    });
    if let Err(panic) = done.join() {
        std::panic::resume_unwind(panic);
    }
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    let (path, name) = (text(path), CString::new(name).unwrap());
    // SAFETY: valid strings, and a buffer of this length.
    let done = unsafe {
        libc::lsetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn get_xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (text(path), CString::new(name).unwrap());
    let mut value = vec![0; 256];
    // SAFETY: valid strings, and a buffer of this length.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    value.truncate(length as usize);
    Ok(value)
}

fn owners_modes_and_times_are_kept(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    std::os::unix::fs::chown(&file, Some(12), Some(34)).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o6755)).unwrap();
    let link = dir.join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(56), Some(78)).unwrap();
    let times = |seconds, nanoseconds| libc::timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    for path in [&file, &link] {
        let both = [times(1_000_000_000, 123_456_789), times(-5, 1)];
        // SAFETY: a valid string and two times.
        ok(unsafe {
            libc::utimensat(
                libc::AT_FDCWD,
                text(path).as_ptr(),
                both.as_ptr(),
                libc::AT_SYMLINK_NOFOLLOW,
            )
        });
        let found = fs::symlink_metadata(path).unwrap();
        assert_eq!(
            (found.atime(), found.atime_nsec()),
            (1_000_000_000, 123_456_789)
        );
        assert_eq!((found.mtime(), found.mtime_nsec()), (-5, 1));
    }
    let found = fs::symlink_metadata(&file).unwrap();
    assert_eq!((found.uid(), found.gid(), mode(&file)), (12, 34, 0o6755));
    let found = fs::symlink_metadata(&link).unwrap();
    assert_eq!((found.uid(), found.gid()), (56, 78));
    // A change of the owner takes set-user-ID away.
    std::os::unix::fs::chown(&file, Some(13), None).unwrap();
    assert_eq!(mode(&file), 0o755);
    let before = fs::metadata(&file).unwrap().mtime();
    fs::write(&file, "y").unwrap();
    assert!(fs::metadata(&file).unwrap().mtime() > before);
}

fn extended_attributes_are_kept(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "").unwrap();
    let link = dir.join("link");
    std::os::unix::fs::symlink("file", &link).unwrap();
    for name in ["user.a", "trusted.b", "security.c"] {
        for path in [&file, &dir.to_owned()] {
            set_xattr(path, name, b"value").unwrap();
            assert_eq!(get_xattr(path, name).unwrap(), b"value");
        }
    }
    set_xattr(&link, "trusted.l", b"of the link").unwrap();
    assert_eq!(error(get_xattr(&file, "trusted.l")), libc::ENODATA);
    assert_eq!(error(set_xattr(&link, "user.l", b"")), libc::EPERM);
    let mut names = vec![0u8; 256];
    // SAFETY: a valid string, and a buffer of this length.
    let length =
        unsafe { libc::llistxattr(text(&file).as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(length as usize);
    let names: Vec<_> = names.split(|byte| *byte == 0).collect();
    assert!(names.contains(&&b"user.a"[..]) && names.contains(&&b"security.c"[..]));
    // SAFETY: valid strings.
    ok(unsafe { libc::removexattr(text(&file).as_ptr(), c"user.a".as_ptr()) });
    assert_eq!(error(get_xattr(&file, "user.a")), libc::ENODATA);
}

/// `struct vfs_ns_cap_data` with CAP_NET_RAW, revision 2 (include/uapi/linux/capability.h).
const CAPABILITY: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

fn writing_takes_capabilities_and_set_user_id_away(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    set_xattr(&file, "security.capability", &CAPABILITY).unwrap();
    assert_eq!(get_xattr(&file, "security.capability").unwrap(), CAPABILITY);
    fs::write(&file, "y").unwrap();
    assert_eq!(
        error(get_xattr(&file, "security.capability")),
        libc::ENODATA
    );
    fs::set_permissions(dir, Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o6777)).unwrap();
    let mut root = OpenOptions::new().append(true).open(&file).unwrap();
    root.write_all(b"root may").unwrap();
    assert_eq!(mode(&file), 0o6777);
    let path = file.clone();
    as_user(1000, move || {
        let mut user = OpenOptions::new().append(true).open(path).unwrap();
        user.write_all(b"others may not").unwrap();
    });
    assert_eq!(mode(&file), 0o777);
    fs::set_permissions(&file, Permissions::from_mode(0o4777)).unwrap();
    let path = file.clone();
    as_user(1000, move || drop(File::create(path).unwrap()));
    assert_eq!(mode(&file), 0o777);
}

fn links_are_what_they_are(dir: &Path) {
    let (file, hard, soft) = (dir.join("file"), dir.join("hard"), dir.join("soft"));
    fs::write(&file, "one").unwrap();
    fs::hard_link(&file, &hard).unwrap();
    std::os::unix::fs::symlink("hard", &soft).unwrap();
    let found = fs::metadata(&file).unwrap();
    assert_eq!(found.nlink(), 2);
    assert_eq!(found.ino(), fs::metadata(&soft).unwrap().ino());
    fs::write(&soft, "two").unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"two");
    fs::remove_file(&file).unwrap();
    assert_eq!(fs::read(&soft).unwrap(), b"two");
    assert_eq!(fs::metadata(&hard).unwrap().nlink(), 1);
    assert_eq!(fs::read_link(&soft).unwrap(), Path::new("hard"));
    std::os::unix::fs::symlink("soft", dir.join("loop")).unwrap();
    fs::remove_file(&soft).unwrap();
    std::os::unix::fs::symlink("loop", &soft).unwrap();
    assert_eq!(error(fs::read(&soft)), libc::ELOOP);
    // The same name, another target.
    fs::remove_file(&soft).unwrap();
    std::os::unix::fs::symlink("hard", &soft).unwrap();
    assert_eq!(fs::read_link(&soft).unwrap(), Path::new("hard"));
}

fn rename_with(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    // SAFETY: valid strings.
    let done = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            text(from).as_ptr(),
            libc::AT_FDCWD,
            text(to).as_ptr(),
            flags,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn a_rename_replaces_an_open_file(dir: &Path) {
    let (old, new) = (dir.join("old"), dir.join("new"));
    fs::write(&old, "old").unwrap();
    let mut open = File::open(&old).unwrap();
    fs::write(&new, "new").unwrap();
    fs::rename(&new, &old).unwrap();
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!(content, "old");
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read(&old).unwrap(), b"new");
    assert_eq!(error(fs::metadata(&new)), libc::ENOENT);
    fs::write(&new, "third").unwrap();
    let refused = rename_with(&new, &old, libc::RENAME_NOREPLACE);
    assert_eq!(error(refused), libc::EEXIST);
    rename_with(&new, &old, libc::RENAME_EXCHANGE).unwrap();
    assert_eq!(fs::read(&new).unwrap(), b"new");
    assert_eq!(fs::read(&old).unwrap(), b"third");
    // Directories, with what is in them.
    let (a, b) = (dir.join("a"), dir.join("b"));
    fs::create_dir_all(a.join("x/y")).unwrap();
    fs::write(a.join("x/y/z"), "deep").unwrap();
    fs::create_dir(&b).unwrap();
    fs::rename(&a, &b).unwrap();
    assert_eq!(fs::read(b.join("x/y/z")).unwrap(), b"deep");
    assert_eq!(error(fs::rename(&b, b.join("x/inside"))), libc::EINVAL);
}

fn a_file_without_a_name_works_on(dir: &Path) {
    let path = dir.join("file");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    file.write_all(b"0123456789").unwrap();
    fs::remove_file(&path).unwrap();
    file.set_len(4).unwrap();
    let found = file.metadata().unwrap();
    assert_eq!((found.len(), found.nlink()), (4, 0));
    file.set_permissions(Permissions::from_mode(0o600)).unwrap();
    file.write_all_at(b"abc", 2).unwrap();
    file.sync_all().unwrap();
    file.rewind().unwrap();
    let mut content = String::new();
    file.read_to_string(&mut content).unwrap();
    assert_eq!(content, "01abc");
    // A directory that is gone, as the current one of a process.
    let gone = dir.join("gone");
    fs::create_dir(&gone).unwrap();
    let open = File::open(&gone).unwrap();
    fs::remove_dir(&gone).unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

fn holes_and_allocation_work(dir: &Path) {
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

fn shared_mappings_are_one_memory(dir: &Path) {
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

fn locks_exclude_others(dir: &Path) {
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

fn fifos_and_sockets_connect(dir: &Path) {
    let fifo = dir.join("fifo");
    // SAFETY: a valid string.
    ok(unsafe { libc::mkfifo(text(&fifo).as_ptr(), 0o600) });
    let path = fifo.clone();
    let writer = thread::spawn(move || fs::write(path, "through a FIFO").unwrap());
    assert_eq!(fs::read(&fifo).unwrap(), b"through a FIFO");
    writer.join().unwrap();
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    assert!(fs::metadata(&path).unwrap().file_type().is_socket());
    let client = thread::spawn(move || UnixStream::connect(path).unwrap().write_all(b"hi"));
    let mut content = String::new();
    listener
        .accept()
        .unwrap()
        .0
        .read_to_string(&mut content)
        .unwrap();
    client.join().unwrap().unwrap();
    assert_eq!(content, "hi");
}

fn device_nodes_work(dir: &Path) {
    let (null, big) = (dir.join("null"), dir.join("big"));
    // SAFETY: valid strings.
    unsafe {
        let character = libc::S_IFCHR | 0o666;
        ok(libc::mknod(
            text(&null).as_ptr(),
            character,
            libc::makedev(1, 3),
        ));
        let block = libc::S_IFBLK | 0o600;
        ok(libc::mknod(
            text(&big).as_ptr(),
            block,
            libc::makedev(259, 300_000),
        ));
    }
    fs::write(&null, "gone").unwrap();
    assert_eq!(fs::read(&null).unwrap(), b"");
    let found = fs::metadata(&big).unwrap();
    assert!(found.file_type().is_block_device());
    assert_eq!(found.rdev(), libc::makedev(259, 300_000));
}

fn appends_do_not_overwrite(dir: &Path) {
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

fn direct_and_synchronous_writes_work(dir: &Path) {
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

fn ranges_are_copied(dir: &Path) {
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

fn ten_thousand_small_files(dir: &Path) {
    for d in 0..20 {
        let sub = dir.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..500 {
            fs::write(sub.join(format!("f{f}")), format!("{d} {f}")).unwrap();
        }
    }
    assert_eq!(crate::guest::walk(dir), 20 * 501);
    for d in 0..20 {
        for f in (0..500).step_by(37) {
            let path = dir.join(format!("d{d}/f{f}"));
            assert_eq!(fs::read_to_string(path).unwrap(), format!("{d} {f}"));
        }
    }
    for d in 0..20 {
        fs::remove_dir_all(dir.join(format!("d{d}"))).unwrap();
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
}

fn two_thousand_files_are_open_at_once(dir: &Path) {
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: a valid structure.
    ok(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) });
    let mut files: Vec<File> = (0..2000)
        .map(|n| {
            let path = dir.join(format!("{n}"));
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(path)
                .unwrap();
            write!(file, "{n}").unwrap();
            file
        })
        .collect();
    for (n, file) in files.iter_mut().enumerate() {
        fs::remove_file(dir.join(format!("{n}"))).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, n.to_string());
    }
}

fn other_users_are_kept_out(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let (mine, theirs) = (dir.join("mine"), dir.join("theirs"));
    fs::write(&mine, "secret").unwrap();
    fs::set_permissions(&mine, Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(1000), Some(1000)).unwrap();
    let (theirs_too, mine_too, top) = (theirs.clone(), mine.clone(), dir.to_owned());
    as_user(1000, move || {
        assert_eq!(error(fs::read(&mine_too)), libc::EACCES);
        assert_eq!(error(fs::write(top.join("new"), "")), libc::EACCES);
        assert_eq!(error(fs::remove_file(&mine_too)), libc::EACCES);
        let own = theirs_too.join("own");
        fs::write(&own, "own").unwrap();
        fs::create_dir(theirs_too.join("dir")).unwrap();
        std::os::unix::fs::symlink("x", theirs_too.join("link")).unwrap();
        assert_eq!(
            error(std::os::unix::fs::chown(&own, Some(0), None)),
            libc::EPERM
        );
    });
    for entry in ["own", "dir", "link"] {
        let found = fs::symlink_metadata(theirs.join(entry)).unwrap();
        assert_eq!((found.uid(), found.gid()), (1000, 1000));
    }
}

/// `struct posix_acl_xattr` (include/uapi/linux/posix_acl_xattr.h): entries of tag, permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

/// The owner, user 1000, the group, the mask, others.
fn acl_for_1000() -> Vec<u8> {
    let none = u32::MAX;
    acl(&[
        (1, 6, none),
        (2, 6, 1000),
        (4, 0, none),
        (0x10, 6, none),
        (0x20, 0, none),
    ])
}

fn access_control_lists_hold(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let path = dir.join("file");
    fs::write(&path, "for some").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    set_xattr(&path, "system.posix_acl_access", &acl_for_1000()).unwrap();
    let value = get_xattr(&path, "system.posix_acl_access").unwrap();
    assert_eq!(value, acl_for_1000());
    let again = path.clone();
    as_user(1000, move || {
        assert_eq!(fs::read(&again).unwrap(), b"for some");
        fs::write(&again, "changed").unwrap();
    });
    let again = path.clone();
    as_user(1001, move || {
        assert_eq!(error(fs::read(&again)), libc::EACCES);
    });
    // The group's bits of the mode are the mask.
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    as_user(1000, move || {
        assert_eq!(error(fs::read(&path)), libc::EACCES);
    });
}

fn default_access_control_lists_are_inherited(dir: &Path) {
    set_xattr(dir, "system.posix_acl_default", &acl_for_1000()).unwrap();
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    let value = get_xattr(&path, "system.posix_acl_access").unwrap();
    assert!(value.ends_with(&acl(&[(0x20, 0, u32::MAX)])[4..]));
    // The list, and not the umask, says what others get.
    assert_eq!(mode(&path) & 0o007, 0);
    let plain = dir.join("..").join("plain-umask");
    fs::write(&plain, "").unwrap();
    assert_eq!(mode(&plain), 0o644);
    fs::remove_file(plain).unwrap();
}

fn group_directories_hand_their_group_down(dir: &Path) {
    std::os::unix::fs::chown(dir, None, Some(2000)).unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o2777)).unwrap();
    let path = dir.to_owned();
    as_user(1000, move || {
        fs::write(path.join("file"), "").unwrap();
        fs::create_dir(path.join("sub")).unwrap();
    });
    for entry in ["file", "sub"] {
        let found = fs::metadata(dir.join(entry)).unwrap();
        assert_eq!((found.uid(), found.gid()), (1000, 2000));
    }
    assert_eq!(mode(&dir.join("sub")) & 0o2000, 0o2000);
}

fn programs_run_from_here(dir: &Path) {
    let program = dir.join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    for _ in 0..2 {
        let output = Command::new(&program).arg("--list").output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("programs_run_from_here"), "{text}");
    }
    let running = Command::new(&program)
        .arg("--wait")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let busy = OpenOptions::new().write(true).open(&program);
    assert_eq!(error(busy), libc::ETXTBSY);
    fs::remove_file(&program).unwrap();
    // Its stdin ends, and so does it.
    assert!(running.wait_with_output().unwrap().status.success());
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let script = dir.join("script");
    fs::write(&script, "#!/init --list\n").unwrap();
    assert_eq!(error(Command::new(&script).spawn()), libc::EACCES);
}

fn file_system_sizes_are_told(dir: &Path) {
    // SAFETY: it has only integer fields.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid string and structure.
    ok(unsafe { libc::statvfs(text(dir).as_ptr(), &mut found) });
    assert!(found.f_blocks > 0 && found.f_bfree > 0 && found.f_namemax == 255);
}

fn deep_trees_and_long_names_work(dir: &Path) {
    let long = "n".repeat(255);
    fs::write(dir.join(&long), "long").unwrap();
    assert_eq!(fs::read(dir.join(&long)).unwrap(), b"long");
    let longer = "n".repeat(256);
    assert_eq!(error(fs::write(dir.join(longer), "")), libc::ENAMETOOLONG);
    let mut deep = dir.to_owned();
    for level in 0..300 {
        deep.push(format!("{level}"));
        fs::create_dir(&deep).unwrap();
    }
    fs::write(deep.join("bottom"), "bottom").unwrap();
    assert_eq!(fs::read(deep.join("bottom")).unwrap(), b"bottom");
    fs::remove_dir_all(dir.join("0")).unwrap();
}

fn many_threads_write_their_own_files(dir: &Path) {
    let threads: Vec<_> = (0..16u8)
        .map(|number| {
            let path = dir.join(format!("{number}"));
            thread::spawn(move || {
                for round in 0..20 {
                    let data = vec![number; 10_000 + round];
                    fs::write(&path, &data).unwrap();
                    assert!(fs::read(&path).unwrap() == data);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
