//! The device thread: it holds a replica of the parameters and computes what it is told, in order.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidemill_collective::{Chunk, ChunkHeader, Credit, CreditLedger, Node, Part, Tree};
use tidemill_kernels::{Backend, MemoryPlace};
use tidemill_model::{Device, GrainLoss, Microbatch, MicrobatchShape, ModelError, Trainable};
use tidemill_streaming_data::reader::Sample;

use super::accumulators::{
    Accumulators, FinishedChunks, FinishedSums, FinishedValues, GradientMap,
};
use super::schedule::Computation;
use super::{EvaluationLoss, LaneLoss};
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::operators::companion::{Jobs, OperatorGone, Replies};
use crate::operators::error::GraphError;
use crate::operators::plan::TrainingPlan;
use crate::operators::residence::{Replica, Residence};
use crate::operators::samples::Grain;

/// Chunks that are copied from a device's memory in one read: 16 MiB, which takes much longer than waiting for the
/// device does.
const CHUNKS_PER_READ: usize = 64;
/// Chunks that are copied from host memory before they leave: few enough that others work on them soon, but every message wakes
/// two threads.
const CHUNKS_PER_MESSAGE: usize = 16;

/// What the device thread is told.
pub(super) enum DeviceJob {
    /// Replace these elements of the parameters.
    Write { start: usize, chunk: Chunk },
    /// Compute.
    Compute(Computation),
}

/// What the device thread answers.
pub(super) enum DeviceReply {
    /// Parameters were written: credit for their owners.
    Written(Vec<Credit>),
    /// Chunks of a finished node of the step that runs.
    Gradients(Vec<Chunk>),
    /// A lane of the step that runs is done.
    Loss(LaneLoss),
    /// Grains of the evaluation that runs are done.
    Evaluated(Vec<EvaluationLoss>),
    /// The computation is done.
    Finished,
}

/// Everything that a device thread starts from.
pub(super) struct DeviceParts<B: Backend, M> {
    pub(super) backend: Arc<B>,
    pub(super) model: Arc<M>,
    pub(super) parameters: Arc<Vec<f32>>,
    pub(super) residence: Option<Residence<B>>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) plan: Arc<TrainingPlan>,
    pub(super) worker: usize,
    pub(super) lanes: Range<usize>,
    /// The owner of each chunk.
    pub(super) owners: Vec<usize>,
}

/// Where the parameters are that the device thread computes with.
enum Home<B: Backend> {
    Own(Box<Replica<B>>),
    Shared(Residence<B>),
}

impl<B: Backend> Home<B> {
    /// `work` with the replica, which nobody else touches meanwhile.
    fn with<R>(
        &mut self,
        work: impl FnOnce(&mut Replica<B>) -> Result<R, Stopped>,
    ) -> Result<R, Stopped> {
        match self {
            Self::Own(replica) => work(replica),
            Self::Shared(residence) => {
                let mut state = residence.lock().ok_or(Stopped::Unwanted)?;
                work(&mut state.replica)
            }
        }
    }
}

/// What the device thread has besides the parameters.
struct Computer<'a, B: Backend, M: Trainable<B>> {
    parts: &'a DeviceParts<B, M>,
    finished: FinishedSums,
    workspace: M::Workspace,
    accumulators: Accumulators<B>,
    replies: &'a Replies<DeviceReply>,
    tokens: Vec<u32>,
}

