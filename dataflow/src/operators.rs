//! The training graph: extension traits on timely streams, one verb a file.
//!
//! ```text
//! samples -> forward_backward -> reduce -> optimize -> gather -> (parameters present) -> next step
//!    ^             ^                          |                          |
//!    +-------------+-------- reports ---------+                          |
//!                  +-----------------------------------------------------+
//! ```
//!
//! The bytes of gradients and parameters stay where they are computed, and a [`Communicator`] moves them between workers;
//! operators tell each other of their progress by tickets. `snapshot` and `checkpoint` hang on `optimize`.
//!
//! [`Communicator`]: tidemill_collective::communicator::Communicator
//!
//! Timestamps are steps, counted from 0 (updates done before them). Each operator's docs say its contract; none
//! ever blocks. Blocking work (of a device, a writer, a decoder) runs on a thread that wakes its operator, and logic that
//! is not about capabilities is in plain structs.
//!
//! | module | verb |
//! |---|---|
//! | [`samples`] | cuts samples in canonical order into grains, reading ahead |
//! | [`table_samples`] | rows of Parquet files, whatever their columns, as samples |
//! | [`forward_backward`] | computes losses and gradients on a device |
//! | [`reduce`] | sums gradients over all lanes, at their owners |
//! | [`optimize`] | clips gradients and updates each worker's part; reports each step |
//! | [`gather`] | brings updated parameters to every worker |
//! | [`measure`] | reports the cost of communication |
//! | [`snapshot`] | copies each worker's part of the state while training goes on |
//! | [`checkpoint`] | hands the state to a writer |
//! | [`evaluate`] | measures the loss on other samples |
//! | [`train`] | all of them, with the loops between |
//! | [`stream_data`] | streams a data set, or rows of any columns, into any timely program |
//! | [`plan`] | the plan that all of them share |
//! | [`trainers`] | which workers of the dataflow train |
//! | [`error`] | breaches of their contracts |
//! | [`sample_names`] | the names of samples in errors |
//! | [`owned`] | the state that a worker owns, and the thread that keeps it |
//! | [`lending`](mod@lending) | the parameters, and which thread has them when |
//! | [`connection`] | the way from a worker that trains to the others |
//! | [`ticket`] | messages between operators about both |
//!
//! Start at [`train`].

pub(crate) mod addressed;
pub(crate) mod bucket_memory;
pub mod checkpoint;
pub mod connection;
pub mod error;
pub mod evaluate;
pub mod forward_backward;
pub mod gather;
pub(crate) mod gather_plan;
mod job_thread;
pub mod lending;
pub mod measure;
pub mod optimize;
pub mod owned;
pub mod plan;
mod queue_trace;
pub mod reduce;
pub(crate) mod requests;
pub mod sample_names;
pub mod samples;
pub mod snapshot;
mod span;
pub mod stream_data;
pub mod table_samples;
pub mod ticket;
pub mod train;
pub mod trainers;

use std::sync::{Arc, Mutex, PoisonError};

use timely::dataflow::Scope;
use timely::dataflow::operators::generic::OperatorInfo;

pub use tidemill_collective::StatePart;

pub use checkpoint::{Checkpoint, CheckpointDone, NewestParameters, StateSink};
pub use connection::Connection;
pub use error::GraphError;
pub use evaluate::{Evaluate, Evaluation, EvaluationReport, EvaluationSamples, Scores, TaskScores};
pub use forward_backward::{Compute, ForwardBackward, LaneLoss};
pub use gather::Gather;
pub use lending::{Borrower, Lender, lending};
pub use measure::{Communication, CommunicationReport, Measure};
pub use optimize::{Optimize, ScheduledRule, StepReport, UpdatePace};
pub use owned::{InitialState, Optimizer, OptimizerThread};
pub use plan::{CheckpointCuts, EvaluationPlan, TrainingPlan};
pub use reduce::Reduce;
pub use sample_names::{SampleName, SampleNames};
pub use samples::{Grain, SampleSource, Samples, Wake};
pub use snapshot::Snapshot;
pub use stream_data::{Positioned, StreamData, StreamPlan, StreamedResult, WorkerPositions};
pub use table_samples::TableSamples;
pub use ticket::{Ready, Ticket};
pub use train::{Training, TrainingLoop, TrainingStreams};
pub use trainers::{Place, Trainers};

use crate::cluster::Failure;

/// Keeps the first failure of a turn, whose inputs are drained to the end all the same.
fn keep_first(result: &mut Result<(), Failure>, next: Result<(), Failure>) {
    if result.is_ok() {
        *result = next;
    }
}

/// Activates an operator from any thread; after its worker is gone it does nothing.
pub(crate) fn wake(scope: Scope<'_, u64>, operator: &OperatorInfo) -> Wake {
    let activator = scope.worker().sync_activator_for(operator.address.to_vec());
    let activator = Mutex::new(activator);
    Arc::new(move || {
        let activator = activator.lock().unwrap_or_else(PoisonError::into_inner);
        // An error means that the worker is gone, and with it the operator that was to be woken.
        let _ = activator.activate();
    })
}
