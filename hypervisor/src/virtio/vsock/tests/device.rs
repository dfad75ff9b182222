//! The device around the connections: configuration, activation, saved state.

use super::*;
use crate::virtio::ActivateError;
use crate::virtio::vsock::device::VsockState;
use std::sync::Arc;

#[test]
fn the_guest_reads_its_cid_and_cannot_change_it() {
    let mut machine = Machine::new();
    machine.device.write_config(0, &[9; 8]);
    let read = |offset, len| {
        let mut data = vec![0xff; len];
        machine.device.read_config(offset, &mut data);
        data
    };
    assert_eq!(read(0, 8), [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(0, 4), [3, 0, 0, 0]);
    assert_eq!(read(1, 8), [0; 8]);
    assert_eq!(read(u64::MAX, 8), [0; 8]);
}

#[test]
fn a_cid_that_is_no_guests_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for cid in [0, 1, 2, u32::MAX] {
        let config = VsockConfig {
            cid,
            ..config(&dir)
        };
        let error = Vsock::new(&config).err().unwrap().to_string();
        assert!(error.contains(&cid.to_string()), "{error}");
    }
}

#[test]
fn a_device_whose_queue_is_missing_does_not_become_active() {
    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::new(&config(&dir)).unwrap();
    let mut machine = Machine::around(dir, device);
    let mut activation = machine.activation();
    activation.queues[2] = virtio_queue::QueueT::new(8).unwrap();
    let result = machine.device.activate(activation);
    assert!(matches!(result, Err(ActivateError::QueueMissing(2))));
    assert!(machine.device.queue_states().is_empty());
}

#[test]
fn a_saved_device_comes_back_and_tells_the_guest_that_its_connections_are_gone() {
    let mut machine = Machine::new();
    let (_client, header) = machine.connected(1 << 18);
    for slot in 0..2 {
        machine.event.offer(&machine.memory, slot, &[(0, 4, true)]);
    }
    let state = machine.device.save();
    let text = serde_json::to_string(&state).unwrap();
    let state: VsockState = serde_json::from_str(&text).unwrap();
    assert_eq!(state, machine.device.save());
    assert_eq!(state.cid, CID);

    let dir = tempfile::tempdir().unwrap();
    let device = Vsock::restore(&config(&dir), &state).unwrap();
    let memory = machine.memory.clone();
    let interrupt = Arc::new(Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()));
    let active = state.active.clone().unwrap();
    let mut restored = Machine {
        dir,
        device,
        interrupt: interrupt.clone(),
        ..machine
    };
    assert!(restored.device.save().transport_reset);
    restored
        .device
        .activate(active.activation(memory, interrupt).unwrap())
        .unwrap();
    restored.pump();
    let (_, event) = restored.event.take(&restored.memory).unwrap();
    assert_eq!(event, [0; 4]);
    assert!(!restored.event.has_news(&restored.memory), "once is enough");
    assert!(!restored.device.save().transport_reset);
    // The old connection is unknown, a new one gets a port that the old ones did not have.
    restored.send(
        Header {
            op: op::CREDIT_UPDATE,
            ..header
        },
        &[],
    );
    restored.expect(op::RST);
    let (_client, new) = restored.connected(1 << 18);
    assert!(new.dst_port > header.dst_port);
    assert_eq!(restored.device.queue_states().len(), 3);
}

#[test]
fn a_device_saved_without_its_driver_has_nothing_to_tell() {
    let dir = tempfile::tempdir().unwrap();
    let state = Vsock::new(&config(&dir)).unwrap().save();
    assert_eq!(state.active, None);
    let device = Vsock::restore(&config(&dir), &state).unwrap();
    assert!(!device.save().transport_reset);
}
