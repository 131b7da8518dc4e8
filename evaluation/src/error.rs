//! Errors in tasks, in their rows and in answers.

use std::io;
use std::path::PathBuf;

use tidemill_streaming_data::DataError;

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, EvaluationError>;

/// Why something cannot be evaluated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// A file or name that is not a valid task or suite: fix it.
    #[error("{origin}: {what}")]
    Task {
        /// The file or name.
        origin: String,
        /// The expectation that was not met, and the value that was found.
        what: String,
    },
    /// A row that a task cannot use: fix the row, or the task.
    #[error("{place}: {what}")]
    Row {
        /// Such as `piqa.jsonl: line 3`.
        place: String,
        /// The expectation that was not met, and the value that was found.
        what: String,
    },
    /// A source of rows that is missing or has another format: fix the task, `--data`, or the file.
    #[error("{origin}: {what}")]
    Source {
        /// The file or URL.
        origin: String,
        /// The expectation that was not met, and the value that was found.
        what: String,
    },
    /// A text that cannot be made into a request: fix the task, or choose another model.
    #[error("{place}: {what}")]
    Request {
        /// The task and the row.
        place: String,
        /// The expectation that was not met, and the value that was found.
        what: String,
    },
    /// An answer that no metric can use: the model is at fault.
    #[error("{task}: {place}: the model answered {found}, expected a log-likelihood")]
    Answer {
        /// The task's name.
        task: String,
        /// The row.
        place: String,
        /// The log-likelihood.
        found: f64,
    },
    /// A file of answers to other requests, or a damaged one: name another `--output`.
    #[error("{}: {what}", path.display())]
    Answers {
        /// The file.
        path: PathBuf,
        /// The expectation that was not met, and the value that was found.
        what: String,
    },
    /// A file that could not be read or written.
    #[error("{action} {} failed", path.display())]
    File {
        /// The attempted operation, such as `reading`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A store that does not answer or refuses.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A tokenizer that fails on a text.
    #[error("{place}")]
    Tokenizer {
        /// The task and the row.
        place: String,
        /// The tokenizer's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EvaluationError {
    /// Whether the same call may succeed later: the input is not at fault.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Data(error) => error.may_succeed_later(),
            _ => false,
        }
    }

    pub(crate) fn task(origin: &str, what: impl Into<String>) -> Self {
        Self::Task { origin: origin.to_owned(), what: what.into() }
    }

    pub(crate) fn row(place: &str, what: impl Into<String>) -> Self {
        Self::Row { place: place.to_owned(), what: what.into() }
    }

    pub(crate) fn request(place: &str, what: impl Into<String>) -> Self {
        Self::Request { place: place.to_owned(), what: what.into() }
    }
}
