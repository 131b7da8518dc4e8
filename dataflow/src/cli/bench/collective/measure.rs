//! The rounds that are measured, whatever way bytes take.

use std::sync::Arc;
use std::time::Instant;

use indicatif::ProgressBar;
use tidemill_collective::{BucketOwners, CHUNK_ELEMENTS};
use tidemill_kernels::FloatEnvironment;
use tidemill_model::{Decay, Layout};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::{Input, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

use super::Way;
use super::values::{Agreement, Difference, Values, in_periods};
use crate::batch::{BatchSettings, MicrobatchMemory};
use crate::cli::progress::bar;
use crate::cluster::progress;
use crate::cluster::{Aborted, ClusterError, ClusterSettings, Failure, WorkerContext, execute};
use crate::error::{JobError, Result};
use crate::operators::TrainingPlan;

/// The arena in buckets of one size, cut over workers as training cuts it.
#[derive(Debug)]
pub(super) struct Plan {
    bucket_mebibytes: usize,
    /// The part of each bucket that each worker owns.
    pub owners: Vec<BucketOwners>,
    /// Every bucket is a segment, which a block of its own uses.
    pub layout: Layout,
    pub training: Arc<TrainingPlan>,
    pub values: Arc<Values>,
}

impl Plan {
    /// `elements` in buckets of `bucket_mebibytes`; the last bucket may be smaller.
    ///
    /// # Errors
    /// More workers than a step may have lanes.
    pub(super) fn new(
        bucket_mebibytes: usize,
        elements: usize,
        values: &Arc<Values>,
    ) -> Result<Self> {
        let bucket = (bucket_mebibytes << 20) / size_of::<f32>();
        let mut layout = Layout::new();
        for start in (0..elements).step_by(bucket) {
            let name = format!("bucket.{}", start / bucket);
            let segment = layout.segment(name.as_str());
            layout.tensor(name.as_str(), &[bucket.min(elements - start)], Decay::Exempt, 1);
            layout.block(name, &[segment]);
        }
        let lanes = Some(values.tree().lanes());
        let batch = BatchSettings { samples_per_step: lanes, lanes, ..Default::default() };
        let batch = batch.plan(MicrobatchMemory::default())?;
        // Buckets of one element at the least: no segment is put together with another.
        let training =
            TrainingPlan::new(batch, &layout, 1, 1).with_cuts(&layout, CHUNK_ELEMENTS, 1);
        let owners = training.buckets.owners(&training.chunks, values.workers());
        let (training, values) = (Arc::new(training), Arc::clone(values));
        Ok(Self { bucket_mebibytes, owners, layout, training, values })
    }

    /// `what` of `worker` differs.
    fn wrong(&self, what: Exchanged, by: By, worker: usize, difference: Difference) -> JobError {
        let Difference { element, expected, found } = difference;
        let (what, bucket_mebibytes) = (what.in_words(by), self.bucket_mebibytes);
        JobError::Exchanged { what, worker, element, bucket_mebibytes, expected, found }
    }
}

/// The operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchanged {
    /// Sums, each where it is owned.
    Sums,
    /// The sums of all owners, at every worker.
    Gathered,
}

impl Exchanged {
    const ALL: [Self; 2] = [Self::Sums, Self::Gathered];

    fn in_words(self, by: By) -> &'static str {
        match (self, by) {
            (Self::Sums, By::Training) => "the sum",
            (Self::Gathered, By::Training) => "the gathered value",
            (Self::Sums, By::Library) => "the library's sum",
            (Self::Gathered, By::Library) => "the library's gathered value",
        }
    }
}

/// The implementation that exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The way that training takes.
    Training,
    /// A library of collectives alone, which adds in an order of its own.
    Library,
}

/// Is shown values, and the element of the arena at which they begin.
pub(super) type Look<'a> = dyn FnMut(usize, &[f32]) -> std::result::Result<(), Failure> + 'a;

/// One worker's end of a way between all workers, with an arena of its own.
pub(super) trait Arm {
    /// From now on the arena is exchanged as `plan` says.
    fn begin<'a>(
        &'a mut self,
        plan: &'a Plan,
    ) -> std::result::Result<Box<dyn Exchange + Send + 'a>, Failure>;
}

