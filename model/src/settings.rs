//! The `[model]` table of a run: a preset, a checkpoint, or every size.
//!
//! [`resolve`](ModelSettings::resolve) says what a table means; `keys` says which keys a family
//! has.

mod keys;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::family::{Family, check_sizes, heads_like};
use crate::gpt_neo::GptNeoConfig;
use crate::hybrid::{BlockKind, BlockPattern, HybridConfig, LlamaSizes, Mamba2Sizes};
use crate::language_model::Recompute;
use crate::llama::LlamaConfig;
use crate::mamba::MambaConfig;
use crate::mamba2::Mamba2Config;
use crate::model_config::{ModelConfig, ModelKind};
use crate::mpt::{LogitScale, MptConfig, MptPositions};
use crate::preset::preset;

/// The `[model]` table as a user writes it; [`resolve`](Self::resolve) says what it means.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The name of a preset; the sizes below override those of the preset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// A checkpoint folder, whose config gives every size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// A family, whose sizes are all given below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ModelKind>,
    /// v, tokens of the vocabulary; the data set's where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// d, the width of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_model: Option<usize>,
    /// The number of blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_layers: Option<usize>,
    /// Mamba and Mamba-2: n, the states of a channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_state: Option<usize>,
    /// Mamba and Mamba-2: k, the taps of the convolution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_conv: Option<usize>,
    /// Mamba and Mamba-2: the inner width as a multiple of `d_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expand: Option<usize>,
    /// Mamba: r, the rank of the step sizes; `ceil(d_model / 16)` where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dt_rank: Option<usize>,
    /// Mamba-2: p, the channels of a head, a divisor of the inner width; 64 where not given, or the most below that divide it. Llama, and
    /// Llama blocks of hybrids: p, the width of a head, an even number; `d_model / n_heads` where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_width: Option<usize>,
    /// Mamba-2 blocks of hybrids: p, as `head_width` of Mamba-2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mamba2_head_width: Option<usize>,
    /// Mamba-2: g, groups of heads that share B and C, a divisor of the heads; 1 where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_groups: Option<usize>,
    /// Attention: h, heads; with a preset and another `d_model`, heads about as wide as the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_heads: Option<usize>,
    /// MPT, GPT-Neo and hybrids: the MLP's width as a multiple of `d_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<usize>,
    /// MPT and GPT-Neo: the positions of the learned table; a preset has at least as many as the
    /// data's samples. Llama: the positions that the model is meant for, as its files say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_seq_len: Option<usize>,
    /// MPT: ALiBi, attention scores that fall with distance, instead of learned positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alibi: Option<bool>,
    /// MPT: no biases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_bias: Option<bool>,
    /// MPT: layer norms over queries and over keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qk_ln: Option<bool>,
    /// MPT: the magnitude that queries, keys and values are clipped to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_qkv: Option<f64>,
    /// MPT: the factor of scores; `1 / sqrt(head width)` where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softmax_scale: Option<f64>,
    /// MPT: the factor on logits, a number or `inv_sqrt_d_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_scale: Option<LogitScale>,
    /// GPT-Neo: positions that a query of a local block attends to. Llama: positions that every
    /// query attends to, as in Mistral 7B.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_size: Option<usize>,
    /// Hybrids: the kinds of blocks in turn, `m` for Mamba, `s` for Mamba-2, `a` for attention and
    /// `l` for Llama; a hybrid has the sizes of the families of its blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_pattern: Option<BlockPattern>,
    /// Llama: g, heads of keys and values, a divisor of `n_heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_kv_heads: Option<usize>,
    /// Llama: f, the MLP's width; with a preset and another `d_model`, as many times that as the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_width: Option<usize>,
    /// Llama: the base of rotary positions' angles, 500,000 where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Llama: biases of queries, keys and values, as in Qwen2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qkv_bias: Option<bool>,
    /// Llama: norms of each head of queries and of keys, as in Qwen3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<bool>,
    /// Llama: the number added to the mean square before the root of every norm, 1e-5 where not
    /// given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
    /// Whether blocks recompute activations instead of keeping them; never numerics, so that a
    /// resumed run may change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
}

/// The meaning of a `[model]` table.
#[derive(Clone, Debug, PartialEq)]
pub enum ResolvedModel {
    /// The model of a checkpoint folder, which is read elsewhere.
    From(PathBuf),
    /// A new model.
    New(ModelConfig),
}

