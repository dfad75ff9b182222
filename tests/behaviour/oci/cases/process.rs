//! `process`: who runs, with which rights, limits and priorities.

use serde_json::{Value, json};

use crate::bundle::{Case, refused, same};

const IDENTITY: &str = "status 'Uid|Gid|Groups|Umask|Cap...|NoNewPrivs|Seccomp'; pwd; env | sort";

fn scheduler(change: Value) -> Value {
    json!({"process": {"scheduler": change}})
}

pub fn cases() -> Vec<Case> {
    let mut cases = users();
    cases.extend(programs());
    cases.extend(limits());
    cases.extend(priorities());
    cases.extend(refusals());
    cases
}

fn users() -> Vec<Case> {
    vec![
        same("process: the small bundle", json!({"ociVersion": "1.2.0"}), IDENTITY),
        same(
            "process: a user with groups and a umask",
            json!({"process": {"user": {"uid": 1000, "gid": 1001, "additionalGids": [29, 50], "umask": 0o27}}}),
            "status 'Uid|Gid|Groups|Umask|Cap...'; env | sort; touch /tmp/f; mkdir /tmp/d; ls -ln /tmp | awk '{print $1, $3, $4, $NF}'; touch /etc/f; ls -l /proc/self/fd/1 | wc -l",
        ),
        same(
            "process: an exec of a user with groups and a umask",
            json!({"process": {"user": {"uid": 1000, "gid": 1001, "additionalGids": [29], "umask": 0o27}}}),
            IDENTITY,
        )
        .exec(),
        same(
            "process: the umask alone",
            json!({"process": {"user": {"umask": 0o77}}}),
            "umask; echo > /tmp/f; ls -ln /tmp/f | cut -c1-10",
        ),
        same(
            "process: a user, capabilities of all sets and noNewPrivileges",
            json!({"process": {"user": {"uid": 1000, "gid": 1000}, "noNewPrivileges": true, "capabilities": {
                "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"], "permitted": ["CAP_CHOWN", "CAP_KILL"],
                "effective": ["CAP_KILL"], "inheritable": ["CAP_CHOWN", "CAP_KILL"], "ambient": ["CAP_KILL"],
            }}}),
            IDENTITY,
        ),
        same(
            "process: an exec with capabilities of all sets and noNewPrivileges",
            json!({"process": {"user": {"uid": 1000, "gid": 1000}, "noNewPrivileges": true, "capabilities": {
                "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"], "permitted": ["CAP_CHOWN", "CAP_KILL"],
                "effective": ["CAP_KILL"], "inheritable": ["CAP_CHOWN", "CAP_KILL"], "ambient": ["CAP_KILL"],
            }}}),
            IDENTITY,
        )
        .exec(),
        same(
            "process: a user with capabilities that are not ambient",
            json!({"process": {"user": {"uid": 1000, "gid": 1000}}}),
            IDENTITY,
        ),
        same(
            "process: an ambient capability that is not inheritable",
            json!({"process": {"capabilities": {"inheritable": [], "ambient": ["CAP_KILL"]}}}),
            IDENTITY,
        ),
        same(
            "process: capabilities that are permitted but not bounding",
            json!({"process": {"capabilities": {"bounding": ["CAP_CHOWN"]}}}),
            IDENTITY,
        ),
        same(
            "process: an inheritable capability of root",
            json!({"process": {"capabilities": {"inheritable": ["CAP_CHOWN"]}}}),
            IDENTITY,
        ),
        same("process: no capabilities", json!({"process": {"capabilities": null}}), "status 'Cap...'")
            .otherwise(0, "CapInh: 0000000000000000
CapPrm: 0000000000000000
CapEff: 0000000000000000
CapBnd: 0000000000000000
CapAmb: 0000000000000000"),
        same("process: an empty set of capabilities", json!({"process": {"capabilities": {"bounding": []}}}), IDENTITY),
        refused("CAP_FLY", "process: a capability that nobody knows",
            json!({"process": {"capabilities": {"bounding+": ["CAP_FLY"], "permitted+": ["CAP_FLY"]}}})),
        same("process: noNewPrivileges of root", json!({"process": {"noNewPrivileges": true}}), IDENTITY),
        same(
            "process: what belongs to Windows",
            json!({"process": {"user": {"username": "ContainerUser"}, "commandLine": "cmd /c ver"}}),
            IDENTITY,
        ),
    ]
}

