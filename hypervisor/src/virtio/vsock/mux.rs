//! All connections: who is meant by a packet, who has something for the guest, who comes and goes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::VsockError;
use super::backlog::Backlog;
use super::connection::{Connection, Key, SocketEvent, Work};
use super::credit::SHARED_GRANTS;
use super::line::Line;
use super::packet::{ANY_PORT, HOST_CID, Header, TYPE_STREAM, op};
use super::socket::{Listener, read_line};
use crate::descriptors::Parts;
use crate::virtio::queue::Segments;

/// How many sockets there may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most connections; a guest or a client that asks for one more is refused.
    pub connections: usize,
    /// The most clients that have not written their line yet; one more, and the oldest is shut out.
    pub handshakes: usize,
}

impl Limits {
    /// What vsock's part of the process's descriptors allows: 4096 connections and 512
    /// handshakes, if the process may have a few times as many.
    pub fn of_process() -> Self {
        let sockets = Parts::of_process().sockets as usize;
        let handshakes = sockets / 9;
        Self {
            connections: sockets - handshakes,
            handshakes,
        }
    }
}

/// Refusals that wait for a receive buffer. When there are so many, nothing more is taken from the
/// guest until it takes them.
pub const MAX_RESETS: usize = 256;

/// Events, and clients accepted, in one go: then the device thread's other work gets its turn.
const BATCH: usize = 64;

/// Host ports of connections from the host: the upper half of what 31 bits hold, far from services.
const FIRST_HOST_PORT: u32 = 1 << 30;
const LAST_HOST_PORT: u32 = (1 << 31) - 1;

/// What epoll's 64 bits name: a connection by its ports, of which none is [`ANY_PORT`], or behind
/// that as the host's port one of `waiting` or the listener.
const LISTENER: u64 = token(ANY_PORT, u32::MAX);

