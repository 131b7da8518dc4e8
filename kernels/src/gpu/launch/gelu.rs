//! GELU of biased rows: forward a row map; backward the gradient of GELU, its values, and the gradient of the bias before it, in one
//! pass over the input.

use bytemuck::{Pod, Zeroable};

use super::partial_sums::Runs;
use super::row_map::{self, BIAS_RUN_ROWS, MapInputs};
use super::sizes::{Access, WIDE_BYTES, blocks, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{BiasedGelu, Gelu, GeluGradients};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::GELU;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

const THREADS: u32 = 128;

/// `GeluBackward` of gelu.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GeluBackward {
    gradient: Address,
    out: Address,
    bias_partials: Address,
    x: Address,
    bias: Address,
    gradient_stride: u64,
    out_stride: u64,
    x_stride: u64,
    rows: u64,
    rows_per_grain: u64,
    runs_per_grain: u32,
    width: u32,
}

/// The variants for wide loads and for single ones.
fn variants(gelu: Gelu) -> [KernelName; 2] {
    match gelu {
        Gelu::Erf => ["gelu_erf_backward_wide", "gelu_erf_backward_single"],
        Gelu::Tanh => ["gelu_tanh_backward_wide", "gelu_tanh_backward_single"],
    }
}

impl<D: Driver, P: Precision> BiasedGelu for Gpu<D, P> {
    fn gelu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        let inputs = MapInputs { x: Some(x), dout: None, bias, limit: 0.0 };
        self.launch_row_map(stream, &row_map::gelu_forward(gelu), out, inputs)
    }

    fn gelu_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: GeluGradients<'_, Self>,
        x: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        grains: GrainRows,
        gelu: Gelu,
    ) -> Result<()> {
        const KERNEL: &str = "gelu_backward";
        let GeluGradients { gradient, out, dbias } = gradients;
        let (rows, width) = (grains.rows(), gradient.columns);
        let gradient_stride = row_stride_mut(KERNEL, "gradient", &gradient, rows, width)?;
        let out_stride = row_stride_mut(KERNEL, "out", &out, rows, width)?;
        let x_stride = row_stride(KERNEL, "x", &x, rows, width)?;
        if let Some(bias) = &bias {
            exactly(KERNEL, "bias", bias, width)?;
        }
        if let Some(dbias) = &dbias {
            exactly_mut(KERNEL, "dbias", dbias, grains.grains() * width)?;
        }
        if width == 0 {
            return Ok(());
        }
        let runs = Runs::new(KERNEL, grains, BIAS_RUN_ROWS, width)?;
        let sums = match &dbias {
            Some(dbias) => {
                Some(self.partial_sums(stream, [dbias.address(), Address::NULL], runs)?)
            }
            None => None,
        };
        let arguments = GeluBackward {
            gradient: gradient.address(),
            out: out.address(),
            bias_partials: sums.as_ref().map_or(Address::NULL, |sums| sums.partials[0]),
            x: x.address(),
            bias: bias.address(),
            gradient_stride,
            out_stride,
            x_stride,
            rows: runs.rows,
            rows_per_grain: runs.rows_per_grain,
            runs_per_grain: runs.runs_per_grain,
            width: runs.width,
        };
        let columns = WIDE_BYTES as usize / size_of::<P::Activation>();
        let access = if width.is_multiple_of(columns) {
            let placed = [
                (arguments.gradient, gradient_stride),
                (arguments.out, out_stride),
                (arguments.x, x_stride),
                // An absent bias has address 0, which counts as aligned.
                (arguments.bias, 0),
            ];
            let bytes = |(at, stride)| (at, stride_bytes::<P::Activation>(stride));
            Access::of(WIDE_BYTES, &placed.map(bytes))
        } else {
            Access::Single
        };
        let [wide, single] = variants(gelu);
        let tiles = width.div_ceil(THREADS as usize * columns);
        let launch = blocks(KERNEL, runs.runs * tiles, THREADS)?;
        // SAFETY: all operands were checked against rows and columns; there is a partial sum for each run of rows where there are any.
        unsafe { self.launch(stream, &GELU, access.choose(wide, single), launch, arguments) }?;
        match &sums {
            // SAFETY: `dbias` holds every grain's; `runs` partial sums were just formed.
            Some(sums) => unsafe { self.launch_sum_partials(stream, KERNEL, sums) },
            None => Ok(()),
        }
    }
}
