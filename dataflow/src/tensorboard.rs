//! Scalars of a run as TensorBoard reads them: a file of events in the run folder's `tensorboard`, a new one for each start.
//!
//! A file is a row of TFRecords: a length, its masked CRC-32C, as many bytes, and theirs. Each holds an `Event` of TensorFlow's
//! event.proto, where a run needs six fields; they are written here field by field. A file begins with the version of the format
//! and with the start of a session: TensorBoard drops what older files say of steps from there on, which are computed again.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{JobError, Result};
use crate::metrics::{STEP_NUMBERS, StepMetrics, StepNumber};
use crate::operators::EvaluationReport;

/// The folder of these files in a run folder.
pub const FOLDER: &str = "tensorboard";

/// The format's version, as TensorFlow writes it.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.START`.
const START: u64 = 1;

/// A file of events that is being written.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Creates a file in the run folder `run` for a start after `step` updates.
    ///
    /// # Errors
    /// A folder or file that cannot be written.
    pub fn create(run: &Path, step: u64) -> Result<Self> {
        let folder = run.join(FOLDER);
        DirBuilder::new()
            .recursive(true)
            .create(&folder)
            .map_err(|source| JobError::file("creating", &folder, source))?;
        // TensorBoard reads files in the order of their names, and takes those that have `tfevents` in them.
        let seconds = seconds_since_the_epoch();
        let name = format!(
            "events.out.tfevents.{:010}.{step:010}.{}.tidemill",
            seconds as u64,
            std::process::id()
        );
        let path = folder.join(name);
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|source| JobError::file("creating", &path, source))?;
        let mut events = Self { file, path };
        let mut version = Message::at(seconds);
        version.bytes(3, FILE_VERSION.as_bytes());
        let mut start = Message::at(seconds);
        start.number(2, step + 1);
        let mut session = Message::default();
        session.number(1, START);
        start.bytes(7, &session.0);
        events.write(&[record(&version.0), record(&start.0)].concat())?;
        Ok(events)
    }

    /// Writes down an update.
    ///
    /// # Errors
    /// A file that cannot be written, such as on a full disk.
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<()> {
        let scalar = |number: &StepNumber| {
            let tag = match number.key.split_once('.') {
                Some((outer, inner)) => format!("{outer}/{inner}"),
                None => format!("train/{}", number.key),
            };
            Some((tag, (number.value)(metrics)?))
        };
        let values: Vec<_> = STEP_NUMBERS.iter().filter_map(scalar).collect();
        self.scalars(metrics.step, &values)
    }

    /// Writes down an evaluation.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn evaluation(&mut self, report: &EvaluationReport) -> Result<()> {
        let mut values = vec![("evaluation/loss".to_owned(), report.loss)];
        for (task, metrics) in report.scores.all() {
            values.extend(
                metrics.iter().map(|(name, value)| (format!("evaluation/{task}/{name}"), *value)),
            );
        }
        self.scalars(report.step, &values)
    }

    fn scalars(&mut self, step: u64, values: &[(impl AsRef<str>, f64)]) -> Result<()> {
        let mut summary = Message::default();
        for (tag, value) in values {
            let mut scalar = Message::default();
            scalar.bytes(1, tag.as_ref().as_bytes());
            scalar.float(2, *value as f32);
            summary.bytes(1, &scalar.0);
        }
        let mut event = Message::at(seconds_since_the_epoch());
        event.number(2, step);
        event.bytes(5, &summary.0);
        self.write(&record(&event.0))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|source| JobError::file("writing", &self.path, source))
    }
}

fn seconds_since_the_epoch() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// A TFRecord of `data`.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked(crc32c::crc32c(&length)).to_le_bytes());
    record.extend(data);
    record.extend(masked(crc32c::crc32c(data)).to_le_bytes());
    record
}

