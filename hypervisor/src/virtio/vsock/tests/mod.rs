//! The device against a driver and a guest that the tests play, through real queues in memory and
//! real sockets.

mod connecting;
mod device;
mod driver;
mod ending;
mod flow;
mod guest;
mod hostile;
mod model;

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use cube_hypervisor_api::config::VsockConfig;
use tempfile::TempDir;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::credit::FIRST_GRANT;
use super::device::Vsock;
use super::packet::{HOST_CID, Header, TYPE_STREAM, op};
use crate::virtio::queue::{FEATURE_EVENT_IDX, FEATURE_VERSION_1};
use crate::virtio::{Activation, Interrupt, Memory, VirtioDevice};
use driver::Ring;

/// The guest's context identifier in the tests.
pub const CID: u32 = 3;

const RX_SIZE: u16 = 64;
const RX_BUFFER: u64 = 4096;
const TX_BUFFER: u64 = 0x1_1000;

/// A machine of memory and one device.
pub struct Machine {
    pub dir: TempDir,
    pub device: Vsock,
    pub memory: Memory,
    pub interrupt: Arc<Interrupt>,
    pub rx: Ring,
    pub tx: Ring,
    pub event: Ring,
    /// Give receive buffers back as soon as they are read.
    pub refill: bool,
}

pub fn config(dir: &TempDir) -> VsockConfig {
    VsockConfig {
        cid: CID,
        path: dir.path().join("v"),
    }
}

impl Machine {
    /// With the driver up and all receive buffers posted.
    pub fn new() -> Self {
        let mut machine = Self::without_buffers();
        machine.post_rx();
        machine
    }

