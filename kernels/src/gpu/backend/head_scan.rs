//! [`HeadScan`] for [`Gpu`], which has no such kernels yet.

use crate::backend::{HeadScan, HeadScanGradients, HeadScanInputs};
use crate::error::{KernelError, Result};
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::HeadScanShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

fn refused() -> Result<()> {
    Err(KernelError::shape("head_scan", "device", "a CPU", "a GPU, which has no scan of heads yet"))
}

impl<D: Driver, P: Precision> HeadScan for Gpu<D, P> {
    const HAS_HEAD_SCAN: bool = false;

    fn head_scan_scratch_bytes(&self, _: HeadScanShape) -> usize {
        0
    }

    fn head_scan_forward(
        &self,
        _: &mut GpuStream<D>,
        _: MatrixMut<'_, Self, f32>,
        _: HeadScanInputs<'_, Self>,
        _: HeadScanShape,
    ) -> Result<()> {
        refused()
    }

    fn head_scan_backward(
        &self,
        _: &mut GpuStream<D>,
        _: HeadScanGradients<'_, Self>,
        _: Matrix<'_, Self, f32>,
        _: HeadScanInputs<'_, Self>,
        _: HeadScanShape,
    ) -> Result<()> {
        refused()
    }

    fn head_scan_piece(
        &self,
        _: &mut GpuStream<D>,
        _: MatrixMut<'_, Self, f32>,
        _: SliceMut<'_, Self, f32>,
        _: Option<Slice<'_, Self, u32>>,
        _: HeadScanInputs<'_, Self>,
        _: HeadScanShape,
    ) -> Result<()> {
        refused()
    }
}
