//! The command line.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use lexopt::prelude::*;

/// What the user asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Print the help.
    Help,
    /// Print the version.
    Version,
    /// Run a machine.
    Run {
        /// Who says which one.
        source: Source,
        /// Whether to print how often the vCPUs came out, at the end.
        exit_counts: bool,
    },
}

/// Where the machine's configuration comes from.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    /// A JSON file.
    File(PathBuf),
    /// The first message on this inherited socket.
    Control(RawFd),
}

/// A command line that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// An unknown option, a missing value.
    #[error("Cannot read the command line: {0}; see --help")]
    Parse(#[from] lexopt::Error),
    /// Neither or both of two options.
    #[error("Give either --config FILE or --control-fd N; see --help")]
    Source,
}

/// What `--help` prints.
pub const HELP: &str = r#"cube-hypervisor: run one virtual machine on KVM

Usage:
  cube-hypervisor --config FILE [--exit-counts]
  cube-hypervisor --control-fd N [--exit-counts]

Options:
  --config FILE     run the machine that the JSON file describes
  --control-fd N    inherited SOCK_SEQPACKET socket; its first message, {"boot": {...}}, is the
                    machine's description, the others are requests while it runs. The machine
                    ends when the other end is closed.
  --exit-counts     print on stderr, at the end, how often the vCPUs came out and for what
  --version         print the version
  --help            print this

The machine's description, with what holds where a field is missing:
  {
    "kernel": "vmlinux",              x86-64 ELF image with a PVH entry note; required
    "initramfs": "initramfs.img",     none
    "cmdline": "console=hvc0 reboot=k panic=-1",
                                      empty; what describes the devices is appended
    "vcpus": 1,
    "memory_mib": 128,
    "disks": [                        none; vda, vdb, ... in this order
      {"path": "disk.img", "read_only": false, "serial": ""}
    ],
    "spare_disks": 0,                 disks to be attached while the machine runs
    "networks": [                     none; eth0, eth1, ... in this order
      {"tap": "tap0", "mac": "random", "mtu": "the TAP's"}
    ],
    "spare_networks": 0,              networks to be attached while the machine runs
    "shares": [                       none; in the guest: mount -t virtiofs TAG DIR
      {"tag": "share", "path": "/srv", "read_only": false, "mounts_only": false, "guest_owned": []}
    ],                                mounts_only: the guest changes only what is mounted below the
                                      path; guest_owned: names of directories there with mounts
                                      that nobody but the guest changes, so that it may cache them
    "vsock": {"cid": 3, "path": "vsock.sock"},
                                      none; the guest's connections to port P of the host reach
                                      the Unix socket PATH_P, and on PATH "CONNECT P\n" asks for
                                      one to the guest
    "entropy": true,                  a virtio-rng device
    "console": "ring"                 "ring": keep the console's end in memory; "stdio": write it
                                      to stdout and read stdin; "log": write its lines to stderr
  }
An unknown field is an error. Without "reboot=k panic=-1" a guest that panics stays as it is.

Exit status:
  0  the guest reset or switched itself off, or the machine was stopped from outside
  1  the hypervisor or the host failed
  2  the command line or the machine's description cannot be used; nothing was started
  3  the guest kernel reported a panic and reset
  4  the guest's processor shut down (triple fault) or came into a state that KVM cannot run
"#;

/// Reads the arguments after the program's name.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, CliError> {
    let mut parser = lexopt::Parser::from_args(args);
    let mut sources = Vec::new();
    let mut exit_counts = false;
    while let Some(arg) = parser.next()? {
        match arg {
            Long("help") | Short('h') => return Ok(Command::Help),
            Long("version") | Short('V') => return Ok(Command::Version),
            Long("config") => sources.push(Source::File(parser.value()?.into())),
            Long("control-fd") => sources.push(Source::Control(parser.value()?.parse()?)),
            Long("exit-counts") => exit_counts = true,
            other => return Err(other.unexpected().into()),
        }
    }
    match <[Source; 1]>::try_from(sources) {
        Ok([source]) => Ok(Command::Run {
            source,
            exit_counts,
        }),
        Err(_) => Err(CliError::Source),
    }
}

#[cfg(test)]
mod tests {
    use cube_hypervisor_api::ExitStatus;

    use super::*;

    fn parse_words(words: &str) -> Result<Command, CliError> {
        parse(words.split_whitespace().map(OsString::from))
    }

    #[test]
    fn a_machine_comes_from_a_file_or_from_a_socket() {
        let file = parse_words("--config vm.json --exit-counts").unwrap();
        assert_eq!(
            file,
            Command::Run {
                source: Source::File("vm.json".into()),
                exit_counts: true
            }
        );
        let socket = parse_words("--control-fd 3").unwrap();
        assert_eq!(
            socket,
            Command::Run {
                source: Source::Control(3),
                exit_counts: false
            }
        );
    }

    #[test]
    fn what_cannot_be_used_is_an_error_that_points_to_the_help() {
        for words in [
            "",
            "--config",
            "--control-fd x",
            "--config a --control-fd 3",
            "--frobnicate",
            "vm.json",
        ] {
            let error = parse_words(words).unwrap_err().to_string();
            assert!(error.contains("--help"), "{words}: {error}");
        }
    }

    #[test]
    fn the_help_names_every_exit_status() {
        for code in 0.. {
            let named = HELP.contains(&format!("\n  {code}  "));
            assert_eq!(named, ExitStatus::from_code(code).is_some(), "{code}");
            if !named {
                break;
            }
        }
    }
}
