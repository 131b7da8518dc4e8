//! The whole training graph: the operators, and the loops between them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tidemill_collective::carry::Courier;
use tidemill_collective::{Carry, Credit};
use tidemill_kernels::Backend;
use tidemill_model::Trainable;
use timely::dataflow::operators::core::feedback::Handle;
use timely::dataflow::operators::vec::ToStream;
use timely::dataflow::operators::{ConnectLoop, Feedback};
use timely::dataflow::{Scope, StreamVec};

use super::checkpoint::{Checkpoint, CheckpointDone, CheckpointStreams, StateSink};
use super::connection::Connection;
use super::error::GraphError;
use super::evaluate::{Evaluate, Evaluation, EvaluationReport, EvaluationSamples};
use super::forward_backward::{
    Compute, EvaluationLoss, ForwardBackward, ForwardBackwardInputs, ForwardBackwardStreams,
};
use super::gather::Gather;
use super::measure::{CommunicationReport, Measure};
use super::optimize::{
    Optimize, OptimizeInputs, OptimizeStreams, ScheduledRule, StepReport, UpdatePace,
};
use super::owned::{InitialState, Optimizer, OptimizerThread};
use super::plan::{EvaluationPlan, TrainingPlan};
use super::reduce::Reduce;
use super::samples::{Grain, SampleSource, Samples};
use super::snapshot::{Snapshot, SnapshotStreams};
use super::ticket::Ticket;
use crate::cluster::{Abort, Actor};

/// The start of each loop of a training graph. [`close`](TrainingLoops::close) ends them.
pub struct TrainingLoop<'scope> {
    /// Buckets whose parameters are present after each update: for `forward_backward`.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// Reports of each update: for `samples` and `forward_backward`.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Buckets whose state a cut has taken: for `optimize`.
    pub taken: StreamVec<'scope, u64, Ticket>,
    /// Credit for state: for `snapshot`.
    pub state_credits: StreamVec<'scope, u64, Credit>,
    /// Losses of evaluated grains: for `evaluation_samples`.
    pub evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
}

/// The ends of the loops of a [`TrainingLoop`]. Each timestamp that goes round comes back as the next.
#[must_use = "a loop that is not closed is no dataflow"]
pub struct TrainingLoops<'scope> {
    present: Handle<'scope, u64, Vec<Ticket>>,
    reports: Handle<'scope, u64, Vec<StepReport>>,
    taken: Handle<'scope, u64, Vec<Ticket>>,
    state_credits: Handle<'scope, u64, Vec<Credit>>,
    evaluation_losses: Handle<'scope, u64, Vec<EvaluationLoss>>,
}

impl<'scope> TrainingLoop<'scope> {
    /// Opens the loops in `scope`.
    pub fn open(scope: Scope<'scope, u64>) -> (Self, TrainingLoops<'scope>) {
        let (present_end, present) = scope.feedback(1);
        let (reports_end, reports) = scope.feedback(1);
        let (taken_end, taken) = scope.feedback(1);
        let (state_credits_end, state_credits) = scope.feedback(1);
        let (evaluation_losses_end, evaluation_losses) = scope.feedback(1);
        let begins = Self { present, reports, taken, state_credits, evaluation_losses };
        let ends = TrainingLoops {
            present: present_end,
            reports: reports_end,
            taken: taken_end,
            state_credits: state_credits_end,
            evaluation_losses: evaluation_losses_end,
        };
        (begins, ends)
    }
}

/// The streams that end the loops.
pub struct LoopEnds<'scope> {
    /// The stream `present` of `gather`: tickets of buckets whose parameters are there.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// The reports of `optimize`, one a step.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// The tickets from `snapshot` of buckets whose state was taken.
    pub taken: StreamVec<'scope, u64, Ticket>,
    /// The credits from `checkpoint` for chunks of state.
    pub state_credits: StreamVec<'scope, u64, Credit>,
    /// The losses of evaluation grains from `forward_backward`.
    pub evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
}

impl<'scope> TrainingLoops<'scope> {
    /// Closes the loops.
    pub fn close(self, ends: LoopEnds<'scope>) {
        ends.present.connect_loop(self.present);
        ends.reports.connect_loop(self.reports);
        ends.taken.connect_loop(self.taken);
        ends.state_credits.connect_loop(self.state_credits);
        ends.evaluation_losses.connect_loop(self.evaluation_losses);
    }
}

/// The parts of a training graph on one worker that trains. Those that do not, of a plan with [`Trainers`](super::Trainers), have
/// [`build_elsewhere`](Training::build_elsewhere).
pub struct Training<B: Backend, M> {
    /// How steps are cut and which there are: the same on every worker.
    pub plan: Arc<TrainingPlan>,
    /// The device of this worker.
    pub backend: Arc<B>,
    /// The model that is trained.
    pub model: Arc<M>,
    /// Parameters and states of the optimizer after `plan.first_step` updates.
    pub state: InitialState,
    /// The optimizer and its schedule.
    pub rule: ScheduledRule<B>,
    /// The connection of this worker with the others that train; `None` if it is alone. See [`Communicators`](crate::communicators::Communicators).
    pub connection: Option<Connection<B>>,
    /// Set to make the step that runs the last one, on every worker.
    pub stop: Arc<AtomicBool>,
    /// Where checkpoints go: on the first worker that trains, and on every one where others write too.
    pub checkpoints: Option<Box<dyn StateSink>>,
    /// Ends the run with the first error.
    pub abort: Abort,
}

