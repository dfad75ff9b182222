//! `linux.resources`: the container's cgroup.

use serde_json::{Value, json};

use crate::bundle::{Case, refused, same};

fn resources(change: Value) -> Value {
    json!({"linux": {"resources": change}})
}

/// Files are opened, to see which the rules allow: what is not there to the kernel is not forbidden either.
const NODES: &str = "try() { mknod /tmp/n c $2 $3 && { head -c0 </tmp/n && echo $1 can be read; printf '' >/tmp/n && echo $1 can be written; }; rm -f /tmp/n; }
    try null 1 3; try zero 1 5; try tun 10 200; try kmsg 1 11; mknod /tmp/b b 7 77 && echo a block device can be made";

pub fn cases() -> Vec<Case> {
    let mut cases = memory();
    cases.extend(processors());
    cases.extend(others());
    cases.extend(devices());
    cases
}

fn memory() -> Vec<Case> {
    const FILES: &str =
        "group memory.max memory.swap.max memory.low memory.high memory.min memory.oom.group";
    let memory = |change: Value| resources(json!({"memory": change}));
    vec![
        same(
            "cgroups: no limits",
            json!({}),
            "group memory.max memory.swap.max memory.low pids.max cpu.max cpu.weight cpu.idle cpuset.cpus cpuset.mems io.max; cat /proc/self/cgroup; options /sys/fs/cgroup; ls /sys/fs/cgroup | grep -v -e misc -e rdma -e pressure -e hugetlb -e numa -e zswap",
        ),
        same(
            "cgroups: memory",
            memory(json!({"limit": 104_857_600, "reservation": 52_428_800})),
            FILES,
        ),
        same(
            "cgroups: memory and swap",
            memory(json!({"limit": 104_857_600, "swap": 157_286_400})),
            FILES,
        ),
        same(
            "cgroups: as much memory as memory and swap",
            memory(json!({"limit": 104_857_600, "swap": 104_857_600})),
            FILES,
        ),
        same(
            "cgroups: memory and swap without limit",
            memory(json!({"limit": 104_857_600, "swap": -1})),
            FILES,
        ),
        same(
            "cgroups: memory without limit",
            memory(json!({"limit": -1})),
            FILES,
        ),
        same(
            "cgroups: less memory and swap than memory",
            memory(json!({"limit": 104_857_600, "swap": 52_428_800})),
            FILES,
        )
        .invalid("linux.resources.memory.swap"),
        same(
            "cgroups: swap alone",
            memory(json!({"swap": 104_857_600})),
            FILES,
        )
        .invalid("linux.resources.memory.swap"),
        same(
            "cgroups: swap without limit alone",
            memory(json!({"swap": -1})),
            FILES,
        ),
        same(
            "cgroups: zeros of memory",
            memory(json!({"limit": 0, "swap": 0, "reservation": 0, "swappiness": null})),
            FILES,
        ),
        same(
            "cgroups: notes about memory",
            memory(
                json!({"limit": 104_857_600, "useHierarchy": true, "checkBeforeUpdate": true, "disableOOMKiller": false}),
            ),
            FILES,
        ),
        same("cgroups: an update of memory", json!({}), FILES)
            .update(json!({"memory": {"limit": 104_857_600}})),
        same(
            "cgroups: an update to more than is in use",
            json!({}),
            FILES,
        )
        .update(json!({"memory": {"limit": 104_857_600, "checkBeforeUpdate": true}})),
        same(
            "cgroups: an update to less than is in use",
            json!({}),
            FILES,
        )
        .update(json!({"memory": {"limit": 4096, "swap": 8192, "checkBeforeUpdate": true}}))
        .invalid("linux.resources.memory.limit"),
        refused(
            "linux.resources.memory.swappiness",
            "cgroups: swappiness",
            memory(json!({"swappiness": 10})),
        ),
        refused(
            "linux.resources.memory.kernel",
            "cgroups: kernel memory",
            memory(json!({"kernel": 104_857_600})),
        ),
        refused(
            "linux.resources.memory.kernel",
            "cgroups: kernel memory for TCP",
            memory(json!({"kernelTCP": 104_857_600})),
        ),
        refused(
            "linux.resources.memory.disableOOMKiller",
            "cgroups: no OOM killer",
            memory(json!({"disableOOMKiller": true})),
        ),
    ]
}

