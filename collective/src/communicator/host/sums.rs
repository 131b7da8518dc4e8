//! The way of a bucket's sums to the owners of its parts.

use std::ops::Range;

use tidemill_kernels::backend::TermValues;
use tidemill_kernels::{Backend, MemoryPlace, Slice, SliceMut};

use super::{Expected, Host, on_host};
use crate::chunk::{Chunk, ChunkHeader, Part};
use crate::communicator::along_tree::AlongTree;
use crate::communicator::post::{ArrivalKind, Key, Sums};
use crate::communicator::threads::{read_sums, sum_uses, within};
use crate::communicator::{CommunicatorError, Cut, Result, reserve};
use crate::node::Node;
use crate::plan::CHUNK_ELEMENTS;

/// A part of a bucket whose sums are formed here, of this group's sums and of those that arrive: this rank's own part, or the part
/// of a rank of another host, to which the sums over this host's lanes are sent.
struct Target {
    owner: usize,
    /// The range of the bucket that it owns.
    own: Range<usize>,
    /// The nodes to sum over.
    nodes: Vec<Node>,
    /// Its terms among the expected chunks.
    terms: Range<usize>,
    /// The number of missing terms of each piece, indexed by node, use and piece.
    awaited: Vec<Vec<Vec<usize>>>,
}

/// A term of a target.
struct Term {
    /// Its target.
    target: usize,
    use_index: usize,
    /// Where it is kept until other terms have come; `None` where it is used as it comes.
    kept_at: Option<usize>,
}

/// The sums of one call.
struct Bucket {
    key: Key,
    uses: usize,
    /// Whether terms are read in the memory that they arrive in.
    is_in_place: bool,
    targets: Vec<Target>,
    expected: Vec<Expected<Term>>,
    /// Elements of terms that wait for others.
    waiting: usize,
}

impl Bucket {
    /// Adds the part of `owner`, summed over `nodes`: `sources` send their sums over nodes within. No chunk is awaited for a node
    /// that no source sends a part of.
    fn add(
        &mut self,
        (owner, own): (usize, Range<usize>),
        nodes: Vec<Node>,
        sources: &[(usize, Vec<Node>)],
    ) {
        let (target, first) = (self.targets.len(), self.expected.len());
        let sent = || sources.iter().flat_map(|(_, nodes)| nodes);
        let of_node = |node: &Node| sent().filter(|term| node.holds(**term)).count();
        let pieces = own.len().div_ceil(CHUNK_ELEMENTS);
        let awaited = nodes.iter().map(|node| vec![vec![of_node(node); pieces]; self.uses]);
        let awaited = awaited.collect();
        for &(source, ref of_source) in sources {
            for &node in of_source {
                let over = nodes[nodes.partition_point(|over| over.hi <= node.lo)];
                let is_in_place = self.is_in_place && of_node(&over) == 1;
                for use_index in 0..self.uses {
                    let part = part_of_sums(self.key, use_index, owner);
                    let kept_at = (!is_in_place).then_some(self.waiting);
                    self.waiting += if is_in_place { 0 } else { own.len() };
                    let place = Term { target, use_index, kept_at };
                    let elements = own.len();
                    self.expected.push(Expected { source, part, node, elements, place });
                }
            }
        }
        let terms = first..self.expected.len();
        self.targets.push(Target { owner, own, nodes, terms, awaited });
    }
}

fn part_of_sums(key: Key, use_index: usize, owner: usize) -> Part {
    let (use_index, owner) = (use_index as u16, owner as u32);
    Part::Gradient { bucket: key.bucket, use_index, owner }
}

