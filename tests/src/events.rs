//! What containerd tells of tasks, as `ctr events` prints it, with the moment at which it was told.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{client, must_ctr, unique};

/// What happens to a task once at most.
const ONCE: [&str; 4] = [
    "/tasks/create",
    "/tasks/start",
    "/tasks/exit",
    "/tasks/delete",
];

/// No test waits longer for an event; one that does not come fails.
const LIMIT: Duration = Duration::from_secs(400);

/// Something that was told.
#[derive(Clone, Debug)]
pub struct Told {
    /// When.
    pub at: Instant,
    /// `/tasks/exit`, for instance.
    pub topic: String,
    /// Of which container.
    pub container: String,
    /// Of which exec; empty or the container's id: of its init.
    pub process: String,
    /// All of it: time, namespace, topic, and the event as JSON.
    pub line: String,
}

#[derive(Default)]
struct List {
    told: Mutex<Vec<Told>>,
    more: Condvar,
    /// Whether the client has ended by itself, so that nothing more will come.
    deaf: AtomicBool,
}

impl List {
    fn lock(&self) -> MutexGuard<'_, Vec<Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client of containerd's that listens to events.
pub struct Events {
    list: Arc<List>,
    client: Option<(Child, JoinHandle<()>)>,
}

impl Events {
    /// Listens from now on.
    pub fn listen() -> Self {
        let mut events = Self {
            list: Arc::default(),
            client: None,
        };
        events.start();
        events
    }

    /// Listens to a containerd that was started again, and keeps what was told before.
    pub fn listen_again(&mut self) {
        self.stop();
        self.start();
    }

    fn start(&mut self) {
        // It listens for as long as the test takes, without a limit.
        let [program, how @ ..] = client();
        let mut command = Command::new(program);
        command.args(how).arg("events").stdin(Stdio::null());
        let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(client.stdout.take().unwrap());
        let list = self.list.clone();
        list.deaf.store(false, Ordering::Relaxed);
        let label = unique("listening");
        let (heard, hears) = std::sync::mpsc::channel();
        let name = label.clone();
        let reader = std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if line.contains(&name) {
                    let _ = heard.send(());
                }
                if let Some(told) = Told::of(line) {
                    list.lock().push(told);
                    list.more.notify_all();
                }
            }
            list.deaf.store(true, Ordering::Relaxed);
            list.more.notify_all();
        });
        // The client does not say when it listens: so let something happen until it says what.
        for n in 0.. {
            must_ctr(&["namespace", "label", "default", &format!("{label}={n}")]);
            if hears.try_recv().is_ok() {
                break;
            }
        }
        must_ctr(&["namespace", "label", "default", &format!("{label}=")]);
        self.client = Some((client, reader));
    }

    fn stop(&mut self) {
        let Some((mut client, reader)) = self.client.take() else {
            return;
        };
        let _ = client.kill();
        let _ = client.wait();
        let _ = reader.join();
    }

    /// What was told of a container, its init and its execs, by now.
    pub fn all_of(&self, id: &str, topic: &str) -> Vec<Told> {
        let told = self.list.lock();
        let mine = told
            .iter()
            .filter(|t| t.topic == topic && t.container == id);
        mine.cloned().collect()
    }

    /// What was told of one container's init by now.
    pub fn of_init(&self, id: &str, topic: &str) -> Vec<Told> {
        let told = self.list.lock();
        let mine = told.iter().filter(|t| t.topic == topic && t.is_of_init(id));
        mine.cloned().collect()
    }

    /// How often something was told of a container's execs.
    pub fn of_execs(&self, id: &str, topic: &str) -> usize {
        let told = self.list.lock();
        let mine = told
            .iter()
            .filter(|t| t.topic == topic && t.container == id && !t.is_of_init(id));
        mine.count()
    }

    /// Waits until something of a container's init is told of.
    pub fn wait_for(&self, topic: &str, id: &str) -> Told {
        let told = self.wait_no_longer_than(LIMIT, topic, id);
        told.unwrap_or_else(|| panic!("nobody tells of {topic} of {id}"))
    }

    /// As [`wait_for`](Self::wait_for); nothing if it does not come within `limit`.
    pub fn wait_no_longer_than(&self, limit: Duration, topic: &str, id: &str) -> Option<Told> {
        self.find(limit, |told| {
            let found = told.iter().find(|t| t.topic == topic && t.is_of_init(id));
            found.cloned()
        })
    }

    /// The topics of what has happened to a container and its execs, up to the first `last`, which is waited for.
    pub fn of_container_until(&self, id: &str, last: &str) -> Vec<String> {
        let topics = self.find(LIMIT, |told| {
            let of_it = told.iter().filter(|t| t.container == id);
            let topics: Vec<_> = of_it.map(|t| t.topic.clone()).collect();
            let end = topics.iter().position(|topic| topic == last)?;
            Some(topics[..=end].to_vec())
        });
        topics.unwrap_or_else(|| panic!("nobody tells of {last} of {id}"))
    }

    /// All that was told of these containers, a line each.
    pub fn lines_about(&self, ids: &[String]) -> String {
        let told = self.list.lock();
        let about = told.iter().filter(|t| ids.contains(&t.container));
        about.map(|t| format!("{}\n", t.line)).collect()
    }

    /// What `look` finds in all that was told, as soon as it does.
    fn find<T>(&self, limit: Duration, look: impl Fn(&[Told]) -> Option<T>) -> Option<T> {
        let until = Instant::now() + limit;
        let mut told = self.list.lock();
        loop {
            if let Some(found) = look(&told) {
                return Some(found);
            }
            assert!(
                !self.list.deaf.load(Ordering::Relaxed),
                "the client that listens to events has ended"
            );
            let left = until.checked_duration_since(Instant::now())?;
            let waited = self.list.more.wait_timeout(told, left);
            told = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What was told more often than once of one process, without the containers in `excused`.
    pub fn told_twice(&self, excused: &[String]) -> Vec<String> {
        let mut lines: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for told in self.list.lock().iter() {
            if ONCE.contains(&told.topic.as_str()) && !excused.contains(&told.container) {
                let (topic, container) = (told.topic.clone(), told.container.clone());
                let key = (topic, container, told.process.clone());
                lines.entry(key).or_default().push(told.line.clone());
            }
        }
        lines
            .into_values()
            .filter(|lines| lines.len() > 1)
            .map(|lines| format!("told twice:\n{}", lines.join("\n")))
            .collect()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Told {
    fn of(line: String) -> Option<Self> {
        let topic = line
            .split_whitespace()
            .find(|word| word.starts_with("/tasks/"))?
            .to_owned();
        let field = |name: &str| {
            let start = line.find(&format!("\"{name}\":\""))? + name.len() + 4;
            let end = start + line[start..].find('"')?;
            Some(line[start..end].to_owned())
        };
        Some(Self {
            at: Instant::now(),
            container: field("container_id")?,
            process: field("id").or_else(|| field("exec_id")).unwrap_or_default(),
            topic,
            line,
        })
    }

    /// With which status, if it is an exit.
    pub fn status(&self) -> Option<u32> {
        if self.topic != "/tasks/exit" {
            return None;
        }
        // A status of 0 is not written.
        let Some((_, status)) = self.line.split_once("\"exit_status\":") else {
            return Some(0);
        };
        let digits = status.split(|c: char| !c.is_ascii_digit()).next();
        digits?.parse().ok()
    }

    fn is_of_init(&self, id: &str) -> bool {
        self.container == id && (self.process.is_empty() || self.process == id)
    }
}
