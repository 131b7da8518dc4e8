//! The versions of a run's data: which version is read from which position of the run's stream on.
//!
//! A run stays on the version of its data that it began with, or, where it [follows](DataFollow::Latest) the newest, moves to the newest
//! at the end of an epoch: at the first step that begins with all samples of the epoch behind it. A *span* is the part of the stream that
//! is read from one version; it starts at the beginning of the epoch that is due. Every later checkpoint has the decision
//! ([`Cursor::moves`]), so which sample is at a position is a function of the checkpoint alone.
//!
//! A decision is due when the first worker asks for a position behind the epoch. The process of worker 0 looks up the newest
//! version, on a thread; [`decisions`](super::decisions) sends it to the others, each opens that version, and the workers that wait
//! for it continue. No operator blocks: a [source](super::versioned_samples) that has no samples yet answers none. Samples of a span
//! are decoded once all workers of the process have the samples of the span before, so that memory and cache are as for one decoder.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use serde::{Deserialize, Serialize};
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::hash::ContentHash;
use tidemill_streaming_data::order::cursor::{Cursor, Move, StreamIdentity};
use tidemill_streaming_data::reader::{Decoder, DecoderSettings};

use super::data::{DataFollow, DataSettings, check_follows, versions_of};
use super::epochs::{Epoch, first_end, next_end};
use super::resolve::ResolvedRun;
use super::source::origin;
use super::train::{Observer, TrainEvent, lock};
use crate::cluster::{Abort, Failure};
use crate::error::{JobError, Result};
use crate::operators::{SampleName, Wake};

/// The part of a run that reads one version of the data.
pub(super) struct VersionSpan {
    /// The position of the run's stream at which it begins.
    pub(super) start: u64,
    /// The epoch of the version that begins there.
    epoch: u64,
    data: Mixture,
    /// One for all workers of the process, for as long as one of them reads.
    decoder: Mutex<Weak<Decoder>>,
    /// Workers of the process that have all samples before it, and ask for its own.
    arrived: AtomicUsize,
}

/// Which version is read from an epoch's end on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Decision {
    /// The first position that it is about.
    position: u64,
    /// The fingerprints of the parts of the version to move to; none to stay.
    versions: Option<Vec<ContentHash>>,
}

/// The versions that a run has read and reads, as one process knows them.
pub(super) struct DataVersions {
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
    pub(super) vocab_size: usize,
    place: Place,
    abort: Abort,
    observer: Observer,
}

/// Which process this is of how many, and its workers.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub process: usize,
    pub processes: usize,
    pub workers: usize,
}

struct State {
    /// At least one, in order.
    spans: Vec<Arc<VersionSpan>>,
    /// Until the first move: afterwards a decoder is there for as long as it is read.
    first_decoder: Option<Arc<Decoder>>,
    /// The first position whose version is not decided.
    decided: u64,
    /// For which position a decision was asked for.
    asked: Option<u64>,
    /// Decisions that are not carried out yet: the version of one before is being opened.
    told: VecDeque<Decision>,
    is_opening: bool,
    /// The newest version, as this process found it.
    found: Option<Mixture>,
    /// Decisions that the other processes have not been sent yet.
    decisions: VecDeque<Decision>,
    wakes: Vec<Wake>,
    is_closed: bool,
}

