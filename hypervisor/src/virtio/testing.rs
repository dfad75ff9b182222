//! For the devices' tests: the driver's side of a device, well-behaved or hostile.

use std::sync::{Arc, Mutex, MutexGuard};

use event_manager::{EventManager, SubscriberOps};
use proptest::prelude::*;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::{Descriptor, VirtqUsedElem};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::queue_state::ActiveState;
use super::{Activation, Interrupt, Memory, VirtioDevice};

/// Descriptor flag: the chain goes on.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes.
pub const WRITE: u16 = 2;

/// Size of each test queue.
pub const SIZE: u16 = 16;
/// Where the buffers of tests may lie; queues lie below.
pub const BUFFERS: u64 = 0x1_0000;
const MEMORY: usize = 0x10_0000;

/// A device with its driver.
pub struct Driver<D: VirtioDevice> {
    manager: EventManager<Arc<Mutex<D>>>,
    device: Arc<Mutex<D>>,
    /// The guest's memory.
    pub memory: Memory,
    /// The device's interrupt.
    pub interrupt: Arc<Interrupt>,
    queues: Vec<DriverQueue>,
}

#[derive(Default, Clone, Copy)]
struct DriverQueue {
    next_descriptor: u16,
    available: u16,
    used: u16,
}

/// A request that the device has handed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The head of its chain.
    pub head: u16,
    /// How many bytes the device says it wrote.
    pub written: u32,
}

/// A part of a chain: address, length, whether the device writes it.
pub type Part = (u64, u32, bool);

impl<D: VirtioDevice> Driver<D> {
    /// Puts the device into an event loop.
    pub fn new(device: D) -> Self {
        let device = Arc::new(Mutex::new(device));
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(device.clone());
        let queues = vec![DriverQueue::default(); device.lock().unwrap().queue_max_sizes().len()];
        Self {
            manager,
            device,
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap(),
            interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
            queues,
        }
    }

    /// A new device with its driver set up, all features accepted.
    pub fn active(device: D) -> Self {
        let driver = Self::new(device);
        let features = driver.device().offered_features();
        driver.activate(features);
        driver
    }

    pub fn device(&self) -> MutexGuard<'_, D> {
        self.device.lock().unwrap()
    }

    /// Sets all queues up and makes the device active with `features`.
    pub fn activate(&self, features: u64) {
        let queues = (0..self.queues.len()).map(queue).collect();
        self.activate_with(features, queues);
    }

    /// Resets the device and sets it up anew, as a driver does that is loaded again.
    pub fn start_over(&mut self) {
        let under_way = {
            let mut device = self.device();
            device.reset();
            device.under_way()
        };
        if let Some(wait) = under_way {
            wait();
        }
        for index in 0..self.queues.len() {
            self.queues[index] = DriverQueue::default();
            self.write(rings(index).0, &[0; 0x1000]);
        }
        self.interrupt.restore(0, false);
        let features = self.device().offered_features();
        self.activate(features);
    }

    pub fn activate_with(&self, features: u64, queues: Vec<Queue>) {
        let activation = Activation {
            memory: self.memory.clone(),
            queues,
            features,
            interrupt: self.interrupt.clone(),
        };
        self.device().activate(activation).unwrap();
    }

    /// Makes `restored` active as it was when `saved`, with this driver's memory.
    pub fn make_active(&self, restored: &mut impl VirtioDevice, saved: Option<&ActiveState>) {
        let activation = saved
            .unwrap()
            .activation(self.memory.clone(), self.interrupt.clone())
            .unwrap();
        restored.activate(activation).unwrap();
    }

    /// Makes a chain of `parts` available in queue `index`, without a kick. Returns its head.
    pub fn add(&mut self, index: usize, parts: &[Part]) -> u16 {
        let state = &mut self.queues[index];
        let head = state.next_descriptor;
        let (table, available, _) = rings(index);
        for (position, &(address, len, writable)) in parts.iter().enumerate() {
            let slot = state.next_descriptor;
            state.next_descriptor = (slot + 1) % SIZE;
            let mut flags = if writable { WRITE } else { 0 };
            if position + 1 < parts.len() {
                flags |= NEXT;
            }
            let descriptor: RawDescriptor =
                Descriptor::new(address, len, flags, state.next_descriptor).into();
            self.memory
                .write_obj(descriptor, GuestAddress(table + u64::from(slot) * 16))
                .unwrap();
        }
        let slot = u64::from(state.available % SIZE);
        self.memory
            .write_obj(head, GuestAddress(available + 4 + slot * 2))
            .unwrap();
        state.available = state.available.wrapping_add(1);
        // With VIRTIO_F_EVENT_IDX: interrupt at the next buffer that is used.
        self.memory
            .write_obj(
                state.used,
                GuestAddress(available + 4 + u64::from(SIZE) * 2),
            )
            .unwrap();
        self.memory
            .write_obj(state.available, GuestAddress(available + 2))
            .unwrap();
        head
    }

    /// Notifies queue `index` and lets the event loop run until nothing happens.
    pub fn kick(&mut self, index: usize) {
        self.device().queue_events()[index].write(1).unwrap();
        self.run();
    }

    /// Lets the event loop run until nothing happens.
    pub fn run(&mut self) {
        for _ in 0..10_000 {
            if self.manager.run_with_timeout(0).unwrap() == 0 {
                return;
            }
        }
        panic!("the device does not come to rest");
    }

    /// Lets the event loop wait for one event, for at most `milliseconds`.
    pub fn run_for(&mut self, milliseconds: i32) {
        self.manager.run_with_timeout(milliseconds).unwrap();
    }

    /// Lets the event loop run until the device interrupts, for at most ten seconds.
    pub fn wait(&mut self) {
        for _ in 0..1000 {
            if self.interrupt.line().read().is_ok() {
                return;
            }
            self.manager.run_with_timeout(10).unwrap();
        }
        panic!("the device does not interrupt");
    }

    /// What the device has handed back in queue `index` since the last call.
    pub fn used(&mut self, index: usize) -> Vec<Used> {
        let (_, _, ring) = rings(index);
        let end: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap();
        let mut all = Vec::new();
        let state = &mut self.queues[index];
        while state.used != end {
            let slot = u64::from(state.used % SIZE);
            let element: VirtqUsedElem = self
                .memory
                .read_obj(GuestAddress(ring + 4 + slot * 8))
                .unwrap();
            all.push(Used {
                head: element.id() as u16,
                written: element.len(),
            });
            state.used = state.used.wrapping_add(1);
        }
        all
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
    }

    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }
}

