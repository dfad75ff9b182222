//! A sandbox of cube, spoken to in the words of containerd. The client and the daemon are left out, since each bundle would
//! take several runs of them and of the shim, and with them ten times as long.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Output;

use containerd_shim_protos::TaskClient;
use containerd_shim_protos::api::{
    CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, ShutdownRequest,
    StartRequest, StateRequest, Status, UpdateTaskRequest, WaitRequest,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::ttrpc::context::{Context, with_timeout};
use containerd_shim_protos::ttrpc::{Client, Error, Result as Answer};
use cube_tests::*;

use crate::bundle::Case;
use crate::lane::{LIMIT_SECONDS, Outcome};

/// The shim of a sandbox.
pub struct Sandbox {
    bundle: PathBuf,
    id: String,
    task: TaskClient,
}

/// Why a call came to nothing.
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

impl From<Failure> for Outcome {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(message) => Self::Refused(message),
            Failure::Silence(why) => Self::Ran(124, why),
        }
    }
}

impl Sandbox {
    /// Starts the shim for the container of a bundle.
    pub fn start(bundle: &Path, id: &str) -> Result<Self, Failure> {
        let told = Ended::from(run_shim(bundle, id, "start").unwrap());
        if told.status != 0 {
            return Err(Failure::Refused(format!("{}{}", told.text(), told.stderr)));
        }
        let client = Client::connect(told.text().trim())?;
        Ok(Self {
            bundle: bundle.to_owned(),
            id: id.to_owned(),
            task: TaskClient::new(client),
        })
    }

    /// Starts the container of a bundle, and leaves it running.
    pub fn launch(&self, bundle: &Path, id: &str, terminal: bool) -> Result<(), Failure> {
        self.create(bundle, id, terminal, "")?;
        if let Err(error) = self.begin(id, "") {
            self.remove(id);
            return Err(error.into());
        }
        Ok(())
    }

    /// The name of the container that it was started for.
    pub fn id(&self) -> &str {
        &self.id
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

    /// Plays a bundle.
    pub fn play(&self, case: &Case, bundle: &Path, id: &str) -> Outcome {
        let output = bundle.join("output");
        let played = if case.exec {
            self.play_exec(case, bundle, id, &output)
        } else {
            self.play_init(bundle, id, &output)
        };
        match played {
            Ok(status) => Outcome::Ran(status, read(&output)),
            Err(Failure::Silence(why)) => Outcome::Ran(124, format!("{}{why}", read(&output))),
            Err(refused) => refused.into(),
        }
    }

    fn play_init(&self, bundle: &Path, id: &str, output: &Path) -> Result<i32, Failure> {
        self.create(bundle, id, false, &to_file(output))?;
        let ended = self.begin(id, "").and_then(|()| self.end(id, ""));
        if ended.is_err() {
            self.remove(id);
        }
        Ok(ended?)
    }

    fn play_exec(
        &self,
        case: &Case,
        bundle: &Path,
        id: &str,
        output: &Path,
    ) -> Result<i32, Failure> {
        self.launch(bundle, id, case.has_terminal())?;
        let play = || -> Answer<i32> {
            if let Some(update) = &case.update {
                self.task.update(
                    context(),
                    &UpdateTaskRequest {
                        id: id.to_owned(),
                        resources: document(update.to_string()),
                        ..Default::default()
                    },
                )?;
            }
            self.task.exec(
                context(),
                &ExecProcessRequest {
                    id: id.to_owned(),
                    exec_id: "probe".to_owned(),
                    stdout: to_file(output),
                    spec: document(process_of(bundle, &case.script())),
                    ..Default::default()
                },
            )?;
            let ended = self.begin(id, "probe").and_then(|()| self.end(id, "probe"));
            if ended.is_err() {
                let _ = self.delete(id, "probe");
            }
            ended
        };
        let played = play();
        self.remove(id);
        Ok(played?)
    }

    fn create(&self, bundle: &Path, id: &str, terminal: bool, stdout: &str) -> Answer<()> {
        let request = CreateTaskRequest {
            id: id.to_owned(),
            bundle: bundle.display().to_string(),
            terminal,
            stdout: stdout.to_owned(),
            ..Default::default()
        };
        self.task.create(context(), &request).map(drop)
    }

    fn begin(&self, id: &str, exec_id: &str) -> Answer<()> {
        let request = StartRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.task.start(context(), &request).map(drop)
    }

    /// Waits for a process, and deletes it.
    fn end(&self, id: &str, exec_id: &str) -> Answer<i32> {
        let request = WaitRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        let status = self.task.wait(context(), &request)?.exit_status;
        self.delete(id, exec_id)?;
        Ok(i32::try_from(status).unwrap())
    }

    fn delete(&self, id: &str, exec_id: &str) -> Answer<()> {
        let request = DeleteRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.task.delete(context(), &request).map(drop)
    }

    /// Deletes a container in whatever state it is.
    fn remove(&self, id: &str) {
        let request = KillRequest {
            id: id.to_owned(),
            signal: 9,
            all: true,
            ..Default::default()
        };
        // One that was created only is deleted without having been there.
        if self.task.kill(context(), &request).is_ok() && self.end(id, "").is_ok() {
            return;
        }
        let _ = self.delete(id, "");
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.remove(&self.id);
        let request = ShutdownRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        let _ = self.task.shutdown(context(), &request);
        let _ = run_shim(&self.bundle, &self.id, "delete");
    }
}

/// The shim's program with an action, as the containerd that the tests have would start it.
fn run_shim(bundle: &Path, id: &str, action: &str) -> io::Result<Output> {
    shim(&setting("CUBE_TEST_ADDRESS"), id, bundle, action)
        .env("CUBE_CONFIG", setting("CUBE_TEST_CONFIG"))
        .output()
}

fn context() -> Context {
    with_timeout(LIMIT_SECONDS * 1_000_000_000)
}

fn to_file(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn read(output: &Path) -> String {
    String::from_utf8_lossy(&fs::read(output).unwrap_or_default()).into_owned()
}

fn document(json: String) -> MessageField<Any> {
    MessageField::some(Any {
        value: json.into_bytes(),
        ..Default::default()
    })
}

/// The process that clients start beside the one of a bundle: like it, with other arguments.
fn process_of(bundle: &Path, script: &str) -> String {
    let config = fs::read(bundle.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let process = &mut config["process"];
    process["args"] = serde_json::json!(["sh", "-c", script]);
    process["terminal"] = serde_json::json!(false);
    process.to_string()
}
