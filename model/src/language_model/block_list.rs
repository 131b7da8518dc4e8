//! The blocks of a model between embedding and head, and which of them share memory.

use std::fmt;

use tidemill_kernels::Backend;

use crate::block::{AnyBlock, BlockMemory};
use crate::error::Result;

/// Blocks in order. Blocks that are [alike](crate::block::Block::is_alike) have one kind of memory.
pub(crate) struct BlockList<B: Backend> {
    blocks: Vec<Box<dyn AnyBlock<B>>>,
    /// The kind of memory of each block.
    kinds: Vec<usize>,
    /// The first block of each kind.
    firsts: Vec<usize>,
}

/// Memory that alike blocks use one after the other, once for each kind of a list.
pub(crate) struct SharedMemory(Vec<BlockMemory>);

impl<B: Backend> BlockList<B> {
    pub(crate) fn new(blocks: Vec<Box<dyn AnyBlock<B>>>) -> Self {
        let (mut kinds, mut firsts) = (Vec::with_capacity(blocks.len()), Vec::new());
        for (index, block) in blocks.iter().enumerate() {
            let is_first = |&first: &usize| blocks[first].is_alike(block.as_ref());
            let kind = firsts.iter().position(is_first).unwrap_or(firsts.len());
            if kind == firsts.len() {
                firsts.push(index);
            }
            kinds.push(kind);
        }
        Self { blocks, kinds, firsts }
    }

    pub(crate) fn as_slice(&self) -> &[Box<dyn AnyBlock<B>>] {
        &self.blocks
    }

    /// The kind of memory of block `index`.
    pub(crate) fn kind(&self, index: usize) -> usize {
        self.kinds[index]
    }

    /// The first block of each kind.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = &dyn AnyBlock<B>> {
        self.firsts.iter().map(|&first| self.blocks[first].as_ref())
    }

    /// Calls `plan` with the first block of each kind.
    pub(crate) fn plan_shared(
        &self,
        plan: impl FnMut(&dyn AnyBlock<B>) -> Result<BlockMemory>,
    ) -> Result<SharedMemory> {
        Ok(SharedMemory(self.firsts().map(plan).collect::<Result<_>>()?))
    }

    /// The part of `memory` that block `index` uses.
    pub(crate) fn shared<'m>(
        &self,
        memory: &'m mut SharedMemory,
        index: usize,
    ) -> &'m mut BlockMemory {
        &mut memory.0[self.kinds[index]]
    }
}

impl<B: Backend> fmt::Debug for BlockList<B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(&self.blocks).finish()
    }
}
