//! The MLP of a transformer block: up, through an activation function, and down.
//!
//! ```text
//! Gelu:       out = gelu(input up_proj^T + bias) down_proj^T + bias
//! GatedSilu:  out = (silu(input gate_proj^T) (input up_proj^T)) down_proj^T        SwiGLU (Shazeer, 2020)
//! ```
//!
//! Forward is [`Mlp::project`], [`Mlp::activate`] and a forward pass of [`Mlp::down_proj`]; it keeps
//! the input of the activation function, `up`. Backward is [`Mlp::backward_down`], which recomputes
//! the function, and [`Mlp::backward_up`].

use tidemill_kernels::backend::{Gelu, GeluGradients, KernelGroup, Output};
use tidemill_kernels::{Backend, Matrix, MatrixMut, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::linear::{Linear, Products};
use crate::trainable::Device;
use crate::transformer::query_key_value::Rows;

/// An MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// From d to f.
    pub up_proj: Linear,
    /// The activation function between the two.
    pub activation: Activation,
    /// From f to the residual stream.
    pub down_proj: Linear,
}

/// The function between the maps of an MLP.
#[derive(Clone, Debug, PartialEq)]
pub enum Activation {
    /// GELU, applied after adding the bias of the map before it.
    Gelu(Gelu),
    /// SiLU of a gate, times the up projection.
    GatedSilu {
        /// From d to f.
        gate_proj: Linear,
    },
}

/// The arguments that the steps of an MLP's backward pass share.
pub struct MlpBackward<'a, B: Backend> {
    /// The rows, and the parameters of the segment that holds the maps.
    pub rows: Rows<'a, B>,
    /// The gradients of the segment's parameters, to which those of the maps are added, grain by
    /// grain.
    pub lane: SliceMut<'a, B, f32>,
    /// Room for `[grains, outputs]` of the widest map that has a bias.
    pub bias_gradients: &'a mut B::Buffer<f32>,
}

impl Mlp {
    /// f
    pub fn width(&self) -> usize {
        self.up_proj.outputs
    }

    /// The columns that forward keeps: f, or 2 f with a gate.
    pub fn up_width(&self) -> usize {
        match self.activation {
            Activation::Gelu(_) => self.width(),
            Activation::GatedSilu { .. } => 2 * self.width(),
        }
    }

    /// The kernels of the activation function, for [`Block::kernels`](crate::block::Block::kernels)
    /// of a block with such an MLP.
    pub fn kernels(&self) -> KernelGroup {
        match self.activation {
            Activation::Gelu(_) => KernelGroup::Gelu,
            Activation::GatedSilu { .. } => KernelGroup::GatedSilu,
        }
    }

    /// Its linear maps.
    pub fn maps(&self) -> impl Iterator<Item = &Linear> {
        let gate = match &self.activation {
            Activation::Gelu(_) => None,
            Activation::GatedSilu { gate_proj } => Some(gate_proj),
        };
        [&self.up_proj, &self.down_proj].into_iter().chain(gate)
    }

    /// The input of the activation function: `up[rows, f] = input[rows, d] up_proj^T`, without its
    /// bias, or `[gate | up][rows, 2 f] = [input gate_proj^T | input up_proj^T]`.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn project<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        products: Products,
        mut up: MatrixMut<'_, B, B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        let f = self.width();
        match &self.activation {
            Activation::Gelu(_) => self.up_proj.product(device, products, up, input, parameters),
            Activation::GatedSilu { gate_proj } => {
                let gate = up.reborrow().columns(0, f)?;
                gate_proj.forward(device, products, gate, input, parameters)?;
                self.up_proj.forward(device, products, up.columns(f, f)?, input, parameters)
            }
        }
    }

    /// The activation function of the output of [`project`](Self::project):
    /// `activated[rows, f] = gelu(up + bias)`, or `silu(gate) up`.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn activate<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        activated: MatrixMut<'_, B, B::Activation>,
        up: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        Ok(match self.activation {
            Activation::Gelu(gelu) => {
                let bias = self.up_proj.bias(parameters)?;
                backend.gelu_forward(stream, activated, up, bias, gelu)
            }
            Activation::GatedSilu { .. } => backend.gated_silu_forward(stream, activated, up),
        }?)
    }

    /// From the gradient of the output, `grad_out[rows, d]`, to that of `up`, `grad_up[rows, f]` or
    /// `[rows, 2 f]`: `grad_out down_proj`, times the derivative of the activation function.
    ///
    /// Recomputes `activated[rows, f]` from `up` as [`project`](Self::project) left it, and adds the
    /// gradients of `down_proj`, and of the bias of GELU's `up_proj`, to the lane.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward_down<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        mut grad_up: MatrixMut<'_, B, B::Activation>,
        mut activated: MatrixMut<'_, B, B::Activation>,
        grad_out: Matrix<'_, B, B::Activation>,
        up: Matrix<'_, B, B::Activation>,
        pass: &mut MlpBackward<'_, B>,
    ) -> Result<()> {
        let MlpBackward { rows: Rows { parameters, grains }, lane, bias_gradients } = pass;
        let (f, map) = (self.width(), &self.down_proj);
        let of_activated = grad_up.reborrow().columns(self.up_width() - f, f)?;
        map.backward_input(device, of_activated, grad_out, *parameters, Output::Overwrite)?;
        let out = activated.reborrow();
        match self.activation {
            Activation::Gelu(gelu) => {
                let dbias = self.up_proj.bias_gradients::<B>(bias_gradients, *grains)?;
                device.backend.gelu_backward(
                    device.stream,
                    GeluGradients { gradient: grad_up, out, dbias },
                    up,
                    self.up_proj.bias(*parameters)?,
                    *grains,
                    gelu,
                )?;
                self.up_proj.add_bias_gradients(device, lane, bias_gradients, *grains)?;
            }
            Activation::GatedSilu { .. } => {
                device.backend.gated_silu_backward(device.stream, grad_up, out, up)?;
            }
        }
        let sides = [grad_out, activated.as_matrix()];
        map.backward_parameters(device, lane, sides, bias_gradients, *grains)
    }

    /// From `grad_up`, which [`backward_down`](Self::backward_down) has left, to the gradient of the
    /// input: `grad_input[rows, d] = grad_up up_proj`, or `grad_gate gate_proj + grad_up up_proj`.
    /// Adds the remaining gradients of these maps, for `input[rows, d]`, to the lane.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward_up<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        mut grad_input: MatrixMut<'_, B, B::Activation>,
        grad_up: Matrix<'_, B, B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        pass: &mut MlpBackward<'_, B>,
    ) -> Result<()> {
        let MlpBackward { rows: Rows { parameters, grains }, lane, bias_gradients } = pass;
        let (f, map) = (self.width(), &self.up_proj);
        match &self.activation {
            // The gradient of its bias was computed with that of `up`.
            Activation::Gelu(_) => {
                map.backward_weight(device, lane, [grad_up, input], *grains)?;
                map.backward_input(device, grad_input, grad_up, *parameters, Output::Overwrite)
            }
            Activation::GatedSilu { gate_proj } => {
                let maps = [(gate_proj, 0, Output::Overwrite), (map, f, Output::Add)];
                for (map, first, output) in maps {
                    let of_map = grad_up.columns(first, f)?;
                    let sides = [of_map, input];
                    map.backward_parameters(device, lane, sides, bias_gradients, *grains)?;
                    let grad_input = grad_input.reborrow();
                    map.backward_input(device, grad_input, of_map, *parameters, output)?;
                }
                Ok(())
            }
        }
    }
}
