//! Epochs of remote data sets, whatever their stores do.

use std::{
    num::NonZeroUsize,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use tidemill_streaming_data::{
    DataError, DataSet, DataSettings, Mixture,
    data_set::table::{Columns, RowBatch, Table, TableDecoder, TableSettings},
    order::mixture::{Amount, Part},
    order::{SampleId, ShuffleOrder},
    reader::{Decoder, DecoderSettings, Sample},
    store::{Location, RemoteFolder},
};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, decoder,
    faulty::{Fault, Faulty, PASSING},
    files, hasty, open, read_and_compare, settings, shuffle, smallest_limit, store_settings,
    support::{Form, example_row, hashed_example, indexed_example, write_example},
    wait_until,
};

#[test]
fn a_store_in_memory_is_a_data_set_with_and_without_an_index() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let plain = tempfile::tempdir().unwrap();
    write_example(plain.path(), &SAMPLES, ROW_TOKENS, &Form::plain());
    // Other files in the folder are not taken for shards.
    std::fs::write(plain.path().join("notes.txt"), "of the people who made it").unwrap();
    for (name, folder) in [("indexed", folder.path()), ("plain", plain.path())] {
        let local = DataSet::open(folder).unwrap();
        let url = format!("memory://{name}/some/where");
        let remote = RemoteFolder::open(Location::parse(&url).unwrap(), &store_settings()).unwrap();
        for (file, _) in files(folder) {
            let bytes = std::fs::read(folder.join(&file)).unwrap();
            remote.put(&file, bytes.clone().into()).unwrap();
            assert_eq!(remote.get(&file).unwrap(), bytes);
        }
        let listed: Vec<(String, u64)> =
            remote.list().unwrap().into_iter().map(|entry| (entry.name, entry.bytes)).collect();
        assert_eq!(listed, files(folder));

        let cache = tempfile::tempdir().unwrap();
        let data_set = DataSet::open_with(&url, &settings(cache.path(), None)).unwrap();
        assert_eq!(data_set.fingerprint(), local.fingerprint());
        assert_eq!(data_set.samples(), 82);
        let id = SampleId { epoch: 0, shard: 2, row: 23 };
        assert_eq!(data_set.sample(id).unwrap(), example_row(2, 23, ROW_TOKENS));
        assert_eq!(files(cache.path()), []);
        for order in ORDERS {
            read_and_compare(&data_set, order, 40..130, false).unwrap();
        }
        assert_eq!(files(cache.path()).len(), SAMPLES.len(), "{:?}", files(cache.path()));
        let url = format!("file://{}", folder.display());
        assert_eq!(DataSet::open(&url).unwrap().fingerprint(), local.fingerprint());
    }
}

/// One GET opens a data set of any number of shards.
#[test]
fn opening_takes_one_request() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let store = Faulty::of_folder(folder.path(), 0, &[], 0);
    let asked = Arc::clone(&store.asked);
    let cache = tempfile::tempdir().unwrap();
    let data_set = open(Arc::new(store), &settings(cache.path(), None)).unwrap();
    assert_eq!((asked.requests(), data_set.samples()), (1, 82));
}

/// Whatever goes wrong on the way, an epoch is the one without faults: whole shards and ranges,
/// with the smallest limit and without.
#[test]
fn a_faulty_store_changes_no_sample() {
    let folder = hashed_example(&SAMPLES, ROW_TOKENS);
    let mut all = PASSING.to_vec();
    all.push(Fault::Flip);
    for (seed, order) in ORDERS.into_iter().enumerate() {
        for limit in [None, Some(smallest_limit(folder.path(), order))] {
            let seed = seed as u64;
            // No hash is known of the index.
            let store = Faulty::of_folder(folder.path(), seed, &all, 40).only(".parquet");
            let asked = Arc::clone(&store.asked);
            let cache = tempfile::tempdir().unwrap();
            let data_set = open(Arc::new(store), &hasty(cache.path(), limit)).unwrap();
            read_and_compare(&data_set, order, 0..100, false).unwrap();
            assert!(asked.requests() > 1 + SAMPLES.len(), "no request failed");
            let most = asked.most_at_once.load(Ordering::SeqCst);
            assert!(most <= 4, "{most} requests at once");
            // Fetches ahead end by themselves.
            wait_until(|| files(cache.path()).iter().all(|(name, _)| name.ends_with(".shard")));
        }
    }
}

