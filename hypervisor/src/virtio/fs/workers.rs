//! The threads that serve a share.
//!
//! A request may block for as long as the host's file system likes. So the workers are several: each
//! idle one waits for the queues' eventfd, of which each kick wakes one, and serves requests until there
//! are none. The first one starts with the device, another one whenever a request is taken and nobody is
//! left to wait for the next, up to [`MOST_WORKERS`]. At most [`MOST_REQUESTS`] of them serve requests
//! at a time, so there is always one for the high-priority queue.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use virtio_queue::{DescriptorChain, QueueState};
use vmm_sys_util::eventfd::EventFd;

use super::super::Memory;
use super::super::queue::{DeviceQueue, QueueError};
use super::credentials::prepare_thread;
use super::request::Requests;

/// The most threads of one share.
pub const MOST_WORKERS: usize = 8;
/// The most requests that are under way at the same time, not counting what needs no reply.
pub const MOST_REQUESTS: usize = MOST_WORKERS - 1;

/// Ample for what a request does; only what is touched takes memory.
const STACK_SIZE: usize = 256 << 10;

/// The index of the high-priority queue, where the guest forgets (virtio 1.2, section 5.11.2).
const HIGH_PRIORITY: usize = 0;
/// The index of the queue for everything else.
const REQUESTS: usize = 1;

/// A running set of workers.
pub struct Workers(Arc<Shared>);

struct Shared {
    name: String,
    state: Mutex<State>,
    /// Signalled when a worker has nothing to do any more.
    rested: Condvar,
    kick: EventFd,
    requests: Requests,
}

struct State {
    queues: [DeviceQueue; 2],
    /// Requests under way, by queue.
    busy: [usize; 2],
    /// Workers that wait for a kick, or that are about to, having just been started.
    idle: usize,
    /// Whether somebody waits in [`Workers::settle`].
    settling: bool,
    threads: Vec<JoinHandle<()>>,
    stop: bool,
    /// The driver broke a queue: nothing more is served until it resets the device.
    broken: bool,
}

/// A request that a worker has taken.
struct Job {
    queue: usize,
    chain: DescriptorChain<Arc<Memory>>,
}

impl Workers {
    /// Starts serving `queues`, which the driver kicks through `kick`. `name` is for people.
    ///
    /// # Errors
    ///
    /// The host has no thread for it.
    pub fn start(
        name: String,
        queues: [DeviceQueue; 2],
        kick: EventFd,
        requests: Requests,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            name,
            state: Mutex::new(State {
                queues,
                busy: [0; 2],
                idle: 0,
                settling: false,
                threads: Vec::new(),
                stop: false,
                broken: false,
            }),
            rested: Condvar::new(),
            kick,
            requests,
        });
        let mut state = shared.lock();
        shared.clone().spawn(&mut state)?;
        drop(state);
        Ok(Self(shared))
    }

    /// Ends all workers, after the requests that are under way.
    pub fn stop(self) {
        let mut state = self.0.lock();
        state.stop = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        let _ = self.0.kick.write(1);
        for thread in threads {
            let _ = thread.join();
        }
        // What the last worker left for the next one.
        let _ = self.0.kick.read();
    }

    /// The number of threads.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.lock().threads.len()
    }

    /// Waits until everything that the driver asked for is done, and returns the queues' state. The
    /// driver does not run meanwhile, so they stay as they are.
    pub fn settle(&self) -> Vec<QueueState> {
        let mut state = self.0.lock();
        state.settling = true;
        while !state.broken && !state.is_settled() {
            let rested = self.0.rested.wait(state);
            state = rested.unwrap_or_else(PoisonError::into_inner);
        }
        state.settling = false;
        state.queues.iter().map(DeviceQueue::state).collect()
    }
}

impl State {
    fn is_settled(&mut self) -> bool {
        self.busy == [0; 2]
            && self
                .queues
                .iter_mut()
                .all(|queue| matches!(queue.enable_notification(), Ok(false) | Err(_)))
    }

