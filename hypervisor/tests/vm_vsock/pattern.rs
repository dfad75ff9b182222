//! A stream whose every byte is known from its position, so that a lost, doubled or moved one shows.

use std::io::{self, Read, Write};

const CHUNK: usize = 64 * 1024;

pub struct Pattern {
    seed: u64,
    position: u64,
}

impl Pattern {
    pub fn new(seed: u64) -> Self {
        Self { seed, position: 0 }
    }

    /// The next bytes.
    fn fill(&mut self, bytes: &mut [u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = (self.position / 8 + self.seed)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .to_le_bytes();
            let from = (self.position % 8) as usize;
            let count = (8 - from).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&word[from..from + count]);
            self.position += count as u64;
            rest = later;
        }
    }

    /// Writes `count` bytes.
    pub fn write(&mut self, to: &mut impl Write, count: u64) -> io::Result<u64> {
        let mut buffer = vec![0; CHUNK];
        let end = self.position + count;
        while self.position < end {
            let now = (end - self.position).min(CHUNK as u64) as usize;
            self.fill(&mut buffer[..now]);
            to.write_all(&buffer[..now])?;
        }
        Ok(count)
    }

    /// Reads to the end of the stream, which a reset is as well. Returns the bytes read.
    pub fn check(&mut self, from: &mut impl Read) -> io::Result<u64> {
        let mut buffer = vec![0; CHUNK];
        let mut expected = vec![0; CHUNK];
        loop {
            let count = match from.read(&mut buffer) {
                Ok(0) => return Ok(self.position),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(self.position);
                }
                Err(error) => return Err(error),
            };
            let start = self.position;
            self.fill(&mut expected[..count]);
            if buffer[..count] != expected[..count] {
                return Err(io::Error::other(format!("wrong data behind byte {start}")));
            }
        }
    }
}
