//! Sums along a binary tree.

use super::dispatch::Dispatch;
use super::gradient_sums::AddAssign;
use super::rows::{elements_mut, exactly};
use super::{Cpu, DeviceStream};
use crate::backend::{TermValues, TreeSum, TreeSums, TreeTerm, check_tree};
use crate::error::{KernelError, Result};

/// Elements that a thread sums at a time: few enough for the stack of waiting sums to stay in the
/// nearest caches.
const PIECE: usize = 2048;

/// A term's elements, unless they are those of the sum's own place; and the joins that follow.
type Leaf<'a> = (Option<&'a [f32]>, usize);

impl TreeSums for Cpu {
    fn tree_sums(&self, stream: &mut DeviceStream, sums: Vec<TreeSum<'_, Cpu>>) -> Result<()> {
        let threads = stream.threads();
        let leaves = sums.iter().map(leaves).collect::<Result<Vec<_>>>()?;
        for (TreeSum { out, .. }, leaves) in sums.into_iter().zip(leaves) {
            let out = elements_mut(out);
            let share = threads.share(out.len().div_ceil(PIECE)) * PIECE;
            threads.for_each(out.chunks_mut(share).enumerate(), |(part, out)| {
                let mut sums = Vec::new();
                for (piece, out) in out.chunks_mut(PIECE).enumerate() {
                    sum_piece(self.dispatch, out, &leaves, part * share + piece * PIECE, &mut sums);
                }
            });
        }
        Ok(())
    }
}

fn leaves<'a>(sum: &TreeSum<'a, Cpu>) -> Result<Vec<Leaf<'a>>> {
    let TreeSum { out, terms } = sum;
    check_tree(terms)?;
    let leaf = |term: &TreeTerm<'a, Cpu>| {
        let values = match term.values {
            TermValues::Out => None,
            TermValues::Buffer(values) => {
                Some(exactly("tree_sum", "term", values, out.elements())?)
            }
            TermValues::Host(values) if values.len() == out.elements() => Some(values),
            TermValues::Host(values) => {
                return Err(KernelError::shape("tree_sum", "term", out.elements(), values.len()));
            }
        };
        Ok((values, term.joins))
    };
    terms.iter().map(leaf).collect()
}

/// The sums of the elements from `first` on. `sums` is room for those that wait.
fn sum_piece(
    dispatch: Dispatch,
    out: &mut [f32],
    leaves: &[Leaf<'_>],
    first: usize,
    sums: &mut Vec<Vec<f32>>,
) {
    let mut waiting = 0;
    for &(values, joins) in leaves {
        let values = values.map_or(&*out, |values| &values[first..][..out.len()]);
        let mut joins = joins;
        if joins > 0 {
            // The sum is formed in place of its first term.
            dispatch.run(AddAssign { out: &mut sums[waiting - 1], x: values });
            joins -= 1;
        } else {
            if sums.len() == waiting {
                sums.push(Vec::with_capacity(PIECE));
            }
            sums[waiting].clear();
            sums[waiting].extend_from_slice(values);
            waiting += 1;
        }
        for _ in 0..joins {
            waiting -= 1;
            let (left, right) = sums.split_at_mut(waiting);
            dispatch.run(AddAssign { out: &mut left[waiting - 1], x: &right[0] });
        }
    }
    out.copy_from_slice(&sums[0]);
}
