//! One job of a thread: read and tokenize a text, or encode a row group.
//!
//! A job depends on nothing but its content, so that any thread may do it at any time, and ends
//! with a result whatever happens: a panic of a tokenizer is caught and becomes an error, since
//! whoever puts the results in order waits for every one of them.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, Sender},
    },
};

use super::{
    Strictness,
    documents::Document,
    pack::{Cut, RowGroup},
    plan::{Extent, Reading},
    shard::{EncodedRowGroup, ShardFormat, encoding_error, shard_file},
    text::{SkipReason, read_document, read_piece},
    tokenize::Tokenize,
};
use crate::error::DataError;

/// How far ahead the threads may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Documents above this are read in pieces, if the tokenizer allows it.
    pub piece_bytes: u64,
    /// Most memory that texts and what becomes of them may take.
    pub held_bytes: u64,
}

/// What to do.
pub(crate) struct Work<'a> {
    /// The documents in order.
    pub documents: &'a [Document],
    /// The tokenizer.
    pub tokenizer: &'a dyn Tokenize,
    /// How the stream is cut.
    pub cut: Cut,
    /// How row groups are stored.
    pub format: &'a ShardFormat,
    /// Where the shards are written.
    pub folder: &'a Path,
    /// Whether a document that cannot be read is an error.
    pub strictness: Strictness,
    /// Number of threads beside the calling one.
    pub workers: usize,
    /// How far ahead they may be.
    pub bounds: Bounds,
}

/// A job or a result, and its number among those of its kind.
pub(crate) struct Numbered<T> {
    pub number: u64,
    pub item: T,
}

/// What a thread is to do.
pub(crate) enum Job {
    /// Read a text and tokenize it.
    Read(Reading),
    /// Encode rows.
    Encode(RowGroup),
}

/// What a thread did.
pub(crate) enum Done {
    /// The answer to [`Job::Read`].
    Text(Result<TextDone, DataError>),
    /// The answer to [`Job::Encode`].
    RowGroup(Result<EncodedRowGroup, DataError>),
}

/// What became of a [`Reading`].
pub(crate) struct TextDone {
    pub reading: Reading,
    pub found: Found,
}

/// What a text held.
pub(crate) enum Found {
    /// Tokens, the one that ends the document included where the text ends it.
    Tokens { tokens: Vec<u32>, text_bytes: u64 },
    /// Not a byte.
    Empty,
    /// UTF-8, which was all that was to be found out.
    Checked,
    /// No document.
    Skipped(SkipReason),
}

/// Does jobs until there are no more, or nobody wants results.
pub(crate) fn perform_all(
    work: &Work<'_>,
    jobs: &Mutex<Receiver<Numbered<Job>>>,
    results: &Sender<Numbered<Done>>,
) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Numbered { number, item: job }) = job else { return };
        let item = match &job {
            Job::Read(reading) => {
                let path = &work.documents[reading.document].path;
                let what = || format!("tokenizing {}", path.display());
                Done::Text(caught(|| read(work, reading), what))
            }
            Job::Encode(row_group) => {
                let path = || work.folder.join(shard_file(row_group.shard));
                let encode = || {
                    let encoded = work.format.encode(row_group);
                    encoded.map_err(|error| encoding_error(&path(), error))
                };
                Done::RowGroup(caught(encode, || format!("encoding {}", path().display())))
            }
        };
        // What was consumed is freed here, before somebody else accounts for it as free.
        drop(job);
        if results.send(Numbered { number, item }).is_err() {
            return;
        }
    }
}

/// The result of the job, or the error that it panicked while doing `what`.
fn caught<T>(
    job: impl FnOnce() -> Result<T, DataError>,
    what: impl FnOnce() -> String,
) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        Err(DataError::PreparingPanic { work: what(), message: panic_message(&*panic) })
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

fn read(work: &Work<'_>, reading: &Reading) -> Result<TextDone, DataError> {
    let done = |found| Ok(TextDone { reading: reading.clone(), found });
    let Document { path, bytes } = &work.documents[reading.document];
    let text = match &reading.extent {
        Extent::Whole => read_document(path),
        Extent::Check(piece) | Extent::Piece(piece) => read_piece(path, *bytes, piece.clone()),
    };
    let (text, ends_document) = match (&reading.extent, text) {
        (Extent::Check(_), Ok(_)) => return done(Found::Checked),
        (Extent::Whole | Extent::Check(_), Err(reason)) => return done(Found::Skipped(reason)),
        // It was good when it was checked, and parts of it may be in rows already.
        (Extent::Piece(_), Err(reason)) => {
            return Err(DataError::DocumentChanged { path: path.clone(), reason });
        }
        (Extent::Whole, Ok(text)) if text.is_empty() => return done(Found::Empty),
        (Extent::Whole, Ok(text)) => (text, true),
        (Extent::Piece(piece), Ok(text)) => (text, piece.end == *bytes),
    };
    let mut tokens = Vec::with_capacity(text.len() + 1);
    let encoded = work.tokenizer.encode(&text, &mut tokens);
    encoded.map_err(|source| DataError::Tokenize { path: path.clone(), source })?;
    let vocab_size = work.tokenizer.vocab_size();
    if let Some(&token) = tokens.iter().find(|&&token| token >= vocab_size) {
        return Err(DataError::TokenizedToken { path: path.clone(), token, vocab_size });
    }
    if ends_document {
        tokens.push(work.tokenizer.eos_token_id());
    }
    done(Found::Tokens { tokens, text_bytes: text.len() as u64 })
}
