//! A guest for tests: it drives the device through its queues, as a kernel does.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cube_hypervisor_api::config::ShareConfig;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use virtiofsd::fuse::{
    AttrOut, EntryOut, InHeader, InitInCompat, InitInExt, InitOut, Opcode, OpenIn, OpenOut,
    OutHeader, ReadIn,
};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::super::{Activation, Interrupt, Memory, VirtioDevice};
use super::{Fs, QUEUE_SIZES};

pub const MEMORY: u64 = 8 << 20;
const RINGS: [u64; 2] = [0x1_0000, 0x2_0000];
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;

/// Which flags Linux 6.1 offers at INIT.
pub const OFFERED: u64 = 0x3_ffff_fffb & !(1 << 31);

pub struct Guest {
    pub device: Fs,
    memory: Memory,
    interrupt: Arc<Interrupt>,
    next: [u16; 2],
    unique: u64,
    pub uid: u32,
    pub gid: u32,
}

/// A reply: an error number (positive), or the bytes behind the header.
pub type Reply = Result<Vec<u8>, i32>;

pub fn config(path: &Path) -> ShareConfig {
    ShareConfig {
        tag: "share".into(),
        path: path.into(),
        read_only: false,
        guest_owned: vec!["rootfs".into()],
        mounts_only: false,
    }
}

/// The plain bytes of a structure.
pub fn bytes<T: ByteValued>(value: T) -> Vec<u8> {
    value.as_slice().to_vec()
}

/// A name with its end.
pub fn name(text: &str) -> Vec<u8> {
    [text.as_bytes(), b"\0"].concat()
}

/// The structure at the start of a reply.
pub fn parse<T: ByteValued + Default>(reply: &[u8]) -> T {
    let mut value = T::default();
    value
        .as_mut_slice()
        .copy_from_slice(&reply[..size_of::<T>()]);
    value
}

impl Guest {
    pub fn new(config: &ShareConfig) -> Self {
        Self::with_device(Fs::new(config, MEMORY, Box::new(|_| {})).unwrap())
    }

