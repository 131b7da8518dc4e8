//! The gate of SwiGLU and its gradients.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, row_stride, row_stride_mut};
use crate::backend::GatedSilu;
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::GATED_SILU;
use crate::gpu::{Gpu, GpuStream};
use crate::view::{Matrix, MatrixMut};

const THREADS: u32 = 256;

/// `GatedSilu` of gated_silu.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    out: Address,
    gradient: Address,
    x: Address,
    out_stride: u64,
    gradient_stride: u64,
    x_stride: u64,
    width: u32,
    unused: u32,
}

impl<D: Driver, P: Precision> GatedSilu for Gpu<D, P> {
    fn gated_silu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
    ) -> Result<()> {
        self.launch_gated_silu(stream, out, None, x)
    }

    fn gated_silu_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradient: MatrixMut<'_, Self, P::Activation>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
    ) -> Result<()> {
        self.launch_gated_silu(stream, out, Some(gradient), x)
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Values; with `gradient`, the gradients too.
    fn launch_gated_silu(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        gradient: Option<MatrixMut<'_, Self, P::Activation>>,
        x: Matrix<'_, Self, P::Activation>,
    ) -> Result<()> {
        let (kernel, [wide, single]): (KernelName, _) = match &gradient {
            None => {
                ("gated_silu_forward", ["gated_silu_forward_wide", "gated_silu_forward_single"])
            }
            Some(_) => {
                ("gated_silu_backward", ["gated_silu_backward_wide", "gated_silu_backward_single"])
            }
        };
        let (rows, width) = (out.rows, out.columns);
        let both = width.saturating_mul(2);
        let out_stride = row_stride_mut(kernel, "out", &out, rows, width)?;
        let x_stride = row_stride(kernel, "x", &x, rows, both)?;
        let (gradient, gradient_stride) = match gradient {
            Some(gradient) => {
                (gradient.address(), row_stride_mut(kernel, "gradient", &gradient, rows, both)?)
            }
            None => (Address::NULL, 0),
        };
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let arguments = Arguments {
            out: out.address(),
            gradient,
            x: x.address(),
            out_stride,
            gradient_stride,
            x_stride,
            width: size32(kernel, "width", width)?,
            unused: 0,
        };
        let columns = WIDE_BYTES as usize / size_of::<P::Activation>();
        let access = if width.is_multiple_of(columns) {
            let placed =
                [(out.address(), out_stride), (gradient, gradient_stride), (x.address(), x_stride)];
            let bytes = |(at, stride)| (at, stride_bytes::<P::Activation>(stride));
            Access::of(WIDE_BYTES, &placed.map(bytes))
        } else {
            Access::Single
        };
        let tiles = width.div_ceil(THREADS as usize * columns);
        let launch = blocks(kernel, rows.saturating_mul(tiles), THREADS)?;
        // SAFETY: all operands were checked against the output's rows and columns.
        unsafe { self.launch(stream, &GATED_SILU, access.choose(wide, single), launch, arguments) }
    }
}
