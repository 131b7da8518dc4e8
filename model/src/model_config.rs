//! A config of any [family](Family) of models, as a folder or a `[model]` table names it.
//!
//! To add a family to those that a `[model]` table and a folder can name (a model of one's own blocks needs none: it is assembled by
//! [`LanguageModel::assemble`]):
//!
//! 1. One file lists its blocks: a config with its sizes, the `config.json` that it reads (`parse`) and writes (`to_json`),
//!    and its `check`; [`Family::build`] names the tensors and gives block after block to [`LanguageModel::assemble`].
//!    [`gpt_neo`](crate::gpt_neo) is the shortest to follow.
//! 2. Here, a variant of [`ModelConfig`] and a [`ModelKind`], which the compiler then asks for in every match; its `model_type`
//!    in [`ModelConfig::parse`], whose last arm names them all.
//! 3. In [`settings`](crate::settings), what a table lays over its sizes and the table that a run writes down; in
//!    `settings/keys.rs`, its name and its keys. A key that no family has yet is a field of
//!    [`ModelSettings`](crate::ModelSettings) and a row of `given`.
//! 4. In [`preset`](crate::preset), the sizes that have a name, if any.
//! 5. In the tests, a model of odd sizes among `model/tests/bodies/families.rs`, which then goes through every body, and a
//!    table among `tests/families.rs`, which then trains, resumes and is elastic to the bit.
//!
//! A new kind of block is a folder of its own first: see [`block`](mod@crate::block).

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tidemill_kernels::Backend;

use crate::error::Result;
use crate::family::{Family, SpecialTokens};
use crate::gpt_neo::GptNeoConfig;
use crate::hugging_face::keys::Keys;
use crate::hugging_face::{CONFIG_FILE, read_json};
use crate::hybrid::HybridConfig;
use crate::language_model::LanguageModel;
use crate::llama::LlamaConfig;
use crate::mamba::MambaConfig;
use crate::mamba2::Mamba2Config;
use crate::mpt::{MptConfig, MptPositions};

/// The config of a model of any family.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ModelConfig {
    /// A Mamba model.
    Mamba(MambaConfig),
    /// A Mamba-2 model.
    Mamba2(Mamba2Config),
    /// An MPT model.
    Mpt(MptConfig),
    /// A GPT-Neo model.
    GptNeo(GptNeoConfig),
    /// A Llama, Mistral, Qwen2 or Qwen3 model.
    Llama(LlamaConfig),
    /// A hybrid of blocks of several families.
    Hybrid(HybridConfig),
}

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// Mamba (Gu and Dao, 2023).
    Mamba,
    /// Mamba-2 (Dao and Gu, 2024).
    Mamba2,
    /// MPT (MosaicML, 2023).
    Mpt,
    /// GPT-Neo (Black et al., 2021).
    GptNeo,
    /// Llama (Touvron et al., 2023), Mistral, Qwen2 and Qwen3.
    Llama,
    /// Blocks of several families in one list.
    Hybrid,
}

