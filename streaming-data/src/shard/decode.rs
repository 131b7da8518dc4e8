//! Row groups to checked tokens, piece by piece.
//!
//! [`Footer::pieces`] finds out how a row group can be decoded: by a page or a few at a time, the
//! short way of [`super::pages`], where the column allows it, which is how `prepare` and most other
//! writers write. This file is the long way, a whole row group through Arrow, for every other
//! column, and it finds and names the defect of a damaged one.

use std::{ops::Range, path::Path};

use arrow_array::{
    Array, ArrayRef, OffsetSizeTrait, PrimitiveArray,
    cast::AsArray,
    types::{
        ArrowPrimitiveType, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
        UInt32Type, UInt64Type,
    },
};
use arrow_schema::DataType;
use parquet::{
    arrow::{ProjectionMask, arrow_reader::ParquetRecordBatchReaderBuilder},
    errors::ParquetError,
};

use super::{
    Footer, RowRule, ShardFile, TOKENS_COLUMN,
    chunk::{Chunk, check_within, column_range, wrong_group},
    guarded,
    pages::{self, PageDirectory, Scratch},
    tokens::{DecodedTokens, Outside, TokenElement},
};
use crate::{cache::memory::Weigh, error::DataError};

/// How much of a row group is read at first to find out how long its first row is.
const FIRST_BYTES: u64 = 2 << 20;

/// How a row group is decoded.
#[derive(Debug)]
pub(crate) struct Pieces {
    rows: u64,
    row_tokens: u64,
    /// None where it is decoded whole.
    directory: Option<PageDirectory>,
}

impl Pieces {
    /// The pieces that hold a row of the row group, in order.
    pub(crate) fn of_row(&self, row: u64) -> Range<usize> {
        self.directory.as_ref().map_or(0..1, |directory| directory.pieces_of(row))
    }

    /// All pieces, one after the other.
    pub(crate) fn all(&self) -> Range<usize> {
        0..self.of_row(self.rows.saturating_sub(1)).end
    }

    /// Places of a piece's tokens in the row group.
    fn places(&self, piece: usize) -> Range<u64> {
        let whole = 0..self.rows * self.row_tokens;
        self.directory.as_ref().map_or(whole, |directory| directory.places(piece))
    }
}

impl Weigh for Pieces {
    fn weight_bytes(&self) -> usize {
        size_of::<Pieces>() + self.directory.as_ref().map_or(0, Weigh::weight_bytes)
    }
}

impl Footer {
    /// Finds out how a row group is decoded. Where it will be read in pieces it is verified now.
    pub(crate) fn pieces(
        &self,
        file: &ShardFile,
        group: usize,
        rule: RowRule,
        scratch: &mut Scratch,
    ) -> Result<Pieces, DataError> {
        // A page of a remote object would be a request: its row groups are read whole.
        let column = self.column(file.path(), group)?;
        let is_within = column_range(column.metadata).is_ok_and(|range| range.end <= file.bytes());
        let directory = match file.is_local() && is_within {
            true => {
                self.verify_group(file, group, scratch.stored())?;
                let read = |range, out: &mut Vec<u8>| file.read_into(range, out);
                PageDirectory::find(column, rule, &read, scratch)?
            }
            false => None,
        };
        let (rows, row_tokens) = (self.group_rows(group) as u64, rule.row_tokens as u64);
        Ok(Pieces { rows, row_tokens, directory })
    }

    /// Reads and decodes a piece of a row group, checking every row and token.
    pub(crate) fn decode(
        &self,
        file: &ShardFile,
        group: usize,
        pieces: &Pieces,
        piece: usize,
        rule: RowRule,
        scratch: &mut Scratch,
    ) -> Result<DecodedTokens, DataError> {
        // A verified file proves nothing of ranges that come from elsewhere.
        if let Some(directory) = pieces.directory.as_ref().filter(|_| file.is_local()) {
            let read = |range, out: &mut Vec<u8>| file.read_into(range, out);
            if let Some(tokens) = directory.decode(piece, &read, scratch)? {
                return Ok(tokens);
            }
        }
        let tokens = self.decode_whole(file, group, rule, scratch)?;
        // A piece that is not simple among others that are, or one that others decode alone.
        Ok(match &pieces.directory {
            Some(_) => tokens.cut(pieces.places(piece)),
            None => tokens,
        })
    }

