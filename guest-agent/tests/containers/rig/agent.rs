//! The host's side: calls of the agent, and what several of them make.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use cube_agent_protocol::agent::{
    ConfigureRequest, ContainerRequest, CreateContainerRequest, Empty, ExecRequest, Process,
    ProcessRequest, ResizePtyRequest, Share, SignalRequest, StatsResponse, UpdateRequest,
    WaitRequest, WaitResponse,
};
use cube_agent_protocol::agent_ttrpc::AgentClient;
use cube_agent_protocol::{AGENT_PORT, SHARE_PATH, SHARE_TAG, STREAM_PORT};
use serde_json::Value;
use tokio::net::UnixListener;
use ttrpc::Code;

use super::place::{Guest, agent_process};
use super::spec::spec;
use super::streams::{Arrivals, Io, random};

/// What the agent answers to a call that it does not carry out.
pub type Failure = (Code, String);

/// The host's side.
#[derive(Clone)]
pub struct Agent {
    client: AgentClient,
    dir: PathBuf,
    /// Whether it is PID 1 of a guest.
    pub in_guest: bool,
    arrivals: Arrivals,
}

impl Agent {
    /// An agent in a guest, or without one on this machine, with sockets in `dir`.
    pub async fn launch(dir: &Path, guest: Option<&Guest>) -> (Self, Child) {
        let bind = |port: u32| {
            let path = dir.join(format!("v_{port}"));
            UnixListener::bind(path).unwrap()
        };
        let control = bind(AGENT_PORT);
        let listener = bind(STREAM_PORT);
        let mut child = match guest {
            Some(guest) => guest.boot(dir),
            None => agent_process(dir),
        };
        let accepted = tokio::time::timeout(Duration::from_secs(60), control.accept());
        let Ok(Ok((connection, _))) = accepted.await else {
            child.kill().unwrap();
            panic!("the agent does not connect");
        };
        let socket = ttrpc::asynchronous::transport::Socket::from(connection);
        let arrivals = Arrivals::listen(listener);
        let agent = Self {
            client: AgentClient::new(ttrpc::asynchronous::Client::new(socket)),
            dir: dir.to_owned(),
            in_guest: guest.is_some(),
            arrivals,
        };
        if agent.in_guest {
            agent.configure(&base_configuration()).await.unwrap();
        }
        (agent, child)
    }

    /// Streams for a process.
    pub fn streams(&self, terminal: bool) -> Io {
        Io::new(&self.arrivals, terminal)
    }

    /// Nothing but /dev/null.
    pub fn no_streams(&self) -> Io {
        Io::none(&self.arrivals)
    }

    /// The root file system, as the agent sees it.
    pub fn rootfs(&self) -> String {
        if self.in_guest {
            format!("{SHARE_PATH}/rootfs")
        } else {
            self.dir.join("rootfs").to_str().unwrap().into()
        }
    }

    pub async fn create(&self, id: &str, spec: &Value, io: &Io) -> Result<u32, Failure> {
        let mut request = CreateContainerRequest::new();
        request.id = id.into();
        request.spec = serde_json::to_vec(spec).unwrap();
        request.rootfs = self.rootfs();
        request.stdio = Some(io.stdio.clone()).into();
        let created = self.client.create_container(context(), &request).await;
        created.map(|created| created.pid).map_err(failure)
    }

