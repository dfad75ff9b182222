//! containerd's table of cases: what each call answers in each state.

use super::*;
use crate::options::Options;
use crate::sandbox::Sandbox;

fn ended() -> Option<Arc<Ended>> {
    Some(Arc::new(Ended {
        message: "killed".into(),
        console: String::new(),
    }))
}

/// Whether the shim has left by now.
async fn has_left(sandbox: &Sandbox) -> bool {
    tokio::time::timeout(Duration::from_millis(1), sandbox.left())
        .await
        .is_ok()
}

impl Bench {
    fn sandbox(&self) -> Sandbox {
        let socket = self.dir.path().join("s");
        std::fs::write(&socket, "").unwrap();
        Sandbox::new(
            "ns".into(),
            "c".into(),
            Options::default(),
            self.tasks.clone(),
            socket,
        )
    }
}

#[tokio::test]
async fn every_call_about_an_unknown_exec_is_not_found() {
    let bench = bench().await;
    bench.run("c").await;
    let tasks = &bench.tasks;
    for code in [
        code(tasks.state("c", "e")),
        code(tasks.start("c", "e").await),
        code(tasks.delete("c", "e").await),
        code(tasks.kill("c", "e", 9, false).await),
        code(tasks.resize("c", "e", (1, 1)).await),
        code(tasks.close_stdin("c", "e")),
        code(tasks.wait("c", "e").await),
    ] {
        assert_eq!(code, Code::NOT_FOUND);
    }
}

#[tokio::test]
async fn without_a_console_a_resize_and_without_a_stdin_its_end_are_no_errors() {
    let bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    for exec in ["", "e"] {
        bench.tasks.resize("c", exec, (80, 24)).await.unwrap();
        bench.tasks.close_stdin("c", exec).unwrap();
    }
    bench.tasks.start("c", "e").await.unwrap();
    bench.tasks.close_stdin("c", "e").unwrap();
    assert!(bench.agent.0.lock().unwrap().log.is_empty());
}

#[tokio::test]
async fn a_created_container_can_be_deleted_and_its_waiters_are_told() {
    let mut bench = bench().await;
    bench.create("c").await;
    let tasks = bench.tasks.clone();
    let wait = tokio::spawn(async move { tasks.wait("c", "").await });
    tokio::task::yield_now().await;
    assert!(!wait.is_finished(), "a wait before the start blocks");
    let deleted = bench.tasks.delete("c", "").await.unwrap();
    assert_eq!(deleted.exit.status, 137);
    assert_eq!(wait.await.unwrap().unwrap().status, 137);
    assert_eq!(bench.events().await, ["create", "exit", "delete"]);
}

#[tokio::test]
async fn an_exec_that_was_never_started_can_be_deleted_and_leaves_nobody_waiting() {
    let mut bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    let tasks = bench.tasks.clone();
    let wait = tokio::spawn(async move { tasks.wait("c", "e").await });
    tokio::task::yield_now().await;
    bench.tasks.delete("c", "e").await.unwrap();
    assert_eq!(code(wait.await.unwrap()), Code::NOT_FOUND);
    // Its name is free again.
    bench.add_exec("c", "e", "sleep");
    assert_eq!(
        bench.events().await,
        ["create", "start", "exec-added", "exec-added"]
    );
}

#[tokio::test]
async fn what_runs_cannot_be_deleted_and_what_was_started_cannot_be_started() {
    let bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    bench.tasks.start("c", "e").await.unwrap();
    for exec in ["", "e"] {
        assert_eq!(
            code(bench.tasks.delete("c", exec).await),
            Code::FAILED_PRECONDITION
        );
        assert_eq!(
            code(bench.tasks.start("c", exec).await),
            Code::FAILED_PRECONDITION
        );
    }
}

#[tokio::test]
async fn two_deletes_of_an_exec_at_once_delete_once() {
    let bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    bench.tasks.start("c", "e").await.unwrap();
    bench.agent.exit("c", "e", 4);
    bench.tasks.wait("c", "e").await.unwrap();
    let (first, second) = tokio::join!(bench.tasks.delete("c", "e"), bench.tasks.delete("c", "e"));
    assert_eq!(first.unwrap().exit.status, 4);
    assert_eq!(code(second), Code::NOT_FOUND);
}

#[tokio::test]
async fn after_its_exit_a_process_can_be_waited_for_and_not_signalled() {
    let bench = bench().await;
    bench.run("c").await;
    bench.agent.exit("c", "", 3);
    for _ in 0..2 {
        assert_eq!(bench.tasks.wait("c", "").await.unwrap().status, 3);
    }
    for all in [false, true] {
        assert_eq!(
            code(bench.tasks.kill("c", "", 9, all).await),
            Code::NOT_FOUND
        );
    }
}

#[tokio::test]
async fn when_the_machine_has_ended_a_kill_finds_nothing() {
    let bench = bench().await;
    bench.run("c").await;
    bench.add_exec("c", "e", "sleep");
    bench.tasks.start("c", "e").await.unwrap();
    // The agent does not answer any more; that the machine is gone is known, the exits are not told yet.
    bench.agent.0.lock().unwrap().mute = true;
    bench.end.send_replace(ended());
    assert_eq!(
        code(bench.tasks.kill("c", "", 15, false).await),
        Code::NOT_FOUND
    );
}

