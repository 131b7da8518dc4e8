//! The sizes of a hybrid of Mamba and attention blocks, checked, and its `config.json`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{ModelError, Result};
use crate::family::{HeadKeys, SpecialTokens, check_sizes, head_width, head_width_of};
use crate::hugging_face::keys::Keys;
use crate::mamba::MambaConfig;

/// A hybrid language model.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// Sizes of the whole model and of its Mamba blocks; `n_layers` counts blocks of both kinds.
    pub mamba: MambaConfig,
    /// The kind of each block.
    pub pattern: BlockPattern,
    /// h, heads of an attention block.
    pub n_heads: usize,
    /// The width of an attention block's MLP as a multiple of `d_model`.
    pub expansion: usize,
}

/// The kind of a block of a hybrid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// `m`: a Mamba block.
    Mamba,
    /// `a`: attention and an MLP.
    Attention,
}

/// The kinds of blocks in turn, such as `mma`: repeated from the first block to the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BlockPattern(Vec<BlockKind>);

impl BlockPattern {
    /// The kind of block `index`.
    pub fn kind(&self, index: usize) -> BlockKind {
        self.0[index % self.0.len()]
    }

    /// Refuses a pattern that makes all `blocks` one kind: that is not a hybrid, and attention
    /// alone would have no positions.
    fn check(&self, blocks: usize) -> Result<()> {
        let has = |kind| (0..blocks.min(self.0.len())).any(|index| self.kind(index) == kind);
        let only = match (has(BlockKind::Mamba), has(BlockKind::Attention)) {
            (true, true) => return Ok(()),
            (true, false) => "only m",
            (false, _) => "only a",
        };
        let expected = format!("an m and an a among the kinds of {blocks} blocks");
        Err(ModelError::config("layer_pattern", expected, only))
    }
}

impl FromStr for BlockPattern {
    type Err = String;

    fn from_str(letters: &str) -> std::result::Result<Self, String> {
        const MOST: usize = 1 << 12;
        let kinds = letters.chars().map(|letter| match letter {
            'm' => Some(BlockKind::Mamba),
            'a' => Some(BlockKind::Attention),
            _ => None,
        });
        kinds
            .collect::<Option<Vec<_>>>()
            .filter(|kinds| (1..=MOST).contains(&kinds.len()))
            .map(Self)
            .ok_or_else(|| {
                let shown: String = letters.chars().take(40).collect();
                format!("expected letters m (Mamba) and a (attention), such as \"mma\", found \"{shown}\"")
            })
    }
}

impl TryFrom<String> for BlockPattern {
    type Error = String;

    fn try_from(letters: String) -> std::result::Result<Self, String> {
        letters.parse()
    }
}

impl From<BlockPattern> for String {
    fn from(pattern: BlockPattern) -> Self {
        pattern.to_string()
    }
}

impl fmt::Display for BlockPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|kind| match kind {
            BlockKind::Mamba => f.write_str("m"),
            BlockKind::Attention => f.write_str("a"),
        })
    }
}

