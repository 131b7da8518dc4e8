//! What goes into the training graph of a test, and where its checkpoints go.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use tidemill::cluster::Failure;
use tidemill::model::Tokens;
use tidemill::operators::{SampleSource, StatePart, StateSink, StepReport, Wake};

use super::{Gate, POSITIONS, State, random};

/// Samples that are a function of their position, sometimes a little late.
pub struct Synthetic {
    pub waiting: VecDeque<u64>,
    pub polls: u64,
    pub wake: Option<Wake>,
    pub vocab_size: u64,
    pub poison: Option<(u64, u32)>,
    /// Has none from this position on.
    pub end: u64,
    pub on_request: Box<dyn FnMut(Range<u64>)>,
}

impl SampleSource for Synthetic {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        (self.on_request)(positions.clone());
        self.waiting.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        self.polls += 1;
        if self.waiting.front().is_some_and(|&position| position >= self.end) {
            return Ok(None);
        }
        if self.polls.is_multiple_of(3) {
            if let Some(wake) = &self.wake {
                wake();
            }
            return Ok(None);
        }
        let Self { poison, vocab_size, .. } = *self;
        Ok(self
            .waiting
            .pop_front()
            .map(|position| (position, sample(position, vocab_size, poison))))
    }

    fn set_wake(&mut self, wake: Wake) {
        self.wake = Some(wake);
    }
}

pub fn sample(position: u64, vocab_size: u64, poison: Option<(u64, u32)>) -> Tokens {
    let token = |t| (random(position * 31 + t) % vocab_size) as u32;
    let mut tokens: Vec<u32> = (0..=POSITIONS as u64).map(token).collect();
    if let Some((_, token)) = poison.filter(|&(at, _)| at == position) {
        tokens[0] = token;
    }
    tokens
}

/// Keeps checkpoints; what was not committed is not there.
pub struct Memory {
    /// The number of elements of each part.
    pub elements: Vec<usize>,
    pub open: Option<(u64, Vec<Vec<f32>>)>,
    pub complete: Arc<Mutex<BTreeMap<u64, State>>>,
    pub full_disk: Option<u64>,
    pub gate: Option<Gate>,
}

impl StateSink for Memory {
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        let parts = self.elements.iter().map(|&elements| vec![f32::NAN; elements]).collect();
        assert!(self.open.replace((report.step, parts)).is_none(), "one checkpoint at a time");
        Ok(())
    }

    fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<(), Failure> {
        self.gate.iter().for_each(Gate::wait);
        let (_, parts) = self.open.as_mut().expect("a checkpoint was begun");
        let out = &mut parts[part.index()][start..start + values.len()];
        assert!(out.iter().all(|value| value.is_nan()), "every element once");
        out.copy_from_slice(values);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Failure> {
        let (step, parts) = self.open.take().expect("a checkpoint was begun");
        if self.full_disk == Some(step) {
            return Err(Failure::restart("no space left on device"));
        }
        let bits = |values: Vec<f32>| -> Vec<u32> {
            assert!(values.iter().all(|value| !value.is_nan()), "every element");
            values.into_iter().map(f32::to_bits).collect()
        };
        self.complete.lock().unwrap().insert(step, parts.into_iter().map(bits).collect());
        Ok(())
    }
}
