//! Namespaces, devices, kernel settings, hooks, and what belongs to other systems.

use serde_json::{Value, json};

use crate::bundle::{Case, refused, same};

fn namespaces(list: &[&str]) -> Value {
    let list: Vec<_> = list.iter().map(|kind| json!({"type": kind})).collect();
    json!({"linux": {"namespaces": list}})
}

fn linux(change: Value) -> Value {
    json!({"linux": change})
}

pub fn cases() -> Vec<Case> {
    let mut cases = spaces();
    cases.extend(nodes());
    cases.extend(settings());
    cases.extend(hooks());
    cases.extend(refusals());
    cases
}

fn spaces() -> Vec<Case> {
    let mapping = |host: u32| json!([{"containerID": 0, "hostID": host, "size": 1000}]);
    let two = json!([{"containerID": 0, "hostID": 100_000, "size": 500}, {"containerID": 1000, "hostID": 200_000, "size": 10}]);
    let user = |more: Value| {
        let mut change = json!({"linux": {"namespaces+": [{"type": "user"}], "uidMappings": mapping(100_000), "gidMappings": mapping(200_000)}});
        change["process"] = more;
        change
    };
    const MAPPED: &str = "cat /proc/self/uid_map /proc/self/gid_map; status 'Uid|Gid|Groups|Cap...'; ls -ldn /proc/self /bin/busybox | awk '{print $3, $4}'; touch /tmp/f; options /proc /sys /dev/pts; options /sys/fs/cgroup | tail -n 1";
    vec![
        same("linux: namespaces of its own", json!({}), "echo $$; ps -o pid >/ps; wc -l </ps; cat /proc/self/cgroup; ls /sys/class/net; cat /proc/sys/kernel/hostname | wc -l"),
        same(
            "linux: no cgroup namespace, and the cgroups mounted",
            namespaces(&["pid", "ipc", "uts", "mount", "network"]),
            "mounted /sys/fs/cgroup | cut -d' ' -f1-2; ls /sys/fs/cgroup | grep -c memory.max",
        ),
        same(
            "linux: a user namespace",
            user(json!({})),
            MAPPED,
        ).host("chown -R 100000:200000 rootfs; chmod 755 . .."),
        same(
            "linux: a user in a user namespace",
            user(json!({"user": {"uid": 7, "gid": 8, "additionalGids": [9]}})),
            MAPPED,
        ).host("chown -R 100000:200000 rootfs; chmod 755 . .."),
        same(
            "linux: an exec in a user namespace",
            user(json!({})),
            MAPPED,
        ).host("chown -R 100000:200000 rootfs; chmod 755 . ..").exec(),
        same(
            "linux: a user namespace of several ranges",
            json!({"linux": {"namespaces+": [{"type": "user"}], "uidMappings": two, "gidMappings": two}}),
            MAPPED,
        ).host("chown -R 100000:100000 rootfs; chmod 755 . .."),
        same(
            "linux: a user that has no number outside",
            user(json!({"user": {"uid": 5000, "gid": 5000}})),
            MAPPED,
        ).invalid("process.user").host("chown -R 100000:200000 rootfs; chmod 755 . .."),
        same("linux: a user namespace without numbers", linux(json!({"namespaces+": [{"type": "user"}]})), MAPPED).invalid("linux.uidMappings"),
        refused("linux.uidMappings", "linux: numbers without a user namespace", linux(json!({"uidMappings": mapping(100_000), "gidMappings": mapping(100_000)}))),
        same(
            "linux: a time namespace",
            linux(json!({"namespaces+": [{"type": "time"}], "timeOffsets": {"boottime": {"secs": 1_000_000, "nanosecs": 5}, "monotonic": {"secs": 2_000_000}}})),
            "cut -c1-4 /proc/uptime; tr -s ' ' <>/proc/self/timens_offsets",
        ),
        same(
            "linux: a time namespace, for an exec",
            linux(json!({"namespaces+": [{"type": "time"}], "timeOffsets": {"boottime": {"secs": 1_000_000}}})),
            "cut -c1-4 /proc/uptime",
        ).exec(),
        same("linux: a time namespace as it is", linux(json!({"namespaces+": [{"type": "time"}]})), "tr -s ' ' <>/proc/self/timens_offsets"),
        same("linux: the time without a namespace of its own", linux(json!({"timeOffsets": {"boottime": {"secs": 1000}}})), "echo it runs").invalid("linux.timeOffsets"),
        same("linux: a clock that has no offset", linux(json!({"namespaces+": [{"type": "time"}], "timeOffsets": {"realtime": {"secs": 1000}}})), "echo it runs").invalid("linux.timeOffsets"),
        same("linux: a namespace twice", linux(json!({"namespaces+": [{"type": "pid"}]})), "echo it runs").invalid("linux.namespaces"),
        same("linux: a namespace that nobody knows", linux(json!({"namespaces+": [{"type": "dream"}]})), "echo it runs").invalid("linux.namespaces[6].type"),
        same("linux: an IPC namespace that is not there", linux(json!({"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc", "path": "@/nosuch"}]})), "echo it runs").otherwise(0, "it runs"),
        refused("linux.namespaces", "linux: no mount namespace", namespaces(&["pid", "ipc", "uts", "network"])),
        refused("user namespace", "linux: a user namespace of the host", linux(json!({"namespaces+": [{"type": "user", "path": "/proc/1/ns/user"}]}))),
        refused("time namespace", "linux: a time namespace of the host", linux(json!({"namespaces+": [{"type": "time", "path": "/proc/1/ns/time"}]}))),
        refused("mount namespace", "linux: a mount namespace of the host", linux(json!({"namespaces": [{"type": "pid"}, {"type": "mount", "path": "/proc/1/ns/mnt"}]}))),
        refused("cgroup namespace", "linux: a cgroup namespace of the host", linux(json!({"namespaces": [{"type": "mount"}, {"type": "cgroup", "path": "/proc/1/ns/cgroup"}]}))),
        same("linux: namespaces of the pod", linux(json!({"namespaces": [{"type": "mount"}, {"type": "pid", "path": "/proc/1/ns/pid"}, {"type": "cgroup"}]})), "cat /proc/1/comm")
            .otherwise(0, "init"),
    ]
}

