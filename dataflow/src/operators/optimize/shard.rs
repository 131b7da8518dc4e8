//! The optimizer thread: it holds the masters and moments of the chunks that this worker owns.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{Decay, Layout};

use super::rule::UpdateRule;
use super::schedule::ShardJob;
use crate::cluster::{Failure, progress};
use crate::operators::companion::{Jobs, Replies};
use crate::operators::error::GraphError;
use crate::operators::plan::TrainingPlan;

/// Parameters and moments after `plan.first_step` updates.
#[derive(Clone, Debug)]
pub struct InitialState {
    /// The parameter arena.
    pub parameters: Arc<Vec<f32>>,
    /// The first and the second moments, in the order of the arena; zeros where there are none.
    pub moments: Option<[Arc<Vec<f32>>; 2]>,
}

/// What the optimizer thread answers.
#[derive(Debug, PartialEq)]
pub(super) enum ShardReply {
    /// The sum of squares of a chunk's mean gradient.
    SumOfSquares { chunk: usize, sum: f64 },
    /// The unit's parameters after the update; `None` where the device reads them where they are.
    Updated { unit: usize, values: Option<Vec<f32>> },
    /// What all workers have updated of a bucket is enqueued to be here.
    Present { bucket: usize },
    /// All that this worker owns is on its way to memory of the host.
    Staged,
    /// A part of the chunk's state.
    Snapshot { chunk: usize, part: StatePart, values: Vec<f32> },
}

/// Replies that leave together, where as many jobs came together: few enough that others work on them soon, but every message
/// wakes a thread.
const REPLIES_PER_MESSAGE: usize = 8;

/// Everything that an optimizer thread starts from.
pub(super) struct ShardParts<B: Backend> {
    pub(super) backend: Arc<B>,
    pub(super) state: InitialState,
    pub(super) rule: UpdateRule,
    pub(super) plan: Arc<TrainingPlan>,
    /// The chunks that this worker owns.
    pub(super) owned: Vec<usize>,
    /// The parts of the arena that are decayed and those that are not, in order.
    pub(super) decays: Vec<(Range<usize>, Decay)>,
}