/// Runs jobs until the operator is gone.
pub(super) fn run<B: Backend, M: Trainable<B>>(
    mut parts: DeviceParts<B, M>,
    jobs: &Jobs<DeviceJob>,
    replies: &Replies<DeviceReply>,
) -> Result<(), Failure> {
    progress::enter(Phase::PreparingDevice, 0);
    let initial = std::mem::take(&mut parts.parameters);
    let memory = parts.plan.state_place.resolve(parts.backend.memory());
    let (mut home, finished) = match (parts.residence.take(), memory) {
        (Some(residence), _) => (Home::Shared(residence), FinishedSums::Resident),
        (None, memory) => {
            let replica = Replica::new(&*parts.backend, parts.model.layout(), &initial)?;
            let chunks = match memory {
                MemoryPlace::Host => CHUNKS_PER_MESSAGE,
                MemoryPlace::Device => CHUNKS_PER_READ,
            };
            (Home::Own(Box::new(replica)), FinishedSums::Copied { from: memory, chunks })
        }
    };
    drop(initial);
    let served = serve(&parts, finished, &mut home, jobs, replies);
    match served {
        Err(Stopped::Unwanted) | Ok(()) => Ok(()),
        Err(Stopped::Failed(failure)) => Err(failure),
    }
}

/// Why the thread ends before its jobs do.
enum Stopped {
    /// The operator is gone, or a thread that shares the parameters has panicked: nobody wants more.
    Unwanted,
    Failed(Failure),
}

impl From<OperatorGone> for Stopped {
    fn from(_: OperatorGone) -> Self {
        Self::Unwanted
    }
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

fn serve<B: Backend, M: Trainable<B>>(
    parts: &DeviceParts<B, M>,
    finished: FinishedSums,
    home: &mut Home<B>,
    jobs: &Jobs<DeviceJob>,
    replies: &Replies<DeviceReply>,
) -> Result<(), Stopped> {
    let workspace = home.with(|replica| Ok(plan_workspace(parts, replica)?))?;
    let mut computer = Computer {
        parts,
        finished,
        workspace,
        accumulators: Accumulators::new(),
        replies,
        tokens: Vec::new(),
    };
    let mut ledger = CreditLedger::default();
    let mut is_prepared = false;
    loop {
        // Credit is settled once a run of writes is through, not after each: one wake, not many.
        let job = match jobs.ready() {
            Some(job) => job,
            None => {
                settle(replies, &mut ledger)?;
                let Some(job) = jobs.next() else { return Ok(()) };
                job
            }
        };
        match job {
            DeviceJob::Write { start, chunk } => {
                progress::enter(Phase::Gathering, 0);
                progress::moved();
                let values = chunk.values().map_err(Failure::from)?;
                home.with(|Replica { stream, parameters, .. }| {
                    let mut device = Device { backend: &*parts.backend, stream };
                    Ok(parameters.write(&mut device, start, &values).map_err(Failure::from)?)
                })?;
                let source = chunk.header().map_err(Failure::from)?.source;
                ledger.consumed(source, chunk.payload_bytes());
            }
            DeviceJob::Compute(computation) => {
                settle(replies, &mut ledger)?;
                let (phase, step) = match &computation {
                    Computation::Train { step, .. } => (Phase::ForwardBackward, step + 1),
                    Computation::Evaluate { updates, .. } => (Phase::Evaluating, *updates),
                };
                // Kernels are compiled when they are first used.
                progress::enter(if is_prepared { phase } else { Phase::PreparingDevice }, step);
                home.with(|replica| match computation {
                    Computation::Train { step, grains } => computer.train(replica, step, &grains),
                    Computation::Evaluate { updates, grains } => {
                        computer.evaluate(replica, updates, &grains)
                    }
                })?;
                is_prepared = true;
                replies.send(DeviceReply::Finished)?;
            }
        }
    }
}

fn settle(replies: &Replies<DeviceReply>, ledger: &mut CreditLedger) -> Result<(), OperatorGone> {
    if ledger.is_settled() {
        return Ok(());
    }
    replies.send(DeviceReply::Written(ledger.settle().collect()))
}

/// Activations and scratch for the largest microbatch of the plan.
fn plan_workspace<B: Backend, M: Trainable<B>>(
    parts: &DeviceParts<B, M>,
    replica: &mut Replica<B>,
) -> Result<M::Workspace, Failure> {
    let batch = &parts.plan.batch;
    let shape = MicrobatchShape {
        samples: batch.microbatch_samples(),
        positions: parts.plan.positions,
        samples_per_grain: batch.grain_samples(),
    };
    let mut device = Device { backend: &*parts.backend, stream: &mut replica.stream };
    Ok(parts.model.plan(&mut device, shape)?)
}

impl<B: Backend, M: Trainable<B>> Computer<'_, B, M> {
    /// The lanes of a step, one after the other.
    fn train(
        &mut self,
        replica: &mut Replica<B>,
        step: u64,
        grains: &[Grain],
    ) -> Result<(), Stopped> {
        self.accumulators.reuse(replica.sums.take());
        let lanes = self.parts.lanes.clone();
        let mut rest = grains;
        for lane in lanes {
            let (of_lane, others) = rest.split_at(self.parts.plan.batch.lane_grains(lane));
            rest = others;
            self.train_lane(replica, step, lane, of_lane)?;
        }
        replica.sums = self.accumulators.take_finished();
        Ok(())
    }

