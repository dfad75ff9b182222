//! The command line: Go's flags with one dash, as containerd writes them, then the action.

use std::ffi::OsString;
use std::path::PathBuf;

/// What the program is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Bring up (or find) the daemon of a sandbox and print its address.
    Start,
    /// Remove what a dead daemon left behind.
    Delete,
}

/// The parsed command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// `-namespace`: containerd's namespace of the container.
    pub namespace: String,
    /// `-id`: the container.
    pub id: String,
    /// `-address`: containerd's gRPC socket.
    pub address: String,
    /// `-publish-binary`: containerd's binary; events go through ttrpc instead.
    pub publish_binary: String,
    /// `-bundle`: the bundle's directory; without it the working directory is meant.
    pub bundle: Option<PathBuf>,
    /// `-debug`.
    pub debug: bool,
    /// `-v`: print the version.
    pub version: bool,
    /// `-info`: describe the runtime.
    pub info: bool,
    /// `start` or `delete`.
    pub action: Option<Action>,
}

/// A command line that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagsError {
    /// No flag has this name.
    #[error(
        "Unknown flag -{0}: known are -namespace, -id, -address, -publish-binary, -bundle, -debug, -v and -info"
    )]
    Unknown(String),
    /// A flag that needs a value is the last word.
    #[error("The flag -{0} needs a value")]
    NoValue(String),
    /// A switch has a value that is no truth value.
    #[error("The value {1:?} of the switch -{0} is neither true nor false")]
    NoBool(String, String),
    /// The word after the flags is no action.
    #[error("Unknown action {0:?}: known are start and delete")]
    Action(String),
    /// A word that is not UTF-8.
    #[error("The argument {0:?} is not UTF-8")]
    NotUtf8(OsString),
}

impl Flags {
    /// Parses the arguments after the program's name by the rules of Go's `flag` package: one or
    /// two dashes, `-name value` or `-name=value`, switches without a value; the first word that
    /// is no flag ends them.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Self, FlagsError> {
        let mut args = args
            .into_iter()
            .map(|arg| arg.into_string().map_err(FlagsError::NotUtf8));
        let mut flags = Self::default();
        while let Some(arg) = args.next().transpose()? {
            let Some(flag) = arg.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
                flags.action = Some(parse_action(&arg)?);
                break;
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            if flag.is_empty() {
                flags.action = args
                    .next()
                    .transpose()?
                    .map(|a| parse_action(&a))
                    .transpose()?;
                break;
            }
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            match name {
                "debug" => flags.debug = switch(name, value)?,
                "v" | "version" => flags.version = switch(name, value)?,
                "info" => flags.info = switch(name, value)?,
                "namespace" | "id" | "address" | "publish-binary" | "bundle" => {
                    let value = match value {
                        Some(value) => value,
                        None => args
                            .next()
                            .transpose()?
                            .ok_or_else(|| FlagsError::NoValue(name.to_owned()))?,
                    };
                    match name {
                        "namespace" => flags.namespace = value,
                        "id" => flags.id = value,
                        "address" => flags.address = value,
                        "publish-binary" => flags.publish_binary = value,
                        _ => flags.bundle = Some(value.into()).filter(|b| b != &PathBuf::new()),
                    }
                }
                _ => return Err(FlagsError::Unknown(name.to_owned())),
            }
        }
        Ok(flags)
    }
}

fn parse_action(word: &str) -> Result<Action, FlagsError> {
    match word {
        "start" => Ok(Action::Start),
        "delete" => Ok(Action::Delete),
        _ => Err(FlagsError::Action(word.to_owned())),
    }
}

/// The truth values that Go's `strconv.ParseBool` knows.
fn switch(name: &str, value: Option<String>) -> Result<bool, FlagsError> {
    match value.as_deref() {
        None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some(other) => Err(FlagsError::NoBool(name.to_owned(), other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Flags, FlagsError> {
        Flags::parse(args.iter().map(OsString::from))
    }

    #[test]
    fn the_command_line_of_containerd_1_6_is_understood() {
        let flags = parse(&[
            "-namespace",
            "default",
            "-address",
            "/run/containerd/containerd.sock",
            "-publish-binary",
            "/usr/bin/containerd",
            "-id",
            "web",
            "-debug",
            "start",
        ])
        .unwrap();
        assert_eq!(flags.namespace, "default");
        assert_eq!(flags.id, "web");
        assert_eq!(flags.address, "/run/containerd/containerd.sock");
        assert!(flags.debug);
        assert_eq!(flags.action, Some(Action::Start));
    }

    #[test]
    fn values_may_follow_an_equals_sign_and_flags_may_have_two_dashes() {
        let flags = parse(&["--id=a=b", "-debug=false", "-bundle=/b", "--", "delete"]).unwrap();
        assert_eq!(flags.id, "a=b");
        assert!(!flags.debug);
        assert_eq!(flags.bundle, Some("/b".into()));
        assert_eq!(flags.action, Some(Action::Delete));
    }

    #[test]
    fn an_empty_bundle_means_the_working_directory() {
        assert_eq!(parse(&["-bundle", "", "delete"]).unwrap().bundle, None);
    }

    #[test]
    fn what_is_unknown_is_named() {
        assert_eq!(
            parse(&["-socket", "x"]),
            Err(FlagsError::Unknown("socket".into()))
        );
        assert_eq!(parse(&["stop"]), Err(FlagsError::Action("stop".into())));
        assert_eq!(parse(&["-id"]), Err(FlagsError::NoValue("id".into())));
        assert_eq!(
            parse(&["-debug=maybe"]),
            Err(FlagsError::NoBool("debug".into(), "maybe".into()))
        );
    }
}
