//! A linear map of rows, with or without a bias: `out = input weight^T + bias`.
//!
//! Products are computed in activation precision; a map that ends in the residual stream adds to it
//! in fp32.

use std::ops::Range;

use tidemill_kernels::backend::Output;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
use crate::initialization::Initializer;
use crate::layout::{Decay, Reading};
use crate::lease::Lease;
use crate::parameter_list::{Bias, NewTensor, ParameterList};
use crate::trainable::Device;

/// A linear map, and the ranges of its parameters in their segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `weight[outputs, inputs]`
    pub weight: Range<usize>,
    /// `bias[outputs]`
    pub bias: Option<Range<usize>>,
    /// Elements of an input row.
    pub inputs: usize,
    /// Elements of an output row.
    pub outputs: usize,
}

/// A linear map that a model adds to its newest segment.
#[derive(Clone, Debug)]
pub struct NewLinear {
    /// The name of its tensors in files, up to `.weight` and `.bias`.
    pub name: String,
    /// Elements of an input row.
    pub inputs: usize,
    /// Elements of an output row.
    pub outputs: usize,
    /// Whether there is a bias, which begins at 0.
    pub bias: Bias,
    /// Where the weight begins.
    pub standard_deviation: f64,
}

/// Which of a backend's products a map uses. Their sums have different orders, and so different
/// bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// The product of the matrix library, fast for many rows: for training and for given tokens.
    Library,
    /// [`ordered_matmul`](tidemill_kernels::backend::OrderedProducts::ordered_matmul), fast for few rows: for chosen tokens.
    Ordered,
}

impl Products {
    /// `out[m, n] = input[m, k] weight[n, k]^T`
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn multiply<B: Backend>(
        self,
        device: &mut Device<'_, B>,
        out: MatrixMut<'_, B, B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        weight: Matrix<'_, B, B::Activation>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        Ok(match self {
            Self::Library => {
                backend.matmul(stream, out, input, weight.transposed(), Output::Overwrite)
            }
            Self::Ordered => backend.ordered_matmul(stream, out, input, weight, Output::Overwrite),
        }?)
    }

    /// `out[m, n] = out + input[m, k] weight[n, k]^T`
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn add<B: Backend>(
        self,
        device: &mut Device<'_, B>,
        out: MatrixMut<'_, B, f32>,
        input: Matrix<'_, B, B::Activation>,
        weight: Matrix<'_, B, B::Activation>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        Ok(match self {
            Self::Library => {
                backend.matmul_f32(stream, out, input, weight.transposed(), Output::Add)
            }
            Self::Ordered => backend.ordered_matmul_f32(stream, out, input, weight, Output::Add),
        }?)
    }
}

impl Linear {
    /// Adds the tensors of a map to the newest segment: a weight, normal around 0, and a bias of zeros.
    ///
    /// # Panics
    /// When no segment is open.
    pub fn add(parameters: &mut ParameterList, linear: NewLinear) -> Self {
        let NewLinear { name, inputs, outputs, bias, standard_deviation } = linear;
        let weight = parameters.tensor(NewTensor {
            name: format!("{name}.weight"),
            shape: &[outputs, inputs],
            decay: Decay::Decayed,
            reading: Reading::Activation,
            initializer: Initializer::Normal { standard_deviation },
        });
        let bias = (bias == Bias::Present).then(|| {
            parameters.tensor(NewTensor {
                name: format!("{name}.bias"),
                shape: &[outputs],
                decay: Decay::Exempt,
                reading: Reading::Fp32,
                initializer: Initializer::Constant(0.0),
            })
        });
        Self { weight, bias, inputs, outputs }
    }

