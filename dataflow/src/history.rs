//! `history.jsonl`: a line for each time that a run was started, and one for each time that it ended in order.
//!
//! Metrics have each step once and so hide kills and resumes; this log keeps them, for people. Nothing of a run relies on it. A start
//! that follows a start, without an end between them, says that the run was killed or failed in between. In a store the log goes
//! where the metrics go, so a start that was killed before its first checkpoint leaves no line there.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::metrics::RunLine;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum HistoryLine {
    /// The workers have their state, and there is something left to do.
    Started(Started),
    /// The run came to its last step, or was asked to stop.
    Ended(Ended),
}

/// A start, or a resume from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Updates done: 0, or the updates of the checkpoint.
    pub step: u64,
    /// Steps behind it that the metrics had already, and that are done again.
    pub steps_again: u64,
    /// Workers of all processes.
    pub workers: usize,
    /// Processes.
    pub processes: usize,
    /// The device of process 0, in words.
    pub device: String,
    /// Seconds since 1970, UTC.
    pub unix_seconds: u64,
}

/// An end in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Updates done.
    pub step: u64,
    /// Seconds since 1970, UTC.
    pub unix_seconds: u64,
}

impl RunLine for HistoryLine {
    const FILE: &'static str = "history.jsonl";

    fn step(&self) -> u64 {
        match self {
            Self::Started(started) => started.step,
            Self::Ended(ended) => ended.step,
        }
    }
}

/// Seconds since 1970, UTC; 0 where the machine's clock is before that.
pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_its_event_first() {
        let ended = HistoryLine::Ended(Ended { step: 7, unix_seconds: 9 });
        let text = serde_json::to_string(&ended).unwrap();
        assert_eq!(text, r#"{"event":"ended","step":7,"unix_seconds":9}"#);
        assert_eq!(serde_json::from_str::<HistoryLine>(&text).unwrap(), ended);
    }
}
