//! The legs of a run's stream: which version of the data is read from which position on.
//!
//! A run stays on the version of its data that it began with, or, where it [follows](DataFollow::Latest) the newest, moves to that
//! at the end of an epoch: at the first step that begins with all samples of the epoch behind it. A leg is what is read of one
//! version; its first position is the version's position 0. What was decided stands in every checkpoint behind it
//! ([`Cursor::moves`]), so which sample is at a position is a function of the checkpoint alone.
//!
//! A decision is due when the first worker asks for a position behind the epoch. The process of worker 0 looks which version is
//! the newest, on a thread; [`decisions`](super::decisions) tells the others, each opens that version, and what waits for it goes on. Nothing of the
//! graph waits: a source that has no samples yet answers none.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use serde::{Deserialize, Serialize};
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::cursor::{Cursor, Move, StreamIdentity};
use tidemill_streaming_data::hash::ContentHash;
use tidemill_streaming_data::reader::{Decoder, DecoderSettings, Sample};

use super::data::{DataFollow, DataSettings, check_follows, versions_of};
use super::resolve::ResolvedRun;
use super::source::{DecodedSamples, origin};
use super::train::{Observer, TrainEvent, lock};
use crate::cluster::{Abort, Failure};
use crate::error::{JobError, Result};
use crate::operators::{SampleName, SampleSource, Wake};

/// What is read of one version of the data.
struct Leg {
    /// The position of the run's stream that is the version's position 0.
    start: u64,
    data: Mixture,
    /// One for all workers of the process, for as long as one of them reads.
    decoder: Mutex<Weak<Decoder>>,
}

/// Which version is read from an epoch's end on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Decision {
    /// The first position that it is about.
    position: u64,
    /// The fingerprints of the parts of the version to move to; none to stay.
    versions: Option<Vec<ContentHash>>,
}

/// The legs as a process knows them.
pub(super) struct Legs {
    began: StreamIdentity,
    /// Moves of the checkpoint that the run goes on from.
    history: Vec<Move>,
    state: Mutex<State>,
    decoding: DecoderSettings,
    samples_per_step: u64,
    /// Positions of the whole run.
    end: u64,
    data: DataSettings,
    seed: u64,
    vocab_size: usize,
    place: Place,
    abort: Abort,
    observer: Observer,
}

/// Which process this is of how many.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub process: usize,
    pub processes: usize,
}

struct State {
    /// At least one, in order.
    legs: Vec<Arc<Leg>>,
    /// Until the first move: afterwards a decoder is kept by those who read.
    first_decoder: Option<Arc<Decoder>>,
    /// The first position of which it is not decided what is there.
    decided: u64,
    /// For which position a decision was asked for, and for which a version is being opened.
    asked: Option<u64>,
    opening: Option<u64>,
    /// The newest version, as this process found it.
    found: Option<Mixture>,
    /// For the other processes.
    decisions: VecDeque<Decision>,
    wakes: Vec<Wake>,
    is_closed: bool,
}

impl Legs {
    /// Those of a run that goes on from its cursor.
    ///
    /// # Errors
    /// A decoder that does not start.
    pub(super) fn new(
        run: &ResolvedRun,
        decoding: DecoderSettings,
        place: Place,
        abort: &Abort,
        observer: &Observer,
    ) -> Result<Arc<Self>> {
        let samples_per_step = run.batch.samples_per_step() as u64;
        let cursor = run.cursor();
        let (_, start) = cursor.current();
        let leg = Leg { start, data: run.data.clone(), decoder: Mutex::default() };
        let decided = match run.config.data.follow {
            DataFollow::Began => u64::MAX,
            DataFollow::Latest => {
                first_end(leg.epoch(samples_per_step), cursor.position - start) + start
            }
        };
        let legs = Self {
            began: cursor.stream,
            history: cursor.moves,
            state: Mutex::new(State {
                legs: vec![Arc::new(leg)],
                first_decoder: None,
                decided,
                asked: None,
                opening: None,
                found: None,
                decisions: VecDeque::new(),
                wakes: Vec::new(),
                is_closed: false,
            }),
            decoding,
            samples_per_step,
            end: run.steps.saturating_mul(samples_per_step),
            data: run.config.data.clone(),
            seed: run.config.run.seed,
            vocab_size: run.model.vocab_size(),
            place,
            abort: abort.clone(),
            observer: Arc::clone(observer),
        };
        let first = Arc::clone(&lock(&legs.state).legs[0]);
        // What is wrong with the data is said before the processes meet.
        let decoder = legs.decoder(&first)?;
        lock(&legs.state).first_decoder = Some(decoder);
        Ok(Arc::new(legs))
    }

