//! Guests for the tests, and the hypervisor as its users start it.
//!
//! A guest is a kernel of a few instructions ([`tiny_kernel`]), a Linux with a script ([`Files::linux`]), one with a
//! shell that the test speaks to ([`Shell`]), or one whose init is the test's own program ([`twin`]).

#![allow(dead_code, missing_docs, unused_imports)]

mod alone;
mod cases;
mod initramfs;
mod measure;
mod owned;
mod shell;
mod tiny_kernel;
pub mod twin;

use std::path::PathBuf;
use std::process::Command;

pub use alone::{Alone, Ended, Files, merged};
pub use cases::{Arguments, Case, run_cases};
pub use initramfs::Initramfs;
pub use measure::report;
pub use owned::Owned;
pub use shell::Shell;
pub use tiny_kernel::{code, kernel};

/// The guest's Linux, which `tests/run-all` names.
pub fn linux() -> PathBuf {
    std::env::var_os("CUBE_KERNEL")
        .expect("CUBE_KERNEL names the guest kernel; tests/run-all sets it")
        .into()
}

/// The program under test: the installed one, if there is one.
pub fn hypervisor() -> Command {
    let program = std::env::var_os("CUBE_HYPERVISOR")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_cube-hypervisor").into());
    Command::new(program)
}

/// Whether there is a KVM to run on; a test that needs one says so and ends otherwise.
pub fn has_kvm(test: &str) -> bool {
    let has = std::env::var_os("CUBE_TEST_KVM").is_some();
    if !has {
        println!("{test}: not run, it needs CUBE_TEST_KVM=1 and CUBE_KERNEL");
    }
    has
}
