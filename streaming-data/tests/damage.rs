//! Every kind of wrong data set is one clear line that names the file, and never a panic.

#[allow(dead_code, reason = "each test program uses its part of it")]
mod support;

use std::{
    fs,
    iter::once,
    num::{NonZeroU64, NonZeroUsize},
    path::Path,
    sync::Arc,
};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Int32Array, StringArray},
    datatypes::{DataType, Field},
};
use support::{
    EXAMPLE_VOCABULARY, Form, ListKind, example_row, footer_range, hashed_example, indexed_example,
    outcome::assert_line, row_groups, write_array, write_column, write_example, write_index,
    write_shard,
};
use tempfile::TempDir;
use tidemill_streaming_data::{
    DataError, DataSet, DataSettings, Mixture,
    data_set::index::{FooterEntry, INDEX_FILE, Index},
    data_set::table::{Columns, Table, TableDecoder, TableSettings},
    hash::ContentHash,
    order::{SampleId, ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings, Sample},
};

const SAMPLES: [u64; 3] = [7, 12, 5];
const SECOND: &str = "shard-00001.parquet";

/// Opens and reads everything in stored order.
fn read_all(folder: &Path) -> Result<u64, DataError> {
    let mut read = 0;
    for_each_sample(folder, |_| read += 1)?;
    Ok(read)
}

/// Opens and reads everything in stored order, up to an error.
fn for_each_sample(folder: &Path, mut each: impl FnMut(Sample)) -> Result<(), DataError> {
    let data_set = DataSet::open(folder)?;
    let settings =
        ShuffleSettings { order: ShuffleOrder::None, window_samples: NonZeroU64::MIN, seed: 0 };
    let samples = data_set.samples();
    let mixture = Mixture::of(data_set, settings)?;
    let settings = DecoderSettings { threads: NonZeroUsize::MIN, memory_bytes: 1 << 20 };
    let decoder = Decoder::new(mixture, settings)?;
    for sample in decoder.reader(once(0..samples)) {
        each(sample?);
    }
    Ok(())
}

/// Opens and reads everything as rows of whatever columns there are.
fn read_rows(folder: &Path) -> Result<(), DataError> {
    let table = Table::open(folder, &Columns::All, &DataSettings::default())?;
    let order =
        ShuffleSettings { order: ShuffleOrder::None, window_samples: NonZeroU64::MIN, seed: 0 };
    let decoder = TableDecoder::new(&table, order, TableSettings::default())?;
    decoder.reader(once(0..table.rows())).try_for_each(|rows| rows.map(drop))
}

/// Reading ends with an error that holds these words.
#[track_caller]
fn assert_fails(folder: &Path, words: &[&str]) {
    match read_all(folder) {
        Ok(read) => panic!("read {read} samples, expected an error with {words:?}"),
        Err(error) => assert_line(&error, words),
    }
}

/// An indexed data set whose second shard's bytes are changed, and the index updated to match
/// where the reader itself is to notice.
fn changed(change: impl FnOnce(&mut Vec<u8>), is_indexed_again: bool) -> TempDir {
    let folder = indexed_example(&SAMPLES, 11);
    let path = folder.path().join(SECOND);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    if is_indexed_again {
        write_index(folder.path(), 10, EXAMPLE_VOCABULARY, &SAMPLES, &Form::plain());
    }
    folder
}

#[test]
fn undamaged_is_read() {
    assert_eq!(read_all(indexed_example(&SAMPLES, 11).path()).unwrap(), 24);
}

#[test]
fn what_is_not_a_data_set() {
    let empty = tempfile::tempdir().unwrap();
    assert_fails(empty.path(), &["no samples", "index.json", "found no shard"]);
    assert_fails(&empty.path().join("none"), &["none", "expected a folder, found nothing"]);
    let file = empty.path().join("file");
    fs::write(&file, "text").unwrap();
    assert_fails(&file, &["file", "expected a folder, found a file"]);
    assert_fails(Path::new("ftp://host/set"), &["ftp://host/set", "found scheme \"ftp\""]);
    assert_fails(Path::new("memory://empty/set"), &["memory://empty/set", "has no samples"]);
    fs::write(empty.path().join(INDEX_FILE), "{\"format_version\": 1,").unwrap();
    assert_fails(empty.path(), &["cannot parse index", "index.json", "line 1"]);
}

