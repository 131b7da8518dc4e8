//! Where the threads of a decoder work: they take batches from the readers' queues in turn.
//!
//! A batch that needs what another thread is decoding is laid aside, and its thread begins the next:
//! neighbouring batches want the same page where samples are read as they are stored, and all threads
//! but one would wait for it. What was laid aside is gone on with, the oldest first, when something
//! has been decoded: the next time that a thread has no batch, or would decode something for a later
//! one, which it then lays aside in turn. It is waited for when nothing else may be begun.
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

/// What the threads do: positions become what readers get.
pub(super) trait Work: Send + Sync + 'static {
    /// What a reader gets.
    type Item: Send + 'static;
    /// What a thread keeps from one batch to the next.
    type Scratch: Default;

    /// A batch of a reader is about to be made. Told in the order of the reader's plan, before a
    /// later batch can begin.
    fn begin(&self, reader: u64, positions: &[Range<u64>]);

    /// A batch was made, or failed, or its reader has left.
    fn end(&self, reader: u64, positions: &[Range<u64>]);

    /// A reader is gone.
    fn leave(&self, reader: u64);

    /// Nothing more is wanted: what is waited for ends with an error.
    fn close(&self);

    /// Makes a batch, in the order of the positions, up to what cannot be made; of what was laid aside,
    /// the rest. With [`Patience::None`] it may be laid aside, all items so far being whole, where
    /// another thread is at what it needs, and where `is_older_ready` before something is decoded.
    fn make(
        &self,
        positions: &[Range<u64>],
        scratch: &mut Self::Scratch,
        items: &mut Vec<Self::Item>,
        patience: Patience,
        is_older_ready: &dyn Fn() -> bool,
    ) -> Result<Progress, DataError>;

    /// A number that is another one when what was laid aside can perhaps be gone on with.
    fn loads(&self) -> u64;
}

/// Whether a thread waits for what another is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    None,
    Wait,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Made,
    /// Another thread is at what it needs; [`Work::loads`] as it was before that was seen.
    Waits {
        loads: u64,
    },
    /// An older one comes first.
    StepsBack,
}

/// How much may wait for readers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) batch: BatchRule,
    /// Batches that may wait or be in work, over all readers.
    pub(super) batches: usize,
}

/// See the [module](self).
pub(super) struct Workshop<W: Work> {
    work: W,
    bounds: Bounds,
    floor: Mutex<Floor<W::Item>>,
    /// There may be work, or the workshop is closed.
    has_work: Condvar,
    /// A queue has something for a reader that waits.
    ready: Condvar,
    /// The turn of the oldest batch that is laid aside, and [`Work::loads`] when it was; no turn is as
    /// high where there is none. Both are hints: who reads one of before and one of after is put right
    /// by the lock.
    oldest: AtomicU64,
    oldest_loads: AtomicU64,
}

struct Floor<T> {
    is_closed: bool,
    queues: BTreeMap<u64, Queue<T>>,
    next_reader: u64,
    /// The reader that was served last.
    last_served: u64,
    /// Batches that were begun.
    begun: u64,
    /// Those that were laid aside, by the order in which they were begun.
    laid_aside: BTreeMap<u64, Task<T>>,
}

/// A batch to be made.
struct Task<T> {
    reader: u64,
    number: u64,
    positions: Vec<Range<u64>>,
    /// Its place among all that were begun.
    turn: u64,
    /// What is made of it.
    items: Vec<T>,
    /// [`Work::loads`] before it was seen that it must wait for another, where it must.
    loads: Option<u64>,
}

enum Call<T> {
    Task(Task<T>, Patience),
    /// A reader has reached its end, or failed, and must be told.
    Tell(u64, Wake),
}

