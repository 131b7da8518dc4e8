//! The scan of heads: `head_scan_forward.cu` over whole sequences and `head_scan_piece.cu` over pieces of them. Its gradients are in
//! [`head_scan_backward`](super::head_scan_backward).
//!
//! Kernels are compiled for classes of states, to which n is padded. Where rows are aligned they read 16 bytes at once, with the same
//! bits.

use bytemuck::{Pod, Zeroable};

use super::scan::Rows;
use super::sizes::{Access, WIDE_BYTES, blocks, sequences32, size32, stride_bytes};
use super::{KernelName, check_piece, exactly, row_stride, row_stride_mut};
use crate::backend::{HeadScan, HeadScanInputs, HeadScanPiece, PieceState};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, Launch};
use crate::gpu::precision::Precision;
use crate::gpu::source::{HEAD_SCAN_BACKWARD, HEAD_SCAN_FORWARD, HEAD_SCAN_PIECE, Source};
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::HeadScanShape;
use crate::view::MatrixMut;

/// Positions of a tile: a warp's of a chunk.
const TILE: usize = 16;
/// Threads of a block that walks pieces, its channels, and the positions that it has at once.
const PIECE_THREADS: u32 = 128;
const PIECE_CHANNELS: usize = 16;
const PIECE_LENGTH: usize = 16;
/// The states that n is padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum HeadStates {
    Of64,
    Of128,
    Of256,
}

impl HeadStates {
    /// The fewest that hold `states`, which are at most 256.
    pub(in crate::gpu) fn of(states: usize) -> Self {
        match states {
            ..=64 => Self::Of64,
            65..=128 => Self::Of128,
            _ => Self::Of256,
        }
    }

    pub(in crate::gpu) fn forward(self) -> &'static Source {
        &HEAD_SCAN_FORWARD[self as usize]
    }

    pub(in crate::gpu) fn backward(self) -> &'static Source {
        &HEAD_SCAN_BACKWARD[self as usize]
    }

    pub(in crate::gpu) fn piece(self) -> &'static Source {
        &HEAD_SCAN_PIECE[self as usize]
    }
}

/// The sizes of a block, as `head_scan.h` has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSizes {
    /// n, padded.
    pub(super) states: usize,
    /// Channels of a head.
    pub(super) channels: usize,
    /// Positions of a chunk.
    length: usize,
    warp: usize,
    /// Bytes of an activation.
    activation: usize,
}

impl BlockSizes {
    pub(super) fn new(states: usize, warp: u32, activation: usize) -> Self {
        let class = HeadStates::of(states);
        let (is_bf16, is_most) = (activation == 2, class == HeadStates::Of256);
        let channels = match (is_most, warp, is_bf16) {
            (true, _, _) => 16,
            (false, 32, true) => 64,
            _ => 32,
        };
        let length = match (warp, is_bf16, is_most) {
            (32, true, false) => 64,
            (32, _, _) | (_, true, _) | (_, _, false) => 32,
            _ => 16,
        };
        Self { states: 64 << class as usize, channels, length, warp: warp as usize, activation }
    }

    /// Warps that share sixteen positions of a chunk.
    pub(super) fn halves(&self) -> usize {
        if self.channels > TILE { 2 } else { 1 }
    }

    /// Warps of a block that walks whole sequences.
    fn warps(&self) -> usize {
        self.length / TILE * self.halves()
    }

    /// Pairs of tiles of positions, a tile with itself too.
    fn tile_pairs(&self) -> usize {
        let tiles = self.length / TILE;
        tiles * (tiles + 1) / 2
    }

    fn forward_bytes(&self) -> usize {
        self.walk_bytes() + self.factors_beyond_rows()
    }

    /// Factors of all pairs of tiles, in fp32 or in two parts, take the place of rows of B or C; where they are more, these bytes
    /// are added.
    fn factors_beyond_rows(&self) -> usize {
        let factors = self.tile_pairs() * TILE * TILE * size_of::<f32>();
        factors.saturating_sub(self.length * self.states * self.activation)
    }

    /// Shared memory that forward and backward both need, in bytes: B, C and x, the states in fp32 or in two parts, and the steps.
    fn walk_bytes(&self) -> usize {
        let Self { states, channels, length, activation, .. } = *self;
        let steps = length * (8 + TILE + 4) * size_of::<f32>();
        length * (2 * states + channels) * activation + self.state_bytes() + steps
    }

    pub(super) fn backward_bytes(&self) -> usize {
        let Self { channels, length, .. } = *self;
        let sums = 2 * self.tile_pairs() * TILE + length * (2 * self.halves() + 1) + self.warps();
        let factors = 2 * self.factors_beyond_rows();
        self.walk_bytes() + factors + (length * channels + sums) * size_of::<f32>()
    }

