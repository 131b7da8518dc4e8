//! Agreement of results: with the definition within a tolerance, and between arms to the bit.

use super::number::Number;

/// The error allowed to a result.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Relative to the expected element.
    of_element: f64,
    /// Relative to the larger of the expected element and the root mean square of its tensor: a sum
    /// whose terms cancel is as exact as its terms are.
    of_typical: f64,
    /// What may be lost where a number below the smallest normal one counts as zero.
    of_underflow: f64,
}

/// The error allowed to a result of type `T` that sums `reduction` terms.
///
/// The arithmetic is fp32 whatever the type. A term carries up to about eight roundings of 2^-24 (the elementary
/// functions have 4 ulp), and the sum adds as a random walk does. The result is rounded to `T` once.
pub fn tolerance<T: Number>(reduction: usize) -> Tolerance {
    let of_typical = match reduction {
        0 => 1e-6,
        1..=32 => 5e-6,
        33..=512 => 1e-5,
        513.. => 3e-5,
    };
    Tolerance { of_element: T::ROUNDING, of_typical, of_underflow: f64::from(f32::MIN_POSITIVE) }
}

impl Tolerance {
    /// The tolerance of a result computed from another rounded result, and so rounded twice.
    pub fn rounded_twice(self) -> Self {
        Self { of_element: 2.0 * self.of_element, ..self }
    }

    /// The tolerance of a result whose terms also carry a relative error of `error`.
    pub fn beside(self, error: f64) -> Self {
        Self { of_typical: self.of_typical + error, ..self }
    }

    /// The tolerance of a result with terms of which one factor may underflow, where the others, in all, are as large as `size`.
    pub fn underflowing(self, size: f64) -> Self {
        Self { of_underflow: f64::from(f32::MIN_POSITIVE) * size, ..self }
    }

    fn allows(self, expected: f64, typical: f64) -> f64 {
        let size = expected.abs();
        self.of_element * size + self.of_typical * size.max(typical) + self.of_underflow
    }
}

/// Asserts that `found` is `expected` within `tolerance`; a NaN never agrees.
#[track_caller]
pub fn assert_close(label: &str, found: &[f32], expected: &[f64], tolerance: Tolerance) {
    assert_close_beside(label, found, expected, tolerance, 0.0);
}

/// [`assert_close`] for sums whose terms, or functions whose inputs, are as large as `terms`
/// although the results may be much smaller: errors are measured relative to `terms` too.
#[track_caller]
pub fn assert_close_beside(
    label: &str,
    found: &[f32],
    expected: &[f64],
    tolerance: Tolerance,
    terms: f64,
) {
    assert_eq!(found.len(), expected.len(), "{label}: elements");
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let typical = (squares / expected.len() as f64).sqrt().max(terms);
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        let allowed = tolerance.allows(expected, typical);
        assert!(
            error <= allowed,
            "{label}[{i}]: found {found:e}, expected {expected:e}: error {error:e} over {allowed:e}"
        );
    }
}

/// [`assert_close`] for sums in which the sizes of the terms add up to `terms[i]`: the largest
/// error that a relative error of the terms can cause.
#[track_caller]
pub fn assert_close_to_sums(
    label: &str,
    found: &[f32],
    expected: &[f64],
    tolerance: Tolerance,
    terms: &[f64],
) {
    assert_eq!((found.len(), terms.len()), (expected.len(), expected.len()), "{label}: elements");
    for i in 0..found.len() {
        let label = format!("{label}[{i}]");
        let (found, expected) = (&found[i..=i], &expected[i..=i]);
        assert_close_beside(&label, found, expected, tolerance, terms[i]);
    }
}

/// Asserts that every element is within `tolerance` of its own size: for results without
/// cancellation.
#[track_caller]
pub fn assert_each_close(label: &str, found: &[f32], expected: &[f64], tolerance: Tolerance) {
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

/// The results of a body on one arm, as a hash of the bits of each labelled result: arms of one
/// device kind must have equal transcripts.
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

    /// Asserts that results which were recorded under one label have the same bits.
    #[track_caller]
    pub fn assert_each_label_has_one_result(&self) {
        for (label, hash) in &self.results {
            let first = self.results.iter().find(|(other, _)| other == label);
            assert_eq!(first.map(|(_, hash)| hash), Some(hash), "{label}: results differ in bits");
        }
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
