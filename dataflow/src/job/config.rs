//! `RUN.toml`: the config of a training run.
//!
//! Every table sits beside its owner (model settings in the model crate, batch settings in
//! [`batch`](crate::batch) ...); the top struct only nests. Unknown keys are errors, units are in the names,
//! and rules across tables live in [`RunConfig::check`]. The resolved form of a run, once its data set is known, is
//! [`ResolvedRun`](super::resolve::ResolvedRun).

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidemill_files::Kind;
use tidemill_kernels::FloatEnvironment;
use tidemill_model::ModelSettings;
use tidemill_model::optimizer::OptimizerSettings;
use tidemill_model::schedule::ScheduleSettings;
use tidemill_streaming_data::store::Location;

use super::data::DataSettings;
use crate::batch::BatchSettings;
use crate::device::DeviceSettings;
use crate::error::{JobError, Result};
use crate::metrics::MetricsSettings;
use crate::parallel::ParallelSettings;
use crate::printable::printable;

/// The whole of `RUN.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// `[run]`: where the run lives and how long it is.
    pub run: RunSettings,
    /// `[model]`: the model that is trained.
    pub model: ModelSettings,
    /// `[data]`: the data that it is trained on.
    pub data: DataSettings,
    /// `[batch]`: samples of a step, and how they are cut.
    #[serde(default)]
    pub batch: BatchSettings,
    /// `[optimizer]`.
    #[serde(default)]
    pub optimizer: OptimizerSettings,
    /// `[schedule]`: the learning rate over the run.
    #[serde(default)]
    pub schedule: ScheduleSettings,
    /// `[checkpoint]`: how often, and how many are kept.
    #[serde(default)]
    pub checkpoint: CheckpointSettings,
    /// `[evaluation]`: the mean loss on another data set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<EvaluationSettings>,
    /// `[metrics]`: the numbers that are written of each step.
    #[serde(default)]
    pub metrics: MetricsSettings,
    /// `[device]`: the device that computes.
    #[serde(default)]
    pub device: DeviceSettings,
    /// `[parallel]`: how the run is spread over its workers.
    #[serde(default)]
    pub parallel: ParallelSettings,
}

/// `[run]`. Exactly one of `steps`, `tokens`, `epochs` and `chinchilla` says how long the run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSettings {
    /// The run folder, or its URL.
    pub dir: PathBuf,
    /// Seeds the initial parameters and the shuffle.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Optimizer updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Predicted tokens; rounded up to whole steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Passes over the data set; rounded up to whole steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Multiples of 20 predicted tokens for each parameter (Hoffmann et al., 2022); rounded up to whole steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chinchilla: Option<f64>,
    /// How long a peer process may be silent before the run ends with exit code 75.
    #[serde(default = "default_peer_deadline_seconds")]
    pub peer_deadline_seconds: f64,
    /// How long the processes may take to meet before the run ends with exit code 75.
    #[serde(default = "default_connect_deadline_seconds")]
    pub connect_deadline_seconds: f64,
    /// How long anything in the run may stand still before it is named and the run ends with exit code 75.
    #[serde(default = "default_step_deadline_seconds")]
    pub step_deadline_seconds: f64,
}

fn default_seed() -> u64 {
    17
}

fn default_peer_deadline_seconds() -> f64 {
    30.0
}

fn default_connect_deadline_seconds() -> f64 {
    60.0
}

/// `run.step_deadline_seconds` where nothing says it.
pub(crate) fn default_step_deadline_seconds() -> f64 {
    600.0
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSettings {
    /// Steps between checkpoints; there is always one after the last step.
    pub every_steps: u64,
    /// Complete checkpoints that are kept; older ones are removed.
    pub keep: usize,
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        Self { every_steps: 50, keep: 3 }
    }
}

/// `[evaluation]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationSettings {
    /// The folder of the data set that is evaluated.
    pub dataset: PathBuf,
    /// Steps between evaluations; there is always one after the run's last step; a stop adds none.
    #[serde(default = "default_evaluation_every_steps")]
    pub every_steps: u64,
    /// Samples from the beginning of the data set; all of them where it has fewer.
    #[serde(default = "default_evaluation_samples")]
    pub samples: u64,
    /// `[[evaluation.tasks]]`: questions that are asked each time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskSettings>,
}

/// An `[[evaluation.tasks]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskSettings {
    /// The name of a task or suite that is built in, or its file (.toml).
    pub task: String,
    /// The folder or URL with the questions; that of a task's file, and of a built-in task the current folder, where it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Few-shot examples before each question; as many as the suite or the task says, where it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fewshot: Option<usize>,
    /// Only so many questions of each task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<NonZeroUsize>,
}

