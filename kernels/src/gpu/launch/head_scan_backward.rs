//! The gradients of the scan of heads: two walks of `head_scan_backward.cu`, each of which leaves what every head adds to dC or dB of
//! its group, and their sums in `scan_sums.cu`.

use bytemuck::{Pod, Zeroable};

use super::head_scan::{Inputs, Plan};
use super::scan::Rows;
use super::scan_backward::SumSamplesArguments;
use super::sizes::{Access, blocks, size32, stride_bytes};
use super::{exactly_mut, row_stride, row_stride_mut};
use crate::backend::{HeadScanBackward, HeadScanGradients, HeadScanInputs};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::SCAN_SUMS;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::HeadScanShape;
use crate::view::Matrix;

/// Threads of a block of `scan_sums.cu`.
const SUM_THREADS: usize = 256;
/// Positions of a document between saved states, as in `head_scan.h`.
const SAVED_POSITIONS: usize = 128;
/// Gradients of parameters of a head.
const PARAMETERS: usize = 3;

/// `HeadScanBackwardArguments` of `head_scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BackwardArguments {
    ddelta_raw: Rows,
    dx: Rows,
    dz: Rows,
    shares: Address,
    saved: Address,
    passed: Address,
    totals: Address,
    parameters: Address,
    pairs: Address,
    dout: Address,
    dout_stride: u64,
    wide_out: u32,
    unused: u32,
    inputs: Inputs,
}

/// `SumHeadsArguments` of `scan_sums.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumHeadsArguments {
    to: Rows,
    shares: Address,
    items: u64,
    heads: u32,
    groups: u32,
    states: u32,
    row: u32,
}

/// The bytes of scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    /// `[b t, h, n]`, n padded: what each head adds to dC, and then to dB.
    shares: usize,
    /// `[b, h, parts of a head, t / 128, channels n]`: states.
    saved: usize,
    /// `[b t, h, parts of a head, halves of a part]`
    passed: usize,
    /// `[b t, h]` where a head has more channels than a block.
    totals: usize,
    /// `[b, 3 h]`
    parameters: usize,
    /// `[b t, g, positions of a chunk]`
    pairs: usize,
}

impl Scratch {
    fn new(plan: &Plan) -> Self {
        let (sequences, heads) = (plan.shape.sequences(), plan.shape.heads());
        let of_rows = sequences.rows() * heads * size_of::<f32>();
        let parts = plan.shape.head_width().div_ceil(plan.sizes.channels);
        let walks = sequences.samples() * heads * parts;
        Self {
            shares: of_rows * plan.sizes.states,
            saved: walks * (sequences.positions() / SAVED_POSITIONS) * plan.sizes.state_bytes(),
            passed: of_rows * parts * plan.sizes.halves(),
            totals: if parts > 1 { of_rows } else { 0 },
            parameters: sequences.samples() * PARAMETERS * heads * size_of::<f32>(),
            pairs: plan.group_pairs_bytes(),
        }
    }

    fn shares_and_states(self) -> usize {
        self.shares + self.saved
    }

    fn beside_shares(self) -> usize {
        self.pairs + self.passed + self.totals + self.parameters
    }
}

impl<D: Driver, P: Precision> HeadScanBackward for Gpu<D, P> {
    fn head_scan_scratch_bytes(&self, shape: HeadScanShape) -> usize {
        let scratch = Scratch::new(&self.head_scan_plan("head_scan_backward", shape));
        scratch.shares_and_states() + scratch.beside_shares()
    }

