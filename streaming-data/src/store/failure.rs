//! Why an operation on a store failed, and whether trying again can help.

use std::time::Duration;

/// The cause of a [`DataError::Store`](crate::DataError::Store).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreFailure {
    /// There is no such object, container or bucket.
    #[error("there is no such object or bucket ({said})")]
    NotFound {
        /// The message of the store.
        said: String,
    },
    /// The credentials do not allow it, or are not valid.
    #[error("access was refused, expected credentials that may do this ({said})")]
    Refused {
        /// The message of the store.
        said: String,
    },
    /// The object is not the one that was there before.
    #[error("the object changed: found {found}, expected {expected}")]
    Changed {
        /// Its version now.
        found: String,
        /// Its version before.
        expected: String,
    },
    /// The object has another size than it should have.
    #[error("the object has {found} bytes, expected {expected}")]
    Size {
        /// Bytes that it has.
        found: u64,
        /// Bytes that it should have.
        expected: u64,
    },
    /// The object is larger than such a one may be.
    #[error("{0}")]
    TooLarge(tidemill_files::Refused),
    /// The store does not support the request, or the request is wrong.
    #[error("{said}")]
    Unsupported {
        /// The message of the store.
        said: String,
    },
    /// The store cannot compare an object and write it in one step.
    #[error("the store cannot write an object only where it is unchanged ({said})")]
    Unconditional {
        /// The message of the store.
        said: String,
    },
    /// Nothing arrived for a time.
    #[error("nothing arrived for {} s", seconds(.0))]
    Stalled(Duration),
    /// The whole operation took longer than it may.
    #[error("not done after {} s", seconds(.0))]
    TooSlow(Duration),
    /// A body ended early.
    #[error("the body ended after {found} of {expected} bytes")]
    Truncated {
        /// Bytes that arrived.
        found: u64,
        /// Bytes that the object has.
        expected: u64,
    },
    /// Anything else: a connection that broke, a server that is too busy.
    #[error("{said}")]
    Other {
        /// The message of the store or the connection.
        said: String,
    },
}

impl StoreFailure {
    /// Whether the same operation would fail again.
    pub fn is_final(&self) -> bool {
        !matches!(
            self,
            StoreFailure::Stalled(_) | StoreFailure::Truncated { .. } | StoreFailure::Other { .. }
        )
    }
}

fn seconds(time: &Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}
