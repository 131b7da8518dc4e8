//! The optimizer thread: the state of what a worker owns, and what is done with it.
//!
//! It has a device stream of its own, beside the one that computes: sums of gradients are formed there while the rest of the
//! backward pass still runs. What it is told is about whole buckets; what it computes is computed element by element, or chunk
//! by chunk, so that how chunks are put together, and who owns them, changes no bit.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::communicator::{Cut, Key};
use tidemill_collective::{StatePart, Tree};
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{Decay, Device, Layout, Parameters};

use super::staging::Staged;
use super::sums::OwnedSums;
use super::{Optimizer, SnapshotReply, Staging, StateJob, UpdateReply};
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::operators::companion::{Jobs, Replies, Stopped};
use crate::operators::error::GraphError;
use crate::operators::lending::Lender;
use crate::operators::optimize::UpdateRule;
use crate::operators::plan::TrainingPlan;
use crate::operators::ticket::{Ready, Ticket};

const NO_SUMS: GraphError =
    GraphError::Order { what: "the mean of gradients", missing: "their sums" };
const LENT: GraphError = GraphError::Order { what: "an update", missing: "the end of the step" };

/// What a worker owns of a bucket.
struct OwnedBucket {
    /// Its chunks that this worker owns.
    chunks: Range<usize>,
    /// Their elements of the parameter arena.
    range: Range<usize>,
    /// Where they begin in the gradient arena of a worker that is alone, for each use.
    slots: Vec<usize>,
    /// Where they begin in the buffers of owned elements, which are in the order of the arena.
    start: usize,
    /// Who owns which elements of the bucket.
    cut: Cut,
}

/// The gradients of all uses over all lanes.
enum Sums<B: Backend> {
    /// Of a worker alone, all of them: while it has them.
    Alone(Option<B::Buffer<f32>>),
    /// Of several what each owns.
    Owned(OwnedSums<B>),
}

/// The state of what a worker owns.
pub(super) struct OwnedState<B: Backend> {
    backend: Arc<B>,
    stream: B::DeviceStream,
    /// What is copied to the host waits for no sums there.
    snapshots: B::DeviceStream,
    rule: UpdateRule,
    plan: Arc<TrainingPlan>,
    tree: Tree,
    /// Rounds of a step's lanes.
    rounds: u32,
    lender: Lender<B>,
    answers: Answers,
    /// The parts of the arena that are decayed and those that are not, in order.
    decays: Vec<(Range<usize>, Decay)>,
    buckets: Vec<OwnedBucket>,
    /// All parameters; lent to the device thread for a step, and changed only when it has given them back.
    parameters: Arc<Parameters<B>>,
    is_lent: bool,
    sums: Sums<B>,
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

impl<B: Backend> OwnedState<B> {
    /// Puts the state on the device and runs jobs until the operators are gone.
    pub(super) fn serve(
        parts: Optimizer<'_, B>,
        plan: Arc<TrainingPlan>,
        staging: Staging,
        place: (usize, usize),
        jobs: &Jobs<StateJob>,
    ) -> Result<(), Failure> {
        let mut state = Self::new(parts, plan, place)?;
        let begun = state.lend();
        // It takes long for much of it: while the first step computes.
        state.staged = Staged::prepare(&*state.backend, staging, B::elements(&state.mean_gradient));
        let ended = begun.and_then(|()| state.run(jobs));
        if let (Err(Stopped::Failed(_)), Some(communicator)) = (&ended, &state.lender.communicator)
        {
            // What waits for others on the device would not end before they are told.
            communicator.abort_handle()();
        }
        // What other workers have posted is read until then, and given back afterwards. Where the device fails, it has said so.
        let _ = state.backend.record(&mut state.stream).and_then(|end| state.backend.wait(&end));
        ended.or_else(Stopped::into_result)
    }

