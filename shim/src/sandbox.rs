//! A sandbox: its machine, the containers in it, and when it ends.

mod controller;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use containerd_shim_protos::api::CreateTaskRequest;
use cube_agent_protocol::SHARE_PATH;
use cube_agent_protocol::agent::{self, Directory, RootfsMount};
use protobuf::MessageField;
use serde_json::Value;
use tokio::sync::{Mutex, Notify, watch};
use tokio::task::spawn_blocking;

use crate::bootstrap::check_name;
use crate::config::Config;
use crate::disks::{DiskError, Disks, OpenDisk, Slots, slots_for};
use crate::hooks::Hooks;
use crate::logger;
use crate::machine::{Booting, Machine, drop_caches};
use crate::mount::{self, Mount};
use crate::options::Options;
use crate::pod::Pod;
use crate::room::{Room, RoomError};
use crate::rootfs::Rootfs;
use crate::spec::{BlockDevice, Spec};
use crate::state::{self, POD, ROOTFS, SHARED_MODE, StateDir, VOLUMES};
use crate::stdio::Uris;
use crate::task_error::TaskError;
use crate::tasks::{Deleted, NewContainer, Reservation, Tasks, create_event, given_up};
use crate::undo::Undo;
use crate::volumes::Volumes;
use controller::Controlled;

/// The sandbox of this shim.
pub struct Sandbox {
    namespace: String,
    id: String,
    /// The runtime's options that the shim was started with.
    options: Options,
    controlled: Controlled,
    /// Its tasks.
    pub tasks: Arc<Tasks>,
    machine: Mutex<Option<Machine>>,
    volumes: Arc<Volumes>,
    /// Where the shim serves.
    socket: PathBuf,
    /// containerd has asked the shim to leave while tasks were there, and will not ask again.
    leave_when_empty: AtomicBool,
    left: Notify,
    /// Whether everything is to end.
    ending: watch::Sender<bool>,
}

impl Sandbox {
    /// A sandbox without a machine: the first container brings it up, or containerd asks for it.
    pub fn new(
        namespace: String,
        id: String,
        options: Options,
        tasks: Arc<Tasks>,
        socket: PathBuf,
    ) -> Self {
        Self {
            namespace,
            id,
            options,
            controlled: Controlled::default(),
            tasks,
            machine: Mutex::default(),
            volumes: Arc::default(),
            socket,
            leave_when_empty: AtomicBool::new(false),
            left: Notify::new(),
            ending: watch::Sender::new(false),
        }
    }

    /// Creates a container, and the machine for the first one.
    pub async fn create(&self, request: CreateTaskRequest) -> Result<u32, TaskError> {
        if !request.checkpoint.is_empty() {
            return Err(TaskError::Unimplemented("restoring a checkpoint".into()));
        }
        check_name("id", &request.id).map_err(|e| TaskError::InvalidArgument(e.to_string()))?;
        let pod = self.controlled.pod()?;
        let reservation = self.tasks.reserve(&request.id)?;
        let created = self.create_reserved(reservation, request, pod).await;
        if created.is_err() {
            self.power_off_if_empty().await;
            self.leave_if_told();
        }
        created
    }

    async fn create_reserved(
        &self,
        reservation: Reservation,
        request: CreateTaskRequest,
        pod: Option<Arc<Pod>>,
    ) -> Result<u32, TaskError> {
        log::debug!("{} is asked for", request.id);
        let bundle = PathBuf::from(&request.bundle);
        let mut spec = Spec::read(&bundle).map_err(TaskError::host)?;
        let hooks = Hooks::of(&spec, &request.id, &bundle).map_err(create_failed)?;
        let hooks = Arc::new(hooks);
        if let Some(pod) = pod {
            spec.join(&self.id);
            if let Some(files) = &pod.files {
                let state = StateDir::path_of(&self.namespace, &self.id);
                files.give(&mut spec, &state.join(POD));
            }
        }
        let created = self
            .create_hooked(reservation, request, spec, hooks.clone())
            .await;
        if created.is_err() {
            hooks.stopped().await;
        }
        created
    }

