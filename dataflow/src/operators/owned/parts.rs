//! What a worker owns of each bucket, and where it is.

use std::ops::Range;

use tidemill_collective::communicator::Cut;
use tidemill_kernels::Backend;
use tidemill_model::{Decay, Layout};

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
}

/// Where the parameters of `part` are.
pub(super) fn place<B: Backend>(lender: &Lender<B>, part: &OwnedPart) -> Range<usize> {
    match lender.is_of_parts() {
        true => part.start..part.start + part.range.len(),
        false => part.range.clone(),
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
        OwnedBucket { part, slots, cut }
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
