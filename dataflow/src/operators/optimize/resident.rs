//! The optimizer thread where training state stays on the device.
//!
//! It is told chunk by chunk what to do, as everywhere, but a chunk is much less than a device needs to be busy, and
//! asking the device for a number takes longer than computing it. So it takes all jobs that are there and runs them over
//! the longest ranges that they make up. What it computes is computed element by element, or chunk by chunk: how jobs
//! are put together changes no bit.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::{PlannedChunk, StatePart};
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{Decay, Device, Layout};

use super::rule::UpdateRule;
use super::schedule::{ShardJob, UseSum};
use super::shard::{ShardReply, decay_runs};
use crate::cluster::Failure;
use crate::operators::companion::{Jobs, Replies};
use crate::operators::error::GraphError;
use crate::operators::plan::TrainingPlan;
use crate::operators::residence::{Replica, Residence, ResidentState};

/// What the thread knows of the state that it shares.
pub(super) struct ResidentShard<B: Backend> {
    backend: Arc<B>,
    residence: Residence<B>,
    rule: UpdateRule,
    plan: Arc<TrainingPlan>,
    /// The parts of the arena that are decayed and those that are not, in order.
    decays: Vec<(Range<usize>, Decay)>,
    /// By segment: where the slots of its uses begin in the gradient arena, in the order of uses.
    slots: Vec<Vec<usize>>,
}

const NO_SUMS: GraphError =
    GraphError::Order { what: "the mean of gradients", missing: "their sums" };

/// Chunks whose elements follow each other in the parameter arena.
type Neighbours<'a> = &'a [usize];

impl<B: Backend> ResidentShard<B> {
    pub(super) fn new(
        backend: Arc<B>,
        residence: Residence<B>,
        rule: UpdateRule,
        plan: Arc<TrainingPlan>,
        layout: &Layout,
    ) -> Self {
        let mut slots = vec![Vec::new(); layout.segments().len()];
        for use_ in layout.uses() {
            slots[use_.segment].push(use_.gradient_offset);
        }
        Self { backend, residence, rule, plan, decays: decay_runs(layout), slots }
    }

