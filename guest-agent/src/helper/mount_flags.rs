//! What libcontainer (0.7) leaves to be done to a container's mounts once they are there: on
//! `linux.readonlyPaths` it forbids programs, devices and set-uid bits, too, which nobody has asked for; it sets no
//! propagation of mounts, and that of the root for the root alone; and it would make a tmpfs read-only before others are
//! mounted in it.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::sched::{CloneFlags, setns};
use oci_spec::runtime::{Linux, Mount, Spec};

use super::child::ChildError;
use super::executor::in_words;
use crate::spec::{LateMounts, clean, is_bind};

/// The flags of mount_setattr(2) and their names in mountinfo.
const FLAGS: [(u64, &str); 3] = [
    (libc::MOUNT_ATTR_NOSUID, "nosuid"),
    (libc::MOUNT_ATTR_NODEV, "nodev"),
    (libc::MOUNT_ATTR_NOEXEC, "noexec"),
];

/// Puts the mounts of a container right whose init has the process id `init`, and runs no program of the
/// container's yet. This process is in the container's mount namespace afterwards.
pub fn settle(spec: &Spec, late: &LateMounts, init: i32) -> Result<(), ChildError> {
    let linux = spec.linux().as_ref();
    let list = |of: fn(&Linux) -> &Option<Vec<String>>| {
        linux.and_then(|l| of(l).as_deref()).unwrap_or_default()
    };
    let masked = list(Linux::masked_paths);
    let readonly = list(Linux::readonly_paths)
        .iter()
        .filter(|path| !masked.contains(path));
    let readonly: Vec<_> = readonly.collect();
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    let root = late.propagation.map(|kind| (Path::new("/"), kind));
    let propagated: Vec<_> = on_top(mounts)
        .filter_map(|(_, mount)| Some((mount.destination().as_path(), propagation(mount)?)))
        .chain(root)
        .collect();
    if readonly.is_empty() && propagated.is_empty() && late.read_only.is_empty() {
        return Ok(());
    }
    let failed =
        |e: io::Error| ChildError::failed("cannot settle the container's mounts", in_words(&e));
    let table = fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(failed)?;
    let table = Mounts::parse(&table);
    let namespace = fs::File::open(format!("/proc/{init}/ns/mnt")).map_err(failed)?;
    setns(&namespace, CloneFlags::CLONE_NEWNS).map_err(|e| failed(e.into()))?;
    for path in readonly {
        restore(path, &table).map_err(failed)?;
    }
    for (_, mount) in on_top(mounts).filter(|(at, _)| late.read_only.contains(at)) {
        make_read_only(mount.destination()).map_err(failed)?;
    }
    for (place, kind) in propagated {
        let none = None::<&str>;
        nix::mount::mount(none, place, none, kind, none).map_err(|e| failed(e.into()))?;
    }
    Ok(())
}

/// Those mounts that no later one hides.
fn on_top(mounts: &[Mount]) -> impl Iterator<Item = (usize, &Mount)> {
    let hidden = |at: usize, place: &Path| {
        let mut later = mounts[at + 1..].iter();
        later.any(|other| clean(place).starts_with(clean(other.destination())))
    };
    mounts
        .iter()
        .enumerate()
        .filter(move |(at, mount)| !hidden(*at, mount.destination()))
}

/// The last propagation that a mount's options name. What the host mounts below the source of a bind comes, or not, by
/// virtio-fs, and what the container mounts there stays its own: of the kinds a bind's own is whether it can be bound.
fn propagation(mount: &Mount) -> Option<MsFlags> {
    let mut options = mount.options().iter().flatten().rev();
    let last = options.find_map(|option| {
        let (name, depth) = match option.strip_prefix('r') {
            Some(name) => (name, MsFlags::MS_REC),
            None => (option.as_str(), MsFlags::empty()),
        };
        let kind = match name {
            "private" => MsFlags::MS_PRIVATE,
            "shared" => MsFlags::MS_SHARED,
            "slave" => MsFlags::MS_SLAVE,
            "unbindable" => MsFlags::MS_UNBINDABLE,
            _ => return None,
        };
        Some(kind | depth)
    });
    last.filter(|kind| !is_bind(mount) || kind.contains(MsFlags::MS_UNBINDABLE))
}