/// One worker's part of an exchange in buckets of one size.
pub(super) trait Exchange {
    /// The memory that is exchanged and received into.
    fn memory(&mut self) -> &mut dyn Memory;

    /// Leaves nothing of `what` where it is going to be received.
    fn ready(&mut self, what: Exchanged) -> std::result::Result<(), Failure> {
        self.memory().clear(what)
    }

    /// Exchanges all buckets once, as far as the host has to do with it. It may wait for other workers.
    fn exchange(&mut self, what: Exchanged) -> std::result::Result<(), Failure>;

    /// Shows all of `what` that was received.
    fn received(
        &mut self,
        what: Exchanged,
        look: &mut Look<'_>,
    ) -> std::result::Result<(), Failure>;
}

/// An arena, and what its worker owns of the sums.
pub(super) trait Memory {
    /// Puts `values` into the arena, from element `start` on.
    fn put(&mut self, start: usize, values: &[f32]) -> std::result::Result<(), Failure>;

    /// Zeros where `what` is received.
    fn clear(&mut self, what: Exchanged) -> std::result::Result<(), Failure>;

    /// Returns when all that was begun with it is done.
    fn finish(&mut self) -> std::result::Result<(), Failure>;
}

/// The rate at which workers received, in GB/s: the mean of all workers, over the time of the slowest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub summed: f64,
    pub gathered: f64,
}

/// The rates of one size of buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub bucket_mebibytes: usize,
    /// Rates of the exchange as training does it.
    pub ours: Rates,
    /// Rates of a library of collectives alone, where it was measured too.
    pub library_alone: Option<Rates>,
}

/// The arms of a worker: all workers have the same.
pub(super) struct Arms {
    /// Which way bytes go in training.
    pub way: Way,
    /// Their exchange.
    pub ours: Box<dyn Arm>,
    /// The library of collectives alone, if it is measured too.
    pub library_alone: Option<Box<dyn Arm>>,
}

/// Seconds of all rounds of one size of buckets, for each arm: of the sums, and of the gathering.
type Seconds = Vec<[f64; 2]>;

