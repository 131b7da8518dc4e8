//! What is read of a shard in parts is verified in parts: the footer by the index, the row groups by
//! the footer.

use std::{
    fs,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::Path as FilePath,
    sync::{Arc, atomic::Ordering},
};

use arrow::datatypes::DataType;
use tidemill_streaming_data::{
    DataError, DataSet,
    data_set::index::{INDEX_FILE, Index},
    data_set::table::{Columns, RowBatch, Table, TableDecoder, TableSettings},
    hash::ContentHash,
    order::{SampleId, ShuffleOrder},
    prepare::{ByteTokenizer, PrepareSettings, prepare},
    store::{Location, RemoteFolder},
};

use crate::{
    ROW_TOKENS, SAMPLES, assert_line,
    faulty::{Fault, Faulty, PASSING},
    files, hasty, open, read_and_compare, settings, shuffle, store_settings,
    support::{
        Form, Hashes, ListKind, example_row, footer_range, hashed_example, row_group_hashes,
        row_groups, write_example, write_shard,
    },
};

const THIRD: &str = "shard-00002.parquet";

/// A row of the second row group of the third shard.
const SAMPLE: SampleId = SampleId { epoch: 0, shard: 2, row: 7 };

/// Changes bytes of the third shard, and gives what they were and are.
fn change(folder: &FilePath, change: impl FnOnce(&mut Vec<u8>)) -> (Vec<u8>, Vec<u8>) {
    let path = folder.join(THIRD);
    let before = fs::read(&path).unwrap();
    let mut after = before.clone();
    change(&mut after);
    fs::write(&path, &after).unwrap();
    (before, after)
}

/// Changes the index.
fn change_index(folder: &FilePath, change: impl FnOnce(&mut Index)) {
    let mut index = Index::read(folder).unwrap();
    change(&mut index);
    fs::write(folder.join(INDEX_FILE), index.to_bytes()).unwrap();
}

/// Reads one sample, and how often the third shard was asked.
fn sample(folder: &FilePath) -> (Result<Vec<u32>, DataError>, usize) {
    let store = Arc::new(Faulty::of_folder(folder, 0, &[], 0));
    let cache = tempfile::tempdir().unwrap();
    let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
    let before = store.asked.of(&format!("set/{THIRD}"));
    let sample = data_set.sample(SAMPLE);
    (sample, store.asked.of(&format!("set/{THIRD}")) - before)
}

/// Reads by ranges, in every way in which that is done, and gives the errors.
fn errors(folder: &FilePath) -> Vec<DataError> {
    let cache = tempfile::tempdir().unwrap();
    let open = |limit| {
        let store = Arc::new(Faulty::of_folder(folder, 0, &[], 0));
        open(store, &settings(cache.path(), limit)).unwrap()
    };
    let (all, few) = (open(Some(1)), open(None));
    vec![
        read_and_compare(&all, ShuffleOrder::Full, 0..82, false).unwrap_err(),
        read_and_compare(&few, ShuffleOrder::None, 20..22, true).unwrap_err(),
        few.sample(SAMPLE).unwrap_err(),
    ]
}

#[test]
fn a_footer_and_a_row_group_take_a_request_each_and_no_more_bytes_than_they_have() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    let bytes = fs::read(folder.path().join(THIRD)).unwrap();
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let cache = tempfile::tempdir().unwrap();
    let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
    let before = (store.asked.requests(), store.asked.bytes());
    assert_eq!(data_set.sample(SAMPLE).unwrap(), example_row(2, 7, ROW_TOKENS));
    let expected = footer_range(&bytes).len() + row_groups(&bytes)[1].len();
    let asked = (store.asked.requests() - before.0, store.asked.bytes() - before.1);
    assert_eq!(asked, (2, expected as u64));
}

