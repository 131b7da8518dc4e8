//! Layer norm over rows of the residual stream or of activations.

use bytemuck::{Pod, Zeroable};

use super::rms_norm::access;
use super::sizes::{Access, blocks, size32};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{NormGradient, NormInput};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::LAYER_NORM;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::NormShape;
use crate::view::{MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Rows up to this width are a warp's, longer ones a block's. Numerics: it chooses the order of a row's sums.
const SHORT_WIDTH: usize = 512;
/// Rows over which a team sums the gradients of parameters. Numerics.
const RUN_ROWS: usize = 16;
const SUM_THREADS: u32 = 128;

/// `LayerNormForward` of layer_norm.cu.
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
}

/// `LayerNormBackward` of layer_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    dx: Address,
    weight_partials: Address,
    bias_partials: Address,
    dy: Address,
    x: Address,
    statistics: Address,
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

/// `LayerNormSumPartials` of layer_norm.cu: of two parameters, or of one.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct SumPartials {
    pub(super) dweight: Address,
    pub(super) dbias: Address,
    pub(super) weight_partials: Address,
    pub(super) bias_partials: Address,
    pub(super) runs: u64,
    pub(super) elements: u64,
    pub(super) runs_per_grain: u32,
    pub(super) width: u32,
}

/// What the norm is of and with.
pub(in crate::gpu) struct LayerNormInputs<'a, D: Driver, P: Precision> {
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
pub(in crate::gpu) struct LayerNormSaved<'a, D: Driver, P: Precision> {
    pub(in crate::gpu) x: NormInput<'a, Gpu<D, P>>,
    pub(in crate::gpu) statistics: Slice<'a, Gpu<D, P>, f32>,
    pub(in crate::gpu) weight: Slice<'a, Gpu<D, P>, f32>,
}

/// Where rows begin, and the elements between them.
type PlacedRows = (Address, u64);

/// The rows that a kernel reads or writes, by the type of their elements.
#[derive(Default)]
struct Operands {
    fp32: Vec<PlacedRows>,
    activations: Vec<PlacedRows>,
}

impl Operands {
    fn access<A>(&self, width: usize) -> Access {
        access::<A>(width, &self.fp32, &self.activations)
    }
}

/// Checks x, and adds it to `operands`.
fn place_input<D: Driver, P: Precision>(
    kernel: KernelName,
    x: &NormInput<'_, Gpu<D, P>>,
    operands: &mut Operands,
    shape: NormShape,
) -> Result<PlacedRows> {
    let (rows, width) = (shape.grains().rows(), shape.width());
    Ok(match x {
        NormInput::Residual(x) => {
            operands.fp32.push((x.address(), row_stride(kernel, "x", x, rows, width)?));
            operands.fp32[operands.fp32.len() - 1]
        }
        NormInput::Activation(x) => {
            operands.activations.push((x.address(), row_stride(kernel, "x", x, rows, width)?));
            operands.activations[operands.activations.len() - 1]
        }
    })
}

/// The variants of a kernel: for rows of a block's width, then for rows of a warp's; of each the wide one, then the single.
type Variants = [[KernelName; 2]; 2];

