//! `config.json` of an MPT model, in transformers' form and LLM Foundry's, which share their keys.
//!
//! Every key that either reads is written explicitly, in alphabetical order, so that the bytes are
//! the same whether or not some other crate of a build switches on serde_json's `preserve_order`.
//! Absent keys have the defaults of transformers. The class of transformers supports neither
//! biases, learned positions, norms of queries and keys nor a logit scale: the config of such a
//! model names Foundry's class instead.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{ModelError, Result};
use crate::family::SpecialTokens;
use crate::hugging_face::keys::Keys;
use crate::mpt::config::{INVERSE_ROOT_OF_WIDTH, LogitScale, MptConfig, MptPositions};

/// Keys of `attn_config` that must be switched off.
const SWITCHES: [&str; 4] = ["attn_uses_sequence_id", "prefix_lm", "qk_gn", "rope"];

impl MptConfig {
    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value of a wrong type or size, or a feature that this crate cannot run: each named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let norm = keys.text("norm_type", "low_precision_layernorm")?;
        if !matches!(norm.as_str(), "layernorm" | "low_precision_layernorm") {
            return Err(keys.wrong("norm_type", "\"layernorm\" or \"low_precision_layernorm\""));
        }
        let eps = if keys.has("layer_norm_epsilon") { "layer_norm_epsilon" } else { "norm_eps" };
        let logit_scale = match keys.value("logit_scale") {
            Some(Value::String(name)) if name == INVERSE_ROOT_OF_WIDTH => {
                Some(LogitScale::InverseRootOfWidth)
            }
            Some(Value::String(_)) => {
                let expected = format!("a number above 0 or \"{INVERSE_ROOT_OF_WIDTH}\"");
                return Err(keys.wrong("logit_scale", &expected));
            }
            _ => keys.positive_or_none("logit_scale")?.map(LogitScale::Number),
        };
        let learned = keys.flag("learned_pos_emb", true)?;
        let mut config = Self {
            vocab_size: keys.size("vocab_size", Some(50_368), 1..=1 << 24)?,
            d_model: keys.size("d_model", Some(2048), 1..=1 << 18)?,
            n_heads: keys.size("n_heads", Some(16), 1..=1 << 18)?,
            n_layers: keys.size("n_layers", Some(24), 1..=1 << 12)?,
            expansion: keys.size("expansion_ratio", Some(4), 1..=64)?,
            max_seq_len: keys.size("max_seq_len", Some(2048), 1..=1 << 24)?,
            positions: if learned { MptPositions::Learned } else { MptPositions::None },
            no_bias: keys.flag("no_bias", true)?,
            qk_ln: false,
            clip_qkv: None,
            softmax_scale: None,
            logit_scale,
            norm_eps: keys.positive(eps, 1e-5)?,
            tie_embeddings: keys.flag("tie_word_embeddings", true)?,
            special_tokens: SpecialTokens {
                bos: keys.token("bos_token_id")?,
                eos: keys.token("eos_token_id")?,
                pad: keys.token("pad_token_id")?,
            },
        };
        refuse_present(&keys, &["block_overrides", "final_logit_softcapping"])?;
        for dropout in ["emb_pdrop", "resid_pdrop"] {
            refuse_dropout(&keys, dropout)?;
        }
        if keys.number("embedding_fraction", 1.0)? != 1.0 {
            return Err(keys.wrong("embedding_fraction", "1 (the whole of a gradient)"));
        }
        if let Some(mlp) = keys.object("ffn_config")? {
            check_mlp(&mlp)?;
        }
        match keys.object("attn_config")? {
            Some(attention) => config.read_attention(&attention)?,
            None => config.positions = MptPositions::Alibi { most: 8.0 },
        }
        config.check().map_err(|error| keys.refused(error))?;
        Ok(config)
    }

    fn read_attention(&mut self, keys: &Keys<'_>) -> Result<()> {
        let kind = keys.text("attn_type", "multihead_attention")?;
        if kind != "multihead_attention" {
            return Err(keys.wrong("attn_type", "\"multihead_attention\""));
        }
        for switch in SWITCHES {
            if keys.flag(switch, false)? {
                return Err(keys.wrong(switch, "false"));
            }
        }
        refuse_present(keys, &["attn_logit_softcapping", "kv_dim"])?;
        refuse_dropout(keys, "attn_pdrop")?;
        match keys.value("flex_attn_mod_list") {
            Some(Value::Array(list)) if list.is_empty() => {}
            None => {}
            Some(_) => return Err(keys.wrong("flex_attn_mod_list", "an empty list")),
        }
        if keys.number("sliding_window_size", -1.0)? != -1.0 {
            return Err(keys.wrong("sliding_window_size", "-1 (no window)"));
        }
        self.qk_ln = keys.flag("qk_ln", false)?;
        self.clip_qkv = keys.positive_or_none("clip_qkv")?;
        self.softmax_scale = keys.positive_or_none("softmax_scale")?;
        if keys.flag("alibi", true)? {
            self.positions = MptPositions::Alibi { most: keys.positive("alibi_bias_max", 8.0)? };
        }
        Ok(())
    }

    /// Whether the class of transformers computes this model.
    fn is_known_to_transformers(&self) -> bool {
        matches!(self.positions, MptPositions::Alibi { .. })
            && self.no_bias
            && !self.qk_ln
            && self.logit_scale.is_none()
            && self.expansion == 4
    }

    /// The `config.json` of this model.
    pub fn to_json(&self) -> Value {
        let class =
            if self.is_known_to_transformers() { "MptForCausalLM" } else { "MPTForCausalLM" };
        let most = match self.positions {
            MptPositions::Alibi { most } => most,
            MptPositions::Learned | MptPositions::None => 8.0,
        };
        json!({
            "architectures": [class],
            "attn_config": {
                "alibi": matches!(self.positions, MptPositions::Alibi { .. }),
                "alibi_bias_max": whole(most),
                "attn_impl": "torch",
                "attn_pdrop": 0.0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": false,
                "clip_qkv": self.clip_qkv,
                "prefix_lm": false,
                "qk_ln": self.qk_ln,
                "softmax_scale": self.softmax_scale,
            },
            "bos_token_id": self.special_tokens.bos,
            "d_model": self.d_model,
            "emb_pdrop": 0.0,
            "embedding_fraction": 1.0,
            "eos_token_id": self.special_tokens.eos,
            "expansion_ratio": self.expansion,
            "init_device": "cpu",
            "initializer_range": 0.02,
            "layer_norm_epsilon": self.norm_eps,
            "learned_pos_emb": self.positions == MptPositions::Learned,
            "logit_scale": self.logit_scale,
            "max_seq_len": self.max_seq_len,
            "model_type": "mpt",
            "n_heads": self.n_heads,
            "n_layers": self.n_layers,
            "no_bias": self.no_bias,
            "norm_type": "low_precision_layernorm",
            "pad_token_id": self.special_tokens.pad,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
            "use_cache": true,
            "verbose": 0,
            "vocab_size": self.vocab_size,
        })
    }
}

