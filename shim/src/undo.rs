//! How what was set up is taken down again: a stack of steps, run last first.

use std::fmt::Display;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

type Step = Box<dyn FnOnce() -> Result<(), Box<dyn Display>> + Send + Sync>;

/// Whose turn it is to be run aside. With one at a time, what was begun first is done first, and no more than one thread
/// is held up.
static TURN: Mutex<()> = Mutex::const_new(());

/// What undoes the work done so far. It runs when it is dropped: a recipe that fails half-way
/// leaves nothing, one that succeeds hands its stack to whoever owns the result.
#[derive(Default)]
pub struct Undo {
    steps: Vec<(String, Step)>,
}

impl Undo {
    /// An empty stack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a step; `what` completes the sentence "Cannot …".
    pub fn push<E: Display + 'static>(
        &mut self,
        what: impl Into<String>,
        step: impl FnOnce() -> Result<(), E> + Send + Sync + 'static,
    ) {
        self.steps.push((
            what.into(),
            Box::new(|| step().map_err(|e| Box::new(e) as Box<dyn Display>)),
        ));
    }

    /// Runs all steps, last first. One that fails is logged and does not stop the others.
    pub fn run(&mut self) {
        while let Some((what, step)) = self.steps.pop() {
            if let Err(error) = step() {
                log::warn!("Cannot {what}: {error}");
            }
        }
    }

    /// Does the same on a thread of its own: a slow disk, which an unmount writes to, does not hold up this one. All is
    /// undone on return. If the caller goes away meanwhile it is undone nevertheless.
    pub async fn run_aside(mut self) {
        if self.steps.is_empty() {
            return;
        }
        let turn = TURN.lock().await;
        let done = spawn_blocking(move || {
            self.run();
            drop(turn);
        });
        if let Err(e) = done.await {
            log::error!("Cannot clean up: {e}");
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        self.run();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, mpsc};
    use std::time::Duration;

    use super::*;

    #[test]
    fn steps_run_last_first_and_a_failure_does_not_stop_them() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut undo = Undo::new();
        for n in 1..=2 {
            let order = order.clone();
            undo.push("count", move || {
                order.lock().unwrap().push(n);
                Err::<(), _>("always fails")
            });
        }
        drop(undo);
        assert_eq!(*order.lock().unwrap(), [2, 1]);
    }

    #[tokio::test]
    async fn what_is_run_aside_holds_up_nobody_keeps_its_order_and_outlives_its_caller() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let (go_on, slow) = mpsc::channel::<()>();
        let slow = Mutex::new(slow);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let mut first = Undo::new();
        let noted = order.clone();
        first.push("wait", move || {
            let _ = begun.send(());
            let slow = slow.lock().unwrap();
            slow.recv_timeout(Duration::from_secs(10))
                .map(|()| noted.lock().unwrap().push(1))
        });
        let mut second = Undo::new();
        let noted = order.clone();
        second.push("count", move || {
            noted.lock().unwrap().push(2);
            Ok::<_, String>(())
        });
        let caller = tokio::spawn(first.run_aside());
        // This thread is free meanwhile.
        has_begun.await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        let second = tokio::spawn(second.run_aside());
        tokio::task::yield_now().await;
        assert!(order.lock().unwrap().is_empty());
        go_on.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(*order.lock().unwrap(), [1, 2]);
    }
}
