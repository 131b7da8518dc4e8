//! How long communication took, and how much of that was not hidden behind computing.

use std::collections::VecDeque;

use tidemill_collective::communicator::Interval;
use tidemill_kernels::{Backend, Result};

/// Spans that are kept before ended ones are measured: a step has few spans, and they are measured after it.
const KEPT_SPANS: usize = 1024;

/// Communication between two points of a device stream.
pub(super) struct Span<B: Backend> {
    pub(super) interval: Interval<B>,
    /// From where on nothing else was left to compute.
    pub(super) awaited: B::Event,
}

/// The time of some spans.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SpentTime {
    pub(super) milliseconds: f64,
    /// The part of this time in which nothing else was left to compute.
    pub(super) exposed_milliseconds: f64,
}

impl SpentTime {
    /// Adds a span; waits until it is over.
    pub(super) fn add<B: Backend>(&mut self, backend: &B, span: &Span<B>) -> Result<()> {
        let Span { interval: Interval { from, to }, awaited } = span;
        backend.wait(to)?;
        backend.wait(awaited)?;
        let whole = backend.elapsed_milliseconds(from, to)?.max(0.0);
        let exposed = backend.elapsed_milliseconds(awaited, to)?;
        self.milliseconds += whole;
        self.exposed_milliseconds += exposed.clamp(0.0, whole);
        Ok(())
    }
}

/// The time that gathering parameters block by block took on a device thread.
pub(super) struct GatheredBlocks<B: Backend> {
    /// Bytes that came from other workers.
    pub(super) bytes: u64,
    spans: VecDeque<Span<B>>,
    /// The time of spans that are not kept any more.
    measured: SpentTime,
}

impl<B: Backend> Default for GatheredBlocks<B> {
    fn default() -> Self {
        Self { bytes: 0, spans: VecDeque::new(), measured: SpentTime::default() }
    }
}

impl<B: Backend> GatheredBlocks<B> {
    /// Notes a block. An evaluation gathers many of them: beyond some, those that are over are measured, and the others wait.
    pub(super) fn push(&mut self, backend: &B, span: Span<B>) -> Result<()> {
        self.spans.push_back(span);
        while self.spans.len() > KEPT_SPANS
            && let Some(first) = self.spans.front()
            && backend.is_complete(&first.interval.to)?
            && backend.is_complete(&first.awaited)?
        {
            self.measured.add(backend, first)?;
            self.spans.pop_front();
        }
        Ok(())
    }

    /// The time of all of them; waits until they are over.
    pub(super) fn time(self, backend: &B) -> Result<SpentTime> {
        let mut time = self.measured;
        self.spans.iter().try_for_each(|span| time.add(backend, span))?;
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime};

    use super::*;

    /// On a CPU an event is an instant, so that all is exact.
    #[test]
    fn what_ends_before_computing_does_is_hidden() {
        let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = cpu.device_stream().unwrap();
        let mut point = || {
            let before = cpu.record_timed(&mut stream).unwrap();
            loop {
                let now = cpu.record_timed(&mut stream).unwrap();
                if cpu.elapsed_milliseconds(&before, &now).unwrap() > 0.0 {
                    break now;
                }
            }
        };
        let points = [point(), point(), point(), point()];
        let between =
            |from: usize, to: usize| cpu.elapsed_milliseconds(&points[from], &points[to]).unwrap();
        let span = |from: usize, to: usize, awaited: usize| {
            let [from, to, awaited] = [from, to, awaited].map(|at| points[at]);
            Span::<Cpu> { interval: Interval { from, to }, awaited }
        };
        for (of, exposed) in [
            ((0, 1, 2), 0.0),
            ((0, 1, 1), 0.0),
            ((0, 2, 1), between(1, 2)),
            ((1, 2, 1), between(1, 2)),
            ((1, 3, 0), between(1, 3)),
        ] {
            let mut time = SpentTime::default();
            let (from, to, awaited) = of;
            time.add(&cpu, &span(from, to, awaited)).unwrap();
            let milliseconds = between(from, to);
            assert_eq!(time, SpentTime { milliseconds, exposed_milliseconds: exposed }, "{of:?}");
        }
        let mut blocks = GatheredBlocks::default();
        let many = 3 * KEPT_SPANS;
        (0..many).for_each(|_| blocks.push(&cpu, span(0, 2, 1)).unwrap());
        assert_eq!(blocks.spans.len(), KEPT_SPANS, "no more are kept");
        let time = blocks.time(&cpu).unwrap();
        let whole = many as f64 * between(0, 2);
        assert!((time.milliseconds / whole - 1.0).abs() < 1e-9, "{time:?}");
        let exposed = many as f64 * between(1, 2);
        assert!((time.exposed_milliseconds / exposed - 1.0).abs() < 1e-9, "{time:?}");
    }
}
