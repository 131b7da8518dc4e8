//! What a worker owns of each bucket, and where it is.

use std::ops::Range;

use tidemill_collective::communicator::{Cut, Values, ValuesMut};
use tidemill_kernels::Backend;
use tidemill_kernels::backend::ActivationElement;
use tidemill_model::{Decay, Layout, MasterPlace, Parameters};

use crate::operators::error::GraphError;
use crate::operators::lending::Lender;
use crate::operators::plan::{OwnedPart, TrainingPlan};

/// What a worker owns of a bucket.
pub(super) struct OwnedBucket {
    pub(super) part: OwnedPart,
    /// Where it begins in the gradient arena of a worker that is alone, for each use.
    pub(super) slots: Vec<usize>,
    /// Who owns which elements of the bucket.
    pub(super) cut: Cut,
    pub(super) beside: Option<Beside>,
}

/// Where the masters of `part` are.
pub(super) fn place<B: Backend>(lender: &Lender<B>, part: &OwnedPart) -> MasterPlace {
    let start = part.start;
    let range = match lender.is_of_parts() {
        true => start..start + part.range.len(),
        false => part.range.clone(),
    };
    MasterPlace { range, start }
}

/// What is gathered of a bucket beside what products read: its elements, and who owns which.
pub(super) struct Beside {
    pub(super) range: Range<usize>,
    pub(super) cut: Cut,
}

impl Beside {
    /// That of elements `range` of `parameters`, cut as `cut` says; none where nothing is.
    pub(super) fn of<B: Backend>(
        parameters: &Parameters<B>,
        range: &Range<usize>,
        cut: &Cut,
    ) -> Option<Self> {
        let vectors = parameters.vector_range(range);
        let to = |rank: usize| range.start..range.start + cut.of_rank(rank).end;
        let ends = (0..cut.ranks()).map(|rank| parameters.vector_range(&to(rank)).len());
        let cut = Cut::at(ends.collect());
        (!vectors.is_empty()).then_some(Self { range: vectors, cut })
    }

    /// What `rank` owns of it.
    pub(super) fn of_rank(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.cut.of_rank(rank);
        self.range.start + start..self.range.start + end
    }
}

/// What others read of elements `range`.
pub(super) fn told<B: Backend>(
    parameters: &Parameters<B>,
    range: Range<usize>,
) -> tidemill_model::Result<Values<'_, B>> {
    match B::Activation::REMAINDERS {
        0 => Ok(Values::Fp32(parameters.fp32(range)?)),
        _ => Ok(Values::Rounded(parameters.rounded(range)?)),
    }
}

/// Where what others own of elements `range` goes.
pub(super) fn told_mut<B: Backend>(
    parameters: &mut Parameters<B>,
    range: Range<usize>,
) -> tidemill_model::Result<ValuesMut<'_, B>> {
    match B::Activation::REMAINDERS {
        0 => Ok(ValuesMut::Fp32(parameters.fp32_mut(range)?)),
        _ => Ok(ValuesMut::Rounded(parameters.rounded_mut(range)?)),
    }
}

/// Elements `range` of an initial arena.
pub(super) fn values<'a>(arena: &'a [f32], range: &Range<usize>) -> Result<&'a [f32], GraphError> {
    let (expected, found) = (range.end, arena.len());
    arena.get(range.clone()).ok_or(GraphError::InitialState { expected, found })
}

/// What `worker` of `workers` owns of each bucket, and how many elements that are.
pub(super) fn owned_buckets(
    plan: &TrainingPlan,
    worker: usize,
    workers: usize,
) -> (Vec<OwnedBucket>, usize) {
    let owners = plan.buckets.owners(&plan.chunks, workers);
    let parts = plan.owned(worker, workers).into_iter();
    let owned = parts.zip(plan.buckets.buckets().iter().zip(&owners));
    let owned = owned.map(|(part, (bucket, owners))| {
        let mut end = 0;
        let ends = (0..workers).map(|rank| {
            end += owners.range(&plan.chunks, rank).len();
            end
        });
        let cut = Cut::at(ends.collect());
        let before = cut.of_rank(worker).start;
        let slots = bucket.slots.iter().map(|slot| slot + before).collect();
        OwnedBucket { part, slots, cut, beside: None }
    });
    let owned: Vec<_> = owned.collect();
    let elements = owned.iter().map(|bucket| bucket.part.range.len()).sum();
    (owned, elements)
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
