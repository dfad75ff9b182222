//! containerd's task service: requests in, answers and status codes out.
//!
//! Task v2 and v3 differ in nothing but the service's name, so one service has both.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::shim_async::{Task, create_task};
use protobuf::MessageField;
use ttrpc::r#async::{Service, TtrpcContext};

use crate::host_cgroup;
use crate::publisher::timestamp;
use crate::sandbox::Sandbox;
use crate::stats;
use crate::stdio::Uris;
use crate::task_error::TaskError;

/// The names under which the task service is served.
const NAMES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// The services for a sandbox, for the server.
pub fn services(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    let mut services = HashMap::new();
    for name in NAMES {
        let service = Arc::new(TaskService {
            sandbox: sandbox.clone(),
        });
        // The map has one entry, under the generated code's own name.
        for service in create_task(service).into_values() {
            services.insert(name.to_owned(), service);
        }
    }
    services
}

struct TaskService {
    sandbox: Arc<Sandbox>,
}

/// Runs a call to its end, also if containerd goes away or gives up meanwhile: the server drops
/// the handlers of a broken connection wherever they are.
pub async fn whole<T: Send + 'static>(
    call: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> ttrpc::Result<T> {
    match tokio::spawn(call).await {
        Ok(result) => Ok(result?),
        Err(e) => Err(TaskError::host(e).into()),
    }
}

#[async_trait]
impl Task for TaskService {
    async fn state(&self, _: &TtrpcContext, r: StateRequest) -> ttrpc::Result<StateResponse> {
        Ok(self.sandbox.tasks.state(&r.id, &r.exec_id)?)
    }

    async fn create(
        &self,
        _: &TtrpcContext,
        r: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        log::debug!("create {}", r.id);
        let sandbox = self.sandbox.clone();
        // Goes with this handler, which goes with the connection.
        let caller = Arc::new(());
        let asked = Arc::downgrade(&caller);
        let created = whole(async move {
            let id = r.id.clone();
            let created = sandbox.create(r).await;
            if let Err(e) = &created {
                log::error!("create {id}: {e}");
                if asked.strong_count() == 0 {
                    // Nobody learns of it, and so nobody will ask a shim without tasks to leave.
                    sandbox.shutdown().await;
                }
            }
            Ok(CreateTaskResponse {
                pid: created?,
                ..Default::default()
            })
        })
        .await;
        drop(caller);
        created
    }

    async fn start(&self, _: &TtrpcContext, r: StartRequest) -> ttrpc::Result<StartResponse> {
        log::debug!("start {} {}", r.id, r.exec_id);
        let sandbox = self.sandbox.clone();
        whole(async move {
            let pid = sandbox.tasks.start(&r.id, &r.exec_id).await?;
            Ok(StartResponse {
                pid,
                ..Default::default()
            })
        })
        .await
    }

    async fn delete(&self, _: &TtrpcContext, r: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        log::debug!("delete {} {}", r.id, r.exec_id);
        let sandbox = self.sandbox.clone();
        whole(async move {
            let deleted = sandbox.delete(&r.id, &r.exec_id).await?;
            Ok(DeleteResponse {
                pid: deleted.pid,
                exit_status: deleted.exit.status,
                exited_at: MessageField::some(timestamp(deleted.exit.at)),
                ..Default::default()
            })
        })
        .await
    }

    async fn pids(&self, _: &TtrpcContext, r: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let processes = self.sandbox.tasks.pids(&r.id).await?;
        Ok(PidsResponse {
            processes,
            ..Default::default()
        })
    }

    async fn pause(&self, _: &TtrpcContext, r: PauseRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        whole(async move { sandbox.tasks.pause(&r.id).await }).await?;
        Ok(Empty::default())
    }

    async fn resume(&self, _: &TtrpcContext, r: ResumeRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        whole(async move { sandbox.tasks.resume(&r.id).await }).await?;
        Ok(Empty::default())
    }