    fn matrix<'a, B: Backend>(
        &self,
        parameters: Lease<'a, B>,
    ) -> Result<Matrix<'a, B, B::Activation>> {
        parameters.weight(&self.weight, self.outputs, self.inputs)
    }

    /// `bias[outputs]`, where there is one.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn bias<'a, B: Backend>(
        &self,
        parameters: Lease<'a, B>,
    ) -> Result<Option<Slice<'a, B, f32>>> {
        self.bias.as_ref().map(|place| parameters.vector(place)).transpose()
    }

    /// `out[rows, outputs] = input[rows, inputs] weight^T`: the reader of `out` adds the bias.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn product<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        products: Products,
        out: MatrixMut<'_, B, B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        products.multiply(device, out, input, self.matrix(parameters)?)
    }

    /// `out[rows, outputs] = input[rows, inputs] weight^T + bias`
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        products: Products,
        mut out: MatrixMut<'_, B, B::Activation>,
        input: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        let bias = self.bias(parameters)?;
        if let (Some(bias), Products::Library) = (bias, products) {
            let weight = self.matrix(parameters)?.transposed();
            return Ok(device.backend.matmul_biased(device.stream, out, input, weight, bias)?);
        }
        self.product(device, products, out.reborrow(), input, parameters)?;
        if let Some(bias) = bias {
            device.backend.add_bias(device.stream, out, bias)?;
        }
        Ok(())
    }

    /// `out[rows, outputs] = residual[rows, outputs] + input[rows, inputs] weight^T + bias`: how
    /// the last map of a block adds to the residual stream.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward_onto<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        out: MatrixMut<'_, B, f32>,
        residual: Matrix<'_, B, f32>,
        input: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        let weight = self.matrix(parameters)?.transposed();
        let Device { backend, stream } = device;
        let bias = self.bias(parameters)?;
        Ok(backend.matmul_onto(stream, out, residual, input, weight, bias)?)
    }

    /// `residual[rows, outputs] = residual + input[rows, inputs] weight^T + bias`, in place: the
    /// form for generation.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward_residual<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        products: Products,
        mut residual: MatrixMut<'_, B, f32>,
        input: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
    ) -> Result<()> {
        products.add(device, residual.reborrow(), input, self.matrix(parameters)?)?;
        if let Some(bias) = self.bias(parameters)? {
            device.backend.add_bias_f32(device.stream, residual, bias)?;
        }
        Ok(())
    }

    /// `grad_input[rows, inputs] = grad_out[rows, outputs] weight`, which overwrites `grad_input`
    /// or is added to it.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward_input<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grad_input: MatrixMut<'_, B, B::Activation>,
        grad_out: Matrix<'_, B, B::Activation>,
        parameters: Lease<'_, B>,
        output: Output,
    ) -> Result<()> {
        let weight = self.matrix(parameters)?;
        Ok(device.backend.matmul(device.stream, grad_input, grad_out, weight, output)?)
    }

    /// Adds the gradients of weight and bias to `lane`, laid out as their segment, grain by grain:
    /// for each grain `grad_out^T input`, and the sums of the columns of `grad_out`. `sides` are
    /// `grad_out[rows, outputs]` and `input[rows, inputs]`; `bias_gradients` has room for `[grains,
    /// outputs]` where there is a bias.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward_parameters<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        lane: &mut SliceMut<'_, B, f32>,
        sides: [Matrix<'_, B, B::Activation>; 2],
        bias_gradients: &mut B::Buffer<f32>,
        grains: GrainRows,
    ) -> Result<()> {
        let [grad_out, _] = sides;
        self.backward_weight(device, lane, sides, grains)?;
        if let Some(gradients) = self.bias_gradients(bias_gradients, grains)? {
            device.backend.bias_backward(device.stream, gradients, grad_out, grains)?;
        }
        self.add_bias_gradients(device, lane, bias_gradients, grains)
    }

    /// Adds the gradient of the weight, `grad_out^T input`, to `lane`, laid out as the weight's
    /// segment, grain by grain. `sides` are `grad_out[rows, outputs]` and `input[rows, inputs]`.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward_weight<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        lane: &mut SliceMut<'_, B, f32>,
        [grad_out, input]: [Matrix<'_, B, B::Activation>; 2],
        grains: GrainRows,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let weight = lane.reborrow().sub(self.weight.start, self.weight.len())?;
        let weight = weight.matrix(self.outputs, self.inputs)?;
        Ok(backend.weight_gradient_add(stream, weight, grad_out, input, grains)?)
    }

    /// The part of `room` for the gradients `[grains, outputs]` of the bias, if there is one.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn bias_gradients<'a, B: Backend>(
        &self,
        room: &'a mut B::Buffer<f32>,
        grains: GrainRows,
    ) -> Result<Option<SliceMut<'a, B, f32>>> {
        let elements = grains.grains() * self.outputs;
        let of_bias = self.bias.as_ref().map(|_| SliceMut::new(room, 0, elements));
        Ok(of_bias.transpose()?)
    }

    /// Adds the [`bias_gradients`](Self::bias_gradients), once they are computed, to `lane`.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn add_bias_gradients<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        lane: &mut SliceMut<'_, B, f32>,
        gradients: &B::Buffer<f32>,
        grains: GrainRows,
    ) -> Result<()> {
        let Some(place) = &self.bias else { return Ok(()) };
        let lane = lane.reborrow().sub(place.start, place.len())?;
        let gradients = Slice::new(gradients, 0, grains.grains() * self.outputs)?;
        Ok(device.backend.accumulate(device.stream, lane, gradients)?)
    }
}
