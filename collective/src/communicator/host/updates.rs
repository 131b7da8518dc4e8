//! How what was updated comes to the ranks that hold it.

use std::ops::Range;

use tidemill_kernels::backend::Element;
use tidemill_kernels::{Backend, SliceMut};

use super::{Expected, Host, on_host};
use crate::chunk::Part;
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
        let readers = self.readers();
        if elements == 0 || readers.is_empty() {
            return Ok(());
        }
        let words = match &values {
            SharedValues::Fp32(values) => on_host((backend, stream), values, 0..elements)?,
            SharedValues::Rounded(values) => {
                words(&backend.to_vec(stream, values.slice(0, elements)?)?).into()
            }
        };
        let root = self.schedule.tree().root();
        self.send_values(&words, self.header(part_of_update(key), root, key.step), &readers)
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
            let ranks = (self.groups[self.group].start, self.rank);
            let (into, traffic) = (out.reborrow(), &mut self.spent.traffic);
            copy_updates((backend, stream), &told, ranks, cut, into, traffic)?;
            self.read.keep_updates(backend, key, told);
        }
        for source in self.sources() {
            let bytes = cut.of_rank(self.holders.place(source)).len() * bytes;
            match self.is_read_here(source) {
                true => self.spent.traffic.came(bytes),
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
        let expected = self.sources().into_iter().map(|source| {
            let Range { start, end } = cut.of_rank(holders.place(source));
            let elements = (end - start).div_ceil(of_word);
            Expected { source, part: part_of_update(key), node, elements, start }
        });
        let expected: Vec<_> = expected.filter(|expected| expected.elements > 0).collect();
        self.receive(key, What::Update, &expected, |index, start, words| {
            let from = &expected[index];
            let end = cut.of_rank(holders.place(from.source)).end;
            let at = from.start + start * of_word;
            let values: &[T] = bytemuck::cast_slice(words);
            let values = &values[..values.len().min(end - at)];
            Ok(backend.write(stream, out.reborrow().sub(at, values.len())?, values)?)
        })
    }

    /// To which workers this one sends what it has updated.
    fn readers(&self) -> Vec<usize> {
        match self.holders {
            Holders::EACH => {
                self.others().map(|group| self.counterpart(group, self.member())).collect()
            }
            holders => self.other_counterparts(holders).collect(),
        }
    }

    /// From which workers of other groups what they have updated comes here, or to another of this group that reads it for all.
    fn sources(&self) -> Vec<usize> {
        match self.holders {
            Holders::EACH => self.others().flat_map(|group| self.groups[group].clone()).collect(),
            holders => self.other_counterparts(holders).collect(),
        }
    }

    /// Whether what `source` has updated comes to this worker of its group.
    fn is_read_here(&self, source: usize) -> bool {
        let place = |group: &Range<usize>| group.contains(&source).then(|| source - group.start);
        let place = self.groups.iter().find_map(place).unwrap_or(0);
        self.holders != Holders::EACH || self.counterpart(self.group, place) == self.rank
    }

    fn other_counterparts(&self, holders: Holders) -> impl Iterator<Item = usize> + use<B> {
        let own = self.rank;
        holders.counterparts(own, self.ranks).filter(move |&rank| rank != own)
    }
}

pub(super) fn part_of_update(key: Key) -> Part {
    Part::Update { bucket: key.bucket, beside: key == key.beside() }
}
