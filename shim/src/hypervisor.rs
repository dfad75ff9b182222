//! The hypervisor process of a sandbox: how it is started, spoken to, and watched.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cube_hypervisor_api::control::{self, ControlError, Event, FromHypervisor, Reply, Request};
use cube_hypervisor_api::exit::ExitStatus;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::sync::{mpsc, oneshot, watch};

use crate::process_id;
use crate::spec::NetworkNamespace;

/// Why the hypervisor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// The program does not start.
    #[error("Cannot start the hypervisor {0:?}: {1}")]
    Spawn(PathBuf, io::Error),
    /// The pod's network namespace is gone.
    #[error("Cannot open the network namespace {0:?}: {1}")]
    NetworkNamespace(PathBuf, io::Error),
    /// A socket or a pidfd cannot be made.
    #[error("Cannot set up the connection to the hypervisor: {0}")]
    Setup(io::Error),
    /// A request could not be sent.
    #[error("Cannot send a request to the hypervisor: {0}")]
    Send(#[source] ControlError),
    /// It refused.
    #[error("{0}")]
    Refused(String),
    /// It ended before it answered.
    #[error("{0}")]
    Ended(Arc<Ended>),
}

/// How a machine ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// One line for a person.
    pub message: String,
    /// The end of the guest's console.
    pub console: String,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        f.write_str(&last_lines(&self.console))
    }
}

/// The last lines of a console, as the end of an error message; bounded.
pub fn last_lines(console: &str) -> String {
    const LINES: usize = 25;
    const BYTES: usize = 2048;
    let mut start = console.len().saturating_sub(BYTES);
    while !console.is_char_boundary(start) {
        start += 1;
    }
    let lines: Vec<_> = console[start..]
        .lines()
        .filter(|l| !l.trim().is_empty())
        .collect();
    if lines.is_empty() {
        return String::new();
    }
    let mut text = String::from("; the guest's last lines:");
    for line in &lines[lines.len().saturating_sub(LINES)..] {
        text.push_str("\n  ");
        text.extend(line.chars().filter(|c| !c.is_control() || *c == '\t'));
    }
    text
}

/// What the hypervisor is started with.
pub struct Launch {
    /// Its binary.
    pub binary: PathBuf,
    /// Its working directory, which its vsock path is relative to.
    pub directory: PathBuf,
    /// The network namespace that it lives in.
    pub network: NetworkNamespace,
    /// Where a process writes "0" to get into its cgroup.
    pub cgroup_processes: Vec<File>,
    /// How willingly the host's kernel ends it when memory runs out.
    pub oom_score_adj: Option<i64>,
}

/// A running hypervisor. Dropping the last handle ends the machine, since the hypervisor sees the
/// control socket close.
pub struct Hypervisor {
    pid: u32,
    handle: Arc<OwnedFd>,
    control: Arc<Control>,
    ended: watch::Receiver<Option<Arc<Ended>>>,
}

/// A request on its way.
pub struct Sent(oneshot::Receiver<Reply>);

struct Control {
    socket: AsyncFd<OwnedFd>,
    /// Who waits for the next replies, in the order of the requests.
    waiting: Mutex<VecDeque<oneshot::Sender<Reply>>>,
    /// What is to be done when the disk of a slot is closed.
    closing: Mutex<HashMap<u8, OnClosed>>,
}

/// Done when a detached disk is closed.
type OnClosed = Box<dyn FnOnce() + Send>;

