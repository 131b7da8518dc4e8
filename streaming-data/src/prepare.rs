//! Documents to shards: files of text become a data set.
//!
//! Documents are taken in byte order of their paths, tokenized, and each ended with eos; the
//! stream of all their tokens is cut into rows of `seq_len + 1` tokens, each row beginning with the
//! last token of the row before, so that every token but the very first is predicted exactly once.
//! The remainder that fills no row is dropped and reported. Empty files are no documents.
//!
//! # Contract
//! - The output is the same to the byte for any number of workers: shards, `index.json` and
//!   `tokenizer.json` depend on the documents, the tokenizer and the settings alone.
//! - The output appears complete or not at all, and nothing is ever overwritten.
//! - A file that cannot be read or is not UTF-8 enters the stream not at all; it is skipped and
//!   named in the report, or an error ([`Strictness`]).
//! - Memory is bounded by the number of workers, whatever the input's size: documents are read
//!   ahead up to a bound in bytes, large ones in pieces (where the tokenizer allows it), and shards
//!   leave as they grow. Only the list of paths grows with the input.
//!
//! | module | holds |
//! |---|---|
//! | `documents` | which files are documents, and in which order |
//! | `tokenize`, `byte_tokenizer` | [`Tokenize`], [`ByteTokenizer`] |
//! | `text` | reading UTF-8, whole or in pieces |
//! | `plan`, `job`, `in_order`, `pipeline` | what to read next; threads; and order again |
//! | `pack` | the stream cut into rows |
//! | `shard` | rows to Parquet |
//! | `output` | the folder that appears when it is complete |

mod byte_tokenizer;
mod documents;
mod in_order;
mod job;
mod output;
mod pack;
mod pipeline;
mod plan;
mod shard;
mod text;
mod tokenize;

use std::{num::NonZeroUsize, ops::ControlFlow, path::PathBuf};

pub use self::{
    byte_tokenizer::ByteTokenizer,
    text::{SkipReason, SkippedDocument},
    tokenize::{Pieces, Tokenize, TokenizeError},
};
use self::{
    documents::find_documents,
    job::{Bounds, Work},
    output::OutputFolder,
    pack::Cut,
    shard::{ShardFormat, TOKEN_BYTES, encoding_error, shard_file},
};
use crate::{
    error::DataError,
    hash::HASH_ALGORITHM,
    index::{FORMAT_VERSION, INDEX_FILE, Index},
};

/// Name of the tokenizer's file beside the index.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Which files of an input folder are documents, where nothing else is said.
pub const DEFAULT_GLOB: &str = "**/*.txt";

/// Tokens of a row group, decoded: small enough that one sample alone is cheap to read, large
/// enough that compression and the footer do not matter.
const ROW_GROUP_BYTES: usize = 1 << 20;

/// Row groups of a shard by default: 64 MiB of tokens, decoded.
const SHARD_ROW_GROUPS: usize = 64;

/// Documents above this are read in pieces.
const PIECE_BYTES: u64 = 512 << 10;

/// What texts may take in memory on their way to the file, for each worker.
const HELD_BYTES_PER_WORKER: u64 = 32 << 20;

/// What to prepare.
#[derive(Debug, Clone)]
pub struct PrepareSettings {
    /// Files, each a document, and folders, searched with their subfolders (symbolic links are
    /// followed) for files whose path below the folder matches `glob`. A file is a document once,
    /// however many paths lead to it; the smallest of the paths counts.
    pub inputs: Vec<PathBuf>,
    /// The folder that is to be the data set: missing or empty.
    pub output: PathBuf,
    /// Which files of input folders are documents: `*` within a folder, `**` across folders.
    pub glob: String,
    /// Predicted tokens per sample; a row has one token more. Below 2^31 - 1.
    pub seq_len: NonZeroUsize,
    /// Threads that read, tokenize and encode, beside the calling one, which writes.
    pub workers: NonZeroUsize,
    /// Whether files that cannot be documents are an error.
    pub strictness: Strictness,
    /// Rows of each shard but the last. By default about 64 MiB of tokens, decoded.
    pub shard_samples: Option<NonZeroUsize>,
}

