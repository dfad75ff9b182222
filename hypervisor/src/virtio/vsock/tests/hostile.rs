//! Guests that keep no rules.

use std::io::Write;

use proptest::prelude::*;

use super::*;
use crate::virtio::queue::{FEATURE_EVENT_IDX, FEATURE_VERSION_1};
use crate::virtio::vsock::credit::FIRST_GRANT;
use crate::virtio::vsock::mux::MAX_RESETS;
use crate::virtio::vsock::packet::{ANY_PORT, SHUTDOWN_BOTH, SHUTDOWN_SEND};
use driver::Ring;

fn sends(machine: &mut Machine, header: Header, data: &[u8]) -> Vec<u16> {
    machine.send(header, data);
    machine.pump();
    let mut ops = vec![];
    while let Some((header, _)) = machine.receive() {
        ops.push(header.op);
        machine.pump();
    }
    ops
}

#[test]
fn packets_for_nobody_are_refused_and_those_of_others_ignored() {
    let mut machine = Machine::new();
    let _service = machine.service(5);
    let request = from_guest(9, 5, op::REQUEST);
    let refused = [
        Header {
            dst_cid: 4,
            ..request
        },
        Header {
            dst_cid: 2 | 1 << 32,
            ..request
        },
        Header {
            socket_type: 2,
            ..request
        },
        Header {
            src_port: ANY_PORT,
            ..request
        },
        Header {
            dst_port: ANY_PORT,
            ..request
        },
        Header {
            op: op::RESPONSE,
            ..request
        },
        Header {
            op: op::RW,
            ..request
        },
        Header { op: 0, ..request },
        Header {
            op: 0xffff,
            ..request
        },
    ];
    for header in refused {
        assert_eq!(sends(&mut machine, header, &[]), [op::RST], "{header:?}");
    }
    let ignored = [
        Header {
            src_cid: 4,
            ..request
        },
        Header {
            src_cid: 3 | 1 << 32,
            ..request
        },
        Header {
            op: op::RST,
            ..request
        },
    ];
    for header in ignored {
        assert_eq!(sends(&mut machine, header, &[]), [0; 0], "{header:?}");
    }
    assert!(machine.device.mux().is_clean());
}

#[test]
fn operations_out_of_place_end_their_connection_and_no_other() {
    let mut machine = Machine::new();
    let (_other, _) = machine.connected(1 << 18);
    let steps: [(u16, u32, u32, &[u8]); 9] = [
        (op::REQUEST, 0, 0, &[]),
        (op::RESPONSE, 0, 0, &[]),
        (0, 0, 0, &[]),
        (8, 0, 0, &[]),
        (0xffff, 0, 0, &[]),
        (op::CREDIT_UPDATE, 0, 0, b"data where none belongs"),
        (op::SHUTDOWN, 0, 0, b"data where none belongs"),
        (op::CREDIT_UPDATE, 0, 1, &[]),
        (op::CREDIT_UPDATE, 0, (1 << 31) - 1, &[]),
    ];
    for (op, flags, fwd_cnt, data) in steps {
        let (mut client, header) = machine.connected(1 << 18);
        let bad = Header {
            op,
            flags,
            fwd_cnt,
            ..header
        };
        assert_eq!(sends(&mut machine, bad, data), [op::RST], "{bad:?}");
        assert!(read_all(&mut client, &mut vec![]));
        assert_eq!(machine.device.mux().counts(), (1, 0, 0));
    }
}

#[test]
fn an_answer_without_a_question_is_refused() {
    let mut machine = Machine::without_buffers();
    let mut client = machine.client(8);
    machine.pump();
    // The guest guesses the port: the request is not sent yet.
    let answer = from_guest(8, 1 << 30, op::RESPONSE);
    machine.send(answer, &[]);
    machine.pump();
    machine.post_rx();
    machine.expect(op::RST);
    assert!(read_all(&mut client, &mut vec![]));
    let _client = machine.client(8);
    let (request, _) = machine.expect(op::REQUEST);
    let early = reply(&request, op::RW);
    assert_eq!(sends(&mut machine, early, b"too early"), [op::RST]);
    assert!(machine.device.mux().is_clean());
}

