//! `linux.seccomp`: what each action, operator and flag does to a call.

use serde_json::{Value, json};

use crate::bundle::{Case, refused, same};

/// Allows all calls but those of `rules`.
pub fn filter(rules: Value) -> Value {
    json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules}}})
}

fn on_sethostname(action: &str) -> Value {
    filter(json!([{"names": ["sethostname"], "action": action}]))
}

fn flags(list: Value) -> Value {
    let mut change = on_sethostname("SCMP_ACT_ERRNO");
    change["linux"]["seccomp"]["flags"] = list;
    change
}

/// What a shell and its commands call.
pub const SHELL: [&str; 82] = [
    "accept4",
    "access",
    "arch_prctl",
    "brk",
    "capget",
    "capset",
    "chdir",
    "clone",
    "close",
    "close_range",
    "dup2",
    "dup3",
    "epoll_ctl",
    "epoll_pwait",
    "execve",
    "exit",
    "exit_group",
    "faccessat",
    "faccessat2",
    "fchdir",
    "fcntl",
    "fork",
    "fstat",
    "fstatfs",
    "futex",
    "getcwd",
    "getdents64",
    "getegid",
    "geteuid",
    "getgid",
    "getpgrp",
    "getpid",
    "getppid",
    "getrandom",
    "gettid",
    "getuid",
    "ioctl",
    "lseek",
    "madvise",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "nanosleep",
    "newfstatat",
    "open",
    "openat",
    "openat2",
    "pipe",
    "pipe2",
    "poll",
    "prctl",
    "pread64",
    "prlimit64",
    "read",
    "readlink",
    "readlinkat",
    "recvfrom",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "sched_getaffinity",
    "sched_yield",
    "sendmsg",
    "sendto",
    "set_robust_list",
    "set_tid_address",
    "setgid",
    "setgroups",
    "setuid",
    "sigaltstack",
    "stat",
    "statfs",
    "statx",
    "tgkill",
    "uname",
    "vfork",
    "wait4",
    "write",
    "writev",
];

/// A shell in a shell: what ends it is its parent's to tell.
const CALL: &str = "status 'NoNewPrivs|Seccomp|Seccomp_filters'; sh -c 'hostname new' 2>&1 | sed 's/ (core dumped)//'; sh -c 'hostname new' 2>/dev/null; echo $?";

