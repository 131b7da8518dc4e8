//! Ranks of several processes, whose bytes go through the host's memory and timely's connections.
//!
//! Workers that read each other's memory are a *group*: usually those of a process. A group's lanes are summed before anything
//! leaves it, and each update from elsewhere comes to it once, for any number of workers: 8 workers in 2 processes send as many bytes
//! as 2 workers in 2 processes. A worker exchanges bytes with one worker of each other group: the one at its own place there.
//! Where the workers of a process hold the parameters together, updates go from each to its counterparts alone.
//!
//! The groups of a *host* do the same once more, so that the network carries no more than for one process a host ([`Topology`]):
//!
//! | | of this host | of another host |
//! |---|---|---|
//! | sums of a group go | to their owner | to the owner's relay on this host, which sums them and sends one part a node of the host's lanes |
//! | an update goes | to each group | to the owner's relay there, which passes it on to each other group of its host |
//!
//! A relay passes chunks on while it sums or gathers the same bucket itself. All ranks go through the buckets in one order, so the
//! passed chunks are in that order too; as they leave later than the relay's own, they wait in a line of their own.

mod sums;
mod updates;

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::{Backend, HostView, Shared, SliceMut};

use super::along_tree::AlongTree;
use super::post::{ArrivalKind, HeldPosts, Inbox, Key, Post, members};
use super::threads::check_reach;
use super::{
    Abort, CommunicationCost, Communicator, CommunicatorError, Cut, Holders, Result, Topology,
    Values, ValuesMut,
};
use crate::carry::{Courier, Outgoing, courier};
use crate::chunk::{Chunk, ChunkHeader, Part};
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;
use crate::node::Node;
use crate::plan::CHUNK_ELEMENTS;

/// Chunks that are handed over together: few enough that others begin with them soon, and many enough that few messages wake a thread.
const CHUNKS_PER_MESSAGE: usize = 16;

/// The end of one rank. [`courier`](Communicator::courier) gives the chunks that have to be [carried](crate::carry::Carry) for it. Before it
/// is dropped, the device stream that it was used with must have run.
pub struct Host<B: Backend> {
    rank: usize,
    ranks: usize,
    schedule: Arc<LaneSchedule>,
    topology: Topology,
    /// The group of this rank, and its host.
    group: usize,
    host: usize,
    holders: Holders,
    post: Post<B>,
    inbox: Inbox<B>,
    /// The line of this rank's own chunks, and that of chunks that it passes on, where there are any.
    outgoing: Vec<Outgoing>,
    courier: Option<Courier>,
    along_tree: AlongTree<B>,
    /// Buffers for sums before they are sent, and for those that come.
    leaving: Option<B::Buffer<f32>>,
    received: Option<B::Buffer<f32>>,
    read: HeldPosts<B>,
    cost: CommunicationCost<B>,
}

impl<B: Backend> Host<B> {
    /// The ends of the ranks of group `group` of `topology`, whose devices are `backends`; they sum over the lanes of
    /// `schedule`, and `holders` hold the parameters: each worker, or those of a process, be they a group or several.
    ///
    /// # Errors
    /// A topology of other ranks than the backends or the schedule's workers, devices of a group that do not read each other's
    /// memory, or a device that fails.
    pub fn group(
        backends: &[&B],
        topology: &Topology,
        group: usize,
        schedule: &Arc<LaneSchedule>,
        holders: Holders,
    ) -> Result<Vec<Self>> {
        let ranks = topology.ranks();
        schedule.check_workers(ranks)?;
        let own = topology.groups().get(group).filter(|own| own.len() == backends.len());
        let other = CollectiveError::Topology { what: "the ranks of groups" };
        let own = own.ok_or(other)?.clone();
        check_reach(backends, own.start)?;
        let end = |(member, (post, inbox)): (usize, (Post<B>, Inbox<B>))| {
            let delivering = post.clone();
            let lines = if topology.has_relays() { 2 } else { 1 };
            let (outgoing, courier) =
                courier(lines, move |arrived| delivering.deliver(arrived, holders));
            Self {
                rank: own.start + member,
                ranks,
                schedule: Arc::clone(schedule),
                topology: topology.clone(),
                group,
                host: topology.host_of(own.start),
                holders,
                post,
                inbox,
                outgoing,
                courier: Some(courier),
                along_tree: AlongTree::new(),
                leaving: None,
                received: None,
                read: HeldPosts::new(),
                cost: CommunicationCost::default(),
            }
        };
        Ok(members(own.start, own.len(), schedule).into_iter().enumerate().map(end).collect())
    }

    /// The other groups of this worker's host.
    fn neighbours(&self) -> impl Iterator<Item = usize> + use<B> {
        let own = self.group;
        self.topology.groups_of(self.host).filter(move |&group| group != own)
    }

    /// The other hosts.
    fn other_hosts(&self) -> impl Iterator<Item = usize> + use<B> {
        let own = self.host;
        (0..self.topology.hosts()).filter(move |&host| host != own)
    }

