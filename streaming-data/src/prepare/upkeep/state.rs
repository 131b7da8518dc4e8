//! The stored state of a data set, and the version that an update begins with.
//!
//! A version is what one `index.json` says. It names its state, a JSON file that lists the parts; every
//! file is named by the hash of its content, so that versions share what they have in common, and what
//! is written for one never changes what another has.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use parquet::file::properties::DEFAULT_CREATED_BY;
use serde::{Deserialize, Serialize};
use tidemill_files::{Kind, read};

use super::{
    copies::Copies,
    cut::CUT,
    part::{Part, STATE_VERSION, check_version},
    record::{Record, RecordReader},
    seen::{SEEN_FILE, Seen},
    stored_settings::StoredSettings,
};
use crate::{
    DataSet,
    data_set::{
        DataSettings,
        index::{INDEX_FILE, Index, STATE_FOLDER, ShardEntry, StateEntry, version_file},
    },
    error::DataError,
    hash::ContentHash,
    prepare::{
        DataReport, PrepareError, Tokenize,
        choose::{duplicates::SIGNATURES, filter::SPLITTER},
        data_report::report_files,
        output::shard::ZSTD_LEVEL,
    },
    store::{Found, RemoteFolder},
};

/// The end of the name of the JSON file.
pub(crate) const STATE_SUFFIX: &str = "json";

/// The content of the JSON file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub format_version: u64,
    pub methods: Methods,
    /// [`tokenizer_identity`].
    pub tokenizer: ContentHash,
    pub settings: StoredSettings,
    /// In the order of the stream.
    pub parts: Vec<PartEntry>,
}

/// The methods, apart from the settings, by which the state and the shards were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Methods {
    /// How words are found, by which filters judge.
    pub words: String,
    pub signatures: String,
    pub cut: String,
    /// The encoder of shards: another version may give other bytes for the same rows.
    pub encoder: String,
}

/// A part of the state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartEntry {
    pub file: String,
    pub bytes: u64,
    pub hash: ContentHash,
}

impl Methods {
    /// The methods of this program.
    pub(crate) fn own() -> Methods {
        let zstd = zstd::zstd_safe::version_string();
        Methods {
            words: SPLITTER.to_owned(),
            signatures: SIGNATURES.to_owned(),
            cut: CUT.to_owned(),
            encoder: format!("{DEFAULT_CREATED_BY}, zstd {zstd}, level {ZSTD_LEVEL}"),
        }
    }
}

impl Methods {
    /// Whether they give the same results for a document as this program's methods.
    pub(crate) fn agree_on_documents(&self) -> bool {
        let own = Methods::own();
        self.words == own.words && self.signatures == own.signatures
    }
}

impl State {
    /// The state of a data set which is written now.
    pub(crate) fn new(
        settings: StoredSettings,
        tokenizer: ContentHash,
        parts: Vec<PartEntry>,
    ) -> State {
        State { format_version: STATE_VERSION, methods: Methods::own(), tokenizer, settings, parts }
    }

    /// Its bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a state has only JSON values");
        bytes.push(b'\n');
        bytes
    }

    /// The index's entry for a state of these bytes: the file's name and the hash.
    pub(crate) fn entry(bytes: &[u8]) -> StateEntry {
        let hash = ContentHash::of(bytes);
        StateEntry { file: state_file(hash, STATE_SUFFIX), hash }
    }

    /// The state that an index names; `path` is what errors name.
    pub(crate) fn parse(bytes: &[u8], index: &Index, path: &Path) -> Result<State, PrepareError> {
        let expected = index.state.as_ref().map(|state| state.hash);
        // The version first: a newer format may differ in all else.
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
        }
        let damaged = |found: String, expected: String| PrepareError::StateDamaged {
            path: path.to_owned(),
            found,
            expected,
        };
        let syntax = |error: serde_json::Error| damaged(error.to_string(), "JSON".to_owned());
        let Version { format_version } = serde_json::from_slice(bytes).map_err(syntax)?;
        check_version(format_version, path)?;
        let found = ContentHash::of(bytes);
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            return Err(damaged(format!("hash {found}"), format!("{expected} as the index says")));
        }
        let state: State = serde_json::from_slice(bytes).map_err(syntax)?;
        // The tokens at the end may fill no row, and are in no shard then.
        let (parts, shards) = (state.parts.len(), index.shards.len());
        match parts == shards || parts == shards + 1 {
            true => Ok(state),
            false => Err(damaged(
                format!("{parts} parts"),
                format!("a part for each of {shards} shards"),
            )),
        }
    }
}

/// A file of the state with such content.
pub(crate) fn state_file(hash: ContentHash, suffix: &str) -> String {
    format!("{STATE_FOLDER}/{}.{suffix}", hash.digits())
}

