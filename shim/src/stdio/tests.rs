use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// More than all buffers on the way hold together.
const LOTS: usize = 1 << 20;

/// Longer than any of these takes.
const MOST: Duration = Duration::from_secs(60);

fn fifo(dir: &TempDir, name: &str) -> String {
    let path = dir.path().join(name);
    mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

/// Both ends of a stream from the guest: ours and the process's.
fn stream() -> (Option<UnixStream>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Some(ours), theirs)
}

async fn open(uris: Uris) -> HostStdio {
    HostStdio::open(&uris, "c1", "ns1", &Arc::default())
        .await
        .unwrap()
}

#[tokio::test]
async fn all_output_reaches_a_client_that_opens_its_fifo_late() {
    let dir = TempDir::new().unwrap();
    let uris = Uris {
        stdout: fifo(&dir, "out"),
        ..Uris::default()
    };
    let host = open(uris.clone()).await;
    let (stdout, mut process) = stream();
    let relays = Relays::start(
        host,
        GuestStdio {
            stdout,
            ..GuestStdio::default()
        },
    );
    let writer = tokio::spawn(async move {
        process.write_all(&pattern(LOTS)).await.unwrap();
    });
    let mut client = pipe::OpenOptions::new()
        .open_receiver(&uris.stdout)
        .unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).await.unwrap();
    writer.await.unwrap();
    assert!(got == pattern(LOTS), "{} bytes", got.len());
    relays.drain(Duration::from_secs(5), MOST).await;
}

#[tokio::test]
async fn a_client_that_comes_back_loses_nothing_and_breaks_no_pipe() {
    let dir = TempDir::new().unwrap();
    let uris = Uris {
        stdout: fifo(&dir, "out"),
        ..Uris::default()
    };
    let host = open(uris.clone()).await;
    let (stdout, mut process) = stream();
    let _relays = Relays::start(
        host,
        GuestStdio {
            stdout,
            ..GuestStdio::default()
        },
    );
    let mut byte = [0];
    for round in 0..3u8 {
        let mut client = pipe::OpenOptions::new()
            .open_receiver(&uris.stdout)
            .unwrap();
        process.write_all(&[round]).await.unwrap();
        client.read_exact(&mut byte).await.unwrap();
        assert_eq!(byte, [round]);
    }
}

#[tokio::test]
async fn stdin_ends_only_after_close_and_the_last_client() {
    let dir = TempDir::new().unwrap();
    let uris = Uris {
        stdin: fifo(&dir, "in"),
        ..Uris::default()
    };
    let host = open(uris.clone()).await;
    let (stdin, mut process) = stream();
    let mut relays = Relays::start(
        host,
        GuestStdio {
            stdin,
            ..GuestStdio::default()
        },
    );
    for round in 0..2u8 {
        let mut client = pipe::OpenOptions::new().open_sender(&uris.stdin).unwrap();
        client.write_all(&[round]).await.unwrap();
        assert_eq!(process.read_u8().await.unwrap(), round);
    }
    let mut client = pipe::OpenOptions::new().open_sender(&uris.stdin).unwrap();
    relays.close_stdin();
    client.write_all(&pattern(100)).await.unwrap();
    drop(client);
    let mut rest = Vec::new();
    process.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, pattern(100));
}

#[tokio::test]
async fn draining_gives_up_output_that_nobody_reads() {
    let dir = TempDir::new().unwrap();
    let uris = Uris {
        stdout: fifo(&dir, "out"),
        ..Uris::default()
    };
    let host = open(uris).await;
    let (stdout, mut process) = stream();
    let relays = Relays::start(
        host,
        GuestStdio {
            stdout,
            ..GuestStdio::default()
        },
    );
    tokio::spawn(async move { process.write_all(&pattern(LOTS)).await });
    relays.drain(Duration::from_millis(50), MOST).await;
}

#[tokio::test]
async fn draining_waits_for_a_slow_reader_longer_than_its_limit() {
    let dir = TempDir::new().unwrap();
    let uris = Uris {
        stdout: fifo(&dir, "out"),
        ..Uris::default()
    };
    let host = open(uris.clone()).await;
    let (stdout, mut process) = stream();
    let relays = Relays::start(
        host,
        GuestStdio {
            stdout,
            ..GuestStdio::default()
        },
    );
    tokio::spawn(async move { process.write_all(&pattern(LOTS)).await });
    let mut client = pipe::OpenOptions::new()
        .open_receiver(&uris.stdout)
        .unwrap();
    let limit = Duration::from_secs(1);
    let slow = tokio::spawn(async move {
        let mut got = Vec::new();
        let mut piece = vec![0; LOTS / 20];
        loop {
            tokio::time::sleep(limit / 10).await;
            match client.read(&mut piece).await.unwrap() {
                0 => return got,
                n => got.extend_from_slice(&piece[..n]),
            }
        }
    });
    let start = std::time::Instant::now();
    relays.drain(limit, MOST).await;
    assert!(start.elapsed() > limit, "the reader was not slow");
    let got = slow.await.unwrap();
    assert!(got == pattern(LOTS), "{} bytes", got.len());
}