    async fn create_hooked(
        &self,
        reservation: Reservation,
        request: CreateTaskRequest,
        mut spec: Spec,
        hooks: Arc<Hooks>,
    ) -> Result<u32, TaskError> {
        let options = Options::parse(request.options.as_ref()).map_err(TaskError::host)?;
        let bundle = PathBuf::from(&request.bundle);
        let config = Config::load(options.config.as_deref(), &spec.annotations())
            .map_err(TaskError::host)?;
        let mut wanted = Wanted::of(&request, &spec, &bundle)?;

        let mut machine = self.machine.lock().await;
        if machine
            .as_ref()
            .is_some_and(|machine| machine.guest.has_ended())
        {
            return Err(TaskError::FailedPrecondition(
                "the sandbox's machine has ended: delete its tasks first".into(),
            ));
        }
        let booting = match &*machine {
            Some(_) => None,
            // It was stopped since.
            None if self.controlled.keeps_shim() => {
                self.controlled.pod()?;
                return Err(TaskError::Host("there is no machine".into()));
            }
            None => {
                // The shim's level is the sandbox's: containers that join it do not change it.
                log::set_max_level(logger::level(log::max_level(), config.log_level));
                let may_grow = spec.group().is_some();
                let slots = slots_for(wanted.count(), may_grow, config.spare_disks)
                    .map_err(create_failed)?;
                let booting = Booting::power_on(&self.namespace, &self.id, &spec, &config, slots);
                Some(booting.map_err(TaskError::host)?)
            }
        };
        let (shared, slots, room) = match (&*machine, &booting) {
            (Some(machine), _) => (machine.state().shared(), machine.slots(), machine.room()),
            (None, Some(booting)) => (booting.state().shared(), booting.slots(), booting.room()),
            (None, None) => return Err(TaskError::Host("there is no machine".into())),
        };
        let (slots, room) = (slots.clone(), room.clone());
        let unwanted = reservation.unwanted();
        // While the guest boots.
        let running = machine.as_ref().map(|machine| machine.guest.pid);
        let bound = Bound::of(&mut spec, room, reservation.id(), running).map_err(create_failed)?;
        wanted.attach(&slots).map_err(create_failed)?;
        let (request, spec) = (Arc::new(request), Arc::new(spec));
        let prepare = {
            let (request, spec, hooks) = (request.clone(), spec.clone(), hooks.clone());
            let common = self.volumes.clone();
            move || {
                let prepared = prepare(
                    reservation,
                    &request,
                    &spec,
                    &hooks,
                    &shared,
                    &wanted,
                    &common,
                );
                (wanted, prepared)
            }
        };
        let (mut wanted, prepared) = match &booting {
            // There is nobody else whom it could hold up.
            Some(_) => prepare(),
            None => spawn_blocking(prepare).await.map_err(TaskError::host)?,
        };
        let mut new = match prepared {
            Ok(new) => new,
            Err(error) => {
                // A machine that boots for nobody else ends with this; in one that goes on the slots are free on return.
                if booting.is_none() {
                    wanted.disks.detach(&[]).await;
                }
                return Err(error);
            }
        };
        new.disks = wanted.disks;
        new.undo.push("free its processors", move || {
            drop(bound);
            Ok::<_, io::Error>(())
        });
        log::debug!(
            "The root file system and volumes of {} are mounted",
            request.id
        );
        let guest = match (booting, &*machine) {
            (Some(mut booting), _) => {
                let boot = async {
                    let hooked = hooks.creating(booting.pid()).await;
                    hooked.map_err(create_failed)?;
                    booting.ready(&spec).await.map_err(TaskError::host)
                };
                match self.unless_ending(unwanted, boot).await {
                    Ok(guest) => {
                        *machine = Some(booting.finish(guest.clone()));
                        drop(machine);
                        guest
                    }
                    Err(error) => {
                        // What is mounted in the sandbox's directory goes before the directory does.
                        new.give_up().await;
                        booting.give_up().await;
                        return Err(error);
                    }
                }
            }
            (None, Some(running)) => {
                let guest = running.guest.clone();
                // Hooks may take their time, and other containers need not wait for them.
                drop(machine);
                let hooked = async { hooks.creating(guest.pid).await.map_err(create_failed) };
                if let Err(error) = self.unless_ending(unwanted, hooked).await {
                    new.give_up().await;
                    return Err(error);
                }
                guest
            }
            (None, None) => return Err(TaskError::Host("there is no machine".into())),
        };
        self.tasks.create(new, guest).await
    }

