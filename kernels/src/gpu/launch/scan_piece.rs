//! The selective scan of pieces of sequences, for generation: `scan_piece.cu` and `scan_step.cu`
//! for the shapes for which training uses the kernels for sixteen states, `scan_any.cu` for every
//! other shape.

use bytemuck::{Pod, Zeroable};

use crate::backend::{PieceState, ScanInputs, SelectiveScanPiece};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::launch::check_piece;
use crate::gpu::launch::scan::{
    ALIGNMENT, BLOCK_CHANNELS, CheckedRows, FORWARD_ANY_SHARED_BYTES, Plan, Rows, SCAN_THREADS,
    Way, forward_shared_bytes,
};
use crate::gpu::precision::Precision;
use crate::gpu::source::{SCAN_ANY, SCAN_PIECE, SCAN_STEP};
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ScanShape;
use crate::view::MatrixMut;

/// Lanes of a channel of `scan_step`.
const STEP_LANES: usize = 4;
/// Blocks for each multiprocessor from which on threads have two samples each: on an H200, 5,120 channels of 8 samples (5 blocks) take
/// 14 % longer so, and of 32 (19 blocks) 15 % less.
const BLOCKS_OF_TWO: usize = 16;

/// `ScanPieceArguments` of `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Arguments {
    out: Rows,
    state: Address,
    lengths: Address,
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
    delta_bias: Address,
    a_log: Address,
    d: Address,
    samples: u32,
    positions: u32,
    channels: u32,
    states: u32,
    lanes: u32,
    wide: u32,
}

/// The checked arguments of a kernel of pieces, and whether rows allow access of 16 bytes.
pub(super) struct Piece {
    pub(super) arguments: Arguments,
    aligned: bool,
}

impl Piece {
    pub(super) fn new<D: Driver, P: Precision>(
        plan: &Plan,
        out: &MatrixMut<'_, Gpu<D, P>, P::Activation>,
        piece: &PieceState<'_, Gpu<D, P>>,
        inputs: &ScanInputs<'_, Gpu<D, P>>,
    ) -> Result<Self> {
        let (kernel, shape) = (plan.kernel, plan.shape);
        let samples = shape.sequences().samples();
        let held = samples * shape.channels() * shape.states();
        check_piece(kernel, piece, inputs.starts.is_some(), [samples, held])?;
        let mut rows = CheckedRows::new(*plan);
        let out = rows.write("out", out)?;
        let inputs = rows.inputs(inputs)?;
        let aligned = |address: Address| address.0.is_multiple_of(ALIGNMENT as u64);
        let wide = rows.aligned && aligned(piece.state.address()) && aligned(inputs.a_log);
        let arguments = Arguments {
            out,
            state: piece.state.address(),
            lengths: piece.lengths.address(),
            delta_raw: inputs.delta_raw,
            x: inputs.x,
            z: inputs.z,
            bc: inputs.bc,
            delta_bias: inputs.delta_bias,
            a_log: inputs.a_log,
            d: inputs.d,
            samples: plan.samples,
            positions: plan.positions,
            channels: plan.channels,
            states: plan.states,
            lanes: plan.lanes,
            wide: wide.into(),
        };
        Ok(Self { arguments, aligned: rows.aligned })
    }
}

/// Blocks of a step whose threads have `each` samples, each of whole channels.
pub(super) fn step_blocks(plan: &Plan, each: usize) -> usize {
    plan.samples.div_ceil(each as u32) as usize * plan.shape.channels() * STEP_LANES / SCAN_THREADS
}

impl<D: Driver, P: Precision> SelectiveScanPiece for Gpu<D, P> {
    fn selective_scan_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        piece: PieceState<'_, Self>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        let plan = self.scan_plan("selective_scan_piece", shape)?;
        let (samples, channels) = (shape.sequences().samples(), shape.channels());
        let is_step = plan.positions == 1 && piece.lengths.is_none();
        let Piece { arguments, aligned } = Piece::new(&plan, &out, &piece, &inputs)?;
        let (source, name, blocks, shared_bytes) = match (plan.way, is_step) {
            (Way::Sixteen, true) => {
                let of_two = step_blocks(&plan, 2);
                let fills =
                    of_two >= BLOCKS_OF_TWO * self.driver().properties().multiprocessors as usize;
                match fills && arguments.wide == 1 {
                    true => (&SCAN_STEP, "scan_step_of_two", of_two, 0),
                    false => (&SCAN_STEP, "scan_step", step_blocks(&plan, 1), 0),
                }
            }
            (Way::Sixteen, false) => {
                let name = if aligned { "scan_piece" } else { "scan_piece_unaligned" };
                let warp = self.driver().properties().warp;
                let shared_bytes = forward_shared_bytes(warp, size_of::<P::Activation>());
                (&SCAN_PIECE, name, samples * (channels / BLOCK_CHANNELS), shared_bytes)
            }
            (Way::Any, true) => {
                (&SCAN_ANY, "scan_step_any", (samples * channels).div_ceil(plan.slots()), 0)
            }
            (Way::Any, false) => {
                let blocks = samples * channels.div_ceil(plan.slots());
                (&SCAN_ANY, "scan_piece_any", blocks, FORWARD_ANY_SHARED_BYTES)
            }
        };
        let launch = plan.launch(blocks, shared_bytes)?;
        let launch = if is_step { launch.early(samples) } else { launch };
        // SAFETY: `CheckedRows` has checked all rows, and state and lengths have their exact sizes.
        unsafe { self.launch(stream, source, name, launch, arguments) }
    }
}
