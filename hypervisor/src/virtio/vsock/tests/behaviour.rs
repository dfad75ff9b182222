//! What the device does with guests and clients that keep the rules, and with clients that do not.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::*;
use crate::virtio::vsock::connection::Key;
use crate::virtio::vsock::credit::{FIRST_GRANT, LARGEST_GRANT};
use crate::virtio::vsock::device::VsockState;
use crate::virtio::vsock::packet::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::virtio::{ActivateError, INTERRUPT_USED_RING};

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).map(|n| (n * 7 + n / 251) as u8).collect()
}

fn is_closed(client: &mut UnixStream) -> bool {
    read_all(client, &mut Vec::new())
}

#[test]
fn a_client_reaches_the_guest_and_data_goes_both_ways() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    client.write_all(b"ping").unwrap();
    let (packet, data) = machine.expect(op::RW);
    assert_eq!(data, b"ping");
    assert_eq!((packet.src_port, packet.dst_port), (header.dst_port, 1000));
    machine.send(
        Header {
            op: op::RW,
            fwd_cnt: 4,
            ..header
        },
        b"pong",
    );
    machine.pump();
    let mut got = [0; 4];
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"pong");
}

#[test]
fn the_guest_reaches_a_service_and_data_goes_both_ways() {
    let mut machine = Machine::new();
    let service = machine.service(500);
    machine.send(from_guest(77, 500, op::REQUEST), &[]);
    let (response, _) = machine.expect(op::RESPONSE);
    assert_eq!((response.src_port, response.dst_port), (500, 77));
    assert_eq!(response.buf_alloc, FIRST_GRANT);
    let (mut peer, _) = service.accept().unwrap();
    machine.send(from_guest(77, 500, op::RW), b"question");
    machine.pump();
    let mut got = [0; 8];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"question");
    peer.write_all(b"answer").unwrap();
    assert_eq!(machine.expect(op::RW).1, b"answer");
}

#[test]
fn what_a_client_writes_behind_its_line_is_data() {
    let mut machine = Machine::new();
    let mut client = UnixStream::connect(machine.path()).unwrap();
    client.write_all(b"CONNECT 9\nearly").unwrap();
    let (request, _) = machine.expect(op::REQUEST);
    machine.expect_nothing();
    machine.send(reply(&request, op::RESPONSE), &[]);
    assert_eq!(machine.expect(op::RW).1, b"early");
}

