//! Elementwise functions over the rows of matrices: biases, GELU and clamps; and the gradients of
//! biases.

use bytemuck::{Pod, Zeroable};

use super::partial_sums::Runs;
use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{Bias, Clamp, Element, Gelu};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::{BIAS, GELU, Source};
use crate::gpu::{Gpu, GpuStream};
use crate::shape::{GrainRows, check_limit};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Rows of a block.
const ROWS: usize = 4;
const SUM_THREADS: u32 = 128;
/// Rows that a thread sums of a bias's gradient. Numerics.
pub(super) const BIAS_RUN_ROWS: usize = 32;

/// Columns that a thread loads at once.
fn columns<T>() -> usize {
    WIDE_BYTES as usize / size_of::<T>()
}

/// `RowMap` of row_map.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RowMap {
    out: Address,
    x: Address,
    dout: Address,
    bias: Address,
    out_stride: u64,
    x_stride: u64,
    dout_stride: u64,
    rows: u64,
    width: u32,
    limit: f32,
}

/// `BiasBackward` of bias.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BiasBackward {
    partials: Address,
    dout: Address,
    dout_stride: u64,
    rows: u64,
    rows_per_grain: u64,
    runs_per_grain: u32,
    width: u32,
}

/// A kernel, and its variants for wide loads and for single ones.
pub(in crate::gpu) struct Map {
    kernel: KernelName,
    source: &'static Source,
    wide: KernelName,
    single: KernelName,
}

macro_rules! map {
    ($kernel:literal, $source:ident, $variants:literal) => {
        Map {
            kernel: $kernel,
            source: &$source,
            wide: concat!($variants, "_wide"),
            single: concat!($variants, "_single"),
        }
    };
}

/// `out += bias` of activations.
pub(in crate::gpu) const ADD_BIAS: Map = map!("add_bias", BIAS, "add_bias");
/// `out += bias` of fp32.
pub(in crate::gpu) const ADD_BIAS_F32: Map = map!("add_bias_f32", BIAS, "add_bias_f32");
/// `out` is x within a limit.
const CLAMP: Map = map!("clamp", BIAS, "clamp");
/// `out` is zero where x is beyond a limit.
const CLAMP_BACKWARD: Map = map!("clamp_backward", BIAS, "clamp_backward");

/// `out = gelu(x + bias)`
pub(in crate::gpu) fn gelu_forward(gelu: Gelu) -> Map {
    match gelu {
        Gelu::Erf => map!("gelu_forward", GELU, "gelu_erf_forward"),
        Gelu::Tanh => map!("gelu_forward", GELU, "gelu_tanh_forward"),
    }
}

/// The inputs of a map. Without x, or without dout, the output's elements are read in its place.
pub(in crate::gpu) struct MapInputs<'a, D: Driver, P: Precision, T: Element> {
    pub(in crate::gpu) x: Option<Matrix<'a, Gpu<D, P>, T>>,
    pub(in crate::gpu) dout: Option<Matrix<'a, Gpu<D, P>, T>>,
    pub(in crate::gpu) bias: Option<Slice<'a, Gpu<D, P>, f32>>,
    pub(in crate::gpu) limit: f32,
}

