//! The messages that two processes exchange when they meet, and their comparison.
//!
//! Said through an established [`Channel`](super::channel::Channel) only: both know the secret.
//! The caller says hello and is welcomed or refused; it then confirms, so that a connection counts
//! at the answering end only when the calling end has it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ciphers::DataKey;
use super::error::ClusterError;
use crate::printable::printable;

/// Longer keys and values of an identity are cut in messages.
const TEXT_LIMIT_BYTES: usize = 1 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Purpose {
    Control,
    Data,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub process: usize,
    pub purpose: Purpose,
    /// Tells a process that calls again from another that was given the same index.
    pub instance: u64,
    /// How long this process waits for a sign of life. The longer one of two counts for both.
    pub peer_deadline: Duration,
    /// How this process was started, and its part: must be equal everywhere.
    pub identity: BTreeMap<String, String>,
    /// The key under which this end seals its bytes, if this is a data connection.
    pub data_key: DataKey,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CallerSays {
    Hello(Hello),
    Confirm,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Welcome(Hello),
    Refused(String),
}

/// The first key, in byte order, on which two processes disagree: the same error on both sides.
pub(super) fn compare(ours: &Hello, theirs: &Hello) -> Option<ClusterError> {
    let (low, high) = if ours.process <= theirs.process { (ours, theirs) } else { (theirs, ours) };
    let keys: BTreeSet<&String> = low.identity.keys().chain(high.identity.keys()).collect();
    let key = keys.into_iter().find(|key| low.identity.get(*key) != high.identity.get(*key))?;
    let value = |hello: &Hello| {
        printable(hello.identity.get(key).map_or("nothing", String::as_str), TEXT_LIMIT_BYTES)
    };
    Some(ClusterError::Disagreement {
        key: printable(key, TEXT_LIMIT_BYTES),
        process: low.process,
        value: value(low),
        other: high.process,
        other_value: value(high),
    })
}
