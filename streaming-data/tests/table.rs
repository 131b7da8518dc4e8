//! Rows of any columns in the canonical order: every type, any number of readers, any position.

use std::{
    fs::File,
    iter::once,
    num::{NonZeroU64, NonZeroUsize},
    ops::Range,
    path::Path,
    sync::Arc,
};

use arrow::{
    array::{
        Array, ArrayRef, AsArray, DictionaryArray, Float64Array, Int32Builder, Int64Array,
        ListBuilder, RecordBatch, StringArray, StructArray,
    },
    compute::concat_batches,
    datatypes::{DataType, Field, Int32Type, Int64Type, Schema, UInt16Type},
};
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};
use tempfile::TempDir;
use tidemill_streaming_data::{
    DataError, DataSettings,
    data_set::table::{Columns, RowBatch, Table, TableDecoder, TableSettings},
    order::cursor::Cursor,
    order::{ShuffleOrder, ShuffleSettings},
};

const ROWS: [usize; 4] = [70, 1, 130, 44];

fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(60).unwrap(), seed: 17 }
}

fn settings(threads: usize, memory_bytes: usize, batch_rows: usize) -> TableSettings {
    let number = |number| NonZeroUsize::new(number).unwrap();
    TableSettings { threads: number(threads), memory_bytes, batch_rows: number(batch_rows) }
}

/// Rows that all differ, with a null here and there, nested and in dictionaries.
fn rows(shard: usize, count: usize) -> RecordBatch {
    let id = |row: usize| (shard * 1000 + row) as i64;
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values((0..count).map(id)));
    let text = |row: usize| format!("text {} {}", id(row), "x".repeat(row % 23));
    let texts: StringArray = (0..count).map(|row| (row % 7 != 3).then(|| text(row))).collect();
    let kinds: DictionaryArray<UInt16Type> =
        (0..count).map(|row| ["web", "code", "books"][id(row) as usize % 3]).collect();
    let mut lists = ListBuilder::new(Int32Builder::new());
    for row in 0..count {
        match row % 5 {
            4 => lists.append_null(),
            length => {
                (0..length)
                    .for_each(|at| lists.values().append_option((at != 1).then_some(row as i32)));
                lists.append(true);
            }
        }
    }
    let inner: ArrayRef =
        Arc::new(Float64Array::from_iter_values((0..count).map(|r| r as f64 / 7.0)));
    let field = Arc::new(Field::new("score", DataType::Float64, false));
    let nested = StructArray::from(vec![(field, inner)]);
    RecordBatch::try_from_iter([
        ("id", ids),
        ("text", Arc::new(texts) as ArrayRef),
        ("kind", Arc::new(kinds) as ArrayRef),
        ("list", Arc::new(lists.finish()) as ArrayRef),
        ("nested", Arc::new(nested) as ArrayRef),
    ])
    .unwrap()
}

fn write(path: &Path, rows: &RecordBatch, group_rows: usize) {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(group_rows))
        .set_data_page_row_count_limit(10)
        .set_write_batch_size(5)
        .build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(properties)).unwrap();
    writer.write(rows).unwrap();
    writer.close().unwrap();
}

fn example(group_rows: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (shard, &count) in ROWS.iter().enumerate() {
        let path = folder.path().join(format!("{shard}.parquet"));
        write(&path, &rows(shard, count), group_rows);
    }
    folder
}

fn open(folder: &Path, columns: &Columns) -> Table {
    Table::open(folder, columns, &DataSettings::default()).unwrap()
}

fn named(names: &[&str]) -> Columns {
    Columns::Named(names.iter().map(|&name| name.to_owned()).collect())
}

/// The rows at positions, from what was written.
fn expected(table: &Table, shuffle: ShuffleSettings, positions: Range<u64>) -> RecordBatch {
    let order = table.order(shuffle).unwrap();
    let names = table.schema().fields().iter().map(|field| field.name().as_str());
    let names: Vec<&str> = names.collect();
    let row = |position| {
        let id = order.sample_at(position);
        let all = rows(id.shard, ROWS[id.shard]).slice(id.row as usize, 1);
        let places: Vec<_> =
            names.iter().map(|name| all.schema().index_of(name).unwrap()).collect();
        let columns = all.project(&places).unwrap().columns().to_vec();
        RecordBatch::try_new(table.schema().clone(), columns).unwrap()
    };
    concat_batches(table.schema(), &positions.map(row).collect::<Vec<_>>()).unwrap()
}

