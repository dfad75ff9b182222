//! Entropy and time: what a machine that was cloned or restored must be given anew.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;

/// `_IOW('R', 0x03, int[2])` of include/uapi/linux/random.h.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
/// `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// The most bytes that are taken at once; the kernel's pool holds far less.
const MOST: usize = 512;

/// struct rand_pool_info with its bytes.
#[repr(C)]
struct PoolInfo {
    entropy_count: i32,
    size: i32,
    bytes: [u8; MOST],
}

/// Adds bytes from the host, credits them in full, and has the generator take them at once.
pub fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    let random = OpenOptions::new().write(true).open("/dev/urandom")?;
    for chunk in bytes.chunks(MOST) {
        let mut info = PoolInfo {
            entropy_count: (chunk.len() * 8) as i32,
            size: chunk.len() as i32,
            bytes: [0; MOST],
        };
        info.bytes[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: the kernel reads the structure's head and then `size` of its bytes.
        check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    }
    // SAFETY: this ioctl has no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })
}

/// Sets the wall clock to nanoseconds since the epoch.
pub fn set_wall_clock(ns: i64) -> io::Result<()> {
    const SECOND: i64 = 1_000_000_000;
    let time = libc::timespec {
        tv_sec: ns.div_euclid(SECOND),
        tv_nsec: ns.rem_euclid(SECOND),
    };
    // SAFETY: the pointer is to a timespec.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) })
}

fn check(result: i32) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
