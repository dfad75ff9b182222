//! Bundles for a runtime that is spoken to without containerd.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::{Ended, TestDir};

/// Makes the bundle `id` below `dir`: of the small specification with a change, and a root file system as [`make_root`] makes it.
pub fn make_bundle(
    dir: &Path,
    id: &str,
    group: &str,
    common: Option<&Path>,
    change: impl FnOnce(&mut Value),
) -> PathBuf {
    let bundle = dir.join(id);
    fs::create_dir(&bundle).unwrap();
    make_root(&bundle.join("rootfs"), common);
    let mut config = small();
    change(&mut config);
    place(&mut config, &bundle.display().to_string());
    write_config(&bundle.join("config.json"), config, group, id);
    bundle
}

/// Makes the bundle `id` below `dir` of a container that runs a shell script, in a sandbox of its own if `group` is empty.
pub fn shell_bundle(dir: &TestDir, id: &str, group: &str, script: &str) -> PathBuf {
    make_bundle(dir.path(), id, group, None, |config| {
        config["process"]["args"] = json!(["sh", "-c", script]);
    })
}

/// Makes a FIFO below `dir`: its path.
pub fn make_fifo(dir: &TestDir, name: &str) -> String {
    let path = dir.path().join(name).display().to_string();
    let ended = Command::new("mkfifo").arg(&path).output().unwrap();
    Ended::from(ended).success();
    path
}

/// What all bundles have in common.
pub fn small() -> Value {
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
    ];
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
    json!({
        "ociVersion": "1.1.0",
        "root": {"path": "@/rootfs"},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "env": ["PATH=/bin"],
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}, {"type": "cgroup"},
            ],
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
        },
    })
}

/// Puts a directory for each `@/`.
pub fn place(value: &mut Value, directory: &str) {
    match value {
        Value::String(text) => *text = text.replace("@/", &format!("{directory}/")),
        Value::Array(list) => list.iter_mut().for_each(|v| place(v, directory)),
        Value::Object(map) => map.values_mut().for_each(|v| place(v, directory)),
        _ => {}
    }
}

/// Writes a `config.json` of a container in the sandbox `group`, and gives it a cgroup if it names none.
pub fn write_config(path: &Path, mut config: Value, group: &str, id: &str) {
    config["annotations"]["io.containerd.runc.v2.group"] = json!(group);
    // Without one runc would make it below its own cgroup, which has processes.
    let linux = &mut config["linux"];
    if linux.get("cgroupsPath").is_none() {
        linux["cgroupsPath"] = json!(format!("/corpus/{id}"));
    }
    fs::write(path, config.to_string()).unwrap();
}

/// What the bundles call of busybox: with all of it, making and removing root file systems takes longer than their containers.
const PROGRAMS: [&str; 47] = [
    "[", "awk", "cat", "chmod", "chown", "cp", "cut", "echo", "env", "false", "find", "grep",
    "head", "hostname", "id", "ionice", "ln", "ls", "mkdir", "mkfifo", "mknod", "mount", "mv",
    "nice", "printf", "ps", "pwd", "readlink", "rm", "rmdir", "sed", "sh", "sleep", "sort", "stat",
    "stty", "sync", "tail", "touch", "tr", "true", "truncate", "tty", "umount", "uname", "uptime",
    "wc",
];

/// A root file system of busybox alone, of its own or a common one (whose pages the guest's kernel has already), with a few
/// files to mount over, to mask and to look at.
pub fn make_root(root: &Path, common: Option<&Path>) {
    for name in [
        "bin", "dev", "proc", "sys", "mnt", "tmp", "etc", "home/app", "data/sub", "real", "work",
    ] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    let set_mode = |name: &str, mode| {
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).unwrap()
    };
    set_mode("tmp", 0o1777);
    let busybox = root.join("bin/busybox");
    match common {
        Some(common) => fs::hard_link(common, &busybox).unwrap(),
        None => drop(fs::copy("/bin/busybox", &busybox).unwrap()),
    }
    for name in PROGRAMS {
        fs::hard_link(&busybox, root.join("bin").join(name)).unwrap();
    }
    for (name, text) in [
        (
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n",
        ),
        ("etc/group", "root:x:0:\naudio:x:29:app\napp:x:1001:\n"),
        ("data/file", "of the root\n"),
        ("data/sub/file", "below it\n"),
    ] {
        fs::write(root.join(name), text).unwrap();
    }
    symlink("/real", root.join("link")).unwrap();
    symlink("../../../../../../real", root.join("data/up")).unwrap();
}
