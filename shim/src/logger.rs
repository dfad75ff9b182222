//! Log lines for containerd: it copies what comes out of the FIFO `log` in the bundle to its own
//! log, so they have the form of its own lines (logrus' text format). `delete` has no such reader any
//! more; of it containerd logs what it writes to its standard error.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use log::{LevelFilter, Log, Metadata, Record};

struct Logger {
    out: Option<File>,
    namespace: String,
    sandbox: String,
}

/// Sends the log of this process to the FIFO `log` in `bundle`; without one, nowhere.
pub fn to_containerd(bundle: &Path, namespace: &str, sandbox: &str, debug: bool) {
    // Opened for reading, too: so that it opens without waiting for a reader, and that writing to
    // it is no error while containerd restarts.
    let fifo = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(bundle.join("log"))
        .ok();
    init(fifo, namespace, sandbox, debug);
    // Standard error is nowhere.
    std::panic::set_hook(Box::new(|info| {
        log::error!("The shim has panicked: {info}")
    }));
}

/// Sends the log of this process to its standard error.
pub fn to_stderr(namespace: &str, sandbox: &str, debug: bool) {
    let stderr = io::stderr().as_fd().try_clone_to_owned();
    init(stderr.ok().map(File::from), namespace, sandbox, debug);
}

fn init(out: Option<File>, namespace: &str, sandbox: &str, debug: bool) {
    // Until the sandbox's settings are known.
    let level = if debug {
        LevelFilter::Debug
    } else {
        LevelFilter::Warn
    };
    let logger = Box::new(Logger {
        out,
        namespace: namespace.to_owned(),
        sandbox: sandbox.to_owned(),
    });
    if log::set_logger(Box::leak(logger)).is_ok() {
        log::set_max_level(level);
    }
}

/// The level by the sandbox's settings. If containerd wants to debug its shims, they say that much at least.
pub fn level(current: LevelFilter, configured: LevelFilter) -> LevelFilter {
    if current >= LevelFilter::Debug {
        return current.max(configured);
    }
    configured
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        let Some(mut out) = self
            .out
            .as_ref()
            .filter(|_| self.enabled(record.metadata()))
        else {
            return;
        };
        let line = format_line(
            SystemTime::now(),
            record.level().as_str(),
            &record.args().to_string(),
            &self.namespace,
            &self.sandbox,
        );
        // One write a line: no more than PIPE_BUF bytes are never mixed with others'. A FIFO that
        // is full because nobody reads it loses lines: a log must not stop a sandbox.
        let _ = out.write(line.as_bytes());
    }

    fn flush(&self) {}
}

fn format_line(
    now: SystemTime,
    level: &str,
    message: &str,
    namespace: &str,
    sandbox: &str,
) -> String {
    let since_epoch = now
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let mut line = String::with_capacity(160 + message.len());
    let _ = write!(line, "time=\"{}\" level=", rfc3339(since_epoch));
    line.push_str(match level {
        "WARN" => "warning",
        "ERROR" => "error",
        "INFO" => "info",
        "DEBUG" => "debug",
        _ => "trace",
    });
    line.push_str(" msg=");
    quote(message, &mut line);
    let _ = write!(
        line,
        " namespace={namespace} runtime=cube sandbox={sandbox}"
    );
    const PIPE_BUF: usize = 4096;
    if line.len() >= PIPE_BUF {
        let mut end = PIPE_BUF - 1;
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
    }
    line.push('\n');
    line
}

/// A quoted string without line breaks or control characters: what a guest writes must not pass
/// for a line of its own.
fn quote(text: &str, line: &mut String) {
    line.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                line.push('\\');
                line.push(c);
            }
            '\n' => line.push_str("\\n"),
            '\t' => line.push_str("\\t"),
            c if c.is_control() => {
                let _ = write!(line, "\\u{:04x}", u32::from(c));
            }
            c => line.push(c),
        }
    }
    line.push('"');
}

/// UTC with nanoseconds, as RFC 3339 has it.
fn rfc3339(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    let second_of_day = seconds % 86_400;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:09}Z",
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
        since_epoch.subsec_nanos()
    )
}

/// Year, month and day of the day that is `days` after 1970-01-01. It counts in years that begin
/// on the 1st of March, so that the leap day is a year's last.
fn civil_date(days: u64) -> (u64, u64, u64) {
    const DAYS_IN_400_YEARS: u64 = 146_097;
    // 0000-03-01 is this many days before the epoch.
    let days = days + 719_468;
    let (era, day) = (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (era * 400 + year + next, month, day_of_month)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_looks_like_containerds_own() {
        let at = SystemTime::UNIX_EPOCH + Duration::new(1_709_210_096, 5_000_000);
        assert_eq!(
            format_line(at, "WARN", "disk \"a\"\nlost", "default", "web"),
            "time=\"2024-02-29T12:34:56.005000000Z\" level=warning msg=\"disk \\\"a\\\"\\nlost\" \
             namespace=default runtime=cube sandbox=web\n"
        );
    }

    #[test]
    fn a_line_is_never_longer_than_a_pipe_takes_at_once() {
        let line = format_line(SystemTime::now(), "INFO", &"ä".repeat(5000), "n", "s");
        assert!(line.len() <= 4096);
        assert!(line.ends_with('\n'));
    }

    #[test]
    fn the_settings_lower_the_level_too_unless_containerd_debugs() {
        use LevelFilter::{Debug, Error, Info, Off, Trace, Warn};
        for configured in [Off, Error, Warn, Info, Trace] {
            assert_eq!(level(Warn, configured), configured);
        }
        assert_eq!(level(Debug, Off), Debug);
        assert_eq!(level(Debug, Trace), Trace);
    }

    #[test]
    fn dates_are_right_at_the_edges() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (10_956, (1999, 12, 31)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(civil_date(days), date);
        }
    }
}
