//! Writing a checkpoint: chunks in any order, in place, aside, then renamed.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tidemill_collective::StatePart;
use tidemill_files::durable;
use tidemill_model::hugging_face::{CONFIG_FILE, config_bytes};

use super::file_plan::{FilePlan, FileShare};
use super::folder::{checkpoint_path, partial_path, retain};
use super::tensor_writer::TensorWriter;
use super::trainer_state::{TRAINER_FILE, TrainerState, checksum_file};
use crate::error::{JobError, Result};

/// The file of the tokenizer, where the data set has one.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// The parts that all checkpoints of a run share.
#[derive(Clone, Debug)]
pub struct CheckpointFiles {
    /// Which files tensors are in.
    pub plan: Arc<FilePlan>,
    /// `config.json`.
    pub config: Value,
    /// `tokenizer.json`, where the data set has one.
    pub tokenizer: Option<Arc<[u8]>>,
    /// How many complete checkpoints stay.
    pub keep: usize,
}

/// A checkpoint that is being written. Dropped before [`commit`](Self::commit), it leaves nothing.
pub struct CheckpointWriter {
    files: CheckpointFiles,
    run_folder: PathBuf,
    partial: PathBuf,
    state: TrainerState,
    tensors: TensorWriter,
    /// The names of the files that hold no tensors.
    small: Vec<String>,
    committed: bool,
}

impl CheckpointWriter {
    /// Begins the checkpoint of `state` in `run_folder`, beside the complete ones.
    ///
    /// # Errors
    /// Files that cannot be created.
    pub fn begin(files: CheckpointFiles, run_folder: &Path, state: TrainerState) -> Result<Self> {
        Self::begin_share(files, run_folder, state, FileShare::ALL)
    }

    /// As [`begin`](Self::begin) where other processes write all files of tensors except the files of `share`: see
    /// [`ShareWriter`](super::ShareWriter).
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_share(
        files: CheckpointFiles,
        run_folder: &Path,
        state: TrainerState,
        share: FileShare,
    ) -> Result<Self> {
        let partial = partial_path(run_folder, state.step);
        if partial.exists() {
            std::fs::remove_dir_all(&partial)
                .map_err(|source| JobError::file("removing", &partial, source))?;
        }
        make_folder(&partial).map_err(|source| JobError::file("creating", &partial, source))?;
        let begun = Self::open(files, run_folder, &partial, state, share);
        if begun.is_err() {
            // The error at hand is the one to tell.
            let _ = std::fs::remove_dir_all(&partial);
        }
        begun
    }

    fn open(
        files: CheckpointFiles,
        run_folder: &Path,
        partial: &Path,
        mut state: TrainerState,
        share: FileShare,
    ) -> Result<Self> {
        state.checksums.clear();
        let config = config_bytes(&files.config);
        let mut small = vec![(CONFIG_FILE, config.as_slice())];
        small.extend(files.tokenizer.as_deref().map(|tokenizer| (TOKENIZER_FILE, tokenizer)));
        small.extend(files.plan.indexes());
        for (name, bytes) in &small {
            let path = partial.join(name);
            durable::write(&path, bytes)
                .map_err(|source| JobError::file("writing", &path, source))?;
        }
        let small = small.into_iter().map(|(name, _)| name.to_owned()).collect();
        let tensors = TensorWriter::begin(&files.plan, partial, share)?;
        let (run_folder, partial) = (run_folder.to_owned(), partial.to_owned());
        Ok(Self { run_folder, partial, state, tensors, small, committed: false, files })
    }

    /// Writes `values` at element `start` of a part's arena. Each element is written once, in
    /// any order.
    ///
    /// # Errors
    /// A file that cannot be written, or elements that were written before: others are missing then.
    pub fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<()> {
        self.tensors.write(part, start, values)
    }

    /// Takes the checksums of files that another process has written.
    ///
    /// # Errors
    /// A file that is none of the checkpoint's, or is another's.
    pub fn take(&mut self, written: BTreeMap<String, String>) -> Result<()> {
        for (name, checksum) in written {
            let is_planned = self.files.plan.files().any(|file| file.name == name);
            let before = self.state.checksums.insert(name.clone(), checksum);
            if !is_planned || before.is_some() {
                let what = format!("another process wrote {name}, which is not its to write");
                return Err(JobError::checkpoint(&self.partial, what));
            }
        }
        Ok(())
    }

    /// Completes the checkpoint: syncs, seals it with checksums, renames it into place, and removes the
    /// oldest ones beyond those that are kept. Returns its folder.
    ///
    /// # Errors
    /// A state that was not written whole, or files that cannot be written.
    pub fn commit(mut self) -> Result<PathBuf> {
        let written = self.tensors.finish()?;
        self.take(written)?;
        for file in self.files.plan.files() {
            if !self.state.checksums.contains_key(&file.name) {
                let what = format!("{} was never written", file.name);
                return Err(JobError::checkpoint(&self.partial, what));
            }
        }
        for name in &self.small {
            let checksum = checksum_file(&self.partial.join(name))?;
            self.state.checksums.insert(name.clone(), checksum);
        }
        let trainer = self.partial.join(TRAINER_FILE);
        durable::write(&trainer, &self.state.to_bytes())
            .map_err(|source| JobError::file("writing", &trainer, source))?;
        durable::sync_folder(&self.partial).map_err(syncing(&self.partial))?;
        if let Some(path) = self.tensors.missing() {
            let what = "expected it as another process wrote it, found none of its size".to_owned();
            return Err(JobError::checkpoint(&path, what));
        }
        if !self.tensors.is_in_place() {
            let what = "it was removed or renamed, or another has its place".to_owned();
            return Err(JobError::checkpoint(&self.partial, what));
        }
        let path = checkpoint_path(&self.run_folder, self.state.step);
        std::fs::rename(&self.partial, &path)
            .map_err(|source| JobError::file("renaming", &self.partial, source))?;
        self.committed = true;
        durable::sync_parent(&path).map_err(syncing(&path))?;
        retain(&self.run_folder, self.files.keep)?;
        Ok(path)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.committed && self.tensors.is_in_place() {
            // A folder that cannot be removed now is swept when the run folder is next opened.
            let _ = std::fs::remove_dir_all(&self.partial);
        }
    }
}

/// Makes the folder of a checkpoint, and the folder of all checkpoints; a run folder that is gone stays gone.
fn make_folder(partial: &Path) -> std::io::Result<()> {
    match partial.parent().map(std::fs::create_dir) {
        Some(Err(error)) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::create_dir(partial)
}

fn syncing(path: &Path) -> impl FnOnce(std::io::Error) -> JobError {
    move |source| JobError::file("syncing", path, source)
}
