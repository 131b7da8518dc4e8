//! RMSNorm over rows of the residual stream.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::RMS_NORM;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::NormShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Rows up to this width are a warp's, longer ones a block's. Numerics: it chooses the order of a row's sum.
const SHORT_WIDTH: usize = 512;
/// Columns that a thread loads at once.
const COLUMNS: usize = 4;
/// Rows over which a team sums `dweight`. Numerics.
const RUN_ROWS: usize = 16;
const SUM_THREADS: u32 = 128;

/// `RmsNormForward` of rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Forward {
    y: Address,
    reciprocal_rms: Address,
    x: Address,
    weight: Address,
    y_stride: u64,
    x_stride: u64,
    rows: u64,
    width: u32,
    eps: f32,
}

/// `RmsNormBackward` of rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    dx: Address,
    partials: Address,
    dy: Address,
    x: Address,
    reciprocal_rms: Address,
    weight: Address,
    dx_stride: u64,
    dy_stride: u64,
    x_stride: u64,
    rows: u64,
    rows_per_grain: u64,
    runs: u64,
    runs_per_grain: u32,
    width: u32,
}

/// `RmsNormSumPartials` of rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumPartials {
    dweight: Address,
    partials: Address,
    runs: u64,
    elements: u64,
    runs_per_grain: u32,
    width: u32,
}

/// The bytes that a pack of columns of `T` is aligned to.
fn pack_bytes<T>() -> u64 {
    ((COLUMNS * size_of::<T>()) as u64).min(WIDE_BYTES)
}

/// Wide where `width` is whole packs, and the operands of fp32 and those of activations, each with its row
/// stride, are aligned to them.
pub(super) fn access<A>(
    width: usize,
    of_fp32: &[(Address, u64)],
    of_activations: &[(Address, u64)],
) -> Access {
    if !width.is_multiple_of(COLUMNS) {
        return Access::Single;
    }
    let bytes = |operands: &[(Address, u64)], stride: fn(u64) -> u64| -> Vec<(Address, u64)> {
        operands.iter().map(|&(address, elements)| (address, stride(elements))).collect()
    };
    let fp32 = Access::of(pack_bytes::<f32>(), &bytes(of_fp32, stride_bytes::<f32>));
    let activations = Access::of(pack_bytes::<A>(), &bytes(of_activations, stride_bytes::<A>));
    if fp32 == Access::Wide { activations } else { fp32 }
}

/// The variants of a kernel: for rows of a block's width, then for rows of a warp's.
struct Variants {
    wide: [KernelName; 2],
    single: [KernelName; 2],
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The variant for rows of `width`, and how many teams its blocks have.
    fn norm_variant(
        &self,
        variants: &Variants,
        access: Access,
        width: usize,
    ) -> (KernelName, usize) {
        let short = width <= SHORT_WIDTH;
        let name =
            access.choose(variants.wide[usize::from(short)], variants.single[usize::from(short)]);
        let team = if short { self.driver.properties().warp } else { THREADS };
        (name, (THREADS / team) as usize)
    }

