//! The figures of a cgroup.

use std::collections::HashMap;
use std::fs;
use std::io;

use cube_agent_protocol::agent;

use super::{Cgroup, CgroupError, Result};

impl Cgroup {
    /// Reads all figures. May take a while: the kernel sums up for it.
    pub fn stats(&self) -> Result<agent::StatsResponse> {
        let mut stats = agent::StatsResponse::new();
        stats.cpu = self.cpu()?.into();
        stats.memory = self.memory()?.into();
        stats.pids = self.pids()?.into();
        stats.io = self
            .text("io.stat")?
            .map_or_else(Vec::new, |text| io_devices(&text));
        stats.hugetlb = self.hugetlb()?;
        stats.cpu_pressure = self.pressure("cpu.pressure")?.into();
        stats.memory_pressure = self.pressure("memory.pressure")?.into();
        stats.io_pressure = self.pressure("io.pressure")?.into();
        Ok(stats)
    }

    fn cpu(&self) -> Result<Option<agent::Cpu>> {
        Ok(self.text("cpu.stat")?.map(|text| {
            let figures = flat(&text);
            let figure = |key: &str| figures.get(key).copied().unwrap_or_default();
            let mut cpu = agent::Cpu::new();
            cpu.usage_usec = figure("usage_usec");
            cpu.user_usec = figure("user_usec");
            cpu.system_usec = figure("system_usec");
            cpu.nr_periods = figure("nr_periods");
            cpu.nr_throttled = figure("nr_throttled");
            cpu.throttled_usec = figure("throttled_usec");
            cpu
        }))
    }

    fn memory(&self) -> Result<Option<agent::Memory>> {
        let Some(current) = self.number("memory.current")? else {
            return Ok(None);
        };
        let mut memory = agent::Memory::new();
        memory.current = current;
        memory.max = self.number("memory.max")?.unwrap_or(u64::MAX);
        memory.swap_current = self.number("memory.swap.current")?.unwrap_or_default();
        memory.swap_max = self.number("memory.swap.max")?.unwrap_or(u64::MAX);
        memory.peak = self.number("memory.peak")?.unwrap_or_default();
        memory.swap_peak = self.number("memory.swap.peak")?.unwrap_or_default();
        memory.stat = flat(&self.text("memory.stat")?.unwrap_or_default());
        memory.events = flat(&self.text("memory.events")?.unwrap_or_default());
        Ok(Some(memory))
    }

    fn pids(&self) -> Result<Option<agent::Pids>> {
        let Some(current) = self.number("pids.current")? else {
            return Ok(None);
        };
        let mut pids = agent::Pids::new();
        pids.current = current;
        pids.limit = self.number("pids.max")?.unwrap_or(u64::MAX);
        Ok(Some(pids))
    }

    fn pressure(&self, name: &str) -> Result<Option<agent::Pressure>> {
        Ok(self.text(name)?.map(|text| pressure(&text)))
    }

    fn hugetlb(&self) -> Result<Vec<agent::HugeTlb>> {
        let mut all = Vec::new();
        let entries =
            fs::read_dir(&self.dir).map_err(|e| CgroupError::Read(self.dir.clone(), e))?;
        for entry in entries.flatten() {
            let name = entry.file_name();
            let page_size = name
                .to_str()
                .and_then(|name| name.strip_prefix("hugetlb.")?.strip_suffix(".current"));
            // hugetlb.SIZE.rsvd.current counts reservations.
            let Some(page_size) = page_size.filter(|size| !size.contains('.')) else {
                continue;
            };
            let mut hugetlb = agent::HugeTlb::new();
            hugetlb.page_size = page_size.to_owned();
            hugetlb.current = self
                .number(&format!("hugetlb.{page_size}.current"))?
                .unwrap_or_default();
            hugetlb.max = self
                .number(&format!("hugetlb.{page_size}.max"))?
                .unwrap_or(u64::MAX);
            let events = self.text(&format!("hugetlb.{page_size}.events"))?;
            let events = flat(&events.unwrap_or_default());
            hugetlb.failures = events.get("max").copied().unwrap_or_default();
            all.push(hugetlb);
        }
        all.sort_by(|a, b| a.page_size.cmp(&b.page_size));
        Ok(all)
    }

    /// The content of a file; none if the controller is not there.
    fn text(&self, name: &str) -> Result<Option<String>> {
        let file = self.file(name);
        match fs::read_to_string(&file) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            // A group without memory pressure figures, for instance.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
            Err(e) => Err(CgroupError::Read(file, e)),
        }
    }

    fn number(&self, name: &str) -> Result<Option<u64>> {
        match self.text(name)? {
            None => Ok(None),
            Some(text) => match number(&text) {
                Some(number) => Ok(Some(number)),
                None => Err(CgroupError::Format(self.file(name), text)),
            },
        }
    }
}

