//! Ranks of several processes, whose devices a library of the vendor connects: NCCL, or RCCL.
//!
//! The library moves bytes and adds nothing: the parts are sent to their owner, and its kernel adds them along the tree. So the sums
//! are the same, to the bit, as in any other communicator.
//!
//! The workers of a process read each other's memory ([`LocalRank`]). Their lanes are summed before anything leaves the process, and
//! each update from elsewhere comes to it once: each rank exchanges bytes with those at its place in the other processes, and the
//! ranks of a process read from each other the parts that came to one of them.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tidemill_kernels::backend::{Element, TermValues};
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId, GroupMember};
use tidemill_kernels::{Backend, Shared, Slice, SliceMut};

use super::along_tree::{AlongTree, Term};
use super::post::{HeldPosts, Inbox, Key, OfMembers, Post, PostedSums, Sums, members};
use super::threads::{check_reach, read_sums, sum_uses, within};
use super::values::SharedValues;
use super::{
    Abort, CommunicationCost, Communicator, CommunicatorError, Cut, Holders, Result, Values,
    ValuesMut, reserve,
};
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;
use crate::node::Node;

/// A worker's end among those of its process, which read each other's memory, before its device joins those of other processes.
pub struct LocalRank<B: Backend> {
    /// The ranks of the process, and this rank's place among them.
    ranks: Range<usize>,
    member: usize,
    post: Post<B>,
    inbox: Inbox<B>,
    /// For each rank of the process that has joined a group, the handle that ends its waits for other ranks. A device waits for
    /// the other devices of its process, so that none of them ends unless all do.
    joined: Arc<Mutex<Vec<Abort>>>,
}

impl<B: Backend> LocalRank<B> {
    /// The ranks from `first_rank` on, whose devices are `backends`, of a process, which sum over the lanes of `schedule`.
    ///
    /// # Errors
    /// [`CommunicatorError::OutOfReach`], or a device that fails.
    pub fn of_process(
        backends: &[&B],
        first_rank: usize,
        schedule: &Arc<LaneSchedule>,
    ) -> Result<Vec<Self>> {
        check_reach(backends, first_rank)?;
        let ranks = first_rank..first_rank + backends.len();
        let joined = Arc::default();
        let end = |(member, (post, inbox))| {
            let (ranks, joined) = (ranks.clone(), Arc::clone(&joined));
            Self { ranks, member, post, inbox, joined }
        };
        Ok(members(first_rank, backends.len(), schedule).into_iter().enumerate().map(end).collect())
    }

    /// A rank that does not read the memory of the others of its process, and is sent their bytes.
    pub fn alone(rank: usize, schedule: &Arc<LaneSchedule>) -> Self {
        let (post, inbox) = members(rank, 1, schedule).remove(0);
        Self { ranks: rank..rank + 1, member: 0, post, inbox, joined: Arc::default() }
    }
}

/// The end of one rank. Before it or a buffer that was sent is dropped, the device stream that it was used with must have run.
pub struct Nccl<B: Backend> {
    /// Its end among the ranks of its process.
    local: LocalRank<B>,
    member: Arc<GroupMember>,
    schedule: Arc<LaneSchedule>,
    holders: Holders,
    along_tree: AlongTree<B>,
    /// Buffers for this process's sums of a bucket before they are sent, and for the sums of other processes.
    leaving: Option<B::Buffer<f32>>,
    received: Option<B::Buffer<f32>>,
    /// Updates of this rank that are not sent yet.
    updates: Vec<(Key, SharedValues<B>)>,
    read: HeldPosts<B>,
    cost: CommunicationCost<B>,
}

impl<B: Backend> Nccl<B> {
    /// The end of `local` among `ranks`, whose device is `backend`, in the group `id`; they sum over the lanes of `schedule`, and
    /// `holders` hold the parameters. Every process has as many ranks.
    /// Begins to join: the first sum waits until all have.
    ///
    /// # Errors
    /// A schedule of another number of workers, ranks that are no multiple of this process's, a device whose memory is not
    /// its own, or the library's error.
    pub fn join(
        backend: &B,
        (library, id): (&CollectiveLibrary, GroupId),
        (local, ranks): (LocalRank<B>, usize),
        schedule: &Arc<LaneSchedule>,
        holders: Holders,
    ) -> Result<Self> {
        schedule.check_workers(ranks)?;
        let of_process = local.ranks.len();
        if !ranks.is_multiple_of(of_process) || !local.ranks.start.is_multiple_of(of_process) {
            return Err(CollectiveError::Uneven { ranks, of_process }.into());
        }
        let rank = local.ranks.start + local.member;
        let member = Arc::new(backend.join_group(library, id, (rank, ranks))?);
        let abort = Box::new(GroupMember::abort_handle(&member));
        local.joined.lock().unwrap_or_else(PoisonError::into_inner).push(abort);
        Ok(Self {
            local,
            member,
            schedule: Arc::clone(schedule),
            holders,
            along_tree: AlongTree::new(),
            leaving: None,
            received: None,
            updates: Vec::new(),
            read: HeldPosts::new(),
            cost: CommunicationCost::default(),
        })
    }

