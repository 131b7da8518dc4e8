//! The worker pool of a decoder: threads that take batches from the readers' queues in turn.
//!
//! A batch that needs a page which another thread decodes is deferred, and its thread begins the next
//! batch: where samples are read as they are stored, neighbouring batches need the same page, and all
//! threads but one would wait for it. A thread resumes the oldest deferred batch as soon as a page has
//! been decoded: when it has no batch, or when it is about to decode a page for a later batch, which it
//! then defers too (the later batch *yields*). A thread waits for a page only when no other batch may
//! be begun.
//!
//! One lock holds all queues; it is taken a few times per batch and load, never per sample, and never while
//! something is read, decoded, or called back.

use std::{
    collections::BTreeMap,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
};

use super::queue::{BatchRule, Made, Plan, Queue, Taken, Wake};
use crate::{error::DataError, shard::panic_text};

/// The work of the threads: they make items for readers out of positions.
pub(super) trait Work: Send + Sync + 'static {
    /// An item of a reader.
    type Item: Send + 'static;
    /// Buffers that a thread keeps from one batch to the next.
    type Scratch: Default;

    /// A batch of a reader is about to be made. Called in the order of the reader's plan, before a
    /// later batch can begin.
    fn begin(&self, reader: u64, positions: &[Range<u64>]);

    /// A batch was made, or failed, or its reader has left.
    fn end(&self, reader: u64, positions: &[Range<u64>]);

    /// A reader was dropped.
    fn remove_reader(&self, reader: u64);

    /// No reader wants more: every wait ends with an error.
    fn close(&self);

    /// Makes the items of a batch in the order of the positions, up to the first that cannot be made;
    /// of a deferred batch, those that are missing. With [`IfBusy::Defer`] it may stop after a whole item:
    /// where another thread decodes what the next item needs, and where `is_older_ready` says, before it
    /// decodes anything, that an older batch can be resumed.
    fn make(
        &self,
        positions: &[Range<u64>],
        scratch: &mut Self::Scratch,
        items: &mut Vec<Self::Item>,
        if_busy: IfBusy,
        is_older_ready: &dyn Fn() -> bool,
    ) -> Result<Progress, DataError>;

    /// How often something has been decoded. Once the number has changed, a deferred batch may be able
    /// to go on.
    fn loads(&self) -> u64;
}

/// A thread's choice for a batch that needs a page which another thread decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IfBusy {
    Defer,
    Wait,
}

/// How far a batch was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Made,
    /// Another thread decodes the pages that the batch needs; `loads` is [`Work::loads`] from before the check.
    Waits {
        loads: u64,
    },
    /// An older batch can be resumed, and comes first.
    Yields,
}

/// Bounds on the batches that wait for readers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) batch: BatchRule,
    /// Batches that may wait or be in work, over all readers.
    pub(super) batches: usize,
}

/// See the [module](self).
pub(super) struct WorkerPool<W: Work> {
    work: W,
    bounds: Bounds,
    state: Mutex<PoolState<W::Item>>,
    /// Notified when there may be work, or the pool is closed.
    has_work: Condvar,
    /// Notified when a queue has a batch, an error or its end for a reader that waits.
    ready: Condvar,
    /// The serial number of the oldest deferred batch, and [`Work::loads`] from before it was deferred;
    /// `u64::MAX` where there is none. Both are hints, read without the lock: a thread that
    /// reads a mixed pair yields needlessly or one piece too late, and the lock decides which batch is resumed.
    oldest: AtomicU64,
    oldest_loads: AtomicU64,
}

/// The part of the pool that its lock protects.
struct PoolState<T> {
    is_closed: bool,
    queues: BTreeMap<u64, Queue<T>>,
    next_reader: u64,
    /// The reader that was served last.
    last_served: u64,
    /// How many batches were begun.
    begun: u64,
    /// Deferred batches by their serial numbers.
    deferred: BTreeMap<u64, Task<T>>,
}

/// A batch to be made.
struct Task<T> {
    reader: u64,
    number: u64,
    positions: Vec<Range<u64>>,
    /// How many batches were begun before this one.
    serial: u64,
    /// The items made so far.
    items: Vec<T>,
    /// [`Work::loads`] from before the batch was found to wait for another thread; none for other batches.
    loads: Option<u64>,
}

