use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::virtio::INTERRUPT_CONFIG;
use crate::virtio::testing::{BUFFERS, Driver, HostileQueue, Part, hostile_queue};

const SECTORS: u64 = 64;

/// For what happens at once, but on another thread.
const PATIENCE: Duration = Duration::from_secs(30);

const HEADER: u64 = BUFFERS;
const STATUS: u64 = BUFFERS + 0x100;
const DATA: u64 = BUFFERS + 0x1000;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// An image of SECTORS sectors, each filled with its number.
fn image() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let mut file = File::create(&path).unwrap();
    for sector in 0..SECTORS {
        file.write_all(&[sector as u8; 512]).unwrap();
    }
    (dir, path)
}

fn block(path: &Path, read_only: bool) -> Block {
    Block::new(Some(Disk::open(path, read_only).unwrap()), "serial-1").unwrap()
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// Makes a request and returns its status and how many bytes the device says it wrote.
fn request(driver: &mut Driver<Block>, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
    driver.write(HEADER, &header(kind, sector));
    driver.write(STATUS, &[0xaa]);
    let mut parts = vec![(HEADER, 16, false)];
    parts.extend(data);
    parts.push((STATUS, 1, true));
    let head = driver.add(0, &parts);
    driver.kick(0);
    driver.wait();
    let used = driver.used(0);
    assert_eq!((used.len(), used[0].head), (1, head));
    (driver.read(STATUS, 1)[0], used[0].written)
}

fn capacity(block: &Block) -> u64 {
    let mut bytes = [0; 8];
    block.read_config(0, &mut bytes);
    u64::from_le_bytes(bytes)
}

#[test]
fn what_is_written_is_in_the_file_and_is_read_again() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    driver.write(DATA, &[0xab; 700]);
    driver.write(DATA + 0x1000, &[0xcd; 324]);
    let parts = [(DATA, 700, false), (DATA + 0x1000, 324, false)];
    assert_eq!(request(&mut driver, OUT, 3, &parts), (OK, 1));
    assert_eq!(request(&mut driver, FLUSH, 0, &[]), (OK, 1));
    let mut expected = vec![0xab; 700];
    expected.extend([0xcd; 324]);
    let mut got = vec![0; 1024];
    File::open(&path)
        .unwrap()
        .read_exact_at(&mut got, 3 * 512)
        .unwrap();
    assert_eq!(got, expected);
    let parts = [(DATA + 0x2000, 1, true), (DATA + 0x3000, 1023, true)];
    assert_eq!(request(&mut driver, IN, 3, &parts), (OK, 1025));
    let mut read = driver.read(DATA + 0x2000, 1);
    read.extend(driver.read(DATA + 0x3000, 1023));
    assert_eq!(read, expected);
}

