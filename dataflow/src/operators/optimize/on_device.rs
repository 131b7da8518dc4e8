//! The optimizer thread where training state stays on the device.
//!
//! It has a device stream of its own, beside the one that computes: sums of gradients are formed there while the rest of the
//! backward pass still runs. What it is told is about whole buckets; what it computes is computed element by element, or chunk
//! by chunk, so that how chunks are put together, and who owns them, changes no bit.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_collective::communicator::{CommunicatorError, Cut, Update};
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{Decay, Device, Layout, Parameters};

use super::rule::UpdateRule;
use super::schedule::{ShardJob, Staging};
use super::shard::{ShardParts, ShardReply};
use super::staging::Staged;
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::operators::companion::{Jobs, Replies, Stopped};
use crate::operators::error::GraphError;
use crate::operators::lending::Lender;
use crate::operators::plan::TrainingPlan;

const NO_SUMS: GraphError =
    GraphError::Order { what: "the mean of gradients", missing: "their sums" };
const LENT: GraphError = GraphError::Order { what: "an update", missing: "the end of the step" };

/// What a worker owns of a bucket.
struct OwnedBucket {
    /// Its chunks that this worker owns.
    chunks: Range<usize>,
    /// Their elements of the parameter arena.
    range: Range<usize>,
    /// For each worker, where the gradients of what it owns are in the gradient arena, for each use.
    slots: Vec<Vec<Range<usize>>>,
    /// Where they begin in the buffers of owned elements, which are in the order of the arena.
    start: usize,
    /// Where the sums of its uses begin, one use after the other, in a buffer of sums that were read from other workers.
    sums: usize,
    /// Who owns which elements of the bucket.
    cut: Cut,
}

/// The state of what a worker owns.
pub(super) struct DeviceShard<B: Backend> {
    backend: Arc<B>,
    stream: B::DeviceStream,
    /// What is copied to the host waits for no sums there.
    snapshots: B::DeviceStream,
    rule: UpdateRule,
    plan: Arc<TrainingPlan>,
    lender: Lender<B>,
    worker: usize,
    /// The parts of the arena that are decayed and those that are not, in order.
    decays: Vec<(Range<usize>, Decay)>,
    buckets: Vec<OwnedBucket>,
    /// All parameters; lent to the device thread for a step, and changed only when it has given them back.
    parameters: Arc<Parameters<B>>,
    is_lent: bool,
    /// The gradients of all uses over all lanes, of a worker alone; of several what each owns.
    sums: Option<B::Buffer<f32>>,
    /// Of what is owned.
    mean_gradient: B::Buffer<f32>,
    moments: [B::Buffer<f32>; 2],
    /// Buckets of the step that were gathered.
    gathered: usize,
    /// Where cuts are copied to, from the first step on.
    staged: Staged<B>,
    /// Behind the copy of them.
    copied: Option<B::Event>,
}

impl<B: Backend> DeviceShard<B> {
    /// Puts the state on the device and runs jobs until the operator is gone.
    pub(super) fn serve(
        parts: ShardParts<B>,
        layout: &Layout,
        (lender, staging): (Lender<B>, Staging),
        (worker, workers): (usize, usize),
        jobs: &Jobs<Vec<ShardJob>>,
        replies: &Replies<Vec<ShardReply>>,
    ) -> Result<(), Failure> {
        let mut shard = Self::new(parts, layout, lender, (worker, workers))?;
        let begun = shard.lend();
        // It takes long for much of it: while the first step computes.
        shard.staged = Staged::prepare(&*shard.backend, staging, B::elements(&shard.mean_gradient));
        let ended = begun.and_then(|()| shard.run(jobs, replies));
        if let (Err(Stopped::Failed(_)), Some(communicator)) = (&ended, &shard.lender.communicator)
        {
            // What waits for others on the device would not end before they are told.
            communicator.abort_handle()();
        }
        // What other workers have posted is read until then, and given back afterwards. Where the device fails, it has said so.
        let _ = shard.backend.record(&mut shard.stream).and_then(|end| shard.backend.wait(&end));
        ended.or_else(Stopped::into_result)
    }

