//! Checkpoints of a run whose folder is in a store.
//!
//! A store cannot rename. So `trainer.json`, which holds the checksums of all the other files, is written last and removed
//! first: a checkpoint is complete exactly while it is there. Which of the complete ones count is said by `run.json` of the
//! run folder, one object that the run which has the folder replaces as a whole. Remains of a killed run are never in it;
//! they are removed with older checkpoints.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidemill_streaming_data::DataError;
use tidemill_streaming_data::store::{RemoteFolder, StoreFailure};

use super::folder::{CHECKPOINTS_FOLDER, step_of};
use super::trainer_state::{TRAINER_FILE, TrainerState};
use crate::error::{JobError, Result};

/// The object in a run folder that says which run has it, and which checkpoints count.
pub const RUN_FILE: &str = "run.json";

/// The content of [`RUN_FILE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The token of the run that has the folder, or had it last.
    pub run: String,
    /// Whether that one has come to its end. One that was killed has not.
    pub ended: bool,
    /// The names of the checkpoints that count.
    pub checkpoints: Vec<String>,
}

impl RunRecord {
    /// The text.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a record has only JSON values");
        bytes.push(b'\n');
        bytes
    }

    /// Parses the record of the run folder `run`.
    ///
    /// # Errors
    /// Bytes that are no record.
    pub fn from_bytes(bytes: &[u8], run: &RemoteFolder) -> Result<Self> {
        let wrong = |what| {
            let path = PathBuf::from(run.location().join(RUN_FILE).to_string());
            Err(JobError::checkpoint(&path, what))
        };
        match serde_json::from_slice::<Self>(bytes) {
            Ok(record) => match record.checkpoints.iter().find(|name| step_of(name).is_none()) {
                Some(name) => wrong(format!("expected names of checkpoints, found {name:?}")),
                None => Ok(record),
            },
            Err(error) => wrong(format!("expected the record of a run: {error}")),
        }
    }
}

/// The checkpoints of a run in a store.
#[derive(Clone, Debug)]
pub struct RemoteCheckpoints {
    run: RemoteFolder,
    folder: RemoteFolder,
}

impl RemoteCheckpoints {
    /// The checkpoints of the run folder `run`.
    pub fn of_run(run: &RemoteFolder) -> Self {
        Self { run: run.clone(), folder: run.folder(CHECKPOINTS_FOLDER) }
    }

    /// The folder of a checkpoint.
    pub fn folder(&self, name: &str) -> RemoteFolder {
        self.folder.folder(name)
    }

    /// The URL of that folder, as a path.
    pub fn url(&self, name: &str) -> PathBuf {
        PathBuf::from(self.folder(name).location().to_string())
    }

    /// The steps of the checkpoints that count, in order.
    ///
    /// # Errors
    /// A store that does not answer, or refuses; a record that is damaged.
    pub fn steps(&self) -> Result<Vec<u64>> {
        Ok(self.list()?.iter().filter_map(|name| step_of(name)).collect())
    }