/// A sum of bytes that hold sums themselves is masked in this format.
fn masked(sum: u32) -> u32 {
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A message of Protocol Buffers, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// An event of that time.
    fn at(seconds: f64) -> Self {
        let mut event = Self::default();
        event.key(1, 1);
        event.0.extend(seconds.to_le_bytes());
        event
    }

    fn key(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn number(&mut self, field: u64, number: u64) {
        self.key(field, 0);
        self.varint(number);
    }

    fn float(&mut self, field: u64, number: f32) {
        self.key(field, 5);
        self.0.extend(number.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MemoryUse;
    use crate::operators::Scores;

    /// The records of a file, each checked by its sums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let (head, rest) = bytes.split_at(12);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
            let sum = |bytes: &[u8]| masked(crc32c::crc32c(bytes)).to_le_bytes();
            assert_eq!(head[8..], sum(&head[..8]));
            let (data, rest) = rest.split_at(length);
            let (end, rest) = rest.split_at(4);
            assert_eq!(end, sum(data));
            found.push(data.to_vec());
            bytes = rest;
        }
        found
    }

    #[test]
    fn sums_are_those_of_the_format() {
        // CRC-32C of "123456789" is 0xe3069283 (RFC 3720).
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(0xe306_9283), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
        assert_eq!(masked(0), 0xa282_ead8);
        assert_eq!(record(b"").len(), 16);
    }

    #[test]
    fn a_file_begins_with_its_version_and_the_start_and_has_a_record_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path(), 300).unwrap();
        let metrics = StepMetrics {
            step: 301,
            loss: 2.5,
            grad_norm: 1.0,
            learning_rate: 1e-3,
            tokens: 9,
            tokens_per_second: 3.0,
            elapsed_seconds: 4.0,
            communication: None,
            memory: Some(MemoryUse { host_bytes: Some(1 << 30), device_bytes: None }),
        };
        events.step(&metrics).unwrap();
        let scores = [("acc".to_owned(), 0.5)].into();
        let tasks = [("piqa".to_owned(), scores)].into();
        let suites = [("own".to_owned(), [("all".to_owned(), 0.25)].into())].into();
        let (step, answers) = (301, Vec::new());
        let report = EvaluationReport {
            step,
            loss: 2.25,
            tokens: 4,
            answers,
            scores: Scores { tasks, suites },
        };
        events.evaluation(&report).unwrap();
        let files: Vec<_> = std::fs::read_dir(folder.path().join(FOLDER)).unwrap().collect();
        let records = records(&std::fs::read(files[0].as_ref().unwrap().path()).unwrap());
        assert_eq!((files.len(), records.len()), (1, 4));
        let ends_with = |record: &[u8], end: &[u8]| assert!(record.ends_with(end), "{record:?}");
        ends_with(&records[0], b"\x1a\x0dbrain.Event:2");
        // Step 301 as a varint, and field 7 of two bytes: status 1.
        ends_with(&records[1], b"\x10\xad\x02\x3a\x02\x08\x01");
        let contains = |record: &[u8], part: &[u8]| {
            assert!(record.windows(part.len()).any(|it| it == part), "{record:?}");
        };
        contains(&records[2], &[b"\x0a\x0atrain/loss\x15", &2.5_f32.to_le_bytes()[..]].concat());
        contains(&records[2], b"train/tokens_per_second");
        let held =
            [b"\x0a\x11memory/host_bytes\x15", &1_073_741_824.0_f32.to_le_bytes()[..]].concat();
        ends_with(&records[2], &held);
        let loss = [b"\x0a\x0fevaluation/loss\x15", &2.25_f32.to_le_bytes()[..]].concat();
        contains(&records[3], &loss);
        let score = [b"\x0a\x13evaluation/piqa/acc\x15", &0.5_f32.to_le_bytes()[..]].concat();
        contains(&records[3], &score);
        let average = [b"\x0a\x12evaluation/own/all\x15", &0.25_f32.to_le_bytes()[..]].concat();
        ends_with(&records[3], &average);
    }
}
