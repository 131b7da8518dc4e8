//! The sizes of a hybrid, checked, and its `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use super::pattern::{BlockKind, BlockPattern};
use crate::error::{ModelError, Result};
use crate::family::{HeadKeys, SpecialTokens, check_sizes, head_width, head_width_of};
use crate::hugging_face::keys::Keys;
use crate::llama::LlamaConfig;
use crate::llama::config::ROPE_THETA;
use crate::mamba::MambaConfig;
use crate::mamba2::Mamba2Config;

/// A hybrid language model. Sizes of a kind of block that the pattern does not hold build nothing; those of [`MambaConfig`] are
/// checked in any case.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// Sizes of the whole model and of its Mamba blocks, of which Mamba-2 blocks share the states,
    /// the convolution and the expansion; `n_layers` counts blocks of all kinds.
    pub mamba: MambaConfig,
    /// The kind of each block.
    pub pattern: BlockPattern,
    /// h, heads of queries of attention blocks and of Llama blocks.
    pub n_heads: usize,
    /// The width of an attention block's MLP as a multiple of `d_model`.
    pub expansion: usize,
    /// Further sizes of Llama blocks.
    pub llama: LlamaSizes,
    /// Further sizes of Mamba-2 blocks.
    pub mamba2: Mamba2Sizes,
}

/// The sizes and switches that Llama blocks of a hybrid do not share with other blocks, as in
/// [`LlamaConfig`].
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaSizes {
    /// g, heads of keys and values: a divisor of h.
    pub n_kv_heads: usize,
    /// p, the width of a head, an even number; `d / h` where not given.
    pub head_width: Option<usize>,
    /// f, the width of the MLP.
    pub mlp_width: usize,
    /// The base of rotary positions.
    pub rope_theta: f64,
    /// How many positions a query attends to, its own among them; `None` for all.
    pub window_size: Option<usize>,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether each head of queries and of keys is normed before the rotary positions are applied.
    pub qk_norm: bool,
}

/// The sizes that Mamba-2 blocks of a hybrid do not share with other blocks, as in
/// [`Mamba2Config`].
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Sizes {
    /// p, the channels of a head; a divisor of e.
    pub head_width: usize,
    /// g, groups of heads that share B and C; a divisor of the heads.
    pub n_groups: usize,
}

impl HybridConfig {
    /// A hybrid of these sizes. Attention blocks and Llama blocks have MLPs 4 times as wide as the
    /// model; Llama blocks have as many heads of keys and values as of queries and angles to the base
    /// 500,000; Mamba-2 blocks have heads of 64 channels (or of the most below that divide e) in
    /// one group.
    pub fn new(mamba: MambaConfig, pattern: BlockPattern, n_heads: usize) -> Self {
        let d_inner = mamba.expand.saturating_mul(mamba.d_model);
        let llama = LlamaSizes {
            n_kv_heads: n_heads,
            head_width: None,
            mlp_width: mamba.d_model.saturating_mul(4),
            rope_theta: ROPE_THETA,
            window_size: None,
            qkv_bias: false,
            qk_norm: false,
        };
        let head_width = Mamba2Config::head_width_like(64, d_inner);
        let mamba2 = Mamba2Sizes { head_width, n_groups: 1 };
        Self { mamba, pattern, n_heads, expansion: 4, llama, mamba2 }
    }

    /// The sizes of Llama blocks, as a model of them alone would have them.
    pub(super) fn llama_config(&self) -> LlamaConfig {
        let Self { mamba, llama, .. } = self;
        LlamaConfig {
            n_kv_heads: llama.n_kv_heads,
            head_width: llama.head_width,
            mlp_width: llama.mlp_width,
            rope_theta: llama.rope_theta,
            window_size: llama.window_size,
            qkv_bias: llama.qkv_bias,
            qk_norm: llama.qk_norm,
            norm_eps: mamba.norm_eps,
            ..LlamaConfig::new(mamba.vocab_size, mamba.d_model, mamba.n_layers, self.n_heads)
        }
    }

