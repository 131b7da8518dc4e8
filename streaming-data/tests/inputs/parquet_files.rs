//! Parquet with a column of text.
//!
//! Seen red: with nulls of a group taken for texts, nulls that are not counted, the way to a nested column
//! before a column's own name, columns of other types accepted, rows counted wrongly, and the wrong byte told.

use std::{fs, fs::File, path::Path, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray, StructArray},
    compute::cast,
    datatypes::{DataType, Field, Schema},
};
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, ZstdLevel},
    data_type::{ByteArray, ByteArrayType},
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};
use tidemill_streaming_data::prepare::{PrepareSettings, SkipReason};

use crate::support::{Bench, broken, documents, skipped};

/// Writes columns with row groups of 300 rows and pages of about 4 KiB.
fn write(path: &Path, columns: Vec<(&str, ArrayRef)>, compression: Compression) {
    let batch = RecordBatch::try_from_iter_with_nullable(
        columns.into_iter().map(|(name, column)| (name, column, true)),
    )
    .unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(300))
        .set_data_page_size_limit(4096)
        .set_compression(compression)
        .build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn strings(documents: &[String]) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(documents))
}

fn dictionary() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}

#[test]
fn the_same_shards_as_of_texts_for_every_kind_of_string() {
    let bench = Bench::new();
    let documents = documents();
    let (texts, expected) = bench.as_texts(&documents);
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..documents.len() as i64));
    for (kind, compression) in [
        (DataType::Utf8, Compression::UNCOMPRESSED),
        (DataType::LargeUtf8, Compression::SNAPPY),
        (DataType::Utf8View, Compression::ZSTD(ZstdLevel::default())),
        (dictionary(), Compression::LZ4_RAW),
    ] {
        let column = cast(&strings(&documents), &kind).unwrap();
        let columns = vec![("a", Arc::clone(&numbers)), ("text", column)];
        write(&bench.path("in.parquet"), columns, compression);
        let (report, files) = bench.prepare_with_all_workers(&["in.parquet"]);
        assert!(files == expected, "{kind}");
        assert_eq!(
            (report.documents, report.empty, report.nulls, report.text_bytes),
            (texts.documents, texts.empty, 0, texts.text_bytes),
            "{kind}"
        );
    }
}

#[test]
fn nulls_and_nested_columns() {
    let bench = Bench::new();
    let documents = documents();
    let (_, expected) = bench.as_lines(&documents);
    // A null of the text, or of the group that it is in.
    let rows = documents.iter().flat_map(|text| [None, Some(text), Some(text)]);
    let texts: ArrayRef = Arc::new(rows.collect::<StringArray>());
    let valid: Vec<bool> = (0..texts.len()).map(|row| row % 3 != 1).collect();
    let field = Arc::new(Field::new("body.plain", DataType::Utf8, true));
    let group = StructArray::new(vec![field].into(), vec![texts], Some(valid.into()));
    write(&bench.path("in.parquet"), vec![("a", Arc::new(group))], Compression::SNAPPY);
    let settings = bench.settings(&["in.parquet"]);
    let settings = PrepareSettings { text_key: Some("a.body.plain".to_owned()), ..settings };
    let (report, files) = bench.prepare(&settings).unwrap();
    assert!(files == expected);
    assert_eq!(report.nulls, 2000);
    // A column's own name comes before the way to another.
    let other = Arc::new(StringArray::from(vec![Some("of that name"); 10]));
    let none = Arc::new(StringArray::from(vec![Some("nested"); 10]));
    let field = Arc::new(Field::new("b", DataType::Utf8, true));
    let group = StructArray::new(vec![field].into(), vec![none], None);
    let columns: Vec<(&str, ArrayRef)> = vec![("a", Arc::new(group)), ("a.b", other)];
    write(&bench.path("in.parquet"), columns, Compression::SNAPPY);
    let settings = PrepareSettings { text_key: Some("a.b".to_owned()), ..settings };
    assert_eq!(bench.prepare(&settings).unwrap().0.text_bytes, 120);
}

#[test]
fn wrong_columns_are_errors_that_name_what_is_there() {
    let bench = Bench::new();
    let path = bench.path("in.parquet");
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
    let bytes = cast(&strings(&["a".into(), "b".into()]), &DataType::Binary).unwrap();
    let list =
        arrow::array::ListArray::from_iter_primitive::<arrow::datatypes::Int32Type, _, _>(vec![
            Some(vec![Some(1)]),
        ]);
    let cases: Vec<(Vec<(&str, ArrayRef)>, &str)> = vec![
        (vec![("x", Arc::clone(&numbers)), ("body", bytes.clone())], "found columns x, body"),
        (vec![("text", numbers)], "found column \"text\" of type INT64"),
        (vec![("text", bytes)], "found column \"text\" of type BYTE_ARRAY"),
        (vec![("text", Arc::new(list))], "found column \"text\" of lists or groups"),
    ];
    for (columns, part) in cases {
        write(&path, columns, Compression::SNAPPY);
        let refused = bench.refused(&bench.settings(&["in.parquet"]));
        let expected = format!("in.parquet: {part}");
        assert!(refused.contains(&expected), "{expected}: {refused}");
        let expected = "expected a column \"text\" of strings; --text-key names another";
        assert!(refused.ends_with(expected), "{refused}");
    }
}

