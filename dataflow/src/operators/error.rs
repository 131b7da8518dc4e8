//! Breaches of the contracts of the graph's operators.

use std::ops::Range;

use tidemill_collective::ChunkHeader;

use crate::cluster::{Classified, ExitClass};

/// Why an operator ended the run.
///
/// The inputs of an operator were made by this code, by another process or by the streams and models of an embedder. An
/// error there is a damaged message, a peer that runs something else, or a bug: never known to be the fault of the
/// configuration or the data, which are checked where they are read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A chunk that the plan does not have, or not there and then.
    #[error("step {step}: expected {expected}, found {found:?}")]
    Chunk {
        /// The step of the receiver, from 1.
        step: u64,
        /// The chunks that could have come.
        expected: &'static str,
        /// The chunk that came.
        found: ChunkHeader,
    },
    /// Something that no slot of the plan is for.
    #[error("step {step}: {what} is not in the plan")]
    Unplanned {
        /// The step, from 1.
        step: u64,
        /// The message that came.
        what: String,
    },
    /// Something that comes once came again.
    #[error("step {step}: {what} came twice")]
    Twice {
        /// The step, from 1.
        step: u64,
        /// The message that came.
        what: String,
    },
    /// Something of a step that is done.
    #[error("step {step}: something of step {found} came late")]
    Late {
        /// The step of the receiver, from 1.
        step: u64,
        /// The step that it is of, from 1.
        found: u64,
    },
    /// A grain that does not belong where it came, or is not as the plan says.
    #[error("step {step}: grain {grain} of lane {lane}: expected {expected}, found {found}")]
    Grain {
        /// The step, from 1.
        step: u64,
        /// The lane that it says it is of.
        lane: usize,
        /// Its index in the lane.
        grain: usize,
        /// The expected value.
        expected: String,
        /// The value that was found.
        found: String,
    },
    /// The stream of grains ended too early.
    #[error(
        "the stream of grains ended: step {step} has {found} of the {expected} grains of worker {worker}"
    )]
    GrainsEnded {
        /// The step that is not complete, from 1.
        step: u64,
        /// The worker, counted as those that train are.
        worker: usize,
        /// Grains that the worker has in a step.
        expected: usize,
        /// Grains that came.
        found: usize,
    },
    /// A source of samples gave another than the next.
    #[error("expected the sample at position {expected}, found {found}")]
    Position {
        /// The position that was asked for.
        expected: u64,
        /// The position that came.
        found: u64,
    },
    /// Rows of a table that did not become one sample each.
    #[error("the rows at positions {positions:?} became {found} samples, expected {expected}")]
    Rows {
        /// Their positions in the canonical order.
        positions: Range<u64>,
        /// Rows.
        expected: usize,
        /// Samples that were made of them.
        found: usize,
    },
    /// A sample of another length than the plan's.
    #[error("the sample at position {position} is {found} positions long, expected {expected}")]
    SampleLength {
        /// Its position in the canonical order.
        position: u64,
        /// Positions of each sample, as the plan says.
        expected: usize,
        /// Positions of this one.
        found: usize,
    },
    /// A model that breaks the contract of [`Trainable`](tidemill_model::Trainable).
    #[error("the model {done}, expected {expected}")]
    Model {
        /// The action that was expected of it.
        expected: String,
        /// The action that it took.
        done: String,
    },
    /// An operator, or a thread of one, did something too early.
    #[error("{what} came before {missing}")]
    Order {
        /// The message that came.
        what: &'static str,
        /// The message that must come first.
        missing: &'static str,
    },
    /// A thread of an operator gave an answer that was not asked for.
    #[error("{thread} answered what it was not asked")]
    Unasked {
        /// Name of the thread.
        thread: &'static str,
    },
    /// The optimizer was given a chunk that another worker owns.
    #[error("the optimizer was given chunk {chunk}, which another worker owns")]
    ForeignChunk {
        /// The chunk.
        chunk: usize,
    },
    /// The initial state that was given to the graph does not fit its model.
    #[error("the initial state has {found} elements, expected at least {expected}")]
    InitialState {
        /// Elements that are needed.
        expected: usize,
        /// Elements that were given.
        found: usize,
    },
    /// The initial state that was given to the graph does not fit its update rule.
    #[error("the initial state has {found} states of the optimizer, expected {expected}")]
    InitialStates {
        /// States that the rule has.
        expected: usize,
        /// States that were given.
        found: usize,
    },
    /// The plan has tensors of several owners, and the update rule updates whole ones.
    #[error(
        "the update rule updates whole tensors, expected a plan in which each has one owner \
         (TrainingPlan::of_unit), found one of elements"
    )]
    TensorsAreCut,
    /// A worker was given no end of the communicator, or not its own.
    #[error(
        "worker {worker} of {workers} was given the communicator's end of worker {rank} of {ranks}"
    )]
    ForeignEnd {
        /// The worker, counted as those that train are.
        worker: usize,
        /// The number of workers that train.
        workers: usize,
        /// The worker whose end it is.
        rank: usize,
        /// The number of workers that it is between; 1 without a communicator.
        ranks: usize,
    },
    /// Something that a worker needs which trains was not given to it.
    #[error("expected {what} on every worker that trains, found none")]
    NotGiven {
        /// The missing thing, in words.
        what: &'static str,
    },
    /// A grain of training came to a worker that does not train.
    #[error(
        "step {step}: grain {grain} of lane {lane}: expected it on a worker that trains, which are {trainers:?}, found it here"
    )]
    NoTrainer {
        /// The step, from 1.
        step: u64,
        /// The lane.
        lane: usize,
        /// Its index in the lane.
        grain: usize,
        /// The workers that train.
        trainers: Vec<usize>,
    },
    /// Ends that cross processes, of some of a dataflow's workers.
    #[error(
        "expected the workers that train to be threads of one process whose devices read each other's memory, or all workers \
         of the dataflow, found some of several"
    )]
    TrainersAcrossProcesses,
    /// A communicator that goes through the lanes in other rounds than the plan.
    #[error(
        "worker {worker} was given a communicator for {found} rounds of lanes, expected {planned}: make it for the plan's batch"
    )]
    ForeignLanes {
        /// The worker.
        worker: usize,
        /// Rounds of the plan.
        planned: usize,
        /// Rounds of the communicator.
        found: usize,
    },
    /// The plan has checkpoints, but the graph was given nowhere to write them.
    #[error("the first worker that trains was given nowhere to write its checkpoints")]
    NoSink,
}

impl Classified for GraphError {
    fn exit_class(&self) -> ExitClass {
        match self {
            // Arguments of the caller, which will be the same again.
            Self::Rows { .. }
            | Self::InitialState { .. }
            | Self::InitialStates { .. }
            | Self::TensorsAreCut
            | Self::NotGiven { .. }
            | Self::NoTrainer { .. }
            | Self::TrainersAcrossProcesses
            | Self::ForeignEnd { .. }
            | Self::ForeignLanes { .. }
            | Self::NoSink => ExitClass::FixInput,
            _ => ExitClass::Restart,
        }
    }
}
