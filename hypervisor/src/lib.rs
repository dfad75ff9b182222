//! cube-hypervisor: a small virtual machine monitor on KVM for one container sandbox.
//!
//! [`run`] is the program. A machine is put together in [`builder`], its vCPUs run in [`vcpu`],
//! its devices are served by [`machine`].

pub mod boot;
pub mod builder;
pub mod bus;
pub mod cli;
pub mod console;
pub mod control;
pub mod cpu;
pub mod descriptors;
pub mod devices;
pub mod ending;
pub mod exits;
mod internal_error;
pub mod io_apic;
pub mod kvm;
pub mod kvm_stats;
mod logger;
pub mod machine;
pub mod memory;
mod run;
pub mod serial;
mod signals;
pub mod slots;
pub mod vcpu;
pub mod virtio;
pub mod vm;

pub use run::run;

use std::error::Error;

/// An error and its causes, in one line.
pub fn one_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line.replace('\n', " ")
}
