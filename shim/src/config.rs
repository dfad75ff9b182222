//! The settings of a sandbox: the shipped defaults, the host's file, the runtime's options and
//! the sandbox's annotations, each over the one before.
//!
//! `shim/config.toml` documents every key and is what is shipped as `share/cube/config.toml`.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::disks::MAX_SLOTS;

/// Where the host's settings are, unless [`CONFIG_ENV`] names another file.
pub const CONFIG_PATH: &str = "/etc/cube/config.toml";

/// The environment variable that names another file than [`CONFIG_PATH`].
pub const CONFIG_ENV: &str = "CUBE_CONFIG";

/// What the key of an annotation for cube starts with.
pub const ANNOTATION_PREFIX: &str = "io.cube.";

/// The settings of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The guest kernel, an absolute path.
    pub kernel: PathBuf,
    /// The guest's initramfs, an absolute path.
    pub initramfs: PathBuf,
    /// The hypervisor's binary, an absolute path.
    pub hypervisor: PathBuf,
    /// Words for the end of the kernel's command line; may be empty.
    pub kernel_params: String,
    /// vCPUs of a sandbox that asks for none, at least 1.
    pub default_vcpus: u8,
    /// The most vCPUs of a sandbox; `None`: as many as the host has processors.
    pub max_vcpus: Option<u8>,
    /// Memory of a sandbox that asks for none, in MiB.
    pub default_memory_mib: u64,
    /// The most memory of a sandbox, in MiB; `None`: as much as the host has.
    pub max_memory_mib: Option<u64>,
    /// Slots for disks of containers that join a sandbox later; `None`: by what its first container has.
    pub spare_disks: Option<u8>,
    /// Whether the layers of the erofs snapshotter go into the guest as disks.
    pub erofs_in_guest: bool,
    /// How long it may take until the agent is there.
    pub boot_timeout: Duration,
    /// What shim and agent log. The hypervisor has warnings only, which the shim passes on as such.
    pub log_level: log::LevelFilter,
    /// Whether the guest's whole console goes to the log.
    pub debug_console: bool,
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("Cannot read the configuration {0}: {1}")]
    Read(PathBuf, io::Error),
    /// Text that is no TOML, an unknown key, a value of the wrong type.
    #[error("The configuration in {origin} is wrong: {detail}")]
    Parse {
        /// The file, the runtime's options or the annotation.
        origin: String,
        /// Place, key and cause in one line.
        detail: String,
    },
    /// A value out of its range.
    #[error("The configuration key {key} is {value}: it must be {wanted}")]
    Value {
        /// The key.
        key: &'static str,
        /// What stands there.
        value: String,
        /// What may stand there.
        wanted: &'static str,
    },
    /// An annotation that is not allowed on this host.
    #[error(
        "The annotation io.cube.{0} is not allowed on this host: its administrator can add \"{0}\" to allowed_annotations in {CONFIG_PATH}"
    )]
    AnnotationRefused(String),
    /// The program's own place is unknown, so relative paths mean nothing.
    #[error("Cannot find out where this program is installed: {0}")]
    Prefix(io::Error),
}

/// What one source sets: any of the keys of `config.toml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layer {
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
    hypervisor: Option<PathBuf>,
    kernel_params: Option<String>,
    default_vcpus: Option<u8>,
    max_vcpus: Option<u8>,
    default_memory_mib: Option<u64>,
    max_memory_mib: Option<u64>,
    spare_disks: Option<u8>,
    erofs_in_guest: Option<bool>,
    boot_timeout_s: Option<u64>,
    log_level: Option<String>,
    debug_console: Option<bool>,
    allowed_annotations: Option<Vec<String>>,
}

