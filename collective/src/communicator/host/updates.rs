//! How what was updated comes to the ranks that hold it.

use std::ops::Range;

use tidemill_kernels::backend::Element;
use tidemill_kernels::{Backend, HostView, SliceMut};

use super::{Expected, Host, on_host};
use crate::chunk::{Chunk, ChunkHeader, Part};
use crate::communicator::post::{Key, What};
use crate::communicator::threads::copy_updates;
use crate::communicator::values::{SharedValues, words};
use crate::communicator::{Cut, Holders, Result, Values, ValuesMut};

impl<B: Backend> Host<B> {
    /// Tells what this worker has updated to those that read its memory, and sends it to those that do not.
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

    /// Brings what other workers have updated to `out`.
    pub(super) fn bring_updates(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        cut: &Cut,
        mut out: ValuesMut<'_, B>,
    ) -> Result<()> {
        let bytes = out.element_bytes();
        if self.holders == Holders::EACH {
            let told = self.inbox.updates(key)?;
            let ranks = (self.members().start, self.rank);
            let (into, traffic) = (out.reborrow(), &mut self.spent.traffic);
            copy_updates((backend, stream), &told, ranks, cut, into, traffic)?;
            self.read.keep_updates(backend, key, told);
        }
        for Source { owner, rank } in self.sources() {
            let bytes = cut.of_rank(self.holders.place(owner)).len() * bytes;
            match self.reader(rank) == self.rank {
                true => self.note_came(rank, bytes),
                false => self.spent.traffic.read(bytes),
            }
        }
        match out {
            ValuesMut::Rounded(out) => self.receive_updates((backend, stream), key, cut, out),
            ValuesMut::Fp32(out) => self.receive_updates((backend, stream), key, cut, out),
        }
    }

    /// What the ranks of other groups have updated.
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
        self.receive(key, What::Update, &expected, |host, index, start, chunk| {
            host.pass_on_update(chunk)?;
            let Range { start: first, end } = expected[index].place;
            let (at, words) = (first + start * of_word, chunk.values()?);
            let values: &[T] = bytemuck::cast_slice(&words);
            let values = &values[..values.len().min(end - at)];
            Ok(backend.write(stream, out.reborrow().sub(at, values.len())?, values)?)
        })
    }

    /// Passes what another host has sent to this worker, for its host, on to the others of the host that read it.
    fn pass_on_update(&self, chunk: &Chunk) -> Result<()> {
        let header = *chunk.header()?;
        let is_for_host = self.topology.host_of(header.source as usize) != self.host;
        // Where the members of a group read what one of them receives, that one passes it on.
        if !is_for_host || header.destination as usize != self.rank {
            return Ok(());
        }
        let mut readers = self.readers_here().peekable();
        if readers.peek().is_none() {
            return Ok(());
        }
        // A copy: the chunk is a part of what the network wants back.
        let words = HostView::from(chunk.values()?.into_owned());
        let chunks = readers.map(|reader| {
            let (destination, source) = (reader as u32, self.rank as u32);
            Chunk::new(ChunkHeader { destination, source, ..header }, words.clone())
        });
        self.pass_on(chunks.collect())
    }

    /// The workers of other groups of this host that are sent what this one has updated, or passes on.
    fn readers_here(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self.holders {
            Holders::EACH => {
                let counterpart = |group| self.topology.counterpart(group, self.rank);
                Box::new(self.neighbours().map(counterpart))
            }
            _ => Box::new(self.counterparts(self.host).filter(|&rank| rank != self.rank)),
        }
    }

    /// The workers of other hosts that are sent what this one has updated.
    fn relays(&self) -> impl Iterator<Item = usize> + '_ {
        self.other_hosts().filter_map(|host| self.relay(host, self.rank))
    }

    /// The worker of `host` that is sent what `owner` of another host has updated; `None` where none there reads it.
    fn relay(&self, host: usize, owner: usize) -> Option<usize> {
        if self.holders == Holders::EACH {
            return Some(self.topology.relay(host, owner));
        }
        let of_owner = self.counterparts(self.topology.host_of(owner));
        let place = of_owner.take_while(|&rank| rank != owner).count();
        let readers: Vec<_> = self.counterparts(host).collect();
        readers.get(place.checked_rem(readers.len())?).copied()
    }

    /// The ranks of `host` that hold what this one holds.
    fn counterparts(&self, host: usize) -> impl Iterator<Item = usize> + use<B> {
        let of_host = self.topology.ranks_of(host);
        let all = self.holders.counterparts(self.rank, self.ranks);
        all.filter(move |rank| of_host.contains(rank))
    }

    /// What comes to this worker, or to another of its group that receives it for all.
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

    /// The worker of this group that receives what `source`, of another group, sends of updates.
    fn reader(&self, source: usize) -> usize {
        match self.topology.host_of(source) == self.host {
            _ if self.holders != Holders::EACH => self.rank,
            true => self.topology.counterpart(self.group, source),
            false => self.topology.relay(self.host, source),
        }
    }
}

/// From where an update comes.
struct Source {
    /// Whose it is.
    owner: usize,
    /// What sends it: its owner, or the relay.
    rank: usize,
}

pub(super) fn part_of_update(key: Key, owner: usize) -> Part {
    Part::Update { bucket: key.bucket, beside: key == key.beside(), owner: owner as u32 }
}
