//! The containers of the pod: what the RPCs do, apart from how processes are made (`helper`).
//!
//! Each container has its own lock, held only to look at or change a few fields and never across
//! an await; the list of containers has another. So no call waits for another one's work, except
//! that a container's end waits for the execs that are being made in it.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cube_agent_protocol::agent;
use nix::unistd::Uid;
use oci_spec::runtime::LinuxResources;
use tokio::net::UnixListener;
use tokio::sync::{RwLock, watch};

use crate::cgroup::{Cgroup, CgroupError};
use crate::helper::create::{CONSOLE_SOCKET, INNER_ID, STATE};
use crate::helper::parent::{Helper, HelperError, Launcher};
use crate::helper::{CreateOrder, ExecOrder, Order, Report, terminal};
use crate::process::Process;
use crate::reaper::{Exit, Reaper, exited};
use crate::stdio::{Connections, Stage, StdioError};
use crate::transport::Connector;

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
    all: Mutex<HashMap<String, Arc<Container>>>,
}

/// A container.
pub struct Container {
    id: String,
    dir: PathBuf,
    cgroup_path: String,
    cgroup: Cgroup,
    inner: Mutex<Inner>,
    /// Read while an exec is made, written when the init has ended.
    making: RwLock<()>,
}

#[derive(Default)]
struct Inner {
    phase: Phase,
    init: Option<Init>,
    /// None while an exec is being made.
    execs: HashMap<String, Option<Arc<Process>>>,
}

#[derive(Clone)]
struct Init {
    process: Arc<Process>,
    pidfd: Arc<OwnedFd>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Creating,
    Created,
    Running,
    Pausing,
    Paused,
    Stopped,
    Deleting,
}

impl Phase {
    fn word(self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Created => "not started",
            Self::Running => "running",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Deleting => "being deleted",
        }
    }
}

