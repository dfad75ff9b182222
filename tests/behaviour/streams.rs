//! FIFOs whose client is slow, goes away, or never comes, and sandboxes that outlive their first container: what no client of
//! containerd's does on purpose. So the shim is spoken to without one.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cube_tests::*;

/// A sandbox whose container runs a shell script, and a directory for what belongs to it.
struct Host {
    dir: TestDir,
    id: String,
    bundle: PathBuf,
}

impl Host {
    fn new(script: &str) -> Self {
        let dir = TestDir::new();
        let id = unique("s");
        let bundle = shell_bundle(&dir, &id, &id, script);
        Self { dir, id, bundle }
    }

    /// A FIFO, by its path.
    fn fifo(&self, name: &str) -> String {
        make_fifo(&self.dir, name)
    }

    /// A file at the top of the container's root file system, empty.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.bundle.join("rootfs").join(name);
        fs::write(&path, "").unwrap();
        path
    }

    fn launch(&self, streams: &Streams) -> (Sandbox, u32) {
        let sandbox = Sandbox::start(&self.bundle, &self.id).unwrap();
        let pid = sandbox.launch(&self.bundle, &self.id, streams).unwrap();
        (sandbox, pid)
    }
}

#[test]
fn outputs_that_nobody_ever_opens_hold_up_their_writers_but_not_the_containers_end() {
    // Each writes until it is held up, and the host sees how much.
    let script = "yes() { n=0; while :; do printf %01024d $n; n=$((n + 1)); echo $n >>/$1; done; }; \
        yes out & yes err >&2 & wait";
    let host = Host::new(script);
    let (out, err) = (host.file("out"), host.file("err"));
    let streams = Streams {
        stdout: host.fifo("stdout"),
        stderr: host.fifo("stderr"),
        ..Streams::default()
    };
    let (sandbox, _) = host.launch(&streams);
    // A pipe of the guest's holds 64 KiB and the FIFO as much.
    for file in [&out, &err] {
        Follower::of(file).wait_for("128");
    }
    sandbox.kill(&host.id).unwrap();
    assert_eq!(sandbox.wait(&host.id, "").unwrap(), 137);
    let clock = Instant::now();
    sandbox.delete(&host.id, "").unwrap();
    let took = clock.elapsed();
    // It waits for a client for two seconds, for both outputs at once; containerd does for ten.
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(took < Duration::from_secs(8), "{took:?}");
    for file in [&out, &err] {
        let kib = fs::read_to_string(file).unwrap().lines().count();
        assert!(kib < 1024, "{kib} KiB were taken of {}", file.display());
    }
    sandbox.shut_down().unwrap();
    assert_no_traces_of(&host.id);
}

/// A line of what the next container writes, in bytes, and how many there are.
const LINE: usize = 1024;
const LINES: usize = 8192;

/// Takes the next line, which is to be the one with this number.
fn take(reader: &mut File, n: usize) {
    let mut line = [0; LINE];
    reader.read_exact(&mut line).unwrap();
    let wanted = format!("{n:0width$}\n", width = LINE - 1);
    assert_eq!(String::from_utf8_lossy(&line), wanted);
}

/// How many KiB a file of the container's says that it has written.
fn written(file: &Path) -> usize {
    let text = fs::read_to_string(file).unwrap();
    text.lines().last().map_or(0, |last| last.parse().unwrap())
}

#[test]
fn a_slow_reader_gets_all_in_order_and_holds_its_writer_up_and_no_other() {
    let script = format!(
        "say() {{ awk -v to=/$1 'BEGIN {{ for (n = 0; n < {LINES}; n++) {{ printf \"%0{width}d\\n\", n; \
            if (n % 16 == 0) {{ print n >>to; close(to) }} }} }}'; }}; say slow & say fast >&2 & \
         while read word; do grep MemAvailable: /proc/meminfo >>/memory; done; wait",
        width = LINE - 1
    );
    let host = Host::new(&script);
    let (said, memory_file) = (host.file("slow"), host.file("memory"));
    let streams = Streams {
        stdin: host.fifo("stdin"),
        stdout: host.fifo("stdout"),
        stderr: host.fifo("stderr"),
        ..Streams::default()
    };
    let (sandbox, _) = host.launch(&streams);
    let shim = sandbox.pid().unwrap();
    let mut slow = File::open(&streams.stdout).unwrap();
    let mut fast = File::open(&streams.stderr).unwrap();
    let mut asking = File::options().write(true).open(&streams.stdin).unwrap();
    let mut answers = Follower::of(&memory_file);
    // What the shim has, and what the guest has left, in KiB. What the hypervisor has says nothing of it: by and by a
    // guest's kernel touches all of its memory, however little it needs at a time.
    let mut memory = || -> (u64, u64) {
        writeln!(asking, "how much?").unwrap();
        (kib_of(shim), kib_in(&answers.next_line()))
    };

    // Both have begun, and this one's reader takes nothing while the other one's gets all.
    Follower::of(&said).wait_for("64");
    (0..LINES).for_each(|n| take(&mut fast, n));
    let mut lead = written(&said);
    let before = memory();
    let mut after = before;
    for n in 0..LINES {
        take(&mut slow, n);
        if n % 64 == 0 {
            lead = lead.max(written(&said).saturating_sub(n));
        }
        // The writer is there yet.
        if n == LINES - 1024 {
            after = memory();
        }
    }
    let shim_growth = after.0.saturating_sub(before.0);
    let guest_growth = before.1.saturating_sub(after.1);
    // Past the test harness, which keeps what a test prints to itself.
    let _ = writeln!(
        std::io::stderr(),
        "streams: a writer leads by {lead} KiB; while 7 MiB come the shim grows by {shim_growth} KiB, \
         the guest needs {guest_growth} KiB more"
    );
    assert!(lead < 1024, "the writer was {lead} KiB ahead");
    assert!(shim_growth < 1024, "the shim: {shim_growth} KiB");
    assert!(guest_growth < 2048, "the guest: {guest_growth} KiB");
    sandbox.close_input(&host.id).unwrap();
    drop((asking, answers));
    assert_eq!(sandbox.end(&host.id, "").unwrap(), 0);
    assert_eq!(slow.read(&mut [0]).unwrap(), 0, "there is more");
    sandbox.shut_down().unwrap();
    assert_no_traces_of(&host.id);
}