#[test]
fn wrong_bytes_in_ranges_change_no_sample() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    for seed in 0..4 {
        let flips = Faulty::of_folder(folder.path(), seed, &[Fault::Flip], 40).only(".parquet");
        let asked = Arc::clone(&flips.asked);
        let cache = tempfile::tempdir().unwrap();
        let data_set = open(Arc::new(flips), &hasty(cache.path(), Some(1))).unwrap();
        read_and_compare(&data_set, ShuffleOrder::Full, 0..100, false).unwrap();
        let without = SAMPLES.iter().map(|rows| 1 + rows.div_ceil(5)).sum::<u64>() as usize;
        assert!(asked.requests() > 1 + without, "no byte was wrong");
        for row in 0..SAMPLES[2] {
            let id = SampleId { row, ..SAMPLE };
            assert_eq!(data_set.sample(id).unwrap(), example_row(2, row, ROW_TOKENS));
        }
    }
}

/// The same of shards that `prepare` wrote, with row groups of their real size.
#[test]
fn what_prepare_writes_is_verified_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("a.txt"), folder.path().join("set"));
    let text: String = (0..60_000).map(|word: u64| format!("{:x} ", word.pow(3))).collect();
    fs::write(&input, text).unwrap();
    let mut prepared = PrepareSettings::new(vec![input], output.clone(), nonzero(1024));
    prepared.shard_samples = Some(nonzero(400));
    prepare(&prepared, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
    let local = DataSet::open(&output).unwrap();
    assert!(local.shards().len() == 2 && local.samples() > 500, "{local:?}");
    let cache = tempfile::tempdir().unwrap();
    let flips = Faulty::of_folder(&output, 1, &[Fault::Flip], 60).only(".parquet");
    let asked = Arc::clone(&flips.asked);
    let remote = open(Arc::new(flips), &settings(cache.path(), None)).unwrap();
    for row in [0, 254, 255, 399] {
        let id = SampleId { epoch: 0, shard: 0, row };
        assert_eq!(remote.sample(id).unwrap(), local.sample(id).unwrap());
    }
    assert!(asked.of("set/shard-00000.parquet") > 1 + 4, "no byte was wrong");
    let path = output.join("shard-00000.parquet");
    let mut bytes = fs::read(&path).unwrap();
    let second = row_groups(&bytes)[1].clone();
    bytes[second.end - 1] ^= 1;
    fs::write(&path, bytes).unwrap();
    let store = Faulty::of_folder(&output, 0, &[], 0);
    let remote = open(Arc::new(store), &settings(cache.path(), None)).unwrap();
    let sample = |row| remote.sample(SampleId { epoch: 0, shard: 0, row });
    assert_line(&sample(255).unwrap_err(), &["row group 1 of shard", "is damaged"]);
    assert!(sample(254).is_ok());
}

