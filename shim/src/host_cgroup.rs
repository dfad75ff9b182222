//! The cgroup on the host that the container's spec names: the hypervisor lives in it, so that
//! what the VM uses counts where containerd and the kubelet look.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::process_id;
use crate::undo::Undo;

/// Where cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Why there is no cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The path leads out of the hierarchy.
    #[error("The cgroup path {0:?} must not contain '..'")]
    BadPath(String),
    /// The kernel's tables cannot be read.
    #[error("Cannot read {0}: {1}")]
    Read(&'static str, io::Error),
    /// The cgroup cannot be made or joined.
    #[error("Cannot make the cgroup {0:?}: {1}")]
    Create(PathBuf, io::Error),
    /// A process cannot be moved there.
    #[error("Cannot move a process into the cgroup {0:?}: {1}")]
    Join(PathBuf, io::Error),
}

/// Whether the host has cgroup v2 alone.
pub fn is_unified() -> bool {
    nix::sys::statfs::statfs(ROOT)
        .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}

/// A cgroup: one directory with v2, one in each hierarchy with v1.
#[derive(Debug)]
pub struct HostCgroup {
    directories: Vec<PathBuf>,
}

impl HostCgroup {
    /// The cgroup of an OCI `cgroupsPath`: absolute, relative to this process's own, or systemd's
    /// `slice:prefix:name`.
    pub fn locate(cgroups_path: &str) -> Result<Self, CgroupError> {
        let path = expand_systemd(cgroups_path).unwrap_or_else(|| cgroups_path.to_owned());
        if Path::new(&path)
            .components()
            .any(|c| c == Component::ParentDir)
        {
            return Err(CgroupError::BadPath(path));
        }
        let table = std::fs::read_to_string("/proc/self/cgroup")
            .map_err(|e| CgroupError::Read("/proc/self/cgroup", e))?;
        let directories = if is_unified() {
            let own = table
                .lines()
                .find_map(|l| l.strip_prefix("0::"))
                .unwrap_or("/");
            vec![join(Path::new(ROOT), own, &path)]
        } else {
            let mounts = std::fs::read_to_string("/proc/self/mountinfo")
                .map_err(|e| CgroupError::Read("/proc/self/mountinfo", e))?;
            hierarchies(&table, &mounts)
                .into_iter()
                .map(|(mount_point, own)| join(&mount_point, own, &path))
                .collect()
        };
        Ok(Self { directories })
    }

    /// Makes the cgroup. A part of it that is there already is joined, and kept afterwards.
    pub fn create(&self, undo: &mut Undo) -> Result<(), CgroupError> {
        for directory in &self.directories {
            let error = |e| CgroupError::Create(directory.clone(), e);
            if let Some(parent) = directory.parent() {
                std::fs::create_dir_all(parent).map_err(error)?;
            }
            match std::fs::create_dir(directory) {
                Ok(()) => {
                    let made = directory.clone();
                    undo.push(format!("remove the cgroup {}", made.display()), move || {
                        remove(&made, Instant::now() + PATIENCE)
                    });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(error(e)),
            }
            inherit_cpuset(directory).map_err(error)?;
        }
        Ok(())
    }

    /// The files that a process writes "0" to in order to move itself here.
    pub fn process_files(&self) -> Result<Vec<File>, CgroupError> {
        self.directories
            .iter()
            .map(|directory| {
                let path = directory.join("cgroup.procs");
                OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .map_err(|e| CgroupError::Join(directory.clone(), e))
            })
            .collect()
    }

    /// Moves a process here.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        for directory in &self.directories {
            std::fs::write(directory.join("cgroup.procs"), pid.to_string())
                .map_err(|e| CgroupError::Join(directory.clone(), e))?;
        }
        Ok(())
    }

    /// Its directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }
}

/// In a v1 hierarchy with cpusets a new cgroup has neither processors nor memory nodes, and takes no process until it
/// has (Documentation/admin-guide/cgroup-v1/cpusets.rst, section 2.1): it gets those of its parent.
fn inherit_cpuset(directory: &Path) -> io::Result<()> {
    let v1 = nix::sys::statfs::statfs(directory)?.filesystem_type()
        == nix::sys::statfs::CGROUP_SUPER_MAGIC;
    if !v1 || !directory.join("cpuset.cpus").exists() {
        return Ok(());
    }
    // The root of the hierarchy has all of them.
    let known = |level: &&Path| {
        ["cpuset.cpus", "cpuset.mems"].iter().all(|file| {
            std::fs::read_to_string(level.join(file)).map_or(true, |list| !list.trim().is_empty())
        })
    };
    let new: Vec<&Path> = directory
        .ancestors()
        .take_while(|level| !known(level))
        .collect();
    for level in new.into_iter().rev() {
        let Some(parent) = level.parent() else {
            continue;
        };
        for file in ["cpuset.cpus", "cpuset.mems"] {
            std::fs::write(level.join(file), std::fs::read(parent.join(file))?)?;
        }
    }
    Ok(())
}

