//! Workers of a timely runtime that a program of its own has started: they run with the same care as the workers of a
//! [`Cluster`](super::Cluster).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use timely::worker::Worker;

use super::abort::Abort;
use super::error::{Actor, ClusterError};
use super::execute::WorkerContext;
use super::failure::Failure;
use super::progress::{self, Phase, Rhythm};

/// Values that the workers of a process share, one of each type.
pub(super) type OfProcess = Arc<Mutex<Vec<Arc<dyn Any + Send + Sync>>>>;

/// The state that the workers of a process share.
#[derive(Clone)]
pub(super) struct Workers {
    pub(super) abort: Abort,
    pub(super) process: usize,
    pub(super) processes: usize,
    pub(super) of_process: OfProcess,
}

impl Workers {
    /// The workers of process `process` of `processes`.
    pub(super) fn new(abort: Abort, process: usize, processes: usize) -> Self {
        Self { abort, process, processes, of_process: OfProcess::default() }
    }

    /// Runs `work` on `worker` until all its dataflows are complete; `None` if the run was ended before, and the
    /// dataflows are dropped.
    pub(super) fn run<R>(
        &self,
        worker: &mut Worker,
        work: impl FnOnce(&mut WorkerContext<'_>) -> Result<R, Failure>,
    ) -> Option<R> {
        let actor = Actor::Worker(worker.index());
        let presence = self.abort.board().join(actor.clone(), Rhythm::Turns);
        presence.begin();
        if let Some(trace) = self.abort.board().trace.get() {
            trace.follow(worker);
        }
        let mut context = WorkerContext { worker, of: self.clone(), presence };
        let thread = std::thread::current();
        self.abort.on_abort(move || thread.unpark());
        let result = self.abort.catch(actor, || {
            let result = work(&mut context)?;
            context.run_until_done()?;
            progress::enter(Phase::WaitingForEnd, progress::step());
            Ok(result)
        });
        // Timely steps a worker for as long as it has dataflows. Operators that have panicked may
        // panic again when they are dropped; that would be no news.
        for dataflow in context.worker.installed_dataflows() {
            let _ = catch_unwind(AssertUnwindSafe(|| context.worker.drop_dataflow(dataflow)));
        }
        result
    }
}

/// A run on the workers of a [`timely::execute()`] of one's own; each worker calls [`work`](Self::work). It makes a worker into the
/// [`WorkerContext`] that parts of this crate ask for, and an error or a panic of one worker ends the run on all of them.
///
/// Failures of other processes are timely's to notice: a [`Cluster`](super::Cluster) notices them itself.
///
/// ```
/// use tidemill::cluster::EmbeddedRun;
/// use timely::dataflow::operators::{ToStream, vec::Map};
///
/// let run = EmbeddedRun::new();
/// let of_workers = run.clone();
/// let workers = timely::execute(timely::Config::process(2), move |worker| {
///     of_workers.work(worker, |context| {
///         let (sender, receiver) = std::sync::mpsc::channel();
///         let index = context.index() as u64;
///         context.dataflow::<u64, _, _>(|scope| {
///             vec![index].to_stream(scope).container::<Vec<_>>().map(move |x| sender.send(x + 1));
///         });
///         context.run_until_done()?;
///         Ok(receiver.iter().sum::<u64>())
///     })
/// })?;
/// let sums: Vec<_> = workers.join().into_iter().flatten().flatten().collect();
/// run.end()?;
/// assert_eq!(sums, [1, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct EmbeddedRun(Workers);

impl EmbeddedRun {
    /// One of workers that are all of this process.
    #[expect(clippy::new_without_default, reason = "each is a run of its own")]
    pub fn new() -> Self {
        Self::of_processes(0, 1)
    }

    /// One of several processes, with index `process`; each has as many workers.
    pub fn of_processes(process: usize, processes: usize) -> Self {
        Self(Workers::new(Abort::new(), process, processes))
    }

    /// The handle with which anything may end the run.
    pub fn abort(&self) -> &Abort {
        &self.0.abort
    }

    /// Runs `work` on `worker`, then steps until all its dataflows are complete, also dataflows that `work` did not build: to be called by
    /// the closure that timely calls, on every worker. `None` where the run was ended before; the dataflows are then dropped.
    pub fn work<R>(
        &self,
        worker: &mut Worker,
        work: impl FnOnce(&mut WorkerContext<'_>) -> Result<R, Failure>,
    ) -> Option<R> {
        self.0.run(worker, work)
    }

    /// Waits until the workers and the threads that they have started are done: to be called when timely's are joined. Half a minute
    /// is enough for all of them; one that is stuck for longer is named.
    ///
    /// # Errors
    /// The first error of the run; [`ClusterError::LeftBehind`] where threads have not ended.
    pub fn end(self) -> Result<(), ClusterError> {
        const DEADLINE: Duration = Duration::from_secs(30);
        let left = self.0.abort.board().wait_for_all(Instant::now() + DEADLINE);
        let error = self.0.abort.first_error();
        if left.is_empty() {
            return error.map_or(Ok(()), Err);
        }
        Err(ClusterError::LeftBehind { left, deadline: DEADLINE, cause: error.map(Arc::new) })
    }
}

#[cfg(test)]
mod tests {
    use timely::dataflow::operators::{Inspect, ToStream};

    use super::*;

    /// Runs on three workers. The second panics or fails after it has begun; the others wait for it without end.
    fn broken(breaks: impl Fn() -> Result<(), Failure> + Send + Sync + 'static) -> String {
        let run = EmbeddedRun::new();
        let of_workers = run.clone();
        let workers = timely::execute(timely::Config::process(3), move |worker| {
            of_workers.work(worker, |context| {
                let _thread = context.abort().guard_thread("beside", || Ok(()))?;
                context.dataflow::<u64, _, _>(|scope| {
                    (0..3).to_stream(scope).container::<Vec<u64>>().inspect(|_| ());
                });
                if context.index() == 1 {
                    breaks()?;
                }
                context.step_while(|| true)?;
                Ok(())
            })
        });
        let answers = workers.unwrap().join();
        assert!(answers.iter().all(|answer| answer.as_ref().is_ok_and(Option::is_none)));
        run.end().unwrap_err().to_string()
    }

    #[test]
    fn a_panic_or_an_error_of_one_worker_ends_all() {
        assert_eq!(broken(|| panic!("on purpose")), "worker 1 panicked: on purpose");
        assert_eq!(broken(|| Err(Failure::fix_input("on purpose"))), "worker 1 failed");
    }
}
