//! Files that all containers of a pod have, which no image has: `/etc/hostname`, `/etc/hosts`, `/etc/resolv.conf`, and
//! one `/dev/shm`. Where the CRI plugin controls a sandbox itself it makes them; a shim that is the controller does.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use serde_json::{Value, json};

use super::PodError;
use super::cri::cri::{DNSConfig, PodSandboxConfig};
use crate::mount::{self, Mount, MountError};
use crate::spec::Spec;
use crate::state::remove_file;
use crate::undo::Undo;

/// The size of `/dev/shm`, the same as the CRI plugin's.
const SHM_SIZE: u64 = 64 << 20;

const SHM: &str = "shm";

/// What a pod's files are to be.
pub struct Files {
    hostname: Option<String>,
    /// Absent: the host's.
    resolv_conf: Option<String>,
    /// Whether there is a `/dev/shm`: not for a pod that is to share the host's.
    shm: bool,
}

/// Why they cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file or directory.
    #[error("Cannot make the pod's {0}: {1}")]
    Make(&'static str, io::Error),
    /// The file system for shared memory.
    #[error("Cannot make the pod's /dev/shm: {0}")]
    Mount(#[from] MountError),
}

impl Files {
    pub(super) fn of(config: &PodSandboxConfig, shm: bool) -> Result<Self, PodError> {
        let hostname = Some(config.hostname.clone()).filter(|name| !name.is_empty());
        if let Some(name) = &hostname
            && name.contains(|c: char| c.is_control() || c.is_whitespace())
        {
            return Err(PodError::Hostname(name.clone()));
        }
        let dns = config.dns_config.as_ref();
        Ok(Self {
            hostname,
            resolv_conf: dns.map(resolv_conf).transpose()?,
            shm,
        })
    }

    /// Makes them in this new directory.
    pub fn make(&self, dir: &Path, undo: &mut Undo) -> Result<(), FilesError> {
        let directory = |path: &Path, undo: &mut Undo| {
            DirBuilder::new().mode(0o755).create(path)?;
            let made = path.to_owned();
            undo.push(format!("remove {}", path.display()), move || {
                std::fs::remove_dir(made)
            });
            Ok::<_, io::Error>(())
        };
        directory(dir, undo).map_err(|e| FilesError::Make("directory", e))?;
        let hostname = match &self.hostname {
            Some(name) => Ok(name.clone()),
            None => nix::unistd::gethostname()
                .map(|name| name.to_string_lossy().into_owned())
                .map_err(io::Error::from),
        };
        let resolv_conf = match &self.resolv_conf {
            Some(text) => Ok(text.clone()),
            None => of_host("/etc/resolv.conf"),
        };
        for (place, text) in [
            ("/etc/hostname", hostname.map(|name| name + "\n")),
            ("/etc/hosts", of_host("/etc/hosts")),
            ("/etc/resolv.conf", resolv_conf),
        ] {
            let path = dir.join(name_of(place));
            let made = path.clone();
            undo.push(format!("remove {}", path.display()), move || {
                remove_file(&made)
            });
            text.and_then(|text| std::fs::write(&path, text))
                .map_err(|e| FilesError::Make(place, e))?;
        }
        if self.shm {
            let target = dir.join(SHM);
            directory(&target, undo).map_err(|e| FilesError::Make("/dev/shm", e))?;
            let tmpfs = Mount {
                kind: "tmpfs".into(),
                source: SHM.into(),
                target: String::new(),
                options: ["nosuid", "noexec", "nodev", "mode=1777"]
                    .map(str::to_owned)
                    .into_iter()
                    .chain([format!("size={SHM_SIZE}")])
                    .collect(),
            };
            mount::mount_rootfs(&[tmpfs], &target)?;
            undo.push(format!("unmount {}", target.display()), move || {
                mount::unmount(&target)
            });
        }
        Ok(())
    }

    /// Gives those in this directory to a container, where it has nothing of its own there. Its root file system decides
    /// whether it may write to them, as it does with the CRI plugin's.
    pub fn give(&self, spec: &mut Spec, dir: &Path) {
        let access = if spec.has_readonly_root() { "ro" } else { "rw" };
        for place in ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"] {
            spec.add_mount(bind(place, &dir.join(name_of(place)), access), |_| false);
        }
        if self.shm {
            // Each container has an empty one by default.
            let is_default = |mount: &Value| mount["type"] == "tmpfs";
            spec.add_mount(bind("/dev/shm", &dir.join(SHM), "rw"), is_default);
        }
    }
}

