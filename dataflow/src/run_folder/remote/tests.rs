//! Two runs of one run folder in a store, interleaved at every request.
//!
//! Seen red: with records and logs that are put without a condition, with checkpoints whose names hold no token, with
//! remains that are listed after the record is put, with checkpoints that are removed before, and with one that is removed
//! although the run that took the folder had found it in the record, and with a token that is put twice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tidemill_streaming_data::store::{Location, StoreSettings};

use super::*;
use crate::checkpoint::TRAINER_FILE;

#[path = "../../../../streaming-data/tests/support/interleaved.rs"]
mod interleaved;

use interleaved::{Change, folder, is_calm, now, seeds, two_writers};

/// For each fault that the test was seen to find, one of these seeds shows it.
const SEEDS: Range<u64> = 130..250;
const STEPS: u64 = 4;
const KEEP: usize = 2;
const MODEL_FILE: &str = "model.safetensors";

/// The files of a run in a folder of this machine, which the store gets.
struct Local(tempfile::TempDir);

impl Local {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A checkpoint whose files must stay together.
    fn checkpoint(&self, label: &str, step: u64) -> PathBuf {
        let folder = self.0.path().join(format!("checkpoint-{step}"));
        std::fs::create_dir_all(&folder).unwrap();
        for name in [MODEL_FILE, TRAINER_FILE] {
            std::fs::write(folder.join(name), format!("{label} at {step}")).unwrap();
        }
        std::fs::write(self.0.path().join(StepMetrics::FILE), format!("{label} at {step}"))
            .unwrap();
        folder
    }
}

/// As a run does: on from the latest checkpoint, with a checkpoint every step. How far it has come.
fn train(store: Arc<dyn ObjectStore>, label: &str, killed_before: Option<u64>) -> Result<u64> {
    let run = RemoteRun::new(folder(store, "run"));
    run.claim()?;
    let begin = run.checkpoints().steps()?.pop().unwrap_or(0);
    run.put("run.toml", label)?;
    let local = Local::new();
    for step in begin + 1..=STEPS {
        if Some(step) == killed_before {
            return Ok(step - 1);
        }
        run.publish(step, &local.checkpoint(label, step), KEEP, local.0.path())?;
    }
    run.finish(local.0.path())?;
    Ok(STEPS)
}