#[test]
fn a_client_whose_port_nobody_listens_on_is_closed() {
    let mut machine = Machine::new();
    let mut client = machine.client(9);
    let (request, _) = machine.expect(op::REQUEST);
    machine.send(reply(&request, op::RST), &[]);
    machine.expect_nothing();
    assert!(is_closed(&mut client));
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_guest_whose_port_has_no_service_is_refused() {
    let mut machine = Machine::new();
    machine.send(from_guest(77, 500, op::REQUEST), &[]);
    let (reset, _) = machine.expect(op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (500, 77));
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_line_that_comes_in_pieces_is_understood() {
    let mut machine = Machine::new();
    let mut client = UnixStream::connect(machine.path()).unwrap();
    for piece in ["CON", "NECT", " 4", "2"] {
        client.write_all(piece.as_bytes()).unwrap();
        machine.expect_nothing();
    }
    client.write_all(b"\n").unwrap();
    assert_eq!(machine.expect(op::REQUEST).0.dst_port, 42);
}

#[test]
fn a_client_that_does_not_say_what_it_wants_is_closed() {
    let mut machine = Machine::new();
    for line in [
        "GET / HTTP/1.1\n",
        "CONNECT\n",
        "CONNECT 4294967295\n",
        "CONNECT 1111111111111111111111111111",
    ] {
        let mut client = UnixStream::connect(machine.path()).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        machine.expect_nothing();
        assert!(is_closed(&mut client), "{line}");
    }
    let mut client = UnixStream::connect(machine.path()).unwrap();
    client.write_all(b"CONNECT 5").unwrap();
    machine.expect_nothing();
    client.shutdown(Shutdown::Write).unwrap();
    machine.expect_nothing();
    assert!(is_closed(&mut client));
    assert!(machine.device.mux().is_clean());
}

#[test]
fn silent_clients_are_bounded_and_shut_nobody_out() {
    let mut machine = Machine::new();
    machine.device.mux().set_limits(1, 20);
    let mut silent = vec![];
    for _ in 0..23 {
        silent.push(UnixStream::connect(machine.path()).unwrap());
        machine.pump();
    }
    assert_eq!(machine.device.mux().counts(), (0, 0, 20));
    let closed: Vec<bool> = silent.iter_mut().map(is_closed).collect();
    assert!(closed[..3].iter().all(|&closed| closed), "the oldest go");
    assert!(closed[3..].iter().all(|&closed| !closed));
    let _client = machine.connected(1000);
    drop(silent);
    machine.expect_nothing();
    assert_eq!(machine.device.mux().counts(), (1, 0, 0));
}

#[test]
fn many_clients_at_once_are_all_served_and_their_ports_differ() {
    let mut machine = Machine::new();
    let clients: Vec<_> = (0..500).map(|_| machine.client(5)).collect();
    let mut ports = std::collections::HashSet::new();
    for _ in &clients {
        let (request, _) = machine.expect(op::REQUEST);
        ports.insert(request.src_port);
        machine.send(reply(&request, op::RESPONSE), &[]);
    }
    machine.pump();
    for mut client in clients {
        let mut line = Vec::new();
        read_all(&mut client, &mut line);
        assert!(line.starts_with(b"OK "), "{line:?}");
    }
    assert_eq!(ports.len(), 500);
    for port in ports {
        let (packet, _) = machine.expect(op::SHUTDOWN);
        assert_eq!(packet.flags, SHUTDOWN_RECEIVE);
        // Then the end of its stream; the order among clients is theirs.
        let _ = port;
    }
}

#[test]
fn a_client_waits_for_the_driver_and_the_driver_for_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::new(&config(&dir)).unwrap();
    let mut machine = Machine::around(dir, device);
    let mut client = machine.client(6);
    machine.pump();
    machine.device.reset();
    machine.pump();
    assert!(!is_closed(&mut client));
    machine.activate();
    machine.post_rx();
    assert_eq!(machine.expect(op::REQUEST).0.dst_port, 6);
}

#[test]
fn a_client_that_leaves_before_the_answer_takes_its_request_back() {
    let mut machine = Machine::new();
    let client = machine.client(6);
    let (request, _) = machine.expect(op::REQUEST);
    drop(client);
    let (reset, _) = machine.expect(op::RST);
    assert_eq!(reset.src_port, request.src_port);
    // The guest's answer crosses it.
    machine.send(reply(&request, op::RESPONSE), &[]);
    machine.expect(op::RST);
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_client_that_leaves_before_the_guest_hears_of_it_is_forgotten() {
    let mut machine = Machine::without_buffers();
    let client = machine.client(6);
    machine.pump();
    drop(client);
    machine.pump();
    machine.post_rx();
    machine.expect_nothing();
    assert!(machine.device.mux().is_clean());
}

#[test]
fn each_direction_ends_by_itself_when_the_client_begins() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    client.write_all(b"last words").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(machine.expect(op::RW).1, b"last words");
    assert_eq!(machine.expect(op::SHUTDOWN).0.flags, SHUTDOWN_SEND);
    machine.expect_nothing();
    machine.send(
        Header {
            op: op::RW,
            ..header
        },
        b"still here",
    );
    let shutdown = Header {
        op: op::SHUTDOWN,
        flags: SHUTDOWN_SEND,
        ..header
    };
    machine.send(shutdown, &[]);
    machine.pump();
    let mut got = String::new();
    client.set_nonblocking(false).unwrap();
    client.read_to_string(&mut got).unwrap();
    assert_eq!(got, "still here");
}

#[test]
fn each_direction_ends_by_itself_when_the_guest_begins() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    machine.send(
        Header {
            op: op::RW,
            ..header
        },
        b"last words",
    );
    let shutdown = |flags| Header {
        op: op::SHUTDOWN,
        flags,
        ..header
    };
    machine.send(shutdown(SHUTDOWN_SEND), &[]);
    machine.expect_nothing();
    let mut got = Vec::new();
    assert!(read_all(&mut client, &mut got));
    assert_eq!(got, b"last words");
    client.write_all(b"still here").unwrap();
    assert_eq!(machine.expect(op::RW).1, b"still here");
    machine.send(shutdown(SHUTDOWN_RECEIVE), &[]);
    machine.expect(op::RST);
    assert!(machine.device.mux().is_clean());
    assert!(client.write_all(b"nobody").is_err());
}