    /// The norm of each row.
    pub(in crate::gpu) fn launch_rms_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "rms_norm_forward";
        const VARIANTS: Variants = Variants {
            wide: ["rms_norm_forward_wide", "rms_norm_forward_short_wide"],
            single: ["rms_norm_forward_single", "rms_norm_forward_short_single"],
        };
        let (rows, width) = (shape.grains().rows(), shape.width());
        exactly_mut(KERNEL, "reciprocal_rms", &reciprocal_rms, rows)?;
        exactly(KERNEL, "weight", &weight, width)?;
        let arguments = Forward {
            y_stride: row_stride_mut(KERNEL, "y", &y, rows, width)?,
            x_stride: row_stride(KERNEL, "x", &x, rows, width)?,
            y: y.address(),
            reciprocal_rms: reciprocal_rms.address(),
            x: x.address(),
            weight: weight.address(),
            rows: rows as u64,
            width: size32(KERNEL, "width", width)?,
            eps: shape.eps(),
        };
        let access = access::<P::Activation>(
            width,
            &[(arguments.x, arguments.x_stride), (arguments.weight, 0)],
            &[(arguments.y, arguments.y_stride)],
        );
        let (name, teams) = self.norm_variant(&VARIANTS, access, width);
        let launch = blocks(KERNEL, rows.div_ceil(teams), THREADS)?;
        // SAFETY: rows and vectors were checked against the shape.
        unsafe { self.launch(stream, &RMS_NORM, name, launch, arguments) }
    }

    /// Adds to `dx`; partial sums of `dweight` over runs of rows, then those of grains.
    #[allow(clippy::too_many_arguments)]
    pub(in crate::gpu) fn launch_rms_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, f32>,
        dweight: SliceMut<'_, Self, f32>,
        dy: Matrix<'_, Self, P::Activation>,
        x: Matrix<'_, Self, f32>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "rms_norm_backward";
        const VARIANTS: Variants = Variants {
            wide: ["rms_norm_backward_wide", "rms_norm_backward_short_wide"],
            single: ["rms_norm_backward_single", "rms_norm_backward_short_single"],
        };
        let (grains, width) = (shape.grains(), shape.width());
        let rows = grains.rows();
        exactly_mut(KERNEL, "dweight", &dweight, grains.grains() * width)?;
        exactly(KERNEL, "reciprocal_rms", &reciprocal_rms, rows)?;
        exactly(KERNEL, "weight", &weight, width)?;
        let [dx_stride, dy_stride, x_stride] = [
            row_stride_mut(KERNEL, "dx", &dx, rows, width)?,
            row_stride(KERNEL, "dy", &dy, rows, width)?,
            row_stride(KERNEL, "x", &x, rows, width)?,
        ];
        // More rows than there are make one grain all the same.
        let runs_per_grain = grains.rows_per_grain().min(rows).div_ceil(RUN_ROWS);
        let last_grain = grains.range(grains.grains() - 1);
        let runs = (grains.grains() - 1) * runs_per_grain + last_grain.len().div_ceil(RUN_ROWS);
        let partial_bytes = runs * width * size_of::<f32>();
        let partials = stream.scratch(&self.driver, ScratchSlot::First, partial_bytes)?;
        let arguments = Backward {
            dx: dx.address(),
            partials,
            dy: dy.address(),
            x: x.address(),
            reciprocal_rms: reciprocal_rms.address(),
            weight: weight.address(),
            dx_stride,
            dy_stride,
            x_stride,
            rows: rows as u64,
            rows_per_grain: grains.rows_per_grain().min(rows) as u64,
            runs: runs as u64,
            runs_per_grain: size32(KERNEL, "runs of rows", runs_per_grain)?,
            width: size32(KERNEL, "width", width)?,
        };
        let of_fp32 = [(arguments.dx, dx_stride), (arguments.x, x_stride), (arguments.weight, 0)];
        let access = access::<P::Activation>(width, &of_fp32, &[(arguments.dy, dy_stride)]);
        let (name, teams) = self.norm_variant(&VARIANTS, access, width);
        let launch = blocks(KERNEL, runs.div_ceil(teams), THREADS)?;
        // SAFETY: as in forward; there is a partial sum for each run of rows.
        unsafe { self.launch(stream, &RMS_NORM, name, launch, arguments) }?;

        let elements = grains.grains() * width;
        let sums = SumPartials {
            dweight: dweight.address(),
            partials,
            runs: arguments.runs,
            elements: elements as u64,
            runs_per_grain: arguments.runs_per_grain,
            width: arguments.width,
        };
        let launch = blocks(KERNEL, elements.div_ceil(SUM_THREADS as usize), SUM_THREADS)?;
        // SAFETY: `dweight` holds every grain's; `runs` partial sums were just formed.
        unsafe { self.launch(stream, &RMS_NORM, "rms_norm_sum_partials", launch, sums) }
    }
}
