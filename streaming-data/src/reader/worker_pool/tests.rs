//! Which batches and threads wait for which others.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::cache::memory::{BoundedCache, Weigh};

/// Positions of a batch.
const BATCH: usize = 3;

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Event {
    /// Decoding of a page has begun, or has come to its end.
    Decoding(u64),
    Decoded(u64),
    /// The test lets pages be decoded.
    Go,
    /// The test ends: no decoding waits any more.
    Over,
}

/// The event in place of the decoding of a page.
#[derive(Clone, Copy)]
enum Decoding {
    Fails,
    Panics,
    WaitsFor(Event),
}

/// Items are positions and their pages.
struct Pages {
    /// The page of each position.
    pages: Vec<u64>,
    decoding: Vec<(u64, Decoding)>,
    decoded: BoundedCache<u64, Page>,
    events: Mutex<HashSet<Event>>,
    /// Events that did not happen before the deadline.
    late: Mutex<Vec<Event>>,
    begun: AtomicUsize,
    ended: AtomicUsize,
    most_begun: AtomicUsize,
}

impl Pages {
    fn new(pages: &[u64], decoding: &[(u64, Decoding)]) -> Arc<Pages> {
        Arc::new(Pages {
            pages: pages.to_vec(),
            decoding: decoding.to_vec(),
            decoded: BoundedCache::new(100),
            events: Mutex::default(),
            late: Mutex::default(),
            begun: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            most_begun: AtomicUsize::new(0),
        })
    }

    fn batches(&self) -> usize {
        self.pages.len().div_ceil(BATCH)
    }

    fn happens(&self, event: Event) {
        self.events.lock().unwrap().insert(event);
    }

    fn wait_for(&self, event: Event) {
        let has_happened = || {
            let events = self.events.lock().unwrap();
            events.contains(&event) || events.contains(&Event::Over)
        };
        if !wait_until(has_happened) {
            self.late.lock().unwrap().push(event);
        }
    }

    fn decode(&self, page: u64) -> Result<Page, DataError> {
        self.happens(Event::Decoding(page));
        for (_, decoding) in self.decoding.iter().filter(|(of, _)| *of == page) {
            match decoding {
                Decoding::Fails => {
                    return Err(DataError::MissingShard { path: page.to_string().into() });
                }
                Decoding::Panics => panic!("page {page}"),
                Decoding::WaitsFor(event) => self.wait_for(*event),
            }
        }
        self.happens(Event::Decoded(page));
        Ok(Page(page))
    }
}

impl Work for Arc<Pages> {
    type Item = (u64, u64);
    type Scratch = ();

    fn begin(&self, _: u64, _: &[Range<u64>]) {
        let begun = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let now = begun - self.ended.load(Ordering::SeqCst);
        self.most_begun.fetch_max(now, Ordering::SeqCst);
    }

    fn end(&self, _: u64, _: &[Range<u64>]) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn remove_reader(&self, _: u64) {}

    fn close(&self) {}

    fn make(
        &self,
        positions: &[Range<u64>],
        (): &mut (),
        items: &mut Vec<(u64, u64)>,
        if_busy: IfBusy,
        is_older_ready: &dyn Fn() -> bool,
    ) -> Result<Progress, DataError> {
        for position in positions.iter().cloned().flatten().skip(items.len()) {
            let key = self.pages[position as usize];
            let decode = || self.decode(key);
            let page = match if_busy {
                IfBusy::Wait => self.decoded.get_or_load(key, decode)?,
                IfBusy::Defer => {
                    let (loads, yields) = (self.decoded.loads(), is_older_ready());
                    match self.decoded.try_get_or_load(key, !yields, decode)? {
                        Some(page) => page,
                        None if yields => return Ok(Progress::Yields),
                        None => return Ok(Progress::Waits { loads }),
                    }
                }
            };
            items.push((position, page.0));
        }
        Ok(Progress::Made)
    }

    fn loads(&self) -> u64 {
        self.decoded.loads()
    }
}

/// Ends the threads even where the test fails.
struct Closing<'a>(&'a WorkerPool<Arc<Pages>>);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.work().happens(Event::Over);
        self.0.close();
    }
}

/// Lets two threads work, on so many batches at once, until `consume` is done.
fn with_two_threads(
    pages: &Arc<Pages>,
    batches: usize,
    consume: impl FnOnce(&WorkerPool<Arc<Pages>>, u64),
) {
    let batch = BatchRule { samples: BATCH as u64, ends_with_range: false };
    let pool = WorkerPool::new(Arc::clone(pages), Bounds { batch, batches });
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| pool.run_worker());
        }
        let _closing = Closing(&pool);
        consume(&pool, enter(&pool));
    });
    assert_eq!(*pages.late.lock().unwrap(), []);
}

/// A reader of all positions.
fn enter(pool: &WorkerPool<Arc<Pages>>) -> u64 {
    let positions = 0..pool.work().pages.len() as u64;
    pool.add_reader(Box::new(std::iter::once(positions)), Arc::new(|| {}))
}

fn take(pool: &WorkerPool<Arc<Pages>>, reader: u64) -> Taken<(u64, u64)> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Poll::Ready(taken) = pool.try_take(reader) {
            return taken;
        }
        assert!(Instant::now() < deadline, "a batch does not come");
        thread::yield_now();
    }
}

/// Reads to the end or a failure: how many positions were read.
fn read(pool: &WorkerPool<Arc<Pages>>, reader: u64) -> (usize, Option<DataError>) {
    let mut read = 0;
    loop {
        match take(pool, reader) {
            Taken::Batch(items) => {
                for item in items {
                    assert_eq!(item, (read as u64, pool.work().pages[read]));
                    read += 1;
                }
            }
            Taken::Failure(error) => return (read, Some(error)),
            Taken::End => return (read, None),
        }
    }
}

