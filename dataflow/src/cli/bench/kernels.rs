//! `tidemill bench kernels`: milliseconds of each kernel, beside the device's ceilings.
//!
//! Two ceilings are measured first, on the device itself: bytes a second of a large copy, and operations a second of a large
//! matrix product. A kernel's fraction is that of the ceiling which bounds it: the fewest bytes that it must move, or its
//! multiplications. (A scan is bound by neither: its exponentials take longer than its bytes.) Times are device time between
//! two events, the median of many runs after one that is not counted.

mod attention;
mod feed_forward;
mod head_scan;
mod measure;
mod products;
mod rows;
mod sequences;

use crate::cli::exit::ExitCode;
use std::num::NonZeroUsize;

use clap::Args;
use serde::Serialize;
use tidemill_kernels::{Backend, Cpu, KernelError, MemoryPlace};

use self::measure::{Bench, Ceilings, Measured};
use crate::cli::Format;
use crate::cli::device::DeviceArguments;
use crate::cli::output::{note_line, result_line};
use crate::device::{Devices, WithBackend};
use crate::error::JobError;

/// Flags of `tidemill bench kernels`.
#[derive(Debug, Args)]
pub(crate) struct KernelsBench {
    #[arg(long = "kernel", value_name = "WORD", help = kernels_help())]
    kernels: Vec<String>,
    /// Sequences: samples, positions, inner width and states; by default shapes that fill the device. Half of E is a
    /// block's width D; attention's heads are 64 columns wide where D is below 1024, else 128, as many as D has room for and
    /// at least one. Heads that are scanned have 64 channels, or the most below that divide E, and 8 N states, at most 256.
    #[arg(long = "shape", value_name = "B,T,E,N", value_parser = SequenceSize::parse)]
    shapes: Vec<SequenceSize>,
    /// Runs of which the median is taken.
    #[arg(long, value_name = "N", default_value = "20")]
    repeats: NonZeroUsize,
    /// Compute threads of the CPU.
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
    #[command(flatten)]
    device: DeviceArguments,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The sizes that a family of kernels is measured at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SequenceSize {
    /// b
    samples: usize,
    /// t
    positions: usize,
    /// e
    inner: usize,
    /// n
    states: usize,
}

impl SequenceSize {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |size: &str| match size.trim().parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(format!("expected numbers of at least 1, found {size:?}")),
        };
        let sizes = text.split(',').map(number).collect::<Result<Vec<usize>, _>>()?;
        match sizes[..] {
            [samples, positions, inner, states] => Ok(Self { samples, positions, inner, states }),
            _ => Err(format!("expected four numbers, b,t,e,n, found {}", sizes.len())),
        }
    }

    fn rows(self) -> usize {
        self.samples * self.positions
    }

    /// d: half of the inner width.
    fn width(self) -> usize {
        (self.inner / 2).max(1)
    }

    /// Shapes that fill a device: the shape that scans are compared at, then microbatches of Mamba 1.4B. On a host, a small model's.
    fn defaults(place: MemoryPlace) -> Vec<Self> {
        let size = |samples, positions, inner| Self { samples, positions, inner, states: 16 };
        match place {
            MemoryPlace::Device => {
                vec![size(2, 4096, 5376), size(8, 2048, 4096), size(16, 1024, 4096)]
            }
            MemoryPlace::Host => vec![size(4, 512, 512)],
        }
    }
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct ResultLine {
    kernel: &'static str,
    shape: String,
    dtype: &'static str,
    direction: &'static str,
    milliseconds: f64,
    gigabytes_per_second: f64,
    teraflops: f64,
    ceiling_fraction: f64,
}

pub(crate) fn run(bench: &KernelsBench) -> anyhow::Result<ExitCode> {
    let names = families::<Cpu>().map(|(name, _)| name);
    let nameless = |word: &&String| !names.iter().any(|name| name.contains(word.as_str()));
    if let Some(word) = bench.kernels.iter().find(nameless) {
        let expected = format!("a word of one of {}", names.join(", "));
        return Err(JobError::value("--kernel", expected, format!("{word:?}")).into());
    }
    let smaller = "give smaller sizes with --shape";
    bench.device.open_one(bench.threads, smaller, Measuring { bench })
}

struct Measuring<'a> {
    bench: &'a KernelsBench,
}