impl<'a, D: Driver, P: Precision, T: Element> MapInputs<'a, D, P, T> {
    /// The output and a bias.
    pub(in crate::gpu) fn of_bias(bias: Slice<'a, Gpu<D, P>, f32>) -> Self {
        Self { x: None, dout: None, bias: Some(bias), limit: 0.0 }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The map of each element.
    pub(in crate::gpu) fn launch_row_map<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        map: &Map,
        out: MatrixMut<'_, Self, T>,
        inputs: MapInputs<'_, D, P, T>,
    ) -> Result<()> {
        let kernel = map.kernel;
        let (rows, width) = (out.rows, out.columns);
        let placed_out = (out.address(), row_stride_mut(kernel, "out", &out, rows, width)?);
        let place = |what, matrix: Option<Matrix<'_, Self, T>>| -> Result<(Address, u64)> {
            match matrix {
                Some(matrix) => {
                    Ok((matrix.address(), row_stride(kernel, what, &matrix, rows, width)?))
                }
                None => Ok(placed_out),
            }
        };
        let (x, dout) = (place("x", inputs.x)?, place("dout", inputs.dout)?);
        if let Some(bias) = &inputs.bias {
            exactly(kernel, "bias", bias, width)?;
        }
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let arguments = RowMap {
            out: placed_out.0,
            x: x.0,
            dout: dout.0,
            bias: inputs.bias.address(),
            out_stride: placed_out.1,
            x_stride: x.1,
            dout_stride: dout.1,
            rows: rows as u64,
            width: size32(kernel, "width", width)?,
            limit: inputs.limit,
        };
        let mut operands = vec![(arguments.bias, 0)];
        operands.extend([placed_out, x, dout].map(|(at, stride)| (at, stride_bytes::<T>(stride))));
        let access = if width.is_multiple_of(columns::<T>()) {
            Access::of(WIDE_BYTES, &operands)
        } else {
            Access::Single
        };
        let name = access.choose(map.wide, map.single);
        let tiles = width.div_ceil(THREADS as usize * columns::<T>());
        let launch = blocks(kernel, rows.div_ceil(ROWS) * tiles, THREADS)?.early(rows);
        // SAFETY: all operands were checked against the output's rows and columns; the kernel is one of elements of type `T`.
        unsafe { self.launch(stream, map.source, name, launch, arguments) }
    }
}

impl<D: Driver, P: Precision> Bias for Gpu<D, P> {
    fn add_bias(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.launch_row_map(stream, &ADD_BIAS, out, MapInputs::of_bias(bias))
    }

    fn add_bias_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.launch_row_map(stream, &ADD_BIAS_F32, out, MapInputs::of_bias(bias))
    }

    fn bias_backward(
        &self,
        stream: &mut GpuStream<D>,
        dbias: SliceMut<'_, Self, f32>,
        dout: Matrix<'_, Self, P::Activation>,
        grains: GrainRows,
    ) -> Result<()> {
        const KERNEL: &str = "bias_backward";
        let (rows, width) = (grains.rows(), dout.columns);
        exactly_mut(KERNEL, "dbias", &dbias, grains.grains() * width)?;
        let dout_stride = row_stride(KERNEL, "dout", &dout, rows, width)?;
        if width == 0 {
            return Ok(());
        }
        let runs = Runs::new(KERNEL, grains, BIAS_RUN_ROWS, width)?;
        let sums = self.partial_sums(stream, [dbias.address(), Address::NULL], runs)?;
        let arguments = BiasBackward {
            partials: sums.partials[0],
            dout: dout.address(),
            dout_stride,
            rows: runs.rows,
            rows_per_grain: runs.rows_per_grain,
            runs_per_grain: runs.runs_per_grain,
            width: runs.width,
        };
        let columns = columns::<P::Activation>();
        let access = if width.is_multiple_of(columns) {
            let stride = stride_bytes::<P::Activation>(dout_stride);
            Access::of(WIDE_BYTES, &[(arguments.dout, stride)])
        } else {
            Access::Single
        };
        let name = access.choose("bias_backward_wide", "bias_backward_single");
        let tiles = width.div_ceil(SUM_THREADS as usize * columns);
        let launch = blocks(KERNEL, runs.runs * tiles, SUM_THREADS)?;
        // SAFETY: dout was checked; there is a partial sum for each run of rows.
        unsafe { self.launch(stream, &BIAS, name, launch, arguments) }?;
        // SAFETY: `dbias` holds every grain's; `runs` partial sums were just formed.
        unsafe { self.launch_sum_partials(stream, KERNEL, &sums) }
    }
}

impl<D: Driver, P: Precision> Clamp for Gpu<D, P> {
    fn clamp(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        limit: f32,
    ) -> Result<()> {
        check_limit(CLAMP.kernel, limit)?;
        let inputs = MapInputs { x: Some(x), dout: None, bias: None, limit };
        self.launch_row_map(stream, &CLAMP, out, inputs)
    }

    fn clamp_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        limit: f32,
    ) -> Result<()> {
        check_limit(CLAMP_BACKWARD.kernel, limit)?;
        let inputs = MapInputs { x: Some(x), dout: None, bias: None, limit };
        self.launch_row_map(stream, &CLAMP_BACKWARD, dx, inputs)
    }
}
