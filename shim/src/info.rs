//! `-info`: what this runtime is and can do.

use std::io::{self, Write};

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use serde_json::json;

/// The name that containerd knows the runtime by.
const NAME: &str = "io.containerd.cube.v1";

/// The type of the runtime-spec's features object in containerd's typeurl notation.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Prints a `RuntimeInfo`.
pub fn info() -> io::Result<()> {
    let bytes = runtime_info().write_to_bytes().map_err(io::Error::other)?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(&bytes)?;
    stdout.flush()
}

fn runtime_info() -> RuntimeInfo {
    // Only what is real: a client decides by it what to ask for.
    let features = json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.0",
        "mountOptions": [
            "async", "atime", "bind", "defaults", "dev", "diratime", "dirsync", "exec", "lazytime",
            "mand", "noatime", "nodev", "nodiratime", "noexec", "nomand", "norelatime",
            "nostrictatime", "nosuid", "nosymfollow", "private", "rbind", "relatime", "ro",
            "rprivate", "rro", "rslave", "rw", "slave", "strictatime", "suid", "sync"
        ],
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "uts"],
            "cgroup": {"v1": false, "v2": true, "systemd": false},
            "seccomp": {"enabled": true},
            "apparmor": {"enabled": false},
            "selinux": {"enabled": false},
            "intelRdt": {"enabled": false},
            "mountExtensions": {"idmap": {"enabled": false}}
        }
    });
    RuntimeInfo {
        name: NAME.to_owned(),
        version: MessageField::some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }),
        features: MessageField::some(Any {
            type_url: FEATURES.to_owned(),
            value: features.to_string().into_bytes(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_are_json_that_claims_recursive_read_only_mounts_and_no_id_mapping() {
        let info =
            RuntimeInfo::parse_from_bytes(&runtime_info().write_to_bytes().unwrap()).unwrap();
        assert_eq!(info.name, NAME);
        let features: serde_json::Value = serde_json::from_slice(&info.features.value).unwrap();
        assert!(
            features["mountOptions"]
                .as_array()
                .unwrap()
                .contains(&json!("rro"))
        );
        assert_eq!(
            features["linux"]["mountExtensions"]["idmap"]["enabled"],
            false
        );
    }
}
