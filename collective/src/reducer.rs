//! One chunk's sum over all lanes: nodes arrive in any order and are summed in tree order.

use std::collections::BTreeMap;

use tidemill_kernels::cpu::add_assign;

use crate::chunk::Chunk;
use crate::error::{CollectiveError, Result};
use crate::tree::{Node, Tree};

/// The partial sums of one chunk of one step.
///
/// A node waits until its sibling is there; then `left + right` becomes their parent. Which of the two
/// holds the result is not numerics: floating-point addition is commutative, only its association counts.
#[derive(Debug)]
pub struct TreeReducer {
    tree: Tree,
    elements: usize,
    waiting: BTreeMap<Node, Vec<f32>>,
    /// The lanes that have arrived, as nodes that touch nothing else.
    arrived: Vec<Node>,
}

impl TreeReducer {
    /// Waits for the nodes of `tree`, each of `elements`.
    pub fn new(tree: Tree, elements: usize) -> Self {
        Self { tree, elements, waiting: BTreeMap::new(), arrived: Vec::new() }
    }

    /// Adds a node; answers the sum over all lanes once it is complete.
    ///
    /// # Errors
    /// A message that is no chunk, lanes that are no node of the tree or that arrived before,
    /// or another number of elements.
    pub fn insert(&mut self, chunk: Chunk) -> Result<Option<Vec<f32>>> {
        let mut node = chunk.header()?.node;
        if !self.tree.contains(node) {
            return Err(CollectiveError::ForeignNode { node, lanes: self.tree.lanes() });
        }
        if let Some(error) = self.arrived.iter().find_map(|&present| node.conflict(present)) {
            return Err(error);
        }
        let (expected, found) = (self.elements, chunk.elements());
        if found != expected {
            return Err(CollectiveError::ChunkLength { node, expected, found });
        }
        self.arrived.push(node);
        // The first sum reads the chunk where it lies, be it a network slab.
        let mut sum = match self.waiting_sibling(node) {
            Some((parent, mut sibling)) => {
                add_assign(&mut sibling, &chunk.values()?);
                node = parent;
                sibling
            }
            None => chunk.into_values()?,
        };
        while let Some((parent, sibling)) = self.waiting_sibling(node) {
            add_assign(&mut sum, &sibling);
            node = parent;
        }
        if node == self.tree.root() {
            return Ok(Some(sum));
        }
        self.waiting.insert(node, sum);
        Ok(None)
    }

    fn waiting_sibling(&mut self, node: Node) -> Option<(Node, Vec<f32>)> {
        let sibling = self.tree.sibling(node)?;
        let values = self.waiting.remove(&sibling)?;
        self.tree.parent(node).map(|parent| (parent, values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::{ChunkHeader, Part};
    use crate::tree::lane_cut;

    const ELEMENTS: usize = 5;

    /// A small generator with a fixed seed (splitmix64).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = self.0;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        }

        fn shuffle<T>(&mut self, items: &mut [T]) {
            for last in (1..items.len()).rev() {
                items.swap(last, (self.next() % (last as u64 + 1)) as usize);
            }
        }
    }

    /// Magnitudes over nine decades, so that the order of a sum shows in its bits.
    fn lane(random: &mut Random) -> Vec<f32> {
        let value = |random: &mut Random| {
            let unit = (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            unit * 10_f32.powi((random.next() % 10) as i32 - 5)
        };
        (0..ELEMENTS).map(|_| value(random)).collect()
    }

    fn tree_sum(lanes: &[Vec<f32>]) -> Vec<f32> {
        if lanes.len() == 1 {
            return lanes[0].clone();
        }
        let (left, right) = lanes.split_at(lanes.len() / 2);
        tree_sum(left).iter().zip(tree_sum(right)).map(|(left, right)| left + right).collect()
    }

    fn chunk(node: Node, values: Vec<f32>) -> Chunk {
        let header = ChunkHeader {
            destination: 0,
            source: 0,
            part: Part::Gradient { use_index: 0 },
            chunk: 0,
            node,
            step: 0,
        };
        Chunk::new(header, values)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn the_sum_is_the_trees_for_any_workers_and_any_arrival() {
        let mut random = Random(1);
        let mut arrival_order_differs = 0;
        for count in (0..=6).map(|power| 1_usize << power) {
            let lanes: Vec<_> = (0..count).map(|_| lane(&mut random)).collect();
            let (tree, expected) = (Tree::new(count).unwrap(), tree_sum(&lanes));
            for element in 0..ELEMENTS {
                let exact: f64 = lanes.iter().map(|lane| f64::from(lane[element])).sum();
                let scale: f64 = lanes.iter().map(|lane| f64::from(lane[element]).abs()).sum();
                let error = (f64::from(expected[element]) - exact).abs();
                assert!(error <= 8.0 * f64::from(f32::EPSILON) * scale);
            }
            for workers in 1..=count {
                let mut nodes: Vec<Node> = lane_cut(count, workers)
                    .unwrap()
                    .iter()
                    .flat_map(|range| tree.cover(range))
                    .collect();
                for _ in 0..3 {
                    random.shuffle(&mut nodes);
                    let mut reducer = TreeReducer::new(tree, ELEMENTS);
                    let mut arrival = vec![0.0_f32; ELEMENTS];
                    for (arrived, &node) in nodes.iter().enumerate() {
                        let values = tree_sum(&lanes[node.lo as usize..node.hi as usize]);
                        add_assign(&mut arrival, &values);
                        let sum = reducer.insert(chunk(node, values)).unwrap();
                        assert_eq!(sum.is_some(), arrived + 1 == nodes.len());
                        if let Some(sum) = sum {
                            assert_eq!(bits(&sum), bits(&expected), "{count} lanes, {workers}");
                        }
                    }
                    arrival_order_differs += usize::from(bits(&arrival) != bits(&expected));
                }
            }
        }
        // The control: summing as nodes arrive gives other bits, so this test can tell.
        assert!(arrival_order_differs > 100, "{arrival_order_differs}");
    }

    #[test]
    fn what_does_not_belong_is_an_error() {
        let tree = Tree::new(4).unwrap();
        let mut reducer = TreeReducer::new(tree, 1);
        let node = Node { lo: 0, hi: 2 };
        assert!(reducer.insert(chunk(node, vec![1.0])).unwrap().is_none());
        for (lo, hi) in [(0, 2), (0, 1), (1, 2), (0, 4)] {
            let again = Node { lo, hi };
            let error = reducer.insert(chunk(again, vec![1.0])).unwrap_err();
            assert_eq!(error, CollectiveError::DuplicateNode { node: again, present: node });
        }
        let foreign = Node { lo: 1, hi: 3 };
        let error = reducer.insert(chunk(foreign, vec![1.0])).unwrap_err();
        assert_eq!(error, CollectiveError::ForeignNode { node: foreign, lanes: 4 });
        let other = Node { lo: 2, hi: 4 };
        let error = reducer.insert(chunk(other, vec![1.0, 2.0])).unwrap_err();
        assert!(matches!(error, CollectiveError::ChunkLength { expected: 1, found: 2, .. }));
        assert!(reducer.insert(Chunk::default()).is_err());
        assert_eq!(reducer.insert(chunk(other, vec![2.0])).unwrap(), Some(vec![3.0]));
    }
}
