//! `tidemill bench data`: samples a second of the reader.

use crate::cli::exit::ExitCode;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill_streaming_data::reader::{Decoder, DecoderSettings};
use tidemill_streaming_data::{DataSet, Mixture};

use crate::cli::Format;
use crate::cli::output::result_line;

/// Flags of `tidemill bench data`.
#[derive(Debug, Args)]
pub(crate) struct DataBench {
    /// The data set.
    #[arg(value_name = "DATASET")]
    dataset: PathBuf,
    /// Samples of a batch.
    #[arg(long, value_name = "N", default_value = "32")]
    batch: NonZeroU64,
    /// The canonical order.
    #[arg(long, value_enum, default_value_t = Shuffle::Window)]
    shuffle: Shuffle,
    /// Samples of a window.
    #[arg(long, value_name = "N", default_value = "16384")]
    window_samples: NonZeroU64,
    /// Threads that read and decode.
    #[arg(long, value_name = "N", default_value = "2")]
    threads: NonZeroUsize,
    /// Memory for decoded samples, in MiB.
    #[arg(long, value_name = "MIB", default_value = "512")]
    cache_mib: NonZeroUsize,
    /// How long to read for.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shuffle {
    None,
    Shard,
    Window,
    Full,
}

impl From<Shuffle> for ShuffleOrder {
    fn from(shuffle: Shuffle) -> Self {
        match shuffle {
            Shuffle::None => Self::None,
            Shuffle::Shard => Self::Shard,
            Shuffle::Window => Self::Window,
            Shuffle::Full => Self::Full,
        }
    }
}

pub(crate) fn run(bench: &DataBench) -> anyhow::Result<ExitCode> {
    let duration = Duration::try_from_secs_f64(bench.seconds).map_err(|error| {
        anyhow::anyhow!("--seconds: expected a time, found {}: {error}", bench.seconds)
    })?;
    let opened = Instant::now();
    let data_set = DataSet::open(&bench.dataset)?;
    let shuffle = ShuffleSettings {
        order: bench.shuffle.into(),
        window_samples: bench.window_samples,
        seed: 17,
    };
    let (seq_len, total) = (data_set.seq_len(), data_set.samples());
    let settings =
        DecoderSettings { threads: bench.threads, memory_bytes: bench.cache_mib.get() << 20 };
    let decoder = Decoder::new(Mixture::of(data_set, shuffle)?, settings)?;
    let batch = bench.batch.get();
    let plan = (0..).map(move |step| step * batch..(step + 1) * batch);
    let mut reader = decoder.reader(plan);
    // Bytes of tokens are folded in, so that nothing is read for nobody.
    let (mut samples, mut fold) = (0_u64, 0_u64);
    let mut take = |count: u64| -> anyhow::Result<()> {
        for sample in reader.by_ref().take(count as usize) {
            fold = fold.wrapping_add(u64::from(sample?.tokens[0]));
        }
        samples += count;
        Ok(())
    };
    take(batch)?;
    let first_batch_seconds = opened.elapsed().as_secs_f64();
    let started = Instant::now();
    while started.elapsed() < duration {
        take(batch)?;
    }
    let samples_per_second = (samples - batch) as f64 / started.elapsed().as_secs_f64();
    std::hint::black_box(fold);
    let megabytes = samples_per_second * (seq_len + 1) as f64 * 4.0 / 1e6;
    match bench.format {
        Format::Json => result_line!(
            "{}",
            serde_json::json!({
                "samples_per_second": samples_per_second,
                "first_batch_seconds": first_batch_seconds,
                "tokens_per_sample": seq_len + 1,
                "samples": total,
                "batch": batch,
                "threads": bench.threads,
            })
        )?,
        Format::Text => {
            result_line!(
                "{samples_per_second:.0} samples/s of {} tokens ({megabytes:.0} MB/s as u32)",
                seq_len + 1
            )?;
            result_line!(
                "first batch of {batch} after {:.1} ms, from opening",
                first_batch_seconds * 1e3
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
