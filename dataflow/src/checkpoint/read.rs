//! Reading a checkpoint: nothing is believed before its checksum is right.

use std::path::{Path, PathBuf};

use tidemill_model::hugging_face::{CONFIG_FILE, SINGLE_FILE};

use super::file_plan::{OPTIMIZER_FILE, Tensors};
use super::local_copy::Wanted;
use super::side_by_side::side_by_side;
use super::trainer_state::{TrainerState, checksum_of, compare};

use crate::error::{JobError, Result};

/// A complete checkpoint, verified as far as it is wanted.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TrainerState,
    wanted: Wanted,
}

impl Checkpoint {
    /// Opens the checkpoint in `path` and verifies every checksum.
    ///
    /// # Errors
    /// A file that is missing, truncated or changed, each named.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_for(path, Wanted::Checkpoint)
    }

    /// Opens the checkpoint in `path`. Only the files that are `wanted` are read and verified.
    ///
    /// # Errors
    /// A file that is missing, truncated or changed, each named.
    pub fn open_for(path: &Path, wanted: Wanted) -> Result<Self> {
        let state = TrainerState::read(path)?;
        if !state.checksums.contains_key(CONFIG_FILE) {
            let what = format!("expected a checksum of {CONFIG_FILE}, found none");
            return Err(JobError::checkpoint(path, what));
        }
        for (tensors, file) in [(Tensors::Model, SINGLE_FILE), (Tensors::Optimizer, OPTIMIZER_FILE)]
        {
            if wanted.includes(file) {
                tensors.entry(path, &state)?;
            }
        }
        let files = state.checksums.iter().filter(|(name, _)| wanted.includes(name)).collect();
        side_by_side(
            files,
            path,
            || false,
            |(name, expected): (&String, &String), shared| {
                let path = path.join(name);
                let file = tidemill_files::open(&path)
                    .map_err(|source| JobError::file("reading", &path, source))?;
                let found = checksum_of(file, &path, || shared.moved())?;
                Ok(compare(&path, expected, &found)?)
            },
        )?;
        Ok(Self { path: path.to_owned(), state, wanted })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file `name` was verified.
    pub fn is_verified(&self, name: &str) -> bool {
        self.wanted.includes(name) && self.state.checksums.contains_key(name)
    }

    /// The state of the run, from `trainer.json`.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }
}

#[cfg(test)]
mod tests {
    use tidemill_collective::StatePart;
    use tidemill_model::hugging_face::FILE_BYTES;
    use tidemill_streaming_data::store::{Location, RemoteFolder, StoreSettings};

    use super::super::fixtures::{FILE_SIZES, STATES, arena, bytes, files, files_of, layout};
    use super::super::local_copy::LocalCopy;
    use super::super::remote::RemoteCheckpoints;
    use super::super::state_files::{RestoredState, StateFiles};
    use super::super::trainer_state::tests::state;
    use super::super::write::CheckpointWriter;
    use super::*;
    use crate::cluster::{Abort, ClusterError};

    /// Writes the checkpoint of `step` in chunks of `chunk` elements, last chunk first.
    fn write(run: &Path, step: u64, chunk: usize) -> PathBuf {
        written(run, step, chunk, FILE_BYTES).commit().unwrap()
    }

    /// As [`write`], except for the commit, and in files of `file_bytes` bytes.
    fn written(run: &Path, step: u64, chunk: usize, file_bytes: u64) -> CheckpointWriter {
        let layout = layout();
        let files = files_of(&layout, file_bytes);
        let mut writer = CheckpointWriter::begin(files, run, state(step)).unwrap();
        for (index, part) in StatePart::all(2).enumerate() {
            let values = arena(&layout, index as f32);
            for start in (0..values.len()).step_by(chunk).collect::<Vec<_>>().into_iter().rev() {
                let end = values.len().min(start + chunk);
                writer.write(part, start, &values[start..end]).unwrap();
            }
        }
        writer
    }