impl Config {
    /// The settings of a sandbox with these runtime options (TOML text, as in containerd's
    /// `ConfigBody`) and these annotations (all of the sandbox's; those of others are ignored).
    pub fn load(
        options: Option<&str>,
        annotations: &HashMap<String, String>,
    ) -> Result<Self, ConfigError> {
        let prefix = installation_prefix()?;
        let mut layer = read_layer(&prefix.join("share/cube/config.toml"), false)?;
        match std::env::var_os(CONFIG_ENV) {
            Some(path) => layer.put(read_layer(Path::new(&path), true)?),
            None => layer.put(read_layer(Path::new(CONFIG_PATH), false)?),
        }
        if let Some(options) = options {
            layer.put(parse_layer(options, "the runtime's options")?);
        }
        layer.put_annotations(annotations)?;
        layer.finish(&prefix)
    }
}

impl Layer {
    /// Takes over what `upper` sets.
    fn put(&mut self, upper: Layer) {
        fn over<T>(lower: &mut Option<T>, upper: Option<T>) {
            if upper.is_some() {
                *lower = upper;
            }
        }
        over(&mut self.kernel, upper.kernel);
        over(&mut self.initramfs, upper.initramfs);
        over(&mut self.hypervisor, upper.hypervisor);
        over(&mut self.kernel_params, upper.kernel_params);
        over(&mut self.default_vcpus, upper.default_vcpus);
        over(&mut self.max_vcpus, upper.max_vcpus);
        over(&mut self.default_memory_mib, upper.default_memory_mib);
        over(&mut self.max_memory_mib, upper.max_memory_mib);
        over(&mut self.spare_disks, upper.spare_disks);
        over(&mut self.erofs_in_guest, upper.erofs_in_guest);
        over(&mut self.boot_timeout_s, upper.boot_timeout_s);
        over(&mut self.log_level, upper.log_level);
        over(&mut self.debug_console, upper.debug_console);
        over(&mut self.allowed_annotations, upper.allowed_annotations);
    }

    /// Takes over what the annotations set, as far as the layers below allow it.
    fn put_annotations(
        &mut self,
        annotations: &HashMap<String, String>,
    ) -> Result<(), ConfigError> {
        for (name, value) in annotations {
            let Some(key) = name.strip_prefix(ANNOTATION_PREFIX) else {
                continue;
            };
            let upper = parse_annotation(key, value)?;
            // Even one who may list every other key must not widen the list itself.
            let allowed = key != "allowed_annotations"
                && match &self.allowed_annotations {
                    Some(keys) => keys.iter().any(|k| k == key),
                    None => DEFAULT_ANNOTATIONS.contains(&key),
                };
            if !allowed {
                return Err(ConfigError::AnnotationRefused(key.to_owned()));
            }
            self.put(upper);
        }
        Ok(())
    }

    /// Fills in the defaults and checks the ranges.
    fn finish(self, prefix: &Path) -> Result<Config, ConfigError> {
        let path = |path: Option<PathBuf>, default: &str| {
            prefix.join(path.unwrap_or_else(|| default.into()))
        };
        let default_vcpus = self.default_vcpus.unwrap_or(1);
        check(
            default_vcpus > 0,
            "default_vcpus",
            default_vcpus,
            "1 or more",
        )?;
        let default_memory_mib = self.default_memory_mib.unwrap_or(256);
        check(
            default_memory_mib >= MIN_MEMORY_MIB,
            "default_memory_mib",
            default_memory_mib,
            "64 or more",
        )?;
        let max_memory_mib = self.max_memory_mib.filter(|&mib| mib > 0);
        if let Some(mib) = max_memory_mib {
            check(
                mib >= MIN_MEMORY_MIB,
                "max_memory_mib",
                mib,
                "64 or more, or 0",
            )?;
        }
        if let Some(spare_disks) = self.spare_disks {
            check(
                spare_disks <= MAX_SLOTS,
                "spare_disks",
                spare_disks,
                "from 0 to 12",
            )?;
        }
        let boot_timeout_s = self.boot_timeout_s.unwrap_or(30);
        check(
            (1..=3600).contains(&boot_timeout_s),
            "boot_timeout_s",
            boot_timeout_s,
            "from 1 to 3600",
        )?;
        let log_level = self.log_level.as_deref().unwrap_or("warn");
        let log_level = log_level.parse().map_err(|_| ConfigError::Value {
            key: "log_level",
            value: format!("{log_level:?}"),
            wanted: "off, error, warn, info, debug or trace",
        })?;
        let kernel_params = self.kernel_params.unwrap_or_default();
        check(
            !kernel_params.contains(|c: char| c.is_control()),
            "kernel_params",
            format!("{kernel_params:?}"),
            "one line without control characters",
        )?;
        Ok(Config {
            kernel: path(self.kernel, "share/cube/vmlinux"),
            initramfs: path(self.initramfs, "share/cube/initramfs.img"),
            hypervisor: path(self.hypervisor, "bin/cube-hypervisor"),
            kernel_params,
            default_vcpus,
            max_vcpus: self.max_vcpus.filter(|&n| n > 0),
            default_memory_mib,
            max_memory_mib,
            spare_disks: self.spare_disks,
            erofs_in_guest: self.erofs_in_guest.unwrap_or(false),
            boot_timeout: Duration::from_secs(boot_timeout_s),
            log_level,
            debug_console: self.debug_console.unwrap_or(false),
        })
    }
}

