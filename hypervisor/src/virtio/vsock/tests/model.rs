//! Whatever both sides do, in whatever order: what one side wrote, the other reads, each byte once and in order.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use proptest::prelude::*;

use super::guest::Guest;
use super::{Machine, read_all};
use crate::virtio::vsock::packet::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

const SERVICE: u32 = 700;

#[derive(Clone, Debug)]
enum Step {
    GuestWrites(usize, usize),
    GuestReads(usize, usize),
    GuestShutsDown(usize, u32),
    GuestCloses(usize),
    HostWrites(usize, usize),
    HostReads(usize, usize),
    HostEndsWriting(usize),
    HostCloses(usize),
    DeviceRuns,
    GuestTakesPackets,
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..3usize;
    let size = prop_oneof![1..100usize, 1..70_000usize, 200_000..400_000usize];
    prop_oneof![
        5 => (which.clone(), size.clone()).prop_map(|(which, size)| Step::GuestWrites(which, size)),
        5 => (which.clone(), size.clone()).prop_map(|(which, size)| Step::GuestReads(which, size)),
        1 => (which.clone(), 1..=3u32).prop_map(|(which, flags)| Step::GuestShutsDown(which, flags)),
        1 => which.clone().prop_map(Step::GuestCloses),
        5 => (which.clone(), size.clone()).prop_map(|(which, size)| Step::HostWrites(which, size)),
        5 => (which.clone(), size).prop_map(|(which, size)| Step::HostReads(which, size)),
        1 => which.clone().prop_map(Step::HostEndsWriting),
        1 => which.prop_map(Step::HostCloses),
        10 => Just(Step::DeviceRuns),
        10 => Just(Step::GuestTakesPackets),
    ]
}

/// The byte at `position` of a stream.
fn byte(stream: usize, position: usize) -> u8 {
    ((position * 2_654_435_761) >> 13) as u8 ^ stream as u8
}

fn bytes(stream: usize, from: usize, count: usize) -> Vec<u8> {
    (from..from + count)
        .map(|position| byte(stream, position))
        .collect()
}

/// One connection: how far each end is.
struct Pair {
    key: (u32, u32),
    client: Option<UnixStream>,
    guest_wrote: usize,
    guest_read: usize,
    host_wrote: usize,
    host_read: usize,
    host_saw_end: bool,
}

struct World {
    machine: Machine,
    guest: Guest,
    pairs: Vec<Pair>,
    service: UnixListener,
}

impl World {
    /// Two connections from the host and one from the guest.
    fn new() -> Self {
        let mut machine = Machine::new();
        let mut guest = Guest::default();
        let service = machine.service(SERVICE);
        let clients = [machine.client(11), machine.client(12)];
        guest.connect(&mut machine, 13, SERVICE);
        for _ in 0..3 {
            machine.pump();
            guest.take_packets(&mut machine);
        }
        let (peer, _) = service.accept().unwrap();
        peer.set_nonblocking(true).unwrap();
        let mut pairs = vec![];
        for (guest_port, mut client) in (11..).zip(clients.into_iter().chain([peer])) {
            let key = *guest
                .sockets
                .keys()
                .find(|key| key.0 == guest_port)
                .unwrap();
            if guest_port != 13 {
                let mut line = [0; 32];
                let count = client.read(&mut line).unwrap();
                assert_eq!(&line[..count], format!("OK {}\n", key.1).as_bytes());
            }
            pairs.push(Pair {
                key,
                client: Some(client),
                guest_wrote: 0,
                guest_read: 0,
                host_wrote: 0,
                host_read: 0,
                host_saw_end: false,
            });
        }
        Self {
            machine,
            guest,
            pairs,
            service,
        }
    }

