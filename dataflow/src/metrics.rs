//! `metrics.jsonl` and `evaluation.jsonl`: a line a step, each step once, whatever was killed and resumed.
//!
//! A line is one write of a whole line, so a killed run leaves at most one torn line, and that at the end. Opening
//! a log for a run that resumes from step `s` drops the torn line and every line past `s`; they are computed again, to
//! the same bits, except for measured times.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tidemill_files::durable;

use crate::error::{JobError, Result};
use crate::operators::{Communication, EvaluationReport};

/// `[metrics]`: the outputs of a run's steps beside `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSettings {
    /// Whether it writes [events for TensorBoard](crate::tensorboard) too.
    pub tensorboard: bool,
}

/// A line of a log of a run folder.
pub trait RunLine: Serialize + DeserializeOwned + Clone {
    /// The log's name in a run folder.
    const FILE: &'static str;

    /// Updates done when it was written.
    fn step(&self) -> u64;
}

impl RunLine for StepMetrics {
    const FILE: &'static str = "metrics.jsonl";

    fn step(&self) -> u64 {
        self.step
    }
}

impl RunLine for EvaluationReport {
    const FILE: &'static str = "evaluation.jsonl";

    fn step(&self) -> u64 {
        self.step
    }
}

/// One line: one optimizer update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Updates done, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch, before the update, in nats.
    pub loss: f64,
    /// L2 norm of the mean gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate of this update.
    pub learning_rate: f64,
    /// Counted tokens so far.
    pub tokens: u64,
    /// Counted tokens of this step over the time since the step before.
    pub tokens_per_second: f64,
    /// Seconds of training so far, earlier runs of the same folder included.
    pub elapsed_seconds: f64,
    /// Bytes and time of worker 0's communication; none where a worker trains alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communication: Option<Communication>,
    /// Memory in use when the step was done: in the first line of a start, and from then on about once a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUse>,
}

/// A number that a line has for its step. All displays of a step's numbers show these.
#[derive(Clone, Copy, Debug)]
pub struct StepNumber {
    /// Its key in a line; `outer.inner` for a key of an inner object.
    pub key: &'static str,
    /// The meaning of the number, in words.
    pub description: &'static str,
    /// Its value; none where a line does not have it.
    pub value: fn(&StepMetrics) -> Option<f64>,
}

impl StepNumber {
    const fn new(
        key: &'static str,
        description: &'static str,
        value: fn(&StepMetrics) -> Option<f64>,
    ) -> Self {
        Self { key, description, value }
    }
}

/// Every number of [`StepMetrics`] but the step, in the order of a line.
pub const STEP_NUMBERS: [StepNumber; 12] = {
    type N = StepNumber;
    [
        N::new("loss", "Loss (nats a token)", |it| Some(it.loss)),
        N::new("grad_norm", "Gradient norm, before clipping", |it| Some(it.grad_norm)),
        N::new("learning_rate", "Learning rate", |it| Some(it.learning_rate)),
        N::new("tokens", "Tokens so far", |it| Some(it.tokens as f64)),
        N::new("tokens_per_second", "Tokens per second", |it| Some(it.tokens_per_second)),
        N::new("elapsed_seconds", "Training so far, earlier starts included (s)", |it| {
            Some(it.elapsed_seconds)
        }),
        N::new(
            "communication.bytes_from_memory",
            "From workers of the same process (bytes a step)",
            |it| Some(it.communication?.bytes_from_memory as f64),
        ),
        N::new("communication.bytes_from_processes", "From other processes (bytes a step)", |it| {
            Some(it.communication?.bytes_from_processes as f64)
        }),
        N::new("communication.milliseconds", "Communication of worker 0 (ms a step)", |it| {
            Some(it.communication?.milliseconds)
        }),
        N::new(
            "communication.exposed_milliseconds",
            "Communication that was not hidden (ms a step)",
            |it| Some(it.communication?.exposed_milliseconds),
        ),
        N::new(HOST_BYTES, "Memory of process 0 (bytes, resident)", |it| {
            Some(it.memory?.host_bytes? as f64)
        }),
        N::new(DEVICE_BYTES, "Memory taken of the device of worker 0 (bytes)", |it| {
            Some(it.memory?.device_bytes? as f64)
        }),
    ]
};

/// The key of the host's memory.
pub(crate) const HOST_BYTES: &str = "memory.host_bytes";
/// The key of the device's.
pub(crate) const DEVICE_BYTES: &str = "memory.device_bytes";

/// Memory that is held, as it was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Resident bytes of process 0, files that it has mapped included; none where the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<u64>,
    /// Bytes by which less of the memory of worker 0's device is free than before its workers began; so what other programs take
    /// meanwhile counts too. None where buffers lie in host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
}

/// An open log of a run.
#[derive(Debug)]
pub struct RunLog<L> {
    file: File,
    path: PathBuf,
    last: Option<L>,
    dropped: u64,
}

impl<L: RunLine> RunLog<L> {
    /// Opens the log of the run folder `dir` to go on after `step` updates.
    ///
    /// # Errors
    /// A log that cannot be read or written, or a complete line that is not one of this log: the error names its
    /// number.
    pub fn open(dir: &Path, step: u64) -> Result<Self> {
        let path = dir.join(L::FILE);
        let text = read_lines(&path)?.unwrap_or_default();
        let (kept, last) = keep_until(&path, &text, step)?;
        let dropped = complete_lines(&text[kept.len()..]).count() as u64;
        let present = std::fs::metadata(&path).map(|metadata| metadata.len()).unwrap_or(0);
        if present != kept.len() as u64 {
            replace(&path, &kept)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|source| JobError::file("opening", &path, source))?;
        Ok(Self { file, path, last, dropped })
    }

