//! Credit: a bound on the bytes that a sender has in flight.
//!
//! Timely has no flow control: its queues have no bound. So a sender takes credit for each chunk, and the receiver
//! gives it back once it has consumed the chunk. A window of a few MB keeps memory bounded and the network's
//! slabs warm in the cache; it never changes the numerics. Consuming a chunk never waits for another worker, so credit
//! always comes back.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// The default credit window: a few chunks to each of a few peers.
pub const DEFAULT_WINDOW_BYTES: usize = 4 << 20;

/// Credit that comes back to a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// The worker that took it.
    pub to: u32,
    /// The bytes that were consumed.
    pub bytes: u64,
}

/// A sender's account.
#[derive(Clone, Debug)]
pub struct CreditWindow {
    window_bytes: u64,
    in_flight_bytes: u64,
}

impl CreditWindow {
    /// A window of `window_bytes`, all of it available.
    pub fn new(window_bytes: usize) -> Self {
        Self { window_bytes: window_bytes as u64, in_flight_bytes: 0 }
    }

    /// Takes credit for `bytes` and says whether there was any. A message larger than the window is
    /// let through alone, so that every window makes progress.
    pub fn take(&mut self, bytes: usize) -> bool {
        let after = self.in_flight_bytes + bytes as u64;
        let granted = self.in_flight_bytes == 0 || after <= self.window_bytes;
        if granted {
            self.in_flight_bytes = after;
        }
        granted
    }

    /// Takes credit back. More than was taken counts as all of it: a peer that returns too much only receives
    /// its own messages sooner.
    pub fn give_back(&mut self, bytes: u64) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
    }
}

/// The credit that a receiver still owes, by sender.
#[derive(Clone, Debug, Default)]
pub struct CreditLedger {
    owed: BTreeMap<u32, u64>,
}

impl CreditLedger {
    /// Notes that `bytes` of worker `from` were consumed.
    pub fn consumed(&mut self, from: u32, bytes: usize) {
        *self.owed.entry(from).or_default() += bytes as u64;
    }

    /// Takes everything that is owed, one entry a sender.
    pub fn settle(&mut self) -> impl Iterator<Item = Credit> {
        std::mem::take(&mut self.owed).into_iter().map(|(to, bytes)| Credit { to, bytes })
    }

    /// Whether nothing is owed.
    pub fn is_settled(&self) -> bool {
        self.owed.is_empty()
    }
}

/// Messages that wait for credit, first in, first out.
#[derive(Debug)]
pub struct PacedQueue<M> {
    window: CreditWindow,
    waiting: VecDeque<(usize, M)>,
}

impl<M> PacedQueue<M> {
    /// An empty queue with a window of its own.
    pub fn new(window_bytes: usize) -> Self {
        Self { window: CreditWindow::new(window_bytes), waiting: VecDeque::new() }
    }

    /// Adds a message of `bytes`.
    pub fn push(&mut self, bytes: usize, message: M) {
        self.waiting.push_back((bytes, message));
    }

    /// The next message, where credit allows it.
    pub fn pop(&mut self) -> Option<M> {
        let &(bytes, _) = self.waiting.front()?;
        if self.window.take(bytes) { self.waiting.pop_front().map(|(_, m)| m) } else { None }
    }

    /// Takes credit back.
    pub fn give_back(&mut self, bytes: u64) {
        self.window.give_back(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_bounds_what_is_in_flight() {
        let mut window = CreditWindow::new(10);
        assert!(window.take(4) && window.take(6));
        assert!(!window.take(1));
        assert_eq!(window.in_flight_bytes, 10);
        window.give_back(4);
        assert!(!window.take(5));
        assert!(window.take(4));
    }

    #[test]
    fn a_message_above_the_window_goes_alone() {
        let mut window = CreditWindow::new(0);
        assert!(window.take(100));
        assert!(!window.take(1));
        window.give_back(1_000);
        assert_eq!(window.in_flight_bytes, 0);
        assert!(window.take(1));
    }

    #[test]
    fn a_ledger_settles_once_for_each_sender() {
        let mut ledger = CreditLedger::default();
        ledger.consumed(2, 5);
        ledger.consumed(0, 1);
        ledger.consumed(2, 7);
        let settled: Vec<_> = ledger.settle().collect();
        assert_eq!(settled, [Credit { to: 0, bytes: 1 }, Credit { to: 2, bytes: 12 }]);
        assert!(ledger.is_settled());
    }

    #[test]
    fn a_paced_queue_keeps_order_and_waits() {
        let mut queue = PacedQueue::new(8);
        for message in 0..4 {
            queue.push(4, message);
        }
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(0), Some(1), None]);
        queue.give_back(4);
        assert_eq!([queue.pop(), queue.pop()], [Some(2), None]);
    }
}
