//! Starting another process in a container.
//!
//! Not by libcontainer's tenant builder: in version 0.7 that one leaves out the container's filter
//! for system calls and does not enter its user namespace.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use libcontainer::capabilities;
use libcontainer::seccomp::initialize_seccomp;
use libcontainer::syscall::Syscall;
use libcontainer::syscall::syscall::create_syscall;
use nix::fcntl::OFlag;
use nix::sched::CloneFlags;
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Gid, Uid};
use oci_spec::runtime::{LinuxPersonalityDomain, LinuxSeccomp, Process};

use super::child::{ChildError, Control};
use super::create::{give_streams, guest_id};
use super::executor::{Program, in_words};
use super::{EXEC_BASE, ExecBase, ExecOrder, priority, terminal};
use crate::cgroup::Cgroup;
use crate::spec;

/// Starts the process. Returns its PID, once it has become the user's program.
pub fn exec(
    order: &ExecOrder,
    document: &[u8],
    init: OwnedFd,
    control: &Control,
) -> Result<i32, ChildError> {
    let mut process: Process = spec::read(document)
        .map_err(|e| ChildError::Invalid(format!("cannot read the process object: {e}")))?;
    spec::adapt_process(&mut process, order.terminal.is_some())
        .map_err(|e| ChildError::Invalid(e.to_string()))?;
    let base = read_base(&order.dir)?;

    let affinity = process.exec_cpu_affinity().as_ref();
    priority::stay_on(affinity.and_then(|a| a.initial().as_deref()))?;
    Cgroup::existing(&order.cgroup)
        .join(order.init)
        .map_err(|e| {
            ChildError::failed(
                "cannot join the container's cgroup",
                crate::error::chain(&e),
            )
        })?;
    priority::stay_on(affinity.and_then(|a| a.cpu_affinity_final().as_deref()))?;
    let syscall = create_syscall();
    inherit_from_here(&process, &base, syscall.as_ref())?;
    enter(init.as_fd(), &base)?;

    // Closed by the process's execve, so that its end means success.
    let (ours, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC)
        .map_err(|e| ChildError::failed("cannot make a pipe", e))?;
    // SAFETY: a helper has one thread, so the child may do whatever its parent might.
    match unsafe { nix::unistd::fork() }
        .map_err(|e| ChildError::failed("cannot fork", in_words(&e.into())))?
    {
        ForkResult::Child => {
            drop(ours);
            let error = become_process(&process, &base, order.terminal, control, syscall.as_ref());
            control.failed(&in_exec(error));
            // A byte says that the failure has been reported.
            let _ = fs::File::from(theirs).write_all(&[1]);
            std::process::exit(1);
        }
        ForkResult::Parent { child } => {
            drop(theirs);
            let mut byte = [0];
            match fs::File::from(ours).read(&mut byte) {
                Ok(0) => Ok(child.as_raw()),
                Ok(_) => Err(ChildError::Reported),
                Err(e) => Err(ChildError::failed("cannot read from the new process", e)),
            }
        }
    }
}

/// As runc words it.
fn in_exec(error: ChildError) -> ChildError {
    const WHERE: &str = "exec failed: unable to start container process";
    match error {
        ChildError::Invalid(message) => ChildError::Invalid(format!("{WHERE}: {message}")),
        ChildError::Failed(message) => ChildError::Failed(format!("{WHERE}: {message}")),
        ChildError::Reported => error,
    }
}

fn read_base(dir: &Path) -> Result<ExecBase, ChildError> {
    let read =
        || -> io::Result<ExecBase> { Ok(serde_json::from_slice(&fs::read(dir.join(EXEC_BASE))?)?) };
    read().map_err(|e| ChildError::failed("cannot read what was kept of the container", e))
}

/// What a process inherits and what takes the guest's own rights to set.
fn inherit_from_here(
    process: &Process,
    base: &ExecBase,
    syscall: &dyn Syscall,
) -> Result<(), ChildError> {
    if let Some(score) = process.oom_score_adj() {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|e| ChildError::failed("cannot set process.oomScoreAdj", e))?;
    }
    let owner = guest_id(base.uid_mappings.as_deref(), process.user().uid());
    give_streams(owner)?;
    for limit in process.rlimits().iter().flatten() {
        syscall
            .set_rlimit(limit)
            .map_err(|e| ChildError::failed(format_args!("cannot set {:?}", limit.typ()), e))?;
    }
    Ok(())
}

/// Enters the namespaces of the container's init; the PID namespace is the next child's.
fn enter(init: BorrowedFd<'_>, base: &ExecBase) -> Result<(), ChildError> {
    // Nothing in the container may look into this process while it is on its way.
    nix::sys::prctl::set_dumpable(false)
        .map_err(|e| ChildError::failed("cannot hide from the container", e))?;
    let flags = CloneFlags::from_bits_retain(base.namespaces);
    nix::sched::setns(init, flags).map_err(|e| {
        ChildError::failed(
            "cannot enter the container's namespaces",
            in_words(&e.into()),
        )
    })?;
    if flags.contains(CloneFlags::CLONE_NEWUSER) {
        nix::unistd::setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))
            .and_then(|()| {
                nix::unistd::setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))
            })
            .map_err(|e| {
                ChildError::failed("cannot become the container's root", in_words(&e.into()))
            })?;
    }
    Ok(())
}

