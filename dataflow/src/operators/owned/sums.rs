//! The sums of a worker's part of a bucket, as they come round by round.

use tidemill_collective::communicator::{Communicator, CommunicatorError, Cut, Key, ReduceScatter};
use tidemill_collective::{Node, Tree};
use tidemill_kernels::{Backend, Slice, SliceMut};

/// The sums of one bucket: of the lanes so far those nodes of the tree that are no halves of another.
pub(super) struct TreeSums<B: Backend> {
    nodes: Vec<(Node, B::Buffer<f32>)>,
    spare: Vec<B::Buffer<f32>>,
}

impl<B: Backend> TreeSums<B> {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), spare: Vec::new() }
    }

    /// The sums over all lanes, once the last round's have come: one use after the other.
    pub(super) fn whole(&self, tree: Tree) -> Option<&B::Buffer<f32>> {
        self.nodes.first().filter(|(node, _)| *node == tree.root()).map(|(_, sums)| sums)
    }

    /// The same, to be changed.
    pub(super) fn whole_mut(&mut self, tree: Tree) -> Option<&mut B::Buffer<f32>> {
        self.nodes.first_mut().filter(|(node, _)| *node == tree.root()).map(|(_, sums)| sums)
    }

    /// The room of `elements` elements, which nothing needs any more.
    fn room(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        elements: usize,
    ) -> Result<B::Buffer<f32>, CommunicatorError> {
        match self.spare.pop() {
            Some(room) => Ok(room),
            None => Ok(backend.allocate(stream, elements)?),
        }
    }

    /// Adds `sums` over the lanes of `node`, which come behind those that are here.
    fn push(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        tree: Tree,
        mut node: Node,
        sums: Slice<'_, B, f32>,
    ) -> Result<(), CommunicatorError> {
        let joined = |nodes: &[(Node, B::Buffer<f32>)], right: Node| {
            let left = nodes.last().map(|(left, _)| *left);
            tree.parent(right).filter(|_| left.is_some() && left == tree.sibling(right))
        };
        // A joined sum replaces its left half.
        let mut right: Option<B::Buffer<f32>> = None;
        while let Some(parent) = joined(&self.nodes, node)
            && let Some((_, mut left)) = self.nodes.pop()
        {
            let added =
                right.as_ref().map_or(Ok(sums), |right| Slice::new(right, 0, sums.elements()))?;
            let into = SliceMut::new(&mut left, 0, sums.elements())?;
            backend.accumulate(stream, into, added)?;
            self.spare.extend(right.replace(left));
            node = parent;
        }
        let sums = match right {
            Some(joined) => joined,
            None => {
                let mut room = self.room((backend, stream), sums.elements())?;
                backend.copy(stream, SliceMut::all(&mut room), sums)?;
                room
            }
        };
        self.nodes.push((node, sums));
        Ok(())
    }
}

/// A round of a bucket whose sums a worker owns in part.
pub(super) struct RoundPart<'a> {
    pub(super) key: Key,
    /// The owners of the bucket's elements.
    pub(super) cut: &'a Cut,
    /// The elements that this one owns, over all uses.
    pub(super) elements: usize,
}

/// The sums of the part of one worker of several.
pub(super) struct OwnedSums<B: Backend> {
    buckets: Vec<TreeSums<B>>,
    /// The sum of a round, if the round is not all.
    of_round: Option<B::Buffer<f32>>,
}

impl<B: Backend> OwnedSums<B> {
    pub(super) fn new(buckets: usize) -> Self {
        Self { buckets: (0..buckets).map(|_| TreeSums::new()).collect(), of_round: None }
    }

    /// The sums of a bucket over all lanes.
    pub(super) fn whole(&self, bucket: usize, tree: Tree) -> Option<&B::Buffer<f32>> {
        self.buckets[bucket].whole(tree)
    }

    /// The same, to be changed.
    pub(super) fn whole_mut(&mut self, bucket: usize, tree: Tree) -> Option<&mut B::Buffer<f32>> {
        self.buckets[bucket].whole_mut(tree)
    }

