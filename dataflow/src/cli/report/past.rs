//! The past of a run: starts, kills, resumes and world sizes, from its history.

use std::path::Path;

use super::log::read_lines;
use crate::cli::output::counted;
use crate::error::JobError;
use crate::history::{Ended, HistoryLine, Started};
use crate::metrics::RunLine;

/// A start of a run, and how it ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sitting {
    pub started: Started,
    pub end: End,
}

/// How a sitting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// At its last step, or because it was asked to.
    InOrder(Ended),
    /// The next start found no end: it was killed or failed, and had lines of metrics up to this step.
    Broken { step: u64 },
    /// Nothing follows: it still runs, or was killed or failed.
    Unknown,
}

impl Started {
    /// The steps that it did a second time, in words.
    pub(super) fn done_again(&self) -> Option<String> {
        let Self { step, steps_again, .. } = *self;
        let [first, last] = [1, steps_again].map(|behind| step.saturating_add(behind));
        match steps_again {
            0 => None,
            1 => Some(format!("step {first}")),
            steps => Some(format!("steps {first} to {last} ({steps})")),
        }
    }
}

/// A mark that a chart shows at a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub step: u64,
    pub kind: MarkKind,
    /// Steps behind it that were done a second time.
    pub again: u64,
    /// In words.
    pub text: String,
}

/// The event of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkKind {
    Killed,
    Resumed,
}

/// The starts of a run, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    pub sittings: Vec<Sitting>,
}

impl Past {
    /// Reads the history of the run folder `dir`; `notes` gets a note on lines that are no lines of a history.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(dir: &Path, notes: &mut Vec<String>) -> Result<Self, JobError> {
        let mut past = Self::default();
        read_lines(dir, HistoryLine::FILE, notes, |line| {
            let line = serde_json::from_str(line)
                .map_err(|error| format!("expected a start or an end: {error}"))?;
            past.add(line);
            Ok(())
        })?;
        Ok(past)
    }

    fn add(&mut self, line: HistoryLine) {
        match line {
            HistoryLine::Started(started) => {
                if let Some(Sitting { end: end @ End::Unknown, .. }) = self.sittings.last_mut() {
                    *end = End::Broken { step: started.step.saturating_add(started.steps_again) };
                }
                self.sittings.push(Sitting { started, end: End::Unknown });
            }
            HistoryLine::Ended(ended) => {
                if let Some(last) = self.sittings.last_mut() {
                    last.end = End::InOrder(ended);
                }
            }
        }
    }

    /// Kills and resumes, in order.
    pub fn marks(&self) -> Vec<Mark> {
        let mut marks = Vec::new();
        for pair in self.sittings.windows(2) {
            let (before, Started { step, steps_again, workers, processes, .. }) =
                (&pair[0], &pair[1].started);
            if let End::Broken { step: reached } = before.end {
                let text = format!("killed or failed after step {reached}");
                marks.push(Mark { step: reached, kind: MarkKind::Killed, again: 0, text });
            }
            let world = world_in_words(*workers, *processes);
            let again = match pair[1].started.done_again() {
                None => String::new(),
                Some(steps) => format!(", {steps} done again"),
            };
            let text = format!("resumed after step {step} with {world}{again}");
            marks.push(Mark { step: *step, kind: MarkKind::Resumed, again: *steps_again, text });
        }
        marks
    }

    /// The numbers of workers that computed the metrics, each with the step after which they began, in ascending order.
    pub fn workers(&self) -> Vec<(u64, usize)> {
        let mut worlds: Vec<(u64, usize)> = Vec::new();
        for Sitting { started, .. } in &self.sittings {
            // Steps of the earlier world are done again.
            while worlds.last().is_some_and(|last| last.0 >= started.step) {
                worlds.pop();
            }
            worlds.push((started.step, started.workers));
        }
        worlds
    }
}

/// Such as `4 workers in 2 processes`.
pub(super) fn world_in_words(workers: usize, processes: usize) -> String {
    let workers = counted(workers, "worker", "workers");
    match processes {
        1 => workers,
        _ => format!("{workers} in {}", counted(processes, "process", "processes")),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn start(step: u64, steps_again: u64, workers: usize) -> HistoryLine {
        let device = "the CPU".to_owned();
        let started = Started {
            step,
            steps_again,
            workers,
            processes: 1,
            device,
            unix_seconds: 1_700_000_000,
        };
        HistoryLine::Started(started)
    }

    pub fn end(step: u64) -> HistoryLine {
        HistoryLine::Ended(Ended { step, unix_seconds: 1_700_000_100 })
    }

    pub fn past(lines: impl IntoIterator<Item = HistoryLine>) -> Past {
        let mut past = Past::default();
        lines.into_iter().for_each(|line| past.add(line));
        past
    }

    #[test]
    fn a_kill_is_told_from_a_stop() {
        let past = past([start(0, 0, 2), end(4), start(4, 0, 3), start(8, 2, 2), end(20)]);
        let marks: Vec<(u64, MarkKind)> =
            past.marks().iter().map(|mark| (mark.step, mark.kind)).collect();
        let [killed, resumed] = [MarkKind::Killed, MarkKind::Resumed];
        assert_eq!(marks, [(4, resumed), (10, killed), (8, resumed)]);
        assert_eq!(
            past.marks()[2].text,
            "resumed after step 8 with 2 workers, steps 9 to 10 (2) done again"
        );
        assert_eq!(past.workers(), [(0, 2), (4, 3), (8, 2)]);
        assert!(matches!(past.sittings[2].end, End::InOrder(Ended { step: 20, .. })));
    }

    #[test]
    fn what_was_done_again_has_the_later_world() {
        let past = past([start(0, 0, 1), start(0, 3, 2), start(5, 1, 4), start(2, 9, 8)]);
        assert_eq!(past.workers(), [(0, 2), (2, 8)]);
        assert_eq!(past.sittings[3].end, End::Unknown);
    }

    #[test]
    fn a_history_with_bad_lines_is_read_as_far_as_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let line = serde_json::to_string(&start(3, 0, 2)).unwrap();
        let text = format!("{{\"event\":\"lunch\"}}\n{line}\n{{\"ev");
        std::fs::write(dir.path().join("history.jsonl"), text).unwrap();
        let mut notes = Vec::new();
        let past = Past::read(dir.path(), &mut notes).unwrap();
        assert_eq!((past.sittings.len(), notes.len()), (1, 2), "{notes:?}");
        assert!(notes[1].contains("line 1: expected a start or an end"), "{notes:?}");
    }
}
