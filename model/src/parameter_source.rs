//! Where a model gets its parameters from, block by block.
//!
//! A model says which block it enters ([`ParameterSource::enter`]) and leases the segments of that
//! block alone ([`ParameterSource::lease`]). So a source may hold only the parameters of the block
//! entered and of the next: it fetches them from other workers just before a block runs, and
//! releases them after. The model computes the same either way.
//!
//! [`WholeParameters`] holds all of them all the time. [`BlockWalk`] checks the order of the blocks
//! for any source, and a [`Packing`](crate::Packing) lists the least that a source must hold of a
//! block.

use tidemill_kernels::Backend;

use crate::error::{ModelError, Result};
use crate::layout::{Direction, Layout, Passes, Use};
use crate::lease::Lease;
use crate::parameters::Parameters;
use crate::trainable::Device;

/// A source of the parameters of the block that a model is in.
///
/// A model of n blocks enters all of them, also those that read nothing, in the same order for
/// every microbatch:
///
/// ```text
/// forward alone          0, 1, ..., n - 1    Direction::Forward
/// forward and backward   0, 1, ..., n - 2    Direction::Forward
///                        n - 1, ..., 1, 0    Direction::Backward
/// ```
///
/// The forward and the backward pass of the last block follow each other, so that block is entered
/// once for both, with [`Direction::Backward`]. Entering it with [`Direction::Forward`] and then
/// with [`Direction::Backward`] is valid too. Entering block 0 with [`Direction::Forward`] is valid
/// at any time and begins a microbatch; a microbatch that failed is thus abandoned.
///
/// Entering a block ends the leases of the block before, which the compiler checks:
///
/// ```compile_fail,E0502
/// use tidemill_kernels::Backend;
/// use tidemill_model::{Device, Direction, ParameterSource, Result};
///
/// fn keeps_a_lease<B: Backend>(
///     device: &mut Device<'_, B>,
///     parameters: &mut dyn ParameterSource<B>,
/// ) -> Result<()> {
///     parameters.enter(device, 0, Direction::Forward)?;
///     let lease = parameters.lease(0)?;
///     parameters.enter(device, 1, Direction::Forward)?;
///     lease.vector(&(0..1))?;
///     Ok(())
/// }
/// ```
///
/// Used before the next block is entered, the lease is valid:
///
/// ```
/// # use tidemill_kernels::Backend;
/// # use tidemill_model::{Device, Direction, ParameterSource, Result};
/// #
/// # fn uses_a_lease<B: Backend>(
/// #     device: &mut Device<'_, B>,
/// #     parameters: &mut dyn ParameterSource<B>,
/// # ) -> Result<()> {
/// parameters.enter(device, 0, Direction::Forward)?;
/// let lease = parameters.lease(0)?;
/// lease.vector(&(0..1))?;
/// parameters.enter(device, 1, Direction::Forward)?;
/// # Ok(())
/// # }
/// ```
pub trait ParameterSource<B: Backend> {
    /// Enters block `block` of the model's layout, in the order stated above, and leaves the block
    /// entered before. Work that the model enqueues on the device's stream from now on may read the
    /// parameters of this block; work that it enqueued earlier may still be reading those of the
    /// block before.
    ///
    /// # Errors
    /// A block out of order, or a device that fails.
    fn enter(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
        direction: Direction,
    ) -> Result<()>;

    /// The parameters of use `use_index` of the model's layout, which must be a use that the block
    /// entered last reads ([`Layout::read_uses`]). Each tensor can be read in the precisions that
    /// [`Layout::reads`] declares, and in no other.
    ///
    /// # Errors
    /// A use of another block, or, in a block entered backward, a use that the layout declares to
    /// be read forward alone.
    fn lease(&self, use_index: usize) -> Result<Lease<'_, B>>;
}

/// The position of a model in its blocks, which a source checks before each lease.
#[derive(Clone, Copy, Debug)]
pub struct BlockWalk<'a> {
    layout: &'a Layout,
    entered: Option<(usize, Direction)>,
}

impl<'a> BlockWalk<'a> {
    /// Before the first block of `layout`.
    pub fn new(layout: &'a Layout) -> Self {
        Self { layout, entered: None }
    }

    /// The block entered last.
    pub fn entered(&self) -> Option<(usize, Direction)> {
        self.entered
    }

