//! A trace of the threads of a process over time, in a file that Perfetto and `chrome://tracing` open.
//!
//! Each worker has a track of its operators, as timely schedules them, and each thread of a run one of the [phases](super::progress::Phase)
//! that it goes through: computing on a device thread, summing, waiting and updating on an optimizer thread, and writing a
//! checkpoint. Each device stream has a track too: the work on it, by the device's own times ([`QueueTrack`]). All tracks use one
//! clock, the machine's, so that files of several processes can be laid over each other.
//!
//! The format is the JSON array of the Trace Event Format (Google, "Trace Event Format", 2016), of complete events (`"ph": "X"`) with
//! microseconds. Spans are written as they end, whole lines at a time: of a process that is killed the file lacks its last spans and the
//! closing bracket, which the format allows. Memory is bounded by `BUFFERED_BYTES`; the file is not, unless it is [of some steps](Trace::of_steps).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use timely::logging::{StartStop, TimelyEvent, TimelyEventBuilder};
use timely::logging_core::Logger;
use timely::worker::Worker;

use super::error::Actor;
use super::progress::Phase;

/// Bytes of spans that wait to be written, at most, beside the one at hand.
const BUFFERED_BYTES: usize = 1 << 16;

/// How long spans wait to be written while others come.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// A trace that is being written; clones write the same.
#[derive(Clone, Debug)]
pub struct Trace {
    file: Arc<Mutex<TraceFile>>,
    /// Where its clock begins, and what that is in nanoseconds since 1970.
    origin: Instant,
    origin_nanoseconds: u128,
    process: usize,
    /// The steps whose spans are written; 0 is before the first.
    steps: RangeInclusive<u64>,
    /// The step that a device of this process has in hand.
    in_hand: Arc<AtomicU64>,
}

#[derive(Debug)]
struct TraceFile {
    /// None once it is complete, or cannot be written.
    file: Option<File>,
    lines: String,
    written: Instant,
    tracks: u64,
}

