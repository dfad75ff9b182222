//! `-info`: what this runtime is and can do.
//!
//! containerd runs it when a client asks for a runtime's features, and from 2.2 on before creates,
//! with the runtime's options on standard input, or nothing.

use std::collections::HashMap;
use std::io::{self, Write};

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use cube_agent_protocol::MOUNT_FLAGS;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use serde_json::{Value, json};

use crate::config::{Config, ConfigError};
use crate::options::{Options, OptionsError};

/// The name that containerd knows the runtime by.
const NAME: &str = "io.containerd.cube.v1";

/// The type of the runtime-spec's features object in containerd's typeurl notation.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// Standard input is no message.
    #[error("Cannot decode the runtime's options on standard input: {0}")]
    Decode(protobuf::Error),
    /// The options cannot be used.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The settings in them cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Standard output.
    #[error("Cannot write the runtime's description to standard output: {0}")]
    Answer(io::Error),
}

/// Prints a `RuntimeInfo`. `input` is what stood on standard input: the runtime's options as an
/// `Any`, which are checked, and repeated in the answer; or nothing.
pub fn info(input: &[u8]) -> Result<(), InfoError> {
    let bytes = runtime_info(input)?
        .write_to_bytes()
        .map_err(|e| InfoError::Answer(e.into()))?;
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(&bytes)
        .and_then(|()| stdout.flush())
        .map_err(InfoError::Answer)
}

fn runtime_info(input: &[u8]) -> Result<RuntimeInfo, InfoError> {
    let options = Any::parse_from_bytes(input).map_err(InfoError::Decode)?;
    let options = Some(options).filter(|any| !any.type_url.is_empty());
    let config = Options::parse(options.as_ref())?.config;
    let config = Config::load(config.as_deref(), &Default::default())?;
    Ok(RuntimeInfo {
        annotations: annotations(&config),
        name: NAME.to_owned(),
        version: MessageField::some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }),
        options: options.into(),
        features: MessageField::some(Any {
            type_url: FEATURES.to_owned(),
            value: features().to_string().into_bytes(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// What containerd's mount manager (2.2 and later) is to leave to the runtime. It asks once, without options.
///
/// Without a claim it mounts everything that is not a plain mount, and hands over directories. A claim counts for every
/// list of mounts of this runtime, and one whose writable layer is a directory cannot be made in the guest: so it is
/// made only where the administrator says that there is none. "mkfs" is not claimed: the images of writable layers are
/// made on the host.
fn annotations(config: &Config) -> HashMap<String, String> {
    const ALLOW_MOUNTS: &str = "containerd.io/runtime-allow-mounts";
    let claims = config
        .erofs_in_guest
        .then(|| (ALLOW_MOUNTS.to_owned(), "erofs,format/*,mkdir/*".to_owned()));
    claims.into_iter().collect()
}

/// The runtime-spec's features object. Only what is real: a client decides by it what to ask for.
fn features() -> Value {
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.3.0",
        "hooks": [
            "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
        ],
        "mountOptions": &MOUNT_FLAGS[..],
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "user", "uts"],
            "cgroup": {"v1": false, "v2": true, "systemd": false, "systemdUser": false, "rdma": false},
            "seccomp": {
                "enabled": true,
                "actions": [
                    "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS",
                    "SCMP_ACT_KILL_THREAD", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_TRAP"
                ],
                "operators": [
                    "SCMP_CMP_EQ", "SCMP_CMP_GE", "SCMP_CMP_GT", "SCMP_CMP_LE", "SCMP_CMP_LT",
                    "SCMP_CMP_MASKED_EQ", "SCMP_CMP_NE"
                ],
                "archs": ["SCMP_ARCH_X32", "SCMP_ARCH_X86", "SCMP_ARCH_X86_64"]
            },
            "apparmor": {"enabled": false},
            "selinux": {"enabled": false},
            "intelRdt": {"enabled": false},
            "netDevices": {"enabled": false},
            // User namespaces are the guest's: without this the CRI plugin asks for none.
            "mountExtensions": {"idmap": {"enabled": false}}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What containerd reads.
    fn answer(input: &[u8]) -> (RuntimeInfo, Value) {
        let bytes = runtime_info(input).unwrap().write_to_bytes().unwrap();
        let info = RuntimeInfo::parse_from_bytes(&bytes).unwrap();
        let features = serde_json::from_slice(&info.features.value).unwrap();
        (info, features)
    }

    #[test]
    fn without_options_the_features_claim_recursive_read_only_mounts_and_no_id_mapping() {
        let (info, features) = answer(b"");
        assert_eq!(info.name, NAME);
        assert!(info.options.is_none());
        assert_eq!(info.features.type_url, FEATURES);
        let options = features["mountOptions"].as_array().unwrap();
        assert!(options.contains(&json!("rro")));
        assert_eq!(
            features["linux"]["mountExtensions"]["idmap"]["enabled"],
            false
        );
    }

    #[test]
    fn mounts_are_claimed_only_where_the_configuration_says_so() {
        assert!(answer(b"").0.annotations.is_empty());
        let body = "erofs_in_guest = true";
        let mut any = b"\x0a\x19runtimeoptions.v1.Options\x12".to_vec();
        any.extend([body.len() as u8 + 2, 0x1a, body.len() as u8]);
        any.extend(body.as_bytes());
        let claims = answer(&any).0.annotations;
        assert_eq!(
            claims["containerd.io/runtime-allow-mounts"],
            "erofs,format/*,mkdir/*"
        );
    }

    #[test]
    fn what_the_specification_refuses_is_not_claimed() {
        let (_, features) = answer(b"");
        let claims = features.to_string();
        for refused in ["\"idmap\",", "\"remount\"", "SCMP_ACT_NOTIFY", "\"time\""] {
            assert!(!claims.contains(refused), "{refused}");
        }
        for refused in ["apparmor", "selinux", "intelRdt", "netDevices"] {
            assert_eq!(features["linux"][refused]["enabled"], false, "{refused}");
        }
    }

    #[test]
    fn options_are_repeated_and_those_that_no_create_would_take_are_refused() {
        let any = |body: &str| {
            let body_length = u8::try_from(body.len()).unwrap();
            let mut any = b"\x0a\x19runtimeoptions.v1.Options\x12".to_vec();
            any.extend([body_length + 2, 0x1a, body_length]);
            any.extend(body.as_bytes());
            any
        };
        let (info, _) = answer(&any("default_vcpus = 2"));
        assert_eq!(info.options.type_url, "runtimeoptions.v1.Options");
        assert_eq!(info.options.value, b"\x1a\x11default_vcpus = 2");
        let error = runtime_info(&any("no_such_key = 1")).unwrap_err();
        assert!(error.to_string().contains("no_such_key"), "{error}");
        assert!(matches!(runtime_info(b"\xff"), Err(InfoError::Decode(_))));
    }
}
