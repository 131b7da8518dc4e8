//! ALiBi: attention scores that fall with distance, instead of embedded positions (Press et al.,
//! 2022).

/// The slope of each of `heads` heads: `2^(-most i / n)` for i from 1 to n, where n is `heads`
/// rounded up to a power of two. If `heads` is not a power of two, every other slope comes first,
/// as in LLM Foundry and transformers.
pub fn alibi_slopes(heads: usize, most: f64) -> Vec<f32> {
    let n = heads.next_power_of_two();
    let slope = |i: usize| libm::exp2(-most * i as f64 / n as f64) as f32;
    if n == heads {
        return (1..=n).map(slope).collect();
    }
    (2..=n).step_by(2).chain((1..=n).step_by(2)).take(heads).map(slope).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of `build_mpt_alibi_tensor` in transformers 4.57.1.
    #[test]
    fn slopes_are_those_of_transformers() {
        assert_eq!(alibi_slopes(4, 8.0), [0.25, 0.0625, 0.015_625, 0.003_906_25]);
        assert_eq!(alibi_slopes(3, 8.0), [0.0625, 0.003_906_25, 0.25]);
        assert_eq!(alibi_slopes(6, 8.0), [0.25, 0.0625, 0.015_625, 0.003_906_25, 0.5, 0.125]);
        assert_eq!(alibi_slopes(1, 8.0), [0.003_906_25]);
        assert_eq!(alibi_slopes(2, 4.0), [0.25, 0.0625]);
    }
}
