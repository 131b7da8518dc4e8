//! `tidemill prepare`: documents to a data set.

mod document_tokenizer;
mod follow;
mod phases;
mod places;
mod report;
mod update;

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidemill_streaming_data::prepare::{
    BrokenDocument, ByteTokenizer, DEFAULT_GLOB, DEFAULT_SEQ_LEN, Dedup, DedupSettings,
    FilterSettings, Layout, PrepareReport, PrepareSettings, Reporting, SkippedDocument, Strictness,
    Tokenize, TokenizedBy, data_report::REPORT_PAGE,
};
use tidemill_streaming_data::store::Location;

use self::document_tokenizer::{DocumentTokenizer, Library};
use self::places::{Done, Ended, Task, What};
use super::Format;
use super::exit::one_line;
use super::output::{note_line, result_line};
use super::processes::{PlaceArguments, SECRET_HELP, parse_threads};
use crate::cli::exit::ExitCode;
use crate::error::JobError;
use crate::printable::printable;

/// Help on several processes: their benefit and their limits.
const PROCESSES_HELP: &str = "\
Several processes (-n, or -p and --hosts) leave the bytes and the report of one. Inputs are dealt out by their sizes, and each process \
reads, filters, signs and tokenizes its own, so a single large file is not shared out. All need the inputs under the same paths, and the \
same flags. Process 0 alone writes: it receives all tokens (4 bytes each) and encodes all shards, a tenth of the work of tokenizing with the \
fastest library, and with --updatable it takes the records of all documents, some 150 bytes each. What a process has read before its turn waits in its folder \
for temporary files (TMPDIR): 4 bytes for each token of its inputs, those records, and with --dedup 8 bytes for each record of duplicates that is \
not the first of its kind (with near a document has 15).";