const fn token(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// A socket that belongs to no connection.
enum Waiting {
    /// A client that has not written its line.
    Handshake(OwnedFd),
    /// The end of a stream whose connection the guest has ended already: what is left to be
    /// written, and what it was granted.
    Rest {
        socket: OwnedFd,
        backlog: Backlog,
        growth: u32,
    },
}

/// What the guest gets next.
pub enum Outgoing<'a> {
    /// A packet without data.
    Packet(Header),
    /// This connection's data.
    Data(&'a mut Connection),
}

/// The connections.
pub struct Mux {
    cid: u32,
    limits: Limits,
    // Edge-triggered. Our own and not the event manager's, because the guest resets the device in a
    // vCPU's thread, where the event manager cannot be told of what goes.
    epoll: Epoll,
    listener: Listener,
    connections: HashMap<Key, Connection>,
    waiting: HashMap<u32, Waiting>,
    handshakes: usize,
    // Connections that have something for the guest, in turn; each at most once.
    ready: VecDeque<Key>,
    resets: VecDeque<Header>,
    // Credit that is left for connections that move much.
    shared_grants: u32,
    next_port: u32,
    next_waiting: u32,
    accepts: bool,
    clients_wait: bool,
    // Given up for a moment to shut a client out when the process has no descriptors left.
    spare: Option<OwnedFd>,
}

impl Mux {
    /// Listens at `path` for guest `cid`. Clients wait there until [`start`](Self::start).
    ///
    /// # Errors
    ///
    /// The host refuses the socket or a descriptor.
    pub fn new(cid: u32, path: &Path, next_port: u32, limits: Limits) -> Result<Self, VsockError> {
        let epoll = Epoll::new().map_err(VsockError::Host)?;
        let listener = Listener::bind(path)?;
        let spare = listener
            .as_fd()
            .try_clone_to_owned()
            .map_err(VsockError::Host)?;
        let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        epoll
            .ctl(
                ControlOperation::Add,
                listener.as_fd().as_raw_fd(),
                EpollEvent::new(events, LISTENER),
            )
            .map_err(VsockError::Host)?;
        Ok(Self {
            cid,
            limits,
            epoll,
            listener,
            connections: HashMap::new(),
            waiting: HashMap::new(),
            handshakes: 0,
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            shared_grants: SHARED_GRANTS,
            next_port: next_port.clamp(FIRST_HOST_PORT, LAST_HOST_PORT),
            next_waiting: 0,
            accepts: false,
            clients_wait: true,
            spare: Some(spare),
        })
    }

    /// The host port of the next connection from the host.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// What becomes readable when [`handle_events`](Self::handle_events) has something to do.
    pub fn event_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// The driver is there: clients are let in.
    pub fn start(&mut self) {
        self.accepts = true;
        self.clients_wait = true;
    }

    /// The driver is gone, and with it all it knew of. What it has sent is written nevertheless.
    pub fn reset(&mut self) {
        self.accepts = false;
        self.ready.clear();
        self.resets.clear();
        for (_, connection) in std::mem::take(&mut self.connections) {
            self.retire(connection);
        }
        self.waiting
            .retain(|_, waiting| matches!(waiting, Waiting::Rest { .. }));
        self.handshakes = 0;
    }

    // From the guest.

    /// Whether the guest's packets can be taken; if not, it has to take its refusals first.
    pub fn takes_packets(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// A packet from the guest; `data` is the `header.len` bytes behind it.
    pub fn receive(&mut self, header: &Header, data: &mut Segments) {
        if header.src_cid != u64::from(self.cid) {
            log::debug!("Dropped a vsock packet from CID {}", header.src_cid);
            return;
        }
        let known = header.dst_cid == u64::from(HOST_CID)
            && header.socket_type == TYPE_STREAM
            && header.src_port != ANY_PORT
            && header.dst_port != ANY_PORT;
        let key = Key {
            host: header.dst_port,
            guest: header.src_port,
        };
        if header.op == op::RST {
            if known {
                self.end(key);
            }
            return;
        }
        match self.connections.get_mut(&key) {
            Some(connection) if known => match connection.receive(header, data) {
                Ok(()) => self.settle(key),
                Err(violation) => {
                    log::debug!("Connection {key:?} is reset: {violation}");
                    self.abort(key);
                    self.resets.push_back(header.reset());
                }
            },
            None if known && header.op == op::REQUEST => self.open(key, header),
            _ => self.resets.push_back(header.reset()),
        }
    }

    /// A packet whose data the guest left out or hid.
    pub fn receive_malformed(&mut self, header: &Header) {
        let key = Key {
            host: header.dst_port,
            guest: header.src_port,
        };
        log::debug!("Connection {key:?} is reset: a packet is shorter than its header says");
        if header.src_cid == u64::from(self.cid) && header.op != op::RST {
            if header.dst_cid == u64::from(HOST_CID) && header.socket_type == TYPE_STREAM {
                self.abort(key);
            }
            self.resets.push_back(header.reset());
        }
    }

    /// The guest asks for a connection to a service.
    fn open(&mut self, key: Key, request: &Header) {
        let opened = match self.make_room() {
            true => self.listener.connect_service(key.host),
            false => Err(io::Error::other("there are too many connections")),
        };
        let accepted = opened
            .map_err(|error| error.to_string())
            .and_then(|socket| {
                Connection::requested_by_guest(key, self.cid, socket, request)
                    .map_err(|violation| violation.to_string())
            });
        match accepted {
            Ok(connection) => {
                if self.insert(key, connection, ControlOperation::Add) {
                    return;
                }
            }
            Err(error) => log::debug!("Connection {key:?} is refused: {error}"),
        }
        self.resets.push_back(request.reset());
    }

    // To the guest.

    /// Whether the guest probably gets something next.
    pub fn has_outgoing(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// What the guest gets next: refusals first, then each connection in turn. For a connection's
    /// data, [`served`](Self::served) follows.
    pub fn next(&mut self) -> Option<Outgoing<'_>> {
        if let Some(header) = self.resets.pop_front() {
            return Some(Outgoing::Packet(header));
        }
        while let Some(&key) = self.ready.front() {
            let work = match self.connections.get_mut(&key) {
                Some(connection) => connection.work(),
                None => Work::None,
            };
            match work {
                Work::None => self.served(),
                Work::Packet => {
                    let header = self.connections.get_mut(&key)?.take_packet();
                    self.served();
                    return Some(Outgoing::Packet(header));
                }
                Work::Data => return self.connections.get_mut(&key).map(Outgoing::Data),
            }
        }
        None
    }

    /// The first connection in turn had it; it goes to the end if it has more.
    pub fn served(&mut self) {
        if let Some(key) = self.ready.pop_front()
            && let Some(connection) = self.connections.get_mut(&key)
        {
            connection.is_queued = false;
            self.settle(key);
        }
    }

    // From the host.

    /// Handles what the sockets have to say, a bounded number of events. `true` when there are
    /// clients left to be let in for which no event will come.
    pub fn handle_events(&mut self) -> bool {
        let mut events = [EpollEvent::default(); BATCH];
        let count = match self.epoll.wait(0, &mut events) {
            Ok(count) => count,
            Err(error) => {
                if error.kind() != io::ErrorKind::Interrupted {
                    log::error!("Cannot wait for the vsock device's sockets: {error}");
                }
                0
            }
        };
        for event in events.iter().take(count) {
            let flags = event.events();
            let has = |set: EventSet| flags & set.bits() != 0;
            let gone = has(EventSet::HANG_UP | EventSet::ERROR);
            let happened = SocketEvent {
                writable: has(EventSet::OUT),
                ending: gone || has(EventSet::READ_HANG_UP),
                gone,
            };
            let (high, low) = ((event.data() >> 32) as u32, event.data() as u32);
            match high {
                _ if event.data() == LISTENER => self.clients_wait = true,
                ANY_PORT => self.on_waiting_event(low, happened),
                host => self.on_connection_event(Key { host, guest: low }, happened),
            }
        }
        self.accept_clients()
    }

    fn on_connection_event(&mut self, key: Key, event: SocketEvent) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        match connection.is_abandoned(event) {
            Some(guest_knows) => {
                self.abort(key);
                if guest_knows {
                    self.resets.push_back(self.reset_of(key));
                }
            }
            None => {
                connection.on_event(event);
                self.settle(key);
            }
        }
    }

    fn on_waiting_event(&mut self, id: u32, event: SocketEvent) {
        let is_over = match self.waiting.get_mut(&id) {
            Some(Waiting::Handshake(client)) => match read_line(client.as_fd()) {
                Line::Connect { port, .. } => return self.start_request(id, port),
                Line::Unfinished => event.ending,
                Line::Malformed => true,
            },
            Some(Waiting::Rest {
                socket, backlog, ..
            }) => backlog.flush(socket.as_fd()).is_err() || backlog.is_empty(),
            None => false,
        };
        if is_over {
            self.drop_waiting(id);
        }
    }

    fn start_request(&mut self, id: u32, port: u32) {
        if let Some(Waiting::Handshake(client)) = self.waiting.remove(&id) {
            self.handshakes -= 1;
            self.request(client, port, ControlOperation::Modify);
        }
    }

    /// Lets clients in that wait, a bounded number. `true` when there are more.
    pub fn accept_clients(&mut self) -> bool {
        if !self.accepts {
            return false;
        }
        for _ in 0..BATCH {
            if !self.clients_wait {
                return false;
            }
            match self.listener.accept() {
                Ok(Some(client)) => self.welcome(client),
                Ok(None) => self.clients_wait = false,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => {
                        if !self.shut_out() {
                            // Tried again when something else happens; descriptors may be free then.
                            return false;
                        }
                    }
                    // The client left, or a signal came: the next one.
                    _ => log::debug!("Cannot accept a vsock client: {error}"),
                },
            }
        }
        self.clients_wait
    }

    /// Closes the next client's connection when there are no descriptors left: it need not wait in
    /// vain. `false` when not even that is possible.
    fn shut_out(&mut self) -> bool {
        let Some(spare) = self.spare.take() else {
            self.spare = self.listener.as_fd().try_clone_to_owned().ok();
            return self.spare.is_some();
        };
        drop(spare);
        let accepted = self.listener.accept();
        match &accepted {
            Ok(Some(_)) => log::warn!("A vsock client is shut out: no descriptors are left"),
            // Without a descriptor the kernel does not even look whether there is one.
            Ok(None) => self.clients_wait = false,
            Err(_) => {}
        }
        let possible = accepted.is_ok();
        drop(accepted);
        self.spare = self.listener.as_fd().try_clone_to_owned().ok();
        possible
    }

    fn welcome(&mut self, client: OwnedFd) {
        // Most have written their line by now.
        match read_line(client.as_fd()) {
            Line::Connect { port, .. } => self.request(client, port, ControlOperation::Add),
            Line::Malformed => {}
            Line::Unfinished => {
                if self.handshakes >= self.limits.handshakes {
                    self.drop_oldest_handshake();
                }
                let id = self.free_waiting_id();
                if self.watch(&client, token(ANY_PORT, id), false, ControlOperation::Add) {
                    self.waiting.insert(id, Waiting::Handshake(client));
                    self.handshakes += 1;
                }
            }
        }
    }

    /// A client asks for the guest's `port`. `how` tells whether its socket is watched yet.
    fn request(&mut self, client: OwnedFd, port: u32, how: ControlOperation) {
        if !self.make_room() {
            log::warn!(
                "A vsock client is refused: there are {} connections",
                self.limits.connections
            );
            return;
        }
        let key = self.free_key(port);
        let connection = Connection::requested_by_host(key, self.cid, client);
        self.insert(key, connection, how);
    }

    fn free_key(&mut self, guest: u32) -> Key {
        loop {
            let host = self.next_port;
            self.next_port = match host {
                LAST_HOST_PORT => FIRST_HOST_PORT,
                _ => host + 1,
            };
            let key = Key { host, guest };
            // There are far more ports than connections, so this ends.
            if !self.connections.contains_key(&key) {
                return key;
            }
        }
    }

    fn free_waiting_id(&mut self) -> u32 {
        loop {
            let id = self.next_waiting;
            // The last one is the listener's.
            self.next_waiting = match id {
                0xffff_fffe => 0,
                _ => id + 1,
            };
            if !self.waiting.contains_key(&id) {
                return id;
            }
        }
    }

    // Coming and going.

    /// Whether there may be one connection more. One that only waits for the guest's confirmation
    /// yields to it.
    fn make_room(&mut self) -> bool {
        let count = self.connections.len() + self.waiting.len() - self.handshakes;
        if count < self.limits.connections {
            return true;
        }
        let closed = self
            .connections
            .iter()
            .find(|(_, connection)| connection.is_closed())
            .map(|(&key, _)| key);
        if let Some(key) = closed {
            self.abort(key);
            self.resets.push_back(self.reset_of(key));
        }
        closed.is_some()
    }

    fn insert(&mut self, key: Key, connection: Connection, how: ControlOperation) -> bool {
        let watched = connection
            .socket()
            .is_some_and(|socket| self.watch(socket, token(key.host, key.guest), false, how));
        if watched {
            self.connections.insert(key, connection);
            self.settle(key);
        }
        watched
    }

    fn watch(&self, socket: &OwnedFd, token: u64, for_space: bool, how: ControlOperation) -> bool {
        let mut events = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        if for_space {
            events |= EventSet::OUT;
        }
        let result = self
            .epoll
            .ctl(how, socket.as_raw_fd(), EpollEvent::new(events, token));
        if let Err(error) = &result {
            log::warn!("Cannot watch a vsock client's socket: {error}");
        }
        result.is_ok()
    }

    /// After everything that happened to a connection: ends it when it is finished, asks for the
    /// events that it waits for, puts it in line if it has something for the guest.
    fn settle(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        if connection.is_finished() {
            self.abort(key);
            self.resets.push_back(self.reset_of(key));
            return;
        }
        let more = connection.incoming().wanted_growth();
        if more > 0 && more <= self.shared_grants {
            self.shared_grants -= more;
            connection.incoming().grow(more);
        }
        if !connection.is_queued && connection.work() != Work::None {
            connection.is_queued = true;
            self.ready.push_back(key);
        }
        if connection.is_stalled() != connection.awaits_space {
            connection.awaits_space = connection.is_stalled();
            let for_space = connection.awaits_space;
            if let Some(connection) = self.connections.get(&key)
                && let Some(socket) = connection.socket()
            {
                let token = token(key.host, key.guest);
                self.watch(socket, token, for_space, ControlOperation::Modify);
            }
        }
    }

    /// The guest knows no more of this connection. What it sent is written nevertheless.
    fn end(&mut self, key: Key) {
        if let Some(connection) = self.take(key) {
            self.retire(connection);
        }
    }

    /// Drops a connection and what it holds.
    fn abort(&mut self, key: Key) {
        if let Some(mut connection) = self.take(key) {
            self.shared_grants += connection.incoming().growth();
        }
    }

    fn take(&mut self, key: Key) -> Option<Connection> {
        let connection = self.connections.remove(&key)?;
        if connection.is_queued {
            self.ready.retain(|&other| other != key);
        }
        Some(connection)
    }

    /// Drops a connection, but keeps its socket until what it holds is written.
    fn retire(&mut self, mut connection: Connection) {
        let growth = connection.incoming().growth();
        if let Some((socket, backlog)) = connection.into_rest() {
            let id = self.free_waiting_id();
            if self.watch(&socket, token(ANY_PORT, id), true, ControlOperation::Modify) {
                let rest = Waiting::Rest {
                    socket,
                    backlog,
                    growth,
                };
                self.waiting.insert(id, rest);
                return;
            }
        }
        self.shared_grants += growth;
    }

    fn drop_waiting(&mut self, id: u32) {
        match self.waiting.remove(&id) {
            Some(Waiting::Handshake(_)) => self.handshakes -= 1,
            Some(Waiting::Rest { growth, .. }) => self.shared_grants += growth,
            None => {}
        }
    }

    fn drop_oldest_handshake(&mut self) {
        // The identifiers count up from `next_waiting`, around the end.
        let oldest = self
            .waiting
            .iter()
            .filter(|(_, waiting)| matches!(waiting, Waiting::Handshake(_)))
            .map(|(&id, _)| id)
            .min_by_key(|id| id.wrapping_sub(self.next_waiting));
        if let Some(id) = oldest {
            log::debug!("A vsock client that has not said what it wants is shut out");
            self.drop_waiting(id);
        }
    }

    fn reset_of(&self, key: Key) -> Header {
        Header {
            src_cid: u64::from(HOST_CID),
            dst_cid: u64::from(self.cid),
            src_port: key.host,
            dst_port: key.guest,
            socket_type: TYPE_STREAM,
            op: op::RST,
            ..Header::default()
        }
    }
}

#[cfg(test)]
impl Mux {
    /// Other limits than the process's.
    pub fn set_limits(&mut self, connections: usize, handshakes: usize) {
        self.limits = Limits {
            connections,
            handshakes,
        };
    }

    /// How many connections, rests and handshakes there are.
    pub fn counts(&self) -> (usize, usize, usize) {
        let rests = self.waiting.len() - self.handshakes;
        (self.connections.len(), rests, self.handshakes)
    }

    /// How many refusals wait.
    pub fn resets(&self) -> usize {
        self.resets.len()
    }

    /// The most that is held of one connection.
    pub fn largest_backlog(&self) -> usize {
        let held = self.connections.values().map(Connection::held);
        held.max().unwrap_or(0)
    }

    /// Whether nothing is left over from any connection.
    pub fn is_clean(&self) -> bool {
        self.counts() == (0, 0, 0) && !self.has_outgoing() && self.shared_grants == SHARED_GRANTS
    }
}
