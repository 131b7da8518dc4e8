//! `config.json` of a `Mamba2ForCausalLM`. Absent keys have the defaults of transformers 4.57.
//!
//! transformers writes a step size without an upper limit as `Infinity`, which is not JSON. This
//! module reads that, and writes the greatest fp32 instead, which limits nothing. The form of
//! `state-spaces/mamba` (`d_model`, `n_layer`, `ssm_cfg` ...) is read too.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::Result;
use crate::family::SpecialTokens;
use crate::hugging_face::keys::Keys;
use crate::mamba2::Mamba2Config;

/// The number that is written for no limit.
const UNLIMITED: f64 = f32::MAX as f64;

impl Mamba2Config {
    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value of a wrong type or size, or a feature that this crate cannot run: each named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let config = if keys.has("model_type") {
            Self::from_transformers(&keys)?
        } else {
            Self::from_state_spaces(&keys)?
        };
        config.check().map_err(|error| keys.refused(error))?;
        Ok(config)
    }

    fn from_transformers(keys: &Keys<'_>) -> Result<Self> {
        if keys.flag("use_bias", false)? {
            return Err(keys.wrong("use_bias", "false (projections without a bias)"));
        }
        if !keys.flag("rms_norm", true)? {
            return Err(keys.wrong("rms_norm", "true"));
        }
        if !matches!(keys.text("hidden_act", "silu")?.as_str(), "silu" | "swish") {
            return Err(keys.wrong("hidden_act", "\"silu\""));
        }
        let d_model = keys.size("hidden_size", Some(4096), 1..=1 << 18)?;
        let expand = keys.size("expand", Some(2), 1..=64)?;
        let head_width = keys.size("head_dim", Some(64), 1..=256)?;
        let n_heads = keys.size("num_heads", Some(128), 1..=1 << 24)?;
        if n_heads * head_width != expand * d_model {
            let expected = format!(
                "expand * hidden_size / head_dim, with {expand} * {d_model} / {head_width}"
            );
            return Err(keys.wrong("num_heads", &expected));
        }
        let token = |key, silent| if keys.has(key) { keys.token(key) } else { Ok(silent) };
        Ok(Self {
            vocab_size: keys.size("vocab_size", Some(32_768), 1..=1 << 24)?,
            d_model,
            n_layers: keys.size("num_hidden_layers", Some(64), 1..=1 << 12)?,
            d_state: keys.size("state_size", Some(128), 1..=256)?,
            d_conv: keys.size("conv_kernel", Some(4), 1..=16)?,
            expand,
            head_width,
            n_groups: keys.size("n_groups", Some(8), 1..=1 << 18)?,
            delta_limits: delta_limits(keys)?,
            norm_eps: keys.positive("layer_norm_epsilon", 1e-5)?,
            tie_embeddings: keys.flag("tie_word_embeddings", false)?,
            conv_bias: keys.flag("use_conv_bias", true)?,
            special_tokens: SpecialTokens {
                bos: token("bos_token_id", Some(0))?,
                eos: token("eos_token_id", Some(2))?,
                pad: token("pad_token_id", Some(1))?,
            },
        })
    }

    /// The form that `state-spaces/mamba` writes, whose files hold the vocabulary padded to `pad_vocab_size_multiple`.
    fn from_state_spaces(keys: &Keys<'_>) -> Result<Self> {
        if !keys.flag("rms_norm", true)? {
            return Err(keys.wrong("rms_norm", "true"));
        }
        if keys.size("d_intermediate", Some(0), 0..=1 << 18)? != 0 {
            return Err(keys.wrong("d_intermediate", "0 (no MLP between the mixers)"));
        }
        let layers_of_attention = keys.value("attn_layer_idx").and_then(Value::as_array);
        if layers_of_attention.is_some_and(|layers| !layers.is_empty()) {
            return Err(keys.wrong("attn_layer_idx", "an empty list (no layers of attention)"));
        }
        let padding = keys.size("pad_vocab_size_multiple", Some(8), 1..=1 << 24)?;
        let vocab_size = keys.size("vocab_size", None, 1..=1 << 24)?.next_multiple_of(padding);
        let d_model = keys.size("d_model", None, 1..=1 << 18)?;
        let n_layers = keys.size("n_layer", None, 1..=1 << 12)?;
        let silent = Self { head_width: 64, ..Self::new(vocab_size, d_model, n_layers) };
        let tie_embeddings = keys.flag("tie_embeddings", true)?;
        let Some(mixer) = keys.object("ssm_cfg")? else {
            return Ok(Self { tie_embeddings, ..silent });
        };
        for switch in ["bias", "norm_before_gate"] {
            if mixer.flag(switch, false)? {
                return Err(mixer.wrong(switch, "false"));
            }
        }
        if !mixer.flag("rmsnorm", true)? {
            return Err(mixer.wrong("rmsnorm", "true"));
        }
        // The reference implementation norms the heads of each group separately, transformers all
        // heads together.
        if mixer.size("ngroups", Some(1), 1..=1 << 18)? != 1 {
            return Err(mixer.wrong("ngroups", "1 (a norm over all heads)"));
        }
        Ok(Self {
            d_state: mixer.size("d_state", Some(silent.d_state), 1..=256)?,
            d_conv: mixer.size("d_conv", Some(silent.d_conv), 1..=16)?,
            expand: mixer.size("expand", Some(silent.expand), 1..=64)?,
            head_width: mixer.size("headdim", Some(silent.head_width), 1..=256)?,
            conv_bias: mixer.flag("conv_bias", silent.conv_bias)?,
            tie_embeddings,
            ..silent
        })
    }

    /// The `config.json` of this model, with every key that transformers reads.
    pub fn to_json(&self) -> Value {
        json!({
            "architectures": ["Mamba2ForCausalLM"],
            "bos_token_id": self.special_tokens.bos,
            "chunk_size": 256,
            "conv_kernel": self.d_conv,
            "eos_token_id": self.special_tokens.eos,
            "expand": self.expand,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "initializer_range": 0.1,
            "layer_norm_epsilon": self.norm_eps,
            "model_type": "mamba2",
            "n_groups": self.n_groups,
            "num_heads": self.n_heads(),
            "num_hidden_layers": self.n_layers,
            "pad_token_id": self.special_tokens.pad,
            "rescale_prenorm_residual": false,
            "residual_in_fp32": true,
            "rms_norm": true,
            "state_size": self.d_state,
            "tie_word_embeddings": self.tie_embeddings,
            "time_step_floor": 1e-4,
            "time_step_limit": self.delta_limits.map(|limit| limit.min(UNLIMITED)),
            "time_step_max": 0.1,
            "time_step_min": 1e-3,
            "time_step_rank": self.d_model.div_ceil(16),
            "torch_dtype": "float32",
            "use_bias": false,
            "use_cache": true,
            "use_conv_bias": self.conv_bias,
            "vocab_size": self.vocab_size,
        })
    }
}

