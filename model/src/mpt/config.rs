//! The sizes and switches of an MPT model, checked. The names are LLM Foundry's.

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::family::{SpecialTokens, check_norm_eps, check_sizes, head_width};

/// An MPT language model.
#[derive(Clone, Debug, PartialEq)]
pub struct MptConfig {
    /// v, the tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub d_model: usize,
    /// h
    pub n_heads: usize,
    /// The number of blocks.
    pub n_layers: usize,
    /// The MLP's width as a multiple of `d_model`.
    pub expansion: usize,
    /// The positions of the table, in a model with learned positions; in others, the length of
    /// training samples.
    pub max_seq_len: usize,
    /// How positions are encoded.
    pub positions: MptPositions,
    /// Whether linear maps and norms have no biases.
    pub no_bias: bool,
    /// Whether queries and keys go through a layer norm of their own, over all heads together.
    pub qk_ln: bool,
    /// Queries, keys and values are clipped to this magnitude.
    pub clip_qkv: Option<f64>,
    /// The factor of scores; `1 / sqrt(head width)` where not given.
    pub softmax_scale: Option<f64>,
    /// The factor that logits are multiplied by.
    pub logit_scale: Option<LogitScale>,
    /// Added to the variance before the root of every norm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding table or a table of its own, `lm_head`.
    pub tie_embeddings: bool,
    /// The tokens that files name for generation; no kernel reads them.
    pub special_tokens: SpecialTokens,
}

/// How an MPT model encodes positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MptPositions {
    /// A learned table, `wpe`.
    Learned,
    /// ALiBi: attention scores that fall with distance (Press et al., 2022).
    Alibi {
        /// `alibi_bias_max`: the least slope is `2^-most`.
        most: f64,
    },
    /// Not at all.
    None,
}

/// The factor that logits are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "LogitScaleSetting", into = "LogitScaleSetting")]
pub enum LogitScale {
    /// A number.
    Number(f64),
    /// `1 / sqrt(d_model)`, written `inv_sqrt_d_model`.
    InverseRootOfWidth,
}

/// [`LogitScale`] as files write it.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number or \"inv_sqrt_d_model\"")]
enum LogitScaleSetting {
    Number(f64),
    Name(String),
}

/// How files write [`LogitScale::InverseRootOfWidth`].
pub(super) const INVERSE_ROOT_OF_WIDTH: &str = "inv_sqrt_d_model";

impl TryFrom<LogitScaleSetting> for LogitScale {
    type Error = String;

    fn try_from(setting: LogitScaleSetting) -> std::result::Result<Self, String> {
        match setting {
            LogitScaleSetting::Number(scale) => Ok(Self::Number(scale)),
            LogitScaleSetting::Name(name) if name == INVERSE_ROOT_OF_WIDTH => {
                Ok(Self::InverseRootOfWidth)
            }
            LogitScaleSetting::Name(name) => {
                Err(format!("expected a number or \"{INVERSE_ROOT_OF_WIDTH}\", found \"{name}\""))
            }
        }
    }
}

impl From<LogitScale> for LogitScaleSetting {
    fn from(scale: LogitScale) -> Self {
        match scale {
            LogitScale::Number(scale) => Self::Number(scale),
            LogitScale::InverseRootOfWidth => Self::Name(INVERSE_ROOT_OF_WIDTH.to_owned()),
        }
    }
}

impl MptConfig {
    /// A model of these sizes with LLM Foundry's defaults for the others: 4 times as wide inside,
    /// 2,048 learned positions, biases, tied embeddings.
    pub fn new(vocab_size: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            vocab_size,
            d_model,
            n_heads,
            n_layers,
            expansion: 4,
            max_seq_len: 2048,
            positions: MptPositions::Learned,
            no_bias: false,
            qk_ln: false,
            clip_qkv: None,
            softmax_scale: None,
            logit_scale: None,
            norm_eps: 1e-5,
            tie_embeddings: true,
            special_tokens: SpecialTokens::default(),
        }
    }

    /// The same with ALiBi and without biases: a model that transformers' `MptForCausalLM` can run.
    pub fn with_alibi_and_no_bias(self) -> Self {
        Self { positions: MptPositions::Alibi { most: 8.0 }, no_bias: true, ..self }
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
            ("expansion", self.expansion, 1..=64),
            ("max_seq_len", self.max_seq_len, 1..=1 << 24),
        ])?;
        head_width(self.d_model, self.n_heads)?;
        let scale = match self.logit_scale {
            Some(LogitScale::Number(scale)) => Some(scale),
            _ => None,
        };
        let most = match self.positions {
            MptPositions::Alibi { most } => Some(most),
            _ => None,
        };
        for (key, value) in [
            ("clip_qkv", self.clip_qkv),
            ("softmax_scale", self.softmax_scale),
            ("logit_scale", scale),
            ("alibi_bias_max", most),
        ] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(ModelError::config(key, "a number above 0", value));
            }
        }
        check_norm_eps(self.norm_eps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_bounds_are_named() {
        type Change = fn(&mut MptConfig);
        let changes: [(&str, Change); 8] = [
            ("vocab_size", |config| config.vocab_size = 0),
            ("n_heads", |config| config.n_heads = 0),
            ("n_heads", |config| config.n_heads = 5),
            ("max_seq_len", |config| config.max_seq_len = 0),
            ("clip_qkv", |config| config.clip_qkv = Some(0.0)),
            ("softmax_scale", |config| config.softmax_scale = Some(f64::NAN)),
            ("logit_scale", |config| config.logit_scale = Some(LogitScale::Number(-1.0))),
            ("norm_eps", |config| config.norm_eps = 0.0),
        ];
        MptConfig::new(259, 12, 1, 3).check().expect("a small model");
        for (key, change) in changes {
            let mut config = MptConfig::new(259, 12, 1, 3);
            change(&mut config);
            let error = config.check().expect_err(key).to_string();
            assert!(error.starts_with(&format!("{key}: expected ")), "{error}");
        }
        let wide = MptConfig::new(259, 514, 1, 2).check().expect_err("wide heads").to_string();
        assert!(wide.starts_with("n_heads: expected heads of at most 256 columns"), "{wide}");
    }

    #[test]
    fn a_logit_scale_is_a_number_or_a_name() {
        let read = |json: &str| serde_json::from_str::<LogitScale>(json);
        assert_eq!(read("0.5").expect("a number"), LogitScale::Number(0.5));
        assert_eq!(read("\"inv_sqrt_d_model\"").expect("a name"), LogitScale::InverseRootOfWidth);
        let error = read("\"half\"").expect_err("no name").to_string();
        assert!(error.contains("expected a number or \"inv_sqrt_d_model\""), "{error}");
        let written = serde_json::to_string(&LogitScale::InverseRootOfWidth).expect("serializes");
        assert_eq!(written, "\"inv_sqrt_d_model\"");
    }
}
