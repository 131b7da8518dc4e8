//! Llama (Touvron et al., 2023) and its relatives as a list of blocks, as transformers defines them: rotary positions, grouped-query
//! attention, an MLP with a gate, norms by the root mean square. Mistral differs by a window, Qwen2 by biases of queries, keys and values,
//! Qwen3 by norms of each head of queries and of keys.
//!
//! Initial values are transformers' too: every linear map and table normal with a standard deviation of 0.02.

pub mod config;
mod hugging_face;

use std::num::NonZeroUsize;

pub use config::LlamaConfig;
use tidemill_kernels::Backend;

use crate::error::Result;
use crate::family::{Family, family_sizes};
use crate::language_model::{LanguageModel, Stem};
use crate::linear::{Linear, NewLinear};
use crate::norm::{NewNorm, Norm, NormKind};
use crate::parameter_list::{Bias, ParameterList};
use crate::transformer::{Activation, Attention, Mlp, QueryKeyNorms, Rotary, TransformerBlock};

/// The standard deviation of initial values.
const STANDARD_DEVIATION: f64 = 0.02;

impl Family for LlamaConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let stem = Stem {
            vocab_size: self.vocab_size,
            width: self.d_model,
            embedding_name: "model.embed_tokens.weight",
            positions: None,
            norm: norm("model.norm".to_owned(), self, self.d_model),
            head_name: (!self.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: STANDARD_DEVIATION,
            logit_scale: 1.0,
        };
        let head_width = self.head_columns()?;
        Ok(LanguageModel::assemble(stem, self.n_layers, self.to_json(), |parameters, index| {
            let block = format!("model.layers.{index}");
            Box::new(add_block(parameters, self, head_width, &block))
        }))
    }

    family_sizes!();
}

/// A norm of `width` elements, with the settings that all norms of the model share.
fn norm(name: String, config: &LlamaConfig, width: usize) -> NewNorm {
    NewNorm {
        name,
        kind: NormKind::RootMeanSquare,
        bias: Bias::Absent,
        width,
        eps: config.norm_eps as f32,
    }
}

/// Adds a block with its tensors, whose names begin with `block`.
pub(crate) fn add_block(
    parameters: &mut ParameterList,
    config: &LlamaConfig,
    head_width: usize,
    block: &str,
) -> TransformerBlock {
    let (d, f) = (config.d_model, config.mlp_width);
    let name = |tensor: &str| format!("{block}.{tensor}");
    let map = |tensor, inputs, outputs, bias| NewLinear {
        name: name(tensor),
        inputs,
        outputs,
        bias,
        standard_deviation: STANDARD_DEVIATION,
    };
    let (width, shared) = (config.n_heads * head_width, config.n_kv_heads * head_width);
    let bias = Bias::when(config.qkv_bias);
    let norm_1 = Norm::add(parameters, norm(name("input_layernorm"), config, d));
    let projections =
        [("self_attn.q_proj", width), ("self_attn.k_proj", shared), ("self_attn.v_proj", shared)];
    let projections =
        projections.map(|(tensor, outputs)| Linear::add(parameters, map(tensor, d, outputs, bias)));
    let out_proj = Linear::add(parameters, map("self_attn.o_proj", width, d, Bias::Absent));
    let query_key_norms = config.qk_norm.then(|| QueryKeyNorms {
        query: Norm::add(parameters, norm(name("self_attn.q_norm"), config, head_width)),
        key: Norm::add(parameters, norm(name("self_attn.k_norm"), config, head_width)),
    });
    let norm_2 = Norm::add(parameters, norm(name("post_attention_layernorm"), config, d));
    let gate_proj = Linear::add(parameters, map("mlp.gate_proj", d, f, Bias::Absent));
    TransformerBlock {
        norm_1,
        projections: projections.into(),
        attention: Attention {
            heads: config.n_heads,
            head_width,
            rotary: Some(Rotary {
                key_value_heads: config.n_kv_heads,
                theta: config.rope_theta,
                scaling: config.rope_scaling,
            }),
            scale: (head_width as f64).sqrt().recip() as f32,
            window: config.window_size.and_then(NonZeroUsize::new),
            slopes: None,
            clip: None,
        },
        query_key_norms,
        out_proj,
        norm_2,
        mlp: Mlp {
            up_proj: Linear::add(parameters, map("mlp.up_proj", d, f, Bias::Absent)),
            activation: Activation::GatedSilu { gate_proj },
            down_proj: Linear::add(parameters, map("mlp.down_proj", f, d, Bias::Absent)),
        },
    }
}
