//! `config.json` of a `MambaForCausalLM`: every key that transformers reads, written explicitly.
//!
//! Defaults differ between transformers' versions and the original repository (`use_bias` has been
//! `true`, `initializer_range` 0.1), so this crate writes every key and relies on no default.
//! Reading takes what transformers 4.57 takes, ignores unknown keys, and refuses by name features
//! that this crate cannot run. The original `state-spaces` form (`d_model`, `n_layer`, `ssm_cfg`
//! ...) is read too, as transformers' converter does.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::keys::Keys;
use crate::error::Result;

/// Bounds that keep products of sizes, and so the sizes of a layout, inside 64 bits for any values
/// in a file.
const MOST_VOCABULARY: usize = 1 << 24;
const MOST_WIDTH: usize = 1 << 18;
const MOST_LAYERS: usize = 1 << 12;
const MOST_EXPANSION: usize = 1 << 6;
/// The limit of the kernels.
const MOST_STATES: usize = 256;
const MOST_TAPS: usize = 16;

/// A `config.json` with `"model_type": "mamba"`.
///
/// The fields are in alphabetical order, so that the bytes written are the same whether or not some other crate of a build switches
/// on serde_json's `preserve_order`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MambaHuggingFaceConfig {
    architectures: [&'static str; 1],
    /// Begins a document.
    pub bos_token_id: Option<u32>,
    /// k, taps of the convolution.
    pub conv_kernel: usize,
    /// Ends a document.
    pub eos_token_id: Option<u32>,
    /// The inner width as a multiple of `hidden_size`.
    pub expand: usize,
    hidden_act: &'static str,
    /// d, model width.
    pub hidden_size: usize,
    /// Used by transformers only when it initializes a new model.
    pub initializer_range: f64,
    /// e, inner width: `expand * hidden_size`.
    pub intermediate_size: usize,
    /// Added to the mean square in every norm.
    pub layer_norm_epsilon: f64,
    model_type: &'static str,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Fills short rows.
    pub pad_token_id: Option<u32>,
    /// Used by transformers only when it initializes a new model.
    pub rescale_prenorm_residual: bool,
    residual_in_fp32: bool,
    /// n, states of a channel.
    pub state_size: usize,
    /// Whether the head's matrix is the embedding.
    pub tie_word_embeddings: bool,
    /// Used by transformers only when it initializes a new model.
    pub time_step_floor: f64,
    /// Used by transformers only when it initializes a new model.
    pub time_step_init_scheme: String,
    /// Used by transformers only when it initializes a new model.
    pub time_step_max: f64,
    /// Used by transformers only when it initializes a new model.
    pub time_step_min: f64,
    /// r, rank of dt.
    pub time_step_rank: usize,
    /// Used by transformers only when it initializes a new model.
    pub time_step_scale: f64,
    torch_dtype: &'static str,
    use_bias: bool,
    use_cache: bool,
    /// Whether the convolution has a bias.
    pub use_conv_bias: bool,
    /// v, the logical vocabulary.
    pub vocab_size: usize,
}

impl Default for MambaHuggingFaceConfig {
    /// The values that transformers assumes for keys that a file leaves out.
    fn default() -> Self {
        Self {
            architectures: ["MambaForCausalLM"],
            bos_token_id: Some(0),
            conv_kernel: 4,
            eos_token_id: Some(0),
            expand: 2,
            hidden_act: "silu",
            hidden_size: 768,
            initializer_range: 0.1,
            intermediate_size: 1536,
            layer_norm_epsilon: 1e-5,
            model_type: "mamba",
            num_hidden_layers: 32,
            pad_token_id: Some(0),
            rescale_prenorm_residual: false,
            residual_in_fp32: true,
            state_size: 16,
            tie_word_embeddings: true,
            time_step_floor: 1e-4,
            time_step_init_scheme: "random".to_owned(),
            time_step_max: 0.1,
            time_step_min: 1e-3,
            time_step_rank: 48,
            time_step_scale: 1.0,
            torch_dtype: "float32",
            use_bias: false,
            use_cache: true,
            use_conv_bias: true,
            vocab_size: 50280,
        }
    }
}

