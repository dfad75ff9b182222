//! What containerd asks of the sandbox itself, where the shim is its controller (`containerd.runtime.sandbox.v1`).
//!
//! The machine is there then from the start of the sandbox to its stop, with containers in it or without, and
//! the shim until the sandbox is shut down. Without those calls it is the first container that brings up
//! the machine, and the last one that takes it along.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::sandbox_api::CreateSandboxRequest;
use tokio::sync::watch;
use tokio::time::timeout;

use super::Sandbox;
use crate::config::Config;
use crate::container::Exit;
use crate::disks::slots_for;
use crate::guest::Guest;
use crate::logger;
use crate::machine::Booting;
use crate::pod::Pod;
use crate::sizing::Size;
use crate::task_error::TaskError;

/// How far containerd has come with the sandbox.
#[derive(Clone, Default)]
enum Stage {
    /// It has not asked for one: its first container is to bring up the machine.
    #[default]
    Absent,
    /// It is described.
    Created(Arc<Pod>, Config),
    /// Its machine boots.
    Starting,
    /// Its machine runs.
    Ready(Arc<Pod>, Started),
    /// Its machine has ended, or never was.
    Ended(Option<Started>, Exit),
}

/// A machine that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The process that stands for the sandbox: the hypervisor, which is in the pod's network namespace.
    pub pid: u32,
    /// When.
    pub at: SystemTime,
    /// How big it is.
    pub size: Size,
}

/// What is known of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its machine, if it ever ran.
    pub started: Option<Started>,
    /// Its end.
    pub exit: Option<Exit>,
}

impl Status {
    /// Whether containers can run in it.
    pub fn is_ready(&self) -> bool {
        self.started.is_some() && self.exit.is_none()
    }
}

/// The sandbox in containerd's eyes.
#[derive(Default)]
pub(super) struct Controlled {
    stage: watch::Sender<Stage>,
    /// Whether it is to end.
    stopping: watch::Sender<bool>,
}

impl Controlled {
    /// Whether the machine, if there is one, stays without containers.
    pub(super) fn keeps_machine(&self) -> bool {
        matches!(*self.stage.borrow(), Stage::Starting | Stage::Ready(..))
    }

    /// Whether the shim stays without containers.
    pub(super) fn keeps_shim(&self) -> bool {
        !matches!(*self.stage.borrow(), Stage::Absent)
    }

    /// The pod that a container is made in; none if the sandbox is not containerd's.
    pub(super) fn pod(&self) -> Result<Option<Arc<Pod>>, TaskError> {
        match &*self.stage.borrow() {
            Stage::Absent => Ok(None),
            Stage::Ready(pod, _) => Ok(Some(pod.clone())),
            Stage::Created(..) | Stage::Starting => Err(TaskError::FailedPrecondition(
                "the sandbox has not been started yet".into(),
            )),
            Stage::Ended(..) => Err(TaskError::FailedPrecondition(
                "the sandbox has been stopped".into(),
            )),
        }
    }

    fn ended(&self) {
        self.stage.send_modify(|stage| {
            let started = match stage {
                Stage::Ended(..) => return,
                Stage::Ready(_, started) => Some(*started),
                _ => None,
            };
            *stage = Stage::Ended(started, Exit::killed());
        });
    }
}

impl Sandbox {
    /// Describes the sandbox, whose machine is not there yet.
    pub async fn create_sandbox(&self, request: &CreateSandboxRequest) -> Result<(), TaskError> {
        self.check_sandbox(&request.sandbox_id)?;
        let invalid = |e: &dyn std::fmt::Display| TaskError::InvalidArgument(e.to_string());
        let pod = Pod::of(request).map_err(|e| invalid(&e))?;
        let options = self.options.config.as_deref();
        let config = Config::load(options, &pod.spec.annotations()).map_err(|e| invalid(&e))?;
        // Under the lock no container brings up the machine meanwhile.
        let machine = self.machine.lock().await;
        if machine.is_some() || !self.tasks.is_empty() {
            return Err(TaskError::FailedPrecondition(
                "the sandbox has containers, the first of which has brought it up".into(),
            ));
        }
        let mut created = false;
        self.controlled.stage.send_if_modified(|stage| {
            created = matches!(stage, Stage::Absent);
            if created {
                *stage = Stage::Created(Arc::new(pod), config);
            }
            created
        });
        if created {
            return Ok(());
        }
        Err(TaskError::AlreadyExists(format!("sandbox {}", self.id)))
    }

