//! A network's backend on the host: a TAP interface.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
};

use crate::virtio::queue::{MAX_SEGMENTS, Segments};

/// Bytes before each packet: `struct virtio_net_hdr_v1` (virtio 1.2, section 5.1.6).
pub const HEADER: usize = 12;

/// What a TAP has to be: whole Ethernet frames, each with nothing but a virtio header before it.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Why something cannot be a network.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// An interface's name has 1 to 15 bytes.
    #[error("{0:?} cannot be the name of a TAP: it has 1 to 15 bytes")]
    Name(String),
    /// The TUN driver is missing or may not be used.
    #[error("Cannot open /dev/net/tun for the TAP {0} (is the module tun loaded?)")]
    Driver(String, #[source] io::Error),
    /// There is no such TAP and none can be made, or it is in use.
    #[error("Cannot use or create the TAP {0} (it is in use, no TAP, or needs CAP_NET_ADMIN)")]
    Attach(String, #[source] io::Error),
    /// The descriptor that was handed over is none of a TAP.
    #[error("The descriptor that was handed over is not that of a TAP")]
    NotTap(#[source] io::Error),
    /// The TAP was opened in a way that the device cannot work with.
    #[error(
        "The TAP {0} that was handed over was not opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    Flags(String),
    /// The host refuses a setting.
    #[error("Cannot set up the TAP {0}")]
    Setup(String, #[source] io::Error),
}

/// A TAP that packets are exchanged with. Never blocks.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    /// A socket plays the TAP in unit tests; there are no offloads to be set.
    #[cfg(test)]
    is_socket: bool,
}

impl Tap {
    /// Attaches to the TAP `name`, or creates it; one that is created goes away with this descriptor.
    ///
    /// # Errors
    ///
    /// There is none and none can be created, or it is in use.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let mut request = interface_request();
        let room = request.ifr_name.len() - 1;
        if name.is_empty() || name.len() > room || name.contains('\0') {
            return Err(TapError::Name(name.to_owned()));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = FLAGS as libc::c_short;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|e| TapError::Driver(name.to_owned(), e))?;
        // SAFETY: TUNSETIFF reads and writes one ifreq (drivers/net/tun.c).
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
            .map_err(|e| TapError::Attach(name.to_owned(), e))?;
        Self::set_up(file, name.to_owned())
    }

    /// The TAP behind `fd`, opened by somebody else.
    ///
    /// # Errors
    ///
    /// It is no TAP, or was opened with other flags than `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let file = File::from(fd);
        let mut request = interface_request();
        // SAFETY: TUNGETIFF writes one ifreq (drivers/net/tun.c).
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })
            .map_err(TapError::NotTap)?;
        let name: Vec<u8> = request
            .ifr_name
            .iter()
            .map(|&byte| byte as u8)
            .take_while(|&byte| byte != 0)
            .collect();
        let name = String::from_utf8_lossy(&name).into_owned();
        // SAFETY: the driver has filled in the flags.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        if flags & FLAGS != FLAGS {
            return Err(TapError::Flags(name));
        }
        // SAFETY: no memory is involved.
        let result = unsafe {
            let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
            libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)
        };
        check(result).map_err(|e| TapError::Setup(name.clone(), e))?;
        Self::set_up(file, name)
    }

    fn set_up(file: File, name: String) -> Result<Self, TapError> {
        let size = HEADER as libc::c_int;
        // SAFETY: TUNSETVNETHDRSZ reads one int (drivers/net/tun.c).
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) })
            .map_err(|e| TapError::Setup(name.clone(), e))?;
        Ok(Self {
            file,
            name,
            #[cfg(test)]
            is_socket: false,
        })
    }

    /// A socket that keeps packets apart, instead of a TAP.
    #[cfg(test)]
    pub fn from_socket(fd: OwnedFd) -> Self {
        Self {
            file: File::from(fd),
            name: "socket".to_owned(),
            is_socket: true,
        }
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface's MTU, if it can be found out: it lies in the network namespace of this thread.
    pub fn mtu(&self) -> Option<u16> {
        let mut request = interface_request();
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        // SAFETY: SIOCGIFMTU reads and writes one ifreq (netdevice(7)).
        check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) })
            .ok()?;
        // SAFETY: the kernel has filled in the MTU.
        u16::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
    }

    /// Lets the host send the guest what it understands according to the negotiated `features`: packets without a
    /// checksum, and large TCP segments.
    ///
    /// # Errors
    ///
    /// What the host says.
    pub fn set_offloads(&self, features: u64) -> io::Result<()> {
        #[cfg(test)]
        if self.is_socket {
            return Ok(());
        }
        let offloads = [
            (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
            (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        ]
        .iter()
        .filter(|(feature, _)| features & 1 << feature != 0)
        .fold(0, |all, (_, offload)| all | offload);
        // SAFETY: TUNSETOFFLOAD takes its argument by value (drivers/net/tun.c).
        check(unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(offloads),
            )
        })
    }

    /// Receives one packet with its header into `segments`, straight into guest memory. What does not fit is cut off.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is none, otherwise what the host says.
    pub fn receive(&self, segments: &Segments) -> io::Result<usize> {
        let iovecs = segments.iovecs();
        let count = iovecs.len().min(MAX_SEGMENTS) as libc::c_int;
        // SAFETY: the iovecs are of guest memory, see `Segments`; the guest may change it meanwhile, as for any DMA.
        let result = unsafe { libc::readv(self.file.as_raw_fd(), iovecs.as_ptr(), count) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Sends `segments`, a header and a packet, straight from guest memory.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when the host has no room now, otherwise what it says.
    pub fn send(&self, segments: &Segments) -> io::Result<()> {
        let iovecs = segments.iovecs();
        let count = iovecs.len().min(MAX_SEGMENTS) as libc::c_int;
        // SAFETY: see `receive`.
        let result = unsafe { libc::writev(self.file.as_raw_fd(), iovecs.as_ptr(), count) };
        match result {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

fn interface_request() -> libc::ifreq {
    // SAFETY: an ifreq of zeroes is valid: a name of no bytes and any of the union's members.
    unsafe { std::mem::zeroed() }
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_a_tap_is_refused_with_its_name() {
        for name in ["", "sixteen-letters-", "a\0b"] {
            assert!(matches!(Tap::open(name), Err(TapError::Name(_))));
        }
        let no_tap = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(matches!(Tap::from_fd(no_tap), Err(TapError::NotTap(_))));
    }
}
