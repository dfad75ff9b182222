//! How connections come about, from either side.

use super::*;
use crate::virtio::vsock::connection::Key;
use crate::virtio::vsock::credit::FIRST_GRANT;
use crate::virtio::vsock::device::VsockState;
use crate::virtio::vsock::packet::SHUTDOWN_RECEIVE;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

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
