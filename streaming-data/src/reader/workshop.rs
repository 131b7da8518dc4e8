//! Where the threads of a decoder work: they take batches from the readers' queues in turn.
//!
//! One lock holds all queues; it is taken a few times per batch, never per sample, and never while
//! something is read, decoded, or called back.

use std::{
    collections::BTreeMap,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use super::{
    Sample,
    queue::{Plan, Queue, Taken, Wake},
};
use crate::{
    cache::BoundedCache,
    data_set::DataSet,
    error::DataError,
    fetch::Fetcher,
    order::{CanonicalOrder, SampleId},
    shard::{DecodedRows, panic_text},
};

/// Samples are handed over in batches of about this size.
const BATCH_BYTES: usize = 128 << 10;

/// See the [module](self).
pub(super) struct Workshop {
    data_set: DataSet,
    order: CanonicalOrder,
    fetcher: Fetcher,
    /// Row groups by shard and number.
    decoded: BoundedCache<(usize, usize), DecodedRows>,
    batch_samples: u64,
    /// Batches that may wait or be in work, over all readers.
    batches: usize,
    floor: Mutex<Floor>,
    /// There may be work, or the workshop is closed.
    work: Condvar,
    /// A queue has something for a reader that waits.
    ready: Condvar,
}

struct Floor {
    is_closed: bool,
    queues: BTreeMap<u64, Queue>,
    next_reader: u64,
    /// The reader that was served last.
    last_served: u64,
}

/// A batch to be made.
struct Task {
    reader: u64,
    number: u64,
    positions: Vec<Range<u64>>,
}

enum Call {
    Task(Task),
    /// A reader has reached its end, or failed, and must be told.
    Tell(u64, Wake),
}

impl Workshop {
    pub(super) fn new(
        data_set: DataSet,
        order: CanonicalOrder,
        fetcher: Fetcher,
        memory_bytes: usize,
    ) -> Workshop {
        let sample_bytes = size_of::<Sample>() + (data_set.seq_len() + 1) * size_of::<u32>();
        let waiting_bytes = memory_bytes / 4;
        // A small bound makes small batches before it makes few.
        let batch_bytes = BATCH_BYTES.min(waiting_bytes / 4);
        let batch_samples = (batch_bytes / sample_bytes).clamp(1, 64);
        Workshop {
            data_set,
            order,
            fetcher,
            decoded: BoundedCache::new(memory_bytes - waiting_bytes),
            batch_samples: batch_samples as u64,
            batches: waiting_bytes / (batch_samples * sample_bytes),
            floor: Mutex::new(Floor {
                is_closed: false,
                queues: BTreeMap::new(),
                next_reader: 0,
                last_served: 0,
            }),
            work: Condvar::new(),
            ready: Condvar::new(),
        }
    }

    pub(super) fn data_set(&self) -> &DataSet {
        &self.data_set
    }

    /// Lets a reader in.
    pub(super) fn enter(&self, plan: Plan, wake: Wake) -> u64 {
        let mut floor = self.lock();
        let reader = floor.next_reader;
        floor.next_reader += 1;
        floor.queues.insert(reader, Queue::new(plan, wake));
        drop(floor);
        self.work.notify_all();
        reader
    }

    /// Lets a reader go.
    pub(super) fn leave(&self, reader: u64) {
        let queue = self.lock().queues.remove(&reader);
        self.fetcher.leave(reader);
        // The others' shares have grown.
        self.work.notify_all();
        drop(queue);
    }

    /// Sends the threads home.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.fetcher.close();
        self.work.notify_all();
    }

    /// What the reader gets next, if it is there.
    pub(super) fn try_take(&self, reader: u64) -> Poll<Taken> {
        let taken = self.lock().take(reader);
        if taken.is_ready() {
            self.work.notify_one();
        }
        taken
    }

    /// What the reader gets next, waiting for it.
    pub(super) fn take(&self, reader: u64) -> Taken {
        let mut floor = self.lock();
        loop {
            if let Poll::Ready(taken) = floor.take(reader) {
                drop(floor);
                self.work.notify_one();
                return taken;
            }
            floor = self.ready.wait(floor).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The life of a thread.
    pub(super) fn work(&self) {
        while let Some(call) = self.next_call() {
            match call {
                Call::Task(task) => {
                    let samples = caught(|| self.decode(&task)).and_then(|made| made);
                    self.fetcher.exit(task.reader, task.positions[0].start);
                    self.finish(&task, samples);
                }
                Call::Tell(reader, wake) => self.tell(reader, &wake),
            }
        }
    }

    /// Waits for something to do; none when the workshop is closed.
    fn next_call(&self) -> Option<Call> {
        let mut floor = self.lock();
        loop {
            if floor.is_closed {
                return None;
            }
            if let Some(call) = floor.next_call(self.batches, self.batch_samples) {
                if let Call::Task(Task { reader, positions, .. }) = &call {
                    // While no thread can begin a later batch: what this one needs is kept.
                    let end = positions[positions.len() - 1].end;
                    self.fetcher.enter(*reader, positions[0].start..end);
                }
                return Some(call);
            }
            floor = self.work.wait(floor).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn decode(&self, task: &Task) -> Result<Vec<Sample>, DataError> {
        let positions = || task.positions.iter().cloned().flatten();
        let ids: Vec<SampleId> = positions().map(|at| self.order.sample_at(at)).collect();
        self.fetcher.begin(&ids, |shard, group| self.decoded.holds(&(shard, group)))?;
        let mut samples = Vec::with_capacity(self.batch_samples as usize);
        for (position, id) in positions().zip(ids) {
            let footer = self.data_set.footer(id.shard, &self.fetcher)?;
            let (group, first_row) = footer.group_of(id.row);
            let rows = self.decoded.get_or_load((id.shard, group), || {
                self.data_set.decode(id.shard, &footer, group, &self.fetcher)
            })?;
            samples.push(Sample { position, tokens: rows.row((id.row - first_row) as usize) });
        }
        Ok(samples)
    }

    fn finish(&self, task: &Task, samples: Result<Vec<Sample>, DataError>) {
        let mut floor = self.lock();
        let Some(queue) = floor.queues.get_mut(&task.reader) else { return };
        let is_front = queue.finish(task.number, samples);
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

    fn lock(&self) -> MutexGuard<'_, Floor> {
        // What panics while the lock is held is a plan, and that is caught: the lock is used
        // poisoned or not.
        self.floor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Floor {
    /// The next thing to do, readers taking turns.
    fn next_call(&mut self, batches: usize, batch_samples: u64) -> Option<Call> {
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
            let must_tell = match caught(|| queue.begin(batch_samples)) {
                Ok(Some((number, positions))) => {
                    return Some(Call::Task(Task { reader, number, positions }));
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

    fn take(&mut self, reader: u64) -> Poll<Taken> {
        self.queues.get_mut(&reader).map_or(Poll::Ready(Taken::End), Queue::take)
    }
}

/// Turns a panic into an error: a thread must outlive what it runs.
fn caught<T>(run: impl FnOnce() -> T) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|panic| DataError::DecodingPanic { message: panic_text(&*panic) })
}
