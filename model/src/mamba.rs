//! Mamba (Gu and Dao, 2023) as a list of blocks: embedding, Mamba blocks, norm and head.
//!
//! Tensors have the names and shapes of `MambaForCausalLM` in Hugging Face files; initial values are those of the
//! reference implementation, `mamba_simple.py` of state-spaces.

pub(crate) mod backward;
pub mod block;
pub mod config;
mod forward;
pub mod generation;
mod tensors;

pub use block::MambaBlock;
pub use config::MambaConfig;
use tidemill_kernels::Backend;

use crate::error::{ModelError, Result};
use crate::family::{Family, family_sizes};
use crate::language_model::{LanguageModel, Stem};
use crate::norm::{NewNorm, NormKind};
use crate::parameter_list::Bias;

impl Family for MambaConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let stem = Stem {
            vocab_size: self.vocab_size,
            width: self.d_model,
            embedding_name: "backbone.embeddings.weight",
            positions: None,
            norm: norm("backbone.norm_f", self),
            head_name: (!self.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: 0.02,
            logit_scale: 1.0,
        };
        let config_json = serde_json::to_value(self.to_hugging_face()).map_err(|error| {
            ModelError::config("config.json", "numbers that JSON can hold", error)
        })?;
        Ok(LanguageModel::assemble(stem, self.n_layers, config_json, |parameters, index| {
            Box::new(MambaBlock::add(parameters, self, index))
        }))
    }

    family_sizes!();
}

/// A norm with the settings that all norms of the model share.
pub(crate) fn norm(name: &str, config: &MambaConfig) -> NewNorm {
    NewNorm {
        name: name.to_owned(),
        kind: NormKind::RootMeanSquare,
        bias: Bias::Absent,
        width: config.d_model,
        eps: config.norm_eps as f32,
    }
}
