//! Streams that a client opens as containerd does.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::r#async::{Client, ClientStream, Server};

use super::super::{GuestStdio, HostStdio, Relays, Uris};
use super::*;

/// Longer than any of these takes.
const MOST: Duration = Duration::from_secs(60);

/// A shim's server, and what its processes use.
struct Bench {
    dir: tempfile::TempDir,
    streams: Arc<Streams>,
    _server: Server,
}

impl Bench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let streams = Streams::new(socket.clone());
        let mut server = Server::new()
            .bind(&format!("unix://{}", socket.display()))
            .unwrap()
            .register_service(HashMap::from([streams.service()]));
        server.start().await.unwrap();
        Self {
            dir,
            streams,
            _server: server,
        }
    }

    fn uri(&self, name: &str) -> String {
        format!(
            "ttrpc+unix://{}?streaming_id={name}",
            self.streams.socket.display()
        )
    }

    async fn stdio(&self, uris: Uris) -> Result<HostStdio, StdioError> {
        HostStdio::open(&uris, "c", "ns", &self.streams).await
    }

    /// Opens a stream as containerd does, on a connection of its own.
    async fn open(&self, name: &str) -> Peer {
        let address = format!("unix://{}", self.dir.path().join("s").display());
        let client = Client::connect(&address).await.unwrap();
        let request = ttrpc::Request {
            service: SERVICE.into(),
            method: "Stream".into(),
            ..Default::default()
        };
        let inner = client.new_stream(request, true, true).await.unwrap();
        let mut stream = ClientStream::<Any, Any>::new(inner);
        // What is left here of a request of Go's.
        stream.send(&Any::default()).await.unwrap();
        let init = StreamInit {
            value: name.into(),
            ..Default::default()
        };
        stream
            .send(&any(STREAM_INIT, &init).unwrap())
            .await
            .unwrap();
        stream.recv().await.unwrap();
        Peer { client, stream }
    }
}

/// containerd's end of a stream.
struct Peer {
    client: Client,
    stream: ClientStream<Any, Any>,
}

impl Peer {
    async fn grant(&self, window: i32) {
        let update = WindowUpdate {
            value: window,
            ..Default::default()
        };
        let update = any(WINDOW_UPDATE, &update).unwrap();
        self.stream.send(&update).await.unwrap();
    }

    async fn send(&self, bytes: &[u8]) {
        let data = Data {
            value: bytes.to_vec(),
            ..Default::default()
        };
        self.stream.send(&any(DATA, &data).unwrap()).await.unwrap();
    }

    /// The next bytes; none at the end.
    async fn receive(&mut self) -> Vec<u8> {
        match self.stream.recv().await {
            Ok(any) => parse::<Data>(&any, DATA).unwrap().value,
            Err(ttrpc::Error::Eof) => Vec::new(),
            Err(e) => panic!("{e}"),
        }
    }

    /// How many bytes may be sent next.
    async fn window(&mut self) -> i32 {
        let any = self.stream.recv().await.unwrap();
        parse::<WindowUpdate>(&any, WINDOW_UPDATE).unwrap().value
    }
}

fn stdout(uri: String) -> Uris {
    Uris {
        stdout: uri,
        ..Default::default()
    }
}

fn stdin(uri: String) -> Uris {
    Uris {
        stdin: uri,
        ..Default::default()
    }
}

fn guest_stdout() -> (GuestStdio, UnixStream) {
    let (ours, process) = UnixStream::pair().unwrap();
    let guest = GuestStdio {
        stdout: Some(ours),
        ..Default::default()
    };
    (guest, process)
}

fn guest_stdin() -> (GuestStdio, UnixStream) {
    let (ours, process) = UnixStream::pair().unwrap();
    let guest = GuestStdio {
        stdin: Some(ours),
        ..Default::default()
    };
    (guest, process)
}

#[tokio::test]
async fn output_arrives_whole_within_the_windows_that_were_granted_and_then_ends() {
    let bench = Bench::new().await;
    let mut peer = bench.open("c-stdout").await;
    let host = bench.stdio(stdout(bench.uri("c-stdout"))).await.unwrap();
    let (guest, mut process) = guest_stdout();
    let relays = Relays::start(host, guest);
    let sent: Vec<u8> = (0..300_000).map(|n| (n % 251) as u8).collect();
    let bytes = sent.clone();
    let writer = tokio::spawn(async move { process.write_all(&bytes).await.unwrap() });
    let mut received = Vec::new();
    while received.len() < sent.len() {
        let window = 7000;
        peer.grant(window as i32).await;
        let mut left = window.min(sent.len() - received.len());
        while left > 0 {
            let piece = peer.receive().await;
            // Never more than was granted.
            left = left.checked_sub(piece.len()).unwrap();
            received.extend(piece);
        }
    }
    writer.await.unwrap();
    relays.drain(Duration::from_secs(5), MOST).await;
    assert!(peer.receive().await.is_empty());
    assert!(received == sent);
    assert!(bench.streams.lock().is_empty());
}

#[tokio::test]
async fn who_grants_no_window_holds_the_process_up_and_its_delete_no_longer_than_the_limit() {
    let bench = Bench::new().await;
    let _peer = bench.open("c-stdout").await;
    let host = bench.stdio(stdout(bench.uri("c-stdout"))).await.unwrap();
    let (guest, mut process) = guest_stdout();
    let relays = Relays::start(host, guest);
    let all = vec![7; 4 << 20];
    let written = tokio::time::timeout(Duration::from_millis(300), process.write_all(&all)).await;
    assert!(written.is_err(), "4 MiB were taken, and are somewhere");
    drop(process);
    relays.drain(Duration::from_millis(100), MOST).await;
}