    /// Enters `block`, in the order that [`ParameterSource`] states.
    ///
    /// # Errors
    /// A block out of order, or past the last.
    pub fn enter(&mut self, block: usize, direction: Direction) -> Result<()> {
        let blocks = self.layout.blocks().len();
        let is_last = block.checked_add(1) == Some(blocks);
        let is_next = match (direction, self.entered) {
            (Direction::Forward, _) if block == 0 => true,
            (Direction::Forward, Some((before, Direction::Forward))) => block == before + 1,
            // A model of one block enters that block first.
            (Direction::Backward, _) if is_last && block == 0 => true,
            (Direction::Backward, Some((before, Direction::Forward))) => {
                is_last && (block == before || block == before + 1)
            }
            (Direction::Backward, Some((before, Direction::Backward))) => {
                before.checked_sub(1) == Some(block)
            }
            _ => false,
        };
        if block >= blocks || !is_next {
            return Err(self.refuse_entering(block, direction));
        }
        self.entered = Some((block, direction));
        Ok(())
    }

    /// Use `use_index`, if the block entered last reads it in the direction in which it was
    /// entered.
    ///
    /// # Errors
    /// A use of another block, or, in a block entered backward, a use that the layout declares to
    /// be read forward alone.
    pub fn of_entered(&self, use_index: usize) -> Result<Use> {
        match (self.layout.uses().get(use_index), self.entered) {
            (Some(&of_block), Some((block, direction)))
                if of_block.block == block && self.layout.is_read(&of_block, direction) =>
            {
                Ok(of_block)
            }
            _ => Err(self.refuse_leasing(use_index)),
        }
    }

    #[cold]
    fn refuse_entering(&self, block: usize, direction: Direction) -> ModelError {
        let found = match self.entered {
            None => "no block entered before it".to_owned(),
            Some(before) => format!("{} entered before it", self.describe(before)),
        };
        ModelError::ParameterAccess {
            attempt: format!("entering {}", self.describe((block, direction))),
            expected: "all blocks in order, forward from the first and then backward from the last"
                .to_owned(),
            found,
        }
    }

    #[cold]
    fn refuse_leasing(&self, use_index: usize) -> ModelError {
        let found = match self.layout.uses().get(use_index) {
            None => format!("an index past the {} uses of the layout", self.layout.uses().len()),
            Some(other) => {
                let segment = &self.layout.segments()[other.segment].name;
                let passes = match other.passes {
                    Passes::Both => "",
                    Passes::Forward => ", read forward alone",
                };
                format!("segment {segment} of {}{passes}", self.name(other.block))
            }
        };
        let expected = match self.entered {
            None => "a block to be entered first".to_owned(),
            Some(entered) => {
                format!("a use that is read in {}, entered last", self.describe(entered))
            }
        };
        let attempt = format!("leasing the parameters of use {use_index}");
        ModelError::ParameterAccess { attempt, expected, found }
    }

    fn name(&self, block: usize) -> String {
        match self.layout.blocks().get(block) {
            Some(name) => format!("block {block} ({name})"),
            None => format!("block {block} (past the last of {})", self.layout.blocks().len()),
        }
    }

    fn describe(&self, (block, direction): (usize, Direction)) -> String {
        let direction = match direction {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
        };
        format!("{} {direction}", self.name(block))
    }
}

/// [`Parameters`] that are all present all the time, as a source: [`Parameters::source`].
pub struct WholeParameters<'a, B: Backend> {
    parameters: &'a Parameters<B>,
    walk: BlockWalk<'a>,
}

impl<B: Backend> Parameters<B> {
    /// These parameters as a source for a model of `layout`, which must be their layout. The source
    /// moves nothing, but it refuses blocks out of order and leases of other blocks, as every
    /// source does.
    pub fn source<'a>(&'a self, layout: &'a Layout) -> WholeParameters<'a, B> {
        WholeParameters { parameters: self, walk: BlockWalk::new(layout) }
    }
}

