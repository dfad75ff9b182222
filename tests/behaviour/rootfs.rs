//! The root filesystem behaves as it does with runc on the same snapshotter.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use cube_tests::*;

/// The container's snapshot, mounted on the host.
struct Snapshot {
    directory: TestDir,
}

impl Snapshot {
    fn of(id: &str) -> Self {
        let directory = TestDir::new();
        let target = directory.path().to_str().unwrap();
        // It prints the mount command.
        let command = must_ctr(&["snapshot", "mounts", target, id]);
        assert!(
            Command::new("sh")
                .args(["-c", &command])
                .status()
                .unwrap()
                .success(),
            "{command}"
        );
        Self { directory }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).status();
    }
}

#[test]
fn what_the_container_writes_is_in_its_snapshot() {
    let script = "mkdir /d && cd /d && echo text > file && chmod 4751 file && chown 33:44 file && chmod 4751 file \
        && ln file hard && ln -s file soft && mkfifo fifo && mknod null c 1 3 \
        && python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")' \
        && { setfattr -n user.colour -v blue file || echo no attributes; }";
    let container = Container::new().image(DEBIAN);
    let ended = container
        .command(&[], &["sh", "-c", script])
        .output()
        .unwrap();
    let has_xattrs = Ended::from(ended).success().is_empty();
    {
        let snapshot = Snapshot::of(&container.id);
        let file = fs::metadata(snapshot.path("d/file")).unwrap();
        assert_eq!(
            (file.uid(), file.gid(), file.mode() & 0o7777, file.nlink()),
            (33, 44, 0o4751, 2)
        );
        assert_eq!(
            fs::read_to_string(snapshot.path("d/hard")).unwrap(),
            "text\n"
        );
        assert_eq!(
            fs::read_link(snapshot.path("d/soft")).unwrap(),
            Path::new("file")
        );
        assert!(
            fs::symlink_metadata(snapshot.path("d/fifo"))
                .unwrap()
                .file_type()
                .is_fifo()
        );
        assert!(
            fs::symlink_metadata(snapshot.path("d/socket"))
                .unwrap()
                .file_type()
                .is_socket()
        );
        let null = fs::symlink_metadata(snapshot.path("d/null")).unwrap();
        assert!(null.file_type().is_char_device() && null.rdev() == (1 << 8 | 3));
        // The tmpfs of kernel 6.1 has no user.* attributes: then the guest must have been told so.
        assert_eq!(has_xattrs, user_xattrs_work(snapshot.directory.path()));
        if has_xattrs {
            let file = snapshot.path("d/file");
            let got = Command::new("getfattr")
                .args(["--only-values", "-n", "user.colour"])
                .arg(file)
                .output();
            assert_eq!(Ended::from(got.unwrap()).success(), "blue");
        }
    }
    try_ctr(&["task", "delete", &container.id]);
    must_ctr(&["container", "delete", &container.id]);
}

fn user_xattrs_work(directory: &Path) -> bool {
    let probe = directory.join("probe");
    fs::write(&probe, "").unwrap();
    let set = Command::new("setfattr")
        .args(["-n", "user.probe", "-v", "1"])
        .arg(&probe)
        .output()
        .unwrap();
    set.status.success()
}

/// Runs a Python program in the container that asserts what it wants.
fn python(program: &str) {
    let ended = Container::new()
        .image(DEBIAN)
        .run(&["python3", "-c", program]);
    assert_eq!(ended.status, 0, "{}\n{}", ended.text(), ended.stderr);
}

#[test]
fn a_rename_over_an_open_file_leaves_its_reader_the_old_one() {
    python(
        "import os
open('/a','w').write('old'); f=open('/a'); open('/b','w').write('new'); os.rename('/b','/a')
assert f.read()=='old' and open('/a').read()=='new' and os.fstat(f.fileno()).st_nlink==0",
    );
}