#[test]
fn a_read_only_disk_refuses_every_change() {
    let (_dir, path) = image();
    let before = std::fs::read(&path).unwrap();
    let device = block(&path, true);
    assert_eq!(
        device.offered_features() & 1 << VIRTIO_BLK_F_RO,
        1 << VIRTIO_BLK_F_RO
    );
    assert_eq!(device.offered_features() & 1 << VIRTIO_BLK_F_DISCARD, 0);
    let mut driver = Driver::active(device);
    assert_eq!(
        request(&mut driver, OUT, 0, &[(DATA, 512, false)]),
        (IOERR, 1)
    );
    driver.write(DATA, &range(0, 1, 0));
    assert_eq!(
        request(&mut driver, DISCARD, 0, &[(DATA, 16, false)]),
        (IOERR, 1)
    );
    assert_eq!(
        request(&mut driver, WRITE_ZEROES, 0, &[(DATA, 16, false)]),
        (IOERR, 1)
    );
    assert_eq!(request(&mut driver, IN, 5, &[(DATA, 512, true)]), (OK, 513));
    assert_eq!(driver.read(DATA, 512), [5; 512]);
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn requests_that_are_wrong_get_a_status_and_change_nothing() {
    let (_dir, path) = image();
    let before = std::fs::read(&path).unwrap();
    let mut driver = Driver::active(block(&path, false));
    let d = &mut driver;
    // Past the end, over the end, an end past what a u64 holds, no whole sector.
    assert_eq!(request(d, IN, SECTORS, &[(DATA, 512, true)]), (IOERR, 1));
    assert_eq!(
        request(d, OUT, SECTORS - 1, &[(DATA, 1024, false)]),
        (IOERR, 1)
    );
    assert_eq!(request(d, OUT, u64::MAX, &[(DATA, 512, false)]), (IOERR, 1));
    assert_eq!(
        request(d, OUT, u64::MAX / 512, &[(DATA, 512, false)]),
        (IOERR, 1)
    );
    assert_eq!(request(d, OUT, 0, &[(DATA, 511, false)]), (IOERR, 1));
    assert_eq!(request(d, IN, 0, &[(DATA, 513, true)]), (IOERR, 1));
    // Unknown types; a range's unknown flags, too many ranges, none, too many sectors.
    assert_eq!(request(d, 2, 0, &[]), (UNSUPP, 1));
    assert_eq!(request(d, u32::MAX, 0, &[]), (UNSUPP, 1));
    d.write(DATA, &range(0, 1, 1));
    assert_eq!(request(d, DISCARD, 0, &[(DATA, 16, false)]), (UNSUPP, 1));
    d.write(DATA, &range(0, 1, 2));
    assert_eq!(
        request(d, WRITE_ZEROES, 0, &[(DATA, 16, false)]),
        (UNSUPP, 1)
    );
    assert_eq!(
        request(d, WRITE_ZEROES, 0, &[(DATA, 17 * 16, false)]),
        (IOERR, 1)
    );
    assert_eq!(request(d, WRITE_ZEROES, 0, &[]), (IOERR, 1));
    d.write(DATA, &range(0, u32::MAX, 0));
    assert_eq!(request(d, DISCARD, 0, &[(DATA, 16, false)]), (IOERR, 1));
    // A serial number has 20 bytes.
    assert_eq!(request(d, GET_ID, 0, &[(DATA, 19, true)]), (IOERR, 1));
    // A header that is cut short.
    d.write(STATUS, &[0xaa]);
    d.add(0, &[(HEADER, 15, false), (STATUS, 1, true)]);
    d.kick(0);
    d.wait();
    assert_eq!((d.used(0)[0].written, d.read(STATUS, 1)[0]), (1, IOERR));
    // No place for a status.
    d.write(HEADER, &header(OUT, 0));
    d.add(0, &[(HEADER, 16, false), (DATA, 512, false)]);
    d.kick(0);
    d.wait();
    assert_eq!(d.used(0)[0].written, 0);
    assert!(!d.interrupt.needs_reset());
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn the_serial_number_is_told() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    driver.write(DATA, &[0xff; 20]);
    assert_eq!(
        request(&mut driver, GET_ID, 0, &[(DATA, 20, true)]),
        (OK, 21)
    );
    assert_eq!(driver.read(DATA, 20), *b"serial-1\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn ranges_become_zero_and_give_their_space_back() {
    let (_dir, path) = image();
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    let mut driver = Driver::active(block(&path, false));
    let mut ranges = range(0, 16, 1);
    ranges.extend(range(32, 16, 1));
    driver.write(DATA, &ranges);
    assert_eq!(
        request(&mut driver, WRITE_ZEROES, 0, &[(DATA, 32, false)]),
        (OK, 1)
    );
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, SECTORS * 512);
    assert!(
        bytes[..16 * 512]
            .iter()
            .chain(&bytes[32 * 512..48 * 512])
            .all(|&byte| byte == 0)
    );
    assert!(bytes[16 * 512..32 * 512].iter().all(|&byte| byte != 0));
    let zeroed = blocks();
    assert!(zeroed < before, "{zeroed} < {before}");
    driver.write(DATA, &range(16, 16, 0));
    assert_eq!(
        request(&mut driver, DISCARD, 0, &[(DATA, 16, false)]),
        (OK, 1)
    );
    assert!(blocks() < zeroed);
}

#[test]
fn a_batch_of_requests_is_one_interrupt() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    driver.write(HEADER, &header(IN, 7));
    for _ in 0..4 {
        driver.add(
            0,
            &[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)],
        );
    }
    driver.kick(0);
    let queue_state = driver.device().queue_states();
    assert_eq!(queue_state[0].next_used, 4);
    assert_eq!(driver.interrupt.line().read().unwrap(), 1);
    assert_eq!(driver.used(0).len(), 4);
}

#[test]
fn a_spare_slot_fails_requests_until_a_disk_is_attached() {
    let (_dir, path) = image();
    let mut driver = Driver::active(Block::new(None, "").unwrap());
    assert_eq!(capacity(&driver.device()), 0);
    assert_eq!(
        request(&mut driver, IN, 0, &[(DATA, 512, true)]),
        (IOERR, 1)
    );
    assert_eq!(request(&mut driver, FLUSH, 0, &[]), (OK, 1));
    let disk = Disk::from_fd(File::open(&path).unwrap().into(), true).unwrap();
    driver.device().attach(disk, "late").unwrap();
    driver.wait();
    assert_eq!(
        driver.interrupt.status() & INTERRUPT_CONFIG,
        INTERRUPT_CONFIG
    );
    assert_eq!(capacity(&driver.device()), SECTORS);
    assert_eq!(request(&mut driver, IN, 9, &[(DATA, 512, true)]), (OK, 513));
    assert_eq!(driver.read(DATA, 512), [9; 512]);
    assert_eq!(
        request(&mut driver, OUT, 9, &[(DATA, 512, false)]),
        (IOERR, 1)
    );
    let again = Disk::open(&path, true).unwrap();
    assert!(matches!(
        driver.device().attach(again, ""),
        Err(AttachError::Occupied)
    ));
}