    fn take(&mut self, step: Step) {
        let Self {
            machine,
            guest,
            pairs,
            ..
        } = self;
        match step {
            Step::GuestWrites(which, size) => {
                let pair = &mut pairs[which];
                let socket = guest.sockets.get_mut(&pair.key).unwrap();
                let size = size.min(socket.space() as usize);
                let data = bytes(which, pair.guest_wrote, size);
                pair.guest_wrote += socket.write(machine, &data);
            }
            Step::GuestReads(which, size) => {
                let pair = &mut pairs[which];
                let socket = guest.sockets.get_mut(&pair.key).unwrap();
                let data = socket.read(machine, size);
                assert!(data == bytes(which + 100, pair.guest_read, data.len()));
                pair.guest_read += data.len();
            }
            Step::GuestShutsDown(which, flags) => {
                let socket = guest.sockets.get_mut(&pairs[which].key).unwrap();
                socket.shutdown(machine, flags);
            }
            Step::GuestCloses(which) => {
                let socket = guest.sockets.get_mut(&pairs[which].key).unwrap();
                socket.close(machine);
            }
            Step::HostWrites(which, size) => {
                let pair = &mut pairs[which];
                if let Some(client) = &mut pair.client {
                    let data = bytes(which + 100, pair.host_wrote, size);
                    pair.host_wrote += client.write(&data).unwrap_or(0);
                }
            }
            Step::HostReads(which, size) => {
                let pair = &mut pairs[which];
                if let Some(client) = &mut pair.client {
                    let mut data = vec![0; size];
                    match client.read(&mut data) {
                        Ok(0) => pair.host_saw_end = true,
                        Ok(count) => {
                            assert!(data[..count] == bytes(which, pair.host_read, count));
                            pair.host_read += count;
                        }
                        Err(_) => {}
                    }
                }
            }
            Step::HostEndsWriting(which) => {
                if let Some(client) = &pairs[which].client {
                    // It fails when the other side has ended everything already.
                    let _ = client.shutdown(Shutdown::Write);
                }
            }
            Step::HostCloses(which) => pairs[which].client = None,
            Step::DeviceRuns => machine.pump(),
            Step::GuestTakesPackets => {
                guest.take_packets(machine);
            }
        }
        // What the device holds of one connection is no more than it was granted.
        assert!(machine.device.mux().largest_backlog() <= 256 * 1024);
    }

    /// Both sides read what there is until nothing comes any more.
    fn settle(&mut self) {
        loop {
            self.machine.pump();
            let mut moved = self.guest.take_packets(&mut self.machine);
            for (which, pair) in self.pairs.iter_mut().enumerate() {
                let socket = self.guest.sockets.get_mut(&pair.key).unwrap();
                let data = socket.read(&mut self.machine, usize::MAX);
                assert!(data == bytes(which + 100, pair.guest_read, data.len()));
                pair.guest_read += data.len();
                moved += data.len();
                if let Some(client) = &mut pair.client {
                    let mut data = Vec::new();
                    pair.host_saw_end |= read_all(client, &mut data);
                    assert!(data == bytes(which, pair.host_read, data.len()));
                    pair.host_read += data.len();
                    moved += data.len();
                }
            }
            if moved == 0 {
                break;
            }
        }
    }

    fn check(&mut self) {
        let ended_by_host: Vec<bool> = self
            .pairs
            .iter()
            .map(|pair| pair.client.is_none())
            .collect();
        self.settle();
        for (which, pair) in self.pairs.iter().enumerate() {
            let socket = &self.guest.sockets[&pair.key];
            if pair.client.is_some() {
                assert_eq!(pair.host_read, pair.guest_wrote, "from the guest, {which}");
                assert_eq!(
                    pair.host_saw_end,
                    socket.ended & SHUTDOWN_SEND != 0 || socket.gone,
                    "the end from the guest, {which}"
                );
            }
            if socket.ended & SHUTDOWN_RECEIVE == 0 {
                assert_eq!(pair.guest_read, pair.host_wrote, "from the host, {which}");
                assert!(
                    !ended_by_host[which] || socket.at_end(),
                    "the end from the host, {which}"
                );
            }
        }
        // Everybody leaves.
        for pair in &mut self.pairs {
            pair.client = None;
        }
        self.settle();
        for pair in &self.pairs {
            let socket = self.guest.sockets.get_mut(&pair.key).unwrap();
            assert!(
                socket.gone || socket.peer_ended == SHUTDOWN_BOTH || socket.ended != 0,
                "the guest is not told"
            );
            socket.close(&mut self.machine);
        }
        self.settle();
        assert!(self.machine.device.mux().is_clean());
        assert!(self.guest.sockets.values().all(|socket| socket.gone));
        // And a new one works as the first did.
        self.guest.connect(&mut self.machine, 14, SERVICE);
        self.machine.pump();
        assert!(self.service.accept().is_ok());
    }
}

proptest! {
    #[test]
    fn each_byte_is_delivered_once_and_in_order(steps in proptest::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
        }
        world.check();
    }
}

#[test]
fn ten_megabytes_go_both_ways_at_once() {
    const SIZE: usize = 10 << 20;
    let mut world = World::new();
    while world
        .pairs
        .iter()
        .any(|pair| pair.guest_read < SIZE || pair.host_read < SIZE)
    {
        for which in 0..3 {
            let rest = SIZE - world.pairs[which].guest_wrote;
            world.take(Step::GuestWrites(which, rest.min(200_000)));
            let rest = SIZE - world.pairs[which].host_wrote;
            if rest > 0 {
                world.take(Step::HostWrites(which, rest.min(200_000)));
            }
        }
        world.take(Step::DeviceRuns);
        world.take(Step::GuestTakesPackets);
        for which in 0..3 {
            world.take(Step::GuestReads(which, 1 << 20));
            world.take(Step::HostReads(which, 1 << 20));
        }
    }
    world.check();
}
