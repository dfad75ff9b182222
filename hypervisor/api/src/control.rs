//! The control socket: a connected pair of `SOCK_SEQPACKET` Unix sockets, one JSON message a
//! packet, file descriptors beside it by `SCM_RIGHTS`.
//!
//! The owner of the machine (the shim) sends a [`Request`] and reads one [`Reply`] for it, in
//! order. Between replies an [`Event`] may come. When the owner closes its end the machine ends.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::VmConfig;
use crate::exit::ExitStatus;

/// The longest packet either side sends, in bytes. Longer ones are refused by the sender.
pub const MAX_PACKET: usize = 128 * 1024;

/// The most descriptors that one packet carries.
pub const MAX_FDS: usize = 8;

/// What the owner asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Build the machine and let it run. The first request, exactly once.
    Boot(Box<VmConfig>),
    /// Give the spare disk in `slot` (counted over `disks` and `spare_disks`) a backend; one
    /// descriptor: the image file or block device, open for reading, and for writing unless `read_only`.
    AttachDisk {
        /// The slot, from 0.
        slot: u8,
        /// Refuse the guest's writes.
        read_only: bool,
        /// What the guest reads as the disk's serial number from now on, at most 20 ASCII characters. Linux
        /// shows what it is now each time that `/sys/block/vdX/serial` is read. Default: empty.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        serial: String,
    },
    /// Take the disk out of `slot`: what the guest asks for from now on fails. Its requests that are under way end
    /// first, for however long the host lets them wait, then the descriptor is closed, the slot is spare again, and
    /// [`Event::DiskClosed`] says so.
    DetachDisk {
        /// The slot, from 0.
        slot: u8,
    },
    /// Give the spare network in `slot` (counted over `networks` and `spare_networks`) a backend
    /// and bring its link up; one descriptor: a TAP, opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    AttachNetwork {
        /// The slot, from 0.
        slot: u8,
    },
    /// Ask for the end of the guest's console.
    Console,
    /// Inject a non-maskable interrupt into the first vCPU. A Linux guest started with
    /// `unknown_nmi_panic` reports where it hangs and resets.
    InjectNmi,
    /// End the machine at once, as if its power were cut.
    Stop,
}

/// What the hypervisor answers to one [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// Done.
    Done,
    /// The answer to [`Request::Console`].
    Console(String),
    /// The request could not be carried out; one line that names cause and cure.
    Failed(String),
}

/// What the hypervisor says unasked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Event {
    /// The machine has ended; the last packet, the process exits with this status next.
    Ended {
        /// Why.
        status: ExitStatus,
        /// One line for a person.
        message: String,
        /// The end of what the guest wrote to its console, at most 16 KiB.
        console: String,
    },
    /// The guest holds many inodes of a share (see `FORGET_THRESHOLD` in the hypervisor): each costs
    /// a descriptor on the host, so the guest should drop caches that it does not need.
    ShareCrowded {
        /// The share's tag.
        tag: String,
        /// Inodes held now.
        inodes: u64,
    },
    /// A disk that was detached is closed.
    DiskClosed {
        /// The slot that it was in.
        slot: u8,
    },
}

/// A packet from the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromHypervisor {
    /// The answer to the oldest unanswered request.
    Reply(Reply),
    /// Something that happened.
    Event(Event),
}

/// A failure on the control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The socket failed.
    #[error("Cannot use the control socket")]
    Socket(#[source] io::Error),
    /// The peer closed its end.
    #[error("The other end of the control socket is closed")]
    Closed,
    /// The peer's packet is too long or carries too many descriptors.
    #[error(
        "A control packet was cut short: it may have {MAX_PACKET} bytes and {MAX_FDS} descriptors"
    )]
    Truncated,
    /// A message of our own is too long to be sent.
    #[error("A control message of {0} bytes is longer than a packet may be ({MAX_PACKET})")]
    TooLong(usize),
    /// The packet is not the message that it should be.
    #[error("Cannot read a control message")]
    Malformed(#[source] serde_json::Error),
}

/// Sends `message` and `fds` as one packet. On a socket in non-blocking mode a full buffer is an
/// error of kind `WouldBlock`.
pub fn send<T: Serialize>(
    socket: impl AsFd,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), ControlError> {
    let bytes = serde_json::to_vec(message).map_err(ControlError::Malformed)?;
    if bytes.len() > MAX_PACKET {
        return Err(ControlError::TooLong(bytes.len()));
    }
    if fds.len() > MAX_FDS {
        return Err(ControlError::Truncated);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::NOSIGNAL;
    loop {
        match sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, flags) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::PIPE) => return Err(ControlError::Closed),
            Err(e) => return Err(ControlError::Socket(e.into())),
        }
    }
}

/// Receives one packet. Descriptors are close-on-exec. `Ok(None)` only on a socket in
/// non-blocking mode that has no packet now.
pub fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> Result<Option<(T, Vec<OwnedFd>)>, ControlError> {
    let Some(length) = next_packet_length(&socket)? else {
        return Ok(None);
    };
    let mut bytes = vec![0; length];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut iov = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Err(ControlError::Closed),
            Err(e) => return Err(ControlError::Socket(e.into())),
        }
    };
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(ControlError::Truncated);
    }
    if received.bytes == 0 {
        return Err(ControlError::Closed);
    }
    let message =
        serde_json::from_slice(&bytes[..received.bytes]).map_err(ControlError::Malformed)?;
    Ok(Some((message, fds)))
}

/// The length of the next packet, at most [`MAX_PACKET`]; so a short one does not cost a long buffer.
fn next_packet_length(socket: impl AsFd) -> Result<Option<usize>, ControlError> {
    // A packet of no bytes is told from the end of the conversation by nothing; both end it.
    let mut nothing = [0; 1];
    loop {
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
        match recv(&socket, &mut nothing, flags) {
            Ok((_, 0)) => return Err(ControlError::Closed),
            Ok((_, length)) => return Ok(Some(length.min(MAX_PACKET))),
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Err(ControlError::Closed),
            Err(e) => return Err(ControlError::Socket(e.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn a_request_arrives_with_its_descriptor() {
        let (ours, theirs) = pair();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"disk").unwrap();
        file.rewind().unwrap();
        let request = Request::AttachDisk {
            slot: 2,
            read_only: true,
            serial: String::new(),
        };
        send(&ours, &request, &[file.as_fd()]).unwrap();
        let (got, fds) = receive::<Request>(&theirs).unwrap().unwrap();
        assert_eq!(got, request);
        let mut text = String::new();
        File::from(fds.into_iter().next().unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "disk");
    }

    #[test]
    fn a_closed_peer_is_told_from_an_empty_socket() {
        let (ours, theirs) = pair();
        rustix::io::ioctl_fionbio(&theirs, true).unwrap();
        assert!(receive::<Request>(&theirs).unwrap().is_none());
        drop(ours);
        assert!(matches!(
            receive::<Request>(&theirs),
            Err(ControlError::Closed)
        ));
    }

    #[test]
    fn a_packet_that_is_no_request_is_malformed() {
        let (ours, theirs) = pair();
        send(&ours, &"reboot", &[]).unwrap();
        assert!(matches!(
            receive::<Request>(&theirs),
            Err(ControlError::Malformed(_))
        ));
        send(&ours, &Request::Stop, &[]).unwrap();
        assert!(matches!(
            receive::<Request>(&theirs),
            Ok(Some((Request::Stop, _)))
        ));
    }
}
