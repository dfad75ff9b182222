//! Volumes of every kind: seen in the container as on the host, or refused with a sentence.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use cube_tests::*;

/// A bind for `ctr run --mount`.
fn bind(source: &Path, destination: &str, options: &str) -> String {
    let source = source.display();
    format!("type=bind,src={source},dst={destination},options={options}")
}

fn with(mount: &str) -> Container {
    Container::new().option("--mount", mount)
}

fn host(program: &str, arguments: &[&str]) {
    let ended = Command::new(program).args(arguments).output().unwrap();
    Ended::from(ended).success();
}

#[test]
fn a_file_and_a_directory_are_the_hosts_read_only_and_read_write() {
    let dir = TestDir::new();
    let file = dir.path().join("file");
    fs::write(&file, "from the host\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();

    let text = with(&bind(&file, "/etc/one", "bind:rw"))
        .sh("cat /etc/one; stat -c %a /etc/one; echo from the guest > /etc/one")
        .success();
    assert_eq!(text, "from the host\n640\n");
    assert_eq!(fs::read_to_string(&file).unwrap(), "from the guest\n");

    for (source, destination, script) in [
        (file.as_path(), "/etc/one", "echo x > /etc/one"),
        (dir.path(), "/data", "touch /data/new"),
    ] {
        let ended = with(&bind(source, destination, "rbind:ro")).sh(script);
        assert_ne!(ended.status, 0);
        assert!(ended.stderr.contains("Read-only file system"), "{ended:?}");
    }
    with(&bind(dir.path(), "/data", "rbind:rw"))
        .sh("touch /data/new")
        .success();
    assert!(dir.path().join("new").exists());
}

#[test]
fn a_socket_a_fifo_and_a_disk_of_the_host_are_refused_by_name() {
    let dir = TestDir::new();
    let socket = dir.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    let fifo = dir.path().join("f");
    host("mkfifo", &[fifo.to_str().unwrap()]);
    let disk = dir.path().join("b");
    host("mknod", &[disk.to_str().unwrap(), "b", "7", "0"]);
    for (path, word) in [(socket, "socket"), (fifo, "FIFO"), (disk, "block device")] {
        let container = with(&bind(&path, "/run/it", "bind:rw"));
        let ended = container.sh("true");
        assert_ne!(ended.status, 0);
        assert!(ended.stderr.contains(word), "{ended:?}");
        assert!(ended.stderr.contains("/run/it"), "{ended:?}");
        assert_no_traces_of(&container.id);
    }
}

#[test]
fn sockets_and_fifos_that_containers_make_in_a_volume_work_between_them() {
    let dir = TestDir::new();
    let mount = bind(dir.path(), "/shared", "rbind:rw");
    let server = with(&mount).image(DEBIAN);
    let group = server.id.clone();
    let program = "import os,socket
s=socket.socket(socket.AF_UNIX); s.bind('/shared/s'); s.listen(); os.mkfifo('/shared/f')
c=s.accept()[0]; c.send(b'by the socket'); open('/shared/f','w').write('by the fifo')";
    let server = server.in_group(&group).start(&["python3", "-c", program]);
    let program = "import os,socket,time
while not os.path.exists('/shared/f'): time.sleep(0.1)
s=socket.socket(socket.AF_UNIX); s.connect('/shared/s'); print(s.recv(99).decode()); print(open('/shared/f').read())";
    let client = with(&mount).image(DEBIAN).in_group(&group);
    let text = client.run(&["python3", "-c", program]).success();
    assert_eq!(text, "by the socket\nby the fifo\n");
    drop(server);
}

#[test]
fn a_character_device_is_the_guests_own() {
    let text = with(&bind(Path::new("/dev/zero"), "/dev/nothing", "bind:rw"))
        .sh("head -c 4 /dev/nothing | od -An -tx1; echo gone > /dev/nothing && echo written")
        .success();
    assert_eq!(text, " 00 00 00 00\nwritten\n");
}

#[test]
fn shared_memory_is_memory_of_its_size_or_a_directory_of_the_host() {
    let script =
        "df -k /dev/shm | tail -n 1; stat -f -c %T /dev/shm; echo x > /dev/shm/x && cat /dev/shm/x";
    let text = with("type=tmpfs,src=shm,dst=/dev/shm,options=mode=1777:size=8m:nosuid")
        .sh(script)
        .success();
    assert!(
        text.contains(" 8192 ") && text.contains("tmpfs\nx\n"),
        "{text}"
    );

    // As the CRI plugin does it, for all containers of a pod.
    let dir = TestDir::new();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let program = "import mmap
f=open('/dev/shm/m','w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096); m[0:5]=b'hello'; m.flush()";
    with(&bind(dir.path(), "/dev/shm", "rbind:rw"))
        .image(DEBIAN)
        .run(&["python3", "-c", program])
        .success();
    assert_eq!(&fs::read(dir.path().join("m")).unwrap()[..5], b"hello");
}

/// A mount on the host, gone when dropped.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn tmpfs(path: &Path) -> Self {
        host("mount", &["-t", "tmpfs", "late", path.to_str().unwrap()]);
        fs::write(path.join("mounted"), "late").unwrap();
        Self(path.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(&self.0).status();
    }
}

#[test]
fn a_mount_that_the_host_makes_later_is_seen_below_an_rslave_bind_and_not_below_a_private_one() {
    let dir = TestDir::new();
    let volume = Mounted::tmpfs(dir.path());
    host("mount", &["--make-shared", volume.0.to_str().unwrap()]);
    fs::create_dir(dir.path().join("sub")).unwrap();
    let container = |propagation: &str| {
        let mount = bind(dir.path(), "/data", &format!("rbind:{propagation}:rw"));
        let running = with(&mount).start(&["sleep", "1000"]);
        // The guest knows the directory as it is before.
        assert_eq!(running.exec(&["ls", "/data/sub"]).success(), "");
        running
    };
    let (slave, private) = (container("rslave"), container("rprivate"));
    let late = Mounted::tmpfs(&dir.path().join("sub"));
    // What the host changes the guest believes for a second at most.
    let look = "for i in $(seq 100); do cat /data/sub/mounted 2>/dev/null && exit; usleep 100000; done; exit 1";
    assert_eq!(slave.exec(&["sh", "-c", look]).success(), "late");
    assert_eq!(private.exec(&["ls", "/data/sub"]).success(), "");
    drop((slave, private, late));
}

#[test]
fn a_root_file_system_without_a_snapshot_is_the_directory_that_the_specification_names() {
    let dir = TestDir::new();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    let id = unique("c");
    let script = "/bin/busybox echo written > /file; /bin/busybox cat /file";
    let ended = try_ctr(&[
        "run",
        "--rm",
        "--runtime",
        &runtime(),
        "--rootfs",
        root.to_str().unwrap(),
        &id,
        "/bin/busybox",
        "sh",
        "-c",
        script,
    ]);
    assert_eq!(ended.success(), "written\n");
    // As it is: what the container writes is there.
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "written\n");
    assert_no_traces_of(&id);
}
