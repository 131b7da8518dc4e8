//! Causal depthwise convolution and SiLU.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, sequences32, size32, stride_bytes};
use super::{KernelName, check_piece, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{
    CausalConv1d, CausalConv1dBackward, CausalConv1dPiece, ConvGradients, ConvInputs, PieceState,
};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, Launch};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD, CAUSAL_CONV1D_BACKWARD_DOCUMENTS,
    CAUSAL_CONV1D_DOCUMENTS, Source,
};
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::ConvShape;
use crate::view::{Matrix, MatrixMut, Slice};

/// Threads of a block of the kernels that walk runs of positions.
const WALK_THREADS: u32 = 128;
/// Threads of such a block that have neighbouring channels.
const CHANNEL_THREADS: usize = 32;
/// Threads of a block of the other kernels.
const THREADS: u32 = 256;
/// Positions of a block of the forward convolution.
const FORWARD_TILE_POSITIONS: usize = 128;
/// Positions of a block of the backward convolution. Numerics: sums are cut there.
const BACKWARD_TILE_POSITIONS: usize = 256;
/// Channels of a thread of the forward convolution where rows are aligned to them.
const FORWARD_WIDE_CHANNELS: usize = 2;
/// Bytes that a thread of the backward convolution reads at once of a row that is aligned to them.
const BACKWARD_WIDE_BYTES: usize = 8;
/// The taps that filters are padded to.
const SHORT_TAPS: usize = 4;
const LONG_TAPS: usize = 16;

/// `CausalConv1dSiluForward` of causal_conv1d.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Forward {
    out: Address,
    x: Address,
    weight: Address,
    bias: Address,
    out_stride: u32,
    x_stride: u32,
    positions: u32,
    channels: u32,
    width: u32,
    samples: u32,
    start_bits: Address,
}

/// Positions that a thread walks of a piece.
const SECTION: usize = 16;
/// Channels and samples of a thread of `causal_conv1d_silu_step`.
const STEP_CHANNELS: usize = 4;
const STEP_SAMPLES: usize = 2;

/// `CausalConv1dSiluPiece` of causal_conv1d.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Piece {
    out: Address,
    state: Address,
    x: Address,
    weight: Address,
    bias: Address,
    lengths: Address,
    out_stride: u64,
    x_stride: u64,
    positions: u32,
    channels: u32,
    width: u32,
    blocks: u32,
    elements: u64,
}

/// `CausalConv1dSiluBackward` of causal_conv1d_backward.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    dx: Address,
    partials: Address,
    dout: Address,
    x: Address,
    weight: Address,
    bias: Address,
    dx_stride: u32,
    dout_stride: u32,
    x_stride: u32,
    positions: u32,
    channels: u32,
    width: u32,
    start_bits: Address,
}

/// `CausalConv1dSumPartials` of causal_conv1d_backward.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumPartials {
    dweight: Address,
    dbias: Address,
    partials: Address,
    channels: u32,
    width: u32,
    taps: u32,
    tiles: u32,
    tiles_per_grain: u32,
    grains: u32,
}

/// The kernels of a direction of the convolution.
struct Kernels {
    source: &'static Source,
    wide: KernelName,
    single: KernelName,
    /// The kernel for more than `SHORT_TAPS` taps.
    long: KernelName,
}

static FORWARD: Kernels = Kernels {
    source: &CAUSAL_CONV1D,
    wide: "causal_conv1d_silu_forward_wide",
    single: "causal_conv1d_silu_forward_single",
    long: "causal_conv1d_silu_forward_long",
};
static FORWARD_DOCUMENTS: Kernels = Kernels {
    source: &CAUSAL_CONV1D_DOCUMENTS,
    wide: "causal_conv1d_silu_forward_wide_documents",
    single: "causal_conv1d_silu_forward_single_documents",
    long: "causal_conv1d_silu_forward_long_documents",
};
static BACKWARD: Kernels = Kernels {
    source: &CAUSAL_CONV1D_BACKWARD,
    wide: "causal_conv1d_silu_backward_wide",
    single: "causal_conv1d_silu_backward_single",
    long: "causal_conv1d_silu_backward_long",
};
static BACKWARD_DOCUMENTS: Kernels = Kernels {
    source: &CAUSAL_CONV1D_BACKWARD_DOCUMENTS,
    wide: "causal_conv1d_silu_backward_wide_documents",
    single: "causal_conv1d_silu_backward_single_documents",
    long: "causal_conv1d_silu_backward_long_documents",
};

/// The sizes of the blocks of a direction, forward or backward.
struct Blocks {
    /// Channels of a thread of the wide kernel.
    wide_channels: usize,
    /// Positions of a block.
    tile_positions: usize,
}

/// The kernel that a convolution takes.
struct Variant {
    source: &'static Source,
    /// Its name in the source.
    name: KernelName,
    /// Taps that its filters are padded to.
    taps: usize,
    /// Tiles of positions of all samples.
    tiles: usize,
    tiles_of_sample: usize,
    launch: Launch,
}

