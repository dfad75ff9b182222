//! Fields that interact: the bundles of `oci/pairs` that no topic of the others has.

use cube_tests::small;
use serde_json::{Value, json};

use super::seccomp::{SHELL, filter};
use crate::bundle::{Case, refused, same};

pub fn cases() -> Vec<Case> {
    let mut cases = programs();
    cases.extend(directories());
    cases.extend(users());
    cases.extend(mounts());
    cases.extend(devices());
    cases.extend(user_namespaces());
    cases.extend(namespaces());
    cases.extend(filters());
    cases.extend(hooks());
    cases.extend(cgroups());
    cases.extend(updates());
    cases
}

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": kind, "source": source, "options": options})
}

/// What the small bundle mounts, with the mount at `destination` changed; none: taken out.
fn mounts_but(destination: &str, instead: Option<Value>) -> Value {
    let mut list = small()["mounts"].clone();
    let mounts = list.as_array_mut().unwrap();
    let at = mounts.iter().position(|m| m["destination"] == destination);
    let at = at.unwrap();
    match instead {
        Some(mount) => mounts[at] = mount,
        None => drop(mounts.remove(at)),
    }
    list
}

/// The namespaces of the small bundle but one.
fn without(kind: &str) -> Value {
    let mut list = small()["linux"]["namespaces"].clone();
    list.as_array_mut().unwrap().retain(|n| n["type"] != kind);
    list
}

/// A number of the host for the first 1000 of a user namespace.
fn mapping(host: u32) -> Value {
    json!([{"containerID": 0, "hostID": host, "size": 1000}])
}

/// A container with a user namespace, and a change to it.
fn in_user_namespace(change: Value) -> Value {
    let mut change = change;
    let linux = &mut change["linux"];
    let others = linux.get("namespaces").cloned();
    let mut list = others.unwrap_or_else(|| small()["linux"]["namespaces"].clone());
    list.as_array_mut().unwrap().push(json!({"type": "user"}));
    linux["namespaces"] = list;
    for (field, host) in [("uidMappings", 100_000), ("gidMappings", 200_000)] {
        if linux.get(field).is_none() {
            linux[field] = mapping(host);
        }
    }
    change
}

/// The root file system is that of a user namespace.
const OWNED: &str = "chown -R 100000:200000 rootfs; chmod 755 . ..";

fn programs() -> Vec<Case> {
    let user = json!({"uid": 1000, "gid": 1001});
    // Whether /proc's files about a process are root's: not even its own user may read those of one with more rights.
    const SET_UID: &str = "/mnt/stat -c %u /proc/self/status; status 'NoNewPrivs'";
    const SET_UID_HOST: &str = "mkdir src; cp /bin/busybox src/stat; chmod 4755 src/stat";
    let set_uid = |options: &[&str], no_new_privileges: bool| json!({"process": {"user": user, "noNewPrivileges": no_new_privileges}, "mounts+": [mount("/mnt", "bind", "@/src", options)]});
    vec![
        same("pairs: a set-uid program", set_uid(&["bind"], false), SET_UID).host(SET_UID_HOST),
        same("pairs: a set-uid program and noNewPrivileges", set_uid(&["bind"], true), SET_UID).host(SET_UID_HOST),
        same("pairs: a set-uid program in a mount without them", set_uid(&["bind", "nosuid"], false), SET_UID).host(SET_UID_HOST),
        same("pairs: a set-uid program, for an exec", set_uid(&["bind"], true), SET_UID).host(SET_UID_HOST).exec(),
        same(
            "pairs: a program in the working directory",
            json!({"process": {"args": ["./prog", "a"], "cwd": "/data"}}),
            "",
        )
        .host("chown 0:0 rootfs; printf '#!/bin/sh\necho $0 $1 $PWD\n' >rootfs/data/prog; chmod 755 rootfs/data/prog"),
        same(
            "pairs: a program below the working directory",
            json!({"process": {"args": ["sub/prog"], "cwd": "/data"}}),
            "",
        )
        .host("chown 0:0 rootfs; printf '#!/bin/sh\necho $0 $PWD\n' >rootfs/data/sub/prog; chmod 755 rootfs/data/sub/prog"),
        same(
            "pairs: a program that PATH has in the working directory",
            json!({"process": {"args": ["prog"], "cwd": "/data", "env": ["PATH=sub:/bin"]}}),
            "",
        )
        .host("chown 0:0 rootfs; printf '#!/bin/sh\necho $0 $PWD\n' >rootfs/data/sub/prog; chmod 755 rootfs/data/sub/prog")
        .invalid("prog"),
        same(
            "pairs: a program that the user may not run",
            json!({"process": {"args": ["/data/prog"], "user": user, "capabilities": {"effective": [], "permitted": []}}}),
            "",
        )
        .host("chown 0:0 rootfs; cp /bin/busybox rootfs/data/prog; chmod 700 rootfs/data/prog")
        .invalid("/data/prog"),
        same(
            "pairs: a program in a mount without them",
            json!({"process": {"args": ["/mnt/echo", "it runs"]}, "mounts+": [mount("/mnt", "bind", "@/src", &["bind", "noexec"])]}),
            "",
        )
        .host("mkdir src; cp /bin/busybox src/echo")
        .invalid("/mnt/echo"),
        same(
            "pairs: a program that is masked",
            json!({"process": {"args": ["/bin/uname"]}, "linux": {"maskedPaths": ["/bin/uname"]}}),
            "",
        )
        .invalid("/bin/uname"),
    ]
}