/// The arena's runs of equal decay; padding belongs to the tensor before it.
pub(super) fn decay_runs(layout: &Layout) -> Vec<(Range<usize>, Decay)> {
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

struct Shard<B: Backend> {
    backend: Arc<B>,
    stream: B::DeviceStream,
    rule: UpdateRule,
    plan: Arc<TrainingPlan>,
    decays: Vec<(Range<usize>, Decay)>,
    /// The first element of each chunk in the buffers; `None` where another worker owns it.
    starts: Vec<Option<usize>>,
    /// Parameters, first and second moments of the owned chunks, one after the other.
    state: [B::Buffer<f32>; 3],
    gradient: B::Buffer<f32>,
    /// Room for one chunk of each use.
    uses: Vec<B::Buffer<f32>>,
}

/// Runs jobs until the operator is gone.
pub(super) fn run<B: Backend>(
    parts: ShardParts<B>,
    jobs: &Jobs<Vec<ShardJob>>,
    replies: &Replies<Vec<ShardReply>>,
) -> Result<(), Failure> {
    let mut shard = Shard::new(parts)?;
    while let Some(jobs) = jobs.next() {
        let mut ready = Vec::new();
        for job in jobs {
            ready.push(shard.run(job)?);
            progress::moved();
            if ready.len() == REPLIES_PER_MESSAGE
                && replies.send(std::mem::take(&mut ready)).is_err()
            {
                return Ok(());
            }
        }
        if !ready.is_empty() && replies.send(ready).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

impl<B: Backend> Shard<B> {
    fn new(parts: ShardParts<B>) -> Result<Self, Failure> {
        let ShardParts { backend, state, rule, plan, owned, decays } = parts;
        let mut stream = backend.device_stream()?;
        let mut starts = vec![None; plan.chunks.chunks().len()];
        let mut elements = 0;
        for &chunk in &owned {
            starts[chunk] = Some(elements);
            elements += plan.chunks.chunks()[chunk].range.len();
        }
        let mut allocate = || backend.allocate::<f32>(&mut stream, elements);
        let mut buffers = [allocate()?, allocate()?, allocate()?];
        let gradient = allocate()?;
        let [first, second] = match &state.moments {
            Some(moments) => [Some(&moments[0]), Some(&moments[1])],
            None => [None, None],
        };
        for (buffer, arena) in buffers.iter_mut().zip([Some(&state.parameters), first, second]) {
            let Some(arena) = arena else { continue };
            for &chunk in &owned {
                let range = plan.chunks.chunks()[chunk].range.clone();
                let (found, expected) = (arena.len(), range.end);
                let values =
                    arena.get(range.clone()).ok_or(GraphError::InitialState { expected, found })?;
                let out = SliceMut::new(buffer, starts[chunk].unwrap_or(0), range.len())?;
                backend.write(&mut stream, out, values)?;
            }
        }
        let uses = Vec::new();
        Ok(Self { backend, stream, rule, plan, decays, starts, state: buffers, gradient, uses })
    }

    fn run(&mut self, job: ShardJob) -> Result<ShardReply, Failure> {
        match job {
            ShardJob::Mean { unit, uses, tokens } => self.mean(unit, &uses, tokens),
            ShardJob::Update { unit: chunk, update, coefficient } => {
                self.update(chunk, update, coefficient)?;
                let values = Some(self.read(chunk, StatePart::Parameter)?);
                Ok(ShardReply::Updated { unit: chunk, values })
            }
            ShardJob::Snapshot { chunk, part } => {
                let values = self.read(chunk, part)?;
                Ok(ShardReply::Snapshot { chunk, part, values })
            }
            ShardJob::Sum { .. } | ShardJob::Gather { .. } | ShardJob::Stage => {
                Err(GraphError::Unasked { thread: "the optimizer of chunks" }.into())
            }
        }
    }

    /// Where `chunk` stands in the buffers, and in the arena.
    fn place(&self, chunk: usize) -> Result<(usize, Range<usize>), Failure> {
        let start = self.starts[chunk].ok_or(GraphError::ForeignChunk { chunk })?;
        Ok((start, self.plan.chunks.chunks()[chunk].range.clone()))
    }

    fn mean(
        &mut self,
        chunk: usize,
        uses: &[Vec<f32>],
        tokens: u64,
    ) -> Result<ShardReply, Failure> {
        let (start, range) = self.place(chunk)?;
        let (backend, stream) = (&self.backend, &mut self.stream);
        for (index, values) in uses.iter().enumerate() {
            if self.uses.len() == index {
                let chunks = self.plan.chunks.chunks().iter();
                let longest = chunks.map(|chunk| chunk.range.len()).max().unwrap_or(0);
                self.uses.push(backend.allocate(stream, longest)?);
            }
            let out = SliceMut::new(&mut self.uses[index], 0, values.len())?;
            backend.write(stream, out, values)?;
        }
        let slices = self.uses.iter().take(uses.len()).map(|use_| Slice::new(use_, 0, range.len()));
        let slices = slices.collect::<Result<Vec<_>, _>>()?;
        let mean = SliceMut::new(&mut self.gradient, start, range.len())?;
        backend.mean_gradient(stream, mean, &slices, tokens as f32)?;
        let mean = Slice::new(&self.gradient, start, range.len())?;
        let sum = backend.sums_of_squares(stream, mean, &[range.len()])?[0];
        Ok(ShardReply::SumOfSquares { chunk, sum })
    }

    fn update(&mut self, chunk: usize, update: u64, coefficient: f32) -> Result<(), Failure> {
        let (start, range) = self.place(chunk)?;
        for (run, decay) in &self.decays {
            let (first, end) = (run.start.max(range.start), run.end.min(range.end));
            if first >= end {
                continue;
            }
            let (first, elements) = (start + first - range.start, end - first);
            let [parameters, exp_avg, exp_avg_sq] = &mut self.state;
            self.backend.adamw(
                &mut self.stream,
                SliceMut::new(parameters, first, elements)?,
                SliceMut::new(exp_avg, first, elements)?,
                SliceMut::new(exp_avg_sq, first, elements)?,
                Slice::new(&self.gradient, first, elements)?,
                (self.rule.adamw)(update, coefficient, *decay),
            )?;
        }
        Ok(())
    }

    fn read(&mut self, chunk: usize, part: StatePart) -> Result<Vec<f32>, Failure> {
        let (start, range) = self.place(chunk)?;
        let from = Slice::new(&self.state[part as usize], start, range.len())?;
        Ok(self.backend.to_vec(&mut self.stream, from)?)
    }
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