    /// Brings the sums of `parts`, in order; those over all lanes together.
    ///
    /// # Errors
    /// The errors of the communicator.
    pub(super) fn sum_each(
        &mut self,
        communicator: &mut dyn Communicator<B>,
        (backend, stream): (&B, &mut B::DeviceStream),
        parts: &[RoundPart<'_>],
    ) -> Result<(), CommunicatorError> {
        let root = communicator.schedule().tree().root();
        let mut rooms = Vec::with_capacity(parts.len());
        for part in parts {
            let sums = &mut self.buckets[part.key.bucket as usize];
            if part.key.round == 0 {
                let before = std::mem::take(&mut sums.nodes);
                sums.spare.extend(before.into_iter().map(|(_, sums)| sums));
            }
            if communicator.schedule().sums(part.key.round as usize)?[..] == [root] {
                rooms.push((part, sums.room((backend, stream), part.elements)?));
            } else {
                self.sum_of_round(communicator, (backend, stream), part)?;
            }
        }
        let whole = rooms.iter_mut().map(|(part, room)| {
            let RoundPart { key, cut, .. } = **part;
            ReduceScatter { key, cut, out: SliceMut::all(room) }
        });
        communicator.reduce_scatter_each(backend, stream, whole.collect())?;
        for (part, room) in rooms {
            self.buckets[part.key.bucket as usize].nodes.push((root, room));
        }
        Ok(())
    }

    /// Brings the sums of a round that is not all lanes.
    fn sum_of_round(
        &mut self,
        communicator: &mut dyn Communicator<B>,
        (backend, stream): (&B, &mut B::DeviceStream),
        &RoundPart { key, cut, elements }: &RoundPart<'_>,
    ) -> Result<(), CommunicatorError> {
        let tree = communicator.schedule().tree();
        let nodes = communicator.schedule().sums(key.round as usize)?;
        let sums = &mut self.buckets[key.bucket as usize];
        let of_all = nodes.len() * elements;
        let fits = self.of_round.take().filter(|room| B::elements(room) >= of_all);
        let mut room = match fits {
            Some(room) => room,
            None => backend.allocate(stream, of_all)?,
        };
        let out = SliceMut::new(&mut room, 0, of_all)?;
        communicator.reduce_scatter(backend, stream, key, cut, out)?;
        // A worker's part of a small bucket may be empty.
        for (index, node) in nodes.into_iter().enumerate().filter(|_| elements > 0) {
            let of_node = Slice::new(&room, index * elements, elements)?;
            sums.push((backend, stream), tree, node, of_node)?;
        }
        self.of_round = Some(room);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime};

    use super::*;

    /// Sums that come in any pieces equal the sums of the tree, and their memory is used again.
    #[test]
    fn nodes_join_as_they_come() {
        let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = cpu.device_stream().unwrap();
        let tree = Tree::new(8).unwrap();
        let lanes = [1e8_f32, 1.0, -1e8, 3.0, 0.5, 7e7, 2.0, -7e7];
        let sum = |node: Node| -> f32 {
            fn of(lanes: &[f32]) -> f32 {
                match lanes {
                    [lane] => *lane,
                    _ => {
                        let (left, right) = lanes.split_at(lanes.len() / 2);
                        of(left) + of(right)
                    }
                }
            }
            of(&lanes[node.lo as usize..node.hi as usize])
        };
        for cut in [[0..3, 3..6, 6..8], [0..1, 1..5, 5..8], [0..4, 4..5, 5..8]] {
            let mut sums = TreeSums::<Cpu>::new();
            for _ in 0..2 {
                let before = std::mem::take(&mut sums.nodes);
                sums.spare.extend(before.into_iter().map(|(_, sums)| sums));
                for lanes in &cut {
                    assert!(sums.whole(tree).is_none(), "not all lanes are there");
                    for node in tree.cover(lanes) {
                        let mut buffer = cpu.allocate::<f32>(&mut stream, 3).unwrap();
                        buffer.as_mut_slice().fill(sum(node));
                        let of_node = Slice::all(&buffer);
                        sums.push((&cpu, &mut stream), tree, node, of_node).unwrap();
                    }
                }
                let whole = sums.whole(tree).expect("all lanes").as_slice();
                assert_eq!(whole, [sum(tree.root()); 3]);
            }
            assert!(sums.spare.len() < 4, "a buffer for each node that waits");
        }
    }
}