fn directories() -> Vec<Case> {
    let user = json!({"uid": 1000, "gid": 1001, "umask": 0o77});
    vec![
        same(
            "pairs: a working directory that its user may not see",
            json!({"process": {"cwd": "/real", "user": user, "capabilities": {"effective": [], "permitted": []}}}),
            "pwd; ls .; touch x; cat /proc/self/cwd/file",
        )
        .host("chown 0:0 rootfs; echo text >rootfs/real/file; chmod 700 rootfs/real"),
        same(
            "pairs: a working directory that is its user's alone",
            json!({"process": {"cwd": "/real", "user": user, "capabilities": {"bounding": [], "effective": [], "permitted": []}}}),
            "pwd; touch x; ls -ln x | cut -c1-10",
        )
        .host("chown 1000:1001 rootfs/real; chmod 700 rootfs/real"),
        same(
            "pairs: a working directory in a volume that is not there",
            json!({"process": {"cwd": "/mnt/a/b", "user": user}, "mounts+": [mount("/mnt", "bind", "@/src", &["rbind"])]}),
            "pwd; ls -ldn . .. | awk '{print $1, $3, $4}'; touch x",
        )
        .host("mkdir src"),
        same(
            "pairs: a working directory that is a volume",
            json!({"process": {"cwd": "/mnt", "user": user}, "mounts+": [mount("/mnt", "bind", "@/src", &["rbind", "ro"])]}),
            "pwd; ls; touch x",
        )
        .host("mkdir src; touch src/file"),
        same(
            "pairs: a working directory that is masked",
            json!({"process": {"cwd": "/data/sub"}, "linux": {"maskedPaths": ["/data/sub"]}}),
            "pwd; ls -A .; ls -A /data/sub; touch x",
        ),
        same(
            "pairs: a working directory that is read-only",
            json!({"process": {"cwd": "/data/sub"}, "linux": {"readonlyPaths": ["/data"]}}),
            "pwd; touch x /data/sub/x",
        ),
        same(
            "pairs: a working directory that is not there, in a root that is read-only",
            json!({"process": {"cwd": "/a/b"}, "root": {"readonly": true}}),
            "pwd; ls -ldn /a/b | cut -d' ' -f1-4; touch x",
        ),
        same(
            "pairs: what a umask is not for",
            json!({
                "process": {"cwd": "/c/d", "user": {"uid": 0, "gid": 0, "umask": 0o77}},
                "mounts+": [mount("/m/n", "tmpfs", "a", &[]), mount("/o/p", "bind", "@/src", &["bind"])],
                "linux": {"devices": [
                    {"path": "/dev/zero2", "type": "c", "major": 1, "minor": 5, "fileMode": 0o666}, {"path": "/e/f/zero", "type": "c", "major": 1, "minor": 5, "fileMode": 0o666},
                ]},
            }),
            "umask; cd /; ls -ldn c c/d m o e e/f e/f/zero dev/zero2 | awk '{print $1, $NF}'",
        )
        .host("mkdir src"),
    ]
}

