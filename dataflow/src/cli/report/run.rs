//! A run as a page shows it: the content of its folder, whose damaged parts are skipped.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tidemill_files::Kind;
use tidemill_streaming_data::store::Location;

use super::log::Log;
use super::past::{Past, world_in_words};
use crate::checkpoint::CHECKPOINTS_FOLDER;
use crate::error::JobError;
use crate::metrics::{RunLine, StepMetrics};
use crate::operators::EvaluationReport;
use crate::run_folder::{DEVICES_FILE, RUN_CONFIG_FILE};

/// The name of the numbers that are derived from counted tokens and their rate: the time of a step.
pub(super) const STEP_MILLISECONDS: &str = "step_milliseconds";

/// A run.
#[derive(Debug)]
pub(super) struct Run {
    /// Name of the run on the page.
    pub name: String,
    pub metrics: Log,
    pub evaluations: Log,
    pub past: Past,
    /// `run.toml`, as it was when the run was last started.
    pub config: Option<String>,
    /// The devices of process 0, in words.
    pub devices: Option<String>,
    /// Missing and damaged parts of the folder, in words.
    pub notes: Vec<String>,
}

impl Run {
    /// Reads the run folder `path`.
    ///
    /// # Errors
    /// A path that is no run folder of this machine, or files that cannot be read.
    pub fn read(path: &Path) -> Result<Self, JobError> {
        let folder = folder(path)?;
        let mut notes = Vec::new();
        let mut before = (0, 0.0);
        let step_milliseconds = |step: u64, fields: &serde_json::Map<String, Value>| {
            let number = |name: &str| fields.get(name)?.as_f64();
            let tokens = number("tokens")?;
            let (step_before, tokens_before) = std::mem::replace(&mut before, (step, tokens));
            let rate = number("tokens_per_second").filter(|rate| *rate > 0.0)?;
            let follows = step_before + 1 == step;
            follows.then_some((STEP_MILLISECONDS, 1e3 * (tokens - tokens_before) / rate))
        };
        let metrics = Log::read(&folder, StepMetrics::FILE, &mut notes, step_milliseconds)?;
        let evaluations = Log::read(&folder, EvaluationReport::FILE, &mut notes, |_, _| None)?;
        let past = Past::read(&folder, &mut notes)?;
        if metrics.steps.is_none() {
            notes.push(format!("{} has no step yet", StepMetrics::FILE));
        } else if past.sittings.is_empty() {
            notes.push("no history of starts: kills and resumes cannot be shown".to_owned());
        }
        let config = text(&folder.join(RUN_CONFIG_FILE), Kind::RunConfig)?;
        if config.is_none() {
            notes.push(format!("{RUN_CONFIG_FILE} is not there"));
        }
        let devices = text(&folder.join(DEVICES_FILE), Kind::Config)?;
        let devices = devices.and_then(|text| devices_in_words(&text));
        let name = name(path);
        Ok(Self { name, metrics, evaluations, past, config, devices, notes })
    }

    /// The keys of the config with their values as they are written.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = BTreeMap::new();
        let table = self.config.as_deref().and_then(|config| config.parse::<toml::Table>().ok());
        flatten("", table.unwrap_or_default(), &mut settings);
        settings
    }

    /// Updates done.
    pub fn last_step(&self) -> u64 {
        let steps = [&self.metrics, &self.evaluations].map(|log| log.steps);
        steps.into_iter().flatten().map(|[_, last]| last).max().unwrap_or(0)
    }

    /// The last world, in words, where the history has it.
    pub fn world(&self) -> Option<String> {
        let started = &self.past.sittings.last()?.started;
        Some(world_in_words(started.workers, started.processes))
    }
}