    /// Brings up the machine. If that fails the sandbox has ended.
    pub async fn start_sandbox(self: &Arc<Self>, id: &str) -> Result<Started, TaskError> {
        self.check_sandbox(id)?;
        let mut described = None;
        self.controlled.stage.send_if_modified(|stage| {
            if let Stage::Created(pod, config) = stage {
                described = Some((pod.clone(), config.clone()));
                *stage = Stage::Starting;
            }
            described.is_some()
        });
        let Some((pod, config)) = described else {
            return Err(match &*self.controlled.stage.borrow() {
                Stage::Absent => no_sandbox(id),
                Stage::Ended(..) => TaskError::FailedPrecondition(format!(
                    "sandbox {id} has ended: it cannot be started again"
                )),
                _ => TaskError::FailedPrecondition(format!("sandbox {id} has been started")),
            });
        };
        let started = self.bring_up(&pod, &config).await;
        if started.is_err() {
            self.controlled.ended();
        }
        let (started, guest) = started?;
        let mut ready = false;
        self.controlled.stage.send_if_modified(|stage| {
            ready = matches!(stage, Stage::Starting);
            if ready {
                *stage = Stage::Ready(pod, started);
            }
            ready
        });
        let sandbox = self.clone();
        tokio::spawn(async move {
            guest.end().await;
            sandbox.controlled.ended();
            sandbox.power_off_if_empty().await;
        });
        if ready { Ok(started) } else { Err(stopped(id)) }
    }

    async fn bring_up(
        &self,
        pod: &Pod,
        config: &Config,
    ) -> Result<(Started, Arc<Guest>), TaskError> {
        let mut machine = self.machine.lock().await;
        if *self.controlled.stopping.borrow() {
            return Err(stopped(&self.id));
        }
        log::set_max_level(logger::level(log::max_level(), config.log_level));
        let slots = slots_for(0, true, config.spare_disks).map_err(TaskError::host)?;
        let booting = Booting::power_on(&self.namespace, &self.id, &pod.spec, config, slots);
        let mut booting = booting.map_err(TaskError::host)?;
        let boot = async {
            if let Some(files) = &pod.files {
                booting.make_pod_files(files).map_err(TaskError::host)?;
            }
            booting.ready(&pod.spec).await.map_err(TaskError::host)
        };
        let stopping = self.controlled.stopping.subscribe();
        let booted = self.unless_ending(stopping.clone(), boot).await;
        match booted {
            Ok(guest) => {
                let started = Started {
                    pid: guest.pid,
                    at: SystemTime::now(),
                    size: Size::of(&pod.spec, config),
                };
                *machine = Some(booting.finish(guest.clone()));
                Ok((started, guest))
            }
            Err(error) => {
                booting.give_up().await;
                Err(if *stopping.borrow() {
                    stopped(&self.id)
                } else {
                    error
                })
            }
        }
    }

    /// Ends the machine, and with it what runs in it; containers may end by themselves for so long. One that has ended
    /// is stopped.
    pub async fn stop_sandbox(&self, id: &str, limit: Duration) -> Result<(), TaskError> {
        self.check_sandbox(id)?;
        if matches!(*self.controlled.stage.borrow(), Stage::Absent) {
            return Err(no_sandbox(id));
        }
        if !limit.is_zero() && self.controlled.keeps_machine() {
            let _ = timeout(limit, self.tasks.terminate_all()).await;
        }
        self.controlled.stopping.send_replace(true);
        let machine = self.machine.lock().await;
        let guest = machine.as_ref().map(|machine| machine.guest.clone());
        drop(machine);
        if let Some(guest) = guest.filter(|guest| !guest.has_ended()) {
            guest.cut_power();
            guest.end().await;
        }
        self.controlled.ended();
        self.power_off_if_empty().await;
        Ok(())
    }