impl<W: Work> Workshop<W> {
    pub(super) fn new(work: W, bounds: Bounds) -> Workshop<W> {
        Workshop {
            work,
            bounds,
            floor: Mutex::new(Floor {
                is_closed: false,
                queues: BTreeMap::new(),
                next_reader: 0,
                last_served: 0,
                begun: 0,
                laid_aside: BTreeMap::new(),
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

    /// Lets a reader in.
    pub(super) fn enter(&self, plan: Plan, wake: Wake) -> u64 {
        let mut floor = self.lock();
        let reader = floor.next_reader;
        floor.next_reader += 1;
        floor.queues.insert(reader, Queue::new(plan, wake));
        drop(floor);
        self.has_work.notify_all();
        reader
    }

    /// Lets a reader go.
    pub(super) fn leave(&self, reader: u64) {
        let mut floor = self.lock();
        let queue = floor.queues.remove(&reader);
        let laid_aside: Vec<Task<W::Item>> = floor
            .laid_aside
            .extract_if(.., |_, task| task.reader == reader)
            .map(|(_, t)| t)
            .collect();
        self.tell_oldest(&floor);
        drop(floor);
        for task in &laid_aside {
            self.work.end(reader, &task.positions);
        }
        self.work.leave(reader);
        // The others' shares have grown.
        self.has_work.notify_all();
        drop(queue);
    }

    /// Sends the threads home.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.work.close();
        self.has_work.notify_all();
    }

    /// What the reader gets next, if it is there.
    pub(super) fn try_take(&self, reader: u64) -> Poll<Taken<W::Item>> {
        let mut floor = self.lock();
        let has_put_down = floor.put_down(reader);
        let taken = floor.take(reader);
        drop(floor);
        if has_put_down || taken.is_ready() {
            self.has_work.notify_one();
        }
        taken
    }

    /// What the reader gets next, waiting for it.
    pub(super) fn take(&self, reader: u64) -> Taken<W::Item> {
        let mut floor = self.lock();
        if floor.put_down(reader) {
            self.has_work.notify_one();
        }
        loop {
            if let Poll::Ready(taken) = floor.take(reader) {
                drop(floor);
                self.has_work.notify_one();
                return taken;
            }
            floor = self.ready.wait(floor).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The life of a thread.
    pub(super) fn do_work(&self) {
        let mut scratch = W::Scratch::default();
        while let Some(call) = self.next_call() {
            match call {
                Call::Task(mut task, patience) => {
                    let Task { positions, items, turn, .. } = &mut task;
                    let turn = *turn;
                    let is_older_ready = || self.is_ready_before(turn);
                    let make = || {
                        self.work.make(positions, &mut scratch, items, patience, &is_older_ready)
                    };
                    let failure = match caught(make).and_then(|made| made) {
                        Ok(Progress::Waits { loads }) => {
                            self.lay_aside(Task { loads: Some(loads), ..task });
                            continue;
                        }
                        Ok(Progress::StepsBack) => {
                            self.lay_aside(Task { loads: None, ..task });
                            continue;
                        }
                        Ok(Progress::Made) => None,
                        Err(error) => Some(error),
                    };
                    self.work.end(task.reader, &task.positions);
                    self.finish(task, failure);
                }
                Call::Tell(reader, wake) => self.tell(reader, &wake),
            }
        }
    }

    /// Waits for something to do; none when the workshop is closed.
    fn next_call(&self) -> Option<Call<W::Item>> {
        let mut floor = self.lock();
        loop {
            if floor.is_closed {
                return None;
            }
            let loads = self.work.loads();
            let mut ready = floor.laid_aside.extract_if(.., |_, task| task.loads != Some(loads));
            let ready = ready.next();
            if let Some((_, task)) = ready {
                self.tell_oldest(&floor);
                return Some(Call::Task(task, Patience::None));
            }
            if let Some(call) = floor.next_call(self.bounds) {
                if let Call::Task(Task { reader, positions, .. }, _) = &call {
                    // While no thread can begin a later batch: what this one needs is kept.
                    self.work.begin(*reader, positions);
                }
                return Some(call);
            }
            if let Some((_, task)) = floor.laid_aside.pop_first() {
                self.tell_oldest(&floor);
                return Some(Call::Task(task, Patience::Wait));
            }
            floor = self.has_work.wait(floor).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells the threads which batch is the oldest that is laid aside.
    fn tell_oldest(&self, floor: &Floor<W::Item>) {
        let (oldest, loads) = match floor.laid_aside.first_key_value() {
            // One that stepped back is nobody's to step back for: it waits for an older one.
            Some((&turn, Task { loads: Some(loads), .. })) => (turn, *loads),
            _ => (u64::MAX, 0),
        };
        self.oldest_loads.store(loads, Ordering::Relaxed);
        self.oldest.store(oldest, Ordering::Relaxed);
    }

    /// Whether a batch that was begun before this one, and laid aside, can perhaps be gone on with.
    fn is_ready_before(&self, turn: u64) -> bool {
        self.oldest.load(Ordering::Relaxed) < turn
            && self.oldest_loads.load(Ordering::Relaxed) != self.work.loads()
    }

    /// Keeps a batch for whoever has time for it.
    fn lay_aside(&self, task: Task<W::Item>) {
        let mut floor = self.lock();
        if floor.queues.contains_key(&task.reader) {
            floor.laid_aside.insert(task.turn, task);
            self.tell_oldest(&floor);
            drop(floor);
            self.has_work.notify_one();
        } else {
            drop(floor);
            self.work.end(task.reader, &task.positions);
        }
    }

    fn finish(&self, task: Task<W::Item>, failure: Option<DataError>) {
        let mut floor = self.lock();
        let Some(queue) = floor.queues.get_mut(&task.reader) else { return };
        let is_front = queue.finish(task.number, Made { items: task.items, failure });
        let wake = Arc::clone(&queue.wake);
        drop(floor);
        if is_front {
            self.tell(task.reader, &wake);
        }
    }

    /// Tells a reader that it can go on.
    fn tell(&self, reader: u64, wake: &Wake) {
        self.ready.notify_all();
        if let Err(error) = caught(|| wake()) {
            if let Some(queue) = self.lock().queues.get_mut(&reader) {
                queue.fail(error);
            }
            self.ready.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Floor<W::Item>> {
        // What panics while the lock is held is a plan, and that is caught: the lock is used
        // poisoned or not.
        self.floor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Floor<T> {
    /// The next thing to do, readers taking turns.
    fn next_call(&mut self, Bounds { batch, batches }: Bounds) -> Option<Call<T>> {
        let bound = batches / self.queues.len().max(1);
        let after = self.queues.range(self.last_served + 1..).map(|(&reader, _)| reader);
        let before = self.queues.range(..=self.last_served).map(|(&reader, _)| reader);
        let turns: Vec<u64> = after.chain(before).collect();
        for reader in turns {
            let Some(queue) = self.queues.get_mut(&reader) else { continue };
            if !queue.wants_work(bound) {
                continue;
            }
            self.last_served = reader;
            let must_tell = match caught(|| queue.begin(batch)) {
                Ok(Some((number, positions))) => {
                    let turn = self.begun;
                    self.begun += 1;
                    let task =
                        Task { reader, number, positions, turn, items: Vec::new(), loads: None };
                    return Some(Call::Task(task, Patience::None));
                }
                Ok(None) => queue.is_at_end(),
                Err(error) => queue.fail(error),
            };
            if must_tell {
                return Some(Call::Tell(reader, Arc::clone(&queue.wake)));
            }
        }
        None
    }

    fn put_down(&mut self, reader: u64) -> bool {
        self.queues.get_mut(&reader).is_some_and(Queue::put_down)
    }

    fn take(&mut self, reader: u64) -> Poll<Taken<T>> {
        self.queues.get_mut(&reader).map_or(Poll::Ready(Taken::End), Queue::take)
    }
}

/// Turns a panic into an error: a thread must outlive what it runs.
fn caught<T>(run: impl FnOnce() -> T) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|panic| DataError::DecodingPanic { message: panic_text(&*panic) })
}

#[cfg(test)]
mod tests;
