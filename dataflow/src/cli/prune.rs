//! `tidemill prune`: older versions of a data set are removed.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use indicatif::DecimalBytes;
use tidemill_streaming_data::prepare::prune;

use super::Format;
use super::exit::ExitCode;
use super::output::{counted, result_line};

/// Flags of `tidemill prune`.
#[derive(Debug, Args)]
pub(crate) struct PruneArguments {
    /// The folder or URL of a data set that was prepared with --updatable.
    #[arg(value_name = "DIR|URL")]
    folder: PathBuf,
    /// How many versions stay, the newest among them. A run that was begun with one that is removed cannot go on.
    #[arg(long, value_name = "N", default_value = "1")]
    keep: NonZeroUsize,
    /// How it is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(arguments: &PruneArguments) -> anyhow::Result<ExitCode> {
    let report = prune(&arguments.folder, arguments.keep)?;
    match arguments.format {
        Format::Json => {
            let names = |versions: &[tidemill_streaming_data::hash::ContentHash]| {
                versions.iter().map(ToString::to_string).collect::<Vec<_>>()
            };
            let printed = serde_json::json!({
                "kept": names(&report.kept),
                "removed": names(&report.removed),
                "files": report.files,
                "bytes": report.bytes,
            });
            result_line!("{printed}")?;
        }
        Format::Text => result_line!(
            "{}: removed {} of {}, and {} ({}) that no other has",
            arguments.folder.display(),
            report.removed.len(),
            counted(report.removed.len() + report.kept.len(), "version", "versions"),
            counted(report.files, "file", "files"),
            DecimalBytes(report.bytes),
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
