//! virtio-fs with a real guest. This program is both: the test on the host, and `/init` of the guest.
//!
//! Needs KVM and root: runs only with `CUBE_TEST_KVM=1`, and boots the kernel that `CUBE_KERNEL` names on
//! the hypervisor that `CUBE_HYPERVISOR` names, or the one built with it. Files go to `CUBE_TEST_DIR`.
//! `--here DIRECTORY` checks the host's own file system instead; `--measure` tells what things cost.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checks;
#[path = "../common/mod.rs"]
mod common;
mod guest;
mod mount;
mod vm;

use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use checks::CHECKS;
use common::twin;
use common::{Arguments, Case, has_kvm, report, run_cases};
use guest::SHARE;
use mount::Mount;
use vm::Vm;

/// What needs both sides.
const CASES: &[Case<Vm>] = cases![
    what_the_guest_wrote_is_in_the_snapshot,
    what_the_host_changes_in_a_volume_is_seen_within_a_second,
    mounts_come_and_go_while_the_guest_runs,
    a_walk_over_100000_files_leaves_few_descriptors_open,
];

fn main() {
    if std::process::id() == 1 {
        twin::guest(guest::serve);
    }
    let arguments = Arguments::read(&["--here"]);
    let checks = CHECKS.iter().filter(|(name, _)| arguments.wants(name));
    if arguments.list {
        let cases = CASES.iter().map(|(name, _)| name);
        let names = CHECKS.iter().map(|(name, _)| name).chain(cases);
        return names.for_each(|name| println!("{name}: test"));
    }
    if arguments.has("--wait") {
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    if let Some(directory) = arguments.value("--here") {
        for (name, check) in checks {
            let own = Path::new(directory).join(name);
            fs::create_dir_all(&own).unwrap();
            println!("test {name} ...");
            check(&own);
        }
        return;
    }
    if !has_kvm("vm_fs") {
        return;
    }
    let mut vm = Vm::start();
    if arguments.has("--measure") {
        return measure(&mut vm);
    }
    let mut failed = 0;
    for (name, _) in checks {
        // A container's root file system, and a volume.
        for place in ["rootfs/c1", "volumes/v"] {
            let directory = format!("{SHARE}/{place}/{name}");
            let start = Instant::now();
            let answer = vm.try_ask(name, &directory);
            let time = start.elapsed().as_millis();
            match answer {
                Ok(_) => println!("test {name} in {place} ... ok ({time} ms)"),
                Err(error) => {
                    println!("test {name} in {place} ... FAILED: {error}");
                    failed += 1;
                }
            }
        }
    }
    run_cases(CASES, &arguments, &mut vm);
    assert_eq!(failed, 0, "{failed} checks failed");
}

fn what_the_guest_wrote_is_in_the_snapshot(vm: &mut Vm) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let names = [
        "owners_modes_and_times_are_kept",
        "shared_mappings_are_one_memory",
        "links_are_what_they_are",
    ];
    for name in names {
        let directory = format!("{SHARE}/rootfs/c1/snapshot-{name}");
        vm.ask(name, &directory);
    }
    let upper = vm.directory().join("upper");
    let of = |path: &str| upper.join(format!("snapshot-{path}"));
    let owners = of("owners_modes_and_times_are_kept");
    let file = fs::symlink_metadata(owners.join("file")).unwrap();
    assert_eq!((file.uid(), file.gid()), (13, 34));
    assert_eq!(file.permissions().mode() & 0o7777, 0o755);
    let link = fs::symlink_metadata(owners.join("link")).unwrap();
    assert_eq!((link.uid(), link.mtime(), link.mtime_nsec()), (56, -5, 1));
    let mapped = fs::read(of("shared_mappings_are_one_memory").join("file")).unwrap();
    assert_eq!((mapped[1], mapped[5000], mapped[5001]), (b'!', 1, 2));
    let hard = fs::read(of("links_are_what_they_are").join("hard")).unwrap();
    assert_eq!(hard, b"two");
}