    fn new(
        parts: ShardParts<B>,
        layout: &Layout,
        lender: Lender<B>,
        (worker, workers): (usize, usize),
    ) -> Result<Self, Failure> {
        progress::enter(Phase::PreparingDevice, 0);
        let ShardParts { backend, state, rule, plan, decays, .. } = parts;
        let mut stream = backend.device_stream()?;
        let snapshots = backend.device_stream()?;
        let mut device = Device { backend: &*backend, stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, layout, &state.parameters)?;
        let (buckets, owned, sums) = owned_buckets(&plan, worker, workers);
        let mut allocate = |elements| backend.allocate::<f32>(&mut stream, elements);
        let sums = match lender.communicator {
            Some(_) => Some(allocate(sums)?),
            None => None,
        };
        let mean_gradient = allocate(owned)?;
        let mut moments = [allocate(owned)?, allocate(owned)?];
        for (buffer, arena) in moments.iter_mut().zip(state.moments.iter().flatten()) {
            for bucket in &buckets {
                let (expected, found) = (bucket.range.end, arena.len());
                let values = arena.get(bucket.range.clone());
                let values = values.ok_or(GraphError::InitialState { expected, found })?;
                let out = SliceMut::new(buffer, bucket.start, values.len())?;
                backend.write(&mut stream, out, values)?;
                progress::moved();
            }
        }
        Ok(Self {
            backend,
            stream,
            snapshots,
            rule,
            plan,
            lender,
            worker,
            decays,
            buckets,
            parameters: Arc::new(parameters),
            is_lent: false,
            sums,
            mean_gradient,
            moments,
            gathered: 0,
            staged: Staged::Nothing,
            copied: None,
        })
    }

    fn run(
        &mut self,
        jobs: &Jobs<Vec<ShardJob>>,
        replies: &Replies<Vec<ShardReply>>,
    ) -> Result<(), Stopped> {
        while let Some(first) = jobs.next() {
            let waiting: Vec<_> =
                first.into_iter().chain(std::iter::from_fn(|| jobs.ready()).flatten()).collect();
            let is_alike = |a: &ShardJob, b: &ShardJob| {
                matches!((a, b), (ShardJob::Mean { .. }, ShardJob::Mean { .. }))
            };
            let mut answers = Vec::with_capacity(waiting.len());
            for alike in waiting.chunk_by(is_alike) {
                progress::moved();
                match alike[0] {
                    ShardJob::Sum { step, bucket } => {
                        // It may wait for other workers, who may wait for what was answered before.
                        send(replies, &mut answers)?;
                        self.sum(step, bucket)?;
                    }
                    ShardJob::Mean { tokens, .. } => {
                        let units = alike.iter().filter_map(|job| match job {
                            ShardJob::Mean { unit, .. } => Some(*unit),
                            _ => None,
                        });
                        self.means(units.collect(), tokens, &mut answers)?;
                    }
                    ShardJob::Update { unit, update, coefficient } => {
                        self.update(unit, update, coefficient)?;
                        answers.push(ShardReply::Updated { unit, values: None });
                    }
                    ShardJob::Gather { step, bucket } => {
                        send(replies, &mut answers)?;
                        self.gather(step, bucket)?;
                        answers.push(ShardReply::Present { bucket });
                    }
                    ShardJob::Stage => {
                        self.stage()?;
                        answers.push(ShardReply::Staged);
                    }
                    ShardJob::Snapshot { chunk, part } => {
                        let values = self.snapshot(chunk, part)?;
                        answers.push(ShardReply::Snapshot { chunk, part, values });
                    }
                }
            }
            send(replies, &mut answers)?;
        }
        Ok(())
    }

    fn lend(&mut self) -> Result<(), Stopped> {
        let sums = match self.lender.communicator {
            Some(_) => None,
            None => self.sums.take(),
        };
        self.lender.lend(&self.backend, &mut self.stream, &self.parameters, sums)?;
        self.is_lent = true;
        Ok(())
    }

    fn take_back(&mut self) -> Result<(), Stopped> {
        if !self.is_lent {
            return Ok(());
        }
        let sums = {
            let _waiting = progress::during(Phase::WaitingForDevice);
            self.lender.take_back(&self.backend, &mut self.stream)?
        };
        self.is_lent = false;
        if self.lender.communicator.is_none() {
            self.sums = sums;
        }
        Ok(())
    }

    fn sum(&mut self, step: u64, bucket: usize) -> Result<(), Stopped> {
        let Some(communicator) = &mut self.lender.communicator else { return Ok(()) };
        let OwnedBucket { slots, sums: first, .. } = &self.buckets[bucket];
        let sums = self.sums.as_mut().ok_or(NO_SUMS)?;
        let elements = slots[self.worker].iter().map(Range::len).sum();
        let out = SliceMut::new(sums, *first, elements)?;
        let _waiting = progress::during(Phase::WaitingForSums);
        let key = (step, bucket as u32);
        let (backend, stream) = (&*self.backend, &mut self.stream);
        communicator.reduce_scatter(backend, stream, key, slots, out).map_err(stopped)
    }