    pub fn with_device(device: Fs) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap();
        let mut guest = Self {
            device,
            memory,
            interrupt: Arc::new(Interrupt::new(EventFd::new(0).unwrap())),
            next: [0; 2],
            unique: 1,
            uid: 0,
            gid: 0,
        };
        guest.activate();
        guest
    }

    pub fn activate(&mut self) {
        let queues = RINGS.iter().zip(QUEUE_SIZES).zip(self.next);
        let queues = queues.map(|((base, size), next)| {
            let mut queue = Queue::new(size).unwrap();
            let [descriptors, available, used] = [*base, base + 0x4000, base + 0x6000];
            queue.set_desc_table_address(Some(descriptors as u32), None);
            queue.set_avail_ring_address(Some(available as u32), None);
            queue.set_used_ring_address(Some(used as u32), None);
            queue.set_next_avail(next);
            queue.set_next_used(next);
            queue.set_ready(true);
            queue
        });
        let activation = Activation {
            memory: self.memory.clone(),
            queues: queues.collect(),
            features: self.device.offered_features(),
            interrupt: self.interrupt.clone(),
        };
        self.device.activate(activation).unwrap();
    }

    /// A guest after its kernel's INIT.
    pub fn mounted(config: &ShareConfig) -> Self {
        let mut guest = Self::new(config);
        guest.init();
        guest
    }

    pub fn init(&mut self) -> InitOut {
        let init = InitInCompat {
            major: 7,
            minor: 36,
            max_readahead: 128 << 10,
            flags: OFFERED as u32,
        };
        let more = InitInExt {
            flags2: (OFFERED >> 32) as u32,
            ..Default::default()
        };
        let body = [bytes(init), bytes(more)].concat();
        parse(&self.call(Opcode::Init, 0, &body).unwrap())
    }

    /// Puts chains of raw descriptors into a queue and waits until the device has used one of them; `None` when
    /// it asked for a reset instead.
    pub fn submit(&mut self, queue: usize, chain: &[(u64, u32, u16)]) -> Option<u32> {
        let base = RINGS[queue];
        let size = QUEUE_SIZES[queue];
        for (index, &(address, len, flags)) in chain.iter().enumerate() {
            let more = if index + 1 < chain.len() { 1 } else { 0 };
            let raw = Descriptor::new(address, len, flags | more, index as u16 + 1);
            let at = GuestAddress(base + index as u64 * 16);
            self.memory.write_obj(RawDescriptor::from(raw), at).unwrap();
        }
        let slot = self.next[queue] % size;
        self.offer(queue, 0);
        let used = GuestAddress(base + 0x6002);
        loop {
            let done: u16 = self.memory.load(used, Ordering::SeqCst).unwrap();
            if done == self.next[queue] {
                let entry = GuestAddress(base + 0x6004 + u64::from(slot) * 8 + 4);
                return Some(self.memory.read_obj(entry).unwrap());
            }
            if self.interrupt.needs_reset() {
                return None;
            }
            self.interrupt.line().read().unwrap();
        }
    }

    fn header(&mut self, opcode: u32, node: u64, body: &[u8]) -> InHeader {
        self.unique += 2;
        InHeader {
            len: (size_of::<InHeader>() + body.len()) as u32,
            opcode,
            unique: self.unique,
            nodeid: node,
            uid: self.uid.into(),
            gid: self.gid.into(),
            pid: 1,
            ..Default::default()
        }
    }

    pub fn call(&mut self, opcode: Opcode, node: u64, body: &[u8]) -> Reply {
        self.call_with_room(opcode, node, body, 0x11_0000)
    }

    pub fn call_with_room(&mut self, opcode: Opcode, node: u64, body: &[u8], room: u32) -> Reply {
        let header = self.header(opcode as u32, node, body);
        let request = [bytes(header), body.to_vec()].concat();
        let (header, reply) = self.call_raw(&request, room).expect("a reply");
        assert_eq!(header.unique, self.unique);
        match header.error {
            0 => Ok(reply),
            error => Err(-error),
        }
    }

    /// Sends any bytes and returns what came back, if anything did.
    pub fn call_raw(&mut self, request: &[u8], room: u32) -> Option<(OutHeader, Vec<u8>)> {
        self.memory
            .write_slice(request, GuestAddress(REQUEST))
            .unwrap();
        let request = (REQUEST, request.len() as u32, 0);
        let written = self.submit(1, &[request, (REPLY, room, 2)])?;
        assert!(written <= room);
        if written == 0 {
            return None;
        }
        let mut reply = vec![0; written as usize];
        self.memory
            .read_slice(&mut reply, GuestAddress(REPLY))
            .unwrap();
        let header: OutHeader = parse(&reply);
        assert_eq!(header.len, written);
        Some((header, reply.split_off(size_of::<OutHeader>())))
    }

    /// Sends what has no reply.
    pub fn tell(&mut self, opcode: Opcode, node: u64, body: &[u8]) {
        let header = self.header(opcode as u32, node, body);
        let request = [bytes(header), body.to_vec()].concat();
        self.memory
            .write_slice(&request, GuestAddress(REQUEST))
            .unwrap();
        self.submit(0, &[(REQUEST, request.len() as u32, 0)]);
    }

    /// Sends a request and does not wait for its reply. Such a request, number `n` of several, has descriptors and
    /// buffers of its own.
    pub fn post(&mut self, n: u16, opcode: Opcode, node: u64, body: &[u8]) {
        let header = self.header(opcode as u32, node, body);
        let request = [bytes(header), body.to_vec()].concat();
        let at = REQUEST + 0x1000 * (u64::from(n) + 1);
        self.memory.write_slice(&request, GuestAddress(at)).unwrap();
        let first = 100 + n * 2;
        let parts = [
            Descriptor::new(at, request.len() as u32, 1, first + 1),
            Descriptor::new(at + 0x800, 0x800, 2, 0),
        ];
        for (part, index) in parts.into_iter().zip(first..) {
            let entry = GuestAddress(RINGS[1] + u64::from(index) * 16);
            self.memory
                .write_obj(RawDescriptor::from(part), entry)
                .unwrap();
        }
        self.offer(1, first);
    }

    /// The number of requests that the device has finished, since the start.
    pub fn finished(&self) -> u16 {
        let used = GuestAddress(RINGS[1] + 0x6002);
        self.memory.load(used, Ordering::SeqCst).unwrap()
    }

    /// Waits until the device has finished `count` requests, since the start.
    pub fn wait_for(&self, count: u16) {
        loop {
            let now = self.finished();
            if now == count {
                return;
            }
            let event = RINGS[1] + 0x4004 + u64::from(QUEUE_SIZES[1]) * 2;
            self.memory
                .store(now, GuestAddress(event), Ordering::SeqCst)
                .unwrap();
            if self.finished() == now {
                self.interrupt.line().read().unwrap();
            }
        }
    }

    fn offer(&mut self, queue: usize, head: u16) {
        let (base, size) = (RINGS[queue], QUEUE_SIZES[queue]);
        let slot = self.next[queue] % size;
        let entry = GuestAddress(base + 0x4004 + u64::from(slot) * 2);
        self.memory.write_obj(head, entry).unwrap();
        // The event index of the interrupt: every request's end is of interest.
        let used: u16 = self.memory.read_obj(GuestAddress(base + 0x6002)).unwrap();
        let event = GuestAddress(base + 0x4004 + u64::from(size) * 2);
        self.memory.write_obj(used, event).unwrap();
        self.next[queue] = self.next[queue].wrapping_add(1);
        let index = GuestAddress(base + 0x4002);
        self.memory
            .store(self.next[queue], index, Ordering::SeqCst)
            .unwrap();
        self.device.queue_events()[queue].write(1).unwrap();
    }

    pub fn look_up(&mut self, parent: u64, entry: &str) -> Result<EntryOut, i32> {
        let reply = self.call(Opcode::Lookup, parent, &name(entry))?;
        Ok(parse(&reply))
    }

    /// Looks a whole path up, from the root.
    pub fn walk(&mut self, path: &str) -> Result<u64, i32> {
        let mut node = 1;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            node = self.look_up(node, part)?.nodeid;
        }
        Ok(node)
    }

    pub fn attributes(&mut self, node: u64) -> Result<AttrOut, i32> {
        let reply = self.call(Opcode::Getattr, node, &[0; 16])?;
        Ok(parse(&reply))
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        let body = bytes(OpenIn {
            flags: flags as u32,
            ..Default::default()
        });
        let reply = self.call(Opcode::Open, node, &body)?;
        Ok(parse::<OpenOut>(&reply).fh)
    }

    pub fn read(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Reply {
        let body = bytes(ReadIn {
            fh,
            offset,
            size,
            ..Default::default()
        });
        self.call(Opcode::Read, node, &body)
    }

    pub fn content(&mut self, path: &str) -> Result<Vec<u8>, i32> {
        let node = self.walk(path)?;
        let fh = self.open(node, libc::O_RDONLY)?;
        self.read(node, fh, 0, 1 << 20)
    }
}
