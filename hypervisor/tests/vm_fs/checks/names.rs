//! Names: links, renames, special files, and files without a name.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::thread;

use super::*;

pub fn links_are_what_they_are(dir: &Path) {
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

pub fn a_rename_replaces_an_open_file(dir: &Path) {
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

pub fn a_file_without_a_name_works_on(dir: &Path) {
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

pub fn fifos_and_sockets_connect(dir: &Path) {
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

pub fn device_nodes_work(dir: &Path) {
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

pub fn programs_run_from_here(dir: &Path) {
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

pub fn deep_trees_and_long_names_work(dir: &Path) {
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