#[test]
fn a_guest_that_takes_no_more_makes_the_clients_writes_fail() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    let shutdown = Header {
        op: op::SHUTDOWN,
        flags: SHUTDOWN_RECEIVE,
        ..header
    };
    machine.send(shutdown, &[]);
    machine.expect_nothing();
    let error = client.write_all(b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    machine.send(
        Header {
            op: op::RW,
            ..header
        },
        b"the other way",
    );
    machine.pump();
    let mut got = Vec::new();
    assert!(!read_all(&mut client, &mut got));
    assert_eq!(got, b"the other way");
    drop(client);
    assert_eq!(machine.expect(op::SHUTDOWN).0.flags, SHUTDOWN_BOTH);
}

#[test]
fn a_client_that_closes_has_everything_delivered_and_the_guest_confirms() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    client.write_all(b"done").unwrap();
    drop(client);
    machine.pump();
    let mut data = Vec::new();
    let mut flags = 0;
    while let Some((packet, bytes)) = machine.receive() {
        data.extend(bytes);
        flags |= packet.flags;
        machine.pump();
    }
    assert_eq!((data.as_slice(), flags), (&b"done"[..], SHUTDOWN_BOTH));
    assert_eq!(machine.device.mux().counts(), (1, 0, 0));
    machine.send(
        Header {
            op: op::RST,
            ..header
        },
        &[],
    );
    machine.expect_nothing();
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_client_that_closes_with_data_unread_has_its_own_delivered() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    machine.send(
        Header {
            op: op::RW,
            ..header
        },
        b"never read",
    );
    machine.pump();
    client.write_all(b"done").unwrap();
    drop(client);
    machine.pump();
    let mut data = Vec::new();
    let mut flags = 0;
    while let Some((packet, bytes)) = machine.receive() {
        data.extend(bytes);
        flags |= packet.flags;
        machine.pump();
    }
    assert_eq!((data.as_slice(), flags), (&b"done"[..], SHUTDOWN_BOTH));
}

/// Sends as much as the guest has credit for until it has none for longer. Returns what was sent.
fn send_until_stalled(machine: &mut Machine, header: Header, start: usize) -> Vec<u8> {
    let mut sent = Vec::new();
    let (mut alloc, mut taken) = (FIRST_GRANT, 0);
    loop {
        let under_way = (start + sent.len()) as u32 - taken;
        let free = (alloc - under_way).min(64 * 1024) as usize;
        if free == 0 {
            machine.pump();
            match machine.receive() {
                Some((packet, _)) => {
                    assert_eq!(packet.op, op::CREDIT_UPDATE);
                    (alloc, taken) = (packet.buf_alloc, packet.fwd_cnt);
                    continue;
                }
                None => return sent,
            }
        }
        let chunk = &bytes(1 << 22)[sent.len()..][..free];
        machine.send(
            Header {
                op: op::RW,
                ..header
            },
            chunk,
        );
        sent.extend_from_slice(chunk);
    }
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

#[test]
fn a_guest_that_resets_with_data_under_way_loses_none_of_it() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    let sent = send_until_stalled(&mut machine, header, 0);
    machine.send(
        Header {
            op: op::RST,
            ..header
        },
        &[],
    );
    machine.expect_nothing();
    assert_eq!(machine.device.mux().counts(), (0, 1, 0));
    // The same ports are free again.
    machine.send(
        Header {
            op: op::CREDIT_UPDATE,
            ..header
        },
        &[],
    );
    machine.expect(op::RST);
    let mut got = Vec::new();
    while !read_all(&mut client, &mut got) {
        machine.pump();
    }
    assert!(got == sent);
    machine.pump();
    assert!(machine.device.mux().is_clean());
}

