//! The norms of a model: root mean square (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016).
//!
//! ```text
//! root mean square:  normed = x (mean(x^2) + eps)^-1/2 weight
//! layer norm:        normed = (x - mean(x)) (variance(x) + eps)^-1/2 weight + bias
//! ```
//!
//! A [`Norm`] knows the ranges of its parameters in their segment; blocks and head run it over the rows of the residual stream. A
//! forward pass writes a [`Normed`], which the backward pass reads: a block keeps one for each of its norms, or runs forward again.

use std::ops::Range;

use tidemill_kernels::backend::{
    KernelGroup, NormGradient, NormGradients, NormInput, NormInputs, NormSaved,
};
pub use tidemill_kernels::shape::NormKind;
use tidemill_kernels::shape::{GrainRows, NormShape};
use tidemill_kernels::{Backend, Matrix, Slice, SliceMut};

use crate::block::{BothGradients, ResidualGradient};
use crate::error::Result;
use crate::initialization::Initializer;
use crate::layout::{Decay, Reading};
use crate::lease::Lease;
use crate::parameter_list::{Bias, NewTensor, ParameterList};
use crate::trainable::Device;

/// A norm over rows of one width.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// The statistic that it divides by.
    pub kind: NormKind,
    /// `weight[d]` in the segment.
    pub weight: Range<usize>,
    /// `bias[d]` in the segment; only layer norms have one.
    pub bias: Option<Range<usize>>,
    /// d, elements of a row.
    pub width: usize,
    /// Added before the root.
    pub eps: f32,
}

/// A norm that a model adds to its newest segment.
#[derive(Clone, Debug)]
pub struct NewNorm {
    /// The name of its tensors in files, up to `.weight` and `.bias`.
    pub name: String,
    /// The statistic that it divides by.
    pub kind: NormKind,
    /// Whether there is a bias; a norm by the root mean square never has one.
    pub bias: Bias,
    /// d
    pub width: usize,
    /// Added before the root.
    pub eps: f32,
}

/// The output of a norm, and what the backward pass needs beside the input.
pub struct Normed<B: Backend> {
    /// `normed[rows, d]`
    output: B::Buffer<B::Activation>,
    /// `statistics[rows]` of the root mean square, `[2, rows]` of a layer norm.
    statistics: B::Buffer<f32>,
    /// d
    width: usize,
}

impl<B: Backend> Normed<B> {
    /// The first `rows`, `[rows, d]`.
    ///
    /// # Errors
    /// More rows than memory was planned for.
    pub fn rows(&self, rows: usize) -> Result<Matrix<'_, B, B::Activation>> {
        Ok(Slice::all(&self.output).matrix(rows, self.width)?)
    }

    /// The memory of all rows that were planned.
    pub fn buffer(&self) -> &B::Buffer<B::Activation> {
        &self.output
    }
}

/// Memory of norms' backward passes, one after the other.
pub struct NormScratch<B: Backend> {
    /// `gradients[grains, d]` of the weight.
    weight_gradients: B::Buffer<f32>,
    /// `gradients[grains, d]` of the bias.
    bias_gradients: B::Buffer<f32>,
}

/// The arguments of a pass of a norm.
pub struct NormPass<'a, B: Backend> {
    /// The segment that holds the norm.
    pub parameters: Lease<'a, B>,
    /// `input[rows, d]`
    pub input: Matrix<'a, B, f32>,
    /// The rows, and how they divide into grains.
    pub grains: GrainRows,
}

impl Norm {
    /// The kernels that norms launch, for [`Block::kernels`](crate::block::Block::kernels) of a
    /// block with such a norm.
    pub fn kernels(&self) -> KernelGroup {
        match self.kind {
            NormKind::RootMeanSquare => KernelGroup::RmsNorm,
            NormKind::Layer => KernelGroup::LayerNorm,
        }
    }

    /// Adds the tensors of a norm to the newest segment, with initial values of one and zero.
    ///
    /// # Panics
    /// When no segment is open.
    pub fn add(parameters: &mut ParameterList, norm: NewNorm) -> Self {
        let NewNorm { name, kind, bias, width, eps } = norm;
        let mut tensor = |name: String, value| {
            let initializer = Initializer::Constant(value);
            parameters.tensor(NewTensor {
                name,
                shape: &[width],
                decay: Decay::Exempt,
                reading: Reading::Fp32,
                initializer,
            })
        };
        let weight = tensor(format!("{name}.weight"), 1.0);
        let bias = match (kind, bias) {
            (NormKind::Layer, Bias::Present) => Some(tensor(format!("{name}.bias"), 0.0)),
            _ => None,
        };
        Self { kind, weight, bias, width, eps }
    }

