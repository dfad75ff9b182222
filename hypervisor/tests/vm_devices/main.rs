//! The devices with a real guest: a Linux that drives them by its shell.
//!
//! Needs KVM: runs only with `CUBE_TEST_KVM=1`, and boots the kernel that `CUBE_KERNEL` names.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod network;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cube_hypervisor_api::config::{DiskConfig, NetworkConfig};
use cube_hypervisor_api::control::{Event, Reply, Request};
use tempfile::TempDir;

use common::{Shell, has_kvm, hypervisor};
use network::{counters, ip, open_tap, own_namespace};

const MIB: usize = 1 << 20;

/// Bytes that are the same every time and do not repeat.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        // The multiplier of Knuth's MMIX generator.
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        bytes.extend_from_slice(&state.to_be_bytes()[..4]);
    }
    bytes.truncate(len);
    bytes
}

fn image(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn disk(path: &Path, read_only: bool) -> DiskConfig {
    DiskConfig {
        path: path.to_owned(),
        read_only,
        serial: "cube-disk-1".into(),
    }
}

fn network(tap: &str) -> NetworkConfig {
    NetworkConfig {
        tap: tap.into(),
        mac: Some("02:00:00:00:00:02".into()),
        mtu: None,
    }
}

/// The SHA-256 that the guest's busybox computes of what is the same here.
fn guest_sum(guest: &mut Shell, command: &str) -> String {
    let line = guest.ok(command);
    line.split(' ').next().unwrap().to_owned()
}

fn host_sum(bytes: &[u8]) -> String {
    let (_dir, path) = image(bytes);
    let output = std::process::Command::new("sha256sum")
        .arg(path)
        .output()
        .unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .to_owned()
}

#[test]
fn the_console_carries_input_and_output() {
    if !has_kvm("console") {
        return;
    }
    let mut guest = Shell::boot(Shell::config());
    assert_eq!(guest.ok("echo 'one  two'; echo three"), "one  two\nthree");
    assert_eq!(guest.run("false"), (String::new(), 1));
    let Reply::Console(tail) = guest.ask(&Request::Console, &[]) else {
        panic!("no console");
    };
    assert!(
        tail.ends_with("@ready\none  two\nthree\n\n@status 0\n\n@status 1\n"),
        "{tail}"
    );
    guest.end();
}

#[test]
fn random_numbers_come_from_the_host() {
    if !has_kvm("entropy") {
        return;
    }
    let mut guest = Shell::boot(Shell::config());
    assert_eq!(
        guest.ok("cat /sys/class/misc/hw_random/rng_current"),
        "virtio_rng.0"
    );
    let read = "dd if=/dev/hwrng bs=16 count=4 2>/dev/null | od -An -tx1";
    let (first, second) = (guest.ok(read), guest.ok(read));
    assert_eq!(first.split_whitespace().count(), 64);
    assert_ne!(first, second);
    guest.end();
    let mut without = Shell::config();
    without.entropy = false;
    let mut guest = Shell::boot(without);
    assert_eq!(
        guest.ok("cat /sys/class/misc/hw_random/rng_current"),
        "none"
    );
    guest.end();
}

#[test]
fn what_is_written_to_a_disk_is_there_after_the_machine() {
    if !has_kvm("disk") {
        return;
    }
    let (_dir, path) = image(&pattern(32 * MIB, 1));
    let mut machine = Shell::config();
    machine.disks = vec![disk(&path, false)];
    let mut guest = Shell::boot(machine.clone());
    assert_eq!(guest.ok("cat /sys/block/vda/serial"), "cube-disk-1");
    assert_eq!(guest.ok("cat /sys/block/vda/size"), "65536");
    assert_eq!(guest.ok("cat /sys/block/vda/ro"), "0");
    assert_eq!(
        guest_sum(&mut guest, "sha256sum /dev/vda"),
        host_sum(&pattern(32 * MIB, 1))
    );

    // A file system, filled by writes of all sizes, and a machine that is cut off after a sync.
    guest.ok("mke2fs -q /dev/vda 2>/dev/null && mount -t ext2 /dev/vda /mnt");
    guest.ok("seq 1 200000 >/mnt/numbers && dd if=/mnt/numbers of=/mnt/odd bs=777 2>/dev/null");
    guest.ok("for i in $(seq 200); do echo $i >/mnt/file$i; done");
    let sum = guest_sum(&mut guest, "cat /mnt/* | sha256sum");
    guest.ok("sync");
    guest.done(&Request::Stop, &[]);
    drop(guest);

    let mut guest = Shell::boot(machine);
    guest.ok("mount -t ext2 /dev/vda /mnt");
    assert_eq!(guest_sum(&mut guest, "cat /mnt/* | sha256sum"), sum);
    guest.ok("umount /mnt");
    let blocks = || fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    guest.ok("blkdiscard /dev/vda");
    assert!(
        blocks() < before / 4,
        "{} of {before} blocks are left",
        blocks()
    );
    guest.end();
}

#[test]
fn several_readers_and_writers_at_once_see_what_they_wrote() {
    if !has_kvm("disk") {
        return;
    }
    let (_dir, path) = image(&vec![0; 32 * MIB]);
    let mut machine = Shell::config();
    machine.vcpus = 2;
    machine.disks = vec![disk(&path, false)];
    let mut guest = Shell::boot(machine);
    guest.ok("dd if=/dev/urandom of=/tmp/random bs=1M count=4 2>/dev/null");
    let sum = guest_sum(&mut guest, "sha256sum /tmp/random");
    guest.ok(
        "for i in 0 1 2 3 4 5 6 7; do dd if=/tmp/random of=/dev/vda bs=64k seek=$((i * 64)) conv=notrunc,fsync 2>/dev/null & done; wait",
    );
    guest.ok("echo 3 >/proc/sys/vm/drop_caches");
    let sums = guest.ok(
        "for i in 0 1 2 3 4 5 6 7; do dd if=/dev/vda bs=64k skip=$((i * 64)) count=64 2>/dev/null | sha256sum & done; wait",
    );
    assert_eq!(sums.matches(&sum).count(), 8, "{sums}");
    guest.end();
    let bytes = fs::read(&path).unwrap();
    for part in bytes.chunks(4 * MIB) {
        assert!(part == &bytes[..4 * MIB]);
    }
}

#[test]
fn a_read_only_disk_stays_as_it_is() {
    if !has_kvm("disk") {
        return;
    }
    let bytes = pattern(MIB, 3);
    let (_dir, path) = image(&bytes);
    let mut machine = Shell::config();
    machine.disks = vec![disk(&path, true)];
    let mut guest = Shell::boot(machine);
    assert_eq!(guest.ok("cat /sys/block/vda/ro"), "1");
    guest.fails("dd if=/dev/zero of=/dev/vda bs=4k count=1 2>&1");
    // The guest's kernel would refuse; the device is to refuse as well.
    guest.run("blockdev --setrw /dev/vda");
    guest.fails("dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2>&1");
    assert_eq!(
        guest_sum(&mut guest, "sha256sum /dev/vda"),
        host_sum(&bytes)
    );
    guest.end();
    assert!(fs::read(&path).unwrap() == bytes);
}

#[test]
fn a_disk_is_attached_while_the_machine_runs() {
    if !has_kvm("disk") {
        return;
    }
    let bytes = pattern(2 * MIB, 4);
    let (_dir, path) = image(&bytes);
    let mut machine = Shell::config();
    machine.spare_disks = 2;
    let mut guest = Shell::boot(machine);
    assert_eq!(guest.ok("cat /sys/block/vdb/size"), "0");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let request = Request::AttachDisk {
        slot: 1,
        read_only: false,
        serial: String::new(),
    };
    guest.done(&request, &[file.as_fd()]);
    guest.wait_for("[ $(cat /sys/block/vdb/size) = 4096 ]");
    assert_eq!(guest.ok("cat /sys/block/vda/size"), "0");
    assert_eq!(
        guest_sum(&mut guest, "sha256sum /dev/vdb"),
        host_sum(&bytes)
    );
    guest.ok("echo changed | dd of=/dev/vdb bs=512 seek=7 conv=notrunc,fsync 2>/dev/null");
    let mut got = [0; 8];
    file.read_exact_at(&mut got, 7 * 512).unwrap();
    assert_eq!(&got, b"changed\n");
    let again = guest.ask(&request, &[file.as_fd()]);
    assert_eq!(again, Reply::Failed("The slot has a disk already".into()));

    // A read-only one in the other slot: the guest may try, the file stays as it is.
    let (_dir, path) = image(&bytes);
    let request = Request::AttachDisk {
        slot: 0,
        read_only: true,
        serial: String::new(),
    };
    guest.done(&request, &[File::open(&path).unwrap().as_fd()]);
    guest.wait_for("[ $(cat /sys/block/vda/size) = 4096 ]");
    assert_eq!(
        guest_sum(&mut guest, "sha256sum /dev/vda"),
        host_sum(&bytes)
    );
    guest.fails("dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2>&1");

    // Out of the slot, and another into it: what the guest reads then is the other's.
    guest.detach(1);
    guest.wait_for("[ $(cat /sys/block/vdb/size) = 0 ]");
    // It ends before its first byte.
    let read = guest.ok("dd if=/dev/vdb of=/dev/null bs=512 count=1 2>&1");
    assert!(read.contains("0+0 records in"), "{read}");
    let other = pattern(MIB, 5);
    let (_other_dir, other_path) = image(&other);
    let request = Request::AttachDisk {
        slot: 1,
        read_only: true,
        serial: "other".into(),
    };
    guest.done(&request, &[File::open(&other_path).unwrap().as_fd()]);
    guest.wait_for("[ $(cat /sys/block/vdb/size) = 2048 ]");
    assert_eq!(guest.ok("cat /sys/block/vdb/serial"), "other");
    assert_eq!(
        guest_sum(&mut guest, "sha256sum /dev/vdb"),
        host_sum(&other)
    );
    guest.end();
    assert!(fs::read(&path).unwrap() == bytes);
}

/// Attaches `file` to a slot and lets the guest look at the slot's device again, as the agent does.
fn attach_and_bind(guest: &mut Shell, slot: u8, file: &File, read_only: bool) -> String {
    let serial = format!("cube-{}", slot + 10);
    let request = Request::AttachDisk {
        slot,
        read_only,
        serial: serial.clone(),
    };
    guest.done(&request, &[file.as_fd()]);
    // Not by asking each disk for its serial number: one that does not answer must not be asked.
    let nth = slot + 1;
    let find = format!(
        "v=$(dirname $(grep -l 0x0002 /sys/bus/virtio/devices/virtio?/device | sed -n {nth}p))"
    );
    let driver = "/sys/bus/virtio/drivers/virtio_blk";
    guest.ok(&format!(
        "{find}; n=$(basename $v); echo $n > {driver}/unbind && echo $n > {driver}/bind"
    ));
    // Bound on return, and the device asked.
    let name = guest.ok(&format!("{find}; ls $v/block"));
    assert_eq!(guest.ok(&format!("cat /sys/block/{name}/serial")), serial);
    let size = file.metadata().unwrap().len() / 512;
    assert_eq!(
        guest.ok(&format!("cat /sys/block/{name}/size /sys/block/{name}/ro")),
        format!("{size}\n{}", u8::from(read_only))
    );
    format!("/dev/{name}")
}

fn tool(program: &str, arguments: &[&str]) {
    let ended = std::process::Command::new(program).args(arguments).output();
    let ended = ended.unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{program}: {stderr}");
}

#[test]
fn a_driver_that_is_bound_again_sees_each_disk_of_a_slot_as_it_is() {
    if !has_kvm("disks in one slot") {
        return;
    }
    let mut machine = Shell::config();
    machine.spare_disks = 3;
    let mut guest = Shell::boot(machine);
    for (seed, read_only) in [(6, false), (7, true), (8, false)] {
        // Of one size, so that nothing but the content and the access tells them apart.
        let bytes = pattern(MIB, seed);
        let (_dir, path) = image(&bytes);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let node = attach_and_bind(&mut guest, 1, &file, read_only);
        assert_eq!(
            guest_sum(&mut guest, &format!("sha256sum {node}")),
            host_sum(&bytes)
        );
        let write = format!("echo new | dd of={node} conv=notrunc,fsync 2>&1");
        if read_only {
            guest.fails(&write);
        } else {
            guest.ok(&write);
        }
        assert_eq!(fs::read(&path).unwrap() == bytes, read_only);
        guest.detach(1);
    }
    guest.end();
}

/// A file system in a file, mounted, that can be told to let all writers wait.
struct Freezer {
    dir: TempDir,
    frozen: bool,
}

impl Freezer {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        tool("mkfs.ext4", &["-q", image.to_str().unwrap()]);
        let freezer = Self { dir, frozen: false };
        tool(
            "mount",
            &["-o", "loop", image.to_str().unwrap(), &freezer.target()],
        );
        freezer
    }

    fn target(&self) -> String {
        self.dir.path().join("mnt").to_str().unwrap().to_owned()
    }

    fn freeze(&mut self, frozen: bool) {
        let how = if frozen { "--freeze" } else { "--unfreeze" };
        tool("fsfreeze", &[how, &self.target()]);
        self.frozen = frozen;
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let command = |program: &str, arguments: &[&str]| {
            let _ = std::process::Command::new(program).args(arguments).status();
        };
        if self.frozen {
            command("fsfreeze", &["--unfreeze", &self.target()]);
        }
        command("umount", &["--lazy", &self.target()]);
    }
}

