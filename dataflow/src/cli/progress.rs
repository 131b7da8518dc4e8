//! Progress: a bar where standard error is a terminal, else a line now and then.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use tidemill_model::schedule::ScheduleName;

use super::output::{counted, note_line};
use crate::job::{ResolvedRun, TrainEvent};
use crate::metrics::MemoryUse;

/// How often a log that is no terminal gets a line.
pub(crate) const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// A bar over `total`, drawn with `template`, hidden where standard error is no terminal.
pub(crate) fn bar(total: u64, template: &str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(template)
        .expect("templates are constants of this program")
        .with_key("eta", write_eta)
        .progress_chars("=> ");
    ProgressBar::with_draw_target(Some(total), target).with_style(style)
}

/// Sets where work goes on from: what was done before says nothing about its speed.
fn go_on_from(bar: &ProgressBar, done: u64) {
    bar.set_position(done);
    // The estimate must know the position before it forgets the time; setting it may leave that to a later tick.
    bar.tick();
    bar.reset_eta();
}

fn write_eta(state: &ProgressState, out: &mut dyn fmt::Write) {
    let is_done = state.len().is_none_or(|all| state.pos() >= all);
    let _ = out.write_str(&left_in_words(state.eta(), is_done));
}

/// The time that is left, which is zero as long as nothing tells: before the first step of this start.
fn left_in_words(left: Duration, is_done: bool) -> String {
    match left.is_zero() && !is_done {
        true => "unknown".to_owned(),
        false => format!("{:#}", HumanDuration(left)),
    }
}

/// The progress of a training run.
pub(crate) struct TrainProgress {
    bar: ProgressBar,
    /// Settings that may surprise: said at the start, from where output that has no reader ends the run in time.
    remarks: Vec<String>,
    /// Whether the learning rate's schedule has an end.
    rate_changes: bool,
    /// Memory in use, as it was last measured.
    memory: Mutex<String>,
    last_line: Mutex<Option<Instant>>,
}

impl TrainProgress {
    pub(crate) fn new(run: &ResolvedRun) -> Self {
        let bar = bar(run.steps, "{wide_bar} step {pos}/{len} {msg} eta {eta}");
        let remarks = run.remarks.clone();
        let rate_changes = run.config.schedule.name != ScheduleName::Constant;
        Self { bar, remarks, rate_changes, memory: Mutex::default(), last_line: Mutex::new(None) }
    }