/// Reads the serial number as the guest does.
fn serial(driver: &mut Driver<Block>) -> String {
    assert_eq!(request(driver, GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
    let id = driver.read(DATA, 20);
    String::from_utf8(id.into_iter().take_while(|&b| b != 0).collect()).unwrap()
}

#[test]
fn a_detached_disk_is_closed_and_its_slot_takes_another() {
    let mut driver = Driver::active(Block::new(None, "").unwrap());
    for name in ["one", "two"] {
        let (dir, path) = image();
        // Written to, so that it has a worker, and is told apart from the other.
        let disk = Disk::open(&path, false).unwrap();
        driver.device().attach(disk, name).unwrap();
        driver.wait();
        assert_eq!(serial(&mut driver), name);
        driver.write(DATA, &[name.len() as u8; 512]);
        let out = request(&mut driver, OUT, 1, &[(DATA, 512, false)]);
        assert_eq!(out, (OK, 1));

        let closed = detach(&driver);
        driver.wait();
        assert_eq!(
            driver.interrupt.status() & INTERRUPT_CONFIG,
            INTERRUPT_CONFIG
        );
        assert_eq!(capacity(&driver.device()), 0);
        closed.recv_timeout(PATIENCE).unwrap();
        let is_open = std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .any(|fd| std::fs::read_link(fd.unwrap().path()).is_ok_and(|target| target == path));
        assert!(!is_open, "the disk is still open");
        let out = request(&mut driver, OUT, 1, &[(DATA, 512, false)]);
        assert_eq!(out, (IOERR, 1));
        assert_eq!(serial(&mut driver), "");
        let empty = driver.device().detach(|| {});
        assert!(matches!(empty, Err(DetachError::Empty)));
        drop(dir);
    }
}

/// Detaches the disk; the result is told when it is closed.
fn detach(driver: &Driver<Block>) -> mpsc::Receiver<()> {
    let (tell, closed) = mpsc::channel();
    let tell = move || tell.send(()).unwrap();
    driver.device().detach(tell).unwrap();
    closed
}

/// A device whose worker waits for the host, as long as the lock is held for writing.
fn stalled(driver: &mut Driver<Block>, stall: &RwLock<()>) {
    driver.write(HEADER, &header(IN, 1));
    driver.add(
        0,
        &[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)],
    );
    assert!(stall.try_write().is_err());
    driver.kick(0);
}

#[test]
fn a_disk_that_does_not_answer_holds_nobody_up_who_detaches_it() {
    let (_dir, path) = image();
    let disk = Disk::open(&path, true).unwrap();
    let stall = disk.stall.clone();
    let mut driver = Driver::active(Block::new(Some(disk), "slow").unwrap());
    let held = stall.write().unwrap();
    stalled(&mut driver, &stall);

    let closed = detach(&driver);
    assert_eq!(capacity(&driver.device()), 0);
    assert!(matches!(closed.try_recv(), Err(TryRecvError::Empty)));
    let another = || Disk::open(&path, true).unwrap();
    let early = driver.device().attach(another(), "early");
    assert!(matches!(early, Err(AttachError::Closing)));
    let again = driver.device().detach(|| {});
    assert!(matches!(again, Err(DetachError::Empty)));

    drop(held);
    closed.recv_timeout(PATIENCE).unwrap();
    // At once, not only when the event loop has come round.
    driver.device().attach(another(), "next").unwrap();
    driver.wait();
    assert_eq!(driver.used(0).len(), 1, "the request under way has ended");
    assert_eq!(serial(&mut driver), "next");
}

#[test]
fn a_reset_waits_for_a_disk_that_does_not_answer_without_the_devices_lock() {
    let (_dir, path) = image();
    for detached_before in [false, true] {
        let disk = Disk::open(&path, true).unwrap();
        let stall = disk.stall.clone();
        let mut driver = Driver::active(Block::new(Some(disk), "slow").unwrap());
        let held = stall.write().unwrap();
        stalled(&mut driver, &stall);
        let before = detached_before.then(|| detach(&driver));

        driver.device().reset();
        let wait = driver.device().under_way().unwrap();
        let (tell, waited) = mpsc::channel();
        let driver_waits = std::thread::spawn(move || {
            wait();
            tell.send(()).unwrap();
        });
        // The owner goes on meanwhile.
        let closed = before.unwrap_or_else(|| detach(&driver));
        driver
            .device()
            .attach(Disk::open(&path, true).unwrap(), "next")
            .unwrap();
        assert!(matches!(closed.try_recv(), Err(TryRecvError::Empty)));
        assert!(matches!(waited.try_recv(), Err(TryRecvError::Empty)));

        drop(held);
        closed.recv_timeout(PATIENCE).unwrap();
        waited.recv_timeout(PATIENCE).unwrap();
        driver_waits.join().unwrap();
        // Of the request that was under way.
        driver.wait();
        driver.start_over();
        assert_eq!(serial(&mut driver), "next");
    }
}

#[test]
fn a_reset_device_works_again_when_it_is_made_active() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    assert_eq!(request(&mut driver, IN, 1, &[(DATA, 512, true)]), (OK, 513));
    driver.start_over();
    assert_eq!(request(&mut driver, IN, 2, &[(DATA, 512, true)]), (OK, 513));
}

