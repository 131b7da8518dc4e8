//! The device thread: it computes one job at a time, a microbatch of a step or a part of an evaluation, in the order in which they
//! come. The parameters are lent to it with the first job of a step, and given back with the last.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidemill_collective::{LaneSchedule, Node};
use tidemill_kernels::Backend;
use tidemill_model::{
    Device, GrainLoss, Microbatch, MicrobatchShape, ModelError, ParameterSource, Trainable,
};

use super::accumulators::GradientMap;
use super::lane_sink::LaneSink;
use super::lane_sums::LaneSums;
use super::outbox::Outbox;
use super::replica::{Borrowed, Replica};
use super::schedule::Computation;
use super::{EvaluationLoss, LaneLoss};
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::operators::error::GraphError;
use crate::operators::job_thread::{Jobs, Replies, Stopped};
use crate::operators::lending::Borrower;
use crate::operators::plan::TrainingPlan;
use crate::operators::queue_trace::QueueTrace;
use crate::operators::samples::Grain;
use crate::operators::ticket::Ready;

/// An answer of the device thread.
pub(super) enum DeviceReply {
    /// The sums of a bucket of the step that runs are final, or enqueued to be.
    Ready(Ready),
    /// A lane of the step that runs is done.
    Loss(LaneLoss),
    /// Grains of the evaluation that runs are done.
    Evaluated(Vec<EvaluationLoss>),
    /// A job is done.
    Finished,
}

/// Everything that a device thread starts from.
pub(super) struct DeviceParts<B: Backend, M> {
    pub(super) backend: Arc<B>,
    pub(super) model: Arc<M>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) plan: Arc<TrainingPlan>,
    /// The worker's lanes, in order.
    pub(super) lanes: Vec<usize>,
    pub(super) schedule: LaneSchedule,
    /// The first grain of an evaluation that is a request.
    pub(super) first_request: usize,
}

/// The state of the device thread beside the parameters.
struct Computer<'a, B: Backend, M: Trainable<B>> {
    parts: &'a DeviceParts<B, M>,
    workspace: M::Workspace,
    sums: LaneSums<B>,
    replies: &'a Replies<DeviceReply>,
    lane: LaneSoFar,
    trace: QueueTrace<B>,
}

/// The results of the microbatches of the lane at hand.
#[derive(Default)]
struct LaneSoFar {
    loss: GrainLoss,
    /// The first grain whose loss is not finite.
    first_not_finite: Option<u32>,
}

/// The place of a microbatch in a step.
struct InStep {
    step: u64,
    lane: usize,
    /// The grains of the lane.
    grains: Range<usize>,
    is_first: bool,
    ends_lane: bool,
    is_last: bool,
}

/// Runs jobs until the operator is gone.
pub(super) fn run<B: Backend, M: Trainable<B>>(
    parts: &DeviceParts<B, M>,
    borrower: Borrower<B>,
    jobs: &Jobs<Computation<M::Sample>>,
    replies: &Replies<DeviceReply>,
) -> Result<(), Failure> {
    progress::enter(Phase::PreparingDevice, 0);
    serve(parts, borrower, jobs, replies).or_else(Stopped::into_result)
}

fn serve<B: Backend, M: Trainable<B>>(
    parts: &DeviceParts<B, M>,
    borrower: Borrower<B>,
    jobs: &Jobs<Computation<M::Sample>>,
    replies: &Replies<DeviceReply>,
) -> Result<(), Stopped> {
    let mut stream = parts.backend.device_stream()?;
    let workspace = plan_workspace(parts, &mut stream)?;
    let sums = LaneSums::of(parts, &borrower);
    let of_run = (parts.model.layout(), &*parts.plan, parts.schedule.workers());
    let trace = QueueTrace::new(&*parts.backend, &mut stream, "device queue")?;
    let mut replica = Replica::new(&*parts.backend, stream, borrower, of_run)?;
    let lane = LaneSoFar::default();
    let mut computer = Computer { parts, workspace, sums, replies, lane, trace };
    let served = computer.serve(&mut replica, jobs);
    if served.is_ok() {
        computer.trace.finish(&*parts.backend)?;
    }
    replica.finish(&parts.backend);
    served
}

/// Activations and scratch for the largest microbatch of the plan.
fn plan_workspace<B: Backend, M: Trainable<B>>(
    parts: &DeviceParts<B, M>,
    stream: &mut B::DeviceStream,
) -> Result<M::Workspace, Failure> {
    let batch = &parts.plan.batch;
    let shape = MicrobatchShape {
        samples: batch.microbatch_samples(),
        positions: parts.plan.positions,
        samples_per_grain: batch.grain_samples(),
    };
    let mut device = Device { backend: &*parts.backend, stream };
    Ok(parts.model.plan(&mut device, shape)?)
}

