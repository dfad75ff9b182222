//! The program: from the command line to the exit status.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cube_hypervisor_api::{ExitStatus, VmConfig};

use crate::builder::{self, BuildError};
use crate::cli::{self, CliError, Command, Source};
use crate::control::{Control, OwnerError};
use crate::devices::OnCrowd;
use crate::ending::{End, Ending};
use crate::machine::Machine;
use crate::signals::Signals;
use crate::{logger, one_line};

/// Why the program ends without a machine having run, or with one that could not go on.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Cli(#[from] CliError),
    #[error("Cannot read {}: check the path", path.display())]
    ReadConfig {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("Cannot use {}: correct it, --help shows the fields", path.display())]
    ParseConfig {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Owner(#[from] OwnerError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("Cannot prepare the machine's end: raise the limit of open files")]
    Prepare(#[source] io::Error),
    #[error("The event loop failed")]
    EventLoop(#[source] event_manager::Error),
}

impl RunError {
    fn status(&self) -> ExitStatus {
        match self {
            Self::Cli(_) | Self::ReadConfig { .. } | Self::ParseConfig { .. } => {
                ExitStatus::BadConfiguration
            }
            Self::Owner(e) => e.status(),
            Self::Build(e) => e.status(),
            Self::Prepare(_) | Self::EventLoop(_) => ExitStatus::VmmError,
        }
    }
}

/// Does what the arguments (without the program's name) ask for. Whatever goes wrong is one line
/// on standard error.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitStatus {
    keep_memory_small();
    logger::start();
    match run_command(args) {
        Ok(status) => status,
        Err(e) => {
            report(&one_line(&e));
            e.status()
        }
    }
}

fn run_command(args: impl IntoIterator<Item = OsString>) -> Result<ExitStatus, RunError> {
    match cli::parse(args)? {
        Command::Help => print(cli::HELP),
        Command::Version => print(concat!("cube-hypervisor ", env!("CARGO_PKG_VERSION"), "\n")),
        Command::Run {
            source,
            exit_counts,
        } => {
            let end = match source {
                Source::File(path) => run_alone(&path, exit_counts)?,
                Source::Control(fd) => run_owned(fd, exit_counts)?,
            };
            if end.status != ExitStatus::GuestReset {
                report(&end.message);
            }
            return Ok(end.status);
        }
    }
    Ok(ExitStatus::GuestReset)
}

/// A machine from a file. What it holds is not given back piece by piece: the process ends.
fn run_alone(path: &Path, exit_counts: bool) -> Result<End, RunError> {
    let config = read_config(path)?;
    let ending = Arc::new(Ending::new().map_err(RunError::Prepare)?);
    // Signals first: they are blocked in every thread that starts from here on.
    let signals = Signals::take_over(Arc::clone(&ending)).map_err(RunError::Prepare)?;
    // Nobody is there to ask the guest to forget inodes.
    let on_crowd: OnCrowd = Arc::new(|_, _| {});
    let mut machine = ManuallyDrop::new(builder::build(&config, &ending, &on_crowd, exit_counts)?);
    machine.add(Arc::new(Mutex::new(signals)));
    serve(&mut machine, &ending, exit_counts)
}

/// A machine that its owner configures and watches.
fn run_owned(fd: i32, exit_counts: bool) -> Result<End, RunError> {
    let (owner, config) = Control::accept(fd)?;
    let ending = Arc::new(Ending::new().map_err(RunError::Prepare)?);
    let started =
        builder::build(&config, &ending, &owner.on_crowd(), exit_counts).map_err(RunError::from);
    let mut machine = match started {
        Ok(machine) => ManuallyDrop::new(machine),
        Err(e) => {
            owner.refuse(e.status(), &one_line(&e));
            return Err(e);
        }
    };
    let control = owner.start(&machine, &ending)?;
    machine.add(control.clone());
    let end = serve(&mut machine, &ending, exit_counts);
    let last = match &end {
        Ok(end) => end.clone(),
        Err(e) => End {
            status: e.status(),
            message: one_line(e),
        },
    };
    control
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .tell_end(&last);
    end
}

fn serve(machine: &mut Machine, ending: &Arc<Ending>, exit_counts: bool) -> Result<End, RunError> {
    let end = machine.run(ending).map_err(RunError::EventLoop);
    if exit_counts {
        eprintln!("{}", machine.exit_table());
    }
    end
}

fn read_config(path: &Path) -> Result<VmConfig, RunError> {
    let text = fs::read(path).map_err(|source| RunError::ReadConfig {
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| RunError::ParseConfig {
        path: path.to_owned(),
        source,
    })
}

fn print(text: &str) {
    // A reader that went away has read enough.
    let _ = io::stdout().write_all(text.as_bytes());
}

fn report(message: &str) {
    eprintln!("cube-hypervisor: {message}");
}

/// One arena for all threads, and large blocks back to the host at once.
fn keep_memory_small() {
    // SAFETY: These calls only set parameters of the allocator; there is one thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 << 10);
    }
}
