//! Decoding pages to tokens, by the form of the pages: one thread decodes every page, and only every 61st sample is assembled,
//! so that nearly all time is decoding.

use std::num::NonZeroUsize;

use criterion::{Criterion, Throughput};
use tidemill_streaming_data::{
    DataSet, Mixture,
    order::ShuffleOrder,
    reader::{Decoder, DecoderSettings},
};

use crate::{
    large::ROW_TOKENS,
    sets::{self, Pages},
    shuffle,
};

const SAMPLES: u64 = 2_000;

/// Fewer samples than a page of any form has, so that no page is skipped.
const STRIDE: u64 = 61;

pub fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decoding");
    group.sample_size(20);
    group.throughput(Throughput::ElementsAndBytes {
        elements: SAMPLES,
        bytes: SAMPLES * ROW_TOKENS as u64 * 4,
    });
    for pages in Pages::ALL {
        let folder = sets::written(pages, 1, SAMPLES);
        let data_set = DataSet::open(folder.path()).unwrap();
        let mixture = Mixture::of(data_set, shuffle(ShuffleOrder::None)).unwrap();
        // Memory for a few pieces but not for the shard, so that every piece is decoded each time.
        let settings = DecoderSettings { threads: NonZeroUsize::MIN, memory_bytes: 2 << 20 };
        let decoder = Decoder::new(mixture, settings).unwrap();
        group.bench_function(pages.name(), |bencher| {
            bencher.iter(|| {
                let plan = (0..SAMPLES / STRIDE).map(|at| at * STRIDE..at * STRIDE + 1);
                let samples = decoder.reader(plan).map(|sample| sample.unwrap().tokens[0]);
                samples.fold(0, u32::wrapping_add)
            });
        });
    }
    group.finish();
}
