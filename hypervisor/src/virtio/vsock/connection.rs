//! One stream between a port of the guest and a Unix socket.
//!
//! Data is never held on its way to the guest: it is read from the socket into the guest's buffers.
//! On its way from the guest it is held only while the socket is full ([`Backlog`]), and the
//! guest's credit bounds that. Each direction ends by itself:
//!
//! | who ends it | what the other side sees |
//! |---|---|
//! | the guest sends `SHUTDOWN` with the send flag | end of file, once the backlog is written |
//! | the guest sends `SHUTDOWN` with the receive flag | its writes fail (`EPIPE`) |
//! | the client shuts down writing | `SHUTDOWN` with the send flag, once everything is read |
//! | the client closes, or shuts down reading and is written to | `SHUTDOWN` with the receive flag, then as above |
//!
//! As in Linux (`net/vmw_vsock/virtio_transport_common.c`) it is the guest that says the last
//! word: after a shutdown of both directions by the host it answers `RST`, after one of its own it
//! waits for `RST`, which it gets when everything it sent is written.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::Shutdown;

use super::backlog::Backlog;
use super::credit::{CreditError, GuestWindow, HostWindow};
use super::packet::{
    HOST_CID, Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op,
};
use super::rx::RxBatch;
use super::socket;
use crate::virtio::queue::{DeviceQueue, QueueError, Segments};

/// The most buffers of the guest that one read fills.
const LARGEST_BURST: usize = 16;

/// The most that one read takes, in bytes: then the next connection gets its turn.
const LARGEST_READ: u32 = 64 * 1024;

/// The pair of ports that names a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The port on the host.
    pub host: u32,
    /// The port in the guest.
    pub guest: u32,
}

/// How the guest broke the protocol; the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// See [`CreditError`].
    #[error(transparent)]
    Credit(#[from] CreditError),
    /// This operation has no place in the connection's present state.
    #[error("The guest sent operation {0} where it has no place")]
    Operation(u16),
    /// Data behind a header that carries none.
    #[error("The guest sent data with operation {0}")]
    UnexpectedData(u16),
    /// Data after it said that there would be no more.
    #[error("The guest sent data after its shutdown")]
    AfterShutdown,
    /// The client cannot be told that the guest has accepted.
    #[error("The client does not take the answer to its CONNECT line")]
    ClientGone,
}

/// What is to be told to the guest, before any data.
#[derive(Debug, Default)]
struct Pending {
    request: bool,
    response: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The host asked, the guest has not answered.
    Requested,
    Established,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    key: Key,
    cid: u32,
    phase: Phase,
    // None when both directions have ended on the host, and the guest has not confirmed it yet.
    socket: Option<OwnedFd>,
    pending: Pending,
    to_guest: GuestWindow,
    from_guest: HostWindow,
    backlog: Backlog,
    // `SHUTDOWN_*`: what the guest has ended, and what the host has.
    ended_by_guest: u32,
    ended_by_host: u32,
    // The socket may have something to read: cleared when a read shows otherwise, set by an event.
    readable: bool,
    // The client will write no more: the end of the stream is to be read even after a short read.
    ending: bool,
    // How many buffers the next read gets: many only when the last read filled all it had.
    burst: usize,
    asked_for_credit: bool,
    /// Whether the connection stands in the list of those that have something for the guest.
    pub is_queued: bool,
    /// Whether an event is asked for when the socket takes data again.
    pub awaits_space: bool,
}

/// What a connection has for the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing now.
    None,
    /// A packet without data.
    Packet,
    /// Data, probably.
    Data,
}

impl Connection {
    /// A client on the host asks for a port of guest `cid`.
    pub fn requested_by_host(key: Key, cid: u32, socket: OwnedFd) -> Self {
        let mut connection = Self::new(key, cid, socket, Phase::Requested);
        connection.pending.request = true;
        connection
    }

    /// The guest asked for a connection by `request`, and `socket` is the service's.
    pub fn requested_by_guest(
        key: Key,
        cid: u32,
        socket: OwnedFd,
        request: &Header,
    ) -> Result<Self, Violation> {
        let mut connection = Self::new(key, cid, socket, Phase::Established);
        connection
            .to_guest
            .update(request.buf_alloc, request.fwd_cnt)?;
        connection.pending.response = true;
        Ok(connection)
    }

    fn new(key: Key, cid: u32, socket: OwnedFd, phase: Phase) -> Self {
        Self {
            key,
            cid,
            phase,
            socket: Some(socket),
            pending: Pending::default(),
            to_guest: GuestWindow::default(),
            from_guest: HostWindow::new(),
            backlog: Backlog::default(),
            ended_by_guest: 0,
            ended_by_host: 0,
            readable: false,
            ending: false,
            burst: 1,
            asked_for_credit: false,
            is_queued: false,
            awaits_space: false,
        }
    }