type Family<B> = fn(&mut Bench<'_, B>, SequenceSize) -> Measured;

/// The families of kernels by name.
fn families<B: Backend>() -> [(&'static str, Family<B>); 25] {
    [
        ("selective_scan", sequences::selective_scan),
        ("selective_scan_documents", sequences::selective_scan_documents),
        ("head_scan", head_scan::head_scan),
        ("head_scan_documents", head_scan::head_scan_documents),
        ("causal_conv1d_silu", sequences::causal_conv1d_silu),
        ("causal_conv1d_silu_documents", sequences::causal_conv1d_silu_documents),
        ("attention", attention::attention),
        ("attention_alibi", attention::attention_alibi),
        ("attention_shared_keys", attention::attention_shared_keys),
        ("rotary", attention::rotary),
        ("rms_norm_heads", attention::rms_norm_heads),
        ("rms_norm", rows::rms_norm),
        ("layer_norm", rows::layer_norm),
        ("gelu", feed_forward::gelu),
        ("gated_silu", feed_forward::gated_silu),
        ("bias", feed_forward::bias),
        ("embedding", rows::embedding),
        ("cross_entropy", rows::cross_entropy),
        ("adamw", rows::adamw),
        ("adamw_master", rows::adamw_master),
        ("lion", rows::lion),
        ("accumulate", rows::accumulate),
        ("sums_of_squares", rows::sums_of_squares),
        ("matmul", products::forward),
        ("weight_gradient", products::weight_gradients),
    ]
}

/// The help of `--kernel`.
fn kernels_help() -> String {
    let names = families::<Cpu>().map(|(name, _)| name).join(", ");
    format!("Kernels whose names contain one of these words; all by default: {names}")
}

impl WithBackend for Measuring<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let KernelsBench { kernels, shapes, repeats, format, .. } = self.bench;
        let backend = devices.first();
        let mut stream = backend.device_stream()?;
        let mut bench = Bench::new(backend.as_ref(), &mut stream, repeats.get());
        let ceilings = Ceilings::measure(&mut bench)?;
        let shapes = match &shapes[..] {
            [] => SequenceSize::defaults(backend.memory()),
            shapes => shapes.to_vec(),
        };
        let wanted =
            |name: &str| kernels.is_empty() || kernels.iter().any(|word| name.contains(word));
        let mut lines = Vec::new();
        for size in shapes {
            for (name, family) in families::<B>() {
                if wanted(name) {
                    match family(&mut bench, size) {
                        Ok(measured) => lines.extend(measured),
                        Err(lacking @ KernelError::Unsupported { .. }) => {
                            note_line!("{name} is not measured: {lacking}");
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        let dtype = devices.precision().word();
        let lines: Vec<ResultLine> =
            lines.into_iter().map(|measured| ceilings.line(measured, dtype)).collect();
        print(*format, &devices.in_words(), &ceilings, &lines)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn print(
    format: Format,
    device: &str,
    ceilings: &Ceilings,
    lines: &[ResultLine],
) -> anyhow::Result<()> {
    if let Format::Json = format {
        return result_line!("{}", serde_json::to_string_pretty(lines)?);
    }
    result_line!(
        "{device}: a copy moves {:.0} GB/s, a product does {:.1} TFLOP/s",
        ceilings.gigabytes_per_second,
        ceilings.teraflops
    )?;
    let widest = |word: fn(&ResultLine) -> &str| lines.iter().map(|line| word(line).len()).max();
    let [kernels, shapes] = [widest(|line| line.kernel), widest(|line| &line.shape)]
        .map(|most| most.unwrap_or(0).max(6));
    result_line!(
        "{:<kernels$} {:<shapes$} {:<9} {:>9} {:>8} {:>8} {:>9}",
        "kernel",
        "shape",
        "direction",
        "ms",
        "GB/s",
        "TFLOP/s",
        "ceiling"
    )?;
    for line in lines {
        result_line!(
            "{:<kernels$} {:<shapes$} {:<9} {:>9.4} {:>8.0} {:>8.1} {:>8.0}%",
            line.kernel,
            line.shape,
            line.direction,
            line.milliseconds,
            line.gigabytes_per_second,
            line.teraflops,
            100.0 * line.ceiling_fraction
        )?;
    }
    Ok(())
}