fn nonzero(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// It is fetched four times, and named with what it is and what it should be.
#[test]
fn a_row_group_that_stays_damaged_is_named_with_its_hash() {
    let length = {
        let folder = hashed_example(&SAMPLES, ROW_TOKENS);
        row_groups(&fs::read(folder.path().join(THIRD)).unwrap())[1].len()
    };
    // Headers of pages and their content.
    for at in (0..length).step_by(41).chain([length - 1]) {
        let folder = hashed_example(&SAMPLES, ROW_TOKENS);
        let (before, after) = change(folder.path(), |bytes| {
            let start = row_groups(bytes)[1].start;
            bytes[start + at] ^= 1 << (at % 8);
        });
        let group = row_groups(&before)[1].clone();
        let [expected, found] =
            [before, after].map(|bytes| ContentHash::of(&bytes[group.clone()]).to_string());
        let named = format!("row group 1 of shard memory://store/set/{THIRD} is damaged");
        let words =
            [&*named, &format!("is {found},"), &format!("expected {expected} as the footer")];
        for error in errors(folder.path()) {
            assert_line(&error, &words);
        }
        // Others of the shard are read.
        let (sample, requests) = sample(folder.path());
        assert_line(&sample.unwrap_err(), &words);
        assert_eq!(requests, 1 + 4);
        // The footer says it without an index as well.
        fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
        for error in errors(folder.path()) {
            assert_line(&error, &words);
        }
    }
}

#[test]
fn a_footer_that_stays_damaged_is_named_with_its_hash() {
    let length = {
        let folder = hashed_example(&SAMPLES, ROW_TOKENS);
        footer_range(&fs::read(folder.path().join(THIRD)).unwrap()).len()
    };
    for at in (0..length).step_by(61).chain([length - 5, length - 1]) {
        let folder = hashed_example(&SAMPLES, ROW_TOKENS);
        let (before, after) = change(folder.path(), |bytes| {
            let start = footer_range(bytes).start;
            bytes[start + at] ^= 1 << (at % 8);
        });
        let range = footer_range(&before);
        let [expected, found] =
            [before, after].map(|bytes| ContentHash::of(&bytes[range.clone()]).to_string());
        let named = format!("the footer of shard memory://store/set/{THIRD} is damaged");
        let words =
            [&*named, &format!("is {found},"), &format!("expected {expected} as the index")];
        for error in errors(folder.path()) {
            assert_line(&error, &words);
        }
        let (sample, requests) = sample(folder.path());
        assert_line(&sample.unwrap_err(), &words);
        assert_eq!(requests, 4);
    }
}

/// Rows of any columns are read by ranges too, and verified alike.
#[test]
fn rows_of_any_columns_are_verified() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    change(folder.path(), |bytes| {
        let end = row_groups(bytes)[3].end;
        bytes[end - 1] ^= 1;
    });
    let url = "memory://damaged/rows";
    let remote = RemoteFolder::open(Location::parse(url).unwrap(), &store_settings()).unwrap();
    for (file, _) in files(folder.path()) {
        remote.put(&file, fs::read(folder.path().join(&file)).unwrap().into()).unwrap();
    }
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(cache.path(), Some(1));
    let table = Table::open(url, &Columns::All, &settings).unwrap();
    let full = shuffle(ShuffleOrder::Full);
    let decoder = TableDecoder::new(&table, full, TableSettings::default()).unwrap();
    let rows: Result<Vec<RowBatch>, DataError> =
        decoder.reader(std::iter::once(0..table.rows())).collect();
    assert_line(&rows.unwrap_err(), &["row group 3 of shard", THIRD, "as the footer says"]);
}

/// Wherever the shard is: an index that contradicts itself is no index.
#[test]
fn an_index_that_states_another_footer_is_an_error() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    change_index(folder.path(), |index| {
        let footer = index.shards[2].footer.as_mut().unwrap();
        footer.hash = ContentHash::of(b"another");
    });
    let words = [THIRD, "the footer of shard", "is damaged", "as the index says"];
    let expected = ContentHash::of(b"another").to_string();
    for error in errors(folder.path()) {
        assert_line(&error, &words);
        assert_line(&error, &[&format!("expected {expected}")]);
    }
    let local = DataSet::open(folder.path()).unwrap();
    assert_line(&local.sample(SAMPLE).unwrap_err(), &words);
    // A footer of another size is another footer.
    for bytes in [9, 1000] {
        change_index(folder.path(), |index| index.shards[2].footer.as_mut().unwrap().bytes = bytes);
        for error in errors(folder.path()) {
            assert_line(&error, &words);
        }
    }
}

/// An index of before there were footers in it: what the footers say holds, what they are does not.
#[test]
fn an_index_without_footers_is_read() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    change_index(folder.path(), |index| {
        index.shards.iter_mut().for_each(|shard| shard.footer = None);
    });
    let store = Faulty::of_folder(folder.path(), 3, &PASSING, 30);
    let cache = tempfile::tempdir().unwrap();
    let data_set = open(Arc::new(store), &hasty(cache.path(), Some(1))).unwrap();
    read_and_compare(&data_set, ShuffleOrder::Full, 0..100, false).unwrap();
    change(folder.path(), |bytes| {
        let end = row_groups(bytes)[1].end;
        bytes[end - 1] ^= 1;
    });
    for error in errors(folder.path()) {
        assert_line(&error, &["row group 1 of shard", THIRD, "as the footer says"]);
    }
}