fn users() -> Vec<Case> {
    let nobody = json!({"bounding": [], "effective": [], "permitted": []});
    let limit = |kind: &str, n: u64| json!([{"type": kind, "soft": n, "hard": n}]);
    // Not a user that other bundles have: the processes of all containers count.
    let many = |uid: u32| json!({"process": {"user": {"uid": uid, "gid": 4321}, "capabilities": nobody, "rlimits": limit("RLIMIT_NPROC", 20)}});
    const MANY: &str = "n=0; while [ $n -lt 30 ]; do sleep 9 & n=$((n + 1)); done; echo all";
    const SHOWN: &str = "cut -d' ' -f18,19,40,41 /proc/$$/stat; ionice -p $$; status 'Cap...'";
    vec![
        same("pairs: too many processes of a user", many(4321), MANY),
        same("pairs: too many processes of root", many(0), MANY),
        same(
            "pairs: how nice a user may be",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}, "capabilities": nobody, "rlimits": limit("RLIMIT_NICE", 30)}}),
            "nice -n -5 cut -d' ' -f19 /proc/self/stat; nice -n -15 cut -d' ' -f19 /proc/self/stat",
        ),
        same(
            "pairs: groups of a user without the right to change them",
            json!({"process": {"user": {"uid": 1000, "gid": 1001, "additionalGids": [29, 50]}, "capabilities": nobody, "noNewPrivileges": true}}),
            "status 'Uid|Gid|Groups|Cap...|NoNewPrivs'",
        ),
        same(
            "pairs: priorities of a user without the right to raise them",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}, "capabilities": nobody,
                "scheduler": {"policy": "SCHED_RR", "priority": 3}, "ioPriority": {"class": "IOPRIO_CLASS_RT", "priority": 2}}}),
            SHOWN,
        ),
        same(
            "pairs: ambient capabilities of a user and noNewPrivileges, for a program of root",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}, "noNewPrivileges": true, "capabilities": {"inheritable": ["CAP_CHOWN"], "ambient": ["CAP_CHOWN"]}}}),
            "touch /tmp/f; chown 7:8 /tmp/f; ls -ln /tmp/f | awk '{print $3, $4}'; chown 7:8 /etc/passwd; ls -ln /etc/passwd | awk '{print $3, $4}'; status 'Cap...'",
        )
        .host("chown 0:0 rootfs"),
        same(
            "pairs: a terminal of a user in a root that is read-only, and noNewPrivileges",
            json!({"process": {"terminal": true, "noNewPrivileges": true, "user": {"uid": 1000, "gid": 1001}}, "root": {"readonly": true}}),
            "ls -ln /dev/console | awk '{print $1, $3}'; echo >/dev/console; options /dev/console; touch /new",
        )
        .exec(),
        same(
            "pairs: a terminal without a /dev of its own",
            json!({"process": {"terminal": true, "consoleSize": {"height": 20, "width": 70}}, "mounts": mounts_but("/dev", None)}),
            "stty -F /dev/console size; options /dev/console /dev/pts; ls /dev | grep -v core",
        )
        .exec(),
    ]
}

