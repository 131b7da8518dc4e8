//! Writing a checkpoint: chunks in any order, in place, aside, then renamed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tidemill_collective::StatePart;
use tidemill_files::durable;
use tidemill_files::lock::is_same_file;
use tidemill_model::Layout;
use tidemill_model::hugging_face::{
    ArenaPlacement, CONFIG_FILE, SINGLE_FILE, SafetensorsLayout, config_bytes,
};

use super::folder::{checkpoint_path, partial_path, retain};
use super::trainer_state::{TRAINER_FILE, TrainerState, checksum_file};
use crate::error::{JobError, Result};

/// The file of the optimizer's state.
pub(super) const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// The file of the tokenizer, where the data set has one.
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Prefixes of the optimizer's tensors.
const OPTIMIZER_PREFIXES: [&str; 2] = ["exp_avg.", "exp_avg_sq."];

/// What the names of a part's tensors begin with.
pub(super) fn prefix(part: StatePart) -> &'static str {
    match part {
        StatePart::Parameter => "",
        StatePart::ExpAvg => OPTIMIZER_PREFIXES[0],
        StatePart::ExpAvgSq => OPTIMIZER_PREFIXES[1],
    }
}

/// What every checkpoint of a run has in common.
#[derive(Clone, Debug)]
pub struct CheckpointFiles {
    /// Where tensors stand in the arenas.
    pub layout: Arc<Layout>,
    /// `config.json`.
    pub config: Value,
    /// `tokenizer.json`, where the data set has one.
    pub tokenizer: Option<Arc<[u8]>>,
    /// How many complete checkpoints stay.
    pub keep: usize,
}

/// A file of tensors that is being filled.
struct TensorFile {
    path: PathBuf,
    file: File,
    elements_left: usize,
}

/// A checkpoint that is being written. Dropped before [`commit`](Self::commit), it leaves nothing.
pub struct CheckpointWriter {
    files: CheckpointFiles,
    run_folder: PathBuf,
    partial: PathBuf,
    state: TrainerState,
    model: TensorFile,
    optimizer: TensorFile,
    placements: [ArenaPlacement; 3],
    /// By part: what was written, from where to where.
    written: [BTreeMap<usize, usize>; 3],
    committed: bool,
}

impl CheckpointWriter {
    /// Begins the checkpoint of `state` in `run_folder`, beside the complete ones.
    ///
    /// # Errors
    /// Files that cannot be created.
    pub fn begin(files: CheckpointFiles, run_folder: &Path, state: TrainerState) -> Result<Self> {
        let partial = partial_path(run_folder, state.step);
        if partial.exists() {
            std::fs::remove_dir_all(&partial)
                .map_err(|source| JobError::file("removing", &partial, source))?;
        }
        make_folder(&partial).map_err(|source| JobError::file("creating", &partial, source))?;
        let begun = Self::open(files, run_folder, &partial, state);
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
        state: TrainerState,
    ) -> Result<Self> {
        let layout = &files.layout;
        let model = SafetensorsLayout::of_arenas(layout, &[""]);
        let optimizer = SafetensorsLayout::of_arenas(layout, &OPTIMIZER_PREFIXES);
        let placements = [
            model.placement(layout, ""),
            optimizer.placement(layout, OPTIMIZER_PREFIXES[0]),
            optimizer.placement(layout, OPTIMIZER_PREFIXES[1]),
        ];
        let write_small = |name: &str, bytes: &[u8]| {
            let path = partial.join(name);
            durable::write(&path, bytes).map_err(|source| JobError::file("writing", &path, source))
        };
        write_small(CONFIG_FILE, &config_bytes(&files.config))?;
        if let Some(tokenizer) = &files.tokenizer {
            write_small(TOKENIZER_FILE, tokenizer)?;
        }
        let elements = layout.parameters();
        let model = TensorFile::create(partial.join(SINGLE_FILE), &model, elements)?;
        let optimizer = TensorFile::create(partial.join(OPTIMIZER_FILE), &optimizer, 2 * elements)?;
        Ok(Self {
            run_folder: run_folder.to_owned(),
            partial: partial.to_owned(),
            state,
            model,
            optimizer,
            placements,
            written: Default::default(),
            committed: false,
            files,
        })
    }