impl Control {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<oneshot::Sender<Reply>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closing(&self) -> MutexGuard<'_, HashMap<u8, OnClosed>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hypervisor {
    /// Starts the process. It does nothing before the first request. `events` gets what it says
    /// unasked, its end aside.
    pub fn spawn(
        launch: Launch,
        events: mpsc::UnboundedSender<Event>,
    ) -> Result<Self, HypervisorError> {
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|e| HypervisorError::Setup(e.into()))?;
        let mut child = spawn_child(launch, theirs)?;
        let pid = child.id();
        let setup = |child: &mut Child| -> io::Result<_> {
            let handle = Arc::new(process_id::open(pid)?);
            nix::fcntl::fcntl(
                ours.as_raw_fd(),
                nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
            )?;
            let control = Arc::new(Control {
                socket: readable(ours)?,
                waiting: Mutex::default(),
                closing: Mutex::default(),
            });
            let exit = readable(handle.try_clone()?)?;
            let stderr = child.stderr.take().map(log_stderr).transpose()?;
            Ok((handle, control, exit, stderr))
        };
        let (handle, control, exit, stderr) = setup(&mut child).map_err(|e| {
            let _ = child.kill();
            let _ = child.wait();
            HypervisorError::Setup(e)
        })?;
        let (end, ended) = watch::channel(None);
        tokio::spawn(watch_process(
            child,
            exit,
            control.clone(),
            stderr,
            events,
            end,
        ));
        Ok(Self {
            pid,
            handle,
            control,
            ended,
        })
    }

    /// Its process id on the host.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A handle that becomes readable when the process has ended.
    pub fn handle(&self) -> Arc<OwnedFd> {
        self.handle.clone()
    }

    /// Becomes `Some` when the process has ended and was reaped.
    pub fn ended(&self) -> watch::Receiver<Option<Arc<Ended>>> {
        self.ended.clone()
    }

    /// What kills the process.
    pub fn killer(&self) -> impl Fn() -> io::Result<()> + Send + Sync + use<> {
        let handle = self.handle.clone();
        move || process_id::kill(&handle)
    }

    /// Sends a request; [`Self::answer`] waits for what comes back.
    pub fn send(&self, request: &Request) -> Result<Sent, HypervisorError> {
        self.send_with(request, &[])
    }

    /// The same, with descriptors beside the request.
    pub fn send_with(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Sent, HypervisorError> {
        let (answer, reply) = oneshot::channel();
        // Under one lock, so that answers are told apart by their order.
        let mut waiting = self.control.waiting();
        match control::send(self.control.socket.get_ref(), request, fds) {
            Ok(()) => waiting.push_back(answer),
            // The process's own last words, which `answer` waits for, say more than this.
            Err(ControlError::Closed) => {}
            Err(e) => return Err(HypervisorError::Send(e)),
        }
        Ok(Sent(reply))
    }

    /// Asks for the disk to be taken out of a slot. When the hypervisor has closed it, `closed` is called; it is dropped
    /// without if the disk is not detached, or the machine ends.
    pub fn detach_disk(
        &self,
        slot: u8,
        closed: impl FnOnce() + Send + 'static,
    ) -> Result<Sent, HypervisorError> {
        self.control.closing().insert(slot, Box::new(closed));
        let sent = self.send(&Request::DetachDisk { slot });
        if sent.is_err() {
            self.control.closing().remove(&slot);
        }
        sent
    }

    /// Waits for the answer to a request.
    pub async fn answer(&self, sent: Sent) -> Result<Reply, HypervisorError> {
        match sent.0.await {
            Ok(Reply::Failed(message)) => Err(HypervisorError::Refused(message)),
            Ok(reply) => Ok(reply),
            Err(_) => Err(HypervisorError::Ended(self.end().await)),
        }
    }

    /// Sends a request and waits for its answer.
    pub async fn request(&self, request: &Request) -> Result<Reply, HypervisorError> {
        let sent = self.send(request)?;
        self.answer(sent).await
    }

    /// Waits for the end.
    pub async fn end(&self) -> Arc<Ended> {
        end_of(self.ended.clone()).await
    }
}

/// Registers a descriptor with the runtime.
fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is the same open descriptor as long as it lives, and the result owns it.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits for the end that `ended` tells of.
pub async fn end_of(mut ended: watch::Receiver<Option<Arc<Ended>>>) -> Arc<Ended> {
    let known = ended
        .wait_for(Option::is_some)
        .await
        .ok()
        .and_then(|ended| ended.clone());
    known.unwrap_or_else(|| {
        Arc::new(Ended {
            message: "The machine has ended".into(),
            console: String::new(),
        })
    })
}

fn spawn_child(launch: Launch, control: OwnedFd) -> Result<Child, HypervisorError> {
    let network = match &launch.network {
        NetworkNamespace::New => None,
        NetworkNamespace::Existing(path) => {
            Some(File::open(path).map_err(|e| HypervisorError::NetworkNamespace(path.clone(), e))?)
        }
    };
    let mut command = Command::new(&launch.binary);
    command
        .arg("--control-fd")
        .arg(control.as_raw_fd().to_string())
        .env_clear()
        .current_dir(&launch.directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0);
    let parent = nix::unistd::getpid();
    let (mut cgroups, adjustment) = (launch.cgroup_processes, launch.oom_score_adj);
    let adjustment = adjustment.map(|n| n.to_string());
    let prepare = move || {
        // Ends with the shim, however that ends.
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        if nix::unistd::getppid() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        for processes in &mut cgroups {
            processes.write_all(b"0")?;
        }
        if let Some(adjustment) = &adjustment {
            File::options()
                .write(true)
                .open("/proc/self/oom_score_adj")?
                .write_all(adjustment.as_bytes())?;
        }
        match &network {
            Some(namespace) => setns(namespace, CloneFlags::CLONE_NEWNET)?,
            None => unshare(CloneFlags::CLONE_NEWNET)?,
        }
        nix::fcntl::fcntl(
            control.as_raw_fd(),
            nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()),
        )?;
        Ok(())
    };
    // SAFETY: this process has one thread that allocates (the runtime is single-threaded), so no
    // lock can be held by another one at the fork; the closure otherwise makes system calls only.
    unsafe { command.pre_exec(prepare) };
    command
        .spawn()
        .map_err(|e| HypervisorError::Spawn(launch.binary.clone(), e))
}

