//! Ranks of several processes, whose devices a library of the vendor connects: NCCL, or RCCL.
//!
//! The library moves bytes and adds nothing: each rank sends an owner the parts of its lanes that the owner needs, and the
//! owner's kernel adds them along the tree. So the sums are those of any other communicator, to the bit.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::backend::{Element, TermValues};
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId, GroupMember};
use tidemill_kernels::{Backend, Shared, Slice, SliceMut};

use super::along_tree::AlongTree;
use super::post::{Inbox, Key, Post, Read, members};
use super::values::SharedValues;
use super::{
    Abort, Communicator, CommunicatorError, Cut, Holders, Result, Spent, Values, ValuesMut, room,
};
use crate::lane_schedule::LaneSchedule;
use crate::tree::Node;

/// The end of one rank. Before it or what was sent is dropped, the device stream that it was used with must have run.
pub struct Nccl<B: Backend> {
    /// At which this rank's thread that computes tells the one that sums.
    post: Post<B>,
    inbox: Inbox<B>,
    member: Arc<GroupMember>,
    schedule: Arc<LaneSchedule>,
    holders: Holders,
    along_tree: AlongTree<B>,
    /// Room for what the other ranks send of a bucket.
    received: Option<B::Buffer<f32>>,
    /// What this rank has updated and not sent.
    updates: Vec<(Key, SharedValues<B>)>,
    read: Read<B>,
    spent: Spent<B>,
}