    /// Changes a container's limits to those of `resources`, an OCI `LinuxResources` object.
    pub async fn update(&self, id: &str, resources: Vec<u8>) -> Result<(), TaskError> {
        self.tasks.check_update(id)?;
        let room = {
            let machine = self.machine.lock().await;
            machine
                .as_ref()
                .map(|machine| (machine.room().clone(), machine.guest.pid))
        };
        let parsed = serde_json::from_slice::<Value>(&resources);
        // Without a machine there is no such container, and what is no JSON is for the agent to refuse.
        let (Some((room, pid)), Ok(mut wanted)) = (room, parsed) else {
            return self.tasks.update(id, resources).await;
        };
        let invalid = |e: RoomError| TaskError::InvalidArgument(e.to_string());
        room.check(&wanted).map_err(invalid)?;
        let binds = !wanted["cpu"]["cpus"]
            .as_str()
            .unwrap_or_default()
            .is_empty();
        let before = room.bind(id, &mut wanted).map_err(invalid)?;
        let pinned = room.pin(pid).map_err(invalid);
        let updated = match pinned {
            Ok(()) => self.tasks.update(id, wanted.to_string().into_bytes()).await,
            failed => failed,
        };
        if updated.is_err() && binds {
            room.bind_again(id, before);
            if let Err(e) = room.pin(pid) {
                log::warn!("After an update of {id} that failed: {e}");
            }
        }
        updated
    }

    /// Deletes an exec, or a container; with the last container the machine ends.
    pub async fn delete(&self, id: &str, exec: &str) -> Result<Deleted, TaskError> {
        let deleted = self.tasks.delete(id, exec).await?;
        if exec.is_empty() {
            self.power_off_if_empty().await;
            let machine = self.machine.lock().await;
            if let Some(guest) = machine.as_ref().map(|machine| machine.guest.clone()) {
                // So that the host can let go of the container's files.
                tokio::spawn(async move { drop_caches(&guest).await });
            }
            drop(machine);
            self.leave_if_told();
        }
        Ok(deleted)
    }

    async fn power_off_if_empty(&self) {
        let mut machine = self.machine.lock().await;
        // Under the lock: a create that waits for it has its name reserved.
        if self.tasks.is_empty()
            && !self.controlled.keeps_machine()
            && let Some(machine) = machine.take()
        {
            machine.power_off().await;
        }
    }

    /// containerd does not need the shim any more. It does not leave while there are tasks, but
    /// then with the last of them.
    pub async fn shutdown(&self) {
        self.leave_when_empty.store(true, Ordering::Relaxed);
        self.power_off_if_empty().await;
        self.leave_if_told();
    }

    fn leave_if_told(&self) {
        if !self.leave_when_empty.load(Ordering::Relaxed)
            || !self.tasks.is_empty()
            || self.controlled.keeps_shim()
        {
            return;
        }
        // Before anybody is told: the next sandbox of this name must not find the socket.
        let _ = std::fs::remove_file(&self.socket);
        self.left.notify_one();
    }

    /// Does work that may take long, and gives it up when everything is to end, or this container is not wanted any more.
    async fn unless_ending<T>(
        &self,
        mut unwanted: watch::Receiver<bool>,
        work: impl Future<Output = Result<T, TaskError>>,
    ) -> Result<T, TaskError> {
        let mut ending = self.ending.subscribe();
        tokio::select! {
            done = work => done,
            _ = ending.wait_for(|ending| *ending) => {
                Err(TaskError::Host("The shim was told to end".into()))
            }
            Ok(_) = unwanted.wait_for(|unwanted| *unwanted) => Err(given_up()),
        }
    }

    /// Ends everything: the shim was told to go.
    pub async fn end(&self) {
        // Whoever brings up the machine lets go of it.
        self.ending.send_replace(true);
        let _ = std::fs::remove_file(&self.socket);
        let tasks = self.tasks.forget_all();
        if let Some(machine) = self.machine.lock().await.take() {
            if !machine.guest.has_ended() {
                machine.guest.cut_off("the shim was told to end");
                machine.guest.end().await;
            }
            for undo in tasks {
                undo.run_aside().await;
            }
            machine.power_off().await;
        }
    }

