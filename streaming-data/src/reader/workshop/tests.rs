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
    first: AtomicBool,
    /// Opens the first gate when it is decoded.
    opens_first: Option<u64>,
    /// So are pages from this one on.
    from: u64,
    rest: AtomicBool,
    is_late: AtomicBool,
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Pages {
    fn new(opens_first: Option<u64>, from: u64) -> Pages {
        Pages {
            decoded: BoundedCache::new(100),
            first: AtomicBool::new(false),
            opens_first,
            from,
            rest: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    fn pass(&self, gate: &AtomicBool) {
        if !wait_until(|| gate.load(Ordering::SeqCst)) {
            self.is_late.store(true, Ordering::SeqCst);
        }
    }

    fn decode(&self, page: u64) -> Result<Page, Infallible> {
        if page == 0 {
            self.pass(&self.first);
        }
        if page >= self.from {
            self.pass(&self.rest);
        }
        if self.opens_first == Some(page) {
            self.first.store(true, Ordering::SeqCst);
        }
        Ok(Page(page))
    }
}

/// Whatever becomes of the test, the threads end.
struct Closing<'a>(&'a Workshop<Arc<Pages>>);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let pages = self.0.work();
        pages.first.store(true, Ordering::SeqCst);
        pages.rest.store(true, Ordering::SeqCst);
        self.0.close();
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
        let _closing = Closing(&workshop);
        consume(&workshop, enter(&workshop));
    });
}

/// A reader of 17 batches.
fn enter(workshop: &Workshop<Arc<Pages>>) -> u64 {
    workshop.enter(Box::new(std::iter::once(0..50)), Arc::new(|| {}))
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
    let pages = Arc::new(Pages::new(Some(2), u64::MAX));
    with_two_threads(&pages, 20, read_all);
    assert!(!pages.is_late.load(Ordering::SeqCst), "a thread waited for page 0");
    assert_eq!(pages.begun.load(Ordering::SeqCst), 17);
    assert_eq!(pages.ended.load(Ordering::SeqCst), 17);
}

/// What needs page 0 is made when that is there, before both threads are at pages that are decoded
/// only when a reader has it.
#[test]
fn what_was_laid_aside_comes_before_what_was_not_begun() {
    let pages = Arc::new(Pages::new(Some(2), 5));
    with_two_threads(&pages, 20, |workshop, reader| {
        for batch in 0..3 {
            let Taken::Batch(items) = workshop.take(reader) else { panic!("no batch {batch}") };
            assert_eq!(items[0], (3 * batch, 0));
        }
        assert!(!pages.is_late.load(Ordering::SeqCst), "both threads were further on");
        pages.rest.store(true, Ordering::SeqCst);
    });
}

/// The bound on batches holds for what is laid aside too: then it is waited for.
#[test]
fn what_was_laid_aside_is_waited_for_when_nothing_more_may_be_begun() {
    for batches in [1, 2, 3] {
        let pages = Arc::new(Pages::new(None, u64::MAX));
        with_two_threads(&pages, batches, |workshop, reader| {
            assert!(wait_until(|| pages.begun.load(Ordering::SeqCst) == batches as u64));
            pages.first.store(true, Ordering::SeqCst);
            read_all(workshop, reader);
        });
        assert_eq!(pages.ended.load(Ordering::SeqCst), 17);
    }
}

#[test]
fn what_was_laid_aside_goes_with_its_reader() {
    let pages = Arc::new(Pages::new(None, u64::MAX));
    with_two_threads(&pages, 20, |workshop, reader| {
        // All but those of page 0, of which one is in work.
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 17 - 3));
        workshop.leave(reader);
        let next = enter(workshop);
        pages.first.store(true, Ordering::SeqCst);
        read_all(workshop, next);
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 2 * 17));
    });
    assert_eq!(pages.begun.load(Ordering::SeqCst), 2 * 17);
}
