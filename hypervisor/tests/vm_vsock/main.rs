//! The vsock device with a real guest. This program is both: the test on the host, and `/init` of
//! the guest.
//!
//! Needs KVM: runs only with `CUBE_TEST_KVM=1`, and boots the kernel that `CUBE_KERNEL` names on
//! the hypervisor that `CUBE_HYPERVISOR` names, or the one built with it. `--measure` tells what
//! things cost instead.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod guest;
mod pattern;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use std::{env, fs, thread};

use guest::*;
use pattern::Pattern;

type Case = (&'static str, fn(&mut Vm));

const CASES: [Case; 9] = [
    (
        "a_service_that_is_missing_is_refused",
        a_service_that_is_missing_is_refused,
    ),
    (
        "a_port_without_a_listener_is_refused",
        a_port_without_a_listener_is_refused,
    ),
    ("64_mib_go_both_ways_at_once", bulk_goes_both_ways_at_once),
    (
        "500_connections_at_once_work",
        hundreds_of_connections_at_once_work,
    ),
    ("the_client_may_end_first", the_client_may_end_first),
    ("the_guest_may_end_first", the_guest_may_end_first),
    (
        "the_last_words_of_a_killed_process_arrive",
        last_words_arrive,
    ),
    (
        "a_guest_that_reads_late_gets_everything",
        a_slow_guest_gets_everything,
    ),
    (
        "the_socket_goes_with_the_machine",
        the_socket_goes_with_the_machine,
    ),
];

/// What is asked for, in the words of the usual test programs; and `--measure`.
#[derive(Default)]
struct Arguments {
    list: bool,
    measure: bool,
    filter: Option<String>,
}

fn main() {
    if std::process::id() == 1 {
        guest::main();
    }
    let arguments = arguments();
    let wanted = |name: &str| {
        arguments
            .filter
            .as_ref()
            .is_none_or(|part| name.contains(part))
    };
    let cases = CASES.into_iter().filter(|(name, _)| wanted(name));
    if arguments.list {
        cases.for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    if env::var_os("CUBE_TEST_KVM").is_none() {
        println!("vm_vsock: not run, it needs CUBE_TEST_KVM=1 and CUBE_KERNEL");
        return;
    }
    let kernel = env::var_os("CUBE_KERNEL").expect("CUBE_KERNEL names the guest kernel");
    if arguments.measure {
        let mut started = None;
        report("a start to the first line", 1, || {
            started = Some(Vm::start(Path::new(&kernel)));
        });
        measure(&mut started.expect("the report runs it"));
        return;
    }
    let mut vm = Vm::start(Path::new(&kernel));
    for (name, case) in cases {
        println!("test {name} ...");
        case(&mut vm);
        println!("test {name} ... ok");
    }
}

fn arguments() -> Arguments {
    let mut arguments = Arguments::default();
    let mut given = env::args().skip(1);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--list" => arguments.list = true,
            "--measure" => arguments.measure = true,
            // One machine serves all cases, one after the other.
            "--test-threads" => drop(given.next()),
            option if option.starts_with('-') => {}
            name => arguments.filter = Some(name.to_owned()),
        }
    }
    arguments
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

fn last_words_arrive(vm: &mut Vm) {
    for _ in 0..5 {
        let mut client = vm.connect(PORT_DYING);
        assert_eq!(Pattern::new(5).check(&mut client).unwrap(), LAST_WORDS);
        assert_eq!(vm.line(), format!("dying: signal {}", libc::SIGKILL));
    }
}

fn a_slow_guest_gets_everything(vm: &mut Vm) {
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
    assert_eq!(vm.child.wait().unwrap().code(), Some(0));
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

fn report(name: &str, count: u64, run: impl FnOnce()) {
    let before = exits();
    let start = Instant::now();
    run();
    let nanoseconds = start.elapsed().as_nanos() as u64 / count;
    print!("{name:34} {nanoseconds:>10} ns");
    for ((name, before), (_, after)) in before.into_iter().zip(exits()) {
        print!(", {name} {:.1}", (after - before) as f64 / count as f64);
    }
    println!();
}

fn exits() -> Vec<(&'static str, u64)> {
    ["exits", "mmio_exits", "halt_exits", "irq_injections"]
        .into_iter()
        .filter_map(|name| {
            let text = fs::read_to_string(format!("/sys/kernel/debug/kvm/{name}")).ok()?;
            Some((name, text.trim().parse().ok()?))
        })
        .collect()
}

/// The machine and its lines.
struct Vm {
    dir: tempfile::TempDir,
    child: Child,
    ready: String,
    lines: BufReader<UnixStream>,
}

impl Vm {
    fn start(kernel: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let initramfs = dir.path().join("initramfs");
        write_initramfs(&initramfs);
        let vsock = dir.path().join("v");
        let config = serde_json::json!({
            "kernel": kernel,
            "initramfs": initramfs,
            "cmdline": "quiet panic=-1 reboot=k",
            "vcpus": 1,
            "memory_mib": 256,
            "vsock": { "path": vsock },
            "console": "log",
        });
        let file = dir.path().join("vm.json");
        fs::write(&file, config.to_string()).unwrap();
        let service = UnixListener::bind(dir.path().join(format!("v_{HOST_LINES}"))).unwrap();
        let built = env!("CARGO_BIN_EXE_cube-hypervisor").into();
        let program = env::var_os("CUBE_HYPERVISOR").unwrap_or(built);
        let child = Command::new(program)
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let lines = accept_unless_it_ends(&service, child.id());
        let mut vm = Self {
            dir,
            child,
            ready: String::new(),
            lines: BufReader::new(lines),
        };
        vm.ready = vm.line();
        vm
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("v")
    }

    /// What the guest reports next.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
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

impl Drop for Vm {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
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

fn accept_unless_it_ends(service: &UnixListener, child: u32) -> UnixStream {
    use std::os::fd::AsRawFd;
    // SAFETY: no pointers are passed.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) } as i32;
    let watch = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [watch(service.as_raw_fd()), watch(pidfd)];
    // SAFETY: the array has two elements.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
    assert!(
        ready > 0 && fds[1].revents == 0,
        "the machine ended before its guest was there"
    );
    // SAFETY: the descriptor is ours alone.
    unsafe { libc::close(pidfd) };
    service.accept().unwrap().0
}

/// This program as `/init`, in a newc archive (Linux, `Documentation/driver-api/early-userspace/buffer-format.rst`).
fn write_initramfs(path: &Path) {
    let program = fs::read(env::current_exe().unwrap()).unwrap();
    let mut file = File::create(path).unwrap();
    for (name, mode, data) in [("init", 0o100_755, &program[..]), ("TRAILER!!!", 0, &[])] {
        let fields = [
            1,
            mode,
            0,
            0,
            1,
            0,
            data.len(),
            0,
            0,
            0,
            0,
            name.len() + 1,
            0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        let name_end = (header.len() + name.len() + 1).next_multiple_of(4);
        let mut entry = [header.as_bytes(), name.as_bytes()].concat();
        entry.resize(name_end, 0);
        entry.extend_from_slice(data);
        entry.resize(entry.len().next_multiple_of(4), 0);
        file.write_all(&entry).unwrap();
    }
}
