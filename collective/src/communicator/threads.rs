//! Ranks that are threads of one process, which read each other's memory.
//!
//! An owner's kernel loads the memory of its peers directly and adds along the tree: nothing is staged, and every byte
//! crosses a link between devices once. Copies of updates are loads too.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::backend::TermValues;
use tidemill_kernels::{Backend, PeerAccess, SliceMut};

use super::along_tree::{AlongTree, NodeSum, Term};
use super::post::{HeldPosts, Inbox, Key, OfMembers, Post, PostedSums, Sums, members};
use super::values::SharedValues;
use super::{
    Abort, CommunicationCost, Communicator, CommunicatorError, Cut, ReduceScatter, Result, Traffic,
    Values, ValuesMut,
};
use crate::lane_schedule::LaneSchedule;
use crate::node::Node;

/// The end of one rank. Before it is dropped, the device streams that it was used with must have run: the memory that they read
/// is then given back.
pub struct Threads<B: Backend> {
    rank: usize,
    ranks: usize,
    schedule: Arc<LaneSchedule>,
    post: Post<B>,
    inbox: Inbox<B>,
    along_tree: AlongTree<B>,
    read: HeldPosts<B>,
    cost: CommunicationCost<B>,
}

/// Checks that each of `backends`, the devices of the ranks from `first_rank` on, can read the memory of all.
///
/// # Errors
/// [`CommunicatorError::OutOfReach`], or a device that fails.
pub fn check_reach<B: Backend>(backends: &[&B], first_rank: usize) -> Result<()> {
    for (rank, backend) in backends.iter().enumerate() {
        for (peer, of_peer) in backends.iter().enumerate() {
            if backend.reach(of_peer)? == PeerAccess::Absent {
                let (rank, peer) = (first_rank + rank, first_rank + peer);
                return Err(CommunicatorError::OutOfReach { rank, peer });
            }
        }
    }
    Ok(())
}

impl<B: Backend> Threads<B> {
    /// The ends of ranks whose devices are `backends`, in order, which sum over the lanes of `schedule`.
    ///
    /// # Errors
    /// A schedule of another number of workers, [`CommunicatorError::OutOfReach`], or a device that fails.
    pub fn group(backends: &[&B], schedule: &Arc<LaneSchedule>) -> Result<Vec<Self>> {
        check_reach(backends, 0)?;
        let ranks = backends.len();
        schedule.check_workers(ranks)?;
        let end = |(rank, (post, inbox))| Self {
            rank,
            ranks,
            schedule: Arc::clone(schedule),
            post,
            inbox,
            along_tree: AlongTree::new(),
            read: HeldPosts::new(),
            cost: CommunicationCost::default(),
        };
        Ok(members(0, ranks, schedule).into_iter().enumerate().map(end).collect())
    }
}

/// Sums `told`, in order, of every use over `node`: the elements `own` of the bucket, one use after the other.
pub(super) fn sum_uses<B: Backend>(
    along_tree: &mut AlongTree<B>,
    (backend, stream): (&B, &mut B::DeviceStream),
    node: Node,
    posted: &[&Sums<B>],
    own: &Range<usize>,
    mut out: SliceMut<'_, B, f32>,
) -> Result<()> {
    let uses = posted.first().map_or(0, |first| first.uses.len());
    for index in 0..uses {
        let terms = terms_of_use(posted, index, own)?;
        let out = out.reborrow().sub(index * own.len(), own.len())?;
        along_tree.sum(backend, stream, node, &terms, out)?;
    }
    Ok(())
}

/// The elements `own` of use `index` of a bucket, of each of `posted`.
fn terms_of_use<'a, B: Backend>(
    posted: &[&'a Sums<B>],
    index: usize,
    own: &Range<usize>,
) -> Result<Vec<Term<'a, B>>> {
    let term = |sums: &&'a Sums<B>| {
        let values = sums.uses[index].slice(own.start, own.len())?;
        Ok((sums.node, TermValues::Buffer(values)))
    };
    posted.iter().map(term).collect()
}

/// The posted sums of the members of a group, in the order of lanes; work that is enqueued on `stream` afterwards may read them.
/// `traffic` counts the `elements` of its own part that member `member` reads of the others.
pub(super) fn read_sums<'a, B: Backend>(
    (backend, stream): (&B, &mut B::DeviceStream),
    posted: &'a OfMembers<PostedSums<B>, B::Event>,
    (member, elements): (usize, usize),
    traffic: &mut Traffic,
) -> Result<Vec<&'a Sums<B>>> {
    let mut sums = Vec::new();
    for (peer, (of_peer, ready)) in posted.iter().enumerate() {
        backend.wait_for(stream, ready)?;
        if peer != member {
            let uses = of_peer.sums.iter().map(|sums| sums.uses.len());
            traffic.read(uses.sum::<usize>() * elements * size_of::<f32>());
        }
        sums.extend(&of_peer.sums);
    }
    sums.sort_by_key(|sums| sums.node);
    Ok(sums)
}

