//! The plan that all operators of one training graph share: how steps are cut, and which steps there are.

use std::num::NonZeroU64;
use std::ops::Range;

use tidemill_collective::communicator::Holders;
use tidemill_collective::{
    BUCKET_ELEMENTS, BucketOwners, BucketPlan, CHUNK_ELEMENTS, ChunkPlan, DEFAULT_WINDOW_BYTES,
    SegmentUses,
};
use tidemill_kernels::Backend;
use tidemill_model::optimizer::UpdateUnit;
use tidemill_model::{Held, Layout, MasterPlace};

use super::sample_names::SampleNames;
use super::trainers::Trainers;
use crate::batch::BatchPlan;

/// The plan of one run, the same on every worker.
#[derive(Clone, Debug)]
pub struct TrainingPlan {
    /// How a step is cut.
    pub batch: BatchPlan,
    /// The workers of the dataflow that train; never numerics.
    pub trainers: Trainers,
    /// The unit that one worker updates by itself, at the least: chunks and owners are cut by it.
    pub unit: UpdateUnit,
    /// The parameter arena in chunks.
    pub chunks: ChunkPlan,
    /// Its chunks in buckets; never numerics.
    pub buckets: BucketPlan,
    /// t, positions of each [`Sample`](tidemill_model::Sample): of tokens one less than these, and 1 of samples that are no sequence.
    pub positions: usize,
    /// The token that ends a document, where documents see nothing of each other.
    pub document_end: Option<u32>,
    /// Updates done before this run: its first timestamp.
    pub first_step: u64,
    /// Counted tokens of those updates.
    pub first_tokens: u64,
    /// Updates done when the run is complete.
    pub steps: u64,
    /// Steps whose samples may be read before they are needed; never numerics.
    pub read_ahead_steps: NonZeroU64,
    /// Bytes of chunks that a worker may have on their way to other processes, and as many of snapshots; never numerics.
    pub window_bytes: usize,
    /// Bytes of the host's memory that the copies of a cut may take, those of all workers together; half of the free memory where
    /// it is not said. Never numerics: a run whose cuts find no room there waits for each to be written.
    pub staging_bytes: Option<usize>,
    /// Which updates are followed by a checkpoint.
    pub checkpoints: CheckpointCuts,
    /// The names of a step's samples in errors; never numerics.
    pub sample_names: SampleNames,
    /// The names of an evaluation's samples in errors; never numerics.
    pub evaluation_names: SampleNames,
}

/// A worker's part of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnedPart {
    /// Its chunks.
    pub(crate) chunks: Range<usize>,
    /// Their elements of the parameter arena.
    pub(crate) range: Range<usize>,
    /// Where they begin among all that the worker owns, which is in the order of the arena.
    pub(crate) start: usize,
}

impl OwnedPart {
    /// Where its masters are.
    pub(crate) fn place(&self) -> MasterPlace {
        MasterPlace { range: self.range.clone(), start: self.start }
    }
}

/// Which updates are followed by a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointCuts {
    /// None.
    Never,
    /// Every so many updates, and the last.
    Every(NonZeroU64),
}

/// The samples of an evaluation: the first of another data set, in its canonical order, cut into grains as a step is; and after them
/// requests, each a sample and a grain of its own, whose sum of losses is reported by itself.
///
/// A graph is given it together with where the samples come from, as an [`Evaluation`](super::evaluate::Evaluation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationPlan {
    /// The number of samples.
    pub samples: NonZeroU64,
    /// The number of requests: the samples at the positions behind those.
    pub requests: u64,
    /// Updates between evaluations; there is always one after the plan's last update. A stop adds none: a program that is asked to
    /// stop may have little time left.
    pub every_steps: NonZeroU64,
}

impl EvaluationPlan {
    /// Whether an evaluation follows update `update` (from 1) of a plan of `steps`.
    pub fn is_due(&self, update: u64, steps: u64) -> bool {
        update >= steps || update.is_multiple_of(self.every_steps.get())
    }

    /// The samples of grain `grain`.
    pub fn grain(&self, batch: &BatchPlan, grain: usize) -> Range<u64> {
        let of_samples = self.sample_grains(batch);
        if grain >= of_samples {
            let end = self.samples.get().saturating_add(self.requests);
            let cut = |request: usize| end.min(self.samples.get().saturating_add(request as u64));
            return cut(grain - of_samples)..cut(grain - of_samples + 1);
        }
        let size = batch.evaluation_grain_samples() as u64;
        let cut = |grain: usize| self.samples.get().min(size.saturating_mul(grain as u64));
        cut(grain)..cut(grain + 1)
    }

    /// The number of grains of samples; the grains of requests follow.
    pub fn sample_grains(&self, batch: &BatchPlan) -> usize {
        self.samples.get().div_ceil(batch.evaluation_grain_samples() as u64) as usize
    }

    /// The grains of an evaluation.
    pub fn grains(&self, batch: &BatchPlan) -> usize {
        self.sample_grains(batch).saturating_add(self.requests as usize)
    }

    /// The grains that worker `worker` of `workers` runs.
    pub fn worker_grains(&self, batch: &BatchPlan, worker: usize, workers: usize) -> Range<usize> {
        let grains = self.grains(batch);
        worker * grains / workers..(worker + 1) * grains / workers
    }
}