impl Containers {
    /// No containers yet.
    pub fn new(settings: Settings, reaper: Arc<Reaper>) -> Self {
        Self {
            settings,
            reaper,
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
                self.forget(&container);
                Err(error)
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
        let cgroup_path = format!("{}/{id}", self.settings.cgroup);
        let container = Arc::new(Container {
            id: id.to_owned(),
            dir: self.settings.dir.join(id),
            cgroup: Cgroup::existing(&cgroup_path),
            cgroup_path,
            inner: Mutex::default(),
            making: RwLock::default(),
        });
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

    async fn make_container(
        &self,
        container: &Arc<Container>,
        request: &agent::CreateContainerRequest,
    ) -> Result<u32> {
        let stdio = request.stdio.clone().unwrap_or_default();
        fs::create_dir(&container.dir)
            .map_err(|e| ContainerError::System("make the container's directory", e))?;
        let order = Order::Create(CreateOrder {
            id: request.id.clone(),
            dir: container.dir.clone(),
            rootfs: PathBuf::from(&request.rootfs),
            cgroup: container.cgroup_path.clone(),
            terminal: stdio.terminal,
        });
        let made = self
            .make_process(&order, &request.spec, &stdio, container, None)
            .await?;
        let pidfd = open_pidfd(made.process.pid)
            .map_err(|e| ContainerError::System("watch the container's init", e))?;
        let pid = made.process.pid;
        {
            let mut inner = lock(&container.inner);
            inner.phase = Phase::Created;
            inner.init = Some(Init {
                process: made.process.clone(),
                pidfd: Arc::new(pidfd),
            });
        }
        made.helper.go_on()?;
        tokio::spawn(container.clone().watch_init(made.process));
        Ok(pid as u32)
    }

    /// Starts another process in a running container. Returns its PID.
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
            let (Some(init), Phase::Running) = (inner.init.clone(), inner.phase) else {
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

    async fn make_exec(
        &self,
        container: &Container,
        request: &agent::ExecRequest,
        init: &Init,
    ) -> Result<Made> {
        let stdio = request.stdio.clone().unwrap_or_default();
        let terminal = match stdio.terminal {
            true => Some((
                character_count(stdio.width)?,
                character_count(stdio.height)?,
            )),
            false => None,
        };
        let order = Order::Exec(ExecOrder {
            dir: container.dir.clone(),
            cgroup: container.cgroup_path.clone(),
            init: init.process.pid,
            terminal,
        });
        self.make_process(
            &order,
            &request.process,
            &stdio,
            container,
            Some(&init.pidfd),
        )
        .await
    }

    /// What create and exec have in common: streams, helper, terminal, registration. The helper
    /// waits for a last word, until which the process cannot become a child of PID 1.
    async fn make_process(
        &self,
        order: &Order,
        document: &[u8],
        stdio: &agent::Stdio,
        container: &Container,
        init: Option<&OwnedFd>,
    ) -> Result<Made> {
        let size = (
            character_count(stdio.width)?,
            character_count(stdio.height)?,
        );
        let connections = Connections::open(&self.settings.connect, stdio).await?;
        let stage = watch::Sender::new(Stage::Open);
        let start = |streams| {
            self.settings.launcher.start(
                &self.reaper,
                order,
                document,
                streams,
                init.map(OwnedFd::as_fd),
            )
        };
        let (helper, terminal) = match order {
            _ if !stdio.terminal => {
                let streams = connections.pipes(&stage.subscribe())?;
                (start(streams)?, None)
            }
            Order::Create(_) => {
                let listener = listen_for_console(container)?;
                let helper = start(crate::stdio::nulls()?)?;
                let master = init_terminal(&helper, &listener, size).await?;
                helper.go_on()?;
                (
                    helper,
                    Some(connections.terminal(master, &stage.subscribe())?),
                )
            }
            Order::Exec(_) => {
                let helper = start(crate::stdio::nulls()?)?;
                let (_, master) = helper.report().await?;
                let master = master.ok_or_else(|| {
                    ContainerError::System("open a terminal", io::Error::other("none came"))
                })?;
                (
                    helper,
                    Some(connections.terminal(master, &stage.subscribe())?),
                )
            }
        };
        let pid = helper.made().await?;
        let collected = self.reaper.register(pid);
        let process = Arc::new(Process::new(pid, collected, stage, terminal));
        Ok(Made { process, helper })
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

    /// Resolves with a process's exit.
    pub async fn wait(&self, container: &str, exec: &str) -> Result<Exit> {
        let exit = self.find(container)?.process(exec)?.exit();
        exited(exit)
            .await
            .ok_or_else(|| no_process(container, exec))
    }

    /// Forgets an exited exec, or a container that is not running.
    pub async fn delete(&self, id: &str, exec: &str) -> Result<Exit> {
        let container = self.find(id)?;
        if !exec.is_empty() {
            return container.delete_exec(exec);
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
        self.forget(&container);
        removed?;
        Ok(exit)
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
        let cgroup = self.cgroup(id)?;
        let resources: LinuxResources = serde_json::from_slice(resources)
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

/// A process that was made and whose helper waits for its last word.
struct Made {
    process: Arc<Process>,
    helper: Helper,
}

impl Container {
    /// After the init's end: ends what is left in the container, and publishes the init's exit when
    /// nothing is. So an exec's exit always comes before its container's.
    async fn watch_init(self: Arc<Self>, init: Arc<Process>) {
        let Some(exit) = exited(init.collected()).await else {
            return;
        };
        {
            let mut inner = lock(&self.inner);
            if inner.phase != Phase::Deleting {
                inner.phase = Phase::Stopped;
            }
        }
        self.end_rest().await;
        // An exec in the making finds its process killed, and comes to an end.
        let _no_more = self.making.write().await;
        self.end_rest().await;
        for process in self.processes() {
            if process.pid != init.pid {
                exited(process.exit()).await;
            }
        }
        init.publish(exit);
    }

    /// After a failed create: whatever there is of it.
    async fn clean_up(&self) {
        if !self.cgroup.exists() {
            return;
        }
        self.end_rest().await;
        if let Err(error) = self.cgroup.remove() {
            log::warn!("Container {}: {}", self.id, crate::error::chain(&error));
        }
    }

    async fn end_rest(&self) {
        let ended = match self.cgroup.kill() {
            Ok(()) => self.cgroup.empty().await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            log::error!(
                "Container {}: cannot end what its init left: {}",
                self.id,
                crate::error::chain(&error)
            );
        }
    }

    /// The init and all execs.
    fn processes(&self) -> Vec<Arc<Process>> {
        let inner = lock(&self.inner);
        let init = inner.init.iter().map(|init| &init.process);
        init.chain(inner.execs.values().flatten())
            .cloned()
            .collect()
    }

    fn process(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = lock(&self.inner);
        let found = match exec {
            "" => inner.init.as_ref().map(|init| init.process.clone()),
            exec => inner.execs.get(exec).cloned().flatten(),
        };
        found.ok_or_else(|| no_process(&self.id, exec))
    }

    fn delete_exec(&self, exec: &str) -> Result<Exit> {
        let process = self.process(exec)?;
        let Some(exit) = process.exited() else {
            return Err(ContainerError::State {
                action: "delete a process of",
                id: self.id.clone(),
                state: "running",
            });
        };
        // Whoever takes it out has deleted it.
        if lock(&self.inner).execs.remove(exec).is_none() {
            return Err(no_process(&self.id, exec));
        }
        process.finish_streams();
        Ok(exit)
    }

    fn signal_all(&self, signal: i32) -> Result<()> {
        if lock(&self.inner).phase == Phase::Stopped {
            return Err(ContainerError::Finished);
        }
        if signal == libc::SIGKILL {
            return Ok(self.cgroup.kill()?);
        }
        for pid in self.cgroup.processes()? {
            // SAFETY: kill(2) has no memory arguments. A process that has ended since is no harm:
            // its number comes round only after all others.
            unsafe { libc::kill(pid as i32, signal) };
        }
        Ok(())
    }

    fn change_phase(&self, action: &'static str, from: Phase, to: Phase) -> Result<()> {
        let mut inner = lock(&self.inner);
        if inner.phase != from {
            return Err(self.wrong_state(action, inner.phase));
        }
        inner.phase = to;
        Ok(())
    }

    fn wrong_state(&self, action: &'static str, phase: Phase) -> ContainerError {
        ContainerError::State {
            action,
            id: self.id.clone(),
            state: phase.word(),
        }
    }

    /// Resolves when the init has been collected.
    async fn init_exit(&self) {
        let collected = lock(&self.inner)
            .init
            .as_ref()
            .map(|init| init.process.collected());
        if let Some(collected) = collected {
            exited(collected).await;
        }
    }

    /// libcontainer's init waits for a connection to this socket, and its end.
    fn notify_init(&self) -> io::Result<()> {
        let state = fs::File::open(self.dir.join(STATE).join(INNER_ID))?;
        // The path may be longer than a socket's address can be; the descriptor's is not.
        let path = format!("/proc/self/fd/{}/notify.sock", state.as_raw_fd());
        std::os::unix::net::UnixStream::connect(path).map(drop)
    }
}

/// Listens where libcontainer will hand over the terminal of a container's init.
fn listen_for_console(container: &Container) -> Result<UnixListener> {
    let listen = || -> io::Result<UnixListener> {
        let dir = fs::File::open(&container.dir)?;
        UnixListener::bind(format!(
            "/proc/self/fd/{}/{CONSOLE_SOCKET}",
            dir.as_raw_fd()
        ))
    };
    listen().map_err(|e| ContainerError::System("listen for the terminal", e))
}

/// Receives the terminal of a container's init, and gives it its owner and size.
async fn init_terminal(
    helper: &Helper,
    listener: &UnixListener,
    (columns, rows): (u16, u16),
) -> Result<OwnedFd> {
    let failed = |e| ContainerError::System("take over the terminal", e);
    let owner = match helper.report().await? {
        (Report::Building { owner }, _) => owner,
        (report, _) => return Err(failed(io::Error::other(format!("{report:?} came")))),
    };
    let accepted = tokio::select! {
        accepted = listener.accept() => accepted.map_err(failed)?,
        // Nothing but a failure is reported before the terminal.
        failure = helper.made() => {
            failure?;
            return Err(failed(io::Error::other("none came")));
        }
    };
    let (socket, _) = accepted;
    let master = loop {
        socket.readable().await.map_err(failed)?;
        let received = socket.try_io(tokio::io::Interest::READABLE, || {
            crate::helper::parent::receive_fd(socket.as_fd())
        });
        match received {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            received => break received.map_err(failed)?,
        }
    };
    let settle = || -> io::Result<()> {
        let slave = terminal::slave_of(&master)?;
        nix::unistd::fchown(slave.as_raw_fd(), Some(Uid::from_raw(owner)), None)?;
        terminal::set_size(slave.as_fd(), columns, rows)
    };
    settle().map_err(failed)?;
    Ok(master)
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

fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open(2) has no memory arguments; its descriptor is close-on-exec.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn character_count(count: u32) -> Result<u16> {
    u16::try_from(count)
        .map_err(|_| ContainerError::Invalid("the terminal's size", count.to_string()))
}

fn no_process(container: &str, exec: &str) -> ContainerError {
    ContainerError::NoProcess {
        container: container.to_owned(),
        exec: exec.to_owned(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