/// Descriptor table, available ring and used ring of queue `index`.
fn rings(index: usize) -> (u64, u64, u64) {
    let base = 0x1000 * (index as u64 + 1);
    (base, base + 0x400, base + 0x800)
}

/// Queue `index` as the transport hands it over.
pub fn queue(index: usize) -> Queue {
    let (table, available, used) = rings(index);
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_desc_table_address(Some(table as u32), Some(0));
    queue.set_avail_ring_address(Some(available as u32), Some(0));
    queue.set_used_ring_address(Some(used as u32), Some(0));
    queue.set_ready(true);
    queue
}

/// A queue full of what no driver should write.
#[derive(Clone, Debug)]
pub struct HostileQueue {
    table: Vec<(u64, u32, u16, u16)>,
    heads: Vec<u16>,
    ahead: u16,
    used_event: u16,
    contents: Vec<u8>,
}

/// Any tables: half of the addresses lie in memory, chains loop, directions are mixed, lengths are zero or huge.
/// `request` is what the buffers hold at random places, so that some chains carry a request.
pub fn hostile_queue(
    request: impl Strategy<Value = Vec<u8>>,
) -> impl Strategy<Value = HostileQueue> {
    let address = prop_oneof![
        8 => (0u64..16).prop_map(|slot| BUFFERS + slot * 0x1000),
        1 => 0u64..MEMORY as u64 + 0x100,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        2 => Just(1u32), 2 => Just(8), 4 => Just(16), 4 => Just(512), 1 => 0u32..0x3000, 1 => any::<u32>(),
    ];
    // NEXT, WRITE and rarely INDIRECT.
    let flags = prop_oneof![4 => 0u16..4, 1 => 4u16..8];
    let next = 0u16..SIZE + 2;
    (
        proptest::collection::vec((address, len, flags, next), usize::from(SIZE)),
        proptest::collection::vec(0u16..SIZE + 1, usize::from(SIZE)),
        prop_oneof![8 => 1u16..SIZE, 1 => any::<u16>()],
        any::<u16>(),
        request,
    )
        .prop_map(|(table, heads, ahead, used_event, contents)| HostileQueue {
            table,
            heads,
            ahead,
            used_event,
            contents,
        })
}

impl HostileQueue {
    /// Writes it to where queue `index` of `driver` lies.
    pub fn install<D: VirtioDevice>(&self, driver: &Driver<D>, index: usize) {
        let (table, available, _) = rings(index);
        for page in 0..16 {
            driver.write(BUFFERS + page * 0x1000, &self.contents);
        }
        for (slot, &(address, len, flags, next)) in (0u64..).zip(&self.table) {
            let descriptor: RawDescriptor = Descriptor::new(address, len, flags, next).into();
            driver
                .memory
                .write_obj(descriptor, GuestAddress(table + slot * 16))
                .unwrap();
        }
        for (slot, &head) in (0u64..).zip(&self.heads) {
            driver
                .memory
                .write_obj(head, GuestAddress(available + 4 + slot * 2))
                .unwrap();
        }
        let end = available + 4 + u64::from(SIZE) * 2;
        driver
            .memory
            .write_obj(self.used_event, GuestAddress(end))
            .unwrap();
        driver
            .memory
            .write_obj(self.ahead, GuestAddress(available + 2))
            .unwrap();
    }
}