#[test]
fn a_driver_that_resets_the_device_loses_nothing_either() {
    let mut machine = Machine::new();
    let (mut client, header) = machine.connected(1 << 18);
    let sent = send_until_stalled(&mut machine, header, 0);
    let (mut other, _) = machine.connected(1 << 18);
    machine.device.reset();
    assert!(is_closed(&mut other));
    let mut got = Vec::new();
    while !read_all(&mut client, &mut got) {
        machine.pump();
    }
    assert!(got == sent);
    machine.pump();
    assert!(machine.device.mux().is_clean());
}

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
fn the_guest_reads_its_cid_and_cannot_change_it() {
    let mut machine = Machine::new();
    machine.device.write_config(0, &[9; 8]);
    let read = |offset, len| {
        let mut data = vec![0xff; len];
        machine.device.read_config(offset, &mut data);
        data
    };
    assert_eq!(read(0, 8), [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(0, 4), [3, 0, 0, 0]);
    assert_eq!(read(1, 8), [0; 8]);
    assert_eq!(read(u64::MAX, 8), [0; 8]);
}

#[test]
fn a_cid_that_is_no_guests_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for cid in [0, 1, 2, u32::MAX] {
        let config = VsockConfig {
            cid,
            ..config(&dir)
        };
        let error = Vsock::new(&config).err().unwrap().to_string();
        assert!(error.contains(&cid.to_string()), "{error}");
    }
}

#[test]
fn a_device_whose_queue_is_missing_does_not_become_active() {
    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::new(&config(&dir)).unwrap();
    let mut machine = Machine::around(dir, device);
    let mut activation = machine.activation();
    activation.queues[2] = virtio_queue::QueueT::new(8).unwrap();
    let result = machine.device.activate(activation);
    assert!(matches!(result, Err(ActivateError::QueueMissing(2))));
    assert!(machine.device.queue_states().is_empty());
}

#[test]
fn a_saved_device_comes_back_and_tells_the_guest_that_its_connections_are_gone() {
    let mut machine = Machine::new();
    let (_client, header) = machine.connected(1 << 18);
    for slot in 0..2 {
        machine.event.offer(&machine.memory, slot, &[(0, 4, true)]);
    }
    let state = machine.device.save();
    let text = serde_json::to_string(&state).unwrap();
    let state: VsockState = serde_json::from_str(&text).unwrap();
    assert_eq!(state, machine.device.save());
    assert_eq!(state.cid, CID);

    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::restore(&config(&dir), &state).unwrap();
    let memory = machine.memory.clone();
    let interrupt = Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()));
    let active = state.active.clone().unwrap();
    let mut restored = Machine {
        dir,
        device,
        interrupt: interrupt.clone(),
        ..machine
    };
    assert!(restored.device.save().transport_reset);
    restored
        .device
        .activate(active.activation(memory, interrupt).unwrap())
        .unwrap();
    restored.pump();
    let (_, event) = restored.event.take(&restored.memory).unwrap();
    assert_eq!(event, [0; 4]);
    assert!(!restored.event.has_news(&restored.memory), "once is enough");
    assert!(!restored.device.save().transport_reset);
    // The old connection is unknown, a new one gets a port that the old ones did not have.
    restored.send(
        Header {
            op: op::CREDIT_UPDATE,
            ..header
        },
        &[],
    );
    restored.expect(op::RST);
    let (_client, new) = restored.connected(1 << 18);
    assert!(new.dst_port > header.dst_port);
    assert_eq!(restored.device.queue_states().len(), 3);
}

#[test]
fn a_device_saved_without_its_driver_has_nothing_to_tell() {
    let dir = tempfile::tempdir().unwrap();
    let state = Vsock::new(&config(&dir)).unwrap().save();
    assert_eq!(state.active, None);
    let device = Vsock::restore(&config(&dir), &state).unwrap();
    assert!(!device.save().transport_reset);
}

#[test]
fn host_ports_wrap_and_skip_those_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::new(&config(&dir)).unwrap();
    let last = VsockState {
        next_port: u32::MAX,
        ..device.save()
    };
    drop(device);
    let device = Vsock::restore(&config(&dir), &last).unwrap();
    let mut machine = Machine::around(dir, device);
    machine.activate();
    machine.post_rx();
    let taken = machine.service(1 << 30);
    machine.send(from_guest(5, 1 << 30, op::REQUEST), &[]);
    machine.expect(op::RESPONSE);
    let clients = [machine.client(5), machine.client(5), machine.client(5)];
    let ports = clients
        .each_ref()
        .map(|_| machine.expect(op::REQUEST).0.src_port);
    assert_eq!(ports, [(1 << 31) - 1, (1 << 30) + 1, (1 << 30) + 2]);
    drop(taken);
    assert_ne!(Key { host: 1, guest: 2 }, Key { host: 2, guest: 1 });
}