pub fn cases() -> Vec<Case> {
    let compare = |op: &str, value: u64| json!({"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": [{"index": 1, "value": value, "op": op}]});
    let operator = |op: &str| filter(json!([compare(op, 100)]));
    const SIZES: &str = "for n in 1 99 100 101 4196; do truncate -s $n /tmp/f && echo $n; done";
    let mut cases = vec![
        same("seccomp: ERRNO", on_sethostname("SCMP_ACT_ERRNO"), CALL),
        same("seccomp: ALLOW", on_sethostname("SCMP_ACT_ALLOW"), CALL),
        same("seccomp: KILL", on_sethostname("SCMP_ACT_KILL"), CALL),
        same(
            "seccomp: KILL_THREAD",
            on_sethostname("SCMP_ACT_KILL_THREAD"),
            CALL,
        ),
        same(
            "seccomp: KILL_PROCESS",
            on_sethostname("SCMP_ACT_KILL_PROCESS"),
            CALL,
        ),
        same("seccomp: TRAP", on_sethostname("SCMP_ACT_TRAP"), CALL),
        same("seccomp: TRACE", on_sethostname("SCMP_ACT_TRACE"), CALL),
        same("seccomp: LOG", on_sethostname("SCMP_ACT_LOG"), CALL),
        same(
            "seccomp: an action that nobody knows",
            on_sethostname("SCMP_ACT_LAUGH"),
            CALL,
        ).invalid("linux.seccomp.syscalls[0].action"),
        refused(
            "seccomp",
            "seccomp: NOTIFY",
            on_sethostname("SCMP_ACT_NOTIFY"),
        ),
        refused(
            "linux.seccomp.listenerPath",
            "seccomp: a listener",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/listener", "listenerMetadata": "web"}}}),
        ),
        refused(
            "accept4",
            "seccomp: all but a list, without what a container waits by",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["execve"], "action": "SCMP_ACT_ALLOW"}]}}}),
        ),
        same("seccomp: EQ", operator("SCMP_CMP_EQ"), SIZES),
        same("seccomp: NE", operator("SCMP_CMP_NE"), SIZES),
        same("seccomp: LT", operator("SCMP_CMP_LT"), SIZES),
        same("seccomp: LE", operator("SCMP_CMP_LE"), SIZES),
        same("seccomp: GE", operator("SCMP_CMP_GE"), SIZES),
        same("seccomp: GT", operator("SCMP_CMP_GT"), SIZES),
        same(
            "seccomp: MASKED_EQ",
            filter(
                json!([{"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95,
                "args": [{"index": 1, "value": 0xff, "valueTwo": 100, "op": "SCMP_CMP_MASKED_EQ"}]}]),
            ),
            SIZES,
        ),
        same(
            "seccomp: two rules of a call",
            filter(json!([
                compare("SCMP_CMP_LT", 50),
                compare("SCMP_CMP_GT", 100)
            ])),
            SIZES,
        ),
        same(
            "seccomp: two conditions of a rule",
            filter(
                json!([{"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": [
                    {"index": 1, "value": 100, "op": "SCMP_CMP_GE"}, {"index": 0, "value": 0, "op": "SCMP_CMP_GT"},
                ]}]),
            ),
            SIZES,
        ),
        same(
            "seccomp: two conditions of one argument",
            filter(
                json!([{"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": [
                    {"index": 1, "value": 100, "op": "SCMP_CMP_GE"}, {"index": 1, "value": 1000, "op": "SCMP_CMP_LT"},
                ]}]),
            ),
            SIZES,
        ),
        same(
            "seccomp: an argument that no call has",
            filter(
                json!([{"names": ["ftruncate"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 7, "value": 1, "op": "SCMP_CMP_EQ"}]}]),
            ),
            SIZES,
        ).invalid("linux.seccomp"),
        same(
            "seccomp: numbers of errors",
            filter(json!([
                {"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
                {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28},
                {"names": ["chmod", "fchmodat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 0},
                {"names": ["symlink", "symlinkat"], "action": "SCMP_ACT_TRACE", "errnoRet": 5},
            ])),
            "hostname new; mkdir /tmp/d; chmod 700 /tmp; ls -ld /tmp | cut -c1-10; ln -s a /tmp/b",
        ),
        same(
            "seccomp: calls that this kernel or this list does not know",
            filter(
                json!([{"names": ["sethostname", "nosuchcall", "arm_sync_file_range"], "action": "SCMP_ACT_ERRNO"}]),
            ),
            CALL,
        ),
        same(
            "seccomp: an architecture that nobody knows",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_PDP11"]}}}),
            CALL,
        ).invalid("linux.seccomp.architectures[0]"),
        same(
            "seccomp: no rules and no architectures",
            json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW"}}}),
            CALL,
        ),
        same(
            "seccomp: the flag LOG",
            flags(json!(["SECCOMP_FILTER_FLAG_LOG"])),
            CALL,
        ),
        same(
            "seccomp: the flag SPEC_ALLOW",
            flags(json!(["SECCOMP_FILTER_FLAG_SPEC_ALLOW"])),
            "status Speculation_Store_Bypass >/dev/null; hostname new",
        ),
        same(
            "seccomp: the flag WAIT_KILLABLE_RECV",
            flags(json!(["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"])),
            CALL,
        ).invalid("SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"),
        same(
            "seccomp: the flag TSYNC",
            flags(json!(["SECCOMP_FILTER_FLAG_TSYNC"])),
            CALL,
        ),
        same(
            "seccomp: a flag that nobody knows",
            flags(json!(["SECCOMP_FILTER_FLAG_FAST"])),
            CALL,
        ).invalid("linux.seccomp.flags[0]"),
        same(
            "seccomp: no flags, said by an empty list",
            flags(json!([])),
            CALL,
        ),
        same("seccomp: an exec", on_sethostname("SCMP_ACT_ERRNO"), CALL).exec(),
    ];
    // The default action is for what the list does not name.
    for (name, action, number) in [
        (
            "seccomp: all but a list is an error",
            "SCMP_ACT_ERRNO",
            json!(61),
        ),
        (
            "seccomp: all but a list is an error, by default EPERM",
            "SCMP_ACT_ERRNO",
            Value::Null,
        ),
        (
            "seccomp: all but a list is death",
            "SCMP_ACT_KILL_PROCESS",
            Value::Null,
        ),
    ] {
        let mut change = filter(json!([{"names": SHELL.as_slice(), "action": "SCMP_ACT_ALLOW"}]));
        change["linux"]["seccomp"]["defaultAction"] = json!(action);
        if !number.is_null() {
            change["linux"]["seccomp"]["defaultErrnoRet"] = number;
        }
        cases.push(same(name, change, "sh -c 'hostname new'; echo $?"));
    }
    // With no right to load a filter otherwise, it has to be loaded while there is one, or with noNewPrivileges.
    for (name, no_new_privileges) in [
        (
            "seccomp: a user without capabilities and with noNewPrivileges",
            true,
        ),
        (
            "seccomp: a user without capabilities or noNewPrivileges",
            false,
        ),
    ] {
        let mut change = filter(
            json!([{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}]),
        );
        change["process"] = json!({"user": {"uid": 1000, "gid": 1000}, "capabilities": {"bounding": [], "effective": [], "permitted": []}, "noNewPrivileges": no_new_privileges});
        cases.push(same(
            name,
            change,
            "status 'Cap...|NoNewPrivs|Seccomp'; mkdir /tmp/d",
        ));
    }
    cases
}
