//! One job of a thread: read and tokenize a text, cut a part off an input, tokenize a part, or
//! encode a row group.
//!
//! A job depends only on its content, so that any thread may do it at any time, and ends
//! with a result in any case: a panic of a tokenizer is caught and becomes an error, since the thread that
//! puts the results in order waits for every one of them.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, mpsc::Sender},
    thread::{self, Scope},
};

use super::{
    batch::Batch,
    job_queue::JobQueue,
    plan::{Extent, Reading},
};
use crate::prepare::{
    PrepareError, Reporting, Strictness,
    choose::admit::{Admission, LeftOut, Pass, Rules},
    data_report::tally::Example,
    input::{
        Entry, Limits, Next, Part, ReadFailure, ReadParts, Sources,
        find::Input,
        skip::{Broken, BrokenDocument, Place, SkipReason},
        text::{read_document, read_piece},
    },
    output::shard::{EncodedRowGroup, ShardFormat, encoding_error, shard_file},
    together::Peers,
    tokens::{
        pack::{Cut, RowGroup},
        tokenize::Tokenize,
    },
};
/// How far ahead the threads may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Texts above this are read in pieces, if the tokenizer allows it, and inputs of many
    /// documents in parts of about this size.
    pub piece_bytes: u64,
    /// A line, row or sample above this is no document.
    pub document_bytes: u64,
    /// Most memory that texts and what becomes of them may take.
    pub held_bytes: u64,
}

/// The work.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    /// The inputs in order.
    pub inputs: &'a [Input],
    /// How inputs of many documents are opened.
    pub sources: &'a Sources,
    /// Which documents and lines enter the stream.
    pub rules: Rules<'a>,
    /// The tokenizer.
    pub tokenizer: &'a dyn Tokenize,
    /// Every token must be below this; none if the bound is unknown.
    pub vocab_size: Option<u32>,
    /// How the stream is cut.
    pub cut: Cut,
    /// How row groups are stored.
    pub format: &'a ShardFormat,
    /// The folder in which shards are written, for messages.
    pub folder: &'a Path,
    /// Whether a document that cannot be read is an error.
    pub strictness: Strictness,
    /// Number of threads in addition to the calling one.
    pub workers: usize,
    /// How far ahead they may be.
    pub bounds: Bounds,
    /// The processes that share the work, if there are others.
    pub peers: Option<&'a dyn Peers>,
}

/// A job or a result, numbered within its kind.
pub(crate) struct Numbered<T> {
    pub number: u64,
    pub item: T,
}

/// A thread's work.
pub(crate) enum Job {
    /// Read a text and tokenize it.
    Read(Reading),
    /// Cut the next part off an input.
    Cut(Cutting),
    /// Tokenize a part.
    Take(PartAtHand),
    /// Encode rows.
    Encode(RowGroup),
}

/// An input, and its reader once it was opened.
pub(crate) struct Cutting {
    pub input: usize,
    pub reader: Option<Box<dyn ReadParts>>,
}

/// A part, and the bytes of memory that are charged for it.
pub(crate) struct PartAtHand {
    pub input: usize,
    pub part: Part,
    pub held_bytes: u64,
    /// Bytes of the input that were read for it.
    pub read_bytes: u64,
}

/// A thread's result.
pub(crate) enum Done {
    /// The answer to [`Job::Read`] and [`Job::Take`]; they share their numbers.
    Taken(Result<Taken, PrepareError>),
    /// The answer to [`Job::Cut`].
    Cut(usize, Result<CutDone, ReadFailure>),
    /// The answer to [`Job::Encode`].
    RowGroup(Result<EncodedRowGroup, PrepareError>),
}

/// The next item of the stream.
pub(crate) enum Taken {
    /// A text or a piece of one.
    Text(TextDone),
    /// A part.
    Part(Box<PartDone>),
    /// An input that gives nothing more.
    Skipped(usize, SkipReason),
    /// An input was read to its end.
    InputEnd(usize),
}

/// An input from which the next part was cut, and that part.
pub(crate) struct CutDone {
    pub reader: Box<dyn ReadParts>,
    pub next: Next,
}

/// The result of reading a part.
#[derive(Default)]
pub(crate) struct PartDone {
    pub input: usize,
    pub held_bytes: u64,
    pub read_bytes: u64,
    pub tokens: Vec<u32>,
    /// Tokens of each document, in a pass that fetches.
    pub lengths: Vec<usize>,
    /// The largest token; 0 where there is none.
    pub largest_token: u32,
    pub documents: u64,
    pub empty: u64,
    pub nulls: u64,
    pub text_bytes: u64,
    pub broken: Broken,
    pub left_out: LeftOut,
    /// The facts that are collected of it.
    pub batch: Batch,
}

/// The result of a [`Reading`].
pub(crate) struct TextDone {
    pub reading: Reading,
    pub found: Found,
}

