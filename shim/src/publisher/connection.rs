//! The way to containerd's event service.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use ttrpc::r#async::transport::Socket;

use super::socket_watch::SocketWatch;

/// A connection to containerd that is made when it is needed, and made again when it broke.
pub struct Connection {
    socket: PathBuf,
    client: Option<EventsClient>,
}

/// An attempt to hand over an event that may succeed later.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// There is no connection.
    #[error("Cannot connect: {0}")]
    Connect(io::Error),
    /// There was one.
    #[error("The connection broke: {0}")]
    Broken(ttrpc::Error),
}

impl Failure {
    /// Whether containerd is away, and not this machine short of something.
    fn is_absence(&self) -> bool {
        match self {
            Self::Connect(error) => matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::NotADirectory
            ),
            Self::Broken(..) => true,
        }
    }
}

/// The pause before the next attempt while the machine is short of descriptors or memory: nothing
/// tells when it has some again.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(1);

impl Connection {
    /// A connection, to be made, to the socket at this address.
    pub fn new(address: &str) -> Self {
        let path = address.strip_prefix("unix://").unwrap_or(address);
        Self {
            socket: path.into(),
            client: None,
        }
    }

    /// Returns when containerd has taken the event, or has refused it for good.
    pub async fn send(&mut self, request: &ForwardRequest) {
        let mut watch = None;
        loop {
            let was_connected = self.client.is_some();
            let Err(failure) = self.try_send(request).await else {
                return;
            };
            log::debug!("containerd takes no events now. {failure}");
            // That was the end of an old containerd perhaps, and a new one is there.
            if was_connected {
                continue;
            }
            let waited = if failure.is_absence() {
                self.wait(&mut watch).await
            } else {
                Err(io::Error::other(failure))
            };
            if let Err(error) = waited {
                log::error!(
                    "Cannot tell containerd at {:?} of events: {error}",
                    self.socket
                );
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
        }
    }

    /// Waits until another attempt makes sense. The first wait only begins to watch: containerd may
    /// have come since the attempt.
    async fn wait(&self, watch: &mut Option<SocketWatch>) -> io::Result<()> {
        match watch {
            Some(watch) => watch.changed().await,
            None => {
                *watch = Some(SocketWatch::new(&self.socket)?);
                Ok(())
            }
        }
    }

    async fn try_send(&mut self, request: &ForwardRequest) -> Result<(), Failure> {
        let client = match &self.client {
            Some(client) => client,
            None => {
                let socket = Socket::connect_unix(self.socket.to_string_lossy())
                    .await
                    .map_err(Failure::Connect)?;
                self.client.insert(EventsClient::new(Client::new(socket)))
            }
        };
        match client.forward(Default::default(), request).await {
            Ok(_) => {}
            // containerd is there and does not want it; asking again changes nothing.
            Err(ttrpc::Error::RpcStatus(status)) => {
                log::error!("containerd refused an event: {}", status.message);
            }
            Err(error) => {
                self.client = None;
                return Err(Failure::Broken(error));
            }
        }
        Ok(())
    }
}
