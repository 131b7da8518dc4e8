//! The [backend](crate::backend)'s traits for [`Gpu`]: memory and order from the driver, kernels from the launchers.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;

use crate::backend::{Backend, NormGradient, NormInput, Output};
use crate::error::Result;
use crate::gpu::driver::{Driver, Rows};
use crate::gpu::launch::norm::{self, NormInputs, NormSaved, ParameterGradients};
use crate::gpu::launch::row_map::{self};
use crate::gpu::matmul::Written;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream, weight_gradient};
use crate::shape::{GrainRows, NormShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> Backend for Gpu<D, P> {
    fn matmul(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output.into(), Rows::Free)
    }

    fn matmul_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output.into(), Rows::Free)
    }

    fn matmul_onto(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()> {
        let to = Written::Onto(base);
        match bias {
            Some(bias) => {
                let add = &row_map::ADD_BIAS_F32;
                self.product_with_bias(stream, out, [a, b], to, bias, add)
            }
            None => self.product(stream, out, a, b, to, Rows::Free),
        }
    }

    fn matmul_biased(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.product_with_bias(stream, out, [a, b], Written::Over, bias, &row_map::ADD_BIAS)
    }

    fn ordered_matmul(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        weight: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.launch_ordered_product(stream, out, a, weight, output)
    }

    fn ordered_matmul_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        weight: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.launch_ordered_product(stream, out, a, weight, output)
    }

    fn weight_gradient_add(
        &self,
        stream: &mut GpuStream<D>,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, P::Activation>,
        input: Matrix<'_, Self, P::Activation>,
        grains: GrainRows,
    ) -> Result<()> {
        self.add_weight_gradient(stream, lane, grad_out, input, grains)
    }

    fn weight_gradient_scratch_bytes(&self, [m, k]: [usize; 2], grains: GrainRows) -> usize {
        weight_gradient::scratch_bytes(m.saturating_mul(k), grains)
    }

    fn rms_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let norm = norm::rms_norm_forward(&x);
        let inputs = NormInputs { x, weight, bias: None };
        self.launch_norm_forward(stream, &norm, y, reciprocal_rms, inputs, shape)
    }

    fn rms_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let parameters = ParameterGradients { dweight, dbias: None };
        let norm = norm::rms_norm_backward(&x);
        let saved = NormSaved { x, statistics: reciprocal_rms, weight };
        self.launch_norm_backward(stream, &norm, gradient, parameters, saved, shape)
    }

    fn layer_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: NormShape,
    ) -> Result<()> {
        let norm = norm::layer_norm_forward(&x);
        let inputs = NormInputs { x, weight, bias };
        self.launch_norm_forward(stream, &norm, y, statistics, inputs, shape)
    }

    fn layer_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        x: NormInput<'_, Self>,
        statistics: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let parameters = ParameterGradients { dweight, dbias };
        let norm = norm::layer_norm_backward(&x);
        let saved = NormSaved { x, statistics, weight };
        self.launch_norm_backward(stream, &norm, gradient, parameters, saved, shape)
    }
}
