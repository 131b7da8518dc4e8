//! [`CausalConv1d`] for [`Gpu`].

use crate::backend::{CausalConv1d, ConvInputs};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ConvShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> CausalConv1d for Gpu<D, P> {
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_forward(stream, out, inputs, shape)
    }

    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, P::Activation>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_backward(stream, dx, dweight, dbias, dout, inputs, shape)
    }

    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        lengths: Option<Slice<'_, Self, u32>>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_piece(stream, out, state, lengths, inputs, shape)
    }
}
