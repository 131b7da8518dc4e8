//! RMSNorm and layer norm over rows of the residual stream or of activations.

use bytemuck::{Pod, Zeroable};

use super::partial_sums::Runs;
use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{
    Norm, NormGradient, NormGradients, NormInput, NormInputs, NormSaved, Runtime,
};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    LAYER_NORM, LAYER_NORM_BACKWARD, LAYER_NORM_OF_ACTIVATIONS, LAYER_NORM_OF_ACTIVATIONS_BACKWARD,
    RMS_NORM, RMS_NORM_BACKWARD, RMS_NORM_HEADS, RMS_NORM_OF_ACTIVATIONS,
    RMS_NORM_OF_ACTIVATIONS_BACKWARD, Source,
};
use crate::gpu::{Gpu, GpuStream};
use crate::shape::{NormKind, NormShape};
use crate::view::{MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Rows up to this width are a warp's, longer ones a block's, where no kernel of narrow heads is. Numerics: it chooses the order of a
/// row's sums.
const SHORT_WIDTH: usize = 512;
/// Columns that a thread loads at once.
const COLUMNS: usize = 4;
/// The most rows that the forward norm of few rows is given on a small device. It gives the same bits as that of any rows.
const FEW_ROWS: usize = 32;
/// And on a larger one, for each multiprocessor: all of them have a block at once.
const FEW_BLOCKS: usize = 2;
/// The most columns of rows that registers hold.
const HELD_COLUMNS: usize = KEPT * THREADS as usize * COLUMNS;
/// Packs of a row that a thread holds in registers: `KEPT` of norm.h.
const KEPT: usize = 4;
/// The widest rows of the norms that load the next rows ahead: those of one pack a thread, and of two. (Of more packs the backward norm
/// is slower: a multiprocessor has one block then.)
const COLUMNS_AHEAD: [usize; 2] = [THREADS as usize * COLUMNS, 2 * THREADS as usize * COLUMNS];
/// Rows of a block of a forward norm that loads the next rows ahead: `FORWARD_ROWS` of norm_ahead.h.
const FORWARD_ROWS: usize = 8;
/// Such blocks that a forward norm must have for each multiprocessor: of fewer rows, each has a block, so that more are at work.
const FORWARD_BLOCKS: usize = 4;
/// Rows over which a team sums the gradients of parameters. Numerics.
const RUN_ROWS: usize = 16;
/// The widths of narrow heads: those that the kernels of narrow heads are for. Numerics.
const HEAD_WIDTHS: [usize; 2] = [64, 128];
/// Narrow heads over which a block sums the gradient of their weight: `RUN_HEADS` of norm.h. Numerics.
const RUN_HEADS: usize = 512;
/// The threads of such a head, and the columns that each loads at once: `TEAM` and `PACK` of rms_norm_heads.cu.
const HEAD_TEAM: u32 = 8;
const HEAD_COLUMNS: usize = 8;

/// `NormForward` of norm.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Forward {
    y: Address,
    statistics: Address,
    x: Address,
    weight: Address,
    bias: Address,
    y_stride: u64,
    x_stride: u64,
    rows: u64,
    width: u32,
    eps: f32,
    heads: u32,
    unused: u32,
}

/// `NormBackward` of norm.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    dx: Address,
    rounded: Address,
    partials: [Address; 2],
    dy: Address,
    x: Address,
    statistics: Address,
    weight: Address,
    dx_stride: u64,
    rounded_stride: u64,
    dy_stride: u64,
    x_stride: u64,
    rows: u64,
    rows_per_grain: u64,
    runs: u64,
    runs_per_grain: u32,
    width: u32,
    heads: u32,
    unused: u32,
}

/// The variants of a kernel: for rows of a block's width, then for rows of a warp's; of each the wide one, then the single.
type Variants = [[KernelName; 2]; 2];

/// A norm in one direction, of one kind of x.
struct Kernels {
    source: &'static Source,
    variants: Variants,
    /// The forward kernel for few rows of a block's width, all of whose loads are wide.
    few: Option<KernelName>,
    /// The kernels for rows of a block's width that load the next rows ahead, one for each entry of [`COLUMNS_AHEAD`], the most columns
    /// of a row, as far as they are faster. They give the same bits as the kernels for all widths.
    ahead: &'static [KernelName],
    /// The kernels for narrow rows, or heads of them, one for each of [`HEAD_WIDTHS`]; of each the wide one, then the single.
    heads: Option<[[KernelName; 2]; 2]>,
}

