//! 50 million samples in 5,000 shards: opened, resumed at a far position, and looked up.

use std::{hint::black_box, sync::Arc};

use criterion::{Criterion, Throughput};
use tidemill_streaming_data::{DataSet, DataSettings, Mixture};

use crate::{
    ORDERS,
    large::{self, SAMPLES},
    shuffle,
};

/// A position in the middle of the eighth epoch.
const FAR: u64 = 7 * SAMPLES + SAMPLES / 2 + 12_345;

pub fn bench(criterion: &mut Criterion) {
    let (folder, store) = (large::folder(), large::store());
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