fn programs() -> Vec<Case> {
    vec![
        same(
            "process: arguments and variables",
            json!({"process": {
                "args": ["/bin/sh", "-c", "echo \"$0|$1|$2\"; env | sort", "", "two words", "*"],
                "env": ["PATH=/nowhere", "A=1", "A=2", "EMPTY=", "LINE=a\nb", "PATH=/bin:/sbin"],
            }}),
            "",
        ),
        same("process: no variables", json!({"process": {"env": [], "args": ["/bin/env"]}}), ""),
        same("process: no PATH to find the program by", json!({"process": {"env": ["A=1"]}}), "env").invalid("executable file not found in $PATH"),
        same("process: a HOME of its own", json!({"process": {"env+": ["HOME=/elsewhere"]}}), "env | sort"),
        same("process: an empty HOME", json!({"process": {"env+": ["HOME="]}}), "env | sort"),
        same("process: a working directory that is not there", json!({"process": {"cwd": "/a/b"}}), "pwd; ls -ldn /a /a/b | cut -d' ' -f1-7"),
        same(
            "process: a working directory that is not there, for a user",
            json!({"process": {"cwd": "/c/d", "user": {"uid": 1000, "gid": 1001}}}),
            "pwd; touch x; ls -ldn /c/d | cut -c1-10",
        ),
        same("process: a working directory behind a link", json!({"process": {"cwd": "/link"}}), "pwd; pwd -P"),
        same("process: a working directory that is a file", json!({"process": {"cwd": "/etc/passwd"}}), "pwd").invalid("process.cwd"),
        refused("process.cwd", "process: a working directory that is not in a new mount",
            json!({
                "process": {"cwd": "/mnt/x/y"},
                "mounts+": [{"destination": "/mnt", "type": "tmpfs", "source": "tmpfs", "options": ["mode=700"]}],
            }),
            ),
        same(
            "process: a terminal and its size, for a user",
            json!({"process": {"terminal": true, "consoleSize": {"height": 31, "width": 97}, "user": {"uid": 1000, "gid": 1001}}}),
            "stty -F /dev/console size; ls -ln /dev/pts/0 | cut -d' ' -f1-5; ls -l /proc/1/fd | grep -c pts/0; options /dev/console; env | sort",
        )
        .exec(),
        same(
            "process: a size without a terminal",
            json!({"process": {"consoleSize": {"height": 31, "width": 97}}}),
            "stty size; ls /dev | grep -v core",
        ),
    ]
}

fn limits() -> Vec<Case> {
    let kinds = [
        "AS",
        "CORE",
        "CPU",
        "DATA",
        "FSIZE",
        "LOCKS",
        "MEMLOCK",
        "MSGQUEUE",
        "NICE",
        "NOFILE",
        "NPROC",
        "RSS",
        "RTPRIO",
        "RTTIME",
        "SIGPENDING",
        "STACK",
    ];
    let all: Vec<_> = kinds
        .iter()
        .zip(1..)
        .map(|(kind, n)| {
            let (soft, hard) = match *kind {
                // runc's own process has them for a while, and threads with stacks as large as these are here.
                "AS" | "DATA" => (1_u64 << 40, (1_u64 << 41) + n),
                "NICE" => (20, 30),
                "NOFILE" => (1000, 2000),
                "RTPRIO" => (3, 7),
                _ => (1 << 28, (1 << 29) + n),
            };
            json!({"type": format!("RLIMIT_{kind}"), "soft": soft, "hard": hard})
        })
        .collect();
    const ALL: &str = "grep -v '^Limit' /proc/$$/limits";
    let one = |kind: &str, soft: u64, hard: u64| json!({"process": {"rlimits": [{"type": kind, "soft": soft, "hard": hard}]}});
    vec![
        same(
            "process: every limit",
            json!({"process": {"rlimits": all.clone()}}),
            ALL,
        ),
        same(
            "process: every limit, for an exec of a user",
            json!({"process": {"rlimits": all, "user": {"uid": 1000, "gid": 1000}}}),
            ALL,
        )
        .exec(),
        same(
            "process: no limit at all",
            one("RLIMIT_MEMLOCK", u64::MAX, u64::MAX),
            "limits 'locked memory'",
        ),
        same(
            "process: a limit that a user could not raise",
            json!({"process": {"rlimits": [{"type": "RLIMIT_NOFILE", "soft": 700_000, "hard": 700_000}], "user": {"uid": 1000, "gid": 1000},
                "capabilities": null}}),
            "limits 'open files'",
        ),
        same(
            "process: a limit above its bound",
            one("RLIMIT_NOFILE", 2000, 1000),
            "limits 'open files'",
        )
        .invalid("process.rlimits"),
        same(
            "process: a limit that nobody knows",
            one("RLIMIT_WEIGHT", 1, 1),
            "echo it runs",
        )
        .invalid("process.rlimits[0].type"),
        same(
            "process: a limit twice",
            json!({"process": {"rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": 100, "hard": 100}, {"type": "RLIMIT_NOFILE", "soft": 200, "hard": 200},
            ]}}),
            "limits 'open files'",
        ),
        same(
            "process: oomScoreAdj",
            json!({"process": {"oomScoreAdj": 321}}),
            "cat /proc/self/oom_score_adj",
        ),
        same(
            "process: oomScoreAdj below zero, for a user",
            json!({"process": {"oomScoreAdj": -500, "user": {"uid": 1000, "gid": 1000}}}),
            "cat /proc/self/oom_score_adj",
        ),
        same(
            "process: oomScoreAdj for an exec",
            json!({"process": {"oomScoreAdj": 123}}),
            "cat /proc/self/oom_score_adj",
        )
        .exec(),
        same(
            "process: oomScoreAdj out of range",
            json!({"process": {"oomScoreAdj": 5000}}),
            "cat /proc/self/oom_score_adj",
        )
        .invalid("process.oomScoreAdj"),
    ]
}

