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
