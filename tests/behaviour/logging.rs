//! Output that goes to a file or to a logging program, as a URI says, and not to a client.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cube_tests::*;

const SCRIPT: &str = "echo to stdout; echo to stderr >&2; exit 3";

/// Runs the script with its outputs going where `uri` says; its status, after its end.
fn run(uri: &str, script: &str) -> (String, Option<u32>) {
    // A client cannot attach to what goes elsewhere.
    let events = Events::listen();
    let container = Container::new().option("--log-uri", uri);
    let running = container.start(&["sh", "-c", script]);
    let exit = events.wait_for("/tasks/exit", &running.id);
    (running.id.clone(), exit.status())
}

/// A program of the host.
fn program(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("logger");
    fs::write(&path, format!("#!/bin/bash\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A logging program that writes each output to a file of `dir`, with the container's name.
fn two_files(dir: &Path) -> PathBuf {
    let to = format!("{}/$CONTAINER_NAMESPACE.$CONTAINER_ID", dir.display());
    // Descriptors 3 and 4 are the outputs; closing 5 says that it is ready.
    let script = format!("exec 5>&-; cat <&3 >{to}.out & cat <&4 >{to}.err & wait");
    program(dir, &script)
}

#[test]
fn outputs_go_to_the_file_that_the_uri_names_behind_what_is_there() {
    let dir = TestDir::new();
    let log = dir.path().join("log");
    fs::write(&log, "before\n").unwrap();
    let uri = format!("file://{}", log.display());
    let (id, status) = run(&uri, SCRIPT);
    assert_eq!(status, Some(3));
    assert_no_traces_of(&id);
    let written = fs::read_to_string(&log).unwrap();
    let mut lines: Vec<_> = written.lines().collect();
    assert_eq!(lines.remove(0), "before");
    lines.sort_unstable();
    assert_eq!(lines, ["to stderr", "to stdout"]);
}

#[test]
fn a_logging_program_gets_each_output_and_the_containers_name() {
    let dir = TestDir::new();
    let uri = format!("binary://{}", two_files(dir.path()).display());
    let (id, status) = run(&uri, SCRIPT);
    assert_eq!(status, Some(3));
    assert_no_traces_of(&id);
    let log = |kind: &str| fs::read_to_string(dir.path().join(format!("default.{id}.{kind}")));
    assert_eq!(log("out").unwrap(), "to stdout\n");
    assert_eq!(log("err").unwrap(), "to stderr\n");
}

#[test]
fn a_logging_program_gets_the_last_byte_of_much_output() {
    let dir = TestDir::new();
    let uri = format!("binary://{}", two_files(dir.path()).display());
    let (id, status) = run(&uri, "head -c 8388608 /dev/zero; echo end");
    assert_eq!(status, Some(0));
    assert_no_traces_of(&id);
    let written = fs::read(dir.path().join(format!("default.{id}.out"))).unwrap();
    assert_eq!(written.len(), (8 << 20) + 4);
    assert!(written.ends_with(b"\0end\n"));
}

#[test]
fn a_logging_program_that_is_missing_fails_the_start_by_its_name() {
    let container = Container::new().option("--log-uri", "binary:///no/such/logger");
    let id = container.id.clone();
    let mut command = container.command(&["--detach"], &["true"]);
    let ended = Ended::from(command.output().unwrap());
    assert_ne!(ended.status, 0);
    assert!(ended.stderr.contains("/no/such/logger"), "{}", ended.stderr);
    try_ctr(&["container", "delete", &id]);
    assert_no_traces_of(&id);
}

#[test]
fn a_logging_program_that_ends_early_does_not_hold_the_container_up() {
    let dir = TestDir::new();
    let logger = program(dir.path(), "exec 5>&-");
    let uri = format!("binary://{}", logger.display());
    // More than a pipe holds. A write to it fails, as it would for a reader that has gone.
    let script = "trap '' PIPE; head -c 1048576 /dev/zero; exit 4";
    let (id, status) = run(&uri, script);
    assert_eq!(status, Some(4));
    assert_no_traces_of(&id);
}

#[test]
fn an_exec_logs_to_a_place_of_its_own() {
    let dir = TestDir::new();
    let log = dir.path().join("exec");
    let uri = format!("file://{}", log.display());
    let running = Container::new().start(&["sleep", "1000"]);
    let mut exec = running.exec_command(&["--log-uri", &uri], &["echo", "of the exec"]);
    assert_eq!(exec.status().unwrap().code(), Some(0));
    assert_eq!(fs::read_to_string(&log).unwrap(), "of the exec\n");
}
