//! The tasks against an agent of our own in this process.

mod agent;
mod contract;
mod hooks;
mod release;

use std::os::unix::net::UnixListener as StdUnixListener;
use std::time::Duration;

use cube_agent_protocol::agent_ttrpc::create_agent;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use ttrpc::Code;
use ttrpc::r#async::Server;
use ttrpc::r#async::transport::Listener;

use agent::FakeAgent;

use super::*;
use crate::guest::Streams;
use crate::hypervisor::Ended;
use crate::publisher::{self, Event, Queue};

/// A sandbox with the pretended guest.
pub(crate) struct Bench {
    agent: FakeAgent,
    pub(crate) tasks: Arc<Tasks>,
    events: Queue,
    guest: Arc<Guest>,
    end: watch::Sender<Option<Arc<Ended>>>,
    dir: tempfile::TempDir,
    _server: Server,
}

const PID: u32 = 4242;

/// One connection, taken over by the agent's server as if it had been accepted.
struct Once(Option<UnixStream>);

impl futures_core::Stream for Once {
    type Item = std::io::Result<UnixStream>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        match self.0.take() {
            Some(stream) => std::task::Poll::Ready(Some(Ok(stream))),
            None => std::task::Poll::Pending,
        }
    }
}

pub(crate) async fn bench() -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let agent = FakeAgent::default();
    let path = dir.path().join("streams");
    agent.0.lock().unwrap().streams = path.clone();
    let streams = Streams::listen(StdUnixListener::bind(&path).unwrap()).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new()
        .register_service(create_agent(Arc::new(agent.clone())))
        .add_listener(Listener::new(Once(Some(theirs))));
    server.start().await.unwrap();
    let (end, ended) = watch::channel(None);
    let power = {
        let end = end.clone();
        Box::new(move || {
            end.send_replace(Some(Arc::new(Ended {
                message: "cut off".into(),
                console: String::new(),
            })));
            Ok(())
        })
    };
    let guest = Arc::new(Guest::new(PID, ours, streams, ended, power));
    let (publisher, events) = publisher::queue();
    let tasks = Tasks::new(
        "ns".into(),
        publisher,
        crate::stdio::Streams::new(dir.path().join("s")),
    );
    Bench {
        agent,
        tasks,
        events,
        guest,
        end,
        dir,
        _server: server,
    }
}

impl Bench {
    fn new_container(&self, id: &str, uris: Uris) -> NewContainer {
        NewContainer {
            reservation: self.tasks.reserve(id).unwrap(),
            bundle: "/bundle".into(),
            spec: b"{}".to_vec(),
            rootfs: "/rootfs".into(),
            rootfs_mounts: Vec::new(),
            block_devices: Vec::new(),
            disks: Disks::default(),
            console_size: (0, 0),
            is_own_sandbox: false,
            hooks: Arc::default(),
            undo: Undo::new(),
            event: TaskCreate {
                container_id: id.into(),
                ..Default::default()
            },
            uris,
        }
    }

    async fn create(&self, id: &str) -> u32 {
        let new = self.new_container(id, Uris::default());
        self.tasks.create(new, self.guest.clone()).await.unwrap()
    }

    pub(crate) async fn run(&self, id: &str) {
        self.create(id).await;
        self.tasks.start(id, "").await.unwrap();
    }

    fn add_exec(&self, id: &str, exec: &str, process: &str) {
        self.tasks
            .exec(id, exec, Uris::default(), format!("\"{process}\"").into())
            .unwrap();
    }

    /// The next events, by name.
    async fn events<const N: usize>(&mut self) -> [&'static str; N] {
        let mut names = [""; N];
        for name in &mut names {
            *name = match self.events.next().await.unwrap() {
                Event::Create(_) => "create",
                Event::Start(_) => "start",
                Event::ExecAdded(_) => "exec-added",
                Event::ExecStarted(_) => "exec-started",
                Event::Exit(e) if e.id == e.container_id => "exit",
                Event::Exit(_) => "exec-exit",
                Event::Delete(_) => "delete",
                Event::Paused(_) => "paused",
                Event::Resumed(_) => "resumed",
                Event::Oom(_) => "oom",
            };
        }
        names
    }
}

fn code<T>(result: Result<T, TaskError>) -> Code {
    result.err().unwrap().code()
}

