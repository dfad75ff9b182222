use std::os::unix::net::UnixDatagram;

use proptest::prelude::*;

use super::tap::HEADER;
use super::*;
use crate::virtio::INTERRUPT_CONFIG;
use crate::virtio::queue::FEATURE_VERSION_1;
use crate::virtio::testing::{BUFFERS, Driver, Part, SIZE, Used, hostile_queue};

const MAC: Mac = [2, 0, 0, 0, 0, 1];

/// A TAP, and the host's side of it.
fn tap() -> (Tap, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (Tap::from_socket(ours.into()), theirs)
}

fn active() -> (Driver<Net>, UnixDatagram) {
    let (tap, host) = tap();
    let mut driver = Driver::active(Net::new(Some(tap), Some(MAC), Some(1500)).unwrap());
    driver.run();
    (driver, host)
}

/// A header of zeroes and a packet of `len` bytes that are all different from their neighbours.
fn packet(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes.extend((0..len).map(|index| (index % 251) as u8));
    bytes
}

fn link_is_up(net: &Net) -> bool {
    let mut status = [0; 2];
    net.read_config(6, &mut status);
    status[0] & 1 == 1
}

#[test]
fn a_packet_of_the_guest_reaches_the_host_as_it_is() {
    let (mut driver, host) = active();
    let packet = packet(100);
    driver.write(BUFFERS, &packet);
    let parts = [
        (BUFFERS, 12, false),
        (BUFFERS + 12, 50, false),
        (BUFFERS + 62, 50, false),
    ];
    let head = driver.add(TRANSMIT, &parts);
    driver.kick(TRANSMIT);
    assert_eq!(driver.used(TRANSMIT), [Used { head, written: 0 }]);
    let mut got = [0; 200];
    let count = host.recv(&mut got).unwrap();
    assert!(got[..count] == packet);
}

#[test]
fn packets_of_the_host_wait_until_the_guest_has_buffers() {
    let (mut driver, host) = active();
    host.send(&packet(100)).unwrap();
    host.send(&packet(30)).unwrap();
    driver.run();
    assert!(driver.used(RECEIVE).is_empty());
    // Two buffers cannot hold the largest packet, so they wait too, unless they are all that the queue holds.
    for index in 0..u64::from(SIZE) {
        driver.add(RECEIVE, &[(BUFFERS + index * 0x100, 64, true)]);
    }
    driver.kick(RECEIVE);
    let used = driver.used(RECEIVE);
    let written: Vec<u32> = used.iter().map(|used| used.written).collect();
    assert_eq!(written, [64, 48]);
    let mut got = driver.read(BUFFERS, 64);
    got.extend(driver.read(BUFFERS + 0x100, 48));
    // The number of buffers is in the header.
    let mut expected = packet(100);
    expected[10] = 2;
    assert!(got == expected);
    // The next packet: all buffers are full again, those it did not reach were kept.
    driver.add(RECEIVE, &[(BUFFERS, 64, true)]);
    driver.add(RECEIVE, &[(BUFFERS + 0x100, 64, true)]);
    driver.kick(RECEIVE);
    assert_eq!(driver.used(RECEIVE).len(), 1);
    let mut expected = packet(30);
    expected[10] = 1;
    assert!(driver.read(BUFFERS + 0x200, 42) == expected);
}

#[test]
fn a_large_segment_goes_into_as_many_buffers_as_it_needs() {
    let (mut driver, host) = active();
    let largest = packet(65_549);
    for index in 0..10 {
        driver.add(RECEIVE, &[(BUFFERS + index * 0x2000, 0x2000, true)]);
    }
    driver.kick(RECEIVE);
    host.send(&largest).unwrap();
    driver.run();
    let used = driver.used(RECEIVE);
    let written: u32 = used.iter().map(|used| used.written).sum();
    assert_eq!((used.len(), written as usize), (9, largest.len()));
    let mut expected = largest.clone();
    expected[10] = 9;
    assert!(driver.read(BUFFERS, largest.len()) == expected);
    assert!(driver.interrupt.line().read().is_ok());
}

