//! Tokens of documents out of the shards of the previous version.

use std::collections::BTreeSet;

use super::state::Version;
use crate::{data_set::index::ShardEntry, prepare::PrepareError};

/// The shards of a version, part by part.
pub(crate) struct FormerShards<'a> {
    version: &'a Version,
    /// Tokens of each part.
    part_tokens: &'a [u64],
    reuse: Reuse,
    /// The part whose tokens in no row were read last, with these tokens; then the part and row group read last.
    tail: Option<(usize, Vec<u32>)>,
    group: Option<((usize, usize), Vec<u32>)>,
    opened: BTreeSet<usize>,
}

/// Whether shards can stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// The same documents are the same file.
    Whole,
    /// Another program encoded them: only their tokens can be used.
    Tokens,
}

impl<'a> FormerShards<'a> {
    pub(crate) fn new(
        version: &'a Version,
        part_tokens: &'a [u64],
        reuse: Reuse,
    ) -> FormerShards<'a> {
        FormerShards {
            version,
            part_tokens,
            reuse,
            tail: None,
            group: None,
            opened: BTreeSet::new(),
        }
    }

    /// The shard of a part, if it may stay as it is where it has the same documents.
    pub(crate) fn reusable(&self, part: usize) -> Option<&'a ShardEntry> {
        let shard = self.version.index.shards.get(part);
        shard.filter(|_| self.reuse == Reuse::Whole)
    }

    /// How many shards were read.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.len() as u64
    }

    /// Tokens of a part.
    pub(crate) fn tokens_of(&self, part: usize) -> u64 {
        self.part_tokens[part]
    }

    /// Tokens of a part that are in no row.
    ///
    /// # Errors
    /// The errors of reading the state.
    pub(crate) fn tail(&mut self, part: usize) -> Result<&[u32], PrepareError> {
        if self.tail.as_ref().is_none_or(|(at, _)| *at != part) {
            self.tail = Some((part, self.version.part(part)?.tail));
        }
        Ok(&self.tail.as_ref().expect("it was just read").1)
    }

    /// Appends tokens of a part, in the order of the stream, starting at one of them: all up to `end`, or as many as
    /// one row group has.
    ///
    /// # Errors
    /// The errors of reading the shard or the state.
    pub(crate) fn read(
        &mut self,
        part: usize,
        from: u64,
        end: u64,
        tokens: &mut Vec<u32>,
    ) -> Result<u64, PrepareError> {
        let seq_len = self.version.data_set.seq_len() as u64;
        let samples = self.version.index.shards.get(part).map_or(0, |shard| shard.samples);
        let in_rows = if samples == 0 { 0 } else { samples * seq_len + 1 };
        if from >= in_rows {
            let (from, until) = ((from - in_rows) as usize, (end - in_rows) as usize);
            match self.tail(part)?.get(from..until) {
                Some(wanted) => tokens.extend_from_slice(wanted),
                None => return Err(self.too_few(part)),
            }
            return Ok(end);
        }
        // Row r has the tokens after r * seq_len, and the first row also the first token.
        let row = from.saturating_sub(1) / seq_len;
        let (group, first_row) = self.version.data_set.group_of(part, row)?;
        if self.group.as_ref().is_none_or(|(at, _)| *at != (part, group)) {
            self.opened.insert(part);
            let rows = self.version.data_set.group_tokens(part, group)?;
            let row_tokens = seq_len as usize + 1;
            let mut stream = Vec::with_capacity(rows.len());
            for (at, row) in rows.chunks_exact(row_tokens).enumerate() {
                stream.extend_from_slice(&row[usize::from(at > 0)..]);
            }
            self.group = Some(((part, group), stream));
        }
        let stream = &self.group.as_ref().expect("it was just read").1;
        let first = first_row * seq_len;
        let until = end.min(first + stream.len() as u64).min(in_rows);
        tokens.extend_from_slice(&stream[(from - first) as usize..(until - first) as usize]);
        Ok(until)
    }

    fn too_few(&self, part: usize) -> PrepareError {
        PrepareError::StateDamaged {
            path: self.version.path_of(&self.version.state.parts[part].file),
            found: "fewer tokens behind the rows".to_owned(),
            expected: "those of its documents".to_owned(),
        }
    }
}
