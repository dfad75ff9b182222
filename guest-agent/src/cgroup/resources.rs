//! The specification's `linux.resources`, made for cgroup v1, as settings of cgroup v2.

use oci_spec::runtime::{
    LinuxBlockIo, LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxPids, LinuxResources,
    LinuxThrottleDevice, LinuxWeightDevice,
};

use super::{Cgroup, CgroupError, Result, read};

/// What a field wants a file to say.
struct Setting {
    field: &'static str,
    file: String,
    value: String,
}

impl Setting {
    fn new(field: &'static str, file: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            field,
            file: file.into(),
            value: value.into(),
        }
    }

    fn write(&self, cgroup: &Cgroup) -> Result<()> {
        let Self { field, file, value } = self;
        let refused = |why: String| Err(CgroupError::Invalid(field, why));
        match cgroup.write(file, value) {
            Err(CgroupError::Write { source, .. }) => match source.raw_os_error() {
                Some(libc::ENODEV | libc::ENXIO) => refused(format!(
                    "the guest has no device for {value:?}: linux.devices makes disks of the host its own"
                )),
                Some(libc::ENOENT) => refused(format!("the guest's kernel has no {file}")),
                // The kernel refuses values by these.
                Some(libc::EINVAL | libc::ERANGE | libc::EOPNOTSUPP) => refused(format!(
                    "the guest's kernel does not take {value:?} for {file}"
                )),
                _ => Err(CgroupError::Write {
                    file: cgroup.file(file),
                    value: value.clone(),
                    source,
                }),
            },
            written => written,
        }
    }
}

type Settings = Vec<Setting>;

/// Sets what is asked for. Everything is looked at before anything is set.
pub fn apply(cgroup: &Cgroup, asked: &LinuxResources) -> Result<()> {
    let mut settings = Settings::new();
    refuse_unknown(asked)?;
    if let Some(cpu) = asked.cpu() {
        settings.extend(cpu_settings(cgroup, cpu)?);
    }
    if let Some(memory) = asked.memory() {
        settings.extend(memory_settings(cgroup, memory)?);
        check_use(cgroup, memory)?;
    }
    if let Some(pids) = asked.pids() {
        settings.push(Setting::new(
            "linux.resources.pids.limit",
            "pids.max",
            pids_max(pids),
        ));
    }
    if let Some(io) = asked.block_io() {
        settings.extend(io_settings(io)?);
    }
    for limit in asked.hugepage_limits().iter().flatten() {
        settings.extend(hugetlb_settings(limit)?);
    }
    for (file, value) in asked.unified().iter().flatten() {
        if file.contains('/') || !file.contains('.') || file.starts_with("cgroup.") {
            return Err(CgroupError::Invalid(
                "linux.resources.unified",
                file.clone(),
            ));
        }
        settings.push(Setting::new("linux.resources.unified", file, value));
    }
    for setting in shrink_last(settings) {
        setting.write(cgroup)?;
    }
    Ok(())
}

/// memory.max comes last: the kernel reclaims, and may kill, while it is written, and swap and the
/// rest should count by then.
fn shrink_last(mut settings: Settings) -> Settings {
    settings.sort_by_key(|setting| setting.file == "memory.max");
    settings
}