    fn head_scan_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: HeadScanGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        let plan = self.head_scan_plan("head_scan_backward", shape);
        let kernel = plan.kernel;
        let (rows, heads, width) = (shape.sequences().rows(), shape.heads(), shape.width());
        let grains = shape.grains().grains();
        for (what, slice) in [
            ("da_log", &gradients.da_log),
            ("dd", &gradients.dd),
            ("ddelta_bias", &gradients.ddelta_bias),
        ] {
            exactly_mut(kernel, what, slice, grains * heads)?;
        }
        let HeadScanGradients { dprojected, dxbc, .. } = &gradients;
        let projected_stride =
            row_stride_mut(kernel, "dprojected", dprojected, rows, shape.projected_width())?;
        let xbc_stride = row_stride_mut(kernel, "dxbc", dxbc, rows, shape.xbc_width())?;
        let dout_stride = row_stride(kernel, "dout", &dout, rows, width)?;
        let column = |first: Address, column: usize, stride| Rows {
            first: first.offset(column * size_of::<P::Activation>()),
            stride,
        };
        let mut checked = plan.inputs(&inputs)?.beside(dout.address(), dout_stride);
        checked.start_bits =
            self.document_start_bits(stream, kernel, inputs.starts, shape.sequences())?.address();
        let of_pairs = [(dprojected.address(), projected_stride), (dxbc.address(), xbc_stride)]
            .map(|(address, stride)| (address, stride_bytes::<P::Activation>(stride)));
        let of_two = Access::of(2 * size_of::<P::Activation>() as u64, &of_pairs);
        let scratch = Scratch::new(&plan);
        let shares =
            stream.scratch(self.driver(), ScratchSlot::First, scratch.shares_and_states())?;
        let pairs = stream.scratch(self.driver(), ScratchSlot::Second, scratch.beside_shares())?;
        self.head_scan_pairs(stream, &plan, pairs, checked)?;
        let passed = pairs.offset(scratch.pairs);
        let totals = passed.offset(scratch.passed);
        let parameters = totals.offset(scratch.totals);
        let arguments = BackwardArguments {
            ddelta_raw: column(dprojected.address(), width + shape.xbc_width(), projected_stride),
            dx: column(dxbc.address(), 0, xbc_stride),
            dz: column(dprojected.address(), 0, projected_stride),
            shares,
            saved: shares.offset(scratch.shares),
            passed,
            totals,
            parameters,
            pairs,
            dout: dout.address(),
            dout_stride,
            wide_out: (shape.head_width().is_multiple_of(2) && of_two == Access::Wide).into(),
            unused: 0,
            inputs: checked,
        };
        let launch =
            plan.launch(shape.sequences().samples() * heads, plan.sizes.backward_bytes())?;
        let walks = [
            ("head_scan_backward_states", shape.groups() * shape.states()),
            ("head_scan_backward_gradients", 0),
        ];
        for (walk, first) in walks {
            // SAFETY: all rows and slices were checked against the shape, scratch memory has the sizes of `Scratch`, and the
            // start bits are this shape's.
            unsafe { self.launch(stream, plan.class.backward(), walk, launch, arguments) }?;
            let to = column(dxbc.address(), width + first, xbc_stride);
            self.sum_heads(stream, &plan, to, shares)?;
        }
        let sums = SumSamplesArguments {
            da_log: gradients.da_log.address(),
            dd: gradients.dd.address(),
            ddelta_bias: gradients.ddelta_bias.address(),
            partials: parameters,
            state_elements: heads as u64,
            channels: size32(kernel, "heads", heads)?,
            samples: size32(kernel, "samples", shape.sequences().samples())?,
            samples_per_grain: size32(kernel, "samples per grain", shape.samples_per_grain())?,
            grains: size32(kernel, "grains", grains)?,
        };
        let items = grains * PARAMETERS * heads;
        let launch = blocks(kernel, items.div_ceil(SUM_THREADS), SUM_THREADS as u32)?;
        // SAFETY: the gradients were checked against the shape, and each sample has its partial sums.
        unsafe { self.launch(stream, &SCAN_SUMS, "scan_sum_samples", launch, sums) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// B's or C's columns of dxbc, `to[b t, g n]`, from the shares of heads.
    fn sum_heads(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        to: Rows,
        shares: Address,
    ) -> Result<()> {
        let Plan { kernel, shape, sizes, .. } = *plan;
        let items = shape.sequences().rows() * shape.groups() * (sizes.states / 4);
        let arguments = SumHeadsArguments {
            to,
            shares,
            items: items as u64,
            heads: size32(kernel, "heads", shape.heads())?,
            groups: size32(kernel, "groups", shape.groups())?,
            states: size32(kernel, "states", shape.states())?,
            row: size32(kernel, "states", sizes.states)?,
        };
        let launch = blocks(kernel, items.div_ceil(SUM_THREADS), SUM_THREADS as u32)?;
        // SAFETY: `to` is of rows that were checked, and each head of each row has its share.
        unsafe { self.launch(stream, &SCAN_SUMS, "scan_sum_heads", launch, arguments) }
    }
}