    /// Takes the next request there is.
    fn take(&mut self) -> Result<Option<Job>, QueueError> {
        let [high_priority, requests] = &mut self.queues;
        // What is forgotten comes in floods: one kick is enough for as many as there are.
        high_priority.disable_notification()?;
        if let Some(chain) = high_priority.pop()? {
            self.busy[HIGH_PRIORITY] += 1;
            let queue = HIGH_PRIORITY;
            return Ok(Some(Job { queue, chain }));
        }
        if self.busy[REQUESTS] < MOST_REQUESTS
            && let Some(chain) = requests.pop()?
        {
            self.busy[REQUESTS] += 1;
            let queue = REQUESTS;
            return Ok(Some(Job { queue, chain }));
        }
        Ok(None)
    }

    /// Asks for a kick at the next request. `true` when there is one already that somebody can take.
    fn ask_for_kick(&mut self) -> Result<bool, QueueError> {
        let high_priority = self.queues[HIGH_PRIORITY].enable_notification()?;
        let requests = self.queues[REQUESTS].enable_notification()?;
        Ok(high_priority || (requests && self.busy[REQUESTS] < MOST_REQUESTS))
    }

    fn finish(&mut self, queue: usize, head: u16, written: u32) -> Result<(), QueueError> {
        self.busy[queue] -= 1;
        if self.broken {
            return Ok(());
        }
        self.queues[queue].add_used(head, written)?;
        self.queues[queue].notify()
    }

    fn fail(&mut self, error: &QueueError) {
        if !self.broken {
            self.broken = true;
            log::warn!("The driver of a share broke the rules: {error}");
            self.queues[REQUESTS].interrupt().signal_needs_reset();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(self: Arc<Self>, state: &mut State) -> io::Result<()> {
        let name = format!("fs-{}-{}", self.name, state.threads.len());
        let thread = std::thread::Builder::new()
            .name(name)
            .stack_size(STACK_SIZE)
            .spawn(move || match prepare_thread() {
                Ok(()) => self.work(),
                Err(e) => {
                    log::error!("A worker of share {} cannot start: {e}", self.name);
                    self.lock().idle -= 1;
                }
            })?;
        state.threads.push(thread);
        state.idle += 1;
        Ok(())
    }

    fn work(self: Arc<Self>) {
        let mut state = self.lock();
        state.idle -= 1;
        while !state.stop {
            let job = match state.broken {
                true => None,
                false => match state.take().and_then(|job| match job {
                    Some(job) => Ok(Some(job)),
                    // Between looking and asking for a kick a request may have come.
                    None => match state.ask_for_kick()? {
                        true => state.take(),
                        false => Ok(None),
                    },
                }) {
                    Ok(job) => job,
                    Err(e) => {
                        state.fail(&e);
                        None
                    }
                },
            };
            let Some(job) = job else {
                if state.settling {
                    self.rested.notify_all();
                }
                state.idle += 1;
                drop(state);
                // Fails only for want of a descriptor, which it has.
                let _ = self.kick.read();
                state = self.lock();
                state.idle -= 1;
                continue;
            };
            if job.queue == REQUESTS {
                self.clone().leave_a_watch(&mut state);
            }
            drop(state);
            let head = job.chain.head_index();
            let written = self.requests.serve(job.chain);
            state = self.lock();
            if let Err(e) = state.finish(job.queue, head, written) {
                state.fail(&e);
            }
        }
        drop(state);
        // One write wakes one reader.
        let _ = self.kick.write(1);
    }

    /// Makes sure that while this worker is busy the next request finds another one.
    fn leave_a_watch(self: Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            match state.queues[REQUESTS].enable_notification() {
                // It came without a kick.
                Ok(true) => drop(self.kick.write(1)),
                Ok(false) => {}
                Err(e) => state.fail(&e),
            }
        } else if state.threads.len() < MOST_WORKERS
            && let Err(e) = self.spawn(state)
        {
            log::warn!("Cannot start another worker for a share: {e}");
        }
    }
}