/// Flags of `tidemill prepare`.
#[derive(Debug, Args)]
#[command(after_help = format!("{PROCESSES_HELP}\n\n{SECRET_HELP}"))]
pub(crate) struct PrepareArguments {
    /// Files and folders: UTF-8 text, JSON lines (.jsonl, .ndjson, .json, also .gz and .zst),
    /// Parquet, and MDS folders of MosaicML.
    #[arg(long, value_name = "PATH", required_unless_present_any = ["print_filter", "update", "follow"], num_args = 1..)]
    input: Vec<PathBuf>,
    /// The folder that becomes the data set, missing or empty, or the URL of one in a store (s3, gs, az, or http with
    /// WebDAV), where no data set is. Shards on their way there wait in the folder for temporary files (TMPDIR).
    #[arg(long, value_name = "DIR|URL", required_unless_present = "print_filter")]
    output: Option<PathBuf>,
    /// The inputs in input folders; an index.json that matches makes its folder one, if it is
    /// that of an MDS data set.
    #[arg(long, value_name = "GLOB", default_value = DEFAULT_GLOB)]
    glob: String,
    /// Where the text of a line, row or sample is: a key or column, with dots into nested ones; by
    /// default `text`, and of MDS samples that have them, `tokens`.
    #[arg(long, value_name = "KEY")]
    text_key: Option<String>,
    /// `bytes`, or the path of a Hugging Face tokenizer.json or of its folder; by default `bytes`.
    /// For samples that are tokenized already, the one that made their tokens.
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<String>,
    /// Predicted tokens per sample; by default 512. Samples that are tokenized already have a
    /// length, with which this must agree.
    #[arg(long, value_name = "N")]
    seq_len: Option<NonZeroUsize>,
    /// Which documents and lines are trained on, by the rules of named sets, one after the other: gopher, repetition, c4,
    /// fineweb, refinedweb, nemo-english; or of TOML files of the same form. The report counts documents and lines by rule.
    /// A large text file is then held in memory whole.
    #[arg(long, value_name = "NAME|FILE.toml,...")]
    filter: Option<String>,
    /// Leave out documents because there are others like them; the first in the order of the inputs is kept. `exact`:
    /// the same text. `exact-words`: the same words, in whatever case, with whatever between them and whatever digits.
    /// `near`: and those that have most runs of five words in common. The inputs are read twice, and must not change
    /// meanwhile; text files are held in memory whole, as with --filter.
    #[arg(long, value_enum, default_value_t)]
    dedup: DedupKind,
    /// Memory for records of documents while they are compared, in each process: 24 bytes for each document, of `near`
    /// 248. Above that they are sorted in the folder for temporary files (TMPDIR); it changes no verdict.
    #[arg(long, value_name = "N", default_value = "1024")]
    dedup_memory_mib: NonZeroU32,
    /// A list of documents to leave out, a key a line: the path of an input as it is reached; such a path, a tab and the
    /// number of a line, row or sample in it, as messages have it; or `xxh3-128:` and the hash of a text.
    #[arg(long, value_name = "KEYS.txt")]
    exclude: Option<PathBuf>,
    /// Print the TOML of a named set, to be copied and changed, and do nothing else.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["input", "output", "filter"])]
    print_filter: Option<String>,
    /// The token that ends a document, by its text; by default the one that the tokenizer's folder
    /// names, or else its usual one.
    #[arg(long, value_name = "TOKEN", requires = "tokenizer")]
    eos_token: Option<String>,
    /// The library that tokenizes. `fastest` is another than Hugging Face's where it gives the same tokens: they are compared on
    /// difficult texts first, and then on some documents of the data set, where a difference is an error.
    #[arg(long, value_enum, default_value_t)]
    tokenizer_library: Library,
    /// Size of the vocabulary, at least the tokenizer's; by default that, and of samples that are
    /// tokenized already their largest token + 1.
    #[arg(long, value_name = "N")]
    vocab_size: Option<NonZeroU32>,
    /// Samples of each shard; by default about 64 MiB of tokens.
    #[arg(long, value_name = "N")]
    shard_samples: Option<NonZeroUsize>,
    /// Make a data set that --update keeps up to date. Shards are named by their content and end at places that the documents
    /// determine, so that a change rewrites only the shards it touches. Sizes vary by a third, up to twice --shard-samples, and some
    /// tokens at the end of each shard fill no sample. Records of the documents are kept beside the shards: 35 bytes and a name for
    /// each, 150 with `--dedup near`; their paths are absolute. The inputs are read twice, whole documents at a time.
    #[arg(long)]
    updatable: bool,
    /// Write a report on the data set beside the shards: report.html, a page that needs only a browser, and report.json. They hold
    /// the documents by verdict and rule with the first three of each (as read, up to 240 characters), lengths, groups of duplicates
    /// and tokens by source; for a data set with --updatable also what an update changed: each version has a report, and each record
    /// holds the length of its document. A report holds no time, and is the same for any number of workers and processes. `inspect`
    /// prints it as text.
    #[arg(long, conflicts_with = "print_filter")]
    report: bool,
    /// Make a new version of an updatable data set from its inputs as they are now. --output is the data set; all other settings are
    /// those that it was prepared with. Only inputs whose size or time changed are read, and the new version is the same as one
    /// prepared from nothing. Older versions stay until `tidemill prune`. Records of documents whose inputs are read again, or are
    /// gone, are held in memory meanwhile: about 400 bytes each with --dedup near.
    #[arg(long, requires = "output", conflicts_with_all = [
        "input", "glob", "text_key", "tokenizer", "seq_len", "filter", "dedup", "exclude", "eos_token", "vocab_size",
        "shard_samples", "strict", "updatable", "report", "print_filter",
    ])]
    update: bool,
    /// Update the data set, and again whenever its inputs change, until stopped (Ctrl-C or SIGTERM). Each new version is reported in
    /// a line. Errors in inputs after the first version are reported, and the update is tried again.
    #[arg(long, requires = "output", conflicts_with_all = [
        "input", "glob", "text_key", "tokenizer", "seq_len", "filter", "dedup", "exclude", "eos_token", "vocab_size",
        "shard_samples", "strict", "updatable", "report", "print_filter", "update", "verify", "processes", "process",
    ])]
    follow: bool,
    /// With --follow: seconds between two looks at names, sizes and times of the inputs.
    // That it needs --follow is waived where that conflicts with another flag.
    #[arg(long, value_name = "N", default_value = "10", requires = "follow", conflicts_with_all = ["input", "print_filter"])]
    look_seconds: NonZeroU32,
    /// With --update: read all inputs, whether or not their sizes and times are the same.
    // That it needs --update is waived where that conflicts with another flag.
    #[arg(long, requires = "update", conflicts_with_all = ["input", "print_filter"])]
    verify: bool,
    /// Make files, lines and rows that are no documents an error that leaves nothing behind.
    #[arg(long)]
    strict: bool,
    /// Threads of each process that read and tokenize; neither they nor processes change a byte. By default one per core. What is on its way takes 32 MiB of
    /// memory for each of them, and a larger document is on its way alone, with up to 32 times its size: a line, row or sample
    /// may have 64 MiB, a text file any size. Beside that are held: the tokenizer (one of 50,000 entries, some 200 MB), of Parquet a page of the text and a dictionary (each of 1 GiB
    /// at most; most writers make them of 1 MiB), of Zstandard its window (128 MiB at most), of an MDS shard in Snappy all of it
    /// (1 GiB at most).
    #[arg(short = 'w', long, value_name = "N", value_parser = parse_threads)]
    workers: Option<NonZeroUsize>,
    #[command(flatten)]
    places: PlaceArguments,
    /// How the report is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Values of `--dedup`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum DedupKind {
    #[default]
    None,
    Exact,
    ExactWords,
    Near,
}

/// How many lines and rows that are no documents get a line of their own.
const PRINTED_BROKEN: usize = 20;

