//! From the state that process 0 has to the state that every worker needs.
//!
//! The state crosses to each process once, and lies there once: the workers of a process share one arena of parameters, and
//! one arena of each state of the optimizer, where each worker touches only its own parts. A process that sees the checkpoint itself
//! reads it there, and nothing crosses to it; the token of the run that holds the folder shows that it is the same folder, not one that
//! looks like it. Other processes get chunks from worker 0, a few megabytes in flight, states only of their own parts.
//! Process 0 verifies every file while it reads.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tidemill_collective::{
    BUCKET_ELEMENTS, CHUNK_ELEMENTS, Chunk, ChunkHeader, ChunkPlan, Node, Part, StatePart,
    by_destination,
};
use tidemill_model::Layout;
use tidemill_model::optimizer::{StateSpec, UpdateUnit};
use tidemill_streaming_data::store::Location;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::{Operator, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

use super::mail::mail;
use crate::checkpoint::{LocalCopy, RestoredState, StateFiles, checkpoint_path};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Aborted, Actor, Failure, WorkerContext};
use crate::error::Result;
use crate::operators::addressed::Addressed;
use crate::operators::plan::cut;
use crate::operators::{GraphError, InitialState};
use crate::run_folder::RunFolder;
use crate::state_arenas::StateArenas;

/// Chunks that are sent before it is looked how many have arrived: 4 MiB of them.
const CHUNKS_PER_BATCH: u64 = 16;
/// Batches that may be on their way while the next is read.
const BATCHES_IN_FLIGHT: u64 = 4;

/// Where worker 0 has the state from.
pub enum StateOrigin {
    /// Initial parameters; the states are zero.
    Parameters(Vec<f32>),
    /// The files of a checkpoint.
    Checkpoint(Box<StoredState>),
}

/// A checkpoint whose files are open.
pub struct StoredState {
    /// Where the files are.
    pub copy: LocalCopy,
    /// The files.
    pub files: StateFiles,
    /// The mark by which other processes know the run folder.
    pub token: Option<String>,
}

/// Where a run starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPoint {
    /// Updates done.
    pub step: u64,
    /// Counted tokens so far.
    pub tokens: u64,
    /// The horizon of the schedule.
    pub horizon: u64,
}

/// The state that a worker starts from.
#[derive(Clone, Debug)]
pub struct Restored {
    /// Where the run starts.
    pub start: StartPoint,
    /// The state, which all workers of the process share.
    pub state: InitialState,
    /// Bytes of it that came from another process.
    pub received_bytes: u64,
}

/// The message of worker 0 to every other process.
#[derive(Clone, Serialize, Deserialize)]
struct Announcement {
    start: StartPoint,
    /// Which files hold the state, for a process that sees them.
    files: Option<FilesIdentity>,
    stored: Stored,
}

/// How a process knows the files of a checkpoint.
#[derive(Clone, Serialize, Deserialize)]
struct FilesIdentity {
    token: String,
    fingerprint: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Stored {
    /// None: all states are zero.
    Parameters,
    States,
}

/// A process that needs the state from worker 0.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Needy {
    process: usize,
}

const NO_STATE: GraphError =
    GraphError::Order { what: "the end of the state from worker 0", missing: "all of the state" };

/// The state of a process, as it arrives.
#[derive(Default)]
struct ProcessState(Mutex<Arriving>);

#[derive(Default)]
struct Arriving {
    start: Option<StartPoint>,
    parameters: Arc<Vec<f32>>,
    states: Option<Vec<Arc<Vec<f32>>>>,
    /// For each part, whether each chunk has come from worker 0.
    arrived: BTreeMap<StatePart, Vec<bool>>,
    received_bytes: u64,
    /// Workers that have their starting state.
    taken: usize,
}

impl ProcessState {
    fn lock(&self) -> MutexGuard<'_, Arriving> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the whole state, which this process has read.
    fn put(&self, start: StartPoint, parameters: Vec<f32>, states: Option<Vec<Vec<f32>>>) {
        let mut state = self.lock();
        state.start = Some(start);
        state.parameters = Arc::new(parameters);
        state.states = states.map(|arenas| arenas.into_iter().map(Arc::new).collect());
    }

