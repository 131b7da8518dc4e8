//! MPT (MosaicML, 2023) as a list of blocks, as LLM Foundry defines it.
//!
//! Initial values are Foundry's defaults too: every linear map and table normal with a standard
//! deviation of `sqrt(2 / fan_in)` (He et al., 2015); maps that end in the residual stream have
//! this divided by `sqrt(2 blocks)`.

pub mod config;
mod hugging_face;

pub use config::{LogitScale, MptConfig, MptPositions};
use tidemill_kernels::Backend;
use tidemill_kernels::backend::Gelu;

use crate::error::Result;
use crate::family::{Family, family_sizes, head_width};
use crate::language_model::{LanguageModel, NewPositions, Stem};
use crate::linear::{Linear, NewLinear};
use crate::norm::{NewNorm, Norm, NormKind};
use crate::parameter_list::{Bias, ParameterList};
use crate::transformer::{
    Activation, Attention, Mlp, QueryKeyNorms, TransformerBlock, alibi_slopes,
};

impl Family for MptConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let width = self.d_model as f64;
        let learned = NewPositions { name: "transformer.wpe.weight", count: self.max_seq_len };
        let stem = Stem {
            vocab_size: self.vocab_size,
            width: self.d_model,
            embedding_name: "transformer.wte.weight",
            positions: (self.positions == MptPositions::Learned).then_some(learned),
            norm: norm("transformer.norm_f".to_owned(), self),
            head_name: (!self.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: (2.0 / width).sqrt(),
            logit_scale: match self.logit_scale {
                None => 1.0,
                Some(LogitScale::Number(scale)) => scale as f32,
                Some(LogitScale::InverseRootOfWidth) => width.sqrt().recip() as f32,
            },
        };
        let head_width = head_width(self.d_model, self.n_heads)?;
        Ok(LanguageModel::assemble(stem, self.n_layers, self.to_json(), |parameters, index| {
            Box::new(add_block(parameters, self, head_width, index))
        }))
    }

    family_sizes!();
}

/// A norm with the settings that all norms of the model share.
fn norm(name: String, config: &MptConfig) -> NewNorm {
    NewNorm {
        name,
        kind: NormKind::Layer,
        bias: config.bias(),
        width: config.d_model,
        eps: config.norm_eps as f32,
    }
}

/// Adds block `index` with its tensors.
fn add_block(
    parameters: &mut ParameterList,
    config: &MptConfig,
    head_width: usize,
    index: usize,
) -> TransformerBlock {
    let (d, f) = (config.d_model, config.expansion * config.d_model);
    let name = |tensor: &str| format!("transformer.blocks.{index}.{tensor}");
    let map = |name, inputs: usize, outputs, residual: f64| NewLinear {
        name,
        inputs,
        outputs,
        bias: config.bias(),
        standard_deviation: (2.0 / inputs as f64).sqrt() / residual,
    };
    let residual = (2.0 * config.n_layers as f64).sqrt();
    let norm_1 = Norm::add(parameters, norm(name("norm_1"), config));
    let projection = Linear::add(parameters, map(name("attn.Wqkv"), d, 3 * d, 1.0));
    let query_key_norms = config.qk_ln.then(|| QueryKeyNorms {
        query: Norm::add(parameters, norm(name("attn.q_ln"), config)),
        key: Norm::add(parameters, norm(name("attn.k_ln"), config)),
    });
    let slopes = match config.positions {
        MptPositions::Alibi { most } => Some(alibi_slopes(config.n_heads, most)),
        MptPositions::Learned | MptPositions::None => None,
    };
    let scale = config.softmax_scale.unwrap_or((head_width as f64).sqrt().recip());
    TransformerBlock {
        norm_1,
        projections: vec![projection],
        attention: Attention {
            heads: config.n_heads,
            head_width,
            rotary: None,
            scale: scale as f32,
            window: None,
            slopes,
            clip: config.clip_qkv.map(|clip| clip as f32),
        },
        query_key_norms,
        out_proj: Linear::add(parameters, map(name("attn.out_proj"), d, d, residual)),
        norm_2: Norm::add(parameters, norm(name("norm_2"), config)),
        mlp: Mlp {
            up_proj: Linear::add(parameters, map(name("ffn.up_proj"), d, f, 1.0)),
            activation: Activation::Gelu(Gelu::Erf),
            down_proj: Linear::add(parameters, map(name("ffn.down_proj"), f, d, residual)),
        },
    }
}

impl MptConfig {
    fn bias(&self) -> Bias {
        Bias::when(!self.no_bias)
    }
}
