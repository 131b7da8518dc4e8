//! `index.json` of an MDS data set.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;
use tidemill_files::{Kind, read};

use super::{
    shard::{ShardCompression, ShardEntry},
    tokens::TokenEncoding,
};
use crate::{
    data_set::index::{INDEX_FILE, TOKENS_COLUMN},
    error::DataError,
    prepare::{PrepareError, input::format::MDS_FORMAT, settings::DEFAULT_TEXT_KEY},
};

/// The version of indexes and shards that is known.
const VERSION: u64 = 2;

/// An MDS data set whose files are there, with the sizes that the index states.
#[derive(Debug)]
pub(crate) struct MdsSet {
    pub shards: Vec<ShardEntry>,
}

/// The type of the wanted column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Documents.
    Text,
    /// Rows.
    Tokens(TokenEncoding),
}

impl Wanted {
    /// Whether samples are rows of tokens.
    fn is_tokens(self) -> bool {
        matches!(self, Wanted::Tokens(_))
    }
}

#[derive(Deserialize)]
struct IndexJson {
    version: u64,
    shards: Vec<ShardJson>,
}

#[derive(Deserialize)]
struct ShardJson {
    column_encodings: Vec<String>,
    column_names: Vec<String>,
    column_sizes: Vec<Option<u32>>,
    compression: Option<String>,
    format: String,
    raw_data: FileJson,
    samples: u64,
    version: u64,
    zip_data: Option<FileJson>,
}

#[derive(Deserialize)]
struct FileJson {
    basename: String,
    bytes: u64,
    #[serde(default)]
    hashes: BTreeMap<String, String>,
}

impl MdsSet {
    /// Reads the index of the folder and looks at every file. The wanted column is the one of text
    /// where a key for it is given, else that of tokens where there is one.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::IndexSyntax`], [`DataError::IndexValue`],
    /// [`PrepareError::InputColumn`], [`DataError::MissingShard`] and [`DataError::ShardBytes`].
    pub(crate) fn open(folder: &Path, text_key: Option<&str>) -> Result<MdsSet, PrepareError> {
        let path = folder.join(INDEX_FILE);
        let bytes = read(&path, Kind::Index).map_err(PrepareError::io("read index", &path))?;
        let index: IndexJson = serde_json::from_slice(&bytes)
            .map_err(|source| DataError::IndexSyntax { path: path.clone(), source })?;
        let wrong = Wrong { path: &path };
        if index.version != VERSION {
            return Err(wrong.value("version".to_owned(), index.version, "2"));
        }
        let shards = index.shards.into_iter().enumerate();
        let shards: Vec<ShardEntry> = shards
            .map(|(at, shard)| shard_entry(folder, &wrong, at, shard, text_key))
            .collect::<Result<_, _>>()?;
        let is_tokens = |shard: &ShardEntry| shard.wanted.is_tokens();
        if let Some(other) = shards.iter().find(|shard| is_tokens(shard) != is_tokens(&shards[0])) {
            return Err(PrepareError::InputColumn {
                path: other.path.to_path_buf(),
                found: "another column than in the first shard".to_owned(),
                expected: "text in all shards, or tokens in all".to_owned(),
            });
        }
        Ok(MdsSet { shards })
    }

    /// Whether samples are rows of tokens.
    pub(crate) fn is_tokens(&self) -> bool {
        self.shards.first().is_some_and(|shard| shard.wanted.is_tokens())
    }

    /// Bytes of the files of all shards.
    pub(crate) fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }
}

/// Makes errors about the index.
struct Wrong<'a> {
    path: &'a Path,
}

impl Wrong<'_> {
    fn value(&self, key: String, found: impl ToString, expected: &'static str) -> PrepareError {
        let (path, found) = (self.path.to_owned(), found.to_string());
        DataError::IndexValue { path, key, found, expected }.into()
    }
}

