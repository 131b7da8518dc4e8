//! `tidemill bench`: throughput, and what bounds it.

mod data;
mod kernels;
mod train;

use crate::cli::exit::ExitCode;

use clap::{Args, Subcommand};

/// What of `tidemill bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Train a preset on made-up tokens: tokens a second, through the whole graph.
    Train(train::TrainBench),
    /// Run each kernel alone: milliseconds, and the fraction of what the device can do.
    Kernels(kernels::KernelsBench),
    /// Read a data set in canonical order: samples a second.
    Data(data::DataBench),
}

pub(crate) fn run(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    match &arguments.what {
        What::Train(bench) => train::run(bench),
        What::Kernels(bench) => kernels::run(bench),
        What::Data(bench) => data::run(bench),
    }
}
