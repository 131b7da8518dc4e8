//! Reads documents for other uses of their texts.

use std::{
    fmt,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    BrokenDocument, ByteTokenizer, FilterSettings, PrepareError, PrepareSettings, Progress,
    Reporting, SkippedDocument, Strictness, bounds,
    choose::{
        admit::{Pass, Rules},
        exclude::Exclusions,
    },
    cut,
    input::{Contents, Sources, find::find_inputs},
    output::shard::{ShardFormat, encoding_error},
    pipeline::{self, job::Work},
};

/// Which texts are read, and how.
#[derive(Debug, Clone)]
pub struct TextSettings {
    /// Files and folders.
    pub inputs: Vec<PathBuf>,
    /// Which files of a folder are inputs.
    pub glob: String,
    /// Where the text of a line, row or sample is.
    pub text_key: Option<String>,
    /// Which documents are shown, and which of their lines.
    pub filters: FilterSettings,
    /// The policy for documents that cannot be read.
    pub strictness: Strictness,
    /// Number of threads.
    pub workers: NonZeroUsize,
}

/// The outcome of reading texts.
#[derive(Debug, Default)]
pub struct TextsReport {
    /// Documents that were shown.
    pub documents: u64,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Inputs that could not be read, or not to their end.
    pub skipped: Vec<SkippedDocument>,
    /// Lines, rows and samples that are no documents.
    pub broken: u64,
    /// The first of these.
    pub named_broken: Vec<BrokenDocument>,
}

/// A callback that is given each text.
#[derive(Clone, Copy)]
pub(crate) struct Visitor<'a>(&'a (dyn Fn(&str) + Sync));

impl Visitor<'_> {
    pub(crate) fn visit(self, text: &str) {
        (self.0)(text);
    }
}

impl fmt::Debug for Visitor<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Visitor")
    }
}

/// Shows `visit` the text of each document, whole and as the filters leave it, on several threads and in any order: as
/// [`prepare`](super::prepare) reads them, within the same bounds of memory.
///
/// # Errors
/// The errors of `prepare` about inputs.
pub fn read_texts(
    settings: &TextSettings,
    visit: &(dyn Fn(&str) + Sync),
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<TextsReport, PrepareError> {
    let mut found = find_inputs(&settings.inputs, &settings.glob)?;
    if settings.strictness == Strictness::Strict && !found.skipped.is_empty() {
        let SkippedDocument { path, reason } = found.skipped.remove(0);
        return Err(PrepareError::Document { path, reason });
    }
    let sources = Sources::new(&mut found.inputs, settings.text_key.as_deref())?;
    if let Contents::Samples { .. } = sources.contents() {
        return Err(PrepareError::ChosenTokens { path: found.inputs[0].path.clone() });
    }
    let (documents, text_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let counted = |text: &str| {
        documents.fetch_add(1, Ordering::Relaxed);
        text_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        visit(text);
    };
    // Nothing is packed: a row is as good as another.
    let nowhere = Path::new("");
    let packing = PrepareSettings::new(Vec::new(), nowhere.to_owned(), NonZeroUsize::MIN);
    let cut = cut(&packing, Contents::Documents)?;
    let format = ShardFormat::new(cut.seq_len).map_err(|error| encoding_error(nowhere, error))?;
    let exclusions = Exclusions::default();
    let workers = settings.workers.get();
    let work = Work {
        inputs: &found.inputs,
        sources: &sources,
        rules: Rules {
            reporting: Reporting::None,
            exclusions: &exclusions,
            filters: settings.filters.sets(),
            pass: Pass::Visit(Visitor(&counted)),
        },
        tokenizer: &ByteTokenizer,
        vocab_size: None,
        cut,
        format: &format,
        folder: nowhere,
        strictness: settings.strictness,
        workers,
        bounds: bounds(workers),
        peers: None,
    };
    let mut show =
        |now: Progress| progress(Progress { documents: documents.load(Ordering::Relaxed), ..now });
    let outcome = pipeline::run(&work, None, None, &mut show)?;
    found.skipped.extend(outcome.skipped);
    Ok(TextsReport {
        documents: documents.into_inner(),
        text_bytes: text_bytes.into_inner(),
        skipped: found.skipped,
        broken: outcome.broken.count,
        named_broken: outcome.broken.named,
    })
}
