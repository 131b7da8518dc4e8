//! The file that keeps answers, so that a second run can continue where the first ended.
//!
//! Its first line says what the answers belong to ([`Header`]): the model, the device, and the
//! requests of each task. Each other line is an answer:
//!
//! ```text
//! {"task": "piqa", "question": 0, "option": 1, "log_likelihood": -31.25, "greedy": null}
//! ```
//!
//! Contract: lines are appended in the order of the requests, each batch in one write, so that the
//! bytes of the file depend only on its first line. A last line that a kill has cut is dropped when
//! the file is opened again. One process at a time has the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidemill_files::durable;
use tidemill_files::lock::{Attempt, Lock};

use crate::error::{EvaluationError, Result};
use crate::metrics::Answer;

/// The version of the file format.
const VERSION: u32 = 1;

/// The model, device and requests that the answers of a file belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The version of the file format.
    tidemill_answers: u32,
    /// The identity of the model: a hash of its files.
    pub model: String,
    /// The kind of device and all else that affects the numbers.
    pub device: String,
    /// The requests of each task.
    pub tasks: Vec<AskedTask>,
}

/// The requests of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskedTask {
    /// The task's name.
    pub name: String,
    /// A hash of their tokens.
    pub requests: String,
    /// How many there are.
    pub count: usize,
}

impl Header {
    /// The header of a file of this version.
    pub fn new(model: String, device: String, tasks: Vec<AskedTask>) -> Self {
        Self { tidemill_answers: VERSION, model, device, tasks }
    }

    /// The differences from the header of a file, in words.
    fn difference(&self, found: &Self) -> Option<String> {
        let said = |what: &str, found: &str, now: &str| {
            Some(format!("it has answers of {what} {found}, but {what} is {now} now"))
        };
        if self.tidemill_answers != found.tidemill_answers {
            let [found, now] = [found, self].map(|of| of.tidemill_answers.to_string());
            return said("version", &found, &now);
        }
        if self.model != found.model {
            return said("the model", &found.model, &self.model);
        }
        if self.device != found.device {
            return said("the device", &found.device, &self.device);
        }
        let names = |header: &Self| {
            let names: Vec<&str> = header.tasks.iter().map(|task| task.name.as_str()).collect();
            names.join(",")
        };
        if names(self) != names(found) {
            return said("the list of tasks", &names(found), &names(self));
        }
        let differs = self.tasks.iter().zip(&found.tasks).find(|(now, found)| now != found)?;
        let name = &differs.0.name;
        Some(format!(
            "its answers of {name} are to other requests (another tokenizer, source, --fewshot, --seed or --limit)"
        ))
    }
}

/// An answer, and the request that it belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// The task's name.
    pub task: String,
    /// The question, from 0.
    pub question: usize,
    /// The option, from 0.
    pub option: usize,
    /// See [`Answer`].
    pub log_likelihood: f64,
    /// See [`Answer`].
    pub greedy: Option<bool>,
}

impl Line {
    /// The answer.
    pub fn answer(&self) -> Answer {
        Answer { log_likelihood: self.log_likelihood, greedy: self.greedy }
    }
}

/// A file of answers, open for adding more.
#[derive(Debug)]
pub struct AnswerFile {
    lock: Lock,
    path: PathBuf,
}

