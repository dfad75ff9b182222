//! A container's figures in the messages that containerd's clients read: those of the host's
//! cgroup version, made from the guest's cgroup v2.

use containerd_shim_protos::cgroups::metrics as v1;
use containerd_shim_protos::cgroups_v2::metrics as v2;
use cube_agent_protocol::agent::{HugeTlb, IoDevice, Pressure, Stall, StatsResponse};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};

/// The figures as an `Any`: `io.containerd.cgroups.v2.Metrics` on a host with cgroup v2 alone, else
/// `io.containerd.cgroups.v1.Metrics`.
pub fn encode(stats: &StatsResponse, unified: bool) -> protobuf::Result<Any> {
    let (type_url, value) = if unified {
        (
            "io.containerd.cgroups.v2.Metrics",
            to_v2(stats).write_to_bytes()?,
        )
    } else {
        (
            "io.containerd.cgroups.v1.Metrics",
            to_v1(stats).write_to_bytes()?,
        )
    };
    Ok(Any {
        type_url: type_url.to_owned(),
        value,
        ..Default::default()
    })
}

/// The figures of several containers together. Limits are added up as well: one that is none (2^64 - 1) makes the sum none.
/// How long processes stood still is left out, since they stood still at the same times.
pub fn sum(parts: &[StatsResponse]) -> StatsResponse {
    let mut sum = StatsResponse::default();
    for part in parts {
        if let Some(part) = part.cpu.as_ref() {
            let cpu = sum.cpu.mut_or_insert_default();
            add(&mut cpu.usage_usec, part.usage_usec);
            add(&mut cpu.user_usec, part.user_usec);
            add(&mut cpu.system_usec, part.system_usec);
            add(&mut cpu.nr_periods, part.nr_periods);
            add(&mut cpu.nr_throttled, part.nr_throttled);
            add(&mut cpu.throttled_usec, part.throttled_usec);
        }
        if let Some(part) = part.memory.as_ref() {
            let memory = sum.memory.mut_or_insert_default();
            add(&mut memory.current, part.current);
            add(&mut memory.max, part.max);
            add(&mut memory.swap_current, part.swap_current);
            add(&mut memory.swap_max, part.swap_max);
            // They need not have been at their peaks at the same time: no more than this.
            add(&mut memory.peak, part.peak);
            add(&mut memory.swap_peak, part.swap_peak);
            for (to, from) in [
                (&mut memory.stat, &part.stat),
                (&mut memory.events, &part.events),
            ] {
                for (key, value) in from {
                    add(to.entry(key.clone()).or_default(), *value);
                }
            }
        }
        if let Some(part) = part.pids.as_ref() {
            let pids = sum.pids.mut_or_insert_default();
            add(&mut pids.current, part.current);
            add(&mut pids.limit, part.limit);
        }
        for part in &part.io {
            let same = |d: &&mut IoDevice| (d.major, d.minor) == (part.major, part.minor);
            match sum.io.iter_mut().find(same) {
                Some(device) => {
                    add(&mut device.rbytes, part.rbytes);
                    add(&mut device.wbytes, part.wbytes);
                    add(&mut device.rios, part.rios);
                    add(&mut device.wios, part.wios);
                }
                None => sum.io.push(part.clone()),
            }
        }
        for part in &part.hugetlb {
            let same = |pages: &&mut HugeTlb| pages.page_size == part.page_size;
            match sum.hugetlb.iter_mut().find(same) {
                Some(pages) => {
                    add(&mut pages.current, part.current);
                    add(&mut pages.max, part.max);
                    add(&mut pages.failures, part.failures);
                }
                None => sum.hugetlb.push(part.clone()),
            }
        }
    }
    sum
}

/// The guest says what the figures are, which need not be possible.
fn add(sum: &mut u64, part: u64) {
    *sum = sum.saturating_add(part);
}