#[test]
fn a_paused_worker_goes_on_when_the_machine_does() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    assert_eq!(request(&mut driver, IN, 1, &[(DATA, 512, true)]), (OK, 513));
    assert_eq!(driver.device().queue_states()[0].next_avail, 1);
    driver.device().resume();
    driver.run();
    assert_eq!(request(&mut driver, IN, 2, &[(DATA, 512, true)]), (OK, 513));
    assert_eq!(driver.read(DATA, 512), [2; 512]);
}

#[test]
fn the_state_survives_json_and_goes_on_where_it_was() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    assert_eq!(request(&mut driver, IN, 1, &[(DATA, 512, true)]), (OK, 513));
    let json = serde_json::to_string(&driver.device().save()).unwrap();
    let state: BlockState = serde_json::from_str(&json).unwrap();
    assert_eq!(state.serial, "serial-1");

    // Asked for before the snapshot, not served before it.
    driver.write(HEADER, &header(IN, 4));
    driver.add(
        0,
        &[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)],
    );
    let mut restored = Block::restore(&state, Some(Disk::open(&path, false).unwrap())).unwrap();
    driver.make_active(&mut restored, state.active.as_ref());
    assert_eq!(restored.save(), state);
    let mut again = Driver::new(restored);
    again.kick(0);
    assert_eq!(again.device().queue_states()[0].next_used, 2);
    assert_eq!(driver.read(DATA, 512), [4; 512]);

    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(512)
        .unwrap();
    let other = Block::restore(&state, Some(Disk::open(&path, false).unwrap()));
    assert!(matches!(other, Err(RestoreError::OtherDisk { .. })));
}

#[test]
fn a_file_that_became_shorter_gives_errors() {
    let (_dir, path) = image();
    let mut driver = Driver::active(block(&path, false));
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(512)
        .unwrap();
    assert_eq!(
        request(&mut driver, IN, 8, &[(DATA, 512, true)]),
        (IOERR, 1)
    );
}

fn hostile() -> impl Strategy<Value = HostileQueue> {
    let kind = prop_oneof![0u32..16, any::<u32>()];
    let sector = prop_oneof![4 => 0..SECTORS + 2, 1 => any::<u64>()];
    hostile_queue((kind, sector).prop_map(|(kind, sector)| header(kind, sector)))
}

proptest! {
    #[test]
    fn a_hostile_driver_gets_a_reset_at_most(queue in hostile(), with_disk: bool, read_only: bool) {
        let (_dir, path) = image();
        let before = std::fs::read(&path).unwrap();
        let disk = with_disk.then(|| Disk::open(&path, read_only).unwrap());
        let mut driver = Driver::new(Block::new(disk, "").unwrap());
        queue.install(&driver, 0);
        let features = driver.device().offered_features();
        driver.activate(features);
        driver.kick(0);
        let alive = !driver.device().queue_states().is_empty();
        prop_assert_eq!(alive, !driver.interrupt.needs_reset());
        driver.device().reset();
        let after = std::fs::read(&path).unwrap();
        prop_assert_eq!(after.len(), before.len());
        if read_only {
            prop_assert!(after == before);
        }
    }

    #[test]
    fn configuration_reads_and_writes_of_any_kind_do_no_harm(
        offset in prop_oneof![0u64..80, any::<u64>()], width in 0usize..9, bytes: [u8; 8],
    ) {
        let (_dir, path) = image();
        let mut device = block(&path, false);
        let before = device.config();
        device.write_config(offset, &bytes[..width.min(8)]);
        prop_assert_eq!(device.config(), before);
        let mut data = vec![0xaa; width];
        device.read_config(offset, &mut data);
        let end = usize::try_from(offset).unwrap_or(usize::MAX);
        prop_assert!(end < before.len() || data.iter().all(|&byte| byte == 0));
    }
}
