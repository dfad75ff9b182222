//! `root`, `mounts`, masked and read-only paths, and propagation.

use serde_json::{Value, json};

use crate::bundle::{Case, refused, same};

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": kind, "source": source, "options": options})
}

fn with(list: &[Value]) -> Value {
    json!({"mounts+": list})
}

fn tmpfs(options: &[&str]) -> Value {
    with(&[mount("/mnt", "tmpfs", "tmpfs", options)])
}

fn bind(options: &[&str]) -> Value {
    with(&[mount("/mnt", "bind", "@/src", options)])
}

/// One mount for each list of options.
fn each(kind: &str, source: &str, all: &[&[&str]]) -> Value {
    let all = all.iter().zip(1..);
    let mounts: Vec<_> = all
        .map(|(options, n)| mount(&format!("/m/{n}"), kind, source, options))
        .collect();
    with(&mounts)
}

/// A directory with a file and with another mount below it.
const SOURCE: &str = "mkdir -p src/sub; echo outside >src/file; mount -t tmpfs below src/sub; echo below >src/sub/file";

/// What can be seen and done in /mnt and below.
const USED: &str = "volumes /mnt; cat /mnt/file /mnt/sub/file; touch /mnt/new /mnt/sub/new; cp /bin/busybox /mnt/echo && /mnt/echo it runs; ls /mnt";

pub fn cases() -> Vec<Case> {
    let mut cases = roots();
    cases.extend(file_systems());
    cases.extend(binds());
    cases.extend(places());
    cases.extend(hidden());
    cases.extend(propagation());
    cases
}

fn roots() -> Vec<Case> {
    vec![
        same(
            "mounts: the small bundle",
            json!({}),
            "options / | cut -d' ' -f1-2; mounted /proc /dev /dev/pts /sys | sed 's/,inode64//; s/sysfs r[ow]$//'; grep -c . /proc/self/mountinfo; touch /new && ls /new",
        ),
        same("mounts: a root that is read-only", json!({"root": {"readonly": true}}), "options / | cut -d' ' -f1-2 | cut -c1-4; touch /new; touch /dev/new /tmp/new; echo >/proc/self/comm"),
        same(
            "mounts: a root that is read-only, and volumes that are not",
            json!({
                "root": {"readonly": true},
                "mounts+": [mount("/tmp", "tmpfs", "tmpfs", &["size=64k"]), mount("/mnt", "bind", "@/src", &["rbind", "rw"])],
                "linux": {"readonlyPaths": ["/tmp", "/mnt/sub"]},
            }),
            "touch /new /mnt/new /tmp/new /mnt/sub/new; options /tmp; volumes /mnt",
        )
        .host(SOURCE),
        same(
            "mounts: a root that is read-only, and a place that is not there",
            json!({"root": {"readonly": true}, "mounts+": [mount("/not/there", "tmpfs", "tmpfs", &[])]}),
            "options /not/there; touch /not/there/new /not/new",
        ),
        same("mounts: a root that is not there", json!({"root": {"path": "@/nosuch"}}), "echo it runs").invalid("rootfs"),
        same("mounts: a root that is a file", json!({"root": {"path": "@/file"}}), "echo it runs").invalid("rootfs").host("touch file"),
        same("mounts: no mounts at all", json!({"mounts": []}), "ls /proc /sys; ls -ln /dev | grep -v kcore | awk '{print $1, $5, $6, $NF}'"),
    ]
}