fn shard_entry(
    folder: &Path,
    wrong: &Wrong<'_>,
    at: usize,
    shard: ShardJson,
    text_key: Option<&str>,
) -> Result<ShardEntry, PrepareError> {
    let key = |key: &str| format!("shards[{at}].{key}");
    if shard.format != MDS_FORMAT {
        return Err(wrong.value(key("format"), format!("{:?}", shard.format), "\"mds\""));
    }
    if shard.version != VERSION {
        return Err(wrong.value(key("version"), shard.version, "2"));
    }
    let columns = shard.column_names.len();
    for (name, length) in [
        ("column_encodings", shard.column_encodings.len()),
        ("column_sizes", shard.column_sizes.len()),
    ] {
        if length != columns {
            let found = format!("a list of {length}");
            return Err(wrong.value(key(name), found, "an entry for each of column_names"));
        }
    }
    let (column, wanted) = wanted_column(folder, &shard, text_key)?;
    let raw = file_path(folder, wrong, &key("raw_data.basename"), &shard.raw_data)?;
    let zip = match &shard.zip_data {
        Some(zip) => Some((file_path(folder, wrong, &key("zip_data.basename"), zip)?, zip)),
        None => None,
    };
    // A cache of StreamingDataset may hold either of them.
    let (path, file, compression) = match zip {
        Some((path, zip)) if !raw.exists() => {
            let name = shard.compression.as_deref().unwrap_or("none");
            let compression = ShardCompression::by_name(name).ok_or_else(|| {
                let expected = "none, zstd, gz, snappy or br";
                wrong.value(key("compression"), format!("{name:?}"), expected)
            })?;
            (path, zip, compression)
        }
        _ => (raw, &shard.raw_data, ShardCompression::NONE),
    };
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() == file.bytes => {}
        Ok(metadata) => {
            let (expected, found) = (file.bytes, metadata.len());
            return Err(DataError::ShardBytes { path, expected, found }.into());
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(DataError::MissingShard { path }.into());
        }
        Err(source) => return Err(DataError::Io { action: "look at shard", path, source }.into()),
    }
    Ok(ShardEntry {
        path: path.into(),
        bytes: file.bytes,
        hashes: file.hashes.clone(),
        compression,
        raw_bytes: shard.raw_data.bytes,
        samples: shard.samples,
        // As MosaicML's reader does, which takes a size of 0 for none.
        sizes: shard.column_sizes.iter().map(|size| size.filter(|&size| size > 0)).collect(),
        column,
        wanted,
    })
}

/// Where a file is that the index names; never outside the folder.
fn file_path(
    folder: &Path,
    wrong: &Wrong<'_>,
    key: &str,
    file: &FileJson,
) -> Result<PathBuf, PrepareError> {
    let relative = Path::new(&file.basename);
    let is_within = relative.components().all(|part| matches!(part, Component::Normal(_)));
    if file.basename.is_empty() || !is_within {
        let found = format!("{:?}", file.basename);
        return Err(wrong.value(key.to_owned(), found, "a path within the folder"));
    }
    Ok(folder.join(relative))
}

/// The wanted column, and the kind of its content.
fn wanted_column(
    folder: &Path,
    shard: &ShardJson,
    text_key: Option<&str>,
) -> Result<(usize, Wanted), PrepareError> {
    let wrong = |found, expected: &str| {
        let (path, expected) = (folder.to_owned(), expected.to_owned());
        Err(PrepareError::InputColumn { path, found, expected })
    };
    let columns = || shard.column_names.iter().zip(&shard.column_encodings);
    if let Some((name, encoding)) = columns().find(|(_, encoding)| encoding.contains("pkl")) {
        let found = format!("column {name:?} of pickled objects ({encoding})");
        return wrong(found, "no pickle, since to read one is to run its code");
    }
    let find = |wanted: &str| {
        let at = shard.column_names.iter().position(|name| name == wanted)?;
        Some((at, shard.column_encodings[at].as_str()))
    };
    if text_key.is_none()
        && let Some((at, encoding)) = find(TOKENS_COLUMN)
        && let Some(encoding) = TokenEncoding::by_name(encoding)
    {
        return Ok((at, Wanted::Tokens(encoding)));
    }
    let text = text_key.unwrap_or(DEFAULT_TEXT_KEY);
    match find(text) {
        Some((at, "str")) => Ok((at, Wanted::Text)),
        _ => {
            let told: Vec<_> =
                columns().map(|(name, encoding)| format!("{name:?} ({encoding})")).collect();
            let found = format!("columns {}", told.join(", "));
            let tokens = match text_key {
                None => ", or \"tokens\" of integers (ndarray:int32 ..., or bytes of int64)",
                Some(_) => "",
            };
            wrong(found, &format!("a column {text:?} (str){tokens}"))
        }
    }
}
