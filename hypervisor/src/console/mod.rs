//! What the guest says: the virtio console, and the early serial port before it.
//!
//! Everything goes into a [`Ring`](ring::Ring) of the last 64 KiB, which is part of every boot error, and is
//! searched for the kernel's panic line. According to the configuration it also goes to standard
//! output as it is, or to standard error line by line. Neither ever blocks the machine: standard
//! output pushes back on the virtio console ([`Console::is_congested`]), standard error loses lines,
//! and says how many.

mod lines;
mod ring;
mod stdio;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cube_hypervisor_api::config;

use lines::Lines;
use ring::Ring;
pub use stdio::Input;
use stdio::Output;

/// How much of the guest's output is kept, in bytes.
pub const RING_SIZE: usize = 64 * 1024;

/// How much output may wait for standard output before the guest has to wait.
const CONGESTED: u64 = RING_SIZE as u64 / 2;

/// How many bytes of lines may wait for standard error before lines are lost.
const LOG_BACKLOG: usize = 16 * 1024;

/// What begins the text of a kernel panic (kernel/panic.c, `panic`).
const PANIC: &[u8] = b"Kernel panic - not syncing: ";

/// The guest's console output. Shared by whatever produces it and whoever wants to know.
pub struct Console {
    inner: Mutex<Inner>,
}

struct Inner {
    ring: Ring,
    lines: Lines,
    panic: Option<String>,
    sink: Sink,
}

/// Where the output goes besides the ring.
enum Sink {
    None,
    /// Nobody reads it any more. It stays open, since the event loop knows it by its number.
    Closed(Output),
    /// As it is. `written` counts from the guest's first byte.
    Raw {
        output: Output,
        written: u64,
    },
    /// In whole lines without control bytes.
    Log {
        output: Output,
        backlog: VecDeque<u8>,
        lost: u64,
    },
}

impl Console {
    /// A console that does what `mode` says with standard output or standard error.
    pub fn new(mode: config::Console) -> Self {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        match mode {
            config::Console::Ring => Self::with_sink(Sink::None),
            config::Console::Stdio => Self::raw(stdout.as_fd()),
            config::Console::Log => Self::log(stderr.as_fd()),
        }
    }

    /// A console whose standard output is `fd`.
    pub(crate) fn raw(fd: BorrowedFd<'_>) -> Self {
        Self::with_sink(match Output::new(fd) {
            Ok(output) => Sink::Raw { output, written: 0 },
            Err(_) => Sink::None,
        })
    }

    fn log(fd: BorrowedFd<'_>) -> Self {
        Self::with_sink(match Output::new(fd) {
            Ok(output) => Sink::Log {
                output,
                backlog: VecDeque::new(),
                lost: 0,
            },
            Err(_) => Sink::None,
        })
    }

    fn with_sink(sink: Sink) -> Self {
        Self {
            inner: Mutex::new(Inner {
                ring: Ring::new(RING_SIZE),
                lines: Lines::default(),
                panic: None,
                sink,
            }),
        }
    }

    /// Takes output of the guest. Never blocks.
    pub fn write(&self, bytes: &[u8]) {
        let inner = &mut *self.lock();
        inner.ring.push(bytes);
        let Inner {
            lines, panic, sink, ..
        } = inner;
        lines.push(bytes, |line| {
            if panic.is_none() {
                *panic = panic_text(line);
            }
            sink.line(line);
        });
        inner.pump();
    }

    /// Goes on with output that had to wait: standard output or error can take more.
    pub fn pump(&self) {
        self.lock().pump();
    }

    /// Whether so much waits for standard output that the guest should wait too.
    pub fn is_congested(&self) -> bool {
        let inner = self.lock();
        match &inner.sink {
            Sink::Raw { written, .. } => inner.ring.total() - written > CONGESTED,
            Sink::None | Sink::Closed(_) | Sink::Log { .. } => false,
        }
    }

    /// The descriptor whose becoming writable (edge-triggered) is the time for [`pump`](Self::pump), if it can be waited for.
    pub fn output_fd(&self) -> Option<RawFd> {
        match &self.lock().sink {
            Sink::None => None,
            Sink::Closed(output) | Sink::Raw { output, .. } | Sink::Log { output, .. } => {
                Some(output.as_raw_fd())
            }
        }
    }

