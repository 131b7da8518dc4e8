//! The footer of a shard: its columns, and which row group holds a row.

use std::{ops::Range, path::Path, sync::Arc};

use arrow_schema::{DataType, SchemaRef};
use bytes::Bytes;
use parquet::{
    arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    errors::ParquetError,
    file::metadata::{FooterTail, ParquetMetaDataReader},
};
use serde::{Deserialize, Serialize};

use super::{GroupHashes, RowKind, ShardFile, chunk::column_range, guarded};
use crate::{cache::memory::Weigh, error::DataError, hash::ContentHash};

/// Name of the column of tokens.
pub const TOKENS_COLUMN: &str = "tokens";

/// Length and magic number after the metadata.
const TAIL_BYTES: u64 = 8;

/// The footer of a shard: the end of its file, from the metadata on, with their length and the magic
/// number after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FooterEntry {
    /// Size of the footer in bytes: more than 8, and at most the size of the file.
    pub bytes: u64,
    /// Hash of the footer.
    pub hash: ContentHash,
}

/// A footer that was read.
#[derive(Debug)]
pub(crate) struct Footer {
    pub(super) metadata: ArrowReaderMetadata,
    /// The column of tokens, or the reason why there is none.
    tokens: Result<TokensColumn, String>,
    /// Where each row group ends, in rows.
    ends: Vec<u64>,
    /// The expected hash of each row group, where it is known.
    group_hashes: Option<GroupHashes>,
    /// Hash of the bytes of the metadata.
    hash: ContentHash,
    entry: FooterEntry,
    file_bytes: u64,
}

/// A column that can be one of tokens.
#[derive(Debug)]
pub(super) struct TokensColumn {
    /// Index of the column among the leaves of the Parquet schema.
    pub(super) leaf: usize,
    /// Index of the column among the top fields of the schema.
    pub(super) root: usize,
    /// Type of a token.
    pub(super) element: DataType,
    /// Tokens in every row, where the type fixes it.
    fixed_row_tokens: Option<usize>,
}

impl TokensColumn {
    /// Finds the column, or says which columns there are.
    fn find(metadata: &ArrowReaderMetadata) -> Result<TokensColumn, String> {
        let fields = metadata.schema().fields();
        let Some(root) = fields.iter().position(|field| field.name() == TOKENS_COLUMN) else {
            let names: Vec<_> = fields.iter().map(|field| field.name().as_str()).collect();
            return Err(format!("columns [{}]", names.join(", ")));
        };
        let (element, fixed_row_tokens) = match fields[root].data_type() {
            DataType::FixedSizeList(item, length) => {
                (item.data_type().clone(), usize::try_from(*length).ok())
            }
            DataType::List(item) | DataType::LargeList(item) => (item.data_type().clone(), None),
            other => return Err(format!("column {TOKENS_COLUMN} of type {other}")),
        };
        if !element.is_integer() {
            return Err(format!("column {TOKENS_COLUMN} of lists of {element}"));
        }
        let schema = metadata.parquet_schema();
        let leaf = (0..schema.num_columns())
            .find(|&leaf| schema.get_column_root_idx(leaf) == root)
            .ok_or_else(|| format!("column {TOKENS_COLUMN} without values"))?;
        Ok(TokensColumn { leaf, root, element, fixed_row_tokens })
    }
}

impl TokensColumn {
    /// Tokens in every row, where the type fixes it.
    pub(super) fn fixed_row_tokens(&self) -> Option<usize> {
        self.fixed_row_tokens
    }
}

