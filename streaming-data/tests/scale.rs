//! Memory does not grow with a data set: 50 million samples open, and go on anywhere, with what their index takes;
//! and reading them takes what the window and the bound on memory say.
//!
//! Every byte that this program allocates is counted, so the tests run one at a time. Nothing is timed here:
//! `cargo bench -p tidemill-streaming-data --bench streams -- opening` does that.

use std::{
    fs::{self, File},
    iter::{once, repeat_n},
    num::{NonZeroU64, NonZeroUsize},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Int32Array, Int64Array, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema},
};
use object_store::memory::InMemory;
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, Encoding, ZstdLevel},
    file::properties::WriterProperties,
};
use peak_alloc::PeakAlloc;
use tempfile::TempDir;
use tidemill_streaming_data::{
    CacheSettings, DataSet, DataSettings, Mixture,
    data_set::index::{Column, INDEX_FILE, Index, ShardEntry, TOKENS_COLUMN},
    data_set::table::{Columns, Table, TableDecoder, TableSettings},
    hash::ContentHash,
    order::{SampleId, ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings},
};

#[path = "support/large.rs"]
mod large;

use large::{SAMPLES, SHARD_SAMPLES, SHARDS};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Held while memory is counted.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result of `act`, with the bytes that it still holds and the most that it has held.
fn measured<T>(act: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let made = act();
    let held = MEMORY.current_usage().saturating_sub(before);
    (made, held, MEMORY.peak_usage().saturating_sub(before))
}

/// The most bytes that `act` has held, whose decoder is gone afterwards: its threads end by themselves, and what they
/// held must be free before anything else is measured.
fn most_of_decoder(act: impl FnOnce()) -> usize {
    let before = MEMORY.current_usage();
    let ((), _, most) = measured(act);
    let deadline = Instant::now() + Duration::from_secs(60);
    while MEMORY.current_usage() > before + (256 << 10) {
        assert!(Instant::now() < deadline, "memory of a dropped decoder is not free");
        std::thread::yield_now();
    }
    most
}

const ORDERS: [ShuffleOrder; 4] =
    [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full];

fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(4096).unwrap(), seed: 17 }
}

/// The text of the index is 1.3 MB. Opening holds it, what it says, and the shards made of that, which is less than four
/// times as much (2.1 were seen), and keeps the shards, which is less than twice (1.1); a number for every sample would
/// be 400 MB.
fn assert_opens_small(open: impl Fn() -> DataSet) {
    let index_bytes = large::index().to_bytes().len();
    let (data_set, held, most) = measured(open);
    assert_eq!((data_set.samples(), data_set.shards().len()), (SAMPLES, SHARDS));
    assert!(held < 2 * index_bytes, "opened: {held} bytes held, {index_bytes} of index");
    assert!(most < 4 * index_bytes, "opening: up to {most} bytes, {index_bytes} of index");
    for order in ORDERS {
        // An order holds where shards begin: as stored, and of the two epochs used last.
        let (_, held, most) = measured(|| {
            let mixture = Mixture::of(data_set.clone(), shuffle(order)).unwrap();
            for epoch in [0, 1, 1 << 20, u64::MAX / SAMPLES - 1] {
                let mut found = Vec::new();
                for place in [0, 1, 4095, 4096, SAMPLES / 2, SAMPLES - 4096, SAMPLES - 1] {
                    let mixed = mixture.sample_at(epoch * SAMPLES + place);
                    let SampleId { epoch: of, shard, row } = mixed.sample;
                    assert!(of == epoch && shard < SHARDS && row < SHARD_SAMPLES, "{mixed:?}");
                    found.push((shard, row));
                }
                found.sort_unstable();
                found.dedup();
                assert_eq!(found.len(), 7, "{order}: places of an epoch hold different samples");
            }
            mixture
        });
        assert!(held < index_bytes / 2, "{order}: {held} bytes held");
        assert!(most < index_bytes, "{order}: up to {most} bytes");
    }
}

#[test]
fn fifty_million_samples_open_with_the_memory_of_their_index() {
    let _alone = alone();
    let folder = large::folder();
    assert_opens_small(|| DataSet::open(folder.path()).unwrap());
}