    /// The last line that was kept or written.
    pub fn last(&self) -> Option<&L> {
        self.last.as_ref()
    }

    /// The number of complete lines past the step that it was opened for.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Appends one line with one write.
    ///
    /// # Errors
    /// A file that cannot be written, such as on a full disk.
    pub fn append(&mut self, entry: L) -> Result<()> {
        let mut line = serde_json::to_string(&entry).expect("metrics are plain numbers");
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .map_err(|source| JobError::file("writing", &self.path, source))?;
        self.last = Some(entry);
        Ok(())
    }
}

/// All complete lines of a run folder's log; none where there is no log.
///
/// # Errors
/// A file that cannot be read, or a complete line that is not one of this log.
pub fn read<L: RunLine>(dir: &Path) -> Result<Vec<L>> {
    let path = dir.join(L::FILE);
    let Some(text) = read_lines(&path)? else { return Ok(Vec::new()) };
    complete_lines(&text).map(|(number, line)| parse_line(&path, number, line)).collect()
}

fn read_lines(path: &Path) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        // A torn write may end inside a character; a torn line is dropped anyway.
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(JobError::file("reading", path, source)),
    }
}

/// Lines that end in a newline, with their numbers from 1.
fn complete_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split_inclusive('\n')
        .enumerate()
        .filter_map(|(index, line)| line.strip_suffix('\n').map(|line| (index + 1, line)))
}

fn parse_line<L: RunLine>(path: &Path, number: usize, line: &str) -> Result<L> {
    serde_json::from_str(line).map_err(|error| JobError::Config {
        origin: path.display().to_string(),
        what: format!("line {number}: expected a line of metrics: {error}"),
    })
}

fn keep_until<L: RunLine>(path: &Path, text: &str, step: u64) -> Result<(String, Option<L>)> {
    let mut kept = String::new();
    let mut last: Option<L> = None;
    for (number, line) in complete_lines(text) {
        let entry: L = parse_line(path, number, line)?;
        if entry.step() > step {
            break;
        }
        kept.push_str(line);
        kept.push('\n');
        last = Some(entry);
    }
    Ok((kept, last))
}

/// Replaces the file by `contents`, wholly or not at all.
fn replace(path: &Path, contents: &str) -> Result<()> {
    durable::replace(path, contents.as_bytes())
        .map_err(|source| JobError::file("replacing", path, source))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    fn line(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 0.1 + step as f64,
            grad_norm: 1.0,
            learning_rate: 1e-3,
            tokens: 10 * step,
            tokens_per_second: 5.0,
            elapsed_seconds: step as f64,
            communication: None,
            memory: None,
        }
    }

    #[test]
    fn resuming_keeps_each_step_once_and_drops_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RunLog::<StepMetrics>::open(dir.path(), 0).unwrap();
        for step in 1..=5 {
            log.append(line(step)).unwrap();
        }
        let path = dir.path().join(StepMetrics::FILE);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"step\":6,\"lo").unwrap();
        assert_eq!(read::<StepMetrics>(dir.path()).unwrap().len(), 5);
        let mut log = RunLog::<StepMetrics>::open(dir.path(), 3).unwrap();
        assert_eq!((log.last().unwrap().step, log.dropped()), (3, 2));
        log.append(line(4)).unwrap();
        let steps: Vec<u64> =
            read::<StepMetrics>(dir.path()).unwrap().iter().map(|line| line.step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }

    /// A field that is added without its number is missing here.
    #[test]
    fn the_numbers_of_a_step_are_those_of_its_line() {
        fn numbers(prefix: &str, value: &Value, found: &mut BTreeMap<String, f64>) {
            for (key, value) in value.as_object().unwrap() {
                match value.as_f64() {
                    Some(number) => drop(found.insert(format!("{prefix}{key}"), number)),
                    None => numbers(&format!("{prefix}{key}."), value, found),
                }
            }
        }
        let communication = Communication {
            bytes_from_memory: 11,
            bytes_from_processes: 12,
            bytes_from_hosts: 13,
            milliseconds: 14.5,
            exposed_milliseconds: 15.5,
        };
        let memory = MemoryUse { host_bytes: Some(16), device_bytes: Some(17) };
        let line = StepMetrics {
            grad_norm: 18.5,
            communication: Some(communication),
            memory: Some(memory),
            ..line(7)
        };
        let mut expected = BTreeMap::new();
        numbers("", &serde_json::to_value(&line).unwrap(), &mut expected);
        assert_eq!(expected.remove("step"), Some(7.0));
        let value = |number: &StepNumber| ((number.value)(&line)).map(|it| (number.key.into(), it));
        let found: BTreeMap<String, f64> = STEP_NUMBERS.iter().filter_map(value).collect();
        assert_eq!(found, expected);
        let of_few = StepMetrics { communication: None, memory: None, ..line };
        let told = STEP_NUMBERS.iter().filter_map(|number| (number.value)(&of_few));
        assert_eq!(told.count(), 6);
    }

    #[test]
    fn a_broken_line_is_named_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let good = serde_json::to_string(&line(1)).unwrap();
        std::fs::write(dir.path().join(StepMetrics::FILE), format!("{good}\nnot json\n{good}\n"))
            .unwrap();
        let error = RunLog::<StepMetrics>::open(dir.path(), 9).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
    }
}
