//! What a container and the host both see, and the host as it comes.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::{Container, TestDir};

/// A directory that a container has as /host.
pub struct Shared(TestDir);

impl Shared {
    /// An empty one.
    pub fn new() -> Self {
        Self(TestDir::new())
    }

    /// The container with it.
    pub fn of(&self, container: Container) -> Container {
        let source = self.0.path().display();
        container.option(
            "--mount",
            &format!("type=bind,src={source},dst=/host,options=rbind:rw"),
        )
    }

    /// An empty file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, "").unwrap();
        path
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self::new()
    }
}

/// A file's lines, also those that come later.
pub struct Follower {
    client: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Follower {
    /// All of them.
    pub fn of(file: &Path) -> Self {
        Self::from(file, 0)
    }

    /// From so many bytes on.
    pub fn from(file: &Path, start: u64) -> Self {
        let mut tail = Command::new("tail");
        tail.args(["-c", &format!("+{}", start + 1), "-f"])
            .arg(file)
            .stdout(Stdio::piped());
        let mut client = tail.spawn().unwrap();
        let lines = BufReader::new(client.stdout.take().unwrap()).lines();
        Self { client, lines }
    }

    /// The next one, as soon as it is there.
    pub fn next_line(&mut self) -> String {
        let line = self.lines.next();
        line.expect("tail has ended").unwrap()
    }

    /// Waits for a line that ends with these words.
    pub fn wait_for_end_of_line(&mut self, words: &str) {
        let end = format!(" {words}");
        while !self.next_line().ends_with(&end) {}
    }

    /// Waits for this line.
    pub fn wait_for(&mut self, line: &str) {
        while self.next_line() != line {}
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
