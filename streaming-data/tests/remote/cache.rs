//! The cache of shards: which it holds, which it evicts, and how processes share it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::Path as FilePath,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use tidemill_streaming_data::{DataSet, hash::ContentHash, order::ShuffleOrder};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, assert_line, decoder,
    faulty::{Faulty, PASSING},
    files, hasty, open, read_and_compare, settings, shuffle, smallest_limit,
    support::{example_row, indexed_example},
    wait_until,
};

/// Files of others in the folder of a cache, some of them named nearly as ours are.
fn foreign(cache: &FilePath) -> Vec<(String, u64)> {
    for name in [
        "shard-00000.parquet",
        "index.json",
        "notes.part",
        "tidemill-x.shard",
        "tidemill-h0123456789abcdef0123456789abcdef-7.shard",
    ] {
        fs::write(cache.join(name), "the only copy").unwrap();
    }
    let digits = "0123456789abcdef".repeat(2);
    for end in ["abcdeF-7.shard", "abcdef-07.shard", "abcdef-7.1.part"] {
        let name = format!("tidemill-h{digits}-{}{end}", &digits[6..]);
        fs::write(cache.join(name), "the only copy").unwrap();
    }
    files(cache)
}

fn of_shards(cache: &FilePath) -> u64 {
    files(cache).iter().filter(|(name, _)| is_ours(name)).map(|(_, bytes)| bytes).sum()
}

fn is_ours(name: &str) -> bool {
    name.starts_with("tidemill-h") && !name.contains("0123456789abcdef")
}

/// With the smallest limit every epoch is read, nothing foreign is touched, the limit holds at any
/// moment, and shards are downloaded no more often than they must.
#[test]
fn the_smallest_limit_holds_and_is_enough() {
    let samples: Vec<u64> = (0..24).map(|shard| 5 + shard % 7).collect();
    let folder = indexed_example(&samples, ROW_TOKENS);
    let all: u64 = samples.iter().sum();
    for order in [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window] {
        let limit = smallest_limit(folder.path(), order);
        let cache = tempfile::tempdir().unwrap();
        let others = foreign(cache.path());
        let store = Faulty::of_folder(folder.path(), 0, &[], 0);
        let asked = Arc::clone(&store.asked);
        let data_set = open(Arc::new(store), &settings(cache.path(), Some(limit))).unwrap();
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::SeqCst) {
                    // Files are seen one after the other: one may be dropped and another made
                    // between two looks. The largest shard is more than that.
                    let held = of_shards(cache.path());
                    assert!(held <= limit + 1000, "{held} of {limit}");
                    thread::yield_now();
                }
            });
            let read = read_and_compare(&data_set, order, 0..3 * all, true);
            is_done.store(true, Ordering::SeqCst);
            read.unwrap();
        });
        let held = of_shards(cache.path());
        assert!(held <= limit && held > limit / 2, "{held} of {limit}");
        let mut kept = files(cache.path());
        kept.retain(|(name, _)| !is_ours(name));
        assert_eq!(kept, others);
        // None is dropped between being fetched and being needed.
        let downloads = asked.requests() - 1;
        assert!(downloads <= 3 * samples.len(), "{order}: {downloads} downloads");
    }
}

/// The shard that a stream needs last is dropped first, and never one that it needs sooner.
#[test]
fn a_second_epoch_finds_what_fits() {
    let samples = [10; 30];
    let folder = indexed_example(&samples, ROW_TOKENS);
    let bytes = fs::metadata(folder.path().join("shard-00000.parquet")).unwrap().len();
    let cache = tempfile::tempdir().unwrap();
    let store = Faulty::of_folder(folder.path(), 0, &[], 0);
    let asked = Arc::clone(&store.asked);
    // Room for 20 of 30: the best that can be is to download 10 in every later epoch. What drops the
    // oldest would keep none, and download all 120.
    let data_set = open(Arc::new(store), &settings(cache.path(), Some(20 * bytes))).unwrap();
    read_and_compare(&data_set, ShuffleOrder::None, 0..300 * 4, true).unwrap();
    let downloads = asked.requests() - 1;
    assert!(downloads <= 30 + 3 * 10, "{downloads} downloads of 120 uses");
}

