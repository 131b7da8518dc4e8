//! The sum of f64 values by a fixed tree over their indices.

/// The sum of `values`: split at the largest power of two below the length, left plus right. So the
/// sum over lanes, a power of two, follows the canonical tree; and no sum depends on the owners.
pub(super) fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [] => 0.0,
        [value] => *value,
        _ => {
            let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_association_is_fixed() {
        let [a, b, c, d, e] = [1e16, 1.0, -1e16, 1.0, 3.0];
        assert_eq!(tree_sum(&[]), 0.0);
        assert_eq!(tree_sum(&[a]), a);
        assert_eq!(tree_sum(&[a, b, c]), (a + b) + c);
        assert_eq!(tree_sum(&[a, b, c, d]), (a + b) + (c + d));
        assert_eq!(tree_sum(&[a, b, c, d, e]), ((a + b) + (c + d)) + e);
        assert_ne!(tree_sum(&[a, b, c, d]), a + b + c + d, "the control: left to right differs");
    }
}
