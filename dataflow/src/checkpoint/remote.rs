//! Checkpoints of a run whose folder is in a store.
//!
//! A store cannot rename. So `trainer.json`, which holds the checksums of all the other files, is written last and removed
//! first: a checkpoint is complete exactly while it is there. Remains of a killed run are never complete; they are
//! overwritten when the run comes to their step again, or removed with older checkpoints.

use std::path::{Path, PathBuf};

use tidemill_streaming_data::DataError;
use tidemill_streaming_data::store::{RemoteFolder, StoreFailure};

use super::folder::{CHECKPOINTS_FOLDER, checkpoint_name, step_of};
use super::trainer_state::TRAINER_FILE;
use crate::error::{JobError, Result};

/// The checkpoints of a run in a store.
#[derive(Clone, Debug)]
pub struct RemoteCheckpoints {
    folder: RemoteFolder,
}

impl RemoteCheckpoints {
    /// Those of the run folder `run`.
    pub fn of_run(run: &RemoteFolder) -> Self {
        Self { folder: run.folder(CHECKPOINTS_FOLDER) }
    }

    /// The folder of the checkpoint of `step`.
    pub fn folder(&self, step: u64) -> RemoteFolder {
        self.folder.folder(&checkpoint_name(step))
    }

    /// The URL of that folder, as a path.
    pub fn url(&self, step: u64) -> PathBuf {
        PathBuf::from(self.folder(step).location().to_string())
    }

    /// The steps of the complete checkpoints, in order.
    ///
    /// # Errors
    /// A store that does not answer, or refuses.
    pub fn list(&self) -> Result<Vec<u64>> {
        let mut complete = Vec::new();
        for step in self.steps()? {
            if self.is_complete(step)? {
                complete.push(step);
            }
        }
        Ok(complete)
    }

    /// The step of the complete checkpoint with the most updates.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn latest(&self) -> Result<Option<u64>> {
        for step in self.steps()?.into_iter().rev() {
            if self.is_complete(step)? {
                return Ok(Some(step));
            }
        }
        Ok(None)
    }

    /// What `read` gives for the complete checkpoint with the most updates. Where a run removes that one meanwhile, it
    /// is asked again, for the one that is the latest then.
    ///
    /// # Errors
    /// As [`list`](Self::list), and those of `read`.
    pub fn with_latest<T>(
        &self,
        mut read: impl FnMut(u64, &RemoteFolder) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut latest = self.latest()?;
        while let Some(step) = latest {
            let error = match read(step, &self.folder(step)) {
                Ok(value) => return Ok(Some(value)),
                Err(error) => error,
            };
            let is_gone = matches!(
                &error,
                JobError::Data(DataError::Store { source: StoreFailure::NotFound { .. }, .. })
            );
            let next = if is_gone { self.latest()? } else { latest };
            if next == latest {
                return Err(error);
            }
            latest = next;
        }
        Ok(None)
    }

    /// Writes the complete checkpoint of `step` that is in the local folder `from`, which is `allowed` again before
    /// its last file.
    ///
    /// # Errors
    /// As [`list`](Self::list), or a file that cannot be read, or that of `allowed`. The checkpoint is not complete then.
    pub fn upload(
        &self,
        step: u64,
        from: &Path,
        allowed: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let reading = |source| JobError::file("reading", from, source);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(from).map_err(reading)? {
            names.push(entry.map_err(reading)?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != TRAINER_FILE);
        names.sort();
        let folder = self.folder(step);
        for name in names {
            folder.put_file(&name, &from.join(&name))?;
        }
        // What makes it complete comes last.
        allowed()?;
        Ok(folder.put_file(TRAINER_FILE, &from.join(TRAINER_FILE))?)
    }

    /// Removes all but the newest `keep` complete checkpoints, and the incomplete ones before `step`.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn retain(&self, step: u64, keep: usize) -> Result<()> {
        let complete = self.list()?;
        let kept = &complete[complete.len().saturating_sub(keep)..];
        for old in self.steps()? {
            let is_remains = !complete.contains(&old) && old < step;
            if is_remains || (complete.contains(&old) && !kept.contains(&old)) {
                self.remove(old)?;
            }
        }
        Ok(())
    }

    fn remove(&self, step: u64) -> Result<()> {
        let folder = self.folder(step);
        // What makes it complete goes first.
        folder.delete(TRAINER_FILE)?;
        for entry in folder.list()? {
            folder.delete(&entry.name)?;
        }
        Ok(())
    }

    /// The steps of which there is anything, in order.
    fn steps(&self) -> Result<Vec<u64>> {
        let names = self.folder.list_folders()?;
        let mut steps: Vec<u64> = names.iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    fn is_complete(&self, step: u64) -> Result<bool> {
        Ok(self.folder(step).list()?.iter().any(|entry| entry.name == TRAINER_FILE))
    }
}