fn default_evaluation_every_steps() -> u64 {
    100
}

fn default_evaluation_samples() -> u64 {
    256
}

/// The value that `tidemill import` writes where only the user knows the value.
pub(crate) const PLACEHOLDER: &str = "FILL-IN";

impl RunConfig {
    /// Reads `path`, applies `overrides` (`key=value`, in order) and checks the result.
    ///
    /// # Errors
    /// A file that cannot be read or is not TOML, an override without `=`, an unknown or missing
    /// key, a wrong type, or values that contradict each other: each names the file and the key.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self> {
        let reading = |source| JobError::file("reading", path, source);
        let bytes = tidemill_files::read(path, Kind::RunConfig).map_err(reading)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let said = format!("it is no text in UTF-8 from byte {at} on");
            reading(std::io::Error::new(std::io::ErrorKind::InvalidData, said))
        })?;
        Self::parse(&text, &path.display().to_string(), overrides)
    }

    /// [`load`](Self::load) from text; `origin` names it in errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self> {
        // Decimal numbers become binary ones by arithmetic.
        let _standard = FloatEnvironment::standard();
        let config_error = |what: String| JobError::Config { origin: origin.to_owned(), what };
        let parsed = text.parse::<toml::Table>();
        let mut table = parsed.map_err(|error| config_error(name_line(&error, text)))?;
        for assignment in overrides {
            set_key(&mut table, assignment)?;
        }
        let mut placeholders = Vec::new();
        for (key, value) in &table {
            find_placeholders(key, value, &mut placeholders);
        }
        if !placeholders.is_empty() {
            let what = format!("{PLACEHOLDER} still stands for {}", placeholders.join(", "));
            return Err(config_error(what));
        }
        let config: Self = if overrides.is_empty() {
            // Straight from the text, so that an error can name the line.
            toml::from_str(text).map_err(|error| config_error(name_line(&error, text)))?
        } else {
            // The merged text is not the user's: an error names its key, not its line.
            let merged = table.to_string();
            toml::from_str(&merged).map_err(|error| config_error(name_key(&error, &merged)))?
        };
        config.check().map_err(|what| config_error(what.to_string()))?;
        Ok(config)
    }

    /// The rules that one table alone cannot know.
    ///
    /// # Errors
    /// The first rule that is broken, naming its keys.
    pub fn check(&self) -> Result<()> {
        let RunSettings { steps, tokens, epochs, chinchilla, .. } = &self.run;
        let lengths = [steps.is_some(), tokens.is_some(), epochs.is_some(), chinchilla.is_some()];
        let given = lengths.into_iter().filter(|&given| given).count();
        let keys = "run.steps, run.tokens, run.epochs, run.chinchilla";
        expect(given == 1, keys, "exactly one of them", given)?;
        expect(steps != &Some(0), "run.steps", "at least 1", 0)?;
        expect(tokens != &Some(0), "run.tokens", "at least 1", 0)?;
        for (key, number) in [("run.epochs", epochs), ("run.chinchilla", chinchilla)] {
            let Some(number) = number else { continue };
            expect(number.is_finite() && *number > 0.0, key, "a number above 0", number)?;
        }
        for (key, seconds) in [
            ("run.peer_deadline_seconds", self.run.peer_deadline_seconds),
            ("run.connect_deadline_seconds", self.run.connect_deadline_seconds),
        ] {
            expect((0.1..=86_400.0).contains(&seconds), key, "0.1 to 86400", seconds)?;
        }
        let seconds = self.run.step_deadline_seconds;
        let valid = (0.1..=604_800.0).contains(&seconds);
        expect(valid, "run.step_deadline_seconds", "0.1 to 604800", seconds)?;
        expect(!self.run.dir.as_os_str().is_empty(), "run.dir", "a folder or URL", "\"\"")?;
        let place = "a folder or a URL of s3, gs or az";
        let location = Location::of_path(&self.run.dir)
            .map_err(|error| JobError::value("run.dir", place, error))?;
        // One is gone with this process, and the other lists and writes only where it speaks WebDAV.
        let url = location.to_string();
        let holds_none = ["memory://", "http://", "https://"].iter().any(|it| url.starts_with(it));
        expect(location.local().is_some() || !holds_none, "run.dir", place, url)?;
        self.data.check()?;
        expect(self.checkpoint.every_steps > 0, "checkpoint.every_steps", "at least 1", 0)?;
        expect(self.checkpoint.keep > 0, "checkpoint.keep", "at least 1", 0)?;
        if let Some(evaluation) = &self.evaluation {
            expect(evaluation.every_steps > 0, "evaluation.every_steps", "at least 1", 0)?;
            expect(evaluation.samples > 0, "evaluation.samples", "at least 1", 0)?;
        }
        let is_local = location.local().is_some() || !self.metrics.tensorboard;
        let expected = "false where run.dir is a URL: TensorBoard's files stay on this machine";
        expect(is_local, "metrics.tensorboard", expected, true)?;
        expect(self.device.threads > 0, "device.threads", "at least 1", 0)?;
        self.optimizer.check()?;
        self.schedule.check_values()?;
        Ok(())
    }

    /// The config as TOML, every key written.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a config holds only what TOML can write")
    }
}

