//! The keys of the `[model]` table that each family has, and those that it requires.

use super::ModelSettings;
use crate::error::{ModelError, Result};
use crate::hybrid::{BlockKind, BlockPattern};
use crate::model_config::ModelKind;

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

    /// The sizes that a table without a preset must give beside [`COMMON`]; of a hybrid, those of the
    /// blocks in its `pattern`.
    fn required(self, pattern: Option<&BlockPattern>) -> Vec<&'static str> {
        let keys: &[&str] = match self {
            Self::Mamba | Self::Mamba2 => &["d_state", "d_conv", "expand"],
            Self::Mpt => &["n_heads", "expansion", "max_seq_len"],
            Self::GptNeo => &["n_heads", "expansion", "max_seq_len", "window_size"],
            Self::Llama => &["n_heads", "n_kv_heads", "mlp_width"],
            Self::Hybrid => {
                let holds = |kind: &BlockKind| pattern.is_some_and(|pattern| pattern.holds(*kind));
                let mut keys = Vec::new();
                for key in
                    BlockKind::ALL.into_iter().filter(holds).flat_map(|kind| of_block(kind)[0])
                {
                    if !keys.contains(key) {
                        keys.push(*key);
                    }
                }
                keys.push("layer_pattern");
                return keys;
            }
        };
        keys.to_vec()
    }
}

/// The keys of one kind of block in a hybrid: those that a table must give, and those with defaults.
fn of_block(kind: BlockKind) -> [&'static [&'static str]; 2] {
    match kind {
        BlockKind::Mamba => [&["d_state", "d_conv", "expand"], &["dt_rank"]],
        BlockKind::Mamba2 => [&["d_state", "d_conv", "expand"], &["mamba2_head_width", "n_groups"]],
        BlockKind::Attention => [&["n_heads", "expansion"], &[]],
        BlockKind::Llama => [
            &["n_heads", "n_kv_heads", "mlp_width"],
            &["head_width", "rope_theta", "window_size", "qkv_bias", "qk_norm"],
        ],
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
            "mamba2_head_width",
            "n_groups",
            "n_heads",
            "expansion",
            "n_kv_heads",
            "head_width",
            "mlp_width",
            "rope_theta",
            "window_size",
            "qkv_bias",
            "qk_norm",
            "layer_pattern",
        ],
    }
}

impl ModelSettings {
    /// Every key of a size or a switch, with its value where the table has one.
    fn given(&self) -> [(&'static str, Option<String>); 27] {
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
            ("mamba2_head_width", shown(self.mamba2_head_width)),
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

    /// Refuses the first given key that is of blocks which `pattern` does not hold.
    pub(super) fn refuse_keys_of_other_blocks(&self, pattern: &BlockPattern) -> Result<()> {
        for (key, value) in self.given() {
            let has_key = |kind: &BlockKind| of_block(*kind).concat().contains(&key);
            let kinds: Vec<_> = BlockKind::ALL.into_iter().filter(has_key).collect();
            let is_read = kinds.is_empty() || kinds.iter().any(|kind| pattern.holds(*kind));
            if let Some(found) = value.filter(|_| !is_read) {
                let letters: Vec<_> = kinds.iter().map(|kind| kind.letter().to_string()).collect();
                let letters = letters.join(" or ");
                let expected = format!("no such size, as layer_pattern has no {letters}");
                return Err(ModelError::config(format!("model.{key}"), expected, found));
            }
        }
        Ok(())
    }

    /// Refuses a table without a preset that leaves out sizes of `kind`, and names all of them.
    pub(super) fn require_keys(&self, kind: ModelKind, vocab_size: Option<usize>) -> Result<()> {
        let given = self.given();
        let is_given = |key: &str| {
            let given = given.iter().any(|(other, value)| *other == key && value.is_some());
            given || (key == "vocab_size" && vocab_size.is_some())
        };
        // The vocabulary is checked last, as most tables leave it to the data.
        let required = kind.required(self.layer_pattern.as_ref());
        let keys = COMMON[1..].iter().chain(&required).chain(&COMMON[..1]);
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
