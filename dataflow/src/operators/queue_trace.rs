//! The work on a device stream, in the trace of the run: when the device began a piece of it and had done it, by its own clock.
//!
//! A device tells how long after another point of its streams a point was reached, not when. So one point is taken whose time by the
//! host's clock is known: the host waits for it, and reads its clock. The two clocks drift apart by some millionths, so a new such point
//! is taken from time to time.

use std::collections::VecDeque;
use std::time::Duration;

use tidemill_collective::communicator::Interval;
use tidemill_kernels::{Backend, Result};

use crate::cluster::progress;
use crate::cluster::trace::QueueTrack;

/// How long a common point of both clocks serves: at 100 millionths of drift, a millisecond.
const LONGEST_SERVICE: Duration = Duration::from_secs(10);

/// Pieces of work that are kept, before the host waits for the first of them: far more than a step has.
const KEPT_PIECES: usize = 4096;

/// A point that both clocks know.
struct CommonPoint<B: Backend> {
    event: B::Event,
    /// The time of the event on the trace's clock.
    time: Duration,
}

impl<B: Backend> Clone for CommonPoint<B> {
    fn clone(&self) -> Self {
        Self { event: self.event.clone(), time: self.time }
    }
}

impl<B: Backend> CommonPoint<B> {
    fn take(backend: &B, stream: &mut B::DeviceStream, track: &QueueTrack) -> Result<Self> {
        let event = backend.record_timed(stream)?;
        backend.wait(&event)?;
        Ok(Self { event, time: track.now() })
    }

    /// The time of `event`, which was reached.
    fn time_of(&self, backend: &B, event: &B::Event) -> Result<Duration> {
        let milliseconds = backend.elapsed_milliseconds(&self.event, event)?;
        let apart = Duration::from_secs_f64(milliseconds.abs() / 1e3);
        Ok(match milliseconds < 0.0 {
            true => self.time.saturating_sub(apart),
            false => self.time + apart,
        })
    }
}

/// A piece of work that is enqueued.
struct Piece<B: Backend> {
    name: &'static str,
    step: u64,
    interval: Interval<B>,
    clock: CommonPoint<B>,
}

/// The pieces of one device stream that are not written yet, oldest first.
struct Queue<B: Backend> {
    track: QueueTrack,
    clock: CommonPoint<B>,
    pieces: VecDeque<Piece<B>>,
}

/// The trace of one device stream; of a run without a trace nothing, and then it enqueues nothing.
pub(super) struct QueueTrace<B: Backend> {
    queue: Option<Queue<B>>,
}

impl<B: Backend> QueueTrace<B> {
    /// The trace of `stream`, which this thread enqueues work on and which is idle.
    pub(super) fn new(backend: &B, stream: &mut B::DeviceStream, name: &str) -> Result<Self> {
        let with_clock = |track: QueueTrack| {
            let clock = CommonPoint::take(backend, stream, &track)?;
            Ok(Queue { track, clock, pieces: VecDeque::new() })
        };
        Ok(Self { queue: progress::queue_track(name).map(with_clock).transpose()? })
    }

    /// Brings the clocks together again if that is due; then waits for all work that is enqueued on `stream`.
    pub(super) fn synchronize(&mut self, backend: &B, stream: &mut B::DeviceStream) -> Result<()> {
        if let Some(Queue { track, clock, .. }) = &mut self.queue
            && track.now().saturating_sub(clock.time) > LONGEST_SERVICE
            && track.is_wanted(progress::step())
        {
            *clock = CommonPoint::take(backend, stream, track)?;
        }
        Ok(())
    }

    /// A piece of work begins here, if it is to be written.
    pub(super) fn begin(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<Option<B::Event>> {
        let is_wanted = |queue: &Queue<B>| queue.track.is_wanted(progress::step());
        let wanted = self.queue.as_ref().is_some_and(is_wanted);
        wanted.then(|| backend.record_timed(stream)).transpose()
    }

    /// The piece `name` of work that began at `from` ends here.
    pub(super) fn end(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        name: &'static str,
        from: Option<B::Event>,
    ) -> Result<()> {
        let Some(from) = from else { return Ok(()) };
        let to = backend.record_timed(stream)?;
        self.note(backend, name, &Interval { from, to })
    }

    /// A piece `name` of work is enqueued between two timed points of the stream.
    pub(super) fn note(
        &mut self,
        backend: &B,
        name: &'static str,
        interval: &Interval<B>,
    ) -> Result<()> {
        let step = progress::step();
        let Some(queue) = self.queue.as_mut().filter(|queue| queue.track.is_wanted(step)) else {
            return Ok(());
        };
        let Interval { from, to } = interval;
        let interval = Interval { from: from.clone(), to: to.clone() };
        queue.pieces.push_back(Piece { name, step, interval, clock: queue.clock.clone() });
        while let Some(piece) = queue.pieces.front()
            && (queue.pieces.len() > KEPT_PIECES || backend.is_complete(&piece.interval.to)?)
        {
            queue.write_first(backend)?;
        }
        Ok(())
    }

    /// Writes all pieces; waits until the device has done them.
    pub(super) fn finish(&mut self, backend: &B) -> Result<()> {
        while let Some(queue) = self.queue.as_mut().filter(|queue| !queue.pieces.is_empty()) {
            queue.write_first(backend)?;
        }
        Ok(())
    }
}

impl<B: Backend> Queue<B> {
    fn write_first(&mut self, backend: &B) -> Result<()> {
        if let Some(Piece { name, step, interval, clock }) = self.pieces.pop_front() {
            backend.wait(&interval.to)?;
            let [from, to] = [&interval.from, &interval.to];
            let between = [clock.time_of(backend, from)?, clock.time_of(backend, to)?];
            self.track.span(name, step, between);
        }
        Ok(())
    }
}
