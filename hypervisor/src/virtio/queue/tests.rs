use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::*;

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
const SIZE: u16 = 16;

// Two regions that touch, a gap, and a third.
fn memory() -> Memory {
    GuestMemoryMmap::from_ranges(&[
        (GuestAddress(0), 0x8000),
        (GuestAddress(0x8000), 0x8000),
        (GuestAddress(0x2_0000), 0x1000),
    ])
    .unwrap()
}

fn device_queue(memory: &Memory, mock: &MockSplitQueue<'_, Memory>) -> DeviceQueue {
    let activation = Activation {
        memory: memory.clone(),
        queues: vec![mock.create_queue().unwrap()],
        features: FEATURE_VERSION_1,
        interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
    };
    let [queue] = activation.accept().unwrap().queues;
    queue
}

fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    Descriptor::new(address, len, flags, next).into()
}

/// Makes the descriptors one chain available and loads it.
fn load(descriptors: &[RawDescriptor]) -> Result<(Option<u16>, Buffers), QueueError> {
    let memory = memory();
    let mock = MockSplitQueue::new(&memory, SIZE);
    for (index, descriptor) in (0..).zip(descriptors) {
        mock.desc_table().store(index, *descriptor).unwrap();
    }
    mock.avail().ring().ref_at(0).unwrap().store(0);
    mock.avail().idx().store(1);
    let mut queue = device_queue(&memory, &mock);
    let mut buffers = Buffers::new(queue.memory().clone());
    let head = queue.pop_into(&mut buffers)?;
    Ok((head, buffers))
}

#[test]
fn a_chain_over_two_regions_is_read_and_written_through() {
    let (head, mut buffers) = load(&[
        descriptor(0x7ffe, 4, NEXT, 1),
        descriptor(0x4000, 0, NEXT, 2),
        descriptor(0x4000, 3, WRITE | NEXT, 3),
        descriptor(0x7fff, 2, WRITE, 0),
    ])
    .unwrap();
    assert_eq!(head, Some(0));
    assert_eq!(
        (buffers.readable.len(), buffers.readable.iovecs().len()),
        (4, 2)
    );
    assert_eq!(buffers.readable.read_array::<3>(), Some([0; 3]));
    assert_eq!(buffers.readable.read_array::<2>(), None);
    assert!(buffers.writable.reserve_last_byte());
    assert_eq!(buffers.writable.len(), 4);
    assert_eq!(buffers.writable.write(b"abcdef"), 4);
    buffers.writable.set_reserved_byte(b'!');
    let memory = buffers.writable.memory.clone();
    let mut got = [0; 2];
    memory.read_slice(&mut got, GuestAddress(0x7fff)).unwrap();
    assert_eq!(&got, b"d!");
}

#[test]
fn each_way_to_break_a_chain_is_told() {
    use QueueError::*;
    let broken = |descriptors: &[RawDescriptor]| load(descriptors).err().unwrap();
    assert!(matches!(
        broken(&[descriptor(0x4000, 1, NEXT, 0)]),
        Endless(0)
    ));
    assert!(matches!(
        broken(&[descriptor(0x4000, 1, NEXT, SIZE)]),
        Endless(0)
    ));
    assert!(matches!(
        broken(&[descriptor(0x4000, 24, INDIRECT, 0)]),
        Endless(0)
    ));
    assert!(matches!(
        broken(&[descriptor(0x4000, 0, INDIRECT, 0)]),
        Endless(0)
    ));
    assert!(matches!(
        broken(&[descriptor(u64::MAX, 2, 0, 0)]),
        OutsideMemory(0)
    ));
    assert!(matches!(
        broken(&[descriptor(0xffff, 2, 0, 0)]),
        OutsideMemory(0)
    ));
    assert!(matches!(
        broken(&[descriptor(0x4000, u32::MAX, WRITE, 0)]),
        OutsideMemory(0)
    ));
    let wrong = [
        descriptor(0x4000, 1, WRITE | NEXT, 1),
        descriptor(0x4000, 1, 0, 0),
    ];
    assert!(matches!(broken(&wrong), Order(0)));
}

