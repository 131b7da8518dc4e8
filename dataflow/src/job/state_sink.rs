//! The graph's checkpoints as folders of the run.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::checkpoint::{CheckpointFiles, CheckpointWriter, StateArena, TrainerState};
use crate::cluster::{Abort, Failure};
use crate::operators::{StatePart, StateSink, StepReport, TrainingPlan};
use crate::run_folder::RunFolder;

/// Called with each complete checkpoint: updates done, and its folder.
pub type OnCommit = Box<dyn Fn(u64, PathBuf) + Send>;

/// How many updates were done at the latest evaluation that is written down.
#[derive(Clone, Default)]
pub struct Evaluated(Arc<(Mutex<u64>, Condvar)>);

impl Evaluated {
    /// The evaluation after `step` updates is written down.
    pub fn note(&self, step: u64) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.0.1.notify_all();
    }

    /// Waits for the evaluation after `step` updates, or for the end of the run.
    fn wait(&self, step: u64, abort: &Abort) -> Result<(), Failure> {
        // Now and then the abort flag is looked at, for evaluations that will never come.
        const LOOK: Duration = Duration::from_millis(100);
        let mut evaluated = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *evaluated < step {
            abort.check()?;
            let waited = self.0.1.wait_timeout(evaluated, LOOK);
            evaluated = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

/// What the checkpoints of a run are made with.
pub struct CheckpointParts {
    /// The files that all have in common.
    pub files: CheckpointFiles,
    /// The run folder, which is held for as long as something may be written into it.
    pub folder: Arc<RunFolder>,
    /// What every checkpoint of the run says but for where it stands.
    pub template: TrainerState,
    /// Which updates are evaluated, and how many samples a step has.
    pub plan: Arc<TrainingPlan>,
    /// The evaluations that are written down.
    pub evaluated: Evaluated,
    /// Ends the run.
    pub abort: Abort,
    /// Is told of each complete checkpoint.
    pub on_commit: OnCommit,
}

/// Writes checkpoints into a run folder.
///
/// A checkpoint is complete only after the evaluation of its step is written down: a run that goes on from it does
/// not evaluate that step again.
pub struct RunCheckpoints {
    parts: CheckpointParts,
    open: Option<(StepReport, CheckpointWriter)>,
}

impl RunCheckpoints {
    /// Checkpoints made with `parts`.
    pub fn new(parts: CheckpointParts) -> Self {
        Self { parts, open: None }
    }

    fn writer(&mut self) -> Result<&mut CheckpointWriter, Failure> {
        let (_, writer) = self.open.as_mut().ok_or("no checkpoint was begun")?;
        Ok(writer)
    }
}

impl StateSink for RunCheckpoints {
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        let CheckpointParts { files, folder, template, plan, .. } = &self.parts;
        let mut state = template.clone();
        state.step = report.step;
        state.tokens = report.total_tokens;
        state.cursor.position = report.step * plan.batch.samples_per_step() as u64;
        let writer = CheckpointWriter::begin(files.clone(), folder.path(), state)?;
        self.open = Some((*report, writer));
        Ok(())
    }

    fn write(
        &mut self,
        part: StatePart,
        arena_start: usize,
        values: &[f32],
    ) -> Result<(), Failure> {
        let arena = match part {
            StatePart::Parameter => StateArena::Parameters,
            StatePart::ExpAvg => StateArena::ExpAvg,
            StatePart::ExpAvgSq => StateArena::ExpAvgSq,
        };
        Ok(self.writer()?.write(arena, arena_start, values)?)
    }

    fn commit(&mut self) -> Result<(), Failure> {
        let (report, writer) = self.open.take().ok_or("no checkpoint was begun")?;
        let CheckpointParts { plan, evaluated, abort, on_commit, .. } = &self.parts;
        if plan.is_evaluated(report.step, report.last) {
            evaluated.wait(report.step, abort)?;
        }
        let path = writer.commit()?;
        on_commit(report.step, path);
        Ok(())
    }
}