/// Opening requests only the index from a store; and a decoder that resumes in the middle of a late epoch requests only
/// the shards of that place.
#[test]
fn fifty_million_samples_of_a_store_open_and_resume_with_the_memory_of_their_index() {
    let _alone = alone();
    let (store, cache) = (large::store(), tempfile::tempdir().unwrap());
    let cache = CacheSettings { dir: Some(cache.path().to_owned()), limit_bytes: None };
    let settings = DataSettings { cache, ..DataSettings::default() };
    let open = || {
        let store: Arc<InMemory> = Arc::clone(&store);
        DataSet::open_store(store, "set".into(), "memory://scale/set", &settings).unwrap()
    };
    // Threads that speak to stores are started once.
    drop(open());
    assert_opens_small(open);

    let data_set = open();
    let index_bytes = large::index().to_bytes().len();
    for order in ORDERS {
        let start = 7 * SAMPLES + SAMPLES / 2 + 12_345;
        let canonical = data_set.order(shuffle(order)).unwrap();
        let shards = (start..start + 64).map(|position| canonical.sample_at(position).shard);
        let names: Vec<_> = shards.map(|at| format!("set/shard-{at:05}.parquet")).collect();
        let most = most_of_decoder(|| {
            let mixture = Mixture::of(data_set.clone(), shuffle(order)).unwrap();
            let decoder = Decoder::new(mixture, DecoderSettings::default()).unwrap();
            let first = decoder.reader(once(start..start + 64)).next().unwrap();
            let error = first.unwrap_err().to_string();
            assert!(names.iter().any(|name| error.contains(name)), "{order}: {error}");
        });
        assert!(most < 4 * index_bytes, "{order}: up to {most} bytes to go on");
    }
}

const ROW_TOKENS: usize = 129;
const ROWS: u64 = 10_000;
const GROUP_ROWS: usize = 500;

/// Shards of rows as `prepare` writes them, with an index.
fn written(shards: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let item = Arc::new(Field::new_list_field(DataType::Int32, false));
    let kind = DataType::FixedSizeList(Arc::clone(&item), ROW_TOKENS as i32);
    let schema = Arc::new(Schema::new(vec![Field::new(TOKENS_COLUMN, kind, false)]));
    let entries = (0..shards).map(|shard| {
        let file = format!("shard-{shard:05}.parquet");
        let path = folder.path().join(&file);
        let tokens = (0..ROWS as u32 * ROW_TOKENS as u32).map(|at| token(shard as u32, at));
        let tokens: ArrayRef = Arc::new(Int32Array::from_iter_values(tokens));
        let rows = FixedSizeListArray::new(Arc::clone(&item), ROW_TOKENS as i32, tokens, None);
        write(&path, &RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(rows)]).unwrap());
        let bytes = fs::read(&path).unwrap();
        let hash = ContentHash::of(&bytes);
        ShardEntry { file, samples: ROWS, bytes: bytes.len() as u64, hash, footer: None }
    });
    let index = Index {
        seq_len: ROW_TOKENS - 1,
        columns: vec![Column { length: ROW_TOKENS, ..large::index().columns.remove(0) }],
        shards: entries.collect(),
        ..large::index()
    };
    fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
    folder
}

fn write(path: &Path, rows: &RecordBatch) {
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::PLAIN)
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(1).unwrap()))
        .set_max_row_group_row_count(Some(GROUP_ROWS))
        .build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(properties)).unwrap();
    writer.write(rows).unwrap();
    writer.close().unwrap();
}

/// Any numbers below the vocabulary will do.
fn token(shard: u32, at: u32) -> i32 {
    ((shard + 1).wrapping_mul(0x9e37_79b9).wrapping_add(at).wrapping_mul(0x85eb_ca6b) >> 17) as i32
}

/// Windows of which the least bound here has room for two: row groups that do not fit are decoded again and again.
fn small_windows() -> ShuffleSettings {
    let window_samples = NonZeroU64::new(2048).unwrap();
    ShuffleSettings { window_samples, ..shuffle(ShuffleOrder::Window) }
}

/// The most memory that reading an epoch takes, with a bound.
fn most_while_reading(folder: &Path, memory_bytes: usize) -> usize {
    most_of_decoder(|| {
        let data_set = DataSet::open(folder).unwrap();
        let samples = data_set.samples();
        let mixture = Mixture::of(data_set, small_windows()).unwrap();
        let threads = NonZeroUsize::new(2).unwrap();
        let decoder = Decoder::new(mixture, DecoderSettings { threads, memory_bytes }).unwrap();
        // A reader that is never read from must not gather samples without a bound.
        let _idle = decoder.reader(once(0..u64::MAX));
        let tokens = decoder.reader(once(0..samples)).map(|sample| sample.unwrap().tokens.len());
        assert_eq!(tokens.sum::<usize>() as u64, samples * ROW_TOKENS as u64);
    })
}

