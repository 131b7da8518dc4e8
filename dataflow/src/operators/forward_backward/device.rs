//! The device thread: it holds a replica of the parameters and computes what it is told, in order.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;

use tidemill_collective::{Chunk, ChunkHeader, Credit, CreditLedger, Node, Part, Tree};
use tidemill_kernels::Backend;
use tidemill_model::{
    Device, GrainLoss, Microbatch, MicrobatchShape, ModelError, Parameters, Trainable,
};

use super::accumulators::{Accumulators, FinishedChunks, GradientMap};
use super::schedule::Computation;
use super::{EvaluationLoss, LaneLoss};
use crate::cluster::Failure;
use crate::operators::companion::{OperatorGone, Replies};
use crate::operators::plan::TrainingPlan;
use crate::operators::samples::Grain;

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
    /// A chunk of a finished node of the step that runs.
    Gradient(Chunk),
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
    pub(super) stop: Arc<AtomicBool>,
    pub(super) plan: Arc<TrainingPlan>,
    pub(super) worker: usize,
    pub(super) lanes: Range<usize>,
    /// The owner of each chunk.
    pub(super) owners: Vec<usize>,
}

struct DeviceThread<'a, B: Backend, M: Trainable<B>> {
    parts: &'a DeviceParts<B, M>,
    stream: B::DeviceStream,
    parameters: Parameters<B>,
    workspace: M::Workspace,
    accumulators: Accumulators<B>,
    replies: &'a Replies<DeviceReply>,
    tokens: Vec<u32>,
}

/// Runs jobs until the operator is gone.
pub(super) fn run<B: Backend, M: Trainable<B>>(
    mut parts: DeviceParts<B, M>,
    jobs: &Receiver<DeviceJob>,
    replies: &Replies<DeviceReply>,
) -> Result<(), Failure> {
    let initial = std::mem::take(&mut parts.parameters);
    let backend = Arc::clone(&parts.backend);
    let mut stream = backend.device_stream()?;
    let mut device = Device { backend: &*backend, stream: &mut stream };
    let batch = &parts.plan.batch;
    // A grain of an evaluation can be longer than a lane.
    let evaluated = parts.plan.evaluation.map_or(0, |_| batch.grain_samples());
    let shape = MicrobatchShape {
        samples: batch.microbatch_samples().max(evaluated),
        positions: parts.plan.positions,
        samples_per_grain: batch.grain_samples(),
    };
    let parameters = Parameters::from_host(&mut device, parts.model.layout(), &initial)?;
    drop(initial);
    let workspace = parts.model.plan(&mut device, shape)?;
    let mut thread = DeviceThread {
        parts: &parts,
        stream,
        parameters,
        workspace,
        accumulators: Accumulators::new(),
        replies,
        tokens: Vec::new(),
    };
    match thread.serve(jobs) {
        Err(Stopped::OperatorGone) | Ok(()) => Ok(()),
        Err(Stopped::Failed(failure)) => Err(failure),
    }
}

/// Why the thread ends before its jobs do.
enum Stopped {
    OperatorGone,
    Failed(Failure),
}

impl From<OperatorGone> for Stopped {
    fn from(_: OperatorGone) -> Self {
        Self::OperatorGone
    }
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl<B: Backend, M: Trainable<B>> DeviceThread<'_, B, M> {
    fn serve(&mut self, jobs: &Receiver<DeviceJob>) -> Result<(), Stopped> {
        let mut ledger = CreditLedger::default();
        loop {
            // Credit is settled once a run of writes is through, not after each: one wake, not many.
            let job = match jobs.try_recv() {
                Ok(job) => job,
                Err(_) => {
                    self.settle(&mut ledger)?;
                    let Ok(job) = jobs.recv() else { return Ok(()) };
                    job
                }
            };
            match job {
                DeviceJob::Write { start, chunk } => self.write(start, &chunk, &mut ledger)?,
                DeviceJob::Compute(computation) => {
                    self.settle(&mut ledger)?;
                    match computation {
                        Computation::Train { step, grains } => self.train(step, &grains)?,
                        Computation::Evaluate { updates, grains } => {
                            self.evaluate(updates, &grains)?;
                        }
                    }
                    self.replies.send(DeviceReply::Finished)?;
                }
            }
        }
    }

