//! Tasks to requests, and answers to results: the whole of an evaluation except the model.
//!
//! ```
//! use tidemill_evaluation::metrics::Answer;
//! use tidemill_evaluation::plan::{PlannedTask, Settings};
//! use tidemill_evaluation::task::Task;
//! use tidemill_evaluation::tokens::{Encode, EncodeError, SpecialTokens, Vocabulary};
//!
//! struct Bytes;
//! impl Encode for Bytes {
//!     fn encode(&self, text: &str, _: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
//!         Ok(text.bytes().map(u32::from).collect())
//!     }
//! }
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # std::fs::write(folder.path().join("sums.jsonl"), "{\"q\": \"1+1=\", \"a\": [\"2\", \"3\"], \"right\": 0}\n").unwrap();
//! # let data = folder.path().to_str().unwrap().to_owned();
//! let task = Task::parse("sums", r#"
//!     kind = "multiple_choice"
//!     context = "{q}"
//!     choices = "{a}"
//!     gold = "right"
//!     metrics = ["acc"]
//!     source = { file = "sums" }
//! "#, "sums.toml").unwrap();
//! let vocabulary = Vocabulary { tokenizer: &Bytes, prefix: None, end: None, positions: None };
//! let settings = Settings { data: Some(data), ..Settings::default() };
//! let planned = PlannedTask::new(task, None, &settings, &vocabulary).unwrap();
//! assert_eq!(planned.requests()[0].tokens, b"1+1= 2".map(u32::from));
//! // A model that finds the first choice likelier:
//! let answers = [-1.0, -2.0].map(|log_likelihood| Answer { log_likelihood, greedy: None });
//! assert_eq!(planned.measure(&answers).unwrap()[0].value, 1.0);
//! ```

use std::num::NonZeroUsize;

use tidemill_streaming_data::hash::{ContentHash, ContentHasher};

use crate::document::Document;
use crate::error::{EvaluationError, Result};
use crate::metrics::{Answer, Measured, measure};
use crate::prompt::{Pool, Prompt, examples};
use crate::rows::Rows;
use crate::task::{Kind, Task};
use crate::tokens::{Request, Vocabulary};

/// Settings for all tasks of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The folder or URL of the sources; default: the folder of the task's file, and the current
    /// folder for a built-in task.
    pub data: Option<String>,
    /// Few-shot examples of every question; default: as the suite says, else as the task says.
    pub fewshot: Option<usize>,
    /// The most questions of each task; the first ones are taken.
    pub limit: Option<usize>,
    /// The seed of the choice of few-shot examples.
    pub seed: u64,
}

/// A task with its requests.
#[derive(Clone, Debug)]
pub struct PlannedTask {
    task: Task,
    shots: usize,
    documents: Vec<Document>,
    requests: Vec<Request>,
    /// The first request of each question.
    firsts: Vec<usize>,
}