/// Copies the updates of the members of a group, whose first rank is `first`, to their places in `out`, except those of
/// `rank`, which are there. Each rank begins with the member behind it: if all began with the first, its link alone would carry
/// all bytes while the others were idle.
pub(super) fn copy_updates<B: Backend>(
    (backend, stream): (&B, &mut B::DeviceStream),
    posted: &OfMembers<SharedValues<B>, B::Event>,
    (first, rank): (usize, usize),
    cut: &Cut,
    mut out: ValuesMut<'_, B>,
    traffic: &mut Traffic,
) -> Result<()> {
    let members = posted.len();
    for member in (1..members).map(|further| (rank - first + further) % members) {
        let ((values, ready), range) = (&posted[member], cut.of_rank(first + member));
        if range.is_empty() {
            continue;
        }
        backend.wait_for(stream, ready)?;
        traffic.read(range.len() * out.element_bytes());
        out.reborrow().copy(backend, stream, range, (values, 0))?;
    }
    Ok(())
}

/// The `posted` sums over lanes of `node`.
pub(super) fn within<'a, B: Backend>(posted: &[&'a Sums<B>], node: Node) -> Vec<&'a Sums<B>> {
    posted.iter().filter(|sums| node.holds(sums.node)).copied().collect()
}

impl<B: Backend> Communicator<B> for Threads<B> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn schedule(&self) -> &LaneSchedule {
        &self.schedule
    }

    fn post(&self) -> Post<B> {
        self.post.clone()
    }

    fn abort_handle(&self) -> Abort {
        self.post.abort_handle()
    }

    fn take_cost(&mut self) -> CommunicationCost<B> {
        std::mem::take(&mut self.cost)
    }

    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        self.reduce_scatter_each(backend, stream, vec![ReduceScatter { key, cut, out }])
    }

    fn reduce_scatter_each(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        buckets: Vec<ReduceScatter<'_, B>>,
    ) -> Result<()> {
        let posted = buckets.iter().map(|bucket| self.inbox.sums(bucket.key));
        let posted = posted.collect::<Result<Vec<_>>>()?;
        let mut sums = Vec::with_capacity(buckets.len());
        for (ReduceScatter { cut, .. }, posted) in buckets.iter().zip(&posted) {
            // Also where nothing is owned: a rank that has posted has gathered the parameters that this one is about to update.
            let place = (self.rank, cut.of_rank(self.rank).len());
            sums.push(read_sums((backend, stream), posted, place, &mut self.cost.traffic)?);
        }
        let keys: Vec<_> = buckets.iter().map(|bucket| bucket.key).collect();
        let from = backend.record_timed(stream)?;
        let mut at_once = Vec::new();
        for (ReduceScatter { key, cut, mut out }, sums) in buckets.into_iter().zip(&sums) {
            let own = cut.of_rank(self.rank);
            if own.is_empty() {
                continue;
            }
            let nodes = self.schedule.sums(key.round as usize)?;
            let uses = sums.first().map_or(0, |first| first.uses.len());
            if let ([node], 1) = (&nodes[..], uses) {
                let terms = terms_of_use(&within(sums, *node), 0, &own)?;
                at_once.push(NodeSum { node: *node, terms, out });
                continue;
            }
            let elements = out.elements() / nodes.len();
            for (index, node) in nodes.into_iter().enumerate() {
                let out = out.reborrow().sub(index * elements, elements)?;
                let posted = within(sums, node);
                sum_uses(&mut self.along_tree, (backend, stream), node, &posted, &own, out)?;
            }
        }
        self.along_tree.sum_each(backend, stream, at_once)?;
        let read = self.cost.summed((backend, stream), from)?;
        for (key, posted) in keys.into_iter().zip(posted) {
            self.read.keep_sums(backend, &read, key.bucket, posted);
        }
        Ok(())
    }

    fn can_join(&mut self, key: Key) -> Result<bool> {
        self.inbox.has_sums(key)
    }

    fn updated(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        _cut: &Cut,
        values: Values<'_, B>,
    ) -> Result<()> {
        let values = values.share(backend, stream)?;
        self.post.updated(backend, stream, key, &values)
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        out: ValuesMut<'_, B>,
    ) -> Result<()> {
        let from = backend.record_timed(stream)?;
        let posted = self.inbox.updates(key)?;
        let (ranks, traffic) = ((0, self.rank), &mut self.cost.traffic);
        copy_updates((backend, stream), &posted, ranks, cut, out, traffic)?;
        self.read.keep_updates(backend, key, posted);
        self.cost.gathered((backend, stream), from)
    }
}
