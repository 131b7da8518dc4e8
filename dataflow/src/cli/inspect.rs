//! `tidemill inspect`: a folder described, in words or JSON.

mod report;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum as _};
use serde_json::{Number, Value, json};
use tidemill_model::hugging_face::CONFIG_FILE;
use tidemill_model::{Blueprint, Family, ModelConfig};
use tidemill_streaming_data::data_set::index::{INDEX_FILE, Selection, Version, versions};
use tidemill_streaming_data::order::statistics::OrderStatistics;
use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill_streaming_data::prepare::DataReport;
use tidemill_streaming_data::store::{Location, RemoteFolder, StoreSettings};
use tidemill_streaming_data::{DataSet, Mixture};

use super::Format;
use super::order::OrderChoice;
use super::output::result_line;
use crate::checkpoint::{
    self, CHECKPOINTS_FOLDER, Checkpoint, LocalCopy, RemoteCheckpoints, TRAINER_FILE, Wanted,
};
use crate::cli::exit::ExitCode;
use crate::error::JobError;
use crate::metrics::{self, StepMetrics};
use crate::run_folder::{self, RUN_CONFIG_FILE};

/// The key of a data set's report in the output, null where it has no report.
const REPORT: &str = "report";

/// Flags of `tidemill inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// The folder or URL of a data set, a run, a checkpoint or a Hugging Face model.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Of a data set: how well the orders mix it and the cost of reading it, for this order of samples or for all.
    #[arg(long, value_name = "ORDER")]
    order: Option<Option<OrderChoice>>,
    /// With --order: samples of a window.
    #[arg(long, value_name = "N", default_value = "16384", requires = "order")]
    window_samples: NonZeroU64,
    /// With --order: samples of a batch.
    #[arg(long, value_name = "N", default_value = "32", requires = "order")]
    batch: NonZeroU64,
    /// With --order: the most bytes that the cache of a remote data set may hold.
    #[arg(long, value_name = "BYTES", requires = "order")]
    cache_limit_bytes: Option<u64>,
    /// How it is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(arguments: &InspectArguments) -> anyhow::Result<ExitCode> {
    let location = Location::of_path(&arguments.folder)?;
    if location.local().is_some_and(|folder| !folder.is_dir()) {
        let what = "expected a folder".to_owned();
        return Err(JobError::Config { origin: location.to_string(), what }.into());
    }
    let mut facts = match location.local() {
        _ if arguments.order.is_some() => order_facts(arguments)?,
        Some(folder) => facts(folder)?,
        None => remote_facts(location)?,
    };
    match arguments.format {
        Format::Json => result_line!("{facts}")?,
        Format::Text => {
            let report = facts.as_object_mut().and_then(|facts| facts.remove(REPORT));
            print_words(&facts, 0)?;
            if let Some(report) = report {
                report::print(serde_json::from_value(report).ok().as_ref())?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Facts about a folder.
fn facts(folder: &Path) -> anyhow::Result<Value> {
    if folder.join(TRAINER_FILE).exists() {
        checkpoint_facts(folder)
    } else if folder.join(CONFIG_FILE).exists() {
        model_facts(folder)
    } else if folder.join(RUN_CONFIG_FILE).exists() || folder.join(CHECKPOINTS_FOLDER).is_dir() {
        let checkpoints = checkpoint::list(folder)?.iter().map(|entry| entry.step).collect();
        run_facts(folder, checkpoints)
    } else {
        data_set_facts(folder)
    }
}

/// Facts about a folder in a store.
fn remote_facts(location: Location) -> anyhow::Result<Value> {
    let url = PathBuf::from(location.to_string());
    let folder = RemoteFolder::open(location, &StoreSettings::default())?;
    let has = |name| folder.get_if_there(name).map(|found| found.is_some());
    if has(TRAINER_FILE)? {
        let copy = LocalCopy::of(&url, Wanted::Model)?;
        checkpoint_facts(copy.path()).with_context(|| of_copy(&url))
    } else if has(CONFIG_FILE)? {
        let copy = LocalCopy::of(&url, Wanted::Config)?;
        model_facts(copy.path()).with_context(|| of_copy(&url))
    } else if has(RUN_CONFIG_FILE)?
        || (!has(INDEX_FILE)? && folder.list_folders()?.iter().any(|it| it == CHECKPOINTS_FOLDER))
    {
        let logs = tempfile::tempdir()?;
        run_folder::fetch_logs(&folder, logs.path())?;
        run_facts(logs.path(), RemoteCheckpoints::of_run(&folder).steps()?)
            .with_context(|| of_copy(&url))
    } else {
        data_set_facts(&url)
    }
}

/// The context of errors about files that were fetched.
fn of_copy(url: &Path) -> String {
    format!("the copy of {} that was fetched", url.display())
}

fn data_set_facts(folder: &Path) -> anyhow::Result<Value> {
    let data_set = DataSet::open(folder)?;
    let samples = data_set.samples();
    let shards: Vec<Value> = data_set
        .shards()
        .iter()
        .map(|shard| {
            let file = shard.path().file_name().map(|name| name.to_string_lossy().into_owned());
            json!({ "file": file, "samples": shard.samples() })
        })
        .collect();
    let settings = StoreSettings::default();
    let has_versions = data_set.is_updatable();
    let versions =
        if has_versions { versions(data_set.location(), &settings)? } else { Vec::new() };
    let versions: Vec<Value> = versions
        .iter()
        .map(|version| {
            let Version { fingerprint, index, .. } = version;
            let (samples, shards) = (index.samples(), index.shards.len());
            json!({ "fingerprint": fingerprint.to_string(), "samples": samples, "shards": shards })
        })
        .collect();
    Ok(json!({
        "kind": "data set",
        "samples": samples,
        "seq_len": data_set.seq_len(),
        "predicted_tokens": samples * data_set.seq_len() as u64,
        "vocab_size": data_set.vocab_size(),
        "bos_token_id": data_set.bos_token_id(),
        "eos_token_id": data_set.eos_token_id(),
        "pad_token_id": data_set.pad_token_id(),
        "fingerprint": data_set.fingerprint().to_string(),
        // Words leave out facts that are null.
        "selection": data_set.selection().map(Selection::settings),
        "versions": (!versions.is_empty()).then_some(versions),
        "shards": shards,
        REPORT: DataReport::read(data_set.location(), &settings)?,
    }))
}

/// Facts about the orders that were asked for.
fn order_facts(arguments: &InspectArguments) -> anyhow::Result<Value> {
    let data_set = DataSet::open(&arguments.folder)?;
    let chosen = arguments.order.flatten();
    let orders = chosen.as_ref().map_or(OrderChoice::value_variants(), std::slice::from_ref);
    let mut facts = serde_json::Map::new();
    facts.insert("kind".to_owned(), "orders of a data set".into());
    facts.insert("samples".to_owned(), data_set.samples().into());
    facts.insert("window_samples".to_owned(), arguments.window_samples.get().into());
    for &order in orders {
        let order = ShuffleOrder::from(order);
        let window_samples = arguments.window_samples;
        let shuffle = ShuffleSettings { order, window_samples, seed: 17 };
        let mixture = Mixture::of(data_set.clone(), shuffle)?;
        let statistics =
            OrderStatistics::new(&mixture, arguments.batch, arguments.cache_limit_bytes);
        facts.insert("batch".to_owned(), statistics.batch.into());
        facts.insert("bytes".to_owned(), statistics.bytes.into());
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        let of_order = json!({
            "effective_batch": rounded(statistics.effective_batch),
            "shards_per_batch": rounded(statistics.shards_per_batch),
            "bytes_before_first_batch": statistics.first_batch_bytes,
            "smallest_cache_bytes": statistics.cache_bytes,
            "reads_per_shard": statistics.reads_per_shard.map(rounded),
        });
        facts.insert(format!("shuffle {order}"), of_order);
    }
    Ok(Value::Object(facts))
}

fn model_facts(folder: &Path) -> anyhow::Result<Value> {
    let config = ModelConfig::read(folder)?;
    let model = Blueprint::new(&config)?;
    let layout = model.layout();
    Ok(json!({
        "kind": "model",
        "model_type": model.config_json()["model_type"],
        "parameters": layout.parameters(),
        "tensors": layout.tensors().len(),
        "vocab_size": config.vocab_size(),
        "d_model": config.d_model(),
        "n_layers": config.n_layers(),
    }))
}

fn checkpoint_facts(folder: &Path) -> anyhow::Result<Value> {
    let checkpoint = Checkpoint::open_for(folder, Wanted::Model)?;
    let state = checkpoint.state();
    let (verified, not_verified): (Vec<_>, Vec<_>) =
        state.checksums.keys().partition(|name| checkpoint.is_verified(name));
    Ok(json!({
        "kind": "checkpoint",
        "verified": verified,
        "not_verified": not_verified,
        "step": state.step,
        "tokens": state.tokens,
        "position": state.cursor.position,
        "data_set": state.cursor.current().0.fingerprint.to_string(),
        "data_set_since": state.cursor.current().1,
        "device": state.device,
        "settings": state.settings,
        "model": model_facts(folder)?,
    }))
}

/// Facts from the logs in `folder` of a run that has these checkpoints.
fn run_facts(folder: &Path, checkpoints: Vec<u64>) -> anyhow::Result<Value> {
    let lines = metrics::read::<StepMetrics>(folder)?;
    Ok(json!({
        "kind": "run",
        "steps_done": lines.last().map_or(0, |line| line.step),
        "first_loss": lines.first().map(|line| line.loss),
        "last": lines.last(),
        "checkpoints": checkpoints,
    }))
}

/// `key: value` lines; tables are indented, long lists are counted.
fn print_words(facts: &Value, depth: usize) -> anyhow::Result<()> {
    const LONGEST_LIST: usize = 8;
    let indent = "  ".repeat(depth);
    let Value::Object(object) = facts else { return Ok(()) };
    // The kind comes first.
    let (kind, others): (Vec<_>, Vec<_>) = object.iter().partition(|(key, _)| *key == "kind");
    for (key, value) in kind.into_iter().chain(others) {
        // Keys of a config stay as the user writes them.
        let key = if key.contains('.') { key.clone() } else { key.replace('_', " ") };
        match value {
            Value::Null => {}
            Value::Object(_) => {
                result_line!("{indent}{key}:")?;
                print_words(value, depth + 1)?;
            }
            Value::Array(list) if list.iter().any(Value::is_object) => {
                result_line!("{indent}{key}: {}", list.len())?;
                for item in list.iter().take(LONGEST_LIST) {
                    let parts: Vec<String> = item
                        .as_object()
                        .into_iter()
                        .flatten()
                        .map(|(key, value)| format!("{key} {}", plain(value)))
                        .collect();
                    result_line!("{indent}  {}", parts.join(", "))?;
                }
                if list.len() > LONGEST_LIST {
                    result_line!("{indent}  and {} more", list.len() - LONGEST_LIST)?;
                }
            }
            value => result_line!("{indent}{key}: {}", plain(value))?,
        }
    }
    Ok(())
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(", "),
        Value::Number(number) if number.is_f64() => in_twelve_digits(number),
        value => value.to_string(),
    }
}

/// A float for a reader: sums such as 233.62887500000002 have digits that say nothing.
fn in_twelve_digits(number: &Number) -> String {
    let rounded = number.as_f64().and_then(|value| format!("{value:.11e}").parse().ok());
    rounded.and_then(Number::from_f64).unwrap_or_else(|| number.clone()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_printed_in_twelve_significant_digits_at_most() {
        let value = json!([233.62887500000002, 0.0003, 0.1, 1.0, -123456789.25, 1e-9, 7, u64::MAX]);
        assert_eq!(
            plain(&value),
            "233.628875, 0.0003, 0.1, 1.0, -123456789.25, 1e-9, 7, 18446744073709551615"
        );
    }
}