    /// The state that one of `workers` workers of this process starts from. Nothing is kept for longer than the last of them needs it.
    fn take(&self, workers: usize) -> std::result::Result<Restored, Failure> {
        let mut state = self.lock();
        let start = state.start.ok_or(NO_STATE)?;
        state.taken += 1;
        let last = state.taken == workers;
        let received_bytes = state.received_bytes;
        let parameters = Arc::clone(&state.parameters);
        let state_of_worker = InitialState { parameters, states: state.states.clone() };
        if last {
            *state = Arriving::default();
        }
        Ok(Restored { start, state: state_of_worker, received_bytes })
    }
}

/// How the state is cut, and this process's part.
struct Cut {
    chunks: ChunkPlan,
    /// For each chunk the process of the worker that owns it.
    owners: Vec<usize>,
    process: usize,
    /// The places of parameters and of the optimizer's states.
    arenas: StateArenas,
}

impl Cut {
    fn of(layout: &Layout, rule: RuleStates<'_>, context: &WorkerContext<'_>) -> Self {
        let (chunks, buckets) = cut(layout, rule.unit, CHUNK_ELEMENTS, BUCKET_ELEMENTS);
        let threads = context.peers() / context.processes();
        let owners = buckets.chunk_owners(&chunks, context.peers());
        let owners = owners.into_iter().map(|worker| worker / threads).collect();
        let arenas = StateArenas::new(layout, rule.states);
        Self { chunks, owners, process: context.process(), arenas }
    }

    /// The ranges of the arena that workers of this process own, in order.
    fn owned(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (planned, owner) in self.chunks.chunks().iter().zip(&self.owners) {
            match ranges.last_mut() {
                _ if *owner != self.process => {}
                Some(last) if last.end == planned.range.start => last.end = planned.range.end,
                _ => ranges.push(planned.range.clone()),
            }
        }
        ranges
    }

    /// Whether `process` needs a chunk of a part.
    fn needs(&self, process: usize, part: StatePart, chunk: usize) -> bool {
        let is_state = self.arenas.of(part).is_some();
        part == StatePart::Parameter || is_state && self.owners[chunk] == process
    }

    /// How many chunks this process needs.
    fn needed(&self, stored: Stored) -> usize {
        let owned = self.owners.iter().filter(|&&owner| owner == self.process).count();
        match stored {
            Stored::Parameters => self.owners.len(),
            Stored::States => self.owners.len() + self.arenas.states() * owned,
        }
    }

    /// Puts a chunk of worker 0 where it belongs.
    fn admit(
        &self,
        state: &ProcessState,
        worker: usize,
        chunk: &Chunk,
    ) -> std::result::Result<(), Failure> {
        let (header, values) = (*chunk.header_for(worker)?, chunk.values()?);
        let (index, step) = (header.chunk as usize, header.step);
        let found = match (header.part, self.chunks.chunks().get(index)) {
            (Part::State(part), Some(planned)) if self.needs(self.process, part, index) => {
                Some((part, self.arenas.range(part, &planned.range)))
            }
            _ => None,
        };
        let (part, range) = match found {
            Some((part, range)) if values.len() == range.len() => (part, range),
            _ => {
                let expected = "a part of the state that this process needs";
                return Err(GraphError::Chunk { step, expected, found: header }.into());
            }
        };
        let mut state = state.lock();
        let arrived = state.arrived.entry(part).or_default();
        arrived.resize(self.owners.len(), false);
        if std::mem::replace(&mut arrived[index], true) {
            let what = format!("{part:?} of chunk {index}");
            return Err(GraphError::Twice { step, what }.into());
        }
        state.received_bytes += chunk.payload_bytes() as u64;
        let zeros = |part| Arc::new(vec![0.0; self.arenas.layout(part).parameter_elements()]);
        let arena = match part {
            StatePart::Parameter => {
                if state.parameters.is_empty() {
                    state.parameters = zeros(part);
                }
                &mut state.parameters
            }
            StatePart::State(index) => {
                let all = || self.arenas.parts().skip(1).map(zeros).collect();
                let states = state.states.get_or_insert_with(all);
                states.get_mut(usize::from(index)).ok_or(NO_STATE)?
            }
        };
        // Nothing else has it before the last has arrived.
        let arena = Arc::get_mut(arena).ok_or(NO_STATE)?;
        arena[range].copy_from_slice(&values);
        Ok(())
    }
}

