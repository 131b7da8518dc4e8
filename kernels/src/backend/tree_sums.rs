//! Sums along a binary tree.

use super::{Runtime, TreeSum, TreeTerm};
use crate::error::Result;
use crate::view::SliceMut;

/// Sums in the order of a tree, over workers. See the [module](super) for what every kernel promises.
pub trait TreeSums: Runtime {
    /// `out[i]` = the sum of element i of the terms, in fp32 along the tree that they are the leaves of: the order that
    /// [`TreeTerm`] describes. So a sum over lanes has the same bits on any worker and in any number of parts.
    ///
    /// # Errors
    /// Terms that are no tree, of another length than `out`, or on a GPU more than 32, or more than 12 sums that wait.
    fn tree_sum(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, f32>,
        terms: &[TreeTerm<'_, Self>],
    ) -> Result<()> {
        self.tree_sums(stream, vec![TreeSum { out, terms: terms.to_vec() }])
    }

    /// The [`tree_sum`](Self::tree_sum) of each. A GPU forms several in one launch, which keeps the links between devices busy where
    /// each of them is small.
    ///
    /// # Errors
    /// As [`tree_sum`](Self::tree_sum), for any of them: then none is written.
    fn tree_sums(
        &self,
        stream: &mut Self::DeviceStream,
        sums: Vec<TreeSum<'_, Self>>,
    ) -> Result<()>;
}