#[tokio::test]
async fn the_pid_of_a_create_is_listed_although_the_machine_ends_meanwhile() {
    let bench = bench().await;
    bench.run("c").await;
    bench.agent.0.lock().unwrap().mute = true;
    let (pids, ()) = tokio::join!(bench.tasks.pids("c"), async {
        tokio::task::yield_now().await;
        bench.end.send_replace(ended());
    });
    let pids = pids.unwrap();
    assert_eq!(pids.iter().map(|p| p.pid).collect::<Vec<_>>(), [PID]);
}

#[tokio::test]
async fn a_kill_that_the_machine_does_not_survive_has_worked() {
    for (exec, signal, works) in [("", 9, true), ("e", 9, true), ("e", 15, false)] {
        let bench = bench().await;
        bench.run("c").await;
        bench.add_exec("c", "e", "sleep");
        bench.tasks.start("c", "e").await.unwrap();
        bench.agent.0.lock().unwrap().mute = true;
        let (killed, ()) = tokio::join!(bench.tasks.kill("c", exec, signal, false), async {
            tokio::task::yield_now().await;
            bench.end.send_replace(ended());
        });
        match killed {
            Ok(()) => assert!(works),
            Err(error) => assert_eq!((works, error.code()), (false, Code::NOT_FOUND)),
        }
    }
}

#[tokio::test]
async fn many_execs_whose_output_nobody_reads_hold_up_a_delete_no_longer_than_one() {
    let bench = bench().await;
    bench.run("c").await;
    let mut clients = Vec::new();
    for n in 0..8 {
        let fifo = bench.dir.path().join(format!("fifo{n}"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Full already: the output has nowhere to go.
        let mut writer = std::fs::OpenOptions::new();
        let mut full = writer.read(true).write(true).open(&fifo).unwrap();
        std::io::Write::write_all(&mut full, &[0; 65536]).unwrap();
        let exec = format!("e{n}");
        let uris = Uris {
            stdout: fifo.display().to_string(),
            ..Default::default()
        };
        bench
            .tasks
            .exec("c", &exec, uris, b"\"quick\"".to_vec())
            .unwrap();
        bench.tasks.start("c", &exec).await.unwrap();
        bench.tasks.wait("c", &exec).await.unwrap();
        // Somebody holds it open, and does not read.
        clients.push(full);
    }
    bench.agent.exit("c", "", 0);
    bench.tasks.wait("c", "").await.unwrap();
    let before = tokio::time::Instant::now();
    bench.tasks.delete("c", "").await.unwrap();
    let elapsed = before.elapsed();
    assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
}

#[tokio::test]
async fn a_shutdown_with_tasks_is_remembered_until_the_last_one_goes() {
    let bench = bench().await;
    let sandbox = bench.sandbox();
    bench.run("a").await;
    bench.run("b").await;
    sandbox.shutdown().await;
    for (id, leaves) in [("b", false), ("a", true)] {
        assert!(!has_left(&sandbox).await);
        bench.agent.exit(id, "", 0);
        bench.tasks.wait(id, "").await.unwrap();
        sandbox.delete(id, "").await.unwrap();
        assert_eq!(has_left(&sandbox).await, leaves, "{id}");
    }
    assert!(!bench.dir.path().join("s").exists());
}

#[tokio::test]
async fn without_a_shutdown_an_empty_sandbox_stays_for_the_next_container() {
    let bench = bench().await;
    let sandbox = bench.sandbox();
    for id in ["a", "b"] {
        bench.run(id).await;
        bench.agent.exit(id, "", 0);
        bench.tasks.wait(id, "").await.unwrap();
        sandbox.delete(id, "").await.unwrap();
        assert!(!has_left(&sandbox).await);
    }
    sandbox.shutdown().await;
    assert!(has_left(&sandbox).await);
}

#[tokio::test]
async fn a_create_that_fails_after_a_shutdown_does_not_keep_the_shim() {
    let bench = bench().await;
    let sandbox = bench.sandbox();
    let coming = bench.tasks.reserve("other").unwrap();
    sandbox.shutdown().await;
    assert!(!has_left(&sandbox).await, "a container is about to come");
    drop(coming);
    let request = containerd_shim_protos::api::CreateTaskRequest {
        id: "c".into(),
        bundle: bench.dir.path().join("no-bundle").display().to_string(),
        ..Default::default()
    };
    sandbox.create(request).await.unwrap_err();
    assert!(has_left(&sandbox).await);
}

#[tokio::test]
async fn a_delete_of_a_container_that_is_being_created_ends_the_create_and_leaves_nothing() {
    let bench = bench().await;
    let sandbox = bench.sandbox();
    let new = bench.new_container("c", Uris::default());
    // As a containerd that was started again does with what lists no processes.
    let (deleted, created) = tokio::join!(
        sandbox.delete("c", ""),
        bench.tasks.create(new, bench.guest.clone())
    );
    assert_eq!(code(deleted), Code::NOT_FOUND);
    created.unwrap_err();
    assert!(bench.agent.0.lock().unwrap().processes.is_empty());
    assert_eq!(code(bench.tasks.state("c", "")), Code::NOT_FOUND);
    sandbox.shutdown().await;
    assert!(has_left(&sandbox).await);
}