impl Variant {
    /// The one of `kernels` for `shape` and for operands of activations whose first element and row stride
    /// are given.
    fn new<T>(
        kernel: KernelName,
        kernels: &Kernels,
        of: Blocks,
        shape: ConvShape,
        operands: &[(Address, u32)],
    ) -> Result<Self> {
        let bytes = (of.wide_channels * size_of::<T>()) as u64;
        let operands: Vec<_> = operands
            .iter()
            .map(|&(address, row_stride)| (address, stride_bytes::<T>(row_stride.into())))
            .collect();
        let aligned = shape.channels().is_multiple_of(of.wide_channels)
            && Access::of(bytes, &operands) == Access::Wide;
        let (name, taps, channels) = match (shape.width() <= SHORT_TAPS, aligned) {
            (true, true) => (kernels.wide, SHORT_TAPS, of.wide_channels),
            (true, false) => (kernels.single, SHORT_TAPS, 1),
            (false, _) => (kernels.long, LONG_TAPS, 1),
        };
        let tiles_of_sample = shape.sequences().positions().div_ceil(of.tile_positions);
        let tiles = shape.sequences().samples() * tiles_of_sample;
        let channel_tiles = shape.channels().div_ceil(CHANNEL_THREADS * channels);
        let launch = blocks(kernel, tiles * channel_tiles, WALK_THREADS)?;
        Ok(Self { source: kernels.source, name, taps, tiles, tiles_of_sample, launch })
    }
}

/// A row stride as these kernels count it.
fn stride32(kernel: KernelName, row_stride: u64) -> Result<u32> {
    size32(kernel, "row stride", row_stride as usize)
}

/// Asks the filter to be that of `shape`, and its rows to be as few as kernels count.
fn check_filter<D: Driver, P: Precision>(
    kernel: KernelName,
    weight: &Slice<'_, Gpu<D, P>, f32>,
    bias: Option<&Slice<'_, Gpu<D, P>, f32>>,
    shape: ConvShape,
) -> Result<()> {
    sequences32(kernel, shape.sequences())?;
    exactly(kernel, "weight", weight, shape.channels() * shape.width())?;
    bias.map_or(Ok(()), |bias| exactly(kernel, "bias", bias, shape.channels()))
}

impl<D: Driver, P: Precision> CausalConv1d for Gpu<D, P> {
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        let ConvInputs { x, weight, bias, starts } = inputs;
        const KERNEL: &str = "causal_conv1d_silu_forward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        check_filter(KERNEL, &weight, bias.as_ref(), shape)?;
        let start_bits = self.document_start_bits(stream, KERNEL, starts, shape.sequences())?;
        let arguments = Forward {
            out_stride: stride32(KERNEL, row_stride_mut(KERNEL, "out", &out, rows, channels)?)?,
            x_stride: stride32(KERNEL, row_stride(KERNEL, "x", &x, rows, channels)?)?,
            out: out.address(),
            x: x.address(),
            weight: weight.address(),
            bias: bias.address(),
            positions: size32(KERNEL, "positions", shape.sequences().positions())?,
            channels: size32(KERNEL, "channels", channels)?,
            width: shape.width() as u32,
            samples: size32(KERNEL, "samples", shape.sequences().samples())?,
            start_bits: start_bits.address(),
        };
        let kernels = start_bits.choose(&FORWARD, &FORWARD_DOCUMENTS);
        let of =
            Blocks { wide_channels: FORWARD_WIDE_CHANNELS, tile_positions: FORWARD_TILE_POSITIONS };
        let operands = [(arguments.out, arguments.out_stride), (arguments.x, arguments.x_stride)];
        let variant = Variant::new::<P::Activation>(KERNEL, kernels, of, shape, &operands)?;
        // SAFETY: `row_stride` has checked all rows, and `check_filter` the filter; the start bits are this shape's.
        unsafe { self.launch(stream, variant.source, variant.name, variant.launch, arguments) }
    }
}

