//! [`HeadScan`] for [`Gpu`].

use crate::backend::{HeadScan, HeadScanGradients, HeadScanInputs};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::HeadScanShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> HeadScan for Gpu<D, P> {
    fn head_scan_scratch_bytes(&self, shape: HeadScanShape) -> usize {
        self.head_scan_scratch(shape)
    }

    fn head_scan_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        self.launch_head_scan_forward(stream, out, inputs, shape)
    }

    fn head_scan_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: HeadScanGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        self.launch_head_scan_backward(stream, gradients, dout, inputs, shape)
    }

    fn head_scan_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        state: SliceMut<'_, Self, f32>,
        lengths: Option<Slice<'_, Self, u32>>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        self.launch_head_scan_piece(stream, out, state, lengths, inputs, shape)
    }
}
