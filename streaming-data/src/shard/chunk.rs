//! The bytes of columns of one row group, in memory.
//!
//! They are read at once: `parquet` reads a file through handles that share one offset, which
//! threads cannot do at the same time. Sizes are compared with the file before memory is taken, for
//! a damaged footer may state anything.

use std::{ops::Range, path::Path};

use bytes::{Buf, Bytes, buf::Reader};
use parquet::{
    errors::ParquetError,
    file::{
        metadata::ColumnChunkMetaData,
        reader::{ChunkReader, Length},
    },
};

use super::{Footer, ShardFile};
use crate::{error::DataError, hash::ContentHash};

/// A range of a file, read; it answers to the offsets of the file.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    start: u64,
    bytes: Bytes,
    file_bytes: u64,
}

impl Chunk {
    /// Reads a column of a row group, whose range must lie within the file. It is verified where the
    /// footer states a hash and the file was not verified as a whole.
    pub(super) fn read(
        file: &ShardFile,
        footer: &Footer,
        group: usize,
        range: Range<u64>,
    ) -> Result<Chunk, DataError> {
        check_within(file, &range)?;
        let (start, file_bytes) = (range.start, file.bytes());
        let bytes = match footer.group_hash_for(file, group) {
            Some(expected) => file
                .read_verified(range, expected)?
                .map_err(|found| wrong_group(file, group, expected, found))?,
            None => file.read(range)?,
        };
        Ok(Chunk { start, bytes, file_bytes })
    }

    /// Reads the start of a column of a row group, which must lie within the file; no hash is
    /// known of that alone.
    pub(super) fn read_begin(file: &ShardFile, range: Range<u64>) -> Result<Chunk, DataError> {
        check_within(file, &range)?;
        let (start, file_bytes) = (range.start, file.bytes());
        Ok(Chunk { start, bytes: file.read(range)?, file_bytes })
    }

    /// Copies a range of the file, which must lie within this one, to `out` and nothing else.
    pub(super) fn read_into(
        &self,
        path: &Path,
        range: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        let length = range.end.saturating_sub(range.start) as usize;
        let bytes = self.get_bytes(range.start, length).map_err(|source| {
            DataError::ShardFormat { action: "read", path: path.to_owned(), source }
        })?;
        out.clear();
        out.extend_from_slice(&bytes);
        Ok(())
    }

    fn from(&self, start: u64) -> Result<Bytes, ParquetError> {
        let outside = || ParquetError::EOF(format!("a page begins at {start}, outside its column"));
        let offset = start.checked_sub(self.start).ok_or_else(outside)?;
        let offset = usize::try_from(offset).map_err(|_| outside())?;
        if offset > self.bytes.len() {
            return Err(outside());
        }
        Ok(self.bytes.slice(offset..))
    }
}

impl Length for Chunk {
    fn len(&self) -> u64 {
        self.file_bytes
    }
}

impl ChunkReader for Chunk {
    type T = Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Reader<Bytes>, ParquetError> {
        Ok(self.from(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let mut bytes = self.from(start)?;
        if length > bytes.len() {
            return Err(ParquetError::EOF(format!("a page ends {length} bytes after {start}")));
        }
        Ok(bytes.split_to(length))
    }
}

/// Compares a range that the footer states with the size of the file.
pub(super) fn check_within(file: &ShardFile, range: &Range<u64>) -> Result<(), DataError> {
    let file_bytes = file.bytes();
    if range.end <= file_bytes {
        return Ok(());
    }
    let found = format!("the footer refers to bytes {range:?} of a file of {file_bytes}");
    Err(DataError::ShardFormat {
        action: "read",
        path: file.path().to_owned(),
        source: ParquetError::EOF(found),
    })
}

/// A row group has another hash than the footer says.
pub(super) fn wrong_group(
    file: &ShardFile,
    group: usize,
    expected: ContentHash,
    found: ContentHash,
) -> DataError {
    DataError::RowGroupHash { path: file.path().to_owned(), group, expected, found }
}

/// Several ranges of a file, read; they answer to the offsets of the file.
#[derive(Debug)]
pub(super) struct Chunks {
    /// In the order of the file.
    chunks: Vec<Chunk>,
    file_bytes: u64,
}

impl Chunks {
    /// Reads columns of a row group, each as [`Chunk::read`] does.
    pub(super) fn read(
        file: &ShardFile,
        footer: &Footer,
        group: usize,
        mut ranges: Vec<Range<u64>>,
    ) -> Result<Chunks, DataError> {
        ranges.sort_by_key(|range| range.start);
        let chunks = ranges
            .into_iter()
            .map(|range| Chunk::read(file, footer, group, range))
            .collect::<Result<_, _>>()?;
        Ok(Chunks { chunks, file_bytes: file.bytes() })
    }

    /// The range that holds an offset.
    fn at(&self, start: u64) -> Result<&Chunk, ParquetError> {
        let after = self.chunks.partition_point(|chunk| chunk.start <= start);
        after.checked_sub(1).map(|at| &self.chunks[at]).ok_or_else(|| {
            ParquetError::EOF(format!("a page begins at {start}, before all columns"))
        })
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.file_bytes
    }
}

impl ChunkReader for Chunks {
    type T = Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Reader<Bytes>, ParquetError> {
        self.at(start)?.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        self.at(start)?.get_bytes(start, length)
    }
}

/// Where the pages of a column of a row group are.
pub(super) fn column_range(column: &ColumnChunkMetaData) -> Result<Range<u64>, ParquetError> {
    let start = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
    let length = column.compressed_size();
    match (u64::try_from(start), u64::try_from(length)) {
        (Ok(start), Ok(length)) => Ok(start..start.saturating_add(length)),
        _ => Err(ParquetError::General(format!(
            "the footer has a column of {length} bytes at offset {start}"
        ))),
    }
}
