//! The ttrpc service: each call to what carries it out, each error to a status.

use std::sync::Arc;

use async_trait::async_trait;
use cube_agent_protocol::agent::{
    ConfigureRequest, ContainerRequest, CreateContainerRequest, Empty, ExecRequest,
    ListProcessesResponse, ProcessCreated, ProcessExit, ProcessRequest, ResizePtyRequest,
    SignalRequest, StatsResponse, UpdateRequest, WaitRequest, WaitResponse,
};
use cube_agent_protocol::agent_ttrpc::Agent;
use tokio::task::JoinError;
use ttrpc::asynchronous::TtrpcContext;
use ttrpc::{Code, get_status};

use crate::configure::{self, ConfigureError};
use crate::container::{ContainerError, Containers};
use crate::disks::DiskError;
use crate::error::chain;
use crate::helper::parent::HelperError;
use crate::init;
use crate::reaper::Exit;
use crate::rootfs::RootfsError;
use crate::stdio::StdioError;

type Result<T> = ttrpc::Result<T>;

/// The service.
pub struct Service {
    containers: Arc<Containers>,
}

impl Service {
    /// A service for these containers.
    pub fn new(containers: Arc<Containers>) -> Self {
        Self { containers }
    }
}

#[async_trait]
impl Agent for Service {
    async fn configure(&self, _: &TtrpcContext, request: ConfigureRequest) -> Result<Empty> {
        configure::configure(request).map_err(configure_status)?;
        Ok(Empty::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> Result<ProcessCreated> {
        // A task of its own: a caller that gives up waiting must not leave half a container.
        let containers = self.containers.clone();
        created(tokio::spawn(async move { containers.create(request).await }).await)
    }

    async fn start_container(&self, _: &TtrpcContext, request: ContainerRequest) -> Result<Empty> {
        done(self.containers.start(&request.id))
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecRequest) -> Result<ProcessCreated> {
        let containers = self.containers.clone();
        created(tokio::spawn(async move { containers.exec(request).await }).await)
    }

    async fn signal(&self, _: &TtrpcContext, request: SignalRequest) -> Result<Empty> {
        done(self.containers.signal(&request))
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> Result<WaitResponse> {
        let (exit, oom_kills) = self
            .containers
            .wait(&request.container_id, &request.exec_id, request.oom_kills)
            .await
            .map_err(status)?;
        let mut response = WaitResponse::new();
        response.exit = exit.map(process_exit).into();
        response.oom_kills = oom_kills;
        Ok(response)
    }

    async fn delete(&self, _: &TtrpcContext, request: ProcessRequest) -> Result<ProcessExit> {
        let containers = self.containers.clone();
        let deleted = tokio::spawn(async move {
            containers
                .delete(&request.container_id, &request.exec_id)
                .await
        });
        let (exit, in_use) = joined(deleted.await)?;
        let mut response = process_exit(exit);
        response.disks_in_use = in_use;
        Ok(response)
    }

    async fn close_stdin(&self, _: &TtrpcContext, request: ProcessRequest) -> Result<Empty> {
        done(
            self.containers
                .close_stdin(&request.container_id, &request.exec_id),
        )
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> Result<Empty> {
        done(self.containers.resize(&request))
    }

    async fn list_processes(
        &self,
        _: &TtrpcContext,
        request: ContainerRequest,
    ) -> Result<ListProcessesResponse> {
        let mut response = ListProcessesResponse::new();
        response.processes = self.containers.list(&request.id).map_err(status)?;
        Ok(response)
    }

    async fn stats(&self, _: &TtrpcContext, request: ContainerRequest) -> Result<StatsResponse> {
        self.containers.stats(&request.id).await.map_err(status)
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateRequest) -> Result<Empty> {
        done(
            self.containers
                .update(&request.id, &request.resources)
                .await,
        )
    }

    async fn pause(&self, _: &TtrpcContext, request: ContainerRequest) -> Result<Empty> {
        done(self.containers.pause(&request.id).await)
    }

    async fn resume(&self, _: &TtrpcContext, request: ContainerRequest) -> Result<Empty> {
        done(self.containers.resume(&request.id).await)
    }

    async fn drop_caches(&self, _: &TtrpcContext, _: Empty) -> Result<Empty> {
        // On a thread of its own: it walks over all inodes.
        match tokio::task::spawn_blocking(configure::drop_caches).await {
            Ok(dropped) => dropped.map_err(configure_status)?,
            Err(error) => return Err(task_status(&error)),
        }
        Ok(Empty::new())
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> Result<Empty> {
        self.containers.kill_all();
        // sync(2) may take its time, and what else is asked meanwhile should be answered.
        tokio::task::spawn_blocking(init::reset);
        Ok(Empty::new())
    }
}

fn created(
    made: std::result::Result<std::result::Result<u32, ContainerError>, JoinError>,
) -> Result<ProcessCreated> {
    let mut response = ProcessCreated::new();
    response.pid = joined(made)?;
    Ok(response)
}

fn joined<T>(
    done: std::result::Result<std::result::Result<T, ContainerError>, JoinError>,
) -> Result<T> {
    match done {
        Ok(done) => done.map_err(status),
        Err(error) => Err(task_status(&error)),
    }
}

fn done(done: std::result::Result<(), ContainerError>) -> Result<Empty> {
    done.map(|()| Empty::new()).map_err(status)
}

fn process_exit(exit: Exit) -> ProcessExit {
    let mut response = ProcessExit::new();
    response.exit_status = exit.status;
    response.exited_at_ns = exit.at_ns;
    response
}

fn status(error: ContainerError) -> ttrpc::Error {
    use ContainerError as E;
    let code = match &error {
        E::NoContainer(_) | E::NoProcess { .. } | E::Finished => Code::NOT_FOUND,
        E::Exists(..) => Code::ALREADY_EXISTS,
        E::State { .. } => Code::FAILED_PRECONDITION,
        E::Invalid(..) | E::Helper(HelperError::Invalid(_)) | E::Stdio(StdioError::Token(..)) => {
            Code::INVALID_ARGUMENT
        }
        E::Cgroup(error) if error.is_invalid() => Code::INVALID_ARGUMENT,
        E::Rootfs(RootfsError::Outside(..) | RootfsError::Disk(DiskError::Unnamed)) => {
            Code::INVALID_ARGUMENT
        }
        E::DisksInUse(..) => Code::ABORTED,
        E::Rootfs(_) | E::System(..) | E::Helper(_) | E::Stdio(_) | E::Cgroup(_) => Code::INTERNAL,
    };
    answer(code, chain(&error))
}

fn configure_status(error: ConfigureError) -> ttrpc::Error {
    let code = if error.is_invalid() {
        Code::INVALID_ARGUMENT
    } else {
        Code::INTERNAL
    };
    answer(code, chain(&error))
}

fn task_status(error: &JoinError) -> ttrpc::Error {
    answer(Code::INTERNAL, chain(error))
}

fn answer(code: Code, message: String) -> ttrpc::Error {
    log::info!("answers {code:?}: {message}");
    ttrpc::Error::RpcStatus(get_status(code, message))
}