    /// The mean gradients of what is owned of `units`, and their sums of squares.
    fn means(
        &mut self,
        mut units: Vec<usize>,
        tokens: u64,
        answers: &mut Vec<ShardReply>,
    ) -> Result<(), Stopped> {
        if self.lender.communicator.is_none() {
            self.take_back()?;
        }
        units.retain(|&unit| !self.buckets[unit].range.is_empty());
        for &unit in &units {
            let OwnedBucket { start, sums: first, range, .. } = &self.buckets[unit];
            let (start, elements) = (*start, range.len());
            let slots = &self.buckets[unit].slots[self.worker];
            let at = |(index, slot): (usize, &Range<usize>)| match self.lender.communicator {
                Some(_) => first + index * elements,
                None => slot.start,
            };
            let sums = self.sums.as_ref().ok_or(NO_SUMS)?;
            let uses = slots.iter().enumerate().map(|of| Slice::new(sums, at(of), elements));
            let uses = uses.collect::<Result<Vec<_>, _>>()?;
            let out = SliceMut::new(&mut self.mean_gradient, start, elements)?;
            self.backend.mean_gradient(&mut self.stream, out, &uses, tokens as f32)?;
        }
        // Asking the device for numbers takes longer than computing them: neighbours are asked for together.
        units.sort_by_key(|&unit| self.buckets[unit].start);
        let end = |unit: usize| self.buckets[unit].start + self.buckets[unit].range.len();
        for neighbours in units.chunk_by(|&a, &b| end(a) == self.buckets[b].start) {
            let (first, last) = (neighbours[0], neighbours[neighbours.len() - 1]);
            let start = self.buckets[first].start;
            let chunks: Vec<usize> =
                neighbours.iter().flat_map(|&unit| self.buckets[unit].chunks.clone()).collect();
            let ends = chunks.iter().scan(0, |end, &chunk| {
                *end += self.plan.chunks.chunks()[chunk].range.len();
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            let mean = Slice::new(&self.mean_gradient, start, end(last) - start)?;
            let squares = self.backend.sums_of_squares(&mut self.stream, mean, &ends)?;
            let squares = chunks.into_iter().zip(squares);
            answers.extend(squares.map(|(chunk, sum)| ShardReply::SumOfSquares { chunk, sum }));
        }
        Ok(())
    }

    /// Updates what is owned of `bucket`, and tells the other workers.
    fn update(&mut self, bucket: usize, update: u64, coefficient: f32) -> Result<(), Stopped> {
        self.take_back()?;
        if let Some(copied) = self.copied.take() {
            self.backend.wait_for(&mut self.stream, &copied)?;
        }
        let Self { backend, stream, snapshots, rule, lender, decays, mean_gradient, .. } = self;
        let OwnedBucket { range, start, .. } = &self.buckets[bucket];
        let parameters = Arc::get_mut(&mut self.parameters).ok_or(LENT)?;
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        let decays = decays.iter().filter_map(|(run, decay)| {
            let run = run.start.max(range.start)..run.end.min(range.end);
            (!run.is_empty()).then_some((run, *decay))
        });
        if !range.is_empty() {
            let mut device = Device { backend: &**backend, stream };
            parameters.update(&mut device, range.clone(), |device, mut parameters| {
                for (run, decay) in decays {
                    let (first, elements) = (run.start - range.start, run.len());
                    device.backend.adamw(
                        device.stream,
                        parameters.reborrow().sub(first, elements)?,
                        SliceMut::new(exp_avg, start + first, elements)?,
                        SliceMut::new(exp_avg_sq, start + first, elements)?,
                        Slice::new(mean_gradient, start + first, elements)?,
                        (rule.adamw)(update, coefficient, decay),
                    )?;
                }
                Ok(())
            })?;
        }
        let ready = backend.record(stream)?;
        backend.wait_for(snapshots, &ready)?;
        let Some(communicator) = &mut lender.communicator else { return Ok(()) };
        // Devices whose memory is not shared have no communicator.
        let Some(values) = parameters.share() else { return Err(Stopped::Unwanted) };
        let (key, update) = ((update - 1, bucket as u32), Update { values, start: range.start });
        communicator.updated(key, update, &ready).map_err(stopped)
    }

    /// Brings what the other workers have updated of `bucket` here; after the last, the device thread may go on.
    fn gather(&mut self, step: u64, bucket: usize) -> Result<(), Stopped> {
        let Self { backend, stream, lender, .. } = self;
        if let Some(communicator) = &mut lender.communicator {
            // The other workers have to update first.
            let _waiting = progress::during(Phase::WaitingForSums);
            let range = self.plan.buckets.buckets()[bucket].range.clone();
            let parameters = Arc::get_mut(&mut self.parameters).ok_or(LENT)?;
            let (key, cut) = ((step, bucket as u32), &self.buckets[bucket].cut);
            let mut device = Device { backend: &**backend, stream };
            let mut gathered = Ok(());
            parameters.update(&mut device, range, |device, out| {
                let Device { backend, stream } = device;
                gathered = communicator.gather(backend, stream, key, cut, out);
                Ok(())
            })?;
            gathered.map_err(stopped)?;
        }
        self.gathered += 1;
        if self.gathered < self.buckets.len() {
            return Ok(());
        }
        self.gathered = 0;
        self.lend()
    }

    /// Begins to copy all that is owned to the host; the next update waits for it on the device.
    fn stage(&mut self) -> Result<(), Failure> {
        let (backend, stream) = (&*self.backend, &mut self.snapshots);
        let mut device = Device { backend, stream };
        let owned = self.buckets.iter().filter(|bucket| !bucket.range.is_empty());
        let owned = owned.map(|bucket| (bucket.range.clone(), bucket.start));
        self.staged.copy(&mut device, &self.parameters, owned, &self.moments)?;
        self.copied = Some(backend.record(stream)?);
        Ok(())
    }

    fn snapshot(&mut self, chunk: usize, part: StatePart) -> Result<Vec<f32>, Failure> {
        let range = self.plan.chunks.chunks()[chunk].range.clone();
        let owner = self.buckets.iter().find(|bucket| bucket.chunks.contains(&chunk));
        let owner = owner.ok_or(GraphError::ForeignChunk { chunk })?;
        let start = owner.start + range.start - owner.range.start;
        let inside = start..start + range.len();
        if let Some(values) = self.staged.values(&*self.backend, part, inside)? {
            return Ok(values);
        }
        let _waiting = progress::during(Phase::WaitingForDevice);
        // Reading waits for the copy, so that the next update comes after it.
        let mut device = Device { backend: &*self.backend, stream: &mut self.snapshots };
        let [exp_avg, exp_avg_sq] = &self.moments;
        let moment = match part {
            StatePart::Parameter => {
                let mut values = vec![0.0; range.len()];
                self.parameters.read(&mut device, range.start, &mut values)?;
                return Ok(values);
            }
            StatePart::ExpAvg => exp_avg,
            StatePart::ExpAvgSq => exp_avg_sq,
        };
        let from = Slice::new(moment, start, range.len())?;
        Ok(device.backend.to_vec(device.stream, from)?)
    }
}

/// What `worker` of `workers` owns of each bucket, how many elements that are, and how many over all uses.
fn owned_buckets(
    plan: &TrainingPlan,
    worker: usize,
    workers: usize,
) -> (Vec<OwnedBucket>, usize, usize) {
    let owners = plan.buckets.owners(&plan.chunks, workers);
    let mut sums = 0;
    let owned = plan.buckets.buckets().iter().zip(&owners).map(|(bucket, owners)| {
        let range = owners.range(&plan.chunks, worker);
        let mut end = 0;
        let ends = (0..workers).map(|rank| {
            end += owners.range(&plan.chunks, rank).len();
            end
        });
        let cut = Cut::at(ends.collect());
        let slots = |rank| {
            let Range { start, end } = cut.of_rank(rank);
            bucket.slots.iter().map(|slot| slot + start..slot + end).collect()
        };
        let slots = (0..workers).map(slots).collect();
        let first = sums;
        sums += range.len() * bucket.slots.len();
        OwnedBucket { chunks: owners.chunks(worker), range, slots, start: 0, sums: first, cut }
    });
    let mut owned: Vec<_> = owned.collect();
    let mut in_order: Vec<_> = owned.iter_mut().collect();
    in_order.sort_by_key(|bucket| bucket.range.start);
    let mut elements = 0;
    for bucket in in_order {
        bucket.start = elements;
        elements += bucket.range.len();
    }
    (owned, elements, sums)
}

/// Sends what there is to answer.
fn send(replies: &Replies<Vec<ShardReply>>, answers: &mut Vec<ShardReply>) -> Result<(), Stopped> {
    if answers.is_empty() {
        return Ok(());
    }
    Ok(replies.send(std::mem::take(answers))?)
}

/// Where the other workers are gone, the run is over.
fn stopped(error: CommunicatorError) -> Stopped {
    match error {
        CommunicatorError::Closed => Stopped::Unwanted,
        CommunicatorError::Device(error) => Stopped::Failed(error.into()),
        error => Stopped::Failed(error.into()),
    }
}
