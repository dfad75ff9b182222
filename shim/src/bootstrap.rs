//! How containerd says what a shim is started for, and how it wants the answer.
//!
//! From 2.3 on it writes a protobuf `BootstrapParams` to standard input and reads a
//! `BootstrapResult`; before, it writes the runtime's options (an `Any`) or nothing, puts the rest
//! into flags and environment, and takes a plain address for a shim that serves task v2.

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use protobuf::Message;
use protobuf::well_known_types::any::Any;

use crate::flags::Flags;

/// What is read from standard input at most; containerd's own bound.
pub const MAX_INPUT: u64 = 10 << 20;

/// The environment variable with the socket for events.
pub const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

/// The environment variable with the socket of the API, from containerd 1.7 on.
pub const GRPC_ADDRESS: &str = "GRPC_ADDRESS";

/// Where sockets are unless containerd names another directory.
pub const SOCKET_DIR: &str = "/run/containerd/s";

/// How containerd speaks to the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Flags and environment; the answer is a plain address, which every version reads as task v2.
    Plain,
    /// `BootstrapParams` and `BootstrapResult`, task v3.
    Bootstrap,
}

/// Why the input of `start` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The instance is not named.
    #[error("The flag -{0} is missing: this program is started by containerd")]
    MissingFlag(&'static str),
    /// Not a name that containerd allows: in a path it could lead elsewhere.
    #[error("The {0} {1:?} cannot be part of a path")]
    BadName(&'static str, String),
    /// Nowhere to send events to.
    #[error(
        "containerd's ttrpc address is missing: the environment variable {TTRPC_ADDRESS} or the bootstrap parameters must name it"
    )]
    NoTtrpcAddress,
    /// The answer cannot be encoded.
    #[error("Cannot encode the answer to start: {0}")]
    Encode(protobuf::Error),
}

/// What `start` was told, whatever the dialect.
#[derive(Clone, Debug, PartialEq)]
pub struct StartParams {
    /// The dialect to answer in.
    pub dialect: Dialect,
    /// The container.
    pub id: String,
    /// containerd's namespace of the container.
    pub namespace: String,
    /// Where events go.
    pub ttrpc_address: String,
    /// containerd's API socket; part of the name of the shim's socket.
    pub grpc_address: String,
    /// The directory for the shim's socket.
    pub socket_dir: String,
    /// Whether debug messages are wanted.
    pub debug: bool,
    /// The runtime's options.
    pub options: Option<Any>,
}

/// The two environment variables that matter, read by the caller.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// [`TTRPC_ADDRESS`].
    pub ttrpc_address: String,
    /// [`GRPC_ADDRESS`].
    pub grpc_address: String,
}

impl StartParams {
    /// Makes sense of standard input, flags and environment.
    pub fn new(
        input: &[u8],
        flags: &Flags,
        environment: Environment,
    ) -> Result<Self, BootstrapError> {
        check_name("id", &flags.id)?;
        check_name("namespace", &flags.namespace)?;
        let params = match bootstrap_params(input, flags) {
            Some(params) => from_bootstrap(params, flags),
            None => from_flags(input, flags, environment),
        };
        if params.ttrpc_address.is_empty() {
            return Err(BootstrapError::NoTtrpcAddress);
        }
        Ok(params)
    }

    /// The answer on standard output for a daemon that listens on `address` (`unix://…`).
    pub fn answer(&self, address: &str) -> Result<Vec<u8>, BootstrapError> {
        match self.dialect {
            Dialect::Plain => Ok(address.as_bytes().to_vec()),
            Dialect::Bootstrap => BootstrapResult {
                version: 3,
                address: address.to_owned(),
                protocol: "ttrpc".to_owned(),
                ..Default::default()
            }
            .write_to_bytes()
            .map_err(BootstrapError::Encode),
        }
    }
}

/// Refuses names that would lead out of the directories made from them.
pub fn check_name(what: &'static str, name: &str) -> Result<(), BootstrapError> {
    if name.is_empty() {
        return Err(BootstrapError::MissingFlag(what));
    }
    if name.contains(['/', '\0']) || name == "." || name == ".." {
        return Err(BootstrapError::BadName(what, name.to_owned()));
    }
    Ok(())
}

/// An `Any` of options parses as `BootstrapParams`, too; only a message that names the very
/// instance that the flags name is one.
fn bootstrap_params(input: &[u8], flags: &Flags) -> Option<BootstrapParams> {
    if input.is_empty() {
        return None;
    }
    BootstrapParams::parse_from_bytes(input)
        .ok()
        .filter(|p| p.instance_id == flags.id && p.namespace == flags.namespace)
}

fn from_bootstrap(params: BootstrapParams, flags: &Flags) -> StartParams {
    /// `LOG_LEVEL_DEBUG`; more verbose levels are below it.
    const DEBUG: i32 = -4;
    StartParams {
        dialect: Dialect::Bootstrap,
        id: params.instance_id,
        namespace: params.namespace,
        ttrpc_address: params.containerd_ttrpc_address,
        grpc_address: params.containerd_grpc_address,
        socket_dir: params
            .socket_dir
            .filter(|dir| !dir.is_empty())
            .unwrap_or_else(|| SOCKET_DIR.to_owned()),
        debug: flags.debug || params.log_level.value() <= DEBUG,
        options: params
            .extensions
            .into_iter()
            .filter_map(|extension| extension.value.into_option())
            .find(crate::options::is_known),
    }
}