#[test]
fn a_disk_that_does_not_answer_holds_up_neither_the_owner_nor_other_devices() {
    if !has_kvm("a disk that does not answer") {
        return;
    }
    let mut freezer = Freezer::new();
    let path = Path::new(&freezer.target()).join("disk");
    fs::write(&path, vec![0; MIB]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    let mut machine = Shell::config();
    machine.spare_disks = 2;
    let mut guest = Shell::boot(machine);
    let node = attach_and_bind(&mut guest, 0, &file, false);
    drop(file);

    freezer.freeze(true);
    guest.ok(&format!(
        "dd if=/dev/zero of={node} bs=4k count=1 oflag=direct 2>/dev/null & sleep 1"
    ));
    guest.done(&Request::DetachDisk { slot: 0 }, &[]);
    // The console is served by the same thread as the owner.
    assert!(matches!(
        guest.ask(&Request::Console, &[]),
        Reply::Console(_)
    ));
    assert_eq!(guest.ok("jobs | grep -c Running; echo alive"), "1\nalive");
    let (_dir, other) = image(&pattern(MIB, 11));
    let other = File::options().read(true).write(true).open(other).unwrap();
    let node = attach_and_bind(&mut guest, 1, &other, false);
    guest.ok(&format!("dd if={node} of=/dev/null 2>/dev/null"));
    let request = Request::AttachDisk {
        slot: 0,
        read_only: false,
        serial: String::new(),
    };
    let Reply::Failed(why) = guest.ask(&request, &[other.as_fd()]) else {
        panic!("the slot is free although its disk is not closed");
    };
    assert!(why.contains("has not closed the disk"), "{why}");

    freezer.freeze(false);
    assert_eq!(guest.event(), Event::DiskClosed { slot: 0 });
    // The request that was under way has ended well.
    guest.ok("wait $!");
    guest.done(&request, &[other.as_fd()]);
    guest.end();
}

#[test]
fn layers_of_erofs_and_a_writable_one_of_ext4_are_an_overlay_in_the_guest() {
    if !has_kvm("erofs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for (layer, file) in [("base", "below"), ("top", "above")] {
        fs::create_dir(path(layer)).unwrap();
        fs::write(path(&format!("{layer}/both")), layer).unwrap();
        fs::write(path(&format!("{layer}/{file}")), pattern(20_000, 9)).unwrap();
    }
    // Metadata and data on two devices, as the erofs snapshotter merges layers.
    let blobs = format!("--blobdev={}", path("base.blob"));
    tool(
        "mkfs.erofs",
        &[
            "--quiet",
            "--chunksize=4096",
            &blobs,
            &path("base.img"),
            &path("base"),
        ],
    );
    tool("mkfs.erofs", &["--quiet", &path("top.img"), &path("top")]);
    File::create(path("rw.img"))
        .unwrap()
        .set_len(16 << 20)
        .unwrap();
    tool("mkfs.ext4", &["-q", &path("rw.img")]);

    let mut machine = Shell::config();
    machine.spare_disks = 4;
    let mut guest = Shell::boot(machine);
    let attach = |guest: &mut Shell, slot, name: &str, read_only: bool| {
        let file = File::options()
            .read(true)
            .write(!read_only)
            .open(path(name))
            .unwrap();
        attach_and_bind(guest, slot, &file, read_only)
    };
    let rw = attach(&mut guest, 0, "rw.img", false);
    let top = attach(&mut guest, 1, "top.img", true);
    let base = attach(&mut guest, 2, "base.img", true);
    let blob = attach(&mut guest, 3, "base.blob", true);
    guest.ok("mkdir -p /mnt/0 /mnt/1 /mnt/2 /mnt/root");
    guest.ok(&format!(
        "mount -t ext4 {rw} /mnt/0 && mkdir /mnt/0/upper /mnt/0/work"
    ));
    guest.ok(&format!("mount -t erofs -o ro {top} /mnt/1"));
    guest.ok(&format!("mount -t erofs -o ro,device={blob} {base} /mnt/2"));
    guest.ok(
        "mount -t overlay -o workdir=/mnt/0/work,upperdir=/mnt/0/upper,lowerdir=/mnt/1:/mnt/2 overlay /mnt/root",
    );
    assert_eq!(guest.ok("cat /mnt/root/both"), "top");
    for file in ["above", "below"] {
        assert_eq!(
            guest_sum(&mut guest, &format!("sha256sum /mnt/root/{file}")),
            host_sum(&pattern(20_000, 9))
        );
    }
    guest.ok(
        "echo new > /mnt/root/below && cat /mnt/0/upper/below && umount /mnt/root && umount /mnt/0",
    );
    guest.end();
}

/// A guest with eth0 up as 10.9.0.2, and the host's tap0 as 10.9.0.1.
/// Of the TAP, and so of the guest's interface.
const MTU: u64 = 1400;

fn networked_guest() -> Shell {
    own_namespace();
    ip("tuntap add tap0 mode tap vnet_hdr");
    ip(&format!("link set tap0 mtu {MTU} up"));
    ip("addr add 10.9.0.1/24 dev tap0");
    let mut machine = Shell::config();
    machine.networks = vec![network("tap0")];
    let mut guest = Shell::boot(machine);
    guest.ok("ip link set lo up; ip link set eth0 up && ip addr add 10.9.0.2/24 dev eth0");
    guest
}

#[test]
fn packets_of_all_sizes_reach_the_host_and_come_back() {
    if !has_kvm("network") {
        return;
    }
    let mut guest = networked_guest();
    assert_eq!(
        guest.ok("cat /sys/class/net/eth0/address"),
        "02:00:00:00:00:02"
    );
    assert_eq!(guest.ok("cat /sys/class/net/eth0/mtu"), MTU.to_string());
    assert_eq!(guest.ok("cat /sys/class/net/eth0/carrier"), "1");
    // Within one packet, just not any more, and as many fragments as a datagram can have.
    for size in [1, 56, 1372, 1373, 60_000] {
        guest.ok(&format!("ping -c 3 -s {size} -w 60 10.9.0.1"));
    }
    // A datagram both ways, whose checksums the other side's kernel looks at: a file by TFTP (RFC 1350).
    let socket = std::net::UdpSocket::bind("10.9.0.1:7000").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    guest.start("tftp -g -r file -l /tmp/file 10.9.0.1 7000 2>/dev/null && cat /tmp/file");
    let mut bytes = [0; 100];
    let (count, from) = socket.recv_from(&mut bytes).unwrap();
    assert!(bytes[..count].starts_with(b"\0\x01file\0octet\0"));
    socket.send_to(b"\0\x03\0\x01the only block", from).unwrap();
    let (count, _) = socket.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..count], b"\0\x04\0\x01");
    assert_eq!(guest.finish(), ("the only block".into(), 0));
    guest.end();
}

