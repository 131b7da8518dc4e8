//! Shards of `prepare` that no index describes: what their footers say of them is compared with what
//! arrives, whole or in parts.

use std::{
    fs,
    path::Path as FilePath,
    sync::{Arc, atomic::Ordering},
};

use tidemill_streaming_data::{
    DataSet,
    data_set::index::INDEX_FILE,
    order::{SampleId, ShuffleOrder},
};

use crate::{
    ROW_TOKENS, SAMPLES, assert_line,
    faulty::{Fault, Faulty},
    files, hasty, open, read_and_compare, settings, smallest_limit,
    support::{example_row, hashed_example, row_groups},
};

const THIRD: &str = "shard-00002.parquet";

fn unindexed() -> tempfile::TempDir {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
    folder
}

/// A store that flips bytes once the data set is open.
fn opened(flips: Faulty, cache: &FilePath, limit: Option<u64>) -> (Arc<Faulty>, DataSet) {
    flips.is_calm.store(true, Ordering::SeqCst);
    let store = Arc::new(flips);
    let data_set = open(Arc::clone(&store) as _, &hasty(cache, limit)).unwrap();
    store.is_calm.store(false, Ordering::SeqCst);
    (store, data_set)
}

/// Every time that a shard is downloaded, in every epoch.
#[test]
fn wrong_bytes_in_whole_shards_change_no_sample() {
    let folder = unindexed();
    let limit = smallest_limit(folder.path(), ShuffleOrder::Shard);
    let requests = |flips: Faulty| {
        let cache = tempfile::tempdir().unwrap();
        let (store, data_set) = opened(flips, cache.path(), Some(limit));
        let before = store.asked.requests();
        read_and_compare(&data_set, ShuffleOrder::Shard, 0..3 * 82, false).unwrap();
        store.asked.requests() - before
    };
    let calm = requests(Faulty::of_folder(folder.path(), 0, &[], 0));
    assert!(calm > SAMPLES.len(), "{calm} downloads: some twice");
    for seed in 0..6 {
        let flips = Faulty::of_folder(folder.path(), seed, &[Fault::Flip], 60).only(".parquet");
        assert!(requests(flips) > calm, "no byte was wrong");
    }
}

#[test]
fn a_shard_that_stays_damaged_is_named_and_not_kept() {
    let folder = unindexed();
    let path = folder.path().join(THIRD);
    let mut bytes = fs::read(&path).unwrap();
    let second = row_groups(&bytes)[1].clone();
    bytes[second.end - 1] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let (cache, store) =
        (tempfile::tempdir().unwrap(), Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0)));
    let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
    for _ in 0..2 {
        let before = store.asked.of(&format!("set/{THIRD}"));
        let error = read_and_compare(&data_set, ShuffleOrder::None, 0..82, false).unwrap_err();
        let named = format!("row group 1 of shard memory://store/set/{THIRD} is damaged");
        assert_line(&error, &[&named, "as the footer says"]);
        // Each thread that decodes or fetches ahead makes requests, and some threads may be of the reader before.
        let requests = store.asked.of(&format!("set/{THIRD}")) - before;
        assert!((4..=24).contains(&requests), "{requests}");
        // Parts may still be downloading.
        let is_third =
            |(name, held): &(String, u64)| name.ends_with(".shard") && *held == bytes.len() as u64;
        assert!(!files(cache.path()).iter().any(is_third), "it was kept");
    }
}

#[test]
fn a_damaged_file_of_the_cache_is_replaced() {
    let folder = unindexed();
    let cache = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let read = || {
        let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
        let before = store.asked.requests();
        read_and_compare(&data_set, ShuffleOrder::Shard, 0..82, false).unwrap();
        store.asked.requests() - before
    };
    assert_eq!(read(), SAMPLES.len());
    assert_eq!(read(), 0);
    let (name, _) = files(cache.path()).swap_remove(4);
    let path = cache.path().join(name);
    let mut bytes = fs::read(&path).unwrap();
    let last = row_groups(&bytes).last().unwrap().end - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_eq!(read(), 1);
    assert_eq!(read(), 0);
}

/// A verified copy of a file does not make ranges trusted that come from elsewhere.
#[test]
fn ranges_are_verified_after_whole_shards_were_read() {
    for folder in [unindexed(), hashed_example(&SAMPLES, ROW_TOKENS)] {
        for seed in 0..3 {
            let cache = tempfile::tempdir().unwrap();
            let flips = Faulty::of_folder(folder.path(), seed, &[Fault::Flip], 50).only(".parquet");
            let (store, data_set) = opened(flips, cache.path(), None);
            store.is_calm.store(true, Ordering::SeqCst);
            read_and_compare(&data_set, ShuffleOrder::None, 0..82, false).unwrap();
            store.is_calm.store(false, Ordering::SeqCst);
            let before = store.asked.requests();
            for row in 0..SAMPLES[2] {
                let id = SampleId { epoch: 0, shard: 2, row };
                assert_eq!(data_set.sample(id).unwrap(), example_row(2, row, ROW_TOKENS));
            }
            assert!(store.asked.requests() - before > SAMPLES[2] as usize, "no byte was wrong");
        }
    }
}
