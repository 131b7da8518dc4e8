// The hidden part of the operators' examples: a model of one number, and the operators of a chain that an example is not about.
// An example includes the whole file, which is no module of the crate.

use std::collections::VecDeque;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
// The standard one: crates whose names come with globs have their own.
use std::result::Result;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::*;
use tidemill::collective::Credit;
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::*;
use tidemill::operators::checkpoint::*;
use tidemill::operators::evaluate::*;
use tidemill::operators::forward_backward::*;
use tidemill::operators::optimize::*;
use tidemill::operators::snapshot::*;
use tidemill::operators::train::*;
use tidemill::operators::*;
use timely::dataflow::operators::Inspect;
use timely::dataflow::operators::vec::ToStream;
use timely::dataflow::{Scope, StreamVec};

const STEPS: u64 = 4;
const WORKERS: usize = 2;

/// `y` is `slope x`.
#[derive(Clone, Debug)]
struct Point {
    x: f32,
    y: f32,
}

impl Sample for Point {}

struct Slope {
    layout: Layout,
}

impl Slope {
    fn new() -> Self {
        let mut layout = Layout::new();
        let segment = layout.segment("slope");
        let slope = layout.tensor("slope", &[1], Decay::Exempt, 1);
        layout.set_reading(slope, Reading::Fp32);
        layout.block("slope", &[segment]);
        Self { layout }
    }

    fn run(
        &self,
        slope: f32,
        microbatch: Microbatch<'_, Point>,
        mut gradient: impl FnMut(f32),
    ) -> Vec<GrainLoss> {
        let mut losses = Vec::new();
        for grain in microbatch.grains() {
            let (mut loss_sum, mut sum) = (0.0, 0.0);
            for Point { x, y } in grain {
                let error = slope * x - y;
                loss_sum += f64::from(0.5 * error * error);
                sum += error * x;
            }
            gradient(sum);
            losses.push(GrainLoss { loss_sum, tokens: grain.len() as u64 });
        }
        losses
    }
}

impl Trainable<Cpu> for Slope {
    type Sample = Point;
    type Workspace = ();

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, _: u64) -> Vec<f32> {
        vec![0.0; self.layout.parameter_elements()]
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "slope" })
    }

    fn plan(&self, _: &mut Device<'_, Cpu>, _: MicrobatchShape) -> tidemill::model::Result<()> {
        Ok(())
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Point>,
    ) -> tidemill::model::Result<Vec<GrainLoss>> {
        parameters.enter(device, 0, Direction::Forward)?;
        let slope = parameters.lease(0)?.vector(&(0..1))?.values()[0];
        Ok(self.run(slope, microbatch, |_| ()))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Point>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> tidemill::model::Result<Vec<GrainLoss>> {
        parameters.enter(device, 0, Direction::Backward)?;
        let slope = parameters.lease(0)?.vector(&(0..1))?.values()[0];
        let losses = self.run(slope, microbatch, |sum| sink.accumulator(0).values()[0] += sum);
        sink.block_done(device, 0)?;
        Ok(losses)
    }
}

/// Points of `y = 3 x`, by their position.
#[derive(Default)]
struct Points(VecDeque<u64>);

impl SampleSource for Points {
    type Sample = Point;

    fn request(&mut self, positions: Range<u64>) {
        self.0.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Point)>, Failure> {
        let x = |position| (position % 7) as f32 / 7.0;
        let point = |position| (position, Point { x: x(position), y: 3.0 * x(position) });
        Ok(self.0.pop_front().map(point))
    }

    fn set_wake(&mut self, _: Wake) {}
}

/// The arguments that all operators share, on one worker.
struct Parts {
    plan: Arc<TrainingPlan>,
    abort: Abort,
    cpu: Arc<Cpu>,
    connection: Option<Connection<Cpu>>,
}

/// Runs `build` on every worker, with three steps of four samples in two lanes.
fn run(build: impl Fn(Scope<'_, u64>, Parts) + Send + Sync + 'static) -> Result<(), Failure> {
    let cluster = ClusterSettings::workers(WORKERS);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch =
        BatchSettings { samples_per_step: Some(8), lanes: Some(2), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let ends = Communicators::of_cluster(&[&*cpu; WORKERS], &cluster, &batch)?;
    execute(cluster, move |context| {
        let mut plan = TrainingPlan::new(batch.clone(), &Slope::new().layout, 1, STEPS);
        plan.checkpoints = CheckpointCuts::Every(NonZeroU64::MIN.saturating_add(1));
        let parts = Parts {
            plan: Arc::new(plan),
            abort: context.abort().clone(),
            cpu: Arc::clone(&cpu),
            connection: ends.take(context, &cpu)?,
        };
        context.dataflow::<u64, _, _>(|scope| build(scope, parts));
        Ok(context.run_until_done()?)
    })?;
    Ok(())
}

/// A chain as far as its grains.
struct Started<'scope> {
    grains: StreamVec<'scope, u64, Grain<Point>>,
    inputs: ForwardBackwardInputs<'scope, Point>,
    compute: Compute<Cpu, Slope>,
    /// Losses of evaluations that come back.
    evaluated: StreamVec<'scope, u64, EvaluationLoss>,
    rest: Rest<'scope>,
}

/// The operators that follow `forward_backward` in the chain.
struct Rest<'scope> {
    plan: Arc<TrainingPlan>,
    abort: Abort,
    thread: OptimizerThread,
    pace: UpdatePace,
    taken: Option<StreamVec<'scope, u64, Ticket>>,
    state_credits: Option<StreamVec<'scope, u64, Credit>>,
    loops: TrainingLoops<'scope>,
}

