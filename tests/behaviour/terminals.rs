//! A terminal in a container is like one on the host: it has the window's size, and keys that are signals are.

use cube_tests::*;

/// Ctrl with a letter.
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_Z: &str = "\x1a";

/// The shell's prompt.
const PROMPT: &str = "/ # ";

/// A program that says that it runs, in words that are not those of the command line.
const SLEEP: &str = "sh -c 'echo it $((40 + 2)) runs; exec sleep 1000'\r";
const IT_RUNS: &str = "it 42 runs";

/// A shell in a terminal of its own container.
fn shell() -> Terminal {
    let mut terminal = Terminal::of(
        &Container::new().flag("--tty").command(&["--rm"], &["sh"]),
        24,
        80,
    );
    terminal.wait_for(PROMPT);
    terminal
}

/// What tells its terminal's size now and whenever it changes.
const TELL_SIZE: &str = "\
    trap 'exit 5' INT; tell() { echo size $(stty size).; }; trap tell WINCH; tell; \
    while :; do sleep 1000 & wait $!; done";

#[test]
fn a_window_that_changes_its_size_tells_the_container_and_an_exec() {
    let running = Container::new().start(&["sleep", "1000"]);
    for client in [
        Container::new()
            .flag("--tty")
            .command(&["--rm"], &["sh", "-c", TELL_SIZE]),
        running.exec_command(&["--tty"], &["sh", "-c", TELL_SIZE]),
    ] {
        let mut terminal = Terminal::of(&client, 33, 101);
        terminal.wait_for("size 33 101.");
        terminal.resize(50, 132);
        terminal.wait_for("size 50 132.");
        terminal.resize(12, 40);
        terminal.wait_for("size 12 40.");
        terminal.press(CTRL_C);
        assert_eq!(terminal.end().status, 5);
    }
}

#[test]
fn ctrl_c_ends_what_runs_in_the_foreground_and_not_the_shell() {
    let mut terminal = shell();
    terminal.press(SLEEP);
    terminal.wait_for(IT_RUNS);
    terminal.press(CTRL_C);
    terminal.wait_for(PROMPT);
    terminal.press("echo status $?.\r");
    terminal.wait_for("status 130.");
    terminal.press("exit 3\r");
    assert_eq!(terminal.end().status, 3);
}

#[test]
fn ctrl_z_stops_a_job_that_goes_on_in_the_background_and_comes_back() {
    let mut terminal = shell();
    // The shell makes a job the terminal's foreground before it lets it go on.
    let job = r#"trap "echo it $((40 + 3)) goes on" CONT; echo it $((40 + 2)) runs; while :; do sleep 1000 & wait; done"#;
    terminal.press(&format!("sh -c '{job}'\r"));
    terminal.wait_for(IT_RUNS);
    terminal.press(CTRL_Z);
    terminal.wait_for("Stopped");
    terminal.wait_for(PROMPT);
    terminal.press("bg\r");
    terminal.wait_for("it 43 goes on");
    terminal.press("jobs\r");
    terminal.wait_for("Running");
    terminal.wait_for(PROMPT);
    terminal.press("fg\r");
    terminal.wait_for("it 43 goes on");
    terminal.press(CTRL_C);
    terminal.wait_for(PROMPT);
    terminal.press("echo status $?.\r");
    terminal.wait_for("status 130.");
    terminal.press("exit\r");
    assert_eq!(terminal.end().status, 0);
}

#[test]
fn ctrl_d_ends_the_shell_with_its_status() {
    let mut terminal = shell();
    terminal.press("sh -c 'exit 7'\r");
    terminal.wait_for(PROMPT);
    terminal.press(CTRL_D);
    assert_eq!(terminal.end().status, 7);
}

/// A line with which a kibibyte is sixteen.
const LINE: &str = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+";

#[test]
fn ten_mebibytes_through_a_terminal_arrive_whole() {
    const BLOCKS: usize = 160;
    // A block of 64 KiB, by doubling: a line at a time would be a hundred thousand system calls.
    let script = format!(
        "echo {LINE} >/line; i=0; while [ $i -lt 10 ]; do cat /line /line >/two; cp /two /line; i=$((i+1)); done; \
         i=0; while [ $i -lt {BLOCKS} ]; do echo block $i; cat /line; i=$((i+1)); done"
    );
    let container = Container::new().flag("--tty");
    let client = container.command(&["--rm"], &["sh", "-c", &script]);
    let mut terminal = Terminal::of(&client, 24, 80);
    // The client itself may say something before.
    terminal.wait_for("block 0\r\n");
    let ended = terminal.end();
    assert_eq!(ended.status, 0);
    assert!(ended.stdout.len() > 10 << 20);
    let mut lines = ended.stdout.split(|byte| *byte == b'\n');
    for block in 1..=BLOCKS {
        for n in 0..1024 {
            let line = lines.next().unwrap_or_default();
            assert!(
                line == format!("{LINE}\r").as_bytes(),
                "line {n} before block {block} is {:?}",
                String::from_utf8_lossy(line)
            );
        }
        let next = match block {
            BLOCKS => String::new(),
            block => format!("block {block}\r"),
        };
        assert_eq!(lines.next(), Some(next.as_bytes()));
    }
    assert_eq!(lines.next(), None);
}

#[test]
fn an_exec_has_a_terminal_of_its_own_in_a_container_without_one() {
    let running = Container::new().start(&["sleep", "1000"]);
    let mut terminal = Terminal::of(&running.exec_command(&["--tty"], &["sh"]), 30, 90);
    terminal.wait_for(PROMPT);
    terminal.press("tty; stty size\r");
    terminal.wait_for("/dev/pts/");
    terminal.wait_for("30 90");
    terminal.wait_for(PROMPT);
    terminal.press(SLEEP);
    terminal.wait_for(IT_RUNS);
    terminal.press(CTRL_C);
    terminal.wait_for(PROMPT);
    terminal.press(CTRL_D);
    assert_eq!(terminal.end().status, 130);
    // The container itself saw nothing of it.
    running.exec(&["true"]).success();
    assert_eq!(running.exec(&["tty"]).text(), "not a tty\n");
}
