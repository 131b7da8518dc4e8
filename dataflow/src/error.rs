//! What can end a job, and what its caller should do about it.

use std::path::{Path, PathBuf};

use tidemill_model::ModelError;
use tidemill_streaming_data::DataError;

use crate::cluster::{ClusterError, SharedError};

/// The result of a call on a job.
pub type Result<T> = std::result::Result<T, JobError>;

/// Why a job could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A config that is not one: fix the input.
    #[error("{origin}: {what}")]
    Config {
        /// The file, or what the text came from.
        origin: String,
        /// The key, what was expected and what was found.
        what: String,
    },
    /// One key or flag with a value that it cannot have: fix the input.
    #[error("{key}: expected {expected}, found {found}")]
    Value {
        /// The key or flag.
        key: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A run cannot be resumed with what it is asked to be now: fix the input.
    #[error("{key} is {saved} in {}, but {found} now: a run cannot change it on resume", checkpoint.display())]
    Resume {
        /// The key that changed.
        key: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        found: String,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A checkpoint that is damaged or not one: restore it, or remove it to go on from the one
    /// before.
    #[error("checkpoint {}: {what}", path.display())]
    Checkpoint {
        /// The folder or file.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// A file that could not be read or written.
    #[error("{action} {} failed", path.display())]
    File {
        /// What was attempted, such as `writing`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A run folder that another process is working in.
    #[error("{} is in use by another run", path.display())]
    RunFolderInUse {
        /// The folder.
        path: PathBuf,
    },
    /// A run folder in a store in which another run has started since: end that one, or leave this one ended.
    #[error("{} was taken over by a run that started later", path.display())]
    RunFolderTaken {
        /// The folder's URL.
        path: PathBuf,
    },
    /// A device that this build or machine does not have: fix the input.
    #[error("{key}: {backend} is not available: {why}")]
    Device {
        /// The key or flag.
        key: &'static str,
        /// The backend asked for.
        backend: &'static str,
        /// Why not, and what to do.
        why: String,
    },
    /// Devices in one process whose bits would not agree: leave one out, with `CUDA_VISIBLE_DEVICES` say.
    #[error(
        "all workers need one kind of device, but {first} and {other} are here: leave one out \
         (CUDA_VISIBLE_DEVICES) or use fewer workers"
    )]
    MixedDevices {
        /// The first worker's device and its kind.
        first: String,
        /// Another's.
        other: String,
    },
    /// A device without room: lower what it is asked to hold.
    #[error("{what} does not fit into the device's memory: {advice}")]
    OutOfMemory {
        /// What does not, such as "the run".
        what: &'static str,
        /// What to change, with the keys as they are now.
        advice: String,
        /// Which allocation failed.
        #[source]
        cause: SharedError,
    },
    /// A kernel that the device's compiler refuses: report it.
    #[error("{message}; please report it; {cpu} avoids it")]
    Compile {
        /// Which kernel, and the first error of the compiler.
        message: String,
        /// The key or flag that makes the CPU compute.
        cpu: &'static str,
    },
    /// A sample with a token that the model does not have: fix the data set or `model.vocab_size`.
    #[error("{} row {row}: token {token} is outside the model's vocabulary of {vocab_size}", path.display())]
    Token {
        /// The shard.
        path: PathBuf,
        /// The row in the shard.
        row: u64,
        /// The token.
        token: u32,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A step that has no loss: the data or the settings are at fault.
    #[error("step {step}: {what}")]
    Step {
        /// The update, from 1.
        step: u64,
        /// What was wrong with it.
        what: String,
    },
    /// The model or its files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data set.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The workers or their processes.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl JobError {
    /// A [`JobError::Value`].
    pub fn value(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::Value { key: key.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A [`JobError::File`].
    pub fn file(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File { action, path: path.to_owned(), source }
    }

    /// A [`JobError::Checkpoint`].
    pub fn checkpoint(path: &Path, what: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.to_owned(), what: what.into() }
    }
}
