//! The graph's checkpoints as folders of the run.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::data_versions::DataVersions;
use crate::checkpoint::{CheckpointFiles, CheckpointWriter, FileShare, TrainerState};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Abort, Failure};
use crate::error::JobError;
use crate::operators::checkpoint::{StateWriters, WrittenFiles};
use crate::operators::{
    EvaluationPlan, GraphError, StatePart, StateSink, StepReport, TrainingPlan,
};
use crate::run_folder::RunFolder;

/// Called with each complete checkpoint: updates done, and its folder or URL.
pub type OnCommit = Box<dyn Fn(u64, PathBuf) + Send>;

/// The latest records that are written of a run, each by the updates that were done.
#[derive(Clone, Default)]
pub struct Written {
    /// The latest line of metrics.
    pub metrics: LatestStep,
    /// The latest evaluation.
    pub evaluations: LatestStep,
}

/// A step that others can wait for.
#[derive(Clone, Default)]
pub struct LatestStep(Arc<(Mutex<u64>, Condvar)>);

impl LatestStep {
    /// `step` is reached.
    pub fn note(&self, step: u64) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.0.1.notify_all();
    }

    /// Waits for `step`, or for the end of the run.
    fn wait(&self, step: u64, abort: &Abort) -> Result<(), Failure> {
        let _waiting = progress::during(Phase::WaitingForWorkers);
        // The wait ends every `LOOK` to check the abort flag: after an abort the step never comes.
        const LOOK: Duration = Duration::from_millis(100);
        let mut latest = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *latest < step {
            abort.check()?;
            let waited = self.0.1.wait_timeout(latest, LOOK);
            latest = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

/// The parts from which the checkpoints of a run are made.
pub struct CheckpointParts {
    /// The files that all have in common.
    pub files: CheckpointFiles,
    /// Which files of tensors process 0 writes.
    pub share: FileShare,
    /// The worker that writes each file.
    pub writers: StateWriters,
    /// The run folder, which is held for as long as something may be written into it.
    pub folder: Arc<RunFolder>,
    /// The state that all checkpoints of the run share, without their place in it.
    pub template: TrainerState,
    /// Which version of the data is where.
    pub data_versions: Arc<DataVersions>,
    /// The training plan, which has the number of samples of a step.
    pub plan: Arc<TrainingPlan>,
    /// The evaluation plan, which says after which updates an evaluation is due.
    pub evaluation: Option<EvaluationPlan>,
    /// The records of the run that are written.
    pub written: Written,
    /// Ends the run.
    pub abort: Abort,
    /// Called with each complete checkpoint.
    pub on_commit: OnCommit,
}

/// Writes checkpoints into a run folder.
///
/// A checkpoint is complete only after the metrics of its step are written down, and its evaluation: a run that goes on from
/// it does not compute them again. They are synced before it gets its name.
pub struct RunCheckpoints {
    parts: CheckpointParts,
    open: Option<(StepReport, CheckpointWriter)>,
}

impl RunCheckpoints {
    /// Checkpoints made with `parts`.
    pub fn new(parts: CheckpointParts) -> Self {
        Self { parts, open: None }
    }

    /// Where the run folder went, whatever else failed failed for it.
    fn failed(&self, error: JobError) -> Failure {
        not_written(self.parts.folder.check().err().unwrap_or(error))
    }
}

const NO_CHECKPOINT: GraphError =
    GraphError::Order { what: "a part of a checkpoint", missing: "its beginning" };

/// A failure to write the state of a run. Whatever is wrong with a file that the run itself made, the input is not at
/// fault: the disk is full, the folder has vanished, a chunk got lost.
pub(super) fn not_written(error: JobError) -> Failure {
    match error {
        JobError::File { .. } | JobError::Checkpoint { .. } => Failure::restart(error),
        other => other.into(),
    }
}

impl StateSink for RunCheckpoints {
    fn writers(&self) -> StateWriters {
        self.parts.writers.clone()
    }

    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        let CheckpointParts { files, share, folder, template, data_versions, plan, .. } =
            &self.parts;
        let mut state = template.clone();
        state.step = report.step;
        state.tokens = report.total_tokens;
        state.set_cursor(data_versions.cursor(report.step * plan.batch.samples_per_step() as u64));
        folder.check().map_err(not_written)?;
        let writer = CheckpointWriter::begin_share(files.clone(), folder.path(), state, *share);
        let writer = writer.map_err(|error| self.failed(error))?;
        // Another run may have made the folder meanwhile: then this removes its own files again.
        folder.check().map_err(not_written)?;
        self.open = Some((*report, writer));
        Ok(())
    }

    fn write(
        &mut self,
        part: StatePart,
        arena_start: usize,
        values: &[f32],
    ) -> Result<(), Failure> {
        let (_, writer) = self.open.as_mut().ok_or(NO_CHECKPOINT)?;
        writer.write(part, arena_start, values).map_err(|error| self.failed(error))
    }

    fn take(&mut self, written: WrittenFiles) -> Result<(), Failure> {
        let (_, writer) = self.open.as_mut().ok_or(NO_CHECKPOINT)?;
        writer.take(written).map_err(not_written)
    }

    fn commit(&mut self) -> Result<(), Failure> {
        let (report, writer) = self.open.take().ok_or(NO_CHECKPOINT)?;
        let CheckpointParts { files, folder, plan, evaluation, written, abort, on_commit, .. } =
            &self.parts;
        written.metrics.wait(report.step, abort)?;
        if evaluation.is_some_and(|evaluation| evaluation.is_due(report.step, plan.steps)) {
            written.evaluations.wait(report.step, abort)?;
        }
        folder.check().map_err(not_written)?;
        let written = folder.sync_logs().and_then(|()| writer.commit());
        let written = written.map_err(|error| self.failed(error))?;
        let _in_store = folder.is_in_store().then(|| progress::during(Phase::UsingStore));
        let path = folder.publish(report.step, written, files.keep).map_err(not_written)?;
        on_commit(report.step, path);
        Ok(())
    }
}
