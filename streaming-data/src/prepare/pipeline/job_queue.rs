//! Jobs that wait for a thread.
//!
//! Jobs are done in the order in which they come, with one exception: the thread that cuts parts off an input
//! supplies all others, so cutting the next part goes before everything else. Otherwise the threads would do
//! all waiting jobs, and then wait for the one that reads.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use super::job::{Job, Numbered};

/// Jobs that one thread hands to many.
#[derive(Default)]
pub(crate) struct JobQueue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Numbered<Job>>,
    is_closed: bool,
}

impl JobQueue {
    /// Adds a job.
    pub(crate) fn push(&self, job: Numbered<Job>) {
        let mut state = self.lock();
        match job.item {
            Job::Cut(_) => state.jobs.push_front(job),
            Job::Read(_) | Job::Take(_) | Job::Encode(_) => state.jobs.push_back(job),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for a job; none once the queue is closed.
    pub(crate) fn pop(&self) -> Option<Numbered<Job>> {
        let state = self.lock();
        let mut state = self
            .changed
            .wait_while(state, |state| state.jobs.is_empty() && !state.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.jobs.pop_front()
    }

    /// Closes the queue when the guard is dropped, on every way out.
    pub(crate) fn close_at_end(&self) -> CloseAtEnd<'_> {
        CloseAtEnd { queue: self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`JobQueue::close_at_end`].
pub(crate) struct CloseAtEnd<'a> {
    queue: &'a JobQueue,
}

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.is_closed = true;
        // The results are no longer wanted.
        state.jobs.clear();
        drop(state);
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::pipeline::{
        job::Cutting,
        plan::{Extent, Reading},
    };

    #[test]
    fn cutting_goes_first_and_a_closed_queue_lets_everybody_go() {
        let queue = JobQueue::default();
        let read = || Job::Read(Reading { input: 0, extent: Extent::Whole, bytes: 1 });
        let cut = Job::Cut(Cutting { input: 0, reader: None });
        for (number, item) in [(1, read()), (2, read()), (3, cut), (4, read())] {
            queue.push(Numbered { number, item });
        }
        let numbers: Vec<_> = (0..3).map(|_| queue.pop().unwrap().number).collect();
        assert_eq!(numbers, [3, 1, 2]);
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| queue.pop().is_none())).collect();
            drop(queue.close_at_end());
            // One of them may have had the last job before.
            let without = waiting.into_iter().map(|one| one.join().unwrap());
            assert!(without.filter(|&none| none).count() >= 2);
        });
        assert!(queue.pop().is_none());
    }
}
