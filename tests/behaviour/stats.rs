//! The figures of `ctr task metrics` are those of a known load, and the same as with runc.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use cube_tests::*;
use serde_json::Value;

/// The runtime to compare with.
const PEER: &str = "io.containerd.runc.v2";

const MIB: u64 = 1 << 20;

/// The kernel tells a process's processor time in hundredths of a second.
const TICK: u64 = 10_000;

/// A container that has done its work and keeps what it holds, with its client.
struct Loaded {
    running: Running,
    client: Child,
    /// The processor time of its processes by then, in microseconds, as the kernel counts it for each.
    used: u64,
}

impl Loaded {
    /// Runs a script until it says that it is ready.
    fn with(container: &Container, script: &str) -> Self {
        let mut command = container.command(&[], &["sh", "-c", script]);
        let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
        let running = Running {
            id: container.id.clone(),
        };
        let mut line = String::new();
        let stdout = client.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let ticks = line
            .strip_prefix("ready ")
            .map(str::trim)
            .map(str::parse::<u64>);
        let Some(Ok(ticks)) = ticks else {
            panic!("the container says {line:?}");
        };
        let used = TICK * ticks;
        Self {
            running,
            client,
            used,
        }
    }

    /// All its figures by now.
    fn figures(&self) -> Figures {
        let text = self.running.task("metrics", &["--format", "json"]);
        let text = text.success();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let mut figures = Figures(BTreeMap::new());
        figures.add("", &value);
        if !is_unified() {
            figures.rename();
        }
        figures
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        try_ctr(&["task", "kill", "--signal", "SIGKILL", &self.running.id]);
        let _ = self.client.wait();
    }
}

/// Figures by their names, for instance `memory.anon`; those of a list by its first one's.
#[derive(Debug)]
struct Figures(BTreeMap<String, f64>);

/// What cgroup v1 calls figures, v2's name, and how many of v1's units one of v2's is.
const OF_V1: [(&str, &str, f64); 14] = [
    ("cpu.throttling.periods", "cpu.nr_periods", 1.0),
    ("cpu.throttling.throttled_periods", "cpu.nr_throttled", 1.0),
    ("cpu.throttling.throttled_time", "cpu.throttled_usec", 1e3),
    ("cpu.usage.kernel", "cpu.system_usec", 1e3),
    ("cpu.usage.total", "cpu.usage_usec", 1e3),
    ("cpu.usage.user", "cpu.user_usec", 1e3),
    ("memory.cache", "memory.file", 1.0),
    ("memory.rss", "memory.anon", 1.0),
    ("memory.usage.failcnt", "memory_events.max", 1.0),
    ("memory.usage.limit", "memory.usage_limit", 1.0),
    ("memory.usage.max", "memory.max_usage", 1.0),
    ("memory.usage.usage", "memory.usage", 1.0),
    ("memory.swap.limit", "memory.swap_limit", 1.0),
    ("memory_oom_control.oom_kill", "memory_events.oom_kill", 1.0),
];

/// Whether the host has cgroup v2.
fn is_unified() -> bool {
    fs::exists("/sys/fs/cgroup/cgroup.controllers").unwrap()
}

impl Figures {
    fn add(&mut self, name: &str, value: &Value) {
        let below = |key: &str| match name {
            "" => key.to_owned(),
            name => format!("{name}.{key}"),
        };
        match value {
            Value::Object(fields) => fields.iter().for_each(|(k, v)| self.add(&below(k), v)),
            Value::Array(list) => {
                for (n, entry) in list.iter().enumerate() {
                    self.add(&below(&n.to_string()), entry);
                }
            }
            Value::Number(number) => {
                self.0.insert(name.to_owned(), number.as_f64().unwrap());
            }
            _ => {}
        }
    }

    /// Gives those of cgroup v1 the names that they have in v2, and v2's units.
    fn rename(&mut self) {
        for (old, new, unit) in OF_V1 {
            if let Some(value) = self.0.remove(old) {
                self.0.insert(new.to_owned(), value / unit);
            }
        }
    }

    /// One that is 0 is not written.
    fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default() as u64
    }

    fn is_within(&self, name: &str, from: u64, to: u64) {
        let value = self.of(name);
        assert!(
            (from..=to).contains(&value),
            "{name} is {value}, not within {from} and {to}: {self:#?}"
        );
    }
}