fn read_all(pool: &WorkerPool<Arc<Pages>>, reader: u64) {
    let (read, failure) = read(pool, reader);
    assert_eq!((read, failure.is_none()), (pool.work().pages.len(), true), "{failure:?}");
}

fn assert_each_ended(pages: &Pages, batches: usize) {
    let (begun, ended) = (&pages.begun, &pages.ended);
    assert_eq!((begun.load(Ordering::SeqCst), ended.load(Ordering::SeqCst)), (batches, batches));
}

/// In the order in which shards store samples: eight to a page.
fn as_stored(pages: u64) -> Vec<u64> {
    (0..pages).flat_map(|page| [page; 8]).collect()
}

/// Page 0 is decoded only after page 2, which one thread alone would never reach.
#[test]
fn a_thread_begins_the_next_batch_in_place_of_waiting() {
    let waits = Decoding::WaitsFor(Event::Decoded(2));
    let pages = Pages::new(&as_stored(6), &[(0, waits)]);
    with_two_threads(&pages, 20, read_all);
    assert_each_ended(&pages, pages.batches());
}

/// Both threads come to pages that are decoded only once a reader has the batches that need page 0.
#[test]
fn deferred_batches_come_before_those_not_begun() {
    let after = |event| Decoding::WaitsFor(event);
    let gates = [(0, after(Event::Decoded(2))), (5, after(Event::Go)), (6, after(Event::Go))];
    let pages = Pages::new(&as_stored(7), &gates);
    with_two_threads(&pages, 20, |pool, reader| {
        for batch in 0..3 {
            let Taken::Batch(items) = take(pool, reader) else { panic!("no batch {batch}") };
            assert_eq!(items[0], (3 * batch, 0));
        }
        pages.happens(Event::Go);
    });
}

/// The first batch waits for page 1, which the thread of the second decodes while the other is held
/// up in the third; the next page of the second comes after the first batch.
#[test]
fn a_later_batch_yields_before_it_decodes_more() {
    let after = |event| Decoding::WaitsFor(event);
    let gates = [
        (0, after(Event::Decoding(1))),
        (1, after(Event::Decoding(3))),
        (2, after(Event::Go)),
        (3, after(Event::Go)),
    ];
    let pages = Pages::new(&[0, 1, 1, 1, 2, 2, 3, 3, 3], &gates);
    with_two_threads(&pages, 20, |pool, reader| {
        let Taken::Batch(items) = take(pool, reader) else { panic!("no batch") };
        assert_eq!(items, [(0, 0), (1, 1), (2, 1)]);
        pages.happens(Event::Go);
        let Taken::Batch(items) = take(pool, reader) else { panic!("no batch") };
        assert_eq!(items, [(3, 1), (4, 2), (5, 2)]);
    });
}

/// With two batches at once the second is waited for: it is made when page 0 is there, though the
/// first goes on to a page that is held up.
#[test]
fn a_deferred_batch_is_waited_for_when_no_other_may_be_begun() {
    let after = |event| Decoding::WaitsFor(event);
    let pages = Pages::new(&[0, 0, 1, 0, 0, 0], &[(0, after(Event::Go)), (1, after(Event::Over))]);
    with_two_threads(&pages, 2, |pool, reader| {
        assert!(wait_until(|| pages.begun.load(Ordering::SeqCst) == 2));
        pages.happens(Event::Go);
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 1), "no thread waited");
        pages.happens(Event::Over);
        read_all(pool, reader);
    });
    assert_each_ended(&pages, 2);
}

/// Deferred or not, no more batches are begun than the bound says.
#[test]
fn the_bound_counts_deferred_batches() {
    for batches in [1, 2, 3] {
        let pages = Pages::new(&as_stored(6), &[(0, Decoding::WaitsFor(Event::Go))]);
        with_two_threads(&pages, batches, |pool, reader| {
            assert!(wait_until(|| pages.begun.load(Ordering::SeqCst) == batches));
            pages.happens(Event::Go);
            read_all(pool, reader);
        });
        assert_each_ended(&pages, pages.batches());
        assert!(pages.most_begun.load(Ordering::SeqCst) <= batches, "of {batches}");
    }
}

#[test]
fn deferred_batches_go_with_their_reader() {
    let pages = Pages::new(&as_stored(6), &[(0, Decoding::WaitsFor(Event::Go))]);
    let all = pages.batches();
    with_two_threads(&pages, 20, |pool, reader| {
        // All except the batches of page 0, one of which is in work.
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == all - 3));
        pool.remove_reader(reader);
        let next = enter(pool);
        pages.happens(Event::Go);
        read_all(pool, next);
        assert!(wait_until(|| pages.ended.load(Ordering::SeqCst) == 2 * all));
    });
    assert_each_ended(&pages, 2 * all);
}

/// A batch that fails after it was deferred keeps the items made before.
#[test]
fn a_failure_comes_behind_the_items_made_before_the_batch_was_deferred() {
    for decoding in [Decoding::Fails, Decoding::Panics] {
        // The second batch has page 0 and waits for page 1, then comes to page 2.
        let gates = [(1, Decoding::WaitsFor(Event::Decoding(3))), (2, decoding)];
        let pages = Pages::new(&[0, 0, 1, 0, 1, 2, 3, 3, 3], &gates);
        with_two_threads(&pages, 20, |pool, reader| {
            let (read, failure) = read(pool, reader);
            assert_eq!(read, 5);
            match decoding {
                Decoding::Fails => assert!(matches!(failure, Some(DataError::MissingShard { .. }))),
                _ => assert!(matches!(failure, Some(DataError::DecodingPanic { .. }))),
            }
        });
    }
}