impl<B: Backend, M: Trainable<B>> Computer<'_, B, M> {
    fn serve(
        &mut self,
        replica: &mut Replica<B>,
        jobs: &Jobs<Computation<M::Sample>>,
    ) -> Result<(), Stopped> {
        let mut is_prepared = false;
        while let Some(computation) = jobs.next() {
            let (phase, step) = match &computation {
                Computation::Train { step, .. } => (Phase::ForwardBackward, step + 1),
                Computation::Evaluate { updates, .. } => (Phase::Evaluating, *updates),
            };
            // Kernels are compiled when they are first used.
            progress::enter(if is_prepared { phase } else { Phase::PreparingDevice }, step);
            self.replies.check()?;
            match computation {
                Computation::Train { step, lane, range, grains } => {
                    self.train(replica, &self.in_step(step, lane, range), grains)?;
                }
                Computation::Evaluate { updates, grains } => {
                    self.evaluate(replica, updates, grains)?;
                }
            }
            is_prepared = true;
            self.replies.send(DeviceReply::Finished)?;
        }
        Ok(())
    }

    fn in_step(&self, step: u64, lane: usize, grains: Range<usize>) -> InStep {
        let DeviceParts { lanes, plan, .. } = self.parts;
        let is_first = grains.start == 0 && lanes.first() == Some(&lane);
        let ends_lane = grains.end == plan.batch.lane_grains(lane);
        let is_last = ends_lane && lanes.last() == Some(&lane);
        InStep { step, lane, grains, is_first, ends_lane, is_last }
    }

    /// Forward and backward over a microbatch.
    fn train(
        &mut self,
        replica: &mut Replica<B>,
        of: &InStep,
        grains: Vec<Grain<M::Sample>>,
    ) -> Result<(), Stopped> {
        let parts = self.parts;
        let post = replica.borrower.post.clone();
        let Borrowed { mut source, stream, sums } =
            replica.borrow(&parts.backend, parts.model.layout())?;
        if of.is_first {
            self.sums.reuse(sums);
        }
        let round = parts.schedule.round_of(of.lane).unwrap_or(0) as u32;
        let mut outbox = Outbox { step: of.step, round, parts, replies: self.replies, post };
        let mut device = Device { backend: &*parts.backend, stream };
        let samples: Vec<_> = grains.into_iter().flat_map(|grain| grain.samples).collect();
        let Device { backend, stream } = &mut device;
        self.trace.synchronize(backend, stream)?;
        let begun = self.trace.begin(backend, stream)?;
        self.compute(&mut device, &mut *source, &mut outbox, of, &samples)?;
        self.trace.end(device.backend, device.stream, "forward and backward", begun)?;
        if of.ends_lane {
            self.replies.send(DeviceReply::Loss(self.end_lane(of)))?;
        }
        if !of.is_last {
            return Ok(());
        }
        outbox.skip_to_end(&mut device)?;
        drop(source);
        // With several workers the others read the sums in this memory, so it is not given back here.
        let sums = if outbox.post.is_none() { self.sums.take_kept() } else { None };
        replica.give_back(&parts.backend, sums)
    }

    fn compute(
        &mut self,
        device: &mut Device<'_, B>,
        source: &mut dyn ParameterSource<B>,
        outbox: &mut Outbox<'_, B, M>,
        of: &InStep,
        samples: &[M::Sample],
    ) -> Result<(), Stopped> {
        let parts = self.parts;
        let (layout, buckets) = (parts.model.layout(), &parts.plan.buckets);
        let lanes = parts.lanes[0]..parts.lanes[parts.lanes.len() - 1] + 1;
        let map = GradientMap { layout, buckets, tree: parts.schedule.tree(), lanes };
        let mut sink: Box<dyn LaneSink<B> + '_> = match &mut self.sums {
            LaneSums::Here(sums) => Box::new(sums.sink(device, &map, outbox, of.lane)?),
            LaneSums::AtOwners(sums) => {
                let node = Node::leaf(of.lane as u32);
                Box::new(sums.sink(device, (layout, buckets), outbox, node)?)
            }
        };
        if of.ends_lane {
            sink.close();
        }
        let size = parts.plan.batch.grain_samples();
        let microbatch = microbatch(&parts.plan, samples, size);
        let expected = microbatch.grains().len();
        let workspace = &mut self.workspace;
        let losses =
            parts.model.forward_backward(device, workspace, source, microbatch, &mut *sink);
        let losses = match losses {
            // The sink is closed because a block came out of order, which `check_order` reports, or because the operator is gone.
            Err(ModelError::SinkClosed) => {
                sink.check_order()?;
                return Err(sink.stopped().unwrap_or(Stopped::Unwanted));
            }
            losses => losses?,
        };
        sink.check_pass()?;
        sink.end();
        add_losses(&mut self.lane.loss, &losses, expected)?;
        let not_finite = losses.iter().position(|loss| !loss.loss_sum.is_finite());
        let not_finite = not_finite.map(|grain| (of.grains.start + grain) as u32);
        self.lane.first_not_finite = self.lane.first_not_finite.or(not_finite);
        Ok(())
    }

    fn end_lane(&mut self, of: &InStep) -> LaneLoss {
        let LaneSoFar { loss, first_not_finite } = std::mem::take(&mut self.lane);
        let (step, lane) = (of.step, of.lane as u32);
        tracing::trace!(step, lane, "lane done");
        let stop_requested = self.parts.stop.load(Ordering::Relaxed);
        let GrainLoss { loss_sum, tokens } = loss;
        LaneLoss { step, lane, loss_sum, tokens, stop_requested, first_not_finite }
    }

    fn evaluate(
        &mut self,
        replica: &mut Replica<B>,
        updates: u64,
        mut grains: Vec<Grain<M::Sample>>,
    ) -> Result<(), Stopped> {
        let DeviceParts { backend, model, plan, .. } = self.parts;
        let Borrowed { mut source, stream, sums } = replica.borrow(backend, model.layout())?;
        self.sums.reuse(sums);
        let mut device = Device { backend: &**backend, stream };
        let begun = self.trace.begin(device.backend, device.stream)?;
        let mut evaluated = Vec::with_capacity(grains.len());
        let size = plan.batch.evaluation_grain_samples();
        // A microbatch of training holds as many samples as fit a lane; so must one of evaluation.
        let fitting = plan.batch.microbatch_samples() / size;
        let requests = grains.partition_point(|grain| grain.grain < self.parts.first_request);
        let requests = grains.split_off(requests);
        for grains in grains.chunks_mut(fitting.max(1)) {
            self.replies.check()?;
            let losses = match fitting {
                0 => vec![self.evaluate_in_pieces(&mut device, &mut *source, &grains[0])?],
                _ => {
                    let samples = grains.iter_mut().flat_map(|grain| grain.samples.drain(..));
                    let samples: Vec<_> = samples.collect();
                    let microbatch = microbatch(plan, &samples, size);
                    model.forward(&mut device, &mut self.workspace, &mut *source, microbatch)?
                }
            };
            add_losses(&mut GrainLoss::default(), &losses, grains.len())?;
            evaluated.extend(evaluation_losses(updates, grains, (losses, None)));
        }
        for grains in requests.chunks(plan.batch.microbatch_grains()) {
            self.replies.check()?;
            let samples: Vec<_> = grains.iter().flat_map(|grain| grain.samples.clone()).collect();
            // A request is one text, whatever tokens are in it.
            let microbatch = Microbatch { document_end: None, ..microbatch(plan, &samples, 1) };
            let workspace = &mut self.workspace;
            let (losses, greedy) =
                model.forward_greedy(&mut device, workspace, &mut *source, microbatch)?;
            add_losses(&mut GrainLoss::default(), &losses, grains.len())?;
            evaluated.extend(evaluation_losses(updates, grains, (losses, greedy)));
        }
        self.trace.end(device.backend, device.stream, "evaluating", begun)?;
        Ok(self.replies.send(DeviceReply::Evaluated(evaluated))?)
    }

    /// The loss of a grain that is longer than a lane, and so than the workspace: as if it had been formed at once.
    fn evaluate_in_pieces(
        &mut self,
        device: &mut Device<'_, B>,
        source: &mut dyn ParameterSource<B>,
        grain: &Grain<M::Sample>,
    ) -> Result<GrainLoss, Failure> {
        let DeviceParts { model, plan, .. } = self.parts;
        let size = plan.batch.microbatch_samples();
        grain.samples.chunks(size).try_fold(GrainLoss::default(), |so_far, samples| {
            let microbatch = microbatch(plan, samples, size);
            let workspace = &mut self.workspace;
            Ok(model.forward_onto(device, workspace, source, microbatch, so_far)?)
        })
    }
}

fn evaluation_losses<S>(
    updates: u64,
    grains: &[Grain<S>],
    (losses, greedy): (Vec<GrainLoss>, Option<Vec<bool>>),
) -> impl Iterator<Item = EvaluationLoss> {
    let of_grains = grains.iter().zip(losses).enumerate();
    of_grains.map(move |(place, (grain, GrainLoss { loss_sum, tokens }))| EvaluationLoss {
        updates,
        grain: grain.grain as u64,
        loss_sum,
        tokens,
        greedy: greedy.as_ref().and_then(|greedy| greedy.get(place).copied()),
    })
}

/// `samples` as one microbatch of grains of `samples_per_grain`.
pub(super) fn microbatch<'a, S>(
    plan: &TrainingPlan,
    samples: &'a [S],
    samples_per_grain: usize,
) -> Microbatch<'a, S> {
    let TrainingPlan { positions, document_end, .. } = *plan;
    Microbatch { samples, positions, samples_per_grain, document_end }
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
