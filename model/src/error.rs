//! Errors of a model: of its configuration, its files, or the device it runs on.

use std::path::PathBuf;

use tidemill_kernels::KernelError;

/// The result of a call on a model.
pub type Result<T> = std::result::Result<T, ModelError>;

/// Why a model could not be built, read, written or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A kernel or the device failed.
    #[error("a kernel failed")]
    Kernel(#[from] KernelError),
    /// A parameter arena of the wrong length.
    #[error("the parameter arena has {found} elements, expected {expected}")]
    ArenaSize {
        /// Elements of the layout.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A configuration value that no model can have: fix the input.
    #[error("{key}: expected {expected}, found {found}")]
    Config {
        /// The key, as the user writes it.
        key: String,
        /// The condition on its value.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A model file that cannot be read or written.
    #[error("{action} {} failed", path.display())]
    File {
        /// The operation, such as `reading`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A model file that does not hold what it should: fix or replace it.
    #[error("{}: {what}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The expected and the found contents.
        what: String,
    },
    /// A token outside the vocabulary.
    #[error("{what}: token {token} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The place of the token.
        what: String,
        /// The token.
        token: u32,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A microbatch that does not fit its workspace, or whose parts do not fit each other: fix the
    /// caller.
    #[error("{what}: expected {expected}, found {found}")]
    Microbatch {
        /// The quantity that does not fit.
        what: &'static str,
        /// The expected value.
        expected: String,
        /// The value found.
        found: usize,
    },
    /// A model that enters its blocks out of order, or reads parameters of another block or in a
    /// precision that its layout does not declare: fix the model.
    #[error("{attempt}: expected {expected}, found {found}")]
    ParameterAccess {
        /// The refused access, such as `entering block 3`.
        attempt: String,
        /// The rule for accesses that it breaks.
        expected: String,
        /// The state that breaks it.
        found: String,
    },
    /// An update rule that was given another number of states than it has: fix the caller.
    #[error("an update of {expected} states was given {found}")]
    UpdateStates {
        /// The states of the rule.
        expected: usize,
        /// The states that were given.
        found: usize,
    },
    /// A number of the model that is infinite or no number: its weights are broken, or training diverged.
    #[error("{what}")]
    NotFinite {
        /// The number's place, and its value.
        what: String,
    },
    /// The receiver of gradients is gone: the run is being torn down.
    #[error("the receiver of gradients is gone")]
    SinkClosed,
}

impl ModelError {
    /// Whether the same call may succeed when it is repeated unchanged: true where a device or the
    /// code around the model failed. An error of the operating system ([`File`](Self::File)) may be
    /// temporary, as far as this crate can tell: only the caller knows which paths a user gave.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Kernel(error) => error.may_succeed_later(),
            Self::File { .. }
            | Self::ArenaSize { .. }
            | Self::Microbatch { .. }
            | Self::ParameterAccess { .. }
            | Self::UpdateStates { .. }
            | Self::SinkClosed => true,
            Self::Config { .. }
            | Self::Format { .. }
            | Self::Token { .. }
            | Self::NotFinite { .. } => false,
        }
    }

    /// A [`ModelError::Config`].
    pub fn config(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::Config { key: key.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A [`ModelError::Format`].
    pub fn format(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Format { path: path.into(), what: what.into() }
    }
}
