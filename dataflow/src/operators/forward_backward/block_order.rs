//! Whether a model finishes its blocks as it promises: every one, once, the last first.

use std::ops::Range;

use tidemill_model::{Layout, ModelError};

use crate::cluster::{Failure, progress};
use crate::operators::error::GraphError;

/// The uses of block `block`.
pub(super) fn uses_of(layout: &Layout, block: usize) -> Range<usize> {
    let uses = layout.uses();
    uses.partition_point(|of| of.block < block)..uses.partition_point(|of| of.block <= block)
}

/// The progress of a backward pass over the blocks.
pub(super) struct BlockOrder {
    /// The block that has to be done next, plus one.
    expected_block: usize,
    violation: Option<GraphError>,
}

impl BlockOrder {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { expected_block: layout.blocks().len(), violation: None }
    }

    /// Block `block` is done.
    ///
    /// # Errors
    /// [`ModelError::SinkClosed`] where another is due: [`check`](Self::check) says which.
    pub(super) fn done(&mut self, block: usize) -> tidemill_model::Result<()> {
        if block + 1 != self.expected_block {
            let due = self.expected_block.checked_sub(1);
            let due = due.map_or("the end of the pass".to_owned(), |due| format!("block {due}"));
            self.violation.get_or_insert_with(|| GraphError::Model {
                expected: due,
                done: format!("finished block {block}"),
            });
            return Err(ModelError::SinkClosed);
        }
        self.expected_block = block;
        progress::moved();
        Ok(())
    }

    /// Checks a pass that has ended: all blocks must be done.
    pub(super) fn check_pass(&mut self, layout: &Layout) -> Result<(), Failure> {
        self.check()?;
        if let Some(missing) = self.expected_block.checked_sub(1) {
            let name = &layout.blocks()[missing];
            return Err(GraphError::Model {
                expected: format!("that it finishes block {name} before its backward pass ends"),
                done: "did not".to_owned(),
            }
            .into());
        }
        Ok(())
    }

    /// Says which block was done out of order, if one was.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        self.violation.take().map_or(Ok(()), |violation| Err(violation.into()))
    }
}
