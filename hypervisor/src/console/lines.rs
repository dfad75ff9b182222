//! Cuts a byte stream into lines.

/// The longest line; longer ones come in pieces.
const LONGEST: usize = 1024;

/// A line that is being collected.
#[derive(Default)]
pub struct Lines {
    line: Vec<u8>,
}

impl Lines {
    /// Appends `bytes` and calls `each` for every line that they complete, without its line end.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let mut rest = piece;
            while !rest.is_empty() {
                let room = LONGEST - self.line.len();
                let (part, after) = rest.split_at(room.min(rest.len()));
                self.line.extend_from_slice(part);
                rest = after;
                let ended = self.line.last() == Some(&b'\n');
                if ended || self.line.len() >= LONGEST {
                    each(trim(&self.line));
                    self.line.clear();
                }
            }
        }
    }

    /// The line that has not ended yet.
    pub fn unfinished(&self) -> &[u8] {
        trim(&self.line)
    }

    /// Forgets it.
    pub fn clear(&mut self) {
        self.line.clear();
    }
}

fn trim(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// The line as text that does nothing to a terminal or a log: control characters, and the invisible ones
/// that change a text's direction, are escaped; what is no UTF-8 is replaced.
pub fn harmless(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    for character in String::from_utf8_lossy(line).chars() {
        let directs = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match character {
            '\t' => text.push('\t'),
            _ if character.is_control() || directs => text.extend(character.escape_unicode()),
            _ => text.push(character),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_bytes_become_harmless() {
        assert_eq!(
            harmless(b"a\tb\x1b[2J\x07\xffc"),
            "a\tb\\u{1b}[2J\\u{7}\u{fffd}c"
        );
        assert_eq!(
            harmless("\u{9b}1m \u{202e}x".as_bytes()),
            "\\u{9b}1m \\u{202e}x"
        );
    }

    proptest! {
        #[test]
        fn lines_are_bounded_and_nothing_is_lost(
            chunks in proptest::collection::vec(proptest::collection::vec(prop_oneof![4 => Just(b'a'), 1 => Just(b'\n')], 0..3000), 0..5),
        ) {
            let mut lines = Lines::default();
            let mut count = 0;
            for chunk in &chunks {
                lines.push(chunk, |line| {
                    assert!(line.len() <= LONGEST && !line.contains(&b'\n'));
                    count += line.len();
                });
            }
            count += lines.unfinished().len();
            let letters = chunks.iter().flatten().filter(|&&byte| byte == b'a').count();
            prop_assert_eq!(count, letters);
        }
    }
}