#[test]
fn data_after_the_end_or_beyond_the_credit_ends_the_connection() {
    let mut machine = Machine::new();
    let (_client, header) = machine.connected(1 << 18);
    let end = Header {
        op: op::SHUTDOWN,
        flags: SHUTDOWN_SEND | 0xfff0,
        ..header
    };
    assert_eq!(sends(&mut machine, end, &[]), [0; 0]);
    assert_eq!(sends(&mut machine, end, &[]), [0; 0], "twice is no news");
    let data = Header {
        op: op::RW,
        ..header
    };
    assert_eq!(sends(&mut machine, data, b"more"), [op::RST]);

    let (_client, header) = machine.connected(1 << 18);
    let data = Header {
        op: op::RW,
        ..header
    };
    let too_much = vec![0; FIRST_GRANT as usize + 1];
    assert_eq!(sends(&mut machine, data, &too_much), [op::RST]);
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_packet_shorter_than_its_header_says_ends_the_connection() {
    let mut machine = Machine::new();
    for len in [1, 5, 65536, 1 << 31, u32::MAX] {
        let (_client, header) = machine.connected(1 << 18);
        let header = Header {
            op: op::RW,
            len,
            ..header
        };
        let mut raw = header.to_bytes().to_vec();
        raw.extend([0; 4]);
        machine.send_raw(&raw, if len == 1 { &[44] } else { &[44, 4] });
        machine.expect(op::RST);
        machine.expect_nothing();
        assert!(machine.device.mux().is_clean());
    }
    // Not even a header: there is nobody to answer.
    machine.send_raw(&[0; 44], &[43]);
    machine.expect_nothing();
}

#[test]
fn a_buffer_that_no_packet_fits_into_goes_back_empty() {
    let mut machine = Machine::without_buffers();
    machine.refill = false;
    machine.post_rx_parts(&[(0, 43, true)]);
    machine.post_rx_parts(&[(0, 4096, false)]);
    machine.post_rx_parts(&[(0, 44, true)]);
    let mut client = machine.client(8);
    machine.pump();
    for expected in [0, 0, 44] {
        let (_, bytes) = machine.rx.take(&machine.memory).unwrap();
        assert_eq!(bytes.len(), expected);
    }
    // Data needs more than a header's room.
    machine.send(from_guest(8, 1 << 30, op::RESPONSE), &[]);
    client.write_all(b"x").unwrap();
    machine.pump();
    machine.post_rx_parts(&[(0, 44, true)]);
    machine.post_rx_parts(&[(0, 45, true)]);
    machine.pump();
    for expected in [0, 45] {
        let (_, bytes) = machine.rx.take(&machine.memory).unwrap();
        assert_eq!(bytes.len(), expected);
    }
}

#[test]
fn a_guest_that_takes_no_refusals_is_not_listened_to_until_it_does() {
    let mut machine = Machine::without_buffers();
    let garbage = from_guest(1, 2, op::RW);
    let mut sent = 0;
    while sent < MAX_RESETS {
        machine.send(garbage, &[]);
        machine.pump();
        sent += 1;
    }
    // The device takes no more now; what follows stays in the queue.
    let slots = 128 / 4;
    for _ in 0..slots {
        machine.send(garbage, &[]);
        sent += 1;
    }
    machine.pump();
    assert!(machine.tx.free_slot_or_reap(&machine.memory).is_none());
    machine.post_rx();
    let mut refusals = 0;
    loop {
        machine.pump();
        match machine.receive() {
            Some((header, _)) => assert_eq!(header.op, op::RST),
            None => break,
        }
        refusals += 1;
    }
    assert_eq!(refusals, sent);
}

#[test]
fn a_flood_of_connections_is_bounded() {
    const MOST: usize = 100;
    let mut machine = Machine::new();
    machine.device.mux().set_limits(MOST, 10);
    let service = machine.service(5);
    let mut peers = vec![];
    let mut refused = 0;
    for port in 0..MOST as u32 + 50 {
        match sends(&mut machine, from_guest(port, 5, op::REQUEST), &[])[..] {
            [op::RESPONSE] => peers.push(service.accept().unwrap().0),
            [op::RST] => refused += 1,
            ref ops => panic!("{ops:?}"),
        }
    }
    assert_eq!((peers.len(), refused), (MOST, 50));
    // Nor does a client get in; but one that is only waiting for the guest's confirmation makes room.
    let mut client = machine.client(5);
    machine.expect_nothing();
    assert!(read_all(&mut client, &mut vec![]));
    peers.pop();
    machine.expect(op::SHUTDOWN);
    machine.expect_any();
    let _client = machine.client(5);
    machine.expect(op::RST);
    machine.expect(op::REQUEST);
    assert_eq!(machine.device.mux().counts(), (MOST, 0, 0));
    machine.device.reset();
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_broken_queue_stops_the_device_until_the_driver_resets_it() {
    for queue in 0..2 {
        let mut machine = Machine::new();
        let (mut client, _) = machine.connected(1 << 18);
        let ring = if queue == 0 { &machine.rx } else { &machine.tx };
        ring.set_avail_idx(&machine.memory, 0x7000);
        machine.device.queue_events()[1].write(1).unwrap();
        client.write_all(b"x").unwrap();
        machine.pump();
        assert!(machine.interrupt.needs_reset());
        assert!(read_all(&mut client, &mut vec![]));
        // Whatever happens now, nothing happens.
        machine.device.queue_events()[0].write(1).unwrap();
        let mut waiting = machine.client(9);
        machine.pump();

        machine.device.reset();
        machine.interrupt.restore(0, false);
        machine.rx = Ring::new(
            &machine.memory,
            0x1_0000,
            RX_SIZE,
            0x10_0000,
            RX_BUFFER + 64,
        );
        machine.tx = Ring::new(&machine.memory, 0x2_0000, 128, 0x20_0000, TX_BUFFER);
        machine.activate();
        machine.post_rx();
        machine.expect(op::REQUEST);
        assert!(!read_all(&mut waiting, &mut vec![]));
    }
}

#[test]
fn buffers_outside_of_memory_stop_the_device() {
    for (address, len) in [(8 << 20, 44), (u64::MAX - 3, 44), ((8 << 20) - 4, u32::MAX)] {
        let mut machine = Machine::new();
        machine
            .tx
            .set_descriptor(&machine.memory, 0, (address, len, 0, 0));
        machine.tx.make_available(&machine.memory, 0);
        machine.device.queue_events()[1].write(1).unwrap();
        machine.pump();
        assert!(machine.interrupt.needs_reset());
    }
}

/// A field's value: one that makes sense, or any.
fn value(sense: &'static [u32]) -> impl Strategy<Value = u32> {
    prop_oneof![6 => proptest::sample::select(sense), 1 => any::<u32>()]
}

#[derive(Clone, Debug)]
enum Step {
    Packet {
        header: Header,
        said: Option<u32>,
        data: usize,
        cut: u32,
    },
    Client,
    ClientWrites(usize, usize),
    ClientReads(usize),
    ClientLeaves(usize),
    GuestTakes(usize),
    Runs,
    Resets,
}

fn step() -> impl Strategy<Value = Step> {
    let header = (
        (value(&[3]), value(&[2]), value(&[11, 12, 13])),
        (
            value(&[700, 701, 1 << 30, (1 << 30) + 1, (1 << 30) + 2]),
            value(&[1]),
        ),
        (value(&[1, 2, 3, 4, 5, 5, 5, 6, 7]), value(&[0, 1, 2, 3])),
        (
            value(&[0, 1, 4096, 1 << 18]),
            value(&[0, 1, 5, 100, 5000, u32::MAX]),
        ),
    )
        .prop_map(
            |((src, dst, guest), (host, kind), (op, flags), (buf_alloc, fwd_cnt))| Header {
                src_cid: u64::from(src),
                dst_cid: u64::from(dst),
                src_port: guest,
                dst_port: host,
                len: 0,
                socket_type: kind as u16,
                op: op as u16,
                flags,
                buf_alloc,
                fwd_cnt,
            },
        );
    let said = proptest::option::weighted(0.1, any::<u32>());
    let data = prop_oneof![3 => Just(0usize), 2 => 1..5000usize, 1 => 60_000..65_000usize];
    prop_oneof![
        20 => (header, said, data, 0..60u32).prop_map(|(header, said, data, cut)| Step::Packet {
            header,
            said,
            data,
            cut
        }),
        2 => Just(Step::Client),
        3 => (0..4usize, 1..100_000usize).prop_map(|(which, size)| Step::ClientWrites(which, size)),
        2 => (0..4usize).prop_map(Step::ClientReads),
        1 => (0..4usize).prop_map(Step::ClientLeaves),
        5 => (0..20usize).prop_map(Step::GuestTakes),
        10 => Just(Step::Runs),
        1 => Just(Step::Resets),
    ]
}

proptest! {
    #[test]
    fn no_packets_in_any_order_break_the_device(steps in proptest::collection::vec(step(), 1..150)) {
        let mut machine = Machine::new();
        let services = [machine.service(700), machine.service(701)];
        for service in &services {
            service.set_nonblocking(true).unwrap();
        }
        let mut clients: Vec<UnixStream> = vec![];
        for step in steps {
            match step {
                Step::Packet { header, said, data, cut } => {
                    let header = Header { len: said.unwrap_or(data as u32), ..header };
                    let mut raw = header.to_bytes().to_vec();
                    raw.resize(44 + data, 7);
                    let total = raw.len() as u32;
                    let cut = cut.min(total);
                    machine.send_raw(&raw, &[cut, total - cut]);
                }
                Step::Client => clients.push(machine.client(11)),
                Step::ClientWrites(which, size) => {
                    if let Some(client) = clients.get_mut(which) {
                        let _ = client.write(&vec![0; size]);
                    }
                }
                Step::ClientReads(which) => {
                    if let Some(client) = clients.get_mut(which) {
                        read_all(client, &mut vec![]);
                    }
                }
                Step::ClientLeaves(which) => {
                    if which < clients.len() {
                        clients.swap_remove(which);
                    }
                }
                Step::GuestTakes(count) => {
                    for _ in 0..count {
                        machine.receive();
                    }
                }
                Step::Runs => machine.pump(),
                Step::Resets => {
                    machine.device.reset();
                    machine.rx = Ring::new(&machine.memory, 0x1_0000, RX_SIZE, 0x10_0000, RX_BUFFER + 64);
                    machine.tx = Ring::new(&machine.memory, 0x2_0000, 128, 0x20_0000, TX_BUFFER);
                    machine.activate();
                    machine.post_rx();
                }
            }
            for service in &services {
                if let Ok((peer, _)) = service.accept() {
                    peer.set_nonblocking(true).unwrap();
                    clients.push(peer);
                }
            }
            prop_assert!(machine.device.mux().largest_backlog() <= 256 * 1024);
            prop_assert!(machine.device.mux().resets() <= MAX_RESETS + 200);
            // Room for the next packet, unless the device waits for the guest.
            if machine.tx.free_slot_or_reap(&machine.memory).is_none() {
                machine.pump();
                while machine.receive().is_some() {
                    machine.pump();
                }
            }
        }
        prop_assert!(!machine.interrupt.needs_reset(), "the queues themselves were sound");
        // The rules kept, it works.
        machine.pump();
        while machine.receive().is_some() {
            machine.pump();
        }
        drop(clients);
        machine.device.reset();
        machine.pump();
        prop_assert!(machine.device.mux().is_clean());
    }

    #[test]
    fn no_rings_break_the_device(
        descriptors in proptest::collection::vec((0u64..0x90_0000, any::<u16>(), 0u16..8, 0u16..140), 128),
        heads in proptest::collection::vec(0u16..140, 1..128),
        which in 0..3usize,
        features in proptest::sample::select(&[FEATURE_VERSION_1, FEATURE_VERSION_1 | FEATURE_EVENT_IDX][..]),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let device = Vsock::new(&config(&dir)).unwrap();
        let mut machine = Machine::around(dir, device);
        let mut activation = machine.activation();
        activation.features = features;
        machine.device.activate(activation).unwrap();
        let mut client = machine.client(5);
        client.write_all(&[1; 1000]).unwrap();
        let ring = [&mut machine.rx, &mut machine.tx, &mut machine.event].into_iter().nth(which).unwrap();
        for (index, &(address, len, flags, next)) in (0..).zip(&descriptors) {
            ring.set_descriptor(&machine.memory, index, (address, u32::from(len), flags, next));
        }
        for &head in &heads {
            ring.make_available(&machine.memory, head);
        }
        for _ in 0..5 {
            machine.device.queue_events()[which].write(1).unwrap();
            // The driver's own check of interrupts has no meaning here.
            for source in 0..4 {
                machine.device.handle(source);
            }
        }
    }
}

#[test]
fn a_guest_that_ends_everything_twice_is_answered_once() {
    let mut machine = Machine::new();
    let (_client, header) = machine.connected(1 << 18);
    let end = Header {
        op: op::SHUTDOWN,
        flags: SHUTDOWN_BOTH,
        ..header
    };
    assert_eq!(sends(&mut machine, end, &[]), [op::RST]);
    assert_eq!(
        sends(&mut machine, end, &[]),
        [op::RST],
        "it is unknown by now"
    );
    assert!(machine.device.mux().is_clean());
}

/// Runs one test of this program in a process of its own.
fn in_a_process_of_its_own(name: &str) {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", name])
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn nobody_waits_in_vain_when_there_are_no_descriptors() {
    in_a_process_of_its_own("virtio::vsock::tests::hostile::without_descriptors");
}

#[test]
#[ignore = "it takes all of the process's descriptors; the test above runs it"]
fn without_descriptors() {
    let few = rustix::process::Rlimit {
        current: Some(100),
        maximum: Some(100),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let mut machine = Machine::new();
    let _service = machine.service(5);
    let mut clients: Vec<_> = (0..3).map(|_| machine.client(7)).collect();
    let mut taken = vec![];
    while let Ok(file) = std::fs::File::open("/dev/null") {
        taken.push(file);
    }
    machine.send(from_guest(9, 5, op::REQUEST), &[]);
    machine.expect(op::RST);
    for client in &mut clients {
        assert!(read_all(client, &mut vec![]), "it is told at once");
    }
    assert!(machine.device.mux().is_clean());
    taken.truncate(taken.len() / 2);
    let _client = machine.client(7);
    machine.expect(op::REQUEST);
}
