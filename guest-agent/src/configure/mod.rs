//! Guest-wide settings.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cube_agent_protocol::agent::{ConfigureRequest, Dns, Share};

mod clock;
mod network;

pub use network::bring_up_loopback;

/// A setting that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConfigureError {
    /// The kernel did not take it.
    #[error("Cannot set {0}")]
    Set(String, #[source] io::Error),
    /// A value that is not one.
    #[error("{0} is not valid: {1:?}")]
    Invalid(&'static str, String),
    /// A share could not be mounted.
    #[error("Cannot mount the share {tag:?} at {path}")]
    Share {
        /// The share's tag.
        tag: String,
        /// Where.
        path: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// No interface has the MAC address.
    #[error("No network interface has the MAC address {0}")]
    NoInterface(String),
    /// There are fewer vCPUs.
    #[error("{asked} vCPUs cannot be on line: the machine has {present}")]
    TooManyCpus {
        /// How many are asked for.
        asked: u32,
        /// How many there are.
        present: u32,
    },
}

impl ConfigureError {
    /// Whether the request is at fault.
    pub fn is_invalid(&self) -> bool {
        matches!(
            self,
            Self::Invalid(..) | Self::NoInterface(_) | Self::TooManyCpus { .. }
        )
    }

    fn set(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Set(what, error)
    }
}

type Result<T> = std::result::Result<T, ConfigureError>;

/// Makes all settings of a request. Entropy and time come first, since what follows may use them,
/// and after a restore no program must run with the old ones for longer than it has to.
pub fn configure(request: ConfigureRequest) -> Result<()> {
    if !request.entropy.is_empty() {
        clock::add_entropy(&request.entropy).map_err(ConfigureError::set("the entropy"))?;
    }
    if request.wall_clock_ns != 0 {
        clock::set_wall_clock(request.wall_clock_ns).map_err(ConfigureError::set("the clock"))?;
    }
    if !request.hostname.is_empty() {
        nix::unistd::sethostname(&request.hostname)
            .map_err(|e| ConfigureError::Set("the host name".into(), e.into()))?;
    }
    if !request.domainname.is_empty() {
        set_domainname(&request.domainname).map_err(ConfigureError::set("the domain name"))?;
    }
    if let Some(dns) = request.dns.as_ref() {
        fs::write("/etc/resolv.conf", resolv_conf(dns)?)
            .map_err(ConfigureError::set("/etc/resolv.conf"))?;
    }
    if !(request.interfaces.is_empty()
        && request.routes.is_empty()
        && request.neighbours.is_empty())
    {
        network::configure(&request.interfaces, &request.routes, &request.neighbours)?;
    }
    for (key, value) in &request.sysctls {
        set_sysctl(&crate::spec::sysctl_path(key), value)
            .map_err(ConfigureError::set(format!("sysctl {key} to {value:?}")))?;
    }
    if request.online_vcpus != 0 {
        set_online(request.online_vcpus)?;
    }
    for share in &request.shares {
        mount_share(share)?;
    }
    Ok(())
}

/// Sets the NIS domain name of the UTS namespace.
pub fn set_domainname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `name`.
    match unsafe { libc::setdomainname(name.as_ptr().cast(), name.len()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes a kernel setting; `path` is below /proc/sys.
pub fn set_sysctl(path: &str, value: &str) -> io::Result<()> {
    let normal = |part: &str| !part.is_empty() && part != "." && part != "..";
    if !path.split('/').all(normal) {
        return Err(io::Error::other("it is not the name of a setting"));
    }
    let file = fs::OpenOptions::new()
        .write(true)
        .open(Path::new("/proc/sys").join(path))?;
    // At once: the kernel takes a write for the whole value.
    crate::transport::write_fd(std::os::fd::AsFd::as_fd(&file), value.as_bytes())?;
    Ok(())
}

/// resolv.conf(5).
fn resolv_conf(dns: &Dns) -> Result<String> {
    let mut text = String::new();
    for server in &dns.servers {
        let _: std::net::IpAddr = server
            .split('%')
            .next()
            .unwrap_or_default()
            .parse()
            .map_err(|_| ConfigureError::Invalid("dns.servers", server.clone()))?;
        text += &format!("nameserver {server}\n");
    }
    for (key, field, words) in [
        ("search", "dns.searches", &dns.searches),
        ("options", "dns.options", &dns.options),
    ] {
        if let Some(bad) = words
            .iter()
            .find(|w| w.is_empty() || w.contains(char::is_whitespace))
        {
            return Err(ConfigureError::Invalid(field, bad.clone()));
        }
        if !words.is_empty() {
            text += &format!("{key} {}\n", words.join(" "));
        }
    }
    Ok(text)
}

/// Mounts a virtio-fs share, unless it is mounted there already.
fn mount_share(share: &Share) -> Result<()> {
    use nix::mount::{MsFlags, mount};
    if !share.path.starts_with('/') {
        return Err(ConfigureError::Invalid("shares[].path", share.path.clone()));
    }
    let failed = |source| ConfigureError::Share {
        tag: share.tag.clone(),
        path: share.path.clone(),
        source,
    };
    let mounted = fs::read_to_string("/proc/self/mounts").map_err(failed)?;
    // proc(5): blanks are escaped, and neither a tag nor a path of ours has any.
    let same = |line: &str| {
        let mut fields = line.split(' ');
        fields.next() == Some(&share.tag)
            && fields.next() == Some(&share.path)
            && fields.next() == Some("virtiofs")
    };
    if mounted.lines().any(same) {
        return Ok(());
    }
    fs::create_dir_all(&share.path).map_err(failed)?;
    let mut flags = MsFlags::MS_NOATIME;
    if share.read_only {
        flags |= MsFlags::MS_RDONLY;
    }
    mount(
        Some(share.tag.as_str()),
        share.path.as_str(),
        Some("virtiofs"),
        flags,
        None::<&str>,
    )
    .map_err(|e| failed(e.into()))
}

/// Brings vCPUs on line or takes them off, so that the first `count` are on line.
fn set_online(count: u32) -> Result<()> {
    const CPUS: &str = "/sys/devices/system/cpu";
    let read = |name: &str| {
        let path = PathBuf::from(CPUS).join(name);
        fs::read_to_string(&path).map_err(ConfigureError::set("the vCPUs on line"))
    };
    let present = highest(&read("present")?) + 1;
    if count > present {
        return Err(ConfigureError::TooManyCpus {
            asked: count,
            present,
        });
    }
    let online = read("online")?;
    // The first one is always on line and has no file to switch it.
    for cpu in 1..present {
        let wanted = cpu < count;
        if contains(&online, cpu) != wanted {
            let file = format!("{CPUS}/cpu{cpu}/online");
            fs::write(&file, if wanted { "1" } else { "0" }).map_err(ConfigureError::set(file))?;
        }
    }
    Ok(())
}

/// The ranges of a list such as "0-3,5".
fn ranges(list: &str) -> impl Iterator<Item = (u32, u32)> {
    list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((first.parse().ok()?, last.parse().ok()?))
    })
}

fn highest(list: &str) -> u32 {
    ranges(list).map(|(_, last)| last).max().unwrap_or(0)
}

fn contains(list: &str, cpu: u32) -> bool {
    ranges(list).any(|(first, last)| (first..=last).contains(&cpu))
}

/// Drops dentries and inodes that nothing uses; clean pages stay.
pub fn drop_caches() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "2").map_err(ConfigureError::set("vm.drop_caches"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(servers: &[&str], searches: &[&str], options: &[&str]) -> Dns {
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        let mut dns = Dns::new();
        dns.servers = owned(servers);
        dns.searches = owned(searches);
        dns.options = owned(options);
        dns
    }

    #[test]
    fn resolv_conf_has_servers_searches_and_options() {
        let text = resolv_conf(&dns(
            &["10.0.0.2", "fe80::1%eth0"],
            &["a.b", "b"],
            &["ndots:5"],
        ));
        assert_eq!(
            text.unwrap(),
            "nameserver 10.0.0.2\nnameserver fe80::1%eth0\nsearch a.b b\noptions ndots:5\n"
        );
        assert!(resolv_conf(&dns(&["dns.example"], &[], &[])).is_err());
        assert!(resolv_conf(&dns(&[], &["a b"], &[])).is_err());
        assert!(resolv_conf(&dns(&[], &[], &["x\noptions y"])).is_err());
    }

    #[test]
    fn lists_of_cpus_are_understood() {
        assert_eq!(highest("0-3,5\n"), 5);
        assert!(contains("0-3,5\n", 2) && contains("0-3,5\n", 5) && !contains("0-3,5\n", 4));
        assert_eq!(highest("0\n"), 0);
    }

    #[test]
    fn a_setting_does_not_climb_out_of_its_directory() {
        assert!(set_sysctl("../../tmp/x", "1").is_err());
        assert!(set_sysctl("net//ipv4", "1").is_err());
    }
}
