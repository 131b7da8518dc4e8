//! The part of each bucket that a worker owns, and its place.

use std::ops::Range;

use tidemill_collective::communicator::{Cut, Holders, Values, ValuesMut};
use tidemill_kernels::Backend;
use tidemill_kernels::backend::ActivationElement;
use tidemill_model::optimizer::{UpdateTerms, UpdateUnit};
use tidemill_model::{Held, Layout, Parameters, Tensor};

use crate::operators::error::GraphError;
use crate::operators::plan::{OwnedPart, TrainingPlan};

/// A worker's part of a bucket.
pub(super) struct OwnedBucket {
    pub(super) part: OwnedPart,
    /// Where it begins in the gradient arena of a worker that is alone, for each use.
    pub(super) slots: Vec<usize>,
    /// Which worker owns which elements of the bucket.
    pub(super) cut: Cut,
    /// The elements that are gathered, and beside them those that are kept once more in fp32; `None` if a worker has no
    /// counterparts but itself.
    pub(super) gathered: Option<Gathered>,
    pub(super) beside: Option<Gathered>,
}

/// The gathered elements of a bucket: some of those that are held, and the counterpart that owns each.
pub(super) struct Gathered {
    pub(super) range: Range<usize>,
    pub(super) cut: Cut,
}

impl Gathered {
    /// For memory in which the counterparts' parts of the bucket are at `parts`, side by side; `None` if all are empty.
    fn of(parts: impl Iterator<Item = Range<usize>>) -> Option<Self> {
        let parts: Vec<_> = parts.collect();
        let mut some = parts.iter().filter(|part| !part.is_empty());
        let first = some.next()?;
        let range = first.start..some.next_back().unwrap_or(first).end;
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        });
        Some(Self { range, cut: Cut::at(ends.collect()) })
    }

    /// The elements that the counterpart at `place` owns.
    pub(super) fn of_place(&self, place: usize) -> Range<usize> {
        let Range { start, end } = self.cut.of_rank(place);
        self.range.start + start..self.range.start + end
    }
}

/// The values that others read, of elements `range` of those that are held.
pub(super) fn told<B: Backend>(
    parameters: &Parameters<B>,
    range: Range<usize>,
) -> tidemill_model::Result<Values<'_, B>> {
    match B::Activation::REMAINDERS {
        0 => Ok(Values::Fp32(parameters.fp32(range)?)),
        _ => Ok(Values::Rounded(parameters.rounded(range)?)),
    }
}

/// The place of the others' parts of elements `range` of those that are held.
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

/// The parts of each bucket that `worker` of `workers`, which has `held`, as `holders` do, owns, and their elements in all.
pub(super) fn owned_buckets(
    plan: &TrainingPlan,
    (worker, workers): (usize, usize),
    holders: Holders,
    held: &Held,
) -> (Vec<OwnedBucket>, usize) {
    let counterparts: Vec<_> = holders.counterparts(worker, workers).collect();
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
        let of = |place: fn(&Held, &Range<usize>) -> Range<usize>| {
            let parts = counterparts.iter().map(|&rank| owners.range(&plan.chunks, rank));
            Gathered::of(parts.map(|range| place(held, &range))).filter(|_| counterparts.len() > 1)
        };
        // A counterpart's elements are held.
        let gathered = of(|held, range| held.place(range).unwrap_or_default());
        let beside = of(Held::vector_range);
        OwnedBucket { part, slots, cut, gathered, beside }
    });
    let owned: Vec<_> = owned.collect();
    let elements = owned.iter().map(|bucket| bucket.part.range.len()).sum();
    (owned, elements)
}

/// Elements of the parameters that are updated alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct UpdateRun {
    pub(super) range: Range<usize>,
    pub(super) terms: UpdateTerms,
    /// The tensor that they are, and its place in the layout, where that is the unit.
    pub(super) tensor: Option<(usize, Tensor)>,
}

impl UpdateRun {
    /// The elements of the run in `owned`; `None` if there are none.
    pub(super) fn within(&self, owned: &Range<usize>) -> Option<Self> {
        let range = self.range.start.max(owned.start)..self.range.end.min(owned.end);
        (!range.is_empty()).then(|| Self { range, ..self.clone() })
    }