impl ModelSettings {
    /// Takes the sizes of the preset or family, overrides them with those of the table, and takes
    /// the vocabulary of the data where the table has none. `data_vocab_size` is the data set's
    /// vocabulary, where it is known.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the key: none or several of `preset`, `from` and `kind`; a size missing, out of
    /// bounds, or of another family; a vocabulary smaller than the data's.
    pub fn resolve(&self, data_vocab_size: Option<u32>) -> Result<ResolvedModel> {
        let choices = [self.preset.is_some(), self.from.is_some(), self.kind.is_some()];
        let chosen = choices.iter().filter(|&&chosen| chosen).count();
        let start = match (&self.preset, &self.from, self.kind) {
            (Some(name), None, None) => preset(name)?,
            (None, Some(folder), None) => {
                self.refuse_keys(&[], "no size beside from, whose checkpoint has them all")?;
                return Ok(ResolvedModel::From(folder.clone()));
            }
            (None, None, Some(kind)) => {
                let data = data_vocab_size.map(|size| size as usize);
                self.require_keys(kind, data)?;
                self.smallest(kind)
            }
            _ => {
                let found = if chosen == 0 { "none" } else { "several" };
                let expected = "exactly one of preset, from and kind";
                return Err(ModelError::config("model", expected, found));
            }
        };
        let expected = format!("no such size for a {} model", start.kind().name());
        self.refuse_keys(keys::of(start.kind()), &expected)?;
        if let Some(expansion) = self.expansion {
            check_sizes(&[("expansion", expansion, 1..=64)]).map_err(in_table)?;
        }
        let data_vocab_size = data_vocab_size.map(|size| size as usize);
        let vocab_size = self.vocab_size.or(data_vocab_size).unwrap_or(start.vocab_size());
        let config = self.over(start, vocab_size);
        if let Some(size) = data_vocab_size.filter(|&size| size > vocab_size) {
            let expected = format!("at least {size}, the data set's vocabulary");
            return Err(ModelError::config("model.vocab_size", expected, vocab_size));
        }
        config.check().map_err(in_table)?;
        if let ModelConfig::Hybrid(hybrid) = &config {
            self.refuse_keys_of_other_blocks(&hybrid.pattern)?;
        }
        Ok(ResolvedModel::New(config))
    }

    /// A model of `kind` with placeholder sizes, which are all replaced.
    fn smallest(&self, kind: ModelKind) -> ModelConfig {
        let mamba = MambaConfig::new(1, 1, 1);
        match (kind, &self.layer_pattern) {
            (ModelKind::Mamba2, _) => {
                Mamba2Config { head_width: 64, ..Mamba2Config::new(1, 1, 1) }.into()
            }
            (ModelKind::Mpt, _) => MptConfig::new(1, 1, 1, 1).into(),
            (ModelKind::GptNeo, _) => GptNeoConfig::new(1, 1, 1, 1).into(),
            (ModelKind::Llama, _) => LlamaConfig::new(1, 1, 1, 1).into(),
            (ModelKind::Hybrid, Some(pattern)) => {
                HybridConfig::new(mamba, pattern.clone(), 1).into()
            }
            (ModelKind::Mamba | ModelKind::Hybrid, _) => mamba.into(),
        }
    }

    /// `config` with the sizes given here.
    fn over(&self, config: ModelConfig, vocab_size: usize) -> ModelConfig {
        match config {
            ModelConfig::Mamba(config) => self.over_mamba(config, vocab_size).into(),
            ModelConfig::Mamba2(config) => self.over_mamba2(config, vocab_size).into(),
            ModelConfig::Mpt(config) => self.over_mpt(config, vocab_size).into(),
            ModelConfig::GptNeo(config) => self.over_gpt_neo(config, vocab_size).into(),
            ModelConfig::Llama(config) => self.over_llama(config, vocab_size).into(),
            ModelConfig::Hybrid(config) => self.over_hybrid(config, vocab_size).into(),
        }
    }

    fn over_mamba(&self, config: MambaConfig, vocab_size: usize) -> MambaConfig {
        let d_model = self.d_model.unwrap_or(config.d_model);
        MambaConfig {
            vocab_size,
            d_model,
            n_layers: self.n_layers.unwrap_or(config.n_layers),
            d_state: self.d_state.unwrap_or(config.d_state),
            d_conv: self.d_conv.unwrap_or(config.d_conv),
            expand: self.expand.unwrap_or(config.expand),
            dt_rank: self.dt_rank.unwrap_or_else(|| MambaConfig::default_dt_rank(d_model)),
            ..config
        }
    }

