//! Runs a command again and again and prints how long it took, from fork to the end, as JSON:
//! `{"runs": N, "min": NS, "median": NS, "max": NS}`. On the counting clock a nanosecond is an instruction.
//!
//! Usage: measure RUNS COMMAND [ARGUMENT…]. One more run before is not counted: it fills caches. The
//! command's output is thrown away; `{}` in an argument stands for a number that no other run has.

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((runs, [program, rest @ ..])) = arguments
        .split_first()
        .and_then(|(runs, command)| Some((runs.parse::<usize>().ok()?, command)))
    else {
        eprintln!("usage: measure RUNS COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    let mut times = Vec::with_capacity(runs);
    for run in 0..=runs {
        let mut command = Command::new(program);
        command
            .args(rest.iter().map(|a| a.replace("{}", &run.to_string())))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let start = Instant::now();
        let status = command.status();
        let took = start.elapsed();
        match status {
            Ok(status) if status.success() => {}
            other => {
                eprintln!("measure: {program} ended with {other:?}");
                return ExitCode::FAILURE;
            }
        }
        if run > 0 {
            times.push(took.as_nanos());
        }
    }
    times.sort_unstable();
    let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
    println!(r#"{{"runs": {runs}, "min": {min}, "median": {median}, "max": {max}}}"#);
    ExitCode::SUCCESS
}