impl PrepareSettings {
    /// The settings with a default for all that has one: the glob [`DEFAULT_GLOB`], one worker,
    /// [`Strictness::Lenient`], shards of about 64 MiB.
    pub fn new(inputs: Vec<PathBuf>, output: PathBuf, seq_len: NonZeroUsize) -> PrepareSettings {
        PrepareSettings {
            inputs,
            output,
            glob: DEFAULT_GLOB.to_owned(),
            seq_len,
            workers: NonZeroUsize::MIN,
            strictness: Strictness::Lenient,
            shard_samples: None,
        }
    }
}

/// What becomes of files that cannot be read or are not UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strictness {
    /// They are skipped and named in the report.
    #[default]
    Lenient,
    /// The first is an error, and nothing is written.
    Strict,
}

/// How far `prepare` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Bytes of documents that are in the stream or were skipped.
    pub bytes_done: u64,
    /// Bytes of all documents that were found.
    pub bytes_total: u64,
    /// Documents in the stream.
    pub documents: u64,
    /// Rows written.
    pub samples: u64,
}

/// What was prepared.
#[derive(Debug)]
pub struct PrepareReport {
    /// Documents in the stream.
    pub documents: u64,
    /// Empty files, which are no documents.
    pub empty: u64,
    /// Paths to a document that was reached by another path as well.
    pub duplicates: u64,
    /// Files and folders that gave no document, in byte order of their paths.
    pub skipped: Vec<SkippedDocument>,
    /// Bytes of text of the documents.
    pub text_bytes: u64,
    /// Tokens of the stream, those that end documents included.
    pub tokens: u64,
    /// Tokens at the end of the stream that fill no row.
    pub dropped_tokens: u64,
    /// Rows written.
    pub samples: u64,
    /// Shards written.
    pub shards: u64,
    /// Bytes of all shards.
    pub shard_bytes: u64,
}

