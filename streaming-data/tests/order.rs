//! The canonical order: every sample once per epoch, random access, and pinned for ever.

use std::num::NonZeroU64;

use tidemill_streaming_data::order::{CanonicalOrder, SampleId, ShuffleOrder, ShuffleSettings};

const ORDERS: [ShuffleOrder; 4] =
    [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full];

fn order(samples: &[u64], order: ShuffleOrder, window: u64, seed: u64) -> CanonicalOrder {
    let window_samples = NonZeroU64::new(window).unwrap();
    CanonicalOrder::new(samples, ShuffleSettings { order, window_samples, seed }).unwrap()
}

fn places(order: &CanonicalOrder, positions: std::ops::Range<u64>) -> Vec<(usize, u64)> {
    positions.map(|p| order.sample_at(p)).map(|s| (s.shard, s.row)).collect()
}

#[test]
fn every_epoch_holds_every_sample_once_without_a_seam() {
    let sizes: [&[u64]; 6] =
        [&[1], &[2], &[3, 1], &[5, 1, 9, 4], &[64, 63, 65, 1, 1], &[0, 7, 0, 1009]];
    for samples in sizes {
        let n: u64 = samples.iter().sum();
        let stored: Vec<(usize, u64)> = samples
            .iter()
            .enumerate()
            .flat_map(|(shard, &rows)| (0..rows).map(move |row| (shard, row)))
            .collect();
        for kind in ORDERS {
            for window in [1, 2, 7, 64, 5000] {
                let order = order(samples, kind, window, 3);
                for epoch in [0, 1, 2, 1 << 40] {
                    let start = epoch * n;
                    assert_eq!(order.sample_at(start).epoch, epoch);
                    assert_eq!(order.sample_at(start + n - 1).epoch, epoch);
                    let mut found = places(&order, start..start + n);
                    found.sort_unstable();
                    assert_eq!(found, stored, "{samples:?} {kind} {window}, epoch {epoch}");
                }
            }
        }
    }
}

#[test]
fn a_position_means_the_same_whatever_was_asked_before() {
    for kind in ORDERS {
        let one = order(&[5, 1, 9, 4], kind, 6, 17);
        let forward: Vec<SampleId> = (0..100).map(|position| one.sample_at(position)).collect();
        let other = order(&[5, 1, 9, 4], kind, 6, 17);
        for step in [99, 37, 53] {
            for position in (0..100).map(|i| i * step % 100) {
                assert_eq!(other.sample_at(position), forward[position as usize], "{kind}");
            }
        }
    }
}

#[test]
fn epochs_and_seeds_differ_where_the_order_uses_them() {
    let samples: Vec<u64> = (20..60).collect();
    let n = samples.iter().sum::<u64>();
    for kind in ORDERS {
        let seed_1 = order(&samples, kind, 100, 1);
        let seed_2 = order(&samples, kind, 100, 2);
        let first = places(&seed_1, 0..n);
        let is_fixed = kind == ShuffleOrder::None;
        assert_eq!(first == places(&seed_1, n..2 * n), is_fixed, "{kind}: epochs");
        assert_eq!(first == places(&seed_2, 0..n), is_fixed, "{kind}: seeds");
    }
}

#[test]
fn shard_order_keeps_rows_and_window_order_keeps_windows_of_it() {
    let samples = [11, 3, 20, 1, 8];
    let n: u64 = samples.iter().sum();
    let by_shard = places(&order(&samples, ShuffleOrder::Shard, 1, 5), 0..2 * n);
    for pair in by_shard[..n as usize].windows(2) {
        let follows = pair[1] == (pair[0].0, pair[0].1 + 1);
        assert!(follows || pair[1].1 == 0, "{pair:?}: rows follow, or a shard begins");
    }
    for window in [1, 4, 10, 100] {
        let by_window = places(&order(&samples, ShuffleOrder::Window, window, 5), 0..2 * n);
        for epoch in [0, n] {
            let mut start = 0;
            while start < n {
                let end = n.min(start + window);
                let inside = (epoch + start) as usize..(epoch + end) as usize;
                let mut expected = by_shard[inside.clone()].to_vec();
                let mut found = by_window[inside].to_vec();
                expected.sort_unstable();
                found.sort_unstable();
                assert_eq!(found, expected, "window {window} from {start} of epoch {epoch}");
                start = end;
            }
        }
    }
    let whole = places(&order(&samples, ShuffleOrder::Window, 1, 5), 0..n);
    assert_eq!(whole, by_shard[..n as usize], "windows of one sample shuffle nothing");
}

/// From a second implementation (Python): a change of these breaks every saved run.
#[test]
fn golden_values() {
    let positions = [0, 1, 2, 9, 18, 19, 20, 37, 38, 1900];
    let golden: [[(usize, u64); 10]; 4] = [
        [(0, 0), (0, 1), (0, 2), (2, 3), (3, 3), (0, 0), (0, 1), (3, 3), (0, 0), (0, 0)],
        [(0, 0), (0, 1), (0, 2), (2, 4), (1, 0), (3, 0), (3, 1), (1, 0), (1, 0), (3, 0)],
        [(0, 4), (2, 0), (0, 1), (2, 3), (1, 0), (3, 2), (3, 3), (1, 0), (3, 0), (3, 3)],
        [(3, 3), (3, 0), (0, 0), (3, 2), (2, 5), (2, 1), (0, 2), (0, 0), (1, 0), (2, 5)],
    ];
    for (kind, golden) in ORDERS.into_iter().zip(golden) {
        let order = order(&[5, 1, 9, 4], kind, 6, 17);
        let found = positions.map(|p| order.sample_at(p)).map(|s| (s.shard, s.row));
        assert_eq!(found, golden, "{kind}");
    }
}

#[test]
fn no_samples_and_too_many_are_errors() {
    let settings = *order_settings();
    for samples in [vec![], vec![0, 0], vec![u64::MAX, 1]] {
        let message = CanonicalOrder::new(&samples, settings).unwrap_err().to_string();
        assert!(message.contains("expected 1 to 2^64 - 1 samples in all"), "{message}");
    }
    let largest = CanonicalOrder::new(&[u64::MAX - 3, 3], settings).unwrap();
    assert_eq!(largest.sample_at(u64::MAX).epoch, 1);
}

fn order_settings() -> &'static ShuffleSettings {
    &ShuffleSettings {
        order: ShuffleOrder::Full,
        window_samples: ShuffleSettings::DEFAULT_WINDOW_SAMPLES,
        seed: 17,
    }
}

#[test]
fn settings_are_read_as_written_in_a_config() {
    let text = r#"{"order": "shard", "window_samples": 16384, "seed": 3}"#;
    let settings: ShuffleSettings = serde_json::from_str(text).unwrap();
    assert_eq!((settings.order, settings.seed), (ShuffleOrder::Shard, 3));
    for (wrong, expected) in [
        (text.replace("shard", "random"), "unknown variant `random`"),
        (text.replace("16384", "0"), "nonzero"),
        (text.replace("seed", "sede"), "unknown field `sede`"),
    ] {
        let message = serde_json::from_str::<ShuffleSettings>(&wrong).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    for kind in ORDERS {
        assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
    }
}
