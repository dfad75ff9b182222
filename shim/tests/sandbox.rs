//! The shim as the controller of a sandbox that never gets a machine, as containerd starts it and speaks to it.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use containerd_shim_protos::api::ConnectRequest;
use containerd_shim_protos::sandbox_api::{CreateSandboxRequest, ShutdownSandboxRequest};
use containerd_shim_protos::sandbox_async::SandboxClient;
use containerd_shim_protos::shim_async::TaskClient;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ttrpc::asynchronous::Client;
use ttrpc::context::with_timeout;

/// No call takes longer, in nanoseconds.
const LIMIT: i64 = 60_000_000_000;

/// A shim for a sandbox without a `config.json`: where it serves.
fn start(bundle: &Path, id: &str) -> PathBuf {
    let started = Command::new(env!("CARGO_BIN_EXE_containerd-shim-cube-rs"))
        .args(["-namespace", "sandbox-test", "-id", id, "-address"])
        .arg(bundle.join("no-containerd"))
        .arg("start")
        .current_dir(bundle)
        .env("TTRPC_ADDRESS", bundle.join("no-containerd"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let answer = String::from_utf8(started.stdout).unwrap();
    assert!(started.status.success(), "{answer}");
    answer.strip_prefix("unix://").unwrap().trim().into()
}

#[tokio::test]
async fn a_shim_answers_the_call_that_ends_it_however_soon_it_ends() {
    let bundle = tempfile::tempdir().unwrap();
    for n in 0..20 {
        let id = format!("s{}-{n}", std::process::id());
        let socket = start(bundle.path(), &id);
        let metadata = std::fs::metadata(&socket).unwrap();
        assert!(metadata.file_type().is_socket());
        let client = Client::connect(&format!("unix://{}", socket.display())).await;
        let client = client.unwrap();
        let sandbox = SandboxClient::new(client.clone());
        let task = TaskClient::new(client);
        let create = CreateSandboxRequest {
            sandbox_id: id.clone(),
            rootfs: vec![Default::default()],
            ..Default::default()
        };
        // It is refused, and containerd shuts down what it has begun.
        let refused = sandbox.create_sandbox(with_timeout(LIMIT), &create).await;
        refused.unwrap_err();
        let nobody = ConnectRequest::default();
        let connected = task.connect(with_timeout(LIMIT), &nobody);
        let process = open(connected.await.unwrap().shim_pid);
        let shutdown = ShutdownSandboxRequest {
            sandbox_id: id,
            ..Default::default()
        };
        let answer = sandbox.shutdown_sandbox(with_timeout(LIMIT), &shutdown);
        answer
            .await
            .unwrap_or_else(|e| panic!("no answer to the last call of shim {n}: {e}"));
        let mut fds = [PollFd::new(
            std::os::fd::AsFd::as_fd(&process),
            PollFlags::POLLIN,
        )];
        let ended = poll(&mut fds, PollTimeout::from(20_000_u16)).unwrap();
        assert_eq!(ended, 1, "shim {n} has not ended");
        assert!(!socket.exists());
    }
}

/// A handle to a process.
fn open(pid: u32) -> std::os::fd::OwnedFd {
    // SAFETY: pidfd_open(2) takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new, and nobody else's.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd as i32) }
}
