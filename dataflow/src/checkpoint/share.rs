//! The part of a checkpoint that a process other than the first writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_files::durable;

use super::file_plan::{FilePlan, FileShare};
use super::folder::partial_path;
use super::tensor_writer::TensorWriter;
use crate::error::{JobError, Result};

/// Files of a checkpoint that another process has begun, completes and names: a
/// [`CheckpointWriter`](super::CheckpointWriter) there. Dropped before [`finish`](Self::finish), it leaves nothing.
pub struct ShareWriter {
    tensors: TensorWriter,
    partial: PathBuf,
    is_finished: bool,
}

impl ShareWriter {
    /// Begins the files of `share` in the checkpoint of `step` that is being written in `run_folder`.
    ///
    /// # Errors
    /// Files that cannot be created.
    pub fn begin(
        plan: &Arc<FilePlan>,
        run_folder: &Path,
        step: u64,
        share: FileShare,
    ) -> Result<Self> {
        let partial = partial_path(run_folder, step);
        let tensors = TensorWriter::begin(plan, &partial, share)?;
        Ok(Self { tensors, partial, is_finished: false })
    }

    /// As [`CheckpointWriter::write`](super::CheckpointWriter::write), of its share.
    ///
    /// # Errors
    /// The errors of [`CheckpointWriter::write`](super::CheckpointWriter::write).
    pub fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<()> {
        self.tensors.write(part, start, values)
    }

    /// Keeps the files, through a power cut too; answers their checksums, for
    /// [`CheckpointWriter::take`](super::CheckpointWriter::take).
    ///
    /// # Errors
    /// A share that was not written whole, or files that cannot be kept or are no longer in their place.
    pub fn finish(mut self) -> Result<BTreeMap<String, String>> {
        let checksums = self.tensors.finish()?;
        durable::sync_folder(&self.partial)
            .map_err(|source| JobError::file("syncing", &self.partial, source))?;
        if !self.tensors.is_in_place() {
            let what = "it was removed or renamed, or another has its place";
            return Err(JobError::checkpoint(&self.partial, what));
        }
        self.is_finished = true;
        Ok(checksums)
    }
}

impl Drop for ShareWriter {
    fn drop(&mut self) {
        if !self.is_finished {
            self.tensors.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{arena, bytes, files_of, layout};
    use super::super::trainer_state::tests::state;
    use super::super::write::CheckpointWriter;
    use super::*;

    /// Bytes of a file such that there are four files, and one of two processes has two of them.
    const FILE_BYTES: u64 = 64;

    /// Begins a checkpoint in `run` that two processes write.
    fn begun(run: &Path) -> (CheckpointWriter, ShareWriter) {
        let files = files_of(&layout(), FILE_BYTES);
        let share = |index| FileShare { index, of: 2 };
        let plan = Arc::clone(&files.plan);
        let first = CheckpointWriter::begin_share(files, run, state(3), share(0)).unwrap();
        (first, ShareWriter::begin(&plan, run, 3, share(1)).unwrap())
    }

    /// Writes all to those that have it to write; answers how often it was another's.
    fn write(first: &mut CheckpointWriter, second: &mut ShareWriter) -> usize {
        let layout = layout();
        let mut refused = 0;
        for (index, part) in StatePart::all(2).enumerate() {
            let values = arena(&layout, index as f32);
            for segment in layout.segments() {
                let (start, values) = (segment.range.start, &values[segment.range.clone()]);
                let written = [first.write(part, start, values), second.write(part, start, values)];
                refused += written.iter().filter(|written| written.is_err()).count();
            }
        }
        refused
    }

    #[test]
    fn what_two_processes_write_is_what_one_writes() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut alone =
            CheckpointWriter::begin(files_of(&layout(), FILE_BYTES), one.path(), state(3)).unwrap();
        for (index, part) in StatePart::all(2).enumerate() {
            alone.write(part, 0, &arena(&layout(), index as f32)).unwrap();
        }
        let (mut first, mut second) = begun(two.path());
        assert_eq!(write(&mut first, &mut second), 6, "each has one writer");
        first.take(second.finish().unwrap()).unwrap();
        assert_eq!(bytes(&first.commit().unwrap()), bytes(&alone.commit().unwrap()));
    }

    #[test]
    fn a_checkpoint_is_not_complete_before_all_have_written() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = run.path().join("checkpoints");
        let left = || folders(&checkpoints);
        // The second has not said so; it has said so, and its file went; nor was all of its share written.
        let (mut first, mut second) = begun(run.path());
        write(&mut first, &mut second);
        let written = second.finish().unwrap();
        assert_eq!(written.len(), 2);
        let error = first.commit().unwrap_err().to_string();
        assert!(error.contains("model-00002-of-00002.safetensors was never written"), "{error}");
        assert_eq!(left(), 0);

        let (mut first, mut second) = begun(run.path());
        write(&mut first, &mut second);
        let written = second.finish().unwrap();
        let partial = partial_path(run.path(), 3);
        std::fs::remove_file(partial.join("model-00002-of-00002.safetensors")).unwrap();
        first.take(written.clone()).unwrap();
        let error = first.take(written).unwrap_err().to_string();
        assert!(error.contains("not its to write"), "{error}");
        let error = first.commit().unwrap_err().to_string();
        assert!(error.contains("expected it as another process wrote it"), "{error}");
        assert_eq!(left(), 0);

        let (first, second) = begun(run.path());
        let error = second.finish().unwrap_err().to_string();
        assert!(error.contains("never written"), "{error}");
        assert_eq!(std::fs::read_dir(&partial).unwrap().count(), 6, "its files went with it");
        drop(first);
        assert_eq!(left(), 0);
    }

    /// How many checkpoints there are, whole or not.
    fn folders(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }
}
