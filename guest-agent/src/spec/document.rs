//! Documents of the specification as they are spelt.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads a document of the specification.
///
/// # Errors
///
/// It is none.
pub fn read<T: DeserializeOwned>(document: &[u8]) -> serde_json::Result<T> {
    // Nearly always; it says best what is wrong, too.
    serde_json::from_slice(document)
        .or_else(|error| of_tree(serde_json::from_slice(document)?).map_err(|_| error))
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
