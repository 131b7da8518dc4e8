//! `config.json` of Llama, Mistral, Qwen2 and Qwen3.
//!
//! Absent keys have the defaults of transformers. A model is written as the plainest of the four
//! that computes the same: as a Qwen3 where heads of queries and keys are normed, as a Qwen2 where
//! queries, keys and values have biases, as a Mistral where it has a window, else as a Llama.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::Result;
use crate::family::{HeadKeys, SpecialTokens};
use crate::hugging_face::keys::Keys;
use crate::llama::LlamaConfig;
use crate::transformer::RopeScaling;

/// The values of `model_type` that this module reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

/// The defaults of transformers for one `model_type`.
struct Silent {
    vocab_size: usize,
    mlp_width: usize,
    n_kv_heads: Option<usize>,
    head_width: Option<usize>,
    max_seq_len: usize,
    special: [Option<u32>; 2],
}

impl Kind {
    fn silent(self) -> Silent {
        match self {
            Self::Llama => Silent {
                vocab_size: 32_000,
                mlp_width: 11_008,
                n_kv_heads: None,
                head_width: None,
                max_seq_len: 2048,
                special: [Some(1), Some(2)],
            },
            Self::Mistral => Silent {
                vocab_size: 32_000,
                mlp_width: 14_336,
                n_kv_heads: Some(8),
                head_width: None,
                max_seq_len: 4096 * 32,
                special: [Some(1), Some(2)],
            },
            Self::Qwen2 | Self::Qwen3 => Silent {
                vocab_size: 151_936,
                mlp_width: 22_016,
                n_kv_heads: Some(32),
                head_width: (self == Self::Qwen3).then_some(128),
                max_seq_len: 32_768,
                special: [None, None],
            },
        }
    }
}

impl LlamaConfig {
    /// The config that the JSON of the file `path` gives. If a file names several tokens that end a
    /// text, the first is kept.
    ///
    /// # Errors
    /// A value of a wrong type or size, or a feature that this crate cannot run: each named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let kind = match value.get("model_type").and_then(Value::as_str) {
            Some("mistral") => Kind::Mistral,
            Some("qwen2") => Kind::Qwen2,
            Some("qwen3") => Kind::Qwen3,
            _ => Kind::Llama,
        };
        let silent = kind.silent();
        if keys.text("hidden_act", "silu")? != "silu" {
            return Err(keys.wrong("hidden_act", "\"silu\""));
        }
        for switch in ["attention_bias", "mlp_bias"] {
            if keys.flag(switch, false)? {
                return Err(keys.wrong(switch, "false"));
            }
        }
        if keys.number("attention_dropout", 0.0)? != 0.0 {
            return Err(keys.wrong("attention_dropout", "0 (no dropout)"));
        }
        let n_heads = keys.size("num_attention_heads", Some(32), 1..=1 << 18)?;
        let n_kv_heads = silent.n_kv_heads.filter(|_| !keys.has("num_key_value_heads"));
        let (rope_theta, rope_scaling) = rope(&keys)?;
        let [bos, eos] = silent.special;
        let config = Self {
            vocab_size: keys.size("vocab_size", Some(silent.vocab_size), 1..=1 << 24)?,
            d_model: keys.size("hidden_size", Some(4096), 1..=1 << 18)?,
            n_layers: keys.size("num_hidden_layers", Some(32), 1..=1 << 12)?,
            n_heads,
            n_kv_heads: keys.size(
                "num_key_value_heads",
                Some(n_kv_heads.unwrap_or(n_heads)),
                1..=1 << 18,
            )?,
            head_width: match keys.value("head_dim") {
                Some(_) => Some(keys.size("head_dim", None, 2..=256)?),
                None => silent.head_width,
            },
            mlp_width: keys.size("intermediate_size", Some(silent.mlp_width), 1..=1 << 22)?,
            max_seq_len: keys.size(
                "max_position_embeddings",
                Some(silent.max_seq_len),
                1..=1 << 24,
            )?,
            rope_theta,
            rope_scaling,
            window_size: window(&keys, kind)?,
            qkv_bias: kind == Kind::Qwen2,
            qk_norm: kind == Kind::Qwen3,
            norm_eps: keys.positive("rms_norm_eps", 1e-6)?,
            tie_embeddings: keys.flag("tie_word_embeddings", false)?,
            special_tokens: SpecialTokens {
                bos: token(&keys, "bos_token_id", bos)?,
                eos: token(&keys, "eos_token_id", eos)?,
                pad: token(&keys, "pad_token_id", None)?,
            },
        };
        // A given width that equals the default is kept as no width.
        let head_width = config.head_width.filter(|p| p * config.n_heads != config.d_model);
        let config = Self { head_width, ..config };
        let names = HeadKeys { heads: "num_attention_heads", width: "hidden_size" };
        config
            .head_columns_named(names, "head_dim")
            .and_then(|_| config.check_shared_heads("num_key_value_heads", names.heads))
            .and_then(|()| config.check())
            .map_err(|error| keys.refused(error))?;
        Ok(config)
    }

    /// The `config.json` of this model, with every key that transformers reads.
    pub fn to_json(&self) -> Value {
        let (kind, class, model_type) = match (self.qk_norm, self.qkv_bias, self.window_size) {
            (true, ..) => (Kind::Qwen3, "Qwen3ForCausalLM", "qwen3"),
            (false, true, _) => (Kind::Qwen2, "Qwen2ForCausalLM", "qwen2"),
            (false, false, Some(_)) => (Kind::Mistral, "MistralForCausalLM", "mistral"),
            (false, false, None) => (Kind::Llama, "LlamaForCausalLM", "llama"),
        };
        let head_width = self.head_columns().ok();
        let scaling = self.rope_scaling.map(|scaling| {
            json!({
                "factor": scaling.factor,
                "high_freq_factor": scaling.high_freq_factor,
                "low_freq_factor": scaling.low_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
                "rope_type": "llama3",
            })
        });
        let mut json = json!({
            "architectures": [class],
            "attention_dropout": 0.0,
            "bos_token_id": self.special_tokens.bos,
            "eos_token_id": self.special_tokens.eos,
            "head_dim": head_width,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "initializer_range": 0.02,
            "intermediate_size": self.mlp_width,
            "max_position_embeddings": self.max_seq_len,
            "model_type": model_type,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "pad_token_id": self.special_tokens.pad,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": scaling,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        if matches!(kind, Kind::Qwen2 | Kind::Qwen3) {
            // Every block has the window: `max_window_layers` is 0, so that no block attends to all
            // positions.
            json["max_window_layers"] = json!(0);
            json["use_sliding_window"] = json!(self.window_size.is_some());
        }
        if kind != Kind::Llama {
            json["sliding_window"] = json!(self.window_size);
        }
        if matches!(kind, Kind::Llama | Kind::Qwen3) {
            json["attention_bias"] = json!(false);
        }
        if kind == Kind::Llama {
            json["mlp_bias"] = json!(false);
        }
        json
    }
}

