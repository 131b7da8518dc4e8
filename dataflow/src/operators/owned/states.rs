//! A worker's part of the states of the optimizer: of each state, bucket by bucket, the elements of the parameters that it owns there.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::optimizer::StateArena;

use super::parts::{OwnedBucket, UpdateRun, values};
use crate::cluster::progress;
use crate::operators::error::GraphError;
use crate::state_arenas::StateArenas;

/// The states of a worker's part.
pub(super) struct OwnedStates<B: Backend> {
    states: Vec<OwnedState>,
    /// The buffer of each state.
    buffers: Vec<B::Buffer<f32>>,
}

/// The place of a state's elements in its owned part.
struct OwnedState {
    arena: StateArena,
    /// For each bucket the first element of its owned part.
    starts: Vec<usize>,
    elements: usize,
}

impl OwnedState {
    fn new(arena: StateArena, buckets: &[OwnedBucket]) -> Self {
        let mut order: Vec<usize> = (0..buckets.len()).collect();
        order.sort_by_key(|&bucket| buckets[bucket].part.range.start);
        let (mut starts, mut elements) = (vec![0; buckets.len()], 0);
        for bucket in order {
            starts[bucket] = elements;
            elements += arena.range(&buckets[bucket].part.range).len();
        }
        Self { arena, starts, elements }
    }

    /// The place of elements `range` of the arena in the owned part: they are of the parameters `of` of bucket `bucket`.
    fn place(&self, bucket: usize, of: &Range<usize>, range: &Range<usize>) -> Range<usize> {
        let start = self.starts[bucket] + range.start - self.arena.range(of).start;
        start..start + range.len()
    }
}

impl<B: Backend> OwnedStates<B> {
    /// The states of `buckets`: `initial`, each in the order of its arena, or zeros.
    ///
    /// # Errors
    /// Other states than there are, or fewer elements; no room.
    pub(super) fn new(
        (backend, stream): (&B, &mut B::DeviceStream),
        arenas: &Arc<StateArenas>,
        buckets: &[OwnedBucket],
        initial: Option<&[Arc<Vec<f32>>]>,
    ) -> Result<Self, crate::cluster::Failure> {
        let parts = arenas.parts().filter_map(|part| match part {
            StatePart::Parameter => None,
            StatePart::State(_) => arenas.of(part).cloned(),
        });
        let states: Vec<_> = parts.map(|arena| OwnedState::new(arena, buckets)).collect();
        let buffers = states.iter().map(|state| backend.allocate::<f32>(stream, state.elements));
        let mut buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        if let Some(initial) = initial {
            let (expected, found) = (states.len(), initial.len());
            if expected != found {
                return Err(GraphError::InitialStates { expected, found }.into());
            }
            for ((state, buffer), initial) in states.iter().zip(&mut buffers).zip(initial) {
                for (bucket, OwnedBucket { part, .. }) in buckets.iter().enumerate() {
                    let values = values(initial, &state.arena.range(&part.range))?;
                    let out = SliceMut::new(buffer, state.starts[bucket], values.len())?;
                    backend.write(stream, out, values)?;
                    progress::moved();
                }
            }
        }
        Ok(Self { states, buffers })
    }

    /// The owned part of each.
    pub(super) fn buffers(&self) -> &[B::Buffer<f32>] {
        &self.buffers
    }

    /// Number of elements of each owned part.
    pub(super) fn elements(&self) -> Vec<usize> {
        self.states.iter().map(|state| state.elements).collect()
    }

    /// Each state of the elements `run`, which are of the parameters `of` of bucket `bucket`.
    ///
    /// # Errors
    /// Elements that are not owned.
    pub(super) fn of_run(
        &mut self,
        bucket: usize,
        of: &Range<usize>,
        run: &UpdateRun,
    ) -> tidemill_kernels::Result<Vec<SliceMut<'_, B, f32>>> {
        let view = |(state, buffer): (&OwnedState, _)| {
            let range = match &run.tensor {
                Some((index, _)) => state.arena.of_tensor(*index),
                None => state.arena.range(&run.range),
            };
            let place = state.place(bucket, of, &range);
            SliceMut::new(buffer, place.start, place.len())
        };
        self.states.iter().zip(&mut self.buffers).map(view).collect()
    }

    /// Where elements of the parameters `range`, which are of those `of` of bucket `bucket`, have their elements of state `state`.
    pub(super) fn place(
        &self,
        state: usize,
        (bucket, of): (usize, &Range<usize>),
        range: &Range<usize>,
    ) -> Option<Range<usize>> {
        let state = self.states.get(state)?;
        Some(state.place(bucket, of, &state.arena.range(range)))
    }

    /// Elements `place` of the owned part of state `state`.
    pub(super) fn slice(
        &self,
        state: usize,
        place: &Range<usize>,
    ) -> Option<tidemill_kernels::Result<Slice<'_, B, f32>>> {
        let buffer = self.buffers.get(state)?;
        Some(Slice::new(buffer, place.start, place.len()))
    }
}
