//! The operators of training, one after the other, in a `timely::execute` of your own.
//!
//! ```text
//! cargo example operators_one_by_one
//! ```
//!
//! `Training::build` chains them for you, and `tidemill::cluster::execute` starts workers. If your
//! program already has a timely runtime, or needs something between two operators, you write the
//! chain yourself: this is all of it. `EmbeddedRun` ends the run on all workers if one fails. The
//! example taps two streams of the chain, the losses of lanes and the tickets of buckets whose
//! gradients are final.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};
use tidemill::batch::{BatchSettings, MicrobatchMemory};
use tidemill::cluster::{Abort, ClusterSettings, EmbeddedRun, Failure};
use tidemill::collective::communicator::Communicator;
use tidemill::device::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{LanguageModel, MambaConfig, Tokens, Trainable};
use tidemill::operators::forward_backward::{ForwardBackwardInputs, ForwardBackwardStreams};
use tidemill::operators::optimize::{OptimizeInputs, OptimizeStreams};
use tidemill::operators::train::LoopEnds;
use tidemill::operators::{
    Compute, ForwardBackward, Gather, InitialState, LaneLoss, Optimize, Optimizer, OptimizerThread,
    Reduce, SampleSource, Samples, ScheduledRule, StepReport, TrainingLoop, TrainingPlan, Wake,
    lending,
};
use timely::dataflow::operators::Inspect;
use timely::dataflow::operators::vec::ToStream;
use timely::dataflow::{Scope, StreamVec};

const VOCABULARY: usize = 31;
const POSITIONS: usize = 24;
/// Lanes of a step: as many workers are possible.
const LANES: usize = 4;
const STEPS: u64 = 40;

/// The parts of a worker's chain.
struct Parts {
    cpu: Arc<Cpu>,
    model: Arc<LanguageModel<Cpu>>,
    plan: Arc<TrainingPlan>,
    /// Its end of the communicator between workers; `None` if it is alone.
    end: Option<Box<dyn Communicator<Cpu>>>,
    abort: Abort,
}

/// The streams of a chain that the program reads.
struct Tapped<'scope> {
    /// One report a step, the same on every worker.
    reports: StreamVec<'scope, u64, StepReport>,
    /// One loss for each lane of the worker and step.
    losses: StreamVec<'scope, u64, LaneLoss>,
}

/// From samples to updated parameters, and back.
fn train_in<'scope>(
    scope: Scope<'scope, u64>,
    parts: Parts,
    ready_buckets: Rc<Cell<u64>>,
) -> Tapped<'scope> {
    let Parts { cpu, model, plan, end, abort } = parts;
    let optimizer = OptimizerSettings { learning_rate: 1e-2, ..Default::default() };
    let rule = ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS);
    // A worker that waits for others must be woken when the run is ended.
    if let Some(end) = &end {
        abort.on_abort(end.abort_handle());
    }
    // Two threads alternate in using the parameters: one computes with them, one updates them.
    let (borrower, lender) = lending(end);
    let layout = Trainable::<Cpu>::layout(&*model);
    let parameters = Arc::new(Trainable::<Cpu>::initialize(&*model, 17));
    let optimizer = Optimizer {
        backend: Arc::clone(&cpu),
        layout,
        state: InitialState { parameters, states: None },
        lender,
        rule: rule.clone(),
    };
    let thread = OptimizerThread::start(optimizer, &plan, &abort, scope);
    let stop = Arc::new(AtomicBool::new(false));
    let compute = Compute { backend: cpu, model: Arc::clone(&model), borrower, stop };

    // The inputs of the feedback loops.
    let (begins, loops) = TrainingLoop::open(scope);
    let grains = scope.samples(Counting::default(), begins.reports.clone(), &plan, &abort);

    let inputs = ForwardBackwardInputs {
        present: begins.present,
        reports: begins.reports,
        evaluations: None,
    };
    let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } =
        grains.forward_backward(inputs, compute, &plan, &abort);

    let ready = ready.inspect(move |_| ready_buckets.set(ready_buckets.get() + 1));

    // There are no checkpoints: `snapshot` and `checkpoint` would supply the inputs that are empty
    // here.
    let inputs = OptimizeInputs { counted, losses: losses.clone(), taken: begins.taken };
    let OptimizeStreams { updated, reports } =
        ready.reduce(&thread).optimize(inputs, &rule.pace, &thread, &plan);

    let present = updated.gather(&thread);

    loops.close(LoopEnds {
        present,
        reports: reports.clone(),
        taken: Vec::new().to_stream(scope),
        state_credits: Vec::new().to_stream(scope),
        evaluation_losses,
    });
    Tapped { reports, losses }
}

