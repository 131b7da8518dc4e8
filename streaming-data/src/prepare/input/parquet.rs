//! Parquet: a document a row, its text in a column of strings.
//!
//! The column is read as its values, page by page, and not as Arrow arrays: so it does not matter
//! which of Arrow's kinds of strings a writer had (small, large, views, dictionaries), a value that
//! is not UTF-8 costs one row instead of the rest of the file, and a part ends where its texts are
//! large enough, however many rows a row group has. In memory are the current page, the dictionary of
//! its row group, and the part.

use std::{
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use parquet::{
    basic::{Compression, ConvertedType, LogicalType, Type as PhysicalType},
    column::reader::ColumnReaderImpl,
    data_type::{ByteArray, ByteArrayType},
    errors::ParquetError,
    file::reader::{FileReader, SerializedFileReader},
    schema::types::{ColumnDescriptor, SchemaDescriptor},
};

mod pages;

use self::pages::BoundedPages;
use super::{
    Limits, More, Next, Part, ReadFailure, ReadParts,
    values::{Texts, Values},
};
use crate::{
    prepare::{
        PrepareError,
        input::skip::{Place, SkipReason},
    },
    shard::panic_text,
};

/// Rows of a part, however short their texts.
const PART_ROWS: usize = 1 << 16;

/// How many columns an error names.
const NAMED_COLUMNS: usize = 20;

/// A column of a file being read.
pub(crate) struct TextColumn {
    path: Arc<Path>,
    reader: SerializedFileReader<File>,
    /// The same file, to look at headers of pages.
    file: File,
    /// The file's size.
    bytes: u64,
    /// The column's place among the leaves of the schema.
    leaf: usize,
    /// Values with a lower level are nulls.
    defined: i16,
    /// The current row group.
    group: usize,
    /// Its column, once it was begun, and its rows that were not read.
    column: Option<(ColumnReaderImpl<ByteArrayType>, u64)>,
    /// The current value, and its level.
    value: Vec<ByteArray>,
    level: Vec<i16>,
    /// The next row of the file.
    row: u64,
    rows: u64,
    /// Why nothing more can be read.
    failure: Option<ParquetError>,
}

impl TextColumn {
    /// Opens a file that has the column.
    ///
    /// # Errors
    /// [`SkipReason::Unreadable`] or [`SkipReason::NotParquet`] to be skipped, and
    /// [`PrepareError::InputColumn`].
    pub(crate) fn open(path: &Path, key: &str) -> Result<TextColumn, ReadFailure> {
        let unreadable = |error: std::io::Error| ReadFailure::Skip(error.into());
        let file = tidemill_files::open(path).map_err(unreadable)?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        let reader = file.try_clone().map_err(unreadable)?;
        let reader = guarded(|| SerializedFileReader::new(reader))
            .map_err(|source| ReadFailure::Skip(SkipReason::NotParquet { source }))?;
        let metadata = reader.metadata().file_metadata();
        let leaf = find_column(metadata.schema_descr(), key).map_err(|found| {
            let expected = format!("a column {key:?} of strings; --text-key names another");
            ReadFailure::Fatal(PrepareError::InputColumn { path: path.to_owned(), found, expected })
        })?;
        let mut groups = reader.metadata().row_groups().iter();
        let unread = groups.find_map(|group| match group.column(leaf).compression() {
            Compression::BROTLI(_) => Some("Brotli"),
            Compression::LZO => Some("LZO"),
            _ => None,
        });
        if let Some(found) = unread {
            return Err(ReadFailure::Skip(SkipReason::Codec { found }));
        }
        let defined = metadata.schema_descr().column(leaf).max_def_level();
        let rows = reader.metadata().row_groups().iter().map(|group| group.num_rows());
        let rows = rows.map(|rows| u64::try_from(rows).unwrap_or(0)).sum();
        Ok(TextColumn {
            path: path.into(),
            reader,
            file,
            bytes,
            leaf,
            defined,
            group: 0,
            column: None,
            value: Vec::new(),
            level: Vec::new(),
            row: 0,
            rows,
            failure: None,
        })
    }

    /// Appends the next row; none at the end of the file. One at a time: a part ends with the row that
    /// fills it, however large the texts are.
    fn read_row(&mut self, rows: &mut Values, limits: Limits) -> Result<Option<()>, ParquetError> {
        loop {
            let (column, left) = match &mut self.column {
                Some(column) => column,
                None if self.group == self.reader.num_row_groups() => return Ok(None),
                none => {
                    let group = self.reader.get_row_group(self.group)?;
                    let pages = BoundedPages::new(&*group, self.leaf, &self.file)?;
                    let description = group.metadata().column(self.leaf).column_descr_ptr();
                    let column = ColumnReaderImpl::new(description, Box::new(pages));
                    let rows = u64::try_from(group.metadata().num_rows()).unwrap_or(0);
                    none.insert((column, rows))
                }
            };
            self.value.clear();
            self.level.clear();
            let levels = Some(&mut self.level);
            let (read, ..) = column.read_records(1, levels, None, &mut self.value)?;
            if read == 0 && *left == 0 {
                self.column = None;
                self.group += 1;
                continue;
            }
            let short = || ParquetError::EOF("a row group has other rows than it says".to_owned());
            *left = left.checked_sub(1).filter(|_| read == 1).ok_or_else(short)?;
            let is_null = self.defined > 0 && *self.level.first().ok_or_else(short)? < self.defined;
            match is_null {
                true => rows.push_null(),
                false => rows.push(self.value.first().ok_or_else(short)?.data(), limits),
            }
            // It would keep its page in memory.
            self.value.clear();
            return Ok(Some(()));
        }
    }
}

impl ReadParts for TextColumn {
    fn next_part(&mut self, limits: Limits) -> Result<Next, ReadFailure> {
        let first_row = self.row;
        let mut rows = Values::new(first_row, Place::Row);
        let mut more = More::Yes;
        while self.failure.is_none()
            && rows.value_bytes() < limits.part_bytes
            && rows.len() < PART_ROWS
        {
            match guarded(|| self.read_row(&mut rows, limits)) {
                Ok(None) => {
                    more = More::No;
                    break;
                }
                Ok(Some(())) => self.row += 1,
                Err(error) => {
                    rows.truncate((self.row - first_row) as usize);
                    self.failure = Some(error);
                }
            }
        }
        if rows.len() == 0 {
            if let Some(source) = self.failure.take() {
                let from = Place::Row(self.row);
                let source = Box::new(source);
                return Err(ReadFailure::Skip(SkipReason::Damaged { from, source }));
            }
            return Ok(Next { part: None, read_bytes: self.bytes, more });
        }
        // How far the file was read, by rows: its columns are all over it.
        let fraction = self.row as f64 / self.rows.max(1) as f64;
        let read_bytes = (self.bytes as f64 * fraction.min(1.0)) as u64;
        let bytes = rows.held_bytes();
        let part = Part { path: Arc::clone(&self.path), bytes, documents: Box::new(Texts(rows)) };
        Ok(Next { part: Some(part), read_bytes, more })
    }
}

/// Runs code of the Parquet reader, which may panic on a damaged file.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    // Whatever was half changed is not used again.
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        Err(ParquetError::General(format!("the Parquet reader panicked: {}", panic_text(&*panic))))
    })
}

