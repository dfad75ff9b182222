//! Serving the shim on one connection, until that connection ends.

use std::io;
use std::sync::Arc;

use cube_agent_protocol::{AGENT_PORT, agent_ttrpc};
use ttrpc::asynchronous::Server;
use ttrpc::asynchronous::transport::Listener;

use crate::container::{Containers, Settings};
use crate::reaper::Reaper;
use crate::service::Service;
use crate::transport::{Connection, Once, Watched};

/// A service that could not start, or ended in another way than by its connection's end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The event loop could not be made.
    #[error("Cannot make the event loop")]
    Runtime(#[source] io::Error),
    /// Children cannot be waited for.
    #[error("Cannot wait for children")]
    Reaper(#[source] io::Error),
    /// The host cannot be reached.
    #[error("Cannot connect to port {AGENT_PORT} of the host")]
    Connect(#[source] io::Error),
    /// The server did not start.
    #[error("Cannot start the ttrpc server")]
    Server(#[source] ttrpc::Error),
}

/// Connects to the host and serves it, collecting dead children meanwhile. Returns when the
/// connection has ended.
pub fn run(settings: Settings) -> Result<(), ServeError> {
    // One thread. Others exist only while something takes its time (`spawn_blocking`).
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .thread_stack_size(256 * 1024)
        .max_blocking_threads(8)
        .build()
        .map_err(ServeError::Runtime)?;
    let served = runtime.block_on(serve(settings));
    // What still runs on a thread may hang in the kernel; the machine is about to be reset.
    runtime.shutdown_background();
    served
}

async fn serve(settings: Settings) -> Result<(), ServeError> {
    let reaper = Arc::new(Reaper::default());
    let signals = reaper.listen().map_err(ServeError::Reaper)?;
    let socket = (settings.connect)(AGENT_PORT).map_err(ServeError::Connect)?;
    let connection = Connection::establish(socket)
        .await
        .map_err(ServeError::Connect)?;
    let containers = Arc::new(Containers::new(settings, reaper.clone()));
    let (connection, ended) = Watched::new(connection);
    let service = Arc::new(Service::new(containers));
    let mut server = Server::new()
        .add_listener(Listener::new(Once::new(connection)))
        .register_service(agent_ttrpc::create_agent(service));
    server.start().await.map_err(ServeError::Server)?;
    tokio::select! {
        _ = ended => Ok(()),
        collected = reaper.run(signals) => collected.map_err(ServeError::Reaper),
    }
}
