//! `trainer.json`: the place of a run at a checkpoint, and everything that may not change when it goes on.
//!
//! The bytes depend only on the state: keys are sorted, there is no time, host or world size.
//! The file carries the checksums of its neighbours, and one of itself.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tidemill_files::Kind;
use tidemill_kernels::DeviceKind;
use tidemill_streaming_data::order::cursor::Cursor;
use xxhash_rust::xxh3::xxh3_128;

use super::folder::step_of;
use crate::cluster::progress;
use crate::error::{JobError, Result};

/// The file's name in a checkpoint.
pub const TRAINER_FILE: &str = "trainer.json";

/// Raised when older readers could misread a checkpoint.
const FORMAT_VERSION: u32 = 1;

/// The version of files of a run that has moved to another version of its data: a reader that ignores moves would continue with
/// wrong samples.
const FORMAT_VERSION_WITH_MOVES: u32 = 2;

/// Everything of a run that is neither a parameter nor optimizer state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// The version of this format.
    pub format_version: u32,
    /// Updates done.
    pub step: u64,
    /// Counted tokens so far.
    pub tokens: u64,
    /// Where the stream of samples is, and which stream it is.
    pub cursor: Cursor,
    /// The settings that are numerics, by the key that the user writes (`batch.lanes` ...).
    pub settings: BTreeMap<String, Value>,
    /// The kind of device that computed this state.
    pub device: BTreeMap<String, Value>,
    /// `xxh3-128:...` of every other file of the checkpoint.
    pub checksums: BTreeMap<String, String>,
}

/// The kind of device as `trainer.json` and the handshake between peers hold it.
pub fn device_keys(kind: &DeviceKind) -> BTreeMap<String, Value> {
    let DeviceKind { backend, architecture, numerics_version, matrix_library } = kind;
    [
        ("backend", Value::from(backend.as_str())),
        ("architecture", Value::from(architecture.as_str())),
        ("numerics_version", Value::from(*numerics_version)),
        ("matrix_library", Value::from(matrix_library.as_str())),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

/// `xxh3-128:` and 32 hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    format_checksum(xxh3_128(bytes))
}

/// [`checksum`] of bytes that come in pieces.
#[derive(Default)]
pub(super) struct Checksum(xxhash_rust::xxh3::Xxh3Default);

impl Checksum {
    pub(super) fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    pub(super) fn digest(&self) -> String {
        format_checksum(self.0.digest128())
    }
}

/// [`checksum`] of a file, read in pieces.
///
/// # Errors
/// A file that cannot be read.
pub fn checksum_file(path: &Path) -> Result<String> {
    let file =
        tidemill_files::open(path).map_err(|source| JobError::file("reading", path, source))?;
    // A thread that reads a large file does not stand still.
    checksum_of(file, path, || {
        progress::moved();
        Ok(())
    })
}

/// [`checksum`] of the bytes that are left to read; `moved` is called before each piece, and may end it. Errors name `path`.
pub(super) fn checksum_of<E: From<JobError>>(
    mut file: impl Read,
    path: &Path,
    moved: impl Fn() -> std::result::Result<(), E>,
) -> std::result::Result<String, E> {
    let mut checksum = Checksum::default();
    let mut piece = vec![0; 1 << 20];
    loop {
        moved()?;
        match file.read(&mut piece).map_err(|source| JobError::file("reading", path, source))? {
            0 => return Ok(checksum.digest()),
            bytes => checksum.update(&piece[..bytes]),
        }
    }
}

/// Compares the checksum of `file`.
///
/// # Errors
/// [`JobError::Checkpoint`] where it is another than `expected`.
pub(super) fn compare(file: &Path, expected: &str, found: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let what = format!("damaged: checksum {expected} expected, {found} found");
    Err(JobError::checkpoint(file, what))
}

fn format_checksum(hash: u128) -> String {
    format!("xxh3-128:{hash:032x}")
}

impl TrainerState {
    /// A state without checksums yet.
    pub fn new(step: u64, tokens: u64, cursor: Cursor) -> Self {
        Self {
            format_version: format_version_for(&cursor),
            step,
            tokens,
            cursor,
            settings: BTreeMap::new(),
            device: BTreeMap::new(),
            checksums: BTreeMap::new(),
        }
    }

    /// Says where the stream of samples is.
    pub fn set_cursor(&mut self, cursor: Cursor) {
        (self.format_version, self.cursor) = (format_version_for(&cursor), cursor);
    }

    /// The file's bytes: sorted keys, and last a checksum of the bytes before it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut value = serde_json::to_value(self).expect("a state holds only JSON");
        let sealed = checksum(value.to_string().as_bytes());
        let object = value.as_object_mut().expect("a struct is an object");
        object.insert("checksum".to_owned(), Value::from(sealed));
        let mut bytes = serde_json::to_vec_pretty(&value).expect("a value is JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Reads and verifies the file of the checkpoint `dir`.
    ///
    /// # Errors
    /// A missing or damaged file, or one of a later version.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(TRAINER_FILE);
        let bytes = tidemill_files::read(&path, Kind::TrainerState)
            .map_err(|source| JobError::file("reading", &path, source))?;
        let state = Self::from_bytes(&bytes, &path)?;
        let named = dir.file_name().and_then(|name| name.to_str()).and_then(step_of);
        match named {
            Some(step) if step != state.step => {
                let what = format!("it is of step {}, but its folder of step {step}", state.step);
                Err(JobError::checkpoint(&path, what))
            }
            _ => Ok(state),
        }
    }

    /// Verifies bytes of [`to_bytes`](Self::to_bytes); errors name `path`.
    ///
    /// # Errors
    /// Damaged bytes, or bytes of a later version.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self> {
        let damaged = |what: String| JobError::checkpoint(path, what);
        let mut value: Value = serde_json::from_slice(bytes)
            .map_err(|error| damaged(format!("expected the state of a run: {error}")))?;
        let object = value
            .as_object_mut()
            .ok_or_else(|| damaged("expected a JSON object, found another value".to_owned()))?;
        let version = object.get("format_version").and_then(Value::as_u64);
        if ![FORMAT_VERSION, FORMAT_VERSION_WITH_MOVES].map(|it| Some(it.into())).contains(&version)
        {
            let found = version.map_or("none".to_owned(), |version| version.to_string());
            return Err(damaged(format!(
                "expected format version {FORMAT_VERSION} or {FORMAT_VERSION_WITH_MOVES}, found {found}"
            )));
        }
        let sealed = object.remove("checksum").and_then(|seal| seal.as_str().map(str::to_owned));
        let found = checksum(value.to_string().as_bytes());
        if sealed.as_deref() != Some(found.as_str()) {
            let expected = sealed.unwrap_or_else(|| "none".to_owned());
            return Err(damaged(format!("damaged: checksum {expected}, but {found} found")));
        }
        let state: Self = serde_json::from_value(value)
            .map_err(|error| damaged(format!("expected the state of a run: {error}")))?;
        // A name with a folder in it could name any file of the machine.
        let is_beside = |name: &str| {
            let mut parts = Path::new(name).components();
            matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        };
        if let Some(name) = state.checksums.keys().find(|name| !is_beside(name)) {
            let expected = "expected checksums of files beside it";
            return Err(damaged(format!("{expected}, found one of {name:?}")));
        }
        if state.to_bytes() != bytes {
            return Err(damaged("damaged: not the bytes that were written".to_owned()));
        }
        Ok(state)
    }
}