#[test]
fn damaged_files_and_texts_that_are_not_utf8_are_named() {
    let bench = Bench::new();
    let documents = documents();
    let path = bench.path("in.parquet");
    write(&path, vec![("text", strings(&documents))], Compression::SNAPPY);
    let whole = fs::read(&path).unwrap();
    // In the second half, somewhere in a page.
    let mut damaged = whole.clone();
    for byte in &mut damaged[whole.len() * 3 / 4..][..5000] {
        *byte = 0xff;
    }
    fs::write(&path, damaged).unwrap();
    let (report, files) = bench.prepare_with_all_workers(&["in.parquet"]);
    let SkipReason::Damaged { from, .. } = &report.skipped[0].reason else { panic!("{report:?}") };
    let before: usize = from.to_string().strip_prefix("row ").unwrap().parse().unwrap();
    assert!(before > 300, "{from}");
    let (_, expected) = bench.as_lines(&documents[..before]);
    assert!(files == expected, "rows before {from}");
    let refused = bench.refused_strictly(&["in.parquet"]);
    assert!(refused.contains(&format!("in.parquet: it is damaged from {from} on: ")), "{refused}");

    fs::write(&path, &whole[..whole.len() - 9]).unwrap();
    bench.write("empty.parquet", "");
    bench.write("z.txt", "long enough for a row or two, but no more");
    let (report, _) = bench.prepare_with_all_workers(&["in.parquet", "empty.parquet", "z.txt"]);
    let skipped = skipped(&report);
    assert_eq!((&*skipped[0].0, &*skipped[1].0), ("empty.parquet", "in.parquet"));
    for (_, reason) in &skipped {
        assert!(reason.starts_with("it is not a Parquet file, or a damaged one: "), "{reason}");
    }
    let refused = bench.refused_strictly(&["in.parquet"]);
    assert!(refused.contains("in.parquet: it is not a Parquet file"), "{refused}");

    // A writer that does not care what it calls UTF-8.
    let schema = parse_message_type("message m { required binary text (UTF8); }").unwrap();
    let file = File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: [&[u8]; 3] = [b"a good document", b"ba\xffd", b"another good document"];
    let values = values.map(|value| ByteArray::from(value.to_vec()));
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let (report, _) = bench.prepare_with_all_workers(&["in.parquet"]);
    assert_eq!((report.documents, report.broken, report.text_bytes), (2, 1, 36));
    assert_eq!(broken(&report), ["row 1: it is not UTF-8 at byte 2"]);
    let refused = bench.refused_strictly(&["in.parquet"]);
    assert!(refused.starts_with("cannot take row 1 of "), "{refused}");
}

/// Of files that tests/fixtures/parquet/generate.py has written.
#[test]
fn a_page_has_the_text_of_its_checksum_and_a_codec_that_is_not_read_is_named() {
    let bench = Bench::new();
    let fixture = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        fs::read(folder.join(name)).unwrap()
    };
    bench.write("z.txt", "long enough for a row or two, but no more");
    let skipped_of = |content: &[u8]| {
        bench.write("in.parquet", content);
        let (report, _) = bench.prepare_with_all_workers(&["in.parquet", "z.txt"]);
        skipped(&report).into_iter().map(|(_, reason)| reason).collect::<Vec<_>>()
    };
    let mut whole = fixture("page-checksums.parquet");
    assert_eq!(skipped_of(&whole), [""; 0]);
    let text = b"the tide turns";
    let at = whole.windows(text.len()).position(|part| part == text).unwrap();
    whole[at] ^= 1;
    let reasons = skipped_of(&whole);
    assert!(reasons[0].starts_with("it is damaged from row 0 on: "), "{reasons:?}");
    assert!(reasons[0].contains("checksum"), "{reasons:?}");
    let reasons = skipped_of(&fixture("brotli.parquet"));
    assert!(reasons[0].starts_with("its column is compressed by Brotli, expected"), "{reasons:?}");
}

#[test]
fn a_file_without_rows_has_no_documents() {
    let bench = Bench::new();
    let schema = Arc::new(Schema::new(vec![Field::new("text", DataType::Utf8, true)]));
    let file = File::create(bench.path("a.parquet")).unwrap();
    ArrowWriter::try_new(file, schema, None).unwrap().close().unwrap();
    bench.write("b.txt", "long enough for a row or two, but no more");
    let (report, _) = bench.prepare_with_all_workers(&["a.parquet", "b.txt"]);
    assert_eq!((report.documents, report.skipped.len()), (1, 0));
}