const FORWARD_RESIDUAL: Variants = [
    ["layer_norm_forward_residual_wide", "layer_norm_forward_residual_single"],
    ["layer_norm_forward_residual_short_wide", "layer_norm_forward_residual_short_single"],
];
const FORWARD_ACTIVATION: Variants = [
    ["layer_norm_forward_activation_wide", "layer_norm_forward_activation_single"],
    ["layer_norm_forward_activation_short_wide", "layer_norm_forward_activation_short_single"],
];
const BACKWARD_RESIDUAL: Variants = [
    ["layer_norm_backward_residual_wide", "layer_norm_backward_residual_single"],
    ["layer_norm_backward_residual_short_wide", "layer_norm_backward_residual_short_single"],
];
const BACKWARD_ACTIVATION: Variants = [
    ["layer_norm_backward_activation_wide", "layer_norm_backward_activation_single"],
    ["layer_norm_backward_activation_short_wide", "layer_norm_backward_activation_short_single"],
];

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The variant for rows of `width`, and how many teams its blocks have.
    fn layer_norm_variant(
        &self,
        variants: Variants,
        access: Access,
        width: usize,
    ) -> (KernelName, usize) {
        let short = width <= SHORT_WIDTH;
        let [wide, single] = variants[usize::from(short)];
        let team = if short { self.driver.properties().warp } else { THREADS };
        (access.choose(wide, single), (THREADS / team) as usize)
    }

    /// The norm of each row.
    pub(in crate::gpu) fn launch_layer_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        inputs: LayerNormInputs<'_, D, P>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "layer_norm_forward";
        let (rows, width) = (shape.grains().rows(), shape.width());
        exactly_mut(KERNEL, "statistics", &statistics, 2 * rows)?;
        exactly(KERNEL, "weight", &inputs.weight, width)?;
        if let Some(bias) = &inputs.bias {
            exactly(KERNEL, "bias", bias, width)?;
        }
        let mut operands = Operands::default();
        let (x, x_stride) = place_input(KERNEL, &inputs.x, &mut operands, shape)?;
        let arguments = Forward {
            y_stride: row_stride_mut(KERNEL, "y", &y, rows, width)?,
            y: y.address(),
            statistics: statistics.address(),
            x,
            weight: inputs.weight.address(),
            bias: inputs.bias.address(),
            x_stride,
            rows: rows as u64,
            width: size32(KERNEL, "width", width)?,
            eps: shape.eps(),
        };
        // No bias lies at 0, which is aligned.
        operands.fp32.extend([(arguments.weight, 0), (arguments.bias, 0)]);
        operands.activations.push((arguments.y, arguments.y_stride));
        let variants = match inputs.x {
            NormInput::Residual(_) => FORWARD_RESIDUAL,
            NormInput::Activation(_) => FORWARD_ACTIVATION,
        };
        let access = operands.access::<P::Activation>(width);
        let (name, teams) = self.layer_norm_variant(variants, access, width);
        let launch = blocks(KERNEL, rows.div_ceil(teams), THREADS)?;
        // SAFETY: rows and vectors were checked against the shape; the variant reads x as what it is.
        unsafe { self.launch(stream, &LAYER_NORM, name, launch, arguments) }
    }

    /// The gradient of x; partial sums of those of the parameters over runs of rows, then those of grains.
    pub(in crate::gpu) fn launch_layer_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradient: NormGradient<'_, Self>,
        parameters: ParameterGradients<'_, D, P>,
        saved: LayerNormSaved<'_, D, P>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "layer_norm_backward";
        let (grains, width) = (shape.grains(), shape.width());
        let rows = grains.rows();
        let elements = grains.grains() * width;
        if !gradient.is_of(&saved.x) {
            return Err(KernelError::shape(KERNEL, "gradient", "that of the kind of x", "another"));
        }
        let ParameterGradients { dweight, dbias } = parameters;
        exactly_mut(KERNEL, "dweight", &dweight, elements)?;
        if let Some(dbias) = &dbias {
            exactly_mut(KERNEL, "dbias", dbias, elements)?;
        }
        exactly(KERNEL, "statistics", &saved.statistics, 2 * rows)?;
        exactly(KERNEL, "weight", &saved.weight, width)?;
        let mut operands = Operands::default();
        let (x, x_stride) = place_input(KERNEL, &saved.x, &mut operands, shape)?;
        let (variants, (dx, dx_stride), (dy, dy_stride)) = match gradient {
            NormGradient::Residual { dx, dy } => {
                let dx = (dx.address(), row_stride_mut(KERNEL, "dx", &dx, rows, width)?);
                let dy = (dy.address(), row_stride(KERNEL, "dy", &dy, rows, width)?);
                operands.fp32.push(dx);
                (BACKWARD_RESIDUAL, dx, dy)
            }
            NormGradient::InPlace(dx) => {
                let dx = (dx.address(), row_stride_mut(KERNEL, "dx", &dx, rows, width)?);
                (BACKWARD_ACTIVATION, dx, dx)
            }
        };
        operands.activations.push((dy, dy_stride));
        // More rows than there are make one grain all the same.
        let runs_per_grain = grains.rows_per_grain().min(rows).div_ceil(RUN_ROWS);
        let last_grain = grains.range(grains.grains() - 1);
        let runs = (grains.grains() - 1) * runs_per_grain + last_grain.len().div_ceil(RUN_ROWS);
        let run_bytes = runs * width * size_of::<f32>();
        let outputs = 1 + usize::from(dbias.is_some());
        let weight_partials =
            stream.scratch(&self.driver, ScratchSlot::First, outputs * run_bytes)?;
        let bias_partials = match dbias {
            Some(_) => Address(weight_partials.0 + run_bytes as u64),
            None => Address::NULL,
        };
        let arguments = Backward {
            dx,
            weight_partials,
            bias_partials,
            dy,
            x,
            statistics: saved.statistics.address(),
            weight: saved.weight.address(),
            dx_stride,
            dy_stride,
            x_stride,
            rows: rows as u64,
            rows_per_grain: grains.rows_per_grain().min(rows) as u64,
            runs: runs as u64,
            runs_per_grain: size32(KERNEL, "runs of rows", runs_per_grain)?,
            width: size32(KERNEL, "width", width)?,
        };
        operands.fp32.push((arguments.weight, 0));
        let access = operands.access::<P::Activation>(width);
        let (name, teams) = self.layer_norm_variant(variants, access, width);
        let launch = blocks(KERNEL, runs.div_ceil(teams), THREADS)?;
        // SAFETY: as in forward; there is a partial sum for each run of rows and each gradient that is asked for.
        unsafe { self.launch(stream, &LAYER_NORM, name, launch, arguments) }?;

        let sums = SumPartials {
            dweight: dweight.address(),
            dbias: dbias.map_or(Address::NULL, |dbias| dbias.address()),
            weight_partials,
            bias_partials,
            runs: arguments.runs,
            elements: elements as u64,
            runs_per_grain: arguments.runs_per_grain,
            width: arguments.width,
        };
        // SAFETY: the outputs hold every grain's; `runs` partial sums of each were just formed.
        unsafe { self.launch_sum_partials(stream, sums) }
    }

    /// Adds the partial sums of each grain's runs, in order.
    ///
    /// # Safety
    /// Outputs of `elements` elements, and `runs` partial sums of `width` for each output that is not null.
    pub(super) unsafe fn launch_sum_partials(
        &self,
        stream: &mut GpuStream<D>,
        sums: SumPartials,
    ) -> Result<()> {
        let outputs = if sums.dbias == Address::NULL { 1 } else { 2 };
        let threads = outputs * sums.elements as usize;
        let launch =
            blocks("layer_norm_sum_partials", threads.div_ceil(SUM_THREADS as usize), SUM_THREADS)?;
        // SAFETY: the caller's.
        unsafe { self.launch(stream, &LAYER_NORM, "layer_norm_sum_partials", launch, sums) }
    }
}
