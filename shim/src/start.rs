//! `start`: finds the sandbox's daemon or becomes its parent, and prints its address.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::unistd::{ForkResult, Pid, fork, setsid};

use crate::bootstrap::{
    BootstrapError, Environment, GRPC_ADDRESS, MAX_INPUT, StartParams, TTRPC_ADDRESS,
};
use crate::daemon::Daemon;
use crate::flags::Flags;
use crate::host_cgroup::{CgroupError, HostCgroup};
use crate::logger;
use crate::options::{Options, OptionsError};
use crate::socket::{self, Bound, SocketError};
use crate::spec::{Spec, SpecError};

/// Why no daemon was started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The bootstrap protocol.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The runtime's options.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The bundle's specification.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The daemon's socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The cgroup for the shim.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Core scheduling was asked for.
    #[error("SCHED_CORE asks for core scheduling, which this kernel does not have or allow: {0}")]
    CoreScheduling(io::Error),
    /// Anything else of the host.
    #[error("Cannot {0}: {1}")]
    Host(&'static str, io::Error),
}

/// Carries out `start`. It returns twice, like fork(2): in the process that containerd waits for,
/// and, when the sandbox has ended, in the daemon.
pub fn start(flags: &Flags) -> Result<ExitCode, StartError> {
    let environment = Environment {
        ttrpc_address: std::env::var(TTRPC_ADDRESS).unwrap_or_default(),
        grpc_address: std::env::var(GRPC_ADDRESS).unwrap_or_default(),
    };
    let params = StartParams::new(&read_input()?, flags, environment)?;
    let bundle = match &flags.bundle {
        Some(bundle) => bundle.clone(),
        None => std::env::current_dir()
            .map_err(|e| StartError::Host("find the bundle, the working directory", e))?,
    };
    let sandbox = sandbox_of(&bundle, &params.id)?;
    let options = Options::parse(params.options.as_ref())?;
    let path = socket::path(
        &params.socket_dir,
        &params.grpc_address,
        &params.namespace,
        &sandbox,
    )?;
    let address = socket::address(&path);
    // containerd 1.6 and 1.7 look here when they are started again.
    std::fs::write(bundle.join("address"), &address)
        .map_err(|e| StartError::Host("write the file address in the bundle", e))?;
    let answer = params.answer(&address)?;
    let mut gate = None;
    if let Bound::Here(listener) = socket::bind_or_join(&path)? {
        let daemon = Daemon {
            namespace: params.namespace.clone(),
            sandbox,
            options: options.clone(),
            ttrpc_address: params.ttrpc_address.clone(),
            listener,
            socket: path.clone(),
        };
        match daemonize(daemon, &bundle, &options, params.debug)
            .inspect_err(|_| remove_socket(&path))?
        {
            Forked::Parent(opener) => gate = Some(opener),
            Forked::Daemon(code) => return Ok(code),
        }
    }
    let mut stdout = io::stdout().lock();
    let told = stdout.write_all(&answer).and_then(|()| stdout.flush());
    if let Some(mut gate) = gate {
        // If containerd is gone, nobody would ever ask the daemon for anything, nor to end: it never begins.
        told.and_then(|()| gate.write_all(b"1"))
            .inspect_err(|_| remove_socket(&path))
            .map_err(|e| StartError::Host("tell containerd of the daemon", e))?;
    } else {
        told.map_err(|e| StartError::Host("write the answer to standard output", e))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn remove_socket(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// What containerd writes to standard input; nothing if a person started us.
pub fn read_input() -> Result<Vec<u8>, StartError> {
    let mut input = Vec::new();
    let stdin = io::stdin();
    if nix::unistd::isatty(stdin.as_raw_fd()).unwrap_or(false) {
        return Ok(input);
    }
    stdin
        .lock()
        .take(MAX_INPUT)
        .read_to_end(&mut input)
        .map_err(|e| StartError::Host("read standard input", e))?;
    Ok(input)
}

/// The sandbox of the container in this bundle: its group, or itself. With the sandbox API there
/// may be no specification yet.
fn sandbox_of(bundle: &Path, id: &str) -> Result<String, StartError> {
    match Spec::read(bundle) {
        Ok(spec) => {
            let group = spec.group().unwrap_or(id).to_owned();
            crate::bootstrap::check_name("group", &group)?;
            Ok(group)
        }
        Err(SpecError::Read(_, e)) if e.kind() == io::ErrorKind::NotFound => Ok(id.to_owned()),
        Err(e) => Err(e.into()),
    }
}

/// Where a fork has led to.
enum Forked {
    /// The process that containerd waits for. The daemon begins when something is written here, and ends if it is closed.
    Parent(File),
    /// The daemon, at its end.
    Daemon(ExitCode),
}

/// Forks the daemon. There is no exec: the daemon is this program, and all that it needs is here.
fn daemonize(
    daemon: Daemon,
    bundle: &Path,
    options: &Options,
    debug: bool,
) -> Result<Forked, StartError> {
    let core_scheduling = std::env::var_os("SCHED_CORE").is_some_and(|value| !value.is_empty());
    if core_scheduling {
        // Tried here, where a failure can be reported; the daemon inherits it.
        schedule_cores()?;
    }
    // Through this pipe the daemon waits until its surroundings are as they must be.
    let (gate, opener) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|e| StartError::Host("make a pipe", e.into()))?;
    // SAFETY: this process has one thread, so the child may do whatever this one may.
    match unsafe { fork() }.map_err(|e| StartError::Host("fork the daemon", e.into()))? {
        ForkResult::Parent { child } => {
            drop(gate);
            confine(child, options)?;
            Ok(Forked::Parent(File::from(opener)))
        }
        ForkResult::Child => {
            drop(opener);
            let mut go = [0];
            // The parent failed, and has said why.
            if File::from(gate).read(&mut go).is_ok_and(|n| n == 0) {
                return Ok(Forked::Daemon(ExitCode::FAILURE));
            }
            logger::to_containerd(bundle, &daemon.namespace, &daemon.sandbox, debug);
            match detach().and_then(|()| daemon.run()) {
                Ok(()) => Ok(Forked::Daemon(ExitCode::SUCCESS)),
                Err(e) => {
                    log::error!("The shim has failed: {e}");
                    Ok(Forked::Daemon(ExitCode::FAILURE))
                }
            }
        }
    }
}

/// A cookie of their own for the shim and all that it starts: no other process shares a core with
/// them.
fn schedule_cores() -> Result<(), StartError> {
    const PR_SCHED_CORE: libc::c_int = 62;
    const PR_SCHED_CORE_CREATE: libc::c_ulong = 1;
    const SCOPE_THREAD_GROUP: libc::c_ulong = 1;
    // SAFETY: the call takes numbers only.
    let result = unsafe {
        libc::prctl(
            PR_SCHED_CORE,
            PR_SCHED_CORE_CREATE,
            0_u64,
            SCOPE_THREAD_GROUP,
            0_u64,
        )
    };
    if result != 0 {
        return Err(StartError::CoreScheduling(io::Error::last_os_error()));
    }
    Ok(())
}

/// Puts the daemon into the cgroup that the options name, and makes it a little likelier to be
/// ended for memory than containerd, whose child this process is.
fn confine(daemon: Pid, options: &Options) -> Result<(), StartError> {
    const MOST: i32 = 1000;
    if let Some(path) = &options.shim_cgroup {
        let cgroup = HostCgroup::locate(path)?;
        let mut undo = crate::undo::Undo::new();
        let joined = cgroup
            .create(&mut undo)
            .and_then(|()| cgroup.add(u32::try_from(daemon.as_raw()).unwrap_or_default()));
        joined?;
        // It belongs to whoever named it, and may hold other shims.
        std::mem::forget(undo);
    }
    let file = |pid: Pid| PathBuf::from(format!("/proc/{pid}/oom_score_adj"));
    let parent = std::fs::read_to_string(file(nix::unistd::getppid()))
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok());
    if let Some(score) = parent {
        std::fs::write(file(daemon), (score + 1).min(MOST).to_string())
            .map_err(|e| StartError::Host("set the daemon's oom_score_adj", e))?;
    }
    Ok(())
}

/// Leaves containerd's session, process group and standard streams, and takes as many descriptors as
/// it may. It adopts no orphans, as runc's shim has to: what a hook or a logging program leaves
/// behind is for the host's init to collect.
fn detach() -> io::Result<()> {
    setsid()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for stream in 0..=2 {
        nix::unistd::dup2(null.as_raw_fd(), stream)?;
    }
    let (_, most) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)?;
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, most, most)?;
    Ok(())
}
