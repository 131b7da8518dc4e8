//! How far `prepare` is: a bar for each phase where standard error is a terminal, else a line now and then.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tidemill_streaming_data::prepare::{Phase, Progress};

use crate::cli::output::note_line;
use crate::cli::progress::{self, LINE_INTERVAL};
use crate::job::StopRequest;

/// The time between two drawings of a bar.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);

/// The display of a preparation.
pub(super) struct Phases {
    bar: ProgressBar,
    to: To,
    /// The phase at hand, and when it began.
    phase: Option<(Phase, Instant)>,
    shown: Option<Instant>,
}

/// Where it is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Terminal,
    Log,
    Nowhere,
}

impl Phases {
    /// On standard error.
    pub(super) fn new() -> Phases {
        let bar = progress::bar(0, "{wide_bar} {msg}");
        let to = if bar.is_hidden() { To::Log } else { To::Terminal };
        Phases { bar, to, phase: None, shown: None }
    }

    /// Nowhere: another process shows it.
    pub(super) fn silent() -> Phases {
        Phases { bar: ProgressBar::hidden(), to: To::Nowhere, phase: None, shown: None }
    }

    /// Shows how far it is, and says whether to go on.
    pub(super) fn show(&mut self, now: Progress, stop: &StopRequest) -> ControlFlow<()> {
        if self.to != To::Nowhere {
            self.draw(now);
        }
        match stop.is_asked() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn draw(&mut self, now: Progress) {
        let time = Instant::now();
        let began = match self.phase {
            Some((phase, began)) if phase == now.phase => began,
            _ => {
                self.phase = Some((now.phase, time));
                time
            }
        };
        let interval = if self.to == To::Terminal { DRAW_INTERVAL } else { LINE_INTERVAL };
        // A log has no line on a phase that ends soon.
        let shown = *self.shown.get_or_insert(time);
        if time.duration_since(shown) < interval {
            return;
        }
        self.shown = Some(time);
        let words = words(now, time.duration_since(began));
        if self.to == To::Log {
            note_line!("note: {words}");
            return;
        }
        // Where no total is known, the bar is as long as the work done so far.
        self.bar.set_length(now.bytes_total.max(1));
        self.bar.set_position(now.bytes_done.min(now.bytes_total));
        self.bar.set_message(words);
    }

    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// The phase in words: how much is done, how fast since the phase began, and how long it will take if that is known.
fn words(now: Progress, since: Duration) -> String {
    let name = match now.phase {
        Phase::Comparing => "reading",
        Phase::Sorting => "sorting",
        Phase::Tokenizing => "tokenizing",
        Phase::Reporting => "reporting",
        Phase::Publishing => "publishing",
    };
    let seconds = since.as_secs_f64();
    let (is_reading, is_tokenizing) = match now.phase {
        Phase::Comparing => (true, false),
        Phase::Tokenizing => (true, true),
        Phase::Sorting | Phase::Reporting | Phase::Publishing => (false, false),
    };
    if !is_reading {
        return format!("{name}, {}", time(seconds));
    }
    let (mut done, mut rates) = (Vec::new(), Vec::new());
    if now.bytes_total > 0 {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        done.push(format!(
            "{:.1} of {:.1} MB",
            megabytes(now.bytes_done),
            megabytes(now.bytes_total)
        ));
        rates.push(format!("{:.1} MB/s", megabytes(now.bytes_done) / seconds.max(1e-3)));
    }
    let mut counted = |count: u64, things: &str| {
        done.push(format!("{count} {things}"));
        rates.push(format!("{:.0} {things}/s", count as f64 / seconds.max(1e-3)));
    };
    counted(now.documents, "documents");
    if is_tokenizing {
        counted(now.tokens, "tokens");
    }
    let mut words = format!("{name}: {}; {}", done.join(", "), rates.join(", "));
    let left = now.bytes_total.saturating_sub(now.bytes_done);
    if now.bytes_done > 0 && left > 0 {
        words += &format!(", {} left", time(seconds * left as f64 / now.bytes_done as f64));
    }
    words
}

/// Some seconds in words.
fn time(seconds: f64) -> String {
    let seconds = seconds.round().min(1e9) as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_says_what_is_known_of_it() {
        let now = Progress {
            phase: Phase::Comparing,
            bytes_done: 30_000_000,
            bytes_total: 120_000_000,
            documents: 4000,
            tokens: 9_000_000,
            samples: 7,
        };
        let of = |phase| words(Progress { phase, ..now }, Duration::from_secs(10));
        assert_eq!(
            of(Phase::Comparing),
            "reading: 30.0 of 120.0 MB, 4000 documents; 3.0 MB/s, 400 documents/s, 30 s left"
        );
        assert_eq!(
            of(Phase::Tokenizing),
            "tokenizing: 30.0 of 120.0 MB, 4000 documents, 9000000 tokens; \
             3.0 MB/s, 400 documents/s, 900000 tokens/s, 30 s left"
        );
        assert_eq!(of(Phase::Sorting), "sorting, 10 s");
        assert_eq!(of(Phase::Reporting), "reporting, 10 s");
        assert_eq!(of(Phase::Publishing), "publishing, 10 s");
        let unknown = Progress { bytes_done: 0, bytes_total: 0, phase: Phase::Tokenizing, ..now };
        assert_eq!(
            words(unknown, Duration::from_secs(2)),
            "tokenizing: 4000 documents, 9000000 tokens; 2000 documents/s, 4500000 tokens/s"
        );
        let nothing = Progress { bytes_total: 10, ..Progress::default() };
        assert!(!words(nothing, Duration::ZERO).contains("left"));
        assert_eq!(
            [59.4, 61.0, 7322.0, f64::MAX].map(time).join(", "),
            "59 s, 1 min 1 s, 2 h 2 min, 277777 h 46 min"
        );
    }
}
