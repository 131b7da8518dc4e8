//! [`Elementwise`] for [`Gpu`].

use crate::backend::{Elementwise, Values, ValuesMut};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::view::{Slice, SliceMut};

impl<D: Driver, P: Precision> Elementwise for Gpu<D, P> {
    fn accumulate(
        &self,
        stream: &mut GpuStream<D>,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.launch_accumulate(stream, lane, gradients)
    }

    fn axpby(
        &self,
        stream: &mut GpuStream<D>,
        out: ValuesMut<'_, Self>,
        keep: f32,
        factor: f32,
        x: Values<'_, Self>,
    ) -> Result<()> {
        self.launch_axpby(stream, out, keep, factor, x)
    }
}