pub(crate) fn run(arguments: &PrepareArguments) -> anyhow::Result<ExitCode> {
    if let Some(name) = &arguments.print_filter {
        let text = FilterSettings::named(name).ok_or_else(|| {
            let known = FilterSettings::names().collect::<Vec<_>>().join(", ");
            JobError::value("--print-filter", format!("one of {known}"), name)
        })?;
        result_line!("{}", text.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    let output = Location::of_path(&arguments.output.clone().unwrap_or_default())?;
    if output.to_string().starts_with("memory://") {
        let expected = "a place that outlives the program";
        return Err(JobError::value("--output", expected, output).into());
    }
    if arguments.follow {
        return follow::run(arguments, &output);
    }
    let ended = places::run(arguments, |workers| match arguments.update {
        true => update::task(arguments, workers),
        false => task(arguments, workers),
    })?;
    let (done, _lifeline) = match ended {
        Ended::Done(done, lifeline) => (done, lifeline),
        Ended::Elsewhere(code) => return Ok(code),
    };
    match *done {
        Done::Prepared(report) => {
            note_left_out(&report)?;
            report::print(&report, &output, arguments)?;
            if arguments.report && arguments.format == Format::Text {
                result_line!("what it is made of: {}", output.join(REPORT_PAGE))?;
            }
        }
        Done::Updated(updated) => update::print(&updated, &output, arguments.format)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The preparation that flags ask for, by so many threads.
fn task(arguments: &PrepareArguments, workers: NonZeroUsize) -> anyhow::Result<Task> {
    let output_path = arguments.output.clone().unwrap_or_default();
    let settings = PrepareSettings {
        glob: arguments.glob.clone(),
        text_key: arguments.text_key.clone(),
        seq_len: arguments.seq_len,
        vocab_size: arguments.vocab_size.map(NonZeroU32::get),
        tokenized_by: match arguments.tokenizer {
            Some(_) => TokenizedBy::Tokenizer,
            None => TokenizedBy::Unknown,
        },
        filters: match &arguments.filter {
            Some(list) => FilterSettings::from_list(list)?,
            None => FilterSettings::default(),
        },
        dedup: DedupSettings {
            dedup: match arguments.dedup {
                DedupKind::None => Dedup::None,
                DedupKind::Exact => Dedup::Exact,
                DedupKind::ExactWords => Dedup::ExactWords,
                DedupKind::Near => Dedup::Near,
            },
            memory_bytes: u64::from(arguments.dedup_memory_mib.get()) << 20,
        },
        exclude: arguments.exclude.clone(),
        workers,
        strictness: if arguments.strict { Strictness::Strict } else { Strictness::Lenient },
        shard_samples: arguments.shard_samples,
        layout: if arguments.updatable { Layout::Updatable } else { Layout::Stream },
        reporting: if arguments.report { Reporting::Files } else { Reporting::None },
        ..PrepareSettings::new(arguments.input.clone(), output_path, DEFAULT_SEQ_LEN)
    };
    let eos_token = arguments.eos_token.as_deref();
    let tokenizer: Box<dyn Tokenize> = match arguments.tokenizer.as_deref() {
        None | Some("bytes") => {
            if eos_token.is_some() {
                let (origin, what) = (
                    "--eos-token".to_owned(),
                    "expected only with a tokenizer.json; the tokenizer `bytes` has its own",
                );
                return Err(JobError::Config { origin, what: what.to_owned() }.into());
            }
            Box::new(ByteTokenizer)
        }
        Some(path) => {
            let library = arguments.tokenizer_library;
            Box::new(DocumentTokenizer::open(path.as_ref(), eos_token, library)?)
        }
    };
    Ok(Task { what: What::Prepare(Box::new(settings)), tokenizer })
}

/// Names what gave no document, and keys of lists that no document has.
fn note_left_out(report: &PrepareReport) -> anyhow::Result<()> {
    note_skipped(&report.skipped, (&report.named_broken, report.broken));
    for key in report.unused_exclusions.iter().take(PRINTED_BROKEN) {
        note_line!("no document has key {key:?} of the list");
    }
    let others = report.unused_exclusions.len().saturating_sub(PRINTED_BROKEN);
    if others > 0 {
        note_line!("no document has {others} other keys of the list");
    }
    Ok(())
}

/// The most bytes of a line about a document, whose name may be anything.
const LONGEST_LINE_BYTES: usize = 8 << 10;

/// Says which inputs could not be read, and which lines and rows are no documents: the first of so many.
pub(super) fn note_skipped(
    skipped: &[SkippedDocument],
    (named_broken, broken): (&[BrokenDocument], u64),
) {
    for skipped in skipped {
        let line = format!("skipped {}: {}", skipped.path.display(), one_line(&skipped.reason));
        note_line!("{}", printable(&line, LONGEST_LINE_BYTES));
    }
    for broken in named_broken.iter().take(PRINTED_BROKEN) {
        let BrokenDocument { path, place, reason } = broken;
        let line = format!("skipped {}, {place}: {reason}", path.display());
        note_line!("{}", printable(&line, LONGEST_LINE_BYTES));
    }
    let others = broken.saturating_sub(PRINTED_BROKEN as u64);
    if others > 0 {
        note_line!("skipped {others} other lines or rows");
    }
}