#[test]
fn missing_and_truncated_shards_are_found_on_opening() {
    let folder = indexed_example(&SAMPLES, 11);
    fs::remove_file(folder.path().join(SECOND)).unwrap();
    assert_fails(folder.path(), &[SECOND, "is missing"]);
    fs::create_dir(folder.path().join(SECOND)).unwrap();
    assert_fails(folder.path(), &[SECOND, "is missing"]);
    for keep in [0, 3, 100] {
        let folder = changed(|bytes| bytes.truncate(keep), false);
        assert_fails(folder.path(), &[SECOND, &format!("has {keep} bytes, expected ")]);
        assert!(matches!(DataSet::open(folder.path()), Err(DataError::ShardBytes { .. })));
    }
}

#[test]
fn a_flipped_bit_anywhere_is_found_by_the_hash() {
    let length = fs::read(indexed_example(&SAMPLES, 11).path().join(SECOND)).unwrap().len();
    for at in (0..length).step_by(97).chain([length - 1]) {
        let folder = changed(|bytes| bytes[at] ^= 0x10, false);
        assert_fails(folder.path(), &[SECOND, "is damaged", "its hash is xxh3-128:"]);
    }
}

/// Where the footers state hashes, what is damaged is found when it is read, and nothing else waits
/// for that: what stands before it is read, and other row groups are.
#[test]
fn damage_is_found_in_the_row_group_in_which_it_is() {
    let sound = fs::read(hashed_example(&SAMPLES, 11).path().join(SECOND)).unwrap();
    let groups = row_groups(&sound);
    let group = groups[1].clone();
    let first_row = Form::hashed().group_rows as u64;
    let named = "row group 1 of shard";
    for at in group.clone().step_by(7).chain([group.end - 1]) {
        let folder = hashed_example(&SAMPLES, 11);
        let path = folder.path().join(SECOND);
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, &bytes).unwrap();
        let [expected, found] =
            [&sound, &bytes].map(|bytes| ContentHash::of(&bytes[group.clone()]).to_string());
        let words = [named, SECOND, &found, &format!("expected {expected} as the footer says")];
        let check = || {
            let data_set = DataSet::open(folder.path()).unwrap();
            let sample = |row| data_set.sample(SampleId { epoch: 0, shard: 1, row });
            assert_eq!(sample(first_row - 1).unwrap(), example_row(1, first_row - 1, 11));
            assert_line(&sample(first_row).unwrap_err(), &words);
            let last_row = SAMPLES[1] - 1;
            assert_eq!(sample(last_row).unwrap(), example_row(1, last_row, 11));
            let mut before = 0;
            let error = for_each_sample(folder.path(), |_| before += 1).unwrap_err();
            assert_line(&error, &words);
            assert_eq!(before, SAMPLES[0] + first_row);
            assert_line(&read_rows(folder.path()).unwrap_err(), &words);
        };
        check();
        let whole = DataSet::open(folder.path()).unwrap().shards()[1].verify().unwrap_err();
        assert_line(&whole, &[SECOND, "is damaged", &ContentHash::of(&bytes).to_string()]);
        // The footer says it without an index as well.
        fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
        check();
    }
    for at in footer_range(&sound).step_by(61).chain([sound.len() - 1]) {
        let folder = hashed_example(&SAMPLES, 11);
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(folder.path().join(SECOND), &bytes).unwrap();
        let words = ["the footer of shard", SECOND, "is damaged", "as the index says"];
        assert_fails(folder.path(), &words);
        assert_line(&read_rows(folder.path()).unwrap_err(), &words);
    }
}

/// A footer that no index describes is not believed before the whole is.
#[test]
fn damage_is_found_where_the_index_states_the_whole_alone() {
    let length = fs::read(hashed_example(&SAMPLES, 11).path().join(SECOND)).unwrap().len();
    for at in (0..length).step_by(97).chain([length - 1]) {
        let folder = hashed_example(&SAMPLES, 11);
        let mut index = Index::read(folder.path()).unwrap();
        index.shards.iter_mut().for_each(|shard| shard.footer = None);
        fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
        assert_eq!(read_all(folder.path()).unwrap(), 24);
        let path = folder.path().join(SECOND);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        assert_fails(folder.path(), &["shard", SECOND, "is damaged: its hash", "as the index"]);
    }
}

