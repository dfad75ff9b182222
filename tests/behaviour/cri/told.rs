//! What containerd's CRI plugin tells of containers.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::pod::crictl_without_limit;

/// No test waits longer for an event; one that does not come fails.
const LIMIT: Duration = Duration::from_secs(200);

/// An event's line.
const TEMPLATE: &str = "{{.containerId}} {{.containerEventType}}";

/// What was told by now.
#[derive(Default)]
struct Told {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

/// containerd keeps what it has to tell until the first client listens, and only until then. So there is one client for all
/// tests, which misses nothing.
fn told() -> &'static Told {
    static TOLD: OnceLock<Told> = OnceLock::new();
    static LISTENS: OnceLock<()> = OnceLock::new();
    let told = TOLD.get_or_init(Told::default);
    LISTENS.get_or_init(|| listen(told));
    told
}

/// It ends with the containerd that it listens to.
fn listen(told: &'static Told) {
    let how = ["events", "--output", "go-template", "--template", TEMPLATE];
    let mut client = crictl_without_limit(&how)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let stdout = BufReader::new(client.stdout.take().unwrap());
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            let mut lines = told.lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.push(line);
            told.more.notify_all();
        }
        let _ = client.wait();
    });
}

/// Listens to a containerd that was started again.
pub fn listen_again() {
    listen(told());
}

/// Waits until something of a container is told.
pub fn wait_for(container: &str, what: &str) {
    let told = told();
    let line = format!("{container} {what}");
    let lines = told.lines.lock().unwrap_or_else(PoisonError::into_inner);
    let (lines, waited) = told
        .more
        .wait_timeout_while(lines, LIMIT, |lines| !lines.contains(&line))
        .unwrap_or_else(PoisonError::into_inner);
    assert!(!waited.timed_out(), "nobody tells of {line}: {lines:#?}");
}
