//! The canonical binary tree over lanes, and how lanes are cut over workers.
//!
//! With L lanes, L a power of two, a node is an aligned power-of-two range of lanes and its sum is
//! `left + right`. Every sum over lanes is formed along this tree, so its bits do not depend on which worker holds
//! which lanes. A worker with any contiguous range of lanes sums the largest nodes inside its range
//! (its *cover*) and the owner of a chunk sums the rest.

use std::ops::Range;

use crate::error::{CollectiveError, Result};
use crate::node::Node;

/// The canonical tree over a power of two of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    lanes: u32,
}

impl Tree {
    /// The tree over `lanes` lanes.
    ///
    /// # Errors
    /// A number that is no power of two, or above 2^31.
    pub fn new(lanes: usize) -> Result<Self> {
        match u32::try_from(lanes) {
            Ok(lanes) if lanes.is_power_of_two() => Ok(Self { lanes }),
            _ => Err(CollectiveError::Lanes { found: lanes }),
        }
    }

    /// The number of lanes.
    pub fn lanes(self) -> usize {
        self.lanes as usize
    }

    /// The node of all lanes.
    pub fn root(self) -> Node {
        Node { lo: 0, hi: self.lanes }
    }

    /// Whether `node` is a node of this tree.
    pub fn contains(self, node: Node) -> bool {
        node.lo < node.hi
            && node.hi <= self.lanes
            && node.lanes().is_power_of_two()
            && node.lo.is_multiple_of(node.lanes())
    }

    /// The node that `node` is a half of; `None` for the root.
    pub fn parent(self, node: Node) -> Option<Node> {
        debug_assert!(self.contains(node));
        if node == self.root() {
            return None;
        }
        let lanes = 2 * node.lanes();
        let lo = node.lo & !(lanes - 1);
        Some(Node { lo, hi: lo + lanes })
    }

    /// The other half of `node`'s parent; `None` for the root.
    pub fn sibling(self, node: Node) -> Option<Node> {
        self.parent(node).map(|parent| {
            if node.lo == parent.lo {
                Node { lo: node.hi, hi: parent.hi }
            } else {
                Node { lo: parent.lo, hi: node.lo }
            }
        })
    }

    /// The fewest nodes that make up `lanes`, in order.
    pub fn cover(self, lanes: &Range<usize>) -> Vec<Node> {
        debug_assert!(lanes.end <= self.lanes());
        let (mut lo, end) = (lanes.start as u32, lanes.end as u32);
        let mut nodes = Vec::new();
        while lo < end {
            let aligned = if lo == 0 { self.lanes } else { 1 << lo.trailing_zeros() };
            let fitting = 1 << (end - lo).ilog2();
            let hi = lo + aligned.min(fitting);
            nodes.push(Node { lo, hi });
            lo = hi;
        }
        nodes
    }

    /// How the sums over `nodes`, which are in order and all lanes together, become the sum over all lanes: for each node
    /// the number of times that the last two sums are added, once it stands behind them.
    ///
    /// # Errors
    /// Lanes that are no node of the tree, that are in two of them, or that are missing.
    pub fn joins(self, nodes: &[Node]) -> Result<Vec<usize>> {
        let mut sums: Vec<Node> = Vec::new();
        let mut joins = Vec::with_capacity(nodes.len());
        for &node in nodes {
            if !self.contains(node) {
                return Err(CollectiveError::ForeignNode { node, lanes: self.lanes() });
            }
            let next = sums.last().map_or(0, |last| last.hi);
            if let Some(&present) = sums.last().filter(|present| node.overlaps(**present)) {
                return Err(CollectiveError::DuplicateNode { node, present });
            }
            if node.lo != next {
                return Err(CollectiveError::MissingLanes { lo: next, hi: node.lo });
            }
            let mut sum = node;
            let before = sums.len();
            while let Some(parent) =
                self.parent(sum).filter(|_| sums.last().copied() == self.sibling(sum))
            {
                sums.pop();
                sum = parent;
            }
            joins.push(before - sums.len());
            sums.push(sum);
        }
        match sums[..] {
            [sum] if sum == self.root() => Ok(joins),
            _ => {
                let lo = sums.last().map_or(0, |last| last.hi);
                Err(CollectiveError::MissingLanes { lo, hi: self.lanes })
            }
        }
    }
}