/// The streams of a process that share a cache need it to hold what all of them need, and leave each
/// other what they need.
#[test]
fn streams_of_a_process_share_a_limit() {
    let samples: Vec<u64> = (0..16).map(|shard| 5 + shard % 7).collect();
    let all: u64 = samples.iter().sum();
    let one = indexed_example(&samples, ROW_TOKENS);
    let other =
        indexed_example(&samples.iter().map(|count| count + 1).collect::<Vec<_>>(), ROW_TOKENS);
    let needs = [&one, &other].map(|set| smallest_limit(set.path(), ShuffleOrder::Shard));
    let cache = tempfile::tempdir().unwrap();
    let limit = needs[0] + needs[1];
    let stores = [&one, &other].map(|set| Arc::new(Faulty::of_folder(set.path(), 0, &[], 0)));
    let open = |store: &Arc<Faulty>, limit| {
        open(Arc::clone(store) as _, &settings(cache.path(), Some(limit))).unwrap()
    };
    {
        let _one = decoder(&open(&stores[0], limit - 1), ShuffleOrder::Shard, None).unwrap();
        let error = decoder(&open(&stores[1], limit - 1), ShuffleOrder::Shard, None).err().unwrap();
        let others = format!("and {} bytes for other streams of this process", needs[0]);
        assert_line(&error, &[&format!("at least {limit}:"), &others]);
    }
    let sets = stores.each_ref().map(|store| open(store, limit));
    let before = stores.each_ref().map(|store| store.asked.requests());
    let decoders = sets.each_ref().map(|set| decoder(set, ShuffleOrder::Shard, Some(0..2 * all)));
    let mut readers = decoders.map(|decoder| decoder.unwrap().reader(std::iter::once(0..2 * all)));
    for _ in 0..2 * all {
        for reader in &mut readers {
            assert!(reader.next().unwrap().is_ok());
        }
        assert!(of_shards(cache.path()) <= limit + 1000);
    }
    for (store, before) in stores.iter().zip(before) {
        let downloads = store.asked.requests() - before;
        // A shard that one stream has fetched ahead may be dropped for one that a thread of the other waits
        // for: each stream orders shards by its own need only.
        assert!(downloads <= 2 * samples.len() + 8, "{downloads} downloads");
    }
}

/// An index may state the hash of another's shard beside a shard of its own making.
#[test]
fn a_data_set_cannot_plant_a_shard_for_another() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let read_from = |place: &str| {
        let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
        let settings = settings(cache.path(), None);
        let path = object_store::path::Path::from("set");
        let data_set = DataSet::open_store(Arc::clone(&store) as _, path, place, &settings);
        let data_set = data_set.unwrap();
        read_and_compare(&data_set, ShuffleOrder::Shard, 0..82, false).unwrap();
        store.asked.requests()
    };
    assert_eq!(read_from("memory://store/set"), 1 + SAMPLES.len());
    assert_eq!(read_from("memory://store/set/"), 1, "the same place, for which all is there");
    for other in ["memory://store/other", "memory://other/set", "http://store/set"] {
        assert_eq!(read_from(other), 1 + SAMPLES.len(), "{other}");
    }
    assert_eq!(files(cache.path()).len(), 4 * SAMPLES.len());
}

#[test]
fn streams_of_one_data_set_share_its_shards() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    thread::scope(|scope| {
        for _ in 0..3 {
            let (store, cache) = (Arc::clone(&store), cache.path());
            scope.spawn(move || {
                let data_set = open(store, &settings(cache, None)).unwrap();
                read_and_compare(&data_set, ShuffleOrder::Window, 0..200, false).unwrap();
            });
        }
    });
    assert_eq!(store.asked.requests(), 3 + SAMPLES.len());
    assert_eq!(files(cache.path()).len(), SAMPLES.len());
}

/// A file of the cache is hashed before it is used; a damaged one is fetched again.
#[test]
fn a_damaged_file_of_the_cache_is_replaced() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let read = || {
        let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
        read_and_compare(&data_set, ShuffleOrder::Shard, 0..82, false).unwrap();
        store.asked.requests()
    };
    assert_eq!(read(), 1 + SAMPLES.len());
    assert_eq!(read(), 2 + SAMPLES.len());
    let whole = files(cache.path());
    for (at, (name, bytes)) in whole.iter().enumerate().take(3) {
        let path = cache.path().join(name);
        let mut content = fs::read(&path).unwrap();
        match at {
            0 => content.truncate(*bytes as usize / 2),
            1 => content[*bytes as usize / 2] ^= 1,
            _ => content.clear(),
        }
        fs::write(&path, content).unwrap();
    }
    assert_eq!(read(), 3 + SAMPLES.len() + 3);
    assert_eq!(files(cache.path()), whole);
}

/// Only downloaded shards are evicted: those of a local data set stay under any limit, also where the cache is
/// made in their own folder.
#[test]
fn the_only_copy_is_never_evicted() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let before = contents(folder.path());
    let url = format!("file://{}", folder.path().display());
    for path in [folder.path(), FilePath::new(&url)] {
        let data_set = DataSet::open_with(path, &settings(folder.path(), Some(1))).unwrap();
        for order in ORDERS {
            read_and_compare(&data_set, order, 0..164, false).unwrap();
            assert!(contents(folder.path()) == before, "{order}");
        }
    }
    let limit = smallest_limit(folder.path(), ShuffleOrder::Shard);
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let data_set = open(store, &settings(folder.path(), Some(limit))).unwrap();
    read_and_compare(&data_set, ShuffleOrder::Shard, 0..164, false).unwrap();
    let mut after = contents(folder.path());
    after.retain(|name, _| !is_ours(name));
    assert!(after == before, "a shard that was there is gone or changed");
}

fn contents(folder: &FilePath) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| fs::read(folder.join(&name)).map(|bytes| (name, bytes)).ok();
    files(folder).into_iter().filter_map(|(name, _)| read(name)).collect()
}

