//! The clean-up that containerd starts as a process of its own, after a shim that died.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::Command;

/// As in `hooks`.
const NOTE: &str = "poststop-hooks-are-due";

#[test]
fn delete_says_on_its_standard_error_which_hook_failed() {
    let bundle = tempfile::tempdir().unwrap();
    let config = r#"{
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
        "hooks": {"poststop": [{"path": "/bin/sh", "args": ["sh", "-c", "echo no more; exit 3"]}]}
    }"#;
    fs::write(bundle.path().join("config.json"), config).unwrap();
    // The shim left it: the container was created, and its hooks have not run.
    fs::write(bundle.path().join(NOTE), "").unwrap();
    let ended = Command::new(env!("CARGO_BIN_EXE_containerd-shim-cube-rs"))
        .args(["-namespace", "delete-test", "-id", "c", "-bundle"])
        .arg(bundle.path())
        .arg("delete")
        .output()
        .unwrap();
    let log = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.success(), "{log}");
    assert!(!ended.stdout.is_empty(), "no answer");
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("level=warning"), "{log}");
    assert!(log.contains("poststop hook #0"), "{log}");
    assert!(log.contains("no more"), "{log}");
    assert!(log.contains("sandbox=c"), "{log}");
    assert!(!bundle.path().join(NOTE).exists());
}
