//! The sizes of a Mamba model, checked.
//!
//! A user writes a [`MambaConfig`], whose fields are all public, and files are translated to one;
//! [`MambaConfig::check`] is the one place that decides which values a model can have. The names
//! are those of the reference implementation (Gu and Dao, 2023, `mamba_simple.py`).

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::Value;

use crate::error::Result;
use crate::family::{SpecialTokens, check_norm_eps, check_sizes};
use crate::hugging_face::MambaHuggingFaceConfig;

/// The sizes of a Mamba language model.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaConfig {
    /// v, the tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub d_model: usize,
    /// The number of Mamba blocks.
    pub n_layers: usize,
    /// n, the states of a channel.
    pub d_state: usize,
    /// k, the taps of the causal convolution.
    pub d_conv: usize,
    /// e / d.
    pub expand: usize,
    /// r, the rank of the projection to step sizes.
    pub dt_rank: usize,
    /// Added to the mean square before the root of every norm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding table or a table of its own, `lm_head`.
    pub tie_embeddings: bool,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// The tokens that files name for generation; no kernel reads them.
    pub special_tokens: SpecialTokens,
}

impl MambaConfig {
    /// A model of this vocabulary, width and depth, with the other sizes as in the paper: 16
    /// states, 4 taps, expansion 2, `dt_rank = ceil(d_model / 16)`, tied embeddings.
    pub fn new(vocab_size: usize, d_model: usize, n_layers: usize) -> Self {
        Self {
            vocab_size,
            d_model,
            n_layers,
            d_state: 16,
            d_conv: 4,
            expand: 2,
            dt_rank: Self::default_dt_rank(d_model),
            norm_eps: 1e-5,
            tie_embeddings: true,
            conv_bias: true,
            special_tokens: SpecialTokens::default(),
        }
    }

    /// `ceil(d_model / 16)`.
    pub fn default_dt_rank(d_model: usize) -> usize {
        d_model.div_ceil(16)
    }

    /// e, the channels of the convolution and of the scan.
    pub fn d_inner(&self) -> usize {
        self.expand * self.d_model
    }

    /// Columns of x_proj's product: the low-rank step sizes, then B, then C.
    pub fn x_proj_width(&self) -> usize {
        self.dt_rank + 2 * self.d_state
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`](crate::ModelError::Config) naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        // Bounds that keep every product of sizes far from overflow, and the bounds of the kernels.
        let sizes: [(&str, usize, RangeInclusive<usize>); 7] = [
            ("vocab_size", self.vocab_size, 1..=1 << 24),
            ("d_model", self.d_model, 1..=1 << 18),
            ("n_layers", self.n_layers, 1..=1 << 12),
            ("d_state", self.d_state, 1..=256),
            ("d_conv", self.d_conv, 1..=16),
            ("expand", self.expand, 1..=64),
            ("dt_rank", self.dt_rank, 1..=1 << 18),
        ];
        check_sizes(&sizes)?;
        check_norm_eps(self.norm_eps)
    }

    /// The sizes that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// As [`MambaHuggingFaceConfig::parse`].
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        Self::from_hugging_face(&MambaHuggingFaceConfig::parse(path, value)?)
    }

    /// The sizes that a Hugging Face `config.json` gives.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn from_hugging_face(file: &MambaHuggingFaceConfig) -> Result<Self> {
        let config = Self {
            vocab_size: file.vocab_size,
            d_model: file.hidden_size,
            n_layers: file.num_hidden_layers,
            d_state: file.state_size,
            d_conv: file.conv_kernel,
            expand: file.expand,
            dt_rank: file.time_step_rank,
            norm_eps: file.layer_norm_epsilon,
            tie_embeddings: file.tie_word_embeddings,
            conv_bias: file.use_conv_bias,
            special_tokens: SpecialTokens {
                bos: file.bos_token_id,
                eos: file.eos_token_id,
                pad: file.pad_token_id,
            },
        };
        config.check()?;
        Ok(config)
    }

    /// The Hugging Face `config.json` of these sizes, with every key that transformers reads.
    pub fn to_hugging_face(&self) -> MambaHuggingFaceConfig {
        let mut file = MambaHuggingFaceConfig::default();
        file.vocab_size = self.vocab_size;
        file.hidden_size = self.d_model;
        file.intermediate_size = self.d_inner();
        file.num_hidden_layers = self.n_layers;
        file.state_size = self.d_state;
        file.conv_kernel = self.d_conv;
        file.expand = self.expand;
        file.time_step_rank = self.dt_rank;
        file.layer_norm_epsilon = self.norm_eps;
        file.tie_word_embeddings = self.tie_embeddings;
        file.use_conv_bias = self.conv_bias;
        file.bos_token_id = self.special_tokens.bos;
        file.eos_token_id = self.special_tokens.eos;
        file.pad_token_id = self.special_tokens.pad;
        file
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugging_face_keys_read_back() {
        let mut config = MambaConfig::new(259, 33, 2);
        config.dt_rank = 5;
        config.norm_eps = 3e-5;
        config.tie_embeddings = false;
        config.conv_bias = false;
        config.special_tokens.eos = Some(257);
        let read = MambaConfig::from_hugging_face(&config.to_hugging_face());
        assert_eq!(read.expect("checked sizes"), config);
    }

    #[test]
    fn sizes_out_of_bounds_are_named() {
        type Change = fn(&mut MambaConfig);
        let changes: [(&str, Change); 9] = [
            ("vocab_size", |config| config.vocab_size = 0),
            ("vocab_size", |config| config.vocab_size = usize::MAX),
            ("d_model", |config| config.d_model = 0),
            ("n_layers", |config| config.n_layers = 0),
            ("d_state", |config| config.d_state = 257),
            ("d_conv", |config| config.d_conv = 17),
            ("expand", |config| config.expand = 0),
            ("dt_rank", |config| config.dt_rank = 0),
            ("norm_eps", |config| config.norm_eps = f64::NAN),
        ];
        MambaConfig::new(259, 7, 1).check().expect("a small model");
        for (key, change) in changes {
            let mut config = MambaConfig::new(259, 7, 1);
            change(&mut config);
            let error = config.check().expect_err(key).to_string();
            assert!(error.starts_with(&format!("{key}: expected ")), "{error}");
        }
    }
}