    fn settle(&mut self, ledger: &mut CreditLedger) -> Result<(), Stopped> {
        if !ledger.is_settled() {
            self.replies.send(DeviceReply::Written(ledger.settle().collect()))?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        start: usize,
        chunk: &Chunk,
        ledger: &mut CreditLedger,
    ) -> Result<(), Failure> {
        let mut device = Device { backend: &*self.parts.backend, stream: &mut self.stream };
        self.parameters.write(&mut device, start, &chunk.values()?)?;
        ledger.consumed(chunk.header()?.source, chunk.payload_bytes());
        Ok(())
    }

    /// The lanes of a step, one after the other.
    fn train(&mut self, step: u64, grains: &[Grain]) -> Result<(), Stopped> {
        let lanes = self.parts.lanes.clone();
        let mut rest = grains;
        for lane in lanes {
            let (of_lane, others) = rest.split_at(self.parts.plan.batch.lane_grains(lane));
            rest = others;
            self.train_lane(step, lane, of_lane)?;
        }
        Ok(())
    }

    fn train_lane(&mut self, step: u64, lane: usize, grains: &[Grain]) -> Result<(), Stopped> {
        let parts = self.parts;
        let map = GradientMap {
            layout: parts.model.layout(),
            chunks: &parts.plan.chunks,
            tree: Tree::new(parts.plan.batch.lanes()).map_err(Failure::from)?,
            lanes: parts.lanes.clone(),
        };
        let mut outbox = Outbox { step, parts, replies: self.replies };
        let mut device = Device { backend: &*parts.backend, stream: &mut self.stream };
        let mut sink = self.accumulators.begin(&mut device, &map, &mut outbox, lane)?;
        let mut total = GrainLoss::default();
        for range in parts.plan.batch.microbatches(lane) {
            if range.end == grains.len() {
                sink.close();
            }
            let microbatch = microbatch(&mut self.tokens, &parts.plan, &grains[range]);
            let expected = microbatch.grains();
            let losses = parts.model.forward_backward(
                &mut device,
                &mut self.workspace,
                &self.parameters,
                microbatch,
                &mut sink,
            );
            let losses = match losses {
                // Either the operator is gone, or the sink refused a block: `check_order` says which.
                Err(ModelError::SinkClosed) => {
                    sink.check_order()?;
                    return Err(Stopped::OperatorGone);
                }
                losses => losses.map_err(Failure::from)?,
            };
            sink.end_pass()?;
            add_losses(&mut total, &losses, expected)?;
        }
        sink.end_lane();
        tracing::trace!(step, lane, accumulators = self.accumulators.held(), "lane done");
        let stop_requested = parts.stop.load(Ordering::Relaxed);
        let GrainLoss { loss_sum, tokens } = total;
        let loss = LaneLoss { step, lane: lane as u32, loss_sum, tokens, stop_requested };
        Ok(self.replies.send(DeviceReply::Loss(loss))?)
    }

    fn evaluate(&mut self, updates: u64, grains: &[Grain]) -> Result<(), Stopped> {
        let parts = self.parts;
        let mut device = Device { backend: &*parts.backend, stream: &mut self.stream };
        let mut evaluated = Vec::with_capacity(grains.len());
        // A microbatch of training holds as many samples as fit a lane; so must one of evaluation.
        let fitting = parts.plan.batch.microbatch_samples() / parts.plan.batch.grain_samples();
        for grains in grains.chunks(fitting.max(1)) {
            let microbatch = microbatch(&mut self.tokens, &parts.plan, grains);
            let losses = parts
                .model
                .forward(&mut device, &mut self.workspace, &self.parameters, microbatch)
                .map_err(Failure::from)?;
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
}

/// `grains` as one microbatch, its tokens gathered in `tokens`.
fn microbatch<'a>(
    tokens: &'a mut Vec<u32>,
    plan: &TrainingPlan,
    grains: &[Grain],
) -> Microbatch<'a> {
    tokens.clear();
    let samples = grains.iter().flat_map(|grain| &grain.samples);
    samples.for_each(|sample| tokens.extend_from_slice(&sample.tokens));
    Microbatch {
        samples: tokens.len() / (plan.positions + 1),
        tokens,
        positions: plan.positions,
        samples_per_grain: plan.batch.grain_samples(),
    }
}

/// Adds grain by grain, in order.
fn add_losses(total: &mut GrainLoss, losses: &[GrainLoss], expected: usize) -> Result<(), Failure> {
    if losses.len() != expected {
        let found = losses.len();
        return Err(format!("the model gave {found} losses for {expected} grains").into());
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
    fn finished(&mut self, use_index: usize, chunk: usize, node: Node, values: Vec<f32>) -> bool {
        let header = ChunkHeader {
            destination: self.parts.owners[chunk] as u32,
            source: self.parts.worker as u32,
            part: Part::Gradient { use_index: use_index as u32 },
            chunk: chunk as u32,
            node,
            step: self.step,
        };
        self.replies.send(DeviceReply::Gradient(Chunk::new(header, values))).is_ok()
    }
}
