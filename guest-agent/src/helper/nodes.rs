//! Devices outside of `/dev`, which libcontainer (0.7) refuses to make. Each is made beside the container and bound to
//! its place, as runc does where a device cannot be made in the place itself.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, Uid, chown};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Mount, Spec};

use super::child::ChildError;
use super::executor::in_words;
use crate::inside;
use crate::spec::clean;

/// Takes the devices outside of `/dev` out of the specification and puts mounts of them in, of nodes below `dir`. What is
/// in a device's place already stays, as runc has it.
pub fn provide(spec: &mut Spec, rootfs: &Path, dir: &Path) -> Result<(), ChildError> {
    let Some(mut linux) = spec.linux().clone() else {
        return Ok(());
    };
    let all = linux.devices().clone().unwrap_or_default();
    let (inside, outside): (Vec<_>, Vec<_>) = all.into_iter().partition(is_in_dev);
    if outside.is_empty() {
        return Ok(());
    }
    let nodes = dir.join("devices");
    let failed =
        |e: io::Error| ChildError::failed("cannot make a device of linux.devices", in_words(&e));
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&nodes)
        .map_err(failed)?;
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    // One without a path is there for device rules alone, says runc.
    let outside = outside
        .iter()
        .filter(|device| device.path() != Path::new(""));
    for (device, at) in outside.zip(0..) {
        if inside::exists(rootfs, device.path()).map_err(failed)? {
            continue;
        }
        let node = nodes.join(format!("{at}"));
        make(device, &node).map_err(failed)?;
        mounts.push(bound(&node, device.path()));
    }
    linux.set_devices(Some(inside));
    spec.set_linux(Some(linux)).set_mounts(Some(mounts));
    Ok(())
}

fn is_in_dev(device: &LinuxDevice) -> bool {
    // libcontainer makes the node at the path as it is spelt.
    device.path().starts_with("/dev") && clean(device.path()).starts_with("/dev")
}

fn bound(node: &Path, place: &Path) -> Mount {
    let mut mount = Mount::default();
    // What the agent keeps of containers is mounted without devices.
    let options = ["bind", "rdev"].map(str::to_owned).to_vec();
    mount
        .set_destination(clean(place))
        .set_typ(Some("bind".into()))
        .set_source(Some(node.to_owned()))
        .set_options(Some(options));
    mount
}

fn make(device: &LinuxDevice, node: &Path) -> io::Result<()> {
    let number = |n: i64| u64::try_from(n).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    let kind = match device.typ() {
        LinuxDeviceType::B => SFlag::S_IFBLK,
        LinuxDeviceType::P => SFlag::S_IFIFO,
        _ => SFlag::S_IFCHR,
    };
    let mode = Mode::from_bits_truncate(device.file_mode().unwrap_or(0o666));
    let numbers = makedev(number(device.major())?, number(device.minor())?);
    mknod(node, kind, mode, numbers)?;
    let owner = device.uid().map(Uid::from_raw);
    chown(node, owner, device.gid().map(Gid::from_raw))?;
    // Without the umask.
    nix::sys::stat::fchmodat(
        None,
        node,
        mode,
        nix::sys::stat::FchmodatFlags::FollowSymlink,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    use super::*;

    #[test]
    fn a_device_outside_of_dev_is_bound_unless_something_is_in_its_place() {
        let rootfs = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(rootfs.path().join("taken"), "").unwrap();
        // A FIFO, which anybody may make.
        let device = |path: &str| serde_json::json!({"path": path, "type": "p", "major": 0, "minor": 0, "fileMode": 0o640});
        let mut spec: Spec = serde_json::from_value(serde_json::json!({
            "ociVersion": "1.1.0",
            "linux": {"devices": [device("/dev/x"), device("/a/b"), device("/taken"), device("/dev/../c"), device("")]},
        }))
        .unwrap();
        provide(&mut spec, rootfs.path(), dir.path()).unwrap();
        let left = spec.linux().as_ref().unwrap().devices().clone().unwrap();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].path(), Path::new("/dev/x"));
        let mounts = spec.mounts().as_ref().unwrap();
        let places: Vec<_> = mounts.iter().map(Mount::destination).collect();
        assert_eq!(places, [Path::new("/a/b"), Path::new("/c")]);
        let node = fs::metadata(mounts[0].source().as_ref().unwrap()).unwrap();
        assert!(node.file_type().is_fifo());
        assert_eq!(node.permissions().mode() & 0o7777, 0o640);
    }
}
