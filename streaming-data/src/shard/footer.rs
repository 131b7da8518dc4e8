//! The footer of a shard: which row group holds a row, and what the `tokens` column is.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    sync::Arc,
};

use arrow::datatypes::DataType;
use parquet::{
    arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    errors::ParquetError,
    file::metadata::{FooterTail, ParquetMetaDataReader},
};

use super::{RowRule, guarded};
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
    pub(crate) fn read(path: &Path) -> Result<Footer, DataError> {
        let (bytes, file_bytes) = read_metadata(path)?;
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

/// The bytes of the metadata, and the size of the file.
fn read_metadata(path: &Path) -> Result<(Vec<u8>, u64), DataError> {
    let io = |error| DataError::io("read shard", path)(error);
    let format = |source| DataError::ShardFormat { action: "read", path: path.to_owned(), source };
    let mut file = File::open(path).map_err(DataError::io("open shard", path))?;
    let file_bytes = file.metadata().map_err(io)?.len();
    if file_bytes < TAIL_BYTES {
        let found = format!("the file has {file_bytes} bytes");
        return Err(format(ParquetError::EOF(found)));
    }
    let mut tail = [0; TAIL_BYTES as usize];
    file.seek(SeekFrom::Start(file_bytes - TAIL_BYTES)).map_err(io)?;
    file.read_exact(&mut tail).map_err(io)?;
    let tail = FooterTail::try_new(&tail).map_err(format)?;
    if tail.is_encrypted_footer() {
        return Err(format(ParquetError::NYI("the footer is encrypted".to_owned())));
    }
    let length = tail.metadata_length() as u64;
    let Some(start) = (file_bytes - TAIL_BYTES).checked_sub(length) else {
        let found = format!("a footer of {length} bytes in a file of {file_bytes}");
        return Err(format(ParquetError::EOF(found)));
    };
    let mut bytes = vec![0; length as usize];
    file.seek(SeekFrom::Start(start)).map_err(io)?;
    file.read_exact(&mut bytes).map_err(io)?;
    Ok((bytes, file_bytes))
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
