//! Ranks that are threads of one process, which read each other's memory.
//!
//! An owner's kernel loads the memory of its peers directly and adds along the tree: nothing is staged, and every byte
//! crosses a link between devices once. Copies of what was updated are loads too.

use std::ops::Range;

use tidemill_kernels::backend::TermValues;
use tidemill_kernels::{Backend, PeerAccess, Slice, SliceMut};

use super::along_tree::{AlongTree, Term};
use super::post::{Inbox, Key, Post, Read, Sums, members};
use super::{Abort, Communicator, CommunicatorError, Cut, Result, Traffic};
use crate::tree::{Node, Tree};

/// The end of one rank. Before it is dropped, the device streams that it was used with must have run: what they read is then
/// given back.
pub struct Threads<B: Backend> {
    rank: usize,
    ranks: usize,
    tree: Tree,
    post: Post<B>,
    inbox: Inbox<B>,
    along_tree: AlongTree<B>,
    read: Read<B>,
    traffic: Traffic,
}

/// Asks that each of `backends`, in the order of ranks, reads the memory of all.
pub(super) fn check_reach<B: Backend>(backends: &[&B], first_rank: usize) -> Result<()> {
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
    /// The ends of ranks whose devices are `backends`, in order, which sum over the lanes of `tree`.
    ///
    /// # Errors
    /// [`CommunicatorError::OutOfReach`], or a device that fails.
    pub fn group(backends: &[&B], tree: Tree) -> Result<Vec<Self>> {
        check_reach(backends, 0)?;
        let ranks = backends.len();
        let end = |(rank, (post, inbox))| Self {
            rank,
            ranks,
            tree,
            post,
            inbox,
            along_tree: AlongTree::new(),
            read: Read::new(),
            traffic: Traffic::default(),
        };
        Ok(members(0, ranks).into_iter().enumerate().map(end).collect())
    }
}

/// Sums `nodes`, in order, of every use that `told` has, over `node`: the elements `own` of the bucket, one use after the other.
pub(super) fn sum_uses<B: Backend>(
    along_tree: &mut AlongTree<B>,
    (backend, stream): (&B, &mut B::DeviceStream),
    node: Node,
    nodes: &[&Sums<B>],
    own: &Range<usize>,
    mut out: SliceMut<'_, B, f32>,
) -> Result<()> {
    let uses = nodes.first().map_or(0, |first| first.uses.len());
    for index in 0..uses {
        let mut terms: Vec<Term<'_, B>> = Vec::with_capacity(nodes.len());
        for sums in nodes {
            let values = sums.uses[index].slice(own.start, own.len())?;
            terms.push((sums.node, TermValues::Buffer(values)));
        }
        let out = out.reborrow().sub(index * own.len(), own.len())?;
        along_tree.sum(backend, stream, node, &terms, out)?;
    }
    Ok(())
}

impl<B: Backend> Communicator<B> for Threads<B> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn post(&self) -> Post<B> {
        self.post.clone()
    }

    fn abort_handle(&self) -> Abort {
        self.post.abort_handle()
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        cut: &Cut,
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let told = self.inbox.sums(Key { step, bucket })?;
        let mut nodes = Vec::new();
        // Also where nothing is owned: a rank that has posted has gathered what this one is about to update.
        let (own, root) = (cut.of_rank(self.rank), self.tree.root());
        for (rank, (of_rank, ready)) in told.iter().enumerate() {
            backend.wait_for(stream, ready)?;
            if rank != self.rank {
                let uses = of_rank.iter().map(|sums| sums.uses.len());
                self.traffic.read(uses.sum::<usize>() * own.len());
            }
            nodes.extend(of_rank);
        }
        nodes.sort_by_key(|sums| sums.node);
        if !own.is_empty() {
            sum_uses(&mut self.along_tree, (backend, stream), root, &nodes, &own, out)?;
        }
        self.read.keep_sums(backend, bucket, told);
        Ok(())
    }

    fn updated(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: (u64, u32),
        _cut: &Cut,
        values: Slice<'_, B, f32>,
    ) -> Result<()> {
        let values = backend.share(stream, values)?;
        self.post.updated(backend, stream, key.into(), &values)
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        cut: &Cut,
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let told = self.inbox.updates(Key { step, bucket })?;
        for (rank, (values, ready)) in told.iter().enumerate() {
            let range = cut.of_rank(rank);
            if range.is_empty() || rank == self.rank {
                continue;
            }
            backend.wait_for(stream, ready)?;
            self.traffic.read(range.len());
            let out = out.reborrow().sub(range.start, range.len())?;
            backend.copy(stream, out, values.slice(0, range.len())?)?;
        }
        self.read.keep_updates(backend, bucket, told);
        Ok(())
    }
}
