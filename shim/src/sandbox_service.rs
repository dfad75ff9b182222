//! containerd's sandbox service, for sandboxes of which the shim is the controller: requests in, answers and status
//! codes out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use containerd_shim_protos::sandbox_api::{
    CreateSandboxRequest, CreateSandboxResponse, PingRequest, PingResponse, PlatformRequest,
    PlatformResponse, SandboxMetricsRequest, SandboxMetricsResponse, SandboxStatusRequest,
    SandboxStatusResponse, ShutdownSandboxRequest, ShutdownSandboxResponse, StartSandboxRequest,
    StartSandboxResponse, StopSandboxRequest, StopSandboxResponse, WaitSandboxRequest,
    WaitSandboxResponse,
};
use containerd_shim_protos::sandbox_async::{Sandbox as Api, create_sandbox};
use protobuf::MessageField;
use serde_json::json;
use ttrpc::r#async::{Service, TtrpcContext};

use crate::host_cgroup;
use crate::publisher::timestamp;
use crate::sandbox::Sandbox;
use crate::service::whole;
use crate::stats;
use crate::task_error::TaskError;

/// The service for a sandbox, for the server.
pub fn services(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    create_sandbox(Arc::new(SandboxService {
        sandbox: sandbox.clone(),
    }))
}

struct SandboxService {
    sandbox: Arc<Sandbox>,
}

#[async_trait]
impl Api for SandboxService {
    async fn create_sandbox(
        &self,
        _: &TtrpcContext,
        r: CreateSandboxRequest,
    ) -> ttrpc::Result<CreateSandboxResponse> {
        log::debug!("create sandbox {}", r.sandbox_id);
        let sandbox = self.sandbox.clone();
        whole(async move { sandbox.create_sandbox(&r).await }).await?;
        Ok(CreateSandboxResponse::default())
    }

    async fn start_sandbox(
        &self,
        _: &TtrpcContext,
        r: StartSandboxRequest,
    ) -> ttrpc::Result<StartSandboxResponse> {
        log::debug!("start sandbox {}", r.sandbox_id);
        let sandbox = self.sandbox.clone();
        let started = whole(async move { sandbox.start_sandbox(&r.sandbox_id).await }).await?;
        Ok(StartSandboxResponse {
            pid: started.pid,
            created_at: MessageField::some(timestamp(started.at)),
            ..Default::default()
        })
    }