    /// A packet from the guest, other than `RST`; `data` is the `header.len` bytes behind it.
    ///
    /// # Errors
    ///
    /// The connection cannot go on.
    pub fn receive(&mut self, header: &Header, data: &mut Segments) -> Result<(), Violation> {
        self.to_guest.update(header.buf_alloc, header.fwd_cnt)?;
        if self.to_guest.available() > 0 {
            self.asked_for_credit = false;
        }
        if header.op != op::RW && !data.is_empty() {
            return Err(Violation::UnexpectedData(header.op));
        }
        match (self.phase, header.op) {
            (Phase::Requested, op::RESPONSE) if !self.pending.request => self.accepted(),
            (Phase::Established, op::RW) => self.receive_data(data),
            (Phase::Established, op::SHUTDOWN) => {
                self.shut_down_by_guest(header.flags);
                Ok(())
            }
            (Phase::Established, op::CREDIT_UPDATE) => Ok(()),
            (Phase::Established, op::CREDIT_REQUEST) => {
                self.pending.credit_update = true;
                Ok(())
            }
            (_, op) => Err(Violation::Operation(op)),
        }
    }

    fn accepted(&mut self) -> Result<(), Violation> {
        let answer = format!("OK {}\n", self.key.host);
        let socket = self.socket.as_ref().ok_or(Violation::ClientGone)?;
        // The socket is empty yet, so it takes either all of the answer or nothing.
        match socket::send_slices(socket.as_fd(), &[IoSlice::new(answer.as_bytes())]) {
            Ok(count) if count == answer.len() => {
                self.phase = Phase::Established;
                Ok(())
            }
            _ => Err(Violation::ClientGone),
        }
    }

    fn receive_data(&mut self, data: &mut Segments) -> Result<(), Violation> {
        if self.ended_by_guest & SHUTDOWN_SEND != 0 {
            return Err(Violation::AfterShutdown);
        }
        let count = u32::try_from(data.len()).map_err(|_| CreditError::Exceeded)?;
        self.from_guest.receive(count)?;
        if self.backlog.is_empty() && !self.is_deaf() {
            self.write_through(data);
        }
        if self.is_deaf() {
            // As a closed socket does: what was under way is thrown away, and the guest knows by now.
            self.from_guest.take(data.len() as u32);
        } else if !data.is_empty() {
            self.backlog.push(data);
        }
        Ok(())
    }

    fn write_through(&mut self, data: &mut Segments) {
        let Some(socket) = &self.socket else { return };
        match socket::send_segments(socket.as_fd(), data) {
            Ok(count) => {
                data.advance(count);
                self.from_guest.take(count as u32);
            }
            Err(error) => self.became_deaf(&error),
        }
    }

    /// Writes what is held as far as the socket takes it.
    pub fn flush(&mut self) {
        let Some(socket) = &self.socket else { return };
        match self.backlog.flush(socket.as_fd()) {
            Ok(count) => self.from_guest.take(count as u32),
            Err(error) => self.became_deaf(&error),
        }
        self.pass_on_end();
    }

    /// The client takes no more data.
    fn became_deaf(&mut self, error: &io::Error) {
        log::debug!("The client of {:?} takes no more data: {error}", self.key);
        self.end_by_host(SHUTDOWN_RECEIVE);
    }

    fn is_deaf(&self) -> bool {
        self.ended_by_host & SHUTDOWN_RECEIVE != 0
    }

    fn end_by_host(&mut self, directions: u32) {
        let new = directions & !self.ended_by_host;
        if new == 0 {
            return;
        }
        self.ended_by_host |= new;
        self.pending.shutdown = true;
        if new & SHUTDOWN_RECEIVE != 0 {
            self.from_guest.take(self.backlog.len() as u32);
            self.backlog.clear();
        }
        if self.ended_by_host == SHUTDOWN_BOTH {
            self.socket = None;
        }
    }

    fn shut_down_by_guest(&mut self, flags: u32) {
        let new = flags & SHUTDOWN_BOTH & !self.ended_by_guest;
        self.ended_by_guest |= new;
        if let Some(socket) = &self.socket
            && new & SHUTDOWN_RECEIVE != 0
        {
            // It fails only if the client has gone, which an event tells.
            let _ = rustix::net::shutdown(socket, Shutdown::Read);
        }
        self.pass_on_end();
    }

