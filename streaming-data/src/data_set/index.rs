//! `index.json`: a description of a data set, so that no shard has to be opened for it.
//!
//! Opening a data set of thousands of shards must not read thousands of footers, and a stream's
//! identity must not depend on where the data lies. So the index states for every shard how many
//! samples it has, and the size and hash of its file; the order of the entries is the stored order.
//! Where it states the hash of a shard's footer as well, parts of the shard can be verified without the rest:
//! the footer by this hash, the row groups by the hashes that the footer states.
//!
//! Contract: [`Index::to_bytes`] is a pure function of the value (fixed order of keys, a newline
//! at the end), so that equal data sets have equal indexes. Reading ignores keys it does not know
//! and refuses a format version above [`FORMAT_VERSION`]; [`Index::read`] and [`Index::from_bytes`]
//! return checked values only. While `prepare` writes a data set to a store, another JSON is in its
//! place, which says so and is refused as [`DataError::StillPreparing`].

use std::{
    collections::BTreeSet,
    path::{Component, Path},
};

use serde::{Deserialize, Serialize};
use tidemill_files::{Kind, read};

use crate::{
    error::DataError,
    hash::{ContentHash, ContentHasher, HASH_ALGORITHM},
};

mod claim;
mod selection;
mod versions;

pub use crate::shard::{FooterEntry, TOKENS_COLUMN};
pub(crate) use claim::{claim_of, is_claim};
pub use selection::{Selection, SelectionDifference};
pub use versions::{Version, versions};
pub(crate) use versions::{read_version, versions_in_folder, versions_in_store};

/// Name of the index within the folder of a data set.
pub const INDEX_FILE: &str = "index.json";

/// Name of the folder of indexes, one for each version of a data set that is kept up to date.
pub const VERSIONS_FOLDER: &str = "index";

/// Name of the folder in which the state of such a data set is.
pub const STATE_FOLDER: &str = "state";

/// Name of the index of a version, below the data set's folder: by the fingerprint.
pub fn version_file(index: &Index) -> String {
    version_file_of(index.fingerprint())
}

/// As [`version_file`], for a fingerprint.
pub fn version_file_of(fingerprint: ContentHash) -> String {
    format!("{VERSIONS_FOLDER}/{}.json", fingerprint.digits())
}

/// The format version that [`Index::to_bytes`] writes, and the newest that can be read.
pub const FORMAT_VERSION: u64 = 1;

/// The content of an `index.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Version of this format: [`FORMAT_VERSION`].
    pub format_version: u64,
    /// Predicted tokens per sample: a row has `seq_len + 1` tokens.
    pub seq_len: usize,
    /// Size of the vocabulary: every token is below it.
    pub vocab_size: u32,
    /// Token that begins a document, where there is one.
    #[serde(default)]
    pub bos_token_id: Option<u32>,
    /// Token that ends a document, where there is one.
    #[serde(default)]
    pub eos_token_id: Option<u32>,
    /// Token that fills, where there is one.
    #[serde(default)]
    pub pad_token_id: Option<u32>,
    /// The tokenizer's file in the folder of the index (`tokenizer.json`), where there is one.
    #[serde(default)]
    pub tokenizer_file: Option<String>,
    /// Algorithm of the hashes: [`HASH_ALGORITHM`].
    pub hash_algorithm: String,
    /// Rows in each row group but the last of a shard: the unit in which rows are decoded.
    pub row_group_samples: u64,
    /// The columns of every shard.
    pub columns: Vec<Column>,
    /// The documents and lines that were left out, where any were to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Selection>,
    /// The records of the documents, where the data set can be kept up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateEntry>,
    /// The shards in stored order.
    pub shards: Vec<ShardEntry>,
}

/// The state of a data set that can be kept up to date.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateEntry {
    /// Path relative to the data set's folder, with `/` between folders.
    pub file: String,
    /// Hash of the file.
    pub hash: ContentHash,
}

/// A column of every shard, in Arrow's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Name: [`TOKENS_COLUMN`] must be among the columns.
    pub name: String,
    /// Arrow type: `fixed_size_list`, `list` or `large_list` for tokens.
    #[serde(rename = "type")]
    pub kind: String,
    /// Arrow type of an element: `uint16`, `int32` ...
    pub element: String,
    /// Elements in a row: `seq_len + 1`.
    pub length: usize,
}