#[tokio::test]
async fn a_container_goes_from_create_to_delete_with_its_status() {
    let mut bench = bench().await;
    assert_eq!(bench.create("c").await, PID);
    assert_eq!(bench.tasks.start("c", "").await.unwrap(), PID);
    let tasks = bench.tasks.clone();
    let wait = tokio::spawn(async move { tasks.wait("c", "").await });
    bench.agent.exit("c", "", 7);
    assert_eq!(wait.await.unwrap().unwrap().status, 7);
    assert_eq!(bench.tasks.state("c", "").unwrap().exit_status, 7);
    let deleted = bench.tasks.delete("c", "").await.unwrap();
    assert_eq!((deleted.pid, deleted.exit.status), (PID, 7));
    assert_eq!(bench.events().await, ["create", "start", "exit", "delete"]);
    assert_eq!(code(bench.tasks.delete("c", "").await), Code::NOT_FOUND);
    assert_eq!(code(bench.tasks.wait("c", "").await), Code::NOT_FOUND);
    assert!(bench.tasks.is_empty());
}

#[tokio::test]
async fn a_failed_create_leaves_no_name_behind_and_says_why_in_runcs_words() {
    let bench = bench().await;
    let mut new = bench.new_container("c", Uris::default());
    new.spec.clear();
    let error = bench
        .tasks
        .create(new, bench.guest.clone())
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "OCI runtime create failed: exec: \"nope\": executable file not found in $PATH"
    );
    assert!(bench.tasks.is_empty());
    bench.create("c").await;
    assert_eq!(
        bench.tasks.reserve("c").err().unwrap().code(),
        Code::ALREADY_EXISTS
    );
}

#[tokio::test]
async fn an_exec_runs_and_its_output_reaches_containerd() {
    let mut bench = bench().await;
    bench.run("c").await;
    let output = bench.dir.path().join("out");
    let uris = Uris {
        stdout: format!("file://{}", output.display()),
        ..Default::default()
    };
    bench
        .tasks
        .exec("c", "e", uris, b"\"true\"".to_vec())
        .unwrap();
    assert_eq!(bench.tasks.state("c", "e").unwrap().pid, 0);
    assert_eq!(bench.tasks.start("c", "e").await.unwrap(), PID);
    bench.agent.exit("c", "e", 3);
    assert_eq!(bench.tasks.wait("c", "e").await.unwrap().status, 3);
    assert_eq!(bench.tasks.delete("c", "e").await.unwrap().exit.status, 3);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "output of e");
    assert_eq!(
        bench.events().await,
        ["create", "start", "exec-added", "exec-started", "exec-exit"]
    );
}

#[tokio::test]
async fn an_exec_that_ends_at_once_exits_after_it_started() {
    let mut bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "quick");
    bench.tasks.start("c", "e").await.unwrap();
    assert_eq!(
        bench.events().await,
        ["create", "start", "exec-added", "exec-started", "exec-exit"]
    );
}

#[tokio::test]
async fn a_failed_exec_wakes_its_waiters_and_can_be_deleted() {
    let bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "missing");
    let tasks = bench.tasks.clone();
    let wait = tokio::spawn(async move { tasks.wait("c", "e").await });
    tokio::task::yield_now().await;
    let error = bench.tasks.start("c", "e").await.unwrap_err();
    assert!(
        error.to_string().starts_with("OCI runtime exec failed: "),
        "{error}"
    );
    assert_eq!(wait.await.unwrap().unwrap().status, 255);
    bench.tasks.delete("c", "e").await.unwrap();
}

#[tokio::test]
async fn an_execs_exit_comes_first_although_its_answer_comes_last() {
    let mut bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    bench.tasks.start("c", "e").await.unwrap();
    bench.agent.exit("c", "", 0);
    bench.agent.exit("c", "e", 137);
    assert_eq!(
        bench.events().await,
        [
            "create",
            "start",
            "exec-added",
            "exec-started",
            "exec-exit",
            "exit"
        ]
    );
    assert_eq!(bench.tasks.wait("c", "e").await.unwrap().status, 137);
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 0);
}

#[tokio::test]
async fn kills_for_want_of_memory_are_told_when_they_happen_and_before_the_exit() {
    let mut bench = bench().await;
    bench.run("c").await;
    assert_eq!(bench.events().await, ["create", "start"]);
    // What survives in the container makes each kill an event of its own.
    for _ in 0..3 {
        bench.agent.oom_kill();
        assert_eq!(bench.events().await, ["oom"]);
        // The next is asked for when this one was sent.
        bench.events.flushed().await;
    }
    // The last one takes the init along.
    bench.agent.oom_kill();
    bench.agent.exit("c", "", 137);
    assert_eq!(bench.events().await, ["oom", "exit"]);
    bench.tasks.delete("c", "").await.unwrap();
    assert_eq!(bench.events().await, ["delete"]);
}

#[tokio::test]
async fn while_containerd_is_away_one_event_stands_for_all_kills() {
    let mut bench = bench().await;
    bench.run("c").await;
    assert_eq!(bench.events().await, ["create", "start"]);
    bench.agent.oom_kill();
    assert_eq!(bench.events().await, ["oom"]);
    for _ in 0..1000 {
        bench.agent.oom_kill();
        tokio::task::yield_now().await;
    }
    bench.agent.exit("c", "", 137);
    assert_eq!(bench.events().await, ["oom", "exit"]);
}

