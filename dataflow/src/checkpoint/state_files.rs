//! The state in a checkpoint's files, as a run goes on from it: read by ranges, and verified in the same pass.
//!
//! Opening reads `trainer.json`, the small files and the headers of the tensors' files. [`StateFiles::read`] then goes through
//! every file once: each byte is in its checksum, and each element that is wanted is in its arena. Several files are read at
//! once, by threads that end when the run does.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::slice;

use tidemill_collective::StatePart;
use tidemill_model::Layout;
use tidemill_model::hugging_face::{StoredElements, TensorFiles};
use tidemill_model::optimizer::StateSpec;

use super::file_plan::{Prefixes, Tensors};
use super::side_by_side::{Ended, MOST_THREADS, SharedProgress, side_by_side};
use super::trainer_state::{Checksum, TrainerState, checksum, checksum_file, compare};
use crate::cluster::Abort;
use crate::error::{JobError, Result};
use crate::state_arenas::StateArenas;

/// Elements of an arena that are read between two looks at whether the run goes on.
const PIECE_ELEMENTS: usize = 1 << 18;

/// A checkpoint that a run goes on from, its files open.
pub struct StateFiles {
    path: PathBuf,
    state: TrainerState,
    model: TensorFiles,
    optimizer: TensorFiles,
    prefixes: Prefixes,
    arenas: StateArenas,
}

/// The arenas of a checkpoint, laid out by a layout and the states of an optimizer; padding is zero.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoredState {
    /// The fp32 masters.
    pub parameters: Vec<f32>,
    /// The states of the optimizer where they were wanted; pages of others are never touched, so they cost no memory.
    pub states: Vec<Vec<f32>>,
}

impl StateFiles {
    /// Opens the checkpoint in `path` with the tensors of `layout` and the optimizer's `states`. The content of files of tensors
    /// is not believed before it is read.
    ///
    /// # Errors
    /// A file that is missing, truncated or of another model; a small one that is changed.
    pub fn open(path: &Path, layout: &Layout, states: &[StateSpec]) -> Result<Self> {
        let state = TrainerState::read(path)?;
        let (model, optimizer) =
            (Tensors::Model.open(path, &state)?, Tensors::Optimizer.open(path, &state)?);
        let (prefixes, arenas) = (Prefixes::new(states), StateArenas::new(layout, states));
        let opened = Self { path: path.to_owned(), state, model, optimizer, prefixes, arenas };
        let Self { state, model, optimizer, arenas, .. } = &opened;
        for part in arenas.parts() {
            opened.of(part).check(arenas.layout(part), opened.prefix(part)?)?;
        }
        for (name, expected) in &state.checksums {
            let file = path.join(name);
            if !model.paths().chain(optimizer.paths()).any(|path| path == file) {
                compare(&file, expected, &checksum_file(&file)?)?;
            }
        }
        Ok(opened)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The state of the run, from `trainer.json`.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Identity of this checkpoint: the checksum of `trainer.json`, which has the checksums of all other files.
    pub fn fingerprint(&self) -> String {
        checksum(&self.state.to_bytes())
    }

    /// All parameters, and the states of the parameters in the ranges `owned`, which are in order. Every file is verified. None where the
    /// run is aborted meanwhile.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged.
    pub fn read(&self, owned: &[Range<usize>], abort: &Abort) -> Result<Option<RestoredState>> {
        let mut restored = self.zeros();
        let RestoredState { parameters, states } = &mut restored;
        let all = 0..usize::MAX;
        let of_model = self.places(StatePart::Parameter, parameters, slice::from_ref(&all))?;
        let mut jobs = self.through(&self.model, of_model)?;
        let owned = self.owned(owned);
        let mut tensors = BTreeMap::new();
        for ((part, state), owned) in self.arenas.parts().skip(1).zip(states).zip(&owned) {
            tensors.append(&mut self.places(part, state, owned)?);
        }
        jobs.append(&mut self.through(&self.optimizer, tensors)?);
        let done = side_by_side(jobs, &self.path, || abort.is_aborted(), Job::run)?;
        Ok(done.map(|_| restored))
    }

    /// As [`read`](Self::read) where another process verifies the same files: no more is read than the wanted elements.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read_owned(
        &self,
        owned: &[Range<usize>],
        abort: &Abort,
    ) -> Result<Option<RestoredState>> {
        let mut restored = self.zeros();
        let RestoredState { parameters, states } = &mut restored;
        let mut jobs = Vec::new();
        let owned = self.owned(owned);
        for ((part, out), ranges) in self.arenas.parts().skip(1).zip(states).zip(&owned) {
            jobs.push(Job::Ranges { files: self, part, ranges, start: 0, out });
        }
        let elements = parameters.len().div_ceil(MOST_THREADS).max(1);
        let ends = |start| start..parameters.len().min(start + elements);
        let ranges: Vec<_> = (0..parameters.len()).step_by(elements).map(ends).collect();
        for (range, out) in ranges.iter().zip(parameters.chunks_mut(elements)) {
            let (part, start, ranges) = (StatePart::Parameter, range.start, slice::from_ref(range));
            jobs.push(Job::Ranges { files: self, part, ranges, start, out });
        }
        let done = side_by_side(jobs, &self.path, || abort.is_aborted(), Job::run)?;
        Ok(done.map(|_| restored))
    }

