//! The end of a machine that one container has for itself.

use super::*;

impl Bench {
    async fn run_alone(&self, id: &str, uris: Uris) {
        let mut new = self.new_container(id, uris);
        new.is_own_sandbox = true;
        self.tasks.create(new, self.guest.clone()).await.unwrap();
        self.tasks.start(id, "").await.unwrap();
    }

    fn has_power(&self) -> bool {
        !self.guest.has_ended()
    }
}

#[tokio::test]
async fn a_machine_of_one_container_is_gone_when_the_exit_is_told() {
    let mut bench = bench().await;
    bench.run_alone("c", Uris::default()).await;
    assert_eq!(bench.events().await, ["create", "start"]);
    bench.agent.exit("c", "", 7);
    assert_eq!(bench.events().await, ["exit"]);
    assert!(!bench.has_power());
    // All that is asked of a stopped container is answered as before.
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 7);
    bench.tasks.stats("c").await.unwrap();
    let pids = bench.tasks.pids("c").await.unwrap();
    assert_eq!(pids.iter().map(|p| p.pid).collect::<Vec<_>>(), [PID]);
    bench.tasks.resize("c", "", (1, 1)).await.unwrap();
    bench.tasks.close_stdin("c", "").unwrap();
    assert_eq!(
        code(bench.tasks.kill("c", "", 9, true).await),
        Code::NOT_FOUND
    );
    let error = bench.tasks.update("c", b"{}".to_vec()).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot update a stopped container");
    let error = bench.tasks.reserve("other").err().unwrap().to_string();
    assert!(
        error
            .starts_with("the sandbox's machine has ended with its container c: delete that first"),
        "{error}"
    );
    assert_eq!(bench.tasks.delete("c", "").await.unwrap().exit.status, 7);
    assert_eq!(bench.events().await, ["delete"]);
    bench.tasks.reserve("other").unwrap();
}

#[tokio::test]
async fn a_machine_stays_for_those_who_share_it_and_for_those_who_may() {
    let bench = bench().await;
    // Its group may grow.
    bench.run("c").await;
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    bench.tasks.delete("c", "").await.unwrap();
    // Another has joined, or is about to.
    bench.run_alone("d", Uris::default()).await;
    bench.run("e").await;
    bench.agent.exit("d", "", 0);
    bench.tasks.wait("d", "").await.unwrap();
    bench.tasks.delete("d", "").await.unwrap();
    bench.agent.exit("e", "", 0);
    bench.tasks.wait("e", "").await.unwrap();
    bench.tasks.delete("e", "").await.unwrap();
    bench.run_alone("f", Uris::default()).await;
    let _coming = bench.tasks.reserve("g").unwrap();
    bench.agent.exit("f", "", 0);
    bench.tasks.wait("f", "").await.unwrap();
    assert!(bench.has_power());
}

#[tokio::test]
async fn output_that_nobody_takes_keeps_the_machine_and_not_the_exit() {
    let bench = bench().await;
    let fifo = bench.dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut open = std::fs::OpenOptions::new();
    let mut client = open.read(true).write(true).open(&fifo).unwrap();
    std::io::Write::write_all(&mut client, &[0; 65536]).unwrap();
    let uris = Uris {
        stdout: fifo.display().to_string(),
        ..Default::default()
    };
    bench.run_alone("c", uris).await;
    bench.agent.exit("c", "", 3);
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 3);
    assert!(bench.has_power());
    // It is all there for a client that comes at last.
    let read = tokio::task::spawn_blocking(move || {
        let mut got = vec![0; 65536 + "output of c".len()];
        std::io::Read::read_exact(&mut client, &mut got).unwrap();
        got
    });
    bench.tasks.delete("c", "").await.unwrap();
    assert!(read.await.unwrap().ends_with(b"output of c"));
}

#[tokio::test]
async fn an_exit_does_not_wait_for_a_stream_that_nobody_opens() {
    let bench = bench().await;
    let uris = Uris {
        stdout: format!(
            "ttrpc+unix://{}?streaming_id=a",
            bench.dir.path().join("s").display()
        ),
        ..Default::default()
    };
    assert!(uris.has_output_streams() && !Uris::default().has_output_streams());
    let new = bench.new_container("c", uris);
    bench.tasks.create(new, bench.guest.clone()).await.unwrap();
    bench.tasks.start("c", "").await.unwrap();
    bench.agent.exit("c", "", 3);
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 3);
    assert!(bench.has_power());
    bench.tasks.delete("c", "").await.unwrap();
}

#[tokio::test]
async fn the_exits_of_execs_are_told_before_the_machine_ends() {
    let mut bench = bench().await;
    bench.run_alone("c", Uris::default()).await;
    bench.add_exec("c", "e", "sleep");
    bench.tasks.start("c", "e").await.unwrap();
    bench.agent.exit("c", "", 0);
    tokio::task::yield_now().await;
    // Its init has ended: nothing more can be started.
    while let Ok(()) = bench
        .tasks
        .exec("c", "late", Uris::default(), b"{}".to_vec())
    {
        bench.tasks.delete("c", "late").await.unwrap();
        tokio::task::yield_now().await;
    }
    assert!(bench.has_power());
    bench.agent.exit("c", "e", 5);
    assert_eq!(bench.tasks.wait("c", "e").await.unwrap().status, 5);
    assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 0);
    assert!(!bench.has_power());
    assert_eq!(bench.tasks.delete("c", "e").await.unwrap().exit.status, 5);
    bench.tasks.delete("c", "").await.unwrap();
    let mut told = Vec::new();
    while told.last() != Some(&"delete") {
        let [name] = bench.events().await;
        told.push(name);
    }
    told.retain(|name| *name != "exec-added");
    assert_eq!(
        told,
        [
            "create",
            "start",
            "exec-started",
            "exec-exit",
            "exit",
            "delete"
        ]
    );
}

#[tokio::test]
async fn a_container_that_was_never_started_is_deleted_once() {
    let mut bench = bench().await;
    let mut new = bench.new_container("c", Uris::default());
    new.is_own_sandbox = true;
    bench.tasks.create(new, bench.guest.clone()).await.unwrap();
    let deleted = bench.tasks.delete("c", "").await.unwrap();
    assert_eq!(deleted.exit.status, 137);
    assert_eq!(bench.events().await, ["create", "exit", "delete"]);
    assert!(bench.events.drain().is_empty());
}

#[tokio::test]
async fn an_agent_that_keeps_its_last_figures_keeps_no_machine() {
    let bench = bench().await;
    bench.run_alone("c", Uris::default()).await;
    bench.agent.0.lock().unwrap().mute = true;
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    assert!(!bench.has_power());
    let error = bench.tasks.stats("c").await.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("The sandbox's machine has ended"),
        "{error}"
    );
}
