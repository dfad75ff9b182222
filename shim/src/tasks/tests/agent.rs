//! The pretended guest's agent: processes that end when the test says so.

use std::collections::{HashMap, VecDeque};

use async_trait::async_trait;
use cube_agent_protocol::agent::{
    ConfigureRequest, CreateContainerRequest, Empty, ExecRequest, ListProcessesResponse,
    Process as GuestProcess, ProcessCreated, ProcessExit, ResizePtyRequest, SignalRequest,
    StatsResponse, Stdio, UpdateRequest, WaitRequest, WaitResponse,
};
use cube_agent_protocol::agent_ttrpc::Agent;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;

use super::super::*;

/// What runs in the pretended guest.
#[derive(Default)]
pub(super) struct State {
    pub(super) processes: HashMap<(String, String), watch::Sender<Option<u32>>>,
    /// Of all containers.
    pub(super) oom_kills: watch::Sender<u64>,
    pub(super) log: VecDeque<String>,
    pub(super) streams: std::path::PathBuf,
    /// Commands that do not answer.
    pub(super) mute: bool,
    /// Processes that SIGKILL does not end.
    pub(super) immortal: bool,
}

#[derive(Clone, Default)]
pub(super) struct FakeAgent(pub(super) Arc<Mutex<State>>);

fn status(code: Code, message: &str) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, message))
}

fn process_exit(exit_status: u32) -> ProcessExit {
    ProcessExit {
        exit_status,
        ..Default::default()
    }
}

impl FakeAgent {
    pub(super) fn oom_kill(&self) {
        let state = self.0.lock().unwrap();
        state.oom_kills.send_modify(|kills| *kills += 1);
    }

    pub(super) fn exit(&self, id: &str, exec: &str, code: u32) {
        let state = self.0.lock().unwrap();
        state.processes[&(id.to_owned(), exec.to_owned())].send_replace(Some(code));
    }

    /// Returns if commands are answered.
    async fn answer(&self) {
        let mute = self.0.lock().unwrap().mute;
        if mute {
            std::future::pending::<()>().await;
        }
    }

    /// Connects the streams as the real agent does; standard output says which process it is.
    async fn connect(&self, stdio: &Stdio, name: &str) {
        let path = self.0.lock().unwrap().streams.clone();
        for token in [&stdio.stdin, &stdio.stdout, &stdio.stderr] {
            if token.is_empty() {
                continue;
            }
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(token).await.unwrap();
            if std::ptr::eq(token, &stdio.stdout) {
                stream
                    .write_all(format!("output of {name}").as_bytes())
                    .await
                    .unwrap();
            }
        }
    }
}

#[async_trait]
impl Agent for FakeAgent {
    async fn configure(&self, _: &TtrpcContext, _: ConfigureRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        r: CreateContainerRequest,
    ) -> ttrpc::Result<ProcessCreated> {
        if r.spec.is_empty() {
            return Err(status(
                Code::NOT_FOUND,
                "exec: \"nope\": executable file not found in $PATH",
            ));
        }
        self.connect(&r.stdio, &r.id).await;
        let mut state = self.0.lock().unwrap();
        state
            .processes
            .insert((r.id, String::new()), watch::Sender::new(None));
        Ok(ProcessCreated {
            pid: 10,
            ..Default::default()
        })
    }

    async fn start_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn exec(&self, _: &TtrpcContext, r: ExecRequest) -> ttrpc::Result<ProcessCreated> {
        if r.process == b"\"missing\"" {
            return Err(status(Code::NOT_FOUND, "executable file not found"));
        }
        self.connect(r.stdio.as_ref().unwrap(), &r.exec_id).await;
        let mut state = self.0.lock().unwrap();
        // This one is over before its start is answered.
        let exit = (r.process == b"\"quick\"").then_some(0);
        state
            .processes
            .insert((r.container_id, r.exec_id), watch::Sender::new(exit));
        Ok(ProcessCreated {
            pid: 11,
            ..Default::default()
        })
    }

    async fn signal(&self, _: &TtrpcContext, r: SignalRequest) -> ttrpc::Result<Empty> {
        self.answer().await;
        let mut state = self.0.lock().unwrap();
        state
            .log
            .push_back(format!("signal {} {} {}", r.exec_id, r.signal, r.all));
        if state.immortal {
            return Ok(Empty::default());
        }
        for ((id, exec), exit) in &state.processes {
            if *id == r.container_id && (r.all || *exec == r.exec_id) && exit.borrow().is_none() {
                exit.send_replace(Some(128 + r.signal));
            }
        }
        Ok(Empty::default())
    }

    async fn wait(&self, _: &TtrpcContext, r: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let (exit, mut oom_kills) = {
            let state = self.0.lock().unwrap();
            let exit = state.processes.get(&(r.container_id, r.exec_id));
            (exit.map(|p| p.subscribe()), state.oom_kills.subscribe())
        };
        let mut exit = exit.ok_or_else(|| status(Code::NOT_FOUND, "no such process"))?;
        let exit = tokio::select! {
            biased;
            exit = exit.wait_for(Option::is_some) => match exit {
                Ok(exit) => *exit,
                Err(_) => return Err(status(Code::NOT_FOUND, "deleted")),
            },
            _ = oom_kills.wait_for(|kills| *kills > r.oom_kills) => None,
        };
        let oom_kills = *oom_kills.borrow();
        Ok(WaitResponse {
            exit: exit.map(process_exit).into(),
            oom_kills,
            ..Default::default()
        })
    }

    async fn delete(&self, _: &TtrpcContext, r: ProcessRequest) -> ttrpc::Result<ProcessExit> {
        let mut state = self.0.lock().unwrap();
        state.log.push_back(format!("delete {}", r.exec_id));
        match state.processes.remove(&(r.container_id, r.exec_id)) {
            Some(exit) => Ok(process_exit(exit.borrow().unwrap_or(137))),
            None => Err(status(Code::NOT_FOUND, "no such process")),
        }
    }

    async fn resize_pty(&self, _: &TtrpcContext, r: ResizePtyRequest) -> ttrpc::Result<Empty> {
        self.0
            .lock()
            .unwrap()
            .log
            .push_back(format!("resize {}x{}", r.width, r.height));
        Ok(Empty::default())
    }

    async fn list_processes(
        &self,
        _: &TtrpcContext,
        _: ContainerRequest,
    ) -> ttrpc::Result<ListProcessesResponse> {
        self.answer().await;
        let process = |pid, exec: &str| GuestProcess {
            pid,
            exec_id: exec.into(),
            ..Default::default()
        };
        Ok(ListProcessesResponse {
            processes: vec![process(10, ""), process(11, "e"), process(12, "")],
            ..Default::default()
        })
    }

    async fn update(&self, _: &TtrpcContext, _: UpdateRequest) -> ttrpc::Result<Empty> {
        self.0.lock().unwrap().log.push_back("update".into());
        Ok(Empty::default())
    }

    async fn stats(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<StatsResponse> {
        self.answer().await;
        self.0.lock().unwrap().log.push_back("stats".into());
        Ok(StatsResponse::default())
    }

    async fn pause(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn resume(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }
}