    /// What the guest's kernel said when it panicked, if it did: one line, without the words before the cause.
    pub fn panic_message(&self) -> Option<String> {
        let inner = self.lock();
        inner
            .panic
            .clone()
            .or_else(|| panic_text(inner.lines.unfinished()))
    }

    /// The last `most` bytes of output or fewer, beginning with a whole line where something had to be left
    /// out. What is no UTF-8 is replaced.
    pub fn tail(&self, most: usize) -> String {
        let inner = self.lock();
        let bytes = inner.ring.tail(most);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The machine has ended: writes what waits. Standard output is waited for, as every program does;
    /// standard error is not.
    pub fn finish(&self) {
        let inner = &mut *self.lock();
        let Inner { lines, sink, .. } = inner;
        if !lines.unfinished().is_empty() {
            sink.line(lines.unfinished());
            lines.clear();
        }
        inner.pump();
        while inner.has_raw_waiting() {
            if let Sink::Raw { output, .. } = &inner.sink
                && output.wait().is_err()
            {
                return;
            }
            inner.pump();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn has_raw_waiting(&self) -> bool {
        matches!(&self.sink, Sink::Raw { written, .. } if *written < self.ring.total())
    }

    /// Writes as much as the sink takes now.
    fn pump(&mut self) {
        let result = match &mut self.sink {
            Sink::None | Sink::Closed(_) => Ok(()),
            Sink::Raw { output, written } => pump_raw(&self.ring, output, written),
            Sink::Log {
                output, backlog, ..
            } => pump_log(output, backlog),
        };
        match result {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // Nobody reads any more: the guest goes on without.
            Err(_) => {
                if let Sink::Raw { output, .. } | Sink::Log { output, .. } =
                    std::mem::replace(&mut self.sink, Sink::None)
                {
                    self.sink = Sink::Closed(output);
                }
            }
        }
    }
}

fn pump_raw(ring: &Ring, output: &Output, written: &mut u64) -> io::Result<()> {
    loop {
        // What the ring has dropped meanwhile is lost here too (only the serial port is not pushed back).
        let (start, bytes) = ring.since(*written);
        *written = start;
        if bytes.is_empty() {
            return Ok(());
        }
        *written += output.write(bytes)? as u64;
    }
}

fn pump_log(output: &Output, backlog: &mut VecDeque<u8>) -> io::Result<()> {
    while !backlog.is_empty() {
        let count = output.write(backlog.as_slices().0)?;
        backlog.drain(..count);
    }
    Ok(())
}

impl Sink {
    /// Appends a line to the log's backlog; a line that does not fit is lost and counted.
    fn line(&mut self, line: &[u8]) {
        let Self::Log { backlog, lost, .. } = self else {
            return;
        };
        let mut text = String::new();
        if *lost > 0 {
            text = format!("console: ({lost} lines lost)\n");
        }
        text.push_str("console: ");
        text.push_str(&lines::harmless(line));
        text.push('\n');
        if backlog.len() + text.len() > LOG_BACKLOG {
            *lost += 1;
        } else {
            *lost = 0;
            backlog.extend(text.as_bytes());
        }
    }
}

/// The cause that a panic line names.
fn panic_text(line: &[u8]) -> Option<String> {
    let start = line
        .windows(PANIC.len())
        .position(|window| window == PANIC)?;
    let cause = line.get(start + PANIC.len()..)?;
    Some(lines::harmless(cause))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use proptest::prelude::*;

    use super::*;

    /// A pipe of one page, and its ends.
    fn small_pipe() -> (File, OwnedFd) {
        let (reader, writer) = io::pipe().unwrap();
        // SAFETY: the descriptor is a pipe's, the argument a size.
        let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
        assert_eq!(size, 4096);
        (File::from(OwnedFd::from(reader)), OwnedFd::from(writer))
    }

    #[test]
    fn a_panic_is_found_across_chunks_and_before_its_line_ends() {
        let console = Console::with_sink(Sink::None);
        console.write(b"[    0.1] Booting\n[    0.2] Kernel panic - not syn");
        assert_eq!(console.panic_message(), None);
        console.write(b"cing: VFS: Unable to mount root fs on \x1b[1munknown-block(0,0)");
        let cause = "VFS: Unable to mount root fs on \\u{1b}[1munknown-block(0,0)";
        assert_eq!(console.panic_message().as_deref(), Some(cause));
        console.write(b"\r\n[    0.3] Kernel panic - not syncing: second\n");
        assert_eq!(console.panic_message().as_deref(), Some(cause));
    }

    #[test]
    fn the_tail_is_the_end_from_a_whole_line_on() {
        let console = Console::with_sink(Sink::None);
        console.write(b"first\nsecond\nth\xffrd");
        assert_eq!(console.tail(100), "first\nsecond\nth\u{fffd}rd");
        assert_eq!(console.tail(14), "second\nth\u{fffd}rd");
        assert_eq!(console.tail(12), "second\nth\u{fffd}rd");
        assert_eq!(console.tail(11), "th\u{fffd}rd");
        assert_eq!(console.tail(2), "rd");
        assert_eq!(console.tail(0), "");
    }

    #[test]
    fn standard_output_that_is_not_read_pushes_back_and_loses_nothing() {
        let (mut reader, writer) = small_pipe();
        let console = Console::raw(writer.as_fd());
        let mut sent = Vec::new();
        while !console.is_congested() {
            let chunk = [sent.len() as u8; 1000];
            console.write(&chunk);
            sent.extend(chunk);
        }
        assert!(sent.len() as u64 > CONGESTED);
        let mut got = vec![0; 4096];
        let count = reader.read(&mut got).unwrap();
        got.truncate(count);
        console.pump();
        assert!(!console.is_congested());
        let rest = std::thread::spawn(move || {
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            rest
        });
        console.finish();
        drop((console, writer));
        got.extend(rest.join().unwrap());
        assert!(got == sent);
    }

    #[test]
    fn a_log_that_is_not_read_loses_lines_and_says_how_many() {
        let (mut reader, writer) = small_pipe();
        let console = Console::log(writer.as_fd());
        let line = [b'x'; 100];
        for _ in 0..400 {
            console.write(&line);
            console.write(b"\n");
        }
        assert!(!console.is_congested());
        let mut text = Vec::new();
        let mut buffer = [0; 4096];
        while text.len() < LOG_BACKLOG {
            let count = reader.read(&mut buffer).unwrap();
            text.extend(&buffer[..count]);
            console.pump();
        }
        console.write(b"and so \x1b[31mon");
        console.finish();
        drop((console, writer));
        reader.read_to_end(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let whole = format!("console: {}", "x".repeat(100));
        let arrived = text.lines().filter(|line| *line == whole).count();
        assert!(text.contains(&format!("console: ({} lines lost)\n", 400 - arrived)));
        assert!(text.ends_with("console: and so \\u{1b}[31mon\n"), "{text}");
    }

    #[test]
    fn an_output_that_nobody_reads_any_more_is_given_up() {
        let (reader, writer) = small_pipe();
        let console = Console::raw(writer.as_fd());
        drop(reader);
        console.write(b"hello\n");
        assert!(matches!(console.lock().sink, Sink::Closed(_)));
        console.finish();
        assert_eq!(console.tail(10), "hello\n");
    }

    proptest! {
        #[test]
        fn any_chunks_give_the_same_panic_and_the_same_tail(
            text in "[a-z\n]{0,50}(Kernel panic - not syncing: [a-z]{1,9}\n)?[a-z\n]{0,50}",
            cuts in proptest::collection::vec(0usize..150, 0..9),
        ) {
            let whole = Console::with_sink(Sink::None);
            whole.write(text.as_bytes());
            let parts = Console::with_sink(Sink::None);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort();
            for cut in cuts.windows(2) {
                parts.write(&text.as_bytes()[cut[0]..cut[1]]);
            }
            prop_assert_eq!(whole.panic_message(), parts.panic_message());
            prop_assert_eq!(whole.tail(80), parts.tail(80));
        }
    }
}
