//! A worker's samples from the [legs](super::legs) of a run, as the graph's source.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use tidemill_model::Tokens;
use tidemill_streaming_data::reader::Decoder;

use super::legs::{Leg, Legs};
use super::source::DecodedSamples;
use crate::cluster::Failure;
use crate::error::Result;
use crate::operators::{SampleSource, Wake};

/// Samples of a worker from the legs of a run.
pub(super) struct LegSamples {
    legs: Arc<Legs>,
    reading: Option<Reading>,
    /// The leg that was come to last, by its start.
    arrived: Option<u64>,
    /// Requests that were not passed on yet.
    waiting: VecDeque<Range<u64>>,
    wake: Option<Wake>,
    /// Whether the decisions end with this worker.
    is_last: bool,
}

/// The reading of a leg by a worker.
struct Reading {
    leg: Arc<Leg>,
    samples: DecodedSamples,
    /// Samples that were asked for and have not come.
    due: u64,
    /// For as long as one of the process's workers has it, there is no other.
    _decoder: Arc<Decoder>,
}

impl LegSamples {
    /// For a worker; the worker of index 0 reads for as long as decisions may be due.
    pub(super) fn new(legs: &Arc<Legs>, worker: usize) -> Self {
        Self {
            legs: Arc::clone(legs),
            reading: None,
            arrived: None,
            waiting: VecDeque::new(),
            wake: None,
            is_last: worker == 0,
        }
    }

    /// Asks for the positions that are decided. A range lies in one leg: it is of one step, and a leg begins with a step.
    fn ask(&mut self) -> Result<()> {
        while let Some(positions) = self.waiting.front() {
            let Some(leg) = self.legs.leg_of(positions.start) else { break };
            if let Some(reading) = self.reading.take_if(|it| it.leg.start != leg.start) {
                if reading.due > 0 {
                    self.reading = Some(reading);
                    break;
                }
                // Its decoder ends before another begins.
                drop(reading);
            }
            if self.arrived.replace(leg.start) != Some(leg.start) {
                self.legs.arrive(&leg);
            }
            let reading = match &mut self.reading {
                Some(reading) => reading,
                None if !self.legs.is_open(&leg) => break,
                none => {
                    let decoder = self.legs.decoder(&leg)?;
                    let mut samples = DecodedSamples::new((*decoder).clone(), self.legs.vocab_size);
                    if let Some(wake) = &self.wake {
                        samples.set_wake(Arc::clone(wake));
                    }
                    none.insert(Reading { leg, samples, due: 0, _decoder: decoder })
                }
            };
            let leg = &reading.leg;
            reading.samples.request(leg.place(positions.start)..leg.place(positions.end));
            reading.due += positions.end - positions.start;
            self.waiting.pop_front();
        }
        Ok(())
    }
}

impl SampleSource for LegSamples {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.waiting.push_back(positions);
    }

    fn poll(&mut self) -> std::result::Result<Option<(u64, Tokens)>, Failure> {
        self.ask()?;
        let Some(reading) = &mut self.reading else { return Ok(None) };
        let Some((place, tokens)) = reading.samples.poll()? else { return Ok(None) };
        reading.due -= 1;
        let position = place - reading.leg.first_place() + reading.leg.start;
        Ok(Some((position, tokens)))
    }

    fn set_wake(&mut self, wake: Wake) {
        self.legs.wake_for_decisions(Arc::clone(&wake));
        self.wake = Some(wake);
    }
}

impl Drop for LegSamples {
    fn drop(&mut self) {
        if self.is_last {
            self.legs.close();
        }
    }
}
