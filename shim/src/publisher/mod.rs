//! Events for containerd: one queue for the whole shim, sent in order.
//!
//! Whoever changes a task's state puts the event into the queue while it holds the state's lock,
//! so the order of events is the order of the changes. One task takes them out and forwards them,
//! one at a time; while containerd is away they wait.

mod connection;
mod socket_watch;

use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused,
    TaskResumed, TaskStart,
};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use tokio::sync::{mpsc, oneshot};

use connection::Connection;

/// Something that happened to a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A task was created.
    Create(TaskCreate),
    /// A task's init runs.
    Start(TaskStart),
    /// An exec was added to a task.
    ExecAdded(TaskExecAdded),
    /// An exec runs.
    ExecStarted(TaskExecStarted),
    /// A process (init or exec) has ended.
    Exit(TaskExit),
    /// A task was deleted.
    Delete(TaskDelete),
    /// A task was paused.
    Paused(TaskPaused),
    /// A task was resumed.
    Resumed(TaskResumed),
    /// The kernel has killed something in a task for want of memory.
    Oom(TaskOOM),
}

impl Event {
    /// containerd's topic, the message's name and its bytes.
    fn encode(&self) -> (&'static str, &'static str, protobuf::Result<Vec<u8>>) {
        match self {
            Self::Create(m) => ("/tasks/create", "TaskCreate", m.write_to_bytes()),
            Self::Start(m) => ("/tasks/start", "TaskStart", m.write_to_bytes()),
            Self::ExecAdded(m) => ("/tasks/exec-added", "TaskExecAdded", m.write_to_bytes()),
            Self::ExecStarted(m) => ("/tasks/exec-started", "TaskExecStarted", m.write_to_bytes()),
            Self::Exit(m) => ("/tasks/exit", "TaskExit", m.write_to_bytes()),
            Self::Delete(m) => ("/tasks/delete", "TaskDelete", m.write_to_bytes()),
            Self::Paused(m) => ("/tasks/paused", "TaskPaused", m.write_to_bytes()),
            Self::Resumed(m) => ("/tasks/resumed", "TaskResumed", m.write_to_bytes()),
            Self::Oom(m) => ("/tasks/oom", "TaskOOM", m.write_to_bytes()),
        }
    }
}

enum Item {
    Event(SystemTime, Event),
    Flush(oneshot::Sender<()>),
}

/// The queue's entrance.
#[derive(Clone)]
pub struct Publisher {
    queue: mpsc::UnboundedSender<Item>,
}

/// The queue's exit.
pub struct Queue {
    items: mpsc::UnboundedReceiver<Item>,
}

/// A new queue. It has no bound: an event is a few hundred bytes, and while containerd is away
/// nothing happens but exits, of which each process has one, and OOM kills, of which no more are
/// asked for until the last one of the container was sent (see [`Publisher::sent`]).
pub fn queue() -> (Publisher, Queue) {
    let (queue, items) = mpsc::unbounded_channel();
    (Publisher { queue }, Queue { items })
}

impl Publisher {
    /// Puts an event into the queue.
    pub fn publish(&self, event: Event) {
        let _ = self.queue.send(Item::Event(SystemTime::now(), event));
    }

    /// Waits until everything put in so far was sent, or the queue is gone.
    pub async fn sent(&self) {
        let (done, flushed) = oneshot::channel();
        let _ = self.queue.send(Item::Flush(done));
        let _ = flushed.await;
    }

    /// The same, at most `limit`.
    pub async fn flush(&self, limit: Duration) {
        if tokio::time::timeout(limit, self.sent()).await.is_err() {
            log::warn!("containerd did not take all events within {limit:?}");
        }
    }
}

impl Queue {
    /// Forwards events to the ttrpc socket at `address` until the queue's entrances are gone.
    pub async fn forward(mut self, address: String, namespace: String) {
        let mut connection = Connection::new(&address);
        while let Some(item) = self.items.recv().await {
            match item {
                Item::Event(at, event) => {
                    if let Some(request) = envelope(at, &event, &namespace) {
                        connection.send(&request).await;
                    }
                }
                Item::Flush(done) => {
                    let _ = done.send(());
                }
            }
        }
    }

