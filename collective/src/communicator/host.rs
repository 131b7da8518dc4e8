//! Ranks of several processes, whose bytes go through the host's memory and timely's connections.
//!
//! Workers that read each other's memory are a *group*: usually those of a process. A group's lanes are summed before anything
//! leaves it, and what was updated elsewhere comes to it once, whatever its number of workers: 8 workers in 2 processes send
//! what 2 workers in 2 processes send. Within a group each worker deals with as many of the others' workers as it can be one
//! of: the worker whose place in its group is the same. Where the workers of a process hold the parameters together, what is updated
//! goes from each to its counterparts alone.

mod updates;

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::backend::TermValues;
use tidemill_kernels::{Backend, HostView, MemoryPlace, Shared, Slice, SliceMut};

use super::along_tree::AlongTree;
use super::post::{Inbox, Key, Post, Read, Sums, What, members};
use super::threads::{check_reach, read_sums, sum_uses, within};
use super::{
    Abort, Communicator, CommunicatorError, Cut, Holders, Result, Spent, Values, ValuesMut, room,
};
use crate::carry::{Courier, Outgoing, courier};
use crate::chunk::{Chunk, ChunkHeader, Part};
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;
use crate::plan::CHUNK_ELEMENTS;
use crate::tree::Node;

/// Chunks that are handed over together: few enough that others work on them soon, but every message wakes a thread.
const CHUNKS_PER_MESSAGE: usize = 16;

/// The end of one rank. [`courier`](Communicator::courier) gives what has to be [carried](crate::carry::Carry) for it. Before it
/// is dropped, the device stream that it was used with must have run.
pub struct Host<B: Backend> {
    rank: usize,
    ranks: usize,
    schedule: Arc<LaneSchedule>,
    /// The ranks of each group, in order, and which of them is this one's.
    groups: Vec<Range<usize>>,
    group: usize,
    holders: Holders,
    post: Post<B>,
    inbox: Inbox<B>,
    outgoing: Outgoing,
    courier: Option<Courier>,
    along_tree: AlongTree<B>,
    /// Room for sums of this group before they leave, and for those of the others.
    leaving: Option<B::Buffer<f32>>,
    received: Option<B::Buffer<f32>>,
    read: Read<B>,
    spent: Spent<B>,
}

impl<B: Backend> Host<B> {
    /// The ends of the ranks of group `group` of `groups`, whose devices are `backends`; they sum over the lanes of
    /// `schedule`, and `holders` hold the parameters: each worker, or those of a process, be they a group or several.
    ///
    /// # Errors
    /// Groups that are not all ranks once, in order, or other than the backends or the schedule's workers, devices of a group that do
    /// not read each other's memory, or a device that fails.
    pub fn group(
        backends: &[&B],
        groups: &[Range<usize>],
        group: usize,
        schedule: &Arc<LaneSchedule>,
        holders: Holders,
    ) -> Result<Vec<Self>> {
        let ranks = groups.last().map_or(0, |last| last.end);
        let own = groups.get(group).filter(|own| own.len() == backends.len());
        let starts = groups.iter().map(|group| group.start);
        let ends = std::iter::once(0).chain(groups.iter().map(|group| group.end));
        let is_whole = starts.zip(ends).all(|(start, before)| start == before);
        let (Some(own), true) = (own, is_whole) else {
            let lanes = schedule.tree().lanes();
            return Err(CollectiveError::Workers { workers: ranks, lanes }.into());
        };
        schedule.check_workers(ranks)?;
        check_reach(backends, own.start)?;
        let end = |(member, (post, inbox)): (usize, (Post<B>, Inbox<B>))| {
            let delivering = post.clone();
            let (outgoing, courier) = courier(move |arrived| delivering.deliver(arrived, holders));
            Self {
                rank: own.start + member,
                ranks,
                schedule: Arc::clone(schedule),
                groups: groups.to_vec(),
                group,
                holders,
                post,
                inbox,
                outgoing,
                courier: Some(courier),
                along_tree: AlongTree::new(),
                leaving: None,
                received: None,
                read: Read::new(),
                spent: Spent::default(),
            }
        };
        Ok(members(own.start, own.len(), schedule).into_iter().enumerate().map(end).collect())
    }