    /// Reads elements `range` of a part, in the parameters' order.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn values(&self, part: StatePart, range: Range<usize>) -> Result<Vec<f32>> {
        let range = self.arenas.range(part, &range);
        let mut values = vec![0.0; range.len()];
        self.read_part(part, range.start, &mut values)?;
        Ok(values)
    }

    /// The tensor `name` of a part: a parameter, or a state of the optimizer for it, read from its file. The file is not verified.
    ///
    /// # Errors
    /// A tensor that the part does not have, or a file that cannot be read.
    #[cfg(feature = "ndarray")]
    pub fn array(&self, part: StatePart, name: &str) -> Result<ndarray::ArrayD<f32>> {
        Ok(self.of(part).array(&format!("{}{name}", self.prefix(part)?))?)
    }

    /// Elements `start ..` of a part's arena, as many as `out` is long.
    fn read_part(&self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        let layout = self.arenas.layout(part);
        Ok(self.of(part).read_arena(layout, self.prefix(part)?, start, out)?)
    }

    /// The elements of each state that belong to the ranges `owned` of the parameters.
    fn owned(&self, owned: &[Range<usize>]) -> Vec<Vec<Range<usize>>> {
        let of = |part| owned.iter().map(|range| self.arenas.range(part, range)).collect();
        self.arenas.parts().skip(1).map(of).collect()
    }

    fn of(&self, part: StatePart) -> &TensorFiles {
        match part {
            StatePart::Parameter => &self.model,
            StatePart::State(_) => &self.optimizer,
        }
    }

    /// The prefix of the names of a part's tensors.
    fn prefix(&self, part: StatePart) -> Result<&str> {
        self.prefixes.of(part).ok_or_else(|| {
            let what = format!("expected a part of the optimizer that was named, found {part:?}");
            JobError::checkpoint(&self.path, what)
        })
    }

    fn zeros(&self) -> RestoredState {
        let zeros = |part| vec![0.0; self.arenas.layout(part).parameter_elements()];
        let states = self.arenas.parts().skip(1).map(zeros).collect();
        RestoredState { parameters: zeros(StatePart::Parameter), states }
    }

    /// Reads all of `files`: of `tensors` the wanted elements.
    fn through<'a>(
        &'a self,
        files: &'a TensorFiles,
        tensors: BTreeMap<String, Place<'a>>,
    ) -> Result<Vec<Job<'a>>> {
        let mut jobs = Vec::new();
        for path in files.paths() {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let expected = self.state.checksums.get(name).ok_or_else(|| {
                JobError::checkpoint(
                    &self.path,
                    format!("expected a checksum of {name}, found none"),
                )
            })?;
            let (number, tensors) = (jobs.len(), BTreeMap::new());
            jobs.push(FileJob { files, number, path, expected, tensors });
        }
        for (name, place) in tensors {
            if let Some(number) = files.file_of(&name) {
                jobs[number].tensors.insert(name, place);
            }
        }
        Ok(jobs.into_iter().map(Job::Through).collect())
    }

    /// The tensors of a part by their names in files; the elements in the ranges `wanted` of the part's arena are read.
    fn places<'a>(
        &self,
        part: StatePart,
        mut arena: &'a mut [f32],
        wanted: &'a [Range<usize>],
    ) -> Result<BTreeMap<String, Place<'a>>> {
        let prefix = self.prefix(part)?;
        let mut places = BTreeMap::new();
        let mut at = 0;
        for tensor in self.arenas.layout(part).tensors() {
            let range = tensor.range();
            let (_, rest) = std::mem::take(&mut arena).split_at_mut(range.start - at);
            let (values, rest) = rest.split_at_mut(range.len());
            (arena, at) = (rest, range.end);
            let place = Place { start: range.start, values, wanted };
            places.insert(format!("{prefix}{}", tensor.name), place);
        }
        Ok(places)
    }
}

