//! Values for workers to sum, and the sums that they must give.
//!
//! Values repeat after a number of elements that divides no bucket and no chunk, so that a value in the wrong place is
//! noticed, and all of a large arena is compared with few expected values.

use std::sync::OnceLock;

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
    /// The sums of one period of values.
    sums: Vec<f32>,
    /// How far sums in another order may be from the sums of one period, where that is asked.
    bounds: OnceLock<Vec<f32>>,
}

/// How closely numbers have to agree with the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agreement {
    /// Sums that were added along the tree have to be equal to the bit.
    ToTheBit,
    /// Sums that were added in any order may differ by rounding.
    WithinRounding,
}

/// An element with another value than expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Difference {
    /// The index in the arena.
    pub element: usize,
    pub expected: f32,
    pub found: f32,
}

impl Values {
    /// The values of `workers` with arenas of `elements`.
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
        let mut values = Self { tree, nodes, period, sums: Vec::new(), bounds: OnceLock::new() };
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

    /// The first of `found`, which begin at element `start` of the arena, that does not agree with the sum.
    pub(super) fn difference(
        &self,
        start: usize,
        found: &[f32],
        agreement: Agreement,
    ) -> Option<Difference> {
        let mut done = 0;
        while done < found.len() {
            let first = (start + done) % self.period;
            let expected = &self.sums[first..];
            let found = &found[done..];
            let mut pairs = expected.iter().zip(found);
            let difference = match agreement {
                Agreement::ToTheBit => {
                    pairs.position(|(expected, found)| expected.to_bits() != found.to_bits())
                }
                Agreement::WithinRounding => {
                    let mut bounded = pairs.zip(&self.bounds()[first..]);
                    bounded.position(|((expected, found), bound)| {
                        let off = (expected - found).abs();
                        off.is_nan() || off > *bound
                    })
                }
            };
            if let Some(index) = difference {
                let (expected, found) = (expected[index], found[index]);
                return Some(Difference { element: start + done + index, expected, found });
            }
            done += expected.len().min(found.len());
        }
        None
    }
}

impl Values {
    /// Twice what roundings of a sum in any order come to at most: the sum along the tree is rounded too.
    fn bounds(&self) -> &[f32] {
        self.bounds.get_or_init(|| {
            let workers = self.workers();
            let rounding = 2.0 * workers as f32 * f32::EPSILON;
            let magnitude =
                |element| (0..workers).map(|worker| value(worker, element).abs()).sum::<f32>();
            (0..self.period).map(|element| rounding * magnitude(element)).collect()
        })
    }
}

/// Hands the parts of an arena that begin at multiples of the period of `values` to `write`, with what belongs there.
///
/// # Errors
/// The errors of `write`.
pub(super) fn in_periods<E>(
    values: &[f32],
    elements: usize,
    mut write: impl FnMut(usize, &[f32]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    (0..elements)
        .step_by(values.len())
        .try_for_each(|start| write(start, &values[..values.len().min(elements - start)]))
}

/// Values span seven decades, so that another order of a sum gives other bits.
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
        let (right, exactly) = (arena(&values, elements), Agreement::ToTheBit);
        assert_eq!(values.difference(0, &right, exactly), None);
        assert_eq!(values.difference(PERIOD - 3, &right[PERIOD - 3..], exactly), None);
        for element in [0, PERIOD - 1, PERIOD, elements - 1] {
            let mut wrong = right.clone();
            wrong[element] = f32::from_bits(wrong[element].to_bits() ^ 1);
            let (expected, found) = (right[element], wrong[element]);
            let difference = Difference { element, expected, found };
            assert_eq!(values.difference(0, &wrong, exactly), Some(difference));
        }
        for moved in [1 << 18, 1 << 16, 1] {
            for agreement in [exactly, Agreement::WithinRounding] {
                assert!(values.difference(0, &right[moved..], agreement).is_some(), "{moved}");
            }
        }
    }

    #[test]
    fn a_sum_in_another_order_agrees_and_one_that_lacks_a_term_does_not() {
        let values = Values::new(3, 1000).unwrap();
        let [a, b, c] = [0, 1, 2].map(|worker| values.of_worker(worker));
        let agree = |found: &[f32], how| values.difference(0, found, how).is_none();
        let other: Vec<f32> = (0..1000).map(|i| (a[i] + b[i]) + c[i]).collect();
        assert!(agree(&other, Agreement::WithinRounding) && !agree(&other, Agreement::ToTheBit));
        let lacking: Vec<f32> = (0..1000).map(|i| a[i] + b[i]).collect();
        assert!(!agree(&lacking, Agreement::WithinRounding));
        assert!(!agree(&[f32::NAN], Agreement::WithinRounding));
    }
}