    async fn checkpoint(&self, _: &TtrpcContext, r: CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        // Of what is not there that is said first.
        self.sandbox.tasks.state(&r.id, "")?;
        Err(TaskError::Unimplemented(
            "checkpoint: the processes are a VM's, which CRIU cannot dump, and VMs have no snapshots yet".into(),
        )
        .into())
    }

    async fn kill(&self, _: &TtrpcContext, r: KillRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        whole(async move { sandbox.tasks.kill(&r.id, &r.exec_id, r.signal, r.all).await }).await?;
        Ok(Empty::default())
    }

    async fn exec(&self, _: &TtrpcContext, r: ExecProcessRequest) -> ttrpc::Result<Empty> {
        let uris = Uris {
            stdin: r.stdin,
            stdout: r.stdout,
            stderr: r.stderr,
            terminal: r.terminal,
        };
        let process = r.spec.into_option().unwrap_or_default().value;
        self.sandbox.tasks.exec(&r.id, &r.exec_id, uris, process)?;
        Ok(Empty::default())
    }

    async fn resize_pty(&self, _: &TtrpcContext, r: ResizePtyRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        whole(async move {
            sandbox
                .tasks
                .resize(&r.id, &r.exec_id, (r.width, r.height))
                .await
        })
        .await?;
        Ok(Empty::default())
    }

    async fn close_io(&self, _: &TtrpcContext, r: CloseIORequest) -> ttrpc::Result<Empty> {
        if r.stdin {
            self.sandbox.tasks.close_stdin(&r.id, &r.exec_id)?;
        }
        Ok(Empty::default())
    }

    async fn update(&self, _: &TtrpcContext, r: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        let resources = r.resources.into_option().unwrap_or_default().value;
        whole(async move { sandbox.update(&r.id, resources).await }).await?;
        Ok(Empty::default())
    }

    async fn wait(&self, _: &TtrpcContext, r: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let exit = self.sandbox.tasks.wait(&r.id, &r.exec_id).await?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn stats(&self, _: &TtrpcContext, r: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let sandbox = self.sandbox.clone();
        let stats = whole(async move { sandbox.tasks.stats(&r.id).await }).await?;
        let stats = stats::encode(&stats, host_cgroup::is_unified()).map_err(TaskError::host)?;
        Ok(StatsResponse {
            stats: MessageField::some(stats),
            ..Default::default()
        })
    }

    async fn connect(&self, _: &TtrpcContext, r: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: self.sandbox.tasks.pid(&r.id),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        whole(async move {
            sandbox.shutdown().await;
            Ok(())
        })
        .await?;
        Ok(Empty::default())
    }
}

#[cfg(test)]
mod tests {
    use protobuf::well_known_types::any::Any;
    use ttrpc::Code;

    use super::*;
    use crate::options::Options;
    use crate::publisher;
    use crate::tasks::Tasks;

    fn service(dir: &std::path::Path) -> TaskService {
        let (publisher, _queue) = publisher::queue();
        let tasks = Tasks::new("ns".into(), publisher, Arc::default());
        let sandbox = Sandbox::new(
            "ns".into(),
            "c".into(),
            Options::default(),
            tasks,
            dir.join("s"),
        );
        TaskService {
            sandbox: Arc::new(sandbox),
        }
    }

    fn code<T>(result: ttrpc::Result<T>) -> Code {
        match result.err().unwrap() {
            ttrpc::Error::RpcStatus(status) => status.code(),
            error => panic!("{error}"),
        }
    }

    /// A request of any kind about the container `id`.
    macro_rules! about {
        ($request:ident, $id:expr) => {
            $request {
                id: $id.into(),
                ..Default::default()
            }
        };
    }

