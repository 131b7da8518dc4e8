//! The MLP of a transformer block: up, through an activation function, and down.
//!
//! ```text
//! Gelu:       out = gelu(input up_proj^T + bias) down_proj^T + bias
//! GatedSilu:  out = (silu(input gate_proj^T) (input up_proj^T)) down_proj^T        SwiGLU (Shazeer, 2020)
//! ```
//!
//! Forward keeps the input of the activation function; backward recomputes the function.

use tidemill_kernels::backend::{Gelu, GeluGradients, KernelGroup, Output};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
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

impl Mlp {
    /// f
    pub(crate) fn width(&self) -> usize {
        self.up_proj.outputs
    }

    /// The columns that forward keeps: f, or 2 f with a gate.
    pub(crate) fn up_width(&self) -> usize {
        match self.activation {
            Activation::Gelu(_) => self.width(),
            Activation::GatedSilu { .. } => 2 * self.width(),
        }
    }

    pub(crate) fn kernels(&self) -> KernelGroup {
        match self.activation {
            Activation::Gelu(_) => KernelGroup::Gelu,
            Activation::GatedSilu { .. } => KernelGroup::GatedSilu,
        }
    }

    /// Its linear maps.
    pub(crate) fn maps(&self) -> impl Iterator<Item = &Linear> {
        let gate = match &self.activation {
            Activation::Gelu(_) => None,
            Activation::GatedSilu { gate_proj } => Some(gate_proj),
        };
        [&self.up_proj, &self.down_proj].into_iter().chain(gate)
    }

    /// The input of the activation function: `up[b t, f]` without its bias, or `[gate | up][b t, 2
    /// f]`.
    pub(crate) fn project<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        products: Products,
        up: &mut B::Buffer<B::Activation>,
        normed: Matrix<'_, B, B::Activation>,
        rows: Rows<'_, B>,
    ) -> Result<()> {
        let (count, f) = (rows.grains.rows(), self.width());
        let mut up = SliceMut::all(up).matrix(count, self.up_width())?;
        match &self.activation {
            Activation::Gelu(_) => {
                self.up_proj.product(device, products, up, normed, rows.parameters)
            }
            Activation::GatedSilu { gate_proj } => {
                let gate = up.reborrow().columns(0, f)?;
                gate_proj.forward(device, products, gate, normed, rows.parameters)?;
                let up = up.columns(f, f)?;
                self.up_proj.forward(device, products, up, normed, rows.parameters)
            }
        }
    }

    /// `activated[b t, f]` from the output of [`project`](Self::project).
    pub(crate) fn activate<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        activated: &mut B::Buffer<B::Activation>,
        up: &B::Buffer<B::Activation>,
        rows: Rows<'_, B>,
    ) -> Result<()> {
        let count = rows.grains.rows();
        let activated = SliceMut::all(activated).matrix(count, self.width())?;
        let up = Slice::all(up).matrix(count, self.up_width())?;
        let Device { backend, stream } = device;
        Ok(match self.activation {
            Activation::Gelu(gelu) => {
                let bias = self.up_proj.bias(rows.parameters)?;
                backend.gelu_forward(stream, activated, up, bias, gelu)
            }
            Activation::GatedSilu { .. } => backend.gated_silu_forward(stream, activated, up),
        }?)
    }

    /// From the gradient of the output to that of `up`, in `gradient[b t, f]` or `[b t, 2 f]`;
    /// recomputes `activated`, and adds the gradients of `down_proj` to `lane`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn backward_down<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        gradient: &mut B::Buffer<B::Activation>,
        activated: &mut B::Buffer<B::Activation>,
        lane: &mut SliceMut<'_, B, f32>,
        grad_out: Matrix<'_, B, B::Activation>,
        up: &B::Buffer<B::Activation>,
        bias: &mut B::Buffer<f32>,
        rows: Rows<'_, B>,
    ) -> Result<()> {
        let (count, f) = (rows.grains.rows(), self.width());
        let mut gradient = SliceMut::all(gradient).matrix(count, self.up_width())?;
        let out = SliceMut::all(&mut *activated).matrix(count, f)?;
        let up = Slice::all(up).matrix(count, self.up_width())?;
        let map = &self.down_proj;
        let of_activated: MatrixMut<'_, B, _> =
            gradient.reborrow().columns(self.up_width() - f, f)?;
        map.backward_input(device, of_activated, grad_out, rows.parameters, Output::Overwrite)?;
        match self.activation {
            Activation::Gelu(gelu) => {
                let dbias = self.up_proj.bias_gradients(bias, rows.grains)?;
                device.backend.gelu_backward(
                    device.stream,
                    GeluGradients { gradient, out, dbias },
                    up,
                    self.up_proj.bias(rows.parameters)?,
                    rows.grains,
                    gelu,
                )?;
                self.up_proj.add_bias_gradients(device, lane, bias, rows.grains)?;
            }
            Activation::GatedSilu { .. } => {
                device.backend.gated_silu_backward(device.stream, gradient, out, up)?;
            }
        }
        let sides = [grad_out, Slice::all(&*activated).matrix(count, f)?];
        map.backward_parameters(device, lane, sides, bias, rows.grains)
    }

    /// From the gradient that [`backward_down`](Self::backward_down) left to that of the input,
    /// `grad_normed[b t, d]`; adds the gradients of the up projections to `lane`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn backward_up<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grad_normed: &mut B::Buffer<B::Activation>,
        lane: &mut SliceMut<'_, B, f32>,
        gradient: &B::Buffer<B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        bias: &mut B::Buffer<f32>,
        rows: Rows<'_, B>,
    ) -> Result<()> {
        let (count, f) = (rows.grains.rows(), self.width());
        let gradient = Slice::all(gradient).matrix(count, self.up_width())?;
        let mut out = SliceMut::all(grad_normed).matrix(count, self.up_proj.inputs)?;
        let map = &self.up_proj;
        match &self.activation {
            // The gradient of its bias was computed with that of `up`.
            Activation::Gelu(_) => {
                map.backward_weight(device, lane, [gradient, input], rows.grains)?;
                map.backward_input(device, out, gradient, rows.parameters, Output::Overwrite)
            }
            Activation::GatedSilu { gate_proj } => {
                let maps = [(gate_proj, 0, Output::Overwrite), (map, f, Output::Add)];
                for (map, first, output) in maps {
                    let of_map = gradient.columns(first, f)?;
                    map.backward_parameters(device, lane, [of_map, input], bias, rows.grains)?;
                    map.backward_input(device, out.reborrow(), of_map, rows.parameters, output)?;
                }
                Ok(())
            }
        }
    }
}
