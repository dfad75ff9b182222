//! A pod as the kubelet makes it, by crictl.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cube_tests::{BUSYBOX, Ended, Follower, TestDir, setting, unique};
use serde_json::{Value, json};

use crate::told;

/// No call takes longer, in seconds.
const LIMIT: &str = "300";

/// In a `LinuxSandboxSecurityContext`: containers have the host's network (cube gives the machine one of its own), and
/// processes that the others do not see.
const NAMESPACES: &str = r#"{"namespace_options": {"network": 2, "pid": 1}}"#;

/// A crictl command line, which fails if it takes too long.
pub fn crictl(arguments: &[&str]) -> Command {
    let without = crictl_without_limit(arguments);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", LIMIT]);
    command.arg(without.get_program()).args(without.get_args());
    command.stdin(Stdio::null());
    command
}

/// A crictl command line, for as long as it takes.
pub fn crictl_without_limit(arguments: &[&str]) -> Command {
    let address = format!("unix://{}", setting("CUBE_TEST_ADDRESS"));
    let mut command = Command::new(setting("CUBE_TEST_CRICTL"));
    command.args(["--config", "/dev/null", "--timeout", "240s"]);
    command.args(["--runtime-endpoint", &address, "--image-endpoint", &address]);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs crictl with these arguments; its result, whatever it is.
pub fn try_crictl(arguments: &[&str]) -> Ended {
    Ended::from(crictl(arguments).output().unwrap())
}

/// Runs crictl with these arguments, successfully; what it printed.
pub fn must_crictl(arguments: &[&str]) -> String {
    try_crictl(arguments).success()
}

/// A pod, with a directory of the host that its containers have as /host.
pub struct Pod {
    /// Its id.
    pub id: String,
    dir: TestDir,
    config: PathBuf,
    cgroup: PathBuf,
    removed: bool,
}

impl Pod {
    /// Runs one by this runtime handler.
    pub fn run(handler: &str) -> Self {
        Self::run_with(handler, json!({}))
    }

    /// Runs one with these changes to its configuration, merged into the objects that are there.
    pub fn run_with(handler: &str, changes: Value) -> Self {
        let (mut pod, ended) = Self::try_run(handler, changes);
        pod.id = ended.success().trim().to_owned();
        pod
    }

    /// What is said of one that cannot be run. Nothing of it is left.
    pub fn refusal(handler: &str, changes: Value) -> String {
        let (mut pod, ended) = Self::try_run(handler, changes);
        assert_ne!(ended.status, 0, "{ended:?}");
        pod.removed = true;
        fs::remove_dir(&pod.cgroup).unwrap();
        ended.stderr
    }

    /// Tries to run one. It has no id yet.
    fn try_run(handler: &str, changes: Value) -> (Self, Ended) {
        let (dir, name) = (TestDir::new(), unique("pod"));
        for made in ["logs", "host"] {
            fs::create_dir(dir.path().join(made)).unwrap();
        }
        // The kubelet makes a pod's cgroup, and containerd looks into it for the pod's figures.
        let cgroup = Path::new("/sys/fs/cgroup").join(&name);
        fs::create_dir(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.subtree_control"), "+cpu +memory +pids").unwrap();
        let config = dir.path().join("pod.json");
        let mut pod = json!({
            "metadata": {"name": name, "uid": name, "namespace": "default"},
            "log_directory": dir.path().join("logs"),
            "linux": {"cgroup_parent": format!("/{name}"), "security_context": namespaces()},
        });
        merge(&mut pod, changes);
        fs::write(&config, pod.to_string()).unwrap();
        let ended = try_crictl(&["runp", "--runtime", handler, config.to_str().unwrap()]);
        let pod = Self {
            id: String::new(),
            dir,
            config,
            cgroup,
            removed: false,
        };
        (pod, ended)
    }

    /// The process that runs its machine.
    pub fn hypervisor(&self) -> u32 {
        // The shim notes it for whoever cleans up after it.
        let note = Path::new("/run/cube/k8s.io")
            .join(&self.id)
            .join("hypervisor");
        let note = fs::read_to_string(note).unwrap();
        note.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Creates a container of a shell script, with these changes to its configuration.
    pub fn create(&self, script: &str, changes: Value) -> Container {
        let name = unique("c");
        let mut config = json!({
            "metadata": {"name": name},
            "image": {"image": BUSYBOX},
            "command": ["sh", "-c", script],
            "log_path": format!("{name}.log"),
            "mounts": [{"container_path": "/host", "host_path": self.host()}],
            "linux": {"security_context": namespaces()},
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let file = self.dir.path().join(&name);
        fs::write(&file, config.to_string()).unwrap();
        let [file, pod] = [&file, &self.config].map(|path| path.to_str().unwrap());
        let id = must_crictl(&["create", &self.id, file, pod]);
        Container {
            id: id.trim().to_owned(),
            log: self.dir.path().join("logs").join(format!("{name}.log")),
        }
    }

    /// Starts a container of a shell script.
    pub fn start(&self, script: &str) -> Container {
        let container = self.create(script, json!({}));
        container.start();
        container
    }

    /// What is /host in its containers.
    pub fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    /// An empty file there.
    pub fn file(&self, name: &str) -> PathBuf {
        let path = self.host().join(name);
        fs::write(&path, "").unwrap();
        path
    }

    /// What containerd says of it.
    pub fn inspect(&self) -> Value {
        let printed = must_crictl(&["inspectp", &self.id]);
        serde_json::from_str(&printed).unwrap()
    }

    /// Its figures.
    pub fn stats(&self) -> Value {
        let printed = must_crictl(&["statsp", "--output", "json", "--id", &self.id]);
        let printed: Value = serde_json::from_str(&printed).unwrap();
        printed["stats"][0].clone()
    }

    /// Stops and removes it; nothing of it is left in its cgroup.
    pub fn remove(mut self) {
        must_crictl(&["stopp", &self.id]);
        must_crictl(&["rmp", &self.id]);
        self.removed = true;
        fs::remove_dir(&self.cgroup).unwrap();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if !self.removed && !self.id.is_empty() {
            try_crictl(&["rmp", "--force", &self.id]);
            let _ = fs::remove_dir(&self.cgroup);
        }
    }
}

/// Puts what is in the second object into the first.
fn merge(to: &mut Value, from: Value) {
    match (to, from) {
        (Value::Object(to), Value::Object(from)) => {
            for (key, value) in from {
                merge(to.entry(key).or_insert(Value::Null), value);
            }
        }
        (to, from) => *to = from,
    }
}

fn namespaces() -> Value {
    serde_json::from_str(NAMESPACES).unwrap()
}

/// A container of a pod, which goes with it.
pub struct Container {
    /// Its id.
    pub id: String,
    /// The file with its output.
    pub log: PathBuf,
}

impl Container {
    /// Starts it.
    pub fn start(&self) {
        must_crictl(&["start", &self.id]);
    }

    /// Waits for its end; its exit status.
    pub fn wait(&self) -> i64 {
        told::wait_for(&self.id, "CONTAINER_STOPPED_EVENT");
        let status = self.status();
        assert_eq!(status["state"], "CONTAINER_EXITED", "{status}");
        status["exitCode"].as_i64().unwrap()
    }

    /// What containerd says of it.
    pub fn status(&self) -> Value {
        let printed = must_crictl(&["inspect", &self.id]);
        let printed: Value = serde_json::from_str(&printed).unwrap();
        printed["status"].clone()
    }

    /// Its figures.
    pub fn stats(&self) -> Value {
        let printed = must_crictl(&["stats", "--output", "json", "--id", &self.id]);
        let printed: Value = serde_json::from_str(&printed).unwrap();
        printed["stats"][0].clone()
    }

    /// Runs another program in it by ExecSync.
    pub fn exec_sync(&self, arguments: &[&str]) -> Ended {
        try_crictl(&[&["exec", "--sync", &self.id], arguments].concat())
    }

    /// Runs another program in it by ExecSync, successfully; what it wrote to its standard output, and it wrote nothing else.
    pub fn output_of(&self, arguments: &[&str]) -> String {
        let printed = self.exec_sync(arguments).success();
        // crictl ends either stream with a line's end.
        printed.strip_suffix("\n\n").unwrap().to_owned()
    }

    /// The command line that runs another program in it by Exec, over a connection of its own.
    pub fn exec(&self, options: &[&str], arguments: &[&str]) -> Command {
        crictl(&[&["exec"], options, &[&self.id], arguments].concat())
    }

    /// Stops it as the kubelet does, with so many seconds for it to end by itself.
    pub fn stop(&self, seconds: u32) {
        must_crictl(&["stop", "--timeout", &seconds.to_string(), &self.id]);
    }

    /// Its output, once these lines are in its log: containerd tells of a container's end before it has written the last.
    pub fn output_with(&self, lines: &[&str]) -> Output {
        let mut missing = lines.to_vec();
        let mut log = Follower::of(&self.log);
        while !missing.is_empty() {
            let line = log.next_line();
            missing.retain(|end| !line.ends_with(end));
        }
        Output::parse(&fs::read_to_string(&self.log).unwrap())
    }
}

/// What a container has written, by its log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// To its standard output.
    pub stdout: String,
    /// To its standard error.
    pub stderr: String,
}

impl Output {
    /// Each line has a time, the stream's name, whether the line is full or goes on, and text.
    fn parse(log: &str) -> Self {
        let mut output = Self::default();
        for line in log.split_terminator('\n') {
            let mut words = line.splitn(4, ' ');
            let mut word = || {
                words
                    .next()
                    .unwrap_or_else(|| panic!("no log line: {line}"))
            };
            let (_, stream, tag, text) = (word(), word(), word(), word());
            let stream = match stream {
                "stdout" => &mut output.stdout,
                "stderr" => &mut output.stderr,
                _ => panic!("no stream: {line}"),
            };
            stream.push_str(text);
            match tag {
                "F" => stream.push('\n'),
                "P" => {}
                _ => panic!("no tag: {line}"),
            }
        }
        output
    }
}
