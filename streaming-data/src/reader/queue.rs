//! One reader's plan, cut into batches, and its batches that are being made or wait to be read.

use std::{collections::VecDeque, ops::Range, sync::Arc, task::Poll};

use crate::error::DataError;

/// Ranges of positions to read, one after the other.
pub(super) type Plan = Box<dyn Iterator<Item = Range<u64>> + Send>;

/// Called when a reader that had nothing ready has a batch, an error or its end.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

/// How the positions of a plan become batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchRule {
    /// Most positions of a batch.
    pub(super) samples: u64,
    /// Whether a batch ends where a range of the plan does.
    pub(super) ends_with_range: bool,
}

/// An item of a reader's queue.
pub(super) enum Taken<T> {
    /// Never empty.
    Batch(Vec<T>),
    Failure(DataError),
    End,
}

/// A batch that a thread is done with.
pub(super) struct Made<T> {
    /// All items, or the items before the failure.
    pub(super) items: Vec<T>,
    pub(super) failure: Option<DataError>,
}

/// A batch in plan order.
enum Slot<T> {
    /// A thread makes it, or it is deferred.
    InProgress,
    Done(Made<T>),
}

/// See the [module](self).
pub(super) struct Queue<T> {
    plan: Plan,
    /// The rest of the plan's last range.
    range: Range<u64>,
    /// No batch follows the batches in `slots`.
    is_complete: bool,
    slots: VecDeque<Slot<T>>,
    /// Number of the batch at the front of `slots`.
    front: u64,
    /// Whether the reader still holds the batch that it took last.
    reader_holds_batch: bool,
    pub(super) wake: Wake,
}

impl<T> Queue<T> {
    pub(super) fn new(plan: Plan, wake: Wake) -> Queue<T> {
        Queue {
            plan,
            range: 0..0,
            is_complete: false,
            slots: VecDeque::new(),
            front: 0,
            reader_holds_batch: false,
            wake,
        }
    }

    /// Whether there may be another batch to begin, with at most `bound` batches unread.
    pub(super) fn wants_work(&self, bound: usize) -> bool {
        let unread = self.slots.len() + usize::from(self.reader_holds_batch);
        !self.is_complete && (self.slots.is_empty() || unread < bound)
    }

    /// Begins the next batch: its number and positions, or none at the end of the plan.
    pub(super) fn begin(&mut self, batch: BatchRule) -> Option<(u64, Vec<Range<u64>>)> {
        let mut ranges = Vec::new();
        let mut room = batch.samples;
        while room > 0 {
            if self.range.is_empty() {
                match self.plan.next() {
                    Some(range) => self.range = range,
                    None => {
                        self.is_complete = true;
                        break;
                    }
                }
                continue;
            }
            let length = room.min(self.range.end - self.range.start);
            let end = self.range.start + length;
            ranges.push(self.range.start..end);
            self.range.start = end;
            room -= length;
            if batch.ends_with_range {
                break;
            }
        }
        if ranges.is_empty() {
            return None;
        }
        self.slots.push_back(Slot::InProgress);
        Some((self.front + self.slots.len() as u64 - 1, ranges))
    }

    /// Puts a batch in its place; whether it is the one that the reader waits for.
    pub(super) fn finish(&mut self, number: u64, made: Made<T>) -> bool {
        self.is_complete |= made.failure.is_some();
        let at = (number - self.front) as usize;
        self.slots[at] = Slot::Done(made);
        at == 0
    }

    /// Ends the queue with a failure that belongs to no batch, after the batches that are begun; whether
    /// the reader waits for the failure.
    pub(super) fn fail(&mut self, error: DataError) -> bool {
        self.is_complete = true;
        self.slots.push_back(Slot::Done(Made { items: Vec::new(), failure: Some(error) }));
        self.slots.len() == 1
    }

    /// Whether nothing is left for the reader but the end.
    pub(super) fn is_at_end(&self) -> bool {
        self.is_complete && self.slots.is_empty()
    }

    /// The reader is done with the batch that it took last; whether it held one.
    pub(super) fn return_batch(&mut self) -> bool {
        std::mem::take(&mut self.reader_holds_batch)
    }

    /// The reader's next batch, error or end, if it is ready.
    pub(super) fn take(&mut self) -> Poll<Taken<T>> {
        let Made { items, failure } = match self.slots.pop_front() {
            Some(Slot::Done(made)) => made,
            Some(Slot::InProgress) => {
                self.slots.push_front(Slot::InProgress);
                return Poll::Pending;
            }
            None if self.is_complete => return Poll::Ready(Taken::End),
            None => return Poll::Pending,
        };
        match failure {
            Some(failure) if items.is_empty() => {
                self.front += 1;
                return Poll::Ready(Taken::Failure(failure));
            }
            // The items before the failure come first.
            Some(_) => self.slots.push_front(Slot::Done(Made { items: Vec::new(), failure })),
            None => self.front += 1,
        }
        self.reader_holds_batch = true;
        Poll::Ready(Taken::Batch(items))
    }
}