    pub(crate) fn show(&self, event: &TrainEvent) {
        match event {
            TrainEvent::Fetching { path } => {
                self.say(&format!("note: fetching {}", path.display()));
            }
            TrainEvent::Started {
                step,
                steps,
                schedule_steps,
                parameters,
                workers,
                device,
                workers_per_device,
                device_changes,
            } => {
                go_on_from(&self.bar, *step);
                self.remarks.iter().for_each(|remark| self.say(&format!("note: {remark}")));
                let from = if *step == 0 {
                    "starting".to_owned()
                } else {
                    format!("resuming after step {step}")
                };
                let parameters = counted(*parameters, "parameter", "parameters");
                let workers = counted(*workers, "worker", "workers");
                self.say(&format!("{from}: {parameters}, {workers} on {device}"));
                if step > steps {
                    self.say(&format!("note: the run has done more steps already than the {steps} that it is to have"));
                } else if step < steps && schedule_steps < steps && self.rate_changes {
                    self.say(&format!(
                        "note: the learning rate's schedule ends with step {schedule_steps}, and the rate stays as it is \
                         from there on (`schedule.steps`, which a run is given when it begins)"
                    ));
                }
                if *workers_per_device > 1 && !device.starts_with("the CPU") {
                    self.say(&format!("note: up to {workers_per_device} workers share a GPU"));
                }
                if !device_changes.is_empty() {
                    self.say(&format!(
                        "note: the kind of device changed ({}): losses go on closely, not to the bit",
                        device_changes.join(", ")
                    ));
                }
            }
            TrainEvent::Moved { step, fingerprint, samples } => {
                let samples = counted(*samples, "sample", "samples");
                self.say(&format!(
                    "note: after step {step} the data is version {fingerprint}, {samples} an epoch"
                ));
            }
            TrainEvent::Step(metrics) => {
                let mut words =
                    format!("loss {:.4} {:.0} tokens/s", metrics.loss, metrics.tokens_per_second);
                if let Ok(mut memory) = self.memory.lock() {
                    if let Some(held) = &metrics.memory {
                        *memory = memory_in_words(held);
                    }
                    words += &*memory;
                }
                self.bar.set_position(metrics.step);
                self.bar.set_message(words.clone());
                if self.bar.is_hidden() && self.line_is_due() {
                    // What a bar shows by itself. The time that is left knows of a step from the tick after it on.
                    self.bar.tick();
                    let steps = self.bar.length().unwrap_or(metrics.step);
                    let left = left_in_words(self.bar.eta(), metrics.step >= steps);
                    note_line!("step {} of {steps}: {words} eta {left}", metrics.step);
                }
            }
            TrainEvent::Evaluated { step, loss } => {
                self.say(&format!("step {step}: evaluation loss {loss:.4}"));
            }
            TrainEvent::Answered { step, scores } => {
                for (task, metrics) in scores.all() {
                    let metrics = metrics.iter().map(|(name, value)| format!("{name} {value:.4}"));
                    let metrics = metrics.collect::<Vec<_>>().join(", ");
                    self.say(&format!("step {step}: {task}: {metrics}"));
                }
            }
            TrainEvent::Checkpointed { .. } => {}
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn say(&self, words: &str) {
        self.bar.suspend(|| note_line!("{words}"));
    }

    fn line_is_due(&self) -> bool {
        let Ok(mut last) = self.last_line.lock() else { return false };
        let due = last.is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

/// Such as ` 1.50 GiB host 62.00 GiB device`.
fn memory_in_words(MemoryUse { host_bytes, device_bytes }: &MemoryUse) -> String {
    let held = [(host_bytes, "host"), (device_bytes, "device")];
    let known = held.iter().filter_map(|(bytes, place)| {
        let gib = (**bytes)? as f64 / f64::from(1 << 30);
        Some(format!(" {gib:.2} GiB {place}"))
    });
    known.collect()
}

/// The progress of work that is counted: things done of a known number, and items of unknown number in them.
pub(crate) struct CountProgress {
    bar: ProgressBar,
    things: &'static str,
    items_name: &'static str,
    items: u64,
    started: Instant,
    last_line: Instant,
}

impl CountProgress {
    pub(crate) fn new(total: u64, things: &'static str, items_name: &'static str) -> Self {
        let bar = bar(total, &format!("{{wide_bar}} {{pos}}/{{len}} {things} {{msg}}"));
        let now = Instant::now();
        Self { bar, things, items_name, items: 0, started: now, last_line: now }
    }

    /// Counts one more item.
    pub(crate) fn item(&mut self) {
        self.add(1);
    }

    /// Some items more.
    pub(crate) fn add(&mut self, items: u64) {
        self.items += items;
        let hidden = self.bar.is_hidden();
        if hidden && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        let rate = self.items as f64 / self.started.elapsed().as_secs_f64();
        let words = format!("{} {}, {rate:.0} a second", self.items, self.items_name);
        if hidden {
            self.last_line = Instant::now();
            let (done, of) = (self.bar.position(), self.bar.length().unwrap_or(0));
            note_line!("{done} of {of} {}: {words}", self.things);
        } else {
            self.bar.set_message(words);
        }
    }

    /// Some things are done.
    pub(crate) fn advance(&self, things: u64) {
        self.bar.inc(things);
    }

    /// Runs `print` with the bar out of its way.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }

    /// Ends; of work that was long enough for a line on the way, says how many items there were a second.
    pub(crate) fn finish_with_rate(self) {
        self.bar.finish_and_clear();
        if self.started.elapsed() >= LINE_INTERVAL {
            let seconds = self.started.elapsed().as_secs_f64();
            let (items, rate) = (self.items, self.items as f64 / seconds);
            note_line!("{items} {} in {seconds:.1} s, {rate:.0} a second", self.items_name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_done_before_a_start_do_not_count_as_its_speed() {
        let bar = ProgressBar::with_draw_target(Some(3000), ProgressDrawTarget::hidden());
        go_on_from(&bar, 329);
        assert_eq!(bar.position(), 329);
        let rate = bar.per_sec();
        assert!(rate.is_nan() || rate == 0.0, "{rate}");
        assert!(bar.eta().is_zero());
    }

    #[test]
    fn the_time_left_is_unknown_before_the_first_step() {
        assert_eq!(left_in_words(Duration::ZERO, false), "unknown");
        assert_eq!(left_in_words(Duration::ZERO, true), "0s");
        assert_eq!(left_in_words(Duration::from_secs(7), false), "7s");
    }
}