    /// Reads and decodes a row group at once.
    fn decode_whole(
        &self,
        file: &ShardFile,
        group: usize,
        rule: RowRule,
        scratch: &mut Scratch,
    ) -> Result<DecodedTokens, DataError> {
        let chunk = self.read_chunk(file, group)?;
        if !file.is_local() {
            let read = |range, out: &mut Vec<u8>| chunk.read_into(file.path(), range, out);
            let column = self.column(file.path(), group)?;
            let directory = PageDirectory::find(column, rule, &read, scratch)?;
            if let Some(directory) = directory
                && let Some(tokens) = directory.decode_all(&read, scratch)?
            {
                return Ok(tokens);
            }
        }
        self.decode_through_arrow(file.path(), group, rule, chunk)
    }

    /// Tokens in the first row of the file.
    pub(crate) fn first_row_tokens(&self, file: &ShardFile) -> Result<usize, DataError> {
        let path = file.path();
        if let Some(row_tokens) = self.tokens(path)?.fixed_row_tokens() {
            return Ok(row_tokens);
        }
        let (group, _) = self.group_of(0);
        // A row group may be larger than memory, and a dictionary and a page are mostly enough.
        let column = self.column(path, group)?.metadata;
        let range = guarded("read", path, || column_range(column))?;
        let mut length = FIRST_BYTES;
        while length < range.end.saturating_sub(range.start) {
            let begin = Chunk::read_begin(file, range.start..range.start + length)?;
            // Cut off, a row group that is longer looks like a damaged one.
            if let Ok(row_tokens) = self.tokens_of_first(file, group, begin) {
                return Ok(row_tokens);
            }
            length *= 16;
        }
        self.tokens_of_first(file, group, self.read_chunk(file, group)?)
    }

    /// Tokens of the first row of a row group; `chunk` holds at least the bytes that this takes.
    fn tokens_of_first(
        &self,
        file: &ShardFile,
        group: usize,
        chunk: Chunk,
    ) -> Result<usize, DataError> {
        let root = self.tokens(file.path())?.root;
        let array = guarded("decode", file.path(), || {
            self.arrays(root, chunk, group, 1)?.next().unwrap_or_else(|| Err(short_of_rows()))
        })?;
        Ok(match array.data_type() {
            DataType::List(_) => array.as_list::<i32>().value_length(0) as usize,
            _ => array.as_list::<i64>().value_length(0) as usize,
        })
    }

    /// Compares all row groups with their hashes in the footer.
    pub(crate) fn verify_groups(&self, file: &ShardFile) -> Result<(), DataError> {
        let mut block = Vec::new();
        let groups = self.metadata.metadata().num_row_groups();
        (0..groups).try_for_each(|group| self.verify_group(file, group, &mut block))
    }

    /// Compares a row group with its hash in the footer, where that is still to be done.
    fn verify_group(
        &self,
        file: &ShardFile,
        group: usize,
        block: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        let Some(expected) = self.group_hash_for(file, group) else { return Ok(()) };
        // Where there are hashes there is one column.
        let column = self.metadata.metadata().row_group(group).column(0);
        let range = guarded("read", file.path(), || column_range(column))?;
        check_within(file, &range)?;
        let found = file.hash_range(range, block)?;
        if found != expected {
            return Err(wrong_group(file, group, expected, found));
        }
        Ok(())
    }

    fn read_chunk(&self, file: &ShardFile, group: usize) -> Result<Chunk, DataError> {
        let column = self.column(file.path(), group)?.metadata;
        let range = guarded("read", file.path(), || column_range(column))?;
        Chunk::read(file, self, group, range)
    }

    /// The column of tokens of a row group.
    pub(super) fn column(&self, path: &Path, group: usize) -> Result<pages::Column<'_>, DataError> {
        let tokens = self.tokens(path)?;
        Ok(pages::Column {
            metadata: self.metadata.metadata().row_group(group).column(tokens.leaf),
            element: &tokens.element,
            rows: self.group_rows(group),
        })
    }

    /// The column of a row group in batches of rows.
    fn arrays(
        &self,
        root: usize,
        chunk: Chunk,
        group: usize,
        batch_rows: usize,
    ) -> Result<impl Iterator<Item = Result<ArrayRef, ParquetError>> + use<>, ParquetError> {
        let tokens_only = ProjectionMask::roots(self.metadata.parquet_schema(), [root]);
        let batches =
            ParquetRecordBatchReaderBuilder::new_with_metadata(chunk, self.metadata.clone())
                .with_projection(tokens_only)
                .with_row_groups(vec![group])
                .with_batch_size(batch_rows)
                .build()?;
        Ok(batches.map(|batch| Ok(batch?.column(0).clone())))
    }

    fn decode_through_arrow(
        &self,
        path: &Path,
        group: usize,
        rule: RowRule,
        chunk: Chunk,
    ) -> Result<DecodedTokens, DataError> {
        let (root, expected_rows) = (self.tokens(path)?.root, self.group_rows(group));
        let arrays: Vec<ArrayRef> = guarded("decode", path, || {
            self.arrays(root, chunk, group, expected_rows.max(1))?.collect()
        })?;
        let start = self.group_start(group);
        let capacity = arrays.iter().map(|array| array.len() * rule.row_tokens).sum();
        let mut tokens = DecodedTokens::with_capacity(0, capacity, rule);
        let mut rows = 0;
        for array in &arrays {
            let first_row = start + rows as u64;
            rows += array.len();
            let place = Place { path, first_row, rule };
            let elements = match array.data_type() {
                DataType::FixedSizeList(..) => place.elements_of_fixed_size_list(array)?,
                DataType::LargeList(_) => place.elements_of_list::<i64>(array)?,
                _ => place.elements_of_list::<i32>(array)?,
            };
            place.append(&elements, &mut tokens)?;
        }
        if rows != expected_rows {
            return guarded("decode", path, || Err(short_of_rows()));
        }
        Ok(tokens)
    }
}