#[test]
fn an_unlinked_open_file_can_still_be_cut_grown_and_read() {
    python("import os
f=open('/a','w+'); f.write('0123456789'); f.flush(); os.unlink('/a')
os.ftruncate(f.fileno(),4); assert os.fstat(f.fileno()).st_size==4
os.ftruncate(f.fileno(),8); f.seek(0); assert f.read()=='0123\\0\\0\\0\\0'
os.fchmod(f.fileno(),0o600); os.posix_fallocate(f.fileno(),0,65536); assert os.fstat(f.fileno()).st_size==65536");
}

#[test]
fn shared_mappings_are_seen_by_readers_and_by_other_processes() {
    python("import mmap,os
f=open('/m','w+b'); f.truncate(8192); m=mmap.mmap(f.fileno(),8192); m[5000]=65
if os.fork()==0:
    g=open('/m','r+b'); n=mmap.mmap(g.fileno(),8192); ok=n[5000]==65; n[1]=66; os._exit(0 if ok else 1)
assert os.wait()[1]==0 and m[1]==66
m.flush(); assert open('/m','rb').read()[5000]==65");
}

#[test]
fn locks_exclude_and_are_released() {
    python(
        "import fcntl,os
a=open('/l','w'); b=open('/l','w')
fcntl.flock(a,fcntl.LOCK_EX)
try: fcntl.flock(b,fcntl.LOCK_EX|fcntl.LOCK_NB); raise SystemExit('two holders of a flock')
except BlockingIOError: pass
a.close(); fcntl.flock(b,fcntl.LOCK_EX|fcntl.LOCK_NB)
c=open('/p','w'); fcntl.lockf(c,fcntl.LOCK_EX)
if os.fork()==0:
    try: fcntl.lockf(open('/p','w'),fcntl.LOCK_EX|fcntl.LOCK_NB); os._exit(1)
    except OSError: os._exit(0)
assert os.wait()[1]==0",
    );
}

#[test]
fn fifos_and_sockets_connect_processes() {
    python("import os,socket,threading
os.mkfifo('/f')
threading.Thread(target=lambda: open('/f','w').write('through the fifo')).start()
assert open('/f').read()=='through the fifo'
s=socket.socket(socket.AF_UNIX); s.bind('/s'); s.listen(); c=socket.socket(socket.AF_UNIX); c.connect('/s')
c.send(b'x'); assert s.accept()[0].recv(1)==b'x'");
}

#[test]
fn directories_times_and_attributes_are_kept() {
    python("import os
os.mkdir('/t'); os.chmod('/t',0o1777); assert os.stat('/t').st_mode&0o7777==0o1777
open('/t/x','w'); os.utime('/t/x',ns=(10**18+7,10**18+9)); assert os.stat('/t/x').st_mtime_ns==10**18+9
os.symlink('../nowhere','/t/dangling'); assert os.readlink('/t/dangling')=='../nowhere'
try: os.rmdir('/t'); raise SystemExit('a full directory was removed')
except OSError as e: assert e.errno==39");
}

#[test]
fn sqlite_works_in_wal_mode() {
    let script = "sqlite3 /db 'pragma journal_mode=wal; create table t(x); insert into t values (1),(2);' && \
        sqlite3 /db 'insert into t values (3); pragma wal_checkpoint; select sum(x) from t; pragma integrity_check;'";
    let text = Container::new().image(DEBIAN).sh(script).success();
    assert!(text.starts_with("wal\n"), "{text}");
    assert!(text.contains("\n6\nok\n"), "{text}");
}

#[test]
fn git_commits_and_checks_its_repository() {
    let script = "export HOME=/root && git init -q /r && cd /r && git config user.email a@b && git config user.name n && \
        for i in 1 2 3; do echo $i > f$i; done && git add . && git commit -qm one && git mv f1 g1 && git commit -qm two && \
        git fsck --strict && git log --oneline | wc -l && git status --porcelain | wc -l";
    let text = Container::new().image(DEBIAN).sh(script).success();
    assert_eq!(
        text.split_whitespace().collect::<Vec<_>>(),
        ["2", "0"],
        "{text}"
    );
}

#[test]
fn ten_thousand_small_files_are_written_listed_and_removed() {
    python("import os,shutil
os.mkdir('/many')
for i in range(10000): open(f'/many/{i}','w').write(str(i))
assert len(os.listdir('/many'))==10000 and sum(len(open(f'/many/{i}').read()) for i in range(0,10000,97))>0
shutil.rmtree('/many'); assert not os.path.exists('/many')");
}

#[test]
fn a_walk_over_100_000_files_does_not_use_up_the_hosts_descriptors() {
    // The host makes them, which is quicker; to the guest a volume is a share like its root.
    let files = TestDir::new();
    for d in 0..100 {
        let directory = files.path().join(d.to_string());
        fs::create_dir(&directory).unwrap();
        for f in 0..1000 {
            fs::File::create(directory.join(f.to_string())).unwrap();
        }
    }
    let mount = format!(
        "type=bind,src={},dst=/walk,options=rbind:rw",
        files.path().display()
    );
    let running = Container::new()
        .image(DEBIAN)
        .option("--mount", &mount)
        .start(&["sleep", "1000"]);
    // 900: `ctr` limits a container's processes to 1024.
    let program = "import os
n=sum(len([os.stat(f'/walk/{d}/{f}') for f in os.listdir(f'/walk/{d}')]) for d in range(100))
held=[open(f'/walk/0/{i}') for i in range(900)]
print(n,len(held))";
    let text = running.exec(&["python3", "-c", program]).success();
    assert_eq!(text, "100000 900\n");
    running.exec(&["true"]).success();
    let pid = running.pid();
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    // It keeps 1024 inodes open for speed alone, however many there are.
    assert!(descriptors < 1200, "{descriptors} are open");
}

#[test]
fn volumes_are_shared_with_the_host_and_read_only_when_asked() {
    let directory = TestDir::new();
    fs::write(directory.path().join("in"), "from the host").unwrap();
    let mount = |options: &str| {
        format!(
            "type=bind,src={},dst=/mnt,options={options}",
            directory.path().display()
        )
    };
    let text = Container::new()
        .option("--mount", &mount("rbind:rw"))
        .sh("cat /mnt/in; echo from the guest > /mnt/out")
        .success();
    assert_eq!(text, "from the host");
    assert_eq!(
        fs::read_to_string(directory.path().join("out")).unwrap(),
        "from the guest\n"
    );
    let ended = Container::new()
        .option("--mount", &mount("rbind:ro"))
        .sh("cat /mnt/in; echo x > /mnt/no");
    assert_ne!(ended.status, 0);
    assert!(ended.stderr.contains("Read-only file system"), "{ended:?}");
    assert!(!directory.path().join("no").exists());
    let file = format!(
        "type=bind,src={}/in,dst=/etc/motd,options=bind:ro",
        directory.path().display()
    );
    assert_eq!(
        Container::new()
            .option("--mount", &file)
            .sh("cat /etc/motd")
            .success(),
        "from the host"
    );
}
