//! The runtime's options, in the messages that containerd's clients use.

use containerd_shim_protos::shim::oci;
use protobuf::CodedInputStream;
use protobuf::Message;
use protobuf::well_known_types::any::Any;

/// The message of `ctr`, nerdctl and Docker.
const RUNC: &str = "containerd.runc.v1.Options";

/// The message of the CRI plugin (`runtimes.NAME.options`), under its names in time.
const GENERIC: [&str; 2] = ["runtimeoptions.v1.Options", "cri.runtimeoptions.v1.Options"];

/// What cube takes from the options; what it does not know in them is not for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The cgroup that the shim is put into.
    pub shim_cgroup: Option<String>,
    /// Settings for this sandbox, the text of a TOML document.
    pub config: Option<String>,
}

/// Why the options cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// Not the message that its type names.
    #[error("Cannot decode the runtime's options {0}: {1}")]
    Decode(String, protobuf::Error),
    /// The settings are not text.
    #[error("The ConfigBody of the runtime's options is not UTF-8")]
    NotUtf8,
    /// The file that they name cannot be read.
    #[error("Cannot read {0}, which the runtime's options name: {1}")]
    Read(String, std::io::Error),
}

/// Whether `any` is one of the messages read here.
pub fn is_known(any: &Any) -> bool {
    let name = type_name(any);
    name == RUNC || GENERIC.contains(&name)
}

impl Options {
    /// Reads the options; those of other runtimes count as none.
    pub fn parse(any: Option<&Any>) -> Result<Self, OptionsError> {
        let Some(any) = any else {
            return Ok(Self::default());
        };
        let name = type_name(any);
        if name == RUNC {
            let options = oci::Options::parse_from_bytes(&any.value)
                .map_err(|e| OptionsError::Decode(name.to_owned(), e))?;
            return Ok(Self {
                shim_cgroup: Some(options.shim_cgroup).filter(|path| !path.is_empty()),
                config: None,
            });
        }
        if GENERIC.contains(&name) {
            let generic =
                parse_generic(&any.value).map_err(|e| OptionsError::Decode(name.to_owned(), e))?;
            return generic.into_options();
        }
        Ok(Self::default())
    }
}

/// The last part of the type's URL: Go writes the bare name, others put a host before it.
fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// `runtimeoptions.v1.Options`: `string type_url = 1; string config_path = 2; bytes config_body = 3;`
#[derive(Default)]
struct Generic {
    config_path: String,
    config_body: Vec<u8>,
}

fn parse_generic(bytes: &[u8]) -> protobuf::Result<Generic> {
    let mut input = CodedInputStream::from_bytes(bytes);
    let mut generic = Generic::default();
    while let Some(tag) = input.read_raw_tag_or_eof()? {
        match tag {
            0x12 => generic.config_path = input.read_string()?,
            0x1a => generic.config_body = input.read_bytes()?,
            _ => {
                let (_, wire_type) = protobuf::rt::WireType::new(tag & 7)
                    .map(|w| (tag >> 3, w))
                    .ok_or_else(|| {
                        std::io::Error::new(std::io::ErrorKind::InvalidData, "unknown wire type")
                    })?;
                input.skip_field(wire_type)?;
            }
        }
    }
    Ok(generic)
}

impl Generic {
    fn into_options(self) -> Result<Options, OptionsError> {
        let config = if !self.config_path.is_empty() {
            std::fs::read_to_string(&self.config_path)
                .map(Some)
                .map_err(|e| OptionsError::Read(self.config_path, e))?
        } else if self.config_body.is_empty() {
            None
        } else {
            Some(String::from_utf8(self.config_body).map_err(|_| OptionsError::NotUtf8)?)
        };
        Ok(Options {
            shim_cgroup: None,
            config,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(name: &str, value: &[u8]) -> Any {
        Any {
            type_url: name.into(),
            value: value.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn the_shim_cgroup_comes_from_runcs_options() {
        let options = Options::parse(Some(&any(RUNC, b"\x1a\x06/shims"))).unwrap();
        assert_eq!(options.shim_cgroup.as_deref(), Some("/shims"));
    }

    #[test]
    fn the_settings_come_from_the_body_if_no_path_is_given() {
        let body = b"\x0a\x01t\x1a\x11default_vcpus = 2";
        for name in [
            "runtimeoptions.v1.Options",
            "type.googleapis.com/runtimeoptions.v1.Options",
        ] {
            let options = Options::parse(Some(&any(name, body))).unwrap();
            assert_eq!(options.config.as_deref(), Some("default_vcpus = 2"));
        }
    }

    #[test]
    fn a_named_file_that_is_missing_is_an_error_with_its_name() {
        let error = Options::parse(Some(&any(GENERIC[0], b"\x12\x08/no/such")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such"), "{error}");
    }

    #[test]
    fn options_of_another_runtime_count_as_none_and_broken_ones_are_errors() {
        assert_eq!(
            Options::parse(Some(&any("x.y.Options", b"\xff"))).unwrap(),
            Options::default()
        );
        assert!(Options::parse(Some(&any(RUNC, b"\xff"))).is_err());
        assert!(Options::parse(Some(&any(GENERIC[0], b"\x1a\x7f"))).is_err());
    }
}