/// The kernel of a launch.
struct Chosen {
    source: &'static Source,
    name: KernelName,
    /// Rows of a block, or runs of them.
    rows_of_block: usize,
}

macro_rules! kernels {
    ($source:ident, $variants:literal) => {
        Kernels {
            source: &$source,
            variants: [
                [concat!($variants, "_wide"), concat!($variants, "_single")],
                [concat!($variants, "_short_wide"), concat!($variants, "_short_single")],
            ],
            few: None,
            ahead: &[],
            heads: None,
        }
    };
    ($source:ident, $variants:literal, few) => {
        Kernels { few: Some(concat!($variants, "_few")), ..kernels!($source, $variants) }
    };
    ($source:ident, $variants:literal, ahead) => {
        Kernels {
            ahead: &[concat!($variants, "_ahead_narrow"), concat!($variants, "_ahead")],
            ..kernels!($source, $variants)
        }
    };
    ($source:ident, $variants:literal, $heads:literal) => {
        Kernels {
            heads: Some([
                [concat!($heads, "_64_wide"), concat!($heads, "_64_single")],
                [concat!($heads, "_128_wide"), concat!($heads, "_128_single")],
            ]),
            ..kernels!($source, $variants)
        }
    };
}

impl Kernels {
    fn forward<B: Runtime>(kind: NormKind, x: &NormInput<'_, B>) -> Self {
        match (kind, x) {
            (NormKind::RootMeanSquare, NormInput::Residual(_)) => {
                // Wider rows are faster by blocks of a row each.
                let ahead = &["rms_norm_forward_ahead_narrow"];
                Self { ahead, ..kernels!(RMS_NORM, "rms_norm_forward", few) }
            }
            (NormKind::RootMeanSquare, NormInput::Activation(_)) => {
                kernels!(
                    RMS_NORM_OF_ACTIVATIONS,
                    "rms_norm_forward_activation",
                    "rms_norm_forward_heads"
                )
            }
            (NormKind::Layer, NormInput::Residual(_)) => {
                let few = Some("layer_norm_forward_residual_few");
                Self { few, ..kernels!(LAYER_NORM, "layer_norm_forward_residual", ahead) }
            }
            (NormKind::Layer, NormInput::Activation(_)) => {
                kernels!(LAYER_NORM_OF_ACTIVATIONS, "layer_norm_forward_activation", few)
            }
        }
    }

    fn backward<B: Runtime>(kind: NormKind, x: &NormInput<'_, B>) -> Self {
        match (kind, x) {
            (NormKind::RootMeanSquare, NormInput::Residual(_)) => {
                kernels!(RMS_NORM_BACKWARD, "rms_norm_backward", ahead)
            }
            (NormKind::RootMeanSquare, NormInput::Activation(_)) => {
                kernels!(
                    RMS_NORM_OF_ACTIVATIONS_BACKWARD,
                    "rms_norm_backward_activation",
                    "rms_norm_backward_heads"
                )
            }
            (NormKind::Layer, NormInput::Residual(_)) => {
                kernels!(LAYER_NORM_BACKWARD, "layer_norm_backward_residual", ahead)
            }
            (NormKind::Layer, NormInput::Activation(_)) => {
                kernels!(LAYER_NORM_OF_ACTIVATIONS_BACKWARD, "layer_norm_backward_activation")
            }
        }
    }

    /// The kernels for rows or heads of the shape's width, if they are narrow and the norm has such kernels.
    ///
    /// # Errors
    /// More heads than they count.
    fn of_heads(&self, kernel: KernelName, shape: NormShape) -> Result<Option<[KernelName; 2]>> {
        let place = HEAD_WIDTHS.iter().position(|&most| shape.width() <= most);
        let Some((variants, place)) = self.heads.zip(place) else { return Ok(None) };
        size32(kernel, "heads of all rows", shape.normed().rows())?;
        Ok(Some(variants[place]))
    }

    /// The kernel that loads the next rows of `width` columns ahead, if there is one.
    fn ahead(&self, width: usize) -> Option<KernelName> {
        let mut of_widths = COLUMNS_AHEAD.iter().zip(self.ahead);
        of_widths.find(|&(&most, _)| width <= most).map(|(_, &name)| name)
    }

    /// The kernel for rows of `width`, where a warp has `warp` threads: `special`, which comes with the rows of its blocks, or runs of
    /// rows, where a row has a whole block of threads and all loads are wide.
    fn of_rows(
        &self,
        access: Access,
        width: usize,
        warp: u32,
        special: Option<(KernelName, usize)>,
    ) -> Chosen {
        let source = self.source;
        let short = width <= SHORT_WIDTH;
        if let Some((name, rows_of_block)) = special
            && !short
            && access == Access::Wide
        {
            return Chosen { source, name, rows_of_block };
        }
        let [wide, single] = self.variants[usize::from(short)];
        let team = if short { warp } else { THREADS };
        Chosen {
            source,
            name: access.choose(wide, single),
            rows_of_block: (THREADS / team) as usize,
        }
    }
}