    /// The sizes of Mamba-2 blocks, as a model of them alone would have them.
    pub(super) fn mamba2_config(&self) -> Mamba2Config {
        let Self { mamba, mamba2, .. } = self;
        Mamba2Config {
            d_state: mamba.d_state,
            d_conv: mamba.d_conv,
            expand: mamba.expand,
            head_width: mamba2.head_width,
            n_groups: mamba2.n_groups,
            norm_eps: mamba.norm_eps,
            conv_bias: mamba.conv_bias,
            ..Mamba2Config::new(mamba.vocab_size, mamba.d_model, mamba.n_layers)
        }
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        self.mamba.check()?;
        if self.pattern.holds(BlockKind::Attention) {
            check_sizes(&[("expansion", self.expansion, 1..=64)])?;
            head_width(self.mamba.d_model, self.n_heads)?;
        }
        if self.pattern.holds(BlockKind::Llama) {
            self.llama_config().check()?;
        }
        if self.pattern.holds(BlockKind::Mamba2) {
            self.mamba2_config().check().map_err(of_mamba2)?;
        }
        self.pattern.check(self.mamba.n_layers)
    }

    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value that is missing, or of a wrong type or size: named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let pattern: BlockPattern = keys
            .text("layer_pattern", "")?
            .parse()
            .map_err(|_| keys.wrong("layer_pattern", "letters m, s, a and l"))?;
        let [m, s, a, l] = BlockKind::ALL.map(|kind| pattern.holds(kind));
        let mut mamba = MambaConfig::new(
            keys.size("vocab_size", None, 1..=1 << 24)?,
            keys.size("hidden_size", None, 1..=1 << 18)?,
            keys.size("num_hidden_layers", None, 1..=1 << 12)?,
        );
        if m || s {
            mamba.d_state = keys.size("state_size", None, 1..=256)?;
            mamba.d_conv = keys.size("conv_kernel", None, 1..=16)?;
            mamba.expand = keys.size("expand", None, 1..=64)?;
            mamba.conv_bias = keys.flag("use_conv_bias", true)?;
        }
        if m {
            mamba.dt_rank = keys.size("time_step_rank", None, 1..=1 << 18)?;
        }
        mamba.norm_eps = keys.positive("layer_norm_epsilon", 1e-5)?;
        mamba.tie_embeddings = keys.flag("tie_word_embeddings", true)?;
        mamba.special_tokens = SpecialTokens {
            bos: keys.token("bos_token_id")?,
            eos: keys.token("eos_token_id")?,
            pad: keys.token("pad_token_id")?,
        };
        let names = HeadKeys { heads: "num_attention_heads", width: "hidden_size" };
        let n_heads = if a || l { keys.size(names.heads, None, 1..=1 << 18)? } else { 1 };
        let mut config = Self::new(mamba, pattern, n_heads);
        if a {
            config.expansion = keys.size("expansion_ratio", None, 1..=64)?;
            head_width_of(names, config.mamba.d_model, n_heads)
                .map_err(|error| keys.refused(error))?;
        }
        if l {
            config.llama = LlamaSizes::parse(&keys)?;
            let llama = config.llama_config();
            llama
                .head_columns_named(names, "head_dim")
                .and_then(|_| llama.check_shared_heads("num_key_value_heads", names.heads))
                .map_err(|error| keys.refused(error))?;
        }
        if s {
            config.mamba2.head_width = keys.size("mamba2_head_dim", None, 1..=256)?;
            config.mamba2.n_groups = keys.size("n_groups", None, 1..=1 << 18)?;
            let inner = config.mamba2_config().d_inner();
            if !inner.is_multiple_of(config.mamba2.head_width) {
                let expected = format!("a divisor of expand times hidden_size, which is {inner}");
                return Err(keys.wrong("mamba2_head_dim", &expected));
            }
        }
        config.check().map_err(|error| keys.refused(error))?;
        Ok(config)
    }

    /// The `config.json` of this model: keys as of transformers' Mamba, Mamba-2 and Llama, and some
    /// of its own.
    pub fn to_json(&self) -> Value {
        let Self { mamba, llama, mamba2, .. } = self;
        let [m, s, a, l] = BlockKind::ALL.map(|kind| self.pattern.holds(kind));
        let mut config = json!({
            "architectures": ["TidemillHybridForCausalLM"],
            "bos_token_id": mamba.special_tokens.bos,
            "eos_token_id": mamba.special_tokens.eos,
            "hidden_size": mamba.d_model,
            "layer_norm_epsilon": mamba.norm_eps,
            "layer_pattern": self.pattern.to_string(),
            "model_type": "tidemill_hybrid",
            "num_hidden_layers": mamba.n_layers,
            "pad_token_id": mamba.special_tokens.pad,
            "tie_word_embeddings": mamba.tie_embeddings,
            "torch_dtype": "float32",
            "vocab_size": mamba.vocab_size,
        });
        if m || s {
            config["conv_kernel"] = json!(mamba.d_conv);
            config["expand"] = json!(mamba.expand);
            config["state_size"] = json!(mamba.d_state);
            config["use_conv_bias"] = json!(mamba.conv_bias);
        }
        if m {
            config["time_step_rank"] = json!(mamba.dt_rank);
        }
        if s {
            config["mamba2_head_dim"] = json!(mamba2.head_width);
            config["n_groups"] = json!(mamba2.n_groups);
        }
        if a || l {
            config["num_attention_heads"] = json!(self.n_heads);
        }
        if a {
            config["expansion_ratio"] = json!(self.expansion);
        }
        if l {
            config["head_dim"] = json!(llama.head_width);
            config["intermediate_size"] = json!(llama.mlp_width);
            config["num_key_value_heads"] = json!(llama.n_kv_heads);
            config["qk_norm"] = json!(llama.qk_norm);
            config["qkv_bias"] = json!(llama.qkv_bias);
            config["rope_theta"] = json!(llama.rope_theta);
            config["sliding_window"] = json!(llama.window_size);
        }
        config
    }
}