fn format_version_for(cursor: &Cursor) -> u32 {
    match cursor.moves.is_empty() {
        true => FORMAT_VERSION,
        false => FORMAT_VERSION_WITH_MOVES,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tidemill_streaming_data::hash::ContentHash;
    use tidemill_streaming_data::order::cursor::StreamIdentity;
    use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};

    use super::*;

    /// A state of some stream.
    pub(crate) fn state(step: u64) -> TrainerState {
        let shuffle = ShuffleSettings {
            order: ShuffleOrder::Window,
            window_samples: ShuffleSettings::DEFAULT_WINDOW_SAMPLES,
            seed: 17,
        };
        let fingerprint = ContentHash::of(b"samples");
        let stream =
            StreamIdentity { fingerprint, samples: 100, seq_len: 8, shuffle, parts: Vec::new() };
        TrainerState::new(step, 10 * step, Cursor { position: 4 * step, ..Cursor::start(stream) })
    }

    #[test]
    fn a_checksum_of_a_file_elsewhere_is_refused_before_that_file_is_opened() {
        for name in ["../../../etc/passwd", "/dev/zero", "..", "a/b", ""] {
            let mut state = state(7);
            state.checksums.insert(name.into(), checksum(b""));
            let error = TrainerState::from_bytes(&state.to_bytes(), Path::new("t")).unwrap_err();
            let expected = "expected checksums of files beside it, found one of";
            assert!(error.to_string().contains(expected), "{name}: {error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_checkpoint_of_pipes_and_devices_is_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(TRAINER_FILE);
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        assert!(TrainerState::read(dir.path()).is_err());
        let zeros = dir.path().join("zeros");
        std::os::unix::fs::symlink("/dev/zero", &zeros).unwrap();
        for path in [&path, &zeros] {
            let error = checksum_file(path).unwrap_err();
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.ends_with("expected a regular file"), "{source}");
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = state(7);
        state.settings.insert("run.seed".into(), Value::from(17));
        state.settings.insert("optimizer.learning_rate".into(), Value::from(1e-3));
        state.checksums.insert("model.safetensors".into(), checksum(b"weights"));
        let bytes = state.to_bytes();
        let path = dir.path().join(TRAINER_FILE);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(TrainerState::read(dir.path()).unwrap(), state);
        for index in 0..bytes.len() {
            for bit in [0, 1, 4, 6] {
                let mut damaged = bytes.clone();
                damaged[index] ^= 1 << bit;
                std::fs::write(&path, &damaged).unwrap();
                assert!(TrainerState::read(dir.path()).is_err(), "byte {index}, bit {bit}");
            }
        }
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        assert!(TrainerState::read(dir.path()).is_err());
    }
}
