//! Linux as the guest. They need KVM and the guest kernel.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod common;

use std::os::fd::AsFd;

use cube_hypervisor_api::ExitStatus::{GuestCrash, GuestPanic};
use cube_hypervisor_api::control::Request;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use serde_json::json;

use common::*;

/// The number after `name` in what the guest printed.
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    let digits: String = line.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn the_example_runs_as_it_is() {
    let files = Files::new();
    std::os::unix::fs::symlink(linux(), files.dir().join("vmlinux")).unwrap();
    let script = "grep -c ^processor /proc/cpuinfo; grep MemTotal /proc/meminfo
        head -c 5 /dev/vda; echo world | dd of=/dev/vda bs=512 seek=1 conv=sync 2>/dev/null; sync
        cat /sys/class/net/eth0/address; ip link set eth0 up && echo up
        head -c 16 /dev/hwrng | wc -c
        reboot -f";
    files.put("initramfs.img", &Initramfs::busybox(script));
    files.put("disk.img", &[b"hello".as_slice(), &[0; 4091]].concat());
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/vm.json");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(example).unwrap()).unwrap();
    let ended = files.run(&config);
    ended.resets();
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "2", "{ended:?}");
    let memory = number(&ended.stdout, "MemTotal");
    assert!((440_000..524_288).contains(&memory), "{memory}");
    assert_eq!(lines[2..], ["hello02:00:00:00:00:01", "up", "16"]);
    let disk = std::fs::read(files.dir().join("disk.img")).unwrap();
    assert_eq!(&disk[512..518], b"world\n");
}

#[test]
fn memory_beyond_the_gap_is_used() {
    let files = Files::new();
    let script = "grep MemTotal /proc/meminfo; reboot -f";
    let ended = files.run(&files.linux("", script, json!({"memory_mib": 4096})));
    ended.resets();
    let memory = number(&ended.stdout, "MemTotal");
    assert!(memory > 3_900_000, "{memory}");
}

#[test]
fn an_init_that_exits_is_a_panic() {
    let files = Files::new();
    let ended = files.run(&files.linux("", "exit 3", json!({})));
    ended.fails(
        GuestPanic,
        &["Attempted to kill init", "exitcode=0x00000300"],
    );
}

#[test]
fn a_reset_by_triple_fault_is_a_crash() {
    let files = Files::new();
    let ended = files.run(&files.linux("reboot=t", "reboot -f", json!({"console": "ring"})));
    ended.fails(GuestCrash, &["triple fault"]);
}

#[test]
fn a_hanging_guest_says_where_after_an_nmi() {
    let files = Files::new();
    // The guest tells by its disk that it hangs: in the console's driver, which holds a lock while it waits for the
    // device, an NMI would find a panic without a voice.
    let disk = files.put("disk", &[0; 512]);
    let script = "echo >/dev/vda; sync; while :; do :; done";
    let devices = json!({"console": "ring", "disks": [{"path": disk}]});
    let config = files.linux("unknown_nmi_panic", script, devices);
    let watch = inotify::init(CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&watch, &disk, WatchFlags::MODIFY).unwrap();
    let machine = Owned::boot(config);
    rustix::io::read(&watch, &mut [0; 64]).unwrap();
    machine.done(&Request::InjectNmi, &[]);
    let (status, message, console) = machine.end();
    assert_eq!(status, GuestPanic, "{console}");
    assert!(message.contains("NMI"), "{message}");
    assert!(console.contains("Call Trace"), "{console}");
}

#[test]
fn a_disk_attached_to_a_running_guest_is_there() {
    let files = Files::new();
    let script = "echo up
        while [ $(cat /sys/block/vda/size) = 0 ]; do sleep 0.01; done
        head -c 5 /dev/vda; reboot -f";
    let config = files.linux("", script, json!({"spare_disks": 1}));
    let disk = std::fs::File::open(files.put("disk", &b"hello".repeat(1024))).unwrap();
    let mut machine = Owned::boot(config);
    machine.read_until("up");
    let attach = Request::AttachDisk {
        slot: 0,
        read_only: true,
        serial: String::new(),
    };
    machine.done(&attach, &[disk.as_fd()]);
    let (_, message, console) = machine.end();
    assert!(console.contains("hello"), "{message}: {console}");
}
