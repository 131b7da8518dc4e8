//! The costs of opening, looking up, decoding and reading.
//!
//! `cargo bench -p tidemill-streaming-data --bench streams`, or one of its groups by name after `--`. Data sets are
//! made in temporary folders; reading them measures the processor, not disks or networks.

mod decoding;
#[path = "../../tests/support/large.rs"]
mod large;
mod opening;
mod reading;
mod sets;

use std::num::NonZeroU64;

use criterion::{criterion_group, criterion_main};
use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};

const ORDERS: [ShuffleOrder; 4] =
    [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full];

/// An order, in windows of 4,096 samples.
fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(4096).unwrap(), seed: 17 }
}

criterion_group!(streams, opening::bench, decoding::bench, reading::bench);
criterion_main!(streams);