fn processors() -> Vec<Case> {
    const FILES: &str = "group cpu.weight cpu.max cpu.max.burst cpu.idle cpuset.cpus cpuset.mems; status 'Cpus_allowed_list|Mems_allowed_list'";
    let cpu = |change: Value| resources(json!({"cpu": change}));
    vec![
        same("cgroups: shares", cpu(json!({"shares": 512})), FILES),
        same(
            "cgroups: the fewest shares",
            cpu(json!({"shares": 2})),
            FILES,
        ),
        same(
            "cgroups: the most shares",
            cpu(json!({"shares": 262_144})),
            FILES,
        ),
        same("cgroups: no shares", cpu(json!({"shares": 0})), FILES),
        same(
            "cgroups: a quota, its period and a burst",
            cpu(json!({"quota": 50_000, "period": 80_000, "burst": 20_000})),
            FILES,
        ),
        same("cgroups: a quota", cpu(json!({"quota": 50_000})), FILES),
        same("cgroups: a period", cpu(json!({"period": 50_000})), FILES),
        same(
            "cgroups: no quota",
            cpu(json!({"quota": -1, "period": 0})),
            FILES,
        ),
        same(
            "cgroups: a quota below the kernel's",
            cpu(json!({"quota": 10})),
            FILES,
        )
        .invalid("linux.resources.cpu.quota"),
        same(
            "cgroups: a burst above the quota",
            cpu(json!({"quota": 50_000, "burst": 60_000})),
            FILES,
        )
        .invalid("linux.resources.cpu.burst"),
        same(
            "cgroups: a quota in a set of processors",
            cpu(json!({"quota": 50_000, "cpus": "1", "mems": "0"})),
            FILES,
        ),
        same(
            "cgroups: a set of processors, for an exec",
            cpu(json!({"cpus": "0-1"})),
            FILES,
        )
        .exec(),
        same(
            "cgroups: a processor that is not there",
            cpu(json!({"cpus": "40"})),
            FILES,
        )
        .invalid("linux.resources.cpu.cpus"),
        same(
            "cgroups: a node of memory that is not there",
            cpu(json!({"mems": "7"})),
            FILES,
        )
        .invalid("linux.resources.cpu.mems"),
        same("cgroups: idle", cpu(json!({"idle": 1})), FILES),
        same(
            "cgroups: idle, with shares",
            cpu(json!({"idle": 1, "shares": 512})),
            FILES,
        )
        .invalid("linux.resources.cpu.shares"),
        refused(
            "linux.resources.cpu.realtime",
            "cgroups: time for real-time processes",
            cpu(json!({"realtimeRuntime": 5000})),
        ),
        refused(
            "linux.resources.cpu.realtime",
            "cgroups: the period of real-time processes",
            cpu(json!({"realtimePeriod": 100_000})),
        ),
    ]
}