impl<B: Backend> Host<B> {
    /// The sums of this worker's part of a bucket, in `out`; this worker also relays the sums of others.
    pub(super) fn sum(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let posted = self.inbox.sums(key)?;
        let (member, own) = (self.rank - self.members().start, cut.of_rank(self.rank));
        let place = (member, own.len());
        let sums = read_sums((backend, stream), &posted, place, &mut self.cost.traffic)?;
        let from = backend.record_timed(stream)?;
        let uses = posted[member].0.uses;
        self.send_sums((backend, stream), key, cut, &sums)?;
        let mut bucket = self.awaited(key, uses, cut, backend.memory() == MemoryPlace::Host)?;
        for &Expected { source, elements, .. } in &bucket.expected {
            self.note_came(source, elements * size_of::<f32>());
        }
        if let Some(target) = bucket.targets.iter().find(|target| target.owner == self.rank) {
            for (place, &node) in target.nodes.iter().enumerate() {
                // No chunk comes for a node whose lanes are all of this group.
                if target.awaited[place].iter().flatten().all(|&terms| terms == 0) {
                    let out = out.reborrow().sub(place * uses * own.len(), uses * own.len())?;
                    let posted = within(&sums, node);
                    sum_uses(&mut self.along_tree, (backend, stream), node, &posted, &own, out)?;
                }
            }
        }
        self.sum_what_comes((backend, stream), &mut bucket, &sums, out)?;
        let read = self.cost.summed((backend, stream), from)?;
        self.read.keep_sums(backend, &read, key.bucket, posted);
        Ok(())
    }

    /// Forms the sums of `bucket`, of `sums` of this group and of arriving chunks.
    fn sum_what_comes(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        bucket: &mut Bucket,
        sums: &[&Sums<B>],
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let Bucket { key, uses, targets, expected, waiting, .. } = bucket;
        let (key, uses, expected) = (*key, *uses, &*expected);
        let (mut received, mut leaving) = (self.received.take(), self.leaving.take());
        let into = reserve(&mut received, (backend, stream), *waiting)?;
        let mut along_tree = std::mem::replace(&mut self.along_tree, AlongTree::new());
        // A chunk is used when it comes, so that credit returns to its sender: where other terms are missing, it is copied.
        self.receive(key, ArrivalKind::Sums, expected, |host, arrived, start, chunk| {
            let Expected { node: of, place: Term { target, use_index, kept_at: at }, .. } =
                &expected[arrived];
            let Target { owner, own, nodes, terms, awaited } = &mut targets[*target];
            let values = chunk.values()?;
            let elements = values.len();
            if let Some(at) = at {
                let into = SliceMut::new(into, at + start, elements)?;
                backend.write(stream, into, &values)?;
            }
            let place = nodes.partition_point(|node| node.hi <= of.lo);
            let node = nodes[place];
            let left = &mut awaited[place][*use_index][start / CHUNK_ELEMENTS];
            *left -= 1;
            if *left > 0 {
                return Ok(());
            }
            // At once, while its terms are in the cache.
            let mut summed = Vec::new();
            for sums in sums.iter().filter(|sums| node.holds(sums.node)) {
                let values = sums.uses[*use_index].slice(own.start + start, elements)?;
                summed.push((sums.node, TermValues::Buffer(values)));
            }
            let is_of = |from: &&Expected<Term>| {
                from.place.use_index == *use_index && node.holds(from.node)
            };
            for from in expected[terms.clone()].iter().filter(is_of) {
                let values = match from.place.kept_at {
                    None => TermValues::Host(&values),
                    Some(at) => TermValues::Buffer(Slice::new(into, at + start, elements)?),
                };
                summed.push((from.node, values));
            }
            summed.sort_by_key(|(node, _)| *node);
            if *owner == host.rank {
                let at = (place * uses + use_index) * own.len() + start;
                let out = out.reborrow().sub(at, elements)?;
                return along_tree.sum(backend, stream, node, &summed, out);
            }
            let sum = if let [_one] = summed[..] {
                values.into_owned()
            } else {
                let sum = reserve(&mut leaving, (backend, stream), elements)?;
                let out = SliceMut::new(sum, 0, elements)?;
                along_tree.sum(backend, stream, node, &summed, out)?;
                backend.to_vec(stream, Slice::new(sum, 0, elements)?)?
            };
            let header = host.header(part_of_sums(key, *use_index, *owner), node, key.step);
            let (destination, piece) = (*owner as u32, (start / CHUNK_ELEMENTS) as u32);
            let header = ChunkHeader { destination, chunk: piece, ..header };
            host.pass_on(vec![Chunk::new(header, sum)])
        })?;
        (self.along_tree, self.received, self.leaving) = (along_tree, received, leaving);
        Ok(())
    }

