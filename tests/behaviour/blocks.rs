//! Disks: root file systems of the blockfile, devmapper and erofs snapshotters, and block devices of the host. The guest
//! mounts them, the host does not.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use cube_tests::*;

fn on_blockfile() -> Container {
    Container::new().snapshotter("blockfile")
}

fn host(program: &str, arguments: &[&str]) -> String {
    let ended = Command::new(program).args(arguments).output().unwrap();
    Ended::from(ended).success()
}

/// A loop device over a file of its own, gone when dropped.
struct Loop {
    node: String,
    file: PathBuf,
    _dir: TestDir,
}

impl Loop {
    fn new(bytes: u64) -> Self {
        let dir = TestDir::new();
        let file = dir.path().join("disk");
        fs::File::create(&file).unwrap().set_len(bytes).unwrap();
        let node = host("losetup", &["--find", "--show", file.to_str().unwrap()]);
        Self {
            node: node.trim().to_owned(),
            file,
            _dir: dir,
        }
    }

    /// What is on it, as the host sees it without the device's own cache.
    fn begins_with(&self, text: &str) -> bool {
        let bytes = fs::read(&self.file).unwrap();
        bytes.starts_with(text.as_bytes())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.node]).status();
    }
}

/// The command that mounts a container's snapshot, as containerd gives it.
fn mount_of(snapshotter: &str, target: &str, id: &str) -> String {
    let told = must_ctr(&[
        "snapshot",
        "--snapshotter",
        snapshotter,
        "mounts",
        target,
        id,
    ]);
    // Until 2.0 one without options has an empty list of them.
    told.trim().trim_end_matches(" -o").to_owned()
}

/// A container's writable image or device.
fn disk_of(snapshotter: &str, id: &str) -> PathBuf {
    let mount = mount_of(snapshotter, "/mnt", id);
    let disk = mount
        .split_whitespace()
        .find(|word| word.contains("/snapshots/") || word.starts_with("/dev/mapper/"));
    // A device is a symbolic link, and open by its node.
    fs::canonicalize(disk.unwrap_or_else(|| panic!("{mount}"))).unwrap()
}

/// A container on a writable disk: the guest mounts it, the host does not, and what is written is in it.
fn is_a_disk_that_the_guest_mounts(snapshotter: &str) {
    let on_disk = || Container::new().snapshotter(snapshotter);
    let container = on_disk();
    let script = "grep ' / ' /proc/mounts; echo kept > /file; mkdir /d; chown 5:6 /d";
    let ended = container.command(&[], &["sh", "-c", script]).output();
    let text = Ended::from(ended.unwrap()).success();
    assert!(
        text.starts_with("/dev/vd") && text.contains(" / ext4 rw"),
        "{text}"
    );

    // While a container runs, its disk is one of the hypervisor's, and no mount or loop device of the host.
    let running = on_disk().start(&["sleep", "1000"]);
    let disk = disk_of(snapshotter, &running.id);
    let open = fs::read_dir(format!("/proc/{}/fd", running.pid())).unwrap();
    let mut open = open.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    assert!(open.any(|path| path == disk), "{disk:?} is not open");
    let loops = host(
        "losetup",
        &["--list", "--noheadings", "--output", "BACK-FILE"],
    );
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    for of_the_host in [loops, mounts] {
        assert!(
            !of_the_host.contains(disk.to_str().unwrap()),
            "{of_the_host}"
        );
    }
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);

    // The disk is whole, and what was written is in it.
    try_ctr(&["task", "delete", &container.id]);
    let dir = TestDir::new();
    let target = dir.path().to_str().unwrap();
    host("sh", &["-c", &mount_of(snapshotter, target, &container.id)]);
    let file = fs::read_to_string(dir.path().join("file"));
    let owner = host(
        "stat",
        &["-c", "%u:%g", dir.path().join("d").to_str().unwrap()],
    );
    host("umount", &[target]);
    assert_eq!(file.unwrap(), "kept\n");
    assert_eq!(owner, "5:6\n");
    must_ctr(&["container", "delete", &container.id]);
    assert_no_traces_of(&container.id);
}