/// The leaf that is the column of strings, or a description of the columns found instead. A name with dots is first
/// the name of a column, then the path to a nested one.
fn find_column(schema: &SchemaDescriptor, key: &str) -> Result<usize, String> {
    let leaves = schema.columns();
    let is_named = |leaf: &ColumnDescriptor| leaf.path().parts() == [key];
    let is_nested = |leaf: &ColumnDescriptor| leaf.path().string() == key;
    let leaf = leaves.iter().position(|leaf| is_named(leaf));
    let leaf = leaf.or_else(|| leaves.iter().position(|leaf| is_nested(leaf)));
    let Some(leaf) = leaf else {
        let within = format!("{key}.");
        if leaves.iter().any(|leaf| leaf.path().string().starts_with(&within)) {
            return Err(format!("column {key:?} of lists or groups"));
        }
        let mut names: Vec<_> = leaves.iter().map(|leaf| leaf.path().string()).collect();
        let others = names.len().saturating_sub(NAMED_COLUMNS);
        names.truncate(NAMED_COLUMNS);
        let others = if others == 0 { String::new() } else { format!(" and {others} others") };
        return Err(format!("columns {}{others}", names.join(", ")));
    };
    let column = &leaves[leaf];
    let is_string = column.physical_type() == PhysicalType::BYTE_ARRAY
        && (column.converted_type() == ConvertedType::UTF8
            || matches!(column.logical_type_ref(), Some(LogicalType::String)));
    if column.max_rep_level() > 0 {
        return Err(format!("column {key:?} of lists"));
    }
    if !is_string {
        let physical = column.physical_type();
        let kind = match (column.logical_type_ref(), column.converted_type()) {
            (Some(logical), _) => format!("{physical} ({logical:?})"),
            (None, ConvertedType::NONE) => physical.to_string(),
            (None, converted) => format!("{physical} ({converted})"),
        };
        return Err(format!("column {key:?} of type {kind}"));
    }
    Ok(leaf)
}