/// Few samples are read by ranges: the index says what is where, the rest stays where it is.
#[test]
fn few_samples_take_few_requests_and_keep_nothing() {
    let samples = [200, 200, 200];
    let folder = indexed_example(&samples, ROW_TOKENS);
    let all: u64 = files(folder.path()).iter().map(|(_, bytes)| bytes).sum();
    for faults in [&[][..], &PASSING] {
        let store = Faulty::of_folder(folder.path(), 5, faults, 30);
        let asked = Arc::clone(&store.asked);
        let cache = tempfile::tempdir().unwrap();
        let settings = if faults.is_empty() { settings } else { hasty };
        let data_set = open(Arc::new(store), &settings(cache.path(), None)).unwrap();
        read_and_compare(&data_set, ShuffleOrder::Full, 7..27, true).unwrap();
        assert_eq!(files(cache.path()), []);
        if faults.is_empty() {
            // The shards here are smaller than what is asked for of their ends.
            assert!(asked.bytes() < 2 * all, "{} of {all}", asked.bytes());
            // The index, three footers, and no more than a row group for each sample.
            assert!(asked.requests() <= 1 + 3 + 20, "{}", asked.requests());
        }
        // Most of a shard: it is fetched whole.
        read_and_compare(&data_set, ShuffleOrder::None, 200..350, true).unwrap();
        assert_eq!(files(cache.path()).len(), 1);
    }
}

/// A full shuffle of more than the cache may hold reads row groups, no more at once than may be, and
/// keeps nothing.
#[test]
fn a_full_shuffle_of_more_than_the_cache_reads_ranges() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let store = Faulty::of_folder(folder.path(), 9, &PASSING, 30);
    let asked = Arc::clone(&store.asked);
    let cache = tempfile::tempdir().unwrap();
    let mut settings = hasty(cache.path(), Some(100));
    settings.store.requests = NonZeroUsize::MIN;
    let data_set = open(Arc::new(store), &settings).unwrap();
    let mixture = Mixture::of(data_set, shuffle(ShuffleOrder::Full)).unwrap();
    let threads = NonZeroUsize::new(2).unwrap();
    // Batches of 64 samples.
    let bounds = DecoderSettings { threads, memory_bytes: 1 << 20 };
    let decoder = Decoder::new(mixture.clone(), bounds).unwrap();
    for sample in decoder.reader(std::iter::once(0..100)) {
        let sample = sample.unwrap();
        let id = mixture.sample_at(sample.position).sample;
        assert_eq!(sample.tokens, example_row(id.shard, id.row, ROW_TOKENS));
    }
    assert_eq!(asked.most_at_once.load(Ordering::SeqCst), 1);
    assert_eq!(files(cache.path()), []);
}

/// A wait for a silent store ends with its decoder, not with a deadline.
#[test]
fn a_decoder_that_is_dropped_ends_what_it_waits_for() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let store = Arc::new(Faulty::always(folder.path(), ".parquet", Fault::Silence));
    let cache = tempfile::tempdir().unwrap();
    let mut settings = settings(cache.path(), None);
    settings.store.progress_deadline = std::time::Duration::from_secs(3600);
    for positions in [None, Some(0..2)] {
        let data_set = open(Arc::clone(&store) as _, &settings).unwrap();
        let decoder = decoder(&data_set, ShuffleOrder::None, positions).unwrap();
        let reader = decoder.reader(std::iter::once(0..2));
        // Until a request waits for its answer.
        wait_until(|| store.asked.at_once.load(Ordering::SeqCst) > 0);
        drop((reader, decoder));
        wait_until(|| store.asked.at_once.load(Ordering::SeqCst) == 0);
        wait_until(|| files(cache.path()).is_empty());
    }
}

/// Shards are there before they are asked for, and no more of them than may be.
#[test]
fn what_is_fetched_ahead_is_bounded_in_bytes() {
    // In the first shard there is more than may wait for the reader.
    let folder = indexed_example(&[40, 9, 9, 9, 9, 9, 9, 9], ROW_TOKENS);
    let bytes = |shard: usize| {
        let path = folder.path().join(format!("shard-{shard:05}.parquet"));
        std::fs::metadata(path).unwrap().len()
    };
    for (ahead_bytes, shards) in
        [(1, 1), (bytes(0) + 1, 2), (bytes(0) + bytes(1) + 1, 3), (1 << 30, 8)]
    {
        let store = Arc::new(Faulty::of_folder(folder.path(), 0, &[], 0));
        let cache = tempfile::tempdir().unwrap();
        let mut settings = settings(cache.path(), None);
        settings.store.ahead_bytes = ahead_bytes;
        let data_set = open(Arc::clone(&store) as _, &settings).unwrap();
        let decoder = decoder(&data_set, ShuffleOrder::None, None).unwrap();
        let mut reader = decoder.reader(std::iter::once(0..100));
        assert!(reader.next().unwrap().is_ok());
        let whole = || {
            let files = files(cache.path());
            files.iter().filter(|(name, _)| name.ends_with(".shard")).count()
        };
        wait_until(|| whole() == shards);
        assert_eq!((files(cache.path()).len(), store.asked.requests()), (shards, 1 + shards));
        assert_eq!(reader.filter(Result::is_ok).count(), 99);
    }
}

