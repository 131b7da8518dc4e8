//! How fast a reader yields, and the stage that bounds it.
//!
//! Three things work side by side: the source of the shards, the threads that decode them, and the one consumer. The
//! consumer waits where the others are slower; the threads that decode have a processor, or wait for one,
//! where they are the slower of these two.

use std::task::Poll;
use std::time::{Duration, Instant};

use tidemill_streaming_data::DataError;
use tidemill_streaming_data::reader::Reader;

/// A unit that a reader yields.
pub(super) trait Read {
    /// Samples or rows.
    fn count(&self) -> u64;
    /// Memory that they take.
    fn bytes(&self) -> u64;
}

/// The limits of a measurement.
pub(super) struct Limits {
    /// Samples or rows of the first batch.
    pub(super) batch: u64,
    pub(super) duration: Duration,
    /// Threads that decode.
    pub(super) threads: usize,
}

/// See the [module](self).
pub(super) struct Pace {
    /// Samples or rows.
    pub(super) per_second: f64,
    pub(super) megabytes_per_second: f64,
    /// From opening the data set.
    pub(super) first_batch_seconds: f64,
    /// Share of the time for which the consumer waited.
    pub(super) consumer_waited: f64,
    /// Share of the time for which the threads that decode had a processor or wanted one, where the system says so.
    pub(super) decoding_busy: Option<f64>,
}

/// The stage that bounds the speed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bound {
    Consumer,
    Decoding,
    Source,
}

impl Bound {
    pub(super) fn name(self) -> &'static str {
        match self {
            Bound::Consumer => "consumer",
            Bound::Decoding => "decoding",
            Bound::Source => "source",
        }
    }
}

impl Pace {
    /// Reads a batch and then for as long as the limits say.
    ///
    /// # Errors
    /// Faults of the data.
    pub(super) fn of<T: Read>(
        reader: Reader<T>,
        opened: Instant,
        limits: Limits,
    ) -> Result<Pace, DataError> {
        let mut consumer = Consumer { reader, waited: Duration::ZERO, count: 0, bytes: 0 };
        consumer.take(limits.batch)?;
        let first_batch_seconds = opened.elapsed().as_secs_f64();
        let busy_before = decoding_nanoseconds();
        (consumer.waited, consumer.count, consumer.bytes) = (Duration::ZERO, 0, 0);
        let started = Instant::now();
        while started.elapsed() < limits.duration {
            consumer.take(limits.batch)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let thread_seconds = seconds * limits.threads as f64;
        let busy = busy_before.zip(decoding_nanoseconds());
        let busy_seconds = busy.map(|(before, after)| after.saturating_sub(before) as f64 / 1e9);
        Ok(Pace {
            per_second: consumer.count as f64 / seconds,
            megabytes_per_second: consumer.bytes as f64 / seconds / 1e6,
            first_batch_seconds,
            consumer_waited: (consumer.waited.as_secs_f64() / seconds).min(1.0),
            decoding_busy: busy_seconds.map(|busy| (busy / thread_seconds).min(1.0)),
        })
    }

    /// The stage that bounds the speed, if that is known.
    pub(super) fn bound_by(&self) -> Option<Bound> {
        match self.decoding_busy {
            _ if self.consumer_waited < 0.5 => Some(Bound::Consumer),
            Some(busy) if busy >= 0.5 => Some(Bound::Decoding),
            Some(_) => Some(Bound::Source),
            None => None,
        }
    }

    /// The measurements that speak for it.
    pub(super) fn reasons(&self) -> String {
        let waited = format!("the consumer waited {:.0} % of the time", self.consumer_waited * 1e2);
        match self.decoding_busy {
            Some(busy) => {
                format!("{waited}, the threads that decode were busy {:.0} %", busy * 1e2)
            }
            None => waited,
        }
    }
}

/// Takes a reader's items.
struct Consumer<T> {
    reader: Reader<T>,
    waited: Duration,
    count: u64,
    bytes: u64,
}

impl<T: Read> Consumer<T> {
    /// Takes so many samples or rows, or a few more.
    fn take(&mut self, count: u64) -> Result<(), DataError> {
        let mut taken = 0;
        while taken < count {
            let item = match self.reader.try_next() {
                Poll::Ready(item) => item,
                Poll::Pending => {
                    let since = Instant::now();
                    let item = self.reader.next();
                    self.waited += since.elapsed();
                    item
                }
            };
            // Plans here have no end.
            let Some(item) = item else { break };
            // Looked at, so that nothing is read in vain.
            let item = std::hint::black_box(item?);
            taken += item.count();
            self.bytes += item.bytes();
        }
        self.count += taken;
        Ok(())
    }
}

/// The kernel's name for a decoding thread: it keeps 15 letters.
const DECODING_THREAD: &str = "tidemill-decode";

/// Time for which the threads that decode have had a processor, or waited for one, where the system says so.
fn decoding_nanoseconds() -> Option<u64> {
    let mut sum = None;
    for thread in std::fs::read_dir("/proc/self/task").ok()? {
        let thread = thread.ok()?.path();
        // Threads may end at any moment.
        let Ok(name) = std::fs::read_to_string(thread.join("comm")) else { continue };
        if name.trim_end() != DECODING_THREAD {
            continue;
        }
        let Ok(times) = std::fs::read_to_string(thread.join("schedstat")) else { continue };
        // Nanoseconds on a processor, nanoseconds in line for one, and turns.
        let times: Option<Vec<u64>> =
            times.split_whitespace().take(2).map(|time| time.parse().ok()).collect();
        *sum.get_or_insert(0) += times?.iter().sum::<u64>();
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_of_three_is_named() {
        let bound = |consumer_waited, decoding_busy| {
            let pace = Pace {
                per_second: 1.0,
                megabytes_per_second: 1.0,
                first_batch_seconds: 1.0,
                consumer_waited,
                decoding_busy,
            };
            pace.bound_by()
        };
        assert_eq!(bound(0.1, Some(0.4)), Some(Bound::Consumer));
        assert_eq!(bound(0.1, None), Some(Bound::Consumer));
        assert_eq!(bound(0.9, Some(0.95)), Some(Bound::Decoding));
        assert_eq!(bound(0.9, Some(0.1)), Some(Bound::Source));
        assert_eq!(bound(0.9, None), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_that_decode_are_told_by_their_name() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (started, has_started) = std::sync::mpsc::channel();
        let before = decoding_nanoseconds().unwrap_or(0);
        let work = move || {
            started
                .send((0..1 << 22_u32).fold(1_u32, |all, x| std::hint::black_box(all ^ x)))
                .unwrap();
            let _ = stopped.recv();
        };
        let thread = std::thread::Builder::new().name(format!("{DECODING_THREAD}-0"));
        let thread = thread.spawn(work).unwrap();
        has_started.recv().unwrap();
        // The kernel counts when a thread gives way, at the latest when it waits to be stopped.
        let deadline = Instant::now() + Duration::from_secs(60);
        while decoding_nanoseconds().unwrap() <= before {
            assert!(Instant::now() < deadline, "nothing was counted");
            std::thread::yield_now();
        }
        drop(stop);
        thread.join().unwrap();
    }
}