/// How long cgroups may have processes that are ending. What lasts longer is somebody else's.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Removes a cgroup whose processes have ended, or do so until the deadline; one that is gone is no error.
///
/// A machine's end is not its processes' end alone: KVM's kernel threads (`kvm_vm_create_worker_thread()` in
/// virt/kvm/kvm_main.c) live in the cgroup too, until the last reference to the machine is gone.
pub fn remove(directory: &Path, deadline: Instant) -> io::Result<()> {
    loop {
        match std::fs::remove_dir(directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(e);
                }
                match File::open(directory.join("cgroup.events")) {
                    Ok(events) if becomes_empty(&events, left)? => {
                        // Busy once more, it has cgroups of somebody else's in it.
                        return match std::fs::remove_dir(directory) {
                            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                            result => result,
                        };
                    }
                    Ok(_) => return Err(e),
                    Err(_) => a_process_ends(directory, left)?,
                }
            }
            result => return result,
        }
    }
}

/// Waits no longer than `limit` until nothing runs in a cgroup of v2, by its `cgroup.events`. False if something still does.
///
/// The list of its processes is not the whole truth: of a process whose last thread is ending it says nothing any more
/// (`css_task_iter_advance()` in kernel/cgroup/cgroup.c), while the kernel still frees its memory.
fn becomes_empty(mut events: &File, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let mut text = String::new();
        // What was read is what the next wait waits for a change of.
        events.rewind()?;
        events.read_to_string(&mut text)?;
        if text.lines().any(|line| line == "populated 0") {
            return Ok(true);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(events.as_fd(), PollFlags::POLLPRI)];
        if poll(
            &mut fds,
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX),
        )? == 0
        {
            return Ok(false);
        }
    }
}

/// Waits no longer than `limit` for the end of a process in a cgroup of v1, which has no file to wait with.
fn a_process_ends(directory: &Path, limit: Duration) -> io::Result<()> {
    /// Between two looks, where the list does not name who is still there.
    const PAUSE: Duration = Duration::from_millis(20);
    let list = std::fs::read_to_string(directory.join("cgroup.procs"))?;
    // 0 is a process of another PID namespace.
    let pids = list
        .lines()
        .filter_map(|line| line.parse().ok().filter(|pid| *pid != 0));
    let handles: Result<Vec<_>, _> = pids.map(process_id::open).collect();
    match handles {
        Ok(handles) if handles.is_empty() => std::thread::sleep(PAUSE.min(limit)),
        Ok(handles) => {
            process_id::one_ends(&handles, limit)?;
        }
        // One of them has ended since.
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
        Err(e) => return Err(e),
    }
    Ok(())
}

fn join(mount_point: &Path, own: &str, path: &str) -> PathBuf {
    match path.strip_prefix('/') {
        Some(absolute) => mount_point.join(absolute.trim_start_matches('/')),
        None => mount_point.join(own.trim_start_matches('/')).join(path),
    }
}

/// `slice:prefix:name` is `prefix-name.scope` (or `name` if it names a slice) below the slice,
/// whose own parents its name lists: `a-b.slice` lies in `a.slice`.
fn expand_systemd(path: &str) -> Option<String> {
    let mut parts = path.split(':');
    let (slice, prefix, name) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || path.contains('/') {
        return None;
    }
    let slice = if slice.is_empty() {
        "system.slice"
    } else {
        slice
    };
    let stem = slice.strip_suffix(".slice")?;
    let mut expanded = String::new();
    if stem != "-" {
        for (at, _) in stem.match_indices('-').chain([(stem.len(), "")]) {
            expanded.push('/');
            expanded.push_str(&stem[..at]);
            expanded.push_str(".slice");
        }
    }
    expanded.push('/');
    if name.ends_with(".slice") {
        expanded.push_str(name);
    } else {
        if !prefix.is_empty() {
            expanded.push_str(prefix);
            expanded.push('-');
        }
        expanded.push_str(name);
        expanded.push_str(".scope");
    }
    Some(expanded)
}

