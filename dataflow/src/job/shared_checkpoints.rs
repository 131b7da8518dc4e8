//! Checkpoints that several processes write: which process writes which files, and the sinks of all processes except 0.
//!
//! File `f` is written by process `f mod n` of the `n` that see the run folder. The parts of other processes are sent to these, as all of
//! it is to process 0 where that alone has the folder.

use std::sync::Arc;

use tidemill_collective::ChunkPlan;

use super::shared_folder::SeenFolder;
use super::state_sink::not_written;
use crate::checkpoint::{FilePlan, FileShare, ShareWriter};
use crate::cluster::Failure;
use crate::error::JobError;
use crate::operators::checkpoint::{StateWriters, WrittenFiles};
use crate::operators::{GraphError, StatePart, StateSink, StepReport};

const NO_CHECKPOINT: GraphError =
    GraphError::Order { what: "a part of a checkpoint", missing: "its beginning" };

/// The processes that write checkpoints.
pub struct Shares {
    /// The first is process 0.
    processes: Vec<usize>,
    workers_of_process: usize,
}

impl Shares {
    /// The shares of the processes, of `processes`, that have a file of `plan` to write.
    pub fn new(mut processes: Vec<usize>, workers_of_process: usize, plan: &FilePlan) -> Self {
        processes.truncate(plan.count());
        Self { processes, workers_of_process }
    }

    /// Which files `process` writes, if any.
    pub fn of(&self, process: usize) -> Option<FileShare> {
        let index = self.processes.iter().position(|&it| it == process)?;
        Some(FileShare { index, of: self.processes.len() })
    }

    /// The first worker of the process that writes it, for each part of each chunk.
    pub fn writers(&self, plan: &FilePlan, chunks: &ChunkPlan) -> StateWriters {
        let of = self.processes.len();
        if of == 1 {
            return StateWriters::default();
        }
        let writer = |file: usize| (self.processes[file % of] * self.workers_of_process) as u32;
        let files = plan.files_of(chunks).into_iter();
        StateWriters::new(files.map(|of| of.into_iter().map(writer).collect()).collect())
    }
}

/// The parts by which a process other than the first writes its files.
pub struct ShareParts {
    /// Which files there are.
    pub plan: Arc<FilePlan>,
    /// Which of them it writes.
    pub share: FileShare,
    /// The run folder.
    pub folder: SeenFolder,
    /// The worker that writes each file.
    pub writers: StateWriters,
}

/// Writes the files of checkpoints that fall to a process other than the first.
pub struct SharedCheckpoints {
    parts: ShareParts,
    open: Option<ShareWriter>,
}

impl SharedCheckpoints {
    /// Files written with `parts`.
    pub fn new(parts: ShareParts) -> Self {
        Self { parts, open: None }
    }

    /// Whether the folder is still the one that process 0 holds.
    fn check(&self) -> Result<(), JobError> {
        let folder = &self.parts.folder;
        match folder.is_held() {
            true => Ok(()),
            false => Err(JobError::RunFolderGone { path: folder.path.clone() }),
        }
    }

    /// Where the run folder went, whatever else failed failed for it.
    fn failed(&self, error: JobError) -> Failure {
        not_written(self.check().err().unwrap_or(error))
    }
}

impl StateSink for SharedCheckpoints {
    fn writers(&self) -> StateWriters {
        self.parts.writers.clone()
    }

    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        let ShareParts { plan, share, folder, .. } = &self.parts;
        self.check()?;
        let writer = ShareWriter::begin(plan, &folder.path, report.step, *share);
        let writer = writer.map_err(|error| self.failed(error))?;
        // Another run may have made the folder meanwhile: then this removes its own files again.
        self.check()?;
        self.open = Some(writer);
        Ok(())
    }

    fn write(
        &mut self,
        part: StatePart,
        arena_start: usize,
        values: &[f32],
    ) -> Result<(), Failure> {
        let writer = self.open.as_mut().ok_or(NO_CHECKPOINT)?;
        writer.write(part, arena_start, values).map_err(|error| self.failed(error))
    }

    fn finish(&mut self) -> Result<WrittenFiles, Failure> {
        let writer = self.open.take().ok_or(NO_CHECKPOINT)?;
        let written = writer.finish().map_err(|error| self.failed(error))?;
        self.check()?;
        Ok(written)
    }

    fn commit(&mut self) -> Result<(), Failure> {
        Err(NO_CHECKPOINT.into())
    }
}

/// Writes nothing, and says which worker does.
pub struct WrittenElsewhere(pub StateWriters);

impl StateSink for WrittenElsewhere {
    fn writers(&self) -> StateWriters {
        self.0.clone()
    }

    fn begin(&mut self, _report: &StepReport) -> Result<(), Failure> {
        Err(NO_CHECKPOINT.into())
    }

    fn write(&mut self, _part: StatePart, _start: usize, _values: &[f32]) -> Result<(), Failure> {
        Err(NO_CHECKPOINT.into())
    }

    fn commit(&mut self) -> Result<(), Failure> {
        Err(NO_CHECKPOINT.into())
    }
}