fn start<'scope>(scope: Scope<'scope, u64>, parts: Parts) -> Started<'scope> {
    let Parts { plan, abort, cpu, connection } = parts;
    let model = Arc::new(Slope::new());
    let settings = OptimizerSettings { learning_rate: 0.5, ..Default::default() };
    let rule = ScheduledRule::new(&settings, ScheduleSettings::default(), STEPS);
    let end = connection.map(|connection| connection.communicator);
    if let Some(end) = &end {
        abort.on_abort(end.abort_handle());
    }
    let (borrower, lender) = lending(end);
    let parameters = Arc::new(model.initialize(0));
    let optimizer = Optimizer {
        backend: Arc::clone(&cpu),
        layout: &model.layout,
        state: InitialState { parameters, states: None },
        lender,
        rule: rule.clone(),
    };
    let thread = OptimizerThread::start(optimizer, &plan, &abort, scope);
    let stop = Arc::new(AtomicBool::new(false));
    let (begins, loops) = TrainingLoop::open(scope);
    let TrainingLoop { present, reports, taken, state_credits, evaluation_losses } = begins;
    let grains = scope.samples(Points::default(), reports.clone(), &plan, &abort);
    let (taken, state_credits) = (Some(taken), Some(state_credits));
    Started {
        grains,
        inputs: ForwardBackwardInputs { present, reports, evaluations: None },
        compute: Compute { backend: cpu, model: Arc::clone(&model), borrower, stop },
        evaluated: evaluation_losses,
        rest: Rest { plan, abort, thread, pace: rule.pace, taken, state_credits, loops },
    }
}

/// A chain as far as its gradients.
fn computed<'scope>(
    scope: Scope<'scope, u64>,
    parts: Parts,
) -> (ForwardBackwardStreams<'scope>, Rest<'scope>) {
    let Started { grains, inputs, compute, rest, .. } = start(scope, parts);
    (grains.forward_backward(inputs, compute, &rest.plan, &rest.abort), rest)
}

/// A chain as far as its updates; besides, the losses of evaluations, of which there are none.
fn updated<'scope>(
    scope: Scope<'scope, u64>,
    parts: Parts,
) -> (OptimizeStreams<'scope>, StreamVec<'scope, u64, EvaluationLoss>, Rest<'scope>) {
    let (ForwardBackwardStreams { ready, counted, losses, evaluation_losses }, mut rest) =
        computed(scope, parts);
    let inputs = rest.optimize_inputs(counted, losses);
    let summed = ready.reduce(&rest.thread);
    (summed.optimize(inputs, &rest.pace, &rest.thread, &rest.plan), evaluation_losses, rest)
}

impl<'scope> Rest<'scope> {
    fn optimize_inputs(
        &mut self,
        counted: StreamVec<'scope, u64, LaneTokens>,
        losses: StreamVec<'scope, u64, LaneLoss>,
    ) -> OptimizeInputs<'scope> {
        let taken = self.taken.take().expect("once");
        OptimizeInputs { counted, losses, taken }
    }

    /// Everything behind what was updated.
    fn close(
        self,
        updates: OptimizeStreams<'scope>,
        evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
    ) {
        let present = updates.updated.clone().gather(&self.thread);
        self.close_with(present, updates, evaluation_losses);
    }

    /// Everything behind what was gathered.
    fn close_with(
        mut self,
        present: StreamVec<'scope, u64, Ticket>,
        updates: OptimizeStreams<'scope>,
        evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
    ) {
        let OptimizeStreams { updated, reports } = updates;
        let credits = self.state_credits.take().expect("once");
        let SnapshotStreams { state, taken } =
            updated.snapshot(reports.clone(), credits, &self.thread, &self.plan);
        let sink = Box::new(Kept::default()) as Box<dyn StateSink>;
        let sink = (reports.scope().index() == 0).then_some(sink);
        let CheckpointStreams { state_credits, .. } =
            state.checkpoint(reports.clone(), sink, &self.thread, &self.plan);
        self.loops.close(LoopEnds { present, reports, taken, state_credits, evaluation_losses });
    }
}

/// A sink that keeps the slope of every checkpoint.
#[derive(Clone, Default)]
struct Kept {
    slopes: Arc<Mutex<Vec<f32>>>,
    next: f32,
}

impl StateSink for Kept {
    fn begin(&mut self, _: &StepReport) -> Result<(), Failure> {
        Ok(())
    }

    fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<(), Failure> {
        if part == StatePart::Parameter && start == 0 {
            self.next = values[0];
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Failure> {
        self.slopes.lock().unwrap_or_else(PoisonError::into_inner).push(self.next);
        Ok(())
    }
}