/// A footer that is known and says nothing of its row groups leaves the hash of the whole.
#[test]
fn damage_is_found_where_only_the_footer_and_the_whole_have_hashes() {
    let folder = indexed_example(&SAMPLES, 11);
    let path = folder.path().join(SECOND);
    let mut bytes = fs::read(&path).unwrap();
    let mut index = Index::read(folder.path()).unwrap();
    let footer = &bytes[footer_range(&bytes)];
    index.shards[1].footer =
        Some(FooterEntry { bytes: footer.len() as u64, hash: ContentHash::of(footer) });
    fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
    assert_eq!(read_all(folder.path()).unwrap(), 24);
    let last = row_groups(&bytes).last().unwrap().end - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let words = ["shard", SECOND, "is damaged: its hash is", "as the index says"];
    let data_set = DataSet::open(folder.path()).unwrap();
    assert_line(&data_set.sample(SampleId { epoch: 0, shard: 1, row: 0 }).unwrap_err(), &words);
    assert_fails(folder.path(), &words);
    assert_line(&read_rows(folder.path()).unwrap_err(), &words);
}

/// Without a hash a changed byte may go unnoticed, but never panics or hangs.
#[test]
fn damage_without_a_hash_is_an_error_or_unnoticed() {
    let folder = tempfile::tempdir().unwrap();
    write_example(folder.path(), &SAMPLES, 11, &Form::plain());
    let path = folder.path().join(SECOND);
    let sound = fs::read(&path).unwrap();
    let mut noticed = 0;
    for at in 0..sound.len() {
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = read_all(folder.path()) {
            assert!(error.to_string().contains(SECOND), "at {at}: {error}");
            noticed += 1;
        }
    }
    assert!(noticed > sound.len() / 10, "{noticed} of {}", sound.len());
    for keep in (0..sound.len()).step_by(13) {
        fs::write(&path, &sound[..keep]).unwrap();
        assert_fails(folder.path(), &[SECOND, "not a Parquet file, or a damaged one"]);
    }
}

#[test]
fn an_index_that_counts_other_rows() {
    let folder = tempfile::tempdir().unwrap();
    write_example(folder.path(), &SAMPLES, 11, &Form::plain());
    write_index(folder.path(), 10, EXAMPLE_VOCABULARY, &[7, 13, 5], &Form::plain());
    assert_fails(folder.path(), &[SECOND, "has 12 rows, expected 13"]);
    write_index(folder.path(), 9, EXAMPLE_VOCABULARY, &SAMPLES, &Form::plain());
    assert_fails(folder.path(), &["lists of 11 integers", "expected lists of 10 (seq_len + 1)"]);
    write_index(folder.path(), 10, EXAMPLE_VOCABULARY, &[7, 0, 5], &Form::plain());
    assert_fails(folder.path(), &[SECOND, "is empty"]);
}

#[test]
fn an_empty_shard_without_an_index() {
    let folder = tempfile::tempdir().unwrap();
    write_example(folder.path(), &[3, 0], 11, &Form::plain());
    assert_fails(folder.path(), &[SECOND, "is empty: expected at least one row"]);
}

#[test]
fn a_column_that_is_missing_or_of_another_type() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let text: ArrayRef = Arc::new(StringArray::from(vec!["one", "two"]));
    write_column(&path, "text", Arc::clone(&text), &Form::plain());
    assert_fails(folder.path(), &["a.parquet", "columns [text]", "lists of integers"]);
    write_array(&path, text, &Form::plain());
    assert_fails(folder.path(), &["a.parquet", "column tokens of type Utf8"]);
    write_array(&path, Arc::new(Int32Array::from(vec![1, 2])), &Form::plain());
    assert_fails(folder.path(), &["a.parquet", "column tokens of type Int32"]);
    let form = Form { element: DataType::Float32, ..Form::plain() };
    write_shard(&path, &[vec![1, 2]], &form);
    assert_fails(folder.path(), &["a.parquet", "column tokens of lists of Float32"]);
    write_shard(&path, &[vec![1], vec![2]], &Form::plain());
    assert_fails(folder.path(), &["a.parquet", "found 1 tokens, expected 2"]);
    // The second file decides it is wrong by the first.
    write_shard(&path, &[vec![1, 2, 3]], &Form::plain());
    write_shard(&folder.path().join("b.parquet"), &[vec![1, 2, 3, 4]], &Form::plain());
    assert_fails(folder.path(), &["b.parquet", "lists of 4 integers", "lists of 3"]);
}