#[cfg(test)]
mod tests {
    use tidemill_streaming_data::store::{Location, StoreSettings};

    use super::*;

    fn run(name: &str) -> RemoteFolder {
        let location = Location::parse(&format!("memory://{name}/a run")).unwrap();
        RemoteFolder::open(location, &StoreSettings::default()).unwrap()
    }

    fn local(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        folder
    }

    #[test]
    fn a_checkpoint_is_complete_with_its_last_file_only() {
        let run = run("complete-with-its-last-file");
        let checkpoints = RemoteCheckpoints::of_run(&run);
        assert_eq!(checkpoints.latest().unwrap(), None);
        let complete = local(&["zz.json", TRAINER_FILE, "config.json"]);
        for step in [5, 100, 20, 7] {
            checkpoints.upload(step, complete.path(), || Ok(())).unwrap();
        }
        for step in [3, 200] {
            let not_allowed = || Err(JobError::RunFolderTaken { path: "elsewhere".into() });
            checkpoints.upload(step, complete.path(), not_allowed).unwrap_err();
            assert_eq!(checkpoints.folder(step).list().unwrap().len(), 2);
        }
        run.put("checkpoints/notes/mine.txt", b"mine"[..].to_vec().into()).unwrap();
        assert_eq!(checkpoints.list().unwrap(), [5, 7, 20, 100]);
        assert_eq!(checkpoints.latest().unwrap(), Some(100));
        let read = checkpoints.folder(20).get("zz.json").unwrap();
        assert_eq!(&read[..], b"zz.json");

        checkpoints.retain(100, 2).unwrap();
        assert_eq!(checkpoints.list().unwrap(), [20, 100]);
        // What is older and incomplete is gone, what may be on its way is not, nor what is no checkpoint.
        let left = run.folder(CHECKPOINTS_FOLDER).list_folders().unwrap();
        assert_eq!(left, ["notes", "step-00000020", "step-00000100", "step-00000200"]);
    }

    #[test]
    fn files_of_many_parts_come_back_and_one_that_is_removed_is_looked_for_again() {
        let run = run("many-parts");
        let checkpoints = RemoteCheckpoints::of_run(&run);
        let folder = local(&[TRAINER_FILE]);
        let bytes: Vec<u8> = (0..(17 << 20) + 5_u32).map(|at| (at / 7) as u8).collect();
        std::fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
        for step in [3, 4] {
            checkpoints.upload(step, folder.path(), || Ok(())).unwrap();
        }
        let mut seen = Vec::new();
        let read = checkpoints.with_latest(|step, folder| {
            seen.push(step);
            if step == 4 {
                checkpoints.remove(4).unwrap();
            }
            Ok(folder.get("model.safetensors")?)
        });
        assert!(read.unwrap().unwrap() == bytes);
        assert_eq!(seen, [4, 3]);
        let missing = checkpoints.with_latest(|_, folder| Ok(folder.get("nothing")?));
        assert!(missing.unwrap_err().to_string().contains("step-00000003/nothing"));
    }
}