    /// The next event, for tests.
    #[cfg(test)]
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            match self.items.recv().await? {
                Item::Event(_, event) => return Some(event),
                Item::Flush(done) => drop(done.send(())),
            }
        }
    }

    /// Waits for somebody who waits for the events before it to be sent, and tells them, for tests.
    #[cfg(test)]
    pub async fn flushed(&mut self) {
        if let Some(Item::Flush(done)) = self.items.recv().await {
            let _ = done.send(());
        }
    }

    /// The events that are in the queue now, for tests.
    #[cfg(test)]
    pub fn drain(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.items.try_recv().ok())
            .filter_map(|item| match item {
                Item::Event(_, event) => Some(event),
                Item::Flush(_) => None,
            })
            .collect()
    }
}

fn envelope(at: SystemTime, event: &Event, namespace: &str) -> Option<ForwardRequest> {
    let (topic, name, bytes) = event.encode();
    let value = bytes
        .inspect_err(|e| log::error!("Cannot encode an event for {topic}: {e}"))
        .ok()?;
    Some(ForwardRequest {
        envelope: MessageField::some(Envelope {
            timestamp: MessageField::some(timestamp(at)),
            namespace: namespace.to_owned(),
            topic: topic.to_owned(),
            event: MessageField::some(Any {
                type_url: format!("containerd.events.{name}"),
                value,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// The protobuf form of a point in time.
pub fn timestamp(at: SystemTime) -> Timestamp {
    let since_epoch = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_epoch.subsec_nanos()).unwrap_or(0),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use containerd_shim_protos::api::Empty;
    use containerd_shim_protos::shim_async::{Events, create_events};
    use ttrpc::r#async::{Server, TtrpcContext};

    use super::*;

    #[derive(Default)]
    struct Containerd {
        seen: Mutex<VecDeque<String>>,
        news: tokio::sync::Notify,
    }

    struct Service(Arc<Containerd>);

    #[async_trait]
    impl Events for Service {
        async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            let envelope = request.envelope.unwrap_or_default();
            assert_eq!(envelope.namespace, "ns");
            let exit = TaskExit::parse_from_bytes(&envelope.event.value).unwrap();
            self.0.seen.lock().unwrap().push_back(exit.container_id);
            self.0.news.notify_one();
            Ok(Empty::default())
        }
    }

    async fn serve(path: &std::path::Path, containerd: &Arc<Containerd>) -> Server {
        let mut server = Server::new()
            .bind(&format!("unix://{}", path.display()))
            .unwrap()
            .register_service(create_events(Arc::new(Service(containerd.clone()))));
        server.start().await.unwrap();
        server
    }

    fn exit(id: usize) -> Event {
        Event::Exit(TaskExit {
            container_id: id.to_string(),
            ..Default::default()
        })
    }

    #[tokio::test]
    async fn events_arrive_once_and_in_order_although_containerd_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let containerd = Arc::new(Containerd::default());
        let (publisher, queue) = queue();
        tokio::spawn(queue.forward(path.display().to_string(), "ns".into()));

        // Nobody listens yet.
        publisher.publish(exit(0));
        publisher.publish(exit(1));
        let mut server = serve(&path, &containerd).await;
        publisher.flush(Duration::from_secs(10)).await;
        server.shutdown().await.unwrap();
        std::fs::remove_file(&path).unwrap();

        publisher.publish(exit(2));
        publisher.publish(exit(3));
        let mut server = serve(&path, &containerd).await;
        publisher.flush(Duration::from_secs(10)).await;
        assert_eq!(*containerd.seen.lock().unwrap(), ["0", "1", "2", "3"]);
        server.shutdown().await.unwrap();
    }
}
