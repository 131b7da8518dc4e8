//! Central differences, which check a backward reference.

/// `elements` fixed values within (-1, 1) that do not repeat; `phase` picks the series.
pub(super) fn wave(phase: f64, elements: usize) -> Vec<f64> {
    (0..elements).map(|i| (phase + 1.7 * i as f64 + 0.01 * (i * i) as f64).sin()).collect()
}

/// `sum of left * right`: a loss whose gradient towards `left` is `right`.
pub(super) fn dot(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// Asserts that `gradient` is the derivative of `loss` at `point` in every coordinate.
pub(super) fn check_gradient(
    what: &str,
    point: &[f64],
    gradient: &[f64],
    mut loss: impl FnMut(&[f64]) -> f64,
) {
    assert_eq!(point.len(), gradient.len(), "{what}: elements of the gradient");
    let step = 1e-5;
    let largest = gradient.iter().fold(1.0_f64, |largest, g| largest.max(g.abs()));
    let mut moved = point.to_vec();
    for i in 0..point.len() {
        moved[i] = point[i] + step;
        let above = loss(&moved);
        moved[i] = point[i] - step;
        let below = loss(&moved);
        moved[i] = point[i];
        let difference = (above - below) / (2.0 * step);
        assert!(
            (difference - gradient[i]).abs() <= 2e-8 * largest,
            "{what}[{i}]: central difference {difference:e}, gradient {:e}",
            gradient[i]
        );
    }
}
