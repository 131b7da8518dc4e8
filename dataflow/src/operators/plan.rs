//! What every operator of one training graph must know: how steps are cut, and which steps there are.

use std::num::NonZeroU64;
use std::ops::Range;

use tidemill_collective::{ChunkPlan, DEFAULT_WINDOW_BYTES};
use tidemill_kernels::MemoryPlace;
use tidemill_model::Layout;

use crate::batch::BatchPlan;

/// The plan of one run, the same on every worker.
#[derive(Clone, Debug)]
pub struct TrainingPlan {
    /// How a step is cut.
    pub batch: BatchPlan,
    /// The parameter arena in chunks.
    pub chunks: ChunkPlan,
    /// t, positions of each sample; a sample has one token more.
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
    /// Bytes of chunks that a worker may have on their way to each of its peers; never numerics.
    pub window_bytes: usize,
    /// Where training state is kept; never numerics.
    pub state_place: StatePlace,
    /// Which updates are followed by a checkpoint.
    pub checkpoints: CheckpointCuts,
    /// What is evaluated, and when.
    pub evaluation: Option<EvaluationPlan>,
}

/// Which updates are followed by a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointCuts {
    /// None.
    Never,
    /// Every so many updates, and the last.
    Every(NonZeroU64),
}

/// Where masters, moments and sums of gradients are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatePlace {
    /// On a device that has a memory of its own, else as on the host.
    #[default]
    Automatic,
    /// Sums and updated parameters are handed from operator to operator as values on the host.
    Host,
    /// Sums and parameters stay in the buffers of the device, where a single worker owns all of them; what has to
    /// go to other workers is copied in large pieces.
    Device,
}

impl StatePlace {
    /// The place for a device whose buffers lie in `memory`.
    pub fn resolve(self, memory: MemoryPlace) -> MemoryPlace {
        match self {
            Self::Automatic => memory,
            Self::Host => MemoryPlace::Host,
            Self::Device => MemoryPlace::Device,
        }
    }
}

/// What is evaluated: the first samples of another data set, in its canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationPlan {
    /// The number of samples.
    pub samples: u64,
    /// Updates between evaluations; there is always one after the last update.
    pub every_steps: NonZeroU64,
}

impl TrainingPlan {
    /// A run of `steps` updates from the beginning, with two steps read ahead, the default window,
    /// and neither checkpoints nor evaluation.
    pub fn new(batch: BatchPlan, layout: &Layout, positions: usize, steps: u64) -> Self {
        Self {
            batch,
            chunks: ChunkPlan::new(layout.segments().iter().map(|segment| segment.range.clone())),
            positions,
            document_end: None,
            first_step: 0,
            first_tokens: 0,
            steps,
            read_ahead_steps: NonZeroU64::MIN.saturating_add(1),
            window_bytes: DEFAULT_WINDOW_BYTES,
            state_place: StatePlace::default(),
            checkpoints: CheckpointCuts::Never,
            evaluation: None,
        }
    }

    /// Whether a checkpoint follows update `update` (from 1).
    pub fn is_cut(&self, update: u64, last: bool) -> bool {
        match self.checkpoints {
            CheckpointCuts::Never => false,
            CheckpointCuts::Every(every) => last || update.is_multiple_of(every.get()),
        }
    }

    /// Whether an evaluation follows update `update` (from 1).
    pub fn is_evaluated(&self, update: u64, last: bool) -> bool {
        self.evaluation
            .is_some_and(|evaluation| last || update.is_multiple_of(evaluation.every_steps.get()))
    }

    /// The samples of evaluation grain `grain`.
    pub fn evaluation_grain(&self, grain: usize) -> Range<u64> {
        let samples = self.evaluation.map_or(0, |evaluation| evaluation.samples);
        let cut = |grain: usize| samples.min((grain * self.batch.grain_samples()) as u64);
        cut(grain)..cut(grain + 1)
    }

    /// The grains of an evaluation.
    pub fn evaluation_grains(&self) -> usize {
        let samples = self.evaluation.map_or(0, |evaluation| evaluation.samples);
        samples.div_ceil(self.batch.grain_samples() as u64) as usize
    }

    /// The grains of an evaluation that worker `worker` of `workers` runs.
    pub fn worker_evaluation_grains(&self, worker: usize, workers: usize) -> Range<usize> {
        let grains = self.evaluation_grains();
        worker * grains / workers..(worker + 1) * grains / workers
    }
}
