//! What containers and execs are made of.

use serde_json::{Value, json};

/// A specification like containerd's for a lone container.
pub fn spec(args: &[&str]) -> Value {
    json!({
        "ociVersion": "1.1.0",
        "root": {"path": "rootfs"},
        "process": exec_process(args),
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro", "nosuid", "noexec", "nodev"]}
        ],
        "linux": {
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "cgroupsPath": "/default/x",
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}, {"type": "cgroup"}],
            "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
        }
    })
}

/// A process object.
pub fn exec_process(args: &[&str]) -> Value {
    let capabilities = ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID", "CAP_SETGID"];
    json!({
        "user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/usr/bin:/bin", "B=2"], "cwd": "/",
        "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities}
    })
}
