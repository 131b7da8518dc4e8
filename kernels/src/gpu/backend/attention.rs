//! [`Attention`] for [`Gpu`].

use crate::backend::{Attention, AttentionInputs, GrowingCache, KeyValueCache};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::AttentionShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> Attention for Gpu<D, P> {
    fn attention_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_forward(stream, out, log_sum_exp, inputs, shape)
    }

    fn attention_scratch_bytes(&self, shape: AttentionShape) -> usize {
        self.attention_backward_scratch(shape)
    }

    fn attention_backward(
        &self,
        stream: &mut GpuStream<D>,
        dqkv: MatrixMut<'_, Self, P::Activation>,
        dout: Matrix<'_, Self, P::Activation>,
        out: Matrix<'_, Self, P::Activation>,
        log_sum_exp: Slice<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_backward(stream, dqkv, dout, out, log_sum_exp, inputs, shape)
    }

    fn append_to_cache(
        &self,
        stream: &mut GpuStream<D>,
        cache: SliceMut<'_, Self, P::Activation>,
        rows: Matrix<'_, Self, P::Activation>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()> {
        self.launch_append_to_cache(stream, cache, rows, past, capacity)
    }

    fn attention_cached(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        q: Matrix<'_, Self, P::Activation>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_cached(stream, out, q, cache, shape)
    }

    fn attention_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        rows: [Matrix<'_, Self, P::Activation>; 3],
        cache: GrowingCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_step(stream, out, rows, cache, shape)
    }
}
