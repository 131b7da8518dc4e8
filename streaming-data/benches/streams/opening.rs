//! 50 million samples in 5,000 shards: opened, gone on with at a far position, and looked up.

use std::{fs, fs::File, hint::black_box, sync::Arc};

use criterion::{Criterion, Throughput};
use object_store::{ObjectStoreExt, memory::InMemory};
use tidemill_streaming_data::{
    DataSet, DataSettings, Mixture,
    hash::ContentHash,
    index::{FooterEntry, INDEX_FILE, ShardEntry},
};

use crate::{ORDERS, sets, shuffle};

const SHARDS: usize = 5_000;
const SHARD_SAMPLES: u64 = 10_000;
const SAMPLES: u64 = SHARDS as u64 * SHARD_SAMPLES;
const SHARD_BYTES: u64 = 20_000_000;

/// Of the middle of the eighth epoch.
const FAR: u64 = 7 * SAMPLES + SAMPLES / 2 + 12_345;

pub fn bench(criterion: &mut Criterion) {
    let shard = |at: usize| ShardEntry {
        file: format!("shard-{at:05}.parquet"),
        samples: SHARD_SAMPLES,
        bytes: SHARD_BYTES,
        hash: ContentHash::of(&at.to_be_bytes()),
        footer: Some(FooterEntry { bytes: 15_000, hash: ContentHash::of(&[at as u8]) }),
    };
    let index = sets::index((0..SHARDS).map(shard).collect());
    let folder = tempfile::tempdir().unwrap();
    for shard in &index.shards {
        // Of the right size, with nothing in it: opening does not read them.
        File::create(folder.path().join(&shard.file)).unwrap().set_len(shard.bytes).unwrap();
    }
    fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
    let store: Arc<InMemory> = Arc::new(InMemory::new());
    let path = format!("set/{INDEX_FILE}").into();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put(&path, index.to_bytes().into())).unwrap();

    let open_folder = || DataSet::open(folder.path()).unwrap();
    let open_store = || {
        let (store, settings) = (Arc::clone(&store), DataSettings::default());
        DataSet::open_store(store, "set".into(), "memory://bench/set", &settings).unwrap()
    };
    let mut group = criterion.benchmark_group("opening");
    group.sample_size(20);
    group.bench_function("folder", |bencher| bencher.iter(open_folder));
    group.bench_function("store", |bencher| bencher.iter(open_store));
    for order in ORDERS {
        group.bench_function(format!("folder and far position/{order}"), |bencher| {
            bencher.iter(|| {
                let mixture = Mixture::of(open_folder(), shuffle(order)).unwrap();
                mixture.sample_at(black_box(FAR))
            });
        });
    }
    group.finish();

    let data_set = open_folder();
    let mut group = criterion.benchmark_group("lookup");
    group.throughput(Throughput::Elements(1));
    for order in ORDERS {
        let order_of = data_set.order(shuffle(order)).unwrap();
        let mut position = FAR;
        group.bench_function(format!("next/{order}"), |bencher| {
            bencher.iter(|| {
                position += 1;
                order_of.sample_at(position)
            });
        });
        group.bench_function(format!("anywhere in an epoch/{order}"), |bencher| {
            bencher.iter(|| {
                position = 7 * SAMPLES + (position + 31_415_927) % SAMPLES;
                order_of.sample_at(position)
            });
        });
    }
    group.finish();
}