/// Refuses keys that change the computation, whatever their value.
fn refuse_present(keys: &Keys<'_>, absent: &[&str]) -> Result<()> {
    match absent.iter().find(|key| keys.value(key).is_some()) {
        Some(key) => Err(keys.wrong(key, "nothing or null")),
        None => Ok(()),
    }
}

/// Refuses a dropout, which this crate does not implement: all published models have none.
fn refuse_dropout(keys: &Keys<'_>, key: &str) -> Result<()> {
    if keys.number(key, 0.0)? == 0.0 { Ok(()) } else { Err(keys.wrong(key, "0 (no dropout)")) }
}

/// Refuses MLPs of other kinds in `ffn_config`.
fn check_mlp(keys: &Keys<'_>) -> Result<()> {
    if keys.text("ffn_type", "mptmlp")? != "mptmlp" {
        return Err(keys.wrong("ffn_type", "\"mptmlp\""));
    }
    if let Some(activation) = keys.object("ffn_act_fn")? {
        for (key, expected) in [("name", "gelu"), ("approximate", "none")] {
            let found = activation.text(key, expected)?;
            if found != expected {
                let key = format!("ffn_act_fn.{key}");
                let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
                return Err(keys.refused(ModelError::config(key, expected, found)));
            }
        }
    }
    Ok(())
}

