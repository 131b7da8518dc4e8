//! The graph's checkpoints as folders of the run.

use std::path::PathBuf;

use crate::checkpoint::{CheckpointFiles, CheckpointWriter, StateArena, TrainerState};
use crate::cluster::Failure;
use crate::operators::{StatePart, StateSink, StepReport};

/// Called with each complete checkpoint: updates done, and its folder.
pub type OnCommit = Box<dyn Fn(u64, PathBuf) + Send>;

/// Writes checkpoints into a run folder.
pub struct RunCheckpoints {
    files: CheckpointFiles,
    run_folder: PathBuf,
    /// What every checkpoint of the run says but for where it stands.
    template: TrainerState,
    samples_per_step: u64,
    writer: Option<CheckpointWriter>,
    step: u64,
    on_commit: OnCommit,
}

impl RunCheckpoints {
    /// Checkpoints of the run in `run_folder`, whose settings are those of `template`.
    pub fn new(
        files: CheckpointFiles,
        run_folder: PathBuf,
        template: TrainerState,
        samples_per_step: u64,
        on_commit: OnCommit,
    ) -> Self {
        Self { files, run_folder, template, samples_per_step, writer: None, step: 0, on_commit }
    }

    fn writer(&mut self) -> Result<&mut CheckpointWriter, Failure> {
        self.writer.as_mut().ok_or_else(|| "no checkpoint was begun".into())
    }
}

impl StateSink for RunCheckpoints {
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        let mut state = self.template.clone();
        state.step = report.step;
        state.tokens = report.total_tokens;
        state.cursor.position = report.step * self.samples_per_step;
        self.step = report.step;
        self.writer = Some(CheckpointWriter::begin(self.files.clone(), &self.run_folder, state)?);
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
        let writer = self.writer.take().ok_or("no checkpoint was begun")?;
        let path = writer.commit()?;
        (self.on_commit)(self.step, path);
        Ok(())
    }
}