#[tokio::test]
async fn when_the_machine_dies_every_process_ends_and_everything_can_be_deleted() {
    let mut bench = bench().await;
    bench.run("a").await;
    bench.run("b").await;
    bench.add_exec("a", "e", "sleep");
    bench.tasks.start("a", "e").await.unwrap();
    bench.end.send_replace(Some(Arc::new(Ended {
        message: "killed".into(),
        console: String::new(),
    })));
    for (id, exec) in [("a", "e"), ("a", ""), ("b", "")] {
        assert_eq!(bench.tasks.wait(id, exec).await.unwrap().status, 137);
    }
    for id in ["a", "b"] {
        assert_eq!(bench.tasks.pids(id).await.unwrap().len(), 1);
        bench.tasks.delete(id, "").await.unwrap();
    }
    let names: Vec<_> = bench.events.drain();
    let exits = names.iter().filter(|e| matches!(e, Event::Exit(_))).count();
    assert_eq!(exits, 3);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_answer_to_sigkill_is_cut_off() {
    let bench = bench().await;
    bench.run("c").await;
    bench.agent.0.lock().unwrap().mute = true;
    bench.tasks.kill("c", "", 9, false).await.unwrap();
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 137);
}

#[tokio::test(start_paused = true)]
async fn a_guest_none_of_whose_containers_ends_by_sigkill_is_cut_off() {
    let bench = bench().await;
    bench.agent.0.lock().unwrap().immortal = true;
    for id in ["a", "b"] {
        bench.run(id).await;
    }
    // Twice, as people do. The other one may do well, so the machine goes on.
    for _ in 0..2 {
        bench.tasks.kill("a", "", 9, false).await.unwrap();
    }
    let of_a = tokio::time::timeout(Duration::from_secs(3600), bench.tasks.wait("a", ""));
    assert!(of_a.await.is_err());
    bench.tasks.kill("b", "", 9, true).await.unwrap();
    for id in ["a", "b"] {
        assert_eq!(bench.tasks.wait(id, "").await.unwrap().status, 137);
    }
}

#[tokio::test]
async fn signals_and_sizes_and_pids_reach_the_right_process() {
    let bench = bench().await;
    let terminal = Uris {
        terminal: true,
        ..Default::default()
    };
    bench
        .tasks
        .create(
            bench.new_container("c", terminal.clone()),
            bench.guest.clone(),
        )
        .await
        .unwrap();
    bench.tasks.start("c", "").await.unwrap();
    bench.tasks.resize("c", "", (80, 24)).await.unwrap();
    bench
        .tasks
        .exec("c", "e", terminal, b"{}".to_vec())
        .unwrap();
    // Before its start the size is kept, not sent.
    bench.tasks.resize("c", "e", (10, 5)).await.unwrap();
    assert_eq!(
        code(bench.tasks.kill("c", "e", 15, false).await),
        Code::FAILED_PRECONDITION
    );
    bench.tasks.start("c", "e").await.unwrap();
    bench.tasks.kill("c", "e", 15, false).await.unwrap();
    assert_eq!(bench.tasks.wait("c", "e").await.unwrap().status, 143);
    assert_eq!(
        code(bench.tasks.kill("c", "e", 15, false).await),
        Code::NOT_FOUND
    );
    bench.tasks.close_stdin("c", "").unwrap();
    let log: Vec<_> = bench.agent.0.lock().unwrap().log.drain(..).collect();
    assert_eq!(log, ["resize 80x24", "signal e 15 false"]);

    let pids = bench.tasks.pids("c").await.unwrap();
    assert_eq!(
        pids.iter().map(|p| p.pid).collect::<Vec<_>>(),
        [PID, 11, 12]
    );
    let details = ProcessDetails::parse_from_bytes(&pids[1].info.value).unwrap();
    assert_eq!(details.exec_id, "e");
}

#[tokio::test]
async fn all_containers_are_asked_to_end_at_once_and_those_that_have_are_not_waited_for() {
    let bench = bench().await;
    for id in ["ended", "a", "b"] {
        bench.run(id).await;
    }
    bench.agent.exit("ended", "", 0);
    bench.tasks.wait("ended", "").await.unwrap();
    bench.tasks.terminate_all().await;
    for (id, status) in [("ended", 0), ("a", 143), ("b", 143)] {
        assert_eq!(bench.tasks.wait(id, "").await.unwrap().status, status);
    }
    assert_eq!(bench.tasks.all_stats().await.unwrap().len(), 3);
}

