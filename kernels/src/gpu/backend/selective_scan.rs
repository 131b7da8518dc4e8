//! [`SelectiveScan`] for [`Gpu`].

use crate::backend::{ScanGradients, ScanInputs, ScanStepInputs, SelectiveScan};
use crate::error::Result;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ScanShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl<D: Driver, P: Precision> SelectiveScan for Gpu<D, P> {
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        self.scan_saved_elements(shape)
    }

    fn selective_scan_scratch_bytes(&self, shape: ScanShape) -> usize {
        self.scan_backward_scratch(shape)
    }

    fn selective_scan_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_forward(stream, out, saved, inputs, shape)
    }

    fn selective_scan_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: ScanGradients<'_, Self>,
        regated: Option<MatrixMut<'_, Self, P::Activation>>,
        dout: Matrix<'_, Self, P::Activation>,
        inputs: ScanInputs<'_, Self>,
        saved: Slice<'_, Self, f32>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_backward(stream, gradients, regated, dout, inputs, saved, shape)
    }

    fn selective_scan_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        lengths: Option<Slice<'_, Self, u32>>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_piece(stream, out, state, lengths, inputs, shape)
    }

    fn selective_scan_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        delta_raw: MatrixMut<'_, Self, P::Activation>,
        inputs: ScanStepInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_step(stream, out, state, delta_raw, inputs, shape)
    }
}