fn short_of_rows() -> ParquetError {
    ParquetError::EOF("a row group has fewer rows than its footer says".to_owned())
}

/// Rows being checked, and where they come from.
struct Place<'a> {
    path: &'a Path,
    /// Row of the file with which the array begins.
    first_row: u64,
    rule: RowRule,
}

impl Place<'_> {
    fn row_length(&self, row: usize, found: usize) -> DataError {
        DataError::RowLength {
            path: self.path.to_owned(),
            row: self.first_row + row as u64,
            expected: self.rule.row_tokens,
            found,
        }
    }

    fn check_no_null_row(&self, array: &ArrayRef) -> Result<(), DataError> {
        match (0..array.len()).find(|&row| array.is_null(row)) {
            Some(row) => Err(self.null(row)),
            None => Ok(()),
        }
    }

    fn null(&self, row: usize) -> DataError {
        DataError::NullToken { path: self.path.to_owned(), row: self.first_row + row as u64 }
    }

    fn elements_of_fixed_size_list(&self, array: &ArrayRef) -> Result<ArrayRef, DataError> {
        self.check_no_null_row(array)?;
        let list = array.as_fixed_size_list();
        let found = list.value_length() as usize;
        if found != self.rule.row_tokens && !list.is_empty() {
            return Err(self.row_length(0, found));
        }
        Ok(list.values().slice(list.value_offset_at(0), list.len() * found))
    }

    fn elements_of_list<O: OffsetSizeTrait>(
        &self,
        array: &ArrayRef,
    ) -> Result<ArrayRef, DataError> {
        self.check_no_null_row(array)?;
        let list = array.as_list::<O>();
        let offsets = list.value_offsets();
        for (row, ends) in offsets.windows(2).enumerate() {
            let found = (ends[1] - ends[0]).as_usize();
            if found != self.rule.row_tokens {
                return Err(self.row_length(row, found));
            }
        }
        let start = offsets[0].as_usize();
        Ok(list.values().slice(start, list.len() * self.rule.row_tokens))
    }

    fn append(&self, elements: &ArrayRef, tokens: &mut DecodedTokens) -> Result<(), DataError> {
        if let Some(at) = (0..elements.len()).find(|&at| elements.is_null(at)) {
            return Err(self.null(at / self.rule.row_tokens));
        }
        match elements.data_type() {
            DataType::Int8 => self.append_as::<Int8Type>(elements, tokens),
            DataType::Int16 => self.append_as::<Int16Type>(elements, tokens),
            DataType::Int32 => self.append_as::<Int32Type>(elements, tokens),
            DataType::Int64 => self.append_as::<Int64Type>(elements, tokens),
            DataType::UInt8 => self.append_as::<UInt8Type>(elements, tokens),
            DataType::UInt16 => self.append_as::<UInt16Type>(elements, tokens),
            DataType::UInt32 => self.append_as::<UInt32Type>(elements, tokens),
            DataType::UInt64 => self.append_as::<UInt64Type>(elements, tokens),
            other => Err(DataError::Column {
                path: self.path.to_owned(),
                found: format!("column {TOKENS_COLUMN} of lists of {other}"),
                expected: "lists of integers".to_owned(),
            }),
        }
    }

    fn append_as<T: ArrowPrimitiveType<Native: TokenElement>>(
        &self,
        elements: &ArrayRef,
        tokens: &mut DecodedTokens,
    ) -> Result<(), DataError> {
        let elements: &PrimitiveArray<T> = elements.as_primitive();
        tokens.append(elements.values().iter().copied()).map_err(|Outside { at, token }| {
            DataError::Token {
                path: self.path.to_owned(),
                row: self.first_row + (at / self.rule.row_tokens) as u64,
                token,
                vocab_size: u64::from(self.rule.last_token()) + 1,
            }
        })
    }
}
