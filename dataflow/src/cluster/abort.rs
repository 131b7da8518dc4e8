//! The flag that ends a run everywhere, with the first error.
//!
//! Every worker, guarded thread, connection and supervisor of a run shares one [`Abort`]. The
//! first error wins; later ones are consequences and are dropped. Some errors are known to be
//! consequences when they are noticed (a socket that closed, a channel whose sender is gone): they
//! are reported with [`Abort::suspect`], which leaves their explanation a moment to arrive.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::{Actor, ClusterError, panic_message};
use super::failure::{Aborted, Failure};
use super::progress::{Board, Phase, Rhythm};
use super::trace::Trace;

/// How long a suspicion waits for the error that explains it.
const EXPLANATION_PATIENCE: Duration = Duration::from_millis(1500);

type Callback = Box<dyn FnOnce() + Send>;

/// A handle on the fate of a run: cheap to clone and to ask, usable from any thread.
#[derive(Clone, Default)]
pub struct Abort {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    aborted: AtomicBool,
    suspected: AtomicBool,
    state: Mutex<State>,
    board: Arc<Board>,
}

#[derive(Default)]
struct State {
    first: Option<ClusterError>,
    suspicion: Option<(ClusterError, Instant)>,
    callbacks: Vec<Callback>,
}

impl std::fmt::Debug for Abort {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Abort").field("first", &self.lock().first).finish_non_exhaustive()
    }
}

impl Abort {
    /// A run that nothing has gone wrong with yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the run with `error`, unless an earlier error already has. Wakes every worker.
    pub fn abort(&self, error: ClusterError) {
        let callbacks = {
            let mut state = self.lock();
            if state.first.is_some() {
                tracing::debug!(error = error.with_causes(), "error after the run was aborted");
                return;
            }
            tracing::debug!(error = error.with_causes(), "the run is aborted");
            state.first = Some(error);
            state.suspicion = None;
            self.shared.aborted.store(true, Ordering::Release);
            std::mem::take(&mut state.callbacks)
        };
        for callback in callbacks {
            callback();
        }
    }

    /// Ends the run with the failure of `actor`, unless an earlier error already has.
    pub fn fail(&self, actor: Actor, failure: impl Into<Failure>) {
        self.abort(failure.into().into_error(actor));
    }

    /// Ends the run with `error` unless another error explains it within a second and a half.
    ///
    /// For a failure that is probably the consequence of another: an operator that finds the channel
    /// to its thread disconnected, a socket that closed. Returns at once.
    pub fn suspect(&self, error: ClusterError) {
        let mut state = self.lock();
        if state.first.is_none() && state.suspicion.is_none() {
            tracing::debug!(error = error.with_causes(), "waiting for the explanation");
            state.suspicion = Some((error, Instant::now() + EXPLANATION_PATIENCE));
            self.shared.suspected.store(true, Ordering::Release);
        }
    }

    /// Whether the run is aborted. Costs one or two loads.
    pub fn is_aborted(&self) -> bool {
        if self.shared.aborted.load(Ordering::Acquire) {
            return true;
        }
        if !self.shared.suspected.load(Ordering::Acquire) {
            return false;
        }
        let unexplained = {
            let mut state = self.lock();
            let due = |(_, deadline): &mut (ClusterError, Instant)| *deadline <= Instant::now();
            state.suspicion.take_if(due)
        };
        if let Some((error, _)) = unexplained {
            self.abort(error);
        }
        self.shared.aborted.load(Ordering::Acquire)
    }

    /// `Err(Aborted)` once the run is aborted: for `?` in loops.
    ///
    /// # Errors
    /// [`Aborted`], which carries nothing: the error is [`Abort::first_error`].
    pub fn check(&self) -> Result<(), Aborted> {
        if self.is_aborted() { Err(Aborted) } else { Ok(()) }
    }

    /// The error that ended the run.
    pub fn first_error(&self) -> Option<ClusterError> {
        self.lock().first.clone()
    }

    /// Calls `callback` once when the run is aborted, on the thread that aborts it; at once if it
    /// already is. It must neither block nor panic.
    pub fn on_abort(&self, callback: impl FnOnce() + Send + 'static) {
        {
            let mut state = self.lock();
            if state.first.is_none() {
                state.callbacks.push(Box::new(callback));
                return;
            }
        }
        callback();
    }

