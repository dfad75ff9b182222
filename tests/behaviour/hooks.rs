//! OCI hooks: each kind runs where and when the specification says.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use cube_tests::*;

/// A bundle of a test's own: a root file system of busybox alone, a specification with hooks, and a
/// log that those of the host write to.
struct Hooked {
    dir: TestDir,
    id: String,
}

impl Hooked {
    fn new() -> Self {
        let dir = TestDir::new();
        let root = dir.path().join("rootfs");
        for name in ["bin", "proc", "dev"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
        for name in ["sh", "ls", "cat", "sleep", "test", "touch"] {
            symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        let id = unique("h");
        Self { dir, id }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("rootfs")
    }

    /// A hook that is a shell script with the state in `$state`, for programs of the host and of
    /// the container: the static busybox is in both.
    fn hook(script: &str) -> String {
        let script = format!("state=$(cat); {script}");
        assert!(!script.contains('"'), "it stands in a JSON string");
        format!(
            r#"[{{"path": "/bin/busybox", "args": ["sh", "-c", "{script}"], "env": ["PATH=/bin:/usr/bin"], "timeout": 60}}]"#
        )
    }

    /// A hook of the host that logs its kind, the state's status, and the network namespace of the
    /// state's process.
    fn logging(&self, kind: &str) -> String {
        let log = self.dir.path().join("log");
        // What follows the key, without the quotation marks: nothing if there is no such key.
        Self::hook(&format!(
            "status=${{state#*status???}}; pid=${{state#*pid??}}; \
             echo {kind} ${{status%%[!a-z]*}} $(readlink /proc/${{pid%%[!0-9]*}}/ns/net) >>{}",
            log.display()
        ))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// `ctr run` of a container with these hooks and this program.
    fn command(&self, how: &str, hooks: &[(&str, String)], script: &str) -> Command {
        let hooks: Vec<_> = hooks
            .iter()
            .map(|(kind, list)| format!(r#""{kind}": {list}"#))
            .collect();
        let spec = format!(
            r#"{{
                "ociVersion": "1.1.0",
                "root": {{"path": "{root}"}},
                "process": {{"user": {{"uid": 0, "gid": 0}}, "cwd": "/", "args": ["sh", "-c", "{script}"], "env": ["PATH=/bin"]}},
                "mounts": [{{"destination": "/proc", "type": "proc", "source": "proc"}}],
                "linux": {{"namespaces": [{{"type": "pid"}}, {{"type": "ipc"}}, {{"type": "uts"}}, {{"type": "mount"}}, {{"type": "network"}}]}},
                "hooks": {{{hooks}}}
            }}"#,
            root = self.root().display(),
            hooks = hooks.join(", "),
        );
        let path = self.dir.path().join("config.json");
        fs::write(&path, spec).unwrap();
        let path = path.display().to_string();
        ctr(&[
            "run",
            "--runtime",
            &runtime(),
            how,
            "--config",
            &path,
            &self.id,
        ])
    }

    fn run(&self, hooks: &[(&str, String)], script: &str) -> Ended {
        Ended::from(self.command("--rm", hooks, script).output().unwrap())
    }

    fn start(&self, hooks: &[(&str, String)], script: &str) -> Running {
        let ended = self.command("--detach", hooks, script).output().unwrap();
        Ended::from(ended).success();
        Running {
            id: self.id.clone(),
        }
    }
}

#[test]
fn hooks_of_the_host_run_there_with_a_process_of_the_pods_network() {
    let hooked = Hooked::new();
    let kinds = ["prestart", "createRuntime", "poststart", "poststop"];
    let hooks = kinds.map(|kind| (kind, hooked.logging(kind)));
    let running = hooked.start(&hooks, "sleep 1000");
    let network = fs::read_link(format!("/proc/{}/ns/net", running.pid())).unwrap();
    let network = network.display();
    assert_ne!(
        network.to_string(),
        fs::read_link("/proc/self/ns/net")
            .unwrap()
            .display()
            .to_string()
    );
    let started = format!(
        "prestart creating {network}\ncreateRuntime creating {network}\npoststart running {network}\n"
    );
    assert_eq!(hooked.log(), started);
    drop(running);
    assert_eq!(hooked.log(), format!("{started}poststop stopped\n"));
    assert_no_traces_of(&hooked.id);
}

#[test]
fn hooks_of_the_container_run_in_the_guest() {
    let hooked = Hooked::new();
    // The root file system of a container without a snapshot, as the guest sees it.
    let root = format!("/run/cube/shared/volumes/{}/rootfs", hooked.id);
    let hooks = [
        (
            "createContainer",
            Hooked::hook(&format!(
                "uname -r >{root}/kernel; echo $state >{root}/created; [ ! -e {root}/started ]"
            )),
        ),
        (
            "startContainer",
            Hooked::hook("[ -e /created ] && echo $state >/started"),
        ),
    ];
    let status = hooked.run(&hooks, "test -e /started && exit 5").status;
    assert_eq!(status, 5);
    let read = |name: &str| fs::read_to_string(hooked.root().join(name)).unwrap();
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_ne!(read("kernel"), host);
    for name in ["created", "started"] {
        let state = read(name);
        assert!(
            state.contains(&format!("\"id\":\"{}\"", hooked.id)),
            "{state}"
        );
    }
}

#[test]
fn a_hook_that_fails_fails_the_run_and_leaves_nothing() {
    for kind in ["prestart", "createRuntime", "createContainer", "poststart"] {
        let hooked = Hooked::new();
        let hooks = [
            (kind, Hooked::hook("echo no such network >&2; exit 3")),
            ("poststop", hooked.logging("poststop")),
        ];
        let ended = hooked.run(&hooks, "sleep 1000");
        assert_ne!(ended.status, 0, "{kind}");
        if kind == "createContainer" {
            assert!(
                ended.stderr.contains("hooks.createContainer"),
                "{}",
                ended.stderr
            );
        } else {
            let words = format!("error running {kind} hook #0: exit status 3");
            assert!(ended.stderr.contains(&words), "{}", ended.stderr);
            assert!(ended.stderr.contains("no such network"), "{}", ended.stderr);
        }
        try_ctr(&["task", "delete", "--force", &hooked.id]);
        try_ctr(&["container", "delete", &hooked.id]);
        assert_eq!(hooked.log(), "poststop stopped\n", "{kind}");
        assert_no_traces_of(&hooked.id);
    }
}

#[test]
fn a_shim_that_is_killed_owes_its_poststop_hooks_to_nobody() {
    let hooked = Hooked::new();
    let hooks = [("poststop", hooked.logging("poststop"))];
    let events = Events::listen();
    let running = hooked.start(&hooks, "sleep 1000");
    let pattern = format!("containerd-shim-cube.* -id {}( |$)", hooked.id);
    let shim = Command::new("pgrep").args(["-f", &pattern]).output();
    let shim = Ended::from(shim.unwrap()).success();
    let mut kill = Command::new("kill");
    assert!(
        kill.args(["-KILL", shim.trim()])
            .status()
            .unwrap()
            .success()
    );
    events.of_container_until(&hooked.id, "/tasks/delete");
    drop(running);
    assert_eq!(hooked.log(), "poststop stopped\n");
    assert_no_traces_of(&hooked.id);
}
