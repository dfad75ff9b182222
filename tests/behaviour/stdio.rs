//! Every byte arrives, in both directions, and no stream holds anything else up.

use std::io::Read;
use std::process::Stdio;

use cube_tests::*;

const MIB_64: usize = 64 << 20;

/// What the container's awk-free generator prints: the same 64 bytes again and again.
const LINE: &str = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+\n";

#[test]
fn both_outputs_at_once_arrive_byte_for_byte() {
    let script = format!(
        "printf '{}' > /line; i=0; while [ $i -lt 10 ]; do cat /line /line > /two; cp /two /line; i=$((i+1)); done; \
         send() {{ i=0; while [ $i -lt 1024 ]; do cat /line; i=$((i+1)); done; }}; \
         send & send >&2 & wait",
        LINE.replace('\n', "\\n")
    );
    let container = Container::new();
    let mut command = container.command(&["--rm"], &["sh", "-c", &script]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let errors = std::thread::spawn(move || check_pattern(&mut stderr));
    let out = check_pattern(child.stdout.as_mut().unwrap());
    assert_eq!(out, MIB_64);
    assert_eq!(errors.join().unwrap(), MIB_64);
    assert!(child.wait().unwrap().success());
}

/// Reads to the end and wants nothing but repetitions of [`LINE`].
fn check_pattern(reader: &mut impl Read) -> usize {
    let (mut buffer, mut total) = (vec![0; 1 << 16], 0);
    loop {
        let n = reader.read(&mut buffer).unwrap();
        if n == 0 {
            return total;
        }
        for (i, byte) in buffer[..n].iter().enumerate() {
            assert_eq!(
                *byte,
                LINE.as_bytes()[(total + i) % LINE.len()],
                "at byte {}",
                total + i
            );
        }
        total += n;
    }
}

#[test]
fn all_of_the_input_arrives() {
    let input: Vec<u8> = (0..MIB_64).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut sum = std::process::Command::new("sha256sum");
    let mut sum = sum
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut sum.stdin.take().unwrap(), &input).unwrap();
    let expected = Ended::from(sum.wait_with_output().unwrap()).success();
    let text = Container::new()
        .run_with_input(&["sha256sum"], input)
        .success();
    assert_eq!(text, expected);
}

#[test]
fn a_container_that_closes_its_output_early_does_no_harm() {
    let text = Container::new().sh("echo first; exec >&-; exec 2>&-; sleep 0.1; exit 5");
    assert_eq!((text.status, text.text().as_str()), (5, "first\n"));
}

#[test]
fn a_container_that_never_reads_its_input_does_no_harm() {
    let ended =
        Container::new().run_with_input(&["sh", "-c", "echo done; exit 3"], vec![b'x'; 4 << 20]);
    assert_eq!((ended.status, ended.text().as_str()), (3, "done\n"));
}

#[test]
fn output_right_before_the_end_is_not_lost() {
    for _ in 0..3 {
        let ended =
            Container::new().sh("head -c 200000 /dev/zero | tr '\\0' x; echo; echo last >&2");
        assert_eq!(ended.stdout.len(), 200_001);
        assert!(ended.stderr.contains("last"), "{}", ended.stderr);
    }
}

#[test]
fn input_to_an_exec_arrives_and_ends() {
    let running = Container::new().start(&["sleep", "1000"]);
    let mut command = running.exec_command(&[], &["cat"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"123\n").unwrap();
    assert_eq!(
        Ended::from(child.wait_with_output().unwrap()).success(),
        "123\n"
    );
}

#[test]
fn no_streams_at_all_are_fine() {
    let container = Container::new().flag("--null-io");
    assert_eq!(
        container.sh("cat; echo nobody hears this; exit 4").status,
        4
    );
}

#[test]
fn a_child_that_keeps_the_output_open_does_not_hold_the_execs_end_up() {
    let running = Container::new().start(&["sleep", "1000"]);
    let events = Events::listen();
    let script = ["sh", "-c", "sleep 1000 & echo started"];
    let mut client = running.exec_command(&[], &script);
    let mut client = client.stdout(Stdio::piped()).spawn().unwrap();
    // The init sleeps on: it is the exec's end that containerd tells of.
    events.of_container_until(&running.id, "/tasks/exit");
    // ctr itself, from 2.0 on, waits for the end of the output as well, with every runtime.
    running.task("kill", &["--signal", "KILL"]).success();
    let mut output = String::new();
    let mut stdout = client.stdout.take().unwrap();
    stdout.read_to_string(&mut output).unwrap();
    assert_eq!(output, "started\n");
    assert_eq!(client.wait().unwrap().code(), Some(0));
}