/// The address of the first row, and the elements from row to row.
type PlacedRows = (Address, u64);

/// The rows that a kernel reads or writes, by the type of their elements.
#[derive(Default)]
struct Operands {
    fp32: Vec<PlacedRows>,
    activations: Vec<PlacedRows>,
}

/// The bytes that a pack of `columns` of `T` is aligned to.
fn pack_bytes<T>(columns: usize) -> u64 {
    ((columns * size_of::<T>()) as u64).min(WIDE_BYTES)
}

fn access_of<T>(rows: &[PlacedRows], columns: usize) -> Access {
    let placed = rows.iter().map(|&(address, stride)| (address, stride_bytes::<T>(stride)));
    Access::of(pack_bytes::<T>(columns), &placed.collect::<Vec<_>>())
}

impl Operands {
    /// Wide where `width` is whole packs of `columns`, and all rows are aligned to them.
    fn access<A>(&self, width: usize, columns: usize) -> Access {
        if !width.is_multiple_of(columns) {
            return Access::Single;
        }
        access_of::<f32>(&self.fp32, columns).and(access_of::<A>(&self.activations, columns))
    }

    /// Checks what both directions read, and adds x and the weight: where the rows of x are.
    fn read<D: Driver, P: Precision>(
        &mut self,
        kernel: KernelName,
        x: &NormInput<'_, Gpu<D, P>>,
        [statistics, weight]: [&Slice<'_, Gpu<D, P>, f32>; 2],
        shape: NormShape,
    ) -> Result<PlacedRows> {
        exactly(kernel, "statistics", statistics, shape.statistics())?;
        exactly(kernel, "weight", weight, shape.width())?;
        self.fp32.push((weight.address(), 0));
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        let (operands, placed) = match x {
            NormInput::Residual(x) => {
                (&mut self.fp32, (x.address(), row_stride(kernel, "x", x, rows, columns)?))
            }
            NormInput::Activation(x) => {
                (&mut self.activations, (x.address(), row_stride(kernel, "x", x, rows, columns)?))
            }
        };
        operands.push(placed);
        Ok(placed)
    }
}

impl<D: Driver, P: Precision> Norm for Gpu<D, P> {
    fn norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        inputs: NormInputs<'_, Self>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = inputs.check(shape)?;
        let NormInputs { x, weight, bias } = inputs;
        let kernels = Kernels::forward(shape.kind(), &x);
        let (rows, width) = (shape.normed().rows(), shape.width());
        if let Some(bias) = &bias {
            exactly(kernel, "bias", bias, width)?;
        }
        let mut operands = Operands::default();
        let (x, x_stride) = operands.read(kernel, &x, [&statistics.as_slice(), &weight], shape)?;
        let arguments = Forward {
            y_stride: row_stride_mut(kernel, "y", &y, shape.grains().rows(), shape.columns())?,
            y: y.address(),
            statistics: statistics.address(),
            x,
            weight: weight.address(),
            bias: bias.address(),
            x_stride,
            rows: rows as u64,
            width: size32(kernel, "width", width)?,
            eps: shape.eps(),
            heads: size32(kernel, "heads", shape.heads())?,
            unused: 0,
        };
        // An absent bias has address 0, which counts as aligned.
        operands.fp32.push((arguments.bias, 0));
        operands.activations.push((arguments.y, arguments.y_stride));
        let of_heads = kernels.of_heads(kernel, shape)?;
        let columns = if of_heads.is_some() { HEAD_COLUMNS } else { COLUMNS };
        let access = operands.access::<P::Activation>(width, columns);
        let Chosen { source, name, rows_of_block } = match of_heads {
            Some([wide, single]) => {
                let (name, rows_of_block) = (access.choose(wide, single), THREADS / HEAD_TEAM);
                Chosen { source: &RMS_NORM_HEADS, name, rows_of_block: rows_of_block as usize }
            }
            None => {
                let device = self.driver.properties();
                let multiprocessors = device.multiprocessors as usize;
                let few_rows = FEW_ROWS.max(FEW_BLOCKS * multiprocessors);
                let many_rows = FORWARD_ROWS * FORWARD_BLOCKS * multiprocessors;
                let special = if rows <= few_rows && width <= HELD_COLUMNS {
                    kernels.few.zip(Some(1))
                } else if rows >= many_rows {
                    kernels.ahead(width).zip(Some(FORWARD_ROWS))
                } else {
                    None
                };
                kernels.of_rows(access, width, device.warp, special)
            }
        };
        let launch = blocks(kernel, rows.div_ceil(rows_of_block), THREADS)?.early(rows);
        // SAFETY: rows and vectors were checked against the shape; the kernels are those of such an x.
        unsafe { self.launch(stream, source, name, launch, arguments) }
    }

