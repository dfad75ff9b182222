//! What cannot run fails at once, says why, and leaves nothing.

use std::time::{Duration, Instant};

use cube_tests::*;

/// Runs it, wants a failure whose message has all of `needles`, and nothing left.
fn assert_fails(container: &Container, arguments: &[&str], needles: &[&str]) -> Duration {
    let start = Instant::now();
    let ended = container.run(arguments);
    let took = start.elapsed();
    assert_ne!(ended.status, 0, "{ended:?}");
    for needle in needles {
        assert!(
            ended.stderr.contains(needle),
            "no {needle:?} in {}",
            ended.stderr
        );
    }
    assert_no_traces_of(&container.id);
    took
}

#[test]
fn a_missing_program_is_named_as_runc_does() {
    assert_fails(
        &Container::new(),
        &["nosuch"],
        &[r#"exec: "nosuch": executable file not found in $PATH"#],
    );
    assert_fails(
        &Container::new(),
        &["/no/such"],
        &[r#""/no/such""#, "no such file or directory"],
    );
}

#[test]
fn a_file_that_is_not_executable_is_named_as_runc_does() {
    assert_fails(
        &Container::new(),
        &["/etc/passwd"],
        &[r#""/etc/passwd""#, "permission denied"],
    );
}

#[test]
fn an_exec_of_a_missing_program_fails_and_the_container_lives() {
    let running = Container::new().start(&["sleep", "1000"]);
    let ended = running.exec(&["nosuch"]);
    assert_ne!(ended.status, 0);
    assert!(
        ended
            .stderr
            .contains(r#"exec: "nosuch": executable file not found in $PATH"#),
        "{}",
        ended.stderr
    );
    running.exec(&["true"]).success();
}

#[test]
fn a_bind_of_a_missing_source_is_named() {
    let container = Container::new().option(
        "--mount",
        "type=bind,src=/no/such/source,dst=/mnt,options=rbind:ro",
    );
    assert_fails(&container, &["true"], &["/no/such/source"]);
}

#[test]
fn a_guest_kernel_that_panics_fails_create_at_once_with_its_last_lines() {
    // There is no such init and no other root: the kernel panics.
    let container = Container::new().setting("kernel_params", "rdinit=/nosuch root=/dev/nosuch");
    let took = assert_fails(&container, &["true"], &["Kernel panic - not syncing"]);
    assert!(took < Duration::from_secs(25), "{took:?}");
}

#[test]
fn an_agent_that_is_missing_fails_create_at_once() {
    let empty = TestDir::new();
    let initramfs = empty.path().join("empty.img");
    std::fs::write(&initramfs, cpio_trailer()).unwrap();
    let container = Container::new().setting("initramfs", initramfs.to_str().unwrap());
    let took = assert_fails(&container, &["true"], &["panic"]);
    assert!(took < Duration::from_secs(25), "{took:?}");
}

#[test]
fn a_guest_that_hangs_fails_create_within_the_boot_time_out() {
    // PID 1 is a shell that waits for ever, so no agent ever calls.
    let image = setting("CUBE_TEST_HANGING_INITRAMFS");
    let container = Container::new()
        .setting("initramfs", &image)
        .setting("boot_timeout_s", "10");
    let took = assert_fails(&container, &["true"], &["10s", "NMI"]);
    assert!(
        took >= Duration::from_secs(10) && took < Duration::from_secs(30),
        "{took:?}"
    );
}

#[test]
fn a_file_that_is_no_kernel_is_named() {
    assert_fails(
        &Container::new().setting("kernel", "/etc/passwd"),
        &["true"],
        &["/etc/passwd", "ELF"],
    );
    assert_fails(
        &Container::new().setting("kernel", "/no/such/kernel"),
        &["true"],
        &["/no/such/kernel"],
    );
}

#[test]
fn an_unknown_annotation_is_named() {
    assert_fails(
        &Container::new().setting("vcpus", "2"),
        &["true"],
        &["io.cube.vcpus"],
    );
}

/// A newc archive with nothing in it.
fn cpio_trailer() -> Vec<u8> {
    let mut archive = b"070701".to_vec();
    for field in [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 11, 0u32] {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(b"TRAILER!!!\0");
    archive.resize(archive.len().next_multiple_of(512), 0);
    archive
}