/// Says that all is done, and how much processor time all processes have taken, and those that they waited for.
const READY: &str =
    "echo ready $(cat /proc/[0-9]*/stat | awk '{ s += $14 + $15 + $16 + $17 } END { print s }')";

/// Two seconds of processor time and more, five processes that sleep, 2 MiB in shared memory and 16 MiB of a program's
/// own. The last program of the pipe gets its first byte when the first has filled its buffer.
const LOAD: &str = "\
    while read -r stat </proc/self/stat; set -- $stat; [ $((${14} + ${15})) -lt 200 ]; do :; done
    head -c 2097152 /dev/zero >/dev/shm/held
    for n in 1 2 3 4 5; do sleep 1000 & done
    dd if=/dev/zero bs=16M count=1 2>/dev/null | { dd bs=1 count=1 of=/dev/null 2>/dev/null; READY; exec sleep 1000; }";

/// What there may be of by chance, or not: how pages came and went, and what the kernel itself needs for it.
const BY_CHANCE: [&str; 25] = [
    "memory.active_anon",
    "memory.active_file",
    "memory.anon_thp",
    "memory.file_dirty",
    "memory.file_mapped",
    "memory.file_writeback",
    "memory.inactive_file",
    "memory.kernel_stack",
    "memory.pgactivate",
    "memory.pgdeactivate",
    "memory.pglazyfree",
    "memory.pglazyfreed",
    "memory.pgmajfault",
    "memory.pgrefill",
    "memory.pgscan",
    "memory.pgsteal",
    "memory.rss_huge",
    "memory.slab_reclaimable",
    "memory.swap_usage",
    "memory.thp_collapse_alloc",
    "memory.thp_fault_alloc",
    "memory.workingset_activate",
    "memory.workingset_nodereclaim",
    "memory.workingset_refault",
    "memory.unevictable",
];

#[test]
fn the_figures_of_a_known_load_are_true_and_none_is_missing_that_runc_has() {
    const LIMIT: u64 = 40 * MIB;
    let of = |runtime: &str| {
        let container = Container::new()
            .runtime(runtime)
            .option("--cpus", "0.5")
            .option("--memory-limit", &LIMIT.to_string());
        Loaded::with(&container, &LOAD.replace("READY", READY))
    };
    let (cube, peer) = (of(&runtime()), of(PEER));
    let (cube_figures, peer_figures) = (cube.figures(), peer.figures());
    for (loaded, figures) in [(&cube, &cube_figures), (&peer, &peer_figures)] {
        figures.is_within("pids.current", 8, 8);
        // Where there is no limit, v1 has a 0, which is not written.
        let no_limit = is_unified().then_some(u64::MAX as f64);
        assert_eq!(figures.0.get("pids.limit").copied(), no_limit);
        // Each process's time is rounded down; counting it takes some too.
        let used = loaded.used;
        figures.is_within(
            "cpu.usage_usec",
            used - 10 * TICK,
            used + used / 2 + 2_000_000,
        );
        assert!(used >= 2_000_000);
        // v1 counts the parts by the clock's ticks, the whole exactly.
        let parts = figures.of("cpu.user_usec") + figures.of("cpu.system_usec");
        let error = if is_unified() { 1000 } else { used / 4 };
        figures.is_within("cpu.usage_usec", parts.saturating_sub(error), parts + error);
        // Two seconds at half a processor: forty periods of a tenth of a second, nearly all of them cut short.
        figures.is_within("cpu.nr_periods", 35, u64::MAX);
        figures.is_within("cpu.nr_throttled", 20, figures.of("cpu.nr_periods"));
        figures.is_within("cpu.throttled_usec", 1_000_000, u64::MAX);
        figures.is_within("memory.anon", 16 * MIB, 20 * MIB);
        if is_unified() {
            figures.is_within("memory.shmem", 2 * MIB, 2 * MIB);
        }
        figures.is_within("memory.file", 2 * MIB, 18 * MIB);
        figures.is_within("memory.usage_limit", LIMIT, LIMIT);
        figures.is_within("memory.usage", 18 * MIB, LIMIT);
        figures.is_within("memory.max_usage", figures.of("memory.usage"), LIMIT);
        figures.is_within("memory.swap_limit", 0, u64::MAX);
    }
    assert_eq!(
        cube_figures.0.get("memory.swap_limit"),
        peer_figures.0.get("memory.swap_limit")
    );
    // What is on disk is the next test's; the guest has huge pages of one size only.
    let of_others = |name: &str| name.starts_with("io.usage.") || name.starts_with("hugetlb.");
    // docs/OCI.md, Figures.
    let is_of_v1_alone = |name: &str| {
        !is_unified()
            && (name.starts_with("cpu.usage.per_cpu.")
                || name.starts_with("blkio.")
                || name == "memory.kernel.max"
                || ["pg_pg_in", "pg_pg_out", "pgpgin", "pgpgout"]
                    .iter()
                    .any(|part| name.ends_with(part)))
    };
    // A share of the last minutes rounds to nothing on one of them.
    let is_share = |name: &str| name.contains("psi") && name.contains(".avg");
    let missing: Vec<_> = peer_figures
        .0
        .keys()
        .filter(|name| !of_others(name) && !is_share(name) && !is_of_v1_alone(name))
        .filter(|name| !BY_CHANCE.contains(&name.replace("total_", "").as_str()))
        .filter(|name| !cube_figures.0.contains_key(*name))
        .collect();
    assert!(
        missing.is_empty(),
        "{missing:?}: {cube_figures:#?} {peer_figures:#?}"
    );

    for loaded in [&cube, &peer] {
        assert_eq!(loaded.running.exec(&["tail", "/dev/zero"]).status, 137);
        let figures = loaded.figures();
        figures.is_within("memory_events.oom_kill", 1, 1);
        figures.is_within("memory_events.max", 1, u64::MAX);
        figures.is_within("memory.max_usage", LIMIT - MIB, LIMIT);
    }
}

