//! The tensors of a Mamba-2 block, with the names of `Mamba2ForCausalLM` in transformers, and their
//! initial values, as in the reference implementation.

use std::ops::Range;

use crate::initialization::Initializer;
use crate::layout::{Decay, Reading};
use crate::mamba2::block::Mamba2Block;
use crate::mamba2::config::Mamba2Config;
use crate::mamba2::norm;
use crate::norm::Norm;
use crate::parameter_list::{NewTensor, ParameterList};

/// The places of one block's tensors in its segment, beside its norms.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mamba2Tensors {
    /// `[e + c + h, d]`
    pub in_proj: Range<usize>,
    /// `[c, 1, k]`
    pub conv_weight: Range<usize>,
    /// `[c]`
    pub conv_bias: Option<Range<usize>>,
    /// `[h]`
    pub dt_bias: Range<usize>,
    /// `[h]`
    pub a_log: Range<usize>,
    /// `[h]`
    pub d: Range<usize>,
    /// `[d, e]`
    pub out_proj: Range<usize>,
}

impl Mamba2Block {
    /// Adds block `index` of a model with its tensors to the newest segment.
    pub fn add(parameters: &mut ParameterList, config: &Mamba2Config, index: usize) -> Self {
        let (d, e, h) = (config.d_model, config.d_inner(), config.n_heads());
        let (c, k) = (config.conv_width(), config.d_conv);
        // PyTorch's default for a linear layer or a convolution: uniform within 1 / sqrt(fan_in).
        let of_fan_in =
            |fan_in: usize| Initializer::Uniform { bound: 1.0 / (fan_in as f64).sqrt() };
        // Scaled down with depth, because every block adds its output to the same residual stream.
        let out_proj_bound = 1.0 / (e as f64).sqrt() / (config.n_layers as f64).sqrt();
        let step_sizes =
            Initializer::InverseSoftplusOfLogUniform { least: 1e-3, most: 0.1, floor: 1e-4 };
        let one = Initializer::Constant(1.0);
        let name = format!("backbone.layers.{index}");
        let block_norm = Norm::add(parameters, norm(format!("{name}.norm"), d, config));
        let matrix = (Decay::Decayed, Reading::Activation);
        let taps = (Decay::Decayed, Reading::Fp32);
        let vector = (Decay::Exempt, Reading::Fp32);
        let mut add = |tensor: &str, shape: &[usize], (decay, reading), initializer| {
            let name = format!("{name}.mixer.{tensor}");
            parameters.tensor(NewTensor { name, shape, decay, reading, initializer })
        };
        let in_proj = add("in_proj.weight", &[config.projected_width(), d], matrix, of_fan_in(d));
        let conv_weight = add("conv1d.weight", &[c, 1, k], taps, of_fan_in(k));
        let conv_bias = config.conv_bias.then(|| add("conv1d.bias", &[c], vector, of_fan_in(k)));
        let decays = Initializer::LogOfUniform { least: 1.0, most: 16.0 };
        let dt_bias = add("dt_bias", &[h], vector, step_sizes);
        let a_log = add("A_log", &[h], vector, decays);
        let skip = add("D", &[h], vector, one);
        let out_bound = Initializer::Uniform { bound: out_proj_bound };
        let out_proj = add("out_proj.weight", &[d, e], matrix, out_bound);
        let gated_norm = Norm::add(parameters, norm(format!("{name}.mixer.norm"), e, config));
        let tensors =
            Mamba2Tensors { in_proj, conv_weight, conv_bias, dt_bias, a_log, d: skip, out_proj };
        Self::new(config, [block_norm, gated_norm], tensors)
    }
}
