//! How data flows: credit, turns, packets and descriptors.

use super::*;
use crate::virtio::INTERRUPT_USED_RING;
use crate::virtio::vsock::credit::{FIRST_GRANT, LARGEST_GRANT};
use crate::virtio::vsock::packet::SHUTDOWN_BOTH;
use std::io::Write;
use std::os::fd::AsFd;

#[test]
fn a_guest_that_does_not_read_stops_the_client_and_loses_nothing() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(10_000);
    let all = bytes(300_000);
    let mut written = 0;
    let mut got = Vec::new();
    let mut stalls = 0;
    while got.len() < all.len() {
        if written < all.len() {
            written += client.write(&all[written..]).unwrap_or(0);
        }
        machine.pump();
        let before = got.len();
        let mut asked = 0;
        while let Some((packet, data)) = machine.receive() {
            match packet.op {
                op::RW => got.extend(data),
                op::CREDIT_REQUEST => asked += 1,
                op => panic!("operation {op}"),
            }
            machine.pump();
        }
        assert_eq!(got.len() - before, 10_000);
        assert!(asked <= 1);
        stalls += asked;
        machine.send(
            Header {
                op: op::CREDIT_UPDATE,
                fwd_cnt: got.len() as u32,
                buf_alloc: 10_000,
                ..header
            },
            &[],
        );
    }
    assert!(got == all);
    assert!(stalls > 20, "it asks once for each stall: {stalls}");
}

#[test]
fn a_connection_that_moves_data_is_granted_more_and_gives_it_back() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    let mut alloc = 0;
    for _ in 0..100 {
        machine.send(
            Header {
                op: op::RW,
                ..header
            },
            &bytes(FIRST_GRANT as usize),
        );
        machine.pump();
        read_all(&mut client, &mut Vec::new());
        while let Some((packet, _)) = machine.receive() {
            alloc = packet.buf_alloc;
        }
    }
    assert_eq!(alloc, LARGEST_GRANT);
    machine.send(
        Header {
            op: op::RST,
            ..header
        },
        &[],
    );
    machine.pump();
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_guest_that_asks_for_credit_is_told() {
    let mut machine = Machine::new();
    let (_client, header) = machine.connected(1 << 18);
    machine.send(
        Header {
            op: op::CREDIT_REQUEST,
            ..header
        },
        &[],
    );
    let (update, _) = machine.expect(op::CREDIT_UPDATE);
    assert_eq!((update.buf_alloc, update.fwd_cnt), (FIRST_GRANT, 0));
}

#[test]
fn connections_take_turns() {
    let mut machine = Machine::without_buffers();
    machine.refill = false;
    let mut clients = vec![];
    for _ in 0..2 {
        let client = machine.client(5);
        machine.post_rx_parts(&[(0, 44, true)]);
        let (request, _) = machine.expect(op::REQUEST);
        machine.send(reply(&request, op::RESPONSE), &[]);
        machine.pump();
        clients.push(client);
    }
    for client in &mut clients {
        client.write_all(&bytes(100_000)).unwrap();
    }
    let mut turns = vec![];
    for _ in 0..10 {
        machine.post_rx_parts(&[(0, 44, true), (44, 4096, true)]);
        turns.push(machine.expect(op::RW).0.src_port);
    }
    for pair in turns.windows(2) {
        assert_ne!(pair[0], pair[1], "{turns:?}");
    }
}

#[test]
fn a_burst_fills_many_buffers_with_one_read_and_interrupts_once() {
    let mut machine = Machine::new();
    let (mut client, _) = machine.connected(1 << 18);
    let all = bytes(100_000);
    client.write_all(&all).unwrap();
    machine.interrupt.acknowledge(INTERRUPT_USED_RING);
    // One event, one turn: the rest of the buffers is used by the time the driver looks.
    machine.device.handle(3);
    assert_eq!(machine.interrupt.line().read().unwrap(), 1);
    let mut got = Vec::new();
    while let Some((_, data)) = machine.receive() {
        got.extend(data);
    }
    assert_eq!(got.len(), 16 * 4096, "all buffers there are");
    machine.pump();
    while let Some((_, data)) = machine.receive() {
        got.extend(data);
        machine.pump();
    }
    assert!(got == all);
}

#[test]
fn packets_may_be_cut_into_descriptors_anywhere() {
    let mut machine = Machine::without_buffers();
    machine.refill = false;
    machine.post_rx_parts(&[(0, 10, true), (10, 30, true), (40, 14, true), (54, 3, true)]);
    let mut client = machine.client(5);
    let (request, _) = machine.expect(op::REQUEST);
    let header = reply(&request, op::RESPONSE);
    let raw = header.to_bytes();
    machine.send_raw(&raw, &[1, 42, 1]);
    client.write_all(&bytes(20)).unwrap();
    machine.pump();
    machine.post_rx_parts(&[(0, 40, true), (40, 8, true), (48, 5, true)]);
    machine.post_rx_parts(&[(0, 50, true), (50, 50, true)]);
    let (_, first) = machine.expect(op::RW);
    let (_, second) = machine.expect(op::RW);
    assert_eq!((first.len(), second.len()), (9, 11));
    assert_eq!([first, second].concat(), bytes(20));
    let mut raw = Header {
        op: op::RW,
        len: 9,
        ..header
    }
    .to_bytes()
    .to_vec();
    raw.extend(b"fragments and more than the length");
    machine.send_raw(&raw, &[43, 4, 2, 20]);
    machine.pump();
    let mut got = Vec::new();
    read_all(&mut client, &mut got);
    assert!(got.ends_with(b"\nfragments"), "{got:?}");
}

#[test]
fn descriptors_beside_the_data_do_not_stop_it() {
    use rustix::net::{
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg as send_message,
    };
    let mut machine = Machine::new();
    let (client, _) = machine.connected(1 << 18);
    for text in ["one ", "two ", "three"] {
        let fds = [client.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let parts = [std::io::IoSlice::new(text.as_bytes())];
        send_message(&client, &parts, &mut ancillary, SendFlags::empty()).unwrap();
    }
    machine.pump();
    let mut got = Vec::new();
    while let Some((_, data)) = machine.receive() {
        got.extend(data);
        machine.pump();
    }
    assert_eq!(got, b"one two three");
}

#[test]
fn a_client_that_does_not_read_stops_the_guest_and_loses_nothing() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    let sent = send_until_stalled(&mut machine, header, 0);
    // What the kernel's socket holds, and one grant.
    assert!(sent.len() < 2 << 20, "{}", sent.len());
    assert_eq!(machine.device.mux().counts(), (1, 0, 0));
    let shutdown = Header {
        op: op::SHUTDOWN,
        flags: SHUTDOWN_BOTH,
        ..header
    };
    machine.send(shutdown, &[]);
    machine.expect_nothing();
    let mut got = Vec::new();
    while !read_all(&mut client, &mut got) {
        machine.pump();
    }
    assert!(got == sent);
    // Everything is written only now.
    while machine.expect_any() != op::RST {}
    assert!(machine.device.mux().is_clean());
}