#[test]
fn an_indirect_table_may_not_be_longer_than_a_system_call_takes() {
    let memory = memory();
    let mock = MockSplitQueue::new(&memory, SIZE);
    for (length, fits) in [
        (MAX_SEGMENTS as u16, true),
        (MAX_SEGMENTS as u16 + 1, false),
    ] {
        for index in 0..length {
            let flags = if index + 1 < length { NEXT } else { 0 };
            memory
                .write_obj(
                    descriptor(0x2_0000, 1, flags, index + 1),
                    GuestAddress(0x4000 + u64::from(index) * 16),
                )
                .unwrap();
        }
        let head = descriptor(0x4000, u32::from(length) * 16, INDIRECT, 0);
        mock.desc_table().store(0, head).unwrap();
        mock.avail().ring().ref_at(0).unwrap().store(0);
        mock.avail().idx().store(1);
        let mut queue = device_queue(&memory, &mock);
        let mut buffers = Buffers::new(queue.memory().clone());
        match queue.pop_into(&mut buffers) {
            Ok(head) => {
                assert!(fits && head == Some(0));
                assert_eq!(buffers.readable.len(), MAX_SEGMENTS);
            }
            Err(e) => assert!(!fits && matches!(e, QueueError::TooLong(0)), "{e}"),
        }
    }
}

#[test]
fn an_available_index_that_jumps_is_an_error_and_no_endless_loop() {
    let memory = memory();
    let mock = MockSplitQueue::new(&memory, SIZE);
    mock.avail().idx().store(SIZE + 1);
    let mut queue = device_queue(&memory, &mock);
    assert!(matches!(queue.pop(), Err(QueueError::AvailableIndex(0))));
}

#[test]
fn a_queue_whose_rings_have_a_hole_is_an_error_and_no_endless_loop() {
    // The available ring's begin and end are memory, what lies between is not.
    let memory: Memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4004), (GuestAddress(0x4020), 0x1000)])
            .unwrap();
    let mock = MockSplitQueue::new(&memory, SIZE);
    memory.write_obj(1u16, GuestAddress(0x4002)).unwrap();
    let mut queue: Queue = mock.create_queue().unwrap();
    queue.set_avail_ring_address(Some(0x4000), None);
    let activation = Activation {
        memory: memory.clone(),
        queues: vec![queue],
        features: FEATURE_VERSION_1,
        interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
    };
    let [mut queue] = activation.accept().unwrap().queues;
    let mut buffers = Buffers::new(queue.memory().clone());
    let result = queue.serve(&mut buffers, 64, |_| Some(0));
    assert!(matches!(result, Err(QueueError::Ring(0))));
}

#[test]
fn a_queue_that_the_driver_did_not_set_up_is_named() {
    let activation = |queues| Activation {
        memory: memory(),
        queues,
        features: 0,
        interrupt: Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())),
    };
    let result = activation(vec![Queue::new(SIZE).unwrap()]).accept::<1>();
    assert!(matches!(result, Err(ActivateError::QueueMissing(0))));
    assert!(matches!(
        activation(vec![]).accept::<1>(),
        Err(ActivateError::QueueMissing(0))
    ));
    let mut outside = Queue::new(SIZE).unwrap();
    outside.set_ready(true);
    outside.set_desc_table_address(Some(0x10_0000), None);
    let result = activation(vec![outside]).accept::<1>();
    assert!(matches!(result, Err(ActivateError::QueueInvalid(0))));
}

#[test]
fn serving_stops_at_the_budget_and_interrupts_once() {
    let memory = memory();
    let mut mock = MockSplitQueue::new(&memory, SIZE);
    for _ in 0..5 {
        mock.add_chain(1).unwrap();
    }
    let mut queue = device_queue(&memory, &mock);
    let mut buffers = Buffers::new(queue.memory().clone());
    assert!(queue.serve(&mut buffers, 3, |_| Some(7)).unwrap());
    assert_eq!(mock.used().idx().load(), 3);
    assert_eq!(queue.interrupt().line().read().unwrap(), 1);
    let mut taken = 0;
    let stop_after_one = |_: &mut Buffers| {
        taken += 1;
        (taken == 1).then_some(0)
    };
    assert!(!queue.serve(&mut buffers, 3, stop_after_one).unwrap());
    assert_eq!(mock.used().idx().load(), 4);
    assert!(!queue.serve(&mut buffers, 3, |_| Some(0)).unwrap());
    assert_eq!(mock.used().idx().load(), 5);
}

