//! Fields that interact: the bundles of `oci/pairs` that no topic of the others has.

mod cgroups;
mod mounts;
mod namespaces;
mod process;

use cube_tests::small;
use serde_json::{Value, json};

use crate::bundle::Case;

pub fn cases() -> Vec<Case> {
    let mut cases = process::programs();
    cases.extend(process::directories());
    cases.extend(process::users());
    cases.extend(mounts::mounts());
    cases.extend(mounts::devices());
    cases.extend(namespaces::user_namespaces());
    cases.extend(namespaces::namespaces());
    cases.extend(process::filters());
    cases.extend(process::hooks());
    cases.extend(cgroups::cgroups());
    cases.extend(cgroups::updates());
    cases
}

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": kind, "source": source, "options": options})
}

/// What the small bundle mounts, with the mount at `destination` changed; none: taken out.
fn mounts_but(destination: &str, instead: Option<Value>) -> Value {
    let mut list = small()["mounts"].clone();
    let mounts = list.as_array_mut().unwrap();
    let at = mounts.iter().position(|m| m["destination"] == destination);
    let at = at.unwrap();
    match instead {
        Some(mount) => mounts[at] = mount,
        None => drop(mounts.remove(at)),
    }
    list
}

/// The namespaces of the small bundle but one.
fn without(kind: &str) -> Value {
    let mut list = small()["linux"]["namespaces"].clone();
    list.as_array_mut().unwrap().retain(|n| n["type"] != kind);
    list
}

/// A number of the host for the first 1000 of a user namespace.
fn mapping(host: u32) -> Value {
    json!([{"containerID": 0, "hostID": host, "size": 1000}])
}

/// A container with a user namespace, and a change to it.
fn in_user_namespace(change: Value) -> Value {
    let mut change = change;
    let linux = &mut change["linux"];
    let others = linux.get("namespaces").cloned();
    let mut list = others.unwrap_or_else(|| small()["linux"]["namespaces"].clone());
    list.as_array_mut().unwrap().push(json!({"type": "user"}));
    linux["namespaces"] = list;
    for (field, host) in [("uidMappings", 100_000), ("gidMappings", 200_000)] {
        if linux.get(field).is_none() {
            linux[field] = mapping(host);
        }
    }
    change
}

/// The root file system is that of a user namespace.
const OWNED: &str = "chown -R 100000:200000 rootfs; chmod 755 . ..";