fn file_systems() -> Vec<Case> {
    const SHOWN: &str = "mounted /mnt | sed 's/,inode64//'; ls -ldn /mnt | cut -d' ' -f1-4 | cut -c1-10; ls -ldn /mnt | awk '{print $3, $4}'";
    // Each at a place of its own, /m/1 and so on.
    let all: [&[&str]; 18] = [
        &[],
        &["size=64k", "mode=1750", "uid=7", "gid=8", "nr_inodes=100"],
        &["size=64k", "ro"],
        &["nosuid", "nodev", "noexec"],
        &[
            "nosuid", "nodev", "noexec", "ro", "suid", "dev", "exec", "rw",
        ],
        &[
            "suid", "dev", "exec", "rw", "nosuid", "nodev", "noexec", "ro",
        ],
        &["noatime", "nodiratime"],
        &["noatime", "atime", "nodiratime", "diratime"],
        &["relatime"],
        &["strictatime"],
        &["strictatime", "nostrictatime"],
        &["norelatime"],
        &["sync", "dirsync"],
        &["sync", "async"],
        &["mand"],
        &["mand", "nomand"],
        &["defaults"],
        &["mode=700", "nosuid", "private"],
    ];
    let mut cases = vec![
        same(
            "mounts: options of a tmpfs",
            each("tmpfs", "tmpfs", &all),
            "options '/m/[0-9]*'; mounted '/m/[0-9]*' | sed -E 's/.* - //; s/,inode64//g'; ls -ln /m | awk '{print $1, $3, $4, $NF}'",
        ),
        same(
            "mounts: an option that nobody knows",
            tmpfs(&["frobnicate"]),
            SHOWN,
        )
        .invalid("frobnicate"),
        same("mounts: a size that is none", tmpfs(&["size=large"]), SHOWN).invalid("size=large"),
    ];
    let few = [
        ("mounts: lazytime", &["lazytime"][..]),
        ("mounts: nolazytime", &["lazytime", "nolazytime"]),
        ("mounts: iversion", &["iversion"]),
        ("mounts: noiversion", &["noiversion"]),
        ("mounts: silent", &["silent"]),
        ("mounts: loud", &["silent", "loud"]),
        ("mounts: nosymfollow", &["nosymfollow"]),
        ("mounts: symfollow", &["nosymfollow", "symfollow"]),
    ];
    cases.extend(few.map(|(name, options)| same(name, tmpfs(options), SHOWN)));
    cases.extend([
        refused(
            "tmpcopyup",
            "mounts: a tmpfs with what was there",
            with(&[mount("/data", "tmpfs", "tmpfs", &["tmpcopyup", "size=1m"])]),
        ),
        same(
            "mounts: shared memory",
            with(&[mount(
                "/dev/shm",
                "tmpfs",
                "shm",
                &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            )]),
            "mounted /dev/shm | sed 's/,inode64//'; ls -ldn /dev/shm | cut -c1-10",
        ),
        same(
            "mounts: message queues",
            with(&[mount(
                "/dev/mqueue",
                "mqueue",
                "mqueue",
                &["nosuid", "noexec", "nodev"],
            )]),
            "mounted /dev/mqueue; ls -ldn /dev/mqueue | cut -c1-10",
        ),
        same(
            "mounts: a proc that hides",
            with(&[mount("/mnt", "proc", "proc", &["hidepid=2", "subset=pid"])]),
            "mounted /mnt; ls /mnt | grep -v '[0-9]'",
        ),
        same(
            "mounts: sysfs that can be written",
            with(&[mount("/mnt", "sysfs", "sysfs", &["rw"])]),
            "options /mnt",
        ),
        same(
            "mounts: cgroup2 by its name",
            with(&[mount("/mnt", "cgroup2", "cgroup2", &["rw"])]),
            "mounted /mnt | cut -d' ' -f1-5; mkdir /mnt/x && echo made; rmdir /mnt/x",
        ),
        same(
            "mounts: cgroups that can be written",
            with(&[mount("/mnt", "cgroup", "cgroup", &["rw"])]),
            "options /mnt; mkdir /mnt/x && echo made; rmdir /mnt/x",
        ),
        same(
            "mounts: another devpts",
            with(&[mount(
                "/mnt",
                "devpts",
                "devpts",
                &["newinstance", "mode=0600", "ptmxmode=0600", "max=3"],
            )]),
            "mounted /mnt; ls -ln /mnt | awk '{print $1, $NF}'",
        ),
        same(
            "mounts: a type that nobody knows",
            with(&[mount("/mnt", "nosuchfs", "none", &[])]),
            "echo it runs",
        )
        .invalid("nosuchfs"),
        refused(
            "needs the host's kernel",
            "mounts: ext4",
            with(&[mount("/mnt", "ext4", "/dev/loop0", &[])]),
        ),
        same(
            "mounts: a mount without type and source",
            json!({"mounts+": [{"destination": "/mnt"}]}),
            "echo it runs",
        )
        .invalid("/mnt"),
        refused(
            "remount",
            "mounts: a remount",
            with(&[
                mount("/mnt", "tmpfs", "tmpfs", &["mode=700"]),
                mount("/mnt", "tmpfs", "tmpfs", &["remount", "ro", "mode=700"]),
            ]),
        ),
    ]);
    cases
}