#[tokio::test]
async fn a_stream_that_is_opened_after_the_process_started_is_its_stream_too() {
    let bench = Bench::new().await;
    let host = bench.stdio(stdout(bench.uri("late"))).await.unwrap();
    let (guest, mut process) = guest_stdout();
    let relays = Relays::start(host, guest);
    process.write_all(b"early words").await.unwrap();
    drop(process);
    let mut peer = bench.open("late").await;
    peer.grant(100).await;
    assert_eq!(peer.receive().await, b"early words");
    relays.drain(Duration::from_secs(5), MOST).await;
    assert!(peer.receive().await.is_empty());
}

#[tokio::test]
async fn output_goes_on_where_a_containerd_that_was_started_again_opens_its_stream() {
    let bench = Bench::new().await;
    let mut peer = bench.open("c-stdout").await;
    let host = bench.stdio(stdout(bench.uri("c-stdout"))).await.unwrap();
    let (guest, mut process) = guest_stdout();
    let relays = Relays::start(host, guest);
    peer.grant(5).await;
    process.write_all(b"firstsecond").await.unwrap();
    assert_eq!(peer.receive().await, b"first");
    // As after kill -9: the connection ends without the stream's end.
    drop(peer);
    let mut peer = bench.open("c-stdout").await;
    peer.grant(100).await;
    assert_eq!(peer.receive().await, b"second");
    drop(process);
    relays.drain(Duration::from_secs(5), MOST).await;
    assert!(peer.receive().await.is_empty());
}

#[tokio::test]
async fn input_arrives_within_windows_and_ends_with_the_stream() {
    let bench = Bench::new().await;
    let mut peer = bench.open("c-stdin").await;
    let host = bench.stdio(stdin(bench.uri("c-stdin"))).await.unwrap();
    let (guest, mut process) = guest_stdin();
    let relays = Relays::start(host, guest);
    let sent: Vec<u8> = (0..300_000).map(|n| (n % 241) as u8).collect();
    let reader = tokio::spawn(async move {
        let mut received = Vec::new();
        process.read_to_end(&mut received).await.unwrap();
        received
    });
    let (mut at, mut window) = (0, 0);
    while at < sent.len() {
        while window == 0 {
            window += usize::try_from(peer.window().await).unwrap();
        }
        let length = window.min(20_000).min(sent.len() - at);
        peer.send(&sent[at..at + length]).await;
        at += length;
        window -= length;
    }
    peer.stream.close_send().await.unwrap();
    assert!(reader.await.unwrap() == sent);
    drop(relays);
}

#[tokio::test]
async fn input_that_arrived_is_passed_on_when_the_client_says_that_it_was_all() {
    let bench = Bench::new().await;
    let mut peer = bench.open("c-stdin").await;
    let host = bench.stdio(stdin(bench.uri("c-stdin"))).await.unwrap();
    let (guest, mut process) = guest_stdin();
    let mut relays = Relays::start(host, guest);
    peer.window().await;
    peer.send(b"all").await;
    let mut text = [0; 3];
    process.read_exact(&mut text).await.unwrap();
    relays.close_stdin();
    assert_eq!(process.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(&text, b"all");
    drop(peer.client);
}

#[tokio::test]
async fn streams_of_others_are_refused_and_none_is_given_twice() {
    let bench = Bench::new().await;
    let own = bench.streams.socket.display().to_string();
    for (uri, needle) in [
        (format!("grpc+unix://{own}?streaming_id=a"), "ttrpc+unix://"),
        (
            "ttrpc+vsock://3:1024?streaming_id=a".into(),
            "absolute path",
        ),
        (
            "ttrpc+unix:///run/other?streaming_id=a".into(),
            "another server",
        ),
        (format!("ttrpc+unix://{own}"), "streaming_id"),
        (format!("ttrpc+unix://{own}?streaming_id="), "streaming_id"),
    ] {
        let error = bench.stdio(stdout(uri)).await.err().unwrap().to_string();
        assert!(error.contains(needle), "{error}");
    }
    let first = bench.stdio(stdout(bench.uri("a"))).await.unwrap();
    let error = bench.stdio(stdout(bench.uri("a"))).await.err().unwrap();
    assert!(error.to_string().contains("another process's"), "{error}");
    drop(first);
    bench.stdio(stdout(bench.uri("a"))).await.unwrap();
}

#[tokio::test]
async fn a_stream_without_a_name_is_refused() {
    let bench = Bench::new().await;
    let address = format!("unix://{}", bench.dir.path().join("s").display());
    let client = Client::connect(&address).await.unwrap();
    let request = ttrpc::Request {
        service: SERVICE.into(),
        method: "Stream".into(),
        ..Default::default()
    };
    let inner = client.new_stream(request, true, true).await.unwrap();
    let mut stream = ClientStream::<Any, Any>::new(inner);
    for _ in 0..2 {
        stream.send(&Any::new()).await.unwrap();
    }
    let error = stream.recv().await.unwrap_err().to_string();
    assert!(error.contains("begins with its name"), "{error}");
}