impl<D: Driver, P: Precision> CausalConv1dBackward for Gpu<D, P> {
    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: ConvGradients<'_, Self>,
        dout: Matrix<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_backward";
        gradients.check(KERNEL, &inputs)?;
        let ConvInputs { x, weight, bias, starts } = inputs;
        let ConvGradients { dx, dweight, dbias } = gradients;
        let (rows, channels, width) = (shape.sequences().rows(), shape.channels(), shape.width());
        let grains = shape.grains().grains();
        check_filter(KERNEL, &weight, bias.as_ref(), shape)?;
        let start_bits = self.document_start_bits(stream, KERNEL, starts, shape.sequences())?;
        exactly_mut(KERNEL, "dweight", &dweight, grains * channels * width)?;
        if let Some(dbias) = &dbias {
            exactly_mut(KERNEL, "dbias", dbias, grains * channels)?;
        }
        let [dx_stride, dout_stride, x_stride] = [
            stride32(KERNEL, row_stride_mut(KERNEL, "dx", &dx, rows, channels)?)?,
            stride32(KERNEL, row_stride(KERNEL, "dout", &dout, rows, channels)?)?,
            stride32(KERNEL, row_stride(KERNEL, "x", &x, rows, channels)?)?,
        ];
        let kernels = start_bits.choose(&BACKWARD, &BACKWARD_DOCUMENTS);
        let of = Blocks {
            wide_channels: BACKWARD_WIDE_BYTES / size_of::<P::Activation>(),
            tile_positions: BACKWARD_TILE_POSITIONS,
        };
        let operands =
            [(dx.address(), dx_stride), (dout.address(), dout_stride), (x.address(), x_stride)];
        let Variant { source, name, taps, tiles, tiles_of_sample, launch } =
            Variant::new::<P::Activation>(KERNEL, kernels, of, shape, &operands)?;
        let partial_bytes = tiles * (taps + 1) * channels * size_of::<f32>();
        let partials = stream.scratch(&self.driver, ScratchSlot::First, partial_bytes)?;
        let arguments = Backward {
            dx: dx.address(),
            partials,
            dout: dout.address(),
            x: x.address(),
            weight: weight.address(),
            bias: bias.address(),
            dx_stride,
            dout_stride,
            x_stride,
            positions: size32(KERNEL, "positions", shape.sequences().positions())?,
            channels: size32(KERNEL, "channels", channels)?,
            width: width as u32,
            start_bits: start_bits.address(),
        };
        // SAFETY: as in forward; the scratch memory holds a sum for each tile and tap.
        unsafe { self.launch(stream, source, name, launch, arguments) }?;

        // A grain of more samples than exist is one grain.
        let samples_per_grain = shape.samples_per_grain().min(shape.sequences().samples());
        let sums = SumPartials {
            dweight: dweight.address(),
            dbias: dbias.address(),
            partials,
            channels: arguments.channels,
            width: arguments.width,
            taps: taps as u32,
            tiles: size32(KERNEL, "tiles of positions", tiles)?,
            tiles_per_grain: (samples_per_grain * tiles_of_sample) as u32,
            grains: grains as u32,
        };
        let sum_blocks = grains * (width + 1) * channels.div_ceil(THREADS as usize);
        let launch = blocks(KERNEL, sum_blocks, THREADS)?;
        let name = "causal_conv1d_sum_partials";
        // SAFETY: `dweight` and `dbias` hold every grain's; the tiles' sums were just formed.
        unsafe { self.launch(stream, &CAUSAL_CONV1D_BACKWARD, name, launch, sums) }
    }
}

impl<D: Driver, P: Precision> CausalConv1dPiece for Gpu<D, P> {
    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        piece: PieceState<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_piece";
        let ConvInputs { x, weight, bias, starts } = inputs;
        let [samples, positions, _] = sequences32(KERNEL, shape.sequences())?;
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        check_filter(KERNEL, &weight, bias.as_ref(), shape)?;
        let elements = samples as usize * channels;
        let held = elements * (shape.width() - 1);
        check_piece(KERNEL, &piece, starts.is_some(), [samples as usize, held])?;
        let blocks_of_section = elements.div_ceil(THREADS as usize);
        let arguments = Piece {
            out_stride: row_stride_mut(KERNEL, "out", &out, rows, channels)?,
            x_stride: row_stride(KERNEL, "x", &x, rows, channels)?,
            out: out.address(),
            state: piece.state.address(),
            x: x.address(),
            weight: weight.address(),
            bias: bias.address(),
            lengths: piece.lengths.address(),
            positions,
            channels: size32(KERNEL, "channels", channels)?,
            width: shape.width() as u32,
            blocks: size32(KERNEL, "blocks of a section", blocks_of_section)?,
            elements: elements as u64,
        };
        let Piece { out, state, x, weight, bias, out_stride, x_stride, .. } = arguments;
        let four = STEP_CHANNELS as u64 * size_of::<P::Activation>() as u64;
        let access = Access::of(WIDE_BYTES, &[weight, bias].map(|address| (address, 0)));
        let of_rows = [(out, out_stride), (x, x_stride), (state, channels as u64)]
            .map(|(address, stride)| (address, stride_bytes::<P::Activation>(stride)));
        let is_step = positions == 1
            && arguments.lengths == Address::NULL
            && shape.width() == SHORT_TAPS
            && channels.is_multiple_of(STEP_CHANNELS)
            && access.and(Access::of(four, &of_rows)) == Access::Wide;
        let (name, blocks_of_piece) = if is_step {
            let threads = channels / STEP_CHANNELS * (samples as usize).div_ceil(STEP_SAMPLES);
            ("causal_conv1d_silu_step", threads.div_ceil(THREADS as usize))
        } else {
            let sections = (positions as usize).div_ceil(SECTION);
            let name = match shape.width() <= SHORT_TAPS {
                true => KERNEL,
                false => "causal_conv1d_silu_piece_long",
            };
            (name, sections * blocks_of_section)
        };
        let launch = blocks(KERNEL, blocks_of_piece, THREADS)?.early(rows);
        // SAFETY: `row_stride` has checked all rows, and state and lengths have their exact sizes.
        unsafe { self.launch(stream, &CAUSAL_CONV1D, name, launch, arguments) }
    }
}
