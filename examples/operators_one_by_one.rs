//! The operators of training, one behind the other, in a `timely::execute` of your own.
//!
//! ```text
//! cargo run --release --example operators_one_by_one
//! ```
//!
//! `Training::build` chains them for you, and `tidemill::cluster::execute` starts workers. If your program already has a timely
//! runtime, or needs something between two operators, you write the chain yourself: this is all of it. `EmbeddedRun` ends the run on
//! all workers if one fails. The example taps two streams of the chain, the losses of lanes and the tickets of buckets whose
//! gradients are final. It trains on one worker, on two, and on two of three: the third builds the same dataflow, as timely wants it,
//! and is free for something else.

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
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{LanguageModel, MambaConfig, Tokens, Trainable};
use tidemill::operators::forward_backward::{ForwardBackwardInputs, ForwardBackwardStreams};
use tidemill::operators::optimize::{OptimizeInputs, OptimizeStreams};
use tidemill::operators::train::LoopEnds;
use tidemill::operators::{
    Compute, ForwardBackward, Gather, InitialState, LaneLoss, Optimize, Optimizer, OptimizerThread,
    Reduce, SampleSource, Samples, ScheduledRule, StepReport, Trainers, TrainingLoop, TrainingPlan,
    Wake, lending,
};
use timely::dataflow::operators::Inspect;
use timely::dataflow::operators::vec::ToStream;
use timely::dataflow::{Scope, StreamVec};

const VOCABULARY: usize = 31;
const POSITIONS: usize = 24;
/// Lanes of a step: as many workers are possible.
const LANES: usize = 4;
const STEPS: u64 = 40;

/// The parts of a worker's chain of operators.
struct Parts {
    plan: Arc<TrainingPlan>,
    abort: Abort,
    /// None where the worker does not train.
    trainer: Option<Trainer>,
}

/// The additional parts of a worker that trains.
struct Trainer {
    cpu: Arc<Cpu>,
    model: Arc<LanguageModel<Cpu>>,
    /// Its end of the communicator between workers; `None` if it is alone.
    end: Option<Box<dyn Communicator<Cpu>>>,
}

/// The streams of a chain that the program looks at.
struct Tapped<'scope> {
    /// One report a step, the same on every worker that trains.
    reports: StreamVec<'scope, u64, StepReport>,
    /// One for each lane of the worker and step.
    losses: StreamVec<'scope, u64, LaneLoss>,
}

/// From samples to updated parameters, and round again.
fn train_in<'scope>(
    scope: Scope<'scope, u64>,
    parts: Parts,
    ready_buckets: Rc<Cell<u64>>,
) -> Tapped<'scope> {
    let Parts { plan, abort, trainer } = parts;
    let optimizer = OptimizerSettings { learning_rate: 1e-2, ..Default::default() };
    let rule = ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS);
    let (thread, compute) = match trainer {
        Some(Trainer { cpu, model, end }) => {
            // A worker that waits for others must hear of it when the run is ended.
            if let Some(end) = &end {
                abort.on_abort(end.abort_handle());
            }
            // Two threads take turns with the parameters: one computes with them, one updates them.
            let (borrower, lender) = lending(end);
            let parameters = Arc::new(Trainable::<Cpu>::initialize(&*model, 17));
            let optimizer = Optimizer {
                backend: Arc::clone(&cpu),
                layout: Trainable::<Cpu>::layout(&*model),
                state: InitialState { parameters, states: None },
                lender,
                rule: rule.clone(),
            };
            let thread = OptimizerThread::start(optimizer, &plan, &abort, scope);
            let stop = Arc::new(AtomicBool::new(false));
            (thread, Some(Compute { backend: cpu, model, borrower, stop }))
        }
        None => (OptimizerThread::start(None::<Optimizer<'_, Cpu>>, &plan, &abort, scope), None),
    };

    // The beginnings of what goes round.
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

    // There are no checkpoints: `snapshot` and `checkpoint` would give what is empty here.
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

/// A run's losses of all steps, those of the lanes of the last step, and how often gradients of a bucket were final.
#[derive(Debug, Default)]
struct RunLog {
    losses: Vec<f64>,
    lanes: Vec<(u32, f64)>,
    ready_buckets: u64,
}

fn main() -> Result<()> {
    let (one, two) = (train(1, Trainers::all())?, train(2, Trainers::all())?);
    let two_of_three = train(3, Trainers::these([0, 2])?)?;
    for others in [&two, &two_of_three] {
        ensure!(one.losses == others.losses, "the losses must not depend on the number of workers");
        ensure!(one.lanes == others.lanes, "nor those of lanes");
    }
    ensure!(two.ready_buckets == two_of_three.ready_buckets, "a third worker has none");
    let (first, last) = (one.losses[0], one.losses[STEPS as usize - 1]);
    println!(
        "loss {first:.3} -> {last:.3}: the same bits with 1 and with 2 workers, and with 2 of 3"
    );
    println!("of the lanes of the last step: {:.3?}", one.lanes);
    println!(
        "tickets of {} buckets with 1 worker, {} with 2",
        one.ready_buckets, two.ready_buckets
    );
    ensure!(last < 0.5 * first, "the model learns");
    Ok(())
}

fn train(workers: usize, trainers: Trainers) -> Result<RunLog> {
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch =
        BatchSettings { samples_per_step: Some(8), lanes: Some(LANES), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    // The communicator that sums between the workers that train, all of them of this process; each takes its end.
    let ranks = trainers.place(0, workers)?.ranks();
    let cluster = ClusterSettings::workers(ranks);
    let ends = Communicators::of_cluster(&vec![&*cpu; ranks], &cluster, &batch)?;
    let model = Arc::new(LanguageModel::new(&MambaConfig::new(VOCABULARY, 16, 1))?);
    let layout = Trainable::<Cpu>::layout(&*model);
    let mut plan = TrainingPlan::new(batch, layout, POSITIONS, STEPS);
    plan.trainers = trainers;
    let plan = Arc::new(plan);

    let run = EmbeddedRun::new();
    let of_workers = run.clone();
    let started = timely::execute(timely::Config::process(workers), move |worker| {
        of_workers.work(worker, |context| {
            let trainer = match plan.trainers.place(context.index(), context.peers())?.rank() {
                Some(_) => {
                    let connection = ends.take_among(&plan.trainers, context, &cpu)?;
                    let end = connection.map(|connection| connection.communicator);
                    Some(Trainer { cpu: Arc::clone(&cpu), model: Arc::clone(&model), end })
                }
                None => None,
            };
            let (plan, abort) = (Arc::clone(&plan), context.abort().clone());
            let parts = Parts { plan, abort, trainer };
            let (log, ready_buckets) = (Rc::new(RefCell::new(RunLog::default())), Rc::default());
            let (of_steps, of_lanes) = (Rc::clone(&log), Rc::clone(&log));
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
            Ok(RunLog { ready_buckets: ready_buckets.get(), ..log.take() })
        })
    });
    let joined = started.map_err(anyhow::Error::msg)?.join();
    run.end()?;
    let mut all = RunLog::default();
    for log in joined {
        // Where a worker has nothing to tell, the run has failed.
        let log = log.map_err(anyhow::Error::msg)?.unwrap_or_default();
        if !log.losses.is_empty() {
            all.losses = log.losses;
        }
        all.lanes.extend(log.lanes);
        all.ready_buckets += log.ready_buckets;
    }
    all.lanes.sort_by_key(|&(lane, _)| lane);
    Ok(all)
}

/// Samples that count on from anywhere.
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
