//! What workers sum, and what it has to come to.
//!
//! Values repeat after a number of elements that divides no bucket and no chunk: what stands in the wrong place differs, and all
//! of a large arena is compared with few expected values.

use tidemill_collective::{Node, Tree, lane_cut};

use crate::error::{JobError, Result};

/// Elements after which values repeat: a prime.
const PERIOD: usize = 1_000_003;

/// The values of all workers, and their sums.
#[derive(Debug)]
pub(super) struct Values {
    tree: Tree,
    /// The nodes of each worker's lanes.
    nodes: Vec<Vec<Node>>,
    period: usize,
    /// Of one period.
    sums: Vec<f32>,
}

/// An element that is not what it has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Difference {
    /// Of the arena.
    pub element: usize,
    pub expected: f32,
    pub found: f32,
}

impl Values {
    /// Those of `workers` with arenas of `elements`.
    ///
    /// # Errors
    /// More workers than a tree has lanes.
    pub(super) fn new(workers: usize, elements: usize) -> Result<Self> {
        let lanes = workers.next_power_of_two();
        let wrong =
            |error| JobError::Communicator(tidemill_collective::CollectiveError::into(error));
        let tree = Tree::new(lanes).map_err(wrong)?;
        let cut = lane_cut(lanes, workers).map_err(wrong)?;
        let nodes = cut.iter().map(|lanes| tree.cover(lanes)).collect();
        let period = PERIOD.min(elements);
        let mut values = Self { tree, nodes, period, sums: Vec::new() };
        values.sums = values.sum(tree.root());
        Ok(values)
    }

    /// The number of workers.
    pub(super) fn workers(&self) -> usize {
        self.nodes.len()
    }

    /// The tree along which they are summed.
    pub(super) fn tree(&self) -> Tree {
        self.tree
    }

    /// The nodes that `worker` adds; its values are those of each.
    pub(super) fn nodes(&self, worker: usize) -> &[Node] {
        &self.nodes[worker]
    }

    /// One period of what `worker` adds.
    pub(super) fn of_worker(&self, worker: usize) -> Vec<f32> {
        (0..self.period).map(|element| value(worker, element)).collect()
    }

    /// The sum over the lanes of `node`: the left half's and the right half's.
    fn sum(&self, node: Node) -> Vec<f32> {
        let owner = self.nodes.iter().position(|nodes| nodes.contains(&node));
        if let Some(worker) = owner {
            return self.of_worker(worker);
        }
        let middle = node.lo + node.lanes() / 2;
        let mut left = self.sum(Node { hi: middle, ..node });
        let right = self.sum(Node { lo: middle, ..node });
        left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
        left
    }

    /// The first of `found`, which begin at element `start` of the arena, that is not the sum.
    pub(super) fn difference(&self, start: usize, found: &[f32]) -> Option<Difference> {
        let mut done = 0;
        while done < found.len() {
            let expected = &self.sums[(start + done) % self.period..];
            let found = &found[done..];
            let mut pairs = expected.iter().zip(found);
            let differs = |(expected, found): (&f32, &f32)| expected.to_bits() != found.to_bits();
            if let Some(index) = pairs.position(differs) {
                let (expected, found) = (expected[index], found[index]);
                return Some(Difference { element: start + done + index, expected, found });
            }
            done += expected.len().min(found.len());
        }
        None
    }
}

/// Hands the parts of an arena that begin at multiples of the period of `values` to `write`, with what belongs there.
///
/// # Errors
/// Those of `write`.
pub(super) fn in_periods<E>(
    values: &[f32],
    elements: usize,
    mut write: impl FnMut(usize, &[f32]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    (0..elements)
        .step_by(values.len())
        .try_for_each(|start| write(start, &values[..values.len().min(elements - start)]))
}

/// Of magnitudes over seven decades, so that the order of a sum shows in its bits.
fn value(worker: usize, element: usize) -> f32 {
    const DECADES: [f32; 7] = [1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3];
    let mut x = ((worker as u64 + 1) << 32) + element as u64;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    let unit = (x >> 40) as f32 / (1 << 23) as f32 - 1.0;
    unit * DECADES[(x % 7) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All elements of an arena of sums.
    fn arena(values: &Values, elements: usize) -> Vec<f32> {
        (0..elements).map(|element| values.sums[element % values.period]).collect()
    }

    #[test]
    fn sums_are_those_of_the_tree() {
        let values = Values::new(3, 1000).unwrap();
        let [a, b, c] = [0, 1, 2].map(|worker| values.of_worker(worker));
        let (tree, order) = (|i: usize| a[i] + (b[i] + c[i]), |i: usize| (a[i] + b[i]) + c[i]);
        let bits = |sum: &dyn Fn(usize) -> f32| (0..1000).map(|i| sum(i).to_bits()).collect();
        let [expected, other]: [Vec<u32>; 2] = [bits(&tree), bits(&order)];
        let found: Vec<u32> = values.sums.iter().map(|sum| sum.to_bits()).collect();
        assert_eq!(found, expected);
        assert_ne!(found, other, "the order of a sum shows");
    }

    #[test]
    fn one_wrong_bit_and_one_wrong_place_are_found() {
        let elements = 2 * PERIOD + 1000;
        let values = Values::new(2, elements).unwrap();
        let right = arena(&values, elements);
        assert_eq!(values.difference(0, &right), None);
        assert_eq!(values.difference(PERIOD - 3, &right[PERIOD - 3..]), None);
        for element in [0, PERIOD - 1, PERIOD, elements - 1] {
            let mut wrong = right.clone();
            wrong[element] = f32::from_bits(wrong[element].to_bits() ^ 1);
            let (expected, found) = (right[element], wrong[element]);
            let difference = Difference { element, expected, found };
            assert_eq!(values.difference(0, &wrong), Some(difference));
        }
        for moved in [1 << 18, 1 << 16, 1] {
            assert!(values.difference(0, &right[moved..]).is_some(), "{moved}");
        }
    }
}