    fn over_mamba2(&self, config: Mamba2Config, vocab_size: usize) -> Mamba2Config {
        let d_model = self.d_model.unwrap_or(config.d_model);
        let expand = self.expand.unwrap_or(config.expand);
        let like =
            || Mamba2Config::head_width_like(config.head_width, expand.saturating_mul(d_model));
        Mamba2Config {
            vocab_size,
            d_model,
            n_layers: self.n_layers.unwrap_or(config.n_layers),
            d_state: self.d_state.unwrap_or(config.d_state),
            d_conv: self.d_conv.unwrap_or(config.d_conv),
            expand,
            head_width: self.head_width.unwrap_or_else(like),
            n_groups: self.n_groups.unwrap_or(config.n_groups),
            ..config
        }
    }

    /// The number of heads that is given; else that of the preset, adapted if `d_model` is given.
    fn heads(&self, d_model: usize, like: (usize, usize)) -> usize {
        self.n_heads.unwrap_or_else(|| heads_like(like, d_model, 1))
    }

    fn over_mpt(&self, config: MptConfig, vocab_size: usize) -> MptConfig {
        let d_model = self.d_model.unwrap_or(config.d_model);
        MptConfig {
            vocab_size,
            d_model,
            n_heads: self.heads(d_model, (config.d_model, config.n_heads)),
            n_layers: self.n_layers.unwrap_or(config.n_layers),
            expansion: self.expansion.unwrap_or(config.expansion),
            max_seq_len: self.max_seq_len.unwrap_or(config.max_seq_len),
            positions: match self.alibi {
                None => config.positions,
                Some(true) => MptPositions::Alibi { most: 8.0 },
                Some(false) => MptPositions::Learned,
            },
            no_bias: self.no_bias.unwrap_or(config.no_bias),
            qk_ln: self.qk_ln.unwrap_or(config.qk_ln),
            clip_qkv: self.clip_qkv.or(config.clip_qkv),
            softmax_scale: self.softmax_scale.or(config.softmax_scale),
            logit_scale: self.logit_scale.or(config.logit_scale),
            ..config
        }
    }

    fn over_gpt_neo(&self, config: GptNeoConfig, vocab_size: usize) -> GptNeoConfig {
        let d_model = self.d_model.unwrap_or(config.d_model);
        let expansion = self.expansion.unwrap_or(config.mlp_width / config.d_model);
        GptNeoConfig {
            vocab_size,
            d_model,
            n_heads: self.heads(d_model, (config.d_model, config.n_heads)),
            n_layers: self.n_layers.unwrap_or(config.n_layers),
            mlp_width: expansion.saturating_mul(d_model),
            max_seq_len: self.max_seq_len.unwrap_or(config.max_seq_len),
            window_size: self.window_size.unwrap_or(config.window_size),
            ..config
        }
    }
}

impl ModelSettings {
    fn over_llama(&self, config: LlamaConfig, vocab_size: usize) -> LlamaConfig {
        let d_model = self.d_model.unwrap_or(config.d_model);
        // Rotary positions turn pairs of columns.
        let like = (config.d_model, config.n_heads);
        let n_heads = self.n_heads.unwrap_or_else(|| heads_like(like, d_model, 2));
        // The preset's number of key and value heads, where it divides another width's heads as
        // evenly.
        let shared = Some(config.n_kv_heads).filter(|shared| n_heads.is_multiple_of(*shared));
        let wide = config.mlp_width.saturating_mul(d_model) / config.d_model;
        LlamaConfig {
            vocab_size,
            d_model,
            n_layers: self.n_layers.unwrap_or(config.n_layers),
            n_heads,
            n_kv_heads: self.n_kv_heads.or(shared).unwrap_or(n_heads),
            mlp_width: self.mlp_width.unwrap_or(wide),
            max_seq_len: self.max_seq_len.unwrap_or(config.max_seq_len),
            rope_theta: self.rope_theta.unwrap_or(config.rope_theta),
            window_size: self.window_size.or(config.window_size),
            qkv_bias: self.qkv_bias.unwrap_or(config.qkv_bias),
            qk_norm: self.qk_norm.unwrap_or(config.qk_norm),
            norm_eps: self.norm_eps.unwrap_or(config.norm_eps),
            head_width: self.head_width.or(config.head_width),
            ..config
        }
    }
}