/// Less than this boots no guest.
const MIN_MEMORY_MIB: u64 = 64;

/// What annotations may set if no file says otherwise.
const DEFAULT_ANNOTATIONS: [&str; 7] = [
    "kernel_params",
    "default_vcpus",
    "default_memory_mib",
    "spare_disks",
    "boot_timeout_s",
    "log_level",
    "debug_console",
];

/// The directory above the one that holds this program.
fn installation_prefix() -> Result<PathBuf, ConfigError> {
    let program = std::env::current_exe().map_err(ConfigError::Prefix)?;
    Ok(program
        .parent()
        .and_then(Path::parent)
        .unwrap_or(Path::new("/"))
        .to_owned())
}

fn read_layer(path: &Path, required: bool) -> Result<Layer, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse_layer(&text, &path.display().to_string()),
        Err(e) if e.kind() == io::ErrorKind::NotFound && !required => Ok(Layer::default()),
        Err(e) => Err(ConfigError::Read(path.to_owned(), e)),
    }
}

fn parse_layer(text: &str, origin: &str) -> Result<Layer, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let line = e
            .span()
            .and_then(|span| text.get(..span.start))
            .map(|before| format!("line {}: ", before.matches('\n').count() + 1))
            .unwrap_or_default();
        ConfigError::Parse {
            origin: origin.to_owned(),
            detail: format!("{line}{}", e.message().replace('\n', " ")),
        }
    })
}

/// An annotation's value is text: it is taken as TOML where that is what the key wants (a number,
/// a boolean), and as the string itself otherwise.
fn parse_annotation(key: &str, value: &str) -> Result<Layer, ConfigError> {
    let origin = format!("the annotation {ANNOTATION_PREFIX}{key}");
    let try_value = |value: toml::Value| -> Result<Layer, toml::de::Error> {
        toml::Table::from_iter([(key.to_owned(), value)]).try_into()
    };
    let as_text = try_value(toml::Value::String(value.to_owned()));
    let typed = value.parse::<i64>().map(toml::Value::Integer);
    let typed = typed.or_else(|_| value.parse::<bool>().map(toml::Value::Boolean));
    let layer = match (as_text, typed) {
        (Ok(layer), _) => Ok(layer),
        (Err(_), Ok(typed)) => try_value(typed),
        (Err(e), Err(_)) => Err(e),
    };
    layer.map_err(|e| ConfigError::Parse {
        origin,
        detail: e.message().replace('\n', " "),
    })
}

