//! Sums of any number of terms along the canonical tree.

use tidemill_kernels::backend::{MOST_TREE_TERMS, TermValues, TreeSum, TreeTerm};
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::Result;
use crate::error::CollectiveError;
use crate::node::Node;
use crate::tree::Tree;

/// The sum over the lanes of a node.
pub(super) type Term<'a, B> = (Node, TermValues<'a, B>);

/// The sum over the lanes of `node`, of `terms`, which together are all of these once, in order.
pub(super) struct NodeSum<'a, B: Backend> {
    pub(super) node: Node,
    pub(super) terms: Vec<Term<'a, B>>,
    pub(super) out: SliceMut<'a, B, f32>,
}

/// The additions that follow each of `terms`.
fn joins<B: Backend>(node: Node, terms: &[Term<'_, B>]) -> Result<Vec<usize>> {
    let inside = |of: &Node| of.lo.checked_sub(node.lo).map(|lo| Node { lo, hi: of.hi - node.lo });
    let nodes: Option<Vec<Node>> = terms.iter().map(|(of, _)| inside(of)).collect();
    let lanes = node.lanes() as usize;
    let foreign = || CollectiveError::ForeignNode { node: terms[0].0, lanes };
    Ok(Tree::new(lanes)?.joins(&nodes.ok_or_else(foreign)?)?)
}

fn leaves<'a, B: Backend>(terms: &[Term<'a, B>], joins: &[usize]) -> Vec<TreeTerm<'a, B>> {
    let leaf = |(&(_, values), &joins): (&Term<'a, B>, &usize)| TreeTerm { values, joins };
    terms.iter().zip(joins).map(leaf).collect()
}

/// A buffer in which the sum of a right half waits for the left one.
struct Scratch<B: Backend> {
    sum: B::Buffer<f32>,
    /// The event behind its last use.
    used: B::Event,
}

/// Sums along the tree, with scratch memory for sums of more terms than a kernel takes at once.
pub(super) struct AlongTree<B: Backend> {
    /// One for each depth of the tree.
    scratch: Vec<Option<Scratch<B>>>,
}

impl<B: Backend> AlongTree<B> {
    pub(super) fn new() -> Self {
        Self { scratch: Vec::new() }
    }

    /// The sum over the lanes of `node` in `out`, of `terms`, which together are all of these once, in order.
    ///
    /// # Errors
    /// Lanes that are missing or are in two terms, or a device that fails.
    pub(super) fn sum(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        node: Node,
        terms: &[Term<'_, B>],
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let joins = joins(node, terms)?;
        self.sum_from(backend, stream, node, (terms, &joins), out, 0)
    }

    /// Each of `sums`, with as few launches as the device allows.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub(super) fn sum_each(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        sums: Vec<NodeSum<'_, B>>,
    ) -> Result<()> {
        let mut at_once = Vec::with_capacity(sums.len());
        for NodeSum { node, terms, out } in sums {
            let joins = joins(node, &terms)?;
            if terms.len() <= MOST_TREE_TERMS {
                at_once.push(TreeSum { out, terms: leaves(&terms, &joins) });
            } else {
                self.sum_from(backend, stream, node, (&terms, &joins), out, 0)?;
            }
        }
        Ok(backend.tree_sums(stream, at_once)?)
    }