    /// Runs jobs until the operator is gone.
    pub(super) fn serve(
        &self,
        jobs: &Jobs<Vec<ShardJob>>,
        replies: &Replies<Vec<ShardReply>>,
    ) -> Result<(), Failure> {
        while let Some(first) = jobs.next() {
            let Some(mut state) = self.residence.lock() else { break };
            let waiting: Vec<_> =
                first.into_iter().chain(std::iter::from_fn(|| jobs.ready()).flatten()).collect();
            let answers = self.run(&mut state, &waiting)?;
            drop(state);
            if replies.send(answers).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn run(
        &self,
        state: &mut ResidentState<B>,
        jobs: &[ShardJob],
    ) -> Result<Vec<ShardReply>, Failure> {
        let mut replies = Vec::with_capacity(jobs.len());
        for alike in jobs.chunk_by(ShardJob::is_alike) {
            let chunks: Vec<usize> = alike.iter().map(ShardJob::chunk).collect();
            match alike[0] {
                ShardJob::Mean { tokens, .. } => {
                    if !alike.iter().all(are_sums_resident) {
                        let (what, expected, found) =
                            ("sums of gradients", "the device", "the host");
                        return Err(GraphError::Memory { what, expected, found }.into());
                    }
                    for neighbours in self.neighbours(&chunks) {
                        self.means(state, neighbours, tokens, &mut replies)?;
                    }
                }
                ShardJob::Update { update, coefficient, .. } => {
                    for neighbours in self.neighbours(&chunks) {
                        self.update(state, neighbours, update, coefficient)?;
                    }
                    let updated = |chunk| ShardReply::Updated { chunk, values: None };
                    replies.extend(chunks.into_iter().map(updated));
                }
                ShardJob::Snapshot { chunk, part } => {
                    let values = self.snapshot(state, chunk, part)?;
                    replies.push(ShardReply::Snapshot { chunk, part, values });
                }
            }
        }
        Ok(replies)
    }

    fn chunk(&self, chunk: usize) -> &PlannedChunk {
        &self.plan.chunks.chunks()[chunk]
    }

    fn neighbours<'a>(&'a self, chunks: &'a [usize]) -> impl Iterator<Item = Neighbours<'a>> {
        chunks.chunk_by(|&a, &b| self.chunk(a).range.end == self.chunk(b).range.start)
    }

    /// The elements of `chunks`.
    fn range(&self, chunks: Neighbours<'_>) -> Range<usize> {
        match (chunks.first(), chunks.last()) {
            (Some(&first), Some(&last)) => {
                self.chunk(first).range.start..self.chunk(last).range.end
            }
            _ => 0..0,
        }
    }

    /// Where the sums of the uses of `chunk` are in the gradient arena.
    fn sums_of(&self, chunk: usize) -> impl Iterator<Item = Range<usize>> {
        let inside = self.plan.chunks.in_segment(chunk);
        let slots = &self.slots[self.chunk(chunk).segment];
        slots.iter().map(move |slot| slot + inside.start..slot + inside.end)
    }

    /// Whether chunk `b` follows chunk `a` in every use, and neither has another.
    fn follows(&self, a: usize, b: usize) -> bool {
        self.sums_of(a).map(|range| range.end).eq(self.sums_of(b).map(|range| range.start))
    }

    fn means(
        &self,
        state: &mut ResidentState<B>,
        chunks: Neighbours<'_>,
        tokens: u64,
        replies: &mut Vec<ShardReply>,
    ) -> Result<(), Failure> {
        let ResidentState { replica: Replica { stream, sums, .. }, mean_gradient, .. } = state;
        let sums = sums.as_ref().ok_or(NO_SUMS)?;
        for run in chunks.chunk_by(|&a, &b| self.follows(a, b)) {
            let range = self.range(run);
            let uses: Result<Vec<_>, _> = self
                .sums_of(run[0])
                .map(|first| Slice::new(sums, first.start, range.len()))
                .collect();
            let out = SliceMut::new(mean_gradient, range.start, range.len())?;
            self.backend.mean_gradient(stream, out, &uses?, tokens as f32)?;
        }
        let range = self.range(chunks);
        let end = |&chunk: &usize| self.chunk(chunk).range.end - range.start;
        let ends: Vec<usize> = chunks.iter().map(end).collect();
        let mean = Slice::new(mean_gradient, range.start, range.len())?;
        let squares = self.backend.sums_of_squares(stream, mean, &ends)?;
        let squares = chunks.iter().zip(squares);
        replies.extend(squares.map(|(&chunk, sum)| ShardReply::SumOfSquares { chunk, sum }));
        Ok(())
    }

    fn update(
        &self,
        state: &mut ResidentState<B>,
        chunks: Neighbours<'_>,
        update: u64,
        coefficient: f32,
    ) -> Result<(), Failure> {
        let ResidentState { replica, mean_gradient, moments: [exp_avg, exp_avg_sq] } = state;
        let mut device = Device { backend: &*self.backend, stream: &mut replica.stream };
        let range = self.range(chunks);
        let start = range.start;
        let decays = self
            .decays
            .iter()
            .map(|(run, decay)| (run.start.max(range.start)..run.end.min(range.end), *decay));
        let decays: Vec<_> = decays.filter(|(run, _)| !run.is_empty()).collect();
        replica.parameters.update(&mut device, range, |device, mut parameters| {
            for (run, decay) in decays {
                device.backend.adamw(
                    device.stream,
                    parameters.reborrow().sub(run.start - start, run.len())?,
                    SliceMut::new(exp_avg, run.start, run.len())?,
                    SliceMut::new(exp_avg_sq, run.start, run.len())?,
                    Slice::new(mean_gradient, run.start, run.len())?,
                    (self.rule.adamw)(update, coefficient, decay),
                )?;
            }
            Ok(())
        })?;
        Ok(())
    }

    fn snapshot(
        &self,
        state: &mut ResidentState<B>,
        chunk: usize,
        part: StatePart,
    ) -> Result<Vec<f32>, Failure> {
        let ResidentState { replica, moments: [exp_avg, exp_avg_sq], .. } = state;
        let mut device = Device { backend: &*self.backend, stream: &mut replica.stream };
        let range = self.chunk(chunk).range.clone();
        let moment = match part {
            StatePart::Parameter => {
                let mut values = vec![0.0; range.len()];
                replica.parameters.read(&mut device, range.start, &mut values)?;
                return Ok(values);
            }
            StatePart::ExpAvg => exp_avg,
            StatePart::ExpAvgSq => exp_avg_sq,
        };
        let from = Slice::new(moment, range.start, range.len())?;
        Ok(device.backend.to_vec(device.stream, from)?)
    }
}

fn are_sums_resident(job: &ShardJob) -> bool {
    match job {
        ShardJob::Mean { uses, .. } => uses.iter().all(|sum| *sum == UseSum::Resident),
        _ => false,
    }
}