    /// The names of the checkpoints that count, in order of their steps.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn list(&self) -> Result<Vec<String>> {
        let record = self.run.get_if_there(RUN_FILE)?;
        let record = record.map(|bytes| RunRecord::from_bytes(&bytes, &self.run)).transpose()?;
        self.complete(record.as_ref())
    }

    /// The names of the checkpoints that count where this is the record, in order of their steps. One that was removed by
    /// hand does not; where there is no record, all do.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn complete(&self, record: Option<&RunRecord>) -> Result<Vec<String>> {
        let mut complete = Vec::new();
        for name in record.map_or_else(|| self.folders(), |it| Ok(it.checkpoints.clone()))? {
            if self.folder(&name).list()?.iter().any(|entry| entry.name == TRAINER_FILE) {
                complete.push(name);
            }
        }
        complete.sort_by_cached_key(|name| (step_of(name), name.clone()));
        Ok(complete)
    }

    /// The name of the checkpoint with the most updates.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn latest(&self) -> Result<Option<String>> {
        Ok(self.list()?.pop())
    }

    /// The state of the run in the checkpoint with the most updates, and its URL.
    ///
    /// # Errors
    /// As [`steps`](Self::steps), or a file that is damaged.
    pub fn latest_state(&self) -> Result<Option<(PathBuf, TrainerState)>> {
        self.with_latest(|name, folder| {
            let path = PathBuf::from(folder.location().join(TRAINER_FILE).to_string());
            let state = TrainerState::from_bytes(&folder.get(TRAINER_FILE)?, &path)?;
            Ok((self.url(name), state))
        })
    }

    /// Reads the checkpoint with the most updates by `read`. If a run removes that checkpoint meanwhile, `read` is called
    /// again, for the one that is the latest then.
    ///
    /// # Errors
    /// As [`steps`](Self::steps), and the errors of `read`.
    pub fn with_latest<T>(
        &self,
        mut read: impl FnMut(&str, &RemoteFolder) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut latest = self.latest()?;
        while let Some(name) = &latest {
            let error = match read(name, &self.folder(name)) {
                Ok(value) => return Ok(Some(value)),
                Err(error) => error,
            };
            let is_gone = matches!(
                &error,
                JobError::Data(DataError::Store { source: StoreFailure::NotFound { .. }, .. })
            );
            let next = if is_gone { self.latest()? } else { latest.clone() };
            if next == latest {
                return Err(error);
            }
            latest = next;
        }
        Ok(None)
    }

    /// Writes a complete checkpoint that is in the local folder `from`, which is `allowed` again before its last file.
    ///
    /// # Errors
    /// As [`steps`](Self::steps), a file that cannot be read, or the error of `allowed`. The checkpoint is not complete then.
    pub fn upload(
        &self,
        name: &str,
        from: &Path,
        allowed: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let reading = |source| JobError::file("reading", from, source);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(from).map_err(reading)? {
            files.push(entry.map_err(reading)?.file_name().to_string_lossy().into_owned());
        }
        files.retain(|file| file != TRAINER_FILE);
        files.sort();
        let folder = self.folder(name);
        for file in files {
            folder.put_file(&file, &from.join(&file))?;
        }
        // The file that makes a checkpoint complete comes last.
        allowed()?;
        Ok(folder.put_file(TRAINER_FILE, &from.join(TRAINER_FILE))?)
    }

    /// Removes a checkpoint, or the files of it that are there.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn remove(&self, name: &str) -> Result<()> {
        let folder = self.folder(name);
        // The file that makes a checkpoint complete goes first.
        folder.delete(TRAINER_FILE)?;
        for entry in folder.list()? {
            folder.delete(&entry.name)?;
        }
        Ok(())
    }

    /// The names of all checkpoints with at least one object, complete or not.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn folders(&self) -> Result<Vec<String>> {
        let mut names = self.folder.list_folders()?;
        names.retain(|name| step_of(name).is_some());
        Ok(names)
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
        // Checkpoints that were copied there from a local folder have no token in their names.
        for name in ["step-00000005", "step-00000100-ab", "step-00000020-00", "step-00000007-ab"] {
            checkpoints.upload(name, complete.path(), || Ok(())).unwrap();
        }
        for name in ["step-00000003-ab", "step-00000200-ab"] {
            let not_allowed = || Err(JobError::RunFolderTaken { path: "elsewhere".into() });
            checkpoints.upload(name, complete.path(), not_allowed).unwrap_err();
            assert_eq!(checkpoints.folder(name).list().unwrap().len(), 2);
        }
        run.put("checkpoints/notes/mine.txt", b"mine"[..].to_vec().into()).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [5, 7, 20, 100]);
        assert_eq!(checkpoints.latest().unwrap().as_deref(), Some("step-00000100-ab"));
        let read = checkpoints.folder("step-00000020-00").get("zz.json").unwrap();
        assert_eq!(&read[..], b"zz.json");
        assert_eq!(checkpoints.folders().unwrap().len(), 6);

        checkpoints.remove("step-00000007-ab").unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [5, 20, 100]);
    }

    #[test]
    fn where_a_record_is_only_the_complete_checkpoints_that_it_names_count() {
        let run = run("that-it-names");
        let checkpoints = RemoteCheckpoints::of_run(&run);
        let complete = local(&[TRAINER_FILE]);
        let names = ["step-00000002-ab", "step-00000004-ab", "step-00000006-cd"];
        for name in names {
            checkpoints.upload(name, complete.path(), || Ok(())).unwrap();
        }
        let of = |names: &[&str]| RunRecord {
            run: "ab".to_owned(),
            ended: true,
            checkpoints: names.iter().map(|&name| name.to_owned()).collect(),
        };
        let put = |bytes: Vec<u8>| run.put(RUN_FILE, bytes.into()).unwrap();
        put(of(&names[..2]).to_bytes());
        assert_eq!(checkpoints.steps().unwrap(), [2, 4]);
        // One that is removed by hand takes the run back to the one before.
        checkpoints.remove(names[1]).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [2]);
        for wrong in [&b"{}"[..], &of(&["../other"]).to_bytes()] {
            put(wrong.to_vec());
            let said = checkpoints.steps().unwrap_err().to_string();
            assert!(said.contains("memory://that-it-names/a%20run/run.json: expected"), "{said}");
        }
    }

    #[test]
    fn files_of_many_parts_come_back_and_one_that_is_removed_is_looked_for_again() {
        let run = run("many-parts");
        let checkpoints = RemoteCheckpoints::of_run(&run);
        let folder = local(&[TRAINER_FILE]);
        let bytes: Vec<u8> = (0..(17 << 20) + 5_u32).map(|at| (at / 7) as u8).collect();
        std::fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
        let names = ["step-00000003-ab", "step-00000004-ab"];
        for name in names {
            checkpoints.upload(name, folder.path(), || Ok(())).unwrap();
        }
        let mut seen = Vec::new();
        let read = checkpoints.with_latest(|name, folder| {
            seen.push(name.to_owned());
            if name == names[1] {
                checkpoints.remove(name).unwrap();
            }
            Ok(folder.get("model.safetensors")?)
        });
        assert!(read.unwrap().unwrap() == bytes);
        assert_eq!(seen, [names[1], names[0]]);
        let missing = checkpoints.with_latest(|_, folder| Ok(folder.get("nothing")?));
        assert!(missing.unwrap_err().to_string().contains("step-00000003-ab/nothing"));
    }
}
