//! Hybrids: blocks of every kind in one list, in the order of a pattern of letters.
//!
//! Mamba blocks, Mamba-2 blocks and Llama blocks are those of [`mamba`](mod@crate::mamba),
//! [`mamba2`](crate::mamba2) and [`llama`]. Attention blocks have norms by the root
//! mean square, no biases, an MLP with GELU, and no positional encoding: the other blocks between
//! them carry the positions, as in Jamba (Lieber et al., 2024).

pub mod config;
pub mod pattern;

pub use config::{HybridConfig, LlamaSizes, Mamba2Sizes};
pub use pattern::{BlockKind, BlockPattern};
use tidemill_kernels::Backend;
use tidemill_kernels::backend::Gelu;

use crate::error::Result;
use crate::family::{Family, family_sizes, head_width};
use crate::language_model::{LanguageModel, Stem};
use crate::linear::{Linear, NewLinear};
use crate::llama;
use crate::mamba::{self, MambaBlock};
use crate::mamba2::Mamba2Block;
use crate::norm::Norm;
use crate::parameter_list::{Bias, ParameterList};
use crate::transformer::{Activation, Attention, Mlp, TransformerBlock};

/// The standard deviation of initial values of attention blocks.
const STANDARD_DEVIATION: f64 = 0.02;

impl Family for HybridConfig {
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        self.check()?;
        let stem = Stem {
            vocab_size: self.mamba.vocab_size,
            width: self.mamba.d_model,
            embedding_name: "backbone.embeddings.weight",
            positions: None,
            norm: mamba::norm("backbone.norm_f", &self.mamba),
            head_name: (!self.mamba.tie_embeddings).then_some("lm_head.weight"),
            standard_deviation: STANDARD_DEVIATION,
            logit_scale: 1.0,
        };
        let (llama, mamba2) = (self.llama_config(), self.mamba2_config());
        // A kind that the pattern does not hold has unchecked sizes, and its width is never read.
        let width =
            |kind, width: Result<usize>| if self.pattern.holds(kind) { width } else { Ok(0) };
        let of_attention =
            width(BlockKind::Attention, head_width(self.mamba.d_model, self.n_heads))?;
        let of_llama = width(BlockKind::Llama, llama.head_columns())?;
        let count = self.mamba.n_layers;
        Ok(LanguageModel::assemble(stem, count, self.to_json(), |parameters, index| {
            let name = format!("backbone.layers.{index}");
            match self.pattern.kind(index) {
                BlockKind::Mamba => Box::new(MambaBlock::add(parameters, &self.mamba, index)),
                BlockKind::Mamba2 => Box::new(Mamba2Block::add(parameters, &mamba2, index)),
                BlockKind::Attention => {
                    Box::new(add_attention(parameters, self, of_attention, &name))
                }
                BlockKind::Llama => Box::new(llama::add_block(parameters, &llama, of_llama, &name)),
            }
        }))
    }

    family_sizes!(mamba);
}

/// Adds an attention block with its tensors, whose names begin with `block`.
fn add_attention(
    parameters: &mut ParameterList,
    config: &HybridConfig,
    head_width: usize,
    block: &str,
) -> TransformerBlock {
    let d = config.mamba.d_model;
    let f = config.expansion * d;
    let name = |tensor: &str| format!("{block}.{tensor}");
    let norm = |tensor| mamba::norm(&name(tensor), &config.mamba);
    let map = |tensor, inputs, outputs, residual: f64| NewLinear {
        name: name(tensor),
        inputs,
        outputs,
        bias: Bias::Absent,
        standard_deviation: STANDARD_DEVIATION / residual,
    };
    // Scaled down with depth, because every block adds its outputs to the same residual stream.
    let residual = (2.0 * config.mamba.n_layers as f64).sqrt();
    TransformerBlock {
        norm_1: Norm::add(parameters, norm("norm_1")),
        projections: vec![Linear::add(parameters, map("attn.Wqkv", d, 3 * d, 1.0))],
        attention: Attention {
            heads: config.n_heads,
            head_width,
            rotary: None,
            scale: (head_width as f64).sqrt().recip() as f32,
            window: None,
            slopes: None,
            clip: None,
        },
        query_key_norms: None,
        out_proj: Linear::add(parameters, map("attn.out_proj", d, d, residual)),
        norm_2: Norm::add(parameters, norm("norm_2")),
        mlp: Mlp {
            up_proj: Linear::add(parameters, map("ffn.up_proj", d, f, 1.0)),
            activation: Activation::Gelu(Gelu::Erf),
            down_proj: Linear::add(parameters, map("ffn.down_proj", f, d, residual)),
        },
    }
}
