//! A single step of the selective scan that also computes its raw steps of time: `scan_step.cu`,
//! for channels with sixteen states.

use bytemuck::{Pod, Zeroable};

use super::ordered_product::ROWS_OF_WARPS;
use super::scan::Way;
use super::scan_piece::{self, Piece, step_blocks};
use super::sizes::{Access, WIDE_BYTES, size32, stride_bytes};
use super::{KernelName, row_stride};
use crate::backend::{
    OrderedProducts, Output, PieceState, ScanStepInputs, SelectiveScanPiece, SelectiveScanStep,
    check_one_position,
};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, ElementKind};
use crate::gpu::precision::Precision;
use crate::gpu::source::SCAN_STEP;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ScanShape;
use crate::view::{MatrixMut, SliceMut};

const KERNEL: KernelName = "selective_scan_step";

/// The most terms that `scan_step_projected` adds: `MOST_TERMS` of scan_step.cu.
const MOST_TERMS: usize = 256;
/// Terms that a lane has of a row at a time.
const CHUNK: usize = 8;

/// `ScanStepArguments` of scan_step.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    scan: scan_piece::Arguments,
    low: Address,
    weight: Address,
    low_stride: u64,
    weight_stride: u64,
    terms: u32,
    padding: u32,
}

impl<D: Driver, P: Precision> SelectiveScanStep for Gpu<D, P> {
    fn selective_scan_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        mut delta_raw: MatrixMut<'_, Self, P::Activation>,
        inputs: ScanStepInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        check_one_position(shape)?;
        let (low, weight) = (inputs.low, inputs.dt_weight);
        let (samples, terms) = (shape.sequences().samples(), low.columns);
        let low_stride = row_stride(KERNEL, "low", &low, samples, terms)?;
        let weight_stride = row_stride(KERNEL, "dt_weight", &weight, shape.channels(), terms)?;
        let access = Access::of(
            WIDE_BYTES,
            &[
                (low.address(), stride_bytes::<P::Activation>(low_stride)),
                (weight.address(), stride_bytes::<P::Activation>(weight_stride)),
            ],
        );
        let plan = self.scan_plan(KERNEL, shape)?;
        let forms_steps = P::ELEMENT == ElementKind::Bf16
            && plan.way == Way::Sixteen
            && samples <= ROWS_OF_WARPS
            && access == Access::Wide
            && terms.is_multiple_of(CHUNK)
            && (1..=MOST_TERMS).contains(&terms);
        let piece = PieceState { state, lengths: None };
        if !forms_steps {
            self.ordered_matmul(stream, delta_raw.reborrow(), low, weight, Output::Overwrite)?;
            let inputs = inputs.with(delta_raw.as_matrix());
            return self.selective_scan_piece(stream, out, piece, inputs, shape);
        }
        let inputs = inputs.with(delta_raw.as_matrix());
        let arguments = Arguments {
            scan: Piece::new(&plan, &out, &piece, &inputs)?.arguments,
            low: low.address(),
            weight: weight.address(),
            low_stride,
            weight_stride,
            terms: size32(KERNEL, "terms", terms)?,
            padding: 0,
        };
        let launch = plan.launch(step_blocks(&plan, 1), 0)?.early(samples);
        // SAFETY: `Piece` has checked what the scan reads and writes, and `low` and `dt_weight` were checked here, and their alignment.
        unsafe { self.launch(stream, &SCAN_STEP, "scan_step_projected", launch, arguments) }
    }
}
