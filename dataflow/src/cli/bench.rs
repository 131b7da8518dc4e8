//! `tidemill bench`: throughput, and its bound.

mod collective;
mod data;
mod generate;
mod kernels;
mod train;

use crate::cli::exit::ExitCode;

use clap::{Args, Subcommand};

/// Flags of `tidemill bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Train a preset on made-up tokens: tokens a second, through the whole graph.
    Train(train::TrainBench),
    /// Continue made-up prompts with one or two presets: tokens a second and memory by batch size.
    Generate(generate::GenerateBench),
    /// Run each kernel alone: milliseconds, and the fraction of the device's ceiling.
    Kernels(kernels::KernelsBench),
    /// Sum and gather between workers: bytes a second by the size of a bucket, every result checked.
    Collective(collective::CollectiveBench),
    /// Read a data set in canonical order: samples or rows a second, and their bound.
    Data(data::DataBench),
}

pub(crate) fn run(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    match &arguments.what {
        What::Train(bench) => train::run(bench),
        What::Generate(bench) => generate::run(bench),
        What::Kernels(bench) => kernels::run(bench),
        What::Collective(bench) => collective::run(bench),
        What::Data(bench) => data::run(bench),
    }
}

/// The most memory that this process has had, where the system says so.
fn peak_memory_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// The memory that this process has now, where the system says so.
fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

fn status_bytes(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