fn to_v2(stats: &StatsResponse) -> v2::Metrics {
    let mut metrics = v2::Metrics::default();
    if let Some(pids) = stats.pids.as_ref() {
        metrics.pids = MessageField::some(v2::PidsStat {
            current: pids.current,
            limit: pids.limit,
            ..Default::default()
        });
    }
    if let Some(cpu) = stats.cpu.as_ref() {
        metrics.cpu = MessageField::some(v2::CPUStat {
            usage_usec: cpu.usage_usec,
            user_usec: cpu.user_usec,
            system_usec: cpu.system_usec,
            nr_periods: cpu.nr_periods,
            nr_throttled: cpu.nr_throttled,
            throttled_usec: cpu.throttled_usec,
            psi: pressure(&stats.cpu_pressure),
            ..Default::default()
        });
    }
    if let Some(memory) = stats.memory.as_ref() {
        let stat = |key: &str| memory.stat.get(key).copied().unwrap_or(0);
        let event = |key: &str| memory.events.get(key).copied().unwrap_or(0);
        metrics.memory = MessageField::some(v2::MemoryStat {
            anon: stat("anon"),
            file: stat("file"),
            kernel_stack: stat("kernel_stack"),
            slab: stat("slab"),
            sock: stat("sock"),
            shmem: stat("shmem"),
            file_mapped: stat("file_mapped"),
            file_dirty: stat("file_dirty"),
            file_writeback: stat("file_writeback"),
            anon_thp: stat("anon_thp"),
            inactive_anon: stat("inactive_anon"),
            active_anon: stat("active_anon"),
            inactive_file: stat("inactive_file"),
            active_file: stat("active_file"),
            unevictable: stat("unevictable"),
            slab_reclaimable: stat("slab_reclaimable"),
            slab_unreclaimable: stat("slab_unreclaimable"),
            pgfault: stat("pgfault"),
            pgmajfault: stat("pgmajfault"),
            // Newer kernels count these for anonymous memory and files apart.
            workingset_refault: stat("workingset_refault")
                + stat("workingset_refault_anon")
                + stat("workingset_refault_file"),
            workingset_activate: stat("workingset_activate")
                + stat("workingset_activate_anon")
                + stat("workingset_activate_file"),
            workingset_nodereclaim: stat("workingset_nodereclaim"),
            pgrefill: stat("pgrefill"),
            pgscan: stat("pgscan"),
            pgsteal: stat("pgsteal"),
            pgactivate: stat("pgactivate"),
            pgdeactivate: stat("pgdeactivate"),
            pglazyfree: stat("pglazyfree"),
            pglazyfreed: stat("pglazyfreed"),
            thp_fault_alloc: stat("thp_fault_alloc"),
            thp_collapse_alloc: stat("thp_collapse_alloc"),
            usage: memory.current,
            usage_limit: memory.max,
            swap_usage: memory.swap_current,
            swap_limit: memory.swap_max,
            max_usage: memory.peak,
            swap_max_usage: memory.swap_peak,
            psi: pressure(&stats.memory_pressure),
            ..Default::default()
        });
        metrics.memory_events = MessageField::some(v2::MemoryEvents {
            low: event("low"),
            high: event("high"),
            max: event("max"),
            oom: event("oom"),
            oom_kill: event("oom_kill"),
            oom_group_kill: event("oom_group_kill"),
            ..Default::default()
        });
    }
    let io_pressure = pressure(&stats.io_pressure);
    if !stats.io.is_empty() || io_pressure.is_some() {
        let usage = stats
            .io
            .iter()
            .map(|device| v2::IOEntry {
                major: device.major,
                minor: device.minor,
                rbytes: device.rbytes,
                wbytes: device.wbytes,
                rios: device.rios,
                wios: device.wios,
                ..Default::default()
            })
            .collect();
        metrics.io = MessageField::some(v2::IOStat {
            usage,
            psi: io_pressure,
            ..Default::default()
        });
    }
    metrics.hugetlb = stats
        .hugetlb
        .iter()
        .map(|pages| v2::HugeTlbStat {
            current: pages.current,
            max: pages.max,
            pagesize: pages.page_size.clone(),
            failcnt: pages.failures,
            ..Default::default()
        })
        .collect();
    metrics
}

fn pressure(figures: &MessageField<Pressure>) -> MessageField<v2::PSIStats> {
    let stall = |stall: &MessageField<Stall>| {
        stall
            .as_ref()
            .map(|stall| v2::PSIData {
                avg10: stall.avg10,
                avg60: stall.avg60,
                avg300: stall.avg300,
                total: stall.total,
                ..Default::default()
            })
            .into()
    };
    figures
        .as_ref()
        .map(|figures| v2::PSIStats {
            some: stall(&figures.some),
            full: stall(&figures.full),
            ..Default::default()
        })
        .into()
}

/// What cgroup v1 has where a memory's limit is none: `PAGE_COUNTER_MAX` pages (include/linux/page_counter.h).
const NO_LIMIT: u64 = i64::MAX as u64 & !0xfff;

/// A limit of cgroup v2 in v1's words.
fn limit(of_v2: u64) -> u64 {
    of_v2.min(NO_LIMIT)
}