/// Every object of the run, by its path in the run folder.
fn objects(store: &InMemory) -> BTreeMap<String, String> {
    let listed: Vec<_> = now(futures_util::TryStreamExt::try_collect(store.list(None))).unwrap();
    let text = |path| {
        let bytes = now(async { store.get(path).await?.bytes().await }).unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    let paths = listed.iter().map(|object: &object_store::ObjectMeta| &object.location);
    paths.map(|path| (path.as_ref()["run/".len()..].to_owned(), text(path))).collect()
}

/// Breaches, told as they happen.
#[derive(Default)]
struct Witness {
    /// The writer that put each file of a checkpoint first.
    owners: BTreeMap<String, usize>,
    /// The writers in the order in which they claimed the folder, by the tokens of their runs.
    claims: Vec<(String, usize)>,
    /// Which of these claims each object was last put under that all runs put.
    put_under: BTreeMap<String, usize>,
    record: Option<RunRecord>,
    wrong: Vec<String>,
}

impl Witness {
    fn see(&mut self, writer: usize, change: &Change, store: &InMemory) {
        let (Change::Put(path, ..) | Change::Remove(path)) = change;
        let path = path.as_ref()["run/".len()..].to_owned();
        let objects = objects(store);
        let is_put = matches!(change, Change::Put(..));
        let current = self.record.as_ref().map_or("", |record| &record.run).to_owned();
        if path == RUN_FILE {
            match (is_put, objects.get(RUN_FILE)) {
                (true, Some(text)) => self.see_record(writer, text),
                _ => self.wrong.push(format!("{writer} removed the record")),
            }
        } else if is_put && path.starts_with("checkpoints/") {
            let owner = *self.owners.entry(path.clone()).or_insert(writer);
            if owner != writer {
                self.wrong.push(format!("{writer} and {owner} both put {path}"));
            }
        } else if is_put {
            // The text of an object says which run put it, by the label that only one has.
            let claims = self.claims.iter().rposition(|(_, by)| *by == writer).unwrap_or(0);
            let last = self.put_under.insert(path.clone(), claims).unwrap_or(0);
            if last > claims {
                self.wrong.push(format!("{writer} put {path} over that of a later run"));
            }
        } else if self.owners.get(&path) != Some(&writer) && path.contains(&current) {
            self.wrong.push(format!("{writer} removed {path} of the run that has the folder"));
        }
        for name in self.record.iter().flat_map(|record| &record.checkpoints) {
            let file = |file: &str| objects.get(&format!("checkpoints/{name}/{file}"));
            if file(TRAINER_FILE).is_none() || file(TRAINER_FILE) != file(MODEL_FILE) {
                self.wrong.push(format!("{name} counts and is not whole"));
            }
        }
    }

    fn see_record(&mut self, writer: usize, text: &str) {
        let record: RunRecord = serde_json::from_str(text).unwrap();
        match self.claims.last() {
            Some((run, by)) if *run == record.run => {
                if *by != writer {
                    self.wrong.push(format!("{writer} put the record of {by}"));
                }
            }
            _ if self.claims.iter().any(|(run, _)| *run == record.run) => {
                self.wrong.push(format!("{writer} put a record after it was overtaken"));
            }
            _ => self.claims.push((record.run.clone(), writer)),
        }
        let latest = |record: &RunRecord| record.checkpoints.last().and_then(|it| step_of(it));
        if self.record.as_ref().is_some_and(|before| latest(before) > latest(&record)) {
            self.wrong.push(format!("{writer} lost the latest checkpoint"));
        }
        self.record = Some(record);
    }
}

#[test]
fn two_runs_of_a_folder_never_damage_or_lose_a_checkpoint_that_counts() {
    let (mut taken, mut stores) = (0, 0);
    for seed in seeds(SEEDS) {
        // One that was overtaken leaves it so; any other is started again.
        let (results, store, witness) = two_writers(seed, 3, Witness::see, |store, attempt| {
            let killed_before = attempt.killed.map(|at| 1 + at % STEPS);
            match train(store, &attempt.label(), killed_before) {
                Ok(STEPS) => ControlFlow::Break(Ok(STEPS)),
                Err(error @ JobError::RunFolderTaken { .. }) => ControlFlow::Break(Err(error)),
                result => ControlFlow::Continue(result),
            }
        });
        let objects = objects(&store);
        assert_eq!(witness.wrong, Vec::<String>::new(), "seed {seed}: {results:?}");
        let attempts = || results.iter().flatten();
        for error in attempts().filter_map(|result| result.as_ref().err()) {
            let said = error.to_string();
            match error {
                JobError::RunFolderTaken { .. } => {
                    taken += 1;
                    assert_eq!(
                        said,
                        "memory://store/run was taken over by a run that started later"
                    );
                }
                error => {
                    stores += 1;
                    let is_of_store = matches!(error, JobError::Data(_)) && !is_calm(seed);
                    assert!(is_of_store, "seed {seed}: {said}");
                }
            }
        }
        let is_done = attempts().any(|result| matches!(result, Ok(STEPS)));
        let Some(record) = witness.record else {
            assert!(!is_done, "seed {seed}: {results:?}");
            continue;
        };
        assert!(!is_done || record.checkpoints.len() == KEEP, "seed {seed}: {record:?}");
        if is_calm(seed) {
            assert!(is_done && record.ended, "seed {seed}: {results:?}");
            let folders: BTreeSet<&str> = (objects.keys())
                .filter_map(|path| path.strip_prefix("checkpoints/")?.split('/').next())
                .collect();
            let named: BTreeSet<&str> = record.checkpoints.iter().map(String::as_str).collect();
            assert_eq!(folders, named, "seed {seed}: {results:?}");
        }
    }
    assert!(taken > 30 && stores > 30, "{taken} were taken, {stores} ended by the store");
}
