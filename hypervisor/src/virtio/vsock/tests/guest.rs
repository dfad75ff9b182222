//! A guest's end of connections, as Linux behaves (`net/vmw_vsock/virtio_transport_common.c`).

use std::collections::{HashMap, VecDeque};

use super::{Machine, from_guest, reply};
use crate::virtio::vsock::packet::{Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};

/// The guest's buffer for a connection; small, so that it fills up often.
pub const BUFFER: u32 = 20_000;

/// The most that the guest sends in one packet.
const LARGEST_PACKET: u32 = 64 * 1024;

/// A socket in the guest.
pub struct Socket {
    guest: u32,
    host: u32,
    sent: u32,
    peer_taken: u32,
    peer_alloc: u32,
    taken: u32,
    told: u32,
    /// What came and was not read.
    pub unread: VecDeque<u8>,
    /// What the host has ended.
    pub peer_ended: u32,
    /// What the guest has ended.
    pub ended: u32,
    /// The host accepted, or the guest did.
    pub established: bool,
    /// The connection is over.
    pub gone: bool,
}

/// The guest's sockets by their own and the host's port.
#[derive(Default)]
pub struct Guest {
    pub sockets: HashMap<(u32, u32), Socket>,
}

impl Socket {
    fn new(guest: u32, host: u32) -> Self {
        Self {
            guest,
            host,
            sent: 0,
            peer_taken: 0,
            peer_alloc: 0,
            taken: 0,
            told: 0,
            unread: VecDeque::new(),
            peer_ended: 0,
            ended: 0,
            established: false,
            gone: false,
        }
    }

    fn send(&mut self, machine: &mut Machine, op: u16, flags: u32, data: &[u8]) {
        self.told = self.taken;
        let header = Header {
            flags,
            buf_alloc: BUFFER,
            fwd_cnt: self.taken,
            ..from_guest(self.guest, self.host, op)
        };
        machine.send(header, data);
    }

    /// How much may be written now.
    pub fn space(&self) -> u32 {
        let may = self.established
            && !self.gone
            && self.ended & SHUTDOWN_SEND == 0
            && self.peer_ended & SHUTDOWN_RECEIVE == 0;
        match may {
            true => self.peer_alloc - self.sent.wrapping_sub(self.peer_taken),
            false => 0,
        }
    }

    /// Writes `data`, as much as there is space for. Returns the bytes written.
    pub fn write(&mut self, machine: &mut Machine, data: &[u8]) -> usize {
        let mut written = 0;
        while written < data.len() {
            let count = self.space().min(LARGEST_PACKET) as usize;
            let count = count.min(data.len() - written);
            if count == 0 {
                break;
            }
            self.sent = self.sent.wrapping_add(count as u32);
            self.send(machine, op::RW, 0, &data[written..written + count]);
            written += count;
        }
        written
    }

    /// Reads up to `count` bytes.
    pub fn read(&mut self, machine: &mut Machine, count: usize) -> Vec<u8> {
        let count = count.min(self.unread.len());
        let data: Vec<u8> = self.unread.drain(..count).collect();
        self.taken = self.taken.wrapping_add(count as u32);
        let free = BUFFER - self.taken.wrapping_sub(self.told);
        if count > 0 && free < BUFFER / 2 && !self.gone {
            self.send(machine, op::CREDIT_UPDATE, 0, &[]);
        }
        data
    }

    /// `shutdown(2)`.
    pub fn shutdown(&mut self, machine: &mut Machine, flags: u32) {
        if self.established && !self.gone && self.ended != SHUTDOWN_BOTH {
            self.ended |= flags;
            self.send(machine, op::SHUTDOWN, flags, &[]);
        }
    }

    /// `close(2)`.
    pub fn close(&mut self, machine: &mut Machine) {
        if self.gone || !self.established {
            return;
        }
        if self.peer_ended == SHUTDOWN_BOTH {
            self.send(machine, op::RST, 0, &[]);
            self.gone = true;
            self.ended = SHUTDOWN_BOTH;
        } else {
            self.shutdown(machine, SHUTDOWN_BOTH);
        }
        self.unread.clear();
    }

    /// Whether reading would give the end of the stream.
    pub fn at_end(&self) -> bool {
        self.unread.is_empty() && (self.gone || self.peer_ended & SHUTDOWN_SEND != 0)
    }
}

impl Guest {
    /// Asks for a connection to `host` from port `guest`.
    pub fn connect(&mut self, machine: &mut Machine, guest: u32, host: u32) {
        let mut socket = Socket::new(guest, host);
        socket.send(machine, op::REQUEST, 0, &[]);
        self.sockets.insert((guest, host), socket);
    }

    /// Takes all packets that the device has for the guest now. Returns how many.
    pub fn take_packets(&mut self, machine: &mut Machine) -> usize {
        let mut count = 0;
        while let Some((header, data)) = machine.receive() {
            self.take_packet(machine, &header, data);
            count += 1;
        }
        count
    }

    fn take_packet(&mut self, machine: &mut Machine, header: &Header, data: Vec<u8>) {
        let key = (header.dst_port, header.src_port);
        if header.op == op::REQUEST {
            let mut socket = Socket::new(key.0, key.1);
            socket.peer_alloc = header.buf_alloc;
            socket.established = true;
            socket.send(machine, op::RESPONSE, 0, &[]);
            assert!(self.sockets.insert(key, socket).is_none());
            return;
        }
        let socket = match self.sockets.get_mut(&key) {
            Some(socket) if !socket.gone => socket,
            _ => {
                if header.op != op::RST {
                    machine.send(reply(header, op::RST), &[]);
                }
                return;
            }
        };
        if header.op != op::RST {
            socket.peer_alloc = header.buf_alloc;
            socket.peer_taken = header.fwd_cnt;
        }
        match header.op {
            op::RESPONSE => {
                assert!(!socket.established);
                socket.established = true;
            }
            op::RW => {
                assert!(socket.established, "data before the answer");
                assert_eq!(socket.peer_ended & SHUTDOWN_SEND, 0, "data after the end");
                if socket.ended & SHUTDOWN_RECEIVE == 0 {
                    socket.unread.extend(data);
                    assert!(socket.unread.len() <= BUFFER as usize, "beyond the credit");
                }
            }
            op::SHUTDOWN => {
                socket.peer_ended |= header.flags;
                if socket.peer_ended == SHUTDOWN_BOTH && socket.unread.is_empty() {
                    socket.send(machine, op::RST, 0, &[]);
                    socket.gone = true;
                }
            }
            op::CREDIT_REQUEST => socket.send(machine, op::CREDIT_UPDATE, 0, &[]),
            op::CREDIT_UPDATE => {}
            op::RST => socket.gone = true,
            op => panic!("operation {op}"),
        }
    }
}