fn refuse_unknown(asked: &LinuxResources) -> Result<()> {
    let unsupported = |field, reason| Err(CgroupError::Unsupported { field, reason });
    if let Some(network) = asked.network()
        && (network.class_id().is_some_and(|id| id != 0)
            || network.priorities().as_ref().is_some_and(|p| !p.is_empty()))
    {
        return unsupported("linux.resources.network", "cgroup v2 does not have it");
    }
    if asked.rdma().as_ref().is_some_and(|rdma| !rdma.is_empty()) {
        return unsupported("linux.resources.rdma", "the guest has no such devices");
    }
    if let Some(memory) = asked.memory() {
        // Kernel memory is part of memory.max; the kernel has taken the separate limit out.
        if memory.kernel().is_some_and(|limit| limit > 0)
            || memory.kernel_tcp().is_some_and(|limit| limit > 0)
        {
            return unsupported(
                "linux.resources.memory.kernel",
                "cgroup v2 does not have it",
            );
        }
        if memory.swappiness().is_some() {
            return unsupported(
                "linux.resources.memory.swappiness",
                "cgroup v2 does not have it",
            );
        }
        if memory.disable_oom_killer() == Some(true) {
            return unsupported(
                "linux.resources.memory.disableOOMKiller",
                "cgroup v2 does not have it",
            );
        }
    }
    if let Some(cpu) = asked.cpu()
        && (cpu.realtime_runtime().is_some_and(|time| time != 0)
            || cpu.realtime_period().is_some_and(|time| time != 0))
    {
        return unsupported(
            "linux.resources.cpu.realtimeRuntime",
            "cgroup v2 does not have it",
        );
    }
    Ok(())
}

fn cpu_settings(cgroup: &Cgroup, cpu: &LinuxCpu) -> Result<Settings> {
    const QUOTA: &str = "linux.resources.cpu.quota";
    let mut settings = Settings::new();
    let mut set =
        |field, file: &str, value: String| settings.push(Setting::new(field, file, value));
    // What is idle takes no weight: it must not be so any more before.
    if let Some(idle) = cpu.idle() {
        set("linux.resources.cpu.idle", "cpu.idle", idle.to_string());
    }
    if let Some(shares) = cpu.shares().filter(|shares| *shares != 0) {
        if cpu.idle() == Some(1) {
            return Err(CgroupError::Invalid(
                "linux.resources.cpu.shares",
                format!("{shares} for a cgroup that linux.resources.cpu.idle says is idle"),
            ));
        }
        set(
            "linux.resources.cpu.shares",
            "cpu.weight",
            weight_of_shares(shares).to_string(),
        );
    }
    // A burst is at most the quota, at each moment: one that becomes less comes before it, one that becomes more after it.
    let burst = match cpu.burst() {
        Some(burst) => Some((
            burst,
            burst <= number_in(cgroup, "cpu.max.burst")?.unwrap_or(0),
        )),
        None => None,
    };
    let burst_if = |first: bool| {
        burst
            .filter(|(_, less)| *less == first)
            .map(|(burst, _)| burst)
    };
    if let Some(burst) = burst_if(true) {
        set(
            "linux.resources.cpu.burst",
            "cpu.max.burst",
            burst.to_string(),
        );
    }
    let quota = cpu.quota().map(|quota| {
        if quota > 0 {
            quota.to_string()
        } else {
            "max".into()
        }
    });
    match (quota, cpu.period().filter(|period| *period != 0)) {
        (Some(quota), Some(period)) => set(QUOTA, "cpu.max", format!("{quota} {period}")),
        (Some(quota), None) => set(QUOTA, "cpu.max", quota),
        (None, Some(period)) => {
            let file = cgroup.file("cpu.max");
            let now = read(&file)?;
            let quota = now
                .split_ascii_whitespace()
                .next()
                .ok_or_else(|| CgroupError::Format(file, now.clone()))?;
            set(
                "linux.resources.cpu.period",
                "cpu.max",
                format!("{quota} {period}"),
            );
        }
        (None, None) => {}
    }
    if let Some(burst) = burst_if(false) {
        set(
            "linux.resources.cpu.burst",
            "cpu.max.burst",
            burst.to_string(),
        );
    }
    if let Some(cpus) = cpu.cpus().as_ref().filter(|cpus| !cpus.is_empty()) {
        set("linux.resources.cpu.cpus", "cpuset.cpus", cpus.clone());
    }
    if let Some(mems) = cpu.mems().as_ref().filter(|mems| !mems.is_empty()) {
        set("linux.resources.cpu.mems", "cpuset.mems", mems.clone());
    }
    Ok(settings)
}