#[test]
fn a_root_file_system_on_a_block_image_is_mounted_by_the_guest_and_keeps_what_is_written() {
    is_a_disk_that_the_guest_mounts("blockfile");
}

#[test]
fn a_root_file_system_on_a_thin_device_is_mounted_by_the_guest_and_keeps_what_is_written() {
    is_a_disk_that_the_guest_mounts("devmapper");
}

#[test]
fn layers_of_the_erofs_snapshotter_are_an_overlay_in_the_guest() {
    let running = Container::new()
        .snapshotter("erofs")
        .start(&["sleep", "1000"]);
    let mounts = running.exec(&["cat", "/proc/mounts"]).success();
    assert!(mounts.contains("overlay / overlay rw"), "{mounts}");
    // Neither the layers nor the overlay are the host's.
    let of_the_host = fs::read_to_string("/proc/mounts").unwrap();
    assert!(!of_the_host.contains(" erofs "), "{of_the_host}");
    // What a layer has can be changed and removed, as anywhere.
    let script = "echo new >> /etc/passwd && rm /bin/false && mkdir /etc/d && tail -n 1 /etc/passwd && ls /bin/false";
    let ended = running.exec(&["sh", "-c", script]);
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "new\n", "{ended:?}");
    assert!(ended.stderr.contains("No such file"), "{ended:?}");
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

#[test]
fn a_read_only_root_on_an_image_cannot_be_written_to() {
    let ended = on_blockfile().flag("--read-only").sh("touch /x");
    assert_ne!(ended.status, 0);
    assert!(ended.stderr.contains("Read-only file system"), "{ended:?}");
}

#[test]
fn containers_of_a_group_take_slots_give_them_back_and_are_told_when_there_are_none() {
    let first = on_blockfile().setting("spare_disks", "1");
    let group = first.id.clone();
    let first = first.in_group(&group).start(&["sleep", "1000"]);
    let member = || on_blockfile().in_group(&group);
    // One after the other in the one spare slot, each with its own files.
    for n in 0..3 {
        let script = format!("ls /mark 2>/dev/null; echo {n} > /mark; cat /mark");
        assert_eq!(member().sh(&script).success(), format!("{n}\n"));
    }
    let second = member().start(&["sleep", "1000"]);
    let third = member();
    let ended = third.sh("true");
    assert_ne!(ended.status, 0);
    assert!(ended.stderr.contains("spare_disks"), "{ended:?}");
    second.exec(&["true"]).success();
    drop(second);
    member().sh("true").success();
    first.exec(&["true"]).success();
}

#[test]
fn a_block_device_is_a_disk_at_its_path_with_its_mode_and_owner() {
    let disk = Loop::new(4 << 20);
    host("chown", &["0:6", &disk.node]);
    host("chmod", &["640", &disk.node]);
    let node = &disk.node;
    let script = format!(
        "stat -c '%F %a %u:%g' {node}; cat {node} | wc -c; echo written | dd of={node} conv=fsync 2>/dev/null"
    );
    let container = Container::new().option("--device", node);
    let text = container.sh(&script).success();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines, ["block special file 640 0:6", "4194304"], "{text}");
    assert!(disk.begins_with("written\n"));
    assert_no_traces_of(&container.id);
}

#[test]
fn a_block_device_that_the_host_has_mounted_is_refused() {
    let disk = Loop::new(16 << 20);
    host("mkfs.ext4", &["-q", &disk.node]);
    let dir = TestDir::new();
    let target = dir.path().to_str().unwrap();
    host("mount", &[&disk.node, target]);
    let container = Container::new().option("--device", &disk.node);
    let ended = container.sh("true");
    host("umount", &[target]);
    assert_ne!(ended.status, 0);
    assert!(ended.stderr.contains("in use on the host"), "{ended:?}");
    assert!(ended.stderr.contains(&disk.node), "{ended:?}");
    assert_no_traces_of(&container.id);

    // And the other way round: what a guest may write to the host does not mount.
    let running = Container::new()
        .option("--device", &disk.node)
        .start(&["sleep", "1000"]);
    let mount = Command::new("mount").args([&disk.node, target]).output();
    assert!(!mount.unwrap().status.success());
    drop(running);
}
