//! Mamba (Gu and Dao, 2023) as a list of blocks: embedding, Mamba blocks, norm and head.
//!
//! Tensors have the names and shapes of `MambaForCausalLM` in Hugging Face files; initial values are those of the
//! reference implementation, `mamba_simple.py` of state-spaces.

mod backward;
pub mod block;
pub mod config;
mod forward;

pub use block::MambaBlock;
pub use config::MambaConfig;

use crate::error::{ModelError, Result};
use crate::family::{Family, Model, family_sizes};
use crate::initialization::Initializer;
use crate::language_model::Stem;
use crate::layer_block::LayerBlock;
use crate::layout::{Decay, Reading};
use crate::mamba::block::MambaTensors;
use crate::norm::{NewNorm, Norm, NormKind};
use crate::parameter_list::{Bias, NewTensor, ParameterList};

/// A Mamba language model.
pub type Mamba = Model;

impl Family for MambaConfig {
    fn build(&self) -> Result<Model> {
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
        Ok(Model::assemble(stem, self.n_layers, config_json, |parameters, layer| {
            LayerBlock::Mamba(Box::new(add_block(parameters, self, layer)))
        }))
    }

    family_sizes!();
}

/// A norm as all of the model's.
pub(crate) fn norm(name: &str, config: &MambaConfig) -> NewNorm {
    NewNorm {
        name: name.to_owned(),
        kind: NormKind::RootMeanSquare,
        bias: Bias::Absent,
        width: config.d_model,
        eps: config.norm_eps as f32,
    }
}

/// Adds block `layer` with its tensors.
pub(crate) fn add_block(
    parameters: &mut ParameterList,
    config: &MambaConfig,
    layer: usize,
) -> MambaBlock {
    let (d, e, n) = (config.d_model, config.d_inner(), config.d_state);
    let (r, k) = (config.dt_rank, config.d_conv);
    // PyTorch's default for a linear layer or a convolution: uniform within 1 / sqrt(fan_in).
    let of_fan_in = |fan_in: usize| Initializer::Uniform { bound: 1.0 / (fan_in as f64).sqrt() };
    // Scaled down with depth, because every block adds its output to the same residual stream.
    let out_proj_bound = 1.0 / (e as f64).sqrt() / (config.n_layers as f64).sqrt();
    let step_sizes =
        Initializer::InverseSoftplusOfLogUniform { least: 1e-3, most: 0.1, floor: 1e-4 };
    let one = Initializer::Constant(1.0);
    let norm = Norm::add(parameters, norm(&format!("backbone.layers.{layer}.norm"), config));
    let matrix = (Decay::Decayed, Reading::Activation);
    let taps = (Decay::Decayed, Reading::Fp32);
    let vector = (Decay::Exempt, Reading::Fp32);
    let mut add = |name: &str, shape: &[usize], (decay, reading), initializer| {
        let name = format!("backbone.layers.{layer}.{name}");
        parameters.tensor(NewTensor { name, shape, decay, reading, initializer })
    };
    let tensors = MambaTensors {
        in_proj: add("mixer.in_proj.weight", &[2 * e, d], matrix, of_fan_in(d)),
        conv_weight: add("mixer.conv1d.weight", &[e, 1, k], taps, of_fan_in(k)),
        conv_bias: config.conv_bias.then(|| add("mixer.conv1d.bias", &[e], vector, of_fan_in(k))),
        x_proj: add("mixer.x_proj.weight", &[r + 2 * n, e], matrix, of_fan_in(e)),
        dt_proj: add("mixer.dt_proj.weight", &[e, r], matrix, of_fan_in(r)),
        dt_bias: add("mixer.dt_proj.bias", &[e], vector, step_sizes),
        a_log: add("mixer.A_log", &[e, n], vector, Initializer::LogOfColumn),
        d: add("mixer.D", &[e], vector, one),
        out_proj: add(
            "mixer.out_proj.weight",
            &[d, e],
            matrix,
            Initializer::Uniform { bound: out_proj_bound },
        ),
    };
    MambaBlock::new(config, norm, tensors)
}
