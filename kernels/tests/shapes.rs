//! Checked shapes: impossible sizes cannot be constructed.

use tidemill_kernels::KernelError;
use tidemill_kernels::shape::{
    ConvShape, CrossEntropyShape, GrainRows, NormShape, ScanShape, SequenceShape,
};

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: tidemill_kernels::Result<T>) {
    assert!(matches!(result, Err(KernelError::Shape { .. })), "found {result:?}");
}

#[test]
fn sizes_of_zero_and_unsupported_sizes_are_refused() {
    let sequences = SequenceShape::new(3, 4).unwrap();
    assert_refused(GrainRows::new(0, 1));
    assert_refused(GrainRows::new(1, 0));
    assert_refused(SequenceShape::new(0, 1));
    assert_refused(SequenceShape::new(1, 0));
    let grains = GrainRows::new(5, 2).unwrap();
    for norm in [NormShape::rms, NormShape::layer] {
        assert_refused(norm(grains, 0, 1e-5));
        for eps in [-1e-5, f32::NAN, f32::INFINITY] {
            assert_refused(norm(grains, 4, eps));
        }
    }
    assert_refused(ConvShape::new(sequences, 0, 4, 4));
    assert_refused(ConvShape::new(sequences, 1, 0, 4));
    assert_refused(ConvShape::new(sequences, 1, 4, 0));
    assert_refused(ConvShape::new(sequences, 1, 4, 17));
    assert_refused(ScanShape::new(sequences, 0, 4, 4));
    assert_refused(ScanShape::new(sequences, 1, 0, 4));
    assert_refused(ScanShape::new(sequences, 1, 4, 0));
    assert_refused(ScanShape::new(sequences, 1, 4, 257));
    assert_refused(CrossEntropyShape::new(0, 5, 5));
    assert_refused(CrossEntropyShape::new(3, 0, 5));
    assert_refused(CrossEntropyShape::new(3, 5, 4));
}

/// No product of a shape's sizes wraps: not rows, not elements, not the bytes of either.
#[test]
fn sizes_that_cannot_be_counted_are_refused() {
    let many = usize::MAX / 2;
    assert_refused(SequenceShape::new(many, 3));
    assert_refused(NormShape::rms(GrainRows::new(many, 2).unwrap(), 3, 1e-5));
    let sequences = SequenceShape::new(1 << 20, 1 << 20).unwrap();
    assert_refused(ConvShape::new(sequences, 1, 1 << 20, 4));
    assert_refused(ConvShape::new(sequences, 1, many, 4));
    assert_refused(ScanShape::new(sequences, 1, 1 << 20, 1));
    assert_refused(ScanShape::new(sequences, 1, usize::MAX, 1));
    assert_refused(CrossEntropyShape::new(many, 5, 5));
    assert_refused(CrossEntropyShape::new(2, 5, usize::MAX));
    let sequences = SequenceShape::new(3, 4).unwrap();
    assert_eq!(ScanShape::new(sequences, usize::MAX, 4, 4).unwrap().samples_per_grain(), 3);
    assert_eq!(ConvShape::new(sequences, usize::MAX, 4, 4).unwrap().grains().grains(), 1);
    assert_eq!(GrainRows::new(many, many - 1).unwrap().range(2), many..many);
}

#[test]
fn grains_cover_every_row_once_and_the_last_may_be_short() {
    let cases = [
        (1, 1, vec![(0, 1)]),
        (5, 2, vec![(0, 2), (2, 4), (4, 5)]),
        (4, 2, vec![(0, 2), (2, 4)]),
        (3, 9, vec![(0, 3)]),
    ];
    for (rows, rows_per_grain, expected) in cases {
        let grains = GrainRows::new(rows, rows_per_grain).unwrap();
        let ranges: Vec<_> = (0..grains.grains())
            .map(|grain| grains.range(grain))
            .map(|range| (range.start, range.end))
            .collect();
        assert_eq!(ranges, expected);
    }
}

#[test]
fn sequences_count_their_grains_in_rows() {
    let sequences = SequenceShape::new(5, 7).unwrap();
    let expected = GrainRows::new(35, 14).unwrap();
    assert_eq!(ConvShape::new(sequences, 2, 3, 4).unwrap().grains(), expected);
    assert_eq!(ScanShape::new(sequences, 2, 3, 4).unwrap().grains(), expected);
}

#[test]
fn errors_say_what_was_expected_and_what_was_found() {
    let error = CrossEntropyShape::new(3, 50_280, 50_277).unwrap_err();
    let text = "cross_entropy: row stride: expected at least 50280, found 50277";
    assert_eq!(error.to_string(), text);
    let grains = GrainRows::new(5, 2).unwrap();
    let text = "layer_norm: width: expected at least 1, found 0";
    assert_eq!(NormShape::layer(grains, 0, 1e-5).unwrap_err().to_string(), text);
    let text = "rms_norm: eps: expected a finite number >= 0, found -1";
    assert_eq!(NormShape::rms(grains, 4, -1.0).unwrap_err().to_string(), text);
}
