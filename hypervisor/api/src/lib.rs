//! What cube-hypervisor is told and what it answers.
//!
//! [`config`] is the machine: the same structure comes from a JSON file when the hypervisor runs
//! alone (`--config vm.json`) and from the shim as the first message on the control socket.
//! [`control`] is the conversation on that socket, [`exit`] what the process's exit status means.

pub mod config;
pub mod control;
pub mod exit;

pub use config::VmConfig;
pub use exit::ExitStatus;