impl Footer {
    /// Reads the footer of a file, and nothing else of it.
    pub(crate) fn read(file: &ShardFile) -> Result<Footer, DataError> {
        let (path, file_bytes) = (file.path(), file.bytes());
        let range = guarded("read", path, || {
            let start = file_bytes.checked_sub(TAIL_BYTES);
            start.ok_or_else(|| ParquetError::EOF(format!("the file has {file_bytes} bytes")))
        })?..file_bytes;
        let tail = file.read(range)?;
        let length = guarded("read", path, || metadata_bytes(&tail))?;
        let start = file_bytes.checked_sub(length + TAIL_BYTES).ok_or_else(|| {
            let found = format!("a footer of {length} bytes in a file of {file_bytes}");
            let (path, source) = (path.to_owned(), ParquetError::EOF(found));
            DataError::ShardFormat { action: "read", path, source }
        })?;
        Footer::of_bytes(file, file.read(start..file_bytes)?)
    }

    /// The footer of a file, whose bytes are these, its last ones.
    pub(crate) fn of_bytes(file: &ShardFile, footer: Bytes) -> Result<Footer, DataError> {
        let path = file.path();
        let footer = guarded("read", path, || footer_at_end(&footer))?;
        let bytes = &footer[..footer.len() - TAIL_BYTES as usize];
        let metadata = guarded("parse the footer of", path, || {
            let metadata = ParquetMetaDataReader::decode_metadata(bytes)?;
            ArrowReaderMetadata::try_new(Arc::new(metadata), ArrowReaderOptions::new())
        })?;
        let ends = guarded("parse the footer of", path, || row_group_ends(&metadata))?;
        let tokens = TokensColumn::find(&metadata);
        let group_hashes =
            guarded("parse the footer of", path, || GroupHashes::find(metadata.metadata()))?;
        let hash = ContentHash::of(bytes);
        let entry = FooterEntry { bytes: footer.len() as u64, hash: ContentHash::of(footer) };
        Ok(Footer { metadata, tokens, ends, group_hashes, hash, entry, file_bytes: file.bytes() })
    }

    /// The column of tokens.
    ///
    /// # Errors
    /// [`DataError::Column`] where there is none.
    pub(super) fn tokens(&self, path: &Path) -> Result<&TokensColumn, DataError> {
        self.tokens.as_ref().map_err(|found| DataError::Column {
            path: path.to_owned(),
            found: found.clone(),
            expected: format!("a column {TOKENS_COLUMN} of lists of integers"),
        })
    }

    /// The columns, as Arrow has them.
    pub(crate) fn schema(&self) -> &SchemaRef {
        self.metadata.schema()
    }

