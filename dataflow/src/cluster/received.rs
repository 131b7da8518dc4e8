//! How much of a peer's messages waits to be consumed here, and the most that may.
//!
//! Timely's receiving threads take all that a peer sends, and keep it until the workers have read
//! it: for ever, where a message is for a channel that never comes to be. They get their memory
//! from a function of ours, so that it can be counted: by the threads that receive, which each
//! serve one peer, until it is freed.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use timely::communication::allocator::zero_copy::bytes_slab::BytesRefill;

/// Memory that holds the messages of one peer.
pub(super) struct Received {
    held_bytes: AtomicUsize,
    limit_bytes: usize,
    exceeded: AtomicBool,
}

thread_local! {
    /// The peer whose messages this thread receives.
    static RECEIVING: RefCell<Option<Arc<Received>>> = const { RefCell::new(None) };
}

impl Received {
    pub(super) fn new(limit_bytes: usize) -> Arc<Self> {
        let (held_bytes, exceeded) = (AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Self { held_bytes, limit_bytes, exceeded })
    }

    /// Counts allocations of this thread from now on as the peer's messages.
    pub(super) fn count_here(self: &Arc<Self>) {
        RECEIVING.with_borrow_mut(|receiving| {
            receiving.get_or_insert_with(|| Arc::clone(self));
        });
    }

    /// Whether the peer has ever sent more than the limit.
    pub(super) fn exceeded(&self) -> bool {
        self.exceeded.load(Ordering::Relaxed)
    }

    /// The most that may wait.
    pub(super) fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }
}

/// Memory of timely's connections.
struct Slab {
    bytes: Vec<u8>,
    counted: Option<Arc<Received>>,
}

impl Slab {
    fn new(length: usize) -> Self {
        let counted = RECEIVING.with_borrow(Clone::clone);
        if let Some(received) = &counted {
            let held = received.held_bytes.fetch_add(length, Ordering::Relaxed) + length;
            if held > received.limit_bytes {
                received.exceeded.store(true, Ordering::Relaxed);
            }
        }
        Self { bytes: vec![0; length], counted }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(received) = &self.counted {
            received.held_bytes.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        }
    }
}

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// Where timely gets its memory.
pub(super) fn counted_memory() -> BytesRefill {
    BytesRefill { logic: Arc::new(|length| Box::new(Slab::new(length))), limit: None }
}
