//! The records that worker 0 writes beside checkpoints, and their readers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::questions::Questions;
use super::state_sink::{Written, not_written};
use super::train::{Observer, TrainEvent};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Abort, Actor};
use crate::error::Result;
use crate::history::HistoryLine;
use crate::memory::resident_bytes;
use crate::metrics::{MemoryUse, MetricsSettings, RunLog, StepMetrics};
use crate::operators::{CommunicationReport, EvaluationReport, Scores, StepReport};
use crate::run_folder::RunFolder;
use crate::tensorboard::EventFile;

/// How often memory is measured at most: asking a device may take longer than a short step.
const MEASURED_EVERY: Duration = Duration::from_secs(1);

/// Says how many bytes of a device are held; none where it does not tell.
pub(super) type DeviceBytes = Box<dyn Fn() -> Option<u64> + Send>;

/// The records and messages of worker 0.
pub(super) struct Journal {
    folder: Arc<RunFolder>,
    history: RunLog<HistoryLine>,
    metrics: RunLog<StepMetrics>,
    /// Steps whose line waits for the cost of communication, or the other way round, in order.
    steps: VecDeque<StepMetrics>,
    communication: VecDeque<CommunicationReport>,
    workers: Workers,
    evaluations: Option<RunLog<EvaluationReport>>,
    /// Requests that are asked at each evaluation.
    pub questions: Option<Arc<dyn Questions>>,
    /// Returns the bytes in use on the device of worker 0, where it has memory of its own.
    pub device_bytes: Option<DeviceBytes>,
    /// When memory was measured last.
    measured: Option<Instant>,
    /// For TensorBoard, where the run asks for it.
    events: Option<EventFile>,
    written: Written,
    observer: Observer,
    abort: Abort,
    /// Seconds of training before this run.
    elapsed_before: f64,
    started: Instant,
    last_step: Instant,
}

/// Whether a run has evaluations to write down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evaluations {
    Logged,
    None,
}

/// Whether steps have communication to be written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workers {
    One,
    Several,
}

impl Workers {
    pub fn of(workers: usize) -> Self {
        if workers == 1 { Self::One } else { Self::Several }
    }
}

impl Journal {
    /// The logs in `folder`, as they were after `step` updates.
    pub fn open(
        folder: &Arc<RunFolder>,
        step: u64,
        (workers, evaluations, settings): (Workers, Evaluations, &MetricsSettings),
        observer: &Observer,
        abort: &Abort,
    ) -> Result<Self> {
        let metrics = RunLog::<StepMetrics>::open(folder.path(), step)?;
        let evaluations = match evaluations {
            Evaluations::Logged => Some(RunLog::open(folder.path(), step)?),
            Evaluations::None => None,
        };
        let events = match settings.tensorboard {
            true => Some(EventFile::create(folder.path(), step)?),
            false => None,
        };
        // All of it stays.
        let history = RunLog::open(folder.path(), u64::MAX)?;
        let now = Instant::now();
        Ok(Self {
            history,
            elapsed_before: metrics.last().map_or(0.0, |last| last.elapsed_seconds),
            folder: Arc::clone(folder),
            metrics,
            steps: VecDeque::new(),
            communication: VecDeque::new(),
            workers,
            evaluations,
            questions: None,
            device_bytes: None,
            measured: None,
            events,
            written: Written::default(),
            observer: Observer::clone(observer),
            abort: abort.clone(),
            started: now,
            last_step: now,
        })
    }

    /// The updates whose records are written, for threads that wait for them.
    pub fn written(&self) -> Written {
        self.written.clone()
    }

    /// The last line of metrics.
    pub fn last(&self) -> Option<&StepMetrics> {
        self.metrics.last()
    }

    /// Steps that had a line already and are done again.
    pub fn steps_again(&self) -> u64 {
        self.metrics.dropped()
    }

    /// Writes down that the run has started or ended.
    pub fn history(&mut self, line: HistoryLine) -> Result<()> {
        self.folder.check()?;
        self.history.append(line)
    }

    /// Writes down a step, and tells it: as soon as the cost of its communication is known too.
    pub fn report(&mut self, report: &StepReport) {
        let now = Instant::now();
        let seconds = (now - self.last_step).as_secs_f64();
        self.last_step = now;
        let metrics = StepMetrics {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            learning_rate: report.learning_rate,
            tokens: report.total_tokens,
            tokens_per_second: report.tokens as f64 / seconds.max(1e-9),
            elapsed_seconds: self.elapsed_before + (now - self.started).as_secs_f64(),
            communication: None,
            memory: self.memory(now),
        };
        match self.workers {
            Workers::One => self.write(metrics),
            Workers::Several => {
                self.steps.push_back(metrics);
                self.write_complete();
            }
        }
    }

    /// The memory that is held, where it was not measured just before.
    fn memory(&mut self, now: Instant) -> Option<MemoryUse> {
        if self.measured.is_some_and(|before| now - before < MEASURED_EVERY) {
            return None;
        }
        self.measured = Some(now);
        let host_bytes = resident_bytes().map(|bytes| bytes as u64);
        let device_bytes = self.device_bytes.as_ref().and_then(|device_bytes| device_bytes());
        let is_known = host_bytes.is_some() || device_bytes.is_some();
        is_known.then_some(MemoryUse { host_bytes, device_bytes })
    }

    /// Takes the cost of communication in a step.
    pub fn communication(&mut self, report: &CommunicationReport) {
        self.communication.push_back(*report);
        self.write_complete();
    }

    /// Writes down the steps whose numbers are complete.
    fn write_complete(&mut self) {
        while !self.communication.is_empty()
            && let Some(metrics) = self.steps.pop_front()
        {
            let of_step = self.communication.pop_front();
            debug_assert_eq!(of_step.map(|report| report.step), Some(metrics.step));
            let communication = of_step.map(|report| report.communication);
            self.write(StepMetrics { communication, ..metrics });
        }
    }

    fn write(&mut self, metrics: StepMetrics) {
        let _telling = progress::during(Phase::Reporting);
        let appended = self.folder.check().and_then(|()| self.metrics.append(metrics.clone()));
        let told = |events: &mut EventFile| events.step(&metrics);
        match appended.and_then(|()| self.events.as_mut().map_or(Ok(()), told)) {
            Ok(()) => {
                self.written.metrics.note(metrics.step);
                (self.observer)(&TrainEvent::Step(metrics));
            }
            Err(error) => self.abort.fail(Actor::Worker(0), not_written(error)),
        }
    }

    /// Writes down an evaluation, and tells it.
    pub fn evaluation(&mut self, report: &EvaluationReport) {
        let Some(evaluations) = &mut self.evaluations else { return };
        let _telling = progress::during(Phase::Reporting);
        let scores = match &self.questions {
            None => Ok(Scores::default()),
            Some(questions) => questions.measure(&report.answers),
        };
        let appended = scores.and_then(|scores| {
            let report = EvaluationReport { scores, ..report.clone() };
            self.folder.check()?;
            evaluations.append(report.clone())?;
            self.events.as_mut().map_or(Ok(()), |events| events.evaluation(&report))?;
            Ok(report)
        });
        match appended {
            Ok(EvaluationReport { step, loss, scores, .. }) => {
                self.written.evaluations.note(step);
                (self.observer)(&TrainEvent::Evaluated { step, loss });
                if !scores.tasks.is_empty() {
                    (self.observer)(&TrainEvent::Answered { step, scores });
                }
            }
            Err(error) => self.abort.fail(Actor::Worker(0), not_written(error)),
        }
    }
}