fn check(
    right: bool,
    key: &'static str,
    value: impl ToString,
    wanted: &'static str,
) -> Result<(), ConfigError> {
    if right {
        return Ok(());
    }
    Err(ConfigError::Value {
        key,
        value: value.to_string(),
        wanted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!("../config.toml");

    fn finish(text: &str) -> Result<Config, ConfigError> {
        parse_layer(text, "a test")?.finish(Path::new("/usr/local"))
    }

    fn annotated(text: &str, key: &str, value: &str) -> Result<Config, ConfigError> {
        let mut layer = parse_layer(text, "a test")?;
        layer.put_annotations(&HashMap::from([(key.to_owned(), value.to_owned())]))?;
        layer.finish(Path::new("/usr/local"))
    }

    #[test]
    fn the_shipped_file_says_what_an_empty_one_means() {
        assert_eq!(finish(SHIPPED).unwrap(), finish("").unwrap());
        let shipped = parse_layer(SHIPPED, "the shipped file").unwrap();
        assert_eq!(shipped.allowed_annotations.unwrap(), DEFAULT_ANNOTATIONS);
    }

    #[test]
    fn the_shipped_file_documents_every_key() {
        // An unknown key's error lists all that are known.
        let error = finish("no_such_key = 1").unwrap_err().to_string();
        let known: Vec<_> = error.split('`').skip(3).step_by(2).collect();
        assert!(known.len() >= 12, "{error}");
        for key in known {
            // In a comment where the default is no value.
            let text = format!("{key} = ");
            assert!(
                SHIPPED
                    .lines()
                    .any(|l| l.trim_start_matches("# ").starts_with(&text)),
                "{key} is not documented"
            );
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place() {
        let error = finish("default_vcpus = 2\nvcpu = 3\n")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("line 2") && error.contains("vcpu"),
            "{error}"
        );
    }

    #[test]
    fn relative_paths_start_at_the_prefix_and_absolute_ones_stay() {
        let config = finish("kernel = \"/boot/vmlinux\"").unwrap();
        assert_eq!(config.kernel, Path::new("/boot/vmlinux"));
        assert_eq!(
            config.hypervisor,
            Path::new("/usr/local/bin/cube-hypervisor")
        );
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (text, key) in [
            ("default_vcpus = 0", "default_vcpus"),
            ("default_memory_mib = 63", "default_memory_mib"),
            ("max_memory_mib = 1", "max_memory_mib"),
            ("spare_disks = 13", "spare_disks"),
            ("boot_timeout_s = 0", "boot_timeout_s"),
            ("log_level = \"loud\"", "log_level"),
            ("kernel_params = \"a\\nb\"", "kernel_params"),
        ] {
            let error = finish(text).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
        assert!(finish("default_vcpus = 300").is_err());
        assert!(finish("default_vcpus = \"2\"").is_err());
    }

    #[test]
    fn an_annotation_sets_numbers_booleans_and_text() {
        let get = |key: &str, value| annotated("", key, value).unwrap();
        assert_eq!(get("io.cube.default_vcpus", "3").default_vcpus, 3);
        assert!(get("io.cube.debug_console", "true").debug_console);
        assert_eq!(get("io.cube.kernel_params", "7").kernel_params, "7");
        assert_eq!(get("com.example.kernel", "x"), finish("").unwrap());
    }

    #[test]
    fn an_annotation_that_is_unknown_wrong_or_not_allowed_is_named() {
        for (key, value, needle) in [
            ("io.cube.vcpus", "3", "vcpus"),
            ("io.cube.default_vcpus", "many", "default_vcpus"),
            ("io.cube.kernel", "/etc/shadow", "io.cube.kernel"),
            (
                "io.cube.allowed_annotations",
                "kernel",
                "allowed_annotations",
            ),
        ] {
            let error = annotated("", key, value).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
        let allowed = "allowed_annotations = [\"kernel\", \"allowed_annotations\"]";
        let config = annotated(allowed, "io.cube.kernel", "/k").unwrap();
        assert_eq!(config.kernel, Path::new("/k"));
    }
}
