//! Local copies of checkpoints and models: those in a folder are read in place, those in a store are downloaded first.
//!
//! Files of a checkpoint are verified as they arrive. One that is damaged is fetched again, a few times; then an error
//! names it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use tidemill_files::scratch::ScratchFolder;
use tidemill_model::hugging_face::CONFIG_FILE;
use tidemill_streaming_data::DataSettings;
use tidemill_streaming_data::store::{Cancel, Location, RemoteFolder, StoreSettings};

use super::file_plan::is_of_optimizer;
use super::folder::{CHECKPOINTS_FOLDER, latest, step_of};
use super::remote::RemoteCheckpoints;
use super::trainer_state::{TRAINER_FILE, TrainerState, checksum_file, compare};
use crate::error::{JobError, Result};

/// How often a file that arrives damaged is fetched.
const ATTEMPTS: u32 = 3;

/// Which files are needed of a checkpoint or model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// `config.json`.
    Config,
    /// The files for generating and scoring: all files except the state of a run.
    Model,
    /// All that a checkpoint has.
    Checkpoint,
}

impl Wanted {
    /// Whether the file `name` of a checkpoint is wanted.
    pub(super) fn includes(self, name: &str) -> bool {
        match self {
            Self::Config => name == CONFIG_FILE,
            Self::Model => !is_of_optimizer(name),
            Self::Checkpoint => true,
        }
    }
}

/// The folder of a checkpoint or model on this machine. A copy is removed when this is dropped; files that are open then
/// can still be read.
#[derive(Debug)]
pub struct LocalCopy {
    path: PathBuf,
    copied: Option<Copied>,
}

/// The source of a copy, and where the copy lies.
#[derive(Debug)]
struct Copied {
    url: PathBuf,
    _folder: ScratchFolder,
}

/// The folder for copies, in the folder of the cache.
const COPIES: &str = "copies";

/// The prefix of the names of copies.
const COPY_PREFIX: &str = "tidemill-copy-";

impl LocalCopy {
    /// The files of `folder`: where they are, or a copy in the folder of the cache (`tidemill/copies` in `XDG_CACHE_HOME`, or
    /// in `~/.cache`).
    ///
    /// # Errors
    /// A store that does not answer or refuses; a file that is missing, or damaged each time it is fetched.
    pub fn of(folder: &Path, wanted: Wanted) -> Result<Self> {
        Self::of_with(folder, wanted, &DataSettings::default(), Cancel::default())
    }

    /// As [`of`](Self::of), for a cache and a store as the settings say, until it is cancelled.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_with(
        folder: &Path,
        wanted: Wanted,
        settings: &DataSettings,
        cancel: Cancel,
    ) -> Result<Self> {
        let location = Location::of_path(folder)?;
        if let Some(path) = location.local() {
            return Ok(Self { path: path.to_owned(), copied: None });
        }
        let parent = settings.cache.folder(&location)?.join(COPIES);
        let folder = RemoteFolder::open(location, &settings.store)?.cancelled_by(cancel);
        Self::fetch(&folder, wanted, &parent)
    }

    /// A copy of `folder` in a new folder in `parent`.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn fetch(folder: &RemoteFolder, wanted: Wanted, parent: &Path) -> Result<Self> {
        let copied = std::fs::create_dir_all(parent)
            .and_then(|()| ScratchFolder::new_in(parent, OsStr::new(COPY_PREFIX)))
            .map_err(|source| JobError::file("creating a folder in", parent, source))?;
        let url = PathBuf::from(folder.location().to_string());
        match wanted {
            Wanted::Config => folder.get_file(CONFIG_FILE, &copied.path().join(CONFIG_FILE))?,
            Wanted::Model | Wanted::Checkpoint => fetch_files(folder, wanted, copied.path())?,
        }
        let path = copied.path().to_owned();
        Ok(Self { path, copied: Some(Copied { url, _folder: copied }) })
    }

    /// Reads the files with `read`; if they are a copy, errors name the source.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn read<T>(&self, read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        read(&self.path).map_err(|cause| match &self.copied {
            Some(copied) => JobError::Copied { url: copied.url.clone(), cause: Box::new(cause) },
            None => cause,
        })
    }

    /// Whether the files were fetched, and so verified.
    pub fn is_fetched(&self) -> bool {
        self.copied.is_some()
    }

    /// Where the files are.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Where the model of `path`, a folder or URL, is: in itself (a checkpoint, a Hugging Face folder), or in a run folder's