impl Trace {
    /// Begins the trace of process `process` in the file `path`, in place of one that is there.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn create(path: &Path, process: usize) -> io::Result<Self> {
        let mut file = File::create(path)?;
        file.write_all(b"[\n")?;
        let (origin, since) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH));
        let trace = Self {
            file: Arc::new(Mutex::new(TraceFile {
                file: Some(file),
                lines: String::new(),
                written: origin,
                tracks: 0,
            })),
            origin,
            origin_nanoseconds: since.unwrap_or_default().as_nanos(),
            process,
            steps: 0..=u64::MAX,
            in_hand: Arc::default(),
        };
        let name = serde_json::json!({ "name": format!("process {process}") });
        trace.write(|lines| {
            let pid = process;
            write!(lines, r#"{{"ph":"M","pid":{pid},"name":"process_name","args":{name}}}"#)
        });
        Ok(trace)
    }

    /// The same trace with the spans of these steps alone, counted from 1 as in metrics: spans that end while a device of the
    /// process has one of these steps in hand; of threads that know their step, the spans of these steps. To be called before the trace is
    /// handed on.
    #[must_use]
    pub fn of_steps(self, steps: RangeInclusive<u64>) -> Self {
        Self { steps, ..self }
    }

    /// Whether spans that end now are written.
    fn is_in_hand(&self) -> bool {
        self.steps.contains(&self.in_hand.load(Ordering::Relaxed))
    }

    /// Whether spans of this step are written; of a thread that does not know its step, 0, those that end now.
    fn is_wanted(&self, step: u64) -> bool {
        match step {
            0 => self.is_in_hand(),
            step => self.steps.contains(&step),
        }
    }

    /// Writes what waits and the end; spans that end later are left out.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(&self) -> io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = std::mem::take(&mut file.lines);
        match file.file.take() {
            Some(mut open) => open.write_all((lines + "\n]\n").as_bytes()),
            None => Ok(()),
        }
    }

    /// A new track, which is called `name`.
    fn track(&self, name: &str) -> u64 {
        let mut track = 0;
        let name = serde_json::json!({ "name": name });
        self.with_file(|file| {
            file.tracks += 1;
            track = file.tracks;
        });
        self.write(|lines| {
            let pid = self.process;
            write!(
                lines,
                r#"{{"ph":"M","pid":{pid},"tid":{track},"name":"thread_name","args":{name}}}"#
            )
        });
        track
    }

    /// A span of `track` between two times since the origin. `name` is JSON, and so are the arguments.
    fn span(&self, track: u64, name: &str, [from, to]: [Duration; 2], arguments: &str) {
        let begin = self.origin_nanoseconds + from.as_nanos();
        let nanoseconds = to.saturating_sub(from).as_nanos();
        self.write(|lines| {
            let pid = self.process;
            write!(
                lines,
                r#"{{"ph":"X","pid":{pid},"tid":{track},"name":{name},"ts":{}.{:03},"dur":{}.{:03}{arguments}}}"#,
                begin / 1000,
                begin % 1000,
                nanoseconds / 1000,
                nanoseconds % 1000,
            )
        });
    }

    fn with_file(&self, with: impl FnOnce(&mut TraceFile)) {
        with(&mut self.file.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn write(&self, line: impl FnOnce(&mut String) -> std::fmt::Result) {
        self.with_file(|file| {
            let Some(open) = &mut file.file else { return };
            // Before each line but the first, so that none is wanted behind the last.
            let is_first = file.tracks == 0 && file.lines.is_empty();
            file.lines.push_str(if is_first { "" } else { ",\n" });
            line(&mut file.lines).expect("a text takes whatever is written to it");
            if file.lines.len() < BUFFERED_BYTES && file.written.elapsed() < LONGEST_WAIT {
                return;
            }
            let written = open.write_all(file.lines.as_bytes());
            file.lines.clear();
            file.written = Instant::now();
            if let Err(error) = written {
                tracing::warn!("the trace ends here, as its file cannot be written: {error}");
                file.file = None;
            }
        });
    }

    /// From now on what timely schedules on `worker` is written, in place of whatever else its log `timely` went to.
    pub(super) fn follow(&self, worker: &Worker) {
        let Some(mut registry) = worker.log_register() else { return };
        let mut operators = Operators {
            track: self.track(&format!("worker {}: operators", worker.index())),
            trace: self.clone(),
            names: HashMap::new(),
            running: Vec::new(),
        };
        let logger = Logger::<TimelyEventBuilder>::new(
            self.origin,
            Duration::ZERO,
            move |_time, events: &mut Option<Vec<(Duration, TimelyEvent)>>| {
                let events = events.iter_mut().flat_map(|events| events.drain(..));
                events.for_each(|(time, event)| operators.take(time, event));
            },
        );
        registry.insert_logger("timely", logger);
    }
}

/// The operators of a worker.
struct Operators {
    trace: Trace,
    track: u64,
    /// In JSON, by the numbers that timely gives.
    names: HashMap<usize, String>,
    /// Operators that have begun and not ended, the outer ones first, and the times at which they began.
    running: Vec<(usize, Duration)>,
}

impl Operators {
    fn take(&mut self, time: Duration, event: TimelyEvent) {
        match event {
            TimelyEvent::Operates(operator) => {
                let name = serde_json::Value::from(operator.name);
                self.names.insert(operator.id, name.to_string());
            }
            TimelyEvent::Schedule(schedule) => match schedule.start_stop {
                StartStop::Start => self.running.push((schedule.id, time)),
                StartStop::Stop => {
                    // One that panicked has not said that it has ended.
                    let Some(place) = self.running.iter().rposition(|&(id, _)| id == schedule.id)
                    else {
                        return;
                    };
                    let begun = self.running[place].1;
                    self.running.truncate(place);
                    if !self.trace.is_in_hand() {
                        return;
                    }
                    if let Some(name) = self.names.get(&schedule.id) {
                        self.trace.span(self.track, name, [begun, time], "");
                    }
                }
            },
            _ => {}
        }
    }
}

/// The track of a thread: its phases.
#[derive(Debug)]
pub(super) struct Track {
    trace: Trace,
    track: u64,
    /// The phase, the step in hand and when it was entered.
    phase: Mutex<(Phase, u64, Duration)>,
}

impl Track {
    /// The track of `actor`, which is in `phase`.
    pub(super) fn new(trace: &Trace, actor: &Actor, phase: Phase) -> Self {
        let track = trace.track(&actor.to_string());
        let phase = Mutex::new((phase, 0, trace.origin.elapsed()));
        Self { trace: trace.clone(), track, phase }
    }

    /// The thread goes on to another phase, or to another step.
    pub(super) fn enter(&self, phase: Phase, step: u64) {
        let mut current = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, of_step, begun) = *current;
        if (before, of_step) == (phase, step) {
            return;
        }
        let now = self.trace.origin.elapsed();
        *current = (phase, step, now);
        drop(current);
        let is_written = self.trace.is_wanted(of_step);
        if step > 0 && matches!(phase, Phase::ForwardBackward | Phase::PreparingDevice) {
            self.trace.in_hand.store(step, Ordering::Relaxed);
        }
        if before != Phase::Idle && is_written {
            let name = format!("\"{before}\"");
            let arguments = format!(r#","args":{{"step":{of_step}}}"#);
            self.trace.span(self.track, &name, [begun, now], &arguments);
        }
    }
}

impl Track {
    /// A track for a device stream that this thread enqueues work on.
    pub(super) fn queue(&self, actor: &Actor, name: &str) -> QueueTrack {
        let trace = self.trace.clone();
        QueueTrack { track: trace.track(&format!("{actor}: {name}")), trace }
    }
}

/// The track of a device stream: the work on it, from when the device began it to when the device had done it.
#[derive(Debug)]
pub struct QueueTrack {
    trace: Trace,
    track: u64,
}

impl QueueTrack {
    /// The time on the trace's clock.
    pub(crate) fn now(&self) -> Duration {
        self.trace.origin.elapsed()
    }

    /// Whether work of this step, which the host enqueues now, is to be written; 0 where the step is not known.
    pub(crate) fn is_wanted(&self, step: u64) -> bool {
        self.trace.is_wanted(step)
    }

    /// Writes work of step `step` (0: not known) between two times.
    pub(crate) fn span(&self, name: &str, step: u64, between: [Duration; 2]) {
        let arguments = match step {
            0 => String::new(),
            step => format!(r#","args":{{"step":{step}}}"#),
        };
        self.trace.span(self.track, &format!("\"{name}\""), between, &arguments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn events(text: &str) -> Vec<Value> {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn spans_are_json_while_they_come_and_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let trace = Trace::create(&path, 3).unwrap();
        let track = Track::new(&trace, &Actor::Thread("a \"thread\"".into()), Phase::Idle);
        track.enter(Phase::Updating, 7);
        track.enter(Phase::Updating, 7);
        track.enter(Phase::Idle, 0);
        // As much as is written without an end.
        for step in 0..2000 {
            track.enter(Phase::Gathering, step);
        }
        let torn = std::fs::read_to_string(&path).unwrap();
        assert!(torn.len() > BUFFERED_BYTES / 2, "{}", torn.len());
        let so_far = events(&(torn + "]"));
        trace.finish().unwrap();
        track.enter(Phase::Idle, 0);
        trace.finish().unwrap();
        let all = events(&std::fs::read_to_string(&path).unwrap());
        assert_eq!(all[..so_far.len()], so_far);
        assert_eq!(all.len(), 2 + 1 + 1999, "the last phase had not ended");
        assert_eq!(all[1]["args"]["name"], "thread a \"thread\"");
        let (name, step) = (&all[2]["name"], &all[2]["args"]["step"]);
        assert_eq!((name.as_str(), step.as_u64()), (Some("updating parameters"), Some(7)));
        assert!(all[2]["ts"].as_f64().unwrap() > 1.6e15, "microseconds since 1970");
        assert!(all[2..].windows(2).all(|pair| pair[0]["ts"].as_f64() <= pair[1]["ts"].as_f64()));
    }

    #[test]
    fn a_trace_of_some_steps_has_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let trace = Trace::create(&path, 0).unwrap().of_steps(3..=4);
        let track = |name: &str| Track::new(&trace, &Actor::Thread(name.into()), Phase::Idle);
        let (device, optimizer) = (track("device"), track("optimizer"));
        for step in 1..=6 {
            device.enter(Phase::ForwardBackward, step);
            // A thread that does not know its step.
            optimizer.enter(Phase::Updating, 0);
            optimizer.enter(Phase::Idle, 0);
        }
        device.enter(Phase::Idle, 0);
        trace.finish().unwrap();
        let all = events(&std::fs::read_to_string(&path).unwrap());
        let of = |name: &str| -> Vec<u64> {
            let spans = all.iter().filter(|event| event["name"] == name);
            spans.map(|event| event["args"]["step"].as_u64().unwrap()).collect()
        };
        assert_eq!(of("forward and backward"), [3, 4]);
        assert_eq!(of("updating parameters").len(), 2);
    }
}
