//! The machine and what it shares.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::common::twin::Twin;
use crate::mount::Mount;

/// How much memory the guest has.
const GUEST_MIB: u64 = 768;

pub struct Vm {
    // First, so that the files are not in use any more when the machine's directory goes.
    _rootfs: Mount,
    twin: Twin,
}

impl Vm {
    /// A machine that shares `shared` in a directory of its own: an overlay at `rootfs/c1`, and `volumes/v`.
    pub fn start() -> Self {
        let base = env::var_os("CUBE_TEST_DIR").map_or_else(env::temp_dir, PathBuf::from);
        fs::create_dir_all(&base).unwrap();
        let dir = tempfile::tempdir_in(base).unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in [
            "lower/etc",
            "upper",
            "work",
            "shared/rootfs/c1",
            "shared/volumes/v",
        ] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("lower/etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
        let rootfs = Mount::overlay(dir.path(), &at("shared/rootfs/c1"));
        let share = json!({ "tag": "share", "path": at("shared"), "guest_owned": ["rootfs"] });
        let twin = Twin::start(dir, json!({ "memory_mib": GUEST_MIB, "shares": [share] }));
        let mut vm = Self {
            _rootfs: rootfs,
            twin,
        };
        assert_eq!(vm.twin.line(), "ready");
        vm
    }

    /// The directory of all its files.
    pub fn directory(&self) -> &Path {
        self.twin.dir()
    }

    /// The directory that it shares.
    pub fn shared(&self) -> PathBuf {
        self.directory().join("shared")
    }

    /// Has the guest do `what` on `path` and returns its answer.
    pub fn try_ask(&mut self, what: &str, path: &str) -> Result<String, String> {
        self.twin.say(&format!("{what} {path}"));
        let line = self.twin.line();
        line.strip_prefix("ok ")
            .map(str::to_owned)
            .ok_or_else(|| line.clone())
    }

    /// As [`try_ask`](Self::try_ask), of what must not fail.
    pub fn ask(&mut self, what: &str, path: &str) -> String {
        self.try_ask(what, path)
            .unwrap_or_else(|error| panic!("{what} {path}: {error}"))
    }

    /// How many descriptors the hypervisor has open.
    pub fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.twin.child.id());
        fs::read_dir(path).unwrap().count()
    }

    /// The memory that the hypervisor uses for itself, in KiB (the proportional set sizes of smaps, proc(5)).
    pub fn own_memory(&self) -> u64 {
        let maps = fs::read_to_string(format!("/proc/{}/smaps", self.twin.child.id())).unwrap();
        // The guest's is in mappings that adjoin each other, since parts of it are advised in different ways.
        let mut runs: Vec<Run> = Vec::new();
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let (Some(first), second) = (words.next(), words.next()) else {
                continue;
            };
            if let Some((start, end)) = first.split_once('-') {
                let [start, end] = [start, end].map(|a| u64::from_str_radix(a, 16).unwrap());
                match runs.last_mut() {
                    Some(run) if run.end == start => run.end = end,
                    _ => runs.push(Run { start, end, kib: 0 }),
                }
            } else if first == "Pss:" {
                runs.last_mut().unwrap().kib += second.unwrap().parse::<u64>().unwrap();
            }
        }
        let own = |run: &&Run| run.end - run.start < GUEST_MIB << 20;
        assert!(!runs.iter().all(|run| own(&run)), "no guest in {maps}");
        runs.iter().filter(own).map(|run| run.kib).sum()
    }
}

/// Mappings without a gap between them.
struct Run {
    start: u64,
    end: u64,
    kib: u64,
}