/// A number on its own line; "max" is 2^64 - 1.
fn number(text: &str) -> Option<u64> {
    match text.trim_ascii() {
        "max" => Some(u64::MAX),
        digits => digits.parse().ok(),
    }
}

/// "KEY NUMBER" lines; others are left out.
fn flat(text: &str) -> HashMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            Some((key.to_owned(), number(value)?))
        })
        .collect()
}

/// "some KEY=NUMBER …" and "full KEY=NUMBER …".
fn pressure(text: &str) -> agent::Pressure {
    let mut pressure = agent::Pressure::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let which = words.next();
        let mut stall = agent::Stall::new();
        for (key, value) in words.filter_map(|word| word.split_once('=')) {
            let share = || value.parse().unwrap_or_default();
            match key {
                "avg10" => stall.avg10 = share(),
                "avg60" => stall.avg60 = share(),
                "avg300" => stall.avg300 = share(),
                "total" => stall.total = value.parse().unwrap_or_default(),
                _ => {}
            }
        }
        match which {
            Some("some") => pressure.some = Some(stall).into(),
            Some("full") => pressure.full = Some(stall).into(),
            _ => {}
        }
    }
    pressure
}

/// "MAJOR:MINOR KEY=NUMBER …" lines.
fn io_devices(text: &str) -> Vec<agent::IoDevice> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let (major, minor) = words.next()?.split_once(':')?;
            let mut device = agent::IoDevice::new();
            device.major = major.parse().ok()?;
            device.minor = minor.parse().ok()?;
            for (key, value) in words.filter_map(|word| word.split_once('=')) {
                let value = value.parse().unwrap_or_default();
                match key {
                    "rbytes" => device.rbytes = value,
                    "wbytes" => device.wbytes = value,
                    "rios" => device.rios = value,
                    "wios" => device.wios = value,
                    _ => {}
                }
            }
            Some(device)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn figures_come_from_the_kernels_files() {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("cpu.stat", "usage_usec 30\nuser_usec 20\nsystem_usec 10\n"),
            ("memory.current", "4096\n"),
            ("memory.max", "max\n"),
            ("memory.stat", "anon 1\nfile 2\n"),
            ("memory.events", "oom 3\noom_kill 4\n"),
            ("pids.current", "2\n"),
            ("pids.max", "max\n"),
            (
                "io.stat",
                "254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n7:1\n",
            ),
            ("hugetlb.2MB.current", "0\n"),
            ("hugetlb.2MB.rsvd.current", "0\n"),
            ("hugetlb.2MB.max", "max\n"),
            ("hugetlb.2MB.events", "max 6\n"),
            (
                "io.pressure",
                "some avg10=1.50 avg60=0.20 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
            ),
        ] {
            fs::write(dir.path().join(file), text).unwrap();
        }
        let cgroup = Cgroup {
            dir: dir.path().to_owned(),
        };
        let stats = cgroup.stats().unwrap();
        assert_eq!((stats.cpu.usage_usec, stats.cpu.nr_periods), (30, 0));
        assert_eq!((stats.memory.current, stats.memory.max), (4096, u64::MAX));
        assert_eq!(
            (stats.memory.stat["file"], stats.memory.events["oom_kill"]),
            (2, 4)
        );
        assert_eq!((stats.pids.current, stats.pids.limit), (2, u64::MAX));
        assert_eq!(stats.io.len(), 2);
        assert_eq!((stats.io[0].major, stats.io[0].wios), (254, 4));
        assert_eq!(stats.hugetlb.len(), 1);
        assert_eq!(stats.hugetlb[0].page_size, "2MB");
        assert_eq!(stats.hugetlb[0].failures, 6);
        let pressure = &stats.io_pressure;
        assert_eq!((pressure.some.avg10, pressure.some.avg60), (1.5, 0.2));
        assert_eq!((pressure.some.total, pressure.full.total), (77, 7));
        assert!(stats.cpu_pressure.is_none());
    }

    #[test]
    fn a_controller_that_is_not_there_has_no_figures() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup {
            dir: dir.path().to_owned(),
        };
        let stats = cgroup.stats().unwrap();
        assert!(stats.cpu.is_none() && stats.memory.is_none() && stats.pids.is_none());
    }

    proptest! {
        #[test]
        fn every_figure_is_found_again(figures in proptest::collection::hash_map("[a-z_]{1,12}", any::<u64>(), 0..20)) {
            let text: String = figures.iter().map(|(key, value)| format!("{key} {value}\n")).collect();
            prop_assert_eq!(flat(&text), figures);
        }

        #[test]
        fn no_text_is_too_strange(text in "\\PC*") {
            let _ = (flat(&text), io_devices(&text), number(&text), pressure(&text));
        }
    }
}