/// The output of a run: the losses of its steps, those of the lanes of the last step, and how often
/// gradients of a bucket were final.
#[derive(Debug, Default)]
struct Told {
    losses: Vec<f64>,
    lanes: Vec<(u32, f64)>,
    ready_buckets: u64,
}

fn main() -> Result<()> {
    let (one, two) = (train(1)?, train(2)?);
    ensure!(one.losses == two.losses, "the losses must not depend on the number of workers");
    ensure!(one.lanes == two.lanes, "nor those of lanes");
    let (first, last) = (one.losses[0], one.losses[STEPS as usize - 1]);
    println!("loss {first:.3} -> {last:.3}: the same bits with 1 and with 2 workers");
    println!("of the lanes of the last step: {:.3?}", one.lanes);
    println!(
        "tickets of {} buckets with 1 worker, {} with 2",
        one.ready_buckets, two.ready_buckets
    );
    ensure!(last < 0.5 * first, "the model learns");
    Ok(())
}

fn train(workers: usize) -> Result<Told> {
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch =
        BatchSettings { samples_per_step: Some(8), lanes: Some(LANES), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    // The communicators between the workers, all of this process; each worker takes its end.
    let cluster = ClusterSettings::threads(workers);
    let ends = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let model = Arc::new(LanguageModel::new(&MambaConfig::new(VOCABULARY, 16, 1))?);
    let layout = Trainable::<Cpu>::layout(&*model);
    let plan = Arc::new(TrainingPlan::new(batch, layout, POSITIONS, STEPS));

    let run = EmbeddedRun::new();
    let of_workers = run.clone();
    let started = timely::execute(timely::Config::process(workers), move |worker| {
        of_workers.work(worker, |context| {
            let parts = Parts {
                cpu: Arc::clone(&cpu),
                model: Arc::clone(&model),
                plan: Arc::clone(&plan),
                end: ends.take(context, &cpu)?.map(|connection| connection.communicator),
                abort: context.abort().clone(),
            };
            let (told, ready_buckets) = (Rc::new(RefCell::new(Told::default())), Rc::default());
            let (of_steps, of_lanes) = (Rc::clone(&told), Rc::clone(&told));
            let counted = Rc::clone(&ready_buckets);
            context.dataflow::<u64, _, _>(|scope| {
                let Tapped { reports, losses } = train_in(scope, parts, counted);
                reports.inspect(move |report| of_steps.borrow_mut().losses.push(report.loss));
                losses.inspect(move |lane| {
                    if lane.step + 1 == STEPS {
                        of_lanes.borrow_mut().lanes.push((lane.lane, lane.loss_sum));
                    }
                });
            });
            context.run_until_done()?;
            Ok(Told { ready_buckets: ready_buckets.get(), ..told.take() })
        })
    });
    let joined = started.map_err(anyhow::Error::msg)?.join();
    run.end()?;
    let mut all = Told::default();
    for told in joined {
        // A worker without results means that the run has failed.
        let told = told.map_err(anyhow::Error::msg)?.unwrap_or_default();
        all.losses = told.losses;
        all.lanes.extend(told.lanes);
        all.ready_buckets += told.ready_buckets;
    }
    all.lanes.sort_by_key(|&(lane, _)| lane);
    Ok(all)
}

/// Samples that count up from their own position.
#[derive(Default)]
struct Counting {
    requested: VecDeque<u64>,
}

impl SampleSource for Counting {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.requested.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        Ok(self.requested.pop_front().map(|position| {
            let token = |index| ((7 * position as usize + index) % VOCABULARY) as u32;
            (position, (0..=POSITIONS).map(token).collect())
        }))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}
