//! The sizes of a Mamba-2 model, checked. The names are those of the reference implementation (Dao and Gu, 2024, `mamba2.py`).

use tidemill_kernels::backend::DeltaLimits;

use crate::error::{ModelError, Result};
use crate::family::{SpecialTokens, check_norm_eps, check_sizes};

/// The sizes of a Mamba-2 language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    /// v, the tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub d_model: usize,
    /// The number of Mamba-2 blocks.
    pub n_layers: usize,
    /// n, the states of a channel.
    pub d_state: usize,
    /// k, the taps of the causal convolution.
    pub d_conv: usize,
    /// e / d.
    pub expand: usize,
    /// p, the channels of a head; a divisor of e.
    pub head_width: usize,
    /// g, groups of heads that share B and C; a divisor of the heads.
    pub n_groups: usize,
    /// The limits of step sizes; the upper one may be infinite.
    pub delta_limits: [f64; 2],
    /// Added to the mean square before the root of every norm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding table or a table of its own, `lm_head`.
    pub tie_embeddings: bool,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// The tokens that files name for generation; no kernel reads them.
    pub special_tokens: SpecialTokens,
}

impl Mamba2Config {
    /// A model of this vocabulary, width and depth, with the other sizes as published: 128 states,
    /// 4 taps, expansion 2, heads of 64 channels (or of the most below that divide e), one group,
    /// unlimited step sizes, tied embeddings.
    pub fn new(vocab_size: usize, d_model: usize, n_layers: usize) -> Self {
        Self {
            vocab_size,
            d_model,
            n_layers,
            d_state: 128,
            d_conv: 4,
            expand: 2,
            head_width: Self::head_width_like(64, d_model.saturating_mul(2)),
            n_groups: 1,
            delta_limits: [0.0, f64::INFINITY],
            norm_eps: 1e-5,
            tie_embeddings: true,
            conv_bias: true,
            special_tokens: SpecialTokens::default(),
        }
    }

    /// The widest head of at most `most` channels whose width divides `inner`.
    pub(crate) fn head_width_like(most: usize, inner: usize) -> usize {
        (1..=most).rev().find(|&width| inner.is_multiple_of(width)).unwrap_or(1)
    }

    /// e, the channels of all heads.
    pub fn d_inner(&self) -> usize {
        self.expand * self.d_model
    }

    /// h, the heads.
    pub fn n_heads(&self) -> usize {
        self.d_inner() / self.head_width.max(1)
    }

    /// c = e + 2 g n, the channels of the convolution.
    pub fn conv_width(&self) -> usize {
        self.d_inner() + 2 * self.n_groups * self.d_state
    }

    /// e + c + h, the columns of in_proj's product.
    pub fn projected_width(&self) -> usize {
        self.d_inner() + self.conv_width() + self.n_heads()
    }

    /// The limits of step sizes in the kernels' type.
    pub(crate) fn kernel_limits(&self) -> Result<DeltaLimits> {
        let [least, most] = self.delta_limits;
        DeltaLimits::new(least as f32, most as f32).map_err(|_| {
            let expected = "a least of 0 or more, then a most above it";
            ModelError::config("time_step_limit", expected, format!("{least} and {most}"))
        })
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        // Bounds that keep every product of sizes far from overflow, and the bounds of the kernels.
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1..=1 << 24),
            ("d_model", self.d_model, 1..=1 << 18),
            ("n_layers", self.n_layers, 1..=1 << 12),
            ("d_state", self.d_state, 1..=256),
            ("d_conv", self.d_conv, 1..=16),
            ("expand", self.expand, 1..=64),
            ("head_width", self.head_width, 1..=256),
            ("n_groups", self.n_groups, 1..=1 << 18),
        ])?;
        let inner = self.d_inner();
        if !inner.is_multiple_of(self.head_width) {
            let expected = format!("a divisor of expand times d_model, which is {inner}");
            return Err(ModelError::config("head_width", expected, self.head_width));
        }
        if !self.n_heads().is_multiple_of(self.n_groups) {
            let expected = format!("a divisor of the {} heads", self.n_heads());
            return Err(ModelError::config("n_groups", expected, self.n_groups));
        }
        self.kernel_limits()?;
        check_norm_eps(self.norm_eps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_bounds_are_named() {
        type Change = fn(&mut Mamba2Config);
        let changes: [(&str, Change); 12] = [
            ("vocab_size", |config| config.vocab_size = 0),
            ("d_model", |config| config.d_model = usize::MAX),
            ("n_layers", |config| config.n_layers = 0),
            ("d_state", |config| config.d_state = 257),
            ("d_conv", |config| config.d_conv = 17),
            ("expand", |config| config.expand = 0),
            ("head_width", |config| config.head_width = 0),
            ("head_width", |config| config.head_width = 5),
            ("n_groups", |config| config.n_groups = 2),
            ("time_step_limit", |config| config.delta_limits = [0.1, 0.1]),
            ("time_step_limit", |config| config.delta_limits = [f64::NAN, 1.0]),
            ("norm_eps", |config| config.norm_eps = f64::NAN),
        ];
        let small = Mamba2Config { head_width: 2, ..Mamba2Config::new(259, 7, 1) };
        small.check().expect("seven heads of two channels");
        for (key, change) in changes {
            let mut config = small.clone();
            change(&mut config);
            let error = config.check().expect_err(key).to_string();
            assert!(error.starts_with(&format!("{key}: expected ")), "{error}");
        }
    }

    #[test]
    fn heads_are_as_wide_as_published_where_that_divides() {
        let width = |d_model| Mamba2Config::new(1, d_model, 1).head_width;
        assert_eq!([width(768), width(20), width(17), width(33)], [64, 40, 34, 33]);
    }
}