impl<B: Backend> Nccl<B> {
    /// The end of `rank` of `ranks`, whose device is `backend`, in the group `id`; they sum over the lanes of `schedule`, and `holders`
    /// hold the parameters.
    /// Begins to join: the first sum waits until all have.
    ///
    /// # Errors
    /// A schedule of another number of workers, a device whose memory is not its own, or what the library answers.
    pub fn join(
        backend: &B,
        library: &CollectiveLibrary,
        id: GroupId,
        (rank, ranks): (usize, usize),
        schedule: &Arc<LaneSchedule>,
        holders: Holders,
    ) -> Result<Self> {
        schedule.check_workers(ranks)?;
        let (post, inbox) = members(rank, 1, schedule).remove(0);
        let member = Arc::new(backend.join_group(library, id, (rank, ranks))?);
        Ok(Self {
            post,
            inbox,
            member,
            schedule: Arc::clone(schedule),
            holders,
            along_tree: AlongTree::new(),
            received: None,
            updates: Vec::new(),
            read: Read::new(),
            spent: Spent::default(),
        })
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

    fn schedule(&self) -> &LaneSchedule {
        &self.schedule
    }

    fn post(&self) -> Post<B> {
        self.post.clone()
    }

    fn abort_handle(&self) -> Abort {
        let (own, member) = (self.post.abort_handle(), GroupMember::abort_handle(&self.member));
        Box::new(move || {
            own();
            member();
        })
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
        let (rank, ranks) = (self.member.rank(), self.member.ranks());
        let Key { step, round, bucket } = key;
        let round = round as usize;
        let told = self.inbox.sums(key)?;
        let Some((of_rank, ready)) = told.first() else { return Err(CommunicatorError::Closed) };
        let parts = &of_rank.sums;
        let posted = parts.iter().map(|part| part.node);
        if !posted.eq(self.schedule.nodes(round, rank..rank + 1)?) {
            let (what, wrong) = ("the sums", "over other lanes than its own");
            return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
        }
        backend.wait_for(stream, ready)?;
        let from = backend.record(stream)?;
        let mut sends = Vec::new();
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let range = cut.of_rank(peer);
            if range.is_empty() {
                continue;
            }
            for index in 0..parts.first().map_or(0, |part| part.uses.len()) {
                for part in parts {
                    sends.push((peer, part.uses[index].slice(range.start, range.len())?));
                }
            }
        }
        let (own, nodes) = (cut.of_rank(rank), self.schedule.sums(round)?);
        // Where nothing is owned, nothing comes.
        let uses = out.elements() / (nodes.len() * own.len()).max(1);
        let (mut places, mut receives, mut end) = (Vec::new(), Vec::new(), 0);
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let of_peer = self.schedule.nodes(round, peer..peer + 1)?;
            for index in (0..uses).filter(|_| !own.is_empty()) {
                for &node in &of_peer {
                    let range = end..end + own.len();
                    end = range.end;
                    receives.push((peer, range.clone()));
                    places.push(Place { index, node, range });
                }
            }
        }
        self.spent.traffic.came(end * size_of::<f32>());
        let received = room(&mut self.received, (backend, stream), end)?;
        if !sends.is_empty() || !receives.is_empty() {
            let into = SliceMut::new(received, 0, end)?;
            backend.exchange(stream, &self.member, &sends, into, &receives)?;
        }
        let sums = nodes.iter().flat_map(|&node| (0..uses).map(move |index| (node, index)));
        for (place, (node, index)) in sums.enumerate().filter(|_| !own.is_empty()) {
            let mut terms = Vec::new();
            for part in parts.iter().filter(|part| node.holds(part.node)) {
                let values = part.uses[index].slice(own.start, own.len())?;
                terms.push((part.node, TermValues::Buffer(values)));
            }
            for place in
                places.iter().filter(|place| place.index == index && node.holds(place.node))
            {
                let from = Slice::new(&*received, place.range.start, place.range.len())?;
                terms.push((place.node, TermValues::Buffer(from)));
            }
            terms.sort_by_key(|(node, _)| *node);
            let out = out.reborrow().sub(place * own.len(), own.len())?;
            self.along_tree.sum(backend, stream, node, &terms, out)?;
        }
        let read = self.spent.summed((backend, stream), from)?;
        self.read.keep_sums(backend, &read, bucket, told);
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
        // It will be sent on the device stream on which it was enqueued.
        self.updates.push((key, values.share(backend, stream)?));
        Ok(())
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        out: ValuesMut<'_, B>,
    ) -> Result<()> {
        let from = backend.record(stream)?;
        let rank = self.member.rank();
        let place = self.updates.iter().position(|(of, _)| *of == key);
        let Some(place) = place else {
            let Key { step, bucket, .. } = key;
            let (what, wrong) = ("the update", "after it was to be gathered");
            return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
        };
        let (_, update) = self.updates.swap_remove(place);
        let bytes = out.element_bytes();
        let (member, holders) = (&*self.member, self.holders);
        let came = match (out, &update) {
            (ValuesMut::Rounded(out), SharedValues::Rounded(update)) => {
                between_counterparts((member, holders), (backend, stream), cut, update, out)?
            }
            (ValuesMut::Fp32(out), SharedValues::Fp32(update)) => {
                between_counterparts((member, holders), (backend, stream), cut, update, out)?
            }
            _ => return Err(CommunicatorError::OtherKind),
        };
        self.spent.traffic.came(came * bytes);
        self.spent.gathered((backend, stream), from)
    }
}

/// Sends `update` to all counterparts and receives theirs; answers how many elements came.
fn between_counterparts<B: Backend, T: Element>(
    (member, holders): (&GroupMember, Holders),
    (backend, stream): (&B, &mut B::DeviceStream),
    cut: &Cut,
    update: &Shared<B, T>,
    out: SliceMut<'_, B, T>,
) -> Result<usize> {
    let rank = member.rank();
    let own = cut.of_rank(holders.place(rank));
    let peers = holders.counterparts(rank, member.ranks()).filter(|&peer| peer != rank);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for peer in peers {
        if !own.is_empty() {
            sends.push((peer, update.slice(0, own.len())?));
        }
        let range = cut.of_rank(holders.place(peer));
        if !range.is_empty() {
            receives.push((peer, range));
        }
    }
    if !sends.is_empty() || !receives.is_empty() {
        backend.exchange(stream, member, &sends, out, &receives)?;
    }
    Ok(receives.iter().map(|(_, range)| range.len()).sum())
}
