//! Fields that interact: programs, directories, users, filters and hooks.

use serde_json::{Value, json};

use super::{OWNED, in_user_namespace, mount, mounts_but, without};
use crate::bundle::{Case, refused, same};
use crate::cases::seccomp::{SHELL, filter};

pub(super) fn programs() -> Vec<Case> {
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

pub(super) fn directories() -> Vec<Case> {
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

pub(super) fn users() -> Vec<Case> {
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

pub(super) fn filters() -> Vec<Case> {
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

pub(super) fn hooks() -> Vec<Case> {
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