fn others() -> Vec<Case> {
    let io = |change: Value| resources(json!({"blockIO": change}));
    let rate = |rate: u64| json!([{"major": 7, "minor": 0, "rate": rate}]);
    vec![
        same(
            "cgroups: processes",
            resources(json!({"pids": {"limit": 17}})),
            "group pids.max",
        ),
        same(
            "cgroups: as many processes as one likes",
            resources(json!({"pids": {"limit": -1}})),
            "group pids.max",
        ),
        same(
            "cgroups: a limit of no processes",
            resources(json!({"pids": {"limit": 0}})),
            "group pids.max",
        )
        .otherwise(0, "pids.max: max"),
        same(
            "cgroups: too few processes for a shell",
            resources(json!({"pids": {"limit": 2}})),
            "(:) && (true; (:)) ; (sleep 0 | sleep 0 | sleep 0 | sleep 0); echo $?",
        ),
        same(
            "cgroups: weight of input and output",
            io(json!({"weight": 250})),
            "group io.weight",
        ),
        refused(
            "linux.resources.blockIO.leafWeight",
            "cgroups: weight of a leaf",
            io(json!({"leafWeight": 250})),
        ),
        refused(
            "linux.resources.blockIO.weightDevice",
            "cgroups: weight of a leaf for a device",
            io(json!({"weightDevice": [{"major": 7, "minor": 0, "leafWeight": 250}]})),
        ),
        refused(
            "linux.resources.blockIO.weightDevice",
            "cgroups: weight of a device of the host",
            io(json!({"weightDevice": [{"major": 7, "minor": 0, "weight": 250}]})),
        ),
        refused(
            "linux.resources.blockIO.throttleReadBpsDevice",
            "cgroups: bytes read from a device of the host",
            io(json!({"throttleReadBpsDevice": rate(1 << 20)})),
        ),
        refused(
            "linux.resources.blockIO.throttleWriteBpsDevice",
            "cgroups: bytes written to a device of the host",
            io(json!({"throttleWriteBpsDevice": rate(1 << 20)})),
        ),
        refused(
            "linux.resources.blockIO.throttleReadIOPSDevice",
            "cgroups: reads from a device of the host",
            io(json!({"throttleReadIOPSDevice": rate(100)})),
        ),
        refused(
            "linux.resources.blockIO.throttleWriteIOPSDevice",
            "cgroups: writes to a device of the host",
            io(json!({"throttleWriteIOPSDevice": rate(100)})),
        ),
        same(
            "cgroups: huge pages",
            resources(json!({"hugepageLimits": [{"pageSize": "2MB", "limit": 4_194_304}]})),
            "group hugetlb.2MB.max hugetlb.2MB.rsvd.max",
        ),
        same(
            "cgroups: huge pages of a size that is not there",
            resources(json!({"hugepageLimits": [{"pageSize": "3MB", "limit": 1}]})),
            "echo it runs",
        )
        .invalid("linux.resources.hugepageLimits"),
        refused(
            "linux.resources.network",
            "cgroups: a class of packets",
            resources(json!({"network": {"classID": 5}})),
        ),
        refused(
            "linux.resources.network",
            "cgroups: the priority of an interface",
            resources(json!({"network": {"priorities": [{"name": "lo", "priority": 5}]}})),
        ),
        refused(
            "linux.resources.rdma",
            "cgroups: RDMA",
            resources(json!({"rdma": {"mlx5_1": {"hcaHandles": 3, "hcaObjects": 10}}})),
        ),
        same(
            "cgroups: files of cgroup v2",
            resources(
                json!({"unified": {"memory.high": "52428800", "memory.min": "4096", "pids.max": "21", "cpu.weight": "77"}}),
            ),
            "group memory.high memory.min pids.max cpu.weight",
        ),
        same(
            "cgroups: files of cgroup v2 after the other fields",
            resources(
                json!({"memory": {"limit": 104_857_600}, "pids": {"limit": 9}, "unified": {"memory.max": "52428800", "pids.max": "21"}}),
            ),
            "group memory.max pids.max",
        ),
        same(
            "cgroups: a file that cgroup v2 does not have",
            resources(json!({"unified": {"memory.colour": "1"}})),
            "echo it runs",
        )
        .invalid("linux.resources.unified"),
        same(
            "cgroups: a file of another directory",
            resources(json!({"unified": {"../memory.max": "1"}})),
            "echo it runs",
        )
        .invalid("linux.resources.unified"),
        same(
            "cgroups: a value that the kernel does not take",
            resources(json!({"unified": {"memory.high": "blue"}})),
            "echo it runs",
        )
        .invalid("linux.resources.unified"),
    ]
}

fn devices() -> Vec<Case> {
    let rules = |list: Value| {
        json!({"linux": {"resources": {"devices": list}}, "mounts+": [
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["dev"]},
        ]})
    };
    let deny = json!({"allow": false, "access": "rwm"});
    vec![
        same("cgroups: devices by default", rules(json!([deny])), NODES),
        same("cgroups: no rules for devices", rules(json!([])), NODES),
        same(
            "cgroups: a device for reading",
            rules(
                json!([deny, {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "rm"}]),
            ),
            NODES,
        ),
        same(
            "cgroups: a device that may only be made",
            rules(
                json!([deny, {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "m"}]),
            ),
            NODES,
        ),
        same(
            "cgroups: a device taken back",
            rules(
                json!([deny, {"allow": false, "type": "c", "major": 1, "minor": 5, "access": "rwm"}]),
            ),
            NODES,
        ),
        // runc's way to the rules is that of cgroup v1, which cannot take a part of one back.
        same(
            "cgroups: all minor numbers but one",
            rules(json!([
                deny, {"allow": true, "type": "c", "major": 1, "access": "rwm"}, {"allow": false, "type": "c", "major": 1, "minor": 11, "access": "w"},
            ])),
            NODES,
        ).otherwise(
            0,
            "null can be read
null can be written
zero can be read
zero can be written
tun can be read
tun can be written
sh: can't open /tmp/n: Operation not permitted
sh: can't create /tmp/n: Operation not permitted
a block device can be made",
        ),
        same(
            "cgroups: block devices may be made",
            rules(json!([deny, {"allow": true, "type": "b", "access": "m"}])),
            NODES,
        ),
        same(
            "cgroups: all devices",
            rules(json!([{"allow": true, "type": "a", "access": "rwm"}])),
            NODES,
        ),
        same(
            "cgroups: a kind of device that nobody knows",
            rules(json!([deny, {"allow": true, "type": "x", "access": "rwm"}])),
            NODES,
        ).invalid("linux.resources.devices[1].type"),
        refused("linux.resources.devices", 
            "cgroups: an access that nobody knows",
            rules(
                json!([deny, {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "q"}]),
            )),
    ]
}