    #[tokio::test]
    async fn every_call_about_an_unknown_container_is_not_found_and_connect_answers() {
        let dir = tempfile::tempdir().unwrap();
        let service = service(dir.path());
        let c = &TtrpcContext::default();
        let codes = [
            code(service.state(c, about!(StateRequest, "x")).await),
            code(service.start(c, about!(StartRequest, "x")).await),
            code(service.delete(c, about!(DeleteRequest, "x")).await),
            code(service.pids(c, about!(PidsRequest, "x")).await),
            code(service.pause(c, about!(PauseRequest, "x")).await),
            code(service.resume(c, about!(ResumeRequest, "x")).await),
            code(
                service
                    .checkpoint(c, about!(CheckpointTaskRequest, "x"))
                    .await,
            ),
            code(service.kill(c, about!(KillRequest, "x")).await),
            code(service.resize_pty(c, about!(ResizePtyRequest, "x")).await),
            code(service.update(c, about!(UpdateTaskRequest, "x")).await),
            code(service.wait(c, about!(WaitRequest, "x")).await),
            code(service.stats(c, about!(StatsRequest, "x")).await),
        ];
        assert_eq!(codes, [Code::NOT_FOUND; 12]);
        let close = CloseIORequest {
            stdin: true,
            ..about!(CloseIORequest, "x")
        };
        assert_eq!(code(service.close_io(c, close).await), Code::NOT_FOUND);
        let process = Any {
            value: b"{}".to_vec(),
            ..Default::default()
        };
        let exec = ExecProcessRequest {
            exec_id: "e".into(),
            spec: MessageField::some(process),
            ..about!(ExecProcessRequest, "x")
        };
        assert_eq!(code(service.exec(c, exec).await), Code::NOT_FOUND);
        let connected = service
            .connect(c, about!(ConnectRequest, "x"))
            .await
            .unwrap();
        assert_eq!(
            (connected.shim_pid, connected.task_pid),
            (std::process::id(), 0)
        );
    }

    #[tokio::test]
    async fn a_checkpoint_cannot_be_restored_and_that_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let request = CreateTaskRequest {
            checkpoint: "/checkpoint".into(),
            ..about!(CreateTaskRequest, "c")
        };
        let refused = service(dir.path())
            .create(&TtrpcContext::default(), request)
            .await;
        assert_eq!(code(refused), Code::UNIMPLEMENTED);
    }

    #[tokio::test]
    async fn a_checkpoint_of_a_task_is_not_served_and_the_reason_is_said() {
        let bench = crate::tasks::tests::bench().await;
        bench.run("c").await;
        let socket = std::path::PathBuf::from("s");
        let sandbox = Sandbox::new(
            "ns".into(),
            "c".into(),
            Options::default(),
            bench.tasks.clone(),
            socket,
        );
        let service = TaskService {
            sandbox: Arc::new(sandbox),
        };
        let refused = service
            .checkpoint(&TtrpcContext::default(), about!(CheckpointTaskRequest, "c"))
            .await;
        let Err(ttrpc::Error::RpcStatus(status)) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(status.code(), Code::UNIMPLEMENTED);
        assert!(status.message.contains("CRIU cannot dump"), "{status:?}");
    }

    #[tokio::test]
    async fn a_shim_leaves_when_a_create_fails_whose_caller_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let service = service(dir.path());
        let request = || CreateTaskRequest {
            bundle: dir.path().join("no-bundle").display().to_string(),
            ..about!(CreateTaskRequest, "c")
        };
        // One that waits for its answer deletes the container and asks the shim to leave.
        service
            .create(&TtrpcContext::default(), request())
            .await
            .unwrap_err();
        let left = service.sandbox.left();
        tokio::pin!(left);
        assert!(at_once(left.as_mut()).await.is_none());
        // The server drops the handler of a connection that breaks.
        let context = TtrpcContext::default();
        let mut call = service.create(&context, request());
        assert!(at_once(call.as_mut()).await.is_none());
        drop(call);
        left.await;
    }

    /// What a future has to say at once.
    async fn at_once<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
        std::future::poll_fn(|context| {
            std::task::Poll::Ready(match std::pin::Pin::new(&mut future).poll(context) {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }

    #[test]
    fn both_versions_of_the_task_service_are_served() {
        let dir = tempfile::tempdir().unwrap();
        let services = services(&service(dir.path()).sandbox);
        let mut names: Vec<_> = services.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, NAMES);
        assert!(services.values().all(|service| service.methods.len() == 17));
    }
}
