//! What cannot be used is one line on stderr that names the cause and the cure, the right exit
//! status, and nothing left behind. None of this needs KVM to work.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use cube_hypervisor_api::ExitStatus::{BadConfiguration, VmmError};
use serde_json::{Value, json};

use common::*;

fn run(args: &[&str]) -> Ended {
    let output = hypervisor()
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    output.into()
}

/// A machine that would reset at once if it had not `more` in its configuration.
#[track_caller]
fn refused(more: Value, needles: &[&str]) {
    let files = Files::new();
    let config = files.config(code::RESET, more);
    files.run(&config).fails(BadConfiguration, needles);
    let mut left: Vec<_> = std::fs::read_dir(files.dir())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["kernel", "vm.json"]);
}

#[test]
fn help_and_version_go_to_stdout() {
    let help = run(&["--help"]);
    help.resets();
    assert!(help.stdout.contains("Exit status:"));
    let version = run(&["--version"]);
    version.resets();
    assert!(version.stdout.starts_with("cube-hypervisor 0."));
}

#[test]
fn a_wrong_command_line_points_to_the_help() {
    run(&[]).fails(BadConfiguration, &["--config", "--help"]);
    run(&["--frobnicate"]).fails(BadConfiguration, &["--frobnicate", "--help"]);
    run(&["--control-fd", "1"]).fails(BadConfiguration, &["Descriptor 1", "SOCK_SEQPACKET"]);
    run(&["--control-fd", "77"]).fails(BadConfiguration, &["Descriptor 77"]);
}

#[test]
fn a_configuration_that_cannot_be_read_is_named() {
    run(&["--config", "/no/such.json"]).fails(BadConfiguration, &["/no/such.json", "check"]);
    let files = Files::new();
    files
        .run(&json!({"memory_mib": 128}))
        .fails(BadConfiguration, &["kernel", "--help"]);
    refused(json!({"memroy_mib": 128}), &["memroy_mib", "--help"]);
    refused(json!({"vcpus": "two"}), &["expected u8", "line 1"]);
}

#[test]
fn a_kernel_that_is_none_is_named() {
    let files = Files::new();
    let cases: [(&str, Option<Vec<u8>>, &str); 5] = [
        ("missing", None, "No such file"),
        ("empty", Some(vec![]), "empty"),
        (
            "image",
            Some(b"MZ bzImage".repeat(100)),
            "not an x86-64 ELF image",
        ),
        ("note", Some(kernel(code::RESET, false)), "CONFIG_PVH"),
        (
            "cut",
            Some(kernel(code::RESET, true)[..200].to_vec()),
            "damaged",
        ),
    ];
    for (name, content, needle) in cases {
        if let Some(content) = content {
            files.put(name, &content);
        }
        let path = files.dir().join(name);
        let ended = files.run(&json!({"kernel": path, "memory_mib": 16}));
        ended.fails(BadConfiguration, &[needle, path.to_str().unwrap()]);
    }
    files
        .run(&json!({"kernel": files.dir(), "memory_mib": 16}))
        .fails(BadConfiguration, &["not a regular file"]);
}

#[test]
fn what_does_not_fit_into_memory_is_named() {
    refused(json!({"memory_mib": 0}), &["0 MiB", "memory_mib"]);
    refused(json!({"memory_mib": 1u64 << 50}), &["memory_mib"]);
    refused(
        json!({"memory_mib": 1}),
        &["kernel", "does not fit", "raise memory_mib"],
    );

    let files = Files::new();
    let initramfs = files.put("initramfs", &vec![0; 17 << 20]);
    let config = files.config(code::RESET, json!({"initramfs": initramfs}));
    files
        .run(&config)
        .fails(BadConfiguration, &["initramfs", "raise memory_mib"]);
    refused(json!({"initramfs": "/no/such"}), &["initramfs /no/such"]);
    refused(
        json!({"cmdline": "x".repeat(4096)}),
        &["command line", "2047"],
    );
}

#[test]
fn too_few_and_too_many_vcpus_are_named() {
    refused(json!({"vcpus": 0}), &["0 vCPUs", "set vcpus"]);
    refused(json!({"vcpus": 255}), &["255 vCPUs", "set vcpus"]);
}

#[test]
fn a_disk_that_is_none_is_named() {
    refused(json!({"disks": [{"path": "/no/such"}]}), &["/no/such"]);
    refused(json!({"disks": [{"path": "/tmp"}]}), &["/tmp"]);
    let mut disk = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut disk, &[0; 512]).unwrap();
    let serial = "x".repeat(21);
    refused(
        json!({"disks": [{"path": disk.path(), "serial": serial}]}),
        &["serial", "20"],
    );
    refused(
        json!({"spare_disks": 30}),
        &["virtio devices", "spare_disks"],
    );
}

#[test]
fn a_network_that_is_none_is_named() {
    refused(json!({"networks": [{"tap": "lo"}]}), &["lo"]);
    refused(
        json!({"networks": [{"tap": "tap0", "mac": "01:00:00:00:00:00"}]}),
        &["MAC"],
    );
    refused(json!({"networks": [{"tap": "tap0", "mtu": 20}]}), &["MTU"]);
}

#[test]
fn a_share_and_a_socket_that_cannot_be_are_named() {
    refused(
        json!({"shares": [{"tag": "t", "path": "/no/such"}]}),
        &["/no/such"],
    );
    refused(json!({"shares": [{"tag": "", "path": "/tmp"}]}), &["tag"]);
    refused(
        json!({"vsock": {"path": "/no/such/socket"}}),
        &["/no/such/socket"],
    );
    refused(json!({"vsock": {"cid": 1, "path": "socket"}}), &["1"]);
}

#[test]
fn a_failure_after_the_socket_was_made_removes_it() {
    // The disk is opened after the socket.
    refused(
        json!({"vsock": {"path": "socket"}, "disks": [{"path": "/no/such"}]}),
        &["/no/such"],
    );
}

/// Runs a good configuration as another user, or where /dev is another one.
fn run_changed(change: impl FnOnce(&mut std::process::Command)) -> Ended {
    let files = Files::new();
    let config = files.config(code::RESET, json!({}));
    let path = files.put("vm.json", config.to_string().as_bytes());
    std::fs::set_permissions(files.dir(), PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = hypervisor();
    command.arg("--config").arg(path);
    change(&mut command);
    command.output().unwrap().into()
}

#[test]
fn a_missing_kvm_is_the_hosts_fault() {
    let ended = run_changed(|command| {
        // SAFETY: The closure only makes system calls, with strings that live as long as the program.
        unsafe {
            command.pre_exec(|| {
                let none = std::ptr::null();
                let private = libc::MS_REC | libc::MS_PRIVATE;
                if libc::unshare(libc::CLONE_NEWNS) < 0
                    || libc::mount(none, c"/".as_ptr(), none, private, none.cast()) < 0
                    || libc::mount(none, c"/dev".as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()) < 0
                {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
    });
    ended.fails(
        VmmError,
        &["There is no /dev/kvm", "load kvm_intel or kvm_amd"],
    );
}

#[test]
fn a_kvm_that_may_not_be_opened_is_named() {
    let ended = run_changed(|command| {
        command.uid(65534).gid(65534);
    });
    ended.fails(VmmError, &["Not allowed to open /dev/kvm", "run as root"]);
}