/// v1 shares (2 to 262144, normally 1024) as a v2 weight (1 to 10000, normally 100): the curve
/// through the three pairs that runc 1.3.2 and crun 1.23 use, weight = 10^(l²/612 + 125·l/612 - 7/34)
/// where l is log2 of the shares.
fn weight_of_shares(shares: u64) -> u64 {
    if shares <= 2 {
        return 1;
    }
    if shares >= 262_144 {
        return 10_000;
    }
    let l = (shares as f64).log2();
    let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
    (10f64.powf(exponent).ceil() as u64).clamp(1, 10_000)
}

/// The number that a file of the cgroup has; none: `max`.
fn number_in(cgroup: &Cgroup, file: &str) -> Result<Option<u64>> {
    let file = cgroup.file(file);
    let text = match read(&file) {
        // A kernel without swap has no file for it.
        Err(CgroupError::Read(_, e)) if e.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        text => text?,
    };
    match text.trim() {
        "max" => Ok(None),
        number => match number.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(CgroupError::Format(file, text)),
        },
    }
}

/// An update of the limit of memory alone leaves that of memory and swap together as it is, and one of the latter alone the
/// former: with cgroup v2, which counts swap alone, both change it.
fn complete(
    cgroup: &Cgroup,
    limit: Option<i64>,
    swap: Option<i64>,
) -> Result<(Option<i64>, Option<i64>)> {
    let now = |file| -> Result<Option<i64>> {
        Ok(number_in(cgroup, file)?.and_then(|bytes| i64::try_from(bytes).ok()))
    };
    match (limit, swap) {
        (Some(1..), None) => {
            let together = match (now("memory.max")?, now("memory.swap.max")?) {
                (Some(memory), Some(swap)) => memory.checked_add(swap),
                _ => None,
            };
            Ok((limit, together))
        }
        (None, Some(1..)) => Ok((now("memory.max")?, swap)),
        asked => Ok(asked),
    }
}

fn memory_settings(cgroup: &Cgroup, memory: &LinuxMemory) -> Result<Settings> {
    let mut settings = Settings::new();
    let limit = memory.limit().filter(|limit| *limit != 0);
    let swap = memory.swap().filter(|swap| *swap != 0);
    let (limit, swap) = complete(cgroup, limit, swap)?;
    match (limit, swap) {
        (_, None) if limit == Some(-1) => settings.push(setting(
            "linux.resources.memory.swap",
            "memory.swap.max",
            -1,
        )?),
        (_, None) => {}
        (_, Some(-1)) => settings.push(setting(
            "linux.resources.memory.swap",
            "memory.swap.max",
            -1,
        )?),
        // v1 counts memory and swap together, v2 swap alone.
        (Some(limit), Some(swap)) if limit > 0 => {
            let alone = swap.checked_sub(limit).filter(|alone| *alone >= 0);
            let alone = alone.ok_or_else(|| {
                CgroupError::Invalid(
                    "linux.resources.memory.swap",
                    format!("memory and swap together ({swap}) are less than memory ({limit})"),
                )
            })?;
            settings.push(setting(
                "linux.resources.memory.swap",
                "memory.swap.max",
                alone,
            )?);
        }
        (_, Some(swap)) => {
            return Err(CgroupError::Invalid(
                "linux.resources.memory.swap",
                format!("{swap} without a limit for memory"),
            ));
        }
    }
    if let Some(limit) = limit {
        settings.push(setting(
            "linux.resources.memory.limit",
            "memory.max",
            limit,
        )?);
    }
    if let Some(reservation) = memory.reservation().filter(|bytes| *bytes != 0) {
        settings.push(setting(
            "linux.resources.memory.reservation",
            "memory.low",
            reservation,
        )?);
    }
    Ok(settings)
}

/// `checkBeforeUpdate`: whether a limit leaves room for what is in use, which the kernel would take away by killing.
fn check_use(cgroup: &Cgroup, memory: &LinuxMemory) -> Result<()> {
    let limits = [
        ("linux.resources.memory.limit", memory.limit()),
        ("linux.resources.memory.swap", memory.swap()),
    ];
    if memory.check_before_update() != Some(true) {
        return Ok(());
    }
    let file = cgroup.file("memory.current");
    let text = read(&file)?;
    let in_use: i64 = text
        .trim()
        .parse()
        .map_err(|_| CgroupError::Format(file, text))?;
    for (field, limit) in limits {
        if let Some(limit) = limit.filter(|limit| *limit > 0 && *limit <= in_use) {
            return Err(CgroupError::Invalid(
                field,
                format!("{limit} bytes are not more than the {in_use} that are in use"),
            ));
        }
    }
    Ok(())
}