/// The output streams of a training graph.
pub struct TrainingStreams<'scope> {
    /// One report a step, on every worker that trains.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// The cost of this worker's communication, for each step; nothing if it is alone.
    pub communication: StreamVec<'scope, u64, CommunicationReport>,
    /// Every complete checkpoint, on the first worker that trains.
    pub checkpoints: StreamVec<'scope, u64, CheckpointDone>,
    /// Every evaluation, on the first worker that trains.
    pub evaluations: StreamVec<'scope, u64, EvaluationReport>,
}

impl<B: Backend, M: Trainable<B>> Training<B, M> {
    /// The graph over samples of `source`, evaluated as `evaluation` says, the same on every worker.
    ///
    /// A worker reads the samples of its lanes; `source` is asked for exactly these. Where the worker does not
    /// [train](TrainingPlan::trainers), these parts are let go: see [`build_elsewhere`](Self::build_elsewhere).
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static LOSSES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
    /// # let newest = NewestParameters::new(&Slope::new().layout);
    /// # let kept = newest.clone();
    /// # run(move |scope, parts| {
    /// # let (Parts { plan, abort, cpu, connection }, newest) = (parts, kept.clone());
    /// // `Slope` is a `Trainable` of one parameter, and `Points` a `SampleSource`.
    /// let model = Arc::new(Slope::new());
    /// let settings = OptimizerSettings { learning_rate: 0.5, ..Default::default() };
    /// let training = Training {
    ///     plan,
    ///     backend: cpu,
    ///     state: InitialState { parameters: Arc::new(model.initialize(0)), states: None },
    ///     model,
    ///     rule: ScheduledRule::new(&settings, ScheduleSettings::default(), STEPS),
    ///     connection,
    ///     stop: Arc::new(AtomicBool::new(false)),
    ///     checkpoints: (scope.index() == 0).then(|| Box::new(newest) as Box<dyn StateSink>),
    ///     abort,
    /// };
    /// let TrainingStreams { reports, .. } = training.build(scope, Points::default(), None);
    /// reports.inspect(|report| {
    ///     println!("step {}: loss {:.4}", report.step, report.loss);
    ///     # LOSSES.lock().expect("no panic").push(report.loss);
    /// });
    /// # })?;
    /// // The points are those of a slope of 3.
    /// let (step, arena) = newest.take().expect("a checkpoint after the last step");
    /// assert!(step == 4 && arena[0] > 1.0);
    /// # let mut losses = LOSSES.lock().expect("no panic").clone();
    /// # losses.sort_by(f64::total_cmp);
    /// # // Each step is reported on both workers, with the same loss.
    /// # assert!(losses.len() == 8 && losses.chunks(2).all(|both| both[0] == both[1]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn build<'scope>(
        self,
        scope: Scope<'scope, u64>,
        source: impl SampleSource<Sample = M::Sample>,
        evaluation: Option<Evaluation<M::Sample>>,
    ) -> TrainingStreams<'scope> {
        let (plan, abort) = (Arc::clone(&self.plan), self.abort.clone());
        Self::build_in(scope, Some(self), (&plan, &abort), source, evaluation)
    }

    /// The graph over a user's own grains: every grain of this worker's lanes, for every step. Evaluated as
    /// `evaluation` says, the same on every worker.
    pub fn build_over<'scope>(
        self,
        grains: StreamVec<'scope, u64, Grain<M::Sample>>,
        evaluation: Option<Evaluation<M::Sample>>,
    ) -> TrainingStreams<'scope> {
        let (begins, ends) = TrainingLoop::open(grains.scope());
        let (plan, abort) = (Arc::clone(&self.plan), self.abort.clone());
        Self::connect(grains, Some(self), (&plan, &abort), evaluation, (begins, ends))
    }

    /// The graph of [`build`](Self::build) on a worker that does not [train](TrainingPlan::trainers), without a device, parameters or
    /// threads. All its streams are empty. `evaluation` is the plan of the other workers' evaluation.
    pub fn build_elsewhere<'scope>(
        scope: Scope<'scope, u64>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        evaluation: Option<EvaluationPlan>,
    ) -> TrainingStreams<'scope> {
        let source = None::<Box<dyn SampleSource<Sample = M::Sample>>>;
        Self::build_in(scope, None, (plan, abort), source, evaluation.map(Evaluation::elsewhere))
    }

    /// The graph of [`build_over`](Self::build_over) on a worker that does not [train](TrainingPlan::trainers). No grain may come there: a
    /// program whose other workers make them exchanges them before, by [`Place`](super::trainers::Place).
    pub fn build_over_elsewhere<'scope>(
        grains: StreamVec<'scope, u64, Grain<M::Sample>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        evaluation: Option<EvaluationPlan>,
    ) -> TrainingStreams<'scope> {
        let loops = TrainingLoop::open(grains.scope());
        let evaluation = evaluation.map(Evaluation::elsewhere);
        Self::connect(grains, None, (plan, abort), evaluation, loops)
    }

    fn build_in<'scope>(
        scope: Scope<'scope, u64>,
        own: Option<Self>,
        (plan, abort): (&Arc<TrainingPlan>, &Abort),
        source: impl SampleSource<Sample = M::Sample>,
        evaluation: Option<Evaluation<M::Sample>>,
    ) -> TrainingStreams<'scope> {
        let (begins, ends) = TrainingLoop::open(scope);
        let grains = scope.samples(source, begins.reports.clone(), plan, abort);
        Self::connect(grains, own, (plan, abort), evaluation, (begins, ends))
    }

    fn connect<'scope>(
        grains: StreamVec<'scope, u64, Grain<M::Sample>>,
        own: Option<Self>,
        (plan, abort): (&Arc<TrainingPlan>, &Abort),
        evaluation: Option<Evaluation<M::Sample>>,
        (begins, loops): (TrainingLoop<'scope>, TrainingLoops<'scope>),
    ) -> TrainingStreams<'scope> {
        let scope = grains.scope();
        let trains = plan.trainers.place_in(scope, abort).rank().is_some();
        let Started { thread, compute, pace, checkpoints, courier } = match own {
            Some(own) if trains => own.start(scope),
            _ => Started::nothing(scope, plan, abort),
        };

        let evaluation_plan = evaluation.as_ref().map(|evaluation| evaluation.plan);
        let evaluations = evaluation.map(|evaluation| {
            let (reports, losses) = (begins.reports.clone(), begins.evaluation_losses.clone());
            scope.evaluation_samples(evaluation, reports, losses, plan, abort)
        });
        let inputs =
            ForwardBackwardInputs { present: begins.present, reports: begins.reports, evaluations };
        let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } =
            grains.forward_backward(inputs, compute, plan, abort);
        let inputs = OptimizeInputs { counted, losses, taken: begins.taken };
        let OptimizeStreams { updated, reports } =
            ready.reduce(&thread).optimize(inputs, &pace, &thread, plan);
        let present = updated.clone().gather(&thread);
        let communication = present.clone().measure(&thread);
        if let Some(courier) = courier {
            present.clone().carry(courier, plan.window_bytes);
        }
        let SnapshotStreams { state, taken } =
            updated.snapshot(reports.clone(), begins.state_credits, &thread, plan);
        let CheckpointStreams { done, state_credits } =
            state.checkpoint(reports.clone(), checkpoints, &thread, plan);
        let evaluations = match evaluation_plan {
            Some(evaluation) => evaluation_losses.clone().evaluate(evaluation, plan, abort),
            None => Vec::new().to_stream(scope),
        };
        loops.close(LoopEnds {
            present,
            reports: reports.clone(),
            taken,
            state_credits,
            evaluation_losses,
        });
        TrainingStreams { reports, communication, checkpoints: done, evaluations }
    }

    /// Starts the optimizer thread.
    fn start(self, scope: Scope<'_, u64>) -> Started<B, M> {
        let Self { plan, backend, model, state, rule, connection, stop, checkpoints, abort } = self;
        let (mut communicator, lending) = match connection {
            Some(Connection { communicator, lending }) => (Some(communicator), lending),
            None => (None, None),
        };
        let courier = communicator.as_mut().and_then(|end| end.courier());
        if let Some(communicator) = &communicator {
            abort.on_abort(communicator.abort_handle());
        }
        if courier.is_some() && !plan.trainers.are_all() {
            abort.fail(Actor::Worker(scope.index()), GraphError::TrainersAcrossProcesses);
        }
        let (borrower, lender) = match lending {
            Some(lending) => {
                abort.on_abort(lending.abort_handle());
                lending.between(communicator)
            }
            None => super::lending::lending(communicator),
        };
        let layout = model.layout().clone();
        let pace = rule.pace.clone();
        let optimizer =
            Optimizer { backend: Arc::clone(&backend), layout: &layout, state, lender, rule };
        let thread = OptimizerThread::start(optimizer, &plan, &abort, scope);
        let compute = Some(Compute { backend, model, borrower, stop });
        Started { thread, compute, pace, checkpoints, courier }
    }
}

/// The parts of the graph that a worker starts for itself.
struct Started<B: Backend, M> {
    thread: OptimizerThread,
    compute: Option<Compute<B, M>>,
    pace: UpdatePace,
    checkpoints: Option<Box<dyn StateSink>>,
    courier: Option<Courier>,
}

impl<B: Backend, M> Started<B, M> {
    /// The parts of a worker that does not train.
    fn nothing(scope: Scope<'_, u64>, plan: &Arc<TrainingPlan>, abort: &Abort) -> Self {
        Self {
            thread: OptimizerThread::start(None::<Optimizer<'_, B>>, plan, abort, scope),
            compute: None,
            // This worker makes no updates.
            pace: UpdatePace { clip_norm: None, learning_rate: Arc::new(|_| 0.0) },
            checkpoints: None,
            courier: None,
        }
    }
}