    /// Rows of the file.
    pub(crate) fn samples(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Size of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Hash of the metadata, which states the place, sizes and statistics of every column.
    pub(crate) fn hash(&self) -> ContentHash {
        self.hash
    }

    /// The footer as an index states it.
    pub(crate) fn entry(&self) -> FooterEntry {
        self.entry
    }

    /// Whether the hashes of the row groups are known.
    pub(super) fn has_group_hashes(&self) -> bool {
        self.group_hashes.is_some()
    }

    /// The expected hash of the pages of a row group, where it is known and bytes of the file are still
    /// verified as they are read.
    pub(super) fn group_hash_for(&self, file: &ShardFile, group: usize) -> Option<ContentHash> {
        let hashes = self.group_hashes.as_ref().filter(|_| !file.is_verified())?;
        hashes.get(group)
    }

    /// Row group of a row of the file, and the first row of that group.
    pub(crate) fn group_of(&self, row: u64) -> (usize, u64) {
        let group = self.ends.partition_point(|&end| end <= row);
        (group, self.group_start(group))
    }

    /// Where a row group begins, in rows.
    pub(super) fn group_start(&self, group: usize) -> u64 {
        if group == 0 { 0 } else { self.ends[group - 1] }
    }

    /// Rows of a row group.
    pub(crate) fn group_rows(&self, group: usize) -> usize {
        (self.ends[group] - self.group_start(group)) as usize
    }

    /// The ranges of the pages of a row group that hold the wanted rows, where the footer
    /// can be believed.
    pub(crate) fn chunk_ranges(&self, group: usize, rows: &RowKind) -> Vec<Range<u64>> {
        let group = self.metadata.metadata().row_group(group);
        let leaves: Vec<usize> = match rows {
            RowKind::Tokens(_) => self.tokens.iter().map(|tokens| tokens.leaf).collect(),
            RowKind::Columns(schema) => self.leaves_of(schema),
        };
        leaves.into_iter().filter_map(|leaf| column_range(group.column(leaf)).ok()).collect()
    }

    /// The leaves of the Parquet schema that make up columns.
    pub(super) fn leaves_of(&self, columns: &SchemaRef) -> Vec<usize> {
        let schema = self.metadata.parquet_schema();
        let is_wanted = |leaf: &usize| {
            let root = self.schema().field(schema.get_column_root_idx(*leaf));
            columns.fields().iter().any(|field| field.name() == root.name())
        };
        (0..schema.num_columns()).filter(is_wanted).collect()
    }

    /// Compares the types of columns with the form of the rows.
    pub(crate) fn check_rows(&self, path: &Path, rows: &RowKind) -> Result<(), DataError> {
        let rule = match rows {
            RowKind::Tokens(rule) => rule,
            RowKind::Columns(columns) => return self.check_columns(path, columns),
        };
        match self.tokens(path)?.fixed_row_tokens {
            Some(found) if found != rule.row_tokens => Err(DataError::Column {
                path: path.to_owned(),
                found: format!("column {TOKENS_COLUMN} of lists of {found} integers"),
                expected: format!("lists of {} (seq_len + 1)", rule.row_tokens),
            }),
            _ => Ok(()),
        }
    }

    fn check_columns(&self, path: &Path, columns: &SchemaRef) -> Result<(), DataError> {
        for column in columns.fields() {
            let found = match self.schema().field_with_name(column.name()) {
                Ok(field) if field.data_type() == column.data_type() => continue,
                Ok(field) => format!("column {} of type {}", field.name(), field.data_type()),
                Err(_) => {
                    let names: Vec<_> =
                        self.schema().fields().iter().map(|field| field.name().as_str()).collect();
                    format!("columns [{}]", names.join(", "))
                }
            };
            let expected = format!("column {} of type {}", column.name(), column.data_type());
            return Err(DataError::Column { path: path.to_owned(), found, expected });
        }
        Ok(())
    }
}

impl Weigh for Footer {
    fn weight_bytes(&self) -> usize {
        let each = size_of::<u64>() + size_of::<ContentHash>();
        size_of::<Footer>() + self.metadata.metadata().memory_size() + each * self.ends.len()
    }
}

/// The footer with which the end of a file ends.
pub(crate) fn footer_at_end(end: &[u8]) -> Result<&[u8], ParquetError> {
    let length = metadata_bytes(end)? + TAIL_BYTES;
    let start = usize::try_from(length).ok().and_then(|length| end.len().checked_sub(length));
    start.map(|start| &end[start..]).ok_or_else(|| {
        ParquetError::EOF(format!("a footer of {length} bytes in the last {}", end.len()))
    })
}

/// How many bytes of metadata are before the tail, with which some bytes end.
fn metadata_bytes(bytes: &[u8]) -> Result<u64, ParquetError> {
    let tail = bytes.last_chunk::<{ TAIL_BYTES as usize }>();
    let tail = tail.ok_or_else(|| ParquetError::EOF("the file became shorter".to_owned()))?;
    let tail = FooterTail::try_new(tail)?;
    if tail.is_encrypted_footer() {
        return Err(ParquetError::NYI("the footer is encrypted".to_owned()));
    }
    Ok(tail.metadata_length() as u64)
}

/// Where each row group ends, in rows.
fn row_group_ends(metadata: &ArrowReaderMetadata) -> Result<Vec<u64>, ParquetError> {
    let mut end = 0_u64;
    metadata
        .metadata()
        .row_groups()
        .iter()
        .map(|group| {
            // A row group is decoded at once: its rows are counted by 32 bits.
            let rows = u32::try_from(group.num_rows()).map_err(|_| {
                ParquetError::General(format!("a row group of {} rows", group.num_rows()))
            })?;
            end += u64::from(rows);
            Ok(end)
        })
        .collect()
}
