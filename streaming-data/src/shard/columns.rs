//! Rows of any columns: slices of a row group as Arrow record batches.
//!
//! Only the pages of the columns that are wanted are read. A row group is decoded in slices, so that
//! memory does not depend on the size of row groups; since pages can only be decoded one after the
//! other, a [`SliceReader`] that has come to a slice is kept and goes on from there.

use std::ops::Range;

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use parquet::{
    arrow::{
        ProjectionMask,
        arrow_reader::{
            ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
        },
    },
    errors::ParquetError,
};

use super::{Footer, RowKind, ShardFile, chunk::Chunks, guarded};
use crate::{cache::Weigh, error::DataError};

/// Decoded bytes of a slice, as the footer tells them.
const SLICE_BYTES: u64 = 4 << 20;

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
        // In the order that was asked for, whatever that of the file is.
        let places: Result<Vec<usize>, _> =
            columns.fields().iter().map(|field| batch.schema().index_of(field.name())).collect();
        let format = |source: arrow::error::ArrowError| DataError::ShardFormat {
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

impl Footer {
    /// Rows of each slice of a row group but the last.
    pub(crate) fn slice_rows(&self, group: usize, columns: &SchemaRef) -> u64 {
        let rows = self.group_rows(group) as u64;
        let metadata = self.metadata.metadata().row_group(group);
        let bytes: u64 = self
            .leaves_of(columns)
            .into_iter()
            .map(|leaf| u64::try_from(metadata.column(leaf).uncompressed_size()).unwrap_or(0))
            .sum();
        // At least one row, and slices of equal length.
        let slices = bytes.div_ceil(SLICE_BYTES).clamp(1, rows.max(1));
        rows.max(1).div_ceil(slices)
    }

    /// Begins to decode a row group at a slice.
    ///
    /// # Errors
    /// [`DataError::ShardFormat`], and those of reading the file.
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
