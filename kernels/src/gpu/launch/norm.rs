//! RMSNorm and layer norm over rows of the residual stream or of activations.

use bytemuck::{Pod, Zeroable};

use super::partial_sums::Runs;
use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{NormGradient, NormInput};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    LAYER_NORM, LAYER_NORM_OF_ACTIVATIONS, RMS_NORM, RMS_NORM_OF_ACTIVATIONS, Source,
};
use crate::gpu::{Gpu, GpuStream};
use crate::shape::NormShape;
use crate::view::{MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Rows up to this width are a warp's, longer ones a block's. Numerics: it chooses the order of a row's sums.
const SHORT_WIDTH: usize = 512;
/// Columns that a thread loads at once.
const COLUMNS: usize = 4;
/// The most rows that the forward norm of few rows is given. It gives the same bits.
const FEW_ROWS: usize = 32;
/// The most columns of rows that registers hold.
const HELD_COLUMNS: usize = KEPT * THREADS as usize * COLUMNS;
/// Packs of a row that a thread holds in registers: `KEPT` of norm.h.
const KEPT: usize = 4;
/// Columns of rows that a backward norm holds of which it loads the next row ahead, a pack or two of each thread. (Of more packs it is
/// slower: a multiprocessor has one block then.)
const COLUMNS_AHEAD: [usize; 2] = [THREADS as usize * COLUMNS, 2 * THREADS as usize * COLUMNS];
/// Rows over which a team sums the gradients of parameters. Numerics.
const RUN_ROWS: usize = 16;

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

/// What the norm is of and with.
pub(in crate::gpu) struct NormInputs<'a, D: Driver, P: Precision> {
    pub(in crate::gpu) x: NormInput<'a, Gpu<D, P>>,
    pub(in crate::gpu) weight: Slice<'a, Gpu<D, P>, f32>,
    pub(in crate::gpu) bias: Option<Slice<'a, Gpu<D, P>, f32>>,
}

/// The gradients of the parameters, `[grains, d]` each.
pub(in crate::gpu) struct ParameterGradients<'a, D: Driver, P: Precision> {
    pub(in crate::gpu) dweight: SliceMut<'a, Gpu<D, P>, f32>,
    pub(in crate::gpu) dbias: Option<SliceMut<'a, Gpu<D, P>, f32>>,
}

/// What the gradients of the norm are formed from.
pub(in crate::gpu) struct NormSaved<'a, D: Driver, P: Precision> {
    pub(in crate::gpu) x: NormInput<'a, Gpu<D, P>>,
    pub(in crate::gpu) statistics: Slice<'a, Gpu<D, P>, f32>,
    pub(in crate::gpu) weight: Slice<'a, Gpu<D, P>, f32>,
}

/// The variants of a kernel: for rows of a block's width, then for rows of a warp's; of each the wide one, then the single.
type Variants = [[KernelName; 2]; 2];

