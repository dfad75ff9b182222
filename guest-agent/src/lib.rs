//! cube-agent: PID 1 of the microVM.
//!
//! [`init`] turns a bare kernel into a machine that containers can run in, [`serve`] answers the
//! shim over one connection to the host, [`service`] maps each call to what carries it out:
//! [`container`] (and, for making processes, [`helper`]) or [`configure`].

pub mod cgroup;
pub mod configure;
pub mod container;
pub mod disks;
pub mod error;
pub mod helper;
pub mod init;
pub mod inside;
pub mod logger;
pub mod process;
pub mod reaper;
pub mod renumber;
pub mod rootfs;
pub mod serve;
pub mod service;
pub mod spec;
pub mod stdio;
pub mod transport;