fn from_flags(input: &[u8], flags: &Flags, environment: Environment) -> StartParams {
    StartParams {
        dialect: Dialect::Plain,
        id: flags.id.clone(),
        namespace: flags.namespace.clone(),
        ttrpc_address: environment.ttrpc_address,
        grpc_address: if flags.address.is_empty() {
            environment.grpc_address
        } else {
            flags.address.clone()
        },
        socket_dir: SOCKET_DIR.to_owned(),
        debug: flags.debug,
        options: Any::parse_from_bytes(input)
            .ok()
            .filter(|any| !any.type_url.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Flags {
        Flags {
            id: "web".into(),
            namespace: "default".into(),
            address: "/run/containerd/containerd.sock".into(),
            ..Default::default()
        }
    }

    fn environment() -> Environment {
        Environment {
            ttrpc_address: "/run/containerd/containerd.sock.ttrpc".into(),
            grpc_address: String::new(),
        }
    }

    /// What containerd 2.3 and later write: field numbers and wire types by hand, so that the
    /// generated code is not its own judge.
    fn recorded_bootstrap(id: &str) -> Vec<u8> {
        fn string(field: u8, text: &str, out: &mut Vec<u8>) {
            out.extend([field << 3 | 2, u8::try_from(text.len()).unwrap()]);
            out.extend(text.as_bytes());
        }
        let mut bytes = Vec::new();
        string(1, id, &mut bytes);
        string(2, "default", &mut bytes);
        // log_level = LOG_LEVEL_DEBUG (-4): a varint of ten bytes.
        bytes.extend([
            0x18, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
        ]);
        string(4, "v2.4.2", &mut bytes);
        string(5, "/run/c.sock.ttrpc", &mut bytes);
        string(6, "/run/c.sock", &mut bytes);
        string(7, "/usr/bin/containerd", &mut bytes);
        let mut any = Vec::new();
        string(1, "containerd.runc.v1.Options", &mut any);
        string(2, "\u{1a}\u{6}/shims", &mut any);
        let mut extension = vec![0x0a, u8::try_from(any.len()).unwrap()];
        extension.extend(any);
        bytes.extend([0x42, u8::try_from(extension.len()).unwrap()]);
        bytes.extend(extension);
        string(9, "/run/other/s", &mut bytes);
        bytes
    }

    #[test]
    fn bootstrap_parameters_of_this_instance_are_taken_and_answered_in_kind() {
        let params =
            StartParams::new(&recorded_bootstrap("web"), &flags(), Environment::default()).unwrap();
        assert_eq!(params.dialect, Dialect::Bootstrap);
        assert_eq!(params.ttrpc_address, "/run/c.sock.ttrpc");
        assert_eq!(params.grpc_address, "/run/c.sock");
        assert_eq!(params.socket_dir, "/run/other/s");
        assert!(params.debug);
        let options = params.options.as_ref().unwrap();
        assert_eq!(options.type_url, "containerd.runc.v1.Options");
        assert_eq!(
            params.answer("unix:///s").unwrap(),
            b"\x08\x03\x12\x09unix:///s\x1a\x05ttrpc"
        );
    }

    #[test]
    fn an_any_with_options_is_the_old_dialect_and_gets_a_plain_address() {
        let input = b"\x0a\x1acontainerd.runc.v1.Options\x12\x08\x1a\x06/shims";
        let params = StartParams::new(input, &flags(), environment()).unwrap();
        assert_eq!(params.dialect, Dialect::Plain);
        assert_eq!(
            params.options.as_ref().unwrap().type_url,
            "containerd.runc.v1.Options"
        );
        assert_eq!(params.socket_dir, SOCKET_DIR);
        assert_eq!(params.answer("unix:///s").unwrap(), b"unix:///s");
    }

    #[test]
    fn a_message_for_another_instance_is_no_bootstrap() {
        let params = StartParams::new(&recorded_bootstrap("db"), &flags(), environment()).unwrap();
        assert_eq!(params.dialect, Dialect::Plain);
        assert_eq!(params.id, "web");
    }

    #[test]
    fn empty_and_meaningless_input_is_the_old_dialect_without_options() {
        for input in [&b""[..], b"\xff\xff\xff"] {
            let params = StartParams::new(input, &flags(), environment()).unwrap();
            assert_eq!((params.dialect, params.options), (Dialect::Plain, None));
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for id in ["..", "a/b", ""] {
            let flags = Flags {
                id: id.into(),
                ..flags()
            };
            assert!(
                StartParams::new(b"", &flags, environment()).is_err(),
                "{id:?}"
            );
        }
    }

    #[test]
    fn without_a_ttrpc_address_there_is_no_start() {
        assert!(matches!(
            StartParams::new(b"", &flags(), Environment::default()),
            Err(BootstrapError::NoTtrpcAddress)
        ));
    }
}