    #[test]
    fn bytes_do_not_depend_on_chunks_and_come_back() {
        for file_bytes in FILE_SIZES {
            let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let write = |run: &Path, chunk| written(run, 3, chunk, file_bytes).commit().unwrap();
            let (a, b) = (write(first.path(), 5), write(second.path(), 1000));
            assert_eq!(bytes(&a), bytes(&b));
            let checkpoint = Checkpoint::open(&a).unwrap();
            assert_eq!(checkpoint.state().tokens, 30);
            let (layout, abort) = (layout(), Abort::new());
            let files = StateFiles::open(&a, &layout, &STATES).unwrap();
            let all = 0..layout.parameter_elements();
            let restored = files.read(std::slice::from_ref(&all), &abort);
            let expected = [0.0, 1.0, 2.0].map(|seed| arena(&layout, seed));
            let [parameters, states @ ..] = expected.clone();
            let states = states.to_vec();
            assert_eq!(restored.unwrap().unwrap(), RestoredState { parameters, states });
            for (part, expected) in StatePart::all(2).zip(expected) {
                assert_eq!(files.values(part, 3..40).unwrap(), expected[3..40]);
            }
        }
    }

    #[cfg(feature = "ndarray")]
    #[test]
    fn tensors_of_a_checkpoint_are_arrays_by_name() {
        let (run, layout) = (tempfile::tempdir().unwrap(), layout());
        let path = written(run.path(), 3, 64, 64).commit().unwrap();
        let files = StateFiles::open(&path, &layout, &STATES).unwrap();
        for (index, part) in StatePart::all(2).enumerate() {
            let arena = arena(&layout, index as f32);
            for tensor in layout.tensors() {
                let found = files.array(part, &tensor.name).unwrap();
                assert_eq!(found, layout.array(&tensor.name, &arena).unwrap());
            }
            let missing = files.array(part, "tabel").unwrap_err().to_string();
            assert!(missing.contains("tabel is missing"), "{missing}");
        }
    }