/// An error that names the key, where a rule does not hold.
pub(super) fn expect(
    holds: bool,
    key: &str,
    expected: &str,
    found: impl std::fmt::Display,
) -> Result<()> {
    if holds { Ok(()) } else { Err(JobError::value(key, expected, found)) }
}

/// Adds the keys below `key` whose value is [`PLACEHOLDER`].
fn find_placeholders(key: &str, value: &toml::Value, found: &mut Vec<String>) {
    match value {
        toml::Value::String(text) if text == PLACEHOLDER => found.push(printable(key, 200)),
        toml::Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                find_placeholders(&format!("{key}[{index}]"), value, found);
            }
        }
        toml::Value::Table(table) => {
            for (name, value) in table {
                find_placeholders(&format!("{key}.{name}"), value, found);
            }
        }
        _ => {}
    }
}

/// Applies one `--set key=value`: `key` is dotted, `value` is TOML, else a bare string.
///
/// # Errors
/// No `=`, an empty key, or a key that goes through something that is not a table.
pub fn set_key(table: &mut toml::Table, assignment: &str) -> Result<()> {
    let wrong = |expected: &str| JobError::value("--set", expected, format!("{assignment:?}"));
    let (key, text) = assignment.split_once('=').ok_or_else(|| wrong("key=value"))?;
    let value = format!("value = {text}")
        .parse::<toml::Table>()
        .ok()
        .and_then(|mut parsed| if parsed.len() == 1 { parsed.remove("value") } else { None })
        .unwrap_or_else(|| toml::Value::String(text.to_owned()));
    let mut path: Vec<&str> = key.trim().split('.').collect();
    let last = path.pop().filter(|last| !last.is_empty());
    let last = last.ok_or_else(|| wrong("a key before the ="))?;
    let mut inner = table;
    for part in path {
        let entry = inner.entry(part).or_insert_with(|| toml::Table::new().into());
        inner = entry.as_table_mut().ok_or_else(|| wrong("a key inside a table"))?;
    }
    inner.insert(last.to_owned(), value);
    Ok(())
}

/// The most bytes of a config that errors quote.
const LONGEST_QUOTE_BYTES: usize = 200;

/// The message of a TOML error on one line.
fn one_line(error: &toml::de::Error) -> String {
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    printable(&message, LONGEST_QUOTE_BYTES)
}

/// The line of `text` that an error is about, from 0.
fn line_of(error: &toml::de::Error, text: &str) -> Option<usize> {
    let before = text.get(..error.span()?.start)?;
    Some(before.matches('\n').count())
}

/// A line of a config, as errors quote it.
fn quoted(line: &str) -> String {
    printable(line.trim(), LONGEST_QUOTE_BYTES)
}

/// [`one_line`], with the line that it is about.
fn name_line(error: &toml::de::Error, text: &str) -> String {
    let message = one_line(error);
    let Some(line) = line_of(error, text) else { return message };
    let source = quoted(text.lines().nth(line).unwrap_or(""));
    format!("line {} ({source}): {message}", line + 1)
}

/// [`one_line`], with the key and the value that it is about, or the table.
fn name_key(error: &toml::de::Error, text: &str) -> String {
    let message = one_line(error);
    let Some(line) = line_of(error, text) else { return message };
    let source = quoted(text.lines().nth(line).unwrap_or(""));
    let table = text.lines().take(line + 1).filter_map(|line| line.strip_prefix('[')).last();
    match table.map(|table| quoted(table.trim_matches(['[', ']']))) {
        Some(_) if source.starts_with('[') => format!("{source}: {message}"),
        Some(table) => format!("{table}.{source}: {message}"),
        None => format!("{source}: {message}"),
    }
}