    pub async fn configure(&self, request: &ConfigureRequest) -> Result<(), Failure> {
        self.client
            .configure(context(), request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn start(&self, id: &str) -> Result<(), Failure> {
        self.client
            .start_container(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn exec(
        &self,
        id: &str,
        exec: &str,
        process: &Value,
        io: &Io,
    ) -> Result<u32, Failure> {
        let mut request = ExecRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        request.process = serde_json::to_vec(process).unwrap();
        request.stdio = Some(io.stdio.clone()).into();
        let created = self.client.exec(context(), &request).await;
        created.map(|created| created.pid).map_err(failure)
    }

    /// Waits for an exit.
    pub async fn wait(&self, id: &str, exec: &str) -> Result<u32, Failure> {
        let response = self.wait_for_news(id, exec, u64::MAX).await?;
        Ok(response.exit.unwrap().exit_status)
    }

    /// Waits for an exit or more OOM kills than these.
    pub async fn wait_for_news(
        &self,
        id: &str,
        exec: &str,
        oom_kills: u64,
    ) -> Result<WaitResponse, Failure> {
        let mut request = WaitRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        request.oom_kills = oom_kills;
        self.client.wait(context(), &request).await.map_err(failure)
    }

    pub async fn delete(&self, id: &str, exec: &str) -> Result<u32, Failure> {
        let exit = self.client.delete(context(), &process(id, exec)).await;
        exit.map(|exit| exit.exit_status).map_err(failure)
    }

    pub async fn signal(
        &self,
        id: &str,
        exec: &str,
        signal: u32,
        all: bool,
    ) -> Result<(), Failure> {
        let mut request = SignalRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        request.signal = signal;
        request.all = all;
        self.client
            .signal(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn close_stdin(&self, id: &str, exec: &str) -> Result<(), Failure> {
        self.client
            .close_stdin(context(), &process(id, exec))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn resize(
        &self,
        id: &str,
        exec: &str,
        width: u32,
        height: u32,
    ) -> Result<(), Failure> {
        let mut request = ResizePtyRequest::new();
        request.container_id = id.into();
        request.exec_id = exec.into();
        (request.width, request.height) = (width, height);
        self.client
            .resize_pty(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn pause(&self, id: &str) -> Result<(), Failure> {
        self.client
            .pause(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn resume(&self, id: &str) -> Result<(), Failure> {
        self.client
            .resume(context(), &container(id))
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn list(&self, id: &str) -> Vec<Process> {
        self.client
            .list_processes(context(), &container(id))
            .await
            .unwrap()
            .processes
    }

    pub async fn stats(&self, id: &str) -> Result<StatsResponse, Failure> {
        self.client
            .stats(context(), &container(id))
            .await
            .map_err(failure)
    }

    pub async fn update(&self, id: &str, resources: &Value) -> Result<(), Failure> {
        let mut request = UpdateRequest::new();
        request.id = id.into();
        request.resources = serde_json::to_vec(resources).unwrap();
        self.client
            .update(context(), &request)
            .await
            .map(drop)
            .map_err(failure)
    }

    pub async fn drop_caches(&self) -> Result<(), Failure> {
        let empty = Empty::new();
        self.client
            .drop_caches(context(), &empty)
            .await
            .map(drop)
            .map_err(failure)
    }

    /// The answer may be lost with the machine.
    pub async fn shutdown(&self) {
        let _ = self.client.shutdown(context(), &Empty::new()).await;
    }

    /// Creates and starts a container without streams.
    pub async fn running(&self, id: &str, args: &[&str]) -> u32 {
        let pid = self
            .create(id, &spec(args), &self.no_streams())
            .await
            .unwrap();
        self.start(id).await.unwrap();
        pid
    }

    /// Kills and deletes a container.
    pub async fn end(&self, id: &str) {
        self.signal(id, "", 9, true).await.unwrap();
        assert_eq!(self.wait(id, "").await.unwrap(), 137);
        self.delete(id, "").await.unwrap();
    }

    /// A container from its create to its delete; its status and its output.
    pub async fn run(&self, id: &str, spec: &Value) -> (u32, String) {
        let io = self.streams(false);
        self.create(id, spec, &io).await.unwrap();
        self.start(id).await.unwrap();
        let (out, err) = (io.stdout().await, io.stderr().await);
        let (out, err) = tokio::join!(out.collect(), err.collect());
        assert_eq!(String::from_utf8_lossy(&err), "");
        let status = self.wait(id, "").await.unwrap();
        self.delete(id, "").await.unwrap();
        (status, String::from_utf8(out).unwrap())
    }

    /// An exec from its start to its end.
    pub async fn exec_collect(&self, id: &str, exec: &str, process: &Value) -> (u32, String) {
        let io = self.streams(false);
        self.exec(id, exec, process, &io).await.unwrap();
        let out = io.stdout().await.collect().await;
        let status = self.wait(id, exec).await.unwrap();
        (status, String::from_utf8(out).unwrap())
    }

    /// Waits until a file is in the root file system.
    pub async fn wait_for_file(&self, name: &str) {
        self.until(async || self.dir.join("rootfs").join(name).exists())
            .await;
    }

    pub fn has_file(&self, name: &str) -> bool {
        self.dir.join("rootfs").join(name).exists()
    }

    pub fn remove_file(&self, name: &str) {
        std::fs::remove_file(self.dir.join("rootfs").join(name)).unwrap();
    }

    /// Waits for a state of the container that nothing announces.
    pub async fn until(&self, reached: impl AsyncFn() -> bool) {
        while !reached().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Whether limits can be set on this machine.
    pub fn has_controllers(&self) -> bool {
        if self.in_guest {
            return true;
        }
        let text = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap();
        text.contains("memory") && text.contains("pids")
    }

    /// Of containers, in the file system and among processes.
    pub async fn nothing_left(&self) {
        let containers = std::fs::read_dir(self.dir.join("containers"))
            .unwrap()
            .count();
        assert_eq!(containers, 0);
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("/containers/"), "{mounts}");
    }
}

/// What a shim tells a fresh guest.
fn base_configuration() -> ConfigureRequest {
    let mut share = Share::new();
    share.tag = SHARE_TAG.into();
    share.path = SHARE_PATH.into();
    let mut request = ConfigureRequest::new();
    request.shares = vec![share];
    request.entropy = random(32);
    request.wall_clock_ns = cube_agent::reaper::wall_clock_ns();
    request
}

fn context() -> ttrpc::context::Context {
    ttrpc::context::with_duration(Duration::ZERO)
}

fn container(id: &str) -> ContainerRequest {
    let mut request = ContainerRequest::new();
    request.id = id.into();
    request
}

fn process(id: &str, exec: &str) -> ProcessRequest {
    let mut request = ProcessRequest::new();
    request.container_id = id.into();
    request.exec_id = exec.into();
    request
}

fn failure(error: ttrpc::Error) -> Failure {
    match error {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message),
        other => panic!("{other}"),
    }
}
