//! Work on several files at once, by threads that end when the run does, while the thread that waits for them says that they
//! move.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tidemill_model::ModelError;

use crate::cluster::progress;
use crate::error::{JobError, Result};

/// Threads at once: with more, a disk or a store of a cluster answers no faster.
pub(super) const MOST_THREADS: usize = 8;

/// Why a thread goes no further.
pub(super) enum Ended {
    /// The others have failed, or the run is over.
    Unwanted,
    Failed(JobError),
}

impl From<ModelError> for Ended {
    fn from(error: ModelError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<JobError> for Ended {
    fn from(error: JobError) -> Self {
        Self::Failed(error)
    }
}

/// The state that working threads share with the thread that waits for them.
#[derive(Default)]
pub(super) struct SharedProgress {
    pieces: AtomicU64,
    is_over: AtomicBool,
}

impl SharedProgress {
    /// A piece is done.
    pub(super) fn moved(&self) -> std::result::Result<(), Ended> {
        self.pieces.fetch_add(1, Ordering::Relaxed);
        if self.is_over.load(Ordering::Relaxed) { Err(Ended::Unwanted) } else { Ok(()) }
    }
}

/// Does `work` on each of `jobs`, on several at once; answers their results, in no order, or none where the run
/// `is_over` before their end. Errors of the system name `path`.
pub(super) fn side_by_side<J: Send, T: Send>(
    jobs: Vec<J>,
    path: &Path,
    is_over: impl Fn() -> bool,
    work: impl Fn(J, &SharedProgress) -> std::result::Result<T, Ended> + Sync,
) -> Result<Option<Vec<T>>> {
    // Now and then it is looked whether the threads move and the run goes on.
    const LOOK: Duration = Duration::from_millis(50);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(MOST_THREADS).min(jobs.len());
    let (queue, shared) = (Mutex::new(jobs), SharedProgress::default());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
    thread::scope(|scope| {
        let (ended, endings) = mpsc::channel();
        let mut failed = None;
        for _ in 0..threads {
            let (ended, next, work, shared) = (ended.clone(), &next, &work, &shared);
            let body = move || {
                while let Some(job) = next() {
                    // The other end waits for all threads.
                    let _ = ended.send(work(job, shared));
                }
            };
            if let Err(source) = thread::Builder::new().spawn_scoped(scope, body) {
                failed = Some(JobError::file("starting a thread for", path, source));
                break;
            }
        }
        drop(ended);
        let (mut pieces, mut done, mut is_unwanted) = (0, Vec::new(), false);
        loop {
            is_unwanted |= is_over();
            if failed.is_some() || is_unwanted {
                shared.is_over.store(true, Ordering::Relaxed);
            }
            match endings.recv_timeout(LOOK) {
                Ok(Ok(result)) => done.push(result),
                Ok(Err(Ended::Failed(error))) => {
                    failed.get_or_insert(error);
                }
                Ok(Err(Ended::Unwanted)) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let read = shared.pieces.load(Ordering::Relaxed);
            if read != pieces {
                pieces = read;
                progress::moved();
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok((!is_unwanted).then_some(done)),
        }
    })
}