    /// Waits until the sandbox has ended for good.
    pub async fn left(&self) {
        self.left.notified().await;
    }
}

/// What a failed create of the OCI runtime is called.
fn create_failed(error: impl std::fmt::Display) -> TaskError {
    TaskError::host(format!("OCI runtime create failed: {error}"))
}

/// A container's processors in the machine, until it is dropped.
struct Bound {
    room: Arc<Room>,
    container: String,
    /// The machine that runs already.
    running: Option<u32>,
}

impl Bound {
    /// Sees to it that the machine has what the container may have, and writes to the specification what the guest calls
    /// it. A machine that boots was made for this container; its threads are bound when they are there.
    fn of(
        spec: &mut Spec,
        room: Arc<Room>,
        container: &str,
        running: Option<u32>,
    ) -> Result<Self, RoomError> {
        let bound = Self {
            room,
            container: container.to_owned(),
            running,
        };
        let Some(resources) = spec.resources_mut() else {
            return Ok(bound);
        };
        if running.is_some() {
            bound.room.check(resources)?;
        }
        bound.room.bind(container, resources)?;
        if let Some(pid) = running {
            bound.room.pin(pid)?;
        }
        Ok(bound)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.room.bind_again(&self.container, None);
        // Threads that have ended with the machine need nothing.
        if let Some(Err(e)) = self.running.map(|pid| self.room.pin(pid)) {
            log::debug!("After the end of {}: {e}", self.container);
        }
    }
}

/// What a container is to have that may be on disks.
struct Wanted {
    rootfs: Rootfs,
    devices: Vec<BlockDevice>,
    /// All of them, once they are attached.
    disks: Disks,
}

impl Wanted {
    fn of(request: &CreateTaskRequest, spec: &Spec, bundle: &Path) -> Result<Self, TaskError> {
        let mounts = rootfs_mounts(request, spec, bundle);
        Ok(Self {
            rootfs: Rootfs::plan(&mounts, &request.id).map_err(TaskError::host)?,
            devices: spec.block_devices().map_err(create_failed)?,
            disks: Disks::default(),
        })
    }

    fn count(&self) -> usize {
        self.rootfs.disks() + self.devices.len()
    }

    /// Gives the disks to the machine, those of the root file system first.
    fn attach(&mut self, slots: &Arc<Slots>) -> Result<(), DiskError> {
        let mut open = Vec::with_capacity(self.count());
        if let Rootfs::Guest(rootfs) = &self.rootfs {
            for image in &rootfs.images {
                open.push(OpenDisk::open(&image.path, image.read_only)?);
            }
        }
        for device in &self.devices {
            open.push(OpenDisk::device(
                device.major,
                device.minor,
                &device.path,
                device.read_only,
            )?);
        }
        self.disks = Disks::attach(slots, &open)?;
        Ok(())
    }

    /// What the agent is told of the mounts and of the devices.
    fn of_guest(&self) -> (Vec<RootfsMount>, Vec<agent::BlockDevice>) {
        let disk = |n| MessageField::from_option(self.disks.of_guest(n));
        let mounts = match &self.rootfs {
            Rootfs::Host(_) => Vec::new(),
            Rootfs::Guest(rootfs) => rootfs
                .mounts
                .iter()
                .map(|mount| RootfsMount {
                    type_: mount.kind.clone(),
                    disk: mount.image.map_or_else(MessageField::none, disk),
                    source: mount.source.clone(),
                    target: mount.target.clone(),
                    flags: mount.flags,
                    data: mount.data.clone(),
                    devices: mount
                        .devices
                        .iter()
                        .filter_map(|&n| self.disks.of_guest(n))
                        .collect(),
                    directories: mount
                        .directories
                        .iter()
                        .map(|(path, mode)| Directory {
                            path: path.clone(),
                            mode: *mode,
                            ..Default::default()
                        })
                        .collect(),
                    ..Default::default()
                })
                .collect(),
        };
        let first = self.rootfs.disks();
        let devices = self.devices.iter().enumerate();
        let devices = devices
            .map(|(n, device)| agent::BlockDevice {
                disk: disk(first + n),
                major: device.major,
                minor: device.minor,
                ..Default::default()
            })
            .collect();
        (mounts, devices)
    }
}