    fn train_lane(
        &mut self,
        replica: &mut Replica<B>,
        step: u64,
        lane: usize,
        grains: &[Grain],
    ) -> Result<(), Stopped> {
        let parts = self.parts;
        let map = GradientMap {
            layout: parts.model.layout(),
            chunks: &parts.plan.chunks,
            tree: Tree::new(parts.plan.batch.lanes()).map_err(Failure::from)?,
            lanes: parts.lanes.clone(),
            finished: self.finished,
        };
        let mut outbox = Outbox { step, parts, replies: self.replies };
        let mut device = Device { backend: &*parts.backend, stream: &mut replica.stream };
        let mut sink = self.accumulators.begin(&mut device, &map, &mut outbox, lane)?;
        let mut total = GrainLoss::default();
        let mut first_not_finite = None;
        for range in parts.plan.batch.microbatches(lane) {
            self.replies.check()?;
            if range.end == grains.len() {
                sink.close();
            }
            let size = parts.plan.batch.grain_samples();
            let first = range.start;
            let samples = grains[range].iter().flat_map(|grain| &grain.samples);
            let microbatch = microbatch(&mut self.tokens, &parts.plan, samples, size);
            let expected = microbatch.grains();
            let losses = parts.model.forward_backward(
                &mut device,
                &mut self.workspace,
                &replica.parameters,
                microbatch,
                &mut sink,
            );
            let losses = match losses {
                // Either the operator is gone, or the sink refused a block: `check_order` says which.
                Err(ModelError::SinkClosed) => {
                    sink.check_order()?;
                    return Err(Stopped::Unwanted);
                }
                losses => losses.map_err(Failure::from)?,
            };
            sink.end_pass()?;
            add_losses(&mut total, &losses, expected)?;
            let not_finite = losses.iter().position(|loss| !loss.loss_sum.is_finite());
            let not_finite = not_finite.map(|grain| (first + grain) as u32);
            first_not_finite = first_not_finite.or(not_finite);
        }
        sink.end_lane();
        tracing::trace!(step, lane, accumulators = self.accumulators.held(), "lane done");
        let stop_requested = parts.stop.load(Ordering::Relaxed);
        let GrainLoss { loss_sum, tokens } = total;
        let lane = lane as u32;
        let loss = LaneLoss { step, lane, loss_sum, tokens, stop_requested, first_not_finite };
        Ok(self.replies.send(DeviceReply::Loss(loss))?)
    }