    /// Waits for the machine's end.
    pub async fn wait_sandbox(&self, id: &str) -> Result<Exit, TaskError> {
        self.sandbox_status(id)?;
        let mut stage = self.controlled.stage.subscribe();
        let ended = stage
            .wait_for(|stage| matches!(stage, Stage::Ended(..)))
            .await;
        match ended.as_deref() {
            Ok(Stage::Ended(_, exit)) => Ok(*exit),
            _ => Err(no_sandbox(id)),
        }
    }

    /// What is known of the sandbox.
    pub fn sandbox_status(&self, id: &str) -> Result<Status, TaskError> {
        self.check_sandbox(id)?;
        let (started, exit) = match &*self.controlled.stage.borrow() {
            Stage::Absent => return Err(no_sandbox(id)),
            Stage::Created(..) | Stage::Starting => (None, None),
            Stage::Ready(_, started) => (Some(*started), None),
            Stage::Ended(started, exit) => (*started, Some(*exit)),
        };
        Ok(Status { started, exit })
    }

    /// Takes all of the sandbox away, and lets the shim leave. After a create that was refused, too: nobody else tells the
    /// shim to leave then.
    pub async fn shutdown_sandbox(&self, id: &str) -> Result<(), TaskError> {
        self.check_sandbox(id)?;
        if self.controlled.keeps_shim() {
            self.stop_sandbox(id, Duration::ZERO).await?;
        } else if !self.tasks.is_empty() {
            return Err(no_sandbox(id));
        }
        self.end().await;
        self.left.notify_one();
        Ok(())
    }

    /// That the call is about this sandbox.
    pub fn check_sandbox(&self, id: &str) -> Result<(), TaskError> {
        if id == self.id {
            return Ok(());
        }
        Err(no_sandbox(id))
    }
}

fn no_sandbox(id: &str) -> TaskError {
    TaskError::NotFound(format!("sandbox {id}"))
}

fn stopped(id: &str) -> TaskError {
    TaskError::Host(format!("The sandbox {id} was stopped while it started"))
}

#[cfg(test)]
mod tests {
    use ttrpc::Code;

    use super::*;
    use crate::options::Options;
    use crate::tasks::Tasks;

    fn sandbox(dir: &std::path::Path) -> Arc<Sandbox> {
        let (publisher, _queue) = crate::publisher::queue();
        let tasks = Tasks::new("ns".into(), publisher, Arc::default());
        Arc::new(Sandbox::new(
            "ns".into(),
            "pod".into(),
            Options::default(),
            tasks,
            dir.join("s"),
        ))
    }

    fn request() -> CreateSandboxRequest {
        CreateSandboxRequest {
            sandbox_id: "pod".into(),
            ..Default::default()
        }
    }

    fn code<T>(result: Result<T, TaskError>) -> Code {
        result.err().expect("it was to fail").code()
    }

