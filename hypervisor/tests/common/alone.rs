//! Machines that run alone, from a file.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use cube_hypervisor_api::ExitStatus;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Initramfs, hypervisor, kernel, linux};

/// A directory with the files of a machine in it.
pub struct Files {
    dir: TempDir,
}

impl Files {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn put(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// A configuration for a kernel that runs `code`, with `more` fields.
    pub fn config(&self, code: &[u8], more: Value) -> Value {
        let path = self.put("kernel", &kernel(code, true));
        merged(json!({"kernel": path, "memory_mib": 16}), more)
    }

    /// A configuration for Linux with this script.
    pub fn linux(&self, cmdline: &str, script: &str, more: Value) -> Value {
        let initramfs = self.put("initramfs", &Initramfs::busybox(script));
        let cmdline = format!("quiet console=hvc0 reboot=k panic=-1 {cmdline}");
        let config = json!({
            "kernel": linux(), "initramfs": initramfs, "cmdline": cmdline,
            "memory_mib": 256, "console": "stdio",
        });
        merged(config, more)
    }

    /// Runs the machine alone.
    pub fn run(&self, config: &Value) -> Ended {
        self.start(config).wait()
    }

    /// Starts the machine alone. What it reads is empty.
    pub fn start(&self, config: &Value) -> Alone {
        let path = self.put("vm.json", config.to_string().as_bytes());
        let child = hypervisor()
            .arg("--config")
            .arg(path)
            .current_dir(self.dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Alone(child)
    }
}

pub fn merged(mut config: Value, more: Value) -> Value {
    let (Some(config_fields), Value::Object(more)) = (config.as_object_mut(), more) else {
        panic!("both are objects");
    };
    config_fields.extend(more);
    config
}

/// A machine that runs alone.
pub struct Alone(pub Child);

impl Alone {
    pub fn wait(self) -> Ended {
        self.0.wait_with_output().unwrap().into()
    }

    /// Waits until the guest has written `text`.
    pub fn read_until(&mut self, text: &str) {
        read_until(self.0.stdout.as_mut().unwrap(), text);
    }
}

/// Reads a guest's output until it has written `text`, and not a byte more.
pub fn read_until(output: &mut impl Read, text: &str) {
    let mut got = Vec::new();
    while !got.ends_with(text.as_bytes()) {
        let mut byte = [0];
        let count = output.read(&mut byte).unwrap();
        assert_eq!(count, 1, "ended after {:?}", String::from_utf8_lossy(&got));
        got.push(byte[0]);
    }
}

/// How a machine that ran alone ended.
#[derive(Debug)]
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).replace('\r', ""),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// Wants this status, with one line on stderr that has all of `needles`.
    #[track_caller]
    pub fn fails(&self, status: ExitStatus, needles: &[&str]) {
        assert_eq!(self.status, Some(status.code().into()), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("cube-hypervisor: "), "{self:?}");
        for needle in needles {
            assert!(self.stderr.contains(needle), "no {needle:?} in {self:?}");
        }
    }

    /// Wants a reset by the guest, without a word on stderr.
    #[track_caller]
    pub fn resets(&self) {
        assert_eq!(self.status, Some(0), "{self:?}");
        assert_eq!(self.stderr, "", "{self:?}");
    }
}