    /// The gradient of x; partial sums of those of the parameters over runs of rows, then those of grains.
    fn norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: NormGradients<'_, Self>,
        saved: NormSaved<'_, Self>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = gradients.check(&saved.x, shape)?;
        let NormGradients { x: gradient, dweight, dbias } = gradients;
        let NormSaved { x, statistics, weight } = saved;
        let kernels = Kernels::backward(shape.kind(), &x);
        let (grains, width) = (shape.grains(), shape.width());
        let (rows, columns) = (grains.rows(), shape.columns());
        let elements = grains.grains() * width;
        exactly_mut(kernel, "dweight", &dweight, elements)?;
        if let Some(dbias) = &dbias {
            exactly_mut(kernel, "dbias", dbias, elements)?;
        }
        let mut operands = Operands::default();
        let (x, x_stride) = operands.read(kernel, &x, [&statistics, &weight], shape)?;
        let mut rounded_to = (Address::NULL, 0);
        let ((dx, dx_stride), (dy, dy_stride)) = match gradient {
            NormGradient::Residual { dx, rounded, dy } => {
                if let Some(rounded) = rounded {
                    let stride = row_stride_mut(kernel, "rounded", &rounded, rows, width)?;
                    rounded_to = (rounded.address(), stride);
                }
                let dx = (dx.address(), row_stride_mut(kernel, "dx", &dx, rows, width)?);
                operands.fp32.push(dx);
                (dx, (dy.address(), row_stride(kernel, "dy", &dy, rows, width)?))
            }
            NormGradient::InPlace(dx) => {
                let dx = (dx.address(), row_stride_mut(kernel, "dx", &dx, rows, columns)?);
                (dx, dx)
            }
        };
        // An absent copy has address 0, which counts as aligned.
        operands.activations.extend([(dy, dy_stride), rounded_to]);
        let of_heads = kernels.of_heads(kernel, shape)?;
        let (run_rows, columns) = match of_heads {
            Some(_) => (RUN_HEADS, HEAD_COLUMNS),
            None => (RUN_ROWS, COLUMNS),
        };
        let runs = Runs::new(kernel, shape.normed(), run_rows, width)?;
        let sums = self.partial_sums(stream, [dweight.address(), dbias.address()], runs)?;
        let arguments = Backward {
            dx,
            rounded: rounded_to.0,
            partials: sums.partials,
            dy,
            x,
            statistics: statistics.address(),
            weight: weight.address(),
            dx_stride,
            rounded_stride: rounded_to.1,
            dy_stride,
            x_stride,
            rows: runs.rows,
            rows_per_grain: runs.rows_per_grain,
            runs: runs.runs as u64,
            runs_per_grain: runs.runs_per_grain,
            width: runs.width,
            heads: size32(kernel, "heads", shape.heads())?,
            unused: 0,
        };
        let access = operands.access::<P::Activation>(width, columns);
        let Chosen { source, name, rows_of_block } = match of_heads {
            // A block has a run.
            Some([wide, single]) => Chosen {
                source: &RMS_NORM_HEADS,
                name: access.choose(wide, single),
                rows_of_block: 1,
            },
            None => {
                let ahead = kernels.ahead(width).zip(Some(1));
                kernels.of_rows(access, width, self.driver.properties().warp, ahead)
            }
        };
        let launch = blocks(kernel, runs.runs.div_ceil(rows_of_block), THREADS)?;
        // SAFETY: as in forward; there is a partial sum for each run of rows and each gradient that is asked for.
        unsafe { self.launch(stream, source, name, launch, arguments) }?;
        if arguments.rounded != Address::NULL && access == Access::Single {
            let launch = blocks(kernel, rows, THREADS)?;
            // SAFETY: both matrices were checked against the shape; a block has a row.
            unsafe { self.launch(stream, kernels.source, "round_dx_single", launch, arguments) }?;
        }
        // SAFETY: the gradients hold every grain's; `runs` partial sums of each were just formed.
        unsafe { self.launch_sum_partials(stream, kernel, &sums) }
    }
}
