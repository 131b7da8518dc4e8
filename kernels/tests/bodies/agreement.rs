//! When results agree: with the definition within a tolerance, and between arms to the bit.

use tidemill_kernels::Element;

/// The relative error allowed to a result of element type `T` that sums `reduction` terms.
///
/// Errors are measured against the larger of the expected element and the root mean square of its
/// tensor: a sum that cancels is as exact as its terms are. An fp32 term carries up to about eight
/// roundings of 2^-24 (the elementary functions have 4 ulp), and the sum adds as a random walk does.
pub fn tolerance<T: Element>(reduction: usize) -> f64 {
    match (T::NAME, reduction) {
        ("f64", _) => 1e-12,
        (_, 0) => 1e-6,
        (_, ..=32) => 5e-6,
        (_, ..=512) => 1e-5,
        (_, _) => 3e-5,
    }
}

/// Asserts that `found` is `expected` within `tolerance`; a NaN never agrees.
#[track_caller]
pub fn assert_close(label: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_close_beside(label, found, expected, tolerance, 0.0);
}

/// [`assert_close`] where the terms of a sum, or what an activation is applied to, are as large as
/// `terms` though the results may be much smaller: errors are measured against that too.
#[track_caller]
pub fn assert_close_beside(
    label: &str,
    found: &[f32],
    expected: &[f64],
    tolerance: f64,
    terms: f64,
) {
    assert_eq!(found.len(), expected.len(), "{label}: elements");
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let typical = (squares / expected.len() as f64).sqrt().max(terms);
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        let allowed = tolerance * expected.abs().max(typical) + f64::from(f32::MIN_POSITIVE);
        assert!(
            error <= allowed,
            "{label}[{i}]: found {found:e}, expected {expected:e}: error {error:e} over {allowed:e}"
        );
    }
}

/// Asserts that every element is within `tolerance` of its own size: for what no sum cancels.
#[track_caller]
pub fn assert_each_close(label: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{label}: elements");
    for i in 0..found.len() {
        let label = format!("{label}[{i}]");
        assert_close(&label, &found[i..=i], &expected[i..=i], tolerance);
    }
}

/// Asserts that two results are equal to the bit.
#[track_caller]
pub fn assert_same_bits(label: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{label}: elements");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            found.to_bits() == expected.to_bits(),
            "{label}[{i}]: found {found:e} ({:#010x}), expected {expected:e} ({:#010x})",
            found.to_bits(),
            expected.to_bits()
        );
    }
}

/// What a body computed on one arm, as a hash of the bits of each labelled result: arms of one
/// device kind must write equal transcripts.
#[derive(Default)]
pub struct Transcript {
    results: Vec<(String, u64)>,
}

impl Transcript {
    /// Adds a result.
    pub fn record(&mut self, label: &str, values: &[f32]) {
        self.record_words(label, values.iter().map(|value| u64::from(value.to_bits())));
    }

    /// Adds a result given as the bits of its elements (hashed with FNV-1a).
    pub fn record_words(&mut self, label: &str, words: impl IntoIterator<Item = u64>) {
        let hash = words.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
            (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
        });
        self.results.push((label.to_owned(), hash));
    }

    /// Asserts that this transcript and `other` hold the same bits.
    #[track_caller]
    pub fn assert_same(&self, name: &str, other: &Self, other_name: &str) {
        assert_eq!(self.results.len(), other.results.len(), "results of {name} and {other_name}");
        for ((label, hash), (_, other_hash)) in self.results.iter().zip(&other.results) {
            assert_eq!(hash, other_hash, "{label}: {name} and {other_name} differ in bits");
        }
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.results.is_empty()
    }
}
