//! What the guest sent and the socket did not take yet.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use super::socket;
use crate::virtio::queue::Segments;

/// Bytes in order. Holds no memory while it is empty. Its size is bounded by the credit that the
/// guest is granted.
#[derive(Debug, Default)]
pub struct Backlog(VecDeque<u8>);

impl Backlog {
    /// Bytes held.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends all of `data`, consuming it.
    pub fn push(&mut self, data: &mut Segments) {
        self.0.reserve_exact(data.len());
        let mut chunk = [0; 4096];
        loop {
            match data.read(&mut chunk) {
                0 => return,
                count => self.0.extend(&chunk[..count]),
            }
        }
    }

    /// Writes to `socket` as much as it takes now. Returns the bytes written.
    ///
    /// # Errors
    ///
    /// The socket takes nothing any more.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut written = 0;
        while !self.0.is_empty() {
            let (front, back) = self.0.as_slices();
            match socket::send_slices(socket, &[IoSlice::new(front), IoSlice::new(back)])? {
                0 => break,
                count => {
                    self.0.drain(..count);
                    written += count;
                }
            }
        }
        if self.0.is_empty() {
            self.clear();
        }
        Ok(written)
    }

    /// Forgets everything and returns the memory.
    pub fn clear(&mut self) {
        self.0 = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_a_full_socket_did_not_take_follows_in_order_and_the_memory_is_returned() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
        let mut backlog = Backlog(sent.iter().copied().collect());
        // So that the ring has its seam in the middle.
        backlog.0.rotate_left(1_000_000);
        backlog.0.rotate_right(1_000_000);
        let mut got = Vec::new();
        let mut buffer = vec![0; 70_000];
        loop {
            backlog.flush(ours.as_fd()).unwrap();
            if backlog.is_empty() {
                break;
            }
            let count = theirs.read(&mut buffer).unwrap();
            got.extend_from_slice(&buffer[..count]);
        }
        assert_eq!(backlog.0.capacity(), 0);
        drop(ours);
        theirs.read_to_end(&mut got).unwrap();
        assert!(got == sent);
    }

    #[test]
    fn a_peer_that_left_is_an_error_and_no_signal() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut backlog = Backlog(VecDeque::from([1]));
        assert!(backlog.flush(ours.as_fd()).is_err());
    }
}
