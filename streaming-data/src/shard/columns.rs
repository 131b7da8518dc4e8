//! Rows of any columns: slices of a row group as Arrow record batches.
//!
//! Only the pages of the columns that are wanted are read. A row group is decoded in slices, so that
//! memory does not depend on the size of row groups; since pages can only be decoded one after the
//! other, a [`SliceReader`] that has come to a slice is kept and goes on from there.

use std::ops::Range;

use arrow_array::RecordBatch;
use arrow_schema::{ArrowError, SchemaRef};
use parquet::{
    arrow::{
        ProjectionMask,
        arrow_reader::{
            ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
        },
    },
    basic::Type,
    errors::ParquetError,
    file::metadata::ColumnChunkMetaData,
};

use super::{Footer, RowKind, ShardFile, chunk::Chunks, guarded};
use crate::{cache::memory::Weigh, error::DataError};

/// Decoded bytes of a slice, as far as the footer tells them.
const SLICE_BYTES: u64 = 4 << 20;

/// Most rows of a slice with texts whose length the footer does not tell: pages state
/// their encoded sizes, and a text that comes again is encoded to nearly nothing.
const UNKNOWN_ROWS: u64 = 4096;

/// Rows of a row group, one slice after the other.
pub(crate) struct SliceReader {
    batches: ParquetRecordBatchReader,
    /// Number of the slice that comes next.
    next: usize,
    /// Rows that follow.
    rows_left: usize,
}

impl SliceReader {
    /// Number of the slice that comes next.
    pub(crate) fn next_slice(&self) -> usize {
        self.next
    }

    /// Whether no slice follows.
    pub(crate) fn is_at_end(&self) -> bool {
        self.rows_left == 0
    }

    /// Decodes the next slice.
    ///
    /// # Errors
    /// [`DataError::ShardFormat`].
    pub(crate) fn read(
        &mut self,
        file: &ShardFile,
        columns: &SchemaRef,
    ) -> Result<Rows, DataError> {
        let batch = guarded("decode", file.path(), || match self.batches.next() {
            Some(batch) => Ok(batch?),
            None => {
                Err(ParquetError::EOF("a row group has fewer rows than its footer says".into()))
            }
        })?;
        self.next += 1;
        self.rows_left = self.rows_left.saturating_sub(batch.num_rows());
        // In the requested order, which may differ from that of the file.
        let places: Result<Vec<usize>, _> =
            columns.fields().iter().map(|field| batch.schema().index_of(field.name())).collect();
        let format = |source: ArrowError| DataError::ShardFormat {
            action: "decode",
            path: file.path().to_owned(),
            source: source.into(),
        };
        let batch = batch.project(&places.map_err(format)?).map_err(format)?;
        // Nullability and metadata may differ from shard to shard, types do not.
        RecordBatch::try_new(columns.clone(), batch.columns().to_vec()).map(Rows).map_err(format)
    }
}

/// Decoded rows.
pub(crate) struct Rows(pub(crate) RecordBatch);

impl Weigh for Rows {
    fn weight_bytes(&self) -> usize {
        self.0.get_array_memory_size()
    }
}

/// The memory of a decoded column.
struct DecodedSize {
    /// A lower bound of the size.
    bytes: u64,
    /// Whether the size is close to this bound.
    is_known: bool,
}

/// A column's decoded size as the footer tells it. The size of its pages is no bound: a value that
/// comes again and again is encoded to nearly nothing.
fn decoded_bytes(column: &ColumnChunkMetaData) -> DecodedSize {
    let number = |value: i64| u64::try_from(value).unwrap_or(0);
    let encoded = number(column.uncompressed_size());
    let values = number(column.num_values());
    let width = match column.column_type() {
        Type::BOOLEAN => 1,
        Type::INT32 | Type::FLOAT => 4,
        Type::INT64 | Type::DOUBLE => 8,
        Type::INT96 => 12,
        Type::FIXED_LEN_BYTE_ARRAY => number(column.column_descr().type_length().into()),
        Type::BYTE_ARRAY => {
            let texts = column.unencoded_byte_array_data_bytes().map(number);
            // Where they end, in four bytes each.
            let bytes = texts.unwrap_or(encoded).saturating_add(values.saturating_mul(4));
            let has_dictionary = column.dictionary_page_offset().is_some();
            return DecodedSize { bytes, is_known: texts.is_some() || !has_dictionary };
        }
    };
    DecodedSize { bytes: encoded.max(values.saturating_mul(width)), is_known: true }
}

impl Footer {
    /// Rows of each slice of a row group but the last.
    pub(crate) fn slice_rows(&self, group: usize, columns: &SchemaRef) -> u64 {
        let rows = self.group_rows(group) as u64;
        let metadata = self.metadata.metadata().row_group(group);
        let leaves = self.leaves_of(columns);
        let decoded = |leaf: &usize| decoded_bytes(metadata.column(*leaf));
        let bytes = leaves.iter().map(decoded).map(|size| size.bytes).fold(0, u64::saturating_add);
        let least = if leaves.iter().map(decoded).all(|size| size.is_known) {
            1
        } else {
            rows.div_ceil(UNKNOWN_ROWS)
        };
        // At least one row, and slices of equal length.
        let slices = bytes.div_ceil(SLICE_BYTES).max(least).clamp(1, rows.max(1));
        rows.max(1).div_ceil(slices)
    }

    /// The memory of a decoded row, by the first row group and as far as the footer tells.
    pub(crate) fn row_bytes(&self, columns: &SchemaRef) -> u64 {
        let Some(group) = self.metadata.metadata().row_groups().first() else { return 0 };
        let leaves = self.leaves_of(columns).into_iter();
        let sizes = leaves.map(|leaf| decoded_bytes(group.column(leaf)).bytes);
        sizes.fold(0, u64::saturating_add) / u64::try_from(group.num_rows()).unwrap_or(1).max(1)
    }

    /// Begins to decode a row group at a slice.
    ///
    /// # Errors
    /// [`DataError::ShardFormat`], and the errors of reading the file.
    pub(crate) fn slices_from(
        &self,
        file: &ShardFile,
        group: usize,
        slice: usize,
        columns: &SchemaRef,
    ) -> Result<SliceReader, DataError> {
        let rows = self.group_rows(group);
        let slice_rows = self.slice_rows(group, columns) as usize;
        let ranges: Vec<Range<u64>> = self.chunk_ranges(group, &RowKind::Columns(columns.clone()));
        let chunks = Chunks::read(file, self, group, ranges)?;
        let leaves = self.leaves_of(columns);
        let before = (slice * slice_rows).min(rows);
        let batches = guarded("decode", file.path(), || {
            let wanted = ProjectionMask::leaves(self.metadata.parquet_schema(), leaves);
            let builder =
                ParquetRecordBatchReaderBuilder::new_with_metadata(chunks, self.metadata.clone())
                    .with_projection(wanted)
                    .with_row_groups(vec![group])
                    .with_batch_size(slice_rows);
            if before == 0 {
                return builder.build();
            }
            let selection = RowSelection::from(vec![
                RowSelector::skip(before),
                RowSelector::select(rows - before),
            ]);
            builder.with_row_selection(selection).build()
        })?;
        Ok(SliceReader { batches, next: slice, rows_left: rows - before })
    }
}
