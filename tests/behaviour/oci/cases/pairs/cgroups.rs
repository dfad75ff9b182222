//! Fields that interact: limits of cgroups, and updates of them.

use serde_json::{Value, json};

use crate::bundle::{Case, same};

const CPU: &str = "group cpu.weight cpu.max cpu.max.burst cpu.idle";
const MEMORY: &str = "group memory.max memory.swap.max memory.low memory.high";

pub(super) fn cgroups() -> Vec<Case> {
    let resources = |change: Value| json!({"linux": {"resources": change}});
    vec![
        same(
            "pairs: files of cgroup v2 for what has a field as well",
            resources(json!({
                "memory": {"limit": 104_857_600, "swap": 157_286_400, "reservation": 52_428_800}, "pids": {"limit": 9}, "cpu": {"shares": 512, "quota": 50_000, "period": 80_000, "burst": 1000},
                "blockIO": {"weight": 250}, "hugepageLimits": [{"pageSize": "2MB", "limit": 4_194_304}],
                "unified": {"memory.max": "83886080", "memory.swap.max": "1048576", "memory.low": "2097152", "pids.max": "21", "cpu.weight": "77", "cpu.max": "40000 90000", "cpu.max.burst": "2000", "io.weight": "default 33",
                    "hugetlb.2MB.max": "2097152"},
            })),
            "group memory.max memory.swap.max memory.low pids.max cpu.weight cpu.max cpu.max.burst io.weight hugetlb.2MB.max hugetlb.2MB.rsvd.max",
        ),
        same(
            "pairs: processors, also by a file of cgroup v2",
            resources(json!({"cpu": {"cpus": "0-1", "mems": "0"}, "unified": {"cpuset.cpus": "1"}})),
            "group cpuset.cpus cpuset.mems; status Cpus_allowed_list",
        ),
        same(
            "pairs: more memory reserved than there may be",
            resources(json!({"memory": {"limit": 52_428_800, "reservation": 104_857_600}})),
            MEMORY,
        ),
        same(
            "pairs: shares, a quota, its period, a burst and processors",
            resources(json!({"cpu": {"shares": 2048, "quota": 50_000, "period": 50_000, "burst": 0, "cpus": "0", "mems": "0"}})),
            "group cpu.weight cpu.max cpu.max.burst cpuset.cpus",
        ),
        same("pairs: an idle cgroup with a quota", resources(json!({"cpu": {"idle": 1, "quota": 50_000}})), CPU),
        same("pairs: a cgroup that is idle, also by a file of cgroup v2", resources(json!({"cpu": {"shares": 512}, "unified": {"cpu.idle": "1"}})), CPU),
        same(
            "pairs: SCHED_DEADLINE on one processor",
            json!({"process": {"scheduler": {"policy": "SCHED_DEADLINE", "runtime": 10_000_000, "deadline": 50_000_000, "period": 60_000_000}}, "linux": {"resources": {"cpu": {"cpus": "0"}}}}),
            "cut -d' ' -f41 /proc/$$/stat",
        )
        .invalid("process.scheduler"),
        same(
            "pairs: the processors of an exec, in its cgroup's",
            json!({"process": {"execCPUAffinity": {"initial": "1", "final": "0-1"}}, "linux": {"resources": {"cpu": {"cpus": "0-1"}}}}),
            "status Cpus_allowed_list",
        )
        .exec(),
    ]
}

pub(super) fn updates() -> Vec<Case> {
    let after = |before: Value, update: Value, name: &'static str, probe: &'static str| {
        same(name, json!({"linux": {"resources": before}}), probe).update(update)
    };
    let quota = json!({"cpu": {"quota": 50_000, "period": 80_000}});
    let memory = json!({"memory": {"limit": 104_857_600, "swap": 157_286_400}});
    vec![
        after(
            quota.clone(),
            json!({"cpu": {"quota": 30_000}}),
            "pairs: an update of a quota alone",
            CPU,
        ),
        after(
            quota.clone(),
            json!({"cpu": {"period": 60_000}}),
            "pairs: an update of a period alone",
            CPU,
        ),
        after(
            quota.clone(),
            json!({"cpu": {"quota": -1}}),
            "pairs: an update to no quota",
            CPU,
        ),
        after(
            quota.clone(),
            json!({"cpu": {"burst": 10_000}}),
            "pairs: an update of a burst",
            CPU,
        ),
        after(
            json!({"cpu": {"quota": 50_000, "burst": 50_000}}),
            json!({"cpu": {"quota": 20_000, "burst": 10_000}}),
            "pairs: an update of a quota and a burst to less",
            CPU,
        ),
        after(
            json!({"cpu": {"quota": 20_000}}),
            json!({"cpu": {"quota": 60_000, "burst": 50_000}}),
            "pairs: an update of a quota and a burst to more",
            CPU,
        ),
        after(
            json!({"cpu": {"shares": 512}}),
            json!({"cpu": {"idle": 1}}),
            "pairs: an update to idle",
            CPU,
        ),
        after(
            json!({"cpu": {"idle": 1}}),
            json!({"cpu": {"shares": 512}}),
            "pairs: an update of the shares of what is idle",
            CPU,
        )
        .invalid("linux.resources.cpu.shares"),
        after(
            json!({"cpu": {"idle": 1}}),
            json!({"cpu": {"idle": 0, "shares": 512}}),
            "pairs: an update to no more idle",
            CPU,
        ),
        after(
            memory.clone(),
            json!({"memory": {"limit": 134_217_728}}),
            "pairs: an update of the limit alone",
            MEMORY,
        ),
        after(
            memory.clone(),
            json!({"memory": {"swap": 209_715_200}}),
            "pairs: an update of swap alone",
            MEMORY,
        ),
        after(
            memory.clone(),
            json!({"memory": {"limit": 209_715_200, "swap": 209_715_200}}),
            "pairs: an update of memory and swap",
            MEMORY,
        ),
        after(
            memory.clone(),
            json!({"memory": {"limit": -1}}),
            "pairs: an update to no limit",
            MEMORY,
        ),
        after(
            memory.clone(),
            json!({"memory": {"limit": 104_857_600, "swap": 4096, "checkBeforeUpdate": true}}),
            "pairs: an update of swap to less than is in use",
            MEMORY,
        )
        .invalid("linux.resources.memory.swap"),
        after(
            memory,
            json!({"memory": {"reservation": 52_428_800}, "unified": {"memory.high": "73400320"}}),
            "pairs: an update of other limits of memory",
            MEMORY,
        ),
        after(
            json!({"pids": {"limit": 50}, "unified": {"pids.max": "40"}}),
            json!({"pids": {"limit": 60}}),
            "pairs: an update of a limit that a file of cgroup v2 had",
            "group pids.max",
        ),
        after(
            json!({"memory": {"limit": 104_857_600}}),
            json!({"memory": {"limit": 83_886_080}, "unified": {"memory.max": "73400320"}}),
            "pairs: an update of a file of cgroup v2 and of its field",
            MEMORY,
        ),
    ]
}
