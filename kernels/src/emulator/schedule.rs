//! Queues whose steps run later, in an order that no interface guarantees.
//!
//! A GPU runs enqueued work at some later time, and its queues are independent. Emulators that
//! share a [`Schedule`] do the same: a step waits until the host waits for something, and then the
//! next queue to run is drawn at random. So missing synchronization gives other bits for some seed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Storage;
use crate::error::Result;
use crate::gpu::driver::Timing;

/// The order in which the queues of one or several emulated GPUs run.
pub struct Schedule {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queues: BTreeMap<usize, Pending>,
    next_queue: usize,
    random: u64,
    /// Memory that was dropped while steps that may name it were pending.
    dropped: Vec<Storage>,
}

/// The work of one queue that has not run yet.
#[derive(Default)]
struct Pending {
    entries: VecDeque<Entry>,
    /// The first error of a step, until the host waits for the queue.
    failed: Option<crate::KernelError>,
}

enum Entry {
    Run(Work),
    Reach(Arc<AtomicBool>),
    WaitFor(Arc<AtomicBool>),
}

/// Runs a step.
pub(super) type Work = Box<dyn FnOnce() -> Result<()> + Send>;

/// A point in a queue.
#[derive(Clone)]
pub struct EmulatorEvent {
    /// `None` where all work before the event had run when it was recorded.
    pending: Option<(Arc<Schedule>, Arc<AtomicBool>)>,
    timing: Timing,
}

/// A queue of a schedule. When it is dropped, its pending work runs first.
pub(super) struct ScheduledQueue {
    schedule: Arc<Schedule>,
    index: usize,
}

impl Schedule {
    /// An order that is a function of `seed` and of the host's calls.
    pub fn new(seed: u64) -> Arc<Self> {
        let state = State { random: seed, ..State::default() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    pub(super) fn queue(self: &Arc<Self>) -> ScheduledQueue {
        let mut state = self.state();
        let index = state.next_queue;
        state.next_queue += 1;
        state.queues.insert(index, Pending::default());
        ScheduledQueue { schedule: Arc::clone(self), index }
    }

    /// Keeps `storage`, which was dropped, for as long as a step may name it; returns it where no step is pending.
    pub(super) fn drop_later(&self, storage: Storage) -> Option<Storage> {
        let mut state = self.state();
        if state.is_idle() {
            return Some(storage);
        }
        state.dropped.push(storage);
        None
    }

    /// Runs steps until `is_over`. The lock is held meanwhile: other threads enqueue in between steps.
    fn run_until(&self, mut is_over: impl FnMut(&mut State) -> bool) {
        loop {
            let mut state = self.state();
            if is_over(&mut state) || !state.run_one() {
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.queues.values().all(|pending| pending.entries.is_empty())
    }

    /// splitmix64.
    fn draw(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % below as u64) as usize
    }

    /// Runs the next step of a random queue, unless none can run.
    fn run_one(&mut self) -> bool {
        let can_run = |entry: &Entry| match entry {
            Entry::WaitFor(reached) => reached.load(Ordering::Acquire),
            Entry::Run(_) | Entry::Reach(_) => true,
        };
        let ready = |(&index, pending): (&usize, &Pending)| {
            pending.entries.front().is_some_and(can_run).then_some(index)
        };
        let ready: Vec<usize> = self.queues.iter().filter_map(ready).collect();
        if ready.is_empty() {
            return false;
        }
        let index = ready[self.draw(ready.len())];
        let Some(pending) = self.queues.get_mut(&index) else { return false };
        match pending.entries.pop_front() {
            Some(Entry::Run(work)) => {
                if let Err(error) = work() {
                    pending.failed.get_or_insert(error);
                }
            }
            Some(Entry::Reach(reached)) => reached.store(true, Ordering::Release),
            Some(Entry::WaitFor(_)) | None => {}
        }
        if self.is_idle() {
            self.dropped.clear();
        }
        true
    }
}

impl ScheduledQueue {
    pub(super) fn enqueue(&self, work: Work) {
        self.push(Entry::Run(work));
    }

    pub(super) fn record(&self, timing: Timing) -> EmulatorEvent {
        let reached = Arc::new(AtomicBool::new(false));
        self.push(Entry::Reach(Arc::clone(&reached)));
        EmulatorEvent { pending: Some((Arc::clone(&self.schedule), reached)), timing }
    }

    pub(super) fn wait_for(&self, event: &EmulatorEvent) {
        if let Some((_, reached)) = &event.pending {
            self.push(Entry::WaitFor(Arc::clone(reached)));
        }
    }

    /// Waits until everything is done; answers what failed.
    pub(super) fn finish(&self) -> Result<()> {
        let index = self.index;
        self.schedule.run_until(|state| {
            state.queues.get(&index).is_none_or(|pending| pending.entries.is_empty())
        });
        let failed = self.schedule.state().queues.get_mut(&index).and_then(|p| p.failed.take());
        failed.map_or(Ok(()), Err)
    }

    fn push(&self, entry: Entry) {
        if let Some(pending) = self.schedule.state().queues.get_mut(&self.index) {
            pending.entries.push_back(entry);
        }
    }
}

impl Drop for ScheduledQueue {
    fn drop(&mut self) {
        // There is no caller to return an error to.
        let _ = self.finish();
        self.schedule.state().queues.remove(&self.index);
    }
}

impl EmulatorEvent {
    /// One that is reached.
    pub(super) fn reached(timing: Timing) -> Self {
        Self { pending: None, timing }
    }

    pub(super) fn is_timed(&self) -> bool {
        self.timing == Timing::Noted
    }

    /// A look lets the device get on a little.
    pub(super) fn is_complete(&self) -> bool {
        let Some((schedule, reached)) = &self.pending else { return true };
        schedule.state().run_one();
        reached.load(Ordering::Acquire)
    }

    pub(super) fn wait(&self) {
        if let Some((schedule, reached)) = &self.pending {
            schedule.run_until(|_| reached.load(Ordering::Acquire));
        }
    }
}
