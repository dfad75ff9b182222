//! Fields that interact: mounts and devices.

use serde_json::json;

use super::{OWNED, in_user_namespace, mount, mounts_but, without};
use crate::bundle::{Case, refused, same};

pub(super) fn mounts() -> Vec<Case> {
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

pub(super) fn devices() -> Vec<Case> {
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