/// One shard of a data set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Path relative to the index, with `/` between folders.
    pub file: String,
    /// Rows in the file.
    pub samples: u64,
    /// Size of the file.
    pub bytes: u64,
    /// Hash of the file.
    pub hash: ContentHash,
    /// The footer of the file, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub footer: Option<FooterEntry>,
}

impl Index {
    /// The identity of the data: a hash of the ordered (samples, hash) of the shards, and of
    /// nothing else. Names and places of files do not enter.
    pub fn fingerprint(&self) -> ContentHash {
        fingerprint(self.shards.iter().map(|shard| (shard.samples, shard.hash)))
    }

    /// Samples in all shards.
    pub fn samples(&self) -> u64 {
        self.shards.iter().map(|shard| shard.samples).sum()
    }

    /// The canonical text: two spaces of indentation, keys in the order of the fields, a newline
    /// at the end.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("an index has only JSON values");
        bytes.push(b'\n');
        bytes
    }

    /// Reads and checks the index of the folder.
    ///
    /// # Errors
    /// [`DataError::Io`] when it cannot be read, and the errors of [`Index::from_bytes`].
    pub fn read(folder: &Path) -> Result<Index, DataError> {
        let path = folder.join(INDEX_FILE);
        let bytes = read(&path, Kind::Index).map_err(DataError::io("read", &path))?;
        Index::from_bytes(&bytes, &path)
    }

    /// Parses and checks an index; errors name `path`.
    ///
    /// # Errors
    /// [`DataError::StillPreparing`], [`DataError::IndexSyntax`], [`DataError::IndexVersion`],
    /// [`DataError::IndexValue`], [`DataError::NoShards`], or [`DataError::EmptyShard`] for a shard
    /// without samples.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Index, DataError> {
        // The version is looked at alone and first: a newer format may differ in every other key.
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
        }
        let syntax = |source| DataError::IndexSyntax { path: path.to_owned(), source };
        let Version { format_version } = match serde_json::from_slice(bytes) {
            Ok(version) => version,
            Err(_) if is_claim(bytes) => {
                let folder = path.parent().unwrap_or(path);
                return Err(DataError::StillPreparing { path: folder.to_owned() });
            }
            Err(error) => return Err(syntax(error)),
        };
        if format_version > FORMAT_VERSION {
            return Err(DataError::IndexVersion {
                path: path.to_owned(),
                found: format_version,
                supported: FORMAT_VERSION,
            });
        }
        let index: Index = serde_json::from_slice(bytes).map_err(syntax)?;
        index.check(path)?;
        Ok(index)
    }

    /// The rules across fields; errors name `path`.
    ///
    /// # Errors
    /// As [`Index::from_bytes`].
    pub fn check(&self, path: &Path) -> Result<(), DataError> {
        let wrong = |key: String, found: String, expected| {
            Err(DataError::IndexValue { path: path.to_owned(), key, found, expected })
        };
        if self.format_version == 0 {
            return wrong("format_version".into(), "0".into(), "1 or more");
        }
        if self.seq_len == 0 || self.seq_len >= i32::MAX as usize {
            return wrong("seq_len".into(), self.seq_len.to_string(), "1 to 2^31 - 2");
        }
        if self.vocab_size == 0 {
            return wrong("vocab_size".into(), "0".into(), "1 or more");
        }
        for (key, id) in [
            ("bos_token_id", self.bos_token_id),
            ("eos_token_id", self.eos_token_id),
            ("pad_token_id", self.pad_token_id),
        ] {
            if let Some(id) = id.filter(|&id| id >= self.vocab_size) {
                return wrong(key.into(), id.to_string(), "a token below vocab_size");
            }
        }
        if let Some(file) = self.tokenizer_file.as_ref().filter(|file| !is_inside(file)) {
            return wrong("tokenizer_file".into(), format!("{file:?}"), PATH_INSIDE);
        }
        if self.hash_algorithm != HASH_ALGORITHM {
            let found = format!("{:?}", self.hash_algorithm);
            return wrong("hash_algorithm".into(), found, "\"xxh3-128\"");
        }
        if self.row_group_samples == 0 {
            return wrong("row_group_samples".into(), "0".into(), "1 or more");
        }
        match self.columns.iter().find(|column| column.name == TOKENS_COLUMN) {
            None => {
                let names: Vec<_> = self.columns.iter().map(|column| &column.name).collect();
                return wrong("columns".into(), format!("{names:?}"), "a column \"tokens\"");
            }
            Some(tokens) if tokens.length != self.seq_len + 1 => {
                let found = tokens.length.to_string();
                return wrong("the length of column tokens".into(), found, "seq_len + 1");
            }
            Some(_) => {}
        }
        if let Some(state) = self.state.as_ref().filter(|state| !is_inside(&state.file)) {
            return wrong("state.file".into(), format!("{:?}", state.file), PATH_INSIDE);
        }
        if self.shards.is_empty() {
            let folder = path.parent().unwrap_or(path);
            return Err(DataError::NoShards { path: folder.to_owned() });
        }
        let mut files = BTreeSet::new();
        let mut samples = 0_u64;
        for (at, shard) in self.shards.iter().enumerate() {
            let key = |field: &str| format!("shards[{at}].{field}");
            if !is_inside(&shard.file) {
                return wrong(key("file"), format!("{:?}", shard.file), PATH_INSIDE);
            }
            if !files.insert(&shard.file) {
                return wrong(key("file"), format!("{:?}", shard.file), "a file listed only once");
            }
            if shard.samples == 0 {
                let folder = path.parent().unwrap_or(Path::new(""));
                return Err(DataError::EmptyShard { path: folder.join(&shard.file) });
            }
            if let Some(footer) =
                shard.footer.filter(|footer| !(9..=shard.bytes).contains(&footer.bytes))
            {
                let found = footer.bytes.to_string();
                return wrong(
                    key("footer.bytes"),
                    found,
                    "more than 8, at most the bytes of the file",
                );
            }
            match samples.checked_add(shard.samples) {
                Some(sum) => samples = sum,
                None => {
                    let found = shard.samples.to_string();
                    return wrong(key("samples"), found, "fewer than 2^64 samples in all");
                }
            }
        }
        Ok(())
    }
}