fn what_the_host_changes_in_a_volume_is_seen_within_a_second(vm: &mut Vm) {
    // As the kubelet does it: a directory of data behind a symbolic link that is replaced.
    let volume = vm.shared().join("volumes/map");
    fs::create_dir_all(volume.join("..1")).unwrap();
    fs::write(volume.join("..1/key"), "one").unwrap();
    std::os::unix::fs::symlink("..1", volume.join("..data")).unwrap();
    std::os::unix::fs::symlink("..data/key", volume.join("key")).unwrap();
    let key = format!("{SHARE}/volumes/map/key");
    let plain = format!("{SHARE}/volumes/map/plain");
    fs::write(volume.join("plain"), "before").unwrap();
    assert_eq!(vm.ask("read", &key), "one");
    assert_eq!(vm.ask("read", &plain), "before");
    fs::create_dir(volume.join("..2")).unwrap();
    fs::write(volume.join("..2/key"), "two").unwrap();
    std::os::unix::fs::symlink("..2", volume.join("..new")).unwrap();
    fs::rename(volume.join("..new"), volume.join("..data")).unwrap();
    fs::remove_dir_all(volume.join("..1")).unwrap();
    fs::write(volume.join("plain"), "after!").unwrap();
    fs::write(volume.join("more"), "").unwrap();
    // The limit itself is under test.
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(vm.ask("read", &key), "two");
    assert_eq!(vm.ask("read", &plain), "after!");
    let names = vm.ask("list", &format!("{SHARE}/volumes/map"));
    assert_eq!(names, "..2 ..data key more plain");
}

fn mounts_come_and_go_while_the_guest_runs(vm: &mut Vm) {
    let point = vm.shared().join("rootfs/c2");
    let in_guest = format!("{SHARE}/rootfs/c2");
    fs::create_dir(&point).unwrap();
    assert_eq!(vm.ask("list", &in_guest), "");
    for round in 0..3 {
        let mounted = Mount::tmpfs(&point);
        fs::write(point.join(format!("file{round}")), "x").unwrap();
        assert_eq!(vm.ask("list", &in_guest), format!("file{round}"));
        assert_ne!(
            vm.ask("device", &in_guest),
            vm.ask("device", &format!("{SHARE}/rootfs")),
        );
        vm.ask("unmount", &in_guest);
        // Not lazily: nothing holds it any more.
        mounted.end().unwrap();
        assert_eq!(vm.ask("list", &in_guest), "");
    }
    // A single file.
    let source = vm.directory().join("hosts");
    fs::write(&source, "127.0.0.1 localhost").unwrap();
    let point = vm.shared().join("volumes/hosts");
    fs::write(&point, "").unwrap();
    let in_guest = format!("{SHARE}/volumes/hosts");
    let mounted = Mount::bind(&source, &point);
    assert_eq!(vm.ask("read", &in_guest), "127.0.0.1 localhost");
    fs::write(&source, "127.0.0.1 localhost pod").unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(vm.ask("read", &in_guest), "127.0.0.1 localhost pod");
    vm.ask("drop_caches", "");
    mounted.end().unwrap();
}

fn a_walk_over_100000_files_leaves_few_descriptors_open(vm: &mut Vm) {
    let tree = vm.directory().join("upper/many");
    // Straight into the layer would be behind overlayfs' back: through the mount, as an image is unpacked before.
    let through = vm.shared().join("rootfs/c1/many");
    let (directories, files) = (200, 500);
    fs::create_dir(&through).unwrap();
    for d in 0..directories {
        let sub = through.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..files {
            fs::File::create(sub.join(format!("f{f}"))).unwrap();
        }
    }
    assert!(tree.is_dir());
    let (before, used) = (vm.descriptors(), vm.own_memory());
    let walked = vm.ask("walk", &format!("{SHARE}/rootfs/c1/many"));
    assert_eq!(walked, (directories * (files + 1)).to_string());
    let after = vm.descriptors();
    println!("  {before} descriptors before, {after} after");
    assert!(after < before + 1100, "{after} descriptors are open");
    vm.ask(
        "two_thousand_files_are_open_at_once",
        &format!("{SHARE}/rootfs/c1/open"),
    );
    let memory = vm.own_memory();
    println!("  {used} KiB of the hypervisor's own before, {memory} after");
    // A node is some 211 bytes, and each file and directory is one, until the guest forgets it.
    assert!(
        memory < used + (32 << 10),
        "{used} KiB before, {memory} KiB after"
    );
    vm.ask("drop_caches", "");
}

/// What things cost, on a clock that may count instructions.
fn measure(vm: &mut Vm) {
    let through = vm.shared().join("rootfs/c1");
    fs::write(through.join("mib"), vec![7; 1 << 20]).unwrap();
    for n in 0..200 {
        fs::write(through.join(format!("small{n}")), "x").unwrap();
    }
    for round in ["first", "second"] {
        let new = format!("new-{round}");
        let all = [
            ("read_mib", "mib", 1),
            ("read_small", "", 200),
            ("walk", "", 1),
            ("write_small", new.as_str(), 200),
        ];
        for (what, path, count) in all {
            report(&format!("{round} {what}"), count, || {
                vm.ask(what, &format!("{SHARE}/rootfs/c1/{path}"));
            });
        }
    }
}