    /// The ranks of this worker's group.
    fn members(&self) -> Range<usize> {
        self.topology.ranks_in(self.group)
    }

    /// Notes that `bytes` came from `source`, which is of another process.
    fn note_came(&mut self, source: usize, bytes: usize) {
        match self.topology.host_of(source) == self.host {
            true => self.cost.traffic.came(bytes),
            false => self.cost.traffic.came_from_host(bytes),
        }
    }

    fn send(&self, chunks: Vec<Chunk>) -> Result<()> {
        send(self.outgoing.first(), chunks)
    }

    /// Passes on chunks of others, or sums of them.
    fn pass_on(&self, chunks: Vec<Chunk>) -> Result<()> {
        send(self.outgoing.last(), chunks)
    }

    /// Sends `values` to each of `destinations`, in pieces.
    fn send_values(
        &self,
        values: &HostView<f32>,
        header: ChunkHeader,
        destinations: &[usize],
    ) -> Result<()> {
        let mut chunks = Vec::with_capacity(CHUNKS_PER_MESSAGE);
        for (piece, start) in (0..values.len()).step_by(CHUNK_ELEMENTS).enumerate() {
            let values = values.sub(start..values.len().min(start + CHUNK_ELEMENTS));
            for &destination in destinations {
                let (destination, chunk) = (destination as u32, piece as u32);
                let header = ChunkHeader { destination, chunk, ..header };
                chunks.push(Chunk::new(header, values.clone()));
            }
            if chunks.len() >= CHUNKS_PER_MESSAGE {
                self.send(std::mem::take(&mut chunks))?;
            }
        }
        self.send(chunks)
    }

    fn header(&self, part: Part, node: Node, step: u64) -> ChunkHeader {
        ChunkHeader { destination: 0, source: self.rank as u32, part, chunk: 0, node, step }
    }

    /// Takes the pieces of `expected` as they come, each once, and calls back with the index of the expected, the piece's beginning in
    /// it, and the piece.
    fn receive<P>(
        &mut self,
        key: Key,
        what: ArrivalKind,
        expected: &[Expected<P>],
        mut take: impl FnMut(&Self, usize, usize, &Chunk) -> Result<()>,
    ) -> Result<()> {
        let pieces = |expected: &Expected<P>| expected.elements.div_ceil(CHUNK_ELEMENTS);
        let mut missing: Vec<Vec<bool>> =
            expected.iter().map(|expected| vec![true; pieces(expected)]).collect();
        let mut left: usize = missing.iter().map(Vec::len).sum();
        while left > 0 {
            let arrived = self.inbox.arrived(key, what)?;
            let chunk = arrived.chunk();
            let header = *chunk.header()?;
            let rank = header.source as usize;
            let wrong = |wrong| what.wrong(rank, key, wrong);
            let is_of = |expected: &Expected<P>| {
                (expected.source, expected.part) == (rank, header.part)
                    && expected.node == header.node
            };
            let Some(index) = expected.iter().position(is_of) else {
                return Err(wrong("that this worker has not to get from it"));
            };
            let (piece, start) = (header.chunk as usize, header.chunk as usize * CHUNK_ELEMENTS);
            let elements = expected[index].elements.saturating_sub(start).min(CHUNK_ELEMENTS);
            match missing[index].get_mut(piece) {
                Some(missing @ true) if chunk.elements() == elements => *missing = false,
                Some(false) => return Err(wrong("twice")),
                _ => return Err(wrong("of another length")),
            }
            take(self, index, start, chunk)?;
            left -= 1;
        }
        self.inbox.close(key, what)
    }
}

fn send(line: Option<&Outgoing>, chunks: Vec<Chunk>) -> Result<()> {
    let sent = chunks.is_empty() || line.is_some_and(|line| line.send(chunks));
    sent.then_some(()).ok_or(CommunicatorError::Closed)
}

/// Elements `range` of shared memory, where the host reads them.
fn on_host<B: Backend>(
    (backend, stream): (&B, &mut B::DeviceStream),
    shared: &Shared<B, f32>,
    range: Range<usize>,
) -> Result<HostView<f32>> {
    match B::host_view(shared) {
        Some(values) => Ok(values.sub(range)),
        None => Ok(backend.to_vec(stream, shared.slice(range.start, range.len())?)?.into()),
    }
}

/// Chunks that are expected from a rank of another group.
struct Expected<P> {
    source: usize,
    part: Part,
    node: Node,
    elements: usize,
    /// Their use.
    place: P,
}

impl<B: Backend> Communicator<B> for Host<B> {
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

    fn courier(&mut self) -> Option<Courier> {
        self.courier.take()
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
        self.sum((backend, stream), key, cut, out)
    }

    fn updated(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        _cut: &Cut,
        values: Values<'_, B>,
    ) -> Result<()> {
        self.tell_update((backend, stream), key, values)
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
        self.bring_updates((backend, stream), key, cut, out)?;
        self.cost.gathered((backend, stream), from)
    }
}

#[cfg(test)]
mod tests;
