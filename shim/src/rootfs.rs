//! What containerd's list of mounts for a root file system means: directories, which the host mounts
//! and the guest has by virtio-fs, or images, which are disks of the machine and which the guest
//! mounts itself.
//!
//! A list is one or the other as a whole. With images the host mounts nothing: what a guest writes
//! into its disk, the host's kernel never reads. So an overlay over images needs a writable layer
//! that is an image as well.
//!
//! The lists of containerd's snapshotters, and what its mount manager makes of them, are in the
//! tests below.

use std::path::{Path, PathBuf};

use cube_agent_protocol::IMAGES_PATH;

use crate::mount::{Mount, Options};

/// What a list of mounts asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rootfs {
    /// To be mounted on the host, in this order.
    Host(Vec<Mount>),
    /// To be mounted in the guest.
    Guest(GuestRootfs),
}

/// A root file system that the guest mounts from disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestRootfs {
    /// The images, which become disks.
    pub images: Vec<Image>,
    /// The mounts, in this order.
    pub mounts: Vec<GuestMount>,
    /// The root file system's path in the guest.
    pub root: String,
}

/// A file or block device of the host with a file system in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its path.
    pub path: PathBuf,
    /// Whether nobody is to write to it.
    pub read_only: bool,
}

/// A mount in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestMount {
    /// The file system's type; empty for a bind.
    pub kind: String,
    /// The image that it mounts, by its place in the list of images.
    pub image: Option<usize>,
    /// The source, where it is no image.
    pub source: String,
    /// Where, an absolute path in the guest.
    pub target: String,
    /// Flags for mount(2).
    pub flags: u64,
    /// The file system's own options.
    pub data: String,
    /// More images that belong to the file system (`device=`), in this order.
    pub devices: Vec<usize>,
    /// Directories to be made before, and their modes.
    pub directories: Vec<(String, u32)>,
}

/// A list that cannot be carried out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RootfsError {
    /// A type that is neither a directory of the host nor a file system of the guest.
    #[error(
        "failed to mount rootfs component: {source_path:?} is of type {kind:?}, which neither the host mounts for a VM nor the guest knows"
    )]
    Kind {
        /// What is to be mounted.
        source_path: String,
        /// Its type.
        kind: String,
    },
    /// A preparation that containerd has to do.
    #[error(
        "failed to mount rootfs component: containerd has left {0:?} of the mount type {1:?} to this runtime, which does not do it"
    )]
    Transform(String, String),
    /// Text in braces that is none of containerd's.
    #[error("failed to mount rootfs component: cannot understand {0:?}")]
    Template(String),
    /// A reference to a mount that does not come before.
    #[error("failed to mount rootfs component: {0:?} names a mount that does not come before it")]
    Reference(String),
    /// A directory of the host in a list with images.
    #[error(
        "failed to mount rootfs component: {0:?} is a directory of the host, which an overlay in the guest cannot have beside images: give the snapshotter a size for its writable layers (default_size of the erofs snapshotter), or set erofs_in_guest = false"
    )]
    HostDirectory(String),
    /// An option that must not be ignored.
    #[error("failed to mount rootfs component: the option {0:?} of {1:?} is not possible in a VM")]
    Option(String, String),
    /// A mount outside of the root file system.
    #[error("failed to mount rootfs component: the target {0:?} leads out of the root file system")]
    Outside(String),
}

/// File systems that the host mounts: directories of its own, and pools of disks that are mounted there anyhow.
const HOST: [&str; 5] = ["", "btrfs", "overlay", "tmpfs", "zfs"];

/// File systems on a disk that the guest's kernel knows, and whether they can be written to.
const IMAGES: [(&str, bool); 6] = [
    ("erofs", false),
    ("ext2", true),
    ("ext3", true),
    ("ext4", true),
    ("squashfs", false),
    ("xfs", true),
];

/// containerd's notes to its mount manager.
const NOTE: &str = "X-containerd.";

impl Rootfs {
    /// Reads the list of the container `id`.
    pub fn plan(mounts: &[Mount], id: &str) -> Result<Self, RootfsError> {
        let mut has_images = false;
        for mount in mounts {
            let (_, kind) = transforms(&mount.kind);
            if is_bind(mount, kind) || HOST.contains(&kind) {
                continue;
            }
            if image_kind(kind).is_none() {
                return Err(RootfsError::Kind {
                    source_path: mount.source.clone(),
                    kind: kind.to_owned(),
                });
            }
            has_images = true;
        }
        if !has_images {
            return match mounts.iter().find(|m| m.kind.contains('/')) {
                None => Ok(Self::Host(mounts.to_vec())),
                Some(mount) => {
                    let (left, _) = transforms(&mount.kind);
                    Err(RootfsError::Transform(left.join("/"), mount.kind.clone()))
                }
            };
        }
        GuestPlan::new(id).finish(mounts).map(Self::Guest)
    }