impl ModelSettings {
    /// No preset is a hybrid: sizes that are not given have the defaults of the others.
    fn over_hybrid(&self, config: HybridConfig, vocab_size: usize) -> HybridConfig {
        let HybridConfig { mamba, pattern, n_heads, .. } = config;
        let HybridConfig { mamba, pattern, n_heads, expansion, llama, mamba2 } = HybridConfig::new(
            self.over_mamba(mamba, vocab_size),
            self.layer_pattern.clone().unwrap_or(pattern),
            self.n_heads.unwrap_or(n_heads),
        );
        HybridConfig {
            mamba,
            pattern,
            n_heads,
            expansion: self.expansion.unwrap_or(expansion),
            llama: LlamaSizes {
                n_kv_heads: self.n_kv_heads.unwrap_or(llama.n_kv_heads),
                head_width: self.head_width,
                mlp_width: self.mlp_width.unwrap_or(llama.mlp_width),
                rope_theta: self.rope_theta.unwrap_or(llama.rope_theta),
                window_size: self.window_size,
                qkv_bias: self.qkv_bias.unwrap_or(llama.qkv_bias),
                qk_norm: self.qk_norm.unwrap_or(llama.qk_norm),
            },
            mamba2: Mamba2Sizes {
                head_width: self.mamba2_head_width.unwrap_or(mamba2.head_width),
                n_groups: self.n_groups.unwrap_or(mamba2.n_groups),
            },
        }
    }
}

impl From<&ModelConfig> for ModelSettings {
    /// The table with every size, as a run saves it.
    fn from(config: &ModelConfig) -> Self {
        let settings = Self {
            kind: Some(config.kind()),
            vocab_size: Some(config.vocab_size()),
            d_model: Some(config.d_model()),
            n_layers: Some(config.n_layers()),
            ..Self::default()
        };
        match config {
            ModelConfig::Mamba(config) => Self {
                d_state: Some(config.d_state),
                d_conv: Some(config.d_conv),
                expand: Some(config.expand),
                dt_rank: Some(config.dt_rank),
                ..settings
            },
            ModelConfig::Mamba2(config) => Self {
                d_state: Some(config.d_state),
                d_conv: Some(config.d_conv),
                expand: Some(config.expand),
                head_width: Some(config.head_width),
                n_groups: Some(config.n_groups),
                ..settings
            },
            ModelConfig::Mpt(config) => Self {
                n_heads: Some(config.n_heads),
                expansion: Some(config.expansion),
                max_seq_len: Some(config.max_seq_len),
                alibi: Some(matches!(config.positions, MptPositions::Alibi { .. })),
                no_bias: Some(config.no_bias),
                qk_ln: Some(config.qk_ln),
                clip_qkv: config.clip_qkv,
                softmax_scale: config.softmax_scale,
                logit_scale: config.logit_scale,
                ..settings
            },
            ModelConfig::GptNeo(config) => Self {
                n_heads: Some(config.n_heads),
                expansion: Some(config.mlp_width / config.d_model),
                max_seq_len: Some(config.max_seq_len),
                window_size: Some(config.window_size),
                ..settings
            },
            ModelConfig::Llama(config) => Self {
                n_heads: Some(config.n_heads),
                n_kv_heads: Some(config.n_kv_heads),
                mlp_width: Some(config.mlp_width),
                max_seq_len: Some(config.max_seq_len),
                rope_theta: Some(config.rope_theta),
                window_size: config.window_size,
                qkv_bias: Some(config.qkv_bias),
                qk_norm: Some(config.qk_norm),
                norm_eps: Some(config.norm_eps),
                head_width: config.head_width,
                ..settings
            },
            ModelConfig::Hybrid(config) => settings.with_hybrid(config),
        }
    }
}

impl ModelSettings {
    fn with_hybrid(self, config: &HybridConfig) -> Self {
        let HybridConfig { mamba, llama, mamba2, .. } = config;
        let [m, s, a, l] = BlockKind::ALL.map(|kind| config.pattern.holds(kind));
        Self {
            layer_pattern: Some(config.pattern.clone()),
            d_state: (m || s).then_some(mamba.d_state),
            d_conv: (m || s).then_some(mamba.d_conv),
            expand: (m || s).then_some(mamba.expand),
            dt_rank: m.then_some(mamba.dt_rank),
            mamba2_head_width: s.then_some(mamba2.head_width),
            n_groups: s.then_some(mamba2.n_groups),
            n_heads: (a || l).then_some(config.n_heads),
            expansion: a.then_some(config.expansion),
            n_kv_heads: l.then_some(llama.n_kv_heads),
            head_width: llama.head_width.filter(|_| l),
            mlp_width: l.then_some(llama.mlp_width),
            rope_theta: l.then_some(llama.rope_theta),
            window_size: llama.window_size.filter(|_| l),
            qkv_bias: l.then_some(llama.qkv_bias),
            qk_norm: l.then_some(llama.qk_norm),
            ..self
        }
    }
}

/// An error about `key`, with the name that the user writes.
fn in_table(error: ModelError) -> ModelError {
    match error {
        ModelError::Config { key, expected, found } => {
            ModelError::Config { key: format!("model.{key}"), expected, found }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