fn name_of(place: &'static str) -> &'static str {
    place.rsplit('/').next().unwrap_or_default()
}

fn bind(destination: &str, source: &Path, access: &str) -> Value {
    json!({
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["rbind", "rprivate", access],
    })
}

/// A file of the host's; empty where it has none.
fn of_host(path: &str) -> io::Result<String> {
    match std::fs::read_to_string(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        result => result,
    }
}

/// resolv.conf(5).
fn resolv_conf(dns: &DNSConfig) -> Result<String, PodError> {
    let words = dns.servers.iter().chain(&dns.searches).chain(&dns.options);
    let is_word = |word: &&String| !word.is_empty() && !word.contains(char::is_whitespace);
    if let Some(bad) = words.into_iter().find(|word| !is_word(word)) {
        return Err(PodError::Dns(bad.clone()));
    }
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use protobuf::MessageField;

    use super::*;

    fn files(config: &PodSandboxConfig) -> Result<Files, PodError> {
        // Without a /dev/shm, for which one must be root.
        Files::of(config, false)
    }

    #[test]
    fn files_say_what_the_pods_configuration_does_and_go_with_the_pod() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("pod");
        let config = PodSandboxConfig {
            hostname: "web-0".into(),
            dns_config: MessageField::some(DNSConfig {
                servers: vec!["10.96.0.10".into(), "fd00::1".into()],
                searches: vec![
                    "default.svc.cluster.local".into(),
                    "svc.cluster.local".into(),
                ],
                options: vec!["ndots:5".into()],
                ..Default::default()
            }),
            ..Default::default()
        };
        let mut undo = Undo::new();
        files(&config).unwrap().make(&dir, &mut undo).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
        assert_eq!(read("hostname"), "web-0\n");
        assert_eq!(read("hosts"), of_host("/etc/hosts").unwrap());
        assert_eq!(
            read("resolv.conf"),
            "search default.svc.cluster.local svc.cluster.local\n\
             nameserver 10.96.0.10\nnameserver fd00::1\noptions ndots:5\n"
        );
        undo.run();
        assert!(!dir.exists());
    }

    #[test]
    fn a_pod_that_says_nothing_has_the_hosts_name_and_name_servers() {
        let root = tempfile::tempdir().unwrap();
        let mut undo = Undo::new();
        let dir = root.path().join("pod");
        let made = files(&PodSandboxConfig::default()).unwrap();
        made.make(&dir, &mut undo).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
        let host = nix::unistd::gethostname().unwrap();
        assert_eq!(read("hostname"), format!("{}\n", host.to_string_lossy()));
        assert_eq!(read("resolv.conf"), of_host("/etc/resolv.conf").unwrap());
    }

    #[test]
    fn no_name_can_write_a_line_of_its_own() {
        let hostname = PodSandboxConfig {
            hostname: "a\nb".into(),
            ..Default::default()
        };
        assert!(matches!(files(&hostname), Err(PodError::Hostname(_))));
        for bad in ["", "1.1.1.1\nnameserver 2.2.2.2", "a b"] {
            let dns = PodSandboxConfig {
                dns_config: MessageField::some(DNSConfig {
                    servers: vec![bad.into()],
                    ..Default::default()
                }),
                ..Default::default()
            };
            assert!(matches!(files(&dns), Err(PodError::Dns(_))), "{bad:?}");
        }
    }

    #[test]
    fn containers_have_them_unless_they_have_something_else_there() {
        let parse = |value: Value| Spec::parse(value.to_string().as_bytes()).unwrap();
        let files = Files {
            hostname: None,
            resolv_conf: None,
            shm: true,
        };
        // As the shim looks for what the host is to bind.
        let places = |spec: Spec| -> Vec<(String, String, bool)> {
            let guest = spec.translate("c", Path::new("/b"), "/s").unwrap();
            let volumes = guest.volumes.iter();
            let text = |path: &Path| path.display().to_string();
            volumes
                .map(|v| {
                    let read_only = v.access == mount::Access::ReadOnly;
                    (text(&v.destination), text(&v.source), read_only)
                })
                .collect()
        };
        let place = |place: &str, source: &str, ro: bool| (place.to_owned(), source.to_owned(), ro);
        let mut spec = parse(json!({
            "root": {"readonly": true},
            "mounts": [
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["size=65536k"]},
                {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts", "options": ["rbind"]},
            ],
        }));
        files.give(&mut spec, Path::new("/p"));
        assert_eq!(
            places(spec),
            [
                place("/dev/shm", "/p/shm", false),
                place("/etc/hosts", "/kubelet/hosts", false),
                place("/etc/hostname", "/p/hostname", true),
                place("/etc/resolv.conf", "/p/resolv.conf", true),
            ]
        );
        let mut spec = parse(json!({"mounts": [
            {"destination": "/dev/shm/", "type": "bind", "source": "/volume", "options": ["rbind"]},
        ]}));
        files.give(&mut spec, Path::new("/p"));
        let got = places(spec);
        assert_eq!(got.len(), 4);
        assert_eq!(got[0], place("/dev/shm/", "/volume", false));
    }
}