/// The child: from the container's root to the user's program. Returns only an error.
fn become_process(
    process: &Process,
    base: &ExecBase,
    terminal: Option<(u16, u16)>,
    control: &Control,
    syscall: &dyn Syscall,
) -> ChildError {
    match settle(process, base, terminal, control, syscall) {
        Err(error) => error,
        Ok(program) => ChildError::Invalid(format!(
            "exec: {:?}: {}",
            program.path(),
            in_words(&io::Error::from(program.run()))
        )),
    }
}

fn settle(
    process: &Process,
    base: &ExecBase,
    terminal: Option<(u16, u16)>,
    control: &Control,
    syscall: &dyn Syscall,
) -> Result<Program, ChildError> {
    let user = process.user();
    nix::unistd::setsid().map_err(|e| ChildError::failed("cannot start a session", e))?;
    priority::set(process, syscall)?;
    if let Some(size) = terminal {
        open_terminal(size, user.uid(), control)
            .map_err(|e| ChildError::failed("cannot open a terminal", in_words(&e)))?;
    }
    if let Some(personality) = &base.personality {
        let domain = match personality.domain() {
            LinuxPersonalityDomain::PerLinux => 0,
            LinuxPersonalityDomain::PerLinux32 => 8,
        };
        // SAFETY: personality(2) has no memory arguments.
        if unsafe { libc::personality(domain) } < 0 {
            return Err(ChildError::failed(
                "cannot set the personality",
                in_words(&io::Error::last_os_error()),
            ));
        }
    }
    if let Some(umask) = user.umask() {
        nix::sys::stat::umask(Mode::from_bits_truncate(umask));
    }
    let changed = nix::unistd::chdir(process.cwd());
    let gids: Vec<Gid> = user
        .additional_gids()
        .iter()
        .flatten()
        .map(|g| Gid::from_raw(*g))
        .collect();
    if !gids.is_empty() {
        syscall
            .set_groups(&gids)
            .map_err(|e| ChildError::failed("cannot set process.user.additionalGids", e))?;
    }
    let no_new_privileges = process.no_new_privileges() == Some(true);
    if no_new_privileges {
        nix::sys::prctl::set_no_new_privs()
            .map_err(|e| ChildError::failed("cannot set process.noNewPrivileges", e))?;
    }
    syscall
        .set_id(Uid::from_raw(user.uid()), Gid::from_raw(user.gid()))
        .map_err(|e| ChildError::failed("cannot set process.user", e))?;
    if !no_new_privileges {
        // Loading a filter is a privilege then: do it while there are privileges.
        filter(base.seccomp.as_ref())?;
    }
    capabilities::reset_effective(syscall)
        .and_then(|()| {
            let own = process.capabilities().as_ref();
            match own.or(base.capabilities.as_ref()) {
                Some(capabilities) => capabilities::drop_privileges(capabilities, syscall),
                None => Ok(()),
            }
        })
        .map_err(|e| ChildError::failed("cannot set process.capabilities", e))?;
    // Root may have been kept out where the user is let in.
    if changed.is_err() {
        nix::unistd::chdir(process.cwd()).map_err(|e| {
            ChildError::Invalid(format!(
                "chdir to cwd ({:?}) set in config.json failed: {}",
                process.cwd().display().to_string(),
                in_words(&e.into())
            ))
        })?;
    }
    let program = Program::find(process)?;
    if no_new_privileges {
        filter(base.seccomp.as_ref())?;
    }
    Ok(program)
}

fn filter(seccomp: Option<&LinuxSeccomp>) -> Result<(), ChildError> {
    match seccomp {
        None => Ok(()),
        Some(seccomp) => initialize_seccomp(seccomp)
            .map(drop)
            .map_err(|e| ChildError::failed("cannot load linux.seccomp", crate::error::chain(&e))),
    }
}

/// Opens a terminal in the container, makes it this session's own and the standard streams, and
/// hands its master to the agent.
fn open_terminal((columns, rows): (u16, u16), uid: u32, control: &Control) -> io::Result<()> {
    let master = terminal::open_master()?;
    let slave = terminal::slave_of(&master)?;
    nix::unistd::fchown(slave.as_raw_fd(), Some(Uid::from_raw(uid)), None)?;
    terminal::set_size(slave.as_fd(), columns, rows)?;
    control.terminal(master.as_fd())?;
    // SAFETY: the ioctl takes an integer.
    if unsafe { libc::ioctl(slave.as_raw_fd(), libc::TIOCSCTTY, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    for stream in 0..3 {
        nix::unistd::dup2(slave.as_raw_fd(), stream)?;
    }
    Ok(())
}
