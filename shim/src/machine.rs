//! Bringing up a sandbox's machine, and taking it down.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cube_agent_protocol::agent::{ConfigureRequest, Empty, Share};
use cube_agent_protocol::{AGENT_PORT, LOG_LEVEL_KEY, SHARE_PATH, SHARE_TAG, STREAM_PORT};
use cube_hypervisor_api::VmConfig;
use cube_hypervisor_api::config::{Console, ShareConfig, VsockConfig};
use cube_hypervisor_api::control::{Event, Reply, Request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use ttrpc::context::Context;

use crate::config::Config;
use crate::disks::Slots;
use crate::guest::{Guest, GuestError, Streams, random};
use crate::host_cgroup::{CgroupError, HostCgroup};
use crate::hypervisor::{Ended, Hypervisor, HypervisorError, Launch, Sent, last_lines};
use crate::pod::{Files, FilesError};
use crate::process_id;
use crate::room::{Room, RoomError};
use crate::sizing::Size;
use crate::spec::Spec;
use crate::state::{ROOTFS, StateDir, StateError, VSOCK};
use crate::undo::Undo;

/// How long a hung guest may take to report on itself after the interrupt.
const REPORT_LIMIT: Duration = Duration::from_secs(2);

/// How much entropy the guest gets, in bytes.
const ENTROPY: usize = 64;

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The sandbox's directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// The cgroup on the host.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// Sockets or random bytes.
    #[error("Cannot set up the sandbox: {0}")]
    Host(io::Error),
    /// Processors that its first container names.
    #[error(transparent)]
    Room(#[from] RoomError),
    /// The guest ended before its agent came up.
    #[error("The guest ended while it booted: {0}")]
    Ended(Arc<Ended>),
    /// The agent did not come in time.
    #[error("The guest's agent did not come up within {limit:?} (boot_timeout_s){console}")]
    TimedOut {
        /// The time-out.
        limit: Duration,
        /// The end of the guest's console, with its introduction.
        console: String,
    },
    /// The agent did not take its configuration.
    #[error("The agent cannot configure the guest: {0}")]
    Configure(GuestError),
}

/// A machine that was switched on and is not ready yet.
pub struct Booting {
    hypervisor: Arc<Hypervisor>,
    boot: Option<Sent>,
    agent: Option<UnixListener>,
    streams: Option<Streams>,
    events: Option<mpsc::UnboundedReceiver<Event>>,
    slots: Arc<Slots>,
    room: Arc<Room>,
    state: StateDir,
    vcpus: u8,
    limit: Duration,
    undo: Undo,
}

/// A machine whose agent serves.
pub struct Machine {
    /// What tasks see of it.
    pub guest: Arc<Guest>,
    hypervisor: Arc<Hypervisor>,
    slots: Arc<Slots>,
    room: Arc<Room>,
    state: StateDir,
    undo: Undo,
}

impl Booting {
    /// Sets up the host's side and switches the machine on, with this number of slots for disks.
    pub fn power_on(
        namespace: &str,
        sandbox: &str,
        spec: &Spec,
        config: &Config,
        slots: u8,
    ) -> Result<Self, BootError> {
        let mut undo = Undo::new();
        let state = StateDir::create(StateDir::path_of(namespace, sandbox), &mut undo)?;
        let cgroup = host_cgroup(sandbox, spec, &state, &mut undo)?;
        let agent = listener(state.listen(AGENT_PORT, &mut undo)?)?;
        let streams =
            Streams::listen(state.listen(STREAM_PORT, &mut undo)?).map_err(BootError::Host)?;
        state.expect_vsock(&mut undo);

        if spec.wants_host_network() {
            log::info!(
                "The host's network cannot be given to a VM: the sandbox has one of its own"
            );
        }
        let (event_sender, events) = mpsc::unbounded_channel();
        let launch = Launch {
            binary: config.hypervisor.clone(),
            directory: state.path().to_owned(),
            network: spec.network_namespace(),
            cgroup_processes: cgroup.process_files()?,
            oom_score_adj: spec.oom_score_adj(),
        };
        let hypervisor = Arc::new(Hypervisor::spawn(launch, event_sender)?);
        let (kill, handle) = (hypervisor.killer(), hypervisor.handle());
        undo.push("end the hypervisor", move || {
            kill()?;
            wait_for_end(&handle)
        });
        log::debug!("The hypervisor is process {}", hypervisor.pid());
        if let Some(note) = process_id::note(hypervisor.pid()) {
            state.note("hypervisor", &note, &mut undo)?;
        }
        let size = Size::of(spec, config);
        let machine = vm_config(config, size, slots, &state);
        let boot = hypervisor.send(&Request::Boot(Box::new(machine)))?;
        Ok(Self {
            slots: Arc::new(Slots::new(hypervisor.clone(), slots)),
            hypervisor,
            room: Arc::new(Room::new(size, Size::most(config))),
            boot: Some(boot),
            agent: Some(agent),
            streams: Some(streams),
            events: Some(events),
            state,
            vcpus: size.vcpus,
            limit: config.boot_timeout,
            undo,
        })
    }

    /// Waits until the agent serves and has configured the guest. Whatever the outcome, what was
    /// set up stays until `self` or the machine is dropped.
    pub async fn ready(&mut self, spec: &Spec) -> Result<Arc<Guest>, BootError> {
        let limit = self.limit;
        match timeout(limit, self.connect(spec)).await {
            Ok(result) => result,
            Err(_) => Err(BootError::TimedOut {
                limit,
                console: self.report().await,
            }),
        }
    }

    async fn connect(&mut self, spec: &Spec) -> Result<Arc<Guest>, BootError> {
        if let Some(boot) = self.boot.take() {
            self.hypervisor.answer(boot).await?;
            self.room.pin(self.hypervisor.pid())?;
            log::debug!("The machine runs");
        }
        let (Some(listener), Some(streams)) = (self.agent.take(), self.streams.take()) else {
            return Err(BootError::Host(io::ErrorKind::InvalidInput.into()));
        };
        let connection = tokio::select! {
            accepted = listener.accept() => accepted.map_err(BootError::Host)?.0,
            ended = self.hypervisor.end() => return Err(BootError::Ended(ended)),
        };
        log::debug!("The agent is there");
        // One agent comes once.
        drop(listener);
        self.state.forget_socket(AGENT_PORT);
        let guest = self.guest(connection, streams);
        let request = configuration(spec, self.vcpus).map_err(BootError::Host)?;
        match guest
            .call(|agent| agent.configure(Context::default(), &request))
            .await
        {
            Ok(_) => {
                log::debug!("The guest is configured");
                Ok(guest)
            }
            Err(GuestError::Ended(ended)) => Err(BootError::Ended(ended)),
            Err(error) => Err(BootError::Configure(error)),
        }
    }

    fn guest(&mut self, connection: UnixStream, streams: Streams) -> Arc<Guest> {
        let guest = Arc::new(Guest::new(
            self.hypervisor.pid(),
            connection,
            streams,
            self.hypervisor.ended(),
            Box::new(self.hypervisor.killer()),
        ));
        if let Some(events) = self.events.take() {
            tokio::spawn(answer_events(events, guest.clone()));
        }
        guest
    }

    /// What a guest that hangs says of itself.
    async fn report(&self) -> String {
        let report = async {
            self.hypervisor.request(&Request::InjectNmi).await?;
            Ok::<_, HypervisorError>(self.hypervisor.end().await)
        };
        if let Ok(Ok(ended)) = timeout(REPORT_LIMIT, report).await {
            return last_lines(&ended.console);
        }
        match timeout(REPORT_LIMIT, self.hypervisor.request(&Request::Console)).await {
            Ok(Ok(Reply::Console(console))) => last_lines(&console),
            _ => String::new(),
        }
    }

    /// Makes the files of the pod that the machine is for; they go with it.
    pub fn make_pod_files(&mut self, files: &Files) -> Result<(), FilesError> {
        files.make(&self.state.pod(), &mut self.undo)
    }

    /// The hypervisor's process id: it lives in the pod's network namespace already.
    pub fn pid(&self) -> u32 {
        self.hypervisor.pid()
    }

    /// Ends what has been switched on, and removes what belongs to it.
    pub async fn give_up(self) {
        self.undo.run_aside().await;
    }

    /// The machine, once it is ready.
    pub fn finish(self, guest: Arc<Guest>) -> Machine {
        Machine {
            guest,
            hypervisor: self.hypervisor,
            slots: self.slots,
            room: self.room,
            state: self.state,
            undo: self.undo,
        }
    }

    /// The sandbox's directory.
    pub fn state(&self) -> &StateDir {
        &self.state
    }

    /// The machine's slots for disks.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// What its containers may have of it.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }
}

impl Machine {
    /// The sandbox's directory.
    pub fn state(&self) -> &StateDir {
        &self.state
    }

    /// The machine's slots for disks.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// What its containers may have of it.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Ends the machine and removes what belongs to it. No task is left in it, and what they wrote
    /// is on the host already: virtio-fs runs without a write-back cache, and a mapping is written
    /// out when it goes. So nothing is asked of the guest, which might not answer.
    pub async fn power_off(self) {
        if !self.guest.has_ended() {
            self.guest.cut_power();
            self.hypervisor.end().await;
        }
        self.undo.run_aside().await;
    }
}

fn listener(listener: std::os::unix::net::UnixListener) -> Result<UnixListener, BootError> {
    listener.set_nonblocking(true).map_err(BootError::Host)?;
    UnixListener::from_std(listener).map_err(BootError::Host)
}

fn host_cgroup(
    sandbox: &str,
    spec: &Spec,
    state: &StateDir,
    undo: &mut Undo,
) -> Result<HostCgroup, BootError> {
    let own = format!("/{sandbox}");
    let path = Some(spec.cgroups_path())
        .filter(|path| !path.is_empty())
        .unwrap_or(&own);
    let cgroup = HostCgroup::locate(path)?;
    let directories: Vec<_> = cgroup
        .directories()
        .iter()
        .map(|d| d.display().to_string())
        .collect();
    state.note("cgroup", &directories.join("\n"), undo)?;
    cgroup.create(undo)?;
    Ok(cgroup)
}

fn vm_config(config: &Config, size: Size, slots: u8, state: &StateDir) -> VmConfig {
    let mut cmdline = String::from("console=hvc0 reboot=k panic=-1 unknown_nmi_panic maxcpus=1");
    if !config.debug_console {
        cmdline.push_str(" quiet");
    }
    cmdline.push_str(&format!(
        " {LOG_LEVEL_KEY}={}",
        config.log_level.as_str().to_lowercase()
    ));
    if !config.kernel_params.is_empty() {
        cmdline.push(' ');
        cmdline.push_str(&config.kernel_params);
    }
    VmConfig {
        kernel: config.kernel.clone(),
        initramfs: Some(config.initramfs.clone()),
        cmdline,
        vcpus: size.vcpus,
        memory_mib: size.memory_mib,
        disks: Vec::new(),
        spare_disks: slots,
        networks: Vec::new(),
        spare_networks: 0,
        shares: vec![ShareConfig {
            tag: SHARE_TAG.to_owned(),
            path: state.shared(),
            read_only: false,
            guest_owned: vec![ROOTFS.to_owned()],
            // We make directories and mount by paths of it, which no guest may lead elsewhere.
            mounts_only: true,
        }],
        vsock: Some(VsockConfig {
            cid: 3,
            path: VSOCK.into(),
        }),
        entropy: true,
        console: Console::Log,
    }
}

fn configuration(spec: &Spec, vcpus: u8) -> io::Result<ConfigureRequest> {
    let mut entropy = vec![0; ENTROPY];
    random(&mut entropy)?;
    let since_epoch = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    // A new UTS namespace on the host would have the host's name, until another is given.
    let hostname = match spec.hostname() {
        "" => nix::unistd::gethostname()?.to_string_lossy().into_owned(),
        name => name.to_owned(),
    };
    Ok(ConfigureRequest {
        hostname,
        domainname: spec.domainname().to_owned(),
        entropy,
        wall_clock_ns: i64::try_from(since_epoch.as_nanos()).unwrap_or(0),
        online_vcpus: u32::from(vcpus),
        sysctls: spec.pod_sysctls(),
        shares: vec![Share {
            tag: SHARE_TAG.to_owned(),
            path: SHARE_PATH.to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    })
}

/// Does what the hypervisor asks for while the machine runs.
async fn answer_events(mut events: mpsc::UnboundedReceiver<Event>, guest: Arc<Guest>) {
    while let Some(event) = events.recv().await {
        if let Event::ShareCrowded { inodes, .. } = event {
            log::debug!(
                "The guest holds {inodes} inodes: it is asked to drop what it does not need"
            );
            drop_caches(&guest).await;
        }
    }
}

/// Lets the guest forget files that it does not use, so that the host can close them.
pub async fn drop_caches(guest: &Guest) {
    let request = Empty::default();
    if let Err(e) = guest
        .call(|agent| agent.drop_caches(Context::default(), &request))
        .await
    {
        log::debug!("The guest did not drop its caches: {e}");
    }
}

/// Waits until a killed process has ended.
fn wait_for_end(handle: &impl AsFd) -> io::Result<()> {
    const LIMIT_MS: u16 = 5000;
    let mut fds = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::from(LIMIT_MS))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}