/// The most memory that reading an epoch takes as rows, in batches of 64.
fn most_while_reading_rows(folder: &Path, memory_bytes: usize) -> usize {
    most_of_decoder(|| {
        let table = Table::open(folder, &Columns::All, &DataSettings::default()).unwrap();
        let number = |number| NonZeroUsize::new(number).unwrap();
        let settings = TableSettings { threads: number(2), memory_bytes, batch_rows: number(64) };
        let decoder = TableDecoder::new(&table, small_windows(), settings).unwrap();
        let _idle = decoder.reader(once(0..u64::MAX));
        let rows =
            decoder.reader(once(0..table.rows())).map(|batch| batch.unwrap().rows.num_rows());
        assert_eq!(rows.sum::<usize>() as u64, table.rows());
    })
}

/// A window is half a megabyte of tokens, the data sets are 7.7 MB and 15 MB: more than any bound here.
#[test]
fn memory_while_reading_is_that_of_the_bound_and_not_of_the_data_set() {
    let _alone = alone();
    let (small, large) = (written(3), written(6));
    for memory_bytes in [1 << 20, 6 << 20] {
        let of_small = most_while_reading(small.path(), memory_bytes);
        let of_large = most_while_reading(large.path(), memory_bytes);
        // Beyond the bound: what threads have in hand, pages among it, and footers of the shards.
        let in_hand = 2 << 20;
        for most in [of_small, of_large] {
            assert!(most < memory_bytes + in_hand, "up to {most} bytes of {memory_bytes}");
            // It is used, or the bound would not be what bounds.
            assert!(most > memory_bytes / 2, "only {most} bytes of {memory_bytes}");
        }
        assert!(of_large < of_small + in_hand, "{of_small} bytes of 7.7 MB, {of_large} of 15 MB");
    }
}

/// The same as rows, which take four bytes a token: a window is 1 MB, the data sets are 15 MB and 31 MB.
#[test]
fn memory_while_reading_rows_is_that_of_the_bound_and_not_of_the_table() {
    let _alone = alone();
    let (small, large) = (written(3), written(6));
    let memory_bytes = 6 << 20;
    let of_small = most_while_reading_rows(small.path(), memory_bytes);
    let of_large = most_while_reading_rows(large.path(), memory_bytes);
    // Beyond the bound: what threads have in hand, which are up to nine row groups for a batch of either.
    let in_hand = 7 << 20;
    for most in [of_small, of_large] {
        assert!(most < memory_bytes + in_hand, "up to {most} bytes of {memory_bytes}");
        assert!(most > memory_bytes / 2, "only {most} bytes of {memory_bytes}");
    }
    assert!(of_large < of_small + (4 << 20), "{of_small} bytes of 15 MB, {of_large} of 31 MB");
}

/// Repeated values take almost no bytes in a file, but their whole size in memory: 98 MB of numbers, 68 MB of
/// text, each in a file of less than 200 KB with one row group.
#[test]
fn repetitive_columns_take_no_more_memory() {
    let _alone = alone();
    const COUNT: usize = 6000;
    const LENGTH: usize = 2048;
    let item = Arc::new(Field::new_list_field(DataType::Int64, false));
    let ones: ArrayRef = Arc::new(Int64Array::from(vec![1; COUNT * LENGTH]));
    let ones: ArrayRef = Arc::new(FixedSizeListArray::new(item, LENGTH as i32, ones, None));
    let text = "the same as before ".repeat(600);
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(repeat_n(&text, COUNT)));
    for (name, column) in [("mask", ones), ("text", texts)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let rows = RecordBatch::try_from_iter([(name, column)]).unwrap();
        let mut writer =
            ArrowWriter::try_new(File::create(&path).unwrap(), rows.schema(), None).unwrap();
        writer.write(&rows).unwrap();
        assert_eq!(writer.close().unwrap().num_row_groups(), 1);
        drop(rows);
        assert!(path.metadata().unwrap().len() < 200_000);
        let most = most_while_reading_rows(folder.path(), 8 << 20);
        assert!(most < 40 << 20, "{name}: {most} bytes");
    }
}