fn binds() -> Vec<Case> {
    let all: [&[&str]; 15] = [
        &["bind"],
        &["rbind"],
        &["bind", "ro"],
        &["rbind", "rro"],
        &["bind", "rro"],
        &["rbind", "ro", "rw"],
        &["rbind", "nosuid", "nodev", "noexec"],
        &["rbind", "rnosuid", "rnodev", "rnoexec"],
        &["rbind", "noexec", "exec", "nosuid", "suid", "nodev", "dev"],
        &["rbind", "noatime", "nodiratime"],
        &["rbind", "rnoatime"],
        &["rbind", "rnosymfollow"],
        &["rbind", "rro", "rrw", "rnoexec", "rexec"],
        &["rbind", "rprivate"],
        &["rbind", "runbindable"],
    ];
    const USED_ALL: &str = "volumes '/m/[0-9]*'; cd /m; for n in $(ls | sort -n); do echo $n $(cat $n/file $n/sub/file; touch $n/new $n/sub/new); done; ls 1";
    let mut cases = vec![
        same(
            "mounts: options of a bind",
            each("bind", "@/src", &all),
            USED_ALL,
        )
        .host(SOURCE),
        same(
            "mounts: options of a bind that follows the host",
            each(
                "bind",
                "@/src",
                &[
                    &["rbind", "rslave"],
                    &["bind", "slave"],
                    &["bind", "rslave", "ro", "nosuid"],
                ],
            ),
            USED_ALL,
        )
        .host(SOURCE),
        same(
            "mounts: an rbind of no programs",
            bind(&["rbind", "rnoexec"]),
            USED,
        )
        .host(SOURCE),
        same(
            "mounts: an rbind with an option of a file system",
            bind(&["rbind", "size=64k"]),
            USED,
        )
        .invalid("size=64k")
        .host(SOURCE),
    ];
    let mapped = |key: &str| {
        let mut mount = mount("/mnt", "bind", "@/src", &["rbind"]);
        mount[key] = json!([{"containerID": 0, "hostID": 1000, "size": 10}]);
        with(&[mount])
    };
    cases.extend([
        same("mounts: a bind by its type alone", bind(&[]), USED)
            .host(SOURCE)
            .otherwise(
                0,
                "/mnt rw
outside
cat: can't open '/mnt/sub/file': No such file or directory
it runs
echo
file
new
sub",
            ),
        same(
            "mounts: an rbind that is read-only",
            bind(&["rbind", "ro"]),
            "volumes /mnt; touch /mnt/new /mnt/sub/new",
        )
        .host(SOURCE)
        .otherwise(
            1,
            "/mnt ro
touch: /mnt/new: Read-only file system
touch: /mnt/sub/new: Read-only file system",
        ),
        same(
            "mounts: recursive options of a tmpfs",
            tmpfs(&["rro", "rnoexec", "rnoatime"]),
            "options /mnt",
        )
        .otherwise(0, "/mnt ro,noexec,noatime"),
        same(
            "mounts: a bind by its option alone",
            json!({"mounts+": [{"destination": "/mnt", "source": "@/src", "options": ["bind"]}]}),
            USED,
        )
        .host(SOURCE),
        same(
            "mounts: a bind of a file",
            with(&[mount("/etc/motd", "bind", "@/src/file", &["bind", "ro"])]),
            "options /etc/motd; cat /etc/motd; echo >/etc/motd",
        )
        .host(SOURCE),
        same(
            "mounts: a bind of a file over a file",
            with(&[mount("/data/file", "bind", "@/src/file", &["bind"])]),
            "cat /data/file; echo more >>/data/file; cat /data/file",
        )
        .host(SOURCE),
        same(
            "mounts: a bind of a file over a directory",
            with(&[mount("/data", "bind", "@/src/file", &["bind"])]),
            "cat /data",
        )
        .invalid("/data")
        .host(SOURCE),
        same(
            "mounts: a bind of a directory over a file",
            with(&[mount("/data/file", "bind", "@/src", &["bind"])]),
            "ls /data/file",
        )
        .invalid("/data/file")
        .host(SOURCE),
        refused(
            "it is a FIFO of the host",
            "mounts: a bind of a FIFO",
            with(&[mount("/fifo", "bind", "@/fifo", &["bind"])]),
        )
        .host("mkfifo fifo"),
        same(
            "mounts: a bind of a link",
            with(&[mount("/mnt", "bind", "@/link", &["bind"])]),
            "cat /mnt/file",
        )
        .host("mkdir src; echo outside >src/file; ln -s src link"),
        same(
            "mounts: a bind with a relative source",
            with(&[mount("/mnt", "bind", "src", &["bind"])]),
            "ls /mnt",
        )
        .invalid("src"),
        same(
            "mounts: a bind of what is not there",
            with(&[mount("/mnt", "bind", "@/nosuch", &["bind"])]),
            "ls /mnt",
        )
        .invalid("nosuch"),
        refused(
            "has uidMappings: id-mapped mounts are not supported",
            "mounts: a bind with other users",
            mapped("uidMappings"),
        )
        .host(SOURCE),
        refused(
            "has gidMappings: id-mapped mounts are not supported",
            "mounts: a bind with other groups",
            mapped("gidMappings"),
        )
        .host(SOURCE),
        refused(
            "is id-mapped, which is not supported",
            "mounts: idmap",
            bind(&["rbind", "idmap"]),
        )
        .host(SOURCE),
        refused(
            "is id-mapped, which is not supported",
            "mounts: ridmap",
            bind(&["rbind", "ridmap"]),
        )
        .host(SOURCE),
    ]);
    cases
}

