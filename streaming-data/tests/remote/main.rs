//! A data set in a store gives the samples of the same data set in a folder, whatever the store
//! does, and what cannot be had is one clear line.

mod blob_server;
mod cache;
mod epochs;
mod errors;
mod faulty;
mod listen;
mod prepare;
mod processes;
mod ranges;
mod s3;
mod s3_server;
mod strangers;
#[allow(dead_code, reason = "other test programs use the rest")]
#[path = "../support/mod.rs"]
mod support;
mod unindexed;
mod updates;
mod web;
mod web_server;

use std::{
    num::{NonZeroU32, NonZeroU64, NonZeroUsize},
    path::Path as FilePath,
    sync::Arc,
    time::Duration,
};

use object_store::{ObjectStore, path::Path};
use support::{example_row, outcome::assert_line};
use tidemill_streaming_data::{
    CacheSettings, DataError, DataSet, DataSettings, Mixture,
    order::{ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings},
    store::StoreSettings,
};

const SAMPLES: [u64; 7] = [13, 1, 24, 7, 10, 18, 9];
const ROW_TOKENS: usize = 11;
const ORDERS: [ShuffleOrder; 4] =
    [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full];

fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(9).unwrap(), seed: 17 }
}

/// Quick to try again.
fn store_settings() -> StoreSettings {
    StoreSettings {
        requests: NonZeroUsize::new(4).unwrap(),
        attempts: NonZeroU32::new(8).unwrap(),
        outage: Duration::ZERO,
        back_off: Duration::from_millis(1),
        back_off_limit: Duration::from_millis(4),
        // Only a machine that is too busy for the tests would take longer.
        progress_deadline: Duration::from_secs(20),
        seed: 3,
        ..StoreSettings::default()
    }
}

/// For stores that fall silent: soon seen, and tried again more often than they do.
fn hasty(cache: &FilePath, limit_bytes: Option<u64>) -> DataSettings {
    let mut settings = settings(cache, limit_bytes);
    settings.store.progress_deadline = Duration::from_millis(50);
    settings.store.attempts = NonZeroU32::new(40).unwrap();
    settings
}

fn settings(cache: &FilePath, limit_bytes: Option<u64>) -> DataSettings {
    let cache = CacheSettings { dir: Some(cache.to_owned()), limit_bytes };
    DataSettings { store: store_settings(), cache }
}

fn open(store: Arc<dyn ObjectStore>, settings: &DataSettings) -> Result<DataSet, DataError> {
    DataSet::open_store(store, Path::from("set"), "memory://store/set", settings)
}

fn decoder(
    data_set: &DataSet,
    order: ShuffleOrder,
    positions: Option<std::ops::Range<u64>>,
) -> Result<Decoder, DataError> {
    let mixture = Mixture::of(data_set.clone(), shuffle(order))?;
    let threads = NonZeroUsize::new(2).unwrap();
    let settings = DecoderSettings { threads, memory_bytes: 3000 };
    match positions {
        Some(positions) => Decoder::of_positions(mixture, settings, positions),
        None => Decoder::new(mixture, settings),
    }
}

/// Reads positions and compares them with what was written.
fn read_and_compare(
    data_set: &DataSet,
    order: ShuffleOrder,
    positions: std::ops::Range<u64>,
    is_known: bool,
) -> Result<(), DataError> {
    let known = is_known.then(|| positions.clone());
    let decoder = decoder(data_set, order, known)?;
    let canonical = data_set.order(shuffle(order))?;
    let mut expected = positions.clone();
    for sample in decoder.reader([positions]) {
        let sample = sample?;
        assert_eq!(Some(sample.position), expected.next());
        let id = canonical.sample_at(sample.position);
        assert_eq!(sample.tokens, example_row(id.shard, id.row, ROW_TOKENS));
    }
    assert!(expected.is_empty(), "{order}: {expected:?} are missing");
    Ok(())
}

/// Names and sizes of the files of a folder.
fn files(folder: &FilePath) -> Vec<(String, u64)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<(String, u64)> = entries
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            // The lock of a cache is there always.
            (name != "tidemill.lock").then_some((name, entry.metadata().ok()?.len()))
        })
        .collect();
    files.sort();
    files
}

/// The smallest limit of a cache that is not refused.
fn smallest_limit(folder: &FilePath, order: ShuffleOrder) -> u64 {
    let cache = tempfile::tempdir().unwrap();
    let data_set =
        open(Arc::new(faulty::in_memory(folder)), &settings(cache.path(), Some(0))).unwrap();
    match decoder(&data_set, order, None) {
        Err(DataError::CacheLimit { needed_bytes, .. }) => needed_bytes,
        // Ranges: any limit will do.
        Ok(_) => 1,
        Err(other) => panic!("{other}"),
    }
}

/// Waits for something that another thread or process does.
fn wait_until(is_so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "waited for a minute");
        std::thread::yield_now();
    }
}