/// How many positions a query attends to.
fn window(keys: &Keys<'_>, kind: Kind) -> Result<Option<usize>> {
    const KEY: &str = "sliding_window";
    let silent = match kind {
        Kind::Llama => return Ok(None),
        Kind::Mistral if keys.has(KEY) => None,
        Kind::Mistral => Some(4096),
        Kind::Qwen2 | Kind::Qwen3 => {
            if !keys.flag("use_sliding_window", false)? {
                return Ok(None);
            }
            // Blocks before this one attend to all positions. This crate runs only models whose
            // blocks are all alike.
            if keys.size("max_window_layers", Some(28), 0..=1 << 12)? != 0 {
                return Err(keys.wrong("max_window_layers", "0 (a window in every layer)"));
            }
            None
        }
    };
    match keys.value(KEY) {
        Some(_) => Ok(Some(keys.size(KEY, None, 1..=1 << 24)?)),
        None => Ok(silent),
    }
}

/// The base of the angles, and how they are stretched. Older files have both beside the other keys,
/// newer ones in `rope_parameters`.
fn rope(keys: &Keys<'_>) -> Result<(f64, Option<RopeScaling>)> {
    const THETA: &str = "rope_theta";
    let of_file = keys.positive(THETA, 10_000.0)?;
    let (theta, scaling) = match keys.object("rope_parameters")? {
        Some(parameters) => (parameters.positive(THETA, of_file)?, Some(parameters)),
        None => (of_file, keys.object("rope_scaling")?),
    };
    let Some(scaling) = scaling else { return Ok((theta, None)) };
    // The name of this key in older files.
    let key = if scaling.has("rope_type") { "rope_type" } else { "type" };
    match scaling.text(key, "default")?.as_str() {
        "default" => Ok((theta, None)),
        "llama3" => {
            let number = |key: &str| {
                scaling.value(key).ok_or_else(|| scaling.wrong(key, "a number above 0"))?;
                scaling.positive(key, 1.0)
            };
            let scaling = RopeScaling {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: scaling.size(
                    "original_max_position_embeddings",
                    None,
                    1..=1 << 24,
                )?,
            };
            Ok((theta, Some(scaling)))
        }
        _ => Err(scaling.wrong(key, "\"default\" or \"llama3\"")),
    }
}