impl ModelConfig {
    /// The config in `folder`.
    ///
    /// # Errors
    /// A file that cannot be read, or that is no config of a model this crate can run.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let value = read_json(&path)?;
        Self::parse(&path, &value)
    }

    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value of a wrong type or size, an unknown kind of model, or a feature that this crate cannot run: each named
    /// with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        match value.get("model_type").and_then(Value::as_str) {
            Some("mpt") => MptConfig::parse(path, value).map(Self::Mpt),
            Some("gpt_neo") => GptNeoConfig::parse(path, value).map(Self::GptNeo),
            Some("llama" | "mistral" | "qwen2" | "qwen3") => {
                LlamaConfig::parse(path, value).map(Self::Llama)
            }
            Some("tidemill_hybrid") => HybridConfig::parse(path, value).map(Self::Hybrid),
            Some("mamba") => MambaConfig::parse(path, value).map(Self::Mamba),
            Some("mamba2") => Mamba2Config::parse(path, value).map(Self::Mamba2),
            // The original form of Mamba and Mamba-2 has no `model_type`.
            None if !keys.has("model_type") && keys.has("n_layer") && is_mamba2(value) => {
                Mamba2Config::parse(path, value).map(Self::Mamba2)
            }
            None if !keys.has("model_type") && keys.has("n_layer") => {
                MambaConfig::parse(path, value).map(Self::Mamba)
            }
            _ => {
                let expected = "\"mamba\", \"mamba2\", \"mpt\", \"gpt_neo\", \"llama\", \"mistral\", \"qwen2\", \
                                \"qwen3\" or \"tidemill_hybrid\"";
                Err(keys.wrong("model_type", expected))
            }
        }
    }

    /// The family.
    pub fn kind(&self) -> ModelKind {
        match self {
            Self::Mamba(_) => ModelKind::Mamba,
            Self::Mamba2(_) => ModelKind::Mamba2,
            Self::Mpt(_) => ModelKind::Mpt,
            Self::GptNeo(_) => ModelKind::GptNeo,
            Self::Llama(_) => ModelKind::Llama,
            Self::Hybrid(_) => ModelKind::Hybrid,
        }
    }

    /// The number of learned positions, where the model has them: no sample may be longer.
    pub fn learned_positions(&self) -> Option<usize> {
        match self {
            Self::Mpt(config) if config.positions == MptPositions::Learned => {
                Some(config.max_seq_len)
            }
            Self::GptNeo(config) => Some(config.max_seq_len),
            Self::Mamba(_) | Self::Mamba2(_) | Self::Mpt(_) | Self::Llama(_) | Self::Hybrid(_) => {
                None
            }
        }
    }

    /// Gives a model that learns its positions at least `positions` of them.
    pub fn extend_positions(&mut self, positions: usize) {
        let max_seq_len = match self {
            Self::Mpt(config) if config.positions == MptPositions::Learned => {
                &mut config.max_seq_len
            }
            Self::GptNeo(config) => &mut config.max_seq_len,
            Self::Mamba(_) | Self::Mamba2(_) | Self::Mpt(_) | Self::Llama(_) | Self::Hybrid(_) => {
                return;
            }
        };
        *max_seq_len = positions.max(*max_seq_len);
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`](crate::ModelError::Config) naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Mamba(config) => config.check(),
            Self::Mamba2(config) => config.check(),
            Self::Mpt(config) => config.check(),
            Self::GptNeo(config) => config.check(),
            Self::Llama(config) => config.check(),
            Self::Hybrid(config) => config.check(),
        }
    }

    fn family(&self) -> &dyn Family {
        match self {
            Self::Mamba(config) => config,
            Self::Mamba2(config) => config,
            Self::Mpt(config) => config,
            Self::GptNeo(config) => config,
            Self::Llama(config) => config,
            Self::Hybrid(config) => config,
        }
    }
}

impl Family for ModelConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        match self {
            Self::Mamba(config) => config.build(),
            Self::Mamba2(config) => config.build(),
            Self::Mpt(config) => config.build(),
            Self::GptNeo(config) => config.build(),
            Self::Llama(config) => config.build(),
            Self::Hybrid(config) => config.build(),
        }
    }

    fn vocab_size(&self) -> usize {
        self.family().vocab_size()
    }

    fn d_model(&self) -> usize {
        self.family().d_model()
    }

    fn n_layers(&self) -> usize {
        self.family().n_layers()
    }

    fn special_tokens(&self) -> SpecialTokens {
        self.family().special_tokens()
    }

    fn special_tokens_mut(&mut self) -> &mut SpecialTokens {
        match self {
            Self::Mamba(config) => config.special_tokens_mut(),
            Self::Mamba2(config) => config.special_tokens_mut(),
            Self::Mpt(config) => config.special_tokens_mut(),
            Self::GptNeo(config) => config.special_tokens_mut(),
            Self::Llama(config) => config.special_tokens_mut(),
            Self::Hybrid(config) => config.special_tokens_mut(),
        }
    }
}

impl From<MambaConfig> for ModelConfig {
    fn from(config: MambaConfig) -> Self {
        Self::Mamba(config)
    }
}

impl From<Mamba2Config> for ModelConfig {
    fn from(config: Mamba2Config) -> Self {
        Self::Mamba2(config)
    }
}

impl From<MptConfig> for ModelConfig {
    fn from(config: MptConfig) -> Self {
        Self::Mpt(config)
    }
}

impl From<GptNeoConfig> for ModelConfig {
    fn from(config: GptNeoConfig) -> Self {
        Self::GptNeo(config)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> Self {
        Self::Llama(config)
    }
}

impl From<HybridConfig> for ModelConfig {
    fn from(config: HybridConfig) -> Self {
        Self::Hybrid(config)
    }
}

/// Whether the original form of a config is one of Mamba-2.
fn is_mamba2(value: &Value) -> bool {
    value["ssm_cfg"]["layer"].as_str() == Some("Mamba2")
}