    /// Sends the sums of this group to the owners in other groups with which this worker deals, or to their relays.
    fn send_sums(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        sums: &[&Sums<B>],
    ) -> Result<()> {
        let (members, round) = (self.members(), key.round as usize);
        let of_group = self.schedule.nodes(round, members.clone())?;
        let of_host = self.schedule.nodes(round, self.topology.ranks_of(self.host))?;
        for owner in (0..self.ranks).filter(|owner| !members.contains(owner)) {
            if cut.of_rank(owner).is_empty() {
                continue;
            }
            let via = self.relay_of_sums(owner);
            if via == self.rank {
                // Nodes with lanes of other groups of this host are sent once those sums have come.
                for &node in of_group.iter().filter(|node| of_host.contains(node)) {
                    self.send_sum((backend, stream), key, (cut, owner, owner), node, sums)?;
                }
            } else if !members.contains(&via)
                && self.topology.counterpart(self.group, via) == self.rank
            {
                for &node in &of_group {
                    self.send_sum((backend, stream), key, (cut, owner, via), node, sums)?;
                }
            }
        }
        Ok(())
    }

    /// The rank of this host to which sums for `owner` go: itself, or its relay.
    fn relay_of_sums(&self, owner: usize) -> usize {
        match self.topology.host_of(owner) == self.host {
            true => owner,
            false => self.topology.relay(self.host, owner),
        }
    }

    /// Sends the sums over `node` of the part of `owner` to `destination`.
    fn send_sum(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        (cut, owner, destination): (&Cut, usize, usize),
        node: Node,
        sums: &[&Sums<B>],
    ) -> Result<()> {
        let own = cut.of_rank(owner);
        let parts = within(sums, node);
        let uses = parts.first().map_or(0, |part| part.uses.len());
        if parts.len() != 1 {
            let buffer = reserve(&mut self.leaving, (backend, stream), uses * own.len())?;
            let out = SliceMut::new(buffer, 0, uses * own.len())?;
            sum_uses(&mut self.along_tree, (backend, stream), node, &parts, &own, out)?;
        }
        for index in 0..uses {
            let values = match (&parts[..], &self.leaving) {
                ([part], _) => on_host((backend, stream), &part.uses[index], own.clone())?,
                (_, Some(buffer)) => {
                    let sum = Slice::new(buffer, index * own.len(), own.len())?;
                    let sum = backend.share(stream, sum)?;
                    on_host((backend, stream), &sum, 0..own.len())?
                }
                (_, None) => return Err(CommunicatorError::Closed),
            };
            let header = self.header(part_of_sums(key, index, owner), node, key.step);
            self.send_values(&values, header, &[destination])?;
        }
        Ok(())
    }

    /// The chunks of a bucket of `uses` uses that this worker receives: for its own part, and for ranks of other hosts that it relays.
    fn awaited(&self, key: Key, uses: usize, cut: &Cut, is_in_place: bool) -> Result<Bucket> {
        let (targets, expected) = (Vec::new(), Vec::new());
        let mut bucket = Bucket { key, uses, is_in_place, targets, expected, waiting: 0 };
        let nodes = |ranks| self.schedule.nodes(key.round as usize, ranks);
        let mut neighbours = Vec::new();
        for group in self.neighbours() {
            let source = self.topology.counterpart(group, self.rank);
            neighbours.push((source, nodes(self.topology.ranks_in(group))?));
        }
        let own = cut.of_rank(self.rank);
        if !own.is_empty() {
            let mut sources = neighbours.clone();
            for host in self.other_hosts() {
                let source = self.topology.relay(host, self.rank);
                sources.push((source, nodes(self.topology.ranks_of(host))?));
            }
            bucket.add((self.rank, own), nodes(0..self.ranks)?, &sources);
        }
        let elsewhere = |rank: &usize| self.topology.host_of(*rank) != self.host;
        for owner in (0..self.ranks).filter(elsewhere) {
            let own = cut.of_rank(owner);
            if !own.is_empty() && self.relay_of_sums(owner) == self.rank {
                bucket.add((owner, own), nodes(self.topology.ranks_of(self.host))?, &neighbours);
            }
        }
        Ok(bucket)
    }
}