/// A norm in one direction, of one kind of x.
pub(in crate::gpu) struct Norm {
    kernel: KernelName,
    source: &'static Source,
    /// What its statistics are called, and how many a row or a head has.
    statistics: (&'static str, usize),
    variants: Variants,
    /// The forward kernel for few rows of a block's width, all of whose loads are wide.
    few: Option<KernelName>,
    /// The backward kernels, for rows of a block's width, that load the next row ahead: for rows of up to so many columns as
    /// [`COLUMNS_AHEAD`] says. They give the same bits as those of all widths.
    ahead: Option<[KernelName; 2]>,
}

macro_rules! norm {
    ($kernel:expr, $source:ident, $statistics:expr, $variants:literal) => {
        Norm {
            kernel: $kernel,
            source: &$source,
            statistics: $statistics,
            variants: [
                [concat!($variants, "_wide"), concat!($variants, "_single")],
                [concat!($variants, "_short_wide"), concat!($variants, "_short_single")],
            ],
            few: None,
            ahead: None,
        }
    };
    (forward $($of:tt),*; $variants:literal) => {
        Norm { few: Some(concat!($variants, "_few")), ..norm!($($of),*, $variants) }
    };
    (backward $($of:tt),*; $variants:literal) => {
        Norm {
            ahead: Some([concat!($variants, "_ahead_narrow"), concat!($variants, "_ahead")]),
            ..norm!($($of),*, $variants)
        }
    };
}

/// Reciprocal roots of mean squares.
const OF_RMS_NORM: (&str, usize) = ("reciprocal_rms", 1);

/// RMSNorm of such an x, forward.
pub(in crate::gpu) fn rms_norm_forward<D: Driver, P: Precision>(
    x: &NormInput<'_, Gpu<D, P>>,
) -> Norm {
    let kernel = "rms_norm_forward";
    match x {
        NormInput::Residual(_) => norm!(forward kernel, RMS_NORM, OF_RMS_NORM; "rms_norm_forward"),
        NormInput::Activation(_) => {
            norm!(kernel, RMS_NORM_OF_ACTIVATIONS, OF_RMS_NORM, "rms_norm_forward_activation")
        }
    }
}

/// RMSNorm of such an x, backward.
pub(in crate::gpu) fn rms_norm_backward<D: Driver, P: Precision>(
    x: &NormInput<'_, Gpu<D, P>>,
) -> Norm {
    let kernel = "rms_norm_backward";
    match x {
        NormInput::Residual(_) => {
            norm!(backward kernel, RMS_NORM, OF_RMS_NORM; "rms_norm_backward")
        }
        NormInput::Activation(_) => {
            norm!(kernel, RMS_NORM_OF_ACTIVATIONS, OF_RMS_NORM, "rms_norm_backward_activation")
        }
    }
}

/// Means, and reciprocal deviations.
const OF_LAYER_NORM: (&str, usize) = ("statistics", 2);

/// Layer norm of such an x, forward.
pub(in crate::gpu) fn layer_norm_forward<D: Driver, P: Precision>(
    x: &NormInput<'_, Gpu<D, P>>,
) -> Norm {
    let kernel = "layer_norm_forward";
    match x {
        NormInput::Residual(_) => {
            norm!(forward kernel, LAYER_NORM, OF_LAYER_NORM; "layer_norm_forward_residual")
        }
        NormInput::Activation(_) => {
            norm!(
                forward kernel, LAYER_NORM_OF_ACTIVATIONS, OF_LAYER_NORM;
                "layer_norm_forward_activation"
            )
        }
    }
}

/// Layer norm of such an x, backward.
pub(in crate::gpu) fn layer_norm_backward<D: Driver, P: Precision>(
    x: &NormInput<'_, Gpu<D, P>>,
) -> Norm {
    let kernel = "layer_norm_backward";
    match x {
        NormInput::Residual(_) => {
            norm!(backward kernel, LAYER_NORM, OF_LAYER_NORM; "layer_norm_backward_residual")
        }
        NormInput::Activation(_) => {
            norm!(
                kernel,
                LAYER_NORM_OF_ACTIVATIONS,
                OF_LAYER_NORM,
                "layer_norm_backward_activation"
            )
        }
    }
}

/// Where rows begin, and the elements between them.
type PlacedRows = (Address, u64);

/// The rows that a kernel reads or writes, by the type of their elements.
#[derive(Default)]
struct Operands {
    fp32: Vec<PlacedRows>,
    activations: Vec<PlacedRows>,
}

/// The bytes that a pack of columns of `T` is aligned to.
fn pack_bytes<T>() -> u64 {
    ((COLUMNS * size_of::<T>()) as u64).min(WIDE_BYTES)
}

fn access_of<T>(rows: &[PlacedRows]) -> Access {
    let placed = rows.iter().map(|&(address, stride)| (address, stride_bytes::<T>(stride)));
    Access::of(pack_bytes::<T>(), &placed.collect::<Vec<_>>())
}

impl Operands {
    /// Wide where `width` is whole packs, and all rows are aligned to them.
    fn access<A>(&self, width: usize) -> Access {
        if !width.is_multiple_of(COLUMNS) {
            return Access::Single;
        }
        match access_of::<f32>(&self.fp32) {
            Access::Wide => access_of::<A>(&self.activations),
            Access::Single => Access::Single,
        }
    }

