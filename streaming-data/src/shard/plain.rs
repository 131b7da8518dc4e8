//! The short way from pages to tokens: a column as `prepare` writes it.
//!
//! A general reader spends most of its time on the levels that give lists their shape. Where every
//! row is known to have the same length, the levels only have to be *compared* with what they must
//! be, at eight to a byte or thousands to a run, and the values of a PLAIN page are the bytes that
//! they are. Everything that is not exactly so (another encoding, a null, a row of another length,
//! a token outside of the vocabulary) returns `None`: the long way of [`super::decode`] then reads
//! the column again, or says what is wrong with it.
//!
//! Levels: the Parquet format's "RLE / bit-packing hybrid" with a bit width of 1. A repetition
//! level is 0 where a row begins, else 1.

use std::sync::Arc;

use arrow::datatypes::DataType;
use bytes::Bytes;
use parquet::{
    basic::{Encoding, Type as PhysicalType},
    column::page::{Page, PageReader},
    errors::ParquetError,
    file::{metadata::ColumnChunkMetaData, serialized_reader::SerializedPageReader},
};

use super::{RowRule, chunk::Chunk, tokens::DecodedRows};

/// A column of one row group.
pub(super) struct Column<'a> {
    pub(super) metadata: &'a ColumnChunkMetaData,
    /// Type of a token.
    pub(super) element: &'a DataType,
    /// Rows of the group.
    pub(super) rows: usize,
}

/// How the bytes of a value are read.
#[derive(Clone, Copy)]
enum Width {
    Signed32,
    Unsigned32,
    Signed64,
    Unsigned64,
}

/// Decodes the column, or returns `None` when it is not in the simple form.
pub(super) fn decode(
    chunk: &Chunk,
    column: &Column<'_>,
    rule: RowRule,
) -> Result<Option<DecodedRows>, ParquetError> {
    let Some(width) = simple_width(column) else { return Ok(None) };
    let expected_tokens = column.rows * rule.row_tokens;
    let mut pages =
        SerializedPageReader::new(Arc::new(chunk.clone()), column.metadata, column.rows, None)?;
    let mut rows = DecodedRows::with_capacity(column.rows, rule);
    while let Some(page) = pages.get_next_page()? {
        let Some(page) = SimplePage::of(page) else { return Ok(None) };
        let has_room = page.count <= expected_tokens - rows.len();
        if !has_room || !are_rows(&page.repetition, page.count, rows.len(), rule.row_tokens) {
            return Ok(None);
        }
        if append(&page, width, &mut rows).is_none() {
            return Ok(None);
        }
    }
    Ok((rows.len() == expected_tokens).then_some(rows))
}

fn simple_width(column: &Column<'_>) -> Option<Width> {
    if column.metadata.column_descr().max_rep_level() != 1 {
        return None;
    }
    match (column.metadata.column_type(), column.element) {
        (PhysicalType::INT32, DataType::Int8 | DataType::Int16 | DataType::Int32) => {
            Some(Width::Signed32)
        }
        (PhysicalType::INT32, DataType::UInt8 | DataType::UInt16 | DataType::UInt32) => {
            Some(Width::Unsigned32)
        }
        (PhysicalType::INT64, DataType::Int64) => Some(Width::Signed64),
        (PhysicalType::INT64, DataType::UInt64) => Some(Width::Unsigned64),
        _ => None,
    }
}

/// The parts of a data page with PLAIN values.
struct SimplePage {
    /// Levels, and therefore values if none is null.
    count: usize,
    /// Encoded repetition levels.
    repetition: Bytes,
    values: Bytes,
}

impl SimplePage {
    fn of(page: Page) -> Option<SimplePage> {
        match page {
            Page::DataPage {
                mut buf,
                num_values,
                encoding: Encoding::PLAIN,
                def_level_encoding: Encoding::RLE,
                rep_level_encoding: Encoding::RLE,
                ..
            } => {
                let repetition = take_levels(&mut buf)?;
                take_levels(&mut buf)?;
                Some(SimplePage { count: num_values as usize, repetition, values: buf })
            }
            Page::DataPageV2 {
                mut buf,
                num_values,
                encoding: Encoding::PLAIN,
                def_levels_byte_len,
                rep_levels_byte_len,
                ..
            } => {
                let repetition = take(&mut buf, rep_levels_byte_len as usize)?;
                take(&mut buf, def_levels_byte_len as usize)?;
                Some(SimplePage { count: num_values as usize, repetition, values: buf })
            }
            _ => None,
        }
    }
}

/// Levels of a version 1 page: their length in four bytes, then they.
fn take_levels(buf: &mut Bytes) -> Option<Bytes> {
    let length = take(buf, 4)?;
    let length = u32::from_le_bytes(length[..].try_into().ok()?);
    take(buf, length as usize)
}

fn take(buf: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= buf.len()).then(|| buf.split_to(length))
}

/// Appends the values of a page; `None` when there are nulls or tokens outside of the vocabulary.
///
/// A null has a definition level but no value, so that as many values as levels mean no null: the
/// definition levels need not be read.
fn append(page: &SimplePage, width: Width, rows: &mut DecodedRows) -> Option<()> {
    fn values<const N: usize>(page: &SimplePage) -> Option<&[[u8; N]]> {
        let (values, rest) = page.values.as_chunks::<N>();
        (rest.is_empty() && values.len() == page.count).then_some(values)
    }
    match width {
        Width::Signed32 => rows.append(values(page)?.iter().map(|&v| i32::from_le_bytes(v))),
        Width::Unsigned32 => rows.append(values(page)?.iter().map(|&v| u32::from_le_bytes(v))),
        Width::Signed64 => rows.append(values(page)?.iter().map(|&v| i64::from_le_bytes(v))),
        Width::Unsigned64 => rows.append(values(page)?.iter().map(|&v| u64::from_le_bytes(v))),
    }
    .ok()
}

