//! Ranks of several processes, whose devices a library of the vendor connects: NCCL, or RCCL.
//!
//! The library moves bytes and adds nothing: each rank sends an owner the parts of its lanes that the owner needs, and the
//! owner's kernel adds them along the tree. So the sums are those of any other communicator, to the bit.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::backend::TreeTerm;
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId, GroupMember};
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::threads::{Key, Post, Threads, Update};
use super::{Abort, Communicator, CommunicatorError, Cut, Result};
use crate::tree::{Node, Tree, lane_cut};

/// The end of one rank. Before it or what was sent is dropped, the device stream that it was used with must have run.
pub struct Nccl<B: Backend> {
    /// At which this rank's thread that computes tells the one that sums.
    own: Threads<B, f32>,
    member: Arc<GroupMember>,
    tree: Tree,
    /// The nodes that each rank posts, in order.
    nodes: Vec<Vec<Node>>,
    /// Room for what the other ranks send of a bucket.
    received: Option<B::Buffer<f32>>,
    /// What this rank has updated and not sent.
    updates: Vec<(Key, Update<B, f32>)>,
}

impl<B: Backend> Nccl<B> {
    /// The end of `rank` of `ranks`, whose device is `backend`, in the group `id`; they sum over the lanes of `tree`, cut as
    /// [`lane_cut`] does. Begins to join: the first sum waits until all have.
    ///
    /// # Errors
    /// More ranks than lanes, a device whose memory is not its own, or what the library answers.
    pub fn join(
        backend: &B,
        library: &CollectiveLibrary,
        id: GroupId,
        (rank, ranks): (usize, usize),
        tree: Tree,
    ) -> Result<Self> {
        let own = Threads::group(&[backend], tree)?.remove(0);
        let lanes = lane_cut(tree.lanes(), ranks)?;
        let nodes = lanes.iter().map(|lanes| tree.cover(lanes)).collect();
        let member = Arc::new(backend.join_group(library, id, (rank, ranks))?);
        Ok(Self { own, member, tree, nodes, received: None, updates: Vec::new() })
    }
}

/// Room for `elements` elements.
fn room<'a, B: Backend>(
    received: &'a mut Option<B::Buffer<f32>>,
    backend: &B,
    stream: &mut B::DeviceStream,
    elements: usize,
) -> Result<&'a mut B::Buffer<f32>> {
    let has = |buffer: &B::Buffer<f32>| B::elements(buffer) >= elements;
    match received.take().filter(has) {
        Some(buffer) => Ok(received.insert(buffer)),
        None => Ok(received.insert(backend.allocate(stream, elements)?)),
    }
}

/// A range of what a rank was sent: the use, the node, and where it is.
struct Place {
    index: usize,
    node: Node,
    range: Range<usize>,
}

impl<B: Backend> Communicator<B> for Nccl<B> {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn ranks(&self) -> usize {
        self.member.ranks()
    }

    fn post(&self) -> Post<B, f32> {
        self.own.post()
    }

    fn abort_handle(&self) -> Abort {
        // It ends with the thread that uses it, not with the last that might abort it.
        let (own, member) = (self.own.abort_handle(), Arc::downgrade(&self.member));
        Box::new(move || {
            own();
            // A device that hangs keeps the library from ending, and must not keep who aborts.
            let abort = move || member.upgrade().iter().for_each(|member| member.abort());
            let _ = std::thread::Builder::new().name("abort".to_owned()).spawn(abort);
        })
    }

    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        owned: &[Vec<Range<usize>>],
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let rank = self.member.rank();
        let told = self.own.wait_for_sums(Key { step, bucket })?;
        let Some((parts, ready)) = told.first() else { return Err(CommunicatorError::Closed) };
        let posted = parts.iter().map(|part| part.node);
        if !posted.eq(self.nodes[rank].iter().copied()) {
            let (what, wrong) = ("the sums", "over other lanes than its own");
            return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
        }
        backend.wait_for(stream, ready)?;
        let mut sends = Vec::new();
        for (peer, ranges) in owned.iter().enumerate().filter(|&(peer, _)| peer != rank) {
            for range in ranges.iter().filter(|range| !range.is_empty()) {
                for part in parts {
                    sends.push((peer, part.sums.slice(range.start, range.len())?));
                }
            }
        }
        let (mut places, mut receives, mut end) = (Vec::new(), Vec::new(), 0);
        for (peer, nodes) in self.nodes.iter().enumerate().filter(|&(peer, _)| peer != rank) {
            for (index, owned) in owned[rank].iter().enumerate().filter(|(_, o)| !o.is_empty()) {
                for &node in nodes {
                    let range = end..end + owned.len();
                    end = range.end;
                    receives.push((peer, range.clone()));
                    places.push(Place { index, node, range });
                }
            }
        }
        let received = room(&mut self.received, backend, stream, end)?;
        if !sends.is_empty() || !receives.is_empty() {
            let into = SliceMut::new(received, 0, end)?;
            backend.exchange(stream, &self.member, &sends, into, &receives)?;
        }
        let mut start = 0;
        for (index, owned) in owned[rank].iter().enumerate().filter(|(_, o)| !o.is_empty()) {
            let mut values = Vec::with_capacity(self.tree.lanes());
            for part in parts {
                values.push((part.node, part.sums.slice(owned.start, owned.len())?));
            }
            for place in places.iter().filter(|place| place.index == index) {
                let from = Slice::new(&*received, place.range.start, place.range.len())?;
                values.push((place.node, from));
            }
            values.sort_by_key(|(node, _)| *node);
            let nodes: Vec<Node> = values.iter().map(|(node, _)| *node).collect();
            let joins = self.tree.joins(&nodes)?;
            let terms = values.into_iter().zip(joins);
            let terms: Vec<_> = terms
                .map(|((_, values), joins)| TreeTerm { values: Some(values), joins })
                .collect();
            backend.tree_sum(stream, out.reborrow().sub(start, owned.len())?, &terms)?;
            start += owned.len();
        }
        Ok(())
    }

    fn updated(
        &mut self,
        (step, bucket): (u64, u32),
        update: Update<B, f32>,
        _: &B::Event,
    ) -> Result<()> {
        // It was enqueued on the device stream on which it will be sent.
        self.updates.push((Key { step, bucket }, update));
        Ok(())
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        cut: &Cut,
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let rank = self.member.rank();
        let place = self.updates.iter().position(|(key, _)| *key == Key { step, bucket });
        let Some(place) = place else {
            let (what, wrong) = ("the update", "after it was to be gathered");
            return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
        };
        let (_, update) = self.updates.swap_remove(place);
        let own = cut.of_rank(rank);
        let peers = (0..cut.ranks()).filter(|&peer| peer != rank);
        let mut sends = Vec::new();
        for peer in peers.clone().filter(|_| !own.is_empty()) {
            sends.push((peer, update.values.slice(update.start, own.len())?));
        }
        let receives = peers.map(|peer| (peer, cut.of_rank(peer)));
        let receives: Vec<_> = receives.filter(|(_, range)| !range.is_empty()).collect();
        if !sends.is_empty() || !receives.is_empty() {
            backend.exchange(stream, &self.member, &sends, out, &receives)?;
        }
        Ok(())
    }
}
