//! The way of updates to the ranks that hold the parameters.

use std::ops::Range;

use tidemill_kernels::backend::Element;
use tidemill_kernels::{Backend, HostView, SliceMut};

use super::{Expected, Host, on_host};
use crate::chunk::{Chunk, ChunkHeader, Part};
use crate::communicator::post::{ArrivalKind, Key};
use crate::communicator::threads::copy_updates;
use crate::communicator::values::{SharedValues, words};
use crate::communicator::{Cut, Holders, Result, Values, ValuesMut};

impl<B: Backend> Host<B> {
    /// Posts this worker's update to the workers that read its memory, and sends it to those that do not.
    pub(super) fn tell_update(
        &self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        values: Values<'_, B>,
    ) -> Result<()> {
        let elements = values.elements();
        let values = values.share(backend, stream)?;
        if self.holders == Holders::EACH {
            self.post.updated(backend, stream, key, &values)?;
        }
        let readers: Vec<_> = self.relays().chain(self.readers_here()).collect();
        if elements == 0 || readers.is_empty() {
            return Ok(());
        }
        let words = match &values {
            SharedValues::Fp32(values) => on_host((backend, stream), values, 0..elements)?,
            SharedValues::Rounded(values) => {
                words(&backend.to_vec(stream, values.slice(0, elements)?)?).into()
            }
        };
        let (root, part) = (self.schedule.tree().root(), part_of_update(key, self.rank));
        self.send_values(&words, self.header(part, root, key.step), &readers)
    }

    /// Copies the updates of other workers to `out`.
    pub(super) fn bring_updates(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        mut out: ValuesMut<'_, B>,
    ) -> Result<()> {
        let bytes = out.element_bytes();
        if self.holders == Holders::EACH {
            let posted = self.inbox.updates(key)?;
            let ranks = (self.members().start, self.rank);
            let (into, traffic) = (out.reborrow(), &mut self.cost.traffic);
            copy_updates((backend, stream), &posted, ranks, cut, into, traffic)?;
            self.read.keep_updates(backend, key, posted);
        }
        for Source { owner, rank } in self.sources() {
            let bytes = cut.of_rank(self.holders.place(owner)).len() * bytes;
            match self.reader(rank) == self.rank {
                true => self.note_came(rank, bytes),
                false => self.cost.traffic.read(bytes),
            }
        }
        match out {
            ValuesMut::Rounded(out) => self.receive_updates((backend, stream), key, cut, out),
            ValuesMut::Fp32(out) => self.receive_updates((backend, stream), key, cut, out),
        }
    }

    /// Receives the updates of the ranks of other groups.
    fn receive_updates<T: Element>(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        mut out: SliceMut<'_, B, T>,
    ) -> Result<()> {
        // Chunks hold words.
        let of_word = size_of::<f32>() / size_of::<T>();
        let (node, holders) = (self.schedule.tree().root(), self.holders);
        let expected = self.sources().into_iter().map(|Source { owner, rank: source }| {
            let place = cut.of_rank(holders.place(owner));
            let part = part_of_update(key, owner);
            Expected { source, part, node, elements: place.len().div_ceil(of_word), place }
        });
        let expected: Vec<_> = expected.filter(|expected| expected.elements > 0).collect();
        self.receive(key, ArrivalKind::Update, &expected, |host, index, start, chunk| {
            host.pass_on_update(chunk)?;
            let Range { start: first, end } = expected[index].place;
            let (at, words) = (first + start * of_word, chunk.values()?);
            let values: &[T] = bytemuck::cast_slice(&words);
            let values = &values[..values.len().min(end - at)];
            Ok(backend.write(stream, out.reborrow().sub(at, values.len())?, values)?)
        })
    }

    /// Passes a chunk that another host has sent to this worker, for its host, on to the others of the host that read it.
    fn pass_on_update(&self, chunk: &Chunk) -> Result<()> {
        let header = *chunk.header()?;
        let is_for_host = self.topology.host_of(header.source as usize) != self.host;
        // Where the members of a group read the chunks that one of them receives, that one passes them on.
        if !is_for_host || header.destination as usize != self.rank {
            return Ok(());
        }
        let mut readers = self.readers_here().peekable();
        if readers.peek().is_none() {
            return Ok(());
        }
        // A copy: the chunk would pin a slab of the network.
        let words = HostView::from(chunk.values()?.into_owned());
        let chunks = readers.map(|reader| {
            let (destination, source) = (reader as u32, self.rank as u32);
            Chunk::new(ChunkHeader { destination, source, ..header }, words.clone())
        });
        self.pass_on(chunks.collect())
    }

    /// The workers of other groups of this host to which this one sends its updates, or passes others on.
    fn readers_here(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self.holders {
            Holders::EACH => {
                let counterpart = |group| self.topology.counterpart(group, self.rank);
                Box::new(self.neighbours().map(counterpart))
            }
            _ => Box::new(self.counterparts(self.host).filter(|&rank| rank != self.rank)),
        }
    }

    /// The workers of other hosts to which this one sends its updates.
    fn relays(&self) -> impl Iterator<Item = usize> + '_ {
        self.other_hosts().filter_map(|host| self.relay(host, self.rank))
    }

    /// The worker of `host` to which updates of `owner` of another host are sent; `None` where none there reads them.
    fn relay(&self, host: usize, owner: usize) -> Option<usize> {
        if self.holders == Holders::EACH {
            return Some(self.topology.relay(host, owner));
        }
        let of_owner = self.counterparts(self.topology.host_of(owner));
        let place = of_owner.take_while(|&rank| rank != owner).count();
        let readers: Vec<_> = self.counterparts(host).collect();
        readers.get(place.checked_rem(readers.len())?).copied()
    }

    /// The ranks of `host` that hold the same parameters as this one.
    fn counterparts(&self, host: usize) -> impl Iterator<Item = usize> + use<B> {
        let of_host = self.topology.ranks_of(host);
        let all = self.holders.counterparts(self.rank, self.ranks);
        all.filter(move |rank| of_host.contains(rank))
    }

    /// The updates that come to this worker, or to another of its group that receives them for all.
    fn sources(&self) -> Vec<Source> {
        let own = match self.holders {
            Holders::EACH => self.members(),
            _ => self.rank..self.rank + 1,
        };
        let others = self.holders.counterparts(self.rank, self.ranks);
        let source = |owner| {
            let relay = match self.topology.host_of(owner) == self.host {
                true => None,
                false => self.relay(self.host, owner),
            };
            Source { owner, rank: relay.filter(|relay| !own.contains(relay)).unwrap_or(owner) }
        };
        others.filter(|owner| !own.contains(owner)).map(source).collect()
    }

    /// The worker of this group that receives the updates of `source`, of another group.
    fn reader(&self, source: usize) -> usize {
        match self.topology.host_of(source) == self.host {
            _ if self.holders != Holders::EACH => self.rank,
            true => self.topology.counterpart(self.group, source),
            false => self.topology.relay(self.host, source),
        }
    }
}

/// The origin of an update.
struct Source {
    /// The rank that made it.
    owner: usize,
    /// The rank that sends it: its owner, or the relay.
    rank: usize,
}

pub(super) fn part_of_update(key: Key, owner: usize) -> Part {
    Part::Update { bucket: key.bucket, beside: key == key.beside(), owner: owner as u32 }
}
