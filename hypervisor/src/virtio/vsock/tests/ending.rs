//! How connections end: nothing under way is lost.

use super::*;
use crate::virtio::vsock::packet::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use std::io::{Read, Write};
use std::net::Shutdown;

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