    /// Whether it is a tensor with only a part in `owned`.
    pub(super) fn is_cut_by(&self, owned: &Range<usize>) -> bool {
        self.tensor.is_some() && self.within(owned).is_some_and(|part| part.range != self.range)
    }
}

/// The runs that a rule of this `unit` updates in one call each, given the terms of each tensor: the arena's runs of equal terms, where padding belongs
/// to the tensor before it; or each tensor, without padding.
pub(super) fn update_runs(
    layout: &Layout,
    terms: &[UpdateTerms],
    unit: UpdateUnit,
) -> Vec<UpdateRun> {
    let tensors = layout.tensors().iter().zip(terms);
    if unit == UpdateUnit::Tensor {
        let run = |(index, (tensor, &terms)): (usize, (&Tensor, _))| {
            let tensor = Some((index, tensor.clone()));
            UpdateRun { range: layout.tensors()[index].range(), terms, tensor }
        };
        return tensors.enumerate().map(run).collect();
    }
    let mut runs: Vec<UpdateRun> = Vec::new();
    for (tensor, &terms) in tensors {
        let start = if runs.is_empty() { 0 } else { tensor.offset };
        match runs.last_mut() {
            Some(run) if run.terms == terms => run.range.end = tensor.offset,
            before => {
                if let Some(run) = before {
                    run.range.end = start;
                }
                runs.push(UpdateRun { range: start..start, terms, tensor: None });
            }
        }
    }
    if let Some(run) = runs.last_mut() {
        run.range.end = layout.parameter_elements();
    }
    runs
}

#[cfg(test)]
mod tests {
    use tidemill_model::Decay;
    use tidemill_model::optimizer::{GroupSettings, update_terms};

    use super::*;

    #[test]
    fn update_runs_cover_the_arena_and_merge_neighbours() {
        let mut layout = Layout::new();
        layout.segment("first");
        layout.tensor("a", &[3, 5], Decay::Decayed, 1);
        layout.tensor("b", &[17], Decay::Exempt, 1);
        layout.tensor("c", &[1], Decay::Exempt, 1);
        layout.segment("second");
        layout.tensor("d", &[2, 2], Decay::Decayed, 1);
        let runs = |groups: &[GroupSettings]| {
            let terms = update_terms(groups, &layout).expect("allowed");
            let runs = update_runs(&layout, &terms, UpdateUnit::Element).into_iter();
            runs.map(|run| (run.range, run.terms)).collect::<Vec<_>>()
        };
        let [decayed, exempt] = [Decay::Decayed, Decay::Exempt].map(UpdateTerms::of);
        assert_eq!(runs(&[]), [(0..16, decayed), (16..64, exempt), (64..80, decayed)]);
        let group = |pattern: &str, factor| GroupSettings {
            patterns: vec![pattern.to_owned()],
            learning_rate_factor: Some(factor),
            weight_decay: None,
        };
        let times = |learning_rate_factor, terms| UpdateTerms { learning_rate_factor, ..terms };
        let groups = [group("[ab]", 0.5), group("c", 1.0)];
        let expected = [
            (0..16, times(0.5, decayed)),
            (16..48, times(0.5, exempt)),
            (48..64, exempt),
            (64..80, decayed),
        ];
        assert_eq!(runs(&groups), expected);
        let terms = update_terms(&groups, &layout).expect("allowed");
        let tensors = update_runs(&layout, &terms, UpdateUnit::Tensor);
        let found: Vec<_> = tensors.iter().map(|run| (run.range.clone(), run.terms)).collect();
        let each = [0..15, 16..33, 48..49, 64..68].into_iter().zip(expected.map(|run| run.1));
        assert_eq!(found, each.collect::<Vec<_>>(), "tensors without padding");
        assert_eq!(tensors[1].within(&(0..40)), Some(tensors[1].clone()));
        assert_eq!(tensors[1].within(&(0..16)), None);
        let is_cut = |owned| tensors.iter().any(|tensor| tensor.is_cut_by(&owned));
        assert_eq!(
            [is_cut(0..16), is_cut(0..20), is_cut(10..80), is_cut(16..64)].map(usize::from),
            [0, 1, 1, 0]
        );
    }
}