/// Mounts what the container needs below the sandbox's shared directory and edits its specification.
fn prepare(
    reservation: Reservation,
    request: &CreateTaskRequest,
    spec: &Spec,
    hooks: &Arc<Hooks>,
    shared: &Path,
    wanted: &Wanted,
    common: &Volumes,
) -> Result<NewContainer, TaskError> {
    let id = reservation.id().to_owned();
    let bundle = PathBuf::from(&request.bundle);
    let volumes_in_guest = format!("{SHARE_PATH}/{VOLUMES}/{id}");
    let guest_spec = spec
        .clone()
        .translate(&id, &bundle, &volumes_in_guest)
        .map_err(TaskError::host)?;

    let mut undo = Undo::new();
    let volumes = shared.join(VOLUMES).join(&id);
    make_directory(&volumes, &mut undo, state::remove_volumes)?;
    let (mounts, block_devices) = wanted.of_guest();
    // A snapshot is the container's alone; a directory of the host is not.
    let (rootfs, rootfs_in_guest) = match &wanted.rootfs {
        Rootfs::Guest(rootfs) => (None, rootfs.root.clone()),
        Rootfs::Host(_) if request.rootfs.is_empty() => (
            Some(volumes.join(ROOTFS)),
            format!("{volumes_in_guest}/{ROOTFS}"),
        ),
        Rootfs::Host(_) => (
            Some(shared.join(ROOTFS).join(&id)),
            format!("{SHARE_PATH}/{ROOTFS}/{id}"),
        ),
    };
    if let (Some(rootfs), Rootfs::Host(mounts)) = (&rootfs, &wanted.rootfs) {
        make_directory(rootfs, &mut undo, state::remove_directory)?;
        let target = rootfs.clone();
        undo.push(format!("unmount {}", rootfs.display()), move || {
            mount::unmount(&target)
        });
        mount::mount_rootfs(mounts, rootfs).map_err(TaskError::host)?;
    }
    for (n, volume) in guest_spec.volumes.iter().enumerate() {
        let target = volumes.join(n.to_string());
        // A container that names no group has its volumes for itself, also if others name it as theirs.
        if spec.group().is_some() {
            let bound = common.bind(volume, &shared.join(VOLUMES));
            let bound = bound.map_err(create_failed)?;
            bound.link(&target).map_err(|e| {
                create_failed(format!("Cannot make the link {}: {e}", target.display()))
            })?;
            undo.push(format!("remove {}", target.display()), move || {
                // Kept until here.
                let _bound = bound;
                std::fs::remove_file(target)
            });
            continue;
        }
        volume.bind(&target).map_err(create_failed)?;
        undo.push(format!("unmount {}", target.display()), move || {
            mount::unmount(&target)
        });
    }
    // Images are not for the host to look into, so its hooks find the bundle's directory empty.
    if let Some(rootfs) = rootfs.filter(|_| !hooks.is_empty() && !request.rootfs.is_empty()) {
        show_rootfs(&rootfs, &bundle.join("rootfs"), &mut undo)?;
    }
    Ok(NewContainer {
        reservation,
        is_own_sandbox: spec.group().is_none(),
        hooks: hooks.clone(),
        spec: guest_spec.json,
        rootfs: rootfs_in_guest,
        rootfs_mounts: mounts,
        block_devices,
        disks: Disks::default(),
        uris: Uris {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        },
        console_size: spec.console_size(),
        undo,
        event: create_event(request),
        bundle,
    })
}

/// Binds the root file system where it is with runc: hooks of the host look for it there.
fn show_rootfs(rootfs: &Path, place: &Path, undo: &mut Undo) -> Result<(), TaskError> {
    if !place.is_dir() {
        return Ok(());
    }
    let bind = Mount {
        kind: "bind".into(),
        source: rootfs.display().to_string(),
        target: String::new(),
        options: vec!["rbind".into()],
    };
    let target = place.to_owned();
    undo.push(format!("unmount {}", place.display()), move || {
        mount::unmount(&target)
    });
    mount::mount_rootfs(&[bind], place).map_err(TaskError::host)
}