    fn evaluate(
        &mut self,
        replica: &mut Replica<B>,
        updates: u64,
        grains: &[Grain],
    ) -> Result<(), Stopped> {
        let plan = &self.parts.plan;
        let mut evaluated = Vec::with_capacity(grains.len());
        let size = plan.batch.evaluation_grain_samples();
        // A microbatch of training holds as many samples as fit a lane; so must one of evaluation.
        let fitting = plan.batch.microbatch_samples() / size;
        for grains in grains.chunks(fitting.max(1)) {
            self.replies.check()?;
            let losses = match fitting {
                0 => vec![self.evaluate_in_pieces(replica, &grains[0])?],
                _ => {
                    let samples = grains.iter().flat_map(|grain| &grain.samples);
                    let microbatch = microbatch(&mut self.tokens, plan, samples, size);
                    let Replica { stream, parameters, .. } = &mut *replica;
                    let mut device = Device { backend: &*self.parts.backend, stream };
                    let model = &self.parts.model;
                    model
                        .forward(&mut device, &mut self.workspace, parameters, microbatch)
                        .map_err(Failure::from)?
                }
            };
            add_losses(&mut GrainLoss::default(), &losses, grains.len())?;
            evaluated.extend(grains.iter().zip(losses).map(|(grain, loss)| EvaluationLoss {
                updates,
                grain: grain.grain as u64,
                loss_sum: loss.loss_sum,
                tokens: loss.tokens,
            }));
        }
        Ok(self.replies.send(DeviceReply::Evaluated(evaluated))?)
    }

    /// The loss of a grain that is longer than a lane, and so than the workspace: as if it had been formed at once.
    fn evaluate_in_pieces(
        &mut self,
        replica: &mut Replica<B>,
        grain: &Grain,
    ) -> Result<GrainLoss, Failure> {
        let DeviceParts { backend, model, plan, .. } = self.parts;
        let mut device = Device { backend: &**backend, stream: &mut replica.stream };
        let size = plan.batch.microbatch_samples();
        grain.samples.chunks(size).try_fold(GrainLoss::default(), |so_far, samples| {
            let microbatch = microbatch(&mut self.tokens, plan, samples, size);
            let (workspace, parameters) = (&mut self.workspace, &replica.parameters);
            Ok(model.forward_onto(&mut device, workspace, parameters, microbatch, so_far)?)
        })
    }
}

/// `samples` as one microbatch of grains of `samples_per_grain`, its tokens gathered in `tokens`.
fn microbatch<'a, 's>(
    tokens: &'a mut Vec<u32>,
    plan: &TrainingPlan,
    samples: impl IntoIterator<Item = &'s Sample>,
    samples_per_grain: usize,
) -> Microbatch<'a> {
    tokens.clear();
    samples.into_iter().for_each(|sample| tokens.extend_from_slice(&sample.tokens));
    Microbatch {
        samples: tokens.len() / (plan.positions + 1),
        tokens,
        positions: plan.positions,
        samples_per_grain,
        document_end: plan.document_end,
    }
}

/// Adds grain by grain, in order.
fn add_losses(total: &mut GrainLoss, losses: &[GrainLoss], expected: usize) -> Result<(), Failure> {
    if losses.len() != expected {
        let found = losses.len();
        let done = format!("gave {found} losses for a microbatch");
        return Err(GraphError::Model {
            expected: format!("one for each of {expected} grains"),
            done,
        }
        .into());
    }
    for loss in losses {
        total.loss_sum += loss.loss_sum;
        total.tokens += loss.tokens;
    }
    Ok(())
}

/// Addresses finished chunks to their owners.
struct Outbox<'a, B: Backend, M> {
    step: u64,
    parts: &'a DeviceParts<B, M>,
    replies: &'a Replies<DeviceReply>,
}

impl<B: Backend, M> FinishedChunks for Outbox<'_, B, M> {
    fn finished(
        &mut self,
        use_index: usize,
        node: Node,
        chunks: Vec<(usize, FinishedValues)>,
    ) -> bool {
        let addressed = |(chunk, values): (usize, FinishedValues)| {
            let header = ChunkHeader {
                destination: self.parts.owners[chunk] as u32,
                source: self.parts.worker as u32,
                part: Part::Gradient { use_index: use_index as u32 },
                chunk: chunk as u32,
                node,
                step: self.step,
            };
            match values {
                FinishedValues::Host(values) => Chunk::new(header, values),
                FinishedValues::Resident(elements) => Chunk::resident(header, elements),
            }
        };
        let chunks = chunks.into_iter().map(addressed).collect();
        self.replies.send(DeviceReply::Gradients(chunks)).is_ok()
    }
}