/// The mount point of each v1 hierarchy (and of v2 beside them) with this process's path in it.
fn hierarchies<'a>(table: &'a str, mounts: &str) -> Vec<(PathBuf, &'a str)> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((fields, tail)) = line.split_once(" - ") else {
            continue;
        };
        let mut tail = tail.split(' ');
        let kind = tail.next().unwrap_or_default();
        let options = tail.nth(1).unwrap_or_default();
        let Some(mount_point) = fields.split(' ').nth(4) else {
            continue;
        };
        let own = table.lines().find_map(|entry| {
            let (_, entry) = entry.split_once(':')?;
            let (controllers, path) = entry.split_once(':')?;
            let matches = match kind {
                "cgroup2" => controllers.is_empty(),
                "cgroup" => {
                    !controllers.is_empty()
                        && controllers
                            .split(',')
                            .all(|c| options.split(',').any(|o| o == c))
                }
                _ => false,
            };
            matches.then_some(path)
        });
        if let Some(own) = own {
            found.push((PathBuf::from(mount_point), own));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemds_notation_names_a_scope_below_nested_slices() {
        let expand = |p: &str| expand_systemd(p);
        assert_eq!(
            expand("kubepods-besteffort-pod1.slice:cri-containerd:abc").as_deref(),
            Some(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-abc.scope"
            )
        );
        assert_eq!(
            expand(":docker:abc").as_deref(),
            Some("/system.slice/docker-abc.scope")
        );
        assert_eq!(expand("-.slice::abc").as_deref(), Some("/abc.scope"));
        assert_eq!(expand("/default/abc"), None);
    }

    #[test]
    fn each_v1_hierarchy_is_found_with_the_own_path_in_it() {
        let mounts = "\
30 24 0:26 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
33 24 0:29 / /proc rw - proc proc rw\n";
        let table = "2:cpu,cpuacct:/a\n1:name=systemd:/b\n0::/c\n";
        assert_eq!(
            hierarchies(table, mounts),
            [
                (PathBuf::from("/sys/fs/cgroup/systemd"), "/b"),
                (PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"), "/a"),
                (PathBuf::from("/sys/fs/cgroup/unified"), "/c"),
            ]
        );
    }

    /// A cgroup of v2 or of one v1 hierarchy, gone when dropped.
    struct Cgroup(PathBuf);

    impl Cgroup {
        fn new(name: &str) -> Self {
            let root = Path::new(ROOT);
            let hierarchy = match is_unified() {
                true => root.to_owned(),
                false => root.join("pids"),
            };
            let directory = hierarchy.join(format!("cube-test-{name}-{}", std::process::id()));
            std::fs::create_dir(&directory).unwrap();
            Self(directory)
        }

        fn holds_a_sleeper(&self) -> std::process::Child {
            let child = std::process::Command::new("sleep")
                .arg("1000")
                .spawn()
                .unwrap();
            std::fs::write(self.0.join("cgroup.procs"), child.id().to_string()).unwrap();
            child
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    #[test]
    fn a_cgroup_is_removed_when_its_last_process_ends() {
        let cgroup = Cgroup::new("ends");
        let mut children = [cgroup.holds_a_sleeper(), cgroup.holds_a_sleeper()];
        let directory = cgroup.0.clone();
        let removing = std::thread::spawn(move || remove(&directory, Instant::now() + PATIENCE));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        removing.join().unwrap().unwrap();
        assert!(!cgroup.0.exists());
        remove(&cgroup.0, Instant::now() + PATIENCE).unwrap();
    }

    #[test]
    fn a_cgroup_with_a_process_that_does_not_end_stays() {
        let cgroup = Cgroup::new("stays");
        let mut child = cgroup.holds_a_sleeper();
        let error = remove(&cgroup.0, Instant::now() + PATIENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn relative_paths_lie_below_the_own_cgroup_and_none_leads_out() {
        let root = Path::new("/c");
        assert_eq!(join(root, "/own", "x"), Path::new("/c/own/x"));
        assert_eq!(join(root, "/own", "/x"), Path::new("/c/x"));
        assert!(matches!(
            HostCgroup::locate("/a/../../b"),
            Err(CgroupError::BadPath(_))
        ));
    }
}