/// latest checkpoint.
///
/// # Errors
/// A folder that is none of these.
pub fn model_folder(path: &Path) -> Result<PathBuf> {
    let location = Location::of_path(path)?;
    let found = match location.local() {
        Some(path) if path.join(CONFIG_FILE).exists() => return Ok(path.to_owned()),
        Some(path) => latest(path)?.map(|entry| entry.path),
        None => {
            let folder = RemoteFolder::open(location.clone(), &StoreSettings::default())?;
            if folder.get_if_there(CONFIG_FILE)?.is_some() {
                return Ok(path.to_owned());
            }
            let checkpoints = RemoteCheckpoints::of_run(&folder);
            checkpoints.latest()?.map(|name| checkpoints.url(&name))
        }
    };
    found.ok_or_else(|| {
        let expected = "a checkpoint, a run folder that has one, or a folder with config.json";
        let is_folder = location.local().is_some_and(Path::is_dir);
        let found = if is_folder { "a folder without either" } else { "no such folder" };
        JobError::value(location.to_string(), expected, found)
    })
}

fn fetch_files(folder: &RemoteFolder, wanted: Wanted, into: &Path) -> Result<()> {
    match folder.get_if_there(TRAINER_FILE)? {
        Some(bytes) => fetch_checkpoint(folder, &bytes, wanted, into),
        None if wanted == Wanted::Checkpoint => {
            let path = path_of(folder, TRAINER_FILE);
            Err(JobError::checkpoint(&path, "expected the state of a run, found no such file"))
        }
        None => fetch_model(folder, into),
    }
}

/// A checkpoint of our own, whose checksums are known.
fn fetch_checkpoint(
    folder: &RemoteFolder,
    trainer: &[u8],
    wanted: Wanted,
    into: &Path,
) -> Result<()> {
    let path = path_of(folder, TRAINER_FILE);
    let mut read = TrainerState::from_bytes(trainer, &path).map(|state| (state, trainer.to_vec()));
    for _ in 1..ATTEMPTS {
        if read.is_ok() {
            break;
        }
        let again = folder.get(TRAINER_FILE)?.to_vec();
        read = TrainerState::from_bytes(&again, &path).map(|state| (state, again));
    }
    let (state, trainer) = read?;
    for (name, expected) in &state.checksums {
        if !wanted.includes(name) {
            continue;
        }
        fetch_verified(folder, name, expected, into)?;
    }
    let copy = into.join(TRAINER_FILE);
    std::fs::write(&copy, trainer).map_err(|source| JobError::file("writing", &copy, source))
}

fn fetch_verified(folder: &RemoteFolder, name: &str, expected: &str, into: &Path) -> Result<()> {
    let copy = into.join(name);
    let mut found = String::new();
    for _ in 0..ATTEMPTS {
        folder.get_file(name, &copy)?;
        found = checksum_file(&copy)?;
        if found == expected {
            break;
        }
    }
    compare(&path_of(folder, name), expected, &found)
}

/// A folder of another's, as Hugging Face lays it out.
fn fetch_model(folder: &RemoteFolder, into: &Path) -> Result<()> {
    let is_part = |name: &str| name.ends_with(".json") || name.ends_with(".safetensors");
    let url = PathBuf::from(folder.location().to_string());
    let entries = folder.list()?;
    let is_run = url.parent().is_some_and(|parent| parent.ends_with(CHECKPOINTS_FOLDER))
        && url.file_name().and_then(|name| name.to_str()).and_then(step_of).is_some();
    if is_run || entries.iter().any(|entry| is_of_optimizer(&entry.name)) {
        let what =
            format!("incomplete: expected {TRAINER_FILE}, which is written last, found none");
        return Err(JobError::checkpoint(&url, what));
    }
    if !entries.iter().any(|entry| entry.name.ends_with(".safetensors")) {
        return Err(JobError::checkpoint(&url, "expected files .safetensors, found none"));
    }
    for entry in entries.iter().filter(|entry| is_part(&entry.name)) {
        folder.get_file(&entry.name, &into.join(&entry.name))?;
    }
    Ok(())
}

/// The path by which errors name a file in a store.
fn path_of(folder: &RemoteFolder, name: &str) -> PathBuf {
    PathBuf::from(folder.location().join(name).to_string())
}
