//! Where the program's log goes: standard error, a line a message.
//!
//! Some messages are about what the guest does, so their number is bounded: a guest cannot fill the host's disk.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};

/// At most so many lines in a period.
const MOST: u32 = 100;
const PERIOD: Duration = Duration::from_secs(60);

struct Logger(Mutex<Budget>);

static LOGGER: Logger = Logger(Mutex::new(Budget {
    since: None,
    used: 0,
}));

/// Starts logging what is worth a person's attention.
pub fn start() {
    // Fails only if there is a logger already, and then there is one.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(LevelFilter::Warn);
}

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let mut budget = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match budget.take(Instant::now()) {
            Allowance::Yes => eprintln!("cube-hypervisor: {}", record.args()),
            Allowance::Last => eprintln!(
                "cube-hypervisor: {}; more than {MOST} messages in a minute, the rest is left out",
                record.args()
            ),
            Allowance::No => {}
        }
    }

    fn flush(&self) {}
}

struct Budget {
    since: Option<Instant>,
    used: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Allowance {
    Yes,
    Last,
    No,
}

impl Budget {
    fn take(&mut self, now: Instant) -> Allowance {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= PERIOD {
            (self.since, self.used) = (Some(now), 0);
        }
        self.used = self.used.saturating_add(1);
        match self.used {
            ..MOST => Allowance::Yes,
            MOST => Allowance::Last,
            _ => Allowance::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_a_new_period_starts_afresh() {
        let mut budget = Budget {
            since: None,
            used: 0,
        };
        let start = Instant::now();
        let taken: Vec<_> = (0..200).map(|_| budget.take(start)).collect();
        assert_eq!(
            taken[98..101],
            [Allowance::Yes, Allowance::Last, Allowance::No]
        );
        assert_eq!(budget.take(start + PERIOD), Allowance::Yes);
    }
}
