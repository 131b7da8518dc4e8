//! The settings of a preparation.

use std::{num::NonZeroUsize, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::{DedupSettings, FilterSettings, Reporting};
use crate::store::StoreSettings;

/// The default glob for inputs below an input folder: texts, JSON lines, Parquet
/// files, and folders that are MDS data sets (by their index).
pub const DEFAULT_GLOB: &str = "**/{*.txt,*.jsonl,*.jsonl.gz,*.jsonl.zst,*.ndjson,*.ndjson.gz,\
                                *.ndjson.zst,*.json.gz,*.json.zst,*.parquet,index.json}";

/// The default key or column of the text in a line, row or sample.
pub const DEFAULT_TEXT_KEY: &str = "text";

/// The default number of predicted tokens per sample of documents.
pub const DEFAULT_SEQ_LEN: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The settings of [`prepare`](super::prepare()): inputs, output, and how documents become samples.
#[derive(Debug, Clone)]
pub struct PrepareSettings {
    /// Files, and folders, searched with their subfolders (symbolic links are followed) for files
    /// whose path below the folder matches `glob`. What a file is follows from its name: JSON lines
    /// (`.jsonl`, `.ndjson`, `.json`, and these with `.gz`, `.zst` or `.zstd` appended), Parquet
    /// (`.parquet`, `.pq`), else a text. A folder whose `index.json` matches the glob and is that of
    /// an MDS data set is one input. A file is an input once, however many paths lead to it; the
    /// smallest of the paths counts.
    pub inputs: Vec<PathBuf>,
    /// The folder that is to be the data set: missing or empty. Or its URL (see [`crate::store`]), which
    /// has no data set and no part of one, except what a killed `prepare` left.
    pub output: PathBuf,
    /// How the store of an output that is a URL is used.
    pub store: StoreSettings,
    /// Glob pattern of the inputs in input folders: `*` within a folder, `**` across folders, `{a,b}`
    /// for either.
    pub glob: String,
    /// Where the text of a line, row or sample is: a key, or a column, with dots into nested ones.
    /// By default [`DEFAULT_TEXT_KEY`]; where it is given, MDS samples are documents even if they
    /// have tokens as well.
    pub text_key: Option<String>,
    /// Predicted tokens per sample; a row has one token more. Below 2^31 - 1. By default
    /// [`DEFAULT_SEQ_LEN`] for documents; samples that are tokenized already have a length, which
    /// this must agree with where it is given.
    pub seq_len: Option<NonZeroUsize>,
    /// Size of the vocabulary that the index states: at least that of the tokenizer. By default the
    /// tokenizer's; of samples of an unknown tokenizer, their largest token + 1.
    pub vocab_size: Option<u32>,
    /// The tokenizer that made the samples that are tokenized already.
    pub tokenized_by: TokenizedBy,
    /// Which documents and lines are trained on; by default all. Samples that are tokenized already cannot be
    /// filtered, compared or excluded.
    pub filters: FilterSettings,
    /// Which documents are left out because there are others like them; by default none. The inputs are then
    /// read twice.
    pub dedup: DedupSettings,
    /// A file with a list of documents to leave out, one key a line: the path of an input as it is reached, to leave out
    /// all of it; such a path, a tab, and the number of a line (from 1), row or sample (from 0);
    /// or `xxh3-128:` and the hash of a text.
    pub exclude: Option<PathBuf>,
    /// Threads that read, tokenize and encode, in addition to the calling thread, which writes.
    pub workers: NonZeroUsize,
    /// Whether files, lines and rows that cannot be documents are an error.
    pub strictness: Strictness,
    /// Rows of each shard but the last, or of [`Layout::Updatable`] about as many. By default about 64 MiB of
    /// tokens, decoded.
    pub shard_samples: Option<NonZeroUsize>,
    /// Where shards end, and whether the data set can be kept up to date.
    pub layout: Layout,
    /// Whether a report for people is written to the folder of the shards.
    pub reporting: Reporting,
}

impl PrepareSettings {
    /// The settings with a default for all that has one: the glob [`DEFAULT_GLOB`], one worker,
    /// [`Strictness::Lenient`], shards of about 64 MiB, [`StoreSettings::default`].
    pub fn new(inputs: Vec<PathBuf>, output: PathBuf, seq_len: NonZeroUsize) -> PrepareSettings {
        PrepareSettings {
            inputs,
            output,
            store: StoreSettings::default(),
            glob: DEFAULT_GLOB.to_owned(),
            text_key: None,
            seq_len: Some(seq_len),
            vocab_size: None,
            tokenized_by: TokenizedBy::Unknown,
            filters: FilterSettings::default(),
            dedup: DedupSettings::default(),
            exclude: None,
            workers: NonZeroUsize::MIN,
            strictness: Strictness::Lenient,
            shard_samples: None,
            layout: Layout::Stream,
            reporting: Reporting::None,
        }
    }
}

/// Where shards end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// One stream of tokens is cut into shards of equal numbers of rows. One added or removed document moves all
    /// documents after it.
    #[default]
    Stream,
    /// A shard ends after a document that its content chooses, and the data set also holds the state of
    /// the documents that [`update`](super::update) needs. Names of shards are hashes of their content. The
    /// inputs are documents, and no MDS folders; they are read twice, each document whole.
    Updatable,
}

/// The treatment of files that cannot be read or are not UTF-8, and of lines, rows and samples that
/// are no documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strictness {
    /// They are skipped and named in the report.
    #[default]
    Lenient,
    /// The first is an error, and nothing is written.
    Strict,
}

/// The tokenizer that made the samples that are tokenized already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenizedBy {
    /// An unknown tokenizer: the index states no special tokens, and no tokenizer is written.
    #[default]
    Unknown,
    /// The tokenizer that `prepare` was given.
    Tokenizer,
}