/// Identity of a tokenizer: the hash of its file, its vocabulary size and the token that ends documents.
pub(crate) fn tokenizer_identity(tokenizer: &dyn Tokenize) -> ContentHash {
    let mut hasher = crate::hash::ContentHasher::new();
    hasher.update(&tokenizer.eos_token_id().to_le_bytes());
    hasher.update(&tokenizer.vocab_size().to_le_bytes());
    hasher.update(tokenizer.tokenizer_json().unwrap_or_default().as_bytes());
    hasher.finish()
}

/// A version of a data set, opened to be updated.
pub(crate) struct Version {
    pub index: Index,
    /// The index in a store, so that it is replaced only where it is still the same.
    pub found: Option<Found>,
    pub state: State,
    pub data_set: DataSet,
    place: Place,
}

/// Where the files of a version are.
enum Place {
    Folder(PathBuf),
    /// The parts of the state were copied to this machine.
    Store(RemoteFolder, Copies),
}

impl Version {
    /// Opens the newest version of a folder.
    ///
    /// # Errors
    /// The errors of opening the index or a shard, [`PrepareError::NotUpdatable`],
    /// [`PrepareError::StateVersion`], [`PrepareError::StateDamaged`].
    pub(crate) fn open_local(folder: &Path) -> Result<Version, PrepareError> {
        let data_set = DataSet::open(folder)?;
        let index = Index::read(folder)?;
        let entry = state_entry(&index, folder)?;
        let read_state = |name: &str| {
            let path = folder.join(name);
            read(&path, Kind::Index).map_err(|error| unreadable(&path, error))
        };
        let state = State::parse(&read_state(&entry.file)?, &index, &folder.join(&entry.file))?;
        let own = version_file(&index);
        check_index(&index, &read_state(&own)?, &folder.join(own))?;
        Ok(Version { index, found: None, state, data_set, place: Place::Folder(folder.to_owned()) })
    }

    /// Opens the newest version in a store. The parts of its state are copied to the folder for temporary files, where a
    /// kill leaves nothing of them.
    ///
    /// # Errors
    /// The errors of [`Version::open_local`] and of the store.
    pub(crate) fn open_remote(remote: &RemoteFolder) -> Result<Version, PrepareError> {
        let path_of = |name: &str| PathBuf::from(remote.location().join(name).to_string());
        let name: PathBuf = remote.location().to_string().into();
        let found = remote.find(INDEX_FILE)?;
        let found = found.ok_or_else(|| PrepareError::NotUpdatable { path: name.clone() })?;
        let index = Index::from_bytes(&found.content, &path_of(INDEX_FILE))?;
        let entry = state_entry(&index, &name)?;
        let state = State::parse(&remote.get(&entry.file)?, &index, &path_of(&entry.file))?;
        let own = version_file(&index);
        let content = remote.get_if_there(&own)?.ok_or_else(|| missing(&path_of(&own)))?;
        check_index(&index, &content, &path_of(&own))?;
        let settings = DataSettings { store: remote.settings().clone(), ..DataSettings::default() };
        let data_set = DataSet::of_folder(remote.clone(), &index, &settings)?;
        let mut copies = Copies::new()?;
        for part in &state.parts {
            copies.add(remote, &part.file)?;
        }
        let place = Place::Store(remote.clone(), copies);
        Ok(Version { index, found: Some(found), state, data_set, place })
    }

    /// The path or URL of a file in error messages.
    pub(crate) fn path_of(&self, file: &str) -> PathBuf {
        match &self.place {
            Place::Folder(folder) => folder.join(file),
            Place::Store(remote, _) => remote.location().join(file).to_string().into(),
        }
    }

    /// A part of the state.
    ///
    /// # Errors
    /// [`PrepareError::StateDamaged`], [`PrepareError::StateVersion`].
    pub(crate) fn part(&self, part: usize) -> Result<Part, PrepareError> {
        let PartEntry { file, hash, .. } = &self.state.parts[part];
        let path = self.path_of(file);
        let bytes = match &self.place {
            Place::Folder(_) => {
                read(&path, Kind::Other).map_err(|error| unreadable(&path, error))?
            }
            Place::Store(_, copies) => copies.read(part)?,
        };
        let found = ContentHash::of(&bytes);
        let part = Part::open(bytes, &path)?;
        match found == *hash {
            true => Ok(part),
            false => Err(PrepareError::StateDamaged {
                path,
                found: format!("hash {found}"),
                expected: format!("{hash} as the state says"),
            }),
        }
    }

    /// All bytes of a shard, compared with the hash in the index.
    ///
    /// # Errors
    /// The errors of reading it, and [`DataError::ShardHash`] for another file.
    pub(crate) fn read_shard(&self, shard: &ShardEntry) -> Result<Vec<u8>, PrepareError> {
        let path = self.path_of(&shard.file);
        let content = match &self.place {
            Place::Folder(_) => {
                read(&path, Kind::Other).map_err(PrepareError::io("read", &path))?
            }
            Place::Store(remote, _) => remote.get(&shard.file)?.into(),
        };
        let found = ContentHash::of(&content);
        match found == shard.hash {
            true => Ok(content),
            false => Err(DataError::ShardHash { path, expected: shard.hash, found }.into()),
        }
    }

