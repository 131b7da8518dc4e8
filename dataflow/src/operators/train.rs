//! The whole training graph: the operators, and the loops between them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tidemill_collective::communicator::Communicator;
use tidemill_collective::{Chunk, Credit};
use tidemill_kernels::Backend;
use tidemill_model::Trainable;
use timely::dataflow::operators::core::feedback::Handle;
use timely::dataflow::operators::vec::ToStream;
use timely::dataflow::operators::{ConnectLoop, Feedback};
use timely::dataflow::{Scope, Stream, StreamVec};

use super::checkpoint::{Checkpoint, CheckpointDone, CheckpointStreams, StateSink};
use super::error::GraphError;
use super::evaluate::{Evaluate, Evaluation, EvaluationReport, EvaluationSamples};
use super::forward_backward::{
    Compute, EvaluationLoss, ForwardBackward, ForwardBackwardInputs, ForwardBackwardStreams,
};
use super::lending::{lending, stays_on_device};
use super::optimize::{
    InitialState, Optimize, OptimizeInputs, OptimizeStreams, Optimizer, StepReport, UpdateRule,
};
use super::plan::TrainingPlan;
use super::reduce::Reduce;
use super::samples::{Grain, SampleSource, Samples};
use super::ticket::Ticket;
use crate::cluster::{Abort, Actor};

/// What goes round in a training graph: the beginning of each loop. [`close`](TrainingLoops::close) ends them.
pub struct TrainingLoop<'scope> {
    /// Parameters after each update: for `forward_backward`.
    pub parameters: Stream<'scope, u64, Chunk>,
    /// Buckets whose parameters are present after each update, where state stays on devices: for `forward_backward`.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// Reports of each update: for `samples` and `forward_backward`.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Credit for parameters: for `optimize`.
    pub parameter_credits: StreamVec<'scope, u64, Credit>,
    /// Credit for state: for `optimize`.
    pub state_credits: StreamVec<'scope, u64, Credit>,
    /// Losses of evaluated grains: for `evaluation_samples`.
    pub evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
}

/// The ends of the loops of a [`TrainingLoop`]. Each timestamp that goes round comes back as the next.
#[must_use = "a loop that is not closed is no dataflow"]
pub struct TrainingLoops<'scope> {
    parameters: Handle<'scope, u64, Chunk>,
    present: Handle<'scope, u64, Vec<Ticket>>,
    reports: Handle<'scope, u64, Vec<StepReport>>,
    parameter_credits: Handle<'scope, u64, Vec<Credit>>,
    state_credits: Handle<'scope, u64, Vec<Credit>>,
    evaluation_losses: Handle<'scope, u64, Vec<EvaluationLoss>>,
}

impl<'scope> TrainingLoop<'scope> {
    /// Opens the loops in `scope`.
    pub fn open(scope: Scope<'scope, u64>) -> (Self, TrainingLoops<'scope>) {
        let (parameters_end, parameters) = scope.feedback(1);
        let (present_end, present) = scope.feedback(1);
        let (reports_end, reports) = scope.feedback(1);
        let (parameter_credits_end, parameter_credits) = scope.feedback(1);
        let (state_credits_end, state_credits) = scope.feedback(1);
        let (evaluation_losses_end, evaluation_losses) = scope.feedback(1);
        let begins = Self {
            parameters,
            present,
            reports,
            parameter_credits,
            state_credits,
            evaluation_losses,
        };
        let ends = TrainingLoops {
            parameters: parameters_end,
            present: present_end,
            reports: reports_end,
            parameter_credits: parameter_credits_end,
            state_credits: state_credits_end,
            evaluation_losses: evaluation_losses_end,
        };
        (begins, ends)
    }
}

/// What flows into the ends of the loops.
pub struct LoopEnds<'scope> {
    /// Of `optimize`.
    pub parameters: Stream<'scope, u64, Chunk>,
    /// Of `optimize`.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// Of `optimize`.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Of `forward_backward`.
    pub parameter_credits: StreamVec<'scope, u64, Credit>,
    /// Of `checkpoint`.
    pub state_credits: StreamVec<'scope, u64, Credit>,
    /// Of `forward_backward`.
    pub evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
}

impl<'scope> TrainingLoops<'scope> {
    /// Closes the loops.
    pub fn close(self, ends: LoopEnds<'scope>) {
        ends.parameters.connect_loop(self.parameters);
        ends.present.connect_loop(self.present);
        ends.reports.connect_loop(self.reports);
        ends.parameter_credits.connect_loop(self.parameter_credits);
        ends.state_credits.connect_loop(self.state_credits);
        ends.evaluation_losses.connect_loop(self.evaluation_losses);
    }
}