    /// Memory for the output of up to `rows` rows.
    ///
    /// # Errors
    /// A device without room.
    pub fn plan_normed<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        rows: usize,
    ) -> Result<Normed<B>> {
        let Device { backend, stream } = device;
        Ok(Normed {
            output: backend.allocate(stream, rows * self.width)?,
            statistics: backend.allocate(stream, rows * self.row_statistics())?,
            width: self.width,
        })
    }

    /// Memory for backward passes of up to `grains`.
    ///
    /// # Errors
    /// A device without room.
    pub fn plan_scratch<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grains: GrainRows,
    ) -> Result<NormScratch<B>> {
        let Device { backend, stream } = device;
        let elements = grains.grains() * self.width;
        Ok(NormScratch {
            weight_gradients: backend.allocate(stream, elements)?,
            bias_gradients: backend.allocate(stream, self.bias.as_ref().map_or(0, |_| elements))?,
        })
    }

    fn row_statistics(&self) -> usize {
        match self.kind {
            NormKind::RootMeanSquare => 1,
            NormKind::Layer => 2,
        }
    }

    /// Bytes of one row of a [`Normed`] whose activations have `activation_bytes` bytes each.
    pub fn row_bytes(&self, activation_bytes: usize) -> usize {
        self.width * activation_bytes + self.row_statistics() * size_of::<f32>()
    }

    fn shape(&self, grains: GrainRows) -> Result<NormShape> {
        let shape = match self.kind {
            NormKind::RootMeanSquare => NormShape::rms,
            NormKind::Layer => NormShape::layer,
        };
        Ok(shape(grains, self.width, self.eps)?)
    }

    /// Writes the rows of `normed` that `pass` has, and their statistics.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        normed: &mut Normed<B>,
        pass: NormPass<'_, B>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let shape = self.shape(pass.grains)?;
        let Normed { output, statistics, width } = normed;
        let output = SliceMut::all(output).matrix(pass.grains.rows(), *width)?;
        let bias = self.bias.as_ref().map(|place| pass.parameters.vector(place));
        let inputs = NormInputs {
            x: NormInput::Residual(pass.input),
            weight: pass.parameters.vector(&self.weight)?,
            bias: bias.transpose()?,
        };
        let statistics = SliceMut::new(statistics, 0, shape.statistics())?;
        Ok(backend.norm_forward(stream, output, statistics, inputs, shape)?)
    }

    /// Given `grad_normed[rows, d]`, adds the gradient of the input to `grad`, whose rows are d
    /// wide, and those of the parameters to `lane`, laid out as their segment. `normed` is as
    /// [`forward`](Self::forward) left it for the same input.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: &mut SliceMut<'_, B, f32>,
        grad_normed: Matrix<'_, B, B::Activation>,
        (normed, scratch): (&Normed<B>, &mut NormScratch<B>),
        pass: NormPass<'_, B>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let (rows, shape) = (pass.grains.rows(), self.shape(pass.grains)?);
        let elements = pass.grains.grains() * self.width;
        let NormScratch { weight_gradients, bias_gradients } = scratch;
        let BothGradients { gradient: dx, rounded } = grad.both_mut(rows, self.width)?;
        let dbias = self.bias.as_ref().map(|_| SliceMut::new(bias_gradients, 0, elements));
        let gradients = NormGradients {
            x: NormGradient::Residual { dx, rounded, dy: grad_normed },
            dweight: SliceMut::new(weight_gradients, 0, elements)?,
            dbias: dbias.transpose()?,
        };
        let saved = NormSaved {
            x: NormInput::Residual(pass.input),
            statistics: Slice::new(&normed.statistics, 0, shape.statistics())?,
            weight: pass.parameters.vector(&self.weight)?,
        };
        backend.norm_backward(stream, gradients, saved, shape)?;
        let places = [(Some(&self.weight), &scratch.weight_gradients)];
        let places = places.into_iter().chain([(self.bias.as_ref(), &scratch.bias_gradients)]);
        for (place, gradients) in places {
            if let Some(place) = place {
                let lane = lane.reborrow().sub(place.start, place.len())?;
                backend.accumulate(stream, lane, Slice::new(gradients, 0, elements)?)?;
            }
        }
        Ok(())
    }
}