    fn pairs_bytes(&self) -> usize {
        2 * self.length * self.states * self.activation
    }

    /// The states of a block.
    pub(super) fn state_bytes(&self) -> usize {
        self.channels * self.states * size_of::<f32>()
    }

    fn piece_bytes(&self) -> usize {
        2 * PIECE_LENGTH * (self.states + PIECE_CHANNELS + 1) * size_of::<f32>()
    }
}

/// `HeadScanInputs` of `head_scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Inputs {
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
    delta_bias: Address,
    a_log: Address,
    d: Address,
    pub(super) start_bits: Address,
    least: f32,
    most: f32,
    positions: u32,
    heads: u32,
    width: u32,
    groups: u32,
    states: u32,
    wide: u32,
}

/// `HeadScanPairsArguments` of `head_scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct PairsArguments {
    pairs: Address,
    inputs: Inputs,
}

/// `HeadScanForwardArguments` of `head_scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ForwardArguments {
    out: Address,
    out_stride: u64,
    pairs: Address,
    inputs: Inputs,
}

/// `HeadScanPieceArguments` of `head_scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct PieceArguments {
    out: Address,
    out_stride: u64,
    state: Address,
    lengths: Address,
    wide_state: u32,
    unused: u32,
    inputs: Inputs,
}

/// The sizes of a scan, checked for kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) kernel: KernelName,
    pub(super) shape: HeadScanShape,
    pub(super) sizes: BlockSizes,
    pub(super) class: HeadStates,
}

impl Plan {
    /// `blocks` blocks that walk.
    pub(super) fn launch(&self, all: usize, shared_bytes: usize) -> Result<Launch> {
        let threads = (self.sizes.warps() * self.sizes.warp) as u32;
        Ok(Launch { shared_bytes, ..blocks(self.kernel, all, threads)? })
    }

    /// Bytes of the products C_i . B_j of all groups, `[b t, g, positions of a chunk]`.
    pub(super) fn group_pairs_bytes(&self) -> usize {
        self.shape.sequences().rows() * self.shape.groups() * self.sizes.length * size_of::<f32>()
    }

    /// `matrix[b t, e]` in fp32: its first element and its stride.
    pub(super) fn out<D: Driver, P: Precision>(
        &self,
        out: &MatrixMut<'_, Gpu<D, P>, f32>,
    ) -> Result<(Address, u64)> {
        let rows = self.shape.sequences().rows();
        let stride = row_stride_mut(self.kernel, "out", out, rows, self.shape.width())?;
        Ok((out.address(), stride))
    }

    /// Checked inputs, of samples that are one document.
    pub(super) fn inputs<D: Driver, P: Precision>(
        &self,
        inputs: &HeadScanInputs<'_, Gpu<D, P>>,
    ) -> Result<Inputs> {
        let Self { kernel, shape, .. } = *self;
        let (rows, width) = (shape.sequences().rows(), shape.width());
        let [_, positions, _] = sequences32(kernel, shape.sequences())?;
        let HeadScanInputs { projected, xbc, delta_bias, a_log, d, delta_limits, .. } = inputs;
        let size32 = |what, size| size32(kernel, what, size);
        let heads = size32("heads", shape.heads())?;
        size32("columns", shape.projected_width())?;
        for (what, slice) in [("delta_bias", delta_bias), ("a_log", a_log), ("d", d)] {
            exactly(kernel, what, slice, shape.heads())?;
        }
        let projected_stride =
            row_stride(kernel, "projected", projected, rows, shape.projected_width())?;
        let xbc_stride = row_stride(kernel, "xbc", xbc, rows, shape.xbc_width())?;
        let column = |first: Address, column: usize, stride| Rows {
            first: first.offset(column * size_of::<P::Activation>()),
            stride,
        };
        let operands = [(projected.address(), projected_stride), (xbc.address(), xbc_stride)];
        let operands =
            operands.map(|(address, stride)| (address, stride_bytes::<P::Activation>(stride)));
        let at_once = WIDE_BYTES as usize / size_of::<P::Activation>();
        let whole =
            shape.head_width().is_multiple_of(at_once) && shape.states().is_multiple_of(at_once);
        let wide = whole && Access::of(WIDE_BYTES, &operands) == Access::Wide;
        Ok(Inputs {
            delta_raw: column(projected.address(), width + shape.xbc_width(), projected_stride),
            x: column(xbc.address(), 0, xbc_stride),
            z: column(projected.address(), 0, projected_stride),
            bc: column(xbc.address(), width, xbc_stride),
            delta_bias: delta_bias.address(),
            a_log: a_log.address(),
            d: d.address(),
            start_bits: Address::NULL,
            least: delta_limits.least(),
            most: delta_limits.most(),
            positions,
            heads,
            width: shape.head_width() as u32,
            groups: shape.groups() as u32,
            states: shape.states() as u32,
            wide: wide.into(),
        })
    }
}

