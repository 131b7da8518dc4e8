//! The sizes and switches of a Llama model, checked.

use tidemill_kernels::shape::MOST_HEAD_WIDTH;

use crate::error::{ModelError, Result};
use crate::family::{HeadKeys, SpecialTokens, check_norm_eps, check_sizes, head_width_of};
use crate::transformer::RopeScaling;

/// The base of rotary positions where none is given.
pub(crate) const ROPE_THETA: f64 = 500_000.0;

/// A Llama, Mistral, Qwen2 or Qwen3 language model.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// v, the tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub d_model: usize,
    /// The number of blocks.
    pub n_layers: usize,
    /// h, heads of queries.
    pub n_heads: usize,
    /// g, heads of keys and values: a divisor of h.
    pub n_kv_heads: usize,
    /// p, the width of a head, an even number; `d / h` where not given.
    pub head_width: Option<usize>,
    /// f, the width of the MLP.
    pub mlp_width: usize,
    /// The number of positions that the model is meant for; no kernel reads it.
    pub max_seq_len: usize,
    /// The base of rotary positions.
    pub rope_theta: f64,
    /// How the angles of rotary positions are stretched to a longer context.
    pub rope_scaling: Option<RopeScaling>,
    /// How many positions a query attends to, its own among them, as in Mistral 7B; `None` for all.
    pub window_size: Option<usize>,
    /// Whether queries, keys and values have biases, as in Qwen2.
    pub qkv_bias: bool,
    /// Whether each head of queries and of keys is normed before the rotary positions are applied,
    /// as in Qwen3; without biases.
    pub qk_norm: bool,
    /// Added to the mean square before the root of every norm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding table or a table of its own, `lm_head`.
    pub tie_embeddings: bool,
    /// The tokens that files name for generation; no kernel reads them.
    pub special_tokens: SpecialTokens,
}

impl LlamaConfig {
    /// A model of these sizes with the settings of Llama 3.2's small models, except that its
    /// positions are not stretched: as many heads of keys and values as of queries, an MLP 4 times
    /// as wide, angles to the base 500,000, tied embeddings.
    pub fn new(vocab_size: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            vocab_size,
            d_model,
            n_layers,
            n_heads,
            n_kv_heads: n_heads,
            head_width: None,
            mlp_width: 4 * d_model,
            max_seq_len: 8192,
            rope_theta: ROPE_THETA,
            rope_scaling: None,
            window_size: None,
            qkv_bias: false,
            qk_norm: false,
            norm_eps: 1e-5,
            tie_embeddings: true,
            special_tokens: SpecialTokens::default(),
        }
    }

    /// p, the width of a head.
    ///
    /// # Errors
    /// Heads that do not share `d_model` evenly, or whose width is odd or beyond what kernels take.
    pub fn head_columns(&self) -> Result<usize> {
        self.head_columns_named(HeadKeys { heads: "n_heads", width: "d_model" }, "head_width")
    }

    /// [`head_columns`](Self::head_columns), with errors that use the key names of a file.
    pub(crate) fn head_columns_named(&self, keys: HeadKeys, columns: &str) -> Result<usize> {
        let (key, columns) = match self.head_width {
            Some(given) => (columns, given),
            None => (keys.heads, head_width_of(keys, self.d_model, self.n_heads)?),
        };
        if !columns.is_multiple_of(2) || !(2..=MOST_HEAD_WIDTH).contains(&columns) {
            let expected =
                format!("heads of an even number of columns from 2 to {MOST_HEAD_WIDTH}");
            return Err(ModelError::config(key, expected, format!("{columns} columns")));
        }
        Ok(columns)
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1..=1 << 24),
            ("d_model", self.d_model, 1..=1 << 18),
            ("n_layers", self.n_layers, 1..=1 << 12),
            ("n_heads", self.n_heads, 1..=1 << 18),
            ("mlp_width", self.mlp_width, 1..=1 << 22),
            ("max_seq_len", self.max_seq_len, 1..=1 << 24),
            ("window_size", self.window_size.unwrap_or(1), 1..=1 << 24),
        ])?;
        self.head_columns()?;
        self.check_shared_heads("n_kv_heads", "n_heads")?;
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(ModelError::config("rope_theta", "a number above 0", self.rope_theta));
        }
        if self.qk_norm && self.qkv_bias {
            return Err(ModelError::config("qkv_bias", "false beside qk_norm", true));
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.check()?;
        }
        check_norm_eps(self.norm_eps)
    }

    pub(crate) fn check_shared_heads(&self, key: &str, heads: &str) -> Result<()> {
        if self.n_kv_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("a divisor of {heads}, which is {}", self.n_heads);
            return Err(ModelError::config(key, expected, self.n_kv_heads));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_bounds_are_named() {
        type Change = fn(&mut LlamaConfig);
        let changes: [(&str, Change); 11] = [
            ("vocab_size", |config| config.vocab_size = 0),
            ("n_heads", |config| config.n_heads = 0),
            ("n_heads", |config| config.n_heads = 5),
            ("n_heads", |config| config.n_heads = 12),
            ("n_kv_heads", |config| config.n_kv_heads = 0),
            ("n_kv_heads", |config| config.n_kv_heads = 2),
            ("head_width", |config| config.head_width = Some(7)),
            ("qkv_bias", |config| (config.qkv_bias, config.qk_norm) = (true, true)),
            ("window_size", |config| config.window_size = Some(0)),
            ("rope_theta", |config| config.rope_theta = f64::INFINITY),
            ("norm_eps", |config| config.norm_eps = 0.0),
        ];
        LlamaConfig::new(259, 12, 1, 3).check().expect("a small model");
        for (key, change) in changes {
            let mut config = LlamaConfig::new(259, 12, 1, 3);
            change(&mut config);
            let error = config.check().expect_err(key).to_string();
            assert!(error.starts_with(&format!("{key}: expected ")), "{error}");
        }
    }
}
