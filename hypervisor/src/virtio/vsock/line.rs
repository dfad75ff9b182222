//! The one line that a client on the host writes first: `CONNECT <port>\n`.

use super::packet::ANY_PORT;

/// The longest line there is, its end included: `CONNECT 4294967294\n`.
pub const LONGEST_LINE: usize = 19;

/// What stands at the beginning of a client's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// A whole line of `len` bytes that asks for a port of the guest.
    Connect {
        /// The guest's port.
        port: u32,
        /// The line's length, its end included.
        len: usize,
    },
    /// The beginning of a line.
    Unfinished,
    /// Not the line it has to be.
    Malformed,
}

/// Looks at the first bytes of a stream.
pub fn parse(bytes: &[u8]) -> Line {
    let bytes = bytes.get(..LONGEST_LINE).unwrap_or(bytes);
    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
        return match bytes.len() < LONGEST_LINE {
            true => Line::Unfinished,
            false => Line::Malformed,
        };
    };
    let port = bytes[..end]
        .strip_prefix(b"CONNECT ")
        // `u32::from_str` would take a plus sign as well.
        .filter(|digits| digits.iter().all(u8::is_ascii_digit))
        .and_then(|digits| std::str::from_utf8(digits).ok())
        .and_then(|digits| digits.parse().ok())
        .filter(|&port| port != ANY_PORT);
    match port {
        Some(port) => Line::Connect { port, len: end + 1 },
        None => Line::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_whole_line_names_a_port_and_ends_where_it_ends() {
        let line = Line::Connect {
            port: 1024,
            len: 13,
        };
        assert_eq!(parse(b"CONNECT 1024\n"), line);
        assert_eq!(parse(b"CONNECT 1024\nmore\n"), line);
        assert!(matches!(
            parse(b"CONNECT 4294967294\n"),
            Line::Connect {
                port: 0xffff_fffe,
                len: LONGEST_LINE
            }
        ));
    }

    #[test]
    fn what_is_no_such_line_is_malformed() {
        for bad in [
            &b"\n"[..],
            b"CONNECT\n",
            b"CONNECT \n",
            b"CONNECT +5\n",
            b"CONNECT -5\n",
            b"CONNECT 5 \n",
            b"CONNECT 5\r\n",
            b"connect 5\n",
            b"CONNECT 4294967295\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 00000000000000000005\n",
            b"CONNECT \xff\n",
            b"GET / HTTP/1.1\r\nHost: a\r\n",
        ] {
            assert_eq!(parse(bad), Line::Malformed, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn every_port_but_any_can_be_asked_for_and_no_prefix_is_a_line(port in 0..u32::MAX) {
            let text = format!("CONNECT {port}\n");
            prop_assert_eq!(parse(text.as_bytes()), Line::Connect { port, len: text.len() });
            for end in 0..text.len() {
                prop_assert_eq!(parse(&text.as_bytes()[..end]), Line::Unfinished);
            }
        }

        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Line::Connect { len, .. } = parse(&bytes) {
                prop_assert!(len <= LONGEST_LINE && bytes[len - 1] == b'\n');
            }
        }
    }
}