/// A token id; the first where a file names several.
fn token(keys: &Keys<'_>, key: &str, silent: Option<u32>) -> Result<Option<u32>> {
    if !keys.has(key) {
        return Ok(silent);
    }
    match keys.value(key) {
        Some(Value::Array(ids)) => {
            let first = ids.first().and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
            first.map(Some).ok_or_else(|| keys.wrong(key, "token ids"))
        }
        _ => keys.token(key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<LlamaConfig> {
        LlamaConfig::parse(Path::new("m/config.json"), value)
    }

    #[test]
    fn what_is_written_reads_back() {
        let plain = LlamaConfig::new(259, 12, 2, 3);
        let everything = LlamaConfig {
            n_kv_heads: 1,
            head_width: Some(6),
            mlp_width: 31,
            max_seq_len: 40,
            rope_theta: 10_000.0,
            rope_scaling: Some(RopeScaling {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            }),
            norm_eps: 1e-6,
            tie_embeddings: false,
            special_tokens: SpecialTokens { bos: None, eos: Some(4), pad: None },
            ..plain.clone()
        };
        let mistral = LlamaConfig { window_size: Some(7), ..everything.clone() };
        let qwen = LlamaConfig { qkv_bias: true, ..plain.clone() };
        let qwen_window = LlamaConfig { window_size: Some(9), ..qwen.clone() };
        let qwen3 = LlamaConfig { qk_norm: true, head_width: Some(6), ..plain.clone() };
        let qwen3_window = LlamaConfig { window_size: Some(9), head_width: None, ..qwen3.clone() };
        for (config, class) in [
            (plain, "LlamaForCausalLM"),
            (everything, "LlamaForCausalLM"),
            (mistral, "MistralForCausalLM"),
            (qwen, "Qwen2ForCausalLM"),
            (qwen_window, "Qwen2ForCausalLM"),
            (qwen3, "Qwen3ForCausalLM"),
            (qwen3_window, "Qwen3ForCausalLM"),
        ] {
            let json = config.to_json();
            assert_eq!(parse(&json).expect("parses"), config);
            assert_eq!(json["architectures"][0], class);
        }
    }

    #[test]
    fn a_silent_file_means_what_transformers_means() {
        let llama = parse(&json!({"model_type": "llama"})).expect("parses");
        let expected = LlamaConfig {
            mlp_width: 11_008,
            max_seq_len: 2048,
            rope_theta: 10_000.0,
            norm_eps: 1e-6,
            tie_embeddings: false,
            special_tokens: SpecialTokens { bos: Some(1), eos: Some(2), pad: None },
            ..LlamaConfig::new(32_000, 4096, 32, 32)
        };
        assert_eq!(llama, expected);
        let mistral = parse(&json!({"model_type": "mistral"})).expect("parses");
        assert_eq!((mistral.n_kv_heads, mistral.window_size), (8, Some(4096)));
        let open = json!({"model_type": "mistral", "sliding_window": null});
        assert_eq!(parse(&open).expect("parses").window_size, None);
        let qwen = parse(&json!({"model_type": "qwen2", "sliding_window": 9})).expect("parses");
        assert_eq!((qwen.qkv_bias, qwen.window_size), (true, None));
        let qwen = json!({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 64});
        let qwen = parse(&qwen).expect("parses");
        assert_eq!((qwen.qk_norm, qwen.head_width, qwen.n_kv_heads), (true, Some(128), 32));
    }

    #[test]
    fn the_file_of_llama_3_is_read() {
        let file = json!({
            "model_type": "llama", "head_dim": 64, "hidden_size": 2048, "num_attention_heads": 32,
            "num_key_value_heads": 8, "eos_token_id": [128_001, 128_008],
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500_000.0,
        });
        let config = parse(&file).expect("parses");
        assert_eq!((config.head_width, config.n_kv_heads), (None, 8));
        assert_eq!(config.special_tokens.eos, Some(128_001));
        assert_eq!(config.rope_scaling.expect("scaled").factor, 32.0);
        // The form of newer versions.
        let newer = json!({"model_type": "llama",
                           "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}});
        assert_eq!(parse(&newer).expect("parses").rope_theta, 7.0);
    }

    #[test]
    fn what_cannot_run_is_named() {
        for (config, expected) in [
            (json!({"hidden_act": "gelu"}), "hidden_act: expected \"silu\""),
            (json!({"attention_bias": true}), "attention_bias: expected false, found true"),
            (json!({"mlp_bias": true}), "mlp_bias: expected false, found true"),
            (json!({"attention_dropout": 0.1}), "attention_dropout: expected 0 (no dropout)"),
            (
                json!({"num_attention_heads": 7}),
                "num_attention_heads: expected a divisor of hidden_size, which is 4096, found 7",
            ),
            (
                json!({"num_key_value_heads": 5}),
                "num_key_value_heads: expected a divisor of num_attention_heads, which is 32, found 5",
            ),
            (json!({"head_dim": 7}), "head_dim: expected heads of an even number of columns"),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
                "rope_type: expected \"default\" or \"llama3\", found \"yarn\"",
            ),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}),
                "low_freq_factor: expected a number above 0, found nothing",
            ),
            (
                json!({"model_type": "qwen2", "use_sliding_window": true}),
                "max_window_layers: expected 0 (a window in every layer), found nothing",
            ),
            (json!({"eos_token_id": []}), "eos_token_id: expected token ids, found a list"),
        ] {
            let error = parse(&config).expect_err("refused").to_string();
            assert!(error.starts_with(&format!("m/config.json: {expected}")), "{error}");
        }
    }
}