    /// How many disks it takes.
    pub fn disks(&self) -> usize {
        match self {
            Self::Host(_) => 0,
            Self::Guest(rootfs) => rootfs.images.len(),
        }
    }
}

/// A type's preparations, the first one first, and what remains.
fn transforms(kind: &str) -> (Vec<&str>, &str) {
    let mut parts: Vec<&str> = kind.split('/').collect();
    let kind = parts.pop().unwrap_or_default();
    (parts, kind)
}

fn image_kind(kind: &str) -> Option<bool> {
    let found = IMAGES.iter().find(|(name, _)| *name == kind);
    found.map(|&(_, writable)| writable)
}

fn is_bind(mount: &Mount, kind: &str) -> bool {
    kind == "bind" || mount.options.iter().any(|o| o == "bind" || o == "rbind")
}

/// The list so far, in the guest.
struct GuestPlan {
    base: String,
    rootfs: GuestRootfs,
    /// Source, target and place of each mount, for what refers to them.
    made: Vec<Made>,
}

struct Made {
    source: String,
    target: String,
    place: String,
}

impl GuestPlan {
    fn new(id: &str) -> Self {
        let base = format!("{IMAGES_PATH}/{id}");
        Self {
            rootfs: GuestRootfs {
                root: format!("{base}/rootfs"),
                ..Default::default()
            },
            base,
            made: Vec::new(),
        }
    }

    /// As containerd's mount manager does it: what comes before the last mount with a preparation is
    /// mounted somewhere, to be referred to; that one and what comes after make the root file system.
    fn finish(mut self, mounts: &[Mount]) -> Result<GuestRootfs, RootfsError> {
        let first_of_root = mounts
            .iter()
            .rposition(|m| m.kind.contains('/'))
            .unwrap_or(0);
        for (n, mount) in mounts.iter().enumerate() {
            let place = if n < first_of_root {
                format!("{}/{n}", self.base)
            } else {
                self.in_root(&mount.target)?
            };
            self.add(mount, place)?;
        }
        Ok(self.rootfs)
    }

    fn in_root(&self, target: &str) -> Result<String, RootfsError> {
        let inside = target.trim_start_matches('/');
        let leads_out = Path::new(inside)
            .components()
            .any(|c| c == std::path::Component::ParentDir);
        if leads_out {
            return Err(RootfsError::Outside(target.to_owned()));
        }
        Ok(match inside {
            "" => self.rootfs.root.clone(),
            inside => format!("{}/{inside}", self.rootfs.root),
        })
    }

    fn add(&mut self, mount: &Mount, place: String) -> Result<(), RootfsError> {
        let (left, kind) = transforms(&mount.kind);
        if let Some(unknown) = left.iter().find(|t| !["format", "mkdir"].contains(t)) {
            return Err(RootfsError::Transform(
                (*unknown).to_owned(),
                mount.kind.clone(),
            ));
        }
        let source = self.resolve(&mount.source)?;
        let target = self.resolve(&mount.target)?;
        let mut options = Vec::with_capacity(mount.options.len());
        let mut planned = GuestMount {
            kind: kind.to_owned(),
            target: place.clone(),
            ..Default::default()
        };
        for option in &mount.options {
            let option = self.resolve(option)?;
            if let Some(path) = option.strip_prefix("X-containerd.mkdir.path=") {
                planned.directories.push(self.directory(path)?);
            } else if forbidden(&option) {
                return Err(RootfsError::Option(option, mount.source.clone()));
            } else if !option.starts_with(NOTE) {
                options.push(option);
            }
        }
        match image_kind(kind) {
            Some(writable) if !is_bind(mount, kind) => {
                self.add_image(planned, &source, writable, options);
            }
            _ => self.add_directory(planned, &source, &options)?,
        }
        self.made.push(Made {
            source,
            target,
            place,
        });
        Ok(())
    }