#[test]
fn bulk_data_goes_both_ways_in_large_segments() {
    if !has_kvm("network") {
        return;
    }
    const BULK: usize = 16 * MIB;
    // An average above the longest frame of the line shows that segments go unsplit. No bound above that one: how long
    // they are is for each sender's TCP, which makes them as short as two frames' worth when the machine is slow
    // (tcp_tso_autosize() in net/ipv4/tcp_output.c).
    const LONGEST_FRAME: u64 = 14 + MTU;
    let mut guest = networked_guest();
    let bytes = pattern(BULK, 5);
    let sum = host_sum(&bytes);

    let before = counters("tap0");
    guest.start("nc -l -p 7001 >/tmp/bulk; sha256sum /tmp/bulk");
    let mut stream = connect("10.9.0.2:7001");
    let start = Instant::now();
    stream.write_all(&bytes).unwrap();
    drop(stream);
    let (text, _) = guest.finish();
    println!("to the guest: {} ms", start.elapsed().as_millis());
    assert!(text.starts_with(&sum), "{text}");
    let after = counters("tap0");
    let (bytes_sent, packets) = (after.sent.0 - before.sent.0, after.sent.1 - before.sent.1);
    assert!(
        bytes_sent / packets > LONGEST_FRAME,
        "{bytes_sent} bytes in {packets} packets"
    );

    let listener = TcpListener::bind("10.9.0.1:7002").unwrap();
    guest.start("nc 10.9.0.1 7002 </tmp/bulk");
    let (mut stream, _) = listener.accept().unwrap();
    let start = Instant::now();
    let mut got = Vec::with_capacity(BULK);
    stream.read_to_end(&mut got).unwrap();
    println!("from the guest: {} ms", start.elapsed().as_millis());
    assert!(got == bytes);
    drop(stream);
    guest.finish();
    let end = counters("tap0");
    let (received, packets) = (
        end.received.0 - after.received.0,
        end.received.1 - after.received.1,
    );
    assert!(
        received / packets > LONGEST_FRAME,
        "{received} bytes in {packets} packets"
    );
    guest.end();
}