    /// Starts a named thread whose error or panic ends the run, and which must end when the run does:
    /// [`Cluster::execute`](super::Cluster::execute) waits for it.
    ///
    /// The values that `work` owns are dropped before its panic is known here. So an operator that sees a
    /// channel to such a thread disconnected must [`suspect`](Abort::suspect), not abort.
    ///
    /// # Errors
    /// [`ClusterError::Spawn`] if the system refuses another thread.
    pub fn guard_thread<F>(&self, name: &str, work: F) -> Result<JoinHandle<()>, ClusterError>
    where
        F: FnOnce() -> Result<(), Failure> + Send + 'static,
    {
        let abort = self.clone();
        let actor = Actor::Thread(name.to_string());
        let presence = self.board().join(actor.clone(), Rhythm::Jobs);
        std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                presence.begin();
                abort.catch(actor, work);
                drop(presence);
            })
            .map_err(ClusterError::spawn(name))
    }

    /// Runs `work`; its error or panic ends the run as one of `actor`.
    pub(super) fn catch<R>(
        &self,
        actor: Actor,
        work: impl FnOnce() -> Result<R, Failure>,
    ) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(failure)) => self.fail(actor, failure),
            Err(payload) => {
                let message = panic_message(payload.as_ref());
                self.abort(ClusterError::Panicked { actor, message });
            }
        }
        None
    }

    /// Gives threads of this process `patience` at least in `phase`, whatever the step deadline.
    pub fn allow(&self, phase: Phase, patience: Duration) {
        self.board().allow(phase, patience);
    }

    /// Sends the records of this process's threads to `trace` from now on: to be called before the run has workers.
    pub fn write_trace(&self, trace: &Trace) {
        // A second trace is ignored.
        let _ = self.board().trace.set(trace.clone());
    }

    pub(super) fn board(&self) -> &Arc<Board> {
        &self.shared.board
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panicked(message: &str) -> ClusterError {
        ClusterError::Panicked { actor: Actor::Worker(0), message: message.into() }
    }

    #[test]
    fn the_first_error_wins_and_callbacks_run_once() {
        let abort = Abort::new();
        let (calls, called) = std::sync::mpsc::channel();
        let early = calls.clone();
        abort.on_abort(move || early.send("early").unwrap());
        assert!(!abort.is_aborted());
        abort.abort(panicked("first"));
        abort.abort(panicked("second"));
        abort.on_abort(move || calls.send("late").unwrap());
        assert_eq!(called.iter().collect::<Vec<_>>(), ["early", "late"]);
        assert_eq!(abort.first_error().unwrap().to_string(), "worker 0 panicked: first");
        assert_eq!(abort.check(), Err(Aborted));
    }

    #[test]
    fn a_suspicion_yields_to_its_explanation() {
        let abort = Abort::new();
        abort.suspect(panicked("consequence"));
        assert!(!abort.is_aborted());
        abort.abort(panicked("cause"));
        assert_eq!(abort.first_error().unwrap().to_string(), "worker 0 panicked: cause");
    }

    #[test]
    fn an_unexplained_suspicion_ends_the_run() {
        let abort = Abort::new();
        let start = Instant::now();
        abort.suspect(panicked("unexplained"));
        while !abort.is_aborted() {
            std::thread::park_timeout(Duration::from_millis(20));
            assert!(start.elapsed() < Duration::from_secs(10), "the suspicion was forgotten");
        }
        assert!(start.elapsed() >= EXPLANATION_PATIENCE);
        assert_eq!(abort.first_error().unwrap().to_string(), "worker 0 panicked: unexplained");
    }

    #[test]
    fn guarded_threads_report_panics_and_errors() {
        let abort = Abort::new();
        abort.guard_thread("reader", || panic!("no {}", "tape")).unwrap().join().unwrap();
        let error = abort.first_error().unwrap();
        assert_eq!(error.to_string(), "thread reader panicked: no tape");

        let abort = Abort::new();
        abort
            .guard_thread("writer", || Err(Failure::restart("disk full")))
            .unwrap()
            .join()
            .unwrap();
        let error = abort.first_error().unwrap();
        assert_eq!(error.with_causes(), "thread writer failed: disk full");
    }
}