/// What a training graph is made of, on one worker.
pub struct Training<B: Backend, M> {
    /// How steps are cut and which there are: the same on every worker.
    pub plan: Arc<TrainingPlan>,
    /// The device of this worker.
    pub backend: Arc<B>,
    /// What is trained.
    pub model: Arc<M>,
    /// Parameters and moments after `plan.first_step` updates.
    pub state: InitialState,
    /// The optimizer and its schedule.
    pub rule: UpdateRule,
    /// This worker's end between the devices of all workers: then state stays there. Without it, state of several workers goes
    /// through the host. All workers have one, or none. See [`Communicators`](crate::device::Communicators).
    pub communicator: Option<Box<dyn Communicator<B>>>,
    /// Set to make the step that runs the last one, on every worker.
    pub stop: Arc<AtomicBool>,
    /// Where worker 0 writes checkpoints.
    pub checkpoints: Option<Box<dyn StateSink>>,
    /// Ends the run with the first error.
    pub abort: Abort,
}

/// What a training graph gives.
pub struct TrainingStreams<'scope> {
    /// One report a step, on every worker.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Every complete checkpoint, on worker 0.
    pub checkpoints: StreamVec<'scope, u64, CheckpointDone>,
    /// Every evaluation, on worker 0.
    pub evaluations: StreamVec<'scope, u64, EvaluationReport>,
}

impl<B: Backend, M: Trainable<B>> Training<B, M> {
    /// The graph over samples of `source`, evaluated as `evaluation` says, the same on every worker.
    ///
    /// The samples of a worker are those of its lanes; `source` is asked for exactly these.
    pub fn build<'scope>(
        self,
        scope: Scope<'scope, u64>,
        source: impl SampleSource,
        evaluation: Option<Evaluation>,
    ) -> TrainingStreams<'scope> {
        let (begins, ends) = TrainingLoop::open(scope);
        let grains = scope.samples(source, begins.reports.clone(), &self.plan, &self.abort);
        self.connect(grains, evaluation, begins, ends)
    }

    /// The graph over a user's own grains: every grain of this worker's lanes, for every step. Evaluated as
    /// `evaluation` says, the same on every worker.
    pub fn build_over<'scope>(
        self,
        grains: StreamVec<'scope, u64, Grain>,
        evaluation: Option<Evaluation>,
    ) -> TrainingStreams<'scope> {
        let (begins, ends) = TrainingLoop::open(grains.scope());
        self.connect(grains, evaluation, begins, ends)
    }

    fn connect<'scope>(
        self,
        grains: StreamVec<'scope, u64, Grain>,
        evaluation: Option<Evaluation>,
        begins: TrainingLoop<'scope>,
        loops: TrainingLoops<'scope>,
    ) -> TrainingStreams<'scope> {
        let Self { plan, backend, model, state, rule, communicator, stop, checkpoints, abort } =
            self;
        let layout = model.layout().clone();
        let scope = grains.scope();
        let (mut borrower, mut lender) = (None, None);
        if stays_on_device(&plan, &*backend, communicator.as_deref(), scope.peers()) {
            if let Some(communicator) = &communicator {
                let (worker, rank) = (scope.index(), communicator.rank());
                if rank != worker {
                    abort.fail(Actor::Worker(worker), GraphError::ForeignEnd { worker, rank });
                }
                abort.on_abort(communicator.abort_handle());
            }
            let (of_device, of_optimizer) = lending(communicator);
            (borrower, lender) = (Some(of_device), Some(of_optimizer));
        }
        let evaluation_plan = evaluation.as_ref().map(|evaluation| evaluation.plan);
        let evaluations = evaluation.map(|evaluation| {
            let (reports, losses) = (begins.reports.clone(), begins.evaluation_losses.clone());
            scope.evaluation_samples(evaluation, reports, losses, &plan, &abort)
        });
        let compute = Compute {
            backend: Arc::clone(&backend),
            model,
            parameters: Arc::clone(&state.parameters),
            borrower,
            stop,
        };
        let inputs = ForwardBackwardInputs {
            parameters: begins.parameters,
            present: begins.present,
            reports: begins.reports,
            evaluations,
        };
        let ForwardBackwardStreams {
            gradients,
            summed,
            losses,
            parameter_credits,
            evaluation_losses,
        } = grains.forward_backward(inputs, compute, &plan, &abort);
        let inputs = OptimizeInputs {
            summed,
            losses,
            parameter_credits: begins.parameter_credits,
            state_credits: begins.state_credits,
        };
        let optimizer = Optimizer { backend, layout: &layout, state, lender, rule };
        let OptimizeStreams { parameters, present, reports, state } =
            gradients.reduce(&plan, &layout, &abort).optimize(inputs, optimizer, &plan, &abort);
        let CheckpointStreams { done, state_credits } =
            state.checkpoint(reports.clone(), checkpoints, &plan, &abort);
        let evaluations = match evaluation_plan {
            Some(evaluation) => evaluation_losses.clone().evaluate(evaluation, &plan, &abort),
            None => Vec::new().to_stream(scope),
        };
        loops.close(LoopEnds {
            parameters,
            present,
            reports: reports.clone(),
            parameter_credits,
            state_credits,
            evaluation_losses,
        });
        TrainingStreams { reports, checkpoints: done, evaluations }
    }
}