/// An error about the heads of Mamba-2 blocks, with the key that tells them from those of Llama blocks.
fn of_mamba2(error: ModelError) -> ModelError {
    match error {
        ModelError::Config { key, expected, found } if key == "head_width" => {
            ModelError::config("mamba2_head_width", expected, found)
        }
        other => other,
    }
}

impl LlamaSizes {
    fn parse(keys: &Keys<'_>) -> Result<Self> {
        let size_or_none =
            |key, range| keys.value(key).map(|_| keys.size(key, None, range)).transpose();
        Ok(Self {
            n_kv_heads: keys.size("num_key_value_heads", None, 1..=1 << 18)?,
            head_width: size_or_none("head_dim", 2..=256)?,
            mlp_width: keys.size("intermediate_size", None, 1..=1 << 22)?,
            rope_theta: keys.positive("rope_theta", ROPE_THETA)?,
            window_size: size_or_none("sliding_window", 1..=1 << 24)?,
            qkv_bias: keys.flag("qkv_bias", false)?,
            qk_norm: keys.flag("qk_norm", false)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(letters: &str) -> HybridConfig {
        let mamba = MambaConfig { d_state: 3, conv_bias: false, ..MambaConfig::new(59, 12, 4) };
        HybridConfig::new(mamba, letters.parse().expect("a pattern"), 3)
    }

    fn parsed(value: &Value) -> Result<HybridConfig> {
        HybridConfig::parse(Path::new("m/config.json"), value)
    }

    #[test]
    fn what_is_written_reads_back() {
        let llama = LlamaSizes {
            n_kv_heads: 1,
            head_width: Some(6),
            mlp_width: 7,
            rope_theta: 30.0,
            window_size: Some(5),
            qkv_bias: false,
            qk_norm: true,
        };
        let mamba2 = Mamba2Sizes { head_width: 4, n_groups: 2 };
        let config = HybridConfig { expansion: 2, llama, mamba2, ..config("mals") };
        config.check().expect("sizes of a model");
        assert_eq!(parsed(&config.to_json()).expect("parses"), config);
        let rank = MambaConfig { dt_rank: 5, ..config.mamba };
        let config = HybridConfig { mamba: rank, ..self::config("ml") };
        assert_eq!(parsed(&config.to_json()).expect("parses"), config);
    }

    /// Files of hybrids of Mamba and attention are what they always were.
    #[test]
    fn a_pattern_of_mamba_and_attention_writes_no_other_sizes() {
        let expected = r#"{"architectures":["TidemillHybridForCausalLM"],"bos_token_id":null,"conv_kernel":4,"eos_token_id":null,"expand":2,"expansion_ratio":4,"hidden_size":12,"layer_norm_epsilon":0.00001,"layer_pattern":"mma","model_type":"tidemill_hybrid","num_attention_heads":3,"num_hidden_layers":4,"pad_token_id":null,"state_size":3,"tie_word_embeddings":true,"time_step_rank":1,"torch_dtype":"float32","use_conv_bias":false,"vocab_size":59}"#;
        assert_eq!(config("mma").to_json().to_string(), expected);
    }

    /// A file holds the sizes that its pattern has a use for, and a reader asks for no other.
    #[test]
    fn sizes_of_other_blocks_are_not_asked_for() {
        let state_space = ["conv_kernel", "expand", "state_size"];
        let llama = ["num_attention_heads", "num_key_value_heads", "intermediate_size"];
        for (letters, needed) in [
            ("la", [&llama[..], &["expansion_ratio"]].concat()),
            ("sl", [&state_space[..], &["mamba2_head_dim", "n_groups"], &llama].concat()),
            ("ms", [&state_space[..], &["time_step_rank", "mamba2_head_dim", "n_groups"]].concat()),
        ] {
            let value = config(letters).to_json();
            let read = parsed(&value).expect(letters);
            assert_eq!((read.to_json(), &read.pattern), (value.clone(), &config(letters).pattern));
            for key in needed {
                let mut without = value.clone();
                without.as_object_mut().expect("an object").remove(key).expect(key);
                let error = parsed(&without).expect_err(key).to_string();
                let start = format!("m/config.json: {key}: expected a whole number from ");
                assert!(error.starts_with(&start), "{letters}: {error}");
            }
        }
    }

    #[test]
    fn wrong_values_of_a_file_are_named() {
        for (letters, key, value, expected) in [
            ("mma", "layer_pattern", json!("mxa"), "letters m, s, a and l, found \"mxa\""),
            (
                "mma",
                "num_attention_heads",
                json!(5),
                "a divisor of hidden_size, which is 12, found 5",
            ),
            (
                "ml",
                "num_key_value_heads",
                json!(2),
                "a divisor of num_attention_heads, which is 3, found 2",
            ),
            (
                "ml",
                "head_dim",
                json!(5),
                "heads of an even number of columns from 2 to 256, found 5 columns",
            ),
            (
                "ms",
                "mamba2_head_dim",
                json!(5),
                "a divisor of expand times hidden_size, which is 24, found 5",
            ),
            ("ml", "sliding_window", json!(0), "a whole number from 1 to 16777216, found 0"),
        ] {
            let mut wrong = config(letters).to_json();
            wrong[key] = value;
            let error = parsed(&wrong).expect_err(key).to_string();
            assert_eq!(error, format!("m/config.json: {key}: expected {expected}"));
        }
    }

    #[test]
    fn sizes_of_blocks_in_the_pattern_are_checked() {
        type Change = fn(&mut HybridConfig);
        let changes: [(&str, &str, Change); 8] = [
            ("ms", "d_state", |config| config.mamba.d_state = 257),
            ("ma", "expansion", |config| config.expansion = 0),
            ("ma", "n_heads", |config| config.n_heads = 5),
            ("ml", "n_heads", |config| config.n_heads = 0),
            ("ml", "n_kv_heads", |config| config.llama.n_kv_heads = 2),
            ("ml", "mlp_width", |config| config.llama.mlp_width = 0),
            ("ms", "mamba2_head_width", |config| config.mamba2.head_width = 5),
            ("ms", "n_groups", |config| config.mamba2.n_groups = 2),
        ];
        for (letters, key, change) in changes {
            let mut wrong = config(letters);
            wrong.check().expect(letters);
            change(&mut wrong);
            let error = wrong.check().expect_err(key).to_string();
            assert!(error.starts_with(&format!("{key}: expected ")), "{letters}: {error}");
        }
        // What the pattern does not hold is not read.
        let mut unread = config("sm");
        (unread.n_heads, unread.expansion, unread.llama.mlp_width) = (0, 0, 0);
        unread.check().expect("no attention");
        let error = config("m").check().expect_err("one kind").to_string();
        assert!(error.starts_with("layer_pattern: expected two kinds or more"), "{error}");
    }
}