/// A thread's next step.
enum Action<T> {
    Make(Task<T>, IfBusy),
    /// A reader has reached its end, or failed, and must be notified.
    Notify(u64, Wake),
}

impl<W: Work> WorkerPool<W> {
    pub(super) fn new(work: W, bounds: Bounds) -> WorkerPool<W> {
        WorkerPool {
            work,
            bounds,
            state: Mutex::new(PoolState {
                is_closed: false,
                queues: BTreeMap::new(),
                next_reader: 0,
                last_served: 0,
                begun: 0,
                deferred: BTreeMap::new(),
            }),
            has_work: Condvar::new(),
            ready: Condvar::new(),
            oldest: AtomicU64::new(u64::MAX),
            oldest_loads: AtomicU64::new(0),
        }
    }

    pub(super) fn work(&self) -> &W {
        &self.work
    }

    /// Adds a reader and answers its number.
    pub(super) fn add_reader(&self, plan: Plan, wake: Wake) -> u64 {
        let mut state = self.lock();
        let reader = state.next_reader;
        state.next_reader += 1;
        state.queues.insert(reader, Queue::new(plan, wake));
        drop(state);
        self.has_work.notify_all();
        reader
    }

    /// Removes a reader, its queue and its deferred batches.
    pub(super) fn remove_reader(&self, reader: u64) {
        let mut state = self.lock();
        let queue = state.queues.remove(&reader);
        let deferred: Vec<Task<W::Item>> = state
            .deferred
            .extract_if(.., |_, task| task.reader == reader)
            .map(|(_, t)| t)
            .collect();
        self.publish_oldest(&state);
        drop(state);
        for task in &deferred {
            self.work.end(reader, &task.positions);
        }
        self.work.remove_reader(reader);
        // Each of the other readers may now have more batches.
        self.has_work.notify_all();
        drop(queue);
    }