/// Copies what the hypervisor writes to its standard error, the guest's console above all, into the
/// log. The result is the last line, for the case that it ends without a word on the control socket.
fn log_stderr(
    stderr: std::process::ChildStderr,
) -> io::Result<tokio::task::JoinHandle<Option<String>>> {
    let mut stderr = tokio::process::ChildStderr::from_std(stderr)?;
    Ok(tokio::spawn(async move {
        let mut lines = Lines::default();
        let mut chunk = [0; 2048];
        loop {
            match stderr.read(&mut chunk).await {
                Ok(0) | Err(_) => return lines.finish(),
                Ok(n) => lines.put(&chunk[..n]),
            }
        }
    }))
}

/// Cuts a byte stream into log lines. A guest can write to its console as fast as it likes: lines
/// have a bounded length, and a second a bounded number of them.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
    last: Option<String>,
    second: Option<Instant>,
    in_second: usize,
}

impl Lines {
    const MAX_LINE: usize = 1024;
    const MAX_PER_SECOND: usize = 500;

    fn put(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' || self.partial.len() == Self::MAX_LINE {
                self.end_line();
            }
            if byte != b'\n' {
                self.partial.push(byte);
            }
        }
    }

    fn end_line(&mut self) {
        let text = String::from_utf8_lossy(&self.partial).trim_end().to_owned();
        self.partial.clear();
        if text.is_empty() {
            return;
        }
        let now = Instant::now();
        if self
            .second
            .is_none_or(|start| now.duration_since(start) >= Duration::from_secs(1))
        {
            self.second = Some(now);
            self.in_second = 0;
        }
        self.in_second += 1;
        match self.in_second.cmp(&Self::MAX_PER_SECOND) {
            std::cmp::Ordering::Less => log::warn!("{text}"),
            std::cmp::Ordering::Equal => {
                log::warn!("The guest writes to its console too fast: lines are left out");
            }
            std::cmp::Ordering::Greater => {}
        }
        self.last = Some(text);
    }

    fn finish(mut self) -> Option<String> {
        self.end_line();
        self.last
    }
}

/// Reads the control socket until the process has ended, then says how.
async fn watch_process(
    mut child: Child,
    exit: AsyncFd<OwnedFd>,
    control: Arc<Control>,
    stderr: Option<tokio::task::JoinHandle<Option<String>>>,
    events: mpsc::UnboundedSender<Event>,
    end: watch::Sender<Option<Arc<Ended>>>,
) {
    let mut said: Option<Ended> = None;
    let mut open = true;
    loop {
        tokio::select! {
            readable = control.socket.readable(), if open => {
                match readable {
                    Ok(mut guard) => match read_packets(&control, &events, &mut said) {
                        Ok(()) => guard.clear_ready(),
                        Err(e) => {
                            open = false;
                            if !matches!(e, ControlError::Closed) {
                                // What cannot be understood cannot be trusted with a guest.
                                log::error!("The hypervisor's control socket: {e}");
                                let _ = child.kill();
                            }
                        }
                    },
                    Err(_) => open = false,
                }
            }
            _ = exit.readable() => break,
        }
    }
    if open {
        let _ = read_packets(&control, &events, &mut said);
    }
    let status = child.wait();
    let last_words = match stderr {
        Some(reader) => reader.await.ok().flatten(),
        None => None,
    };
    let ended = said.unwrap_or_else(|| Ended {
        message: describe(status, last_words),
        console: String::new(),
    });
    log::info!("The sandbox's machine has ended: {}", ended.message);
    end.send_replace(Some(Arc::new(ended)));
    // After the end is known: a request that finds its answer missing looks there.
    control.waiting().clear();
    control.closing().clear();
}