/// The folder `path`, if it is the folder of a run.
fn folder(path: &Path) -> Result<PathBuf, JobError> {
    let refused = |what: &str| {
        Err(JobError::Config { origin: path.display().to_string(), what: what.to_owned() })
    };
    let location = Location::of_path(path)?;
    let Some(folder) = location.local() else {
        return refused(
            "expected a run folder of this machine, found a URL; copy its run.toml and its .jsonl and .json files here",
        );
    };
    if !folder.is_dir() {
        return refused("expected a folder");
    }
    let signs = [RUN_CONFIG_FILE, StepMetrics::FILE, CHECKPOINTS_FOLDER];
    if !signs.iter().any(|sign| folder.join(sign).exists()) {
        return refused(
            "expected the folder of a run (`run.dir` of a RUN.toml), found none of run.toml, metrics.jsonl and checkpoints in it",
        );
    }
    Ok(folder.to_owned())
}

/// The path as it was given, without what says nothing.
fn name(path: &Path) -> String {
    let shown = path.display().to_string();
    let short = shown.trim_end_matches('/').trim_start_matches("./");
    if short.is_empty() { shown } else { short.to_owned() }
}

/// The text of a file, where it is there.
fn text(path: &Path, kind: Kind) -> Result<Option<String>, JobError> {
    match tidemill_files::read(path, kind) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(JobError::file("reading", path, source)),
    }
}

/// Such as `2 × NVIDIA H200 (cuda sm_90a), bf16`.
fn devices_in_words(json: &str) -> Option<String> {
    let devices: Value = serde_json::from_str(json).ok()?;
    let mut counted: Vec<(&str, usize)> = Vec::new();
    for worker in devices["workers"].as_array()? {
        let name = worker["name"].as_str()?;
        match counted.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counted.push((name, 1)),
        }
    }
    let names: Vec<String> = counted
        .iter()
        .map(|(name, count)| match count {
            1 => (*name).to_owned(),
            // Workers share it.
            _ if devices["kind"]["backend"] == "cpu" => (*name).to_owned(),
            count => format!("{count} \u{d7} {name}"),
        })
        .collect();
    let kind = &devices["kind"];
    let [backend, architecture] = ["backend", "architecture"].map(|key| kind[key].as_str());
    let precision = devices["precision"].as_str()?;
    Some(format!("{} ({} {}), {precision}", names.join(" and "), backend?, architecture?))
}

fn flatten(prefix: &str, table: toml::Table, into: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(table) => flatten(&key, table, into),
            value => {
                into.insert(key, value.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_however_little_of_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let refused = Run::read(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("expected the folder of a run"), "{refused}");
        let refused = Run::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(refused.contains("none") && refused.contains("expected a folder"), "{refused}");
        let refused = Run::read(Path::new("memory://a/run")).unwrap_err().to_string();
        assert!(refused.contains("found a URL"), "{refused}");
        std::fs::write(dir.path().join("run.toml"), "[run]\nsteps = 5\ndir = \"a\"").unwrap();
        let run = Run::read(dir.path()).unwrap();
        assert_eq!(run.notes, ["metrics.jsonl has no step yet"]);
        assert_eq!(run.settings()["run.steps"], "5");
        assert_eq!((run.last_step(), run.world(), run.devices), (0, None, None));
    }

    #[test]
    fn how_long_steps_took_is_known_where_they_follow_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let line = |step, tokens, rate| {
            format!("{{\"step\":{step},\"tokens\":{tokens},\"tokens_per_second\":{rate}}}\n")
        };
        let text = [line(1, 10, 100), line(2, 20, 200), line(5, 50, 10), line(6, 60, 0)].concat();
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let run = Run::read(dir.path()).unwrap();
        let took = run.metrics.get(STEP_MILLISECONDS).unwrap();
        assert_eq!((took.count(), took.sum()), (2, 150.0));
    }

    #[test]
    fn devices_are_counted() {
        let worker = |name| serde_json::json!({ "name": name, "ordinal": 0 });
        let json = serde_json::json!({
            "kind": { "backend": "cuda", "architecture": "sm_90a" },
            "precision": "bf16",
            "workers": [worker("A"), worker("B"), worker("A")],
        });
        let words = devices_in_words(&json.to_string());
        assert_eq!(words.as_deref(), Some("2 \u{d7} A and B (cuda sm_90a), bf16"));
        assert_eq!(devices_in_words("[]"), None);
    }
}
