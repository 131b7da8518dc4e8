//! The parameters of a block, gathered from the workers that own them before it runs, and let go behind it.
//!
//! Two pieces of memory take turns: in one are the parameters of the block that runs, and into the other those of the next come
//! meanwhile, on a device stream of their own. They come from where their owners have them: nothing is staged.

use std::sync::Arc;

use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{BlockWalk, Device, Direction, Lease, ParameterSource, Parameters, Result};

use crate::operators::gather_plan::{GatherPlan, GatheredUse, Piece};

/// Memory for the parameters of a block.
struct Place<B: Backend> {
    fp32: B::Buffer<f32>,
    activation: B::Buffer<B::Activation>,
    /// What is there or on its way.
    uses: Vec<usize>,
    /// Behind what brings it.
    ready: Option<B::Event>,
    /// Behind what read the block that was there before.
    left: Option<B::Event>,
}

/// The two places, which stay from step to step.
pub(super) struct GatheredParameters<B: Backend> {
    plan: GatherPlan,
    stream: B::DeviceStream,
    places: [Place<B>; 2],
    /// Where the block is that was entered last.
    current: usize,
}

impl<B: Backend> GatheredParameters<B> {
    pub(super) fn new(device: &mut Device<'_, B>, plan: GatherPlan) -> Result<Self> {
        let Device { backend, stream } = device;
        let [fp32, activation] = plan.most_elements();
        let mut place = || -> Result<Place<B>> {
            Ok(Place {
                fp32: backend.allocate(stream, fp32)?,
                activation: backend.allocate(stream, activation)?,
                uses: Vec::new(),
                ready: None,
                left: None,
            })
        };
        let places = [place()?, place()?];
        Ok(Self { places, stream: backend.device_stream()?, current: 0, plan })
    }

    /// On which parameters are copied from their owners.
    pub(super) fn stream(&mut self) -> &mut B::DeviceStream {
        &mut self.stream
    }

    /// What was gathered is not what its owners have any more.
    pub(super) fn forget(&mut self) {
        self.places.iter_mut().for_each(|place| place.uses.clear());
    }

    /// A source that reads `owners`, by worker.
    pub(super) fn source<'a>(
        &'a mut self,
        layout: &'a tidemill_model::Layout,
        owners: &'a [Arc<Parameters<B>>],
    ) -> BlockByBlock<'a, B> {
        BlockByBlock { walk: BlockWalk::new(layout), owners, gathered: self }
    }
}

/// A source that gathers each block when the model comes to it, and the next one ahead.
pub(super) struct BlockByBlock<'a, B: Backend> {
    walk: BlockWalk<'a>,
    owners: &'a [Arc<Parameters<B>>],
    gathered: &'a mut GatheredParameters<B>,
}

impl<B: Backend> BlockByBlock<'_, B> {
    /// Brings what is read of a block to `place`.
    fn bring(&mut self, backend: &B, entered: (usize, Direction), place: usize) -> Result<()> {
        let GatheredParameters { plan, stream, places, .. } = &mut *self.gathered;
        let place = &mut places[place];
        place.uses.clear();
        if let Some(left) = place.left.take() {
            backend.wait_for(stream, &left)?;
        }
        for use_index in plan.needed(entered) {
            let GatheredUse { fp32, activation, .. } = plan.use_of(use_index);
            for Piece { worker, from, to } in fp32 {
                let values = self.owners[*worker].masters(from.clone())?;
                let out = SliceMut::new(&mut place.fp32, *to, from.len())?;
                backend.copy(stream, out, values)?;
            }
            for Piece { worker, from, to } in activation {
                let values = self.owners[*worker].copies(from.clone())?;
                let out = SliceMut::new(&mut place.activation, *to, from.len())?;
                backend.copy(stream, out, values)?;
            }
            place.uses.push(use_index);
        }
        place.ready = Some(backend.record(stream)?);
        Ok(())
    }

    /// Where all that is read of a block is, or is on its way to.
    fn place_of(&self, entered: (usize, Direction)) -> Option<usize> {
        let GatheredParameters { plan, places, .. } = &*self.gathered;
        let is_there = |place: &Place<B>| plan.needed(entered).all(|of| place.uses.contains(&of));
        places.iter().position(is_there)
    }

    /// The block that follows, where that is known.
    fn next(&self, (block, direction): (usize, Direction)) -> Option<(usize, Direction)> {
        let last = self.gathered.plan.layout().blocks().len() - 1;
        match direction {
            Direction::Forward => (block < last).then_some((block + 1, direction)),
            Direction::Backward => block.checked_sub(1).map(|before| (before, direction)),
        }
    }
}

impl<B: Backend> ParameterSource<B> for BlockByBlock<'_, B> {
    fn enter(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
        direction: Direction,
    ) -> Result<()> {
        self.walk.enter(block, direction)?;
        let Device { backend, stream } = device;
        let (entered, before) = ((block, direction), self.gathered.current);
        let found = self.place_of(entered);
        // What reads the block before is enqueued.
        if found != Some(before) {
            self.gathered.places[before].left = Some(backend.record(stream)?);
        }
        let place = match found {
            Some(place) => place,
            None => {
                self.bring(backend, entered, 1 - before)?;
                1 - before
            }
        };
        self.gathered.current = place;
        if let Some(ready) = self.gathered.places[place].ready.take() {
            backend.wait_for(stream, &ready)?;
        }
        match self.next(entered) {
            Some(next) if self.place_of(next).is_none() => self.bring(backend, next, 1 - place),
            _ => Ok(()),
        }
    }

    fn lease(&self, use_index: usize) -> Result<Lease<'_, B>> {
        self.walk.of_entered(use_index)?;
        let GatheredParameters { plan, places, current, .. } = &*self.gathered;
        let place = &places[*current];
        let GatheredUse { packing, starts: [fp32, activation], .. } = plan.use_of(use_index);
        let rest = |held: usize, start: usize| held.saturating_sub(start);
        let fp32 = Slice::new(&place.fp32, *fp32, rest(B::elements(&place.fp32), *fp32))?;
        let held = B::elements(&place.activation);
        let activation = Slice::new(&place.activation, *activation, rest(held, *activation))?;
        Lease::packed(packing, fp32, activation)
    }
}