fn connect(address: &str) -> TcpStream {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            // The guest's program does not listen yet.
            Err(e) if Instant::now() > deadline => panic!("{address}: {e}"),
            Err(_) => std::thread::yield_now(),
        }
    }
}

#[test]
fn a_network_is_attached_vanishes_and_is_attached_again() {
    if !has_kvm("network") {
        return;
    }
    own_namespace();
    let mut machine = Shell::config();
    machine.spare_networks = 1;
    let mut guest = Shell::boot(machine);
    guest.ok("ip link set eth0 up && ip addr add 10.9.0.2/24 dev eth0");
    assert_eq!(guest.ok("cat /sys/class/net/eth0/carrier"), "0");
    for name in ["tap1", "tap2"] {
        let tap = open_tap(name);
        ip(&format!("link set {name} up"));
        ip(&format!("addr add 10.9.0.1/24 dev {name}"));
        guest.done(&Request::AttachNetwork { slot: 0 }, &[tap.as_fd()]);
        drop(tap);
        guest.wait_for("[ $(cat /sys/class/net/eth0/carrier) = 1 ]");
        guest.ok("ping -c 2 -w 60 10.9.0.1");
        ip(&format!("link del {name}"));
        guest.wait_for("[ $(cat /sys/class/net/eth0/carrier) = 0 ]");
    }
    let errors = guest.end();
    assert!(
        errors.contains("The TAP tap1 is gone, the link is down"),
        "{errors}"
    );
}

