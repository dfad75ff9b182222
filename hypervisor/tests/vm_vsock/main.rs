//! The vsock device with a real guest. This program is both: the test on the host, and `/init` of
//! the guest.
//!
//! Needs KVM: runs only with `CUBE_TEST_KVM=1`, and boots the kernel that `CUBE_KERNEL` names on
//! the hypervisor that `CUBE_HYPERVISOR` names, or the one built with it. `--measure` tells what
//! things cost instead.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod guest;
mod pattern;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::{fs, thread};

use serde_json::json;

use common::twin::{self, Twin};
use common::{Arguments, Case, has_kvm, report, run_cases};
use guest::*;
use pattern::Pattern;

const CASES: &[Case<Vm>] = cases![
    a_service_that_is_missing_is_refused,
    a_port_without_a_listener_is_refused,
    bulk_goes_both_ways_at_once,
    hundreds_of_connections_at_once_work,
    the_client_may_end_first,
    the_guest_may_end_first,
    the_last_words_of_a_killed_process_arrive,
    a_guest_that_reads_late_gets_everything,
    the_socket_goes_with_the_machine,
];

fn main() {
    if std::process::id() == 1 {
        twin::guest(guest::serve);
    }
    let arguments = Arguments::read(&[]);
    if arguments.list {
        let names = CASES.iter().map(|(name, _)| name);
        return names.for_each(|name| println!("{name}: test"));
    }
    if !has_kvm("vm_vsock") {
        return;
    }
    if arguments.has("--measure") {
        let mut started = None;
        report("a start to the first line", 1, || {
            started = Some(Vm::start());
        });
        measure(&mut started.expect("the report runs it"));
        return;
    }
    run_cases(CASES, &arguments, &mut Vm::start());
}

fn a_service_that_is_missing_is_refused(vm: &mut Vm) {
    let expected = format!("ready; nobody: {:?}", Some(libc::ECONNRESET));
    assert_eq!(vm.ready, expected);
}

fn a_port_without_a_listener_is_refused(vm: &mut Vm) {
    let mut client = vm.dial(PORT_NOBODY);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"");
}

