//! Runs a command again and again and prints how long it took, from fork to the end, as JSON:
//! `{"runs": N, "min": NS, "median": NS, "max": NS}`. On the counting clock a nanosecond is an instruction.
//!
//! Usage: measure [--until SOCKET] RUNS COMMAND [ARGUMENT…]. One more run before is not counted: it fills
//! caches. The command's output is thrown away; `{}` in an argument stands for a number that no other run has.
//! With `--until` the time ends when somebody connects to the Unix socket SOCKET, and the command is killed then.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    match measured(std::env::args().skip(1).collect()) {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("measure: {message}");
            ExitCode::FAILURE
        }
    }
}

fn measured(mut arguments: Vec<String>) -> Result<String, String> {
    let until = (arguments.first().map(String::as_str) == Some("--until") && arguments.len() > 1)
        .then(|| PathBuf::from(arguments.drain(..2).nth(1).unwrap_or_default()));
    let (runs, program, rest) = match arguments.as_slice() {
        [runs, program, rest @ ..] if runs.parse::<usize>().is_ok_and(|n| n > 0) => {
            (runs.parse().unwrap_or(1), program, rest)
        }
        _ => return Err("usage: measure [--until SOCKET] RUNS COMMAND [ARGUMENT…]".into()),
    };
    let mut times = Vec::with_capacity(runs);
    for run in 0..=runs {
        let mut command = Command::new(program);
        command
            .args(rest.iter().map(|a| a.replace("{}", &run.to_string())))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let took = match &until {
            Some(socket) => until_connected(&mut command, socket),
            None => until_ended(&mut command),
        };
        let took = took.map_err(|e| format!("{program} {e}"))?;
        if run > 0 {
            times.push(took.as_nanos());
        }
    }
    times.sort_unstable();
    let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
    Ok(format!(
        r#"{{"runs": {runs}, "min": {min}, "median": {median}, "max": {max}}}"#
    ))
}

fn until_ended(command: &mut Command) -> Result<Duration, String> {
    let start = Instant::now();
    let status = command.status();
    let took = start.elapsed();
    match status {
        Ok(status) if status.success() => Ok(took),
        Ok(status) => Err(format!("ended with {status}")),
        Err(error) => Err(format!("does not start: {error}")),
    }
}

fn until_connected(command: &mut Command, socket: &Path) -> Result<Duration, String> {
    let listener = UnixListener::bind(socket).map_err(|e| format!("cannot be listened to: {e}"))?;
    let start = Instant::now();
    let mut child = command
        .spawn()
        .map_err(|e| format!("does not start: {e}"))?;
    let connected = wait_for_either(&listener, &child);
    let took = start.elapsed();
    // SAFETY: kill(2) has no memory arguments; the child is not reaped yet, so the number is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let status = child.wait();
    let _ = std::fs::remove_file(socket);
    match connected {
        Ok(true) => Ok(took),
        Ok(false) => Err(format!("ended before it connected: {status:?}")),
        Err(error) => Err(format!("cannot be waited for: {error}")),
    }
}

/// Waits until somebody connects (true) or the child ends.
fn wait_for_either(listener: &UnixListener, child: &Child) -> io::Result<bool> {
    // SAFETY: pidfd_open(2) has no memory arguments.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let end = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    let mut fds = [listener.as_raw_fd(), end.as_raw_fd()].map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: pointer and number are those of an array that outlives the call.
    if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fds[0].revents & libc::POLLIN != 0)
}
