//! The containers of the pod: what the RPCs do, apart from how processes are made (`helper`).
//!
//! Each container has its own lock, held only to look at or change a few fields and never across
//! an await; the list of containers has another. So no call waits for another one's work, except
//! that a container's end waits for the execs that are being made in it.

mod make;
mod state;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cube_agent_protocol::agent;
use oci_spec::runtime::LinuxResources;

use crate::cgroup::oom::OomKills;
use crate::cgroup::{Cgroup, CgroupError};
use crate::disks::Disks;
use crate::helper::parent::{HelperError, Launcher};
use crate::reaper::{Exit, Reaper, exited};
use crate::renumber;
use crate::rootfs::RootfsError;
use crate::stdio::StdioError;
use crate::transport::Connector;
use make::character_count;
pub use state::Container;
use state::{Phase, lock, no_process};

/// A call on containers that did not work.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// There is no such container.
    #[error("container {0:?} not found")]
    NoContainer(String),
    /// There is no such process.
    #[error("process {exec:?} of container {container:?} not found")]
    NoProcess {
        /// The container.
        container: String,
        /// The exec.
        exec: String,
    },
    /// The container, or the exec, is there already.
    #[error("{0} {1:?} already exists")]
    Exists(&'static str, String),
    /// The call does not fit the container's state.
    #[error("cannot {action} container {id:?}: it is {state}")]
    State {
        /// What was asked for.
        action: &'static str,
        /// The container.
        id: String,
        /// Its state.
        state: &'static str,
    },
    /// The process has ended.
    #[error("process already finished")]
    Finished,
    /// Something in the request is not what it should be.
    #[error("{0} is not valid: {1}")]
    Invalid(&'static str, String),
    /// A system call failed.
    #[error("Cannot {0}")]
    System(&'static str, #[source] io::Error),
    /// A process could not be made.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The streams could not be connected.
    #[error(transparent)]
    Stdio(#[from] StdioError),
    /// The cgroup did not do as told.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The root file system could not be mounted, or a disk not found.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// A create failed, and what it had mounted is still in use.
    #[error("The disks {0:?} stay in use after a failed create")]
    DisksInUse(Vec<String>, #[source] Box<ContainerError>),
}

type Result<T> = std::result::Result<T, ContainerError>;

/// Where containers live.
pub struct Settings {
    /// A directory with one directory per container.
    pub dir: PathBuf,
    /// The cgroup with one cgroup per container, an absolute path below the root cgroup.
    pub cgroup: String,
    /// How helpers are started.
    pub launcher: Launcher,
    /// How streams are connected.
    pub connect: Connector,
}

/// All containers.
pub struct Containers {
    settings: Settings,
    reaper: Arc<Reaper>,
    disks: Arc<Disks>,
    all: Mutex<HashMap<String, Arc<Container>>>,
}

impl Containers {
    /// No containers yet.
    pub fn new(settings: Settings, reaper: Arc<Reaper>) -> Self {
        Self {
            settings,
            reaper,
            disks: Arc::default(),
            all: Mutex::default(),
        }
    }

    /// Creates a container. Returns its init's PID.
    pub async fn create(&self, request: agent::CreateContainerRequest) -> Result<u32> {
        let container = self.reserve(&request.id)?;
        let made = self.make_container(&container, &request).await;
        match made {
            Ok(pid) => Ok(pid),
            Err(error) => {
                container.clean_up().await;
                let in_use = container.unmount().await;
                self.forget(&container);
                Err(match in_use.is_empty() {
                    true => error,
                    false => ContainerError::DisksInUse(in_use, Box::new(error)),
                })
            }
        }
    }

    fn reserve(&self, id: &str) -> Result<Arc<Container>> {
        let valid = !id.is_empty()
            && id.len() <= 255
            && !id.starts_with('.')
            && id
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_.-+".contains(&byte));
        if !valid {
            return Err(ContainerError::Invalid(
                "the container's id",
                format!("{id:?}"),
            ));
        }
        let container = Arc::new(Container::new(id, &self.settings));
        let mut all = lock(&self.all);
        if all.contains_key(id) {
            return Err(ContainerError::Exists("container", id.to_owned()));
        }
        all.insert(id.to_owned(), container.clone());
        Ok(container)
    }

    fn forget(&self, container: &Container) {
        if let Err(error) = fs::remove_dir_all(&container.dir)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("Cannot remove {}: {error}", container.dir.display());
        }
        lock(&self.all).remove(&container.id);
    }

    /// Starts another process in a container that runs, or is to be started. Returns its PID.
    pub async fn exec(&self, request: agent::ExecRequest) -> Result<u32> {
        let container = self.find(&request.container_id)?;
        let _making = container.making.read().await;
        let init = {
            let mut inner = lock(&container.inner);
            if request.exec_id.is_empty() {
                return Err(ContainerError::Invalid(
                    "the exec's id",
                    "it is empty".into(),
                ));
            }
            if inner.execs.contains_key(&request.exec_id) {
                return Err(ContainerError::Exists("exec", request.exec_id));
            }
            // The namespaces of an init that waits for its start are there already.
            let (Some(init), Phase::Created | Phase::Running) = (inner.init.clone(), inner.phase)
            else {
                return Err(container.wrong_state("exec in", inner.phase));
            };
            inner.execs.insert(request.exec_id.clone(), None);
            init
        };
        let made = self.make_exec(&container, &request, &init).await;
        let mut inner = lock(&container.inner);
        match made {
            Ok(made) => {
                let pid = made.process.pid;
                inner
                    .execs
                    .insert(request.exec_id.clone(), Some(made.process.clone()));
                drop(inner);
                made.helper.go_on()?;
                tokio::spawn(async move {
                    if let Some(exit) = exited(made.process.collected()).await {
                        made.process.publish(exit);
                    }
                });
                Ok(pid as u32)
            }
            Err(error) => {
                inner.execs.remove(&request.exec_id);
                Err(error)
            }
        }
    }

    /// Lets a created container's init become the user's program.
    pub fn start(&self, id: &str) -> Result<()> {
        let container = self.find(id)?;
        let mut inner = lock(&container.inner);
        if inner.phase != Phase::Created {
            return Err(container.wrong_state("start", inner.phase));
        }
        container
            .notify_init()
            .map_err(|e| ContainerError::System("start the container's init", e))?;
        inner.phase = Phase::Running;
        Ok(())
    }

    /// Sends a signal to a process, or to all of a container.
    pub fn signal(&self, request: &agent::SignalRequest) -> Result<()> {
        let signal = i32::try_from(request.signal)
            .ok()
            .filter(|signal| (0..=64).contains(signal))
            .ok_or_else(|| ContainerError::Invalid("the signal", request.signal.to_string()))?;
        let container = self.find(&request.container_id)?;
        if request.all {
            return container.signal_all(signal);
        }
        let process = container.process(&request.exec_id)?;
        match process.signal(&self.reaper, signal) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ContainerError::Finished),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                Err(ContainerError::Finished)
            }
            Err(error) => Err(ContainerError::System("send the signal", error)),
        }
    }

    /// Resolves when a process has exited, or when its container has had more than `oom_kills` OOM
    /// kills: with the exit in the first case, and with the number of kills up to then.
    pub async fn wait(&self, id: &str, exec: &str, oom_kills: u64) -> Result<(Option<Exit>, u64)> {
        let container = self.find(id)?;
        let exit = container.process(exec)?.exit();
        let kills = OomKills::of(&container.cgroup);
        let exit = tokio::select! {
            biased;
            exit = exited(exit) => Some(exit.ok_or_else(|| no_process(id, exec))?),
            () = kills.more_than(oom_kills) => None,
        };
        Ok((exit, kills.count()))
    }

    /// Forgets an exited exec, or a container that is not running; also returned are the serial numbers of disks that
    /// could not be given up.
    pub async fn delete(&self, id: &str, exec: &str) -> Result<(Exit, Vec<String>)> {
        let container = self.find(id)?;
        if !exec.is_empty() {
            return Ok((container.delete_exec(exec)?, Vec::new()));
        }
        let (init, created) = {
            let mut inner = lock(&container.inner);
            let created = inner.phase == Phase::Created;
            let (Some(init), Phase::Created | Phase::Stopped) = (inner.init.clone(), inner.phase)
            else {
                return Err(match inner.phase {
                    Phase::Deleting => ContainerError::NoContainer(id.to_owned()),
                    phase => container.wrong_state("delete", phase),
                });
            };
            inner.phase = Phase::Deleting;
            (init, created)
        };
        if created {
            init.process
                .signal(&self.reaper, libc::SIGKILL)
                .map_err(|e| ContainerError::System("kill the container's init", e))?;
        }
        let exit = exited(init.process.exit())
            .await
            .unwrap_or_else(|| Exit::now(137));
        let removed = container.cgroup.remove();
        for process in container.processes() {
            process.finish_streams();
        }
        let in_use = container.unmount().await;
        self.forget(&container);
        removed?;
        Ok((exit, in_use))
    }

    /// Ends a process's standard input. Without one it does nothing, and that is no error.
    pub fn close_stdin(&self, container: &str, exec: &str) -> Result<()> {
        self.find(container)?.process(exec)?.close_stdin();
        Ok(())
    }

    /// Sets the size of a process's terminal.
    pub fn resize(&self, request: &agent::ResizePtyRequest) -> Result<()> {
        let process = self
            .find(&request.container_id)?
            .process(&request.exec_id)?;
        process
            .resize(
                character_count(request.width)?,
                character_count(request.height)?,
            )
            .map_err(|e| ContainerError::System("resize the terminal", e))
    }

    /// All processes of a container.
    pub fn list(&self, id: &str) -> Result<Vec<agent::Process>> {
        let container = self.find(id)?;
        let execs: HashMap<u32, String> = lock(&container.inner)
            .execs
            .iter()
            .filter_map(|(id, process)| Some((process.as_ref()?.pid as u32, id.clone())))
            .collect();
        Ok(container
            .cgroup
            .processes()?
            .into_iter()
            .map(|pid| {
                let mut process = agent::Process::new();
                process.pid = pid;
                process.exec_id = execs.get(&pid).cloned().unwrap_or_default();
                process
            })
            .collect())
    }

    /// The cgroup of a container, for what takes its time.
    pub fn cgroup(&self, id: &str) -> Result<Cgroup> {
        Ok(self.find(id)?.cgroup.clone())
    }

    /// Changes limits. On a thread of its own: the kernel may reclaim memory meanwhile.
    pub async fn update(&self, id: &str, resources: &[u8]) -> Result<()> {
        let container = self.find(id)?;
        let cgroup = container.cgroup.clone();
        let disks = lock(&container.inner).block_devices.clone();
        let resources: LinuxResources = serde_json::from_slice(resources)
            .and_then(|mut value| {
                renumber::resources(&mut value, &disks);
                serde_json::from_value(value)
            })
            .map_err(|e| ContainerError::Invalid("the resources", e.to_string()))?;
        on_thread(move || {
            cgroup.apply(&resources)?;
            match resources.devices().as_deref() {
                None | Some([]) => Ok(()),
                rules => cgroup.allow_devices(rules),
            }
        })
        .await
    }

    /// Reads a container's figures. On a thread of its own: the kernel sums them up meanwhile.
    pub async fn stats(&self, id: &str) -> Result<agent::StatsResponse> {
        let cgroup = self.cgroup(id)?;
        on_thread(move || cgroup.stats()).await
    }

    /// Freezes a running container.
    pub async fn pause(&self, id: &str) -> Result<()> {
        let container = self.find(id)?;
        container.change_phase("pause", Phase::Running, Phase::Pausing)?;
        // A container that ends meanwhile ends the wait as well: its cgroup gets empty.
        let ended = container.init_exit();
        let frozen = tokio::select! {
            frozen = container.cgroup.freeze(true) => frozen.map_err(ContainerError::from),
            _ = ended => Err(container.wrong_state("pause", Phase::Stopped)),
        };
        let phase = if frozen.is_ok() {
            Phase::Paused
        } else {
            Phase::Running
        };
        let _ = container.change_phase("pause", Phase::Pausing, phase);
        frozen
    }

    /// Thaws a paused container.
    pub async fn resume(&self, id: &str) -> Result<()> {
        let container = self.find(id)?;
        container.change_phase("resume", Phase::Paused, Phase::Pausing)?;
        let ended = container.init_exit();
        let thawed = tokio::select! {
            thawed = container.cgroup.freeze(false) => thawed.map_err(ContainerError::from),
            _ = ended => Ok(()),
        };
        let phase = if thawed.is_ok() {
            Phase::Running
        } else {
            Phase::Paused
        };
        let _ = container.change_phase("resume", Phase::Pausing, phase);
        thawed
    }

    /// Kills everything in every container.
    pub fn kill_all(&self) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for container in all {
            if let Err(error) = container.cgroup.kill() {
                log::debug!("{}", crate::error::chain(&error));
            }
        }
    }

    fn find(&self, id: &str) -> Result<Arc<Container>> {
        lock(&self.all)
            .get(id)
            .cloned()
            .ok_or_else(|| ContainerError::NoContainer(id.to_owned()))
    }
}

/// Runs what may take a while elsewhere than in the event loop.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, CgroupError> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(error) => Err(ContainerError::System(
            "finish the work",
            io::Error::other(error),
        )),
    }
}