    /// Writes `values`, which stand from element `start` of a part's arena. Each element is written once, in
    /// any order.
    ///
    /// # Errors
    /// A file that cannot be written, or elements that were written before: others are missing then.
    pub fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<()> {
        let end = start + values.len();
        let written = &mut self.written[part as usize];
        if let Some((&before, &until)) = written.range(..end).next_back()
            && until > start
        {
            let what = format!(
                "elements {start} to {end} of {part:?} arrived, but {before} to {until} were written before"
            );
            return Err(JobError::checkpoint(&self.partial, what));
        }
        written.insert(start, end);
        let placement = &self.placements[part as usize];
        let target = match part {
            StatePart::Parameter => &mut self.model,
            StatePart::ExpAvg | StatePart::ExpAvgSq => &mut self.optimizer,
        };
        for piece in placement.pieces(start..start + values.len()) {
            let values = &values[piece.arena.start - start..piece.arena.end - start];
            target.write_at(values, piece.file_offset)?;
        }
        Ok(())
    }

    /// Completes the checkpoint: syncs, seals it with checksums, renames it into place, and removes the
    /// oldest ones beyond those that are kept. Returns its folder.
    ///
    /// # Errors
    /// A state that was not written whole, or files that cannot be written.
    pub fn commit(mut self) -> Result<PathBuf> {
        let mut names = vec![CONFIG_FILE, SINGLE_FILE, OPTIMIZER_FILE];
        names.extend(self.files.tokenizer.is_some().then_some(TOKENIZER_FILE));
        self.model.finish()?;
        self.optimizer.finish()?;
        for name in names {
            let checksum = checksum_file(&self.partial.join(name))?;
            self.state.checksums.insert(name.to_owned(), checksum);
        }
        let trainer = self.partial.join(TRAINER_FILE);
        durable::write(&trainer, &self.state.to_bytes())
            .map_err(|source| JobError::file("writing", &trainer, source))?;
        durable::sync_folder(&self.partial).map_err(syncing(&self.partial))?;
        if !self.is_in_place() {
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

    /// Whether what is at the path of this checkpoint is this checkpoint: the run folder may have been renamed, and another
    /// run may write the checkpoint of the same step there.
    fn is_in_place(&self) -> bool {
        let TensorFile { path, file, .. } = &self.model;
        let looks = std::fs::metadata(path).and_then(|there| Ok((there, file.metadata()?)));
        looks.is_ok_and(|(there, ours)| is_same_file(&there, &ours))
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.committed && self.is_in_place() {
            // What cannot be removed now is swept when the run folder is next opened.
            let _ = std::fs::remove_dir_all(&self.partial);
        }
    }
}

impl TensorFile {
    fn create(path: PathBuf, plan: &SafetensorsLayout, elements: usize) -> Result<Self> {
        let create = || -> std::io::Result<File> {
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            file.set_len(plan.file_bytes())?;
            file.write_all_at(plan.header_bytes(), 0)?;
            Ok(file)
        };
        let file = create().map_err(|source| JobError::file("writing", &path, source))?;
        Ok(Self { path, file, elements_left: elements })
    }

    fn write_at(&mut self, values: &[f32], offset: u64) -> Result<()> {
        let mut bytes = Vec::with_capacity(values.len() * 4);
        for value in values {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        self.file
            .write_all_at(&bytes, offset)
            .map_err(|source| JobError::file("writing", &self.path, source))?;
        self.elements_left = self.elements_left.saturating_sub(values.len());
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if self.elements_left != 0 {
            let what = format!("{} elements were never written", self.elements_left);
            return Err(JobError::checkpoint(&self.path, what));
        }
        self.file.sync_all().map_err(syncing(&self.path))
    }
}

/// Makes the folder of a checkpoint, and that of all of them; a run folder that is gone stays gone.
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