#[test]
fn tokens_outside_of_the_vocabulary_are_named_with_shard_and_row() {
    for element in [DataType::Int32, DataType::Int64] {
        for (kind, dictionary) in
            [(ListKind::Fixed, false), (ListKind::List, false), (ListKind::Fixed, true)]
        {
            let form = Form { kind, element: element.clone(), dictionary, ..Form::plain() };
            for bad in [-1, i64::from(i32::MIN), 100, i64::from(i32::MAX)] {
                let folder = tempfile::tempdir().unwrap();
                let mut rows = vec![vec![1, 2, 99]; 14];
                write_shard(&folder.path().join("a.parquet"), &rows, &form);
                rows[12][1] = bad;
                write_shard(&folder.path().join("b.parquet"), &rows, &form);
                write_index(folder.path(), 2, 100, &[14, 14], &form);
                let token = format!("found token {bad}, expected 0 to 99 (vocabulary of 100)");
                assert_fails(folder.path(), &["b.parquet, row 12", &token]);
                // No index, no vocabulary: what is not negative may be a token.
                fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
                if bad < 0 {
                    assert_fails(folder.path(), &["b.parquet, row 12", "vocabulary of 4294967296"]);
                } else {
                    assert_eq!(read_all(folder.path()).unwrap(), 28);
                }
            }
        }
    }
}

#[test]
fn rows_of_another_length_are_named() {
    for kind in [ListKind::List, ListKind::LargeList] {
        // As many tokens as there should be, in rows that are wrong.
        for bad in [12, 3] {
            let form = Form { kind, ..Form::plain() };
            let folder = tempfile::tempdir().unwrap();
            let mut rows = vec![vec![1, 2, 3]; 14];
            rows[bad] = vec![1, 2];
            rows[bad + 1] = vec![1, 2, 3, 4];
            write_shard(&folder.path().join("a.parquet"), &rows, &form);
            let row = format!("a.parquet, row {bad}");
            assert_fails(folder.path(), &[&row, "found 2 tokens, expected 3"]);
        }
        let folder = tempfile::tempdir().unwrap();
        let rows = [vec![1, 2], vec![], vec![3, 4]];
        let form = Form { kind, ..Form::plain() };
        write_shard(&folder.path().join("a.parquet"), &rows, &form);
        assert_fails(folder.path(), &["a.parquet, row 1", "found 0 tokens, expected 2"]);
    }
}

#[test]
fn nulls_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let form = Form { nullable: true, ..Form::plain() };
    let tokens = Int32Array::from_iter((0..24).map(|at| (at != 19).then_some(at)));
    let item = Arc::new(Field::new("element", DataType::Int32, true));
    let lists = FixedSizeListArray::new(item, 2, Arc::new(tokens), None);
    write_array(&path, Arc::new(lists), &form);
    assert_fails(folder.path(), &["a.parquet, row 9", "found a null"]);
}

#[test]
fn the_identity_is_of_the_content_and_not_of_the_place() {
    let write = |samples: &[u64], row_tokens, indexed| {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), samples, row_tokens, &Form::plain());
        if indexed {
            let seq_len = row_tokens - 1;
            write_index(folder.path(), seq_len, EXAMPLE_VOCABULARY, samples, &Form::plain());
        }
        DataSet::open(folder.path()).unwrap().fingerprint()
    };
    for indexed in [true, false] {
        let one = write(&SAMPLES, 11, indexed);
        assert_eq!(one, write(&SAMPLES, 11, indexed));
        assert_ne!(one, write(&[7, 12], 11, indexed));
        assert_ne!(one, write(&SAMPLES, 12, indexed));
    }
    assert_ne!(write(&SAMPLES, 11, true), write(&SAMPLES, 11, false));
}