#[test]
fn without_merging_a_packet_has_one_buffer() {
    let (tap, host) = tap();
    let mut driver = Driver::new(Net::new(Some(tap), Some(MAC), None).unwrap());
    driver.activate(FEATURE_VERSION_1);
    for index in 0..2 {
        driver.add(
            RECEIVE,
            &[
                (BUFFERS + index * 0x1000, 12, true),
                (BUFFERS + index * 0x1000 + 12, 200, true),
            ],
        );
    }
    host.send(&packet(100)).unwrap();
    host.send(&packet(300)).unwrap();
    driver.kick(RECEIVE);
    let written: Vec<u32> = driver
        .used(RECEIVE)
        .iter()
        .map(|used| used.written)
        .collect();
    assert_eq!(written, [112, 212]);
    let mut expected = packet(100);
    expected[10] = 1;
    assert!(driver.read(BUFFERS, 112) == expected);
}

#[test]
fn a_congested_host_holds_the_guests_packets_and_loses_none() {
    let (mut driver, host) = active();
    let mut sent = 0;
    let packet = packet(1500);
    driver.write(BUFFERS, &packet);
    let part: [Part; 1] = [(BUFFERS, packet.len() as u32, false)];
    loop {
        driver.add(TRANSMIT, &part);
        driver.kick(TRANSMIT);
        if driver.used(TRANSMIT).is_empty() {
            break;
        }
        sent += 1;
        assert!(sent < 10_000);
    }
    let mut got = [0; 2000];
    for _ in 0..sent {
        assert_eq!(host.recv(&mut got).unwrap(), packet.len());
    }
    driver.run();
    assert_eq!(driver.used(TRANSMIT).len(), 1);
    assert_eq!(host.recv(&mut got).unwrap(), packet.len());
}

#[test]
fn a_spare_slot_has_its_link_down_until_a_tap_is_attached() {
    let mut driver = Driver::active(Net::new(None, Some(MAC), None).unwrap());
    assert!(!link_is_up(&driver.device()));
    driver.write(BUFFERS, &packet(60));
    driver.add(TRANSMIT, &[(BUFFERS, 72, false)]);
    driver.kick(TRANSMIT);
    assert_eq!(driver.used(TRANSMIT).len(), 1);
    assert!(driver.interrupt.line().read().is_ok());

    let (tap, host) = tap();
    driver.device().attach(tap).unwrap();
    assert_eq!(
        driver.interrupt.status() & INTERRUPT_CONFIG,
        INTERRUPT_CONFIG
    );
    assert!(link_is_up(&driver.device()));
    driver.run();
    driver.add(TRANSMIT, &[(BUFFERS, 72, false)]);
    driver.kick(TRANSMIT);
    let mut got = [0; 200];
    assert_eq!(host.recv(&mut got).unwrap(), 72);
    host.send(&packet(60)).unwrap();
    for index in 0..u64::from(SIZE) {
        driver.add(RECEIVE, &[(BUFFERS + 0x1000 * index, 0x1000, true)]);
    }
    driver.kick(RECEIVE);
    assert_eq!(driver.used(RECEIVE)[0].written, 72);
    let (second, _host) = self::tap();
    assert!(matches!(
        driver.device().attach(second),
        Err(AttachError::Occupied(_))
    ));
}

#[test]
fn a_tap_that_vanishes_takes_the_link_down_and_another_can_follow() {
    let (tap, host) = {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Tap::from_socket(ours.into()), theirs)
    };
    let mut driver = Driver::active(Net::new(Some(tap), Some(MAC), None).unwrap());
    for index in 0..u64::from(SIZE) {
        driver.add(RECEIVE, &[(BUFFERS + 0x1000 * index, 0x1000, true)]);
    }
    driver.kick(RECEIVE);
    assert!(link_is_up(&driver.device()));
    drop(host);
    driver.run();
    assert!(!link_is_up(&driver.device()));
    assert_eq!(
        driver.interrupt.status() & INTERRUPT_CONFIG,
        INTERRUPT_CONFIG
    );
    let (again, host) = self::tap();
    driver.device().attach(again).unwrap();
    host.send(&packet(60)).unwrap();
    driver.run();
    assert_eq!(driver.used(RECEIVE)[0].written, 72);
}

#[test]
fn a_packet_longer_than_any_segment_is_dropped() {
    let (mut driver, host) = active();
    let parts: Vec<Part> = (0..10).map(|_| (BUFFERS, 0x2000, false)).collect();
    driver.add(TRANSMIT, &parts);
    driver.kick(TRANSMIT);
    assert_eq!(driver.used(TRANSMIT).len(), 1);
    assert!(host.recv(&mut [0; 10]).is_err());
}