fn places() -> Vec<Case> {
    vec![
        same(
            "mounts: one in another",
            with(&[
                mount("/mnt", "tmpfs", "a", &["mode=755"]),
                mount("/mnt/x/y", "tmpfs", "b", &["mode=700"]),
            ]),
            "options /mnt /mnt/x/y; find /mnt",
        ),
        same(
            "mounts: one over another",
            with(&[
                mount("/mnt/x", "tmpfs", "a", &["mode=755"]),
                mount("/mnt", "tmpfs", "b", &["mode=700"]),
            ]),
            "options /mnt /mnt/x; find /mnt",
        ),
        same(
            "mounts: two in one place",
            with(&[
                mount("/mnt", "tmpfs", "a", &["size=4k"]),
                mount("/mnt", "tmpfs", "b", &["size=8k"]),
            ]),
            "mounted /mnt | sed 's/,inode64//'",
        ),
        same(
            "mounts: a tmpfs in a bind",
            with(&[
                mount("/mnt", "bind", "@/src", &["rbind"]),
                mount("/mnt/new/er", "tmpfs", "a", &["mode=700"]),
            ]),
            "options /mnt/new/er; find /mnt | sort",
        )
        .host(SOURCE),
        same(
            "mounts: a tmpfs in a bind that is read-only",
            with(&[
                mount("/mnt", "bind", "@/src", &["rbind", "ro"]),
                mount("/mnt/new", "tmpfs", "a", &[]),
            ]),
            "find /mnt | sort",
        )
        .invalid("/mnt/new")
        .host(SOURCE),
        same(
            "mounts: a bind in a tmpfs",
            with(&[
                mount("/mnt", "tmpfs", "a", &["mode=755"]),
                mount("/mnt/in/file", "bind", "@/src/file", &["bind"]),
            ]),
            "cat /mnt/in/file; find /mnt",
        )
        .host(SOURCE),
        same(
            "mounts: a place that is not there",
            with(&[mount("/a/b c/d", "tmpfs", "a", &[])]),
            "find /a; ls -ld '/a/b c' | cut -c1-10",
        ),
        same(
            "mounts: a place behind a link",
            with(&[mount("/link/x", "tmpfs", "a", &[])]),
            "options /real/x /link/x",
        ),
        same(
            "mounts: a place behind a link that leads out",
            with(&[mount("/data/up/x", "tmpfs", "a", &[])]),
            "options /real/x /data/up/x",
        ),
        same(
            "mounts: a place with dots",
            with(&[mount("/data/../mnt/./x", "tmpfs", "a", &[])]),
            "options /mnt/x",
        ),
        same(
            "mounts: a place above the root",
            with(&[mount("/../../mnt", "tmpfs", "a", &[])]),
            "options /mnt",
        ),
        refused(
            "mounts[].destination",
            "mounts: a relative place",
            with(&[mount("mnt", "tmpfs", "a", &[])]),
        ),
        same(
            "mounts: a place with a slash at its end",
            with(&[mount("/mnt/", "tmpfs", "a", &[])]),
            "options /mnt",
        ),
        same(
            "mounts: a tmpfs over the root",
            with(&[mount("/", "tmpfs", "a", &[])]),
            "echo it runs",
        )
        .invalid("mounts[].destination"),
        same(
            "mounts: a bind over /proc",
            with(&[mount("/proc", "bind", "@/src", &["rbind"])]),
            "ls /proc",
        )
        .invalid("mounts[].destination")
        .host(SOURCE),
        same(
            "mounts: a tmpfs in /proc",
            with(&[mount("/proc/self", "tmpfs", "a", &[])]),
            "echo it runs",
        )
        .invalid("mounts[].destination"),
        same(
            "mounts: a tmpfs over /sys/kernel",
            with(&[mount("/sys/kernel", "tmpfs", "a", &["ro"])]),
            "ls /sys/kernel; options /sys/kernel",
        ),
    ]
}