/// A write that a store loses on the way is tried again.
#[test]
fn writes_are_tried_again() {
    let empty = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty::of_folder(empty.path(), 7, &[Fault::Busy], 50));
    let settings = hasty(empty.path(), None).store;
    let location = Location::parse("memory://faulty/set").unwrap();
    let folder = RemoteFolder::of_store(Arc::clone(&store) as _, "set".into(), location, &settings);
    let names: Vec<String> = (0..20).map(|number| format!("file {number:02}")).collect();
    for name in &names {
        folder.put(name, name.clone().into()).unwrap();
    }
    let listed: Vec<String> = folder.list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(listed, names);
    assert!(store.asked.requests() > 21, "no request failed");
    for name in &names {
        assert_eq!(folder.get(name).unwrap(), name.as_bytes());
        folder.delete(name).unwrap();
    }
    assert_eq!(folder.list().unwrap(), []);
}

/// Rows of a store are those of the folder, whole shards and ranges, and a shard that is not what its index says is
/// refused.
#[test]
fn rows_of_a_store_are_those_of_the_folder() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let url = "memory://rows/some/where";
    let remote = RemoteFolder::open(Location::parse(url).unwrap(), &store_settings()).unwrap();
    for (file, _) in files(folder.path()) {
        let bytes = std::fs::read(folder.path().join(&file)).unwrap();
        remote.put(&file, bytes.into()).unwrap();
    }
    let columns = Columns::Named(vec!["tokens".to_owned()]);
    let read = |path: &Path,
                settings: &DataSettings,
                order: ShuffleOrder|
     -> Result<Vec<RowBatch>, DataError> {
        let table = Table::open(path, &columns, settings)?;
        let decoder = TableDecoder::new(&table, shuffle(order), TableSettings::default())?;
        decoder.reader(std::iter::once(0..table.rows() + 5)).collect()
    };
    for order in ORDERS {
        let cache = tempfile::tempdir().unwrap();
        let local = read(folder.path(), &DataSettings::default(), order).unwrap();
        // A full shuffle of more than the cache holds reads ranges.
        let limit = (order == ShuffleOrder::Full).then_some(1);
        let found = read(Path::new(url), &settings(cache.path(), limit), order).unwrap();
        assert_eq!(found, local, "{order}");
        assert_eq!(files(cache.path()).is_empty(), limit.is_some(), "{order}");
    }
    let name = &files(folder.path())[1].0;
    let mut bytes = std::fs::read(folder.path().join(name)).unwrap();
    bytes[9] ^= 1;
    std::fs::write(folder.path().join(name), bytes).unwrap();
    let wrong = read(folder.path(), &DataSettings::default(), ShuffleOrder::None).unwrap_err();
    assert!(matches!(wrong, DataError::ShardHash { .. }), "{wrong}");
}

/// Each part of a mixture is fetched for the positions that are its own: whole where most of it is read, by ranges
/// where little is, and nothing of the others.
#[test]
fn a_mixture_of_stores_is_that_of_the_folders() {
    let folders = [indexed_example(&SAMPLES, ROW_TOKENS), indexed_example(&[40, 31], ROW_TOKENS)];
    let cache = tempfile::tempdir().unwrap();
    let stores = folders
        .each_ref()
        .map(|folder| Arc::new(Faulty::of_folder(folder.path(), 2, &PASSING, 20)));
    let mix = |sets: [DataSet; 2]| {
        let amounts = [Amount::Proportion(0.5), Amount::Proportion(0.5)];
        let parts = ["one", "other"].into_iter().zip(sets).zip(amounts);
        let part = |((name, data_set), amount): ((&str, _), _)| Part {
            name: name.to_owned(),
            data_set,
            amount,
        };
        Mixture::new(parts.map(part).collect(), shuffle(ShuffleOrder::Window)).unwrap()
    };
    let remote = stores
        .each_ref()
        .map(|store| open(Arc::clone(store) as _, &hasty(cache.path(), None)).unwrap());
    let local = mix(folders.each_ref().map(|folder| DataSet::open(folder.path()).unwrap()));
    let remote = mix(remote);
    assert_eq!(remote.fingerprint(), local.fingerprint());
    let threads = NonZeroUsize::new(2).unwrap();
    let decoder_settings = DecoderSettings { threads, memory_bytes: 3000 };
    let read = |mixture: &Mixture, positions: std::ops::Range<u64>| -> Vec<Sample> {
        let decoder =
            Decoder::of_positions(mixture.clone(), decoder_settings, positions.clone()).unwrap();
        decoder.reader([positions]).map(Result::unwrap).collect()
    };
    assert_eq!(read(&remote, 30..36), read(&local, 30..36));
    assert_eq!(files(cache.path()), [], "a few samples are read by ranges");
    // 142 positions are 71 of each part: the whole of the other.
    assert_eq!(read(&remote, 0..142), read(&local, 0..142));
    let kept = files(cache.path());
    for (shard, name) in ["shard-00000.parquet", "shard-00001.parquet"].into_iter().enumerate() {
        let bytes = std::fs::metadata(folders[1].path().join(name)).unwrap().len();
        let is_kept = kept.iter().any(|(name, size)| name.ends_with(".shard") && *size == bytes);
        assert!(is_kept, "shard {shard} of the other part was not fetched whole");
    }
}