/// Measures each of `plans` with what `make` makes for each worker; and says which way bytes went.
///
/// # Errors
/// The first of the run: a device or a peer that fails, or a wrong result.
pub(super) fn measure(
    cluster: ClusterSettings,
    plans: Vec<Arc<Plan>>,
    rounds: u64,
    make: impl Fn(&mut WorkerContext<'_>) -> std::result::Result<Arms, Failure> + Send + Sync + 'static,
) -> std::result::Result<(Way, Vec<Measured>), ClusterError> {
    let bar = bar(plans.len() as u64, "{wide_bar} {pos}/{len} sizes of buckets");
    let (of_workers, shown) = (plans.clone(), bar.clone());
    let seconds = execute(cluster, move |context| {
        let mut arms = make(context)?;
        let mut together = Together::new(context);
        let times = |plan| {
            let seconds = time(context, &mut arms, &mut together, plan, rounds)?;
            advance(&shown, context);
            Ok(seconds)
        };
        let seconds =
            of_workers.iter().map(times).collect::<std::result::Result<Vec<_>, Failure>>()?;
        Ok((arms.way, seconds))
    });
    bar.finish_and_clear();
    let (ways, seconds): (Vec<Way>, Vec<Vec<Seconds>>) = seconds?.into_iter().unzip();
    let measured = plans.iter().enumerate().map(|(index, plan)| {
        let (workers, elements) = (plan.values.workers() as f64, plan.layout.parameter_elements());
        let received = rounds as f64 * 4.0 * elements as f64 * (workers - 1.0) / workers / 1e9;
        let arms = seconds.iter().map(|of_worker| of_worker[index].len()).min().unwrap_or(0);
        let slowest = |arm: usize, of: usize| {
            seconds.iter().map(|of_worker| of_worker[index][arm][of]).fold(0.0, f64::max)
        };
        let rates = |arm: usize| Rates {
            summed: received / slowest(arm, 0),
            gathered: received / slowest(arm, 1),
        };
        Measured {
            bucket_mebibytes: plan.bucket_mebibytes,
            ours: rates(0),
            library_alone: (arms > 1).then(|| rates(1)),
        }
    });
    Ok((ways.first().copied().unwrap_or(Way::Host), measured.collect()))
}

fn advance(bar: &ProgressBar, context: &WorkerContext<'_>) {
    if context.index() == 0 {
        bar.inc(1);
    }
}

/// In how many turns the rounds of several arms are run, so that what else happens on the machine happens to all of them.
const TURNS: u64 = 4;

/// Seconds of all rounds of each arm, after one that compiles kernels, wakes links and touches memory.
fn time(
    context: &mut WorkerContext<'_>,
    arms: &mut Arms,
    together: &mut Together,
    plan: &Arc<Plan>,
    rounds: u64,
) -> std::result::Result<Seconds, Failure> {
    let values = plan.values.of_worker(context.index());
    let mut runs = Vec::new();
    let library_alone = arms.library_alone.as_mut().map(|arm| (By::Library, arm));
    for (by, arm) in [(By::Training, &mut arms.ours)].into_iter().chain(library_alone) {
        let mut exchange = arm.begin(plan)?;
        let put = |start, values: &[f32]| exchange.memory().put(start, values);
        in_periods(&values, plan.layout.parameter_elements(), put)?;
        exchange.memory().finish()?;
        runs.push(Run { exchange, by, plan });
    }
    let turns = if runs.len() == 1 { 1 } else { TURNS.min(rounds) };
    let mut seconds = vec![[0.0; 2]; runs.len()];
    for (index, what) in Exchanged::ALL.into_iter().enumerate() {
        for run in &mut runs {
            together.wait(context)?;
            run.rounds(context, what, 1)?;
        }
        for turn in 0..turns {
            let of_turn = rounds * (turn + 1) / turns - rounds * turn / turns;
            for (run, seconds) in runs.iter_mut().zip(&mut seconds) {
                together.wait(context)?;
                run.exchange.ready(what)?;
                together.wait(context)?;
                let since = Instant::now();
                run.rounds(context, what, of_turn)?;
                seconds[index] += since.elapsed().as_secs_f64();
                // Until then others may read the buffers that are compared here.
                together.wait(context)?;
                if turn + 1 == turns {
                    run.check(context.index(), what)?;
                }
            }
        }
    }
    Ok(seconds)
}

/// An arm that exchanges.
struct Run<'a> {
    exchange: Box<dyn Exchange + Send + 'a>,
    by: By,
    plan: &'a Plan,
}

impl Run<'_> {
    fn rounds(
        &mut self,
        context: &mut WorkerContext<'_>,
        what: Exchanged,
        rounds: u64,
    ) -> std::result::Result<(), Failure> {
        let exchange = &mut self.exchange;
        context.step_beside("exchange", move || {
            FloatEnvironment::standard().keep();
            for _ in 0..rounds {
                exchange.exchange(what)?;
                progress::moved();
            }
            exchange.memory().finish()
        })
    }

    /// Compares all of `what` that `worker` received with the expected values.
    fn check(&mut self, worker: usize, what: Exchanged) -> std::result::Result<(), Failure> {
        let (by, plan) = (self.by, self.plan);
        let agreement = match by {
            By::Training => Agreement::ToTheBit,
            By::Library => Agreement::WithinRounding,
        };
        self.exchange.received(what, &mut |start, found| match plan
            .values
            .difference(start, found, agreement)
        {
            None => Ok(()),
            Some(difference) => Err(plan.wrong(what, by, worker, difference).into()),
        })
    }
}

/// Where all workers wait for each other.
struct Together {
    input: InputHandle<u64, CapacityContainerBuilder<Vec<()>>>,
    probe: ProbeHandle<u64>,
}

impl Together {
    fn new(context: &mut WorkerContext<'_>) -> Self {
        let (mut input, probe) = (InputHandle::new(), ProbeHandle::new());
        context.dataflow::<u64, _, _>(|scope| {
            scope.input_from(&mut input).probe_with(&probe);
        });
        Self { input, probe }
    }

    /// Returns when all workers have come here.
    fn wait(&mut self, context: &mut WorkerContext<'_>) -> std::result::Result<(), Aborted> {
        let next = *self.input.time() + 1;
        self.input.advance_to(next);
        context.step_while(|| self.probe.less_than(&next))
    }
}