    /// The ranks at the place of `rank` in the other processes.
    fn across(&self, rank: usize) -> impl Iterator<Item = usize> + use<B> {
        let of_process = self.local.ranks.len();
        let all = (rank % of_process..self.member.ranks()).step_by(of_process);
        all.filter(move |&peer| peer != rank)
    }

    /// The fewest nodes that make up the lanes of the process of `rank` in a round, whose sums leave the process.
    fn nodes_of_process(&self, round: usize, rank: usize) -> Result<Vec<Node>> {
        let of_process = self.local.ranks.len();
        let first = rank / of_process * of_process;
        Ok(self.schedule.nodes(round, first..first + of_process)?)
    }

    /// Checks that the ranks of this process have posted sums of their own lanes.
    fn check(&self, key: Key, posted: &OfMembers<PostedSums<B>, B::Event>) -> Result<()> {
        let Key { step, round, bucket } = key;
        for (rank, (of_rank, _)) in self.local.ranks.clone().zip(posted) {
            let posted = of_rank.sums.iter().map(|sums| sums.node);
            if !posted.eq(self.schedule.nodes(round as usize, rank..rank + 1)?) {
                let (what, wrong) = ("the sums", "over other lanes than its own");
                return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
            }
        }
        Ok(())
    }
}

/// The sums over a node that a process sends to the rank at the same place in another, of that rank's part.
struct Leaving<'a, B: Backend> {
    peer: usize,
    own: Range<usize>,
    /// Where they lie: in the memory of the rank that sends, or one use after the other in a buffer.
    lies: Lies<'a, B>,
}

enum Lies<'a, B: Backend> {
    Here(&'a Sums<B>),
    InRoom { start: usize, node: Node },
}

/// The sums over a node that a rank has received, one use after the other.
struct Came {
    node: Node,
    start: usize,
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
        self.local.post.clone()
    }

    fn abort_handle(&self) -> Abort {
        let (here, joined) = (self.local.post.abort_handle(), Arc::clone(&self.local.joined));
        Box::new(move || {
            here();
            let mut joined = joined.lock().unwrap_or_else(PoisonError::into_inner);
            joined.drain(..).for_each(|abort| abort());
        })
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
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let (rank, round) = (self.member.rank(), key.round as usize);
        let posted = self.local.inbox.sums(key)?;
        self.check(key, &posted)?;
        let (of_rank, _) = &posted[self.local.member];
        let (uses, own) = (of_rank.uses, cut.of_rank(rank));
        let peers: Vec<(usize, Range<usize>)> =
            self.across(rank).map(|peer| (peer, cut.of_rank(peer))).collect();
        let reads = own.len() + peers.iter().map(|(_, of_peer)| of_peer.len()).sum::<usize>();
        let place = (self.local.member, reads);
        let sums = read_sums((backend, stream), &posted, place, &mut self.cost.traffic)?;
        let from = backend.record_timed(stream)?;

        let (mut leaving, mut end) = (Vec::new(), 0);
        let nodes = self.nodes_of_process(round, rank)?;
        for (peer, of_peer) in peers.iter().filter(|(_, of_peer)| !of_peer.is_empty()) {
            for &node in &nodes {
                let lies = match of_rank.sums.iter().find(|sums| sums.node == node) {
                    Some(sums) => Lies::Here(sums),
                    None => {
                        let start = end;
                        end += uses * of_peer.len();
                        Lies::InRoom { start, node }
                    }
                };
                leaving.push(Leaving { peer: *peer, own: of_peer.clone(), lies });
            }
        }
        // Where nothing is owned, nothing comes.
        let (mut came, mut receives, mut coming) = (Vec::new(), Vec::new(), 0);
        for &(peer, _) in peers.iter().filter(|_| !own.is_empty()) {
            for node in self.nodes_of_process(round, peer)? {
                came.push(Came { node, start: coming });
                for _ in 0..uses {
                    receives.push((peer, coming..coming + own.len()));
                    coming += own.len();
                }
            }
        }
        let summed = reserve(&mut self.leaving, (backend, stream), end)?;
        for Leaving { own, lies, .. } in &leaving {
            if let Lies::InRoom { start, node } = *lies {
                let into = SliceMut::new(summed, start, uses * own.len())?;
                let posted = within(&sums, node);
                sum_uses(&mut self.along_tree, (backend, stream), node, &posted, own, into)?;
            }
        }
        let mut sends = Vec::with_capacity(leaving.len() * uses);
        for Leaving { peer, own, lies } in &leaving {
            for index in 0..uses {
                let values = match lies {
                    Lies::Here(sums) => sums.uses[index].slice(own.start, own.len())?,
                    Lies::InRoom { start, .. } => {
                        Slice::new(&*summed, start + index * own.len(), own.len())?
                    }
                };
                sends.push((*peer, values));
            }
        }

        self.cost.traffic.came(coming * size_of::<f32>());
        let received = reserve(&mut self.received, (backend, stream), coming)?;
        if !sends.is_empty() || !receives.is_empty() {
            let into = SliceMut::new(received, 0, coming)?;
            backend.exchange(stream, &self.member, &sends, into, &receives)?;
        }
        let over = self.schedule.sums(round)?;
        let over = over.iter().flat_map(|&node| (0..uses).map(move |index| (node, index)));
        for (place, (node, index)) in over.enumerate().filter(|_| !own.is_empty()) {
            let mut terms: Vec<Term<'_, B>> = Vec::new();
            for sums in within(&sums, node) {
                let values = sums.uses[index].slice(own.start, own.len())?;
                terms.push((sums.node, TermValues::Buffer(values)));
            }
            for came in came.iter().filter(|came| node.holds(came.node)) {
                let start = came.start + index * own.len();
                let values = Slice::new(&*received, start, own.len())?;
                terms.push((came.node, TermValues::Buffer(values)));
            }
            terms.sort_by_key(|(node, _)| *node);
            let out = out.reborrow().sub(place * own.len(), own.len())?;
            self.along_tree.sum(backend, stream, node, &terms, out)?;
        }
        let read = self.cost.summed((backend, stream), from)?;
        self.read.keep_sums(backend, &read, key.bucket, posted);
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
        // The update will be sent on the device stream on which it was enqueued.
        self.updates.push((key, values.share(backend, stream)?));
        Ok(())
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        mut out: ValuesMut<'_, B>,
    ) -> Result<()> {
        let from = backend.record_timed(stream)?;
        let rank = self.member.rank();
        let place = self.updates.iter().position(|(of, _)| *of == key);
        let Some(place) = place else {
            let Key { step, bucket, .. } = key;
            let (what, wrong) = ("the update", "after it was to be gathered");
            return Err(CommunicatorError::Posted { rank, what, bucket, step, wrong });
        };
        let (_, update) = self.updates.swap_remove(place);
        let bytes = out.element_bytes();
        // Where each rank holds all parameters, updates come to one rank of a process, and the others read them there.
        let is_of_process = self.holders == Holders::EACH && self.local.ranks.len() > 1;
        let peers: Vec<usize> = match is_of_process {
            true => self.across(rank).collect(),
            false => self.holders.counterparts(rank, self.member.ranks()).collect(),
        };
        let place_of = |rank| cut.of_rank(self.holders.place(rank));
        let own = place_of(rank);
        let receives = peers.iter().filter(|&&peer| peer != rank);
        let receives: Vec<_> = receives.map(|&peer| (peer, place_of(peer))).collect();
        let (member, through) = (&*self.member, (backend, &mut *stream));
        let came = match (out.reborrow(), &update) {
            (ValuesMut::Rounded(out), SharedValues::Rounded(update)) => {
                exchange_updates(member, through, (&own, update), out, receives)?
            }
            (ValuesMut::Fp32(out), SharedValues::Fp32(update)) => {
                exchange_updates(member, through, (&own, update), out, receives)?
            }
            _ => return Err(CommunicatorError::OtherKind),
        };
        self.cost.traffic.came(came * bytes);
        if is_of_process {
            self.gather_here((backend, stream), key, cut, out)?;
        }
        self.cost.gathered((backend, stream), from)
    }
}

