//! The thread that waits for a detached disk: for the requests that are under way, and for its closing. The last
//! close of a block device writes out what the host has cached of it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use vmm_sys_util::eventfd::EventFd;

use super::disk::Disk;
use super::worker::{Ring, Worker};

/// Reserved for the thread's stack; only what is touched is memory.
const STACK: usize = 64 * 1024;

/// What a worker that has ended leaves: its ring, unless the driver broke it.
type Left = Option<Box<Ring>>;

/// A disk that is being closed.
pub struct Closing {
    thread: JoinHandle<()>,
    left: Arc<Mutex<Option<Left>>>,
}

impl Closing {
    /// Stops `worker`, lets go of `disk`, and signals `wake`.
    ///
    /// # Errors
    ///
    /// The host has no thread left; everything is as it was.
    pub fn start(
        disk: Arc<Disk>,
        worker: Option<Worker>,
        wake: Arc<EventFd>,
    ) -> Result<Self, (Arc<Disk>, Option<Worker>, io::Error)> {
        let left = Arc::new(Mutex::new(None));
        let result = left.clone();
        // Handed over to a thread that there is, so that nothing is lost if there is none.
        let (hand_over, taken) = mpsc::channel::<(Arc<Disk>, Option<Worker>)>();
        let spawned = std::thread::Builder::new()
            .name("close".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                let Ok((disk, worker)) = taken.recv() else {
                    return;
                };
                let ring = worker.and_then(Worker::stop);
                // First, so that whoever learns of the close finds the slot free.
                *lock(&result) = Some(ring);
                drop(disk);
                let _ = wake.write(1);
            });
        match spawned {
            Ok(thread) => {
                // It waits for this and does nothing else.
                let _ = hand_over.send((disk, worker));
                Ok(Self { thread, left })
            }
            Err(error) => Err((disk, worker, error)),
        }
    }

    /// What the worker left, once it has ended.
    pub fn ended(&self) -> Option<Left> {
        lock(&self.left).take()
    }

    /// Waits for it.
    pub fn wait(self) -> Left {
        let _ = self.thread.join();
        lock(&self.left).take().flatten()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
