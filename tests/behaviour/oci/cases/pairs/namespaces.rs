//! Fields that interact: namespaces.

use serde_json::json;

use super::{OWNED, in_user_namespace, mount, mounts_but, without};
use crate::bundle::{Case, refused, same};
use crate::cases::seccomp::filter;

pub(super) fn user_namespaces() -> Vec<Case> {
    let user = json!({"uid": 7, "gid": 8, "additionalGids": [9], "umask": 0o27});
    const FIFO: &str = "cut -d' ' -f18,19,40,41 /proc/$$/stat";
    vec![
        same(
            "pairs: limits and priorities in a user namespace",
            in_user_namespace(json!({"process": {
                "oomScoreAdj": -500, "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 700_000, "hard": 700_000}, {"type": "RLIMIT_NICE", "soft": 30, "hard": 30}],
                "scheduler": {"policy": "SCHED_OTHER", "nice": 5}, "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 6}, "cwd": "/c/d",
            }})),
            "cat /proc/self/oom_score_adj; limits 'open files|nice priority'; cut -d' ' -f18,19,40,41 /proc/$$/stat; ionice -p $$; pwd; ls -ldn /c /c/d | awk '{print $1, $3, $4}'",
        )
        .host(OWNED),
        same(
            "pairs: rights of a user in a user namespace",
            in_user_namespace(json!({"process": {"user": user, "noNewPrivileges": true, "capabilities": {
                "bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "inheritable": ["CAP_CHOWN"], "ambient": ["CAP_CHOWN"],
            }}})),
            "status 'Uid|Gid|Groups|Umask|Cap...|NoNewPrivs'; touch /tmp/f; chown 9:9 /tmp/f; ls -ln /tmp/f | awk '{print $1, $3, $4}'",
        )
        .host(OWNED),
        same("pairs: SCHED_FIFO in a user namespace", in_user_namespace(json!({"process": {"scheduler": {"policy": "SCHED_FIFO", "priority": 5}}})), FIFO)
            .host(OWNED)
            .invalid("process.scheduler"),
        same("pairs: IOPRIO_CLASS_RT in a user namespace", in_user_namespace(json!({"process": {"ioPriority": {"class": "IOPRIO_CLASS_RT", "priority": 5}}})), "ionice -p $$")
            .host(OWNED)
            .invalid("process.ioPriority"),
        same(
            "pairs: a group that has no number outside",
            in_user_namespace(json!({"process": {"user": {"uid": 7, "gid": 8, "additionalGids": [5000]}}})),
            "status Groups",
        )
        .host(OWNED)
        .invalid("process.user.additionalGids"),
        same(
            "pairs: a terminal in a user namespace",
            in_user_namespace(json!({"process": {"terminal": true, "user": user, "consoleSize": {"height": 20, "width": 70}}})),
            "stty -F /dev/console size; ls -ln /dev/pts/0 /dev/console | awk '{print $1, $3, $4}'; options /dev/console",
        )
        .host(OWNED)
        .exec(),
        same(
            "pairs: volumes in a user namespace",
            in_user_namespace(json!({"mounts+": [
                mount("/mnt", "bind", "@/src", &["rbind"]), mount("/m/1", "bind", "@/src", &["rbind", "ro", "nosuid", "nodev", "noexec"]), mount("/m/2", "tmpfs", "a", &["uid=7", "gid=8", "mode=750", "size=64k"]),
                mount("/m/3", "devpts", "devpts", &["newinstance", "mode=620", "gid=5"]), mount("/m/4", "proc", "proc", &[]), mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            ]})),
            "cd /mnt; ls -ln . | awk '{print $1, $3, $4, $NF}'; cat theirs mine; echo >theirs; echo >mine; touch new; chown 3:3 new mine theirs; ls -ln new | awk '{print $3, $4}'; volumes /mnt; \
             touch /m/1/new; volumes /m/1; ls -ln /m | awk '{print $1, $3, $4, $NF}' | grep -v 4$; touch /m/2/new; options /m/2 /m/3 /m/4; ls -ln /m/3 | awk '{print $1, $3, $4, $NF}'; ls -d /dev/mqueue",
        )
        .host("chown -R 100000:200000 rootfs; chmod 755 . ..; mkdir src; echo 1 >src/theirs; chmod 600 src/theirs; echo 2 >src/mine; chown -R 100000:200000 src/mine; chmod 600 src/mine; chown 100000 src"),
        same(
            "pairs: a root that is read-only, and hidden paths, in a user namespace",
            in_user_namespace(json!({
                "root": {"readonly": true},
                "linux": {"maskedPaths": ["/data/file", "/proc/kcore", "/sys/firmware"], "readonlyPaths": ["/proc/sys", "/mnt"]},
                "mounts+": [mount("/mnt", "tmpfs", "a", &["nosuid", "noexec"])],
            })),
            "cat /data/file; touch /new /mnt/new; options /proc/sys /mnt; ls /sys/firmware; echo 1 >/proc/sys/kernel/domainname",
        )
        .host(OWNED),
        same(
            "pairs: a root that is shared, in a user namespace",
            in_user_namespace(json!({"linux": {"rootfsPropagation": "rshared"}, "mounts+": [mount("/mnt", "tmpfs", "a", &["rslave"])]})),
            "options / | cut -d' ' -f1,3- | sed 's/ *master//'; options /mnt",
        )
        .host(OWNED),
        same(
            "pairs: a group of terminals that has no number outside",
            in_user_namespace(json!({
                "linux": {"gidMappings": [{"containerID": 0, "hostID": 200_000, "size": 2}]},
                "mounts": mounts_but("/dev/pts", Some(mount("/dev/pts", "devpts", "devpts", &["newinstance", "gid=5"]))),
            })),
            "options /dev/pts",
        )
        .host(OWNED)
        .invalid("/dev/pts"),
        same(
            "pairs: a working directory that root of the user namespace may not see",
            in_user_namespace(json!({"process": {"cwd": "/real"}})),
            "pwd",
        )
        .host("chown -R 100000:200000 rootfs; chown 0:0 rootfs/real; chmod 700 rootfs/real; chmod 755 . ..")
        .invalid("process.cwd"),
        refused(
            "is id-mapped, which is not supported",
            "pairs: idmap in a user namespace",
            in_user_namespace(json!({"mounts+": [mount("/mnt", "bind", "@/src", &["bind", "idmap"])]})),
        )
        .host("mkdir src"),
        same(
            "pairs: the time in a user namespace",
            {
                let mut change = in_user_namespace(json!({"linux": {"timeOffsets": {"boottime": {"secs": 1_000_000}}}}));
                change["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "time"}));
                change
            },
            "cut -c1-4 /proc/uptime",
        )
        .host(OWNED),
        same(
            "pairs: a filter in a user namespace",
            in_user_namespace(filter(json!([{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}]))),
            "mkdir /tmp/d; status 'Seccomp|NoNewPrivs'",
        )
        .host(OWNED),
        same(
            "pairs: a setting of a user namespace",
            in_user_namespace(json!({"linux": {"sysctl": {"user.max_uts_namespaces": "17"}}})),
            "cat /proc/sys/user/max_uts_namespaces",
        )
        .host(OWNED),
        same(
            "pairs: a setting of a user namespace that there is not",
            json!({"linux": {"sysctl": {"user.max_uts_namespaces": "17"}}}),
            "cat /proc/sys/user/max_uts_namespaces",
        )
        .invalid("user.max_uts_namespaces"),
        same(
            "pairs: cgroups of a user namespace",
            in_user_namespace(json!({"mounts": mounts_but("/sys/fs/cgroup", Some(mount("/sys/fs/cgroup", "cgroup", "cgroup", &["rw"])))})),
            CGROUPS,
        )
        .host(OWNED),
        same(
            "pairs: cgroups of a user in a user namespace",
            in_user_namespace(json!({
                "process": {"user": user, "capabilities": {"effective": [], "permitted": []}},
                "mounts": mounts_but("/sys/fs/cgroup", Some(mount("/sys/fs/cgroup", "cgroup", "cgroup", &["rw"]))),
            })),
            CGROUPS,
        )
        .host(OWNED),
    ]
}

/// Who may change the container's cgroup.
const CGROUPS: &str = "options /sys/fs/cgroup | tail -n 1; cd /sys/fs/cgroup; ls -ldn . cgroup.procs cgroup.subtree_control cgroup.threads memory.max memory.oom.group pids.max cpu.max | awk '{print $1, $3, $4, $NF}'; mkdir x && echo made; echo $$ >x/cgroup.procs && cat /proc/self/cgroup; echo $$ >cgroup.procs; rmdir x; echo 9 >pids.max && cat pids.max";

pub(super) fn namespaces() -> Vec<Case> {
    let rw = mounts_but(
        "/sys/fs/cgroup",
        Some(mount("/sys/fs/cgroup", "cgroup", "cgroup", &["rw"])),
    );
    let sysctl = |key: &str, value: &str, absent: &str| json!({"linux": {"sysctl": {key: value}, "namespaces": without(absent)}});
    vec![
        same(
            "pairs: cgroups of a user",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}, "capabilities": {"effective": [], "permitted": []}}, "mounts": rw}),
            CGROUPS,
        ),
        same("pairs: cgroups of root", json!({"mounts": rw}), CGROUPS),
        same(
            "pairs: cgroups that can be written, without a namespace of its own",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}}, "mounts": rw, "linux": {"namespaces": without("cgroup")}}),
            "options /sys/fs/cgroup | tail -n 1; cd /sys/fs/cgroup; ls -ldn . pids.max | awk '{print $1, $3, $4, $NF}'; mkdir x",
        ),
        same(
            "pairs: a cgroup of a name, without a namespace of its own",
            json!({"linux": {"cgroupsPath": "/corpus/name", "namespaces": without("cgroup")}}),
            "cat /proc/self/cgroup",
        )
        .otherwise(0, "0::/pod/ID"),
        same("pairs: a setting of IPC without a namespace of its own", sysctl("kernel.msgmax", "9001", "ipc"), "cat /proc/sys/kernel/msgmax").alone().otherwise(0, "9001"),
        same("pairs: a setting of message queues without a namespace of its own", sysctl("fs.mqueue.msg_max", "21", "ipc"), "cat /proc/sys/fs/mqueue/msg_max").alone().otherwise(0, "21"),
        same("pairs: a setting of the network without a namespace of its own", sysctl("net.ipv4.ip_forward", "1", "network"), "cat /proc/sys/net/ipv4/ip_forward").alone().otherwise(0, "1"),
        same("pairs: a domain name as a setting, without a namespace of its own", sysctl("kernel.domainname", "example.net", "uts"), "cat /proc/sys/kernel/domainname").alone().otherwise(0, "example.net"),
        same(
            "pairs: a host name and a domain name without a namespace of their own",
            json!({"hostname": "web-1", "domainname": "example.org", "linux": {"namespaces": without("uts")}}),
            "hostname; cat /proc/sys/kernel/domainname",
        )
        .alone()
        .otherwise(0, "web-1\nexample.org"),
        same(
            "pairs: a domain name, also as a setting",
            json!({"domainname": "example.org", "linux": {"sysctl": {"kernel.domainname": "example.net"}}}),
            "cat /proc/sys/kernel/domainname",
        )
        .alone(),
        same(
            "pairs: settings below a path that is read-only",
            json!({"linux": {"sysctl": {"net.ipv4.ip_forward": "1", "kernel.msgmax": "9002"}, "readonlyPaths": ["/proc/sys"], "maskedPaths": ["/proc/sys/net"]}}),
            "cat /proc/sys/kernel/msgmax; ls /proc/sys/net; echo 1 >/proc/sys/kernel/msgmax",
        )
        .alone(),
        same(
            "pairs: what is left behind without a PID namespace",
            json!({"linux": {"namespaces": without("pid")}}),
            "sleep 1000 & sh -c 'sleep 1000 & sleep 1000' & echo done",
        ),
    ]
}