    #[test]
    fn a_model_that_is_too_large_for_one_file_is_several_with_an_index() {
        let run = tempfile::tempdir().unwrap();
        let path = written(run.path(), 3, 64, 64).commit().unwrap();
        let names: Vec<_> = bytes(&path).into_iter().map(|(name, _)| name).collect();
        let expected = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer-00001-of-00002.safetensors",
            "optimizer-00002-of-00002.safetensors",
            "optimizer.safetensors.index.json",
            "tokenizer.json",
            "trainer.json",
        ];
        assert_eq!(names, expected);
        let map = |name| -> serde_json::Value {
            let index = std::fs::read(path.join(name)).unwrap();
            serde_json::from_slice::<serde_json::Value>(&index).unwrap()["weight_map"].clone()
        };
        let model = serde_json::json!({"table": expected[1], "vector": expected[2]});
        assert_eq!(map(expected[3]), model);
        let optimizer = serde_json::json!({
            "exp_avg.table": expected[4],
            "exp_avg.vector": expected[5],
            "exp_avg_sq.table": expected[4],
            "exp_avg_sq.vector": expected[5],
        });
        assert_eq!(map(expected[6]), optimizer);
        // Every reader of a model opens this file first, and no checksum covers it.
        std::fs::write(path.join(SINGLE_FILE), "").unwrap();
        let error = Checkpoint::open_for(&path, Wanted::Model).unwrap_err().to_string();
        assert!(error.contains("found model.safetensors too"), "{error}");
    }

    #[test]
    fn the_files_of_a_large_model_come_from_a_store_as_they_are_wanted() {
        let run = tempfile::tempdir().unwrap();
        let path = written(run.path(), 3, 64, 64).commit().unwrap();
        let location = Location::parse("memory://large-model/run").unwrap();
        let folder = RemoteFolder::open(location, &StoreSettings::default()).unwrap();
        let stored = RemoteCheckpoints::of_run(&folder);
        stored.upload("step-00000003-ab", &path, || Ok(())).unwrap();
        for (wanted, files) in [(Wanted::Config, 1), (Wanted::Model, 6), (Wanted::Checkpoint, 9)] {
            let folder = stored.folder("step-00000003-ab");
            let copy = LocalCopy::fetch(&folder, wanted, run.path()).unwrap();
            assert_eq!(bytes(copy.path()).len(), files);
            if wanted != Wanted::Config {
                Checkpoint::open_for(copy.path(), wanted).unwrap();
            }
        }
        stored.remove("step-00000003-ab").unwrap();
        assert_eq!(stored.folder("step-00000003-ab").list().unwrap().len(), 0);
    }

    #[test]
    fn of_the_states_no_more_is_taken_than_is_owned() {
        let run = tempfile::tempdir().unwrap();
        let (layout, abort) = (layout(), Abort::new());
        let files = StateFiles::open(&write(run.path(), 3, 64), &layout, &STATES).unwrap();
        let owned = [2..9, 33..36];
        let verified = files.read(&owned, &abort).unwrap().unwrap();
        let only = |seed| {
            let mut values = arena(&layout, seed);
            let is_owned = |index| owned.iter().any(|range| range.contains(&index));
            values
                .iter_mut()
                .enumerate()
                .filter(|&(index, _)| !is_owned(index))
                .for_each(|it| *it.1 = 0.0);
            values
        };
        let (parameters, states) = (arena(&layout, 0.0), vec![only(1.0), only(2.0)]);
        assert_eq!(verified, RestoredState { parameters, states });
        assert_eq!(files.read_owned(&owned, &abort).unwrap().unwrap(), verified);
        abort.abort(ClusterError::StoppedEarly);
        assert_eq!(files.read(&owned, &abort).unwrap(), None);
    }

    #[test]
    fn what_is_damaged_is_noticed_where_nothing_of_it_is_wanted() {
        let run = tempfile::tempdir().unwrap();
        let (layout, abort) = (layout(), Abort::new());
        let path = written(run.path(), 1, 64, 64).commit().unwrap();
        for (name, good) in bytes(&path) {
            let mut flipped = good.clone();
            *flipped.last_mut().unwrap() ^= 1;
            std::fs::write(path.join(&name), flipped).unwrap();
            let opened = StateFiles::open(&path, &layout, &STATES);
            let read = opened.and_then(|files| files.read(&[], &abort));
            let error = read.unwrap_err().to_string();
            assert!(error.contains(name.to_str().unwrap()), "{error}");
            std::fs::write(path.join(&name), good).unwrap();
        }
        let whole = StateFiles::open(&path, &layout, &STATES).unwrap();
        assert!(whole.read(&[], &abort).unwrap().is_some());
    }

    #[test]
    fn every_damaged_or_missing_file_is_named() {
        for file_bytes in FILE_SIZES {
            every_damage_is_named(file_bytes);
        }
    }

    fn every_damage_is_named(file_bytes: u64) {
        let run = tempfile::tempdir().unwrap();
        let path = written(run.path(), 1, 64, file_bytes).commit().unwrap();
        for (name, good) in bytes(&path) {
            let file = path.join(&name);
            let mut flipped = good.clone();
            let middle = flipped.len() / 2;
            flipped[middle] ^= 4;
            for bad in [&flipped[..], &good[..good.len() - 1]] {
                std::fs::write(&file, bad).unwrap();
                let error = Checkpoint::open(&path).unwrap_err().to_string();
                assert!(error.contains(name.to_str().unwrap()), "{error}");
            }
            std::fs::remove_file(&file).unwrap();
            assert!(Checkpoint::open(&path).is_err());
            std::fs::write(&file, &good).unwrap();
            Checkpoint::open(&path).unwrap();
        }
    }

    #[test]
    fn a_damaged_optimizer_does_not_keep_the_model_from_being_opened() {
        let run = tempfile::tempdir().unwrap();
        let path = write(run.path(), 1, 64);
        std::fs::write(path.join(OPTIMIZER_FILE), "damaged").unwrap();
        Checkpoint::open_for(&path, Wanted::Model).unwrap();
        std::fs::remove_file(path.join(OPTIMIZER_FILE)).unwrap();
        Checkpoint::open_for(&path, Wanted::Model).unwrap();
        assert!(Checkpoint::open(&path).is_err(), "a run cannot go on from it");
        std::fs::write(path.join(SINGLE_FILE), "damaged").unwrap();
        let error = Checkpoint::open_for(&path, Wanted::Model).unwrap_err().to_string();
        assert!(error.contains(SINGLE_FILE), "{error}");
        Checkpoint::open_for(&path, Wanted::Config).unwrap();
    }

    #[test]
    fn elements_that_are_written_twice_are_refused() {
        let run = tempfile::tempdir().unwrap();
        let layout = layout();
        let mut writer = CheckpointWriter::begin(files(&layout), run.path(), state(1)).unwrap();
        let values = arena(&layout, 0.0);
        writer.write(StatePart::Parameter, 4, &values[4..8]).unwrap();
        writer.write(StatePart::Parameter, 0, &values[..4]).unwrap();
        writer.write(StatePart::State(0), 0, &values[..4]).unwrap();
        for twice in [0..4, 3..5, 7..9, 0..9, 5..6] {
            let error = writer
                .write(StatePart::Parameter, twice.start, &values[twice.clone()])
                .unwrap_err()
                .to_string();
            assert!(error.contains("written before"), "{twice:?}: {error}");
        }
        writer.write(StatePart::Parameter, 8, &values[8..]).unwrap();
    }

    #[test]
    fn an_incomplete_state_is_no_checkpoint_and_leaves_nothing() {
        let run = tempfile::tempdir().unwrap();
        let kept = write(run.path(), 1, 64);
        let layout = layout();
        let mut writer = CheckpointWriter::begin(files(&layout), run.path(), state(2)).unwrap();
        writer.write(StatePart::Parameter, 0, &arena(&layout, 0.0)).unwrap();
        let error = writer.commit().unwrap_err().to_string();
        assert!(error.contains("never written"), "{error}");
        let entries: Vec<_> = std::fs::read_dir(kept.parent().unwrap()).unwrap().collect();
        assert_eq!(entries.len(), 1);
        Checkpoint::open(&kept).unwrap();
    }

    /// Another run has the old name of the run folder, and is at the same step.
    #[test]
    fn a_checkpoint_whose_run_folder_is_renamed_leaves_another_s_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (run, moved) = (dir.path().join("run"), dir.path().join("moved"));
        std::fs::create_dir(&run).unwrap();
        for ours_is_whole in [true, false] {
            let ours = written(&run, 1, 64, FILE_BYTES);
            std::fs::rename(&run, &moved).unwrap();
            let missing = CheckpointWriter::begin(files(&layout()), &run, state(1));
            assert!(missing.is_err() && !run.exists(), "a run folder that is gone stays gone");
            std::fs::create_dir(&run).unwrap();
            let other = written(&run, 1, 64, FILE_BYTES);
            if ours_is_whole {
                let error = ours.commit().unwrap_err().to_string();
                assert!(error.contains("removed or renamed"), "{error}");
            } else {
                drop(ours);
            }
            assert!(super::super::list(&run).unwrap().is_empty(), "not complete before its end");
            Checkpoint::open(&other.commit().unwrap()).unwrap();
            std::fs::remove_dir_all(&moved).unwrap();
            std::fs::remove_dir_all(super::super::folder::checkpoint_path(&run, 1)).unwrap();
        }
    }

    #[test]
    fn only_the_newest_are_kept() {
        let run = tempfile::tempdir().unwrap();
        for step in 1..=4 {
            write(run.path(), step, 64);
        }
        let steps: Vec<u64> =
            super::super::list(run.path()).unwrap().iter().map(|entry| entry.step).collect();
        assert_eq!(steps, [3, 4]);
    }
}
