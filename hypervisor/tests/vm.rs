//! Machines that run, with kernels of a few instructions. They need KVM.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod common;

use std::os::fd::{AsFd, BorrowedFd};

use cube_hypervisor_api::ExitStatus::{BadConfiguration, GuestCrash, GuestPanic, GuestReset};
use cube_hypervisor_api::control::{Reply, Request};
use serde_json::json;

use common::*;

#[test]
fn a_reset_is_the_normal_end() {
    let files = Files::new();
    files.run(&files.config(code::RESET, json!({}))).resets();
}

#[test]
fn what_the_guest_writes_early_is_on_stdout() {
    let files = Files::new();
    let code = [&code::print("hello\n"), code::RESET].concat();
    let ended = files.run(&files.config(&code, json!({"console": "stdio"})));
    ended.resets();
    assert_eq!(ended.stdout, "hello\n");
}

#[test]
fn a_panic_is_told_from_a_reset_and_named() {
    let files = Files::new();
    let text = "[    0.1] Kernel panic - not syncing: no root\n";
    let code = [&code::print(text), code::RESET].concat();
    files
        .run(&files.config(&code, json!({})))
        .fails(GuestPanic, &["panicked: no root"]);
}

#[test]
fn a_triple_fault_is_a_crash() {
    let files = Files::new();
    files
        .run(&files.config(code::TRIPLE_FAULT, json!({})))
        .fails(GuestCrash, &["triple fault"]);
}

#[test]
fn every_vcpu_that_kvm_takes_can_be_had() {
    let files = Files::new();
    files
        .run(&files.config(code::RESET, json!({"vcpus": 64})))
        .resets();
}

#[test]
fn exits_are_counted_by_kind() {
    let files = Files::new();
    let code = [&code::print("123"), code::RESET].concat();
    let path = files.put(
        "vm.json",
        files.config(&code, json!({})).to_string().as_bytes(),
    );
    let output = hypervisor()
        .arg("--exit-counts")
        .arg("--config")
        .arg(path)
        .output()
        .unwrap();
    let table = Ended::from(output).stderr;
    for line in ["serial 3", "keyboard 1", "total 4", "kvm_exits "] {
        assert!(table.lines().any(|l| l.starts_with(line)), "{table}");
    }
}

#[test]
fn a_signal_ends_the_machine_and_removes_its_socket() {
    let files = Files::new();
    let code = [&code::print("up\n"), code::SPIN].concat();
    let config = files.config(
        &code,
        json!({"console": "stdio", "vsock": {"path": "socket"}}),
    );
    let mut machine = files.start(&config);
    machine.read_until("up");
    assert!(files.dir().join("socket").exists());
    // SAFETY: The process is a child that has not been waited for.
    unsafe { libc::kill(machine.0.id() as i32, libc::SIGTERM) };
    machine.wait().resets();
    assert!(!files.dir().join("socket").exists());
}

#[test]
fn an_owner_reads_the_console_and_stops_the_machine() {
    let files = Files::new();
    let code = [&code::print("up\n"), code::SPIN].concat();
    let mut machine = Owned::boot(files.config(&code, json!({"console": "stdio"})));
    machine.read_until("up\n");
    let told = machine.ask(&Request::Console, &[]);
    assert_eq!(told, Reply::Console("up\n".into()));
    machine.done(&Request::Stop, &[]);
    let (status, message, console) = machine.end();
    assert_eq!(status, GuestReset);
    assert_eq!(message, "Stopped by the owner");
    assert_eq!(console, "up\n");
}

#[test]
fn a_machine_ends_with_its_owner() {
    let files = Files::new();
    let mut machine = Owned::boot(files.config(
        code::SPIN,
        json!({"vsock": {"path": files.dir().join("socket")}}),
    ));
    assert!(files.dir().join("socket").exists());
    machine.socket = None;
    assert_eq!(machine.child.wait().unwrap().code(), Some(0));
    assert!(!files.dir().join("socket").exists());
}

#[test]
fn an_owner_that_is_gone_before_it_said_anything_is_enough() {
    let mut machine = Owned::start();
    machine.socket = None;
    assert_eq!(machine.child.wait().unwrap().code(), Some(1));
}

#[test]
fn an_nmi_reaches_a_guest_that_hangs() {
    let files = Files::new();
    // Without an interrupt table the NMI ends in a triple fault.
    let machine = Owned::boot(files.config(code::SPIN, json!({})));
    machine.done(&Request::InjectNmi, &[]);
    let (status, message, _) = machine.end();
    assert_eq!(status, GuestCrash, "{message}");
}

#[test]
fn what_cannot_be_built_is_told_to_the_owner() {
    let machine = Owned::start();
    let config = serde_json::from_value(json!({"kernel": "/no/such"})).unwrap();
    let Reply::Failed(reason) = machine.ask(&Request::Boot(Box::new(config)), &[]) else {
        panic!("it runs");
    };
    assert!(reason.contains("/no/such"), "{reason}");
    let (status, message, _) = machine.end();
    assert_eq!((status, message), (BadConfiguration, reason));
}

#[test]
fn the_first_request_has_to_be_boot() {
    let machine = Owned::start();
    let reply = machine.ask(&Request::Stop, &[]);
    assert!(matches!(reply, Reply::Failed(_)), "{reply:?}");
    assert_eq!(machine.end().0, BadConfiguration);
}

#[test]
fn requests_that_cannot_be_carried_out_say_why() {
    let files = Files::new();
    let file = std::fs::File::open(files.put("disk", &[0; 512])).unwrap();
    let disk = file.as_fd();
    let machine = Owned::boot(files.config(code::SPIN, json!({"spare_disks": 1})));
    let attach = |slot, read_only, fds: &[BorrowedFd<'_>]| {
        let request = Request::AttachDisk {
            slot,
            read_only,
            serial: String::new(),
        };
        machine.ask(&request, fds)
    };
    for (slot, read_only, fds) in [
        (1, true, vec![disk]),
        (0, true, vec![]),
        (0, false, vec![disk]),
    ] {
        let reply = attach(slot, read_only, &fds);
        assert!(
            matches!(reply, Reply::Failed(_)),
            "{slot} {read_only}: {reply:?}"
        );
    }
    assert_eq!(attach(0, true, &[disk]), Reply::Done);
    assert!(matches!(attach(0, true, &[disk]), Reply::Failed(_)));
    let again = serde_json::from_value(json!({"kernel": "/no/such"})).unwrap();
    let reply = machine.ask(&Request::Boot(Box::new(again)), &[]);
    assert_eq!(reply, Reply::Failed("The machine runs already".into()));
    machine.done(&Request::Stop, &[]);
    assert_eq!(machine.end().0, GuestReset);
}
