//! Messages for the operator: to the kernel's log, and so to the guest's console.
//!
//! The level comes from the kernel's command line. In a helper the first error is also kept, because
//! libcontainer's errors say what failed only in its log.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::sync::OnceLock;

use cube_agent_protocol::LOG_LEVEL_KEY;
use log::{Level, LevelFilter, Log, Metadata, Record};
use nix::sys::memfd::{MemFdCreateFlag, memfd_create};

/// The longest message in bytes, the kernel's LOG_LINE_MAX with room for its own prefix.
const MAX_LINE: usize = 900;

struct KernelLog {
    file: Option<File>,
    /// A memory file that all processes of a helper share.
    errors: Option<File>,
}

static LOGGER: OnceLock<KernelLog> = OnceLock::new();

/// Starts logging in the agent. Without /dev/kmsg (in tests) messages go to standard error.
pub fn start(level: LevelFilter) {
    install(level, None);
    if level > LevelFilter::Warn {
        // Else the kernel lets ten lines through in five seconds (printk_devkmsg in
        // Documentation/admin-guide/sysctl/kernel.rst).
        if let Err(error) = std::fs::write("/proc/sys/kernel/printk_devkmsg", "on") {
            log::warn!("Some messages will be lost: {error}");
        }
    }
}

/// Starts logging in a helper, and keeps errors for [`first_error`].
pub fn start_in_helper() {
    let errors = memfd_create(c"errors", MemFdCreateFlag::MFD_CLOEXEC)
        .map(File::from)
        .ok();
    install(level_of_kernel(), errors);
}

fn install(level: LevelFilter, errors: Option<File>) {
    let file = OpenOptions::new().write(true).open("/dev/kmsg").ok();
    let logger = LOGGER.get_or_init(|| KernelLog { file, errors });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
}

/// The level that the kernel's command line asks for; `warn` if it says nothing that is a level.
pub fn level_of_kernel() -> LevelFilter {
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    level_in(&line)
}

fn level_in(line: &str) -> LevelFilter {
    line.split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix(LOG_LEVEL_KEY)?.strip_prefix('='))
        .filter_map(|level| level.parse().ok())
        .next_back()
        .unwrap_or(LevelFilter::Warn)
}

/// The first error that any process of this helper has logged.
pub fn first_error() -> Option<String> {
    let mut file = LOGGER.get()?.errors.as_ref()?;
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    text.lines().next().map(str::to_owned)
}

impl Log for KernelLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if record.level() == Level::Error
            && let Some(mut errors) = self.errors.as_ref()
        {
            // The file is shared, its offset too: each line is written at once behind the others.
            let line = format!("{}\n", record.args().to_string().replace('\n', "; "));
            let _ = errors.write_all(line.as_bytes());
        }
        if !self.enabled(record.metadata()) {
            return;
        }
        // Facility 3 is "system daemons" (syslog(3)); the kernel's levels for ours.
        let priority = match record.level() {
            Level::Error => 3 << 3 | 3,
            Level::Warn => 3 << 3 | 4,
            Level::Info => 3 << 3 | 6,
            Level::Debug | Level::Trace => 3 << 3 | 7,
        };
        let mut line = format!(
            "<{priority}>cube-agent: {}: {}",
            record.target(),
            record.args()
        );
        let mut end = line.len().min(MAX_LINE);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
        let line = line.replace('\n', "; ");
        match self.file.as_ref() {
            // One write is one record, and nobody is left to be told of a failure.
            Some(mut file) => drop(file.write_all(line.as_bytes())),
            None => eprintln!("{line}"),
        }
    }

    fn flush(&self) {}
}

/// Says that the agent cannot go on, where the host's last look at the console will find it.
pub fn last_words(message: &str) {
    let line = format!("<{}>cube-agent: {message}", 3 << 3 | 2);
    let kernel = OpenOptions::new().write(true).open("/dev/kmsg");
    let written = kernel.and_then(|mut kernel| kernel.write_all(line.as_bytes()));
    if written.is_err() {
        eprintln!("cube-agent: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_level_on_the_command_line_counts() {
        assert_eq!(level_in("quiet cube.log=debug panic=1"), LevelFilter::Debug);
        assert_eq!(
            level_in("cube.log=debug cube.log=error"),
            LevelFilter::Error
        );
        assert_eq!(level_in("cube.logs=debug cube.log=loud"), LevelFilter::Warn);
        assert_eq!(level_in(""), LevelFilter::Warn);
    }
}
