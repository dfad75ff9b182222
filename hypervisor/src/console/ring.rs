//! A bounded memory of the end of a byte stream.

use std::collections::VecDeque;

/// Keeps the last bytes of all that was pushed. Memory is taken as it fills.
pub struct Ring {
    bytes: VecDeque<u8>,
    capacity: usize,
    total: u64,
}

impl Ring {
    /// A ring of `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self {
            bytes: VecDeque::new(),
            capacity,
            total: 0,
        }
    }

    /// Appends `bytes`, dropping the oldest that do not fit.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let kept = bytes
            .get(bytes.len().saturating_sub(self.capacity)..)
            .unwrap_or(bytes);
        let excess = (self.bytes.len() + kept.len()).saturating_sub(self.capacity);
        self.bytes.drain(..excess);
        self.bytes.extend(kept);
    }

    /// How many bytes were pushed ever.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes from position `position` of the stream on, or from the oldest there is: the position of the first
    /// and a contiguous run that may be shorter than all there are.
    pub fn since(&self, position: u64) -> (u64, &[u8]) {
        let oldest = self.total - self.bytes.len() as u64;
        let start = position.clamp(oldest, self.total);
        let skip = (start - oldest) as usize;
        let (front, back) = self.bytes.as_slices();
        let run = match front.get(skip..) {
            Some(rest) if !rest.is_empty() => rest,
            _ => back.get(skip - front.len()..).unwrap_or(&[]),
        };
        (start, run)
    }

    /// The last `most` bytes; if that leaves bytes out, from the first whole line or, without one, from
    /// the first whole character on.
    pub fn tail(&self, most: usize) -> Vec<u8> {
        let skip = self.bytes.len().saturating_sub(most);
        let tail: Vec<u8> = self.bytes.iter().skip(skip).copied().collect();
        let cut = skip > 0 || self.total > self.bytes.len() as u64;
        let at_line_start = skip > 0 && self.bytes.get(skip - 1) == Some(&b'\n');
        if !cut || at_line_start {
            return tail;
        }
        let start = match tail.iter().position(|&byte| byte == b'\n') {
            Some(newline) if newline + 1 < tail.len() => newline + 1,
            _ => tail
                .iter()
                .position(|byte| byte & 0xc0 != 0x80)
                .unwrap_or(0),
        };
        tail.get(start..).unwrap_or(&[]).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_ring_is_the_end_of_the_stream(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..20),
            position in 0u64..800,
        ) {
            let mut ring = Ring::new(64);
            let mut all = Vec::new();
            for chunk in &chunks {
                ring.push(chunk);
                all.extend(chunk);
            }
            prop_assert_eq!(ring.total(), all.len() as u64);
            let mut got = Vec::new();
            let mut at = position;
            loop {
                let (start, run) = ring.since(at);
                if run.is_empty() {
                    break;
                }
                got.extend_from_slice(run);
                at = start + run.len() as u64;
            }
            let start = (position as usize).clamp(all.len().saturating_sub(64), all.len());
            prop_assert_eq!(&got, &all[start..]);
            prop_assert!(all.ends_with(&ring.tail(30)));
            prop_assert!(ring.tail(30).len() <= 30);
        }
    }

    #[test]
    fn a_tail_without_a_line_starts_with_a_whole_character() {
        let mut ring = Ring::new(8);
        ring.push("ääää".as_bytes());
        assert_eq!(ring.tail(3), "ä".as_bytes());
    }
}