/// Shards that a user deletes while they are read are read to their end, and fetched again when they are
/// needed again.
#[test]
fn deleted_shards_are_fetched_again() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
    let canonical = data_set.order(shuffle(ShuffleOrder::Window)).unwrap();
    let decoder = decoder(&data_set, ShuffleOrder::Window, None).unwrap();
    let mut read = 0;
    for sample in decoder.reader(std::iter::once(0..82 * 3)) {
        let sample = sample.unwrap();
        let id = canonical.sample_at(read);
        assert_eq!(
            (sample.position, sample.tokens),
            (read, example_row(id.shard, id.row, ROW_TOKENS))
        );
        read += 1;
        if read % 50 == 0 {
            for (name, _) in files(cache.path()).iter().filter(|(name, _)| name.ends_with(".shard"))
            {
                let _ = fs::remove_file(cache.path().join(name));
            }
        }
    }
    assert_eq!(read, 82 * 3);
    let downloads = store.asked.requests() - 1;
    assert!(downloads > SAMPLES.len(), "nothing was deleted: {downloads} downloads");
}

/// A part file belongs to its process as long as that lives, and is removed afterwards.
#[test]
fn parts_of_the_dead_are_removed_and_parts_of_the_living_are_not() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let part = |digit: char| {
        let digits = digit.to_string().repeat(32);
        let name = format!("tidemill-h{digits}-{digits}-50.1-0.part");
        let file = File::create(cache.path().join(&name)).unwrap();
        file.set_len(50).unwrap();
        (name, file)
    };
    let (dead, _) = part('d');
    let (living, held) = part('a');
    held.lock().unwrap();
    let store = Faulty::of_folder(folder.path(), 1, &PASSING, 20);
    let data_set = open(Arc::new(store), &hasty(cache.path(), Some(1 << 20))).unwrap();
    read_and_compare(&data_set, ShuffleOrder::Window, 0..82, false).unwrap();
    let left: Vec<String> = files(cache.path()).into_iter().map(|(name, _)| name).collect();
    assert!(!left.contains(&dead) && left.contains(&living), "{left:?}");
}

/// The part of the first shard that a process is at as long as this is held, and its name.
fn held_part(folder: &FilePath, cache: &FilePath) -> (String, File) {
    let bytes = fs::read(folder.join("shard-00000.parquet")).unwrap();
    let hash = ContentHash::of(&bytes).to_string();
    let digits = hash.rsplit(':').next().unwrap();
    // The file's name in a cache depends on the shard's origin: it is taken from another cache that has the shard.
    let other = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(folder, 0, &[], 0));
    let data_set = open(store, &settings(other.path(), None)).unwrap();
    read_and_compare(&data_set, ShuffleOrder::None, 0..82, false).unwrap();
    let shards = files(other.path());
    let (shard, _) = shards.iter().find(|(name, _)| name.contains(digits)).unwrap();
    let name = shard.replace(".shard", ".1-0.part");
    let held = File::create(cache.join(&name)).unwrap();
    held.lock().unwrap();
    (name, held)
}

/// A stalled process keeps its lock, so that no other process can see whether it will go on.
#[test]
fn the_part_of_a_stalled_process_is_not_waited_for_for_ever() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let (name, _held) = held_part(folder.path(), cache.path());
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let mut settings = settings(cache.path(), None);
    settings.store.operation_deadline = Duration::from_millis(300);
    let data_set = open(Arc::clone(&store) as _, &settings).unwrap();
    let decoder = decoder(&data_set, ShuffleOrder::None, Some(0..82)).unwrap();
    let reader = decoder.reader(std::iter::once(0..82));
    let reading = thread::spawn(move || reader.filter(Result::is_ok).count());
    wait_until(|| reading.is_finished());
    assert_eq!(reading.join().unwrap(), 82);
    assert_eq!(store.asked.of("set/shard-00000.parquet"), 1);
    // It is there beside what the other may still put in its place.
    let left = files(cache.path());
    assert!(left.iter().any(|(left, _)| *left == name) && left.len() == SAMPLES.len() + 1);
}

/// A process that dies while others wait for what it downloads: they do it themselves.
#[test]
fn the_part_of_a_process_that_dies_is_downloaded_by_those_who_wait() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let cache = tempfile::tempdir().unwrap();
    let (name, held) = held_part(folder.path(), cache.path());
    let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
    let data_set = open(Arc::clone(&store) as _, &settings(cache.path(), None)).unwrap();
    let decoder = decoder(&data_set, ShuffleOrder::None, Some(0..82)).unwrap();
    let mut reader = decoder.reader(std::iter::once(0..82));
    // All others are there: what is missing is what the dead one was at.
    wait_until(|| files(cache.path()).len() == SAMPLES.len());
    assert!(reader.try_next().is_pending());
    assert_eq!(store.asked.of("set/shard-00000.parquet"), 0);
    drop(held);
    let reading = thread::spawn(move || reader.filter(Result::is_ok).count());
    wait_until(|| reading.is_finished());
    assert_eq!(reading.join().unwrap(), 82);
    assert_eq!(store.asked.of("set/shard-00000.parquet"), 1);
    let left = files(cache.path());
    assert!(left.iter().all(|(left, _)| *left != name) && left.len() == SAMPLES.len());
}
