//! Errors between documents and a data set.

mod passing;

use std::{io, path::PathBuf};

use super::{BrokenReason, Parted, Place, SkipReason, TokenizeError};
use crate::{error::DataError, hash::ContentHash};

/// Why `prepare` ended without a data set.
///
/// Messages have the form of [`DataError`]'s: each names the file, and where there is one the
/// place in it; causes are not repeated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// Errors of files, stores and indexes, which occur elsewhere too.
    #[error(transparent)]
    Data(#[from] DataError),

    /// A setting of `prepare`, or a property of its tokenizer, cannot be.
    #[error("cannot prepare: {key} is {found}, expected {expected}")]
    Setting {
        /// Name of the setting or property.
        key: &'static str,
        /// Its value.
        found: u64,
        /// The expected value.
        expected: &'static str,
    },

    /// The pattern for the names of documents is not one.
    #[error("cannot parse glob {glob:?}")]
    Glob {
        /// The pattern.
        glob: String,
        /// The defect.
        #[source]
        source: globset::Error,
    },

    /// A name that is not one of a set of filters.
    #[error("found filter {name:?}, expected one of {known}, or the path of a .toml file")]
    UnknownFilter {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },

    /// A file that should hold filters holds none, or wrong ones.
    #[error("filter file {path}{place}: {problem}", path = path.display())]
    FilterFile {
        /// The file.
        path: PathBuf,
        /// The line, behind a comma, where it is known.
        place: String,
        /// The fault there.
        problem: String,
    },

    /// Documents were to be left out, and the inputs are tokenized already.
    #[error(
        "cannot filter, compare or exclude documents of {path}: found samples of tokens, expected documents"
    )]
    ChosenTokens {
        /// The first input.
        path: PathBuf,
    },

    /// The inputs hold no document.
    #[error(
        "found no document: expected a file that matches glob {glob:?} below {inputs}, found {found}",
        inputs = inputs.iter().map(|input| input.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoDocuments {
        /// The inputs as they were given.
        inputs: Vec<PathBuf>,
        /// The pattern.
        glob: String,
        /// The kinds of files found instead, and the flag that takes them.
        found: String,
    },

    /// A file or folder gives no document, and was to be an error.
    #[error("cannot take document {path}", path = path.display())]
    Document {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        #[source]
        reason: SkipReason,
    },

    /// A line, row or sample is no document, and was to be an error.
    #[error("cannot take {place} of {path}", path = path.display())]
    BrokenDocument {
        /// The file.
        path: PathBuf,
        /// The place in the file.
        place: Place,
        /// Why not.
        #[source]
        reason: BrokenReason,
    },

    /// The column or key of the documents' text or tokens is missing or of another type.
    #[error("input {path}: found {found}, expected {expected}", path = path.display())]
    InputColumn {
        /// The file or folder.
        path: PathBuf,
        /// The content that was found.
        found: String,
        /// The expected content.
        expected: String,
    },

    /// Some inputs are documents, others are tokenized already.
    #[error(
        "found samples of tokens in {tokens} and documents in {documents}, expected the one or the other"
    )]
    MixedInputs {
        /// The first input of tokens.
        tokens: PathBuf,
        /// The first of documents.
        documents: PathBuf,
    },

    /// Samples that are tokenized already have another length than was asked for.
    #[error(
        "found samples of {found} tokens, which predict {predicted}, expected seq_len {asked}",
        predicted = found - 1
    )]
    SampleLength {
        /// The `seq_len` of the settings.
        asked: usize,
        /// Tokens of a sample.
        found: usize,
    },

    /// The content of an MDS shard differs from the hash in its index.
    #[error(
        "shard {path} is damaged: its {algorithm} is {found}, expected {expected} as the index says"
    )]
    ShardDigest {
        /// The shard.
        path: PathBuf,
        /// Name of the hash's algorithm, as Python has it.
        algorithm: String,
        /// Hash according to the index, in hexadecimal digits.
        expected: String,
        /// Hash of the file.
        found: String,
    },

    /// An input that this build cannot read.
    #[error("{path} is read by the feature `{feature}`, expected a build with it", path = path.display())]
    LeftOut {
        /// The input.
        path: PathBuf,
        /// The feature, of `tidemill-streaming-data`.
        feature: &'static str,
    },

    /// The layout of an MDS shard cannot be.
    #[error("shard {path} is damaged: found {found}, expected {expected}", path = path.display())]
    DamagedMdsShard {
        /// The shard.
        path: PathBuf,
        /// The content that was found.
        found: String,
        /// The expected content.
        expected: String,
    },

    /// A sample that was tokenized elsewhere is no row.
    #[error("{path}, {place}: found {found}, expected {expected}", path = path.display())]
    Sample {
        /// The file.
        path: PathBuf,
        /// The sample.
        place: Place,
        /// The sample's content, in words.
        found: String,
        /// The expected value.
        expected: String,
    },

    /// A sample that was tokenized elsewhere has a token that is not in the vocabulary.
    #[error(
        "{path}, {place}: found token {token}, expected 0 to {last} (vocabulary of {vocab_size})",
        last = vocab_size.saturating_sub(1)
    )]
    SampleToken {
        /// The file.
        path: PathBuf,
        /// The sample.
        place: Place,
        /// The token.
        token: i128,
        /// Size of the vocabulary; 2^31 - 1 where none is stated.
        vocab_size: u64,
    },

    /// A document changed after it was checked, when parts of it could be in the stream.
    #[error("document {path} changed while it was read", path = path.display())]
    DocumentChanged {
        /// The document.
        path: PathBuf,
        /// Its fault now.
        #[source]
        reason: SkipReason,
    },

    /// The documents of an input are others than when they were compared with each other.
    #[error("input {path} changed while it was prepared", path = path.display())]
    InputChanged {
        /// The input, or the file in it.
        path: PathBuf,
    },

    /// A line of a list of documents is no key.
    #[error("list {path}, line {line}: found {found:?}, expected {expected}", path = path.display())]
    ExclusionKey {
        /// The list.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The line, or a description of it.
        found: String,
        /// The form of a key.
        expected: &'static str,
    },

    /// The tokenizer refused a document.
    #[error("cannot tokenize document {path}", path = path.display())]
    Tokenize {
        /// The document.
        path: PathBuf,
        /// The tokenizer's error.
        #[source]
        source: TokenizeError,
    },

    /// The tokenizer gave a token that is not in its vocabulary.
    #[error(
        "document {path}: the tokenizer gave token {token}, expected 0 to {last} \
         (its vocabulary of {vocab_size})",
        last = vocab_size.saturating_sub(1)
    )]
    TokenizedToken {
        /// The document.
        path: PathBuf,
        /// The token.
        token: u32,
        /// Size of its vocabulary.
        vocab_size: u32,
    },

    /// The documents are too short for a single row.
    #[error(
        "found {found} tokens in {documents} documents ({skipped} files and {broken} lines or rows \
         skipped{first}), expected at least {needed}: one row of seq_len + 1"
    )]
    TooFewTokens {
        /// Tokens of all documents.
        found: u64,
        /// Documents that were tokenized.
        documents: u64,
        /// Files that could not be.
        skipped: u64,
        /// Lines, rows and samples that could not be.
        broken: u64,
        /// Which is the first of these and why, behind a comma, where there is one.
        first: String,
        /// Tokens of a row.
        needed: u64,
    },

    /// There is something where the data set was to be written.
    #[error(
        "cannot write data set {path}: found {found}, expected nothing or an empty folder; name another, \
         or remove this one"
    )]
    OutputExists {
        /// The output.
        path: PathBuf,
        /// The kind of thing that was found there.
        found: &'static str,
    },

    /// There is a data set where one was to be written, and other documents or lines were left out of it.
    #[error(
        "cannot go on with data set {path}: {key} is {found} in it, expected {asked} as it was asked for now; \
         prepare to another folder, or ask for the same"
    )]
    OtherSelection {
        /// The output.
        path: PathBuf,
        /// The first setting that differs.
        key: String,
        /// The setting that the data set was prepared with.
        found: String,
        /// The setting that was asked for.
        asked: String,
    },

    /// Another `prepare` began to write the same data set to a store.
    #[error(
        "cannot write data set {path}: found the claim of another `prepare`, which took it over, or its \
         data set, expected the claim of this one; what the other wrote is untouched"
    )]
    OutputTaken {
        /// The URL of the output.
        path: PathBuf,
    },

    /// The data set has no state of its documents.
    #[error(
        "cannot update data set {path}: found no state of its documents, expected one that was prepared with \
         --updatable; prepare it anew"
    )]
    NotUpdatable {
        /// The data set.
        path: PathBuf,
    },

    /// The state of a data set is of another version of this program.
    #[error(
        "cannot update by state {path}: found version {found}, expected {supported}; prepare the data set anew, or use \
         the program that wrote it"
    )]
    StateVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version that this program reads and writes.
        supported: u64,
    },

    /// The state of a data set is damaged.
    #[error(
        "state {path} is damaged: found {found}, expected {expected}; the shards are untouched, prepare the data set anew"
    )]
    StateDamaged {
        /// The file.
        path: PathBuf,
        /// The content that was found.
        found: String,
        /// The expected content.
        expected: String,
    },

    /// Another process updates the data set.
    #[error("cannot update data set {path}: another process is doing it; what it writes is untouched", path = path.display())]
    UpdateRunning {
        /// The data set.
        path: PathBuf,
    },

    /// Another process published a version of the data set since the update began, or removed older ones.
    #[error(
        "cannot publish the new version of data set {path}: another update was faster, or older versions were pruned \
         meanwhile; what is there is untouched; update again"
    )]
    UpdateOvertaken {
        /// The URL of the data set.
        path: PathBuf,
    },

    /// Older versions of the data set, which has this URL, are being removed, or this was broken off.
    #[error("cannot write to data set {}: `prune` is at work there, or was killed; where none is, prune again", .0.display())]
    PruneRunning(PathBuf),

    /// The tokenizer is not the one that made the tokens of a data set.
    #[error(
        "cannot update data set {path}: found a tokenizer with {found}, expected the one that made its tokens, with {expected}"
    )]
    OtherTokenizer {
        /// The data set.
        path: PathBuf,
        /// Identity of the given tokenizer: a hash.
        found: ContentHash,
        /// Identity of the tokenizer that made the data set's tokens.
        expected: ContentHash,
    },

    /// An input that did not change, by its size and time, has another text.
    #[error(
        "document {number} of input {path} is another than when it was last read: if the input changed during this preparation, \
         run it again; if it changed before and kept its size and time, update with --verify"
    )]
    OtherText {
        /// The input.
        path: PathBuf,
        /// Number of the line or row; 0 of a text.
        number: u64,
    },

    /// A document that was left out before is kept now, and cannot be read.
    #[error(
        "cannot read input {path}, which has documents that were left out before and are wanted now"
    )]
    Readmitted {
        /// The input.
        path: PathBuf,
        /// Why it cannot be read.
        #[source]
        reason: SkipReason,
    },

    /// A path that is to be kept in a data set is not UTF-8.
    #[error("cannot keep path {path} in a data set: expected UTF-8", path = path.display())]
    PathNotUtf8 {
        /// The path.
        path: PathBuf,
    },

    /// An input that a data set which is kept up to date cannot have.
    #[error("cannot keep documents of {path} up to date: found an MDS folder, expected text, JSON lines or Parquet", path = path.display())]
    InputNotUpdatable {
        /// The first such input.
        path: PathBuf,
    },

    /// Rows cannot be brought into the form of a shard.
    #[error("cannot encode shard {path}", path = path.display())]
    ShardEncoding {
        /// The shard.
        path: PathBuf,
        /// The error of the Parquet writer.
        #[source]
        source: parquet::errors::ParquetError,
    },

    /// A thread of `prepare` panicked, which is a bug of the tokenizer or here.
    #[error("a thread panicked while {work}: {message}")]
    Panic {
        /// The work of the thread, with the file.
        work: String,
        /// The message of the panic.
        message: String,
    },

    /// A process cannot read an input that process 0 found.
    #[error(
        "process {process} cannot read input {path}, which process 0 can: expected inputs that all processes reach by the same \
         path, such as a folder that their hosts share"
    )]
    InputUnseen {
        /// The input.
        path: PathBuf,
        /// The process.
        process: usize,
        /// The operating system's error in that process.
        #[source]
        source: io::Error,
    },

    /// A process prepares with something else than process 0.
    #[error("process {process} has {what} {found}, expected {expected} as process 0 has it")]
    OtherProcess {
        /// The process.
        process: usize,
        /// The thing that differs, in words.
        what: &'static str,
        /// The hash in that process.
        found: ContentHash,
        /// The hash in process 0.
        expected: ContentHash,
    },

    /// Bytes from another process are no message, or not the expected one.
    #[error(
        "process {process} sent something else than what was to come, which is a bug here or damage on the way"
    )]
    Message {
        /// Which process sent it.
        process: usize,
    },

    /// The processes that prepare together do not do so any longer.
    #[error(transparent)]
    Parted(#[from] Parted),

    /// The caller of `prepare` asked it to stop.
    #[error("preparing was interrupted")]
    Interrupted,
}
