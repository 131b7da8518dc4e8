//! A log of a run folder, read for a page: every number of every line by its name, and its faults in words.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;

use serde_json::{Map, Value};

use super::series::Series;
use crate::error::JobError;

/// The longest line that is read, in bytes: longer ones are no lines of a log.
const LONGEST_LINE_BYTES: usize = 1 << 20;
/// The most names of numbers that are plotted; a log has a few of them.
const MOST_NAMES: usize = 200;

/// The numbers of a log; a number of an inner object is called `outer.inner`.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    pub series: BTreeMap<String, Series>,
    /// Steps of the first and the last line.
    pub steps: Option<[u64; 2]>,
}

/// Damaged lines of a file: the first one's fault, and their number.
#[derive(Debug, Default)]
struct Damage {
    first: Option<String>,
    lines: u64,
}

impl Log {
    /// Reads `name` in the run folder `dir`, if it is there. Lines that are no lines of a log are left out, with a note in `notes`.
    /// `derive` may add numbers to a line, which has its step.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(
        dir: &Path,
        name: &str,
        notes: &mut Vec<String>,
        mut derive: impl FnMut(u64, &Map<String, Value>) -> Option<(&'static str, f64)>,
    ) -> Result<Self, JobError> {
        let mut log = Self::default();
        read_lines(dir, name, notes, |line| {
            let fields: Map<String, Value> =
                serde_json::from_str(line).map_err(|error| format!("expected JSON: {error}"))?;
            let step = fields.get("step").and_then(Value::as_u64);
            let step = step.ok_or("expected a number of steps as \"step\"")?;
            let [first, last] = log.steps.unwrap_or([step, 0]);
            if step < last {
                return Err(format!("expected no step before {last}, found {step}"));
            }
            log.steps = Some([first, step]);
            for (name, value) in &fields {
                if name != "step" {
                    log.push(step, name, value);
                }
            }
            if let Some((name, number)) = derive(step, &fields) {
                log.series_of(name).push(step, number);
            }
            Ok(())
        })?;
        Ok(log)
    }

    fn push(&mut self, step: u64, name: &str, value: &Value) {
        match value {
            Value::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                if self.series.contains_key(name) || self.series.len() < MOST_NAMES {
                    self.series_of(name).push(step, number);
                }
            }
            Value::Object(fields) => {
                for (inner, value) in fields {
                    self.push(step, &format!("{name}.{inner}"), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) => {}
        }
    }

    fn series_of(&mut self, name: &str) -> &mut Series {
        if !self.series.contains_key(name) {
            self.series.insert(name.to_owned(), Series::default());
        }
        self.series.get_mut(name).expect("it was put there")
    }

    /// The values called `name`, where there are any.
    pub fn get(&self, name: &str) -> Option<&Series> {
        self.series.get(name).filter(|series| series.count() > 0)
    }
}

/// Gives every complete line of `name` in `dir`, where it is there, to `read`; `notes` gets a note on the lines that it refuses.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn read_lines(
    dir: &Path,
    name: &str,
    notes: &mut Vec<String>,
    mut read: impl FnMut(&str) -> Result<(), String>,
) -> Result<(), JobError> {
    let path = dir.join(name);
    let failed = |source| JobError::file("reading", &path, source);
    let file = match tidemill_files::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(failed(source)),
    };
    let (mut reader, mut bytes, mut number) = (BufReader::new(file), Vec::new(), 0_u64);
    let mut damage = Damage::default();
    loop {
        bytes.clear();
        number += 1;
        if reader.read_until(b'\n', &mut bytes).map_err(failed)? == 0 {
            break;
        }
        let Some(line) = bytes.strip_suffix(b"\n") else {
            notes.push(format!("{name}: the last line is torn, and left out"));
            break;
        };
        let found = if line.len() > LONGEST_LINE_BYTES {
            Err(format!("{} bytes are no line of a log", line.len()))
        } else {
            std::str::from_utf8(line).map_err(|error| error.to_string()).and_then(&mut read)
        };
        if let Err(what) = found {
            damage.lines += 1;
            damage.first.get_or_insert_with(|| format!("line {number}: {what}"));
        }
    }
    if let Some(first) = damage.first {
        let others = match damage.lines {
            1 => String::new(),
            lines => format!(" (and {} more such lines)", lines - 1),
        };
        notes.push(format!("{name}: left out {first}{others}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Log, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.jsonl"), text).unwrap();
        let mut notes = Vec::new();
        let double = |_, fields: &Map<String, Value>| Some(("twice", 2.0 * fields["a"].as_f64()?));
        (Log::read(dir.path(), "m.jsonl", &mut notes, double).unwrap(), notes)
    }

    #[test]
    fn every_number_is_there_by_its_name() {
        let (log, notes) = read(
            "{\"step\":1,\"a\":1.5,\"b\":{\"c\":2,\"d\":{\"e\":3}},\"text\":\"x\"}\n{\"step\":4,\"a\":null}\n",
        );
        let names: Vec<&str> = log.series.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b.c", "b.d.e", "twice"]);
        assert_eq!(log.get("b.d.e").unwrap().last().unwrap().value, 3.0);
        assert_eq!(log.get("twice").unwrap().last().unwrap().value, 3.0);
        assert_eq!((log.get("a").unwrap().count(), log.steps), (1, Some([1, 4])));
        assert!(notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn bad_lines_are_left_out_and_named() {
        let (log, notes) = read(
            "{\"step\":1,\"a\":1}\nnot json\n{\"a\":2}\n{\"step\":0,\"a\":7}\n{\"step\":3,\"a\":3}\n{\"ste",
        );
        assert_eq!(log.get("a").unwrap().count(), 2);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("the last line is torn"), "{notes:?}");
        assert!(notes[1].contains("line 2: expected JSON"), "{notes:?}");
        assert!(notes[1].contains("and 2 more such lines"), "{notes:?}");
    }

    #[test]
    fn a_log_that_is_not_there_is_empty_and_a_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name| Log::read(dir.path(), name, &mut Vec::new(), |_, _| None);
        assert_eq!(read("m.jsonl").unwrap().steps, None);
        std::fs::create_dir(dir.path().join("m.jsonl")).unwrap();
        assert!(read("m.jsonl").unwrap_err().to_string().contains("m.jsonl"));
    }
}
