//! Documents to shards: texts, JSON lines, Parquet and MDS become a data set.
//!
//! Inputs are taken in byte order of their paths, and the documents in them in the order in which
//! are stored; each is tokenized and ended with eos. The stream of all their tokens is cut
//! into rows of `seq_len + 1` tokens, each row beginning with the last token of the row before, so
//! that every token except the very first is predicted exactly once. The remainder that fills no row
//! is dropped and reported. Empty texts and nulls are no documents.
//!
//! | input | a document is | its text |
//! |---|---|---|
//! | text | a file | all of it |
//! | JSON lines, also in gzip or Zstandard | a line | the string at [`PrepareSettings::text_key`] |
//! | Parquet | a row | the string column of that name |
//! | MDS folder | a sample | the `str` column of that name |
//! | MDS folder with a column `tokens` | no document: a row as it is | |
//!
//! # Contract
//! - The output is the same to the byte for any number of workers: shards, `index.json` and
//!   `tokenizer.json` depend on the documents, the tokenizer and the settings alone. In a store, names
//!   (and the index, which states them) differ from one run to the next: `shard-`, 16 digits that no other
//!   run has, and the number, as in `shard-0123456789abcdef-00000.parquet`.
//! - The output appears complete or not at all, and no data set is ever overwritten. A folder on this
//!   machine is put in place in one step. In a store, a claim takes the place of the index until
//!   the shards are there, and opening the data set before is an error that says so. Of two processes that
//!   write to the same place, the one that claimed it last goes on. That holds without exception in stores that
//!   compare and write in one step: S3, Google's, Azure's and memory. To one that cannot (a web server with
//!   WebDAV, some that speak like S3) a warning is logged: requests that were under way when the place
//!   changed hands may damage what is there.
//! - A text that cannot be read or is not UTF-8 does not enter the stream; it is skipped and
//!   named in the report, or an error ([`Strictness`]).
//! - A line, row or sample that is no document is counted, and the first [`NAMED_BROKEN`] are named,
//!   or the first is an error. A compressed or Parquet file that turns out to be damaged gives what
//!   stands before the damage, and is named with the place, or is an error.
//! - Settings that do not fit the inputs are always an error: a Parquet file without the
//!   column, an MDS data set that is not what its index says.
//! - Lists, filters and duplicates leave out documents in this order, and each sees only documents that the
//!   steps before it kept; the data set is as if the others did not exist. With any of them a text file is held
//!   whole, however large, and nothing else during a large one. Duplicates are found in a pass of their own:
//!   the inputs are read twice, and one that changed in between is an error.
//! - Memory is bounded by the number of workers, independent of the input's size: documents are read
//!   ahead up to a bound in bytes, large texts in pieces (where the tokenizer allows it), other
//!   inputs in parts, and shards leave as they grow. A line, row or sample above
//!   [`DOCUMENT_BYTES_LIMIT`] is broken; while a large one is read and tokenized, nothing else is. Of a Parquet
//!   file the current page and the dictionary are held too, each of at most [`PAGE_BYTES_LIMIT`], of
//!   Zstandard its window (128 MiB), of an MDS shard in Snappy all (1 GiB). Only the list of paths
//!   grows with the input. For an output
//!   in a store, at most four shards wait in the folder for temporary files (`TMPDIR`), without
//!   names there: nothing of them outlives the process. Three are sent at a time, each with at most
//!   32 MiB of it in memory, or all of it to a store that takes no parts (a web server).
//!
//! With [`Reporting::Files`] two more files describe the content of the data set ([`data_report`]).
//!
//! Modules in the order in which a document passes through them:
//!
//! | module | holds |
//! |---|---|
//! | `settings` | [`PrepareSettings`] |
//! | `input` | files that are inputs, their order and their kind; reading them; the parts of them that gave no document |
//! | `choose` | which documents and lines enter the stream: lists, filters and duplicates |
//! | `tokens` | [`Tokenize`], [`ByteTokenizer`]; the stream of tokens cut into rows |
//! | `output` | rows to Parquet; the folder, local or in a store, that is a data set when it is complete |
//! | `pipeline` | the threads that do all this, the next input to read, and the order of results; one pass, or two where documents are compared |
//! | `together` | [`prepare_together`], [`Peers`]: several processes prepare one data set |
//! | `upkeep` | data sets that are kept up to date: [`Layout::Updatable`], [`update()`] |
//! | `texts` | [`read_texts`]: documents for anything else than a data set |
//! | `report` | [`Progress`], [`PrepareReport`] |
//! | [`data_report`] | [`DataReport`]: a report on the data set's documents, for people |
//! | `error` | [`PrepareError`] |

