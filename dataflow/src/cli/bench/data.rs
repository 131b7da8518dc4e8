//! `tidemill bench data`: samples, or rows of any columns, a second of the reader, and what bounds them.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tidemill_streaming_data::data_set::table::{
    Columns, RowBatch, Table, TableDecoder, TableSettings,
};
use tidemill_streaming_data::order::ShuffleSettings;
use tidemill_streaming_data::reader::{Decoder, DecoderSettings, Sample};
use tidemill_streaming_data::{CacheSettings, DataSet, DataSettings, Mixture};

use self::pace::{Pace, Read};
use crate::cli::Format;
use crate::cli::exit::ExitCode;
use crate::cli::order::OrderChoice;
use crate::cli::output::result_line;
use crate::error::JobError;

mod pace;

/// Flags of `tidemill bench data`.
#[derive(Debug, Args)]
pub(crate) struct DataBench {
    /// The data set's folder or URL.
    #[arg(value_name = "DATASET")]
    dataset: PathBuf,
    /// Read rows of these columns, whatever they are, in place of samples of tokens.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    columns: Vec<String>,
    /// Samples or rows of a batch.
    #[arg(long, value_name = "N", default_value = "32")]
    batch: NonZeroUsize,
    /// The canonical order.
    #[arg(long, value_enum, default_value_t = OrderChoice::Window)]
    shuffle: OrderChoice,
    /// Samples of a window.
    #[arg(long, value_name = "N", default_value = "16384")]
    window_samples: NonZeroU64,
    /// Threads that read and decode.
    #[arg(long, value_name = "N", default_value = "2")]
    threads: NonZeroUsize,
    /// Memory for decoded samples or rows, in MiB.
    #[arg(long, value_name = "MIB", default_value = "512")]
    cache_mib: NonZeroUsize,
    /// The folder in which shards of a remote data set are kept.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// The most bytes that the folder may hold.
    #[arg(long, value_name = "BYTES")]
    cache_limit_bytes: Option<u64>,
    /// How long to read for.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(bench: &DataBench) -> anyhow::Result<ExitCode> {
    let duration = Duration::try_from_secs_f64(bench.seconds).map_err(|error| {
        JobError::value("--seconds", "a time", format!("{}: {error}", bench.seconds))
    })?;
    let measured =
        if bench.columns.is_empty() { samples(bench, duration) } else { rows(bench, duration) }?;
    match bench.format {
        Format::Json => result_line!("{}", measured.json(bench))?,
        Format::Text => measured.print(bench)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// How much was read, and how fast.
struct Measured {
    /// `samples` or `rows`.
    what: &'static str,
    /// Samples or rows of the data set.
    total: u64,
    /// Tokens of a sample.
    tokens: Option<usize>,
    pace: Pace,
}

fn samples(bench: &DataBench, duration: Duration) -> anyhow::Result<Measured> {
    let opened = Instant::now();
    let data_set = DataSet::open_with(&bench.dataset, &bench.settings())?;
    let (tokens, total) = (data_set.seq_len() + 1, data_set.samples());
    let settings = DecoderSettings { threads: bench.threads, memory_bytes: bench.memory_bytes() };
    let decoder = Decoder::new(Mixture::of(data_set, bench.order())?, settings)?;
    let pace = Pace::of(decoder.reader(bench.plan()), opened, bench.limits(duration))?;
    Ok(Measured { what: "samples", total, tokens: Some(tokens), pace })
}

fn rows(bench: &DataBench, duration: Duration) -> anyhow::Result<Measured> {
    let opened = Instant::now();
    let columns = Columns::Named(bench.columns.clone());
    let table = Table::open(&bench.dataset, &columns, &bench.settings())?;
    let settings = TableSettings {
        threads: bench.threads,
        memory_bytes: bench.memory_bytes(),
        batch_rows: bench.batch,
    };
    let decoder = TableDecoder::new(&table, bench.order(), settings)?;
    let pace = Pace::of(decoder.reader(bench.plan()), opened, bench.limits(duration))?;
    Ok(Measured { what: "rows", total: table.rows(), tokens: None, pace })
}

impl Read for Sample {
    fn count(&self) -> u64 {
        1
    }

    fn bytes(&self) -> u64 {
        size_of_val(&self.tokens[..]) as u64
    }
}

impl Read for RowBatch {
    fn count(&self) -> u64 {
        self.rows.num_rows() as u64
    }

    fn bytes(&self) -> u64 {
        self.rows.get_array_memory_size() as u64
    }
}

impl DataBench {
    fn order(&self) -> ShuffleSettings {
        let (order, window_samples) = (self.shuffle.into(), self.window_samples);
        ShuffleSettings { order, window_samples, seed: 17 }
    }

    fn settings(&self) -> DataSettings {
        let cache =
            CacheSettings { dir: self.cache_dir.clone(), limit_bytes: self.cache_limit_bytes };
        DataSettings { cache, ..DataSettings::default() }
    }

    fn memory_bytes(&self) -> usize {
        self.cache_mib.get().saturating_mul(1 << 20)
    }

    /// Batches one after the other, for ever.
    fn plan(&self) -> impl Iterator<Item = std::ops::Range<u64>> + Send + 'static {
        let batch = self.batch.get() as u64;
        (0..).map(move |step| step * batch..(step + 1) * batch)
    }

    fn limits(&self, duration: Duration) -> pace::Limits {
        pace::Limits { batch: self.batch.get() as u64, duration, threads: self.threads.get() }
    }
}

impl Measured {
    fn json(&self, bench: &DataBench) -> Value {
        let Measured { what, total, tokens, pace } = self;
        json!({
            format!("{what}_per_second"): pace.per_second,
            "megabytes_per_second": pace.megabytes_per_second,
            "first_batch_seconds": pace.first_batch_seconds,
            "bound_by": pace.bound_by().map(|bound| bound.name()),
            "decoding_busy": pace.decoding_busy,
            "consumer_waited": pace.consumer_waited,
            "tokens_per_sample": tokens,
            *what: total,
            "batch": bench.batch,
            "threads": bench.threads,
        })
    }

    fn print(&self, bench: &DataBench) -> anyhow::Result<()> {
        let Measured { what, tokens, pace, .. } = self;
        let Pace { per_second, megabytes_per_second, first_batch_seconds, .. } = pace;
        let of = tokens.map_or(String::new(), |tokens| format!(" of {tokens} tokens"));
        let form = if tokens.is_some() { "u32" } else { "Arrow" };
        result_line!("{per_second:.0} {what}/s{of} ({megabytes_per_second:.0} MB/s as {form})")?;
        let milliseconds = first_batch_seconds * 1e3;
        result_line!("first batch of {} after {milliseconds:.1} ms, from opening", bench.batch)?;
        if let Some(bound) = pace.bound_by() {
            result_line!("bound by {}: {}", bound.name(), pace.reasons())?;
        }
        Ok(())
    }
}
