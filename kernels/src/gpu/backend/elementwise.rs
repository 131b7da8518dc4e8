//! [`Elementwise`] for [`Gpu`].

use crate::backend::{Elementwise, Values, ValuesMut};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};

impl<D: Driver, P: Precision> Elementwise for Gpu<D, P> {
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