mod choose;
pub mod data_report;
mod error;
mod input;
mod output;
mod pipeline;
mod report;
mod settings;
mod texts;
mod together;
mod tokens;
mod upkeep;

use std::{cell::Cell, mem, num::NonZeroUsize, ops::ControlFlow, path::Path};

#[cfg(feature = "live")]
pub(crate) use self::choose::{
    duplicates::{Signature, Signer},
    filter::judge,
};
use self::{
    choose::{
        admit::{Pass, Rules},
        exclude::Exclusions,
        selection::{selection, with_selection},
    },
    data_report::{Difference, DuplicateGroups, EXAMPLES, Findings, Verdict},
    input::{
        Contents, Sources,
        find::{find_inputs, path_bytes},
    },
    output::{
        Output, OutputFolder, RemoteOutput,
        shard::{ShardFormat, TOKEN_BYTES, encoding_error, shard_file},
    },
    pipeline::{
        Outcome,
        job::{Bounds, Work},
        passes::run_passes,
    },
    together::{Setup, ask, greet},
    tokens::{
        pack::{Cut, Rows},
        vocabulary::Vocabulary,
    },
    upkeep::{Former, Upkeep, update_with},
};
pub use self::{
    choose::{
        duplicates::{DEDUP_MEMORY_BYTES, Dedup, DedupReport, DedupSettings},
        filter::{FilterReport, FilterSettings, Rule},
    },
    data_report::{DataReport, Reporting},
    error::PrepareError,
    input::skip::{BrokenDocument, BrokenReason, NAMED_BROKEN, Place, SkipReason, SkippedDocument},
    report::{Phase, PrepareReport, PreparedFrom, Progress},
    settings::{
        DEFAULT_GLOB, DEFAULT_SEQ_LEN, DEFAULT_TEXT_KEY, Layout, PrepareSettings, Strictness,
        TokenizedBy,
    },
    texts::{TextSettings, TextsReport, read_texts},
    together::{Parted, Peers, prepare_together, update_together},
    tokens::{
        byte_tokenizer::ByteTokenizer,
        tokenize::{Pieces, Tokenize, TokenizeError},
    },
    upkeep::{
        Changes, Follow, PruneReport, UpdateReport, UpdateSettings, Verify, prune, prune_in_store,
        update, update_in_store,
    },
};
use crate::{
    data_set::index::{FORMAT_VERSION, Index},
    hash::{ContentHash, HASH_ALGORITHM},
    store::{Location, RemoteFolder},
};

/// Name of the tokenizer's file in the folder of the index.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Tokens of a row group, decoded: small enough that one sample alone is cheap to read, large
/// enough that compression and the footer do not matter.
const ROW_GROUP_BYTES: usize = 1 << 20;

/// Row groups of a shard by default: 64 MiB of tokens, decoded.
const SHARD_ROW_GROUPS: usize = 64;

/// Texts above this are read in pieces, and other inputs in parts of about this size.
const PIECE_BYTES: u64 = 512 << 10;

/// A line, row or sample may have this many bytes: 64 MiB. (A text file may have any number.)
pub const DOCUMENT_BYTES_LIMIT: u64 = 64 << 20;

/// A page of a Parquet column of text may have this many bytes, decompressed: 1 GiB. Writers make
/// pages of about a megabyte, but some end one only after a thousand rows, however large.
pub const PAGE_BYTES_LIMIT: u64 = 1 << 30;

/// Memory that texts, their tokens and row groups may take, for each worker.
const HELD_BYTES_PER_WORKER: u64 = 32 << 20;