    fn add_image(
        &mut self,
        mut planned: GuestMount,
        source: &str,
        writable: bool,
        options: Vec<String>,
    ) {
        let (devices, options): (Vec<_>, Vec<_>) = options
            .into_iter()
            // The disk is what a loop device would be.
            .filter(|option| option != "loop")
            .partition(|option| option.starts_with("device="));
        let parsed = Options::parse(&options);
        let read_only = !writable || parsed.is_read_only();
        planned.image = Some(self.image(source, read_only));
        for device in &devices {
            let path = device.trim_start_matches("device=");
            let image = self.image(path, true);
            planned.devices.push(image);
        }
        planned.flags = parsed.flags() | if read_only { libc::MS_RDONLY } else { 0 };
        planned.data = parsed.whole_data();
        self.rootfs.mounts.push(planned);
    }

    fn image(&mut self, path: &str, read_only: bool) -> usize {
        self.rootfs.images.push(Image {
            path: path.into(),
            read_only,
        });
        self.rootfs.images.len() - 1
    }

    fn add_directory(
        &mut self,
        mut planned: GuestMount,
        source: &str,
        options: &[String],
    ) -> Result<(), RootfsError> {
        let parsed = Options::parse(options);
        planned.flags = parsed.flags();
        let bind = planned.kind == "bind" || planned.flags & libc::MS_BIND != 0;
        if bind {
            self.must_be_ours(source)?;
            planned.kind.clear();
            planned.flags |= libc::MS_BIND;
        }
        for option in options {
            let directories = ["lowerdir=", "upperdir=", "workdir="]
                .iter()
                .find_map(|key| option.strip_prefix(key));
            for directory in directories.into_iter().flat_map(|list| list.split(':')) {
                self.must_be_ours(directory)?;
            }
        }
        planned.source = source.to_owned();
        planned.data = parsed.whole_data();
        self.rootfs.mounts.push(planned);
        Ok(())
    }

    /// A directory in the guest that an earlier mount holds.
    fn must_be_ours(&self, path: &str) -> Result<(), RootfsError> {
        let below = Path::new(path).strip_prefix(&self.base);
        let is_ours = below.is_ok_and(|rest| {
            rest.components()
                .all(|c| matches!(c, std::path::Component::Normal(_)))
        });
        match is_ours {
            true => Ok(()),
            false => Err(RootfsError::HostDirectory(path.to_owned())),
        }
    }

    /// `PATH[:MODE[:UID:GID]]`; containerd makes directories for nobody but root.
    fn directory(&self, text: &str) -> Result<(String, u32), RootfsError> {
        let unknown = || RootfsError::Template(text.to_owned());
        let mut parts = text.split(':');
        let path = parts.next().unwrap_or_default();
        let mode = match parts.next() {
            None => 0o700,
            Some(mode) => u32::from_str_radix(mode, 8)
                .ok()
                .filter(|mode| *mode <= 0o777)
                .ok_or_else(unknown)?,
        };
        if !matches!(
            (parts.next(), parts.next(), parts.next()),
            (None, None, None) | (Some("0"), Some("0"), None)
        ) {
            return Err(unknown());
        }
        self.must_be_ours(path)?;
        Ok((path.to_owned(), mode))
    }

    /// Puts what containerd's templates refer to in their place.
    fn resolve(&self, text: &str) -> Result<String, RootfsError> {
        let mut resolved = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, tail)) = rest.split_once("{{") {
            let unknown = || RootfsError::Template(text.to_owned());
            let (expression, tail) = tail.split_once("}}").ok_or_else(unknown)?;
            resolved.push_str(before);
            let words: Vec<_> = expression.split_whitespace().collect();
            let made = |n: &str| {
                let n: usize = n.parse().map_err(|_| unknown())?;
                let made = self.made.get(n);
                made.map(|made| (n, made))
                    .ok_or_else(|| RootfsError::Reference(text.to_owned()))
            };
            match words[..] {
                ["source", n] => resolved.push_str(&made(n)?.1.source),
                ["target", n] => resolved.push_str(&made(n)?.1.target),
                ["mount", n] => resolved.push_str(&made(n)?.1.place),
                ["overlay", first, last] => {
                    let (first, last) = (made(first)?.0, made(last)?.0);
                    let (from, to) = (first.min(last), first.max(last));
                    let mut places: Vec<_> =
                        self.made[from..=to].iter().map(|m| &*m.place).collect();
                    if first > last {
                        places.reverse();
                    }
                    resolved.push_str(&places.join(":"));
                }
                _ => return Err(unknown()),
            }
            rest = tail;
        }
        resolved.push_str(rest);
        Ok(resolved)
    }
}

/// Options that promise something which the guest does not keep.
fn forbidden(option: &str) -> bool {
    ["X-containerd.dmverity", "uidmap=", "gidmap="]
        .iter()
        .any(|start| option.starts_with(start))
}

#[cfg(test)]
#[path = "rootfs_tests.rs"]
mod tests;