#[tokio::test(start_paused = true)]
async fn draining_ends_although_a_reader_takes_a_little_again_and_again() {
    let (stdout, mut process) = stream();
    let (moves, news) = watch::channel(0);
    let output = tokio::spawn(async move {
        let _stream = stdout;
        loop {
            tokio::time::sleep(Duration::from_millis(1900)).await;
            moves.send_replace(1);
        }
    });
    let relays = Relays {
        outputs: vec![output],
        news: OutputNews(news),
        input: None,
        stdin_keeper: None,
        logger: None,
    };
    let start = Instant::now();
    relays
        .drain(Duration::from_secs(2), Duration::from_secs(10))
        .await;
    assert_eq!(start.elapsed().as_secs(), 10);
    // Its stream is closed.
    assert_eq!(process.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_output_that_the_guest_has_not_ended_has_more_time_than_one_that_nobody_takes() {
    let limits = OutputLimits {
        client: Duration::from_secs(1),
        guest: Duration::from_secs(5),
        all: Duration::from_secs(7),
    };
    for (waiting, seconds) in [(0, 5), (1, 1)] {
        let (_moves, news) = watch::channel(waiting);
        let start = Instant::now();
        assert!(!OutputNews(news).all_taken(limits).await);
        assert_eq!(start.elapsed().as_secs(), seconds);
    }
    let (moves, news) = watch::channel(0);
    let ends = async move {
        tokio::time::sleep(Duration::from_secs(4)).await;
        drop(moves);
    };
    let (all, ()) = tokio::join!(OutputNews(news).all_taken(limits), ends);
    assert!(all);
}

#[tokio::test]
async fn a_file_takes_both_streams_and_is_appended_to() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("new/with space.log");
    let uri = format!("file://{}", path.display()).replace(' ', "%20");
    let uris = Uris {
        stdout: uri.clone(),
        stderr: uri,
        ..Uris::default()
    };
    for _ in 0..2 {
        let host = open(uris.clone()).await;
        let ((stdout, mut out), (stderr, mut err)) = (stream(), stream());
        let relays = Relays::start(
            host,
            GuestStdio {
                stdin: None,
                stdout,
                stderr,
            },
        );
        out.write_all(b"o").await.unwrap();
        err.write_all(b"e").await.unwrap();
        drop((out, err));
        relays.drain(Duration::from_secs(5), MOST).await;
    }
    let mut text = std::fs::read(&path).unwrap();
    text.sort_unstable();
    assert_eq!(text, b"eeoo");
}

fn logging_program(dir: &Path, body: &str) -> String {
    let path = dir.join("logger");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("binary://{}?{}", path.display(), dir.join("log").display())
}

#[tokio::test]
async fn a_logging_program_gets_names_streams_and_time_to_finish() {
    let dir = TempDir::new().unwrap();
    let body = r#"trap '' TERM; exec 5>&-; { echo "$CONTAINER_NAMESPACE/$CONTAINER_ID"; cat <&3; cat <&4; } >"$1""#;
    let uri = logging_program(dir.path(), body);
    let uris = Uris {
        stdout: uri.clone(),
        stderr: uri,
        ..Uris::default()
    };
    let host = open(uris).await;
    let ((stdout, mut out), (stderr, mut err)) = (stream(), stream());
    let relays = Relays::start(
        host,
        GuestStdio {
            stdin: None,
            stdout,
            stderr,
        },
    );
    out.write_all(b"out\n").await.unwrap();
    err.write_all(b"err\n").await.unwrap();
    drop((out, err));
    relays.drain(Duration::from_secs(5), MOST).await;
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    assert_eq!(log, "ns1/c1\nout\nerr\n");
}

#[tokio::test]
async fn what_cannot_be_opened_is_named() {
    for (uri, needle) in [
        ("/no/such/fifo", "/no/such/fifo"),
        ("ftp://host/x", "ftp://host/x"),
        ("binary:///no/such/program", "/no/such/program"),
        ("file://relative", "file://relative"),
    ] {
        let uris = Uris {
            stdout: uri.to_owned(),
            ..Uris::default()
        };
        let error = HostStdio::open(&uris, "c", "n", &Arc::default())
            .await
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(needle), "{error}");
    }
}

#[tokio::test]
async fn a_program_that_must_say_that_it_is_ready_is_told_from_one_that_crashed() {
    let dir = TempDir::new().unwrap();
    let program = |name: &str, script: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    };
    let ready = program("ready", "printf x >&5; exec 5>&-; cat <&3 >/dev/null");
    let crashed = program("crashed", "exit 1");
    let open = async |scheme: &str, path: &str| {
        let uris = Uris {
            stdout: format!("{scheme}://{path}"),
            ..Uris::default()
        };
        HostStdio::open(&uris, "c", "n", &Arc::default()).await
    };
    assert!(open("binary-v2", &ready).await.is_ok());
    let error = open("binary-v2", &crashed).await.err().unwrap().to_string();
    assert!(error.contains("without writing a byte"), "{error}");
    // By the older scheme either is ready.
    assert!(open("binary", &crashed).await.is_ok());
}