/// Whether `count` levels, the first of them at `position` of its column, say that a row begins at
/// every multiple of `row_tokens` and nowhere else.
fn are_rows(levels: &[u8], count: usize, position: usize, row_tokens: usize) -> bool {
    let mut left = count;
    // Levels before the next that begins a row.
    let mut until_row = (row_tokens - position % row_tokens) % row_tokens;
    let mut levels = levels.iter().copied();
    while left > 0 {
        let Some(header) = read_varint(&mut levels) else { return false };
        let length = (header >> 1) as usize;
        if length == 0 {
            return false;
        }
        if header & 1 == 0 {
            let length = length.min(left);
            match levels.next() {
                Some(0) if length == 1 && until_row == 0 => until_row = row_tokens - 1,
                Some(1) if length <= until_row => until_row -= length,
                _ => return false,
            }
            left -= length;
        } else {
            for _ in 0..length {
                let Some(packed) = levels.next() else { return false };
                // The last byte of a page is padded.
                let here = left.min(8);
                for bit in 0..here {
                    let begins_row = packed >> bit & 1 == 0;
                    if begins_row != (until_row == 0) {
                        return false;
                    }
                    until_row = if begins_row { row_tokens - 1 } else { until_row - 1 };
                }
                left -= here;
            }
        }
    }
    true
}

fn read_varint(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..35).step_by(7) {
        let byte = bytes.next()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use arrow::{
        array::{ArrayRef, FixedSizeListArray, RecordBatch, UInt16Array},
        datatypes::Field,
    };
    use parquet::{
        arrow::ArrowWriter,
        basic::{Compression, ZstdLevel},
        file::properties::{WriterProperties, WriterVersion},
    };

    use super::*;
    use crate::shard::{Footer, ShardFile, chunk::column_range};

    /// The form that `prepare` writes must not fall back in silence to the long way.
    #[test]
    fn plain_lists_of_fixed_size_take_the_short_way() {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            let (row_tokens, count) = (9, 100_u16);
            let item = Arc::new(Field::new("element", DataType::UInt16, false));
            let tokens = UInt16Array::from_iter_values(0..9 * count);
            let lists = FixedSizeListArray::new(item, 9, Arc::new(tokens), None);
            let batch = RecordBatch::try_from_iter([("tokens", Arc::new(lists) as ArrayRef)]);
            let properties = WriterProperties::builder()
                .set_writer_version(version)
                .set_dictionary_enabled(false)
                .set_encoding(Encoding::PLAIN)
                .set_compression(Compression::ZSTD(ZstdLevel::default()))
                .set_data_page_size_limit(500)
                .set_write_batch_size(4)
                .build();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.parquet");
            let batch = batch.unwrap();
            let file = fs::File::create(&path).unwrap();
            let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();

            let file = ShardFile::open(&path).unwrap();
            let footer = Footer::read(&file).unwrap();
            let metadata = footer.metadata.metadata().row_group(0).column(footer.leaf);
            let chunk = Chunk::read(&file, column_range(metadata).unwrap()).unwrap();
            let column = Column { metadata, element: &footer.element, rows: count.into() };
            let rule = RowRule { row_tokens, vocab_size: Some(900) };
            let rows = decode(&chunk, &column, rule).unwrap().expect("the short way is taken");
            for row in [0, 50, 99] {
                let expected: Vec<u32> = (row as u32 * 9..row as u32 * 9 + 9).collect();
                assert_eq!(rows.row(row), expected);
            }
            // What is wrong is left to the long way.
            let short = RowRule { vocab_size: Some(899), ..rule };
            assert!(decode(&chunk, &column, short).unwrap().is_none());
            let other = RowRule { row_tokens: 10, ..rule };
            assert!(decode(&chunk, &column, other).unwrap().is_none());
        }
    }

    #[test]
    fn levels_in_runs_and_packed_are_compared_with_rows() {
        // Rows of 11: 0, seven 1 packed; then a run of three 1; then the next row.
        let row = [0b11, 0b1111_1110, 3 << 1, 1];
        let two: Vec<u8> = [row, row].concat();
        assert!(are_rows(&two, 22, 0, 11));
        assert!(are_rows(&two, 22, 33, 11));
        assert!(!are_rows(&two, 22, 1, 11), "rows do not begin there");
        assert!(!are_rows(&two, 22, 0, 10), "rows are longer");
        assert!(!are_rows(&two, 22, 0, 22), "rows are shorter");
        assert!(!are_rows(&two, 23, 0, 11), "levels are missing");
        assert!(!are_rows(&row[..3], 11, 0, 11), "a run without its value");
        // The middle of a row only, as a version 1 page may begin.
        assert!(are_rows(&[5 << 1, 1], 5, 2, 11));
        assert!(!are_rows(&[5 << 1, 1], 5, 7, 11));
        assert!(!are_rows(&[5 << 1, 0], 5, 0, 11), "five rows of one token");
        assert!(are_rows(&[1 << 1, 0], 1, 11, 11));
        // A packed byte of which five bits are padding.
        assert!(are_rows(&[0b11, 0b0000_0110], 3, 0, 3));
        assert!(!are_rows(&[0b11, 0b0000_0110], 4, 0, 4));
        assert!(!are_rows(&[0], 1, 0, 3), "an empty run");
        assert!(!are_rows(&[0xff; 9], 1, 0, 3), "a header without an end");
    }
}