    /// Closes the pool: the threads end after the batch in hand.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.work.close();
        self.has_work.notify_all();
    }

    /// The reader's next batch, error or end, if it is ready.
    pub(super) fn try_take(&self, reader: u64) -> Poll<Taken<W::Item>> {
        let mut state = self.lock();
        let has_returned = state.return_batch(reader);
        let taken = state.take(reader);
        drop(state);
        if has_returned || taken.is_ready() {
            self.has_work.notify_one();
        }
        taken
    }

    /// The reader's next batch, error or end; waits until it is ready.
    pub(super) fn take(&self, reader: u64) -> Taken<W::Item> {
        let mut state = self.lock();
        if state.return_batch(reader) {
            self.has_work.notify_one();
        }
        loop {
            if let Poll::Ready(taken) = state.take(reader) {
                drop(state);
                self.has_work.notify_one();
                return taken;
            }
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The loop of a thread: performs actions until the pool is closed.
    pub(super) fn run_worker(&self) {
        let mut scratch = W::Scratch::default();
        while let Some(action) = self.next_action() {
            match action {
                Action::Make(mut task, if_busy) => {
                    let Task { positions, items, serial, .. } = &mut task;
                    let serial = *serial;
                    let is_older_ready = || self.is_ready_before(serial);
                    let make =
                        || self.work.make(positions, &mut scratch, items, if_busy, &is_older_ready);
                    let failure = match caught(make).and_then(|made| made) {
                        Ok(Progress::Waits { loads }) => {
                            self.defer(Task { loads: Some(loads), ..task });
                            continue;
                        }
                        Ok(Progress::Yields) => {
                            self.defer(Task { loads: None, ..task });
                            continue;
                        }
                        Ok(Progress::Made) => None,
                        Err(error) => Some(error),
                    };
                    self.work.end(task.reader, &task.positions);
                    self.finish(task, failure);
                }
                Action::Notify(reader, wake) => self.notify(reader, &wake),
            }
        }
    }

    /// Waits for an action; none when the pool is closed.
    fn next_action(&self) -> Option<Action<W::Item>> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let loads = self.work.loads();
            let mut ready = state.deferred.extract_if(.., |_, task| task.loads != Some(loads));
            let ready = ready.next();
            if let Some((_, task)) = ready {
                self.publish_oldest(&state);
                return Some(Action::Make(task, IfBusy::Defer));
            }
            if let Some(action) = state.next_action(self.bounds) {
                if let Action::Make(Task { reader, positions, .. }, _) = &action {
                    // Under the lock, while no thread can begin a later batch: the shards that this
                    // batch needs are kept.
                    self.work.begin(*reader, positions);
                }
                return Some(action);
            }
            if let Some((_, task)) = state.deferred.pop_first() {
                self.publish_oldest(&state);
                return Some(Action::Make(task, IfBusy::Wait));
            }
            state = self.has_work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells the threads which deferred batch is the oldest.
    fn publish_oldest(&self, state: &PoolState<W::Item>) {
        let (oldest, loads) = match state.deferred.first_key_value() {
            // No batch yields to one that has itself yielded: that one waits for an older batch.
            Some((&serial, Task { loads: Some(loads), .. })) => (serial, *loads),
            _ => (u64::MAX, 0),
        };
        self.oldest_loads.store(loads, Ordering::Relaxed);
        self.oldest.store(oldest, Ordering::Relaxed);
    }

    /// Whether a deferred batch that was begun before this one may be able to go on.
    fn is_ready_before(&self, serial: u64) -> bool {
        self.oldest.load(Ordering::Relaxed) < serial
            && self.oldest_loads.load(Ordering::Relaxed) != self.work.loads()
    }

    /// Keeps a batch until a thread resumes it.
    fn defer(&self, task: Task<W::Item>) {
        let mut state = self.lock();
        if state.queues.contains_key(&task.reader) {
            state.deferred.insert(task.serial, task);
            self.publish_oldest(&state);
            drop(state);
            self.has_work.notify_one();
        } else {
            drop(state);
            self.work.end(task.reader, &task.positions);
        }
    }

    fn finish(&self, task: Task<W::Item>, failure: Option<DataError>) {
        let mut state = self.lock();
        let Some(queue) = state.queues.get_mut(&task.reader) else { return };
        let is_front = queue.finish(task.number, Made { items: task.items, failure });
        let wake = Arc::clone(&queue.wake);
        drop(state);
        if is_front {
            self.notify(task.reader, &wake);
        }
    }

    /// Notifies a reader that it can go on.
    fn notify(&self, reader: u64, wake: &Wake) {
        self.ready.notify_all();
        if let Err(error) = caught(|| wake()) {
            if let Some(queue) = self.lock().queues.get_mut(&reader) {
                queue.fail(error);
            }
            self.ready.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState<W::Item>> {
        // Only a plan can panic while the lock is held, and that panic is caught: the state is whole even
        // where the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> PoolState<T> {
    /// The next action, readers taking turns.
    fn next_action(&mut self, Bounds { batch, batches }: Bounds) -> Option<Action<T>> {
        let bound = batches / self.queues.len().max(1);
        let after = self.queues.range(self.last_served + 1..).map(|(&reader, _)| reader);
        let before = self.queues.range(..=self.last_served).map(|(&reader, _)| reader);
        let round: Vec<u64> = after.chain(before).collect();
        for reader in round {
            let Some(queue) = self.queues.get_mut(&reader) else { continue };
            if !queue.wants_work(bound) {
                continue;
            }
            self.last_served = reader;
            let must_notify = match caught(|| queue.begin(batch)) {
                Ok(Some((number, positions))) => {
                    let serial = self.begun;
                    self.begun += 1;
                    let task =
                        Task { reader, number, positions, serial, items: Vec::new(), loads: None };
                    return Some(Action::Make(task, IfBusy::Defer));
                }
                Ok(None) => queue.is_at_end(),
                Err(error) => queue.fail(error),
            };
            if must_notify {
                return Some(Action::Notify(reader, Arc::clone(&queue.wake)));
            }
        }
        None
    }

    fn return_batch(&mut self, reader: u64) -> bool {
        self.queues.get_mut(&reader).is_some_and(Queue::return_batch)
    }

    fn take(&mut self, reader: u64) -> Poll<Taken<T>> {
        self.queues.get_mut(&reader).map_or(Poll::Ready(Taken::End), Queue::take)
    }
}

/// Turns a panic into an error: a thread must outlive the work, plans and callbacks that it runs.
fn caught<T>(run: impl FnOnce() -> T) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|panic| DataError::DecodingPanic { message: panic_text(&*panic) })
}

#[cfg(test)]
mod tests;