/// Prepares a data set; `progress` is told where it is after each text and each row group, and
/// breaks it off by its answer.
///
/// # Errors
/// - [`DataError::PrepareSetting`], [`DataError::Glob`], [`DataError::NoDocuments`],
///   [`DataError::OutputExists`]: the settings cannot be met.
/// - [`DataError::Document`] for the first file that is to be skipped, if that is an error.
/// - [`DataError::TooFewTokens`] when the documents do not fill a row.
/// - [`DataError::DocumentChanged`], [`DataError::Tokenize`], [`DataError::TokenizedToken`],
///   [`DataError::PreparingPanic`]: a document cannot be tokenized.
/// - [`DataError::Io`] for an input that does not exist and an output that cannot be written,
///   [`DataError::ShardEncoding`].
/// - [`DataError::Interrupted`] when `progress` answered [`ControlFlow::Break`].
///
/// After an error nothing of the output is left.
pub fn prepare(
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<PrepareReport, DataError> {
    let cut = cut(settings)?;
    check_tokenizer(tokenizer)?;
    // The inputs first: the output may lie within one, and what is written there is no input.
    let mut found = find_documents(&settings.inputs, &settings.glob)?;
    if settings.strictness == Strictness::Strict && !found.skipped.is_empty() {
        let SkippedDocument { path, reason } = found.skipped.remove(0);
        return Err(DataError::Document { path, reason });
    }
    let folder = OutputFolder::begin(&settings.output)?;
    let format = ShardFormat::new(cut.seq_len)
        .map_err(|error| encoding_error(&folder.path().join(shard_file(0)), error))?;
    let workers = settings.workers.get();
    let work = Work {
        documents: &found.documents,
        tokenizer,
        cut,
        format: &format,
        folder: folder.path(),
        strictness: settings.strictness,
        workers,
        bounds: Bounds {
            piece_bytes: PIECE_BYTES,
            held_bytes: HELD_BYTES_PER_WORKER.saturating_mul(workers as u64),
        },
    };
    let outcome = pipeline::run(&work, progress)?;
    let mut skipped = found.skipped;
    skipped.extend(outcome.skipped);
    skipped.sort_by(|a, b| documents::path_bytes(&a.path).cmp(documents::path_bytes(&b.path)));
    if outcome.shards.is_empty() {
        return Err(DataError::TooFewTokens {
            found: outcome.tokens,
            documents: outcome.documents,
            skipped: skipped.len() as u64,
            needed: cut.seq_len as u64 + 1,
        });
    }

    let tokenizer_json = tokenizer.tokenizer_json();
    let index = Index {
        format_version: FORMAT_VERSION,
        seq_len: cut.seq_len,
        vocab_size: tokenizer.vocab_size(),
        bos_token_id: tokenizer.bos_token_id(),
        eos_token_id: Some(tokenizer.eos_token_id()),
        pad_token_id: tokenizer.pad_token_id(),
        tokenizer_file: tokenizer_json.is_some().then(|| TOKENIZER_FILE.to_owned()),
        hash_algorithm: HASH_ALGORITHM.to_owned(),
        row_group_samples: cut.row_group_samples as u64,
        columns: vec![format.column()],
        shards: outcome.shards,
    };
    if let Some(json) = &tokenizer_json {
        folder.write(TOKENIZER_FILE, json.as_bytes())?;
    }
    folder.write(INDEX_FILE, &index.to_bytes())?;
    let beside = index.tokenizer_file.as_deref().into_iter().chain([INDEX_FILE]);
    folder.publish(index.shards.iter().map(|shard| shard.file.as_str()).chain(beside))?;
    Ok(PrepareReport {
        documents: outcome.documents,
        empty: outcome.empty,
        duplicates: found.duplicates,
        skipped,
        text_bytes: outcome.text_bytes,
        tokens: outcome.tokens,
        dropped_tokens: outcome.dropped_tokens,
        samples: index.samples(),
        shards: index.shards.len() as u64,
        shard_bytes: index.shards.iter().map(|shard| shard.bytes).sum(),
    })
}

/// How the stream is cut, for these settings.
fn cut(settings: &PrepareSettings) -> Result<Cut, DataError> {
    let seq_len = settings.seq_len.get();
    if seq_len >= i32::MAX as usize {
        return Err(DataError::PrepareSetting {
            key: "seq_len",
            found: seq_len as u64,
            expected: "1 to 2^31 - 2",
        });
    }
    let row_group_samples = (ROW_GROUP_BYTES / TOKEN_BYTES / (seq_len + 1)).max(1);
    let shard_samples = match settings.shard_samples {
        Some(samples) => samples.get(),
        None => row_group_samples * SHARD_ROW_GROUPS,
    };
    let row_group_samples = row_group_samples.min(shard_samples);
    Ok(Cut { seq_len, row_group_samples, shard_samples })
}

/// Whether an index can describe the tokenizer.
fn check_tokenizer(tokenizer: &dyn Tokenize) -> Result<(), DataError> {
    let vocab_size = tokenizer.vocab_size();
    if vocab_size == 0 || vocab_size > i32::MAX as u32 {
        return Err(DataError::PrepareSetting {
            key: "the tokenizer's vocabulary",
            found: u64::from(vocab_size),
            expected: "1 to 2^31 - 1 tokens",
        });
    }
    for (key, token) in [
        ("the tokenizer's bos token", tokenizer.bos_token_id()),
        ("the tokenizer's eos token", Some(tokenizer.eos_token_id())),
        ("the tokenizer's pad token", tokenizer.pad_token_id()),
    ] {
        if let Some(token) = token.filter(|&token| token >= vocab_size) {
            return Err(DataError::PrepareSetting {
                key,
                found: u64::from(token),
                expected: "a token of its vocabulary",
            });
        }
    }
    Ok(())
}
