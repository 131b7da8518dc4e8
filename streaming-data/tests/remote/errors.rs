//! What cannot be had is one clear line, soon.

use std::{
    fs,
    num::NonZeroU32,
    path::Path as FilePath,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use object_store::{ObjectStore, ObjectStoreExt, path::Path};
use tidemill_streaming_data::{
    DataError, DataSet,
    data_set::index::INDEX_FILE,
    order::ShuffleOrder,
    store::{Location, RemoteFolder, StoreSettings},
};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, assert_line, decoder,
    faulty::{Fault, Faulty, in_memory, now},
    files, open, read_and_compare, settings, smallest_limit, store_settings,
    support::{Form, indexed_example, write_example},
    wait_until,
};

const THIRD: &str = "shard-00002.parquet";

/// Reads all of a store that fails for some objects, and what it was asked for them.
fn failing(only: &str, fault: Fault, order: ShuffleOrder, is_known: bool) -> (DataError, usize) {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let store = Faulty::always(folder.path(), only, fault);
    let asked = Arc::clone(&store.asked);
    let read = || {
        let mut settings = settings(cache.path(), None);
        settings.store.attempts = NonZeroU32::new(3).unwrap();
        if matches!(fault, Fault::Silence | Fault::Stall) {
            settings.store.progress_deadline = Duration::from_millis(30);
        }
        let data_set = open(Arc::new(store), &settings)?;
        let positions = if is_known { 14..16 } else { 0..82 };
        read_and_compare(&data_set, order, positions, is_known)
    };
    let error = read().unwrap_err();
    // Threads that were fetching ahead end by themselves.
    wait_until(|| !files(cache.path()).iter().any(|(name, _)| name.ends_with(".part")));
    (error, asked.of(&format!("set/{only}")))
}

#[test]
fn a_missing_shard_is_named_at_once() {
    let (error, _) = failing(THIRD, Fault::Missing, ShuffleOrder::None, false);
    assert_line(&error, &["memory://store/set/shard-00002.parquet", "is missing"]);
    let (error, _) = failing(THIRD, Fault::Missing, ShuffleOrder::None, true);
    assert_line(&error, &["cannot read memory://store/set/shard-00002.parquet (1 attempt)"]);
    let (error, _) = failing("", Fault::Missing, ShuffleOrder::None, false);
    assert_line(&error, &["memory://store/set", "connection broke"]);
}

#[test]
fn a_store_that_has_answered_before_is_waited_for() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let with_outage = |outage| {
        let store = Faulty::of_folder(folder.path(), 0, &[Fault::Busy], 100).in_a_row(12);
        let attempts = NonZeroU32::new(3).unwrap();
        let settings = StoreSettings { outage, attempts, ..store_settings() };
        let location = Location::parse("memory://store/set").unwrap();
        let store = Arc::new(store);
        let objects: Arc<dyn ObjectStore> = store.clone();
        (store, RemoteFolder::of_store(objects, Path::from("set"), location, &settings))
    };
    let (store, remote) = with_outage(Duration::from_secs(60));
    // One that never answered may be the wrong one.
    assert_line(&remote.get(INDEX_FILE).unwrap_err(), &["index.json (3 attempts)", "503"]);
    store.is_calm.store(true, Ordering::SeqCst);
    let expected = remote.get(INDEX_FILE).unwrap();
    store.is_calm.store(false, Ordering::SeqCst);
    assert_eq!(remote.get(INDEX_FILE).unwrap(), expected);
    assert_eq!(store.asked.requests(), 3 + 1 + 10);

    let (store, remote) = with_outage(Duration::ZERO);
    store.is_calm.store(true, Ordering::SeqCst);
    remote.get(INDEX_FILE).unwrap();
    store.is_calm.store(false, Ordering::SeqCst);
    assert_line(&remote.get(INDEX_FILE).unwrap_err(), &["index.json (3 attempts)", "503"]);
}