/// What a process has in memory, in KiB.
fn kib_of(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    kib_in(status.lines().find(|l| l.starts_with("VmRSS:")).unwrap())
}

/// The figure of a line `NAME: FIGURE kB`.
fn kib_in(line: &str) -> u64 {
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_reader_that_closes_its_end_and_opens_it_again_gets_what_came_meanwhile_and_comes_after() {
    let script = "while read word; do echo \"heard $word\"; echo $word >>/said; done; exit 4";
    let host = Host::new(script);
    let said = host.file("said");
    let streams = Streams {
        stdin: host.fifo("stdin"),
        stdout: host.fifo("stdout"),
        ..Streams::default()
    };
    let (sandbox, _) = host.launch(&streams);
    let mut said = Follower::of(&said);
    let mut writer = File::options().write(true).open(&streams.stdin).unwrap();
    let mut say = |word: &str| writeln!(writer, "{word}").unwrap();
    let hear = |reader: &mut File, word: &str| {
        let wanted = format!("heard {word}\n");
        let mut heard = vec![0; wanted.len()];
        reader.read_exact(&mut heard).unwrap();
        assert_eq!(String::from_utf8_lossy(&heard), wanted);
    };
    for round in 0..3 {
        let mut reader = File::open(&streams.stdout).unwrap();
        if round > 0 {
            hear(&mut reader, "nobody");
        }
        say("somebody");
        hear(&mut reader, "somebody");
        drop(reader);
        // It has written, without a signal or an error, when it tells of it.
        say("nobody");
        said.wait_for("nobody");
    }
    // A client that goes away does not end the input either.
    drop(writer);
    writer = File::options().write(true).open(&streams.stdin).unwrap();
    writeln!(writer, "last").unwrap();
    said.wait_for("last");
    // As with runc's shim, what is in a FIFO that nobody has open is lost with the process.
    let mut reader = File::open(&streams.stdout).unwrap();
    sandbox.close_input(&host.id).unwrap();
    drop((writer, said));
    assert_eq!(sandbox.end(&host.id, "").unwrap(), 4);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "heard nobody\nheard last\n");
    sandbox.shut_down().unwrap();
    assert_no_traces_of(&host.id);
}

#[test]
fn a_sandbox_whose_last_container_was_deleted_runs_another_one() {
    let host = Host::new("echo first >/mine; exec sleep 1000");
    let mine = host.file("mine");
    let (sandbox, first_machine) = host.launch(&Streams::default());
    Follower::of(&mine).wait_for("first");
    let shim = sandbox.pid().unwrap();
    let end = End::of(first_machine).unwrap();
    sandbox.kill(&host.id).unwrap();
    assert_eq!(sandbox.end(&host.id, "").unwrap(), 137);
    assert!(
        end.comes_within(Duration::from_secs(10)),
        "the machine runs on without a container"
    );

    // The same name again, and then another one, in the same shim.
    let other = unique("s");
    let other_bundle = shell_bundle(&host.dir, &other, &host.id, "exit 3");
    for (id, bundle, status) in [
        (&host.id, host.bundle.as_path(), 137),
        (&other, other_bundle.as_path(), 3),
    ] {
        let machine = sandbox.launch(bundle, id, &Streams::default()).unwrap();
        assert_ne!(machine, first_machine);
        assert_eq!(sandbox.pid().unwrap(), shim);
        if status == 137 {
            sandbox.kill(id).unwrap();
        }
        assert_eq!(sandbox.end(id, "").unwrap(), status);
        assert_no_traces_of_container(id, bundle);
    }
    sandbox.shut_down().unwrap();
    for id in [&host.id, &other] {
        assert_no_traces_of(id);
    }
}

/// The shim has the first container's name, so what is left of that one is what its bundle shows: mounts.
fn assert_no_traces_of_container(id: &str, bundle: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let bundle = bundle.display().to_string();
    let left: Vec<_> = mounts.lines().filter(|l| l.contains(&bundle)).collect();
    assert!(left.is_empty(), "mounts of {id}: {left:#?}");
}
