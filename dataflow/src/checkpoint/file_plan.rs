//! Which file of a checkpoint each tensor is in: a function of the layout alone.
//!
//! A model of up to [`FILE_BYTES`](tidemill_model::hugging_face::FILE_BYTES) is `model.safetensors`, a larger one
//! `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`; the optimizer's state likewise. Files are
//! numbered: the model's, then the optimizer's.

use std::ops::Range;
use std::path::Path;

use tidemill_collective::{ChunkPlan, PlannedChunk, StatePart};
use tidemill_model::Layout;
use tidemill_model::hugging_face::{
    ArenaPlacement, FilePiece, FileSet, INDEX_FILE, PlannedFile, SINGLE_FILE, TensorFiles,
};
use tidemill_model::optimizer::StateSpec;

use super::trainer_state::TrainerState;
use crate::error::{JobError, Result};
use crate::state_arenas::StateArenas;

/// The file of the optimizer's state, where that is one file.
pub(super) const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// The index of the optimizer's files, where there are several.
const OPTIMIZER_INDEX: &str = "optimizer.safetensors.index.json";

/// The prefix of tensors' names, by part: empty for parameters, the name of the state for each of `states`.
#[derive(Clone, Debug)]
pub(super) struct Prefixes(Vec<String>);

impl Prefixes {
    pub(super) fn new(states: &[StateSpec]) -> Self {
        let states = states.iter().map(StateSpec::prefix);
        Self(std::iter::once(String::new()).chain(states).collect())
    }

    /// The prefix of the names of a part's tensors; `None` where there is no such state.
    pub(super) fn of(&self, part: StatePart) -> Option<&str> {
        self.0.get(part.index()).map(String::as_str)
    }
}

/// Whether a file of this name holds state of the optimizer.
pub(super) fn is_of_optimizer(name: &str) -> bool {
    let rest = name.strip_prefix("optimizer").unwrap_or_default();
    rest == ".safetensors.index.json"
        || rest.strip_suffix(".safetensors").is_some_and(|it| it.is_empty() || it.starts_with('-'))
}

/// Which files a process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileShare {
    /// Its place among the processes that write.
    pub index: usize,
    /// How many processes write.
    pub of: usize,
}

impl FileShare {
    /// All files.
    pub const ALL: Self = Self { index: 0, of: 1 };

    /// Whether file `number` is one of them.
    pub fn has(self, number: usize) -> bool {
        number % self.of == self.index
    }
}

/// The kind of a set of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tensors {
    Model,
    Optimizer,
}

impl Tensors {
    /// The name of the file where there is one, and the name of the index where there are several.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Model => [SINGLE_FILE, INDEX_FILE],
            Self::Optimizer => [OPTIMIZER_FILE, OPTIMIZER_INDEX],
        }
    }

    /// Which of the two names the checkpoint `path` has, by its checksums.
    ///
    /// # Errors
    /// A checkpoint with a checksum of neither, or one with an index and a file that is not of it: others would read that.
    pub(super) fn entry(self, path: &Path, state: &TrainerState) -> Result<&'static str> {
        let [single, index] = self.names();
        let has = |name| state.checksums.contains_key(name);
        match (has(single), has(index)) {
            (true, _) => Ok(single),
            (false, true) if path.join(single).exists() => {
                let what = format!("expected the files of {index} alone, found {single} too");
                Err(JobError::checkpoint(path, what))
            }
            (false, true) => Ok(index),
            (false, false) => {
                let what = format!("expected a checksum of {single}, found none");
                Err(JobError::checkpoint(path, what))
            }
        }
    }

    /// Opens the files of the checkpoint `path`.
    ///
    /// # Errors
    /// As [`entry`](Self::entry), and files that are missing or truncated, or have no checksum.
    pub(super) fn open(self, path: &Path, state: &TrainerState) -> Result<TensorFiles> {
        let [single, _] = self.names();
        let entry = self.entry(path, state)?;
        Ok(match entry == single {
            true => TensorFiles::open(&path.join(entry))?,
            false => TensorFiles::open_index(&path.join(entry))?,
        })
    }
}

/// The files of a checkpoint that hold tensors.
#[derive(Clone, Debug)]
pub struct FilePlan {
    model: FileSet,
    optimizer: FileSet,
    /// The placements of tensors, by part and by file of the part's set.
    places: Vec<Vec<ArenaPlacement>>,
}

impl FilePlan {
    /// The files of a model: one, and one of the optimizer's `states`, where it has `file_bytes` bytes at most, else several of as
    /// many: [`FILE_BYTES`](tidemill_model::hugging_face::FILE_BYTES).
    pub fn new(layout: &Layout, states: &[StateSpec], file_bytes: u64) -> Self {
        let (prefixes, arenas) = (Prefixes::new(states), StateArenas::new(layout, states));
        let named = |part| (arenas.layout(part), prefixes.of(part).unwrap_or_default());
        let of_states: Vec<_> = arenas.parts().skip(1).map(named).collect();
        let model = FileSet::new(layout, "model", &[""], file_bytes);
        let optimizer = FileSet::of_arenas(layout, "optimizer", &of_states, file_bytes);
        let places = arenas.parts().map(|part| {
            let set = if part == StatePart::Parameter { &model } else { &optimizer };
            let (layout, prefix) = named(part);
            set.placements(layout, prefix)
        });
        Self { places: places.collect(), model, optimizer }
    }

    /// How many files there are.
    pub fn count(&self) -> usize {
        self.model.files().len() + self.optimizer.files().len()
    }

    /// The files, by their numbers.
    pub(super) fn files(&self) -> impl Iterator<Item = &PlannedFile> {
        self.model.files().iter().chain(self.optimizer.files())
    }

    /// The name and the bytes of each index.
    pub(super) fn indexes(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.model.index().into_iter().chain(self.optimizer.index())
    }

    /// The number of the first file that a part may be in.
    fn first_file(&self, part: StatePart) -> usize {
        match part {
            StatePart::Parameter => 0,
            StatePart::State(_) => self.model.files().len(),
        }
    }

    /// The number of the file that each chunk is in, by part and by chunk. Chunks are of one segment, as files are of whole
    /// ones.
    pub fn files_of(&self, chunks: &ChunkPlan) -> Vec<Vec<usize>> {
        let files_of = |part: StatePart| {
            let set = if part == StatePart::Parameter { &self.model } else { &self.optimizer };
            let file =
                |planned: &PlannedChunk| self.first_file(part) + set.file_of(planned.range.start);
            chunks.chunks().iter().map(file).collect()
        };
        StatePart::all(self.places.len() - 1).map(files_of).collect()
    }

    /// The places of elements `range` of a part's arena, each with the number of its file; padding has none.
    pub(super) fn pieces(
        &self,
        part: StatePart,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, FilePiece)> + '_ {
        let files = self.places.get(part.index()).into_iter().flatten().enumerate();
        let first = self.first_file(part);
        files.flat_map(move |(file, places)| {
            places.pieces(range.clone()).map(move |piece| (first + file, piece))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimizers_files_are_known_by_their_names() {
        for name in [OPTIMIZER_FILE, OPTIMIZER_INDEX, "optimizer-00003-of-00017.safetensors"] {
            assert!(is_of_optimizer(name), "{name}");
        }
        for name in
            [SINGLE_FILE, INDEX_FILE, "optimizer.json", "optimizers.safetensors", "trainer.json"]
        {
            assert!(!is_of_optimizer(name), "{name}");
        }
    }
}