fn mounts() -> Vec<Case> {
    let propagation = |kind: &str, read_only: bool| {
        json!({"linux": {"rootfsPropagation": kind}, "root": {"readonly": read_only}, "mounts+": [
            mount("/m/1", "tmpfs", "a", &["private"]), mount("/m/2", "tmpfs", "a", &["shared"]), mount("/m/3", "tmpfs", "a", &["rslave"]), mount("/m/4", "tmpfs", "a", &["unbindable"]),
            mount("/m/5", "tmpfs", "a", &[]),
        ]})
    };
    const SHOWN: &str =
        "options / | cut -d' ' -f3- | sed 's/ *master//'; options '/m/[0-9]'; touch /new";
    let hidden = |read_only: &[&str], masked: &[&str]| json!({"linux": {"readonlyPaths": read_only, "maskedPaths": masked}});
    const HIDDEN: &str = "ls -A /data /data/sub; touch /data/new /data/sub/new; cat /data/file";
    vec![
        same("pairs: a root that is shared, and propagation of mounts", propagation("rshared", false), SHOWN),
        same("pairs: a root that follows, and propagation of mounts", propagation("rslave", true), SHOWN),
        same("pairs: a root that cannot be bound and is read-only", propagation("unbindable", true), SHOWN),
        same("pairs: a masked path in a read-only one", hidden(&["/data"], &["/data/sub"]), HIDDEN),
        same("pairs: a read-only path in a masked one", hidden(&["/data/sub"], &["/data"]), HIDDEN),
        same(
            "pairs: masked places of mounts",
            json!({
                "mounts+": [mount("/mnt", "tmpfs", "a", &["size=64k"]), mount("/etc/motd", "bind", "@/file", &["bind"])],
                "linux": {"maskedPaths": ["/mnt", "/etc/motd"]},
            }),
            "touch /mnt/new; ls -A /mnt; options /mnt | cut -d' ' -f1-2; cat /etc/motd; options /etc/motd | wc -l",
        )
        .host("echo text >file"),
        same(
            "pairs: masked and read-only devices",
            json!({"linux": {"devices": [{"path": "/dev/zero2", "type": "c", "major": 1, "minor": 5}], "maskedPaths": ["/dev/zero2"], "readonlyPaths": ["/dev/full"]}}),
            "head -c1 /dev/zero2 | wc -c; echo >/dev/full; options /dev/zero2 /dev/full",
        ),
        same(
            "pairs: a bind in a tmpfs that is read-only",
            json!({"mounts+": [mount("/mnt", "tmpfs", "a", &["ro"]), mount("/mnt/in/side", "bind", "@/src", &["bind"])]}),
            "options /mnt; touch /mnt/new /mnt/in/side/new; ls /mnt/in/side",
        )
        .host("mkdir src"),
        same(
            "pairs: a /dev that is read-only, and devices",
            json!({
                "mounts": mounts_but("/dev", Some(mount("/dev", "tmpfs", "tmpfs", &["nosuid", "mode=755", "ro"]))),
                "linux": {"devices": [{"path": "/dev/zero2", "type": "c", "major": 1, "minor": 5}]},
            }),
            "options /dev; ls -ln /dev | grep -v kcore | awk '{print $1, $3, $4, $5, $6, $NF}'; touch /dev/new; echo >/dev/null",
        ),
        same(
            "pairs: a tmpfs of a user",
            json!({"process": {"user": {"uid": 1000, "gid": 1001}, "capabilities": {"effective": [], "permitted": []}}, "mounts+": [
                mount("/m/1", "tmpfs", "a", &["mode=700", "uid=1000", "gid=1001"]), mount("/m/2", "tmpfs", "a", &["mode=700", "uid=7"]),
            ]}),
            "touch /m/1/new /m/2/new; ls -ln /m | awk '{print $1, $3, $4}'",
        ),
        same(
            "pairs: a proc that hides, of the pod, for a user",
            json!({
                "process": {"user": {"uid": 4322, "gid": 4322}, "capabilities": {"effective": [], "permitted": []}},
                "mounts+": [mount("/mnt", "proc", "proc", &["hidepid=2"])],
                "linux": {"namespaces": without("pid")},
            }),
            "for p in /mnt/[0-9]*; do stat -c %u $p 2>/dev/null; done | sort -u",
        ),
        same(
            "pairs: a volume over a volume that is read-only",
            json!({"mounts+": [mount("/mnt", "bind", "@/src", &["rbind", "ro"]), mount("/mnt/sub", "bind", "@/other", &["bind", "rw"])], "root": {"readonly": true}}),
            "touch /mnt/new /mnt/sub/new; ls /mnt/sub",
        )
        .host("mkdir -p src/sub other; touch other/file"),
    ]
}