/// Where no index says what a footer is, it is what it was when the data set was opened.
#[test]
fn a_footer_that_arrives_otherwise_than_on_opening_is_fetched_again() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
    for seed in 0..4 {
        let store = Faulty::of_folder(folder.path(), seed, &[Fault::Flip], 50).only(".parquet");
        store.is_calm.store(true, Ordering::SeqCst);
        let (store, cache) = (Arc::new(store), tempfile::tempdir().unwrap());
        let data_set = open(Arc::clone(&store) as _, &hasty(cache.path(), Some(1))).unwrap();
        store.is_calm.store(false, Ordering::SeqCst);
        read_and_compare(&data_set, ShuffleOrder::Full, 0..82, false).unwrap();
    }
}

/// Hashes that do not fit the footer in which they stand are no hashes; those that another writer
/// copied with the rest of the metadata say nothing of what it wrote.
#[test]
fn hashes_are_of_the_file_in_which_they_stand() {
    let folder = tempfile::tempdir().unwrap();
    let read = |form: &Form| {
        write_example(folder.path(), &SAMPLES, ROW_TOKENS, form);
        let (cache, store) =
            (tempfile::tempdir().unwrap(), Faulty::of_folder(folder.path(), 0, &[], 0));
        let data_set = open(Arc::new(store), &settings(cache.path(), Some(1)))?;
        read_and_compare(&data_set, ShuffleOrder::Full, 0..82, false)
    };
    read(&Form::hashed()).unwrap();
    let hashes = row_group_hashes(&fs::read(folder.path().join(THIRD)).unwrap());
    let hashes = Hashes::Stated(hashes);
    // The third has five row groups, the first has three.
    let error = read(&Form { hashes: hashes.clone(), ..Form::hashed() }).unwrap_err();
    let words = ["shard-00000.parquet", "tidemill.row_group_hashes is 5 hashes", "of 3 row groups"];
    assert_line(&error, &words);
    let error = read(&Form { hashes: Hashes::Stated("none".to_owned()), ..Form::hashed() });
    assert_line(&error.unwrap_err(), &["tidemill.row_group_hashes is \"none\", expected"]);
    read(&Form { hashes, created_by: "somebody else", ..Form::hashed() }).unwrap();
}

/// How long rows are that are not typed so is learnt from the first of them, without the rest of a
/// row group that may be larger than memory.
#[test]
fn the_length_of_rows_takes_the_beginning_of_a_row_group() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.parquet");
    // Rows, tokens of each, and whether what is looked at first holds the first of them.
    for (rows, row_tokens, is_enough) in [(2000, 1000, true), (3, 700_000, false)] {
        let form = Form {
            kind: ListKind::List,
            element: DataType::Int32,
            group_rows: rows,
            page_rows: (rows / 40).max(1),
            ..Form::plain()
        };
        let row = |row: usize| (0..row_tokens as i64).map(|at| at % 50_000 + row as i64).collect();
        let tokens: Vec<Vec<i64>> = (0..rows).map(row).collect();
        write_shard(&path, &tokens, &form);
        let bytes = fs::metadata(&path).unwrap().len();
        assert!(bytes > 8_000_000);
        let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
        let cache = tempfile::tempdir().unwrap();
        let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
        assert_eq!(data_set.seq_len() + 1, row_tokens);
        assert_eq!(DataSet::open(folder.path()).unwrap().seq_len() + 1, row_tokens);
        // The bytes that are requested at the end where the size of the footer is unknown.
        let tail = 64 << 10;
        let read = (2 << 20) + if is_enough { 0 } else { bytes };
        assert!((read - tail..=read + tail).contains(&store.asked.bytes()));
    }
}