#[tokio::test]
async fn pause_and_resume_are_told_and_guarded() {
    let mut bench = bench().await;
    bench.run("c").await;
    assert_eq!(
        code(bench.tasks.resume("c").await),
        Code::FAILED_PRECONDITION
    );
    bench.tasks.pause("c").await.unwrap();
    assert_eq!(
        code(bench.tasks.pause("c").await),
        Code::FAILED_PRECONDITION
    );
    assert_eq!(
        code(bench.tasks.exec("c", "e", Uris::default(), b"{}".to_vec())),
        Code::FAILED_PRECONDITION
    );
    bench.tasks.resume("c").await.unwrap();
    assert_eq!(
        bench.events().await,
        ["create", "start", "paused", "resumed"]
    );
}

#[tokio::test]
async fn a_stopped_container_has_figures_and_takes_no_limits() {
    let bench = bench().await;
    bench.run("c").await;
    let limits = || b"{}".to_vec();
    bench.tasks.update("c", limits()).await.unwrap();
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    let error = bench.tasks.update("c", limits()).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot update a stopped container");
    assert_eq!(error.code(), Code::UNKNOWN);
    // Its cgroup is there until it is deleted.
    bench.tasks.stats("c").await.unwrap();
    let log: Vec<_> = bench.agent.0.lock().unwrap().log.drain(..).collect();
    assert_eq!(log, ["update", "stats"]);
}

#[tokio::test]
async fn two_deletes_at_once_delete_once() {
    let mut bench = bench().await;
    bench.run("c").await;
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    let (first, second) = tokio::join!(bench.tasks.delete("c", ""), bench.tasks.delete("c", ""));
    assert!(first.is_ok());
    assert_eq!(code(second), Code::NOT_FOUND);
    assert_eq!(bench.events().await, ["create", "start", "exit", "delete"]);
    assert!(bench.events.drain().is_empty());
}

#[tokio::test]
async fn a_delete_that_cleans_up_slowly_does_not_hold_up_other_containers() {
    let mut bench = bench().await;
    let (go_on, slow_disk) = std::sync::mpsc::channel::<()>();
    let slow_disk = Mutex::new(slow_disk);
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let mut new = bench.new_container("slow", Uris::default());
    new.undo.push("unmount", move || {
        let _ = begun.send(());
        let slow_disk = slow_disk.lock().unwrap();
        slow_disk.recv_timeout(Duration::from_secs(10))
    });
    bench.tasks.create(new, bench.guest.clone()).await.unwrap();
    bench.run("other").await;
    bench.agent.exit("slow", "", 0);
    bench.tasks.wait("slow", "").await.unwrap();
    let tasks = bench.tasks.clone();
    let delete = tokio::spawn(async move { tasks.delete("slow", "").await });
    has_begun.await.unwrap();

    assert_eq!(
        bench.tasks.state("other", "").unwrap().status,
        Status::RUNNING.into()
    );
    bench.tasks.kill("other", "", 15, false).await.unwrap();
    assert_eq!(bench.tasks.wait("other", "").await.unwrap().status, 143);
    // Nothing is left when the event says so, and the name is taken as long.
    assert!(!delete.is_finished());
    assert_eq!(
        bench.events().await,
        ["create", "create", "start", "exit", "exit"]
    );
    assert!(bench.events.drain().is_empty());
    assert!(bench.tasks.reserve("slow").is_err());
    go_on.send(()).unwrap();
    delete.await.unwrap().unwrap();
    assert_eq!(bench.events().await, ["delete"]);
    assert!(bench.tasks.reserve("slow").is_ok());
}

#[tokio::test]
async fn a_client_that_never_reads_does_not_hold_up_the_delete() {
    let bench = bench().await;
    let fifo = bench.dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let uris = Uris {
        stdout: fifo.display().to_string(),
        ..Default::default()
    };
    bench
        .tasks
        .create(bench.new_container("c", uris), bench.guest.clone())
        .await
        .unwrap();
    bench.tasks.start("c", "").await.unwrap();
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    let before = tokio::time::Instant::now();
    bench.tasks.delete("c", "").await.unwrap();
    assert!(before.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_stream_is_read_to_its_end_before_a_delete_returns() {
    let bench = bench().await;
    let fifo = bench.dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let uris = Uris {
        stdout: fifo.display().to_string(),
        ..Default::default()
    };
    let mut reader = tokio::net::unix::pipe::OpenOptions::new()
        .open_receiver(&fifo)
        .unwrap();
    bench
        .tasks
        .create(bench.new_container("c", uris), bench.guest.clone())
        .await
        .unwrap();
    bench.tasks.start("c", "").await.unwrap();
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    bench.tasks.delete("c", "").await.unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "output of c");
}