fn to_v1(stats: &StatsResponse) -> v1::Metrics {
    let mut metrics = v1::Metrics::default();
    if let Some(pids) = stats.pids.as_ref() {
        metrics.pids = MessageField::some(v1::PidsStat {
            current: pids.current,
            // There it is 0 that stands for no limit.
            limit: if pids.limit == u64::MAX {
                0
            } else {
                pids.limit
            },
            ..Default::default()
        });
    }
    if let Some(cpu) = stats.cpu.as_ref() {
        let nanoseconds = |microseconds: u64| microseconds.saturating_mul(1000);
        metrics.cpu = MessageField::some(v1::CPUStat {
            usage: MessageField::some(v1::CPUUsage {
                total: nanoseconds(cpu.usage_usec),
                kernel: nanoseconds(cpu.system_usec),
                user: nanoseconds(cpu.user_usec),
                ..Default::default()
            }),
            throttling: MessageField::some(v1::Throttle {
                periods: cpu.nr_periods,
                throttled_periods: cpu.nr_throttled,
                throttled_time: nanoseconds(cpu.throttled_usec),
                ..Default::default()
            }),
            ..Default::default()
        });
    }
    if let Some(memory) = stats.memory.as_ref() {
        let stat = |key: &str| memory.stat.get(key).copied().unwrap_or(0);
        let entry = |usage, limit, max, failcnt| {
            MessageField::some(v1::MemoryEntry {
                usage,
                limit,
                max,
                failcnt,
                ..Default::default()
            })
        };
        let failures = memory.events.get("max").copied().unwrap_or(0);
        metrics.memory = MessageField::some(v1::MemoryStat {
            cache: stat("file"),
            rss: stat("anon"),
            rss_huge: stat("anon_thp"),
            mapped_file: stat("file_mapped"),
            dirty: stat("file_dirty"),
            writeback: stat("file_writeback"),
            pg_fault: stat("pgfault"),
            pg_maj_fault: stat("pgmajfault"),
            inactive_anon: stat("inactive_anon"),
            active_anon: stat("active_anon"),
            inactive_file: stat("inactive_file"),
            active_file: stat("active_file"),
            unevictable: stat("unevictable"),
            hierarchical_memory_limit: limit(memory.max),
            // v1 counts memory and swap together.
            hierarchical_swap_limit: limit(memory.max.saturating_add(memory.swap_max)),
            total_cache: stat("file"),
            total_rss: stat("anon"),
            total_rss_huge: stat("anon_thp"),
            total_mapped_file: stat("file_mapped"),
            total_dirty: stat("file_dirty"),
            total_writeback: stat("file_writeback"),
            total_pg_fault: stat("pgfault"),
            total_pg_maj_fault: stat("pgmajfault"),
            total_inactive_anon: stat("inactive_anon"),
            total_active_anon: stat("active_anon"),
            total_inactive_file: stat("inactive_file"),
            total_active_file: stat("active_file"),
            total_unevictable: stat("unevictable"),
            usage: entry(memory.current, limit(memory.max), memory.peak, failures),
            swap: entry(
                memory.current.saturating_add(memory.swap_current),
                limit(memory.max.saturating_add(memory.swap_max)),
                // Exact if nothing was swapped; else what was seen of both together at least.
                memory
                    .peak
                    .max(memory.current.saturating_add(memory.swap_current)),
                0,
            ),
            kernel: entry(stat("kernel"), NO_LIMIT, 0, 0),
            kernel_tcp: entry(stat("sock"), NO_LIMIT, 0, 0),
            ..Default::default()
        });
        metrics.memory_oom_control = MessageField::some(v1::MemoryOomControl {
            oom_kill: memory.events.get("oom_kill").copied().unwrap_or(0),
            ..Default::default()
        });
    }
    let entries = |figures: fn(&cube_agent_protocol::agent::IoDevice) -> (u64, u64)| {
        stats
            .io
            .iter()
            .flat_map(|device| {
                let (read, written) = figures(device);
                [
                    ("Read", read),
                    ("Write", written),
                    ("Total", read.saturating_add(written)),
                ]
                .map(|(op, value)| v1::BlkIOEntry {
                    op: op.to_owned(),
                    major: device.major,
                    minor: device.minor,
                    value,
                    ..Default::default()
                })
            })
            .collect()
    };
    if !stats.io.is_empty() {
        metrics.blkio = MessageField::some(v1::BlkIOStat {
            io_service_bytes_recursive: entries(|device| (device.rbytes, device.wbytes)),
            io_serviced_recursive: entries(|device| (device.rios, device.wios)),
            ..Default::default()
        });
    }
    metrics.hugetlb = stats
        .hugetlb
        .iter()
        .map(|pages| v1::HugetlbStat {
            usage: pages.current,
            max: pages.max,
            failcnt: pages.failures,
            pagesize: pages.page_size.clone(),
            ..Default::default()
        })
        .collect();
    metrics
}

#[cfg(test)]
mod tests {
    use cube_agent_protocol::agent::{Cpu, HugeTlb, IoDevice, Memory, Pids};