fn priorities() -> Vec<Case> {
    const SHOWN: &str = "cut -d' ' -f18,19,40,41 /proc/$$/stat";
    let io = |class: &str, priority: i32| json!({"process": {"ioPriority": {"class": class, "priority": priority}}});
    vec![
        same("process: SCHED_OTHER and a nice value", scheduler(json!({"policy": "SCHED_OTHER", "nice": 7})), SHOWN),
        same("process: SCHED_FIFO", scheduler(json!({"policy": "SCHED_FIFO", "priority": 5})), SHOWN),
        same(
            "process: SCHED_RR, for an exec of a user",
            json!({"process": {"scheduler": {"policy": "SCHED_RR", "priority": 6}, "user": {"uid": 1000, "gid": 1000}}}),
            SHOWN,
        )
        .exec(),
        same("process: SCHED_BATCH", scheduler(json!({"policy": "SCHED_BATCH", "nice": -3})), SHOWN),
        same("process: SCHED_IDLE", scheduler(json!({"policy": "SCHED_IDLE"})), SHOWN),
        same("process: SCHED_ISO, which Linux does not have", scheduler(json!({"policy": "SCHED_ISO"})), SHOWN).invalid("process.scheduler"),
        same(
            "process: SCHED_DEADLINE",
            scheduler(json!({
                "policy": "SCHED_DEADLINE", "runtime": 10_000_000, "deadline": 50_000_000, "period": 60_000_000,
                "flags": ["SCHED_FLAG_RECLAIM", "SCHED_FLAG_DL_OVERRUN", "SCHED_FLAG_RESET_ON_FORK"],
            })),
            SHOWN,
        ),
        same(
            "process: a scheduler whose policy and parameters stay",
            scheduler(json!({"policy": "SCHED_OTHER", "flags": ["SCHED_FLAG_KEEP_POLICY", "SCHED_FLAG_KEEP_PARAMS"]})),
            SHOWN,
        ),
        same(
            "process: a scheduler with clamps",
            scheduler(json!({"policy": "SCHED_OTHER", "flags": ["SCHED_FLAG_UTIL_CLAMP_MIN", "SCHED_FLAG_UTIL_CLAMP_MAX"]})),
            SHOWN,
        ).invalid("process.scheduler"),
        same("process: SCHED_FIFO without a priority", scheduler(json!({"policy": "SCHED_FIFO"})), SHOWN).invalid("process.scheduler"),
        same("process: IOPRIO_CLASS_RT", io("IOPRIO_CLASS_RT", 3), "ionice -p $$"),
        same("process: IOPRIO_CLASS_BE", io("IOPRIO_CLASS_BE", 6), "ionice -p $$"),
        same("process: IOPRIO_CLASS_IDLE, for an exec", io("IOPRIO_CLASS_IDLE", 0), "ionice -p $$").exec(),
        same(
            "process: the processors of an exec",
            json!({"process": {"execCPUAffinity": {"initial": "0", "final": "1"}}}),
            "status Cpus_allowed_list; status Cpus_allowed_list; sed -n s/^Cpus_allowed_list://p /proc/1/status",
        )
        .exec(),
        same(
            "process: the processors of an exec, of which one is not in its cgroup",
            json!({"process": {"execCPUAffinity": {"final": "0"}}, "linux": {"resources": {"cpu": {"cpus": "1"}}}}),
            "status Cpus_allowed_list",
        ).invalid("process.execCPUAffinity")
        .exec(),
    ]
}

fn refusals() -> Vec<Case> {
    vec![
        same("process: no program", json!({"process": {"args": []}}), "").invalid("process.args"),
        same(
            "process: a program that is not there",
            json!({"process": {"args": ["nosuch"]}}),
            "",
        )
        .invalid("nosuch"),
        same(
            "process: a relative working directory",
            json!({"process": {"cwd": "tmp"}}),
            "",
        )
        .invalid("process.cwd"),
        same(
            "process: a variable without a value",
            json!({"process": {"env+": ["NOVALUE"]}}),
            "env | sort",
        )
        .invalid("process.env"),
        // runc wants a kernel with AppArmor for it, which the nested host has not.
        same(
            "process: unconfined by AppArmor",
            json!({"process": {"apparmorProfile": "unconfined"}}),
            "echo it runs",
        )
        .otherwise(0, "it runs"),
        refused(
            "AppArmor",
            "process: an AppArmor profile",
            json!({"process": {"apparmorProfile": "strict"}}),
        ),
        refused(
            "process.selinuxLabel",
            "process: an SELinux label",
            json!({"process": {"selinuxLabel": "system_u:system_r:container_t:s0"}}),
        ),
    ]
}
