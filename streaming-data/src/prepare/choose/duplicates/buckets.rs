//! Which documents are not the first of a bucket.
//!
//! Entries of documents (bucket, number) come in any order. They are gathered up to a bound of memory, sorted, and
//! all entries except the first of each bucket are marked at once; the remaining entries go to a file. At the end
//! the files are merged, and of each bucket the first document stays. Nothing here depends on the bound, or on the
//! order, but the time.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufReader, BufWriter, Read, Seek, Write},
    mem,
};

/// Identity of a bucket, by which its entries are sorted.
pub(super) trait Key: Copy + Ord {
    /// Its bytes in a file.
    type Bytes: AsRef<[u8]> + AsMut<[u8]> + Default;

    fn to_bytes(self) -> Self::Bytes;
    fn from_bytes(bytes: Self::Bytes) -> Self;
}

impl Key for u64 {
    type Bytes = [u8; 8];

    fn to_bytes(self) -> [u8; 8] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 8]) -> u64 {
        u64::from_le_bytes(bytes)
    }
}

/// 128 bits in two parts, which need no more room than they have.
impl Key for [u64; 2] {
    type Bytes = [u8; 16];

    fn to_bytes(self) -> [u8; 16] {
        (u128::from(self[0]) << 64 | u128::from(self[1])).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 16]) -> [u64; 2] {
        let bits = u128::from_le_bytes(bytes);
        [(bits >> 64) as u64, bits as u64]
    }
}

/// An entry: a document is in a bucket.
type Entry<K> = (K, u64);

/// Buffer of a file while it is merged, and while it is written.
const BUFFER_BYTES: usize = 256 << 10;

/// Documents in their buckets.
#[derive(Debug)]
pub(super) struct Buckets<K> {
    entries: Vec<Entry<K>>,
    /// Entries that may be in memory.
    bound: usize,
    /// Files of entries that memory had no room for: each is sorted, with one entry for each bucket in it.
    files: Vec<File>,
}

impl<K: Key> Buckets<K> {
    /// Buckets whose entries take at most this memory, or the entries of a few documents.
    pub(super) fn new(memory_bytes: u64) -> Buckets<K> {
        let bound = memory_bytes / size_of::<Entry<K>>() as u64;
        let bound = usize::try_from(bound).unwrap_or(usize::MAX).max(64);
        Buckets { entries: Vec::new(), bound, files: Vec::new() }
    }

    /// Puts a document into a bucket. `not_first` is called with documents that are not the first of a bucket, of this
    /// or an earlier call, in any order and perhaps twice, each with a document that is before it in the bucket. Once
    /// the buckets are finished, these pairs connect all documents of a bucket.
    ///
    /// # Errors
    /// The error of a file that cannot be written.
    pub(super) fn insert(
        &mut self,
        bucket: K,
        document: u64,
        not_first: &mut dyn FnMut(u64, u64),
    ) -> io::Result<()> {
        if self.entries.len() >= self.bound {
            let firsts = self.firsts(not_first);
            self.files.push(write_sorted(&firsts)?);
            self.entries = firsts;
            self.entries.clear();
        }
        if self.entries.len() == self.entries.capacity() {
            // Doubling would hold three times the bound for a moment.
            let room = self.entries.len().clamp(1 << 10, 1 << 22);
            self.entries.reserve_exact(room.min(self.bound - self.entries.len()));
        }
        self.entries.push((bucket, document));
        Ok(())
    }

    /// Calls `not_first` for all documents that are not the first of a bucket and for which it was not called before.
    /// `go_on` is asked now and then.
    ///
    /// # Errors
    /// The error of a file that cannot be written or read, or of `go_on`.
    pub(super) fn finish<E: From<io::Error>>(
        mut self,
        not_first: &mut dyn FnMut(u64, u64),
        go_on: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let firsts = self.firsts(not_first);
        go_on()?;
        if self.files.is_empty() {
            return Ok(());
        }
        self.files.push(write_sorted(&firsts)?);
        drop(firsts);
        let mut files: Vec<_> = self
            .files
            .into_iter()
            .map(|file| BufReader::with_capacity(BUFFER_BYTES, file))
            .collect();
        // The smallest entry that each file has next.
        let mut next = BinaryHeap::new();
        for (at, file) in files.iter_mut().enumerate() {
            next.extend(read_entry::<K>(file)?.map(|entry| Reverse((entry, at))));
        }
        let mut last = None;
        let mut merged = 0_u64;
        while let Some(Reverse(((bucket, document), at))) = next.pop() {
            match last {
                Some((same, first)) if same == bucket => {
                    if first != document {
                        not_first(document, first);
                    }
                }
                _ => last = Some((bucket, document)),
            }
            next.extend(read_entry::<K>(&mut files[at])?.map(|entry| Reverse((entry, at))));
            merged += 1;
            if merged.is_multiple_of(1 << 20) {
                go_on()?;
            }
        }
        Ok(())
    }