/// The content of a text.
pub(crate) enum Found {
    /// Tokens of a piece, the one that ends the document included where the piece ends it.
    Piece { tokens: Vec<u32>, text_bytes: u64, example: Option<Example> },
    /// A whole document, which may be empty or left out.
    Whole(Box<PartDone>),
    /// The text is UTF-8; the pass needs nothing else.
    Checked,
    /// No document.
    Skipped(SkipReason),
}

/// Starts the threads that do the jobs: as many as the work has workers, or as the system gives, since their number changes no result.
///
/// # Errors
/// The system gives none.
pub(crate) fn start_workers<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: &'scope Work<'_>,
    jobs: &'scope JobQueue,
    results: &Sender<Numbered<Done>>,
) -> Result<(), PrepareError> {
    for started in 0..work.workers {
        let results = results.clone();
        let perform = move || perform_all(work, jobs, &results);
        if let Err(error) = thread::Builder::new().spawn_scoped(scope, perform) {
            if started == 0 {
                return Err(PrepareError::io("start a thread that prepares", work.folder)(error));
            }
            tracing::warn!("started {started} threads of {}: {error}", work.workers);
            break;
        }
    }
    Ok(())
}

/// Does jobs until there are no more, or results are no longer wanted.
fn perform_all(work: &Work<'_>, jobs: &JobQueue, results: &Sender<Numbered<Done>>) {
    while let Some(Numbered { number, item: job }) = jobs.pop() {
        // The job frees its inputs before the calling thread counts their memory as free.
        let item = match job {
            Job::Read(reading) => {
                let path = &work.inputs[reading.input].path;
                let what = || format!("tokenizing {}", path.display());
                Done::Taken(caught(|| read(work, &reading, number).map(Taken::Text), what))
            }
            Job::Cut(Cutting { input, reader }) => {
                let path = &work.inputs[input].path;
                let what = || format!("reading {}", path.display());
                let cut = caught(|| Ok(cut(work, input, reader)), what);
                Done::Cut(input, cut.unwrap_or_else(|error| Err(ReadFailure::Fatal(error))))
            }
            Job::Take(part) => {
                let path = Arc::clone(&part.part.path);
                let what = || format!("tokenizing {}", path.display());
                Done::Taken(caught(
                    || take(work, part, number).map(Box::new).map(Taken::Part),
                    what,
                ))
            }
            Job::Encode(row_group) => {
                let path = work.folder.join(shard_file(row_group.shard));
                let encode = || {
                    let encoded = work.format.encode(&row_group, &work.cut);
                    encoded.map_err(|error| encoding_error(&path, error))
                };
                Done::RowGroup(caught(encode, || format!("encoding {}", path.display())))
            }
        };
        if results.send(Numbered { number, item }).is_err() {
            return;
        }
    }
}

/// The result of the job, or the error that it panicked while doing `what`.
fn caught<T>(
    job: impl FnOnce() -> Result<T, PrepareError>,
    what: impl FnOnce() -> String,
) -> Result<T, PrepareError> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        Err(PrepareError::Panic { work: what(), message: panic_message(&*panic) })
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

fn read(work: &Work<'_>, reading: &Reading, number: u64) -> Result<TextDone, PrepareError> {
    let done = |found| Ok(TextDone { reading: reading.clone(), found });
    let Input { path, bytes, .. } = &work.inputs[reading.input];
    let text = match &reading.extent {
        Extent::Whole => read_document(path),
        Extent::Check(piece) | Extent::Piece(piece) => read_piece(path, *bytes, piece.clone()),
        Extent::Part => unreachable!("parts are cut off, not read"),
    };
    let (text, ends_document) = match (&reading.extent, text) {
        (Extent::Check(_), Ok(_)) => return done(Found::Checked),
        // It was good when it was checked, and parts of it may be in rows already.
        (Extent::Piece(_), Err(reason)) => {
            return Err(PrepareError::DocumentChanged { path: path.clone(), reason });
        }
        (_, Err(reason)) => {
            let admission = Admission::new(work.rules, number, reading.input);
            let unchanged = admission.finish().ok_or_else(|| changed(path));
            return unchanged.and_then(|_| done(Found::Skipped(reason)));
        }
        (Extent::Piece(piece), Ok(text)) => (text, piece.end == *bytes),
        (_, Ok(text)) => {
            let mut whole = PartDone { input: reading.input, ..PartDone::default() };
            let mut admission = Admission::new(work.rules, number, reading.input);
            take_text(work, path, None, &text, &mut admission, &mut whole)?;
            whole.end(admission, path)?;
            return done(Found::Whole(Box::new(whole)));
        }
    };
    let begins_document = matches!(&reading.extent, Extent::Piece(piece) if piece.start == 0);
    let is_shown = begins_document && work.rules.reporting == Reporting::Files;
    let example = is_shown.then(|| Example::of_text(reading.input, path, None, &text));
    let mut tokens = Vec::with_capacity(text.len() + 1);
    tokenize(work, path, &text, &mut tokens)?;
    if ends_document {
        tokens.push(work.tokenizer.eos_token_id());
    }
    done(Found::Piece { tokens, text_bytes: text.len() as u64, example })
}

