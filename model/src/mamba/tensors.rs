//! The tensors of a Mamba block, with the names of `MambaForCausalLM` in transformers, and their
//! initial values, as in the reference implementation.

use std::ops::Range;

use crate::initialization::Initializer;
use crate::layout::{Decay, Reading};
use crate::mamba::block::MambaBlock;
use crate::mamba::config::MambaConfig;
use crate::mamba::norm;
use crate::norm::Norm;
use crate::parameter_list::{NewTensor, ParameterList};

/// The places of one block's tensors in its segment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MambaTensors {
    /// `[2 e, d]`
    pub in_proj: Range<usize>,
    /// `[e, 1, k]`
    pub conv_weight: Range<usize>,
    /// `[e]`
    pub conv_bias: Option<Range<usize>>,
    /// `[r + 2 n, e]`
    pub x_proj: Range<usize>,
    /// `[e, r]`
    pub dt_proj: Range<usize>,
    /// `[e]`
    pub dt_bias: Range<usize>,
    /// `[e, n]`
    pub a_log: Range<usize>,
    /// `[e]`
    pub d: Range<usize>,
    /// `[d, e]`
    pub out_proj: Range<usize>,
}

impl MambaBlock {
    /// Adds block `index` of a model with its tensors to the newest segment.
    pub fn add(parameters: &mut ParameterList, config: &MambaConfig, index: usize) -> Self {
        let (d, e, n) = (config.d_model, config.d_inner(), config.d_state);
        let (r, k) = (config.dt_rank, config.d_conv);
        // PyTorch's default for a linear layer or a convolution: uniform within 1 / sqrt(fan_in).
        let of_fan_in =
            |fan_in: usize| Initializer::Uniform { bound: 1.0 / (fan_in as f64).sqrt() };
        // Scaled down with depth, because every block adds its output to the same residual stream.
        let out_proj_bound = 1.0 / (e as f64).sqrt() / (config.n_layers as f64).sqrt();
        let step_sizes =
            Initializer::InverseSoftplusOfLogUniform { least: 1e-3, most: 0.1, floor: 1e-4 };
        let one = Initializer::Constant(1.0);
        let norm = Norm::add(parameters, norm(&format!("backbone.layers.{index}.norm"), config));
        let matrix = (Decay::Decayed, Reading::Activation);
        let taps = (Decay::Decayed, Reading::Fp32);
        let vector = (Decay::Exempt, Reading::Fp32);
        let mut add = |name: &str, shape: &[usize], (decay, reading), initializer| {
            let name = format!("backbone.layers.{index}.{name}");
            parameters.tensor(NewTensor { name, shape, decay, reading, initializer })
        };
        let tensors = MambaTensors {
            in_proj: add("mixer.in_proj.weight", &[2 * e, d], matrix, of_fan_in(d)),
            conv_weight: add("mixer.conv1d.weight", &[e, 1, k], taps, of_fan_in(k)),
            conv_bias: config
                .conv_bias
                .then(|| add("mixer.conv1d.bias", &[e], vector, of_fan_in(k))),
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
        Self::new(config, norm, tensors)
    }
}
