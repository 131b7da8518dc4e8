//! Files, lines, rows and samples that gave no document, and the reasons.
//!
//! Nothing is left out in silence. Files are all named; of the documents inside files that are
//! broken, the first [`NAMED_BROKEN`] are named and all are counted, so that a file of a billion
//! broken lines costs no memory.

use std::{error::Error, fmt, io, path::PathBuf};

/// How many broken documents are named; all are counted.
pub const NAMED_BROKEN: usize = 100;

/// A file or folder that gave no document, or not all that it should.
#[derive(Debug)]
pub struct SkippedDocument {
    /// Where it is, as it was reached.
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: SkipReason,
}

impl SkippedDocument {
    /// Path and reason with its causes, in a line.
    pub(crate) fn line(&self) -> String {
        format!("{}: {}", self.path.display(), self.reason.line())
    }
}

impl SkipReason {
    /// The reason with its causes, in a line.
    pub(crate) fn line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            line = format!("{line}: {error}");
            cause = error.source();
        }
        line
    }
}

/// Why a file or folder gave no document, or not all that it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SkipReason {
    /// It cannot be opened, listed or read.
    #[error("it cannot be read")]
    Unreadable {
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// Its content is not UTF-8.
    #[error("it is not UTF-8 at byte {offset}")]
    NotUtf8 {
        /// The first byte that does not belong to a character, from 0.
        offset: u64,
    },
    /// It is a pipe, a socket or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// Its size changed after it was found.
    #[error("it has {found} bytes and had {expected} when it was found")]
    Changed {
        /// Its size when it was found.
        expected: u64,
        /// Its size now.
        found: u64,
    },
    /// Its name says that it is compressed in a way that is not read.
    #[error(
        "its name ends in .{found}, expected text, or JSON lines as they are, in .gz or in .zst"
    )]
    Compression {
        /// The end of its name.
        found: &'static str,
    },
    /// Its text is compressed in a way that is not read.
    #[error(
        "its column is compressed by {found}, expected Zstandard, Snappy, LZ4, gzip or nothing"
    )]
    Codec {
        /// How.
        found: &'static str,
    },
    /// It is one shard of an MDS data set, which says little without the index beside it.
    #[error("it is a shard of an MDS data set, expected the folder with its index.json")]
    LooseMdsShard,
    /// An `index.json` that cannot be understood, so that the kind of its folder is unknown.
    #[error("it is no JSON, expected the index of an MDS data set or of another")]
    Index {
        /// The place and the defect.
        #[source]
        source: serde_json::Error,
    },
    /// It is no Parquet file, although its name says so.
    #[error("it is not a Parquet file, or a damaged one")]
    NotParquet {
        /// The error of the Parquet reader.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// It is compressed and its checksum is wrong: it is damaged somewhere before that place, and all of that is in the stream.
    #[error("its checksum is wrong: any text before {to} may be damaged")]
    Checksum {
        /// The first place that was not taken.
        to: Place,
        /// The message of the reader of the format.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// It is damaged or breaks off; what comes before that place is in the stream.
    #[error("it is damaged from {from} on")]
    Damaged {
        /// The first place that could not be read.
        from: Place,
        /// The message of the reader of the format.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The reason as found by one of several processes that prepare together; with several processes, all reasons are passed on so.
    #[error("{words}")]
    Told {
        /// The reason with its causes.
        words: String,
    },
}

impl From<io::Error> for SkipReason {
    fn from(source: io::Error) -> SkipReason {
        SkipReason::Unreadable { source }
    }
}

/// Where in its file a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line, from 1.
    Line(u64),
    /// A row of a Parquet file, from 0.
    Row(u64),
    /// A sample of an MDS shard, from 0.
    Sample(u64),
}

impl Place {
    /// Its number.
    pub(crate) fn number(self) -> u64 {
        match self {
            Place::Line(number) | Place::Row(number) | Place::Sample(number) => number,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(formatter, "line {line}"),
            Place::Row(row) => write!(formatter, "row {row}"),
            Place::Sample(sample) => write!(formatter, "sample {sample}"),
        }
    }
}

/// A line, row or sample that is not a valid document.
#[derive(Debug, Clone)]
pub struct BrokenDocument {
    /// The file.
    pub path: PathBuf,
    /// The place in the file.
    pub place: Place,
    /// The fault.
    pub reason: BrokenReason,
}

impl BrokenDocument {
    /// Path, place and reason, in a line.
    pub(crate) fn line(&self) -> String {
        format!("{}, {}: {}", self.path.display(), self.place, self.reason)
    }
}

/// The fault of a line, row or sample.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BrokenReason {
    /// It is not UTF-8.
    #[error("it is not UTF-8 at byte {offset}")]
    NotUtf8 {
        /// The first byte of the line or text that does not belong to a character, from 0.
        offset: usize,
    },
    /// It is not JSON.
    #[error("it is not JSON at column {column}: {problem}")]
    NotJson {
        /// The column of the line, from 1.
        column: usize,
        /// The fault there.
        problem: String,
    },
    /// It is JSON, but no object.
    #[error("found {found}, expected an object")]
    NotAnObject {
        /// The line's kind of value, such as "a list".
        found: &'static str,
    },
    /// The object has no such key.
    #[error("it has no key {key:?}")]
    NoKey {
        /// The key, with dots between nested ones.
        key: String,
    },
    /// The value at the key is no text.
    #[error("{key:?} is {found}, expected a string")]
    NotText {
        /// The key, with dots between nested ones.
        key: String,
        /// The kind of value at the key, such as "a list".
        found: &'static str,
    },
    /// The document is longer than the reader holds in memory at once.
    #[error("it is longer than {limit_bytes} bytes, the most that a document may have here")]
    TooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// The fault as found by one of several processes that prepare together; with several processes, all faults are passed on so.
    #[error("{words}")]
    Told {
        /// The fault.
        words: String,
    },
}

/// Broken documents in order: all counted, the first of them kept.
#[derive(Debug, Default)]
pub(crate) struct Broken {
    /// How many there are.
    pub count: u64,
    /// The first [`NAMED_BROKEN`].
    pub named: Vec<BrokenDocument>,
}

impl Broken {
    /// Adds a broken document.
    pub(crate) fn push(&mut self, broken: BrokenDocument) {
        self.count += 1;
        if self.named.len() < NAMED_BROKEN {
            self.named.push(broken);
        }
    }

    /// Appends the broken documents of a later part.
    pub(crate) fn append(&mut self, later: Broken) {
        self.take(later.count, later.named);
    }

    /// Counts `count` more broken documents; `named` are the first of them.
    pub(crate) fn take(&mut self, count: u64, named: Vec<BrokenDocument>) {
        self.count += count;
        let room = NAMED_BROKEN - self.named.len();
        self.named.extend(named.into_iter().take(room));
    }
}
