//! GPT-Neo (Black et al., 2021) as a list of blocks, as transformers defines it: scores without a
//! scale, blocks that alternate between full and windowed attention, biases everywhere but in the
//! projections of queries, keys and values.
//!
//! Initial values are transformers' too: every linear map and table normal with a standard deviation of 0.02.

pub mod config;

use std::num::NonZeroUsize;

pub use config::{GptNeoConfig, Reach};
use tidemill_kernels::Backend;
use tidemill_kernels::backend::Gelu;

use crate::error::Result;
use crate::family::{Family, family_sizes, head_width};
use crate::language_model::{LanguageModel, NewPositions, Stem};
use crate::linear::{Linear, NewLinear};
use crate::norm::{NewNorm, Norm, NormKind};
use crate::parameter_list::{Bias, ParameterList};
use crate::transformer::{Activation, Attention, Mlp, TransformerBlock};

/// The standard deviation of initial values.
const STANDARD_DEVIATION: f64 = 0.02;

impl Family for GptNeoConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let positions = NewPositions { name: "transformer.wpe.weight", count: self.max_seq_len };
        let stem = Stem {
            vocab_size: self.vocab_size,
            width: self.d_model,
            embedding_name: "transformer.wte.weight",
            positions: Some(positions),
            norm: norm("transformer.ln_f".to_owned(), self),
            head_name: (!self.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: STANDARD_DEVIATION,
            logit_scale: 1.0,
        };
        let head_width = head_width(self.d_model, self.n_heads)?;
        Ok(LanguageModel::assemble(stem, self.n_layers, self.to_json(), |parameters, index| {
            Box::new(add_block(parameters, self, head_width, index))
        }))
    }

    family_sizes!();
}

/// A norm with the settings that all norms of the model share.
fn norm(name: String, config: &GptNeoConfig) -> NewNorm {
    NewNorm {
        name,
        kind: NormKind::Layer,
        bias: Bias::Present,
        width: config.d_model,
        eps: config.norm_eps as f32,
    }
}

/// Adds block `index` with its tensors.
fn add_block(
    parameters: &mut ParameterList,
    config: &GptNeoConfig,
    head_width: usize,
    index: usize,
) -> TransformerBlock {
    let d = config.d_model;
    let name = |tensor: &str| format!("transformer.h.{index}.{tensor}");
    let map = |name, inputs, outputs, bias| NewLinear {
        name,
        inputs,
        outputs,
        bias,
        standard_deviation: STANDARD_DEVIATION,
    };
    let norm_1 = Norm::add(parameters, norm(name("ln_1"), config));
    let projections = ["q_proj", "k_proj", "v_proj"].map(|projection| {
        let name = name(&format!("attn.attention.{projection}"));
        Linear::add(parameters, map(name, d, d, Bias::Absent))
    });
    let window = match config.reach(index) {
        Reach::Global => None,
        Reach::Local => NonZeroUsize::new(config.window_size),
    };
    let f = config.mlp_width;
    let out_proj = map(name("attn.attention.out_proj"), d, d, Bias::Present);
    TransformerBlock {
        norm_1,
        projections: projections.into(),
        attention: Attention {
            heads: config.n_heads,
            head_width,
            rotary: None,
            scale: 1.0,
            window,
            slopes: None,
            clip: None,
        },
        query_key_norms: None,
        out_proj: Linear::add(parameters, out_proj),
        norm_2: Norm::add(parameters, norm(name("ln_2"), config)),
        mlp: Mlp {
            up_proj: Linear::add(parameters, map(name("mlp.c_fc"), d, f, Bias::Present)),
            activation: Activation::Gelu(Gelu::Tanh),
            down_proj: Linear::add(parameters, map(name("mlp.c_proj"), f, d, Bias::Present)),
        },
    }
}
