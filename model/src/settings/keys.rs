//! The keys of the `[model]` table that each family has, and those that it requires.

use super::{ModelKind, ModelSettings};
use crate::error::{ModelError, Result};

/// The keys that every family has.
const COMMON: [&str; 3] = ["vocab_size", "d_model", "n_layers"];

impl ModelKind {
    /// The key as a user writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mamba => "mamba",
            Self::Mamba2 => "mamba2",
            Self::Mpt => "mpt",
            Self::GptNeo => "gpt_neo",
            Self::Llama => "llama",
            Self::Hybrid => "hybrid",
        }
    }

    /// The sizes that a table without a preset must give beside [`COMMON`].
    fn required(self) -> &'static [&'static str] {
        match self {
            Self::Mamba | Self::Mamba2 => &["d_state", "d_conv", "expand"],
            Self::Mpt => &["n_heads", "expansion", "max_seq_len"],
            Self::GptNeo => &["n_heads", "expansion", "max_seq_len", "window_size"],
            Self::Llama => &["n_heads", "n_kv_heads", "mlp_width"],
            Self::Hybrid => {
                &["d_state", "d_conv", "expand", "n_heads", "expansion", "layer_pattern"]
            }
        }
    }
}

/// The keys of a family.
pub(super) fn of(kind: ModelKind) -> &'static [&'static str] {
    match kind {
        ModelKind::Mamba => {
            &["vocab_size", "d_model", "n_layers", "d_state", "d_conv", "expand", "dt_rank"]
        }
        ModelKind::Mamba2 => &[
            "vocab_size",
            "d_model",
            "n_layers",
            "d_state",
            "d_conv",
            "expand",
            "head_width",
            "n_groups",
        ],
        ModelKind::Mpt => &[
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "expansion",
            "max_seq_len",
            "alibi",
            "no_bias",
            "qk_ln",
            "clip_qkv",
            "softmax_scale",
            "logit_scale",
        ],
        ModelKind::GptNeo => &[
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "expansion",
            "max_seq_len",
            "window_size",
        ],
        ModelKind::Llama => &[
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_width",
            "mlp_width",
            "max_seq_len",
            "rope_theta",
            "window_size",
            "qkv_bias",
            "qk_norm",
            "norm_eps",
        ],
        ModelKind::Hybrid => &[
            "vocab_size",
            "d_model",
            "n_layers",
            "d_state",
            "d_conv",
            "expand",
            "dt_rank",
            "n_heads",
            "expansion",
            "layer_pattern",
        ],
    }
}

impl ModelSettings {
    /// Every key of a size or a switch, with its value where the table has one.
    fn given(&self) -> [(&'static str, Option<String>); 26] {
        fn shown<T: ToString>(value: Option<T>) -> Option<String> {
            value.map(|value| value.to_string())
        }
        let logit_scale = self.logit_scale.map(|scale| format!("{scale:?}"));
        [
            ("vocab_size", shown(self.vocab_size)),
            ("d_model", shown(self.d_model)),
            ("n_layers", shown(self.n_layers)),
            ("d_state", shown(self.d_state)),
            ("d_conv", shown(self.d_conv)),
            ("expand", shown(self.expand)),
            ("dt_rank", shown(self.dt_rank)),
            ("head_width", shown(self.head_width)),
            ("n_groups", shown(self.n_groups)),
            ("n_heads", shown(self.n_heads)),
            ("n_kv_heads", shown(self.n_kv_heads)),
            ("mlp_width", shown(self.mlp_width)),
            ("rope_theta", shown(self.rope_theta)),
            ("qkv_bias", shown(self.qkv_bias)),
            ("qk_norm", shown(self.qk_norm)),
            ("norm_eps", shown(self.norm_eps)),
            ("expansion", shown(self.expansion)),
            ("max_seq_len", shown(self.max_seq_len)),
            ("alibi", shown(self.alibi)),
            ("no_bias", shown(self.no_bias)),
            ("qk_ln", shown(self.qk_ln)),
            ("clip_qkv", shown(self.clip_qkv)),
            ("softmax_scale", shown(self.softmax_scale)),
            ("logit_scale", logit_scale),
            ("window_size", shown(self.window_size)),
            ("layer_pattern", shown(self.layer_pattern.as_ref())),
        ]
    }

    /// Refuses the first given key that is not among `allowed`.
    pub(super) fn refuse_keys(&self, allowed: &[&str], expected: &str) -> Result<()> {
        let given = self.given().into_iter().find_map(|(key, value)| {
            value.filter(|_| !allowed.contains(&key)).map(|value| (key, value))
        });
        match given {
            Some((key, value)) => Err(ModelError::config(format!("model.{key}"), expected, value)),
            None => Ok(()),
        }
    }

    /// Refuses a table without a preset that leaves out sizes of `kind`, and names all of them.
    pub(super) fn require_keys(&self, kind: ModelKind, vocab_size: Option<usize>) -> Result<()> {
        let given = self.given();
        let is_given = |key: &str| {
            let given = given.iter().any(|(other, value)| *other == key && value.is_some());
            given || (key == "vocab_size" && vocab_size.is_some())
        };
        // The vocabulary is checked last, as most tables leave it to the data.
        let keys = COMMON[1..].iter().chain(kind.required()).chain(&COMMON[..1]);
        let mut missing = keys.copied().filter(|key| !is_given(key));
        let Some(first) = missing.next() else { return Ok(()) };
        let mut expected = "a size, as there is no preset".to_owned();
        let others: Vec<&str> = missing.collect();
        if !others.is_empty() {
            expected += &format!(" (missing too: {})", others.join(", "));
        }
        Err(ModelError::config(format!("model.{first}"), expected, "none"))
    }
}