impl PlannedTask {
    /// Reads the rows of `task` and makes its requests; `shots` is the number of few-shot examples
    /// that a suite sets.
    ///
    /// # Errors
    /// Sources that cannot be read, rows that the task cannot use, and texts that cannot be made
    /// into requests.
    pub fn new(
        task: Task,
        shots: Option<usize>,
        settings: &Settings,
        vocabulary: &Vocabulary<'_>,
    ) -> Result<Self> {
        let own = task.folder.as_deref().map(|folder| folder.display().to_string());
        let data = settings.data.clone().or(own).unwrap_or_else(|| ".".to_owned());
        let open = |file: &str| Rows::open(&data, file, task.source.origin.as_deref());
        let rows = open(&task.source.file)?;
        let asked = settings.limit.unwrap_or(usize::MAX).min(rows.rows.len());
        let shots = settings.fewshot.or(shots).unwrap_or(task.fewshot);
        let other = task.source.fewshot.as_deref().filter(|_| shots > 0).map(open).transpose()?;
        // Examples may be any rows; questions are the first ones.
        let pool = if shots > 0 { other.as_ref().unwrap_or(&rows) } else { &rows };
        let documents = |rows: &Rows, count: usize| -> Result<Vec<Document>> {
            (0..count).map(|index| Document::new(&task, rows, index)).collect()
        };
        let questions = documents(&rows, asked)?;
        let (kind, pool) = match shots {
            0 => (Pool::Other, Vec::new()),
            _ if other.is_some() => (Pool::Other, documents(pool, pool.rows.len())?),
            _ => (Pool::Same, documents(pool, pool.rows.len())?),
        };
        let made = of_each(&questions, |index, document| {
            let chosen = examples(shots, pool.len(), kind, index, settings.seed)
                .map_err(|what| EvaluationError::task(&task.name, what))?;
            let chosen: Vec<&Document> = chosen.into_iter().map(|row| &pool[row]).collect();
            let request = |option| {
                let prompt = Prompt::new(&task, &chosen, document, option);
                let continuation = document.continuation(option);
                let (delimiters, place) = (&task.delimiters, &document.place);
                vocabulary.request(task.tokenization, delimiters, &prompt, continuation, place)
            };
            (0..document.options()).map(request).collect::<Result<Vec<Request>>>()
        })?;
        let (mut requests, mut firsts) = (Vec::new(), Vec::with_capacity(questions.len()));
        for of_question in made {
            firsts.push(requests.len());
            requests.extend(of_question);
        }
        Ok(Self { task, shots, documents: questions, requests, firsts })
    }

    /// The task.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The number of few-shot examples of each question.
    pub fn shots(&self) -> usize {
        self.shots
    }

    /// The questions.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// The requests, in the order of the questions, and of each question's options.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Whether a metric needs to know if each token of a continuation is the most likely one.
    pub fn asks_greedy(&self) -> bool {
        self.task.kind == Kind::LanguageModelling
    }

    /// The identity of these requests: a hash and their number.
    pub fn fingerprint(&self) -> ContentHash {
        let mut hasher = ContentHasher::new();
        hasher.update(&[u8::from(self.asks_greedy())]);
        for Request { tokens, first, .. } in &self.requests {
            for number in [tokens.len() as u64, *first as u64] {
                hasher.update(&number.to_le_bytes());
            }
            for token in tokens {
                hasher.update(&token.to_le_bytes());
            }
        }
        hasher.finish()
    }

    /// The question and the option of request `index`.
    ///
    /// # Panics
    /// If there is no such request.
    pub fn asked(&self, index: usize) -> (usize, usize) {
        let question = self.firsts.partition_point(|&first| first <= index) - 1;
        assert!(index < self.requests.len(), "a request of this task");
        (question, index - self.firsts[question])
    }

    /// The request for an option of a question, if there is one.
    pub fn request_of(&self, question: usize, option: usize) -> Option<usize> {
        let options = self.documents.get(question)?.options();
        (option < options).then(|| self.firsts[question] + option)
    }

    /// The metrics, given an answer to each request.
    ///
    /// # Errors A log-likelihood that is not a finite number.
    ///
    /// # Panics If the number of answers is not that of requests.
    pub fn measure(&self, answers: &[Answer]) -> Result<Vec<Measured>> {
        assert_eq!(answers.len(), self.requests.len(), "an answer to each request");
        measure(&self.task, &self.documents, &self.requests, answers)
    }
}

/// The results of `make` for each item, in order, computed on as many threads as there are cores.
///
/// # Errors The error of the first item that has one.
fn of_each<T: Sync, R: Send>(
    items: &[T],
    make: impl Fn(usize, &T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let share = items.len().div_ceil(threads).max(1);
    let make = &make;
    let of_part = move |(part, items): (usize, &[T])| -> Result<Vec<R>> {
        items.iter().enumerate().map(|(place, item)| make(part * share + place, item)).collect()
    };
    let parts: Vec<Result<Vec<R>>> = std::thread::scope(|scope| {
        let parts = items.chunks(share).enumerate();
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || of_part(part))).collect();
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut made = Vec::with_capacity(items.len());
    for part in parts {
        made.extend(part?);
    }
    Ok(made)
}