/// Takes all packets that are there.
fn read_packets(
    control: &Control,
    events: &mpsc::UnboundedSender<Event>,
    said: &mut Option<Ended>,
) -> Result<(), ControlError> {
    while let Some((packet, _)) = control::receive::<FromHypervisor>(control.socket.get_ref())? {
        match packet {
            FromHypervisor::Reply(reply) => {
                if let Some(answer) = control.waiting().pop_front() {
                    let _ = answer.send(reply);
                }
            }
            FromHypervisor::Event(Event::Ended {
                message, console, ..
            }) => {
                *said = Some(Ended { message, console });
            }
            FromHypervisor::Event(Event::DiskClosed { slot }) => {
                let closed = control.closing().remove(&slot);
                if let Some(closed) = closed {
                    closed();
                }
            }
            FromHypervisor::Event(event) => {
                let _ = events.send(event);
            }
        }
    }
    Ok(())
}

/// What an exit without a last message on the control socket means.
fn describe(status: io::Result<std::process::ExitStatus>, last_words: Option<String>) -> String {
    let how = match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => match ExitStatus::from_code(code) {
                Some(ExitStatus::GuestReset) => "ended: the guest has reset itself".to_owned(),
                _ => format!("ended with status {code}"),
            },
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(e) => format!("ended, its status is unknown ({e})"),
    };
    match last_words {
        Some(words) => format!("The hypervisor {how}: {words}"),
        None => format!("The hypervisor {how}"),
    }
}

#[cfg(test)]
pub mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that stands in for the hypervisor: a shell script that is given the descriptor.
    pub fn script(directory: &std::path::Path, text: &str) -> Launch {
        let binary = directory.join("hypervisor");
        // Written elsewhere first: a file open for writing, also in a child of another test,
        // cannot be executed.
        std::fs::write(directory.join("text"), text).unwrap();
        std::fs::set_permissions(directory.join("text"), PermissionsExt::from_mode(0o755)).unwrap();
        let status = Command::new("cp")
            .arg("-p")
            .args([directory.join("text"), binary.clone()])
            .status()
            .unwrap();
        assert!(status.success());
        Launch {
            binary,
            directory: directory.to_owned(),
            network: NetworkNamespace::New,
            cgroup_processes: Vec::new(),
            oom_score_adj: None,
        }
    }

    #[tokio::test]
    async fn an_end_without_a_word_is_told_with_status_and_last_line() {
        let dir = tempfile::tempdir().unwrap();
        let launch = script(
            dir.path(),
            "#!/bin/sh\necho first >&2; echo no kvm >&2; exit 1\n",
        );
        let hypervisor = Hypervisor::spawn(launch, mpsc::unbounded_channel().0).unwrap();
        let ended = hypervisor.end().await;
        assert_eq!(ended.message, "The hypervisor ended with status 1: no kvm");
        let error = hypervisor.request(&Request::Console).await.unwrap_err();
        assert!(error.to_string().contains("no kvm"), "{error}");
    }

    #[tokio::test]
    async fn a_request_that_waits_when_the_process_is_killed_fails_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let launch = script(dir.path(), "#!/bin/sh\nexec sleep 1000\n");
        let hypervisor = Hypervisor::spawn(launch, mpsc::unbounded_channel().0).unwrap();
        let killer = hypervisor.killer();
        let (reply, ()) = tokio::join!(hypervisor.request(&Request::Console), async {
            killer().unwrap();
        });
        let error = reply.unwrap_err().to_string();
        assert!(error.contains("signal 9"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_binary_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut launch = script(dir.path(), "");
        launch.binary = "/no/such/hypervisor".into();
        let error = Hypervisor::spawn(launch, mpsc::unbounded_channel().0)
            .err()
            .unwrap();
        assert!(error.to_string().contains("/no/such/hypervisor"), "{error}");
    }

    #[test]
    fn an_error_carries_a_bounded_end_of_the_console() {
        let console: String = (0..1000).map(|n| format!("line {n}\n\x1b[0m\n")).collect();
        let text = last_lines(&console);
        assert!(text.len() < 2300, "{}", text.len());
        assert!(text.contains("line 999"));
        assert!(!text.contains('\x1b'));
        assert_eq!(last_lines(""), "");
    }

    #[test]
    fn a_flood_from_the_guest_is_cut() {
        let mut lines = Lines::default();
        lines.put(&vec![b'x'; 10 * Lines::MAX_LINE]);
        assert!(lines.partial.len() <= Lines::MAX_LINE);
        assert_eq!(lines.finish().unwrap().len(), Lines::MAX_LINE);
    }
}