fn nodes() -> Vec<Case> {
    let devices = |list: Value| linux(json!({"devices": list}));
    let allowed = |list: Value| {
        linux(json!({"devices": list, "resources": {"devices": [
            {"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 10, "minor": 200, "access": "rwm"},
        ]}}))
    };
    let node = |path: &str, kind: &str, major: u32, minor: u32| json!({"path": path, "type": kind, "major": major, "minor": minor, "fileMode": 0o640, "uid": 7, "gid": 8});
    const LISTED: &str = "ls -ln /dev | grep -v kcore | awk '{print $1, $2, $3, $4, $5, $6}' | sort; ls -l /dev/fd /dev/stdin /dev/stdout /dev/stderr /dev/ptmx | sed 's/.*:[0-9][0-9] //'";
    vec![
        same(
            "linux: the devices that all have",
            json!({}),
            "ls -ln /dev | grep -v kcore | awk '{print $1, $3, $4, $5, $6, $NF}'",
        ),
        same(
            "linux: devices and their owners",
            devices(json!([
                node("/dev/tun", "c", 10, 200),
                node("/dev/u", "u", 5, 0),
                node("/dev/queue", "p", 0, 0)
            ])),
            LISTED,
        ),
        same(
            "linux: a device that may be used",
            allowed(json!([node("/dev/net/tun", "c", 10, 200)])),
            "ls -ln /dev/net/tun | cut -d' ' -f1-4; head -c0 /dev/net/tun; echo $?",
        ),
        same(
            "linux: a device that may not be used",
            devices(json!([node("/dev/kmsg", "c", 1, 11)])),
            "ls -ln /dev/kmsg | cut -d' ' -f1-4; head -c0 /dev/kmsg; echo $?",
        ),
        same(
            "linux: a device in a directory that is not there",
            devices(json!([node("/a/b/zero", "c", 1, 5)])),
            "ls -ln /a/b | awk '{print $1, $3, $4, $5, $6, $NF}'",
        ),
        same(
            "linux: a device in the place of another",
            devices(json!([node("/dev/null", "c", 1, 5)])),
            "ls -ln /dev/null | awk '{print $1, $3, $4, $5, $6}'",
        )
        .invalid("/dev/null"),
        same(
            "linux: a device in the place of a file",
            devices(json!([node("/data/file", "c", 1, 5)])),
            "ls -ln /data/file | awk '{print $1, $3, $4, $5, $6}'",
        ),
        same(
            "linux: a device without mode and owner",
            devices(json!([{"path": "/dev/zero2", "type": "c", "major": 1, "minor": 5}])),
            "ls -ln /dev/zero2 | awk '{print $1, $3, $4, $5, $6}'",
        ),
        same(
            "linux: a kind of device that nobody knows",
            devices(json!([{"path": "/dev/x", "type": "x", "major": 1, "minor": 5}])),
            "echo it runs",
        )
        .invalid("linux.devices[0].type"),
        same(
            "linux: a device without a path",
            devices(json!([{"path": "", "type": "c", "major": 1, "minor": 5}])),
            "echo it runs",
        ),
        refused(
            "no slot left for a disk",
            "linux: a block device",
            devices(json!([node("/dev/loop0", "b", 7, 0)])),
        ),
    ]
}

fn settings() -> Vec<Case> {
    let sysctl = |map: Value| linux(json!({"sysctl": map}));
    let policy = |change: Value| linux(json!({"memoryPolicy": change}));
    vec![
        same(
            "linux: settings of the namespaces",
            sysctl(json!({"net.ipv4.ip_forward": "1", "net/ipv4/ip_unprivileged_port_start": "80", "kernel.shmmax": "12345678", "kernel.msgmax": "9000",
                "fs.mqueue.msg_max": "22", "kernel.shm_rmid_forced": "1", "kernel.sem": "32000 1024000000 500 32000"})),
            "cd /proc/sys; for f in net/ipv4/ip_forward net/ipv4/ip_unprivileged_port_start kernel/shmmax kernel/msgmax fs/mqueue/msg_max kernel/shm_rmid_forced kernel/sem; do echo $f $(cat $f); done",
        )
        .alone(),
        same("linux: a setting of the kernel", sysctl(json!({"vm.swappiness": "10"})), "echo it runs").invalid("vm.swappiness"),
        same("linux: a setting that is not there", sysctl(json!({"net.ipv4.nosuch": "1"})), "echo it runs").invalid("nosuch"),
        same("linux: a value that the kernel does not take", sysctl(json!({"net.ipv4.ip_forward": "blue"})), "echo it runs").invalid("blue"),
        same("linux: the host name as a setting", sysctl(json!({"kernel.hostname": "web"})), "echo it runs").invalid("kernel.hostname"),
        same(
            "linux: host name and domain name",
            json!({"hostname": "web-0", "domainname": "example.org"}),
            "hostname; cat /proc/sys/kernel/hostname /proc/sys/kernel/domainname",
        )
        .alone(),
        same("linux: LINUX32", linux(json!({"personality": {"domain": "LINUX32"}})), "uname -m"),
        same("linux: LINUX32, for an exec", linux(json!({"personality": {"domain": "LINUX32"}})), "uname -m").exec(),
        same("linux: LINUX", linux(json!({"personality": {"domain": "LINUX"}})), "uname -m"),
        same("linux: a personality that nobody knows", linux(json!({"personality": {"domain": "SVR4"}})), "uname -m").invalid("linux.personality.domain"),
        refused("linux.personality.flags", "linux: flags of a personality", linux(json!({"personality": {"domain": "LINUX", "flags": ["ADDR_NO_RANDOMIZE"]}}))),
        refused("linux.memoryPolicy", "linux: memory of the default policy", policy(json!({"mode": "MPOL_DEFAULT", "nodes": ""}))),
        refused("linux.memoryPolicy", "linux: memory of one node", policy(json!({"mode": "MPOL_BIND", "nodes": "0", "flags": ["MPOL_F_STATIC_NODES"]}))),
        refused("linux.memoryPolicy", "linux: memory of nodes by their number", policy(json!({"mode": "MPOL_BIND", "nodes": "0", "flags": ["MPOL_F_RELATIVE_NODES"]}))),
        refused("linux.memoryPolicy", "linux: memory of a node that moves", policy(json!({"mode": "MPOL_BIND", "nodes": "0", "flags": ["MPOL_F_NUMA_BALANCING"]}))),
        refused("linux.memoryPolicy", "linux: memory of all nodes in turn", policy(json!({"mode": "MPOL_INTERLEAVE", "nodes": "0"}))),
        refused("linux.memoryPolicy", "linux: memory of all nodes in turn by weight", policy(json!({"mode": "MPOL_WEIGHTED_INTERLEAVE", "nodes": "0"}))),
        refused("linux.memoryPolicy", "linux: memory of a preferred node", policy(json!({"mode": "MPOL_PREFERRED", "nodes": "0"}))),
        refused("linux.memoryPolicy", "linux: memory of preferred nodes", policy(json!({"mode": "MPOL_PREFERRED_MANY", "nodes": "0"}))),
        refused("linux.memoryPolicy", "linux: memory of the node that runs", policy(json!({"mode": "MPOL_LOCAL", "nodes": ""}))),
        same("linux: a cgroup of a name", linux(json!({"cgroupsPath": "/corpus/web"})), "cat /proc/self/cgroup"),
        same("linux: an annotation", json!({"annotations": {"org.example.colour": "blue"}}), "echo it runs"),
    ]
}

fn hooks() -> Vec<Case> {
    let log = |kind: &str| json!([{"path": "/bin/busybox", "args": ["sh", "-c", format!("cat >/dev/null; echo {kind} $0 $A >>@/log"), kind], "env": ["A=1", "PATH=/bin"], "timeout": 60}]);
    let inside = |script: &str| json!([{"path": "/bin/busybox", "args": ["sh", "-c", script], "env": ["A=2", "PATH=/bin"], "timeout": 60}]);
    let slow = json!([{"path": "/bin/busybox", "args": ["sleep", "1000"], "timeout": 1}]);
    vec![
        same(
            "linux: hooks of all kinds",
            json!({
                "hooks": {
                    "prestart": log("prestart"), "createRuntime": log("createRuntime"), "poststart": log("poststart"), "poststop": log("poststop"),
                    "createContainer": inside("cat >/dev/null; [ $A = 2 ]"), "startContainer": inside("cat >/dev/null; env | sort >/started; pwd >>/started"),
                },
                "mounts+": [{"destination": "/log", "type": "bind", "source": "@/log", "options": ["bind"]}],
            }),
            "cat /started; until grep -q poststart /log; do :; done; cat /log",
        )
        .host("touch log")
        .alone(),
        same("linux: a hook that takes too long", json!({"hooks": {"createRuntime": slow}}), "echo it runs").invalid("createRuntime").alone(),
        same("linux: a hook of the container that takes too long", json!({"hooks": {"createContainer": slow}}), "echo it runs").invalid("createContainer").alone(),
        same("linux: a hook of the container's start that takes too long", json!({"hooks": {"startContainer": slow}}), "echo it runs").alone(),
        same("linux: a hook that is not there", json!({"hooks": {"createRuntime": [{"path": "/no/such"}]}}), "echo it runs").invalid("createRuntime").alone(),
        same("linux: a hook with a relative path", json!({"hooks": {"createRuntime": [{"path": "bin/busybox"}]}}), "echo it runs").invalid("createRuntime").alone(),
        refused("createContainer hook #0", "linux: a script as a hook of the container", json!({"hooks": {"createContainer": [{"path": "@/script"}]}}))
            .host("printf '#!/bin/sh\nexit 0\n' >script; chmod 755 script")
            .alone(),
    ]
}

fn refusals() -> Vec<Case> {
    let rdt = |change: Value| linux(json!({"intelRdt": change}));
    vec![
        refused(
            "linux.intelRdt",
            "linux: a class of the cache",
            rdt(json!({"closID": "web", "l3CacheSchema": "L3:0=f", "memBwSchema": "MB:0=50"})),
        ),
        refused(
            "linux.intelRdt",
            "linux: the cache monitored",
            rdt(json!({"enableMonitoring": true, "schemata": ["L3:0=f"]})),
        ),
        refused(
            "linux.netDevices",
            "linux: a network device of the host",
            linux(json!({"netDevices": {"no-such-device": {"name": "eth7"}}})),
        ),
        refused(
            "linux.mountLabel",
            "linux: an SELinux label of the mounts",
            linux(json!({"mountLabel": "system_u:object_r:container_file_t:s0"})),
        ),
        refused(
            "solaris",
            "linux: Solaris",
            json!({"solaris": {"milestone": "multi-user"}}),
        ),
        refused(
            "windows",
            "linux: Windows",
            json!({"windows": {"layerFolders": ["C:\\layer"]}}),
        ),
        refused(
            "vm",
            "linux: a VM",
            json!({"vm": {"kernel": {"path": "/vmlinuz"}}}),
        ),
        refused(
            "zos",
            "linux: z/OS",
            json!({"zos": {"namespaces": [{"type": "pid"}]}}),
        ),
        refused(
            "freebsd",
            "linux: FreeBSD",
            json!({"freebsd": {"jail": {"host": "new"}}}),
        ),
    ]
}
