//! A sandbox of cube, spoken to in the words of containerd, without a client and a daemon between.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Output;

use containerd_shim_protos::TaskClient;
use containerd_shim_protos::api::{
    CloseIORequest, ConnectRequest, CreateTaskRequest, DeleteRequest, ExecProcessRequest,
    KillRequest, ShutdownRequest, StartRequest, StateRequest, Status, UpdateTaskRequest,
    WaitRequest,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::sandbox_sync::SandboxClient;
use containerd_shim_protos::ttrpc::context::{Context, with_timeout};
use containerd_shim_protos::ttrpc::{Client, Error};

use crate::{Ended, setting, shim};

/// No call takes longer; one that hangs fails.
pub const CALL_LIMIT_SECONDS: i64 = 240;

/// The shim of a sandbox. What it was started for is deleted, and it is ended, when this is dropped.
pub struct Sandbox {
    bundle: PathBuf,
    id: String,
    task: TaskClient,
    /// What containerd asks of the sandbox itself.
    pub controller: SandboxClient,
}

/// Why a call came to nothing.
#[derive(Debug)]
pub enum Failure {
    /// The shim's answer is no.
    Refused(String),
    /// There is no answer.
    Silence(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::RpcStatus(status) => Self::Refused(status.message),
            other => Self::Silence(other.to_string()),
        }
    }
}

/// The answer to a call.
pub type Answer<T> = Result<T, Failure>;

/// The standard streams of a process, as URIs; empty is none.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    /// Its input.
    pub stdin: String,
    /// Its output.
    pub stdout: String,
    /// Its output of errors.
    pub stderr: String,
    /// Whether it has a terminal.
    pub terminal: bool,
}

impl Sandbox {
    /// Starts the shim for the container of a bundle, or for a sandbox, whose bundle has none.
    pub fn start(bundle: &Path, id: &str) -> Answer<Self> {
        let told = Ended::from(run_shim(bundle, id, "start").unwrap());
        if told.status != 0 {
            return Err(Failure::Refused(format!("{}{}", told.text(), told.stderr)));
        }
        let client = Client::connect(told.text().trim())?;
        Ok(Self {
            bundle: bundle.to_owned(),
            id: id.to_owned(),
            task: TaskClient::new(client.clone()),
            controller: SandboxClient::new(client),
        })
    }

    /// The name of the container that it was started for.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The shim's process.
    pub fn pid(&self) -> Answer<u32> {
        let request = ConnectRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        Ok(self.task.connect(context(), &request)?.shim_pid)
    }

    /// Whether the container that it was started for is gone, as only the end of the machine explains.
    pub fn has_ended(&self) -> bool {
        let request = StateRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        let state = self.task.state(context(), &request);
        !state.is_ok_and(|state| state.status == Status::RUNNING.into())
    }

    /// Starts the container of a bundle, and leaves it running: its process on the host.
    pub fn launch(&self, bundle: &Path, id: &str, streams: &Streams) -> Answer<u32> {
        let pid = self.create(bundle, id, streams)?;
        if let Err(error) = self.begin(id, "") {
            self.remove(id);
            return Err(error);
        }
        Ok(pid)
    }

    /// Creates the container of a bundle: its process on the host.
    pub fn create(&self, bundle: &Path, id: &str, streams: &Streams) -> Answer<u32> {
        let streams = streams.clone();
        let request = CreateTaskRequest {
            id: id.to_owned(),
            bundle: bundle.display().to_string(),
            terminal: streams.terminal,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr,
            ..Default::default()
        };
        Ok(self.task.create(context(), &request)?.pid)
    }

    /// Adds an exec with this `process` object to a container.
    pub fn add_exec(&self, id: &str, exec_id: &str, process: String, stdout: &str) -> Answer<()> {
        let request = ExecProcessRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            stdout: stdout.to_owned(),
            spec: document(process),
            ..Default::default()
        };
        self.task.exec(context(), &request)?;
        Ok(())
    }

    /// Starts a container's init, or an exec.
    pub fn begin(&self, id: &str, exec_id: &str) -> Answer<()> {
        let request = StartRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.task.start(context(), &request)?;
        Ok(())
    }

    /// Gives a container these `linux.resources`.
    pub fn update(&self, id: &str, resources: String) -> Answer<()> {
        let request = UpdateTaskRequest {
            id: id.to_owned(),
            resources: document(resources),
            ..Default::default()
        };
        self.task.update(context(), &request)?;
        Ok(())
    }

    /// Lets the input of a container's init end, once those who write it have closed it.
    pub fn close_input(&self, id: &str) -> Answer<()> {
        let request = CloseIORequest {
            id: id.to_owned(),
            stdin: true,
            ..Default::default()
        };
        self.task.close_io(context(), &request)?;
        Ok(())
    }

    /// Kills all of a container.
    pub fn kill(&self, id: &str) -> Answer<()> {
        let request = KillRequest {
            id: id.to_owned(),
            signal: 9,
            all: true,
            ..Default::default()
        };
        self.task.kill(context(), &request)?;
        Ok(())
    }

    /// Waits for a process: its exit status.
    pub fn wait(&self, id: &str, exec_id: &str) -> Answer<i32> {
        let request = WaitRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        let status = self.task.wait(context(), &request)?.exit_status;
        Ok(i32::try_from(status).unwrap())
    }

    /// Deletes a process that has ended or never was started.
    pub fn delete(&self, id: &str, exec_id: &str) -> Answer<()> {
        let request = DeleteRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.task.delete(context(), &request)?;
        Ok(())
    }

    /// Waits for a process, and deletes it: its exit status.
    pub fn end(&self, id: &str, exec_id: &str) -> Answer<i32> {
        let status = self.wait(id, exec_id)?;
        self.delete(id, exec_id)?;
        Ok(status)
    }

    /// Deletes a container in whatever state it is.
    pub fn remove(&self, id: &str) {
        // One that was created only is deleted without having been there.
        if self.kill(id).is_ok() && self.end(id, "").is_ok() {
            return;
        }
        let _ = self.delete(id, "");
    }

    /// Tells the shim to end, which it does if it has no container.
    pub fn shut_down(&self) -> Answer<()> {
        let request = ShutdownRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        self.task.shutdown(context(), &request)?;
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.remove(&self.id);
        let _ = self.shut_down();
        let _ = run_shim(&self.bundle, &self.id, "delete");
    }
}

/// The shim's program with an action, as the containerd that the tests have would start it.
fn run_shim(bundle: &Path, id: &str, action: &str) -> io::Result<Output> {
    shim(&setting("CUBE_TEST_ADDRESS"), id, bundle, action)
        .env("CUBE_CONFIG", setting("CUBE_TEST_CONFIG"))
        .output()
}

/// The limits of a call.
pub fn context() -> Context {
    with_timeout(CALL_LIMIT_SECONDS * 1_000_000_000)
}

fn document(json: String) -> MessageField<Any> {
    MessageField::some(Any {
        value: json.into_bytes(),
        ..Default::default()
    })
}