impl Inputs {
    /// Reads 16 bytes at once only where rows of fp32 beside these allow it too.
    pub(super) fn beside(mut self, first: Address, stride: u64) -> Self {
        let operand = [(first, stride_bytes::<f32>(stride))];
        if Access::of(WIDE_BYTES, &operand) == Access::Single {
            self.wide = 0;
        }
        self
    }
}

impl<D: Driver, P: Precision> HeadScan for Gpu<D, P> {
    fn head_scan_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        let plan = self.head_scan_plan("head_scan_forward", shape);
        let (out, out_stride) = plan.out(&out)?;
        let checked = plan.inputs(&inputs)?.beside(out, out_stride);
        let start_bits =
            self.document_start_bits(stream, plan.kernel, inputs.starts, shape.sequences())?;
        let inputs = Inputs { start_bits: start_bits.address(), ..checked };
        let pairs = stream.scratch(self.driver(), ScratchSlot::First, plan.group_pairs_bytes())?;
        self.head_scan_pairs(stream, &plan, pairs, inputs)?;
        let arguments = ForwardArguments { out, out_stride, pairs, inputs };
        let parts = shape.head_width().div_ceil(plan.sizes.channels);
        let all = shape.sequences().samples() * shape.heads() * parts;
        let launch = plan.launch(all, plan.sizes.forward_bytes())?;
        // SAFETY: `Plan` has checked all rows and slices against the shape, and the start bits are this shape's.
        unsafe { self.launch(stream, plan.class.forward(), "head_scan_forward", launch, arguments) }
    }
}

impl<D: Driver, P: Precision> HeadScanPiece for Gpu<D, P> {
    fn head_scan_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        let plan = self.head_scan_plan("head_scan_piece", shape);
        let (kernel, samples) = (plan.kernel, shape.sequences().samples());
        let held = samples * shape.width() * shape.states();
        check_piece(kernel, &piece, inputs.starts.is_some(), [samples, held])?;
        let (out, out_stride) = plan.out(&out)?;
        let of_state = [
            (piece.state.address(), 0),
            (Address::NULL, stride_bytes::<f32>(shape.states() as u64)),
        ];
        let is_step = shape.sequences().positions() == 1 && piece.lengths.is_none();
        let arguments = PieceArguments {
            out,
            out_stride,
            state: piece.state.address(),
            lengths: piece.lengths.address(),
            wide_state: u32::from(
                Access::of(WIDE_BYTES, &of_state) == Access::Wide
                    && shape.states() == plan.sizes.states,
            ),
            unused: 0,
            inputs: plan.inputs(&inputs)?,
        };
        let all = samples * shape.heads() * shape.head_width().div_ceil(PIECE_CHANNELS);
        let shared_bytes = plan.sizes.piece_bytes();
        let launch = Launch { shared_bytes, ..blocks(kernel, all, PIECE_THREADS)? };
        let launch = if is_step { launch.early(samples) } else { launch };
        // SAFETY: `Plan` has checked all rows and slices, and state and lengths have their exact sizes.
        unsafe { self.launch(stream, plan.class.piece(), "head_scan_piece", launch, arguments) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Leaves the products C_i . B_j of each group in `pairs`, which has `group_pairs_bytes`.
    pub(super) fn head_scan_pairs(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        pairs: Address,
        inputs: Inputs,
    ) -> Result<()> {
        let (shape, sequences) = (plan.shape, plan.shape.sequences());
        let runs = sequences.positions().div_ceil(plan.sizes.length);
        let all = sequences.samples() * shape.groups() * runs;
        let launch = plan.launch(all, plan.sizes.pairs_bytes())?;
        let arguments = PairsArguments { pairs, inputs };
        // SAFETY: `Plan` has checked the rows of the inputs, and each row of each group has its place in `pairs`.
        unsafe { self.launch(stream, plan.class.forward(), "head_scan_pairs", launch, arguments) }
    }

    pub(super) fn head_scan_plan(&self, kernel: KernelName, shape: HeadScanShape) -> Plan {
        let warp = self.driver().properties().warp;
        let sizes = BlockSizes::new(shape.states(), warp, size_of::<P::Activation>());
        Plan { kernel, shape, sizes, class: HeadStates::of(shape.states()) }
    }
}
