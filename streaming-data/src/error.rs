//! The error of reading data sets, and of all else that is not preparing them: that has
//! [`PrepareError`](crate::prepare::PrepareError).
//!
//! A variant answers the caller's question: fix the input (a wrong file, index or setting), wait
//! for a later version (remote stores), or give up (the machine failed). Every message names the
//! file, and where there is one the row; the cause of a variant is its `source`, never repeated
//! inside the message, so that printing the chain gives one clear line.

use std::{io, path::PathBuf};

use crate::{hash::ContentHash, store::StoreFailure};

/// The errors between a folder of shards and a stream of samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A URL cannot be used.
    #[error("cannot use {text}: found {found}, expected {expected}")]
    Location {
        /// The URL, without parts that may be secret.
        text: String,
        /// The defect.
        found: String,
        /// The expected form.
        expected: String,
    },

    /// A remote store failed, or refused.
    #[error("cannot {action} {url} ({attempts} {})", if *.attempts == 1 { "attempt" } else { "attempts" })]
    Store {
        /// The attempted action, as a verb.
        action: &'static str,
        /// URL of the object or folder.
        url: String,
        /// Number of attempts.
        attempts: u32,
        /// Why the last attempt failed.
        #[source]
        source: StoreFailure,
    },

    /// The read was cancelled: its reader or decoder is gone.
    #[error("reading {url} was cancelled")]
    Cancelled {
        /// The object.
        url: String,
    },

    /// The cache of shards may not hold enough for the stream.
    #[error(
        "the limit of cache {path} is {limit_bytes} bytes, expected at least {needed_bytes}: {reason}",
        path = path.display()
    )]
    CacheLimit {
        /// The folder of the cache.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
        /// The smallest that can work.
        needed_bytes: u64,
        /// The settings and shards that make it so.
        reason: String,
    },

    /// Shards in use fill the cache.
    #[error(
        "no room for {bytes} bytes in cache {path}: its limit is {limit_bytes} bytes, \
         and what fills it is in use by this and other processes",
        path = path.display()
    )]
    CacheInUse {
        /// The folder of the cache.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
        /// Size of the shard that found no room.
        bytes: u64,
    },

    /// The path of a data set is not a folder.
    #[error("cannot open data set {path}: expected a folder, found {found}", path = path.display())]
    NotAFolder {
        /// The path as it was given.
        path: PathBuf,
        /// Its kind, or that there is nothing.
        found: &'static str,
    },

    /// The folder, or its index, lists no shard.
    #[error(
        "data set {path} has no samples: expected index.json or *.parquet files, found no shard",
        path = path.display()
    )]
    NoShards {
        /// The folder.
        path: PathBuf,
    },

    /// The operating system refused something.
    #[error("cannot {action} {path}", path = path.display())]
    Io {
        /// The attempted action, as a verb: `read`, `write`, `create` ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },

    /// A data set of a store is not complete: `prepare` has not put its index.
    #[error(
        "data set {path} is still being prepared, or its `prepare` ended before it was complete: wait \
         for it, or run it again",
        path = path.display()
    )]
    StillPreparing {
        /// The URL of the data set.
        path: PathBuf,
    },

    /// `index.json` is not the JSON that it should be.
    #[error("cannot parse index {path}", path = path.display())]
    IndexSyntax {
        /// The index.
        path: PathBuf,
        /// The place and the defect.
        #[source]
        source: serde_json::Error,
    },

    /// `index.json` was written in a format that this version does not know.
    #[error(
        "index {path} has format version {found}, expected at most {supported}: \
         read it with a newer version",
        path = path.display()
    )]
    IndexVersion {
        /// The index.
        path: PathBuf,
        /// The version it states.
        found: u64,
        /// The newest version known here.
        supported: u64,
    },

    /// A value in `index.json` cannot be.
    #[error("index {path}: {key} is {found}, expected {expected}", path = path.display())]
    IndexValue {
        /// The index.
        path: PathBuf,
        /// The key, as in `shards[3].file`.
        key: String,
        /// Its value.
        found: String,
        /// The expected value.
        expected: &'static str,
    },

    /// A shard that the index lists is not there.
    #[error("shard {path} is missing: the index lists it", path = path.display())]
    MissingShard {
        /// Where it should be.
        path: PathBuf,
    },

    /// A shard holds no row.
    #[error("shard {path} is empty: expected at least one row", path = path.display())]
    EmptyShard {
        /// The shard.
        path: PathBuf,
    },

    /// The size of a shard differs from the size in the index.
    #[error(
        "shard {path} has {found} bytes, expected {expected} as the index says: \
         it is truncated or was replaced",
        path = path.display()
    )]
    ShardBytes {
        /// The shard.
        path: PathBuf,
        /// Bytes according to the index.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },

    /// The number of rows of a shard differs from the number in the index.
    #[error(
        "shard {path} has {found} rows, expected {expected} as the index says",
        path = path.display()
    )]
    ShardSamples {
        /// The shard.
        path: PathBuf,
        /// Rows according to the index.
        expected: u64,
        /// Rows according to the footer.
        found: u64,
    },

    /// The content of a shard differs from the hash in the index.
    #[error(
        "shard {path} is damaged: its hash is {found}, expected {expected} as the index says",
        path = path.display()
    )]
    ShardHash {
        /// The shard.
        path: PathBuf,
        /// Hash according to the index.
        expected: ContentHash,
        /// Hash of the file.
        found: ContentHash,
    },

    /// The footer of a shard is not the one that it had when the data set was opened.
    #[error(
        "shard {path} changed since it was opened: the hash of its footer is {found}, \
         expected {expected}",
        path = path.display()
    )]
    ShardFooter {
        /// The shard.
        path: PathBuf,
        /// Hash when the data set was opened.
        expected: ContentHash,
        /// Hash now.
        found: ContentHash,
    },

    /// The footer of a shard differs from the hash in the index.
    #[error(
        "the footer of shard {path} is damaged: its hash is {found}, expected {expected} as the \
         index says",
        path = path.display()
    )]
    FooterHash {
        /// The shard.
        path: PathBuf,
        /// Hash according to the index.
        expected: ContentHash,
        /// Hash of the bytes that were read.
        found: ContentHash,
    },

    /// A row group of a shard differs from the hash in its footer.
    #[error(
        "row group {group} of shard {path} is damaged: its hash is {found}, expected {expected} as \
         the footer says",
        path = path.display()
    )]
    RowGroupHash {
        /// The shard.
        path: PathBuf,
        /// Which row group, from 0.
        group: usize,
        /// Hash according to the footer.
        expected: ContentHash,
        /// Hash of the bytes that were read.
        found: ContentHash,
    },

    /// A shard is not a Parquet file, or a damaged one.
    #[error("cannot {action} shard {path}: not a Parquet file, or a damaged one", path = path.display())]
    ShardFormat {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The shard.
        path: PathBuf,
        /// The error of the Parquet reader.
        #[source]
        source: parquet::errors::ParquetError,
    },

    /// The `tokens` column of a shard is missing or of another type.
    #[error("shard {path}: found {found}, expected {expected}", path = path.display())]
    Column {
        /// The shard.
        path: PathBuf,
        /// The content that was found.
        found: String,
        /// The expected content.
        expected: String,
    },

    /// A row is not `seq_len + 1` tokens long.
    #[error("shard {path}, row {row}: found {found} tokens, expected {expected}", path = path.display())]
    RowLength {
        /// The shard.
        path: PathBuf,
        /// The row within the shard, from 0.
        row: u64,
        /// `seq_len + 1`.
        expected: usize,
        /// Tokens in the row.
        found: usize,
    },

    /// A row, or a token of it, is null.
    #[error("shard {path}, row {row}: found a null, expected tokens only", path = path.display())]
    NullToken {
        /// The shard.
        path: PathBuf,
        /// The row within the shard, from 0.
        row: u64,
    },

    /// A token is not in the vocabulary.
    #[error(
        "shard {path}, row {row}: found token {token}, expected 0 to {last} (vocabulary of {vocab_size})",
        path = path.display(),
        last = vocab_size.saturating_sub(1)
    )]
    Token {
        /// The shard.
        path: PathBuf,
        /// The row within the shard, from 0.
        row: u64,
        /// The token.
        token: i128,
        /// Size of the vocabulary; 2^32 where the data set does not state one.
        vocab_size: u64,
    },

    /// The canonical order cannot be formed over these shards.
    #[error("cannot order the samples of {shards} shards: found {found}, expected {expected}")]
    Order {
        /// How many shards there are.
        shards: usize,
        /// The value that was found.
        found: String,
        /// The expected value.
        expected: &'static str,
    },

    /// Data sets cannot be mixed.
    #[error("cannot mix data sets: {part} has {found}, expected {expected}")]
    Mixture {
        /// The name of the part.
        part: String,
        /// The value that was found.
        found: String,
        /// The expected value.
        expected: String,
    },

    /// The identity of a stream has changed since its cursor was saved.
    #[error("cannot resume the data stream: {key} was {saved} when it was saved and is {now} now")]
    ResumeMismatch {
        /// The field that differs: `fingerprint`, `samples`, `seq_len`, `shuffle`, `window_samples`, `seed`,
        /// or something of a part of a mixture, as in `streams.web.share`.
        key: String,
        /// Its saved value.
        saved: String,
        /// Its new value.
        now: String,
    },

    /// A decoding thread panicked, which is a bug here or in a caller's plan of positions.
    #[error("a decoding thread panicked: {message}")]
    DecodingPanic {
        /// The message of the panic.
        message: String,
    },
}