/// Puts a text into the stream, as far as it is to be there.
fn take_text(
    work: &Work<'_>,
    path: &Path,
    place: Option<Place>,
    text: &str,
    admission: &mut Admission<'_>,
    done: &mut PartDone,
) -> Result<(), PrepareError> {
    if text.is_empty() {
        done.empty += 1;
        return Ok(());
    }
    let source = text;
    let Some(text) = admission.admit(path, place, source)? else { return Ok(()) };
    let before = done.tokens.len();
    done.tokens.reserve(text.len() + 1);
    tokenize(work, path, &text, &mut done.tokens)?;
    done.tokens.push(work.tokenizer.eos_token_id());
    let length = done.tokens.len() - before;
    if let Pass::Fetch(_) = work.rules.pass {
        done.lengths.push(length);
    }
    admission.keep((path, place), source, length);
    done.documents += 1;
    done.text_bytes += text.len() as u64;
    Ok(())
}

/// The error that an input has changed since the first pass.
fn changed(path: &Path) -> PrepareError {
    PrepareError::InputChanged { path: path.to_owned() }
}

impl PartDone {
    /// Takes the results on the documents, which are complete.
    fn end(&mut self, admission: Admission<'_>, path: &Path) -> Result<(), PrepareError> {
        (self.left_out, self.batch) = admission.finish().ok_or_else(|| changed(path))?;
        Ok(())
    }
}

/// Appends the tokens of a text, all of the tokenizer's vocabulary.
fn tokenize(
    work: &Work<'_>,
    path: &Path,
    text: &str,
    tokens: &mut Vec<u32>,
) -> Result<(), PrepareError> {
    let before = tokens.len();
    let encoded = work.tokenizer.encode(text, tokens);
    encoded.map_err(|source| PrepareError::Tokenize { path: path.to_owned(), source })?;
    let vocab_size = work.tokenizer.vocab_size();
    match tokens[before..].iter().find(|&&token| token >= vocab_size) {
        Some(&token) => {
            Err(PrepareError::TokenizedToken { path: path.to_owned(), token, vocab_size })
        }
        None => Ok(()),
    }
}

/// Cuts the next part off, opening the input first where that was not done.
fn cut(
    work: &Work<'_>,
    input: usize,
    reader: Option<Box<dyn ReadParts>>,
) -> Result<CutDone, ReadFailure> {
    let mut reader = match reader {
        Some(reader) => reader,
        None => work.sources.open(&work.inputs[input])?,
    };
    let Bounds { piece_bytes, document_bytes, .. } = work.bounds;
    let next = reader.next_part(Limits {
        part_bytes: usize::try_from(piece_bytes).unwrap_or(usize::MAX),
        document_bytes: usize::try_from(document_bytes).unwrap_or(usize::MAX),
    })?;
    Ok(CutDone { reader, next })
}

/// Tokenizes the documents of a part.
fn take(work: &Work<'_>, at_hand: PartAtHand, number: u64) -> Result<PartDone, PrepareError> {
    let PartAtHand { input, part, held_bytes, read_bytes } = at_hand;
    let path = &part.path;
    let mut done = PartDone { input, held_bytes, read_bytes, ..PartDone::default() };
    let mut admission = Admission::new(work.rules, number, input);
    part.documents.visit(&mut |place, entry| {
        match entry {
            Entry::Text(text) => {
                take_text(work, path, Some(place), text, &mut admission, &mut done)?;
            }
            Entry::Tokens(tokens) => {
                check_sample(work, path, place, tokens)?;
                admission.keep_sample(tokens.len());
                done.tokens.extend_from_slice(tokens);
                done.documents += 1;
            }
            Entry::Null => done.nulls += 1,
            Entry::Broken(reason) => {
                let path = path.to_path_buf();
                if work.strictness == Strictness::Strict {
                    return Err(PrepareError::BrokenDocument { path, place, reason });
                }
                done.broken.push(BrokenDocument { path, place, reason });
            }
        }
        Ok(())
    })?;
    done.end(admission, path)?;
    done.largest_token = done.tokens.iter().copied().max().unwrap_or(0);
    Ok(done)
}

/// Whether an already tokenized sample is of the vocabulary, where that is known.
fn check_sample(
    work: &Work<'_>,
    path: &Path,
    place: Place,
    tokens: &[u32],
) -> Result<(), PrepareError> {
    let Some(vocab_size) = work.vocab_size else { return Ok(()) };
    match tokens.iter().find(|&&token| token >= vocab_size) {
        Some(&token) => Err(PrepareError::SampleToken {
            path: path.to_owned(),
            place,
            token: i128::from(token),
            vocab_size: u64::from(vocab_size),
        }),
        None => Ok(()),
    }
}