/// The states of an update rule, and the unit that one worker updates by itself.
#[derive(Clone, Copy)]
pub struct RuleStates<'a> {
    /// Its states.
    pub states: &'a [StateSpec],
    /// The unit that owners are cut by.
    pub unit: UpdateUnit,
}

/// Brings the state from worker 0, which alone gives an `origin`, to every worker: parameters of a layout, and states of them.
/// `run_dir` is this process's own, where it may
/// see the files that worker 0 reads.
///
/// # Errors
/// Files that cannot be read or are damaged, or a run that was aborted.
pub fn distribute(
    context: &mut WorkerContext<'_>,
    origin: Option<(StartPoint, StateOrigin)>,
    (layout, rule): (&Layout, RuleStates<'_>),
    run_dir: &Path,
) -> std::result::Result<Restored, Failure> {
    let states = rule.states;
    let cut = Arc::new(Cut::of(layout, rule, context));
    let state = context.of_process::<ProcessState>();
    let (worker, processes) = (context.index(), context.processes());
    let threads = context.peers() / processes;
    let first_of = |process: usize| process * threads;
    progress::enter(Phase::WaitingForState, 0);

    let mut values = InputHandle::<u64, CapacityContainerBuilder<Chunk>>::new();
    let probe = ProbeHandle::new();
    let abort = context.abort().clone();
    let (mut announcements, announced, _) = context.dataflow(|scope| mail(scope, "Announce"));
    let (mut answers, needy, answered) = context.dataflow(|scope| mail::<Needy>(scope, "Answer"));
    context.dataflow::<u64, _, _>(|scope| {
        let (cut, state) = (Arc::clone(&cut), Arc::clone(&state));
        values
            .to_stream(scope)
            .unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
                by_destination(),
                "Restore",
                |_, _| {
                    move |input, _output| {
                        input.for_each(|_time, chunk| {
                            progress::moved();
                            if let Err(failure) = cut.admit(&state, worker, chunk) {
                                abort.fail(Actor::Worker(worker), failure);
                            }
                        });
                    }
                },
            )
            .probe_with(&probe);
    });
    if let Some((start, origin)) = &origin {
        let stored = match origin {
            StateOrigin::Parameters(_) => None,
            StateOrigin::Checkpoint(stored) => Some(stored),
        };
        let files = stored.and_then(|stored| {
            let (token, fingerprint) = (stored.token.clone()?, stored.files.fingerprint());
            Some(FilesIdentity { token, fingerprint })
        });
        let stored = stored.map_or(Stored::Parameters, |_| Stored::States);
        let announcement = Announcement { start: *start, files, stored };
        for process in 1..processes {
            announcements.send(Addressed::new(first_of(process), announcement.clone()));
        }
    }
    announcements.close();
    let mut expected = None;
    let mut seen = None;
    if worker == first_of(context.process()) && worker > 0 {
        context.step_while(|| announced.borrow().is_empty())?;
        let Announcement { start, files, stored } = announced.borrow_mut().pop().ok_or(NO_STATE)?;
        seen = files
            .and_then(|identity| find_files(run_dir, &start, &identity, (layout, states)))
            .map(|it| (start, it));
        if seen.is_none() {
            state.lock().start = Some(start);
            expected = Some(cut.needed(stored));
            answers.send(Addressed::new(0, Needy { process: context.process() }));
        }
    }
    answers.close();
    context.step_while(|| !answered.done())?;
    let owned = cut.owned();
    if let Some((start, files)) = seen {
        progress::enter(Phase::Restoring, 0);
        let read = files.read_owned(&owned, context.abort())?.ok_or(Aborted)?;
        state.put(start, read.parameters, Some(read.states));
    }
    if let Some((start, origin)) = origin {
        progress::enter(Phase::Restoring, 0);
        let source = origin.read(&owned, context)?;
        let to: Vec<usize> = needy.take().iter().map(|needy| needy.process).collect();
        let mut sent = 0;
        for part in StatePart::all(states.len()) {
            for (index, planned) in cut.chunks.chunks().iter().enumerate() {
                let needs = |process: &&usize| cut.needs(**process, part, index);
                let mut to = to.iter().filter(needs).peekable();
                if to.peek().is_none() {
                    continue;
                }
                let Some(chunk) = source.values(part, planned.range.clone())? else {
                    continue;
                };
                let (chunk, header) = (Arc::new(chunk), |destination| ChunkHeader {
                    destination,
                    source: 0,
                    part: Part::State(part),
                    chunk: index as u32,
                    node: Node::leaf(0),
                    step: start.step,
                });
                for process in to {
                    let header = header(first_of(*process) as u32);
                    values.send_batch(&mut Chunk::new(header, Arc::clone(&chunk)));
                }
                progress::moved();
                sent += 1;
                if sent % CHUNKS_PER_BATCH == 0 {
                    let batch = sent / CHUNKS_PER_BATCH;
                    values.advance_to(batch);
                    let oldest = batch.saturating_sub(BATCHES_IN_FLIGHT);
                    let _waiting = progress::during(Phase::WaitingForWorkers);
                    context.step_while(|| probe.less_than(&oldest))?;
                }
            }
        }
        state.put(start, source.parameters, source.states);
    }
    values.close();
    progress::enter(Phase::WaitingForWorkers, 0);
    context.run_until_done()?;
    progress::enter(Phase::Starting, 0);
    if let Some(expected) = expected {
        let arrived = state.lock().arrived.values().flatten().filter(|&&arrived| arrived).count();
        if arrived != expected {
            return Err(NO_STATE.into());
        }
    }
    state.take(threads)
}

