//! The tests' containerd, to be killed and started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{End, Ended, setting};

/// It ends at once.
const LIMIT: Duration = Duration::from_secs(60);

/// The containerd that tests/containerd/start has started.
pub struct Containerd(PathBuf);

impl Containerd {
    /// The one that the tests use.
    pub fn of_the_tests() -> Self {
        let socket = PathBuf::from(setting("CUBE_TEST_ADDRESS"));
        Self(socket.parent().unwrap().to_owned())
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        let pid = fs::read_to_string(self.0.join("pid")).unwrap();
        pid.trim().parse().unwrap()
    }

    /// Kills it, and waits for its end.
    pub fn kill(&self) {
        let end = End::of(self.pid()).unwrap();
        self.signal(libc::SIGKILL);
        // Its files are locked as long as it is there.
        assert!(end.comes_within(LIMIT), "containerd survives SIGKILL");
    }

    /// Makes it stand still, with its sockets open, until it goes on.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill(2) has no memory arguments.
        assert_eq!(unsafe { libc::kill(self.pid() as i32, signal) }, 0);
    }

    /// Starts it again, with what it had and where it was.
    pub fn start_again(&self) {
        let start = Path::new(env!("CARGO_MANIFEST_DIR")).join("containerd/start");
        let ended = Command::new(start)
            .arg("--again")
            .arg(&self.0)
            .output()
            .unwrap();
        Ended::from(ended).success();
    }

    /// The file with all that it and its shims say.
    pub fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// What it and its shims said of these containers last.
    pub fn log_about(&self, ids: &[String]) -> String {
        const LINES: usize = 60;
        let log = fs::read(self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log
            .lines()
            .filter(|line| ids.iter().any(|id| line.contains(id.as_str())))
            .collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}
