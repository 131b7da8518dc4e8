//! Pages of every form, written by `parquet`, decoded alone.

use std::{fs, path::Path, sync::Arc};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Int64Array, ListArray, RecordBatch, UInt16Array},
    buffer::OffsetBuffer,
    datatypes::Field,
};
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, Encoding, ZstdLevel},
    file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion},
};

use super::*;
use crate::shard::{Footer, ShardFile};

const ROW_TOKENS: usize = 9;
const ROWS: usize = 1000;
const RULE: RowRule = RowRule { row_tokens: ROW_TOKENS, vocab_size: Some(900) };

fn write(path: &Path, lists: ArrayRef, properties: WriterPropertiesBuilder) {
    let batch = RecordBatch::try_from_iter([("tokens", lists)]).unwrap();
    let properties = properties.set_data_page_size_limit(500).set_write_batch_size(4).build();
    let file = fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn token(at: usize) -> u16 {
    (at * 7 % 900) as u16
}

/// Rows without nulls, as `prepare` writes them except for the width of tokens.
fn fixed() -> ArrayRef {
    let item = Arc::new(Field::new("element", DataType::UInt16, false));
    let tokens = UInt16Array::from_iter_values((0..ROW_TOKENS * ROWS).map(token));
    Arc::new(FixedSizeListArray::new(item, ROW_TOKENS as i32, Arc::new(tokens), None))
}

/// Rows and tokens that might be null, as other writers write them.
fn nullable(null: Option<usize>) -> ArrayRef {
    let item = Arc::new(Field::new("item", DataType::Int64, true));
    let tokens: Int64Array =
        (0..ROW_TOKENS * ROWS).map(|at| (Some(at) != null).then(|| i64::from(token(at)))).collect();
    let offsets = OffsetBuffer::from_lengths([ROW_TOKENS; ROWS]);
    Arc::new(ListArray::new(item, offsets, Arc::new(tokens), None))
}

/// Pieces of the file that were decoded the short way, of how many; none without a directory.
fn short_way(path: &Path, rule: RowRule) -> Option<(usize, usize)> {
    let bytes = fs::read(path).unwrap();
    let read = |range: Range<u64>, out: &mut Vec<u8>| {
        out.clear();
        out.extend_from_slice(&bytes[range.start as usize..range.end as usize]);
        Ok(())
    };
    let footer = Footer::read(&ShardFile::open(path).unwrap()).unwrap();
    let mut scratch = Scratch::default();
    let column = footer.column(path, 0).unwrap();
    let mut directory = PageDirectory::find(column, rule, &read, &mut scratch).unwrap()?;
    // A piece for each page.
    directory.pieces = (0..directory.pages.len())
        .map(|at| Piece { first: directory.pages[at].first, pages: at..at + 1 })
        .collect();
    let mut decoded = Vec::new();
    for piece in 0..directory.pieces.len() {
        decoded.push(directory.decode(piece, &read, &mut scratch).unwrap());
    }
    for row in 0..ROWS {
        let places = (row * ROW_TOKENS) as u64..((row + 1) * ROW_TOKENS) as u64;
        let pieces = &decoded[directory.pieces_of(row as u64)];
        if pieces.iter().all(Option::is_some) {
            let mut tokens = Vec::new();
            for piece in pieces.iter().flatten() {
                assert_ne!(piece.copy_to(places.clone(), &mut tokens), 0, "needed");
            }
            let expected: Vec<u32> =
                (places.start..places.end).map(|at| u32::from(token(at as usize))).collect();
            assert_eq!(tokens, expected, "row {row}");
        }
    }
    let short = decoded.iter().flatten().count();
    Some((short, decoded.len()))
}

/// No common form may fall back in silence to the long way.
#[test]
fn pages_of_every_common_form_are_decoded_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        for compression in [
            Compression::ZSTD(ZstdLevel::default()),
            Compression::SNAPPY,
            Compression::UNCOMPRESSED,
        ] {
            for dictionary in [false, true] {
                for lists in [fixed(), nullable(None)] {
                    let properties = WriterProperties::builder()
                        .set_writer_version(version)
                        .set_compression(compression)
                        .set_dictionary_enabled(dictionary);
                    let properties = match dictionary {
                        true => properties,
                        false => properties.set_encoding(Encoding::PLAIN),
                    };
                    write(&path, lists, properties);
                    let (short, all) = short_way(&path, RULE).expect("a directory");
                    assert_eq!(short, all, "{version:?} {compression:?} {dictionary}");
                    assert!(all > 20, "many pages");
                    // The general reader says which defect it is.
                    let few = RowRule { vocab_size: Some(899), ..RULE };
                    assert!(short_way(&path, few).is_none_or(|(short, all)| short < all));
                    let longer = RowRule { row_tokens: ROW_TOKENS + 1, ..RULE };
                    assert_eq!(short_way(&path, longer), None);
                }
            }
        }
    }
}

#[test]
fn pages_with_a_null_or_of_another_form_are_left_to_the_long_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    for dictionary in [false, true] {
        for null in [0, 4567, ROW_TOKENS * ROWS - 1] {
            let properties = WriterProperties::builder().set_dictionary_enabled(dictionary);
            write(&path, nullable(Some(null)), properties);
            let (short, all) = short_way(&path, RULE).expect("a directory");
            assert_eq!(short, all - 1, "all but the page with the null");
        }
    }
    let delta = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BINARY_PACKED);
    write(&path, fixed(), delta);
    assert_eq!(short_way(&path, RULE), None);
    let lz4 = WriterProperties::builder().set_compression(Compression::LZ4_RAW);
    write(&path, fixed(), lz4);
    assert_eq!(short_way(&path, RULE), None);
}