impl StateOrigin {
    /// Reads the state of process 0, and finds where the others read theirs.
    fn read(
        self,
        owned: &[Range<usize>],
        context: &WorkerContext<'_>,
    ) -> std::result::Result<Source, Failure> {
        match self {
            Self::Parameters(parameters) => Ok(Source { parameters, states: None, stored: None }),
            Self::Checkpoint(stored) => {
                let read = |_: &Path| stored.files.read(owned, context.abort());
                let RestoredState { parameters, states } =
                    stored.copy.read(read)?.ok_or(Aborted)?;
                Ok(Source { parameters, states: Some(states), stored: Some(stored) })
            }
        }
    }
}

/// The state that process 0 starts from, and where the others read theirs.
struct Source {
    parameters: Vec<f32>,
    states: Option<Vec<Vec<f32>>>,
    stored: Option<Box<StoredState>>,
}

impl Source {
    /// Values of elements `range` of a part; `None` if all of the part is zero.
    fn values(&self, part: StatePart, range: Range<usize>) -> Result<Option<Vec<f32>>> {
        if part == StatePart::Parameter {
            return Ok(Some(self.parameters[range].to_vec()));
        }
        let Some(StoredState { copy, files, .. }) = self.stored.as_deref() else { return Ok(None) };
        copy.read(|_| files.values(part, range)).map(Some)
    }
}

/// The checkpoint that process 0 reads, where this process sees it in its own `run_dir`.
fn find_files(
    run_dir: &Path,
    start: &StartPoint,
    identity: &FilesIdentity,
    (layout, states): (&Layout, &[StateSpec]),
) -> Option<StateFiles> {
    let location = Location::of_path(run_dir).ok()?;
    let folder = location.local()?;
    if !RunFolder::is_held_under(folder, &identity.token) {
        return None;
    }
    match StateFiles::open(&checkpoint_path(folder, start.step), layout, states) {
        Ok(files) => (files.fingerprint() == identity.fingerprint).then_some(files),
        Err(error) => {
            tracing::debug!("{error}, which process 0 sends");
            None
        }
    }
}