fn devices() -> Vec<Case> {
    let zero = |path: &str| json!([{"path": path, "type": "c", "major": 1, "minor": 5, "fileMode": 0o666}]);
    vec![
        same(
            "pairs: a device in a mount without devices",
            json!({"mounts+": [mount("/mnt", "tmpfs", "a", &["nodev"])], "linux": {"devices": zero("/mnt/zero")}}),
            "ls -ln /mnt | awk '{print $1, $3, $4, $5, $6, $NF}'; head -c1 /mnt/zero | wc -c",
        )
        // runc makes it in the mount.
        .otherwise(0, "total     0\ncrw-rw-rw- 0 0 1, 5 zero\n1"),
        same(
            "pairs: a device in a root that is read-only",
            json!({"root": {"readonly": true}, "linux": {"devices": zero("/a/zero")}}),
            "ls -ln /a/zero | awk '{print $1, $3, $4, $5, $6, $NF}'; head -c1 /a/zero | wc -c; touch /a/new",
        ),
        same(
            "pairs: devices without a /dev of its own",
            json!({"mounts": mounts_but("/dev", None), "linux": {"devices": zero("/dev/zero2")}}),
            "ls -ln /dev | grep -v kcore | awk '{print $1, $3, $4, $5, $6, $NF}'",
        ),
        refused(
            "/dev cannot be bound",
            "pairs: devices and a /dev of the host",
            json!({"mounts": mounts_but("/dev", Some(mount("/dev", "bind", "@/src", &["rbind"]))), "linux": {"devices": zero("/dev/zero2")}}),
        )
        .host("mkdir src"),
        same(
            "pairs: a device at the place of a volume",
            json!({"mounts+": [mount("/data/file", "bind", "@/file", &["bind"])], "linux": {"devices": zero("/data/file")}}),
            "head -c1 /data/file | wc -c",
        )
        .host("echo text >file"),
        same(
            "pairs: binds of devices, and the rules for them",
            json!({
                "mounts+": [mount("/dev/zero2", "bind", "/dev/zero", &["bind"]), mount("/dev/log", "bind", "/dev/kmsg", &["bind"])],
                "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}},
            }),
            "head -c1 /dev/zero2 | wc -c; head -c0 /dev/log; ls -ln /dev/zero2 /dev/log | awk '{print $1, $3, $4, $5, $6, $NF}'",
        ),
        same(
            "pairs: rules for devices, and no right to make them",
            json!({"process": {"capabilities": {"bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "permitted": ["CAP_CHOWN"]}},
                "linux": {"resources": {"devices": [{"allow": true, "type": "a", "access": "rwm"}]}}}),
            "mknod /tmp/n c 1 3; mknod /tmp/p p && echo made",
        ),
        same(
            "pairs: devices of a user namespace",
            in_user_namespace(json!({"linux": {
                "devices": [{"path": "/dev/net/tun", "type": "c", "major": 10, "minor": 200, "fileMode": 0o600, "uid": 7, "gid": 8}],
                "resources": {"devices": [{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 10, "minor": 200, "access": "rwm"}]},
            }})),
            "ls -ln /dev/net/tun /dev/null /dev/zero | awk '{print $3, $4, $5, $6, $NF}'; echo >/dev/null; mknod /tmp/n c 1 3",
        )
        .host(OWNED),
    ]
}

fn user_namespaces() -> Vec<Case> {
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

fn namespaces() -> Vec<Case> {
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

fn filters() -> Vec<Case> {
    let on = |names: &[&str]| {
        filter(json!([{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": 28}]))
    };
    let with = |mut change: Value, process: Value| {
        change["process"] = process;
        change
    };
    let user = |no_new_privileges: bool| {
        with(
            on(&[
                "setuid",
                "setgid",
                "setgroups",
                "setresuid",
                "setresgid",
                "capset",
                "chdir",
            ]),
            json!({"user": {"uid": 1000, "gid": 1001, "additionalGids": [29]}, "cwd": "/tmp", "noNewPrivileges": no_new_privileges}),
        )
    };
    const WHO: &str = "status 'Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp'; pwd";
    let of_sethostname = |rule: Value| {
        let mut rule = rule;
        rule["names"] = json!(["sethostname"]);
        filter(json!([rule]))
    };
    const CALL: &str = "sh -c 'hostname new' 2>&1 | sed 's/ (core dumped)//'; sh -c 'hostname new' 2>/dev/null; echo $?";
    vec![
        same("pairs: a filter for what makes a user, and noNewPrivileges", user(true), WHO),
        same("pairs: a filter for what makes a user, and noNewPrivileges, for an exec", user(true), WHO).exec(),
        same("pairs: a filter for what makes a user", user(false), WHO).invalid("No space left on device"),
        same(
            "pairs: a filter for what has been set by then",
            {
                let mut change = with(
                    on(&["personality", "sched_setattr", "sched_setscheduler", "setpriority", "ioprio_set", "sethostname", "setdomainname", "mount", "mknod", "mknodat", "keyctl", "umask"]),
                    json!({"user": {"uid": 0, "gid": 0, "umask": 0o27}, "scheduler": {"policy": "SCHED_BATCH", "nice": 7}, "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 6}}),
                );
                change["linux"]["personality"] = json!({"domain": "LINUX32"});
                change
            },
            "uname -m; cut -d' ' -f18,19,40,41 /proc/$$/stat; ionice -p $$; status Umask; nice -n 9 true",
        ),
        same(
            "pairs: the number of an error with an action that has none",
            of_sethostname(json!({"action": "SCMP_ACT_KILL_PROCESS", "errnoRet": 5})),
            CALL,
        ),
        same(
            "pairs: a second value with an operator that has none",
            of_sethostname(json!({"action": "SCMP_ACT_ERRNO", "args": [{"index": 1, "value": 3, "valueTwo": 7, "op": "SCMP_CMP_EQ"}]})),
            "hostname new; hostname newer",
        ),
        same(
            "pairs: a default number of an error with a default that has none",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "defaultErrnoRet": 5, "syscalls": [{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO"}]}}}),
            CALL,
        ),
        same(
            "pairs: another number of an error than the default's",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 61, "syscalls": [
                {"names": SHELL.as_slice(), "action": "SCMP_ACT_ALLOW"}, {"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
                {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}, {"names": ["rmdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 61},
            ]}}}),
            "hostname new; mkdir /tmp/d; rmdir /data/sub; rm /data/file",
        ),
        same(
            "pairs: two actions for one call",
            filter(json!([{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}, {"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}])),
            CALL,
        ),
        same(
            "pairs: the default action NOTIFY",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_NOTIFY", "listenerPath": "/run/listener"}}}),
            "echo it runs",
        )
        .invalid("linux.seccomp"),
        refused(
            "linux.seccomp.listenerPath",
            "pairs: NOTIFY and its listener",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/listener", "listenerMetadata": "web",
                "syscalls": [{"names": ["sethostname"], "action": "SCMP_ACT_NOTIFY"}]}}}),
        ),
    ]
}

fn hooks() -> Vec<Case> {
    let hook = |script: &str| json!([{"path": "/bin/busybox", "args": ["sh", "-c", script]}]);
    let mut inside = filter(
        json!([{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}]),
    );
    inside["hooks"] = json!({"startContainer": hook(
        "cat >/dev/null; exec >/tmp/hook 2>&1; umask; pwd; env | sort; ulimit -n; grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp):' /proc/self/status; cat /proc/self/oom_score_adj; mkdir /tmp/d; touch /new; true",
    )});
    inside["root"] = json!({"readonly": true});
    inside["mounts+"] = json!([mount("/tmp", "tmpfs", "tmpfs", &["mode=1777"])]);
    inside["process"] = json!({
        "user": {"uid": 1000, "gid": 1001, "additionalGids": [29], "umask": 0o27}, "cwd": "/data", "env+": ["A=1"], "noNewPrivileges": true, "oomScoreAdj": 77,
        "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 100, "hard": 200}],
        "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "inheritable": ["CAP_CHOWN"], "ambient": ["CAP_CHOWN"]},
    });
    vec![
        same("pairs: a hook of the container's start is its user's", inside, "cat /tmp/hook"),
        same(
            "pairs: a hook of the container's start, without a PID namespace",
            json!({
                "hooks": {"startContainer": hook("sed -E 's/.*\"pid\":([0-9]+).*/\\1/' >/tmp/pid")},
                "linux": {"namespaces": without("pid")},
            }),
            "[ \"$(cat /tmp/pid)\" = $$ ] && echo the same || cat /tmp/pid",
        ),
        same(
            "pairs: a hook of the container in a user namespace",
            in_user_namespace(json!({"hooks": {"createContainer": hook("cat >/dev/null; read a b c </proc/self/uid_map; [ $b = 100000 ]")}})),
            "echo it runs",
        )
        .host(OWNED),
        same(
            "pairs: a hook of the host is told of annotations",
            json!({
                "annotations": {"org.example.colour": "blue"},
                "hooks": {"createRuntime": hook("cat >@/state")},
                "mounts+": [mount("/state", "bind", "@/state", &["bind"])],
            }),
            "tr ',{}' '\\n\\n\\n' </state | grep org.example",
        )
        .host("touch state")
        .alone(),
    ]
}

const CPU: &str = "group cpu.weight cpu.max cpu.max.burst cpu.idle";
const MEMORY: &str = "group memory.max memory.swap.max memory.low memory.high";

fn cgroups() -> Vec<Case> {
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

fn updates() -> Vec<Case> {
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