/// A number of bytes; -1 is "max".
fn setting(field: &'static str, file: &str, bytes: i64) -> Result<Setting> {
    let value = match bytes {
        -1 => "max".into(),
        0.. => bytes.to_string(),
        _ => return Err(CgroupError::Invalid(field, bytes.to_string())),
    };
    Ok(Setting::new(field, file, value))
}

/// 0 and less is no limit, as runc has it.
fn pids_max(pids: &LinuxPids) -> String {
    match pids.limit() {
        limit @ 1.. => limit.to_string(),
        _ => "max".into(),
    }
}

fn io_settings(io: &LinuxBlockIo) -> Result<Settings> {
    let mut settings = Settings::new();
    let devices = io.weight_device().iter().flatten();
    let leaves = devices.map(LinuxWeightDevice::leaf_weight);
    for (field, weight) in std::iter::once(("linux.resources.blockIO.leafWeight", io.leaf_weight()))
        .chain(leaves.map(|weight| ("linux.resources.blockIO.weightDevice[].leafWeight", weight)))
    {
        if weight.is_some_and(|weight| weight != 0) {
            return Err(CgroupError::Unsupported {
                field,
                reason: "cgroup v2 does not have it",
            });
        }
    }
    if let Some(weight) = io.weight().filter(|weight| *weight != 0) {
        settings.push(Setting::new(
            "linux.resources.blockIO.weight",
            "io.weight",
            io_weight(weight).to_string(),
        ));
    }
    for device in io.weight_device().iter().flatten() {
        if let Some(weight) = device.weight() {
            let (major, minor) = (device.major(), device.minor());
            settings.push(Setting::new(
                "linux.resources.blockIO.weightDevice",
                "io.weight",
                format!("{major}:{minor} {}", io_weight(weight)),
            ));
        }
    }
    let mut throttle = |field, devices: &Option<Vec<LinuxThrottleDevice>>, key: &str| {
        for device in devices.iter().flatten() {
            let rate = match device.rate() {
                0 => "max".to_owned(),
                rate => rate.to_string(),
            };
            let value = format!("{}:{} {key}={rate}", device.major(), device.minor());
            settings.push(Setting::new(field, "io.max", value));
        }
    };
    throttle(
        "linux.resources.blockIO.throttleReadBpsDevice",
        io.throttle_read_bps_device(),
        "rbps",
    );
    throttle(
        "linux.resources.blockIO.throttleWriteBpsDevice",
        io.throttle_write_bps_device(),
        "wbps",
    );
    throttle(
        "linux.resources.blockIO.throttleReadIOPSDevice",
        io.throttle_read_iops_device(),
        "riops",
    );
    throttle(
        "linux.resources.blockIO.throttleWriteIOPSDevice",
        io.throttle_write_iops_device(),
        "wiops",
    );
    Ok(settings)
}

/// v1 weights run from 10 to 1000, v2 from 1 to 10000: the line through both ends, as runc has it.
fn io_weight(weight: u16) -> u64 {
    1 + (u64::from(weight).saturating_sub(10)) * 9_999 / 990
}