#[test]
fn a_device_that_cannot_be_is_told_in_one_line() {
    if !has_kvm("configuration") {
        return;
    }
    own_namespace();
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("odd");
    fs::write(&odd, [0; 513]).unwrap();
    let disk = |path: &Path| serde_json::json!({"disks": [{"path": path}]});
    let net = |field: &str, value: serde_json::Value| {
        let mut network = serde_json::json!({"tap": "tap0"});
        network[field] = value;
        serde_json::json!({"networks": [network]})
    };
    let cases = [
        (disk(Path::new("/missing.img")), "/missing.img"),
        (disk(dir.path()), "neither a file nor a block device"),
        (disk(&odd), "513 bytes"),
        (net("tap", "lo".into()), "the TAP lo"),
        (
            net("tap", "a-name-that-is-too-long".into()),
            "1 to 15 bytes",
        ),
        (net("mac", "01:00:00:00:00:01".into()), "MAC address"),
        (net("mtu", 67.into()), "68 to 65535"),
    ];
    for (mut machine, expected) in cases {
        machine["kernel"] = Shell::config().kernel.to_str().unwrap().into();
        let file = dir.path().join("vm.json");
        fs::write(&file, machine.to_string()).unwrap();
        let output = hypervisor().arg("--config").arg(&file).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(expected), "{text}");
    }
}
