//! The hold on a folder of this machine: a lock on a file in it, which the kernel releases with the process.
//!
//! The file stays when the hold ends: it says which process held it last. A copy of the folder has a file of its own, which
//! no process holds; other names of the folder lead to the same file. A hold is of the file, so it is lost with the name:
//! [`Hold::check`] says whether the folder is still where it was.
//!
//! The line below the holder is a token that is new each time. A process that finds the token of another in the file that it
//! reads itself has the same folder before it, wherever that is mounted: see [`shows`].

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidemill_files::durable;
use tidemill_files::lock::{Attempt, Lock};
use tidemill_streaming_data::store::new_token;

use crate::error::{JobError, Result};

/// The name of the file that is locked.
pub const LOCK_FILE: &str = "run.lock";

/// How long the hold of another is waited for. The processes of a run that was killed let go when the last of them is gone,
/// for which those on GPUs take some seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Nothing is said of a wait that is over sooner.
const SILENCE: Duration = Duration::from_millis(500);

/// How often the lock is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest name of a holder that is read.
const LONGEST_NAME_BYTES: u64 = 300;

/// A folder that this process holds.
#[derive(Debug)]
pub(super) struct Hold {
    folder: PathBuf,
    lock: Lock,
    token: String,
}

impl Hold {
    /// Creates `folder` where it is missing and takes hold of it, as soon as another lets go but no later than `patience`.
    /// `shown` is the folder's name in errors.
    ///
    /// # Errors
    /// A folder or file that cannot be made or locked, or [`JobError::RunFolderInUse`].
    pub(super) fn take(folder: &Path, shown: &Path, patience: Duration) -> Result<Self> {
        let path = folder.join(LOCK_FILE);
        let since = Instant::now();
        let mut told = false;
        loop {
            durable::make_folders(folder)
                .map_err(|source| JobError::file("creating", folder, source))?;
            let attempt =
                Lock::attempt(&path).map_err(|source| JobError::file("locking", &path, source))?;
            let mut lock = match attempt {
                Attempt::Taken(lock) => {
                    let token = new_token();
                    sign(lock.file(), &token)
                        .map_err(|source| JobError::file("writing", &path, source))?;
                    return Ok(Self { folder: folder.to_owned(), lock, token });
                }
                // The folder went between being opened and being locked.
                Attempt::Gone => continue,
                Attempt::Held(lock) => lock,
            };
            if since.elapsed() >= patience {
                let holder = holder(&mut lock);
                return Err(JobError::RunFolderInUse { path: shown.to_owned(), holder });
            }
            if !told && since.elapsed() > SILENCE {
                told = true;
                let (holder, shown) = (holder(&mut lock), shown.display());
                tracing::warn!("waiting for {shown}, which is in use by {holder}");
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The token of this hold, which no other hold has.
    pub(super) fn token(&self) -> &str {
        &self.token
    }

    /// Says so where the folder is no longer the one that is held: it was removed or renamed, and another may be in its place.
    ///
    /// # Errors
    /// [`JobError::RunFolderGone`], or a folder that cannot be looked at.
    pub(super) fn check(&self) -> Result<()> {
        match self.lock.is_in_place() {
            Ok(true) => Ok(()),
            Ok(false) => Err(JobError::RunFolderGone { path: self.folder.clone() }),
            Err(source) => Err(JobError::file("looking at", self.lock.path(), source)),
        }
    }
}

/// Whether `folder` is the one that is held under `token`, by whichever process.
pub(super) fn shows(folder: &Path, token: &str) -> bool {
    let mut text = String::new();
    let read = tidemill_files::open(&folder.join(LOCK_FILE))
        .and_then(|file| file.take(LONGEST_NAME_BYTES).read_to_string(&mut text));
    read.is_ok() && text.lines().nth(1) == Some(token)
}

/// Writes down the holder.
fn sign(mut lock: &File, token: &str) -> std::io::Result<()> {
    let name = format!("process {} on {}", std::process::id(), host());
    lock.set_len(0)?;
    lock.rewind()?;
    lock.write_all(format!("{name}\n{token}\n").as_bytes())?;
    // Another machine is shown the server's content.
    lock.sync_data()
}

/// The holder of a lock, as it wrote down.
fn holder(lock: &mut File) -> String {
    let mut name = String::new();
    let read = lock.rewind().and_then(|()| lock.take(LONGEST_NAME_BYTES).read_to_string(&mut name));
    let name = name.lines().next().unwrap_or_default().trim();
    match read {
        Ok(_) if !name.is_empty() && !name.contains(char::is_control) => name.to_owned(),
        _ => "an unknown process".to_owned(),
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "an unknown host".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Classified, ExitClass};

    fn take(folder: &Path) -> Result<Hold> {
        Hold::take(folder, folder, Duration::ZERO)
    }

    fn assert_in_use(folder: &Path) {
        let error = take(folder).unwrap_err();
        assert!(matches!(error, JobError::RunFolderInUse { .. }), "{error}");
        assert_eq!(error.exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn a_hold_that_ends_soon_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let dying = take(dir.path()).unwrap();
        let (waiting, other_waits) = std::sync::mpsc::channel();
        let path = dir.path().to_owned();
        let next = std::thread::spawn(move || {
            waiting.send(()).unwrap();
            Hold::take(&path, &path, Duration::from_secs(60))
        });
        other_waits.recv().unwrap();
        assert_in_use(dir.path());
        drop(dying);
        next.join().unwrap().unwrap().check().unwrap();
    }

    #[test]
    fn another_name_of_a_folder_is_the_same_folder_and_a_copy_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let (run, link, copy) =
            (dir.path().join("run"), dir.path().join("link"), dir.path().join("copy"));
        let hold = take(&run).unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        assert_in_use(&link);
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(run.join(LOCK_FILE), copy.join(LOCK_FILE)).unwrap();
        let of_copy = take(&copy).unwrap();
        drop(hold);
        take(&link).unwrap().check().unwrap();
        of_copy.check().unwrap();
    }

    #[test]
    fn a_folder_that_is_renamed_or_removed_is_no_longer_held() {
        let dir = tempfile::tempdir().unwrap();
        let (run, moved) = (dir.path().join("run"), dir.path().join("moved"));
        let gone = |hold: &Hold| {
            let error = hold.check().unwrap_err();
            assert!(matches!(error, JobError::RunFolderGone { .. }), "{error}");
            assert_eq!(error.exit_class(), ExitClass::Restart);
        };
        let first = take(&run).unwrap();
        first.check().unwrap();
        std::fs::rename(&run, &moved).unwrap();
        gone(&first);
        // Another run can take the old name, while the first still holds the folder that was moved.
        let second = take(&run).unwrap();
        second.check().unwrap();
        gone(&first);
        assert_in_use(&moved);
        std::fs::remove_file(run.join(LOCK_FILE)).unwrap();
        gone(&second);
        let third = take(&run).unwrap();
        std::fs::remove_dir_all(&run).unwrap();
        gone(&third);
        std::fs::write(&run, "a file").unwrap();
        gone(&third);
    }

    #[test]
    fn a_folder_shows_the_token_of_the_hold_that_it_is_in() {
        let dir = tempfile::tempdir().unwrap();
        let (run, link, copy) =
            (dir.path().join("run"), dir.path().join("link"), dir.path().join("copy"));
        let earlier = take(&run).unwrap().token().to_owned();
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(run.join(LOCK_FILE), copy.join(LOCK_FILE)).unwrap();
        let hold = take(&run).unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        assert!(shows(&run, hold.token()) && shows(&link, hold.token()));
        assert!(!shows(&run, &earlier) && !shows(&copy, hold.token()));
        assert!(!shows(&dir.path().join("missing"), hold.token()) && !shows(&run, ""));
    }

    #[test]
    fn a_holder_that_says_nothing_sensible_is_unknown() {
        let dir = tempfile::tempdir().unwrap();
        for (said, told) in [
            ("process 7 on node-1\n", "process 7 on node-1"),
            ("", "an unknown process"),
            ("process \u{1b}[31m7", "an unknown process"),
        ] {
            let hold = take(dir.path()).unwrap();
            std::fs::write(dir.path().join(LOCK_FILE), said).unwrap();
            let error = take(dir.path()).unwrap_err().to_string();
            assert!(error.ends_with(&format!("in use by another run ({told})")), "{error}");
            drop(hold);
        }
    }
}
