//! Errors as the host reads them.

use std::error::Error;
use std::fmt::Write;

/// The message of an error and of what caused it, on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some crates repeat the cause in their own message.
        if !text.ends_with(&next) {
            let _ = write!(text, ": {next}");
        }
        cause = error.source();
    }
    text.replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("Cannot open the door")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn a_chain_names_every_cause_once() {
        let error = Outer(std::io::Error::other("no key"));
        assert_eq!(chain(&error), "Cannot open the door: no key");
    }
}