#[test]
fn the_state_survives_json_and_buffers_that_were_loaded_come_again() {
    let (mut driver, host) = active();
    for index in 0..u64::from(SIZE) {
        driver.add(RECEIVE, &[(BUFFERS + 0x100 * index, 0x100, true)]);
    }
    driver.kick(RECEIVE);
    host.send(&packet(60)).unwrap();
    driver.run();
    assert_eq!(driver.used(RECEIVE).len(), 1);
    let json = serde_json::to_string(&driver.device().save()).unwrap();
    let state: NetState = serde_json::from_str(&json).unwrap();
    assert_eq!((state.mac, state.mtu), (MAC, Some(1500)));
    let active = state.active.clone().unwrap();
    assert_eq!(
        (active.queues[0].next_avail, active.queues[0].next_used),
        (1, 1)
    );

    let (tap, host) = tap();
    let mut restored = Net::restore(&state, Some(tap)).unwrap();
    let activation = active
        .activation(driver.memory.clone(), driver.interrupt.clone())
        .unwrap();
    restored.activate(activation).unwrap();
    assert_eq!(restored.save(), state);
    // One more buffer makes the queue full again, which is when so small buffers are used.
    driver.add(RECEIVE, &[(BUFFERS, 0x100, true)]);
    host.send(&packet(60)).unwrap();
    Driver::new(restored).run();
    let mut expected = packet(60);
    expected[10] = 1;
    assert!(driver.read(BUFFERS + 0x100, 72) == expected);
}

#[test]
fn only_an_address_of_one_device_is_an_address() {
    assert_eq!(
        parse_mac("02:00:5e:10:fF:01"),
        Some([2, 0, 0x5e, 0x10, 0xff, 1])
    );
    for text in [
        "",
        "02:00:00:00:00",
        "02:00:00:00:00:01:02",
        "2:0:0:0:0:1",
        "02-00-00-00-00-01",
        "+2:00:00:00:00:01",
        "01:00:00:00:00:01",
        "00:00:00:00:00:00",
        "02:00:00:00:00:0g",
    ] {
        assert_eq!(parse_mac(text), None, "{text}");
    }
    let random = Net::new(None, None, None).unwrap().mac;
    assert_eq!(random[0] & 3, 2);
    assert_ne!(random, Net::new(None, None, None).unwrap().mac);
}

proptest! {
    #[test]
    fn a_hostile_driver_gets_a_reset_at_most(
        queues in proptest::array::uniform2(hostile_queue(any::<[u8; 16]>().prop_map(Vec::from))),
        mergeable: bool,
        lengths in proptest::collection::vec(0usize..5000, 0..20),
    ) {
        let (tap, host) = tap();
        let mut driver = Driver::new(Net::new(Some(tap), Some(MAC), None).unwrap());
        queues[0].install(&driver, RECEIVE);
        queues[1].install(&driver, TRANSMIT);
        let mut features = driver.device().offered_features();
        if !mergeable {
            features &= !(1 << VIRTIO_NET_F_MRG_RXBUF);
        }
        for length in lengths {
            host.send(&packet(length)).unwrap();
        }
        driver.activate(features);
        driver.kick(RECEIVE);
        driver.kick(TRANSMIT);
        prop_assert_eq!(driver.interrupt.needs_reset(), driver.device().active.is_none());
        prop_assert!(link_is_up(&driver.device()));
        driver.device().reset();
        prop_assert!(driver.device().queue_states().is_empty());
    }

    #[test]
    fn configuration_reads_and_writes_of_any_kind_do_no_harm(
        offset in prop_oneof![0u64..16, any::<u64>()], width in 0usize..9, bytes: [u8; 8],
    ) {
        let mut net = Net::new(None, Some(MAC), Some(1400)).unwrap();
        let before = net.config();
        net.write_config(offset, &bytes[..width.min(8)]);
        prop_assert_eq!(net.config(), before);
        let mut data = vec![0xaa; width];
        net.read_config(offset, &mut data);
        let end = usize::try_from(offset).unwrap_or(usize::MAX);
        prop_assert!(end < before.len() || data.iter().all(|&byte| byte == 0));
    }
}