impl TrainingPlan {
    /// A run of `steps` updates from the beginning, on all workers of the dataflow, with two steps read ahead, the default window,
    /// and no checkpoints. It is for rules whose unit is an element; for others see [`of_unit`](Self::of_unit).
    pub fn new(batch: BatchPlan, layout: &Layout, positions: usize, steps: u64) -> Self {
        let unit = UpdateUnit::Element;
        let (chunks, buckets) = cut(layout, unit, CHUNK_ELEMENTS, BUCKET_ELEMENTS);
        Self {
            batch,
            trainers: Trainers::all(),
            unit,
            chunks,
            buckets,
            positions,
            document_end: None,
            first_step: 0,
            first_tokens: 0,
            steps,
            read_ahead_steps: NonZeroU64::MIN.saturating_add(1),
            window_bytes: DEFAULT_WINDOW_BYTES,
            staging_bytes: None,
            checkpoints: CheckpointCuts::Never,
            sample_names: SampleNames::default(),
            evaluation_names: SampleNames::default(),
        }
    }

    /// The same plan for rules of this `unit`, the arena of `layout` cut as a plan has it at first. Where every tensor has one owner,
    /// chunks end where tensors do, which is numerics: the norm of the gradient is summed by chunks.
    #[must_use]
    pub fn of_unit(self, layout: &Layout, unit: UpdateUnit) -> Self {
        Self { unit, ..self }.with_cuts(layout, CHUNK_ELEMENTS, BUCKET_ELEMENTS)
    }

    /// The same plan with the arena of `layout` in other chunks, which are numerics, and in other buckets, which are not.
    ///
    /// # Panics
    /// When `chunk_elements` is 0.
    #[must_use]
    pub fn with_cuts(self, layout: &Layout, chunk_elements: usize, bucket_elements: usize) -> Self {
        let (chunks, buckets) = cut(layout, self.unit, chunk_elements, bucket_elements);
        Self { chunks, buckets, ..self }
    }

    /// The parts that `worker` of `workers` owns, by bucket.
    pub(crate) fn owned(&self, worker: usize, workers: usize) -> Vec<OwnedPart> {
        owned(&self.chunks, &self.buckets.owners(&self.chunks, workers), worker)
    }

    /// The parameters of `layout` that `worker` of `workers` holds, where `holders` hold all: its counterparts own them.
    pub(crate) fn held<B: Backend>(
        &self,
        layout: &Layout,
        holders: Holders,
        (worker, workers): (usize, usize),
    ) -> Held {
        let owners = self.buckets.owners(&self.chunks, workers);
        let counterparts = holders.counterparts(worker, workers);
        let of = |rank| owners.iter().map(move |owners| owners.range(&self.chunks, rank));
        Held::parts::<B>(layout, counterparts.flat_map(of).collect::<Vec<_>>())
    }

    /// The worker among `workers` that owns each chunk.
    pub fn owners(&self, workers: usize) -> Vec<usize> {
        self.buckets.chunk_owners(&self.chunks, workers)
    }

    /// Whether a checkpoint follows update `update` (from 1).
    pub fn is_cut(&self, update: u64, last: bool) -> bool {
        match self.checkpoints {
            CheckpointCuts::Never => false,
            CheckpointCuts::Every(every) => last || update.is_multiple_of(every.get()),
        }
    }
}

/// The parts that `worker` owns, by bucket; `owners` has the owners of each bucket.
pub(crate) fn owned(chunks: &ChunkPlan, owners: &[BucketOwners], worker: usize) -> Vec<OwnedPart> {
    let part = |owners: &BucketOwners| OwnedPart {
        chunks: owners.chunks(worker),
        range: owners.range(chunks, worker),
        start: 0,
    };
    let mut parts: Vec<OwnedPart> = owners.iter().map(part).collect();
    let mut in_order: Vec<_> = parts.iter_mut().collect();
    in_order.sort_by_key(|part| part.range.start);
    let mut elements = 0;
    for part in in_order {
        part.start = elements;
        elements += part.range.len();
    }
    parts
}

/// The parameter arena of `layout` in chunks, for rules of this `unit`, and these in buckets.
pub(crate) fn cut(
    layout: &Layout,
    unit: UpdateUnit,
    chunk_elements: usize,
    bucket_elements: usize,
) -> (ChunkPlan, BucketPlan) {
    let ranges = layout.segments().iter().map(|segment| segment.range.clone());
    let chunks = match unit {
        UpdateUnit::Element => ChunkPlan::with_chunk_elements(ranges.clone(), chunk_elements),
        UpdateUnit::Tensor => {
            let tensors = layout.segments().iter().map(|segment| {
                let tensors = &layout.tensors()[segment.tensors.clone()];
                tensors.iter().map(|tensor| tensor.offset).collect()
            });
            ChunkPlan::of_whole_tensors(ranges.clone().zip(tensors), chunk_elements)
        }
    };
    let mut segments: Vec<_> =
        ranges.map(|range| SegmentUses { range, uses: Vec::new() }).collect();
    for use_ in layout.uses() {
        segments[use_.segment].uses.push((use_.block, use_.gradient_offset));
    }
    let buckets = BucketPlan::new(&chunks, &segments, bucket_elements);
    (chunks, buckets)
}

#[cfg(test)]
pub(super) mod tests {
    use tidemill_model::Decay;

    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};

    /// Nine steps of two lanes, of two segments of 16 elements, which are a bucket and a chunk each.
    pub(in crate::operators) fn two_buckets() -> (TrainingPlan, Layout) {
        let mut layout = Layout::new();
        for name in ["first", "second"] {
            let segment = layout.segment(name);
            layout.tensor(format!("{name}.weight"), &[16], Decay::Exempt, 1);
            layout.block(name, &[segment]);
        }
        let settings = BatchSettings { samples_per_step: Some(2), ..Default::default() };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 4, 9);
        (plan.with_cuts(&layout, 16, 1), layout)
    }
}
