//! Reading samples as in training: an epoch shuffled by windows, decoded by two threads in less memory than the data
//! set takes, and taken by one consumer.

use std::{
    iter::once,
    num::{NonZeroU64, NonZeroUsize},
};

use criterion::{Criterion, Throughput};
use tidemill_streaming_data::{
    DataSet, Mixture,
    order::{ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings},
};

use crate::{
    sets::{self, Pages},
    shuffle,
};

const SHARDS: u64 = 4;
const SHARD_SAMPLES: u64 = 1_000;

/// A window of 512 samples takes 2 MiB, the data set 16 MiB.
const WINDOW: NonZeroU64 = NonZeroU64::new(512).unwrap();
const MEMORY_BYTES: usize = 8 << 20;

pub fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reading");
    group.sample_size(20);
    group.throughput(Throughput::Elements(SHARDS * SHARD_SAMPLES));
    let threads = NonZeroUsize::new(2).unwrap();
    for pages in Pages::ALL {
        let folder = sets::written(pages, SHARDS, SHARD_SAMPLES);
        let data_set = DataSet::open(folder.path()).unwrap();
        let shuffle = ShuffleSettings { window_samples: WINDOW, ..shuffle(ShuffleOrder::Window) };
        let samples = data_set.samples();
        let mixture = Mixture::of(data_set, shuffle).unwrap();
        let settings = DecoderSettings { threads, memory_bytes: MEMORY_BYTES };
        let decoder = Decoder::new(mixture, settings).unwrap();
        let mut epoch = 0;
        group.bench_function(format!("window of {WINDOW}/{}", pages.name()), |bencher| {
            bencher.iter(|| {
                // Another permutation each time, so that no decoded page can be reused.
                let positions = epoch * samples..(epoch + 1) * samples;
                epoch += 1;
                let tokens = decoder.reader(once(positions)).map(|s| s.unwrap().tokens[0]);
                tokens.fold(0, u32::wrapping_add)
            });
        });
    }
    group.finish();
}