fn concat(table: &Table, batches: &[RowBatch]) -> RecordBatch {
    concat_batches(table.schema(), batches.iter().map(|batch| &batch.rows)).unwrap()
}

#[test]
fn every_order_and_type_from_any_position_with_any_memory() {
    for group_rows in [1000, 13] {
        let folder = example(group_rows);
        for columns in [Columns::All, named(&["nested", "text"]), named(&["list"])] {
            let table = open(folder.path(), &columns);
            assert_eq!((table.rows(), table.shards().len()), (245, 4));
            if let Columns::Named(asked) = &columns {
                let names = table.schema().fields().iter().map(|field| field.name());
                assert!(names.eq(asked), "in the order in which they were asked for");
            }
            for order in
                [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
            {
                for (threads, memory) in [(1, 1 << 20), (3, 5000)] {
                    let decoder =
                        TableDecoder::new(&table, shuffle(order), settings(threads, memory, 16));
                    let decoder = decoder.unwrap();
                    for start in [0, 100, 244] {
                        let reader = decoder.reader(once(start..start + 150));
                        let batches: Vec<_> = reader.map(Result::unwrap).collect();
                        let mut next = start;
                        for RowBatch { positions, rows } in &batches {
                            assert_eq!(positions.start, next, "positions follow each other");
                            assert_eq!(rows.num_rows() as u64, positions.end - positions.start);
                            assert!(rows.num_rows() <= 16);
                            next = positions.end;
                        }
                        let expected = expected(&table, shuffle(order), start..start + 150);
                        assert_eq!(concat(&table, &batches), expected, "{order} from {start}");
                    }
                }
            }
        }
    }
}

#[test]
fn batches_end_where_steps_do_for_any_number_of_workers() {
    let folder = example(50);
    let table = open(folder.path(), &named(&["id", "kind"]));
    let shuffle = shuffle(ShuffleOrder::Window);
    let decoder = TableDecoder::new(&table, shuffle, settings(2, 1 << 20, 7)).unwrap();
    let whole = expected(&table, shuffle, 0..300);
    for workers in [1, 2, 3, 10] {
        let readers: Vec<_> = (0..workers)
            .map(|worker| {
                let place = move |step: u64, part: u64| step * 30 + part * 30 / workers;
                decoder
                    .reader((0..10).map(move |step| place(step, worker)..place(step, worker + 1)))
            })
            .collect();
        let mut batches: Vec<RowBatch> =
            readers.into_iter().flatten().map(Result::unwrap).collect();
        for batch in &batches {
            let RowBatch { positions: Range { start, end }, .. } = batch;
            assert_eq!(start / 30, (end - 1) / 30, "within a step");
            let ends_share = (1..=workers).any(|part| end % 30 == part * 30 / workers % 30);
            assert!(end - start == 7 || ends_share, "{start} to {end}: short in the middle");
        }
        batches.sort_by_key(|batch| batch.positions.start);
        assert_eq!(concat(&table, &batches), whole, "{workers} workers");
    }
    // A dictionary stays one.
    let kinds = whole.column_by_name("kind").unwrap();
    assert!(kinds.as_dictionary_opt::<UInt16Type>().is_some(), "{:?}", kinds.data_type());
    let ids = whole.column_by_name("id").unwrap().as_primitive::<Int64Type>();
    assert_eq!(ids.values().len(), 300);
    // A stream of it can be resumed, by its identity and position.
    let saved = Cursor { position: 77, ..Cursor::start(table.identity(shuffle)) };
    saved.check_resume(&open(folder.path(), &Columns::All).identity(shuffle)).unwrap();
}

/// A column that one shard declares never null may have nulls in another.
#[test]
fn shards_may_differ_in_what_can_be_null() {
    let folder = tempfile::tempdir().unwrap();
    for (name, is_nullable, numbers) in
        [("a", false, vec![Some(1), Some(2)]), ("b", true, vec![None, Some(4)])]
    {
        let field = Field::new("number", DataType::Int64, is_nullable);
        let numbers: ArrayRef = Arc::new(Int64Array::from(numbers));
        let schema = Arc::new(Schema::new(vec![field]));
        let rows = RecordBatch::try_new(schema, vec![numbers]).unwrap();
        write(&folder.path().join(format!("{name}.parquet")), &rows, 50);
    }
    let table = open(folder.path(), &Columns::All);
    let shuffle = shuffle(ShuffleOrder::None);
    let decoder = TableDecoder::new(&table, shuffle, settings(1, 1 << 20, 10)).unwrap();
    let batches: Vec<_> = decoder.reader(once(0..4)).map(Result::unwrap).collect();
    let rows = concat(&table, &batches);
    let numbers = rows.column(0).as_primitive::<Int64Type>();
    assert_eq!(numbers.iter().collect::<Vec<_>>(), [Some(1), Some(2), None, Some(4)]);
}

/// Row groups of more than a slice: all rows come, whatever is dropped in the meantime.
#[test]
fn large_row_groups_are_decoded_in_slices() {
    let folder = tempfile::tempdir().unwrap();
    let count = 3000;
    let text = |row: usize| format!("{row} {}", "lorem ipsum ".repeat(400 + row % 11));
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..count).map(text)));
    let rows = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let file = File::create(folder.path().join("a.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(properties)).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    let table = open(folder.path(), &Columns::All);
    for (order, memory) in [
        (ShuffleOrder::None, 64 << 20),
        (ShuffleOrder::Window, 64 << 20),
        (ShuffleOrder::Window, 1 << 20),
        (ShuffleOrder::Full, 64 << 20),
    ] {
        let shuffle =
            ShuffleSettings { window_samples: NonZeroU64::new(900).unwrap(), ..shuffle(order) };
        let places = table.order(shuffle).unwrap();
        let decoder = TableDecoder::new(&table, shuffle, settings(2, memory, 100)).unwrap();
        let mut read = 0;
        for batch in decoder.reader(once(0..count as u64)) {
            let RowBatch { positions, rows } = batch.unwrap();
            let found = rows.column(0).as_string::<i32>();
            for (at, position) in positions.enumerate() {
                let expected = text(places.sample_at(position).row as usize);
                assert!(found.value(at) == expected, "row of position {position}");
                read += 1;
            }
        }
        assert_eq!(read, count, "{order} in {memory} bytes");
    }
}

#[test]
fn what_is_wrong_is_said_of_the_shard_and_the_column() {
    let folder = example(50);
    let refused = |columns: &Columns, expected: &[&str]| {
        let error = Table::open(folder.path(), columns, &DataSettings::default()).unwrap_err();
        for part in expected {
            assert!(error.to_string().contains(part), "{part} is not in {error}");
        }
    };
    let there = "columns [id, text, kind, list, nested]";
    refused(&named(&["texts"]), &["0.parquet", there, "expected a column texts"]);
    refused(&named(&["id", "id"]), &["column id twice"]);
    refused(&named(&[]), &["no column"]);
    // A shard of another type, or without the column, where that column is wanted.
    let other: ArrayRef = Arc::new(StringArray::from(vec!["7"]));
    let other = RecordBatch::try_from_iter([("id", other)]).unwrap();
    write(&folder.path().join("9.parquet"), &other, 50);
    refused(
        &named(&["id"]),
        &["9.parquet", "column id of type Utf8", "expected column id of type Int64"],
    );
    refused(&named(&["text"]), &["9.parquet", "columns [id]", "expected column text of type Utf8"]);
    let empty = tempfile::tempdir().unwrap();
    let error = Table::open(empty.path(), &Columns::All, &DataSettings::default()).unwrap_err();
    assert!(matches!(error, DataError::NoShards { .. }), "{error}");
    let missing = empty.path().join("nowhere");
    let error = Table::open(missing, &Columns::All, &DataSettings::default()).unwrap_err();
    assert!(matches!(error, DataError::NotAFolder { .. }), "{error}");

    // Damage after opening is an error at its place, not a panic.
    let folder = example(50);
    let table = open(folder.path(), &Columns::All);
    let path = folder.path().join("2.parquet");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[10..400].fill(0xa5);
    std::fs::write(&path, bytes).unwrap();
    let shuffle = shuffle(ShuffleOrder::None);
    let decoder = TableDecoder::new(&table, shuffle, settings(2, 1 << 20, 7)).unwrap();
    let results: Vec<_> = decoder.reader(once(0..245)).collect();
    let (last, before) = results.split_last().unwrap();
    assert!(before.iter().all(Result::is_ok) && before.len() >= 71 / 7);
    assert!(last.as_ref().unwrap_err().to_string().contains("2.parquet"));
}

#[test]
fn types_of_lists_are_told() {
    // Guards the helper above: lists hold nulls.
    let all = rows(0, 10);
    let lists = all.column_by_name("list").unwrap().as_list::<i32>();
    assert!(lists.is_null(4) && lists.value(2).as_primitive::<Int32Type>().is_null(1));
}