#[test]
fn the_driver_is_interrupted_exactly_when_it_wants_to_be() {
    for event_idx in [false, true] {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        let mut queue = device_queue(&memory, &mock);
        queue.queue.set_event_idx(event_idx);
        // The mock's rings overlap where the used event lies.
        let used = 0x6000;
        queue.queue.set_used_ring_address(Some(used), None);
        let told = |queue: &DeviceQueue| queue.interrupt().line().read().is_ok();
        let available = GuestAddress(queue.queue.avail_ring());
        let used_event = GuestAddress(available.0 + 4 + 2 * u64::from(SIZE));
        // Nothing used, nothing told.
        queue.notify().unwrap();
        assert!(!told(&queue));
        // Without VIRTIO_F_EVENT_IDX the flag counts, with it the index.
        let wishes: [(u16, u16, bool); 3] = match event_idx {
            false => [(0, 9, true), (1, 2, false), (0, 0, true)],
            true => [(1, 1, true), (0, 4, false), (1, 4, true)],
        };
        for (flags, index, wanted) in wishes {
            memory.write_obj(flags, available).unwrap();
            memory.write_obj(index, used_event).unwrap();
            queue.add_used_together([(3, 1), (4, 2)]).unwrap();
            queue.notify().unwrap();
            assert_eq!(told(&queue), wanted, "{event_idx} {flags} {index}");
        }
        let index: u16 = memory.read_obj(GuestAddress(u64::from(used) + 2)).unwrap();
        let last: [u32; 2] = [0, 4].map(|offset| {
            let address = u64::from(used) + 4 + 5 * 8 + offset;
            memory.read_obj(GuestAddress(address)).unwrap()
        });
        assert_eq!((index, last), (6, [4, 2]));
        assert!(queue.add_used(SIZE, 0).is_err());
    }
}

#[test]
fn bytes_can_be_written_in_the_middle() {
    let (_, buffers) = load(&[
        descriptor(0x4000, 3, WRITE | NEXT, 1),
        descriptor(0x5000, 2, WRITE, 0),
    ])
    .unwrap();
    assert!(buffers.writable.write_at(2, b"ab"));
    assert!(buffers.writable.write_at(5, b""));
    assert!(!buffers.writable.write_at(4, b"xy"));
    let memory = &buffers.writable.memory;
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x4002)).unwrap(), b'a');
    assert_eq!(
        memory.read_obj::<[u8; 2]>(GuestAddress(0x5000)).unwrap(),
        *b"bx"
    );
}

proptest! {
    #[test]
    fn whatever_the_tables_hold_a_chain_is_sound_or_refused(
        table in proptest::collection::vec((0u64..0x2_2000, 0u32..0x3000, 0u16..8, 0u16..20), 32),
        heads in proptest::collection::vec(0u16..20, 16),
        ahead in 0u16..20,
    ) {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        for (index, &(address, len, flags, next)) in table.iter().enumerate() {
            let raw = descriptor(address, len, flags, next);
            if index < 16 {
                mock.desc_table().store(index as u16, raw).unwrap();
            } else {
                memory.write_obj(raw, GuestAddress(0x4000 + index as u64 * 16)).unwrap();
            }
        }
        for (index, &head) in heads.iter().enumerate() {
            mock.avail().ring().ref_at(index).unwrap().store(head);
        }
        mock.avail().idx().store(ahead);
        let mut queue = device_queue(&memory, &mock);
        let mut buffers = Buffers::new(queue.memory().clone());
        let _ = queue.serve(&mut buffers, 64, |buffers| {
            for segments in [&mut buffers.readable, &mut buffers.writable] {
                let sum: usize = segments.iovecs().iter().map(|part| part.iov_len).sum();
                assert_eq!(sum, segments.len());
                assert!(segments.iovecs().len() <= MAX_SEGMENTS * 3);
                segments.truncate(sum / 2);
                assert_eq!(segments.len(), sum / 2);
                segments.advance(sum);
                assert!(segments.is_empty() && segments.iovecs().is_empty());
            }
            Some(0)
        });
    }
}