    /// Names of all files of the version that are never replaced.
    pub(crate) fn files(&self) -> BTreeSet<String> {
        let parts = self.state.parts.iter().map(|part| &part.file);
        let shards = self.index.shards.iter().map(|shard| &shard.file);
        parts
            .chain(shards)
            .chain(self.index.state.iter().map(|state| &state.file))
            .cloned()
            .collect()
    }

    /// The looks of inputs when the version was made, or a later one.
    ///
    /// # Errors
    /// The errors of reading it.
    pub(crate) fn seen(&self) -> Result<Seen, PrepareError> {
        let name = format!("{STATE_FOLDER}/{SEEN_FILE}");
        let bytes = self.file_if_there(&name)?;
        Ok(bytes.map_or_else(Seen::default, |bytes| Seen::from_bytes(&bytes, &self.path_of(&name))))
    }

    /// The report on the version, where there is one.
    ///
    /// # Errors
    /// The errors of reading it.
    pub(crate) fn report(&self) -> Result<Option<DataReport>, PrepareError> {
        let [name, _] = report_files(self.index.fingerprint());
        let report = self.file_if_there(&name)?.and_then(|bytes| DataReport::from_bytes(&bytes));
        Ok(report.filter(|report| report.is_of(&self.index)))
    }

    /// Whether it has this state and these shards.
    pub(crate) fn is_of(&self, state: &StateEntry, shards: &[ShardEntry]) -> bool {
        self.index.state.as_ref() == Some(state) && self.index.shards == shards
    }

    fn file_if_there(&self, name: &str) -> Result<Option<Vec<u8>>, PrepareError> {
        let path = self.path_of(name);
        Ok(match &self.place {
            Place::Store(remote, _) => remote.get_if_there(name)?.map(Vec::from),
            Place::Folder(_) => match read(&path, Kind::Other) {
                Ok(bytes) => Some(bytes),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                Err(error) => return Err(PrepareError::io("read", &path)(error)),
            },
        })
    }

    /// All records in order.
    pub(crate) fn records(&self) -> Records<'_> {
        Records { version: self, next: 0, part: None, reader: RecordReader::default() }
    }
}

fn state_entry<'a>(index: &'a Index, path: &Path) -> Result<&'a StateEntry, PrepareError> {
    let none = || PrepareError::NotUpdatable { path: path.to_owned() };
    index.state.as_ref().ok_or_else(none)
}

/// Fails unless the newest index equals the version's own index, except for the state: parts of it that no hash covers, such
/// as the length of rows, go into the next version. The state has a hash of its own, and may be the state of another version
/// of the same shards, where a process that was killed left it.
fn check_index(newest: &Index, own: &[u8], path: &Path) -> Result<(), PrepareError> {
    let without_state = |index: &Index| Index { state: None, ..index.clone() };
    let own = Index::from_bytes(own, path)?;
    match without_state(&own) == without_state(newest) {
        true => Ok(()),
        false => Err(PrepareError::StateDamaged {
            path: path.to_owned(),
            found: "another index".to_owned(),
            expected: format!("what {INDEX_FILE} says"),
        }),
    }
}

fn unreadable(path: &Path, error: std::io::Error) -> PrepareError {
    match error.kind() {
        std::io::ErrorKind::NotFound => missing(path),
        _ => PrepareError::io("read", path)(error),
    }
}

fn missing(path: &Path) -> PrepareError {
    PrepareError::StateDamaged {
        path: path.to_owned(),
        found: "nothing".to_owned(),
        expected: "a file of the state".to_owned(),
    }
}

/// The records of a version, part after part.
pub(crate) struct Records<'a> {
    version: &'a Version,
    /// The part after the current one.
    next: usize,
    part: Option<(Part, usize)>,
    reader: RecordReader,
}

impl Records<'_> {
    /// The next record and its part; none at the end.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub(crate) fn next(&mut self) -> Result<Option<(usize, Record)>, PrepareError> {
        loop {
            if let Some((part, at)) = &mut self.part {
                let mut unread = &part.records()[*at..];
                let before = unread.len();
                let read = self.reader.read(&mut unread);
                *at += before - unread.len();
                match read {
                    Ok(Some(record)) => return Ok(Some((self.next - 1, record))),
                    Ok(None) => self.part = None,
                    Err(error) => {
                        let file = &self.version.state.parts[self.next - 1].file;
                        return Err(PrepareError::StateDamaged {
                            path: self.version.path_of(file),
                            found: error.to_string(),
                            expected: "records".to_owned(),
                        });
                    }
                }
            }
            if self.next == self.version.state.parts.len() {
                return Ok(None);
            }
            self.part = Some((self.version.part(self.next)?, 0));
            self.reader.next_part();
            self.next += 1;
        }
    }
}
