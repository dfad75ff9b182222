//! The host's side of a network: a namespace for this thread alone, and TAPs in it.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::process::Command;

/// This thread, and what it starts, gets an empty network namespace of its own.
pub fn own_namespace() {
    // SAFETY: the call concerns this thread only, and no memory.
    let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    ip("link set lo up");
}

/// Runs `ip` in this thread's namespace.
pub fn ip(arguments: &str) {
    let status = Command::new("ip")
        .args(arguments.split(' '))
        .status()
        .unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Opens a new TAP as a machine's owner does, to be handed over.
pub fn open_tap(name: &str) -> File {
    let tun = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .unwrap();
    // SAFETY: an ifreq of zeroes is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the call reads and writes one ifreq.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    tun
}

/// Bytes and packets that the host received from and sent to the TAP.
pub struct Counters {
    pub received: (u64, u64),
    pub sent: (u64, u64),
}

/// The counters of `name` in this thread's namespace.
pub fn counters(name: &str) -> Counters {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(&format!("{name}:")))
        .unwrap();
    let numbers: Vec<u64> = line
        .split_whitespace()
        .map(|number| number.parse().unwrap())
        .collect();
    Counters {
        received: (numbers[0], numbers[1]),
        sent: (numbers[8], numbers[9]),
    }
}
