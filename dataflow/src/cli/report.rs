//! `tidemill report`: one HTML page about one or several runs, which needs no network, no library and no program but a browser.

mod chart;
mod escape;
mod log;
mod page;
mod past;
mod run;
mod scale;
mod series;
mod tables;

use std::path::PathBuf;

use clap::Args;
use tidemill_files::durable;

use self::run::Run;
use super::exit::ExitCode;
use super::output::{check_replaceable, note_line, result_line};
use crate::error::JobError;

/// The page's name in a run folder.
const REPORT_FILE: &str = "report.html";

/// Flags of `tidemill report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// The folders of runs, which the page shows over each other.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Where the page goes; report.html in the first run's folder where this is not said.
    #[arg(short, long, value_name = "FILE.html")]
    output: Option<PathBuf>,
}

pub(crate) fn run(arguments: &ReportArguments) -> anyhow::Result<ExitCode> {
    let runs: Vec<Run> =
        arguments.runs.iter().map(|path| Run::read(path)).collect::<Result<_, JobError>>()?;
    let output = arguments.output.clone().unwrap_or_else(|| arguments.runs[0].join(REPORT_FILE));
    check_replaceable(&output, &[b"<!DOCTYPE html>"], "a page")?;
    durable::replace(&output, page::page(&runs).as_bytes())
        .map_err(|source| JobError::file("writing", &output, source))?;
    for run in &runs {
        for note in &run.notes {
            note_line!("note: {}: {note}", run.name);
        }
    }
    result_line!("{}", output.display())?;
    Ok(ExitCode::SUCCESS)
}