fn bulk_goes_both_ways_at_once(vm: &mut Vm) {
    let client = vm.connect(PORT_BULK);
    let mut writer = client.try_clone().unwrap();
    let sender = thread::spawn(move || {
        Pattern::new(2).write(&mut writer, BULK).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    assert_eq!(Pattern::new(1).check(&mut &client).unwrap(), BULK);
    sender.join().unwrap();
    assert_eq!(vm.line(), format!("bulk: sent Ok(()), received Ok({BULK})"));
}

fn hundreds_of_connections_at_once_work(vm: &mut Vm) {
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| vm.dial(PORT_ECHO)).collect();
    for client in &mut clients {
        read_ok(client);
    }
    for round in 0..3 {
        for (number, client) in clients.iter_mut().enumerate() {
            write!(client, "{number:05} {round}").unwrap();
        }
        for (number, client) in clients.iter_mut().enumerate() {
            let mut got = [0; 7];
            client.read_exact(&mut got).unwrap();
            assert_eq!(got, format!("{number:05} {round}").as_bytes());
        }
    }
    for client in &mut clients {
        client.shutdown(Shutdown::Write).unwrap();
    }
    for client in &mut clients {
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
}

fn the_client_may_end_first(vm: &mut Vm) {
    let mut client = vm.connect(PORT_COUNT);
    Pattern::new(3).write(&mut client, 1_000_000).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "Ok(1000000)");
    assert_eq!(vm.line(), "count: Ok(1000000)");
    // Closing at once, with everything under way.
    let mut client = vm.connect(PORT_COUNT);
    Pattern::new(3).write(&mut client, 500_000).unwrap();
    drop(client);
    assert_eq!(vm.line(), "count: Ok(500000)");
}

fn the_guest_may_end_first(vm: &mut Vm) {
    let mut client = vm.connect(PORT_MUTE);
    let mut words = String::new();
    client.read_to_string(&mut words).unwrap();
    assert_eq!(words, "the end");
    Pattern::new(4).write(&mut client, 1_000_000).unwrap();
    drop(client);
    assert_eq!(vm.line(), "mute: Ok(1000000)");
}

fn the_last_words_of_a_killed_process_arrive(vm: &mut Vm) {
    for _ in 0..5 {
        let mut client = vm.connect(PORT_DYING);
        assert_eq!(Pattern::new(5).check(&mut client).unwrap(), LAST_WORDS);
        assert_eq!(vm.line(), format!("dying: signal {}", libc::SIGKILL));
    }
}

fn a_guest_that_reads_late_gets_everything(vm: &mut Vm) {
    let mut client = vm.connect(PORT_SLOW);
    let mut writer = client.try_clone().unwrap();
    let sender = thread::spawn(move || {
        Pattern::new(6).write(&mut writer, LAST_WORDS).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    // The guest's buffer fills up, and ours does not exist; another connection is not held up by that.
    let mut other = vm.connect(PORT_ECHO);
    other.write_all(b"hello").unwrap();
    let mut got = [0; 5];
    other.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    vm.connect(PORT_SLOW);
    sender.join().unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert_eq!(vm.line(), format!("slow: Ok({LAST_WORDS})"));
}

fn the_socket_goes_with_the_machine(vm: &mut Vm) {
    let path = vm.path();
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let _client = vm.dial(PORT_END);
    assert_eq!(vm.twin.child.wait().unwrap().code(), Some(0));
    assert!(!path.exists());
}

/// What things cost, on a clock that may count instructions; and KVM's exits, where debugfs tells.
fn measure(vm: &mut Vm) {
    const MIB: u64 = BULK >> 20;
    report("a MiB to the guest", MIB, || {
        let mut client = vm.connect(PORT_SINK);
        let buffer = vec![0; 64 * 1024];
        for _ in 0..BULK / buffer.len() as u64 {
            client.write_all(&buffer).unwrap();
        }
        drop(client);
        assert_eq!(vm.line(), format!("sink: {BULK}"));
    });
    report("a MiB from the guest", MIB, || {
        let mut client = vm.connect(PORT_SOURCE);
        let mut buffer = vec![0; 64 * 1024];
        while client.read(&mut buffer).unwrap() > 0 {}
        assert_eq!(vm.line(), format!("source: {BULK}"));
    });
    let mut echo = vm.connect(PORT_ECHO);
    for size in [1, 4096] {
        let data = vec![0; size];
        let mut got = vec![0; size];
        report(&format!("{size} bytes there and back"), 500, || {
            for _ in 0..500 {
                echo.write_all(&data).unwrap();
                echo.read_exact(&mut got).unwrap();
            }
        });
    }
    report("a connection, opened and closed", 200, || {
        for _ in 0..200 {
            let client = vm.connect(PORT_ECHO);
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!((&client).read(&mut [0]).unwrap(), 0);
        }
    });
}

/// The machine.
struct Vm {
    twin: Twin,
    ready: String,
}

impl Vm {
    fn start() -> Self {
        let mut twin = Twin::start(tempfile::tempdir().unwrap(), json!({}));
        let ready = twin.line();
        Self { twin, ready }
    }

    fn path(&self) -> PathBuf {
        self.twin.socket()
    }

    /// What the guest reports next.
    fn line(&mut self) -> String {
        self.twin.line()
    }

    /// A client that has asked for `port`.
    fn dial(&self, port: u32) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        writeln!(client, "CONNECT {port}").unwrap();
        client
    }

    /// A client that is connected to `port`.
    fn connect(&self, port: u32) -> UnixStream {
        let mut client = self.dial(port);
        read_ok(&mut client);
        client
    }
}

fn read_ok(client: &mut UnixStream) {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let line = String::from_utf8(line).unwrap();
    let port = line
        .strip_prefix("OK ")
        .and_then(|port| port.trim_end().parse::<u32>().ok());
    assert!(port.is_some(), "{line}");
}
