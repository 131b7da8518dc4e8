//! Sums of gradients: over grains, over uses of a parameter, and of squares.

/// `lane[i] + sum over g of gradients[g, i]`, for `gradients[grains, lane.len()]`.
pub fn accumulate(lane: &[f64], gradients: &[f64]) -> Vec<f64> {
    let mut sum = lane.to_vec();
    for gradient in gradients.chunks_exact(lane.len()) {
        for (sum, gradient) in sum.iter_mut().zip(gradient) {
            *sum += gradient;
        }
    }
    sum
}

/// `(uses[0][i] + uses[1][i] + ...) / count`.
pub fn mean_gradient(uses: &[&[f64]], count: f64) -> Vec<f64> {
    let elements = uses[0].len();
    (0..elements).map(|i| uses.iter().map(|values| values[i]).sum::<f64>() / count).collect()
}

/// `sum of x^2`.
pub fn sum_of_squares(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

/// The sum of element i of `terms`, of which there is at least one. In exact arithmetic the tree does not matter.
pub fn tree_sum(terms: &[&[f64]]) -> Vec<f64> {
    (0..terms[0].len()).map(|i| terms.iter().map(|values| values[i]).sum()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_by_hand() {
        assert_eq!(accumulate(&[1.0, 2.0], &[10.0, 20.0, 100.0, 200.0]), [111.0, 222.0]);
        assert_eq!(mean_gradient(&[&[1.0, 2.0], &[5.0, 8.0]], 2.0), [3.0, 5.0]);
        assert_eq!(tree_sum(&[&[1.0, 2.0], &[5.0, 8.0], &[-2.0, 1.0]]), [4.0, 11.0]);
        assert_eq!(sum_of_squares(&[3.0, -4.0]), 25.0);
    }
}