/// The mounts of a namespace by their ids: that of the mount below, and the options.
struct Mounts<'a>(HashMap<u64, (u64, &'a str)>);

impl<'a> Mounts<'a> {
    /// proc(5): id, id of the parent, device, root, place, options.
    fn parse(mountinfo: &'a str) -> Self {
        let entries = mountinfo.lines().filter_map(|line| {
            let mut fields = line.split(' ');
            let id = fields.next()?.parse().ok()?;
            let parent = fields.next()?.parse().ok()?;
            Some((id, (parent, fields.nth(3)?)))
        });
        Self(entries.collect())
    }

    /// Those flags of a mount that the one below does not have.
    fn added(&self, id: u64) -> u64 {
        let options = |id: u64| self.0.get(&id).map(|(parent, options)| (*parent, *options));
        let Some((_, below)) = options(id).and_then(|(parent, _)| options(parent)) else {
            return 0;
        };
        FLAGS
            .iter()
            .filter(|(_, name)| !below.split(',').any(|option| option == *name))
            .fold(0, |flags, (flag, _)| flags | flag)
    }
}

/// A descriptor of what is at a path, to change its mount by.
fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: the path ends with NUL.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets and clears flags of the mount that the descriptor is in.
fn change(fd: &OwnedFd, set: u64, clear: u64) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: set,
        attr_clr: clear,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the empty path ends with NUL, and the structure is as long as its size says.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    Ok(Errno::result(result).map(drop)?)
}

fn make_read_only(place: &Path) -> io::Result<()> {
    change(&open(place)?, libc::MOUNT_ATTR_RDONLY, 0)
}

fn restore(path: &str, mounts: &Mounts<'_>) -> io::Result<()> {
    let fd = match open(Path::new(path)) {
        // A path that is not there is none to be made read-only.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    // SAFETY: statx is plain integers, for which all zeroes is a value.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the empty path ends with NUL, and the structure lives until the call returns.
    let result = unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_MNT_ID,
            &raw mut status,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    match mounts.added(status.stx_mnt_id) {
        0 => Ok(()),
        added => change(&fd, 0, added),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_below_a_later_one_is_hidden() {
        let mounts: Vec<Mount> = ["/a", "/b/c", "/a/x", "/b/../b", "/a"]
            .iter()
            .map(|place| serde_json::from_value(serde_json::json!({"destination": place})).unwrap())
            .collect();
        let places: Vec<_> = on_top(&mounts).map(|(_, m)| m.destination()).collect();
        assert_eq!(places, [Path::new("/b/../b"), Path::new("/a")]);
    }

    #[test]
    fn the_last_propagation_counts() {
        let of = |options: &[&str]| {
            let json =
                serde_json::json!({"destination": "/m", "type": "tmpfs", "options": options});
            propagation(&serde_json::from_value(json).unwrap())
        };
        assert_eq!(
            of(&["shared", "ro", "runbindable", "rw"]),
            Some(MsFlags::MS_UNBINDABLE | MsFlags::MS_REC)
        );
        assert_eq!(of(&["private"]), Some(MsFlags::MS_PRIVATE));
        assert_eq!(of(&["ro", "relatime"]), None);
        assert_eq!(of(&["rbind", "rprivate"]), None);
        assert_eq!(
            of(&["bind", "private", "unbindable"]),
            Some(MsFlags::MS_UNBINDABLE)
        );
    }

    #[test]
    fn flags_that_the_mount_below_has_stay() {
        let mounts = Mounts::parse(
            "20 1 0:30 / / rw,noatime - virtiofs share rw\n\
             21 20 0:31 / /proc rw,nosuid,nodev,noexec - proc proc rw\n\
             22 21 0:31 /sys /proc/sys ro,nosuid,nodev,noexec - proc proc rw\n\
             23 20 0:30 /usr /usr ro,nosuid,nodev,noexec,noatime - virtiofs share rw\n",
        );
        assert_eq!(mounts.added(22), 0);
        assert_eq!(
            mounts.added(23),
            libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC
        );
        assert_eq!(mounts.added(99), 0);
    }
}