/// A number in the form that transformers' config wants: an integer where it has no fraction.
fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number < 1e9 { json!(number as u64) } else { json!(number) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<MptConfig> {
        MptConfig::parse(Path::new("m/config.json"), value)
    }

    #[test]
    fn what_is_written_reads_back() {
        let plain = MptConfig::new(259, 12, 2, 3);
        let everything = MptConfig {
            qk_ln: true,
            clip_qkv: Some(0.75),
            softmax_scale: Some(0.3),
            logit_scale: Some(LogitScale::InverseRootOfWidth),
            max_seq_len: 33,
            expansion: 3,
            norm_eps: 1e-3,
            tie_embeddings: false,
            special_tokens: SpecialTokens { bos: None, eos: Some(257), pad: Some(1) },
            ..plain.clone()
        };
        let scaled = MptConfig { logit_scale: Some(LogitScale::Number(0.5)), ..plain.clone() };
        let bare = MptConfig { positions: MptPositions::None, ..plain.clone() };
        let known = plain.clone().with_alibi_and_no_bias();
        for (config, class) in [
            (plain, "MPTForCausalLM"),
            (everything, "MPTForCausalLM"),
            (scaled, "MPTForCausalLM"),
            (bare, "MPTForCausalLM"),
            (known, "MptForCausalLM"),
        ] {
            let json = config.to_json();
            assert_eq!(parse(&json).expect("parses"), config);
            assert_eq!(json["architectures"][0], class);
        }
    }

    #[test]
    fn a_silent_file_means_what_transformers_means() {
        let config = parse(&json!({"model_type": "mpt"})).expect("parses");
        assert_eq!(config, MptConfig::new(50_368, 2048, 24, 16).with_alibi_and_no_bias());
    }

    #[test]
    fn what_cannot_run_is_named() {
        for (config, expected) in [
            (json!({"norm_type": "rmsnorm"}), "norm_type: expected \"layernorm\""),
            (json!({"attn_config": {"attn_type": "multiquery_attention"}}), "attn_type: expected"),
            (json!({"attn_config": {"prefix_lm": true}}), "prefix_lm: expected false"),
            (json!({"attn_config": {"sliding_window_size": 128}}), "sliding_window_size: expected"),
            (json!({"n_heads": 5}), "n_heads: expected a divisor of d_model, which is 2048"),
            (
                json!({"logit_scale": "half"}),
                "logit_scale: expected a number above 0 or \"inv_sqrt_d_model\", found \"half\"",
            ),
            (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping: expected nothing"),
            (
                json!({"block_overrides": {"order": []}}),
                "block_overrides: expected nothing or null",
            ),
            (json!({"ffn_config": {"ffn_type": "mptglu"}}), "ffn_type: expected \"mptmlp\""),
            (
                json!({"ffn_config": {"ffn_type": "mptmlp", "ffn_act_fn": {"name": "silu"}}}),
                "ffn_act_fn.name: expected \"gelu\", found \"silu\"",
            ),
            (
                json!({"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}),
                "ffn_act_fn.approximate: expected \"none\", found \"tanh\"",
            ),
            (json!({"attn_config": {"rope": true}}), "rope: expected false"),
            (
                json!({"attn_config": {"attn_logit_softcapping": 50.0}}),
                "attn_logit_softcapping: expected nothing or null",
            ),
            (
                json!({"attn_config": {"flex_attn_mod_list": [{"mod_name": "local"}]}}),
                "flex_attn_mod_list: expected an empty list",
            ),
            (json!({"d_model": "wide"}), "d_model: expected a whole number"),
            (json!({"embedding_fraction": 0.1}), "embedding_fraction: expected 1 (the whole of a"),
            (json!({"embedding_fraction": "all"}), "embedding_fraction: expected a number"),
            (json!({"emb_pdrop": 0.1}), "emb_pdrop: expected 0 (no dropout), found 0.1"),
            (json!({"resid_pdrop": 0.1}), "resid_pdrop: expected 0 (no dropout), found 0.1"),
            (
                json!({"attn_config": {"attn_pdrop": 0.1}}),
                "attn_pdrop: expected 0 (no dropout), found 0.1",
            ),
            (
                json!({"attn_config": {"attn_uses_sequence_id": true}}),
                "attn_uses_sequence_id: expected false, found true",
            ),
        ] {
            let error = parse(&config).expect_err("refused").to_string();
            assert!(error.starts_with(&format!("m/config.json: {expected}")), "{error}");
        }
    }
}