    fn sum_from(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        node: Node,
        (terms, joins): (&[Term<'_, B>], &[usize]),
        mut out: SliceMut<'_, B, f32>,
        depth: usize,
    ) -> Result<()> {
        if terms.len() <= MOST_TREE_TERMS {
            return Ok(backend.tree_sum(stream, out, &leaves(terms, joins))?);
        }
        // Several terms are terms of the two halves, which have as many lanes each.
        let middle = node.lo + node.lanes() / 2;
        let cut = terms.partition_point(|(of, _)| of.hi <= middle);
        let ((left, right), (left_joins, right_joins)) = (terms.split_at(cut), joins.split_at(cut));
        let mut right_joins = right_joins.to_vec();
        // The last of them is also joined with the left half.
        if let Some(last) = right_joins.last_mut() {
            *last -= 1;
        }
        let elements = out.elements();
        if self.scratch.len() == depth {
            self.scratch.push(None);
        }
        let mut sum = match self.scratch[depth].take() {
            Some(Scratch { sum, used }) if B::elements(&sum) >= elements => {
                backend.wait_for(stream, &used)?;
                sum
            }
            _ => backend.allocate(stream, elements)?,
        };
        let right_out = SliceMut::new(&mut sum, 0, elements)?;
        let upper = Node { lo: middle, ..node };
        self.sum_from(backend, stream, upper, (right, &right_joins), right_out, depth + 1)?;
        let lower = Node { hi: middle, ..node };
        self.sum_from(backend, stream, lower, (left, left_joins), out.reborrow(), depth + 1)?;
        let both = [
            TreeTerm { values: TermValues::Out, joins: 0 },
            TreeTerm { values: TermValues::Buffer(Slice::new(&sum, 0, elements)?), joins: 1 },
        ];
        backend.tree_sum(stream, out, &both)?;
        let used = backend.record(stream)?;
        self.scratch[depth] = Some(Scratch { sum, used });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime};

    use super::*;

    /// A term whose magnitude varies, so that another order of the sum gives other bits.
    fn term(lane: u32, element: usize) -> f32 {
        let mixed = (u64::from(lane) << 20 | element as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let unit = (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * 10_f32.powi((mixed % 7) as i32 - 3)
    }

    fn by_hand(node: Node, element: usize) -> f32 {
        if node.lanes() == 1 {
            return term(node.lo, element);
        }
        let middle = node.lo + node.lanes() / 2;
        by_hand(Node { hi: middle, ..node }, element)
            + by_hand(Node { lo: middle, ..node }, element)
    }

    /// Also of more than a kernel takes, of a part of the lanes, and of unequal terms.
    #[test]
    fn any_number_of_terms_is_summed_along_the_tree() {
        let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = cpu.device_stream().unwrap();
        let tree = Tree::new(256).unwrap();
        let mut sums = AlongTree::<Cpu>::new();
        let uneven: Vec<_> = [0..37, 37..100, 100..101, 101..256]
            .iter()
            .flat_map(|lanes| tree.cover(lanes))
            .collect();
        let leaves = |lanes: std::ops::Range<u32>| lanes.map(Node::leaf).collect::<Vec<_>>();
        for (node, nodes) in [
            (tree.root(), uneven),
            (tree.root(), leaves(0..256)),
            (Node { lo: 64, hi: 128 }, leaves(64..128)),
            (Node { lo: 64, hi: 96 }, leaves(64..96)),
            (Node { lo: 5, hi: 6 }, leaves(5..6)),
        ] {
            for elements in [1, 33] {
                let mut buffers = Vec::new();
                for &node in &nodes {
                    let mut buffer = cpu.allocate::<f32>(&mut stream, elements).unwrap();
                    let values: Vec<f32> = (0..elements).map(|at| by_hand(node, at)).collect();
                    cpu.write(&mut stream, SliceMut::all(&mut buffer), &values).unwrap();
                    buffers.push(buffer);
                }
                let terms: Vec<_> = nodes
                    .iter()
                    .zip(&buffers)
                    .map(|(&node, buffer)| (node, TermValues::Buffer(Slice::all(buffer))))
                    .collect();
                let mut out = cpu.allocate::<f32>(&mut stream, elements).unwrap();
                out.fill(f32::NAN);
                let all = SliceMut::all(&mut out);
                sums.sum(&cpu, &mut stream, node, &terms, all).unwrap();
                for (at, found) in out.iter().enumerate() {
                    assert_eq!(found.to_bits(), by_hand(node, at).to_bits(), "{node}, {at}");
                }
            }
        }
        let value = cpu.allocate::<f32>(&mut stream, 1).unwrap();
        let mut out = cpu.allocate::<f32>(&mut stream, 1).unwrap();
        for (node, lanes) in [(Node { lo: 4, hi: 8 }, 3), (Node { lo: 4, hi: 8 }, 4)] {
            let terms = [(Node::leaf(lanes), TermValues::Buffer(Slice::all(&value)))];
            let all = SliceMut::all(&mut out);
            assert!(sums.sum(&cpu, &mut stream, node, &terms, all).is_err(), "{node}, {lanes}");
        }
    }
}