impl<B: Backend> ParameterSource<B> for WholeParameters<'_, B> {
    fn enter(&mut self, _: &mut Device<'_, B>, block: usize, direction: Direction) -> Result<()> {
        self.walk.enter(block, direction)
    }

    fn lease(&self, use_index: usize) -> Result<Lease<'_, B>> {
        let Use { segment, .. } = self.walk.of_entered(use_index)?;
        self.parameters.lease(self.walk.layout, segment)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime};

    use super::*;
    use crate::layout::Decay;

    /// `count` blocks with a segment each.
    fn blocks(count: usize) -> Layout {
        let mut layout = Layout::new();
        for block in 0..count {
            let segment = layout.segment(format!("part.{block}"));
            layout.tensor(format!("{block}.weight"), &[3], Decay::Exempt, 1);
            layout.block(format!("blocks.{block}"), &[segment]);
        }
        layout
    }

    /// Enters blocks one after the other; returns the result of the last.
    fn walk(layout: &Layout, entries: &[(usize, Direction)]) -> Result<()> {
        let mut walk = BlockWalk::new(layout);
        let (last, before) = entries.split_last().expect("a block");
        for &(block, direction) in before {
            walk.enter(block, direction).expect("in order");
        }
        walk.enter(last.0, last.1)
    }

    const FORWARD: Direction = Direction::Forward;
    const BACKWARD: Direction = Direction::Backward;

    #[test]
    fn blocks_are_entered_forward_and_then_backward() {
        let all = [(0, FORWARD), (1, FORWARD), (2, BACKWARD), (1, BACKWARD), (0, BACKWARD)];
        let twice = [all, all].concat();
        walk(&blocks(3), &twice).expect("the last once");
        let both = [(0, FORWARD), (1, FORWARD), (2, FORWARD), (2, BACKWARD), (1, BACKWARD)];
        walk(&blocks(3), &both).expect("the last for each pass");
        walk(&blocks(3), &[(0, FORWARD), (1, FORWARD), (2, FORWARD), (0, FORWARD)])
            .expect("forward alone");
        walk(&blocks(3), &[(0, FORWARD), (1, FORWARD), (0, FORWARD)]).expect("after an error");
        walk(&blocks(1), &[(0, BACKWARD), (0, FORWARD), (0, BACKWARD)]).expect("the only one");
    }

    #[test]
    fn blocks_out_of_order_are_named() {
        for entries in [
            &[(1, FORWARD)][..],
            &[(2, BACKWARD)],
            &[(0, FORWARD), (2, FORWARD)],
            &[(0, FORWARD), (0, BACKWARD)],
            &[(0, FORWARD), (1, FORWARD), (1, BACKWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, FORWARD), (1, BACKWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, BACKWARD), (0, BACKWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, BACKWARD), (1, FORWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, FORWARD), (3, FORWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, BACKWARD), (2, BACKWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, FORWARD), (usize::MAX, FORWARD)],
            &[(0, FORWARD), (1, FORWARD), (2, BACKWARD), (usize::MAX, BACKWARD)],
        ] {
            assert!(walk(&blocks(3), entries).is_err(), "{entries:?}");
        }
        let refused =
            |entries: &[_]| walk(&blocks(3), entries).expect_err("out of order").to_string();
        assert_eq!(
            refused(&[(0, FORWARD), (2, FORWARD)]),
            "entering block 2 (blocks.2) forward: expected all blocks in order, forward from the first and then backward \
             from the last, found block 0 (blocks.0) forward entered before it"
        );
        assert_eq!(
            refused(&[(7, BACKWARD)]),
            "entering block 7 (past the last of 3) backward: expected all blocks in order, forward from the first and then \
             backward from the last, found no block entered before it"
        );
    }

    #[test]
    fn parameters_of_another_block_are_not_leased() {
        let (mut layout, backend) = (blocks(3), Cpu::new(NonZeroUsize::MIN).expect("a thread"));
        layout.set_use_passes(0, Passes::Forward);
        let mut stream = backend.device_stream().expect("a stream");
        let device = &mut Device { backend: &backend, stream: &mut stream };
        let arena = vec![0.5; layout.parameter_elements()];
        let parameters = Parameters::from_host(device, &layout, &arena).expect("fits");
        let source: &mut dyn ParameterSource<Cpu> = &mut parameters.source(&layout);
        let refused = |source: &dyn ParameterSource<Cpu>, use_index| {
            source.lease(use_index).map(|_| ()).expect_err("of another block").to_string()
        };
        assert_eq!(
            refused(source, 0),
            "leasing the parameters of use 0: expected a block to be entered first, found segment part.0 of block 0 \
             (blocks.0), read forward alone"
        );
        source.enter(device, 0, FORWARD).expect("the first");
        source.lease(0).expect("its own");
        assert_eq!(
            refused(source, 1),
            "leasing the parameters of use 1: expected a use that is read in block 0 (blocks.0) forward, entered last, found \
             segment part.1 of block 1 (blocks.1)"
        );
        source.enter(device, 1, FORWARD).expect("the second");
        source.lease(1).expect("its own");
        assert!(
            refused(source, 0)
                .ends_with("found segment part.0 of block 0 (blocks.0), read forward alone")
        );
        assert!(refused(source, 9).ends_with("found an index past the 3 uses of the layout"));
        source.enter(device, 2, BACKWARD).expect("the last");
        source.enter(device, 1, BACKWARD).expect("the second");
        source.enter(device, 0, BACKWARD).expect("the first");
        assert_eq!(
            refused(source, 0),
            "leasing the parameters of use 0: expected a use that is read in block 0 (blocks.0) backward, entered last, \
             found segment part.0 of block 0 (blocks.0), read forward alone"
        );
    }
}
