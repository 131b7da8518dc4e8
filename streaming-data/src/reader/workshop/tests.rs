//! Who waits for whom.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::cache::{BoundedCache, Weigh};

/// Positions that share a page.
const PAGE: u64 = 8;

/// Long enough for any machine, so that a hang fails instead.
const DEADLINE: Duration = Duration::from_secs(60);

fn wait_until(is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::yield_now();
    }
    true
}

/// A decoded page, by its number.
struct Page(u64);

impl Weigh for Page {
    fn weight_bytes(&self) -> usize {
        1
    }
}

/// Items are positions and the pages that they were found in.
struct Pages {
    decoded: BoundedCache<u64, Page>,
    /// Page 0 is decoded when this is true, or the deadline has passed.
    gate: AtomicBool,
    was_in_time: AtomicBool,
    /// Opens the gate when it is decoded.
    opens: Option<u64>,
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Pages {
    fn new(opens: Option<u64>) -> Pages {
        Pages {
            decoded: BoundedCache::new(100),
            gate: AtomicBool::new(false),
            was_in_time: AtomicBool::new(false),
            opens,
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    fn decode(&self, page: u64) -> Result<Page, Infallible> {
        if page == 0 {
            let was_in_time = wait_until(|| self.gate.load(Ordering::SeqCst));
            self.was_in_time.store(was_in_time, Ordering::SeqCst);
        }
        if self.opens == Some(page) {
            self.gate.store(true, Ordering::SeqCst);
        }
        Ok(Page(page))
    }
}

impl Work for Arc<Pages> {
    type Item = (u64, u64);
    type Scratch = ();

    fn begin(&self, _: u64, _: &[Range<u64>]) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self, _: u64, _: &[Range<u64>]) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self, _: u64) {}

    fn close(&self) {}

    fn make(
        &self,
        positions: &[Range<u64>],
        (): &mut (),
        items: &mut Vec<(u64, u64)>,
        patience: Patience,
    ) -> Result<Progress, DataError> {
        for position in positions.iter().cloned().flatten().skip(items.len()) {
            let loads = self.decoded.loads();
            let (key, decode) = (position / PAGE, || self.decode(position / PAGE));
            let page = match patience {
                Patience::Wait => self.decoded.get_or_load(key, decode).map(Some),
                Patience::None => self.decoded.try_get_or_load(key, decode),
            };
            match page {
                Ok(Some(page)) => items.push((position, page.0)),
                Ok(None) => return Ok(Progress::Waits { loads }),
            }
        }
        Ok(Progress::Made)
    }

    fn loads(&self) -> u64 {
        self.decoded.loads()
    }
}

/// Lets two threads work on batches of three, of which so many may wait, until `consume` is done.
fn with_two_threads(
    pages: &Arc<Pages>,
    batches: usize,
    consume: impl FnOnce(&Workshop<Arc<Pages>>, u64),
) {
    let batch = BatchRule { samples: 3, ends_with_range: false };
    let workshop = Workshop::new(Arc::clone(pages), Bounds { batch, batches });
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| workshop.do_work());
        }
        let reader = workshop.enter(Box::new(std::iter::once(0..50)), Arc::new(|| {}));
        consume(&workshop, reader);
        workshop.close();
    });
}

fn read_all(workshop: &Workshop<Arc<Pages>>, reader: u64) {
    let mut expected = (0..50).map(|position| (position, position / PAGE));
    while let Taken::Batch(items) = workshop.take(reader) {
        for item in items {
            assert_eq!(Some(item), expected.next());
        }
    }
    assert_eq!(expected.next(), None);
}

/// Page 0 is decoded only after page 2 has been: two batches want nothing else, and one wants it and
/// page 1.
#[test]
fn a_thread_begins_what_needs_nothing_that_another_is_at() {
    let pages = Arc::new(Pages::new(Some(2)));
    with_two_threads(&pages, 20, read_all);
    assert!(pages.was_in_time.load(Ordering::SeqCst), "a thread waited for page 0");
    assert_eq!(pages.begun.load(Ordering::SeqCst), 17);
    assert_eq!(pages.ended.load(Ordering::SeqCst), 17);
}

/// The bound on batches holds for what is laid aside too: then it is waited for.
#[test]
fn what_was_laid_aside_is_waited_for_when_nothing_more_may_be_begun() {
    for batches in [1, 2, 3] {
        let pages = Arc::new(Pages::new(None));
        with_two_threads(&pages, batches, |workshop, reader| {
            assert!(wait_until(|| pages.begun.load(Ordering::SeqCst) == batches as u64));
            pages.gate.store(true, Ordering::SeqCst);
            read_all(workshop, reader);
        });
        assert_eq!(pages.ended.load(Ordering::SeqCst), 17);
    }
}

#[test]
fn what_was_laid_aside_goes_with_its_reader() {
    let pages = Arc::new(Pages::new(None));
    with_two_threads(&pages, 20, |workshop, reader| {
        // All but those of page 0, of which one is in work.
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 17 - 3));
        workshop.leave(reader);
        let next = workshop.enter(Box::new(std::iter::once(0..50)), Arc::new(|| {}));
        pages.gate.store(true, Ordering::SeqCst);
        read_all(workshop, next);
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 2 * 17));
    });
    assert_eq!(pages.begun.load(Ordering::SeqCst), 2 * 17);
}