impl HybridConfig {
    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        self.mamba.check()?;
        check_sizes(&[("expansion", self.expansion, 1..=64)])?;
        head_width(self.mamba.d_model, self.n_heads)?;
        self.pattern.check(self.mamba.n_layers)
    }

    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value that is missing, or of a wrong type or size: named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let pattern = keys.text("layer_pattern", "")?;
        let pattern =
            pattern.parse().map_err(|_| keys.wrong("layer_pattern", "letters m and a"))?;
        let config = Self {
            mamba: MambaConfig {
                vocab_size: keys.size("vocab_size", None, 1..=1 << 24)?,
                d_model: keys.size("hidden_size", None, 1..=1 << 18)?,
                n_layers: keys.size("num_hidden_layers", None, 1..=1 << 12)?,
                d_state: keys.size("state_size", None, 1..=256)?,
                d_conv: keys.size("conv_kernel", None, 1..=16)?,
                expand: keys.size("expand", None, 1..=64)?,
                dt_rank: keys.size("time_step_rank", None, 1..=1 << 18)?,
                norm_eps: keys.positive("layer_norm_epsilon", 1e-5)?,
                tie_embeddings: keys.flag("tie_word_embeddings", true)?,
                conv_bias: keys.flag("use_conv_bias", true)?,
                special_tokens: SpecialTokens {
                    bos: keys.token("bos_token_id")?,
                    eos: keys.token("eos_token_id")?,
                    pad: keys.token("pad_token_id")?,
                },
            },
            pattern,
            n_heads: keys.size("num_attention_heads", None, 1..=1 << 18)?,
            expansion: keys.size("expansion_ratio", None, 1..=64)?,
        };
        let names = HeadKeys { heads: "num_attention_heads", width: "hidden_size" };
        head_width_of(names, config.mamba.d_model, config.n_heads)
            .and_then(|_| config.check())
            .map_err(|error| keys.refused(error))?;
        Ok(config)
    }

    /// The `config.json` of this model: keys as of transformers' Mamba, and three of its own.
    pub fn to_json(&self) -> Value {
        let mamba = &self.mamba;
        json!({
            "architectures": ["TidemillHybridForCausalLM"],
            "bos_token_id": mamba.special_tokens.bos,
            "conv_kernel": mamba.d_conv,
            "eos_token_id": mamba.special_tokens.eos,
            "expand": mamba.expand,
            "expansion_ratio": self.expansion,
            "hidden_size": mamba.d_model,
            "layer_norm_epsilon": mamba.norm_eps,
            "layer_pattern": self.pattern.to_string(),
            "model_type": "tidemill_hybrid",
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": mamba.n_layers,
            "pad_token_id": mamba.special_tokens.pad,
            "state_size": mamba.d_state,
            "tie_word_embeddings": mamba.tie_embeddings,
            "time_step_rank": mamba.dt_rank,
            "torch_dtype": "float32",
            "use_conv_bias": mamba.conv_bias,
            "vocab_size": mamba.vocab_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let config = HybridConfig {
            mamba: MambaConfig { d_state: 3, conv_bias: false, ..MambaConfig::new(59, 12, 4) },
            pattern: "mma".parse().expect("a pattern"),
            n_heads: 3,
            expansion: 2,
        };
        let path = Path::new("m/config.json");
        assert_eq!(HybridConfig::parse(path, &config.to_json()).expect("parses"), config);
        let mut wrong = config.to_json();
        wrong["layer_pattern"] = json!("mxa");
        let error = HybridConfig::parse(path, &wrong).expect_err("refused").to_string();
        assert_eq!(error, "m/config.json: layer_pattern: expected letters m and a, found \"mxa\"");
        let mut wrong = config.to_json();
        wrong["num_attention_heads"] = json!(5);
        let error = HybridConfig::parse(path, &wrong).expect_err("refused").to_string();
        let expected =
            "num_attention_heads: expected a divisor of hidden_size, which is 12, found 5";
        assert_eq!(error, format!("m/config.json: {expected}"));
    }

    #[test]
    fn blocks_are_of_both_kinds() {
        let config = |pattern: &str, blocks| HybridConfig {
            mamba: MambaConfig::new(59, 12, blocks),
            pattern: pattern.parse().expect("a pattern"),
            n_heads: 3,
            expansion: 2,
        };
        for (pattern, blocks) in [("ma", 2), ("ma", 9), ("mma", 3), ("aam", 3)] {
            config(pattern, blocks).check().expect(pattern);
        }
        for (pattern, blocks, found) in
            [("m", 5, "m"), ("mma", 2, "m"), ("a", 1, "a"), ("am", 1, "a")]
        {
            let error = config(pattern, blocks).check().expect_err(pattern).to_string();
            let expected = format!("an m and an a among the kinds of {blocks} blocks");
            assert_eq!(error, format!("layer_pattern: expected {expected}, found only {found}"));
        }
    }

    #[test]
    fn patterns_repeat() {
        let pattern: BlockPattern = "mma".parse().expect("a pattern");
        let kinds: Vec<_> = (0..5).map(|index| pattern.kind(index)).collect();
        let (m, a) = (BlockKind::Mamba, BlockKind::Attention);
        assert_eq!(kinds, [m, m, a, m, m]);
        assert!("".parse::<BlockPattern>().is_err());
    }
}