    /// Takes the entries, sorted, and of each bucket the first; tells of the others.
    fn firsts(&mut self, not_first: &mut dyn FnMut(u64, u64)) -> Vec<Entry<K>> {
        let mut entries = mem::take(&mut self.entries);
        entries.sort_unstable();
        entries.dedup_by(|later, first| {
            let is_same = later.0 == first.0;
            if is_same && later.1 != first.1 {
                not_first(later.1, first.1);
            }
            is_same
        });
        entries
    }
}

/// A file without a name that has the entries, to be read from the beginning.
fn write_sorted<K: Key>(entries: &[Entry<K>]) -> io::Result<File> {
    let mut writer = BufWriter::with_capacity(BUFFER_BYTES, tempfile::tempfile()?);
    for (bucket, document) in entries {
        writer.write_all(bucket.to_bytes().as_ref())?;
        writer.write_all(&document.to_le_bytes())?;
    }
    let mut file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.rewind()?;
    Ok(file)
}

/// The next entry of a file, if it has one.
fn read_entry<K: Key>(file: &mut BufReader<File>) -> io::Result<Option<Entry<K>>> {
    use std::io::BufRead;
    if file.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let mut bucket = K::Bytes::default();
    let mut document = [0; 8];
    file.read_exact(bucket.as_mut())?;
    file.read_exact(&mut document)?;
    Ok(Some((K::from_bytes(bucket), u64::from_le_bytes(document))))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use super::*;
    use crate::prepare::choose::duplicates::shingles::mix;

    /// In which order documents come.
    #[derive(Clone, Copy, PartialEq)]
    enum Order {
        OfNumbers,
        Other,
    }

    /// Documents that are not first, in memory for `bound` entries.
    fn found<K: Key>(documents: &[Vec<K>], bound: usize, order: Order) -> BTreeSet<u64> {
        let is_ordered = order == Order::OfNumbers;
        let mut buckets = Buckets::new((bound * size_of::<Entry<K>>()) as u64);
        let mut found = BTreeSet::new();
        // In any order: each seventh of seven, then those before them.
        let order = (0..7).rev().flat_map(|first| (first..documents.len()).step_by(7));
        let in_order = (0..documents.len()).filter(|_| is_ordered);
        for document in order.filter(|_| !is_ordered).chain(in_order) {
            for &key in &documents[document] {
                let document = document as u64;
                buckets
                    .insert(key, document, &mut |document, _| _ = found.insert(document))
                    .unwrap();
                assert!(buckets.entries.len() <= bound.max(64));
            }
        }
        let mut found_last = Vec::new();
        let go_on = &mut || Ok::<_, io::Error>(());
        buckets.finish(&mut |document, _| found_last.push(document), go_on).unwrap();
        found.extend(found_last);
        found
    }

    #[test]
    fn the_bound_changes_nothing_and_the_definition_holds() {
        for seed in 0..20 {
            let mut state: u64 = seed;
            let mut below = |most: u64| {
                state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
                state % most
            };
            // Some buckets are of a single document, some of hundreds; a document may be in one twice.
            let documents: Vec<Vec<u64>> = (0..700)
                .map(|_| {
                    (0..below(6))
                        .map(|_| if below(3) == 0 { below(4) } else { below(3000) })
                        .collect()
                })
                .collect();
            let (mut seen, mut expected) = (HashSet::<u64>::new(), BTreeSet::new());
            for (number, buckets) in (0..).zip(&documents) {
                if buckets.iter().any(|bucket| seen.contains(bucket)) {
                    expected.insert(number);
                }
                seen.extend(buckets);
            }
            for bound in [64, 100, 999, 1 << 20] {
                for order in [Order::OfNumbers, Order::Other] {
                    assert_eq!(found(&documents, bound, order), expected, "{seed} {bound}");
                }
            }
            let wide: Vec<Vec<[u64; 2]>> = documents
                .iter()
                .map(|buckets| buckets.iter().map(|&bucket| [bucket % 2, bucket]).collect())
                .collect();
            assert_eq!(found(&wide, 70, Order::Other), expected, "{seed}");
        }
    }
}
