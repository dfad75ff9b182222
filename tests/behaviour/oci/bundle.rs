//! A bundle's `config.json`: a small one, and a change to it.

use cube_tests::{place, small};
use serde_json::{Map, Value, json};

/// What is wanted of cube.
#[derive(Debug, PartialEq, Eq)]
pub enum Expect {
    /// What runc's container sees, and its exit status.
    Same,
    /// Both refuse it, cube by a sentence with these words.
    Invalid(&'static str),
    /// It is refused when it is created, by a sentence with these words; runc may do it.
    Refused(&'static str),
    /// Documented in docs/OCI.md as done otherwise: this exit status and output.
    Otherwise(i32, &'static str),
}

/// A bundle, and what its container is to look at.
pub struct Case {
    /// What it is about.
    pub name: &'static str,
    /// A merge patch (RFC 7396) of [`small`]; the list below a key with a `+` at its end is appended to the one that is
    /// there. In texts, `@` stands for a directory of the case on the host.
    pub change: Value,
    /// A shell script, which runs as the container's init behind [`PRELUDE`].
    pub probe: &'static str,
    /// What is wanted.
    pub expect: Expect,
    /// A script that the host runs before, in the case's directory.
    pub host: &'static str,
    /// Whether the sandbox is to be the container's own, since it changes the pod.
    pub alone: bool,
    /// Whether the probe is an exec beside an init that sleeps.
    pub exec: bool,
    /// `linux.resources` that the container is given anew before that.
    pub update: Option<Value>,
}

/// cube and runc do the same.
pub fn same(name: &'static str, change: Value, probe: &'static str) -> Case {
    Case {
        name,
        change,
        probe,
        expect: Expect::Same,
        host: "",
        alone: false,
        exec: false,
        update: None,
    }
}

/// cube refuses it, with these words.
pub fn refused(words: &'static str, name: &'static str, change: Value) -> Case {
    Case {
        expect: Expect::Refused(words),
        ..same(name, change, "echo it runs")
    }
}

impl Case {
    /// In a sandbox of its own.
    pub fn alone(self) -> Self {
        Self {
            alone: true,
            ..self
        }
    }

    /// After this script on the host.
    pub fn host(self, host: &'static str) -> Self {
        Self { host, ..self }
    }

    /// By an exec.
    pub fn exec(self) -> Self {
        Self { exec: true, ..self }
    }

    /// Both refuse it, cube with these words.
    pub fn invalid(self, words: &'static str) -> Self {
        Self {
            expect: Expect::Invalid(words),
            ..self
        }
    }

    /// By an exec after an update.
    pub fn update(self, resources: Value) -> Self {
        Self {
            update: Some(resources),
            ..self.exec()
        }
    }

    /// Done in another way, as documented.
    pub fn otherwise(self, status: i32, output: &'static str) -> Self {
        Self {
            expect: Expect::Otherwise(status, output),
            ..self
        }
    }

    /// The probe as a whole.
    pub fn script(&self) -> String {
        format!("{PRELUDE}{}", self.probe)
    }

    /// Whether the init has a terminal.
    pub fn has_terminal(&self) -> bool {
        self.change.pointer("/process/terminal") == Some(&Value::Bool(true))
    }

    /// The whole `config.json`, for a case directory.
    pub fn config(&self, directory: &str) -> Value {
        let mut config = small();
        let script = if self.exec {
            "exec sleep 1000".to_owned()
        } else {
            self.script()
        };
        config["process"]["args"] = json!(["sh", "-c", script]);
        merge(&mut config, &self.change);
        place(&mut config, directory);
        config
    }
}

/// What probes are written with.
pub const PRELUDE: &str = r#"exec 2>&1
# status NAME|NAME: lines of the process's status.
status() { grep -E "^($1):" /proc/$$/status | tr '\t' ' '; }
# limits NAME|NAME: its limits.
limits() { grep -E "^Max ($1) " /proc/$$/limits; }
# options PATH…: the mounts there, the oldest first, with options and propagation, whatever they are mounts of.
options() { for p; do sed -nE "s,^[0-9]+ [0-9]+ [^ ]+ [^ ]+ ($p [^ ]+ .*)- .*,\1,p" /proc/self/mountinfo; done | sed -E 's/(shared|master|propagate_from):[0-9]+/\1/g; s/ $//'; }
# volumes PATH…: options without what is the host's alone: times of access, and whose mounts are followed.
volumes() { options "$@" | sed -E 's/,(rel|no)atime//; s/ (master|shared)//'; }
# mounted PATH…: type and options of the file systems there as well.
mounted() { for p; do sed -nE "s,^[0-9]+ [0-9]+ [^ ]+ [^ ]+ ($p [^ ]+ .*- .*),\1,p" /proc/self/mountinfo; done | sed -E 's/(shared|master|propagate_from):[0-9]+/\1/g'; }
# group FILE…: of the container's cgroup.
group() { for f; do echo "$f: $(cat /sys/fs/cgroup/$f)"; done; }
"#;

/// RFC 7396, and `+`.
fn merge(target: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *target = change.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else {
        return;
    };
    for (key, value) in change {
        if let Some(key) = key.strip_suffix('+') {
            let list = target.entry(key).or_insert_with(|| json!([]));
            let (Value::Array(list), Value::Array(more)) = (list, value) else {
                panic!("{key} is no list");
            };
            list.extend(more.iter().cloned());
        } else if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

/// The paths of all values of a change, the value as the last part. The members of a list are `[0]` and so on; a key with dots
/// is several parts, as it is in a field's name.
pub fn fields(change: &Value) -> Vec<Vec<String>> {
    let below = |name: &str, value: &Value| -> Vec<Vec<String>> {
        let mut paths = fields(value);
        for path in &mut paths {
            let parts = name.trim_end_matches('+').split('.').map(str::to_owned);
            path.splice(0..0, parts);
        }
        paths
    };
    match change {
        Value::Object(map) if !map.is_empty() => {
            map.iter().flat_map(|(key, v)| below(key, v)).collect()
        }
        Value::Array(list) if !list.is_empty() => {
            let members = list.iter().enumerate();
            members
                .flat_map(|(n, v)| below(&format!("[{n}]"), v))
                .collect()
        }
        Value::String(text) => vec![vec![text.clone()]],
        other => vec![vec![other.to_string()]],
    }
}

/// Whether a path of [`fields`] is at, or below, a field as `oci/fields` writes it.
pub fn is_at(path: &[String], field: &str) -> bool {
    let (name, value) = match field.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (field, None),
    };
    let parts: Vec<_> = name.split('.').collect();
    path.len() > parts.len()
        && parts.iter().zip(path).all(|(part, key)| match *part {
            "*" => true,
            "[]" => key.starts_with('['),
            _ => part == key,
        })
        && value.is_none_or(|value| path[parts.len()] == value)
}