    /// Checks x, and whether such a norm has heads, and adds it.
    fn place_input<D: Driver, P: Precision>(
        &mut self,
        norm: &Norm,
        x: &NormInput<'_, Gpu<D, P>>,
        shape: NormShape,
    ) -> Result<PlacedRows> {
        let kernel = norm.kernel;
        if !std::ptr::eq(norm.source, &raw const RMS_NORM_OF_ACTIVATIONS) {
            shape.check_whole_rows(kernel)?;
        }
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

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The variant for rows of `width`, and how many teams its blocks have.
    fn norm_variant(&self, norm: &Norm, access: Access, width: usize) -> (KernelName, usize) {
        let short = width <= SHORT_WIDTH;
        let [wide, single] = norm.variants[usize::from(short)];
        let team = if short { self.driver.properties().warp } else { THREADS };
        (access.choose(wide, single), (THREADS / team) as usize)
    }

    /// The norm of each row.
    pub(in crate::gpu) fn launch_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        norm: &Norm,
        y: MatrixMut<'_, Self, P::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        inputs: NormInputs<'_, D, P>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = norm.kernel;
        let (rows, width) = (shape.normed().rows(), shape.width());
        let (name, per_row) = norm.statistics;
        exactly_mut(kernel, name, &statistics, per_row * rows)?;
        exactly(kernel, "weight", &inputs.weight, width)?;
        if let Some(bias) = &inputs.bias {
            exactly(kernel, "bias", bias, width)?;
        }
        let mut operands = Operands::default();
        let (x, x_stride) = operands.place_input(norm, &inputs.x, shape)?;
        let arguments = Forward {
            y_stride: row_stride_mut(kernel, "y", &y, shape.grains().rows(), shape.columns())?,
            y: y.address(),
            statistics: statistics.address(),
            x,
            weight: inputs.weight.address(),
            bias: inputs.bias.address(),
            x_stride,
            rows: rows as u64,
            width: size32(kernel, "width", width)?,
            eps: shape.eps(),
            heads: size32(kernel, "heads", shape.heads())?,
            unused: 0,
        };
        // An absent bias has address 0, which counts as aligned.
        operands.fp32.extend([(arguments.weight, 0), (arguments.bias, 0)]);
        operands.activations.push((arguments.y, arguments.y_stride));
        let access = operands.access::<P::Activation>(width);
        let is_few = rows <= FEW_ROWS && (SHORT_WIDTH + 1..=HELD_COLUMNS).contains(&width);
        let (name, teams) = match (norm.few, access) {
            (Some(few), Access::Wide) if is_few => (few, 1),
            _ => self.norm_variant(norm, access, width),
        };
        let launch = blocks(kernel, rows.div_ceil(teams), THREADS)?.early(rows);
        // SAFETY: rows and vectors were checked against the shape; the norm is one of such an x.
        unsafe { self.launch(stream, norm.source, name, launch, arguments) }
    }

    /// The gradient of x; partial sums of those of the parameters over runs of rows, then those of grains.
    pub(in crate::gpu) fn launch_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        norm: &Norm,
        gradient: NormGradient<'_, Self>,
        parameters: ParameterGradients<'_, D, P>,
        saved: NormSaved<'_, D, P>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = norm.kernel;
        let (grains, width) = (shape.grains(), shape.width());
        let (rows, columns) = (grains.rows(), shape.columns());
        let elements = grains.grains() * width;
        if !gradient.is_of(&saved.x) {
            return Err(KernelError::shape(kernel, "gradient", "that of the kind of x", "another"));
        }
        let ParameterGradients { dweight, dbias } = parameters;
        exactly_mut(kernel, "dweight", &dweight, elements)?;
        if let Some(dbias) = &dbias {
            exactly_mut(kernel, "dbias", dbias, elements)?;
        }
        let (name, per_row) = norm.statistics;
        exactly(kernel, name, &saved.statistics, per_row * shape.normed().rows())?;
        exactly(kernel, "weight", &saved.weight, width)?;
        let mut operands = Operands::default();
        let (x, x_stride) = operands.place_input(norm, &saved.x, shape)?;
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
        let runs = Runs::new(kernel, shape.normed(), RUN_ROWS, width)?;
        let sums = self.partial_sums(stream, [dweight.address(), dbias.address()], runs)?;
        let arguments = Backward {
            dx,
            rounded: rounded_to.0,
            partials: sums.partials,
            dy,
            x,
            statistics: saved.statistics.address(),
            weight: saved.weight.address(),
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
        operands.fp32.push((arguments.weight, 0));
        let access = operands.access::<P::Activation>(width);
        let place = COLUMNS_AHEAD.iter().position(|&most| width <= most);
        let (name, teams) = match (norm.ahead.zip(place), access) {
            (Some((ahead, place)), Access::Wide) if width > SHORT_WIDTH => (ahead[place], 1),
            _ => self.norm_variant(norm, access, width),
        };
        let launch = blocks(kernel, runs.runs.div_ceil(teams), THREADS)?;
        // SAFETY: as in forward; there is a partial sum for each run of rows and each gradient that is asked for.
        unsafe { self.launch(stream, norm.source, name, launch, arguments) }?;
        if arguments.rounded != Address::NULL && access == Access::Single {
            let launch = blocks(kernel, rows, THREADS)?;
            // SAFETY: both matrices were checked against the shape; a block has a row.
            unsafe { self.launch(stream, norm.source, "round_dx_single", launch, arguments) }?;
        }
        // SAFETY: the gradients hold every grain's; `runs` partial sums of each were just formed.
        unsafe { self.launch_sum_partials(stream, kernel, &sums) }
    }
}