    /// Whether any decision may be due.
    pub(super) fn may_move(&self) -> bool {
        self.data.follow == DataFollow::Latest
    }

    /// The cursor of a checkpoint at a position.
    pub(super) fn cursor(&self, position: u64) -> Cursor {
        let state = lock(&self.state);
        let moved = state.legs[1..].iter().take_while(|leg| leg.start < position);
        let moved = moved.map(|leg| Move { position: leg.start, stream: leg.data.identity() });
        let moves = self.history.iter().cloned().chain(moved).collect();
        Cursor { position, stream: self.began.clone(), moves }
    }

    /// What the sample at a position is called.
    pub(super) fn name(&self, position: u64) -> SampleName {
        let leg = lock(&self.state).leg_of(position);
        let (file, row) = origin(&leg.data, position - leg.start);
        SampleName { file: file.display().to_string(), row }
    }

    /// The next decision for the other processes; `None` where there will be no more.
    pub(super) fn next_decision(&self) -> Option<Option<Decision>> {
        let mut state = lock(&self.state);
        let decision = state.decisions.pop_front();
        (decision.is_some() || !state.is_closed).then_some(decision)
    }

    /// `wake` is called when there is another decision, or will be none.
    pub(super) fn wake_for_decisions(&self, wake: Wake) {
        lock(&self.state).wakes.push(wake);
    }

    /// Takes the decision of worker 0's process. Every worker may be told.
    pub(super) fn decide(self: &Arc<Self>, decision: Decision) {
        let mut state = lock(&self.state);
        let position = decision.position;
        if position != state.decided || state.opening == Some(position) {
            return;
        }
        let Some(versions) = decision.versions else {
            let leg = state.leg_of(position);
            state.decided =
                leg.start + next_end(leg.epoch(self.samples_per_step), position - leg.start);
            return state.wake();
        };
        state.opening = Some(position);
        if let Some(data) = state.found.take() {
            drop(state);
            return self.move_to(data);
        }
        drop(state);
        let legs = Arc::clone(self);
        let open = move || -> std::result::Result<(), Failure> {
            let data = legs.data.open(legs.seed, Some(&versions))?;
            if versions_of(&data) != versions {
                let expected =
                    format!("version {} of the data, which process 0 found", versions[0]);
                return Err(JobError::value("data.follow", expected, data.fingerprint()).into());
            }
            legs.move_to(data);
            Ok(())
        };
        // Where no thread starts, the run is aborted.
        _ = self.abort.guard_thread("open-version", open);
    }

    /// From where it is not decided on, `data` is read.
    fn move_to(&self, data: Mixture) {
        let mut state = lock(&self.state);
        let start = state.decided;
        let leg = Arc::new(Leg { start, data, decoder: Mutex::default() });
        state.decided = start + next_end(leg.epoch(self.samples_per_step), 0);
        state.first_decoder = None;
        state.legs.push(Arc::clone(&leg));
        state.wake();
        drop(state);
        if self.place.process == 0 {
            (self.observer)(&TrainEvent::Moved {
                step: start / self.samples_per_step,
                fingerprint: leg.data.fingerprint().to_string(),
                samples: leg.data.samples(),
            });
        }
    }

    /// The leg of a position; none where that is not decided yet. Then it will be, and whatever was to be woken is.
    fn leg_of(self: &Arc<Self>, position: u64) -> Option<Arc<Leg>> {
        let mut state = lock(&self.state);
        if position < state.decided {
            return Some(state.leg_of(position));
        }
        let due = state.decided;
        // The process of worker 0.
        if self.place.process == 0 && state.asked != Some(due) {
            state.asked = Some(due);
            drop(state);
            let legs = Arc::clone(self);
            let look = move || {
                legs.look(due);
                Ok(())
            };
            _ = self.abort.guard_thread("newest-version", look);
        }
        None
    }

    /// Looks which version is the newest, and decides.
    fn look(self: &Arc<Self>, position: u64) {
        let current = Arc::clone(lock(&self.state).legs.last().expect("at least one"));
        let newest = self.data.open(self.seed, None).and_then(|newest| {
            check_follows(&newest, &current.data, self.vocab_size)?;
            Ok(newest)
        });
        let newest = match newest {
            Ok(newest) => (newest.identity() != current.data.identity()).then_some(newest),
            Err(error) => {
                let at = current.data.fingerprint();
                tracing::warn!(
                    "the run stays on version {at} of its data for another epoch: {error}"
                );
                None
            }
        };
        let versions = newest.as_ref().map(versions_of);
        let decision = Decision { position, versions };
        let mut state = lock(&self.state);
        state.found = newest;
        if self.place.processes > 1 {
            state.decisions.push_back(decision);
            state.wake();
        } else {
            drop(state);
            self.decide(decision);
        }
    }