/// Which lanes each worker owns: contiguous, never empty, in order. It changes the speed, never the numerics.
///
/// Lanes are cut at multiples of the coarsest power of two whose largest load stays within an eighth of the
/// smallest that any cut has; so three workers of 64 lanes get 24, 24 and 16, whose covers are two
/// nodes at most, where an even cut would send four.
///
/// # Errors
/// Lanes that are no power of two, no worker, or more workers than lanes.
pub fn lane_cut(lanes: usize, workers: usize) -> Result<Vec<Range<usize>>> {
    Tree::new(lanes)?;
    if workers == 0 || workers > lanes {
        return Err(CollectiveError::Workers { workers, lanes });
    }
    let smallest = lanes.div_ceil(workers);
    let largest_load = |granule: usize| (lanes / granule).div_ceil(workers) * granule;
    let mut granule = lanes;
    while lanes / granule < workers || 8 * largest_load(granule) > 9 * smallest {
        granule /= 2;
    }
    let (share, extra) = (lanes / granule / workers, lanes / granule % workers);
    let start = |worker: usize| (worker * share + worker.min(extra)) * granule;
    Ok((0..workers).map(|worker| start(worker)..start(worker + 1)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_contiguous_complete_and_balanced() {
        for lanes in (0..=8).map(|power| 1_usize << power) {
            for workers in 1..=lanes {
                let cut = lane_cut(lanes, workers).unwrap();
                assert_eq!(cut.len(), workers);
                assert_eq!(cut[0].start, 0);
                assert_eq!(cut[workers - 1].end, lanes);
                assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(cut.iter().all(|range| !range.is_empty()));
                let largest = cut.iter().map(ExactSizeIterator::len).max().unwrap();
                assert!(8 * largest <= 9 * lanes.div_ceil(workers), "{lanes} / {workers}");
            }
        }
        let loads = |lanes, workers| -> Vec<usize> {
            lane_cut(lanes, workers).unwrap().iter().map(ExactSizeIterator::len).collect()
        };
        assert_eq!(loads(64, 3), [24, 24, 16]);
        assert_eq!(loads(8, 3), [3, 3, 2]);
        assert_eq!(loads(8, 4), [2, 2, 2, 2]);
    }

    #[test]
    fn wrong_cuts_are_errors() {
        assert_eq!(lane_cut(6, 2), Err(CollectiveError::Lanes { found: 6 }));
        assert_eq!(lane_cut(0, 1), Err(CollectiveError::Lanes { found: 0 }));
        assert_eq!(lane_cut(4, 5), Err(CollectiveError::Workers { workers: 5, lanes: 4 }));
        assert_eq!(lane_cut(4, 0), Err(CollectiveError::Workers { workers: 0, lanes: 4 }));
    }

    #[test]
    fn covers_are_nodes_that_make_up_the_range() {
        let tree = Tree::new(32).unwrap();
        for lo in 0..32 {
            for hi in lo + 1..=32 {
                let cover = tree.cover(&(lo..hi));
                assert!(cover.iter().all(|&node| tree.contains(node)));
                assert_eq!(cover[0].lo as usize, lo);
                assert_eq!(cover[cover.len() - 1].hi as usize, hi);
                assert!(cover.windows(2).all(|pair| pair[0].hi == pair[1].lo));
                // Fewest: no two siblings are both in the cover.
                for &node in &cover {
                    assert!(tree.sibling(node).is_none_or(|sibling| !cover.contains(&sibling)));
                }
            }
        }
    }

    #[test]
    fn joins_are_the_tree_for_any_workers() {
        let tree = Tree::new(8).unwrap();
        assert_eq!(tree.joins(&[tree.root()]), Ok(vec![0]));
        let leaves: Vec<_> = (0..8).map(Node::leaf).collect();
        assert_eq!(tree.joins(&leaves), Ok(vec![0, 1, 0, 2, 0, 1, 0, 3]));
        for workers in 1..=8 {
            let cut = lane_cut(8, workers).unwrap();
            let nodes: Vec<_> = cut.iter().flat_map(|lanes| tree.cover(lanes)).collect();
            let joins = tree.joins(&nodes).unwrap();
            assert_eq!(joins.iter().sum::<usize>(), nodes.len() - 1);
        }
        let node = |lo, hi| Node { lo, hi };
        for (nodes, error) in [
            (vec![], CollectiveError::MissingLanes { lo: 0, hi: 8 }),
            (vec![node(0, 4)], CollectiveError::MissingLanes { lo: 4, hi: 8 }),
            (vec![node(4, 8)], CollectiveError::MissingLanes { lo: 0, hi: 4 }),
            (
                vec![node(0, 4), node(2, 4)],
                CollectiveError::DuplicateNode { node: node(2, 4), present: node(0, 4) },
            ),
            (vec![node(0, 3)], CollectiveError::ForeignNode { node: node(0, 3), lanes: 8 }),
        ] {
            assert_eq!(tree.joins(&nodes), Err(error));
        }
    }

    #[test]
    fn parents_and_siblings_agree() {
        let tree = Tree::new(8).unwrap();
        let node = Node { lo: 4, hi: 6 };
        assert_eq!(tree.parent(node), Some(Node { lo: 4, hi: 8 }));
        assert_eq!(tree.sibling(node), Some(Node { lo: 6, hi: 8 }));
        assert_eq!(tree.sibling(Node { lo: 6, hi: 8 }), Some(node));
        assert_eq!(tree.parent(tree.root()), None);
        assert!(!tree.contains(Node { lo: 1, hi: 3 }));
        assert!(!tree.contains(Node { lo: 0, hi: 3 }));
        assert!(!tree.contains(Node { lo: 8, hi: 9 }));
        assert!(!tree.contains(Node { lo: 3, hi: 3 }));
    }
}
