//! Running one hook.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};

use super::Hook;

/// How much of the end of what a hook writes is kept for its error, in bytes a stream.
const KEPT: usize = 1024;

/// Runs a hook to its end, with `state` on its standard input, in the directory `bundle`. The error
/// says what happened, in the words of runc's users.
pub(super) async fn run(hook: &Hook, state: &[u8], bundle: &Path) -> Result<(), String> {
    let (mut child, mut stdin, mut outputs) =
        start(hook, bundle).map_err(|e| format!("fork/exec {}: {e}", hook.path.display()))?;
    let ended = {
        let end = end(&mut child, &mut stdin, &mut outputs, state);
        match hook.limit() {
            None => Some(end.await),
            Some(limit) => tokio::time::timeout(limit, end).await.ok(),
        }
    };
    let Some(status) = ended else {
        kill(&mut child).await;
        let seconds = hook.timeout.unwrap_or_default();
        return Err(format!("hook ran past specified timeout of {seconds}.0s"));
    };
    // What it has left in the pipes. A process that it leaves behind may hold them open for good.
    for output in &mut outputs {
        output.take();
    }
    let [stdout, stderr] = outputs.map(Output::text);
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!(
            "{}, stdout: {stdout}, stderr: {stderr}",
            in_words(status)
        )),
        Err(e) => Err(format!("cannot wait for it: {e}")),
    }
}

type Started = (Child, Option<pipe::Sender>, [Output; 2]);

fn start(hook: &Hook, bundle: &Path) -> io::Result<Started> {
    let mut command = Command::new(&hook.path);
    if let Some((name, arguments)) = hook.args.split_first() {
        command.arg0(name).args(arguments);
    }
    if !hook.env.is_empty() {
        command.env_clear();
        command.envs(
            hook.env
                .iter()
                .filter_map(|variable| variable.split_once('=')),
        );
    }
    let (stdin, stdin_end) = pipe::pipe()?;
    let (stdout_end, stdout) = pipe::pipe()?;
    let (stderr_end, stderr) = pipe::pipe()?;
    let inherited = |fd: io::Result<OwnedFd>| fd.map(Stdio::from);
    let child = command
        .current_dir(bundle)
        .process_group(0)
        // When the create that it belongs to is given up.
        .kill_on_drop(true)
        .stdin(inherited(stdin_end.into_blocking_fd())?)
        .stdout(inherited(stdout_end.into_blocking_fd())?)
        .stderr(inherited(stderr_end.into_blocking_fd())?)
        .spawn()?;
    Ok((
        child,
        Some(stdin),
        [Output::new(stdout), Output::new(stderr)],
    ))
}

/// Feeds the hook and takes what it writes until it has ended.
async fn end(
    child: &mut Child,
    stdin: &mut Option<pipe::Sender>,
    [stdout, stderr]: &mut [Output; 2],
    state: &[u8],
) -> io::Result<ExitStatus> {
    let talk = async {
        let feed = async {
            if let Some(mut stdin) = stdin.take() {
                // One that does not read it is not at fault; its status says.
                let _ = stdin.write_all(state).await;
            }
        };
        tokio::join!(feed, stdout.follow(), stderr.follow());
        std::future::pending().await
    };
    tokio::select! {
        status = child.wait() => status,
        never = talk => never,
    }
}

/// Ends a hook and what it has started.
async fn kill(child: &mut Child) {
    let group = child.id().and_then(|pid| i32::try_from(pid).ok());
    if let Some(group) = group {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    if let Err(e) = child.wait().await {
        log::warn!("Cannot wait for a hook's end: {e}");
    }
}

/// An exit status as Go writes it.
fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(name) => format!("signal: {name}"),
            Err(_) => format!("signal: {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

/// The end of what a hook writes to one of its streams.
struct Output {
    pipe: pipe::Receiver,
    end: Vec<u8>,
}

impl Output {
    fn new(pipe: pipe::Receiver) -> Self {
        Self {
            pipe,
            end: Vec::new(),
        }
    }

    /// Takes all that comes, up to end-of-file.
    async fn follow(&mut self) {
        while self.pipe.readable().await.is_ok() && self.take() {}
    }

    /// Takes what is there. Whether more may come.
    fn take(&mut self) -> bool {
        let mut piece = [0; KEPT];
        loop {
            match self.pipe.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(n) => {
                    self.end.extend(&piece[..n]);
                    let excess = self.end.len().saturating_sub(KEPT);
                    self.end.drain(..excess);
                }
                Err(e) => return e.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }

    /// One line.
    fn text(self) -> String {
        let text = String::from_utf8_lossy(&self.end);
        text.trim_end().replace('\n', "; ")
    }
}