impl DataVersions {
    /// The versions of a run that continues from its cursor.
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
        let span = VersionSpan::new(start, cursor.first_epoch(), run.data.clone());
        let decided = match run.config.data.follow {
            DataFollow::Began => u64::MAX,
            DataFollow::Latest => {
                first_end(span.epoch(samples_per_step), cursor.position - start) + start
            }
        };
        let data_versions = Self {
            began: cursor.stream,
            history: cursor.moves,
            state: Mutex::new(State {
                spans: vec![Arc::new(span)],
                first_decoder: None,
                decided,
                asked: None,
                told: VecDeque::new(),
                is_opening: false,
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
        let first = Arc::clone(&lock(&data_versions.state).spans[0]);
        // Faults of the data are reported before the processes meet.
        let decoder = data_versions.decoder(&first)?;
        lock(&data_versions.state).first_decoder = Some(decoder);
        Ok(Arc::new(data_versions))
    }

    /// Whether any decision may be due.
    pub(super) fn may_move(&self) -> bool {
        self.data.follow == DataFollow::Latest
    }

    /// The cursor of a checkpoint at a position.
    pub(super) fn cursor(&self, position: u64) -> Cursor {
        let state = lock(&self.state);
        let moved = state.spans[1..].iter().take_while(|span| span.start < position);
        let moved = moved.map(|span| Move {
            position: span.start,
            epoch: span.epoch,
            stream: span.data.identity(),
        });
        let moves = self.history.iter().cloned().chain(moved).collect();
        Cursor { position, stream: self.began.clone(), moves }
    }

    /// The name of the sample at a position.
    pub(super) fn name(&self, position: u64) -> SampleName {
        let span = lock(&self.state).span_of(position);
        let (file, row) = origin(&span.data, span.place(position));
        SampleName { file: file.display().to_string(), row }
    }

    /// The next decision for the other processes; `None` where there will be no more.
    pub(super) fn next_decision(&self) -> Option<Option<Decision>> {
        let mut state = lock(&self.state);
        let decision = state.decisions.pop_front();
        (decision.is_some() || !state.is_closed).then_some(decision)
    }

    /// `wake` is called when there is another decision, or will be none, and when the next span may be read.
    pub(super) fn wake_for_decisions(&self, wake: Wake) {
        lock(&self.state).wakes.push(wake);
    }

    /// Takes the next decision of worker 0's process.
    pub(super) fn decide(self: &Arc<Self>, decision: Decision) {
        lock(&self.state).told.push_back(decision);
        self.carry_out();
    }

    /// Carries out decisions, up to a version that is to be opened first.
    fn carry_out(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        while !state.is_opening
            && let Some(Decision { position, versions }) = state.told.pop_front()
        {
            assert_eq!(position, state.decided, "decisions are told in order, each once");
            let Some(versions) = versions else {
                let span = state.span_of(position);
                state.decided =
                    span.start + next_end(span.epoch(self.samples_per_step), position - span.start);
                state.wake();
                continue;
            };
            state.is_opening = true;
            let found = state.found.take();
            drop(state);
            match found {
                Some(data) => self.move_to(data),
                None => self.open(versions),
            }
            state = lock(&self.state);
        }
    }

    /// Opens versions that the process of worker 0 found, on a thread, and goes on from there.
    fn open(self: &Arc<Self>, versions: Vec<ContentHash>) {
        let data_versions = Arc::clone(self);
        let open = move || -> std::result::Result<(), Failure> {
            let data = data_versions.data.open(data_versions.seed, Some(&versions))?;
            if versions_of(&data) != versions {
                let expected =
                    format!("version {} of the data, which process 0 found", versions[0]);
                // It may not have come here yet, or be pruned, with a newer one in its place.
                let found = data.fingerprint();
                return Err(Failure::restart(JobError::value("data.follow", expected, found)));
            }
            data_versions.move_to(data);
            data_versions.carry_out();
            Ok(())
        };
        // Where no thread starts, the run is aborted.
        _ = self.abort.guard_thread("open-version", open);
    }

    /// From where it is not decided on, `data` is read.
    fn move_to(&self, data: Mixture) {
        let mut state = lock(&self.state);
        let start = state.decided;
        let last = state.spans.last().expect("at least one");
        let epoch = last.epoch + (start - last.start) / last.data.samples().max(1);
        let span = Arc::new(VersionSpan::new(start, epoch, data));
        state.decided = start + next_end(span.epoch(self.samples_per_step), 0);
        state.first_decoder = None;
        state.is_opening = false;
        state.spans.push(Arc::clone(&span));
        state.wake();
        drop(state);
        if self.place.process == 0 {
            (self.observer)(&TrainEvent::Moved {
                step: start / self.samples_per_step,
                fingerprint: span.data.fingerprint().to_string(),
                samples: span.data.samples(),
            });
        }
    }

    /// One of this process's workers has all samples before a span, and comes to it.
    pub(super) fn arrive(&self, span: &VersionSpan) {
        if span.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.place.workers {
            lock(&self.state).wake();
        }
    }

    /// Whether no worker of this process reads positions before a span.
    pub(super) fn is_open(&self, span: &VersionSpan) -> bool {
        lock(&self.state).spans[0].start == span.start
            || span.arrived.load(Ordering::Acquire) == self.place.workers
    }

    /// The span of a position; none where that is not decided yet. Then it will be, and whatever was to be woken is.
    pub(super) fn span_of(self: &Arc<Self>, position: u64) -> Option<Arc<VersionSpan>> {
        let mut state = lock(&self.state);
        if position < state.decided {
            return Some(state.span_of(position));
        }
        let due = state.decided;
        // The process of worker 0.
        if self.place.process == 0 && state.asked != Some(due) {
            state.asked = Some(due);
            drop(state);
            let data_versions = Arc::clone(self);
            let look = move || {
                data_versions.look(due);
                Ok(())
            };
            _ = self.abort.guard_thread("newest-version", look);
        }
        None
    }

    /// Looks which version is the newest, and decides.
    fn look(self: &Arc<Self>, position: u64) {
        let current = Arc::clone(lock(&self.state).spans.last().expect("at least one"));
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

    /// The decoder of a span; this process has one decoder at a time.
    ///
    /// # Errors
    /// One that does not start.
    pub(super) fn decoder(&self, span: &VersionSpan) -> Result<Arc<Decoder>> {
        let mut shared = lock(&span.decoder);
        if let Some(decoder) = shared.upgrade() {
            return Ok(decoder);
        }
        // The range ends with the run, so that no shard of a remote data set is fetched that the run does not read.
        let positions = span.place(span.start)..span.place(self.end.max(span.start));
        let decoder = Decoder::of_positions(span.data.clone(), self.decoding, positions)?;
        let decoder = Arc::new(decoder);
        *shared = Arc::downgrade(&decoder);
        Ok(decoder)
    }

    /// No more is decided.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.wake();
    }
}

impl State {
    /// The span of a position for which it is decided.
    fn span_of(&self, position: u64) -> Arc<VersionSpan> {
        let behind = self.spans.partition_point(|span| span.start <= position);
        Arc::clone(&self.spans[behind.max(1) - 1])
    }

    fn wake(&self) {
        self.wakes.iter().for_each(|wake| wake());
    }
}

impl VersionSpan {
    fn new(start: u64, epoch: u64, data: Mixture) -> Self {
        Self { start, epoch, data, decoder: Mutex::default(), arrived: AtomicUsize::new(0) }
    }

    /// The position in the version's own stream.
    pub(super) fn place(&self, position: u64) -> u64 {
        position - self.start + self.first_place()
    }

    /// The position of its beginning in the version's own stream.
    pub(super) fn first_place(&self) -> u64 {
        self.epoch.saturating_mul(self.data.samples())
    }

    fn epoch(&self, samples_per_step: u64) -> Epoch {
        Epoch { samples: self.data.samples(), samples_per_step }
    }
}