    fn new(
        parts: Optimizer<'_, B>,
        plan: Arc<TrainingPlan>,
        (worker, workers): (usize, usize),
    ) -> Result<Self, Failure> {
        progress::enter(Phase::PreparingDevice, 0);
        let Optimizer { backend, layout, state, lender, rule } = parts;
        let decays = decay_runs(layout);
        let lanes = plan.batch.lane_schedule(workers)?;
        let mut stream = backend.device_stream()?;
        let snapshots = backend.device_stream()?;
        let mut device = Device { backend: &*backend, stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, layout, &state.parameters)?;
        let (buckets, owned) = owned_buckets(&plan, worker, workers);
        let mut allocate = |elements| backend.allocate::<f32>(&mut stream, elements);
        let sums = match lender.communicator {
            Some(_) => Sums::Owned(OwnedSums::new(buckets.len())),
            None => Sums::Alone(None),
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
            tree: lanes.tree(),
            rounds: lanes.rounds() as u32,
            plan,
            lender,
            answers: Answers::default(),
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

    fn run(&mut self, jobs: &Jobs<StateJob>) -> Result<(), Stopped> {
        let mut next = None;
        while let Some(job) = next.take().or_else(|| jobs.next()) {
            progress::moved();
            match job {
                StateJob::AnswerSums(replies) => self.answers.sums = Some(replies),
                StateJob::AnswerUpdates(replies) => self.answers.updates = Some(replies),
                StateJob::AnswerGathers(replies) => self.answers.gathers = Some(replies),
                StateJob::AnswerSnapshots(replies) => self.answers.snapshots = Some(replies),
                StateJob::Sum(ready) => {
                    if self.sum(ready)? {
                        answer(&self.answers.sums, ready.ticket)?;
                    }
                }
                StateJob::Mean { bucket, tokens } => {
                    // Those that wait are computed together.
                    let mut buckets = vec![bucket];
                    while let Some(job) = jobs.ready() {
                        match job {
                            StateJob::Mean { bucket, .. } => buckets.push(bucket),
                            other => {
                                next = Some(other);
                                break;
                            }
                        }
                    }
                    let squares = self.means(buckets, tokens)?;
                    answer(&self.answers.updates, UpdateReply::Squares(squares))?;
                }
                StateJob::Update { bucket, update, coefficient } => {
                    self.update(bucket, update, coefficient)?;
                    answer(&self.answers.updates, UpdateReply::Updated { bucket })?;
                }
                StateJob::Gather(ticket) => {
                    self.gather(ticket)?;
                    answer(&self.answers.gathers, ticket)?;
                }
                StateJob::Stage => {
                    self.stage()?;
                    answer(&self.answers.snapshots, SnapshotReply::Staged)?;
                }
                StateJob::Snapshot { chunk, part } => {
                    let values = self.snapshot(chunk, part)?;
                    let values = SnapshotReply::Values { chunk, part, values };
                    answer(&self.answers.snapshots, values)?;
                }
            }
        }
        Ok(())
    }

    fn lend(&mut self) -> Result<(), Stopped> {
        let sums = match &mut self.sums {
            Sums::Owned(_) => None,
            Sums::Alone(sums) => sums.take(),
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
        if let Sums::Alone(held) = &mut self.sums {
            *held = sums;
        }
        Ok(())
    }

    /// Sums a round of a bucket, and answers whether it was the last.
    fn sum(&mut self, Ready { ticket, round }: Ready) -> Result<bool, Stopped> {
        let (Some(communicator), Sums::Owned(sums)) =
            (&mut self.lender.communicator, &mut self.sums)
        else {
            return Ok(round + 1 == self.rounds);
        };
        let OwnedBucket { range, slots, cut, .. } = &self.buckets[ticket.bucket as usize];
        let key = Key { round, ..Key::new(ticket.step, ticket.bucket) };
        let _waiting = progress::during(Phase::WaitingForSums);
        let (device, elements) = ((&*self.backend, &mut self.stream), slots.len() * range.len());
        sums.sum(&mut **communicator, device, key, cut, elements).map_err(Stopped::of)?;
        Ok(round + 1 == self.rounds)
    }

    /// The mean gradients of what is owned of `buckets`, and their sums of squares by chunk.
    fn means(
        &mut self,
        mut buckets: Vec<usize>,
        tokens: u64,
    ) -> Result<Vec<(usize, f64)>, Stopped> {
        if self.lender.communicator.is_none() {
            self.take_back()?;
        }
        buckets.retain(|&bucket| !self.buckets[bucket].range.is_empty());
        for &bucket in &buckets {
            let OwnedBucket { start, range, slots, .. } = &self.buckets[bucket];
            let (start, elements) = (*start, range.len());
            let (sums, is_alone) = match &self.sums {
                Sums::Alone(sums) => (sums.as_ref(), true),
                Sums::Owned(sums) => (sums.whole(bucket, self.tree), false),
            };
            let sums = sums.ok_or(NO_SUMS)?;
            let at = |(index, slot): (usize, &usize)| match is_alone {
                true => *slot,
                false => index * elements,
            };
            let uses = slots.iter().enumerate().map(|of| Slice::new(sums, at(of), elements));
            let uses = uses.collect::<Result<Vec<_>, _>>()?;
            let out = SliceMut::new(&mut self.mean_gradient, start, elements)?;
            self.backend.mean_gradient(&mut self.stream, out, &uses, tokens as f32)?;
        }
        let mut found = Vec::new();
        // Asking the device for numbers takes longer than computing them: neighbours are asked for together.
        buckets.sort_by_key(|&bucket| self.buckets[bucket].start);
        let end = |bucket: usize| self.buckets[bucket].start + self.buckets[bucket].range.len();
        for neighbours in buckets.chunk_by(|&a, &b| end(a) == self.buckets[b].start) {
            let (first, last) = (neighbours[0], neighbours[neighbours.len() - 1]);
            let start = self.buckets[first].start;
            let chunks: Vec<usize> =
                neighbours.iter().flat_map(|&bucket| self.buckets[bucket].chunks.clone()).collect();
            let ends = chunks.iter().scan(0, |end, &chunk| {
                *end += self.plan.chunks.chunks()[chunk].range.len();
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            let mean = Slice::new(&self.mean_gradient, start, end(last) - start)?;
            let squares = self.backend.sums_of_squares(&mut self.stream, mean, &ends)?;
            found.extend(chunks.into_iter().zip(squares));
        }
        Ok(found)
    }

    /// Updates what is owned of `bucket`, and tells the other workers.
    fn update(&mut self, bucket: usize, update: u64, coefficient: f32) -> Result<(), Stopped> {
        self.take_back()?;
        if let Some(copied) = self.copied.take() {
            self.backend.wait_for(&mut self.stream, &copied)?;
        }
        let Self { backend, stream, snapshots, rule, lender, decays, mean_gradient, .. } = self;
        let OwnedBucket { range, start, cut, .. } = &self.buckets[bucket];
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
        let (key, values) =
            (Key::new(update - 1, bucket as u32), parameters.masters(range.clone())?);
        communicator.updated(&**backend, stream, key, cut, values).map_err(Stopped::of)
    }

    /// Brings what the other workers have updated of a bucket here; after the last, the device thread may go on.
    fn gather(&mut self, Ticket { step, bucket }: Ticket) -> Result<(), Stopped> {
        let Self { backend, stream, lender, .. } = self;
        if let Some(communicator) = &mut lender.communicator {
            // The other workers have to update first.
            let _waiting = progress::during(Phase::WaitingForSums);
            let range = self.plan.buckets.buckets()[bucket as usize].range.clone();
            let parameters = Arc::get_mut(&mut self.parameters).ok_or(LENT)?;
            let cut = &self.buckets[bucket as usize].cut;
            let mut device = Device { backend: &**backend, stream };
            let mut gathered = Ok(());
            parameters.update(&mut device, range, |device, out| {
                let Device { backend, stream } = device;
                let key = Key::new(step, bucket);
                gathered = communicator.gather(backend, stream, key, cut, out);
                Ok(())
            })?;
            gathered.map_err(Stopped::of)?;
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

/// What `worker` of `workers` owns of each bucket, and how many elements that are.
fn owned_buckets(plan: &TrainingPlan, worker: usize, workers: usize) -> (Vec<OwnedBucket>, usize) {
    let owners = plan.buckets.owners(&plan.chunks, workers);
    let owned = plan.buckets.buckets().iter().zip(&owners).map(|(bucket, owners)| {
        let range = owners.range(&plan.chunks, worker);
        let mut end = 0;
        let ends = (0..workers).map(|rank| {
            end += owners.range(&plan.chunks, rank).len();
            end
        });
        let cut = Cut::at(ends.collect());
        let before = cut.of_rank(worker).start;
        let slots = bucket.slots.iter().map(|slot| slot + before).collect();
        OwnedBucket { chunks: owners.chunks(worker), range, slots, start: 0, cut }
    });
    let mut owned: Vec<_> = owned.collect();
    let mut in_order: Vec<_> = owned.iter_mut().collect();
    in_order.sort_by_key(|bucket| bucket.range.start);
    let mut elements = 0;
    for bucket in in_order {
        bucket.start = elements;
        elements += bucket.range.len();
    }
    (owned, elements)
}

/// Where answers go, once the operators have said so.
#[derive(Default)]
struct Answers {
    sums: Option<Replies<Ticket>>,
    updates: Option<Replies<UpdateReply>>,
    gathers: Option<Replies<Ticket>>,
    snapshots: Option<Replies<SnapshotReply>>,
}

fn answer<R>(replies: &Option<Replies<R>>, reply: R) -> Result<(), Stopped> {
    let missing = "where its answer goes";
    let replies = replies.as_ref().ok_or(GraphError::Order { what: "a job", missing })?;
    Ok(replies.send(reply)?)
}

/// The arena's runs of equal decay; padding belongs to the tensor before it.
fn decay_runs(layout: &Layout) -> Vec<(Range<usize>, Decay)> {
    let mut runs: Vec<(Range<usize>, Decay)> = Vec::new();
    for tensor in layout.tensors() {
        match runs.last_mut() {
            Some((run, decay)) if *decay == tensor.decay => run.end = tensor.offset,
            Some((run, _)) => {
                run.end = tensor.offset;
                runs.push((tensor.offset..tensor.offset, tensor.decay));
            }
            None => runs.push((0..0, tensor.decay)),
        }
    }
    if let Some((run, _)) = runs.last_mut() {
        run.end = layout.parameter_elements();
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_runs_cover_the_arena_and_merge_neighbours() {
        let mut layout = Layout::new();
        layout.segment("first");
        layout.tensor("a", &[3, 5], Decay::Decayed, 1);
        layout.tensor("b", &[17], Decay::Exempt, 1);
        layout.tensor("c", &[1], Decay::Exempt, 1);
        layout.segment("second");
        layout.tensor("d", &[2, 2], Decay::Decayed, 1);
        let runs = decay_runs(&layout);
        let decayed = |range| (range, Decay::Decayed);
        assert_eq!(runs, [decayed(0..16), (16..64, Decay::Exempt), decayed(64..80)]);
    }
}