fn make_directory(
    path: &Path,
    undo: &mut Undo,
    remove: fn(&Path) -> io::Result<()>,
) -> Result<(), TaskError> {
    DirBuilder::new()
        .mode(SHARED_MODE)
        .create(path)
        .map_err(|e| TaskError::host(format!("Cannot make {path:?}: {e}")))?;
    let made = path.to_owned();
    undo.push(format!("remove {}", path.display()), move || remove(&made));
    Ok(())
}

/// The mounts of the root file system. Without any it is a directory on the host.
fn rootfs_mounts(request: &CreateTaskRequest, spec: &Spec, bundle: &Path) -> Vec<Mount> {
    if request.rootfs.is_empty() {
        return vec![Mount {
            kind: "bind".into(),
            source: spec.root_path(bundle).display().to_string(),
            target: String::new(),
            options: vec!["rbind".into()],
        }];
    }
    request
        .rootfs
        .iter()
        .map(|mount| Mount {
            kind: mount.type_.clone(),
            source: mount.source.clone(),
            target: mount.target.clone(),
            options: mount.options.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(socket: PathBuf) -> Sandbox {
        let (publisher, _queue) = crate::publisher::queue();
        let tasks = Tasks::new("ns".into(), publisher, Arc::default());
        Sandbox::new("ns".into(), "c".into(), Options::default(), tasks, socket)
    }

    /// Nobody will ever say that it is not.
    fn wanted() -> watch::Receiver<bool> {
        watch::channel(false).1
    }

    #[tokio::test]
    async fn a_hook_that_hangs_while_the_machine_is_brought_up_does_not_hold_up_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path().join("s"));
        let hook = r#"{"hooks": {"createRuntime": [
            {"path": "/bin/sh", "args": ["sh", "-c", "echo $$ >pid; exec sleep 1000"]}
        ]}}"#;
        let spec = Spec::parse(hook.as_bytes()).unwrap();
        let hooks = Hooks::of(&spec, "c", dir.path()).unwrap();
        let bring_up = async {
            let _machine = sandbox.machine.lock().await;
            let hook = async { hooks.creating(1).await.map_err(create_failed) };
            sandbox
                .unless_ending(wanted(), hook)
                .await
                .unwrap_err()
                .to_string()
        };
        // The hook opens it when it runs, and writes its process id.
        let note = dir.path().join("pid");
        nix::unistd::mkfifo(&note, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let end = async {
            let told = tokio::task::spawn_blocking(move || std::fs::read_to_string(note));
            let pid: u32 = told.await.unwrap().unwrap().trim().parse().unwrap();
            sandbox.end().await;
            pid
        };
        let (error, pid) = tokio::join!(bring_up, end);
        assert_eq!(error, "The shim was told to end");
        // The hook is ended, or was collected already.
        if let Ok(hook) = crate::process_id::open(pid) {
            let hook = std::os::fd::AsFd::as_fd(&hook);
            let mut fds = [nix::poll::PollFd::new(hook, nix::poll::PollFlags::POLLIN)];
            assert_eq!(nix::poll::poll(&mut fds, 5000_u16).unwrap(), 1);
        }
        // What was begun after that does not begin.
        let late = sandbox.unless_ending(wanted(), std::future::pending::<Result<(), _>>());
        assert!(late.await.is_err());
    }

    #[tokio::test]
    async fn a_boot_is_given_up_when_its_container_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path().join("s"));
        let reservation = sandbox.tasks.reserve("c").unwrap();
        let boot = async {
            let unwanted = reservation.unwanted();
            let never = std::future::pending::<Result<(), _>>();
            let given_up = sandbox.unless_ending(unwanted, never).await;
            drop(reservation);
            given_up
        };
        let (given_up, deleted) = tokio::join!(boot, sandbox.delete("c", ""));
        given_up.unwrap_err();
        assert_eq!(deleted.unwrap_err().code(), ttrpc::Code::NOT_FOUND);
        assert!(sandbox.tasks.is_empty());
    }
}
