//! The rounds that are measured, whatever way bytes take.

use std::sync::Arc;
use std::time::Instant;

use indicatif::ProgressBar;
use tidemill_collective::{BucketOwners, CHUNK_ELEMENTS};
use tidemill_model::{Decay, Layout};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::{Input, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

use super::Way;
use super::values::{Difference, Values};
use crate::batch::{BatchSettings, MicrobatchMemory};
use crate::cli::progress;
use crate::cluster::{Aborted, ClusterError, ClusterSettings, Failure, WorkerContext, execute};
use crate::error::{JobError, Result};
use crate::operators::TrainingPlan;

/// The arena in buckets of one size, cut over workers as training cuts it.
#[derive(Debug)]
pub(super) struct Plan {
    bucket_mebibytes: usize,
    /// What each worker owns of each bucket.
    pub owners: Vec<BucketOwners>,
    /// Every bucket is a segment, which a block of its own uses.
    pub layout: Layout,
    pub training: Arc<TrainingPlan>,
    pub values: Arc<Values>,
}

impl Plan {
    /// `elements` in buckets of `bucket_mebibytes`, the last of which may be smaller.
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
    pub(super) fn wrong(&self, what: Exchanged, worker: usize, difference: Difference) -> JobError {
        let Difference { element, expected, found } = difference;
        let (what, bucket_mebibytes) = (what.in_words(), self.bucket_mebibytes);
        JobError::Exchanged { what, worker, element, bucket_mebibytes, expected, found }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchanged {
    /// Sums, each where it is owned.
    Sums,
    /// The sums of all owners, at every worker.
    Gathered,
}

impl Exchanged {
    fn in_words(self) -> &'static str {
        match self {
            Self::Sums => "the sum",
            Self::Gathered => "the gathered value",
        }
    }
}

/// One worker's part of an exchange.
pub(super) trait Exchange {
    /// Which way its bytes go.
    fn way(&self) -> Way;

    /// Puts the worker's values into its arena, which is exchanged as `plan` says from now on.
    fn begin(
        &mut self,
        context: &mut WorkerContext<'_>,
        plan: &Arc<Plan>,
    ) -> std::result::Result<(), Failure>;

    /// Exchanges so often; answers when this worker has all that it has to receive.
    fn run(
        &mut self,
        context: &mut WorkerContext<'_>,
        what: Exchanged,
        rounds: u64,
    ) -> std::result::Result<(), Failure>;

    /// Zeros where `what` is received.
    fn clear(&mut self, what: Exchanged) -> std::result::Result<(), Failure>;

    /// Compares all of `what` that was received with what it has to be.
    fn check(&mut self, what: Exchanged) -> std::result::Result<(), Failure>;
}

/// What a worker received a second, in GB: the mean of all workers, over the time of the slowest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub bucket_mebibytes: usize,
    pub summed: f64,
    pub gathered: f64,
}

/// A worker's part of an exchange, or why there is none.
type Made = std::result::Result<Box<dyn Exchange>, Failure>;

/// Measures each of `plans` with what `make` makes for each worker; and says which way bytes went.
///
/// # Errors
/// The first of the run: a device or a peer that fails, or a wrong result.
pub(super) fn measure(
    cluster: ClusterSettings,
    plans: Vec<Arc<Plan>>,
    rounds: u64,
    make: impl Fn(&mut WorkerContext<'_>) -> Made + Send + Sync + 'static,
) -> std::result::Result<(Way, Vec<Measured>), ClusterError> {
    let bar = progress::bar(plans.len() as u64, "{wide_bar} {pos}/{len} sizes of buckets");
    let (of_workers, shown) = (plans.clone(), bar.clone());
    let seconds = execute(cluster, move |context| {
        let mut exchange = make(context)?;
        let mut together = Together::new(context);
        let times = |plan| {
            let seconds = time(context, &mut *exchange, &mut together, plan, rounds)?;
            advance(&shown, context);
            Ok(seconds)
        };
        let seconds =
            of_workers.iter().map(times).collect::<std::result::Result<Vec<_>, Failure>>()?;
        Ok((exchange.way(), seconds))
    });
    bar.finish_and_clear();
    let seconds = seconds?;
    let measured = plans.iter().enumerate().map(|(index, plan)| {
        let slowest = |of: usize| {
            let of_worker = seconds.iter().map(|(_, worker)| worker[index][of]);
            of_worker.fold(0.0, f64::max)
        };
        let (workers, elements) = (plan.values.workers() as f64, plan.layout.parameter_elements());
        let received = rounds as f64 * 4.0 * elements as f64 * (workers - 1.0) / workers / 1e9;
        Measured {
            bucket_mebibytes: plan.bucket_mebibytes,
            summed: received / slowest(0),
            gathered: received / slowest(1),
        }
    });
    let way = seconds.first().map_or(Way::Host, |(way, _)| *way);
    Ok((way, measured.collect()))
}

fn advance(bar: &ProgressBar, context: &WorkerContext<'_>) {
    if context.index() == 0 {
        bar.inc(1);
    }
}

/// Seconds of all rounds of each exchange, after one that compiles kernels, wakes links and touches memory.
fn time(
    context: &mut WorkerContext<'_>,
    exchange: &mut dyn Exchange,
    together: &mut Together,
    plan: &Arc<Plan>,
    rounds: u64,
) -> std::result::Result<[f64; 2], Failure> {
    let mut seconds = [0.0; 2];
    exchange.begin(context, plan)?;
    for (what, seconds) in [Exchanged::Sums, Exchanged::Gathered].into_iter().zip(&mut seconds) {
        together.wait(context)?;
        exchange.run(context, what, 1)?;
        together.wait(context)?;
        exchange.clear(what)?;
        together.wait(context)?;
        let since = Instant::now();
        exchange.run(context, what, rounds)?;
        *seconds = since.elapsed().as_secs_f64();
        // Until then others may read what is compared here.
        together.wait(context)?;
        exchange.check(what)?;
    }
    Ok(seconds)
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
