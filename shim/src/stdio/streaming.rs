//! Standard streams that containerd carries over connections to this shim: `ttrpc+unix://ADDRESS?streaming_id=NAME`,
//! where the address is the one that `start` has answered.
//!
//! containerd opens a bidirectional `containerd.services.streaming.v1.Streaming/Stream`, names it, and
//! names it again in a Create or Exec. From then on messages of bytes go one way and messages that
//! grant a window of bytes the other: who has no window left waits. A containerd that was started
//! again opens the stream of the same name again, and it goes on there.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
// Messages of a single field with the number 1 have the same bytes whatever their name.
use protobuf::well_known_types::wrappers::{
    BytesValue as Data, Int32Value as WindowUpdate, StringValue as StreamInit,
};
use tokio::sync::{mpsc, oneshot};
use ttrpc::Code;
use ttrpc::r#async::{
    SSReceiver, SSSender, ServerStream, Service, StreamHandler, StreamInner, TtrpcContext,
};

use super::target::StdioError;

/// The service's name.
const SERVICE: &str = "containerd.services.streaming.v1.Streaming";
const STREAM_INIT: &str = "containerd.services.streaming.v1.StreamInit";
const DATA: &str = "containerd.types.transfer.Data";
const WINDOW_UPDATE: &str = "containerd.types.transfer.WindowUpdate";

/// The most bytes in a message, and how many may be on their way to us: what containerd uses.
const MAX_DATA: usize = 32 * 1024;
const WINDOW: usize = 2 * MAX_DATA;

/// The streams that containerd has opened or is to open, by name.
#[derive(Default)]
pub struct Streams {
    /// Where this shim serves.
    socket: PathBuf,
    table: Mutex<HashMap<String, Slot>>,
}

/// What connects a stream's opening with its use, whichever comes first.
struct Slot {
    opened: mpsc::UnboundedSender<Connection>,
    /// Taken by the process whose stream it is.
    openings: Option<mpsc::UnboundedReceiver<Connection>>,
}

/// A stream that is open. containerd sees its end when it is dropped.
struct Connection {
    sender: SSSender<Any>,
    receiver: SSReceiver<Any>,
    _end: oneshot::Sender<()>,
}

impl Streams {
    /// For a shim that serves on `socket`.
    pub fn new(socket: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            socket,
            table: Mutex::default(),
        })
    }

    /// The service by which containerd opens streams, for the server.
    pub fn service(self: &Arc<Self>) -> (String, Service) {
        let method: Arc<dyn StreamHandler + Send + Sync> = Arc::new(OpenStream(self.clone()));
        let service = Service {
            methods: HashMap::new(),
            streams: HashMap::from([("Stream".to_owned(), method)]),
        };
        (SERVICE.to_owned(), service)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// containerd has opened a stream.
    fn open(&self, name: String, connection: Connection) {
        let mut table = self.lock();
        let slot = table.entry(name).or_insert_with(Slot::new);
        if let Some(openings) = &mut slot.openings {
            // Nobody uses it yet: the one before is given up.
            while openings.try_recv().is_ok() {}
        }
        let _ = slot.opened.send(connection);
    }

    /// The stream that `uri` names, whose scheme is `scheme` and whose rest is `rest`.
    pub(super) fn take(
        self: &Arc<Self>,
        uri: &str,
        scheme: &str,
        rest: &str,
    ) -> Result<Stream, StdioError> {
        let path = super::target::decode_path(uri, rest)?;
        let query = rest.split_once('?').map_or("", |(_, query)| query);
        let name = form_urlencoded::parse(query.as_bytes())
            .find(|(key, _)| key == "streaming_id")
            .map(|(_, name)| name.into_owned())
            .filter(|name| !name.is_empty())
            .ok_or_else(|| StdioError::NoStream(uri.to_owned()))?;
        if scheme != "ttrpc+unix" || !same(&path, &self.socket) {
            return Err(StdioError::ForeignStream(
                uri.to_owned(),
                self.socket.clone(),
            ));
        }
        let mut table = self.lock();
        let slot = table.entry(name.clone()).or_insert_with(Slot::new);
        let openings = slot
            .openings
            .take()
            .ok_or_else(|| StdioError::StreamInUse(uri.to_owned()))?;
        Ok(Stream {
            name,
            streams: self.clone(),
            openings,
            connection: None,
            window: 0,
        })
    }
}

/// Go writes a path behind an empty host with one slash too many.
fn same(path: &Path, socket: &Path) -> bool {
    path.components().eq(socket.components())
}

impl Slot {
    fn new() -> Self {
        let (opened, openings) = mpsc::unbounded_channel();
        Self {
            opened,
            openings: Some(openings),
        }
    }
}

/// The method by which containerd opens a stream.
struct OpenStream(Arc<Streams>);

