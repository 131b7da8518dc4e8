//! MosaicML's shards (MDS): a folder with an `index.json` and shards of samples, as
//! StreamingDataset reads them.
//!
//! A data set of text is documents; one of tokens (a column `tokens`, as LLM Foundry writes it) is
//! rows, which stay as they are. Only that one column is looked at. What holds pickled objects is
//! refused as a whole: to read them is to run their code.
//!
//! Such a data set is one thing, made by a program: a shard that is missing or differs from what the
//! index says is an error in any case.
//!
//! | module | holds |
//! |---|---|
//! | [`index`] | `index.json`, checked; which column is wanted |
//! | [`digest`] | the hashes that it states |
//! | [`offsets`] | where the samples of a shard are |
//! | [`shard`] | the samples of one shard, one after the other |
//! | [`tokens`] | arrays of numbers to tokens |

mod digest;
mod index;
mod offsets;
mod shard;
mod tokens;

use std::sync::Arc;

pub(crate) use self::index::MdsSet;
use self::{
    index::Wanted,
    shard::{OpenShard, ShardEntry},
    tokens::TokenSamples,
};
use super::{
    Documents, Limits, More, Next, Part, ReadFailure, ReadParts,
    values::{Texts, Values},
};
use crate::prepare::{DOCUMENT_BYTES_LIMIT, PrepareError, input::skip::Place};

/// Samples of a part, however short.
const PART_SAMPLES: usize = 1 << 16;

/// A data set being read.
pub(crate) struct MdsReader {
    set: Arc<MdsSet>,
    /// Tokens of each sample, where they are tokens.
    row_tokens: usize,
    /// The current shard.
    shard: usize,
    open: Option<OpenShard>,
    /// Bytes of the files of shards before that one.
    bytes_before: u64,
}

impl MdsReader {
    /// Begins with the first shard.
    pub(crate) fn new(set: Arc<MdsSet>, row_tokens: usize) -> MdsReader {
        MdsReader { set, row_tokens, shard: 0, open: None, bytes_before: 0 }
    }

    fn next(&self, part: Option<Part>, more: More) -> Next {
        let read = self.open.as_ref().map_or(0, OpenShard::read_bytes);
        Next { part, read_bytes: self.bytes_before + read, more }
    }
}

impl ReadParts for MdsReader {
    fn next_part(&mut self, limits: Limits) -> Result<Next, ReadFailure> {
        let set = Arc::clone(&self.set);
        let Some(entry) = set.shards.get(self.shard) else {
            return Ok(self.next(None, More::No));
        };
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(OpenShard::open(entry)?),
        };
        let mut values = Values::new(open.sample(), Place::Sample);
        let mut is_last = false;
        while values.value_bytes() < limits.part_bytes && values.len() < PART_SAMPLES {
            if !open.read_sample(&mut values, limits)? {
                is_last = true;
                break;
            }
        }
        let bytes = values.held_bytes();
        let part = (values.len() > 0).then(|| {
            let path = Arc::clone(&entry.path);
            let documents: Box<dyn Documents> = match entry.wanted {
                Wanted::Text => Box::new(Texts(values)),
                Wanted::Tokens(encoding) => Box::new(TokenSamples {
                    path: Arc::clone(&path),
                    values,
                    encoding,
                    row_tokens: self.row_tokens,
                }),
            };
            Part { path, bytes, documents }
        });
        if is_last {
            self.open = None;
            self.bytes_before += entry.bytes;
            self.shard += 1;
        }
        Ok(self.next(part, More::Yes))
    }
}

/// Tokens of the first sample; none where there is no sample.
///
/// # Errors
/// [`DataError`] where it cannot be read.
pub(crate) fn first_sample_tokens(set: &MdsSet) -> Result<Option<usize>, PrepareError> {
    let with_samples = |entry: &&ShardEntry| entry.samples > 0;
    let Some(entry) = set.shards.iter().find(with_samples) else { return Ok(None) };
    let Wanted::Tokens(encoding) = entry.wanted else { return Ok(None) };
    let mut open = OpenShard::open(entry)?;
    let mut values = Values::new(0, Place::Sample);
    let document_bytes = DOCUMENT_BYTES_LIMIT as usize;
    let limits = Limits { part_bytes: usize::MAX, document_bytes };
    open.read_sample(&mut values, limits)?;
    let samples = TokenSamples { path: Arc::clone(&entry.path), values, encoding, row_tokens: 0 };
    samples.first_length().map(Some)
}
