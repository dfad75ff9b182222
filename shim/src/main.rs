//! `containerd-shim-cube-rs`: between containerd and a sandbox's microVM.
//!
//! containerd runs it as `… start`, which leaves a daemon for the sandbox behind ([`start`],
//! [`daemon`]), and as `… delete` to clean up after one that died ([`delete`]). The daemon serves
//! the task API ([`service`]) for a sandbox ([`sandbox`]): it brings up the machine
//! ([`machine`], [`hypervisor`]), mounts what the containers need ([`mount`], [`spec`]) and
//! carries out what is asked of them in the guest ([`tasks`], [`container`], [`guest`]).

mod bootstrap;
mod config;
mod container;
mod daemon;
mod delete;
mod disks;
mod flags;
mod guest;
mod hooks;
mod host_cgroup;
mod hypervisor;
mod info;
mod logger;
mod machine;
mod mount;
mod options;
mod pod;
mod process_id;
mod processors;
mod publisher;
mod room;
mod rootfs;
mod sandbox;
mod sandbox_service;
mod service;
mod sizing;
mod socket;
mod spec;
mod start;
mod state;
mod stats;
mod stdio;
mod task_error;
mod tasks;
mod undo;
mod volumes;

use std::fmt::Display;
use std::process::ExitCode;

use flags::{Action, Flags};

fn main() -> ExitCode {
    one_heap();
    match run() {
        Ok(code) => code,
        Err(message) => {
            // containerd shows it to the user.
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, String> {
    fn text(error: impl Display) -> String {
        error.to_string()
    }
    let flags = Flags::parse(std::env::args_os().skip(1)).map_err(text)?;
    if flags.version {
        println!(
            "{} version {}",
            env!("CARGO_PKG_NAME"),
            env!("CARGO_PKG_VERSION")
        );
        return Ok(ExitCode::SUCCESS);
    }
    if flags.info {
        let input = start::read_input().map_err(text)?;
        info::info(&input).map_err(text)?;
        return Ok(ExitCode::SUCCESS);
    }
    match flags.action {
        Some(Action::Start) => start::start(&flags).map_err(text),
        Some(Action::Delete) => {
            delete::delete(&flags).map_err(text)?;
            Ok(ExitCode::SUCCESS)
        }
        None => Err("This program is started by containerd, as start or delete: ctr run --runtime io.containerd.cube.v1 …".into()),
    }
}

/// The C library makes a heap for every thread that allocates, unless told not to.
fn one_heap() {
    // SAFETY: the call takes two numbers; it is made before there is another thread.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}