#[async_trait]
impl StreamHandler for OpenStream {
    async fn handler(
        &self,
        _: TtrpcContext,
        inner: StreamInner,
    ) -> ttrpc::Result<Option<ttrpc::Response>> {
        let (sender, mut receiver) = ServerStream::<Any, Any>::new(inner).split();
        let mut first = receiver.recv().await?;
        // The request that opens the stream has no message in it. Go's client does not say so, and the server here then
        // hands on an empty one.
        if first.as_ref() == Some(&Any::default()) {
            first = receiver.recv().await?;
        }
        let name = first
            .and_then(|any| parse::<StreamInit>(&any, STREAM_INIT))
            .ok_or_else(|| {
                let message = "a stream begins with its name: invalid argument";
                ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INVALID_ARGUMENT, message))
            })?;
        log::debug!("The stream {} is open", name.value);
        sender
            .send(&any("google.protobuf.Empty", &Empty::default())?)
            .await?;
        let (end, ended) = oneshot::channel::<()>();
        self.0.open(
            name.value,
            Connection {
                sender,
                receiver,
                _end: end,
            },
        );
        let _ = ended.await;
        Ok(None)
    }
}

fn any(name: &str, message: &impl Message) -> ttrpc::Result<Any> {
    let value = message
        .write_to_bytes()
        .map_err(|e| ttrpc::Error::Others(e.to_string()))?;
    Ok(Any {
        type_url: name.to_owned(),
        value,
        ..Default::default()
    })
}

/// The message in `any`, if it is of this type.
fn parse<M: Message>(any: &Any, name: &str) -> Option<M> {
    let is = any.type_url.rsplit('/').next().unwrap_or_default();
    (is == name)
        .then(|| M::parse_from_bytes(&any.value).ok())
        .flatten()
}

/// A process's end of a stream.
pub(super) struct Stream {
    name: String,
    streams: Arc<Streams>,
    openings: mpsc::UnboundedReceiver<Connection>,
    connection: Option<Connection>,
    /// How many bytes the connection's other side still takes, or may still send.
    window: usize,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.streams.lock().remove(&self.name);
    }
}

impl Stream {
    /// Waits until there is a connection, or another one.
    async fn reopen(&mut self) -> io::Result<()> {
        self.connection = None;
        self.window = 0;
        let connection = self.openings.recv().await;
        self.connection = Some(connection.ok_or(io::ErrorKind::BrokenPipe)?);
        Ok(())
    }

    /// Sends what containerd has room for of `piece`; how much. Waits for room, and for a containerd that is
    /// away.
    pub(super) async fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        loop {
            let Some(connection) = &mut self.connection else {
                self.reopen().await?;
                continue;
            };
            if self.window == 0 {
                let granted = tokio::select! {
                    message = connection.receiver.recv() => match message {
                        Ok(Some(any)) => parse::<WindowUpdate>(&any, WINDOW_UPDATE),
                        // It is gone, without a window to come.
                        Ok(None) | Err(_) => {
                            self.reopen().await?;
                            continue;
                        }
                    },
                    // A containerd that was started again does not close what it had before.
                    new = self.openings.recv() => {
                        self.connection = new;
                        continue;
                    }
                };
                let more = granted.and_then(|update| usize::try_from(update.value).ok());
                self.window = more.unwrap_or_default();
                continue;
            }
            let length = piece.len().min(self.window).min(MAX_DATA);
            let data = Data {
                value: piece[..length].to_vec(),
                ..Default::default()
            };
            let data = any(DATA, &data).map_err(io::Error::other)?;
            if connection.sender.send(&data).await.is_err() {
                self.reopen().await?;
                continue;
            }
            self.window -= length;
            return Ok(length);
        }
    }

    /// The next bytes that containerd sends; none when it has closed the stream.
    pub(super) async fn read(&mut self) -> io::Result<Vec<u8>> {
        loop {
            let Some(connection) = &mut self.connection else {
                self.reopen().await?;
                continue;
            };
            if self.window < MAX_DATA {
                let update = WindowUpdate {
                    value: i32::try_from(WINDOW - self.window).unwrap_or(0),
                    ..Default::default()
                };
                let update = any(WINDOW_UPDATE, &update).map_err(io::Error::other)?;
                if connection.sender.send(&update).await.is_ok() {
                    self.window = WINDOW;
                }
            }
            let message = tokio::select! {
                biased;
                message = connection.receiver.recv() => message,
                new = self.openings.recv() => {
                    self.connection = new;
                    self.window = 0;
                    continue;
                }
            };
            match message {
                Ok(None) => return Ok(Vec::new()),
                Ok(Some(any)) => match parse::<Data>(&any, DATA) {
                    Some(data) if !data.value.is_empty() => {
                        self.window = self.window.saturating_sub(data.value.len());
                        return Ok(data.value);
                    }
                    _ => {}
                },
                Err(_) => self.reopen().await?,
            }
        }
    }
}

#[cfg(test)]
#[path = "streaming_tests.rs"]
mod tests;
