//! Documents of the specification as they are spelt.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// A document that is none of the specification's.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// A member has a value that it cannot have.
    #[error("{0} is not valid: {1}")]
    Member(String, serde_json::Error),
    /// The whole is none.
    #[error(transparent)]
    Whole(#[from] serde_json::Error),
}

/// Reads a document of the specification.
///
/// # Errors
///
/// It is none; the error says where.
pub fn read<T: DeserializeOwned>(document: &[u8]) -> Result<T, DocumentError> {
    // Nearly always; it says best what is wrong, too.
    let error = match serde_json::from_slice(document) {
        Ok(read) => return Ok(read),
        Err(error) => error,
    };
    if let Ok(read) = of_tree(serde_json::from_slice(document)?) {
        return Ok(read);
    }
    let place = path_to(document, error.line(), error.column());
    if place.is_empty() {
        return Err(DocumentError::Whole(error));
    }
    Err(DocumentError::Member(place, error))
}

/// What a document has at a line and a column, as they are counted in errors: `process.rlimits[0].type`.
fn path_to(document: &[u8], line: usize, column: usize) -> String {
    enum Step {
        Key(String),
        Index(usize),
    }
    let lines = document.split_inclusive(|byte| *byte == b'\n');
    let before: usize = lines.take(line.saturating_sub(1)).map(<[u8]>::len).sum();
    let end = before.saturating_add(column).min(document.len());
    let mut path = Vec::new();
    let mut key_next = false;
    let mut bytes = document[..end].iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' => {
                path.push(Step::Key(String::new()));
                key_next = true;
            }
            b'[' => path.push(Step::Index(0)),
            b'}' | b']' => {
                path.pop();
            }
            b',' => match path.last_mut() {
                Some(Step::Index(at)) => *at += 1,
                _ => key_next = true,
            },
            b'"' => {
                let mut text = Vec::new();
                while let Some(byte) = bytes.next().filter(|byte| **byte != b'"') {
                    text.extend(if *byte == b'\\' {
                        bytes.next()
                    } else {
                        Some(byte)
                    });
                }
                if let (true, Some(Step::Key(key))) = (key_next, path.last_mut()) {
                    *key = String::from_utf8_lossy(&text).into_owned();
                    key_next = false;
                }
            }
            _ => {}
        }
    }
    path.iter().fold(String::new(), |place, step| match step {
        Step::Key(key) if place.is_empty() => key.clone(),
        Step::Key(key) => format!("{place}.{key}"),
        Step::Index(at) => format!("{place}[{at}]"),
    })
}

/// As [`read`], of a document that has been changed.
///
/// # Errors
///
/// As there.
pub fn of_tree<T: DeserializeOwned>(mut document: Value) -> serde_json::Result<T> {
    for place in ["/scheduler/flags", "/process/scheduler/flags"] {
        let flags = document.pointer_mut(place).and_then(Value::as_array_mut);
        flags.into_iter().flatten().for_each(respell);
    }
    serde_json::from_value(document)
}

/// The names of two flags are misspelt in oci-spec 0.10.
fn respell(flag: &mut Value) {
    match flag.as_str() {
        Some("SCHED_FLAG_RESET_ON_FORK") => *flag = "SCHED_RESET_ON_FORK".into(),
        Some("SCHED_FLAG_DL_OVERRUN") => *flag = "SCHED_FLAG_D_L_OVERRUN".into(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use oci_spec::runtime::{Process, Spec};

    use super::super::tests::small;
    use super::*;

    #[test]
    fn a_member_that_cannot_be_read_is_named() {
        let mut json = small();
        json["process"]["rlimits"] = serde_json::json!([
            {"type": "RLIMIT_CPU", "soft": 1, "hard": 1},
            {"type": "RLIMIT_WEIGHT", "soft": 1, "hard": 1},
        ]);
        for document in [
            json.to_string(),
            serde_json::to_string_pretty(&json).unwrap(),
        ] {
            let message = read::<Spec>(document.as_bytes()).unwrap_err().to_string();
            assert!(
                message.starts_with("process.rlimits[1].type is not valid: "),
                "{message}"
            );
            assert!(message.contains("RLIMIT_WEIGHT"), "{message}");
        }
        let message = read::<Spec>(b"{\"ociVersion\"").unwrap_err().to_string();
        assert!(message.contains("EOF"), "{message}");
        assert_eq!(
            path_to(br#"{"a\"b": [5, {"c": "x,[{", "d": "#, 1, 30),
            "a\"b[1].d"
        );
    }

    #[test]
    fn flags_of_a_scheduler_are_read_as_the_specification_spells_them() {
        let flags = serde_json::json!([
            "SCHED_FLAG_RESET_ON_FORK",
            "SCHED_FLAG_RECLAIM",
            "SCHED_FLAG_DL_OVERRUN"
        ]);
        let scheduler = serde_json::json!({"policy": "SCHED_DEADLINE", "flags": flags});
        let process =
            serde_json::json!({"user": {"uid": 0, "gid": 0}, "cwd": "/", "scheduler": scheduler});
        let read_back: Process = read(process.to_string().as_bytes()).unwrap();
        let count = |process: &Process| {
            process
                .scheduler()
                .as_ref()
                .unwrap()
                .flags()
                .as_ref()
                .unwrap()
                .len()
        };
        assert_eq!(count(&read_back), 3);
        let mut json = small();
        json["process"] = process;
        let spec: Spec = read(json.to_string().as_bytes()).unwrap();
        assert_eq!(count(spec.process().as_ref().unwrap()), 3);
        json["process"]["scheduler"]["flags"] = serde_json::json!(["SCHED_FLAG_FAST"]);
        let error = read::<Spec>(json.to_string().as_bytes()).unwrap_err();
        assert!(error.to_string().contains("SCHED_FLAG_FAST"), "{error}");
    }
}
