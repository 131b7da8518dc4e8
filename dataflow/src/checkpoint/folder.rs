//! The folder of a run's checkpoints: which there are, which is the latest, which are removed.
//!
//! A name that begins with a dot is never a checkpoint: one being written, or one being removed. Such
//! remains of a killed run are swept when the next run opens the folder.

use std::path::{Path, PathBuf};

use crate::error::{JobError, Result};

/// The name of the folder inside a run folder.
pub const CHECKPOINTS_FOLDER: &str = "checkpoints";

/// A complete checkpoint: updates done, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// Updates done.
    pub step: u64,
    /// The folder.
    pub path: PathBuf,
}

/// `step-00000100`.
pub fn checkpoint_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// `step-00000100-0123456789abcdef`: a checkpoint's name in a store, with the token of the run that wrote it.
pub fn checkpoint_name_of(step: u64, token: &str) -> String {
    format!("{}-{token}", checkpoint_name(step))
}

/// The step of a checkpoint's name, with or without a token; none for any other name.
pub fn step_of(name: &str) -> Option<u64> {
    let name = name.strip_prefix("step-")?;
    let (step, token) = name.split_once('-').unwrap_or((name, "0"));
    let is_token = !token.is_empty() && token.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_token.then(|| step.parse().ok())?
}

/// `checkpoints/step-00000100` in `run_folder`.
pub fn checkpoint_path(run_folder: &Path, step: u64) -> PathBuf {
    run_folder.join(CHECKPOINTS_FOLDER).join(checkpoint_name(step))
}

/// Where the checkpoint of `step` is written before it is complete.
pub fn partial_path(run_folder: &Path, step: u64) -> PathBuf {
    run_folder.join(CHECKPOINTS_FOLDER).join(format!(".step-{step:08}.partial"))
}

/// The checkpoints of a run, oldest first; none where there is no folder.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(run_folder: &Path) -> Result<Vec<CheckpointEntry>> {
    let folder = run_folder.join(CHECKPOINTS_FOLDER);
    let mut entries = Vec::new();
    for path in children(&folder)? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if let Some(step) = step_of(name) {
            entries.push(CheckpointEntry { step, path });
        }
    }
    entries.sort_by_key(|entry| entry.step);
    Ok(entries)
}

/// The checkpoint with the most updates.
///
/// # Errors
/// A folder that cannot be read.
pub fn latest(run_folder: &Path) -> Result<Option<CheckpointEntry>> {
    Ok(list(run_folder)?.pop())
}

/// Removes files that a killed run left half written or half removed.
///
/// # Errors
/// Remains that cannot be removed.
pub fn sweep(run_folder: &Path) -> Result<()> {
    for path in children(&run_folder.join(CHECKPOINTS_FOLDER))? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if name.starts_with(".step-") {
            std::fs::remove_dir_all(&path)
                .map_err(|source| JobError::file("removing", &path, source))?;
        }
    }
    Ok(())
}

/// Removes all but the newest `keep` checkpoints. Each is renamed first, so that it is complete or
/// absent at every moment.
///
/// # Errors
/// A checkpoint that cannot be removed.
pub fn retain(run_folder: &Path, keep: usize) -> Result<()> {
    let mut entries = list(run_folder)?;
    entries.truncate(entries.len().saturating_sub(keep));
    for CheckpointEntry { step, path } in entries {
        let aside = run_folder.join(CHECKPOINTS_FOLDER).join(format!(".step-{step:08}.removed"));
        std::fs::rename(&path, &aside)
            .and_then(|()| std::fs::remove_dir_all(&aside))
            .map_err(|source| JobError::file("removing", &path, source))?;
    }
    Ok(())
}

fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| JobError::file("reading", folder, source);
    let listing = match std::fs::read_dir(folder) {
        Ok(listing) => listing,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(failed(source)),
    };
    let mut paths = Vec::new();
    for entry in listing {
        paths.push(entry.map_err(failed)?.path());
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_is_by_number_and_remains_are_not_checkpoints() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(latest(run.path()).unwrap(), None);
        for step in [5, 100, 20] {
            std::fs::create_dir_all(checkpoint_path(run.path(), step)).unwrap();
        }
        std::fs::create_dir_all(partial_path(run.path(), 120)).unwrap();
        std::fs::create_dir_all(run.path().join(CHECKPOINTS_FOLDER).join("notes")).unwrap();
        assert_eq!(latest(run.path()).unwrap().unwrap().step, 100);
        sweep(run.path()).unwrap();
        assert!(!partial_path(run.path(), 120).exists());
        retain(run.path(), 2).unwrap();
        let steps: Vec<u64> = list(run.path()).unwrap().iter().map(|entry| entry.step).collect();
        assert_eq!(steps, [20, 100]);
        assert!(run.path().join(CHECKPOINTS_FOLDER).join("notes").exists());
    }
}