#[test]
fn a_store_that_stays_broken_is_given_up() {
    for (fault, words) in [
        (Fault::Busy, "503 Service Unavailable"),
        (Fault::Silence, "nothing arrived for 0.03 s"),
        (Fault::Stall, "nothing arrived for 0.03 s"),
        (Fault::Break, "the connection broke"),
        (Fault::Truncate, "the body ended after"),
    ] {
        for is_known in [false, true] {
            let (error, _) = failing(THIRD, fault, ShuffleOrder::None, is_known);
            // Every half of a body is progress; the number of attempts is what is left of it.
            assert_line(&error, &["cannot read memory://store/set/shard-00002.parquet", words]);
        }
        let (error, _) = failing(INDEX_FILE, fault, ShuffleOrder::None, false);
        assert_line(&error, &["memory://store/set/index.json", "attempts", words]);
    }
}

/// A shard that never has its hash is downloaded four times.
#[test]
fn a_shard_that_stays_damaged_is_named_with_its_hash() {
    let (error, requests) = failing(THIRD, Fault::Flip, ShuffleOrder::None, false);
    let words = ["memory://store/set/shard-00002.parquet", "is damaged", "its hash is xxh3-128:"];
    assert_line(&error, &words);
    // One thread fetches ahead, and two decode.
    assert!((4..=12).contains(&requests), "{requests}");
}

#[test]
fn a_shard_that_changed_is_not_read() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let plain = tempfile::tempdir().unwrap();
    write_example(plain.path(), &SAMPLES, ROW_TOKENS, &Form::plain());
    let change = |folder: &FilePath, bytes: Vec<u8>, positions| {
        let store = Arc::new(in_memory(folder));
        let cache = tempfile::tempdir().unwrap();
        let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
        now(store.put(&Path::from(format!("set/{THIRD}")), bytes.into())).unwrap();
        let known = positions != (0..82);
        read_and_compare(&data_set, ShuffleOrder::None, positions, known).unwrap_err()
    };
    for folder in [folder.path(), plain.path()] {
        let mut bytes = fs::read(folder.join(THIRD)).unwrap();
        // The same again, with another etag.
        if !folder.join(INDEX_FILE).exists() {
            for positions in [0..82, 14..16] {
                let error = change(folder, bytes.clone(), positions);
                assert_line(&error, &[THIRD, "changed", "etag"]);
            }
        }
        let length = bytes.len();
        bytes.push(0);
        let found = format!("has {} bytes, expected {length}", length + 1);
        assert_line(&change(folder, bytes.clone(), 0..82), &[THIRD, &found]);
        assert_line(&change(folder, bytes, 14..16), &[THIRD, &found]);
    }
}

#[test]
fn a_limit_that_cannot_work_is_refused_with_the_numbers() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    for order in ORDERS {
        let limit = smallest_limit(folder.path(), order);
        let cache = tempfile::tempdir().unwrap();
        let open = |limit| {
            let store = Arc::new(in_memory(folder.path()));
            let data_set = open(store, &settings(cache.path(), Some(limit))).unwrap();
            decoder(&data_set, order, None)
        };
        assert!(open(limit).is_ok(), "{order}");
        if order != ShuffleOrder::Full {
            let error = open(limit - 1).err().unwrap();
            let (found, expected) = (format!("is {} bytes", limit - 1), format!("least {limit}:"));
            assert_line(&error, &[&found, &expected, &format!("shuffle {order}"), "2 threads"]);
        }
    }
}

#[test]
fn what_is_no_place_for_a_data_set_or_a_cache() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let file = folder.path().join(INDEX_FILE);
    let data_set = open(Arc::new(in_memory(folder.path())), &settings(&file, None)).unwrap();
    let error = decoder(&data_set, ShuffleOrder::None, None).err().unwrap();
    assert_line(&error, &["cannot make cache", INDEX_FILE]);
    for (url, words) in [
        ("memory://nothing/here", "memory://nothing/here has no samples"),
        ("https://host/set?token=secret", "https://host/set: found a query"),
        ("https://me:secret@host/set", "https://host/set: found a user or password"),
        ("file://host/set", "found host \"host\""),
    ] {
        let error = DataSet::open(url).err().unwrap();
        assert_line(&error, &[words]);
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
    // An index that is none.
    now(async {
        let store = Arc::new(in_memory(folder.path()));
        store.put(&Path::from("set/index.json"), "{".into()).await.unwrap();
        let error = open(store, &settings(&file, None)).err().unwrap();
        assert_line(&error, &["cannot parse index memory://store/set/index.json"]);
    });
}
