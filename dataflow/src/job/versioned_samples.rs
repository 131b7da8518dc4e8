//! A worker's samples from the [versions](super::data_versions) of a run's data, as the graph's source.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use tidemill_model::Tokens;
use tidemill_streaming_data::reader::Decoder;

use super::data_versions::{DataVersions, VersionSpan};
use super::source::DecodedSamples;
use crate::cluster::Failure;
use crate::error::Result;
use crate::operators::{SampleSource, Wake};

/// Samples of a worker from the versions of a run's data.
pub(super) struct VersionedSamples {
    data_versions: Arc<DataVersions>,
    reading: Option<Reading>,
    /// The start of the span that this worker arrived at last.
    arrived: Option<u64>,
    /// Requests that were not passed on yet.
    waiting: VecDeque<Range<u64>>,
    wake: Option<Wake>,
    /// Whether the decisions end with this worker.
    is_last: bool,
}

/// The reading of a span by a worker.
struct Reading {
    span: Arc<VersionSpan>,
    samples: DecodedSamples,
    /// Samples that were asked for and have not come.
    due: u64,
    /// For as long as one of the process's workers has it, there is no other.
    _decoder: Arc<Decoder>,
}

impl VersionedSamples {
    /// For a worker; the worker of index 0 reads for as long as decisions may be due.
    pub(super) fn new(data_versions: &Arc<DataVersions>, worker: usize) -> Self {
        Self {
            data_versions: Arc::clone(data_versions),
            reading: None,
            arrived: None,
            waiting: VecDeque::new(),
            wake: None,
            is_last: worker == 0,
        }
    }

    /// Asks for the positions that are decided. A range lies in one span: it is of one step, and a span begins with a step.
    fn ask(&mut self) -> Result<()> {
        while let Some(positions) = self.waiting.front() {
            let Some(span) = self.data_versions.span_of(positions.start) else { break };
            if let Some(reading) = self.reading.take_if(|it| it.span.start != span.start) {
                if reading.due > 0 {
                    self.reading = Some(reading);
                    break;
                }
                // Its decoder ends before another begins.
                drop(reading);
            }
            if self.arrived.replace(span.start) != Some(span.start) {
                self.data_versions.arrive(&span);
            }
            let reading = match &mut self.reading {
                Some(reading) => reading,
                None if !self.data_versions.is_open(&span) => break,
                none => {
                    let decoder = self.data_versions.decoder(&span)?;
                    let mut samples =
                        DecodedSamples::new((*decoder).clone(), self.data_versions.vocab_size);
                    if let Some(wake) = &self.wake {
                        samples.set_wake(Arc::clone(wake));
                    }
                    none.insert(Reading { span, samples, due: 0, _decoder: decoder })
                }
            };
            let span = &reading.span;
            reading.samples.request(span.place(positions.start)..span.place(positions.end));
            reading.due += positions.end - positions.start;
            self.waiting.pop_front();
        }
        Ok(())
    }
}

impl SampleSource for VersionedSamples {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.waiting.push_back(positions);
    }

    fn poll(&mut self) -> std::result::Result<Option<(u64, Tokens)>, Failure> {
        self.ask()?;
        let Some(reading) = &mut self.reading else { return Ok(None) };
        let Some((place, tokens)) = reading.samples.poll()? else { return Ok(None) };
        reading.due -= 1;
        let position = place - reading.span.first_place() + reading.span.start;
        Ok(Some((position, tokens)))
    }

    fn set_wake(&mut self, wake: Wake) {
        self.data_versions.wake_for_decisions(Arc::clone(&wake));
        self.wake = Some(wake);
    }
}

impl Drop for VersionedSamples {
    fn drop(&mut self) {
        if self.is_last {
            self.data_versions.close();
        }
    }
}