impl<B: Backend> Nccl<B> {
    /// Copies to `out` the updates of a bucket that the other ranks of this process have: their own, and those that came to them.
    fn gather_here(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        mut out: ValuesMut<'_, B>,
    ) -> Result<()> {
        // The next update of this bucket comes after every rank of the process has posted its sums of the next step, and so after
        // these copies.
        let all = out.share(backend, stream)?;
        self.local.post.updated(backend, stream, key, &all)?;
        let posted = self.local.inbox.updates(key)?;
        // Each begins with the rank behind it, so that not all read the same at once.
        let (first, ranks) = (self.local.ranks.start, posted.len());
        let own = self.member.rank() - first;
        for index in (1..ranks).map(|further| (own + further) % ranks) {
            let (peer, (values, ready)) = (first + index, &posted[index]);
            backend.wait_for(stream, ready)?;
            for owner in self.across(peer).chain([peer]) {
                let range = cut.of_rank(owner);
                self.cost.traffic.read(range.len() * out.element_bytes());
                let from = range.start;
                out.reborrow().copy(backend, stream, range, (values, from))?;
            }
        }
        self.read.keep_updates(backend, key, posted);
        Ok(())
    }
}

/// Sends `update`, which is `own` of a bucket, to all of `receives`, and receives their updates; answers the number of elements that came.
fn exchange_updates<B: Backend, T: Element>(
    member: &GroupMember,
    (backend, stream): (&B, &mut B::DeviceStream),
    (own, update): (&Range<usize>, &Shared<B, T>),
    out: SliceMut<'_, B, T>,
    mut receives: Vec<(usize, Range<usize>)>,
) -> Result<usize> {
    let mut sends = Vec::new();
    for &(peer, _) in receives.iter().filter(|_| !own.is_empty()) {
        sends.push((peer, update.slice(0, own.len())?));
    }
    receives.retain(|(_, range)| !range.is_empty());
    if !sends.is_empty() || !receives.is_empty() {
        backend.exchange(stream, member, &sends, out, &receives)?;
    }
    Ok(receives.iter().map(|(_, range)| range.len()).sum())
}