#[test]
fn what_is_written_to_a_disk_and_read_from_it_is_counted() {
    // With cgroup v1 the kernel counts for nobody who sets no limits (block/blk-throttle.c), so runc's are all 0.
    let peer = is_unified().then(|| PEER.to_owned());
    for runtime in std::iter::once(runtime()).chain(peer) {
        let dir = TestDir::new();
        let file = dir.path().join("disk");
        fs::File::create(&file).unwrap().set_len(8 * MIB).unwrap();
        let losetup = |arguments: &[&str]| {
            let ended = Command::new("losetup").args(arguments).output().unwrap();
            Ended::from(ended).success().trim().to_owned()
        };
        let node = losetup(&["--find", "--show", file.to_str().unwrap()]);
        let script = format!(
            "dd if=/dev/zero of={node} bs=64k count=64 oflag=direct 2>/dev/null
             dd if={node} of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null
             {READY}; exec sleep 1000"
        );
        let container = Container::new().runtime(&runtime).option("--device", &node);
        let loaded = Loaded::with(&container, &script);
        let figures = loaded.figures();
        drop(loaded);
        losetup(&["-d", &node]);
        // The disk is another device for each, and the root filesystem's may be there too.
        let devices = 0..figures.0.len();
        let is_counted = |of_one: &[(String, u64)]| {
            of_one
                .iter()
                .all(|(name, value)| figures.of(name) == *value)
        };
        let of_one = if is_unified() { in_v2 } else { in_v1 };
        let counted = devices.map(of_one).any(|of_one| is_counted(&of_one));
        assert!(counted, "{runtime}: {figures:#?}");
    }
}

/// The figures of the N-th device after writing 64 blocks of 64 KiB and reading 16.
fn in_v2(n: usize) -> [(String, u64); 4] {
    let name = |part: &str| format!("io.usage.{n}.{part}");
    [
        (name("wbytes"), 4 * MIB),
        (name("rbytes"), MIB),
        (name("wios"), 64),
        (name("rios"), 16),
    ]
}

/// The same in cgroup v1: each device's reads are followed by its writes.
fn in_v1(n: usize) -> [(String, u64); 4] {
    let bytes = |n| format!("blkio.io_service_bytes_recursive.{n}.value");
    let times = |n| format!("blkio.io_serviced_recursive.{n}.value");
    [
        (bytes(n), MIB),
        (bytes(n + 1), 4 * MIB),
        (times(n), 16),
        (times(n + 1), 64),
    ]
}