    /// Tells the client that the guest sends no more, once it has everything.
    fn pass_on_end(&mut self) {
        if self.ended_by_guest & SHUTDOWN_SEND != 0
            && self.backlog.is_empty()
            && let Some(socket) = &self.socket
        {
            // See above.
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
    }

    /// Something happened at the socket.
    pub fn on_event(&mut self, event: SocketEvent) {
        self.readable = true;
        self.ending |= event.ending;
        if event.gone && self.phase == Phase::Established {
            self.end_by_host(SHUTDOWN_RECEIVE);
            if self.ended_by_guest & SHUTDOWN_RECEIVE != 0 {
                // What is still to be read is of no use to anyone.
                self.end_by_host(SHUTDOWN_SEND);
            }
        }
        if event.writable {
            self.flush();
        }
    }

    /// Whether the client left before the guest answered. `Some(true)` when the guest knows of the request.
    pub fn is_abandoned(&self, event: SocketEvent) -> Option<bool> {
        (self.phase == Phase::Requested && event.gone).then_some(!self.pending.request)
    }

    /// Whether the guest ended both directions and everything that it sent is written.
    pub fn is_finished(&self) -> bool {
        self.ended_by_guest == SHUTDOWN_BOTH && self.backlog.is_empty()
    }

    /// Whether data waits for the socket to take it.
    pub fn is_stalled(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether the host is done with it and waits for the guest to confirm.
    pub fn is_closed(&self) -> bool {
        self.socket.is_none()
    }

    /// The socket, unless the connection [`is_closed`](Self::is_closed).
    pub fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// The window that the guest sends into.
    pub fn incoming(&mut self) -> &mut HostWindow {
        &mut self.from_guest
    }

    /// What is left to write when the guest no longer knows of the connection.
    pub fn into_rest(self) -> Option<(OwnedFd, Backlog)> {
        match (self.socket, self.backlog.is_empty()) {
            (Some(socket), false) => Some((socket, self.backlog)),
            _ => None,
        }
    }

    /// What the guest is to get next.
    pub fn work(&mut self) -> Work {
        if self.phase == Phase::Established && self.from_guest.is_worth_telling() {
            self.pending.credit_update = true;
        }
        let may_read = self.readable
            && self.phase == Phase::Established
            && (self.ended_by_guest & SHUTDOWN_RECEIVE) | (self.ended_by_host & SHUTDOWN_SEND) == 0;
        if may_read && self.to_guest.available() == 0 && !self.asked_for_credit {
            self.pending.credit_request = true;
            self.asked_for_credit = true;
        }
        let Pending {
            request,
            response,
            shutdown,
            credit_update,
            credit_request,
        } = self.pending;
        if request || response || shutdown || credit_update || credit_request {
            Work::Packet
        } else if may_read && self.to_guest.available() > 0 {
            Work::Data
        } else {
            Work::None
        }
    }

    /// The packet that [`work`](Self::work) announced.
    pub fn take_packet(&mut self) -> Header {
        let pending = &mut self.pending;
        let mut flags = 0;
        let op = if std::mem::take(&mut pending.request) {
            op::REQUEST
        } else if std::mem::take(&mut pending.response) {
            op::RESPONSE
        } else if std::mem::take(&mut pending.shutdown) {
            flags = self.ended_by_host;
            op::SHUTDOWN
        } else if std::mem::take(&mut pending.credit_request) {
            // It tells the guest our counts as well.
            pending.credit_update = false;
            op::CREDIT_REQUEST
        } else {
            op::CREDIT_UPDATE
        };
        self.pending.credit_update = false;
        Header {
            flags,
            ..self.header(op, 0)
        }
    }

    fn header(&mut self, op: u16, len: u32) -> Header {
        let (buf_alloc, fwd_cnt) = self.from_guest.tell();
        Header {
            src_cid: u64::from(HOST_CID),
            dst_cid: u64::from(self.cid),
            src_port: self.key.host,
            dst_port: self.key.guest,
            len,
            socket_type: TYPE_STREAM,
            op,
            flags: 0,
            buf_alloc,
            fwd_cnt,
        }
    }

    /// Reads from the socket into the buffers of `batch`, which has one, and as many more of `rx` as
    /// are worth it, and hands over what was filled. Returns the bytes read.
    ///
    /// # Errors
    ///
    /// The driver broke the queue.
    pub fn send_data(
        &mut self,
        batch: &mut RxBatch,
        rx: &mut DeviceQueue,
    ) -> Result<usize, QueueError> {
        if batch.room() == 0 {
            batch.hand_back(rx)?;
            return Ok(0);
        }
        let limit = self.to_guest.available().min(LARGEST_READ) as usize;
        while batch.count() < self.burst && batch.room() < limit && batch.load_another(rx)? {}
        let wanted = batch.room().min(limit);
        let count = match &self.socket {
            Some(socket) => match batch.receive(socket.as_fd(), wanted) {
                Ok(filled) => {
                    self.readable = !filled.drained || self.ending;
                    filled.count
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    batch.put_back(rx);
                    return Ok(0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    batch.put_back(rx);
                    return Ok(0);
                }
                // The client left with data unread (ECONNRESET). What it wrote itself came before.
                Err(_) => {
                    self.end_by_host(SHUTDOWN_RECEIVE);
                    0
                }
            },
            None => 0,
        };
        if count == 0 {
            self.end_by_host(SHUTDOWN_SEND);
            batch.put_back(rx);
            return Ok(0);
        }
        self.burst = match count == wanted {
            true => (self.burst * 4).min(LARGEST_BURST),
            false => 1,
        };
        self.to_guest.send(count as u32);
        let header = self.header(op::RW, 0);
        self.pending.credit_update = false;
        batch.hand_over(rx, header, count)?;
        Ok(count)
    }
}

/// What epoll says about a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketEvent {
    /// It takes data again.
    pub writable: bool,
    /// The client writes no more.
    pub ending: bool,
    /// Nothing goes either way any more, except for what is still to be read.
    pub gone: bool,
}

#[cfg(test)]
impl Connection {
    /// Bytes that wait for the socket to take them.
    pub fn held(&self) -> usize {
        self.backlog.len()
    }
}