/// What is in use is limited, and what is reserved.
fn hugetlb_settings(limit: &LinuxHugepageLimit) -> Result<[Setting; 2]> {
    let size = limit.page_size();
    if size.is_empty() || !size.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(CgroupError::Invalid(
            "linux.resources.hugepageLimits[].pageSize",
            size.clone(),
        ));
    }
    let value = match limit.limit() {
        -1 => "max".into(),
        limit => limit.to_string(),
    };
    Ok(["max", "rsvd.max"].map(|file| {
        let file = format!("hugetlb.{size}.{file}");
        Setting::new("linux.resources.hugepageLimits", file, value.as_str())
    }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn applied(json: serde_json::Value, files: &[&str]) -> Result<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(dir.path().join(file), "").unwrap();
        }
        let cgroup = Cgroup {
            dir: dir.path().to_owned(),
        };
        apply(&cgroup, &serde_json::from_value(json).unwrap())?;
        Ok(files
            .iter()
            .map(|file| fs::read_to_string(dir.path().join(file)).unwrap())
            .collect())
    }

    #[test]
    fn limits_of_v1_become_limits_of_v2() {
        let json = serde_json::json!({
            "cpu": {"shares": 1024, "quota": 50000, "period": 100000, "cpus": "0-1"},
            "memory": {"limit": 1048576, "swap": 3145728, "reservation": 4096},
            "pids": {"limit": 100},
            "blockIO": {"weight": 1000, "throttleReadBpsDevice": [{"major": 254, "minor": 0, "rate": 7}]},
            "hugepageLimits": [{"pageSize": "2MB", "limit": 5}],
            "unified": {"memory.high": "9"}
        });
        let files = [
            "cpu.weight",
            "cpu.max",
            "cpuset.cpus",
            "memory.max",
            "memory.swap.max",
            "memory.low",
            "pids.max",
            "io.weight",
            "io.max",
            "hugetlb.2MB.max",
            "hugetlb.2MB.rsvd.max",
            "memory.high",
        ];
        let values = [
            "100",
            "50000 100000",
            "0-1",
            "1048576",
            "2097152",
            "4096",
            "100",
            "10000",
            "254:0 rbps=7",
            "5",
            "5",
            "9",
        ];
        assert_eq!(applied(json, &files).unwrap(), values);
    }

    #[test]
    fn no_limit_is_max() {
        let json = serde_json::json!({
            "cpu": {"quota": -1, "period": 50000}, "memory": {"limit": -1}, "pids": {"limit": -1}
        });
        let files = ["cpu.max", "memory.max", "memory.swap.max", "pids.max"];
        assert_eq!(
            applied(json, &files).unwrap(),
            ["max 50000", "max", "max", "max"]
        );
    }

    fn cgroup_with(dir: &tempfile::TempDir, files: &[(&str, &str)]) -> Cgroup {
        for (file, text) in files {
            fs::write(dir.path().join(file), text).unwrap();
        }
        Cgroup {
            dir: dir.path().to_owned(),
        }
    }

    #[test]
    fn an_update_of_one_limit_of_memory_keeps_the_other() {
        let updated = |max: &str, swap: &str, update: serde_json::Value| {
            let dir = tempfile::tempdir().unwrap();
            let cgroup = cgroup_with(&dir, &[("memory.max", max), ("memory.swap.max", swap)]);
            let memory = serde_json::from_value(update).unwrap();
            let settings = memory_settings(&cgroup, &memory)?;
            Ok::<Vec<_>, CgroupError>(settings.into_iter().map(|s| (s.file, s.value)).collect())
        };
        let set = |file: &str, value: &str| (file.to_owned(), value.to_owned());
        let more = updated("1000\n", "500\n", serde_json::json!({"limit": 1200}));
        let expected = [set("memory.swap.max", "300"), set("memory.max", "1200")];
        assert_eq!(more.unwrap(), expected);
        let swap = updated("1000\n", "500\n", serde_json::json!({"swap": 1700}));
        let expected = [set("memory.swap.max", "700"), set("memory.max", "1000")];
        assert_eq!(swap.unwrap(), expected);
        for (max, swap) in [("1000\n", "max\n"), ("max\n", "500\n")] {
            let unlimited = updated(max, swap, serde_json::json!({"limit": 1200}));
            assert_eq!(unlimited.unwrap(), [set("memory.max", "1200")]);
        }
        for update in [
            serde_json::json!({"limit": 1600}),
            serde_json::json!({"swap": 900}),
        ] {
            let error = updated("1000\n", "500\n", update).unwrap_err();
            assert!(error.is_invalid(), "{error}");
        }
    }

    #[test]
    fn what_the_kernel_takes_only_after_something_else_comes_after_it() {
        let order = |burst: &str, update: serde_json::Value| -> Vec<String> {
            let dir = tempfile::tempdir().unwrap();
            let cgroup = cgroup_with(&dir, &[("cpu.max.burst", burst)]);
            let cpu = serde_json::from_value(update).unwrap();
            let settings = cpu_settings(&cgroup, &cpu).unwrap();
            settings.into_iter().map(|s| s.file).collect()
        };
        let both = |burst: u64| serde_json::json!({"quota": 20_000, "burst": burst});
        assert_eq!(order("500\n", both(400)), ["cpu.max.burst", "cpu.max"]);
        assert_eq!(order("500\n", both(600)), ["cpu.max", "cpu.max.burst"]);
        let awake = serde_json::json!({"idle": 0, "shares": 512});
        assert_eq!(order("0\n", awake), ["cpu.idle", "cpu.weight"]);
    }

    #[test]
    fn a_limit_below_what_is_in_use_is_refused_if_that_is_to_be_checked() {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("memory.current", "5000\n"),
            ("memory.max", ""),
            ("memory.swap.max", ""),
        ] {
            fs::write(dir.path().join(file), text).unwrap();
        }
        let cgroup = Cgroup {
            dir: dir.path().to_owned(),
        };
        let update = |limit: i64, swap: i64, check: bool| {
            let memory =
                serde_json::json!({"limit": limit, "swap": swap, "checkBeforeUpdate": check});
            apply(
                &cgroup,
                &serde_json::from_value(serde_json::json!({"memory": memory})).unwrap(),
            )
        };
        let message = update(4000, -1, true).unwrap_err().to_string();
        assert!(
            message.contains("memory.limit") && message.contains("5000"),
            "{message}"
        );
        assert_eq!(
            fs::read_to_string(dir.path().join("memory.max")).unwrap(),
            ""
        );
        update(6000, -1, true).unwrap();
        update(-1, -1, true).unwrap();
        update(4000, -1, false).unwrap();
    }

    #[test]
    fn shares_and_weights_keep_their_ends_and_middle() {
        assert_eq!([2, 1024, 262_144].map(weight_of_shares), [1, 100, 10_000]);
        assert_eq!([10, 500, 1000].map(io_weight), [1, 4950, 10_000]);
    }

    #[test]
    fn what_v2_lacks_is_refused_by_name() {
        for (json, name) in [
            (
                serde_json::json!({"memory": {"swappiness": 5}}),
                "swappiness",
            ),
            (serde_json::json!({"memory": {"kernel": 5}}), "kernel"),
            (
                serde_json::json!({"memory": {"disableOOMKiller": true}}),
                "disableOOMKiller",
            ),
            (
                serde_json::json!({"memory": {"limit": 5, "swap": 3}}),
                "swap",
            ),
            (serde_json::json!({"memory": {"swap": 3}}), "swap"),
            (
                serde_json::json!({"cpu": {"realtimeRuntime": 5}}),
                "realtimeRuntime",
            ),
            (
                serde_json::json!({"cpu": {"idle": 1, "shares": 512}}),
                "shares",
            ),
            (
                serde_json::json!({"hugepageLimits": [{"pageSize": "3MB", "limit": 1}]}),
                "hugepageLimits",
            ),
            (serde_json::json!({"network": {"classID": 5}}), "network"),
            (
                serde_json::json!({"blockIO": {"weightDevice": [{"major": 7, "minor": 0, "leafWeight": 5}]}}),
                "weightDevice[].leafWeight",
            ),
            (serde_json::json!({"unified": {"../x.y": "1"}}), "unified"),
            (
                serde_json::json!({"unified": {"cgroup.kill": "1"}}),
                "unified",
            ),
        ] {
            let error = applied(json, &[]).unwrap_err();
            assert!(
                error.is_invalid() && error.to_string().contains(name),
                "{error}"
            );
        }
    }
}
