//! The [backend](crate::backend)'s traits for [`Gpu`]: memory and order from the driver, kernels from the launchers.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;

use crate::backend::{Backend, NormGradient, NormInput};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::launch::norm::{self, NormInputs, NormSaved, ParameterGradients};
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::NormShape;
use crate::view::{MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> Backend for Gpu<D, P> {
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