impl DataError {
    /// Whether the same call may succeed another time though nothing is changed. A store that did not answer may; one that
    /// refuses, and a data set or a setting that is wrong, will be the same.
    ///
    /// Whether the operating system's answer ([`Io`](Self::Io)) may have passed, as far as this crate can tell: only its caller
    /// knows which paths were given by a user.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Store { source: StoreFailure::TooSlow(_), .. }
            | Self::Cancelled { .. }
            | Self::CacheInUse { .. }
            | Self::Io { .. }
            | Self::DecodingPanic { .. } => true,
            Self::Store { source, .. } => !source.is_final(),
            Self::Location { .. }
            | Self::CacheLimit { .. }
            | Self::NotAFolder { .. }
            | Self::NoShards { .. }
            | Self::StillPreparing { .. }
            | Self::IndexSyntax { .. }
            | Self::IndexVersion { .. }
            | Self::IndexValue { .. }
            | Self::MissingShard { .. }
            | Self::EmptyShard { .. }
            | Self::ShardBytes { .. }
            | Self::ShardSamples { .. }
            | Self::ShardHash { .. }
            | Self::ShardFooter { .. }
            | Self::FooterHash { .. }
            | Self::RowGroupHash { .. }
            | Self::ShardFormat { .. }
            | Self::Column { .. }
            | Self::RowLength { .. }
            | Self::NullToken { .. }
            | Self::Token { .. }
            | Self::Order { .. }
            | Self::Mixture { .. }
            | Self::ResumeMismatch { .. } => false,
        }
    }

    /// Wraps an error of the operating system; made for `map_err`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> DataError {
        let path = path.into();
        move |source| DataError::Io { action, path, source }
    }
}