impl AnswerFile {
    /// Opens or creates the file, and reads the answers in it.
    ///
    /// # Errors
    /// A file that another process has open, that holds no answers or answers to other requests, or
    /// that cannot be read or written.
    pub fn open(path: &Path, header: &Header) -> Result<(Self, Vec<Line>)> {
        let failed = |action| {
            let path = path.to_owned();
            move |source| EvaluationError::File { action, path, source }
        };
        let wrong = |what: String| {
            let what = format!("{what}: name another --output, or remove the file");
            EvaluationError::Answers { path: path.to_owned(), what }
        };
        let lock = match Lock::attempt(path).map_err(failed("opening"))? {
            Attempt::Taken(lock) => lock,
            Attempt::Held(_) => {
                let what = "another process adds answers to it".to_owned();
                return Err(EvaluationError::Answers { path: path.to_owned(), what });
            }
            Attempt::Gone => return Err(wrong("it was removed while it was opened".to_owned())),
        };
        let (mut lines, mut whole_bytes) = (Vec::new(), 0);
        let mut reader = BufReader::new(lock.file());
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(failed("reading"))?;
            if line.last() != Some(&b'\n') {
                break;
            }
            whole_bytes += line.len() as u64;
            let expected =
                if number == 1 { "the first line of a file of answers" } else { "an answer" };
            let none = |error: serde_json::Error| {
                wrong(format!("line {number}: expected {expected}: {error}"))
            };
            if number > 1 {
                lines.push(serde_json::from_slice(&line).map_err(none)?);
                continue;
            }
            let found: Header = serde_json::from_slice(&line).map_err(none)?;
            if let Some(difference) = header.difference(&found) {
                return Err(wrong(difference));
            }
        }
        // A text without the end of its first line is a cut file of answers only if it is the
        // beginning of such a line.
        let text =
            serde_json::to_string(header).map_err(io::Error::from).map_err(failed("writing"))?
                + "\n";
        if whole_bytes == 0 && !text.as_bytes().starts_with(&line) {
            return Err(wrong("expected a file of answers".to_owned()));
        }
        let file = Self { lock, path: path.to_owned() };
        file.cut(whole_bytes).map_err(failed("writing"))?;
        if whole_bytes == 0 {
            file.write(&text).map_err(failed("writing"))?;
            durable::sync_parent(path).map_err(failed("writing"))?;
        }
        Ok((file, lines))
    }

    /// Adds answers, in one write.
    ///
    /// # Errors
    /// A disk that is full, or a file system that fails.
    pub fn add(&self, lines: &[Line]) -> Result<()> {
        let texts: io::Result<String> =
            lines.iter().map(|line| Ok(serde_json::to_string(line)? + "\n")).collect();
        texts.and_then(|text| self.write(&text)).map_err(|source| self.failed(source))
    }

    /// Syncs the file, so that a power cut loses none of the answers.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn finish(self) -> Result<()> {
        self.lock.file().sync_all().map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> EvaluationError {
        EvaluationError::File { action: "writing", path: self.path.clone(), source }
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let mut file: &File = self.lock.file();
        file.write_all(text.as_bytes())
    }

    /// Truncates the file to this many bytes, and continues behind them.
    fn cut(&self, bytes: u64) -> io::Result<()> {
        let mut file: &File = self.lock.file();
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let task = AskedTask { name: "piqa".to_owned(), requests: "ab".to_owned(), count: 4 };
        Header::new("m".to_owned(), "cpu".to_owned(), vec![task])
    }

    fn line(question: usize) -> Line {
        let log_likelihood = -1.0 / 3.0 - question as f64;
        Line { task: "piqa".to_owned(), question, option: 1, log_likelihood, greedy: None }
    }

    #[test]
    fn answers_are_found_again_and_a_cut_line_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("answers.jsonl");
        let (file, lines) = AnswerFile::open(&path, &header()).expect("new");
        assert!(lines.is_empty());
        file.add(&[line(0), line(1)]).expect("added");
        let held = AnswerFile::open(&path, &header()).unwrap_err().to_string();
        assert!(held.ends_with("another process adds answers to it"), "{held}");
        file.finish().expect("kept");
        let whole = std::fs::read(&path).expect("read");
        for cut in [whole.len(), whole.len() - 1, whole.len() - 20] {
            std::fs::write(&path, &whole[..cut]).expect("written");
            let (file, lines) = AnswerFile::open(&path, &header()).expect("again");
            let left = if cut == whole.len() { 2 } else { 1 };
            assert_eq!(lines, [line(0), line(1)][..left]);
            file.add(&[line(0), line(1)][left..]).expect("added");
            drop(file);
            assert_eq!(std::fs::read(&path).expect("read"), whole, "{cut}");
        }
        // The first line may be cut too.
        std::fs::write(&path, &whole[..9]).expect("written");
        let (file, lines) = AnswerFile::open(&path, &header()).expect("again");
        assert!(lines.is_empty());
        file.add(&[line(0), line(1)]).expect("added");
        assert_eq!(std::fs::read(&path).expect("read"), whole);
    }

    #[test]
    fn answers_to_something_else_are_refused_and_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("answers.jsonl");
        drop(AnswerFile::open(&path, &header()).expect("new"));
        let kept = std::fs::read(&path).expect("read");
        let refused = |header: &Header| AnswerFile::open(&path, header).unwrap_err().to_string();
        let other = refused(&Header { model: "n".to_owned(), ..header() });
        assert!(other.contains("it has answers of the model m, but the model is n now"), "{other}");
        let other = refused(&Header { device: "gpu".to_owned(), ..header() });
        assert!(other.contains("of the device cpu"), "{other}");
        let mut tasks = header().tasks;
        tasks[0].requests = "cd".to_owned();
        let other = refused(&Header { tasks, ..header() });
        assert!(other.contains("piqa are to other requests"), "{other}");
        let other = refused(&Header { tasks: Vec::new(), ..header() });
        assert!(other.contains("the list of tasks piqa"), "{other}");
        assert_eq!(std::fs::read(&path).expect("read"), kept);
        for text in ["notes", "notes\n", "{\"task\": 1}\n"] {
            std::fs::write(&path, text).expect("written");
            let said = refused(&header());
            assert!(said.contains("name another --output"), "{said}");
            assert_eq!(std::fs::read(&path).expect("read"), text.as_bytes());
        }
    }
}