/// Prepares a data set. `progress` is called with the position after each text and each row group, and
/// often during waits for a store; its answer can stop the preparation.
///
/// # Errors
/// - [`PrepareError::Setting`], [`PrepareError::Glob`], [`PrepareError::NoDocuments`],
///   [`PrepareError::OutputExists`]: the settings cannot be met.
/// - [`PrepareError::Document`] and [`PrepareError::BrokenDocument`] for the first file, line, row
///   or sample that is to be skipped, if that is an error.
/// - [`PrepareError::InputColumn`] for inputs without the column of text,
///   [`PrepareError::MixedInputs`], and [`PrepareError::SampleLength`], [`PrepareError::Sample`] and
///   [`PrepareError::SampleToken`] for samples that are tokenized already and cannot be rows.
/// - [`PrepareError::ShardDigest`] and [`PrepareError::DamagedMdsShard`] for an MDS data set that is
///   not what its index says.
/// - [`PrepareError::TooFewTokens`] when the documents do not fill a row.
/// - [`PrepareError::DocumentChanged`], [`PrepareError::Tokenize`],
///   [`PrepareError::TokenizedToken`], [`PrepareError::Panic`]: a document cannot be tokenized.
/// - [`PrepareError::ShardEncoding`] when rows cannot be brought into the form of a shard.
/// - [`PrepareError::OutputTaken`] when another `prepare` began to write the same to a store.
/// - [`PrepareError::Interrupted`] when `progress` answered [`ControlFlow::Break`].
/// - [`PrepareError::Data`] for an input that does not exist, an MDS index that is not one or lists
///   a shard that is missing or of another size, and an output that cannot be written. Where the
///   URL of an output, the credentials or the rights are at fault, that is before the first document
///   is tokenized.
///
/// After an error nothing of the output is left in a folder. In a store the claim is left, which says that
/// there is no data set, and files that the store does not let us remove; the next `prepare` takes it over.
pub fn prepare(
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<PrepareReport, PrepareError> {
    prepare_with(None, settings, tokenizer, progress)
}

/// As [`prepare`], with other processes where there are some.
fn prepare_with(
    peers: Option<&dyn Peers>,
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<PrepareReport, PrepareError> {
    let output = Location::of_path(&settings.output)?;
    prepare_in(settings, tokenizer, progress, (None, peers), || match output.local() {
        Some(path) => Ok(Box::new(OutputFolder::begin(path)?)),
        None => {
            let folder = RemoteFolder::open(output.clone(), &settings.store)?;
            Ok(Box::new(RemoteOutput::begin(folder)?))
        }
    })
}

/// As [`prepare`], to a folder of a store that the caller made; the output and the store of the
/// settings are not looked at.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_to_store(
    folder: &RemoteFolder,
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<PrepareReport, PrepareError> {
    let begin = || Ok(Box::new(RemoteOutput::begin(folder.clone())?) as Box<dyn Output>);
    prepare_in(settings, tokenizer, progress, (None, None), begin)
}

fn prepare_in(
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    (former, peers): (Option<Former<'_>>, Option<&dyn Peers>),
    begin_output: impl FnOnce() -> Result<Box<dyn Output>, PrepareError>,
) -> Result<PrepareReport, PrepareError> {
    check_seq_len(settings.seq_len.map_or(1, NonZeroUsize::get))?;
    let upkeep = match settings.layout {
        Layout::Stream => None,
        Layout::Updatable => Some(Upkeep::of(settings, tokenizer, former)?),
    };
    // Paths that a data set keeps are absolute.
    let inputs = upkeep.as_ref().map_or_else(|| settings.inputs.clone(), |it| it.settings.inputs());
    // The inputs first: the output may lie within one, and files that are written there are no inputs.
    let mut found = find_inputs(&inputs, &settings.glob)?;
    if former.is_some() {
        found.leave_out(&settings.output, &inputs);
    }
    if settings.strictness == Strictness::Strict && !found.skipped.is_empty() {
        let SkippedDocument { path, reason } = found.skipped.remove(0);
        return Err(PrepareError::Document { path, reason });
    }
    let sources = Sources::new(&mut found.inputs, settings.text_key.as_deref())?;
    let exclusions = settings.exclude.as_deref();
    let base = upkeep.as_ref().map(|upkeep| Path::new(&upkeep.settings.base));
    let exclusions = exclusions.map(|list| Exclusions::open(list, base)).transpose()?;
    let exclusions = exclusions.unwrap_or_default();
    let selection = selection(settings, &exclusions);
    if let Contents::Samples { .. } = sources.contents()
        && selection.is_some()
    {
        return Err(PrepareError::ChosenTokens { path: found.inputs[0].path.clone() });
    }
    let cut = cut(settings, sources.contents())?;
    let vocabulary = Vocabulary::new(settings, sources.contents(), tokenizer)?;
    let format = ShardFormat::new(cut.seq_len)
        .map_err(|error| encoding_error(&settings.output.join(shard_file(0)), error))?;
    let mut output = begin_output()
        .map_err(|error| with_selection(error, &settings.output, selection.as_ref()))?;
    let setup = || {
        let rows = (sources.contents(), vocabulary.size, cut.seq_len);
        Setup::new(settings, tokenizer, (&exclusions, base), rows)
    };
    if let Err(error) = greet(peers, setup) {
        output.abandon();
        return Err(error);
    }
    let folder = output.folder().to_owned();
    let latest = Cell::new(Progress::default());
    let progress = &mut |now: Progress| {
        // The place where everything was read, no matter what follows.
        if now.phase == Phase::Tokenizing {
            latest.set(now);
        }
        progress(now)
    };
    let workers = settings.workers.get();
    let work = Work {
        inputs: &found.inputs,
        sources: &sources,
        rules: Rules {
            exclusions: &exclusions,
            filters: settings.filters.sets(),
            pass: Pass::Tokenize(None),
            reporting: settings.reporting,
        },
        tokenizer,
        vocab_size: vocabulary.size,
        cut,
        format: &format,
        folder: &folder,
        strictness: settings.strictness,
        workers,
        bounds: bounds(workers),
        peers,
    };
    let outcome = match upkeep {
        Some(upkeep) => upkeep::build(work, upkeep, &mut *output, progress),
        None => run_passes(work, settings.dedup, &mut *output, progress),
    };
    let outcome = outcome.and_then(|(outcome, dedup)| {
        Ok((with_a_row(outcome, dedup, &mut found.skipped, cut)?, dedup))
    });
    let (mut outcome, dedup) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            output.abandon();
            return Err(error);
        }
    };

    let by = vocabulary.tokenizer;
    let tokenizer_json = by.and_then(Tokenize::tokenizer_json);
    let tokenizer_file = match (&former, &tokenizer_json) {
        (Some(former), _) => former.index.tokenizer_file.clone(),
        (None, Some(json)) => Some(tokenizer_file(&*output, settings.layout, json)),
        (None, None) => None,
    };
    let index = Index {
        format_version: FORMAT_VERSION,
        seq_len: cut.seq_len,
        vocab_size: vocabulary.size.unwrap_or(outcome.largest_token + 1),
        bos_token_id: by.and_then(Tokenize::bos_token_id),
        eos_token_id: by.map(Tokenize::eos_token_id),
        pad_token_id: by.and_then(Tokenize::pad_token_id),
        tokenizer_file,
        hash_algorithm: HASH_ALGORITHM.to_owned(),
        row_group_samples: cut.row_group_samples as u64,
        columns: vec![format.column()],
        selection,
        state: outcome.state.take(),
        shards: mem::take(&mut outcome.shards),
    };
    let from = match sources.contents() {
        Contents::Documents => PreparedFrom::Documents,
        Contents::Samples { .. } => PreparedFrom::TokenizedSamples,
    };
    let report = match settings.reporting {
        Reporting::None => Vec::new(),
        Reporting::Files => {
            let (skipped, reached_again) = (found.skipped.len() as u64, found.duplicates);
            let (index, outcome, inputs) = (&index, &outcome, &found.inputs[..]);
            let findings = Findings { index, outcome, inputs, from, skipped, reached_again };
            DataReport::new(&findings).files()
        }
    };
    // From here on a request to stop comes too late.
    let publishing = Progress { phase: Phase::Publishing, ..latest.get() };
    let put = || {
        ask(progress, publishing)?;
        report.into_iter().try_for_each(|(name, content)| output.put(&name, content))
    };
    if let Err(error) = put() {
        output.abandon();
        return Err(error);
    }
    output.publish(&index, tokenizer_json.as_deref())?;
    Ok(PrepareReport {
        from,
        documents: outcome.documents,
        empty: outcome.empty,
        nulls: outcome.nulls,
        duplicates: found.duplicates,
        skipped: found.skipped,
        fingerprint: index.fingerprint(),
        changes: outcome.changes,
        broken: outcome.broken.count,
        named_broken: outcome.broken.named,
        filtered: outcome.left_out.filtered,
        dedup,
        excluded: outcome.left_out.excluded,
        unused_exclusions: exclusions.unused(),
        text_bytes: outcome.text_bytes,
        tokens: outcome.tokens,
        dropped_tokens: outcome.dropped_tokens,
        seq_len: index.seq_len,
        vocab_size: index.vocab_size,
        samples: index.samples(),
        shards: index.shards.len() as u64,
        shard_bytes: index.shards.iter().map(|shard| shard.bytes).sum(),
    })
}

/// The name of the tokenizer's file in a new data set.
fn tokenizer_file(output: &dyn Output, layout: Layout, json: &str) -> String {
    match output.name_of(TOKENIZER_FILE) {
        // The part of a name that differs from run to run is left out where the data set depends on its inputs alone.
        name if layout == Layout::Updatable && name != TOKENIZER_FILE => {
            format!("tokenizer-{}.json", ContentHash::of(json.as_bytes()).digits())
        }
        name => name,
    }
}

/// The outcome, if it has a row, with all skipped files.
fn with_a_row(
    mut outcome: Outcome,
    dedup: DedupReport,
    skipped: &mut Vec<SkippedDocument>,
    cut: Cut,
) -> Result<Outcome, PrepareError> {
    skipped.append(&mut outcome.skipped);
    skipped.sort_by(|a, b| path_bytes(&a.path).cmp(path_bytes(&b.path)));
    if !outcome.shards.is_empty() {
        return Ok(outcome);
    }
    let broken = outcome.broken;
    let first = skipped.first().map(SkippedDocument::line);
    let first = first.or_else(|| broken.named.first().map(BrokenDocument::line));
    let mut first = first.map(|first| format!(", the first {first}")).unwrap_or_default();
    let filtered = &outcome.left_out.filtered;
    let rejected = &filtered.rejected;
    if let Some((rule, _)) = rejected.iter().max_by_key(|(_, count)| **count) {
        let all = filtered.rejected_documents();
        first = format!("{first}; filters rejected {all} others, most of them by {rule}");
    }
    if dedup != DedupReport::default() {
        let DedupReport { copies, near_copies } = dedup;
        first = format!("{first}; {copies} others are copies, and {near_copies} near copies");
    }
    Err(PrepareError::TooFewTokens {
        found: outcome.tokens,
        documents: outcome.documents,
        skipped: skipped.len() as u64,
        broken: broken.count,
        first,
        needed: cut.seq_len as u64 + 1,
    })
}

/// Whether rows may have this number of predicted tokens.
fn check_seq_len(seq_len: usize) -> Result<(), PrepareError> {
    if seq_len < i32::MAX as usize {
        return Ok(());
    }
    let (key, found) = ("seq_len", seq_len as u64);
    Err(PrepareError::Setting { key, found, expected: "1 to 2^31 - 2" })
}

/// How the stream is cut, for these settings.
fn bounds(workers: usize) -> Bounds {
    Bounds {
        piece_bytes: PIECE_BYTES,
        document_bytes: DOCUMENT_BYTES_LIMIT,
        held_bytes: HELD_BYTES_PER_WORKER.saturating_mul(workers as u64),
    }
}

fn cut(settings: &PrepareSettings, contents: Contents) -> Result<Cut, PrepareError> {
    let asked = settings.seq_len.map(NonZeroUsize::get);
    let (seq_len, rows) = match contents {
        Contents::Samples { row_tokens: Some(row_tokens) } => (row_tokens - 1, Rows::Apart),
        Contents::Samples { row_tokens: None } => (asked.unwrap_or(1), Rows::Apart),
        Contents::Documents => (asked.unwrap_or(DEFAULT_SEQ_LEN.get()), Rows::Overlapping),
    };
    check_seq_len(seq_len)?;
    if let Some(asked) = asked.filter(|&asked| asked != seq_len) {
        return Err(PrepareError::SampleLength { asked, found: seq_len + 1 });
    }
    let row_group_samples = (ROW_GROUP_BYTES / TOKEN_BYTES / (seq_len + 1)).max(1);
    let shard_samples = match settings.shard_samples {
        Some(samples) => samples.get(),
        None => row_group_samples * SHARD_ROW_GROUPS,
    };
    let row_group_samples = row_group_samples.min(shard_samples);
    Ok(Cut { seq_len, row_group_samples, shard_samples, rows })
}
