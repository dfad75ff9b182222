//! All that containerd tells of tasks, with the moment at which it was told.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cube_tests::*;

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
    /// All of it.
    line: String,
}

#[derive(Default)]
struct List {
    told: Mutex<Vec<Told>>,
    more: Condvar,
}

impl List {
    fn lock(&self) -> MutexGuard<'_, Vec<Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client of containerd's that listens to events.
pub struct Recorder {
    list: Arc<List>,
    client: Option<(Child, JoinHandle<()>)>,
    /// Containers whose exit may be told of twice: a shim that was killed in the middle of a delete has told of it, and
    /// containerd, which cannot know, tells of it as well.
    may_be_told_twice: Vec<String>,
}

impl Recorder {
    /// Listens from now on.
    pub fn start() -> Self {
        let mut recorder = Self {
            list: Arc::default(),
            client: None,
            may_be_told_twice: Vec::new(),
        };
        recorder.listen();
        recorder
    }

    /// Listens to a containerd that was started again.
    pub fn listen_again(&mut self) {
        self.stop();
        self.listen();
    }

    fn listen(&mut self) {
        let mut client = ctr(&["events"]).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(client.stdout.take().unwrap());
        let list = self.list.clone();
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
        // Not SIGKILL, which `timeout` could not hand on.
        // SAFETY: kill(2) has no memory arguments; the process is a child that was not waited for.
        unsafe { libc::kill(client.id() as i32, libc::SIGTERM) };
        let _ = client.wait();
        let _ = reader.join();
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

    /// Waits until a container's exit is told of, for no longer than `limit`.
    pub fn wait_for_exit(&self, id: &str, limit: Duration) -> Option<Told> {
        self.wait_for("/tasks/exit", id, limit)
    }

    /// Waits until something of a container's init is told of, for no longer than `limit`.
    pub fn wait_for(&self, topic: &str, id: &str, limit: Duration) -> Option<Told> {
        let until = Instant::now() + limit;
        let mut told = self.list.lock();
        loop {
            let found = told.iter().find(|t| t.topic == topic && t.is_of_init(id));
            if let Some(found) = found {
                return Some(found.clone());
            }
            let left = until.checked_duration_since(Instant::now())?;
            told = self
                .list
                .more
                .wait_timeout(told, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Excuses a container, whose shim is killed while it tells of the end.
    pub fn excuse(&mut self, id: &str) {
        self.may_be_told_twice.push(id.to_owned());
    }

    /// What was told more often than once of one process.
    pub fn told_twice(&self) -> Vec<String> {
        let mut lines: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for told in self.list.lock().iter() {
            let once = [
                "/tasks/create",
                "/tasks/start",
                "/tasks/exit",
                "/tasks/delete",
            ];
            if once.contains(&told.topic.as_str())
                && !self.may_be_told_twice.contains(&told.container)
            {
                let key = (
                    told.topic.clone(),
                    told.container.clone(),
                    told.process.clone(),
                );
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

impl Drop for Recorder {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Told {
    /// A line of `ctr events`: time, namespace, topic, and the event as JSON.
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

    fn is_of_init(&self, id: &str) -> bool {
        self.container == id && (self.process.is_empty() || self.process == id)
    }
}
