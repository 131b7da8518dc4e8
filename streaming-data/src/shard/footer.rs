//! The footer of a shard: which row group holds a row, and what the `tokens` column is.

use std::{ops::Range, path::Path, sync::Arc};

use arrow::datatypes::DataType;
use bytes::Bytes;
use parquet::{
    arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    errors::ParquetError,
    file::metadata::{FooterTail, ParquetMetaDataReader},
};

use super::{RowRule, ShardFile, chunk::column_range, guarded};
use crate::{cache::Weigh, error::DataError, hash::ContentHash, index::TOKENS_COLUMN};

/// Length and magic number behind the metadata.
const TAIL_BYTES: u64 = 8;

/// A footer that was read, and whose `tokens` column has a type that can be one.
#[derive(Debug)]
pub(crate) struct Footer {
    pub(super) metadata: ArrowReaderMetadata,
    /// Index of the column among the leaves of the Parquet schema.
    pub(super) leaf: usize,
    /// Index of the column among the top fields of the schema.
    pub(super) root: usize,
    /// Type of a token.
    pub(super) element: DataType,
    /// Tokens in every row, where the type fixes it.
    fixed_row_tokens: Option<usize>,
    /// Where each row group ends, in rows.
    ends: Vec<u64>,
    /// Hash of the bytes of the metadata.
    hash: ContentHash,
    file_bytes: u64,
}

impl Footer {
    /// Reads the footer of a file, and nothing else of it.
    pub(crate) fn read(file: &ShardFile) -> Result<Footer, DataError> {
        let path = file.path();
        let bytes = read_metadata(file)?;
        let metadata = guarded("parse the footer of", path, || {
            let metadata = ParquetMetaDataReader::decode_metadata(&bytes)?;
            ArrowReaderMetadata::try_new(Arc::new(metadata), ArrowReaderOptions::new())
        })?;
        let ends = guarded("parse the footer of", path, || row_group_ends(&metadata))?;
        let found = |found: String| DataError::Column {
            path: path.to_owned(),
            found,
            expected: format!("a column {TOKENS_COLUMN} of lists of integers"),
        };
        let fields = metadata.schema().fields();
        let Some(root) = fields.iter().position(|field| field.name() == TOKENS_COLUMN) else {
            let names: Vec<_> = fields.iter().map(|field| field.name().as_str()).collect();
            return Err(found(format!("columns [{}]", names.join(", "))));
        };
        let (element, fixed_row_tokens) = match fields[root].data_type() {
            DataType::FixedSizeList(item, length) => {
                (item.data_type().clone(), usize::try_from(*length).ok())
            }
            DataType::List(item) | DataType::LargeList(item) => (item.data_type().clone(), None),
            other => return Err(found(format!("column {TOKENS_COLUMN} of type {other}"))),
        };
        if !element.is_integer() {
            return Err(found(format!("column {TOKENS_COLUMN} of lists of {element}")));
        }
        let schema = metadata.parquet_schema();
        let leaf = (0..schema.num_columns())
            .find(|&leaf| schema.get_column_root_idx(leaf) == root)
            .ok_or_else(|| found(format!("column {TOKENS_COLUMN} without values")))?;
        let hash = ContentHash::of(&bytes);
        let file_bytes = file.bytes();
        Ok(Footer { metadata, leaf, root, element, fixed_row_tokens, ends, hash, file_bytes })
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

    /// Tokens in every row, where the type of the column fixes it.
    pub(crate) fn fixed_row_tokens(&self) -> Option<usize> {
        self.fixed_row_tokens
    }

    /// Row group of a row of the file, and the first row of that group.
    pub(crate) fn group_of(&self, row: u64) -> (usize, u64) {
        let group = self.ends.partition_point(|&end| end <= row);
        (group, self.group_start(group))
    }

    pub(super) fn group_start(&self, group: usize) -> u64 {
        if group == 0 { 0 } else { self.ends[group - 1] }
    }

    /// Rows of a row group.
    pub(super) fn group_rows(&self, group: usize) -> usize {
        (self.ends[group] - self.group_start(group)) as usize
    }

    /// Where the column's pages of a row group are, where the footer can be believed.
    pub(crate) fn chunk_range(&self, group: usize) -> Option<Range<u64>> {
        column_range(self.metadata.metadata().row_group(group).column(self.leaf)).ok()
    }

    /// Compares the column's type with what every row must be.
    pub(crate) fn check_column(&self, path: &Path, rule: RowRule) -> Result<(), DataError> {
        match self.fixed_row_tokens {
            Some(found) if found != rule.row_tokens => Err(DataError::Column {
                path: path.to_owned(),
                found: format!("column {TOKENS_COLUMN} of lists of {found} integers"),
                expected: format!("lists of {} (seq_len + 1)", rule.row_tokens),
            }),
            _ => Ok(()),
        }
    }
}

impl Weigh for Footer {
    fn weight_bytes(&self) -> usize {
        size_of::<Footer>() + self.metadata.metadata().memory_size() + 8 * self.ends.len()
    }
}

/// The bytes of the metadata.
fn read_metadata(file: &ShardFile) -> Result<Bytes, DataError> {
    let (path, file_bytes) = (file.path(), file.bytes());
    let format = |source| DataError::ShardFormat { action: "read", path: path.to_owned(), source };
    if file_bytes < TAIL_BYTES {
        let found = format!("the file has {file_bytes} bytes");
        return Err(format(ParquetError::EOF(found)));
    }
    let metadata_end = file_bytes - TAIL_BYTES;
    let tail = file.read(metadata_end..file_bytes)?;
    let tail = <&[u8; TAIL_BYTES as usize]>::try_from(&*tail)
        .map_err(|_| format(ParquetError::EOF("the file became shorter".to_owned())))?;
    let tail = FooterTail::try_new(tail).map_err(format)?;
    if tail.is_encrypted_footer() {
        return Err(format(ParquetError::NYI("the footer is encrypted".to_owned())));
    }
    let length = tail.metadata_length() as u64;
    let Some(start) = metadata_end.checked_sub(length) else {
        let found = format!("a footer of {length} bytes in a file of {file_bytes}");
        return Err(format(ParquetError::EOF(found)));
    };
    file.read(start..metadata_end)
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