    fn decoder(&self, leg: &Leg) -> Result<Arc<Decoder>> {
        let mut shared = lock(&leg.decoder);
        if let Some(decoder) = shared.upgrade() {
            return Ok(decoder);
        }
        // Of remote data sets no more is fetched than the run will read.
        let positions = 0..self.end.saturating_sub(leg.start);
        let decoder = Decoder::of_positions(leg.data.clone(), self.decoding, positions)?;
        let decoder = Arc::new(decoder);
        *shared = Arc::downgrade(&decoder);
        Ok(decoder)
    }

    fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.wake();
    }
}

impl State {
    /// The leg of a position of which it is decided.
    fn leg_of(&self, position: u64) -> Arc<Leg> {
        let behind = self.legs.partition_point(|leg| leg.start <= position);
        Arc::clone(&self.legs[behind.max(1) - 1])
    }

    fn wake(&self) {
        self.wakes.iter().for_each(|wake| wake());
    }
}

impl Leg {
    fn epoch(&self, samples_per_step: u64) -> Epoch {
        Epoch { samples: self.data.samples(), samples_per_step }
    }
}

/// Samples of an epoch, and of a step.
#[derive(Clone, Copy)]
struct Epoch {
    samples: u64,
    samples_per_step: u64,
}

impl Epoch {
    /// The first step's beginning behind so many epochs.
    fn end(self, epochs: u64) -> u64 {
        let samples = epochs.saturating_mul(self.samples);
        samples.div_ceil(self.samples_per_step).saturating_mul(self.samples_per_step)
    }
}

/// The first end of an epoch that is not before `position`, a step's beginning, and not at 0.
fn first_end(epoch: Epoch, position: u64) -> u64 {
    match position {
        0 => next_end(epoch, 0),
        _ => next_end(epoch, position - 1),
    }
}

/// The first end of an epoch behind `position`.
fn next_end(epoch: Epoch, position: u64) -> u64 {
    let mut epochs = position.saturating_sub(epoch.samples_per_step) / epoch.samples.max(1);
    while epoch.end(epochs) <= position {
        epochs += 1;
    }
    epoch.end(epochs)
}

/// Samples of a worker from the legs of a run.
pub(super) struct LegSamples {
    legs: Arc<Legs>,
    /// What it reads, in order, and where each begins.
    reading: VecDeque<(Arc<Leg>, Arc<Decoder>, DecodedSamples)>,
    /// What was asked for and is not decided yet.
    waiting: VecDeque<Range<u64>>,
    wake: Option<Wake>,
    /// Whether the decisions end with it.
    is_last: bool,
}

impl LegSamples {
    /// For a worker; that of index 0 reads for as long as decisions may be due.
    pub(super) fn new(legs: &Arc<Legs>, worker: usize) -> Self {
        Self {
            legs: Arc::clone(legs),
            reading: VecDeque::new(),
            waiting: VecDeque::new(),
            wake: None,
            is_last: worker == 0,
        }
    }

    /// Asks for what is decided. A range lies in one leg: it is of one step, and a leg begins with a step.
    fn ask(&mut self) -> Result<()> {
        while let Some(positions) = self.waiting.front() {
            let Some(leg) = self.legs.leg_of(positions.start) else { break };
            if self.reading.back().is_none_or(|(last, ..)| last.start != leg.start) {
                let decoder = self.legs.decoder(&leg)?;
                let mut samples = DecodedSamples::new((*decoder).clone(), self.legs.vocab_size);
                if let Some(wake) = &self.wake {
                    samples.set_wake(Arc::clone(wake));
                }
                self.reading.push_back((leg, decoder, samples));
            }
            let (leg, _, samples) = self.reading.back_mut().expect("it was pushed");
            samples.request(positions.start - leg.start..positions.end - leg.start);
            self.waiting.pop_front();
        }
        Ok(())
    }
}

impl SampleSource for LegSamples {
    fn request(&mut self, positions: Range<u64>) {
        self.waiting.push_back(positions);
    }

    fn poll(&mut self) -> std::result::Result<Option<Sample>, Failure> {
        self.ask()?;
        while let Some((leg, _, samples)) = self.reading.front_mut() {
            if let Some(sample) = samples.poll()? {
                return Ok(Some(Sample { position: sample.position + leg.start, ..sample }));
            }
            if !samples.is_exhausted() || self.reading.len() == 1 {
                break;
            }
            self.reading.pop_front();
        }
        Ok(None)
    }

    fn set_wake(&mut self, wake: Wake) {
        lock(&self.legs.state).wakes.push(Arc::clone(&wake));
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
