//! Making the processes of containers.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cube_agent_protocol::{IMAGES_PATH, agent};
use nix::unistd::Uid;
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::state::{Container, Init, Phase, lock};
use super::{ContainerError, Containers, Result};
use crate::helper::create::CONSOLE_SOCKET;
use crate::helper::parent::Helper;
use crate::helper::{BlockNumbers, CreateOrder, ExecOrder, Order, Report, terminal};
use crate::process::Process;
use crate::rootfs::Mounted;
use crate::stdio::{Connections, Stage};

/// A process that was made and whose helper waits for its last word.
pub(super) struct Made {
    pub(super) process: Arc<Process>,
    pub(super) helper: Helper,
}

impl Containers {
    /// Makes a container and follows its init to its end. Returns the init's PID.
    pub(super) async fn make_container(
        &self,
        container: &Arc<Container>,
        request: &agent::CreateContainerRequest,
    ) -> Result<u32> {
        let stdio = request.stdio.clone().unwrap_or_default();
        fs::create_dir(&container.dir)
            .map_err(|e| ContainerError::System("make the container's directory", e))?;
        let block_devices = self.mount_disks(container, request).await?;
        let order = Order::Create(CreateOrder {
            block_devices,
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

    /// Mounts the root file system, if it is on disks, and finds the disks among the devices.
    async fn mount_disks(
        &self,
        container: &Container,
        request: &agent::CreateContainerRequest,
    ) -> Result<Vec<BlockNumbers>> {
        if request.rootfs_mounts.is_empty() && request.block_devices.is_empty() {
            return Ok(Vec::new());
        }
        let disks = self.disks.clone();
        let (mounts, devices) = (request.rootfs_mounts.clone(), request.block_devices.clone());
        let mut mounted = Mounted::new(Path::new(IMAGES_PATH).join(&container.id));
        // On a thread of its own: it waits for the disks.
        let worked = tokio::task::spawn_blocking(move || {
            let done = mounted
                .mount(&disks, &mounts)
                .and_then(|()| mounted.devices(&disks, &devices));
            (mounted, done)
        });
        let (mounted, done) = worked
            .await
            .map_err(|e| ContainerError::System("mount the disks", io::Error::other(e)))?;
        // Also what a failure leaves: the end of the create undoes it.
        let mut inner = lock(&container.inner);
        inner.mounted = Some(mounted);
        inner.block_devices = done?;
        Ok(inner.block_devices.clone())
    }

    /// Makes a process in a container.
    pub(super) async fn make_exec(
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

fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open(2) has no memory arguments; its descriptor is close-on-exec.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A terminal's width or height.
pub(super) fn character_count(count: u32) -> Result<u16> {
    u16::try_from(count)
        .map_err(|_| ContainerError::Invalid("the terminal's size", count.to_string()))
}