/// Hash of the ordered (samples, hash): both as big-endian bytes, one after the other.
pub(crate) fn fingerprint(shards: impl Iterator<Item = (u64, ContentHash)>) -> ContentHash {
    let mut hasher = ContentHasher::new();
    for (samples, hash) in shards {
        hasher.update(&samples.to_be_bytes());
        hasher.update(&hash.to_be_bytes());
    }
    hasher.finish()
}

const PATH_INSIDE: &str = "a relative path that stays inside the data set's folder";

/// Whether a path of the index cannot lead out of the folder of the data set.
fn is_inside(file: &str) -> bool {
    !file.is_empty()
        && Path::new(file).components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Index {
        let shard = |file: &str, samples, hash: u128| ShardEntry {
            file: file.into(),
            samples,
            bytes: 1000,
            hash: format!("xxh3-128:{hash:032x}").parse().unwrap(),
            footer: None,
        };
        Index {
            format_version: FORMAT_VERSION,
            seq_len: 512,
            vocab_size: 259,
            bos_token_id: Some(256),
            eos_token_id: Some(257),
            pad_token_id: None,
            tokenizer_file: Some("tokenizer.json".into()),
            hash_algorithm: HASH_ALGORITHM.into(),
            row_group_samples: 64,
            columns: vec![Column {
                name: TOKENS_COLUMN.into(),
                kind: "fixed_size_list".into(),
                element: "uint16".into(),
                length: 513,
            }],
            selection: None,
            state: None,
            shards: vec![shard("a.parquet", 7, 1), shard("b.parquet", 9, 2)],
        }
    }

    fn parse(text: &str) -> Result<Index, DataError> {
        Index::from_bytes(text.as_bytes(), Path::new("set/index.json"))
    }

    #[test]
    fn canonical_text_is_read_back() {
        let index = example();
        let text = String::from_utf8(index.to_bytes()).unwrap();
        assert!(text.starts_with("{\n  \"format_version\": 1,\n  \"seq_len\": 512,\n"), "{text}");
        assert!(text.ends_with("}\n"), "{text}");
        let read = parse(&text).unwrap();
        assert_eq!(read, index);
        assert_eq!(read.to_bytes(), text.as_bytes());
        assert_eq!(read.samples(), 16);
    }

    #[test]
    fn unknown_keys_are_ignored_and_optional_ones_may_be_left_out() {
        let text = String::from_utf8(example().to_bytes()).unwrap();
        let text = text
            .replace("  \"bos_token_id\": 256,\n", "  \"licence\": {\"spdx\": \"MIT\"},\n")
            .replace("  \"tokenizer_file\": \"tokenizer.json\",\n", "");
        let expected = Index { bos_token_id: None, tokenizer_file: None, ..example() };
        assert_eq!(parse(&text).unwrap(), expected);
    }

    #[test]
    fn fingerprint_is_of_samples_and_hashes_in_order_and_not_of_names() {
        let index = example();
        let mut renamed = index.clone();
        renamed.shards[0].file = "elsewhere/z.parquet".into();
        renamed.seq_len = 3;
        assert_eq!(renamed.fingerprint(), index.fingerprint());
        // Pinned: a saved run compares with it for ever.
        assert_eq!(index.fingerprint().to_string(), "xxh3-128:0e1fb4f044d07396f7dfc63c8dd1b3d1");

        let mut swapped = index.clone();
        swapped.shards.swap(0, 1);
        let mut longer = index.clone();
        longer.shards[1].samples += 1;
        for other in [swapped, longer] {
            assert_ne!(other.fingerprint(), index.fingerprint());
        }
    }

    /// An index without footers is written as it was before there were any, and a run that was begun
    /// with one goes on with the other.
    #[test]
    fn footers_are_optional_and_no_part_of_the_identity() {
        let without = example();
        assert!(!String::from_utf8(without.to_bytes()).unwrap().contains("footer"));
        let mut index = without.clone();
        index.shards[1].footer = Some(FooterEntry { bytes: 1000, hash: ContentHash::of(b"") });
        assert_eq!(index.fingerprint(), without.fingerprint());
        let text = String::from_utf8(index.to_bytes()).unwrap();
        assert_eq!(parse(&text).unwrap(), index);
        let footer = "\"footer\": {\n        \"bytes\": 1000,\n        \"hash\": \"xxh3-128:99aa";
        assert!(text.contains(footer), "{text}");
    }

    #[test]
    fn wrong_indexes_are_refused_in_one_line_that_names_the_file_and_the_key() {
        type Change = fn(&mut Index);
        fn footer(bytes: u64) -> Option<FooterEntry> {
            Some(FooterEntry { bytes, hash: ContentHash::of(b"") })
        }
        let cases: [(&str, Change); 13] = [
            ("seq_len", |index| index.seq_len = 0),
            ("vocab_size", |index| index.vocab_size = 0),
            ("eos_token_id", |index| index.eos_token_id = Some(259)),
            ("hash_algorithm", |index| index.hash_algorithm = "md5".into()),
            ("row_group_samples", |index| index.row_group_samples = 0),
            ("columns", |index| index.columns.clear()),
            ("length of column tokens", |index| index.columns[0].length = 512),
            ("shards[1].file", |index| index.shards[1].file = "../b.parquet".into()),
            ("shards[1].file", |index| index.shards[1].file = "a.parquet".into()),
            ("shards[1].samples", |index| index.shards[1].samples = u64::MAX),
            ("set/b.parquet is empty", |index| index.shards[1].samples = 0),
            ("shards[0].footer.bytes", |index| index.shards[0].footer = footer(8)),
            ("shards[1].footer.bytes", |index| index.shards[1].footer = footer(1001)),
        ];
        for (key, change) in cases {
            let mut index = example();
            change(&mut index);
            let text = String::from_utf8(index.to_bytes()).unwrap();
            let message = parse(&text).unwrap_err().to_string();
            assert!(message.contains(key) && message.contains("set/"), "{key}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
        assert!(matches!(
            parse("{\"format_version\": 2, \"shards\": {}}"),
            Err(DataError::IndexVersion { found: 2, supported: 1, .. })
        ));
        for text in ["", "[]", "{}", "{\"format_version\": 1}", "{\"format_version\": \"1\"}"] {
            assert!(matches!(parse(text), Err(DataError::IndexSyntax { .. })), "{text}");
        }
    }
}
