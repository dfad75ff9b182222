//! The host's block devices that a specification names.

use serde_json::Value;

use super::{Spec, SpecError};

/// A block device of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// The first path that the container has it by.
    pub path: String,
    /// Its major number on the host.
    pub major: i64,
    /// Its minor number.
    pub minor: i64,
    /// Whether the container's device rules forbid writes.
    pub read_only: bool,
}

impl Spec {
    /// The host's block devices that are to be devices of the container, each once, however often it is named.
    pub fn block_devices(&self) -> Result<Vec<BlockDevice>, SpecError> {
        let mut found: Vec<BlockDevice> = Vec::new();
        let devices = self.get(&["linux", "devices"]).and_then(Value::as_array);
        for device in devices.into_iter().flatten() {
            if device.get("type").and_then(Value::as_str) != Some("b") {
                continue;
            }
            let path = device.get("path").and_then(Value::as_str);
            let path = path.unwrap_or_default().to_owned();
            let number = |key| device.get(key).and_then(Value::as_i64);
            let (Some(major), Some(minor)) = (number("major"), number("minor")) else {
                return Err(SpecError::Malformed(
                    format!("block device {path:?}"),
                    "one with a major and a minor number",
                ));
            };
            if found.iter().any(|d| (d.major, d.minor) == (major, minor)) {
                continue;
            }
            found.push(BlockDevice {
                read_only: !self.may_write(major, minor),
                path,
                major,
                minor,
            });
        }
        Ok(found)
    }

    /// Whether the device rules allow to write to a block device: each rule changes what those before it say.
    fn may_write(&self, major: i64, minor: i64) -> bool {
        let rules = self.get(&["linux", "resources", "devices"]);
        let Some(rules) = rules.and_then(Value::as_array).filter(|r| !r.is_empty()) else {
            return true;
        };
        let mut writable = false;
        for rule in rules {
            let text = |key| rule.get(key).and_then(Value::as_str).unwrap_or_default();
            let all = matches!(text("type"), "" | "a");
            // Without a number, or with a negative one, every number.
            let is = |key, number| {
                let wanted = rule.get(key).and_then(Value::as_i64);
                wanted.is_none_or(|n| n < 0 || n == number)
            };
            let matches = all || (text("type") == "b" && is("major", major) && is("minor", minor));
            if matches && (all || text("access").is_empty() || text("access").contains('w')) {
                writable = rule.get("allow").and_then(Value::as_bool) == Some(true);
            }
        }
        writable
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(value: Value) -> Spec {
        Spec::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn block_devices_are_found_once_each_and_written_to_as_far_as_the_rules_allow() {
        let device =
            |path, major, minor| json!({"type": "b", "path": path, "major": major, "minor": minor});
        let devices = json!([
            device("/dev/data", 7, 0),
            {"type": "c", "path": "/dev/null", "major": 1, "minor": 3},
            device("/dev/same", 7, 0),
            device("/dev/log", 7, 1)
        ]);
        let with = |rules: Value| {
            let value = json!({"linux": {"devices": &devices, "resources": {"devices": rules}}});
            let found = spec(value).block_devices().unwrap();
            let names: Vec<_> = found.iter().map(|d| &*d.path).collect();
            assert_eq!(names, ["/dev/data", "/dev/log"]);
            found.iter().map(|d| d.read_only).collect::<Vec<_>>()
        };
        let none = json!({"allow": false, "access": "rwm"});
        let rule = |minor: i64, access: &str| json!({"allow": true, "type": "b", "major": 7, "minor": minor, "access": access});
        assert_eq!(with(json!([])), [false, false]);
        assert_eq!(with(json!([none])), [true, true]);
        assert_eq!(
            with(json!([none, rule(0, "rwm"), rule(1, "r")])),
            [false, true]
        );
        assert_eq!(with(json!([none, rule(-1, "rw")])), [false, false]);
        assert_eq!(
            with(json!([none, {"allow": true, "type": "c", "access": "rwm"}])),
            [true, true]
        );
        assert_eq!(
            with(json!([none, {"allow": true, "type": "a", "access": "rwm"}])),
            [false, false]
        );
        let nameless = json!({"linux": {"devices": [{"type": "b", "path": "/dev/sda"}]}});
        let error = spec(nameless).block_devices().unwrap_err().to_string();
        assert!(error.contains("/dev/sda"), "{error}");
    }
}