impl MambaHuggingFaceConfig {
    /// The config that the JSON of the file `path` gives, in transformers' form or in the original one.
    ///
    /// # Errors
    /// A key of a wrong type or size, another kind of model, or a feature that this crate cannot run: each named with
    /// the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        if keys.has("model_type") {
            Self::from_transformers(&keys)
        } else if keys.has("d_model") && keys.has("n_layer") {
            Self::from_state_spaces(&keys)
        } else {
            Err(keys.wrong("model_type", "\"mamba\""))
        }
    }

    fn from_transformers(keys: &Keys<'_>) -> Result<Self> {
        let default = Self::default();
        if !keys.is("model_type", "mamba") {
            return Err(keys.wrong("model_type", "\"mamba\""));
        }
        if keys.flag("use_bias", false)? {
            return Err(keys.wrong("use_bias", "false (projections without a bias)"));
        }
        if !matches!(keys.text("hidden_act", "silu")?.as_str(), "silu" | "swish") {
            return Err(keys.wrong("hidden_act", "\"silu\""));
        }
        let hidden_size = keys.size("hidden_size", Some(default.hidden_size), 1..=MOST_WIDTH)?;
        let expand = keys.size("expand", Some(default.expand), 1..=MOST_EXPANSION)?;
        let intermediate_size = expand * hidden_size;
        let inner = intermediate_size..=intermediate_size;
        if keys.size("intermediate_size", Some(intermediate_size), inner).is_err() {
            let expected = format!("expand * hidden_size = {intermediate_size}");
            return Err(keys.wrong("intermediate_size", &expected));
        }
        let rank = hidden_size.div_ceil(16);
        let time_step_rank = if keys.is("time_step_rank", "auto") {
            rank
        } else {
            keys.size("time_step_rank", Some(rank), 1..=MOST_WIDTH)?
        };
        let ids = |key, default| if keys.has(key) { keys.token(key) } else { Ok(default) };
        Ok(Self {
            bos_token_id: ids("bos_token_id", default.bos_token_id)?,
            conv_kernel: keys.size("conv_kernel", Some(default.conv_kernel), 1..=MOST_TAPS)?,
            eos_token_id: ids("eos_token_id", default.eos_token_id)?,
            expand,
            hidden_size,
            initializer_range: keys.number("initializer_range", default.initializer_range)?,
            intermediate_size,
            layer_norm_epsilon: keys.positive("layer_norm_epsilon", default.layer_norm_epsilon)?,
            num_hidden_layers: keys.size(
                "num_hidden_layers",
                Some(default.num_hidden_layers),
                1..=MOST_LAYERS,
            )?,
            pad_token_id: ids("pad_token_id", default.pad_token_id)?,
            rescale_prenorm_residual: keys
                .flag("rescale_prenorm_residual", default.rescale_prenorm_residual)?,
            state_size: keys.size("state_size", Some(default.state_size), 1..=MOST_STATES)?,
            tie_word_embeddings: keys.flag("tie_word_embeddings", default.tie_word_embeddings)?,
            time_step_floor: keys.number("time_step_floor", default.time_step_floor)?,
            time_step_init_scheme: keys
                .text("time_step_init_scheme", &default.time_step_init_scheme)?,
            time_step_max: keys.number("time_step_max", default.time_step_max)?,
            time_step_min: keys.number("time_step_min", default.time_step_min)?,
            time_step_rank,
            time_step_scale: keys.number("time_step_scale", default.time_step_scale)?,
            use_conv_bias: keys.flag("use_conv_bias", default.use_conv_bias)?,
            vocab_size: keys.size("vocab_size", Some(default.vocab_size), 1..=MOST_VOCABULARY)?,
            ..default
        })
    }

    /// The form that `state-spaces/mamba` writes. Its files hold the vocabulary padded to
    /// `pad_vocab_size_multiple`, so the padded size is the logical one here.
    fn from_state_spaces(keys: &Keys<'_>) -> Result<Self> {
        let default = Self::default();
        let hidden_size = keys.size("d_model", None, 1..=MOST_WIDTH)?;
        if !keys.flag("rms_norm", true)? {
            return Err(keys.wrong("rms_norm", "true"));
        }
        if keys.size("d_intermediate", Some(0), 0..=MOST_WIDTH)? != 0 {
            return Err(keys.wrong("d_intermediate", "0 (no MLP between the mixers)"));
        }
        let padding = keys.size("pad_vocab_size_multiple", Some(8), 1..=MOST_VOCABULARY)?;
        let vocab_size = keys.size("vocab_size", None, 1..=MOST_VOCABULARY)?;
        let mut config = Self {
            hidden_size,
            num_hidden_layers: keys.size("n_layer", None, 1..=MOST_LAYERS)?,
            tie_word_embeddings: keys.flag("tie_embeddings", true)?,
            time_step_rank: hidden_size.div_ceil(16),
            vocab_size: vocab_size.next_multiple_of(padding),
            ..default
        };
        if let Some(mixer) = keys.object("ssm_cfg")? {
            if mixer.has("layer") && !mixer.is("layer", "Mamba1") {
                return Err(mixer.wrong("layer", "\"Mamba1\""));
            }
            if mixer.flag("bias", false)? {
                return Err(mixer.wrong("bias", "false (projections without a bias)"));
            }
            config.state_size = mixer.size("d_state", Some(config.state_size), 1..=MOST_STATES)?;
            config.conv_kernel = mixer.size("d_conv", Some(config.conv_kernel), 1..=MOST_TAPS)?;
            config.expand = mixer.size("expand", Some(config.expand), 1..=MOST_EXPANSION)?;
            config.use_conv_bias = mixer.flag("conv_bias", config.use_conv_bias)?;
            if !mixer.is("dt_rank", "auto") {
                let rank = Some(config.time_step_rank);
                config.time_step_rank = mixer.size("dt_rank", rank, 1..=MOST_WIDTH)?;
            }
        }
        config.intermediate_size = config.expand * hidden_size;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hugging_face::parse_json;

    fn parse(json: &str) -> Result<MambaHuggingFaceConfig> {
        let path = Path::new("m/config.json");
        MambaHuggingFaceConfig::parse(path, &parse_json(path, json.as_bytes())?)
    }

    fn refused(json: &str) -> String {
        parse(json).expect_err("refused").to_string()
    }

    #[test]
    fn a_silent_file_means_what_transformers_means() {
        let config = parse(r#"{"model_type": "mamba", "never_heard_of": [1]}"#).expect("parses");
        assert_eq!(config, MambaHuggingFaceConfig::default());
        let json = r#"{"model_type": "mamba", "hidden_size": 40, "time_step_rank": "auto",
                       "bos_token_id": null, "expand": 3}"#;
        let config = parse(json).expect("parses");
        assert_eq!((config.time_step_rank, config.intermediate_size), (3, 120));
        assert_eq!((config.bos_token_id, config.eos_token_id), (None, Some(0)));
    }

    #[test]
    fn what_is_written_reads_back() {
        let config = MambaHuggingFaceConfig {
            hidden_size: 24,
            intermediate_size: 72,
            expand: 3,
            time_step_rank: 5,
            eos_token_id: None,
            tie_word_embeddings: false,
            layer_norm_epsilon: 1e-3,
            ..MambaHuggingFaceConfig::default()
        };
        let json = serde_json::to_string(&config).expect("serializes");
        assert_eq!(parse(&json).expect("parses"), config);
        let value: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(value["architectures"][0], "MambaForCausalLM");
        assert_eq!(value["use_bias"], false);
        assert_eq!(value.as_object().map(serde_json::Map::len), Some(28));
    }

    #[test]
    fn the_original_form_is_read() {
        let json = r#"{"d_model": 100, "n_layer": 2, "vocab_size": 50277, "ssm_cfg": {"d_conv": 3},
                       "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
                       "pad_vocab_size_multiple": 8}"#;
        let config = parse(json).expect("parses");
        assert_eq!((config.vocab_size, config.num_hidden_layers), (50280, 2));
        assert_eq!((config.conv_kernel, config.intermediate_size), (3, 200));
        assert_eq!(config.time_step_rank, 7);
        let mamba2 = json.replace("\"d_conv\": 3", "\"layer\": \"Mamba2\"");
        assert_eq!(refused(&mamba2), "m/config.json: layer: expected \"Mamba1\", found \"Mamba2\"");
    }

    #[test]
    fn what_cannot_run_is_named() {
        let mamba = |rest: &str| refused(&format!("{{\"model_type\": \"mamba\", {rest}}}"));
        assert_eq!(
            refused(r#"{"model_type": "mamba2"}"#),
            "m/config.json: model_type: expected \"mamba\", found \"mamba2\""
        );
        assert_eq!(refused("{}"), "m/config.json: model_type: expected \"mamba\", found nothing");
        assert_eq!(
            mamba(r#""hidden_size": "wide""#),
            "m/config.json: hidden_size: expected a whole number from 1 to 262144, found \"wide\""
        );
        assert!(mamba(r#""vocab_size": 99999999999999"#).contains("vocab_size: expected"));
        assert!(mamba(r#""num_hidden_layers": 0"#).contains("num_hidden_layers: expected"));
        assert!(mamba(r#""expand": 1.5"#).contains("expand: expected a whole number"));
        assert!(mamba(r#""use_bias": true"#).contains("use_bias: expected false"));
        assert!(mamba(r#""hidden_act": "relu""#).contains("hidden_act: expected \"silu\""));
        assert!(mamba(r#""layer_norm_epsilon": 0"#).contains("layer_norm_epsilon: expected"));
        assert!(mamba(r#""bos_token_id": -1"#).contains("bos_token_id: expected a token id"));
        assert_eq!(
            mamba(r#""intermediate_size": 7"#),
            "m/config.json: intermediate_size: expected expand * hidden_size = 1536, found 7"
        );
        assert!(refused("{\"model_type\": ").starts_with("m/config.json: is not JSON: EOF"));
        assert_eq!(refused("[]"), "m/config.json: expected a JSON object, found a list");
    }
}