    async fn platform(
        &self,
        _: &TtrpcContext,
        r: PlatformRequest,
    ) -> ttrpc::Result<PlatformResponse> {
        self.sandbox.check_sandbox(&r.sandbox_id)?;
        let mut response = PlatformResponse::default();
        let platform = response.platform.mut_or_insert_default();
        platform.os = "linux".into();
        // In Go's words (GOARCH).
        platform.architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        }
        .into();
        Ok(response)
    }

    async fn stop_sandbox(
        &self,
        _: &TtrpcContext,
        r: StopSandboxRequest,
    ) -> ttrpc::Result<StopSandboxResponse> {
        log::debug!("stop sandbox {}", r.sandbox_id);
        let sandbox = self.sandbox.clone();
        let limit = Duration::from_secs(r.timeout_secs.into());
        whole(async move { sandbox.stop_sandbox(&r.sandbox_id, limit).await }).await?;
        Ok(StopSandboxResponse::default())
    }

    async fn wait_sandbox(
        &self,
        _: &TtrpcContext,
        r: WaitSandboxRequest,
    ) -> ttrpc::Result<WaitSandboxResponse> {
        let exit = self.sandbox.wait_sandbox(&r.sandbox_id).await?;
        Ok(WaitSandboxResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn sandbox_status(
        &self,
        _: &TtrpcContext,
        r: SandboxStatusRequest,
    ) -> ttrpc::Result<SandboxStatusResponse> {
        let status = self.sandbox.sandbox_status(&r.sandbox_id)?;
        // The CRI plugin hands the word on to the kubelet.
        let state = if status.is_ready() {
            "SANDBOX_READY"
        } else {
            "SANDBOX_NOTREADY"
        };
        let mut info = HashMap::new();
        if let Some(started) = status.started.filter(|_| r.verbose) {
            let machine = json!({
                "vcpus": started.size.vcpus,
                "memoryMiB": started.size.memory_mib,
                "hypervisorPid": started.pid,
                "shimPid": std::process::id(),
            });
            info.insert("machine".to_owned(), machine.to_string());
        }
        Ok(SandboxStatusResponse {
            sandbox_id: r.sandbox_id,
            pid: status.started.map_or(0, |started| started.pid),
            state: state.into(),
            info,
            created_at: status.started.map(|started| timestamp(started.at)).into(),
            exited_at: status.exit.map(|exit| timestamp(exit.at)).into(),
            ..Default::default()
        })
    }

    async fn ping_sandbox(&self, _: &TtrpcContext, r: PingRequest) -> ttrpc::Result<PingResponse> {
        if self.sandbox.sandbox_status(&r.sandbox_id)?.is_ready() {
            return Ok(PingResponse::default());
        }
        let message = format!("sandbox {} does not run", r.sandbox_id);
        Err(TaskError::FailedPrecondition(message).into())
    }

    async fn shutdown_sandbox(
        &self,
        _: &TtrpcContext,
        r: ShutdownSandboxRequest,
    ) -> ttrpc::Result<ShutdownSandboxResponse> {
        log::debug!("shut down sandbox {}", r.sandbox_id);
        let sandbox = self.sandbox.clone();
        whole(async move { sandbox.shutdown_sandbox(&r.sandbox_id).await }).await?;
        Ok(ShutdownSandboxResponse::default())
    }

    async fn sandbox_metrics(
        &self,
        _: &TtrpcContext,
        r: SandboxMetricsRequest,
    ) -> ttrpc::Result<SandboxMetricsResponse> {
        self.sandbox.sandbox_status(&r.sandbox_id)?;
        let sandbox = self.sandbox.clone();
        let figures = whole(async move { sandbox.tasks.all_stats().await }).await?;
        let sum = stats::sum(&figures);
        let data = stats::encode(&sum, host_cgroup::is_unified()).map_err(TaskError::host)?;
        let mut response = SandboxMetricsResponse::default();
        let metrics = response.metrics.mut_or_insert_default();
        metrics.id = r.sandbox_id;
        metrics.timestamp = MessageField::some(timestamp(SystemTime::now()));
        metrics.data = MessageField::some(data);
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::publisher;
    use crate::tasks::Tasks;

    #[tokio::test]
    async fn a_sandbox_is_described_in_the_words_that_kubernetes_and_go_know() {
        let dir = tempfile::tempdir().unwrap();
        let (publisher, _queue) = publisher::queue();
        let tasks = Tasks::new("ns".into(), publisher, Arc::default());
        let socket = dir.path().join("s");
        let sandbox = Sandbox::new("ns".into(), "pod".into(), Options::default(), tasks, socket);
        let service = SandboxService {
            sandbox: Arc::new(sandbox),
        };
        let c = &TtrpcContext::default();
        let create = CreateSandboxRequest {
            sandbox_id: "pod".into(),
            ..Default::default()
        };
        service.create_sandbox(c, create).await.unwrap();
        let platform = PlatformRequest {
            sandbox_id: "pod".into(),
            ..Default::default()
        };
        let platform = service.platform(c, platform).await.unwrap().platform;
        assert_eq!(platform.os, "linux");
        assert!(["amd64", "arm64"].contains(&platform.architecture.as_str()));
        let status = SandboxStatusRequest {
            sandbox_id: "pod".into(),
            verbose: true,
            ..Default::default()
        };
        let status = service.sandbox_status(c, status).await.unwrap();
        assert_eq!((status.state.as_str(), status.pid), ("SANDBOX_NOTREADY", 0));
        let ping = PingRequest {
            sandbox_id: "pod".into(),
            ..Default::default()
        };
        service.ping_sandbox(c, ping).await.unwrap_err();
        let metrics = SandboxMetricsRequest {
            sandbox_id: "pod".into(),
            ..Default::default()
        };
        let metrics = service.sandbox_metrics(c, metrics).await.unwrap().metrics;
        assert_eq!(metrics.id, "pod");
        assert!(metrics.data.type_url.starts_with("io.containerd.cgroups."));
    }
}
