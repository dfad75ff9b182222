//! Device numbers of disks: a specification has the host's, the guest has its own.

use serde_json::Value;

use crate::helper::BlockNumbers;

/// Gives the block devices of a whole specification, and what it says of them, the numbers that they have here.
pub fn specification(spec: &mut Value, disks: &[BlockNumbers]) {
    let Some(linux) = spec.get_mut("linux") else {
        return;
    };
    if let Some(devices) = linux.get_mut("devices") {
        each(devices, disks, is_block);
    }
    if let Some(resources) = linux.get_mut("resources") {
        self::resources(resources, disks);
    }
}

/// The same for `linux.resources` alone: device rules, weights and throttles.
pub fn resources(resources: &mut Value, disks: &[BlockNumbers]) {
    if let Some(rules) = resources.get_mut("devices") {
        each(rules, disks, is_block);
    }
    let block_io = resources.get_mut("blockIO").and_then(Value::as_object_mut);
    for limits in block_io.into_iter().flat_map(|limits| limits.values_mut()) {
        each(limits, disks, |_| true);
    }
}

fn is_block(device: &Value) -> bool {
    device.get("type").and_then(Value::as_str) == Some("b")
}

fn each(list: &mut Value, disks: &[BlockNumbers], is_meant: fn(&Value) -> bool) {
    let entries = list.as_array_mut().into_iter().flatten();
    for entry in entries.filter(|entry| is_meant(entry)) {
        let number = |key| entry.get(key).and_then(Value::as_i64);
        let numbers = number("major").zip(number("minor"));
        let disk = disks.iter().find(|disk| Some(disk.host) == numbers);
        if let (Some(disk), Some(entry)) = (disk, entry.as_object_mut()) {
            entry.insert("major".into(), disk.guest.0.into());
            entry.insert("minor".into(), disk.guest.1.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DISKS: [BlockNumbers; 2] = [
        BlockNumbers {
            host: (7, 0),
            guest: (254, 16),
        },
        // What one disk is here, another is on the host.
        BlockNumbers {
            host: (254, 16),
            guest: (254, 32),
        },
    ];

    #[test]
    fn disks_have_the_guests_numbers_wherever_they_are_named() {
        let mut spec = json!({"linux": {
            "devices": [
                {"type": "b", "path": "/dev/data", "major": 7, "minor": 0, "fileMode": 416, "uid": 5},
                {"type": "c", "path": "/dev/seven", "major": 7, "minor": 0},
                {"type": "b", "path": "/dev/other", "major": 7, "minor": 1},
                {"type": "b", "path": "/dev/vd", "major": 254, "minor": 16}
            ],
            "resources": {
                "devices": [
                    {"allow": false, "access": "rwm"},
                    {"allow": true, "type": "b", "major": 7, "minor": 0, "access": "rw"},
                    {"allow": true, "type": "c", "major": 7, "minor": 0, "access": "r"},
                    {"allow": true, "type": "b", "major": 7, "access": "r"}
                ],
                "blockIO": {
                    "weight": 10,
                    "throttleReadBpsDevice": [{"major": 7, "minor": 0, "rate": 600}]
                }
            }
        }});
        specification(&mut spec, &DISKS);
        assert_eq!(
            spec,
            json!({"linux": {
                "devices": [
                    {"type": "b", "path": "/dev/data", "major": 254, "minor": 16, "fileMode": 416, "uid": 5},
                    {"type": "c", "path": "/dev/seven", "major": 7, "minor": 0},
                    {"type": "b", "path": "/dev/other", "major": 7, "minor": 1},
                    {"type": "b", "path": "/dev/vd", "major": 254, "minor": 32}
                ],
                "resources": {
                    "devices": [
                        {"allow": false, "access": "rwm"},
                        {"allow": true, "type": "b", "major": 254, "minor": 16, "access": "rw"},
                        {"allow": true, "type": "c", "major": 7, "minor": 0, "access": "r"},
                        {"allow": true, "type": "b", "major": 7, "access": "r"}
                    ],
                    "blockIO": {
                        "weight": 10,
                        "throttleReadBpsDevice": [{"major": 254, "minor": 16, "rate": 600}]
                    }
                }
            }})
        );
    }

    #[test]
    fn what_is_no_specification_stays_as_it_is() {
        for value in [
            json!(null),
            json!([]),
            json!({"linux": {"devices": 5, "resources": []}}),
        ] {
            let mut same = value.clone();
            specification(&mut same, &DISKS);
            resources(&mut same, &DISKS);
            assert_eq!(same, value);
        }
    }
}
