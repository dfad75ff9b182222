//! A container's cgroup: one directory of the guest's cgroup v2 tree.
//!
//! Documentation/admin-guide/cgroup-v2.rst of Linux describes all files that are used here.

pub mod devices;
pub mod oom;
mod resources;
pub mod stats;

use std::fs;
use std::io::{self, Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxDeviceCgroup, LinuxResources};
use tokio::io::Interest;

use crate::transport::watch;

/// Where the tree is mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

/// A failure around a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file could not be read.
    #[error("Cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// A file could not be written.
    #[error("Cannot write {value:?} to {}", .file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What was written.
        value: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A directory could not be made.
    #[error("Cannot make the cgroup {}", .0.display())]
    Make(PathBuf, #[source] io::Error),
    /// A directory could not be removed.
    #[error("Cannot remove the cgroup {}", .0.display())]
    Remove(PathBuf, #[source] io::Error),
    /// A file does not have the kernel's format.
    #[error("Cannot understand {}: {text:?}", .0.display(), text = .1)]
    Format(PathBuf, String),
    /// A setting that cgroup v2, or the guest, does not have.
    #[error("{field} cannot be used in a microVM: {reason}")]
    Unsupported {
        /// The field's name in the specification.
        field: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// A setting whose value makes no sense.
    #[error("{0} is not valid: {1}")]
    Invalid(&'static str, String),
    /// The device filter could not be put in place.
    #[error("Cannot filter devices")]
    Devices(#[source] io::Error),
}

impl CgroupError {
    /// Whether the request is at fault: what it asks for cannot be had.
    pub fn is_invalid(&self) -> bool {
        match self {
            Self::Unsupported { .. } | Self::Invalid(..) => true,
            // The kernel refuses values by these.
            Self::Write { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::EINVAL | libc::ERANGE | libc::ENODEV | libc::EOPNOTSUPP)
            ),
            _ => false,
        }
    }
}

type Result<T> = std::result::Result<T, CgroupError>;

/// A cgroup.
#[derive(Clone, Debug)]
pub struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// The cgroup at an absolute path below the root cgroup, which exists.
    pub fn existing(path: &str) -> Self {
        Self {
            dir: Path::new(ROOT).join(path.trim_start_matches('/')),
        }
    }

    /// Whether it is there.
    pub fn exists(&self) -> bool {
        self.dir.exists()
    }

    /// Makes the cgroup at an absolute path below the root cgroup.
    pub fn create(path: &str) -> Result<Self> {
        let cgroup = Self::existing(path);
        match fs::create_dir(&cgroup.dir) {
            Ok(()) => Ok(cgroup),
            Err(e) => Err(CgroupError::Make(cgroup.dir, e)),
        }
    }

    /// Gives the cgroups below this one every controller that it has itself.
    pub fn delegate(&self) -> Result<()> {
        let controllers = read(&self.file("cgroup.controllers"))?;
        let enable: Vec<_> = controllers
            .split_ascii_whitespace()
            .map(|name| format!("+{name}"))
            .collect();
        if enable.is_empty() {
            return Ok(());
        }
        self.write("cgroup.subtree_control", &enable.join(" "))
    }

    /// The file with this name.
    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        write(self.file(name), value)
    }

    /// Sets limits. What the specification does not mention stays as it is.
    pub fn apply(&self, asked: &LinuxResources) -> Result<()> {
        resources::apply(self, asked)
    }

    /// Lets processes use only the devices that the rules allow, and those that every container has.
    pub fn allow_devices(&self, rules: Option<&[LinuxDeviceCgroup]>) -> Result<()> {
        devices::restrict(&self.dir, rules.unwrap_or_default())
    }

    /// Moves the calling process in. If the container has made cgroups of its own below this one
    /// and runs there, then to where its init is.
    pub fn join(&self, init: i32) -> Result<()> {
        match self.write("cgroup.procs", "0") {
            Err(CgroupError::Write { source, .. })
                if source.raw_os_error() == Some(libc::EBUSY) =>
            {
                let of_init = PathBuf::from(format!("/proc/{init}/cgroup"));
                let text = read(&of_init)?;
                let path = text
                    .lines()
                    .find_map(|line| line.strip_prefix("0::"))
                    .ok_or_else(|| CgroupError::Format(of_init, text.clone()))?;
                Self::existing(path).write("cgroup.procs", "0")
            }
            joined => joined,
        }
    }

    /// The PIDs of all processes in it and below.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        self.each(&mut |dir| {
            let file = dir.join("cgroup.procs");
            match fs::read_to_string(&file) {
                Ok(text) => pids.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok())),
                // Threaded cgroups list their processes in the one above; others may just have gone.
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EOPNOTSUPP | libc::ENODEV | libc::ENOENT)
                    ) => {}
                Err(e) => return Err(CgroupError::Read(file, e)),
            }
            Ok(())
        })?;
        pids.sort_unstable();
        Ok(pids)
    }

    /// Kills everything in it and below.
    pub fn kill(&self) -> Result<()> {
        self.write("cgroup.kill", "1")
    }

    /// Freezes or thaws everything in it and below; resolves when that is done.
    pub async fn freeze(&self, frozen: bool) -> Result<()> {
        let value = if frozen { "1" } else { "0" };
        self.write("cgroup.freeze", value)?;
        self.event("frozen", value).await
    }

    /// Resolves when nothing runs in it or below.
    pub async fn empty(&self) -> Result<()> {
        self.event("populated", "0").await
    }

    /// Resolves when `key` in cgroup.events has this value.
    async fn event(&self, key: &str, value: &str) -> Result<()> {
        let path = self.file("cgroup.events");
        let failed = |e| CgroupError::Read(path.clone(), e);
        let mut file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(failed)?;
        // Most often there is nothing to wait for.
        if has_event(&mut file, key, value).map_err(failed)? {
            return Ok(());
        }
        let mut file = watch(file, Interest::PRIORITY).map_err(failed)?;
        loop {
            if has_event(file.get_mut(), key, value).map_err(failed)? {
                return Ok(());
            }
            let mut ready = file.ready(Interest::PRIORITY).await.map_err(failed)?;
            ready.clear_ready();
        }
    }

    /// Removes it and what is below.
    pub fn remove(&self) -> Result<()> {
        self.each(&mut |dir| match fs::remove_dir(dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(CgroupError::Remove(dir.to_owned(), e))
            }
            _ => Ok(()),
        })
    }

    /// Visits it and all below, children first.
    fn each(&self, visit: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
        fn walk(dir: &Path, visit: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
            let entries = match fs::read_dir(dir) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(CgroupError::Read(dir.to_owned(), e)),
            };
            for entry in entries.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    walk(&entry.path(), visit)?;
                }
            }
            visit(dir)
        }
        walk(&self.dir, visit)
    }
}

fn has_event(file: &mut fs::File, key: &str, value: &str) -> io::Result<bool> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text
        .lines()
        .any(|line| line.split_once(' ') == Some((key, value))))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).map_err(|e| CgroupError::Read(file.to_owned(), e))
}

fn write(file: PathBuf, value: &str) -> Result<()> {
    // Not fs::write: that would create, and the cgroup file system does not let it.
    let written = fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .and_then(|opened| {
            crate::transport::write_fd(std::os::fd::AsFd::as_fd(&opened), value.as_bytes())
        });
    match written {
        Ok(_) => Ok(()),
        Err(source) => Err(CgroupError::Write {
            file,
            value: value.to_owned(),
            source,
        }),
    }
}