/// Where a tensor goes: its elements in an arena, and the place of the first.
struct Place<'a> {
    start: usize,
    values: &'a mut [f32],
    /// The ranges of the arena to read, in order.
    wanted: &'a [Range<usize>],
}

/// A job of a reading thread.
enum Job<'a> {
    Through(FileJob<'a>),
    /// Ranges of a part, from whichever files they are in.
    Ranges {
        files: &'a StateFiles,
        part: StatePart,
        ranges: &'a [Range<usize>],
        /// The element of the arena that `out` begins with.
        start: usize,
        out: &'a mut [f32],
    },
}

/// A file that is read from its first byte to its last.
struct FileJob<'a> {
    files: &'a TensorFiles,
    number: usize,
    path: &'a Path,
    expected: &'a str,
    tensors: BTreeMap<String, Place<'a>>,
}

impl Job<'_> {
    fn run(self, shared: &SharedProgress) -> std::result::Result<(), Ended> {
        match self {
            Self::Through(job) => job.run(shared),
            Self::Ranges { files, part, ranges, start, out } => {
                for range in ranges {
                    for first in range.clone().step_by(PIECE_ELEMENTS) {
                        let end = range.end.min(first + PIECE_ELEMENTS);
                        let out = &mut out[first - start..end - start];
                        files.read_part(part, first, out)?;
                        shared.moved()?;
                    }
                }
                Ok(())
            }
        }
    }
}

impl FileJob<'_> {
    fn run(self, shared: &SharedProgress) -> std::result::Result<(), Ended> {
        let Self { files, number, path, expected, mut tensors } = self;
        let mut checksum = Checksum::default();
        files.read_through(number, |bytes, elements| {
            checksum.update(bytes);
            let place = elements.as_ref().and_then(|it| tensors.get_mut(it.name));
            if let (Some(elements), Some(place)) = (elements, place) {
                place.take(&elements);
            }
            shared.moved()
        })?;
        Ok(compare(path, expected, &checksum.digest())?)
    }
}

impl Place<'_> {
    /// Takes the wanted ones of `elements`.
    fn take(&mut self, elements: &StoredElements<'_>) {
        let here = self.start + elements.range.start..self.start + elements.range.end;
        let first = self.wanted.partition_point(|range| range.end <= here.start);
        for range in self.wanted[first..].iter().take_while(|range| range.start < here.end) {
            let start = range.start.max(here.start) - self.start;
            let end = range.end.min(here.end) - self.start;
            elements.decode(start, &mut self.values[start..end]);
        }
    }
}
