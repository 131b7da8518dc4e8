//! Mamba-2 (Dao and Gu, 2024) as a list of blocks: embedding, Mamba-2 blocks, norm and head.
//!
//! Tensors have the names and shapes of `Mamba2ForCausalLM` in Hugging Face files, and the norm
//! behind the gate is over all heads, as in that class; initial values are those of the reference
//! implementation, `mamba2.py` of state-spaces.

mod backward;
pub mod block;
pub mod config;
mod forward;
pub mod generation;
mod hugging_face;
mod tensors;

pub use block::Mamba2Block;
pub use config::Mamba2Config;
use tidemill_kernels::Backend;

use crate::error::Result;
use crate::family::{Family, family_sizes};
use crate::language_model::{LanguageModel, Stem};
use crate::norm::{NewNorm, NormKind};
use crate::parameter_list::Bias;

impl Family for Mamba2Config {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let stem = Stem {
            vocab_size: self.vocab_size,
            width: self.d_model,
            embedding_name: "backbone.embeddings.weight",
            positions: None,
            norm: norm("backbone.norm_f".to_owned(), self.d_model, self),
            head_name: (!self.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: 0.02,
            logit_scale: 1.0,
        };
        Ok(LanguageModel::assemble(stem, self.n_layers, self.to_json(), |parameters, index| {
            Box::new(Mamba2Block::add(parameters, self, index))
        }))
    }

    family_sizes!();
}

/// A norm of `width` columns, with the settings that all norms of the model share.
fn norm(name: String, width: usize, config: &Mamba2Config) -> NewNorm {
    NewNorm {
        name,
        kind: NormKind::RootMeanSquare,
        bias: Bias::Absent,
        width,
        eps: config.norm_eps as f32,
    }
}