    use super::*;

    #[test]
    fn figures_of_several_containers_add_up_and_no_limit_stays_none() {
        let unlimited = StatsResponse {
            memory: MessageField::some(Memory {
                current: 1,
                max: u64::MAX,
                stat: [("anon".to_owned(), 1), ("file".to_owned(), 2)].into(),
                ..Default::default()
            }),
            io: vec![
                IoDevice {
                    major: 8,
                    rbytes: 1,
                    ..Default::default()
                },
                IoDevice {
                    major: 9,
                    rbytes: 7,
                    ..Default::default()
                },
            ],
            ..stats()
        };
        let sum = sum(&[stats(), unlimited]);
        assert_eq!((sum.cpu.usage_usec, sum.cpu.user_usec), (60, 40));
        assert_eq!((sum.memory.current, sum.memory.max), (4097, u64::MAX));
        assert_eq!(
            (sum.memory.stat["anon"], sum.memory.stat["file"]),
            (1025, 2)
        );
        assert_eq!(sum.memory.events["oom_kill"], 2);
        assert_eq!((sum.pids.current, sum.pids.limit), (6, 18));
        let read: Vec<_> = sum.io.iter().map(|d| (d.major, d.rbytes)).collect();
        assert_eq!(read, [(8, 513), (9, 7)]);
        assert_eq!(sum.hugetlb[0].failures, 10);
        assert!(sum.cpu_pressure.is_none());
        assert_eq!(super::sum(&[]), StatsResponse::default());
    }

    fn stats() -> StatsResponse {
        StatsResponse {
            cpu: MessageField::some(Cpu {
                usage_usec: 30,
                user_usec: 20,
                ..Default::default()
            }),
            memory: MessageField::some(Memory {
                current: 4096,
                max: 8192,
                stat: [("anon".to_owned(), 1024)].into(),
                events: [("oom_kill".to_owned(), 2)].into(),
                ..Default::default()
            }),
            pids: MessageField::some(Pids {
                current: 3,
                limit: 9,
                ..Default::default()
            }),
            io: vec![IoDevice {
                major: 8,
                rbytes: 512,
                wbytes: 1024,
                ..Default::default()
            }],
            hugetlb: vec![HugeTlb {
                failures: 5,
                ..Default::default()
            }],
            cpu_pressure: MessageField::some(Pressure {
                some: MessageField::some(Stall {
                    avg10: 1.5,
                    total: 77,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn on_a_v2_host_the_figures_are_the_guests_own() {
        let any = encode(&stats(), true).unwrap();
        assert_eq!(any.type_url, "io.containerd.cgroups.v2.Metrics");
        let metrics = v2::Metrics::parse_from_bytes(&any.value).unwrap();
        assert_eq!(metrics.cpu.usage_usec, 30);
        assert_eq!(
            (metrics.memory.usage, metrics.memory.usage_limit),
            (4096, 8192)
        );
        assert_eq!(metrics.memory.anon, 1024);
        assert_eq!(metrics.memory_events.oom_kill, 2);
        assert_eq!((metrics.pids.current, metrics.pids.limit), (3, 9));
        assert_eq!(metrics.io.usage[0].wbytes, 1024);
        assert_eq!(metrics.hugetlb[0].failcnt, 5);
        let psi = &metrics.cpu.psi;
        assert_eq!((psi.some.avg10, psi.some.total), (1.5, 77));
        assert!(psi.full.is_none() && metrics.memory.psi.is_none());
    }

    #[test]
    fn on_a_v1_host_they_are_converted() {
        let any = encode(&stats(), false).unwrap();
        assert_eq!(any.type_url, "io.containerd.cgroups.v1.Metrics");
        let metrics = v1::Metrics::parse_from_bytes(&any.value).unwrap();
        assert_eq!(metrics.cpu.usage.total, 30_000);
        assert_eq!(
            (metrics.memory.usage.usage, metrics.memory.rss),
            (4096, 1024)
        );
        assert_eq!(metrics.pids.limit, 9);
        let total = &metrics.blkio.io_service_bytes_recursive[2];
        assert_eq!((total.op.as_str(), total.value), ("Total", 1536));
    }

    #[test]
    fn no_limit_of_processes_is_said_as_each_version_says_it() {
        let stats = StatsResponse {
            pids: MessageField::some(Pids {
                current: 3,
                limit: u64::MAX,
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(to_v2(&stats).pids.limit, u64::MAX);
        assert_eq!(to_v1(&stats).pids.limit, 0);
    }

    #[test]
    fn a_controller_that_is_absent_stays_absent() {
        let any = encode(&StatsResponse::default(), true).unwrap();
        assert!(any.value.is_empty());
    }
}
