//! Hooks of the container's namespaces: the guest runs them.
//!
//! `startContainer` hooks are programs of the container. `createContainer` hooks are programs of the host that
//! run in the container's namespaces before its root is its root: each is led into the guest as a
//! file, alone. What it needs beside itself is not there, so it must be a static program.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::mount::{Access, Volume};
use crate::spec::SpecError;

/// Leaves what is the guest's in `hooks`, with paths that mean something there. `shared` is the
/// container's directory of volumes as the guest sees it.
pub fn translate(
    hooks: &mut Map<String, Value>,
    shared: &str,
    volumes: &mut Vec<Volume>,
) -> Result<(), SpecError> {
    if let Some(kind) = hooks.keys().find(|kind| !KINDS.contains(&kind.as_str())) {
        return Err(SpecError::Unsupported(format!(
            "hooks.{kind} is no kind of hook that is known: known are {}",
            KINDS.join(", ")
        )));
    }
    hooks.retain(|kind, list| {
        matches!(kind.as_str(), "createContainer" | "startContainer") && !list.is_null()
    });
    for (number, hook) in entries(hooks, "createContainer")?.iter_mut().enumerate() {
        let path = path_of(hook, "createContainer", number)?;
        check_program(&path, number)?;
        let hook = hook
            .as_object_mut()
            .ok_or_else(|| SpecError::Malformed("hooks.createContainer".into(), OBJECTS))?;
        if hook.get("args").is_none_or(Value::is_null) {
            hook.insert("args".into(), Value::from(vec![path.display().to_string()]));
        }
        hook.insert(
            "path".into(),
            Value::from(format!("{shared}/{}", volumes.len())),
        );
        volumes.push(Volume {
            destination: path.clone(),
            source: path,
            recursive: false,
            access: Access::ReadOnly,
            follows_host: false,
        });
    }
    for (number, hook) in entries(hooks, "startContainer")?.iter_mut().enumerate() {
        path_of(hook, "startContainer", number)?;
    }
    Ok(())
}

const KINDS: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

const OBJECTS: &str = "a list of objects";

fn entries<'a>(
    hooks: &'a mut Map<String, Value>,
    kind: &'static str,
) -> Result<&'a mut [Value], SpecError> {
    match hooks.get_mut(kind) {
        None => Ok(&mut []),
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(SpecError::Malformed(format!("hooks.{kind}"), OBJECTS)),
    }
}

fn path_of(hook: &Value, kind: &str, number: usize) -> Result<PathBuf, SpecError> {
    let path = hook.get("path").and_then(Value::as_str).unwrap_or_default();
    if !Path::new(path).is_absolute() {
        return Err(SpecError::Unsupported(format!(
            "The path {path:?} of the {kind} hook #{number} is not absolute"
        )));
    }
    Ok(path.into())
}

/// Refuses a program that would look for an interpreter in the guest.
fn check_program(path: &Path, number: usize) -> Result<(), SpecError> {
    let hook = format!("The createContainer hook #{number}, {}", path.display());
    let refuse = |why: String| Err(SpecError::Unsupported(format!("{hook}, {why}")));
    match interpreter(path) {
        Ok(None) => Ok(()),
        Ok(Some(interpreter)) => refuse(format!(
            "is run in the guest, which does not have its interpreter {interpreter}: link it statically, or make it a createRuntime hook"
        )),
        Err(e) => refuse(format!("cannot be read: {e}")),
    }
}

/// The interpreter of a script or of a dynamically linked program (elf(5)).
fn interpreter(path: &Path) -> std::io::Result<Option<String>> {
    const PT_INTERP: u32 = 3;
    const HEADER: usize = 64;
    let file = File::open(path)?;
    let mut head = Vec::new();
    (&file).take(HEADER as u64).read_to_end(&mut head)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
        return Ok(Some(String::from_utf8_lossy(line).trim().to_owned()));
    }
    if head.len() < HEADER || !head.starts_with(b"\x7fELF\x02\x01") {
        // What the kernel says of it when it is run says more.
        return Ok(None);
    }
    let number = |bytes: &[u8]| {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(wide)
    };
    let (offset, size, count) = (
        number(&head[32..40]),
        number(&head[54..56]),
        number(&head[56..58]),
    );
    for n in 0..count {
        let mut entry = [0; 40];
        let at = n.checked_mul(size).and_then(|n| n.checked_add(offset));
        let Some(at) = at else { return Ok(None) };
        file.read_exact_at(&mut entry, at)?;
        if number(&entry[..4]) == u64::from(PT_INTERP) {
            let length = number(&entry[32..40]).min(256) as usize;
            let mut name = vec![0; length];
            file.read_exact_at(&mut name, number(&entry[8..16]))?;
            let name = String::from_utf8_lossy(&name);
            return Ok(Some(name.trim_end_matches('\0').to_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn translated(hooks: Value) -> Result<(Value, Vec<Volume>), SpecError> {
        let Value::Object(mut hooks) = hooks else {
            panic!("not an object")
        };
        let mut volumes = vec![Volume {
            source: "/v".into(),
            destination: "/v".into(),
            recursive: false,
            access: Access::ReadWrite,
            follows_host: false,
        }];
        translate(&mut hooks, "/shared/c", &mut volumes)?;
        Ok((Value::Object(hooks), volumes))
    }

    /// A static program: this one.
    fn own() -> String {
        std::env::current_exe().unwrap().display().to_string()
    }

    #[test]
    fn programs_of_the_host_are_led_into_the_guest_and_the_rest_stays_where_it_is() {
        let (hooks, volumes) = translated(json!({
            "prestart": [{"path": "/usr/bin/net"}],
            "createRuntime": [{"path": "/usr/bin/net"}],
            "poststart": [], "poststop": null,
            "createContainer": [
                {"path": own(), "args": ["name", "a"], "timeout": 3},
                {"path": own()}
            ],
            "startContainer": [{"path": "/bin/of-the-container", "env": ["A=1"]}],
        }))
        .unwrap();
        assert_eq!(
            hooks,
            json!({
                "createContainer": [
                    {"path": "/shared/c/1", "args": ["name", "a"], "timeout": 3},
                    {"path": "/shared/c/2", "args": [own()]}
                ],
                "startContainer": [{"path": "/bin/of-the-container", "env": ["A=1"]}],
            })
        );
        assert_eq!(volumes.len(), 3);
        assert_eq!(volumes[2].source, PathBuf::from(own()));
        assert_eq!(volumes[2].access, Access::ReadOnly);
    }

    #[test]
    fn a_program_that_needs_an_interpreter_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/usr/bin/env python3\n").unwrap();
        let refused = |path: &Path| {
            let hooks = json!({"createContainer": [{"path": path}]});
            translated(hooks).err().unwrap().to_string()
        };
        let error = refused(&script);
        assert!(error.contains("/usr/bin/env python3"), "{error}");
        // Debian's shell is linked dynamically.
        let error = refused(Path::new("/bin/sh"));
        assert!(error.contains("ld-linux"), "{error}");
        let error = refused(Path::new("/no/such"));
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn what_is_no_hook_is_refused() {
        for (hooks, needle) in [
            (
                json!({"createContainer": [{"path": "relative"}]}),
                "absolute",
            ),
            (json!({"startContainer": [{}]}), "absolute"),
            (json!({"startContainer": {}}), "list of objects"),
            (json!({"afterwards": []}), "hooks.afterwards"),
        ] {
            let error = translated(hooks).err().unwrap().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }
}