    #[tokio::test]
    async fn a_sandbox_that_containerd_has_not_created_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        assert_eq!(code(sandbox.start_sandbox("pod").await), Code::NOT_FOUND);
        let stopped = sandbox.stop_sandbox("pod", Duration::ZERO).await;
        assert_eq!(code(stopped), Code::NOT_FOUND);
        assert_eq!(code(sandbox.wait_sandbox("pod").await), Code::NOT_FOUND);
        assert_eq!(code(sandbox.sandbox_status("pod")), Code::NOT_FOUND);
        sandbox.create_sandbox(&request()).await.unwrap();
        assert_eq!(code(sandbox.sandbox_status("another")), Code::NOT_FOUND);
        assert!(!sandbox.sandbox_status("pod").unwrap().is_ready());
        let twice = sandbox.create_sandbox(&request()).await;
        assert_eq!(code(twice), Code::ALREADY_EXISTS);
    }

    #[tokio::test]
    async fn a_sandbox_that_its_first_container_has_brought_up_is_not_created_a_second_time() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        let _reserved = sandbox.tasks.reserve("c").unwrap();
        let created = sandbox.create_sandbox(&request()).await;
        assert_eq!(code(created), Code::FAILED_PRECONDITION);
        // Nor shut down.
        assert_eq!(code(sandbox.shutdown_sandbox("pod").await), Code::NOT_FOUND);
    }

    #[tokio::test]
    async fn a_shim_leaves_after_a_create_that_was_refused() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        let rootfs = CreateSandboxRequest {
            rootfs: vec![Default::default()],
            ..request()
        };
        sandbox.create_sandbox(&rootfs).await.unwrap_err();
        sandbox.shutdown_sandbox("pod").await.unwrap();
        sandbox.left().await;
    }

    #[tokio::test]
    async fn a_container_is_refused_before_the_start_and_after_the_stop() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        let create = || {
            sandbox.create(containerd_shim_protos::api::CreateTaskRequest {
                id: "c".into(),
                bundle: dir.path().display().to_string(),
                ..Default::default()
            })
        };
        sandbox.create_sandbox(&request()).await.unwrap();
        let early = create().await.err().unwrap().to_string();
        assert!(early.contains("not been started"), "{early}");
        sandbox.stop_sandbox("pod", Duration::ZERO).await.unwrap();
        let late = create().await.err().unwrap().to_string();
        assert!(late.contains("has been stopped"), "{late}");
    }

    #[tokio::test]
    async fn a_stop_may_come_twice_and_before_the_start_and_ends_every_wait() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        sandbox.create_sandbox(&request()).await.unwrap();
        let stop = async {
            sandbox.stop_sandbox("pod", Duration::ZERO).await.unwrap();
            sandbox.stop_sandbox("pod", Duration::ZERO).await
        };
        let (exit, stopped) = tokio::join!(sandbox.wait_sandbox("pod"), stop);
        stopped.unwrap();
        let exit = exit.unwrap();
        assert_eq!(exit.status, 137);
        let status = sandbox.sandbox_status("pod").unwrap();
        assert_eq!((status.started, status.exit), (None, Some(exit)));
        let started = sandbox.start_sandbox("pod").await;
        assert_eq!(code(started), Code::FAILED_PRECONDITION);
    }

    #[tokio::test]
    async fn a_shim_leaves_with_its_sandbox_and_not_when_it_is_told_of_its_containers() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        std::fs::write(dir.path().join("s"), "").unwrap();
        sandbox.create_sandbox(&request()).await.unwrap();
        // The task service's, which containerd sends after the delete of a container.
        sandbox.shutdown().await;
        assert!(dir.path().join("s").exists());
        sandbox.shutdown_sandbox("pod").await.unwrap();
        sandbox.left().await;
        assert!(!dir.path().join("s").exists());
    }

    #[tokio::test]
    async fn a_description_that_cannot_be_carried_out_is_an_invalid_argument() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        let rootfs = CreateSandboxRequest {
            rootfs: vec![Default::default()],
            ..request()
        };
        let refused = sandbox.create_sandbox(&rootfs).await;
        assert_eq!(code(refused), Code::INVALID_ARGUMENT);
        let vcpus = CreateSandboxRequest {
            annotations: [("io.cube.default_vcpus".to_owned(), "many".to_owned())].into(),
            ..request()
        };
        let refused = sandbox.create_sandbox(&vcpus).await;
        assert_eq!(code(refused), Code::INVALID_ARGUMENT);
        sandbox.create_sandbox(&request()).await.unwrap();
    }
}