fn hidden() -> Vec<Case> {
    vec![
        same(
            "mounts: masked paths",
            json!({"linux": {"maskedPaths": ["/data/file", "/data/sub", "/not/there", "/proc/kcore", "/proc/timer_list", "/sys/firmware", "/link"]}}),
            "cat /data/file; ls -A /data/sub /real; wc -c </proc/timer_list; touch /data/sub/new; options /data/file /data/sub /proc/timer_list | cut -d' ' -f1; options /data/sub; mounted /data/sub | sed 's/.* - //; s/,inode64//; s/,nr_[a-z]*=[0-9]*//g; s/,size=[0-9k]*//'; ls -ld /not",
        ),
        same(
            "mounts: read-only paths",
            json!({"linux": {"readonlyPaths": ["/data/file", "/data/sub", "/not/there", "/proc/sys", "/dev/null", "/link"]}}),
            "echo >/data/file; touch /data/sub/new /real/new /data/new; volumes /data/file /data/sub /proc/sys /real; echo 1 >/proc/sys/kernel/msgmax; echo >/dev/null",
        ),
        same(
            "mounts: read-only and masked paths in mounts",
            json!({
                "mounts+": [mount("/mnt", "bind", "@/src", &["rbind", "nosuid", "noexec"]), mount("/tmp", "tmpfs", "a", &["nodev", "size=64k"])],
                "linux": {"readonlyPaths": ["/mnt", "/tmp"], "maskedPaths": ["/mnt/sub", "/mnt/file"]},
            }),
            "options /tmp; volumes /mnt; ls -A /mnt/sub; cat /mnt/file; touch /mnt/new /tmp/new /mnt/sub/new",
        )
        .host(SOURCE),
        same(
            "mounts: a path that is masked and read-only",
            json!({"linux": {"readonlyPaths": ["/data"], "maskedPaths": ["/data"]}}),
            "ls -A /data; touch /data/new",
        ),
        same("mounts: a relative path is masked", json!({"linux": {"maskedPaths": ["data"]}}), "ls -A /data"),
        same("mounts: a relative path is read-only", json!({"linux": {"readonlyPaths": ["data"]}}), "touch /data/new"),
        same(
            "mounts: paths that an exec sees",
            json!({"root": {"readonly": true}, "linux": {"readonlyPaths": ["/proc/sys"], "maskedPaths": ["/data/sub"]}}),
            "ls -A /data/sub; touch /new; options /proc/sys",
        )
        .exec(),
    ]
}

fn propagation() -> Vec<Case> {
    let root = |kind: &str| json!({"linux": {"rootfsPropagation": kind}, "mounts+": [mount("/mnt", "bind", "@/src", &["rbind"]), mount("/tmp", "tmpfs", "a", &[])]});
    const SHOWN: &str = "options / | cut -d' ' -f1,3- | sed 's/ master//; s/ $//'";
    let mut cases: Vec<Case> = [
        "private",
        "rprivate",
        "slave",
        "rslave",
        "unbindable",
        "runbindable",
        "shared",
        "rshared",
    ]
    .into_iter()
    .zip([
        "mounts: rootfsPropagation private",
        "mounts: rootfsPropagation rprivate",
        "mounts: rootfsPropagation slave",
        "mounts: rootfsPropagation rslave",
        "mounts: rootfsPropagation unbindable",
        "mounts: rootfsPropagation runbindable",
        "mounts: rootfsPropagation shared",
        "mounts: rootfsPropagation rshared",
    ])
    .map(|(kind, name)| same(name, root(kind), SHOWN).host(SOURCE))
    .collect();
    cases.extend(
        [
            ("mounts: a private tmpfs", &["private"][..]),
            ("mounts: a shared tmpfs", &["shared"]),
            ("mounts: a tmpfs that cannot be bound", &["unbindable"]),
            ("mounts: a tmpfs that follows", &["rslave"]),
        ]
        .map(|(name, options)| same(name, tmpfs(options), "options /mnt")),
    );
    cases.push(
        same(
            "mounts: rootfsPropagation of a kind that nobody knows",
            root("wide"),
            SHOWN,
        )
        .invalid("linux.rootfsPropagation")
        .host(SOURCE),
    );
    cases
}
