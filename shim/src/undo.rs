//! How what was set up is taken down again: a stack of steps, run last first.

use std::fmt::Display;

type Step = Box<dyn FnOnce() -> Result<(), Box<dyn Display>> + Send + Sync>;

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
}

impl Drop for Undo {
    fn drop(&mut self) {
        self.run();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

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
}