    /// This worker's place in its group.
    fn member(&self) -> usize {
        self.rank - self.groups[self.group].start
    }

    /// The nodes of the lanes of group `group` in a round.
    fn nodes(&self, round: u32, group: usize) -> Result<Vec<Node>> {
        Ok(self.schedule.nodes(round as usize, self.groups[group].clone())?)
    }

    /// The other groups.
    fn others(&self) -> impl Iterator<Item = usize> + use<B> {
        let own = self.group;
        (0..self.groups.len()).filter(move |&group| group != own)
    }

    /// The rank of `group` that deals with a worker whose place in its own group is `member`.
    fn counterpart(&self, group: usize, member: usize) -> usize {
        let group = &self.groups[group];
        group.start + member % group.len()
    }

    fn send(&self, chunks: Vec<Chunk>) -> Result<()> {
        let sent = chunks.is_empty() || self.outgoing.send(chunks);
        sent.then_some(()).ok_or(CommunicatorError::Closed)
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

    /// Sends the sums of this group to those owners in other groups with which this worker deals.
    fn send_sums(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        Key { step, round, bucket }: Key,
        cut: &Cut,
        sums: &[&Sums<B>],
    ) -> Result<()> {
        let members = self.groups[self.group].len();
        let mut leaving = self.leaving.take();
        let nodes = self.nodes(round, self.group)?;
        let owners = self.others().flat_map(|group| self.groups[group].clone().enumerate());
        let owners: Vec<(usize, usize)> = owners.collect();
        for (place, owner) in owners {
            let own = cut.of_rank(owner);
            if own.is_empty() || place % members != self.member() {
                continue;
            }
            for &node in &nodes {
                let parts = within(sums, node);
                let uses = parts.first().map_or(0, |part| part.uses.len());
                if parts.len() != 1 {
                    let room = room(&mut leaving, (backend, stream), uses * own.len())?;
                    let out = SliceMut::new(room, 0, uses * own.len())?;
                    sum_uses(&mut self.along_tree, (backend, stream), node, &parts, &own, out)?;
                }
                for index in 0..uses {
                    let values = match (&parts[..], &leaving) {
                        ([part], _) => on_host((backend, stream), &part.uses[index], own.clone())?,
                        (_, Some(room)) => {
                            let sum = Slice::new(room, index * own.len(), own.len())?;
                            let sum = backend.share(stream, sum)?;
                            on_host((backend, stream), &sum, 0..own.len())?
                        }
                        (_, None) => return Err(CommunicatorError::Closed),
                    };
                    let part = Part::Gradient { bucket, use_index: index as u16 };
                    self.send_values(&values, self.header(part, node, step), &[owner])?;
                }
            }
        }
        self.leaving = leaving;
        Ok(())
    }

    fn header(&self, part: Part, node: Node, step: u64) -> ChunkHeader {
        ChunkHeader { destination: 0, source: self.rank as u32, part, chunk: 0, node, step }
    }

    /// Takes the pieces of `expected` as they come, each once: which of these it is of, where it begins in it, and its elements.
    fn receive(
        &mut self,
        key: Key,
        what: What,
        expected: &[Expected],
        mut write: impl FnMut(usize, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let pieces = |expected: &Expected| expected.elements.div_ceil(CHUNK_ELEMENTS);
        let mut missing: Vec<Vec<bool>> =
            expected.iter().map(|expected| vec![true; pieces(expected)]).collect();
        let mut left: usize = missing.iter().map(Vec::len).sum();
        while left > 0 {
            let arrived = self.inbox.arrived(key, what)?;
            let chunk = arrived.chunk();
            let header = *chunk.header()?;
            let rank = header.source as usize;
            let wrong = |wrong| what.wrong(rank, key, wrong);
            let is_of = |expected: &Expected| {
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
            write(index, start, &chunk.values()?)?;
            left -= 1;
        }
        self.inbox.close(key, what)
    }
}

/// Elements `range` of what is shared, where the host reads them.
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

/// What comes from a rank of another group.
struct Expected {
    source: usize,
    part: Part,
    node: Node,
    elements: usize,
    /// Where it is written.
    start: usize,
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
        let Key { round, bucket, .. } = key;
        let told = self.inbox.sums(key)?;
        let own = cut.of_rank(self.rank);
        let place = (self.member(), own.len());
        let sums = read_sums((backend, stream), &told, place, &mut self.spent.traffic)?;
        let from = backend.record(stream)?;
        self.send_sums((backend, stream), key, cut, &sums)?;
        if own.is_empty() {
            self.inbox.close(key, What::Sums)?;
            let read = self.spent.summed((backend, stream), from)?;
            self.read.keep_sums(backend, &read, bucket, told);
            return Ok(());
        }
        let nodes = self.schedule.sums(round as usize)?;
        let uses = (out.elements() / (nodes.len() * own.len())).max(1);
        let mut expected = Vec::new();
        for group in self.others() {
            let source = self.counterpart(group, self.member());
            for node in self.nodes(round, group)? {
                for index in 0..uses {
                    let part = Part::Gradient { bucket, use_index: index as u16 };
                    let start = expected.len() * own.len();
                    expected.push(Expected { source, part, node, elements: own.len(), start });
                }
            }
        }
        self.spent.traffic.came(expected.len() * own.len() * size_of::<f32>());
        let along_tree = &mut self.along_tree;
        let mut awaited = Vec::with_capacity(nodes.len());
        for (place, &node) in nodes.iter().enumerate() {
            let terms = expected.iter().filter(|from| node.holds(from.node)).count();
            // Of a node whose lanes are all of this group nothing comes.
            if terms == 0 {
                let out = out.reborrow().sub(place * uses * own.len(), uses * own.len())?;
                let told = within(&sums, node);
                sum_uses(along_tree, (backend, stream), node, &told, &own, out)?;
            }
            // By use and piece: how many of its terms have not come.
            let pieces = vec![terms / uses; own.len().div_ceil(CHUNK_ELEMENTS)];
            awaited.push(vec![pieces; uses]);
        }
        // A chunk is used when it comes, so that its sender gets credit back: where others are missing, it is copied.
        let is_alone =
            |node: &Node| expected.iter().filter(|from| node.holds(from.node)).count() <= uses;
        let is_read_in_place = nodes.iter().all(is_alone) && backend.memory() == MemoryPlace::Host;
        let elements = if is_read_in_place { 0 } else { expected.len() * own.len() };
        let mut received = self.received.take();
        let into = room(&mut received, (backend, stream), elements)?;
        let mut along_tree = std::mem::replace(&mut self.along_tree, AlongTree::new());
        self.receive(key, What::Sums, &expected, |arrived, start, values| {
            let (of, elements) = (expected[arrived].node, values.len());
            let index = arrived % uses;
            if !is_read_in_place {
                let at = expected[arrived].start + start;
                backend.write(stream, SliceMut::new(into, at, elements)?, values)?;
            }
            let place = nodes.partition_point(|node| node.hi <= of.lo);
            let node = nodes[place];
            let left = &mut awaited[place][index][start / CHUNK_ELEMENTS];
            *left -= 1;
            if *left > 0 {
                return Ok(());
            }
            // At once, while its terms are in the cache.
            let mut terms = Vec::with_capacity(sums.len() + expected.len() / uses);
            for sums in sums.iter().filter(|sums| node.holds(sums.node)) {
                let values = sums.uses[index].slice(own.start + start, elements)?;
                terms.push((sums.node, TermValues::Buffer(values)));
            }
            let of_use = expected.iter().skip(index).step_by(uses);
            for from in of_use.filter(|from| node.holds(from.node)) {
                let values = match is_read_in_place {
                    true => TermValues::Host(values),
                    false => TermValues::Buffer(Slice::new(into, from.start + start, elements)?),
                };
                terms.push((from.node, values));
            }
            terms.sort_by_key(|(node, _)| *node);
            let at = (place * uses + index) * own.len() + start;
            let out = out.reborrow().sub(at, elements)?;
            along_tree.sum(backend, stream, node, &terms, out)
        })?;
        self.along_tree = along_tree;
        self.received = received;
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
        let from = backend.record(stream)?;
        self.bring_updates((backend, stream), key, cut, out)?;
        self.spent.gathered((backend, stream), from)
    }
}

#[cfg(test)]
mod tests;
