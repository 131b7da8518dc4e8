//! The scan of heads, as a Mamba-2 block calls it.

use tidemill_kernels::backend::{DeltaLimits, HeadScanGradients, HeadScanInputs};
use tidemill_kernels::shape::{HeadScanShape, HeadScanSizes, SequenceShape};
use tidemill_kernels::{Backend, KernelError, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};
use super::sequences::Documents;

/// The most channels of a head.
const HEAD_WIDTH: usize = 64;
/// States for each that a Mamba has, and the most.
const STATES: [usize; 2] = [8, 256];

pub(super) fn head_scan<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    scan(bench, size, "head_scan", Documents::Together)
}

pub(super) fn head_scan_documents<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    scan(bench, size, "head_scan_documents", Documents::Apart)
}

/// Heads of one group, as wide as they can be up to 64 channels.
fn sizes(size: SequenceSize) -> HeadScanSizes {
    let divides = |width: &usize| size.inner.is_multiple_of(*width);
    let head_width = (1..=HEAD_WIDTH).rev().find(divides).unwrap_or(1);
    let states = size.states.saturating_mul(STATES[0]).min(STATES[1]);
    HeadScanSizes { heads: size.inner / head_width, head_width, groups: 1, states }
}

fn scan<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
    kernel: &'static str,
    documents: Documents,
) -> Measured {
    let SequenceSize { samples, positions, inner, .. } = size;
    let rows = size.rows();
    let starts = documents.starts(bench, size)?;
    let HeadScanSizes { heads, head_width, states, .. } = sizes(size);
    let shape = HeadScanShape::new(SequenceShape::new(samples, positions)?, 1, sizes(size))?;
    let (projected_width, xbc_width) = (shape.projected_width(), shape.xbc_width());
    let projected = bench.activations(rows * projected_width)?;
    let xbc = bench.activations(rows * xbc_width)?;
    let delta_bias = bench.floats(heads, [-4.6, -2.3])?;
    let a_log = bench.floats(heads, [0.0, 2.8])?;
    let d = bench.floats(heads, [0.5, 1.5])?;
    let dout = bench.floats(rows * inner, [-1.0, 1.0])?;
    let mut out = bench.room::<f32>(rows * inner)?;
    let inputs = || -> Result<HeadScanInputs<'_, B>, KernelError> {
        Ok(HeadScanInputs {
            projected: Slice::all(&projected).matrix(rows, projected_width)?,
            xbc: Slice::all(&xbc).matrix(rows, xbc_width)?,
            delta_bias: Slice::all(&delta_bias),
            a_log: Slice::all(&a_log),
            d: Slice::all(&d),
            delta_limits: DeltaLimits::NONE,
            starts: starts.as_ref().map(Slice::all),
        })
    };
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, inner)?;
        backend.head_scan_forward(stream, out, inputs()?, shape)
    })?;
    let mut dprojected = bench.room::<B::Activation>(rows * projected_width)?;
    let mut dxbc = bench.room::<B::Activation>(rows * xbc_width)?;
    let mut da_log = bench.room::<f32>(samples * heads)?;
    let mut dd = bench.room::<f32>(samples * heads)?;
    let mut ddelta_bias = bench.room::<f32>(samples * heads)?;
    let backward = bench.milliseconds(|backend, stream| {
        let gradients = HeadScanGradients {
            dprojected: SliceMut::all(&mut dprojected).matrix(rows, projected_width)?,
            dxbc: SliceMut::all(&mut dxbc).matrix(rows, xbc_width)?,
            da_log: SliceMut::all(&mut da_log),
            dd: SliceMut::all(&mut dd),
            ddelta_bias: SliceMut::all(&mut ddelta_bias),
        };
        let dout = Slice::all(&dout).matrix(rows, inner)?;
        backend.head_scan_backward(stream, gradients, dout, inputs()?, shape)
    })?;
    let name = format!("({samples}, {positions}, {heads} heads of {head_width}, {states})");
    let name = documents.shape(name);
    // z, x, B, C and raw step sizes; and what is fp32: what leaves the gate, or its gradient.
    let read = bench.activation_bytes() * (rows * (inner + xbc_width + heads)) as f64
        + documents.bytes(size);
    let of_gate = 4.0 * (rows * inner) as f64;
    // In chunks, each state at each position takes one product when it is read and one when it is updated.
    let products = 2.0 * (rows * inner * states) as f64;
    let line = |direction, bytes, operations, milliseconds| Measurement {
        kernel,
        direction,
        shape: name.clone(),
        work: Work { bytes, operations },
        milliseconds,
    };
    Ok(vec![
        line("forward", read + of_gate, 2.0 * products, forward),
        line("backward", 2.0 * read + of_gate, 6.0 * products, backward),
    ])
}