/// Both values of `time_step_limit`. The greatest fp32, and numbers beyond it, limit nothing.
fn delta_limits(keys: &Keys<'_>) -> Result<[f64; 2]> {
    const KEY: &str = "time_step_limit";
    let Some(limits) = keys.value(KEY) else {
        return Ok([0.0, f64::INFINITY]);
    };
    let number = |limit: &Value| match limit.as_str() {
        Some("Infinity") => Some(f64::INFINITY),
        _ => limit.as_f64().map(|limit| if limit < UNLIMITED { limit } else { f64::INFINITY }),
    };
    let both = match limits.as_array().map(Vec::as_slice) {
        Some([least, most]) => number(least).zip(number(most)),
        _ => None,
    };
    let (least, most) = both.ok_or_else(|| keys.wrong(KEY, "a list of two numbers"))?;
    Ok([least, most])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hugging_face::parse_json;

    fn parse(json: &str) -> Result<Mamba2Config> {
        let path = Path::new("m/config.json");
        Mamba2Config::parse(path, &parse_json(path, json.as_bytes())?)
    }

    #[test]
    fn a_silent_file_means_what_transformers_means() {
        let config = parse(r#"{"model_type": "mamba2", "never_heard_of": [1]}"#).expect("parses");
        let expected = Mamba2Config {
            n_groups: 8,
            tie_embeddings: false,
            special_tokens: SpecialTokens { bos: Some(0), eos: Some(2), pad: Some(1) },
            ..Mamba2Config::new(32_768, 4096, 64)
        };
        assert_eq!(config, expected);
        assert_eq!(config.n_heads(), 128);
    }

    #[test]
    fn what_is_written_reads_back() {
        let limits = [[0.0, f64::INFINITY], [0.001, 0.5]];
        for delta_limits in limits {
            let config = Mamba2Config {
                head_width: 12,
                n_groups: 2,
                d_state: 9,
                delta_limits,
                conv_bias: false,
                ..Mamba2Config::new(259, 24, 2)
            };
            let json = config.to_json().to_string();
            assert_eq!(parse(&json).expect("parses"), config);
        }
    }

    /// Python writes an infinite number as `Infinity`; a string that contains the word stays a
    /// string.
    #[test]
    fn numbers_without_end_are_read() {
        let json = |limit: &str| {
            format!(
                r#"{{"model_type": "mamba2", "note": "to Infinity", "time_step_limit": {limit}}}"#
            )
        };
        let limits = |limit: &str| parse(&json(limit)).map(|config| config.delta_limits);
        assert_eq!(limits("[0.0, Infinity]").expect("parses"), [0.0, f64::INFINITY]);
        assert_eq!(limits("[0.25,Infinity ]").expect("parses"), [0.25, f64::INFINITY]);
        let error = limits("[0.0]").expect_err("one number").to_string();
        assert!(error.contains("time_step_limit: expected a list of two numbers"), "{error}");
        let error = limits("[Infinity, Infinity]").expect_err("no step").to_string();
        assert!(error.contains("time_step_limit: expected a least"), "{error}");
        let error = parse(r#"{"model_type": "mamba2", "layer_norm_epsilon": Infinity}"#);
        let error = error.expect_err("no number").to_string();
        assert!(
            error.ends_with("layer_norm_epsilon: expected a number, found \"Infinity\""),
            "{error}"
        );
    }

    #[test]
    fn the_original_form_is_read() {
        let json = r#"{"d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
                       "attn_layer_idx": [], "rms_norm": true, "pad_vocab_size_multiple": 16}"#;
        assert_eq!(parse(json).expect("parses"), Mamba2Config::new(50_288, 768, 24));
        let groups = json.replace("\"Mamba2\"", "\"Mamba2\", \"ngroups\": 8");
        let error = parse(&groups).expect_err("norms of groups").to_string();
        assert!(error.contains("ngroups: expected 1 (a norm over all heads), found 8"), "{error}");
    }

    #[test]
    fn what_cannot_run_is_named() {
        for (key, value, expected) in [
            ("use_bias", "true", "use_bias: expected false"),
            ("hidden_act", "\"relu\"", "hidden_act: expected \"silu\""),
            ("num_heads", "3", "num_heads: expected expand * hidden_size / head_dim"),
            ("n_groups", "3", "n_groups: expected a divisor of the 128 heads"),
            ("rms_norm", "false", "rms_norm: expected true"),
        ] {
            let json = format!("{{\"model_type\": \"mamba2\", \"{key}\": {value}}}");
            let error = parse(&json).expect_err(key).to_string();
            assert!(error.starts_with("m/config.json: ") && error.contains(expected), "{error}");
        }
    }
}
