//! Ranks that are threads of one process, which read each other's memory.
//!
//! An owner's kernel loads the memory of its peers directly and adds along the tree: nothing is staged, and every byte
//! crosses a link between devices once. Copies of what was updated are loads too.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::backend::TermValues;
use tidemill_kernels::{Backend, PeerAccess, SliceMut};

use super::along_tree::{AlongTree, Term};
use super::post::{Inbox, Key, OfMembers, Post, Read, Sums, Told, members};
use super::values::SharedValues;
use super::{
    Abort, Communicator, CommunicatorError, Cut, Result, Spent, Traffic, Values, ValuesMut,
};
use crate::lane_schedule::LaneSchedule;
use crate::tree::Node;

/// The end of one rank. Before it is dropped, the device streams that it was used with must have run: what they read is then
/// given back.
pub struct Threads<B: Backend> {
    rank: usize,
    ranks: usize,
    schedule: Arc<LaneSchedule>,
    post: Post<B>,
    inbox: Inbox<B>,
    along_tree: AlongTree<B>,
    read: Read<B>,
    spent: Spent<B>,
}

/// Sees to it that each of `backends`, which are those of ranks from `first_rank` on, reads the memory of all.
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
            read: Read::new(),
            spent: Spent::default(),
        };
        Ok(members(0, ranks, schedule).into_iter().enumerate().map(end).collect())
    }
}

/// Sums `told`, in order, of every use over `node`: the elements `own` of the bucket, one use after the other.
pub(super) fn sum_uses<B: Backend>(
    along_tree: &mut AlongTree<B>,
    (backend, stream): (&B, &mut B::DeviceStream),
    node: Node,
    told: &[&Sums<B>],
    own: &Range<usize>,
    mut out: SliceMut<'_, B, f32>,
) -> Result<()> {
    let uses = told.first().map_or(0, |first| first.uses.len());
    for index in 0..uses {
        let mut terms: Vec<Term<'_, B>> = Vec::with_capacity(told.len());
        for sums in told {
            let values = sums.uses[index].slice(own.start, own.len())?;
            terms.push((sums.node, TermValues::Buffer(values)));
        }
        let out = out.reborrow().sub(index * own.len(), own.len())?;
        along_tree.sum(backend, stream, node, &terms, out)?;
    }
    Ok(())
}

/// What the members of a group have told, in the order of lanes: what is enqueued on `stream` from now on may read it. `traffic`
/// notes what member `member` reads of the others, which are the `elements` that it owns.
pub(super) fn read_sums<'a, B: Backend>(
    (backend, stream): (&B, &mut B::DeviceStream),
    told: &'a OfMembers<Told<B>, B::Event>,
    (member, elements): (usize, usize),
    traffic: &mut Traffic,
) -> Result<Vec<&'a Sums<B>>> {
    let mut sums = Vec::new();
    for (peer, (of_peer, ready)) in told.iter().enumerate() {
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

/// Copies what the members of a group, of which rank `first` is the first, have updated of a bucket to its place in `out`; but
/// for `rank`, which has its own there. Each begins with the member behind it: began all with the first, its link would carry
/// what all receive, while the others' were idle.
pub(super) fn copy_updates<B: Backend>(
    (backend, stream): (&B, &mut B::DeviceStream),
    told: &OfMembers<SharedValues<B>, B::Event>,
    (first, rank): (usize, usize),
    cut: &Cut,
    mut out: ValuesMut<'_, B>,
    traffic: &mut Traffic,
) -> Result<()> {
    let members = told.len();
    for member in (1..members).map(|further| (rank - first + further) % members) {
        let ((values, ready), range) = (&told[member], cut.of_rank(first + member));
        if range.is_empty() {
            continue;
        }
        backend.wait_for(stream, ready)?;
        traffic.read(range.len() * out.element_bytes());
        out.reborrow().copy(backend, stream, range, (values, 0))?;
    }
    Ok(())
}

/// Those of `told` whose lanes are of `node`.
pub(super) fn within<'a, B: Backend>(told: &[&'a Sums<B>], node: Node) -> Vec<&'a Sums<B>> {
    told.iter().filter(|sums| node.holds(sums.node)).copied().collect()
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

    fn spent(&mut self) -> Spent<B> {
        std::mem::take(&mut self.spent)
    }

    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let told = self.inbox.sums(key)?;
        let own = cut.of_rank(self.rank);
        // Also where nothing is owned: a rank that has posted has gathered what this one is about to update.
        let place = (self.rank, own.len());
        let sums = read_sums((backend, stream), &told, place, &mut self.spent.traffic)?;
        let from = backend.record_timed(stream)?;
        if !own.is_empty() {
            let nodes = self.schedule.sums(key.round as usize)?;
            let elements = out.elements() / nodes.len();
            for (index, node) in nodes.into_iter().enumerate() {
                let out = out.reborrow().sub(index * elements, elements)?;
                let told = within(&sums, node);
                sum_uses(&mut self.along_tree, (backend, stream), node, &told, &own, out)?;
            }
        }
        let read = self.spent.summed((backend, stream), from)?;
        self.read.keep_sums(backend, &read, key.bucket, told);
        Ok(())
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
        let told = self.inbox.updates(key)?;
        let (ranks, traffic) = ((0, self.rank), &mut self.spent.traffic);
        copy_updates((backend, stream), &told, ranks, cut, out, traffic)?;
        self.read.keep_updates(backend, key, told);
        self.spent.gathered((backend, stream), from)
    }
}