    /// With the driver up.
    pub fn without_buffers() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let device = Vsock::new(&config(&dir)).unwrap();
        let mut machine = Self::around(dir, device);
        machine.activate();
        machine.pump();
        machine
    }

    /// Without the driver.
    pub fn around(dir: TempDir, device: Vsock) -> Self {
        let memory: Memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        Self {
            dir,
            device,
            rx: Ring::new(&memory, 0x1_0000, RX_SIZE, 0x10_0000, RX_BUFFER + 64),
            tx: Ring::new(&memory, 0x2_0000, 128, 0x20_0000, TX_BUFFER),
            event: Ring::new(&memory, 0x3_0000, 8, 0x4_0000, 64),
            memory,
            interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
            refill: true,
        }
    }

    pub fn activation(&self) -> Activation {
        Activation {
            memory: self.memory.clone(),
            queues: [&self.rx, &self.tx, &self.event].map(Ring::queue).into(),
            features: FEATURE_VERSION_1 | FEATURE_EVENT_IDX,
            interrupt: self.interrupt.clone(),
        }
    }

    pub fn activate(&mut self) {
        let activation = self.activation();
        self.device.activate(activation).unwrap();
    }

    /// Lets the device thread run until it would sleep. Fails when it never would.
    pub fn pump(&mut self) {
        // A driver that has seen everything is to be told of the next thing.
        let news = |machine: &Self| {
            machine.rx.has_news(&machine.memory) || machine.tx.has_news(&machine.memory)
        };
        let had_news = news(self);
        for _ in 0..20_000 {
            let mut fds: Vec<libc::pollfd> = self
                .device
                .queue_events()
                .iter()
                .map(|event| event.as_raw_fd())
                .chain([self.device.sockets_fd()])
                .map(|fd| libc::pollfd {
                    fd,
                    events: libc::POLLIN,
                    revents: 0,
                })
                .collect();
            // SAFETY: the array is of as many elements.
            let count = unsafe { libc::poll(fds.as_mut_ptr(), 4, 0) };
            assert!(count >= 0);
            if count == 0 {
                let told = self.interrupt.line().read().is_ok();
                assert!(
                    told || had_news || !news(self),
                    "buffers were used without an interrupt"
                );
                return;
            }
            for (source, fd) in (0..).zip(fds) {
                if fd.revents != 0 {
                    self.device.handle(source);
                }
            }
        }
        panic!("the device spins");
    }

    /// Posts all free receive buffers, as Linux 6.1 does: a header and a page.
    pub fn post_rx(&mut self) {
        while let Some(slot) = self.rx.free_slot() {
            let parts = [(0, 44, true), (44, RX_BUFFER as u32, true)];
            self.rx.offer(&self.memory, slot, &parts);
        }
        self.kick_rx();
    }

    /// Posts one receive buffer of these parts: offsets and lengths.
    pub fn post_rx_parts(&mut self, parts: &[(u64, u32, bool)]) {
        let slot = self.rx.free_slot().unwrap();
        self.rx.offer(&self.memory, slot, parts);
        self.kick_rx();
    }

    pub fn kick_rx(&mut self) {
        if self.rx.must_kick(&self.memory) {
            self.device.queue_events()[0].write(1).unwrap();
        }
    }

    /// Sends a packet of these bytes in parts of these lengths.
    pub fn send_raw(&mut self, bytes: &[u8], lengths: &[u32]) {
        if self.tx.free_slot_or_reap(&self.memory).is_none() {
            self.pump();
        }
        let slot = self
            .tx
            .free_slot_or_reap(&self.memory)
            .expect("the device takes no packets");
        self.tx.fill(&self.memory, slot, bytes);
        let mut parts = Vec::new();
        let mut offset = 0;
        for &len in lengths {
            parts.push((offset, len, false));
            offset += u64::from(len);
        }
        self.tx.offer(&self.memory, slot, &parts);
        if self.tx.must_kick(&self.memory) {
            self.device.queue_events()[1].write(1).unwrap();
        }
    }

    /// Sends a packet as Linux 6.1 does: the header, and the data if there is any.
    pub fn send(&mut self, header: Header, data: &[u8]) {
        let header = Header {
            len: data.len() as u32,
            ..header
        };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend_from_slice(data);
        let lengths = [44, data.len() as u32];
        self.send_raw(&bytes, &lengths[..1 + usize::from(!data.is_empty())]);
    }

    /// The next packet for the guest.
    pub fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let (slot, bytes) = self.rx.take(&self.memory)?;
        let header = Header::from_bytes(bytes[..44].try_into().unwrap());
        assert_eq!(bytes.len(), 44 + header.len as usize);
        assert_eq!(header.dst_cid, u64::from(CID));
        if self.refill {
            let parts = [(0, 44, true), (44, RX_BUFFER as u32, true)];
            self.rx.offer(&self.memory, slot, &parts);
            self.kick_rx();
        }
        Some((header, bytes[44..].to_vec()))
    }

    /// Lets the device run, then the next packet, which there must be.
    pub fn expect(&mut self, op: u16) -> (Header, Vec<u8>) {
        self.pump();
        let packet = self.receive().expect("a packet for the guest");
        assert_eq!(packet.0.op, op, "{:?}", packet.0);
        packet
    }

    /// Lets the device run. The operation of the next packet, which there must be.
    pub fn expect_any(&mut self) -> u16 {
        self.pump();
        self.receive().expect("a packet for the guest").0.op
    }

    /// Lets the device run; there must be nothing for the guest.
    pub fn expect_nothing(&mut self) {
        self.pump();
        assert_eq!(self.receive(), None);
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("v")
    }

    /// A service on the host.
    pub fn service(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("v_{port}"))).unwrap()
    }

    /// A client on the host that has asked for `port`.
    pub fn client(&self, port: u32) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        writeln!(client, "CONNECT {port}").unwrap();
        client.set_nonblocking(true).unwrap();
        client
    }

    /// A connection from the host that the guest has accepted with this buffer size.
    pub fn connected(&mut self, buf_alloc: u32) -> (UnixStream, Header) {
        let mut client = self.client(1000);
        let (request, _) = self.expect(op::REQUEST);
        let reply = Header {
            buf_alloc,
            ..reply(&request, op::RESPONSE)
        };
        self.send(reply, &[]);
        self.pump();
        let mut line = [0; 64];
        let count = client.read(&mut line).unwrap();
        assert_eq!(
            &line[..count],
            format!("OK {}\n", request.src_port).as_bytes()
        );
        (client, reply)
    }
}

/// A header that answers `header`.
pub fn reply(header: &Header, op: u16) -> Header {
    Header {
        src_cid: header.dst_cid,
        dst_cid: header.src_cid,
        src_port: header.dst_port,
        dst_port: header.src_port,
        socket_type: header.socket_type,
        op,
        buf_alloc: 256 * 1024,
        ..Header::default()
    }
}

/// A header from the guest.
pub fn from_guest(guest: u32, host: u32, op: u16) -> Header {
    Header {
        src_cid: u64::from(CID),
        dst_cid: u64::from(HOST_CID),
        src_port: guest,
        dst_port: host,
        socket_type: TYPE_STREAM,
        op,
        buf_alloc: 256 * 1024,
        ..Header::default()
    }
}

/// Reads what is there, without waiting; `true` when the end of the stream was there as well.
pub fn read_all(stream: &mut UnixStream, into: &mut Vec<u8>) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        let mut buffer = [0; 65536];
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(count) => into.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return true,
            Err(error) => panic!("{error}"),
        }
    }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).map(|n| (n * 7 + n / 251) as u8).collect()
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

fn is_closed(client: &mut UnixStream) -> bool {
    read_all(client, &mut Vec::new())
}
