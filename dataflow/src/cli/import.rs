//! `tidemill import`: a training file of LLM Foundry or a config of DeepSpeed to a `RUN.toml`.
//!
//! The file becomes leaves ([`document`], [`interpolation`]); the rules of [`foundry`] and [`deepspeed`] say what each becomes
//! ([`translation`]); and [`run_toml`] writes that down.

mod deepspeed;
mod document;
mod duration;
mod foundry;
mod interpolation;
mod optimizer;
mod run_toml;
#[cfg(test)]
mod tests;
mod translation;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use tidemill_files::Kind;

use self::translation::Translation;
use super::output::{note_line, result_line};
use crate::cli::exit::ExitCode;
use crate::error::JobError;

/// Flags of `tidemill import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// A training file of LLM Foundry (YAML) or a config of DeepSpeed (JSON).
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The file that is written, where nothing is; standard output where it is not given.
    #[arg(short, long, value_name = "RUN.toml")]
    output: Option<PathBuf>,
}

pub(crate) fn run(arguments: &ImportArguments) -> anyhow::Result<ExitCode> {
    let path = &arguments.file;
    if let Some(output) = arguments.output.as_ref().filter(|output| output.exists()) {
        let found = output.display();
        return Err(JobError::value("--output", "a path where nothing is", found).into());
    }
    let reading = |source| JobError::file("reading", path, source);
    let bytes = tidemill_files::read(path, Kind::RunConfig).map_err(reading)?;
    let origin = path.display().to_string();
    let wrong = |what| JobError::Config { origin: origin.clone(), what };
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        wrong(format!("it is no text in UTF-8 from byte {at} on"))
    })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let text = translate(&text, &name).map_err(wrong)?;
    match &arguments.output {
        None => result_line!("{}", text.trim_end())?,
        Some(output) => {
            tidemill_files::durable::replace(output, text.as_bytes())
                .with_context(|| format!("writing {} failed", output.display()))?;
            note_line!("written: {}; its first lines say what to fill in", output.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The `RUN.toml` of a file of another framework; `name` is the file's.
///
/// # Errors
/// A text that cannot be read, is of neither framework, or has a value that none of its keys can have: with the line.
fn translate(text: &str, name: &str) -> Result<String, String> {
    let mut leaves = document::leaves(text.trim_start_matches('\u{feff}'))?;
    let named = interpolation::resolve(&mut leaves)?;
    let mut translation = Translation::new(leaves);
    translation.settle_nulls();
    let framework = if deepspeed::is_one(&translation) {
        deepspeed::translate(&mut translation)?;
        "config of DeepSpeed"
    } else if foundry::is_one(&translation) {
        foundry::translate(&mut translation)?;
        "training file of LLM Foundry"
    } else {
        return Err(
            "expected a training file of LLM Foundry (model, with max_duration, train_loader or \
                    global_train_batch_size) or a config of DeepSpeed (train_batch_size, \
                    train_micro_batch_size_per_gpu or zero_optimization), found neither"
                .to_owned(),
        );
    };
    translation.settle_the_rest(&named);
    let name = crate::printable::printable(name, 200);
    let title = format!("Written by `tidemill import` from {name}, a {framework}.");
    Ok(run_toml::render(&translation, &title))
}
