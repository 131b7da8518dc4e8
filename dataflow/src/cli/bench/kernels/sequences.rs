//! Kernels over sequences: the selective scan and the causal convolution, as a Mamba block calls them.

use tidemill_kernels::backend::{ConvGradients, ConvInputs, ScanGradients, ScanInputs, ScanSaved};
use tidemill_kernels::shape::{ConvShape, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, KernelError, MatrixMut, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};

/// Taps of the convolution.
const TAPS: usize = 4;
/// Positions of a document where samples are of several.
const DOCUMENT: usize = 256;

fn line(
    kernel: &'static str,
    direction: &'static str,
    shape: String,
    bytes: f64,
    milliseconds: f64,
) -> Measurement {
    Measurement { kernel, direction, shape, work: Work::bytes(bytes), milliseconds }
}

/// Whether samples are measured whole.
#[derive(Clone, Copy)]
pub(super) enum Documents {
    Together,
    Apart,
}

impl Documents {
    /// The starts of documents, for kernels that keep documents apart.
    pub(super) fn starts<B: Backend>(
        self,
        bench: &mut Bench<'_, B>,
        size: SequenceSize,
    ) -> Result<Option<B::Buffer<u32>>, KernelError> {
        match self {
            Self::Together => Ok(None),
            Self::Apart => {
                bench.document_starts([size.samples, size.positions], DOCUMENT).map(Some)
            }
        }
    }

    /// A shape, with how long documents are.
    pub(super) fn shape(self, shape: String) -> String {
        match self {
            Self::Together => shape,
            Self::Apart => format!("{shape}, documents of {DOCUMENT}"),
        }
    }

    /// Bytes of the starts of documents.
    pub(super) fn bytes(self, size: SequenceSize) -> f64 {
        match self {
            Self::Together => 0.0,
            Self::Apart => 4.0 * size.rows() as f64,
        }
    }
}

pub(super) fn selective_scan<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    scan(bench, size, "selective_scan", Documents::Together)
}

pub(super) fn selective_scan_documents<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    scan(bench, size, "selective_scan_documents", Documents::Apart)
}

fn scan<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
    kernel: &'static str,
    documents: Documents,
) -> Measured {
    let SequenceSize { samples, positions, inner, states } = size;
    let rows = size.rows();
    let sequences = SequenceShape::new(samples, positions)?;
    let starts = documents.starts(bench, size)?;
    let shape = ScanShape::new(sequences, 1, inner, states)?;
    let delta_raw = bench.activations(rows * inner)?;
    let delta_bias = bench.floats(inner, [-4.6, -2.3])?;
    let x = bench.activations(rows * inner)?;
    let bc = bench.activations(rows * 2 * states)?;
    let xz = bench.activations(rows * 2 * inner)?;
    let a_log = bench.floats(inner * states, [0.0, 2.8])?;
    let d = bench.floats(inner, [0.5, 1.5])?;
    let dout = bench.activations(rows * inner)?;
    let mut out = bench.room::<B::Activation>(rows * inner)?;
    let mut saved = bench.room::<f32>(bench.backend.selective_scan_saved_elements(shape))?;
    let inputs = || -> Result<ScanInputs<'_, B>, KernelError> {
        Ok(ScanInputs {
            delta_raw: Slice::all(&delta_raw).matrix(rows, inner)?,
            delta_bias: Slice::all(&delta_bias),
            x: Slice::all(&x).matrix(rows, inner)?,
            bc: Slice::all(&bc).matrix(rows, 2 * states)?,
            z: Slice::all(&xz).matrix(rows, 2 * inner)?.columns(inner, inner)?,
            a_log: Slice::all(&a_log),
            d: Slice::all(&d),
            starts: starts.as_ref().map(Slice::all),
        })
    };
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, inner)?;
        backend.selective_scan_forward(stream, out, SliceMut::all(&mut saved), inputs()?, shape)
    })?;
    let mut ddelta_raw = bench.room::<B::Activation>(rows * inner)?;
    let mut dx = bench.room::<B::Activation>(rows * inner)?;
    let mut dbc = bench.room::<B::Activation>(rows * 2 * states)?;
    let mut dxz = bench.room::<B::Activation>(rows * 2 * inner)?;
    let mut da_log = bench.room::<f32>(samples * inner * states)?;
    let mut dd = bench.room::<f32>(samples * inner)?;
    let mut ddelta_bias = bench.room::<f32>(samples * inner)?;
    let backward = bench.milliseconds(|backend, stream| {
        let dxz: MatrixMut<'_, B, _> = SliceMut::all(&mut dxz).matrix(rows, 2 * inner)?;
        let gradients = ScanGradients {
            ddelta_raw: SliceMut::all(&mut ddelta_raw).matrix(rows, inner)?,
            dx: SliceMut::all(&mut dx).matrix(rows, inner)?,
            dbc: SliceMut::all(&mut dbc).matrix(rows, 2 * states)?,
            dz: dxz.columns(inner, inner)?,
            da_log: SliceMut::all(&mut da_log),
            dd: SliceMut::all(&mut dd),
            ddelta_bias: SliceMut::all(&mut ddelta_bias),
            regated: Some(SliceMut::all(&mut out).matrix(rows, inner)?),
        };
        let dout = Slice::all(&dout).matrix(rows, inner)?;
        let saved = ScanSaved { dout, inputs: inputs()?, saved: Slice::all(&saved) };
        backend.selective_scan_backward(stream, gradients, saved, shape)
    })?;
    let activation = bench.activation_bytes();
    let (wide, narrow) = ((rows * inner) as f64, (rows * 2 * states) as f64);
    let name = documents.shape(format!("({samples}, {positions}, {inner}, {states})"));
    let starts = documents.bytes(size);
    let (read, both) = (4.0 * wide + narrow, 8.0 * wide + 2.0 * narrow);
    Ok(vec![
        line(kernel, "forward", name.clone(), activation * read + starts, forward),
        line(kernel, "backward", name, activation * both + starts, backward),
    ])
}

pub(super) fn causal_conv1d_silu<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    convolution(bench, size, "causal_conv1d_silu", Documents::Together)
}

pub(super) fn causal_conv1d_silu_documents<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    convolution(bench, size, "causal_conv1d_silu_documents", Documents::Apart)
}

fn convolution<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
    kernel: &'static str,
    documents: Documents,
) -> Measured {
    let SequenceSize { samples, positions, inner, .. } = size;
    let rows = size.rows();
    let starts = documents.starts(bench, size)?;
    let shape = ConvShape::new(SequenceShape::new(samples, positions)?, 1, inner, TAPS)?;
    let xz = bench.activations(rows * 2 * inner)?;
    let dout = bench.activations(rows * inner)?;
    let weight = bench.floats(inner * TAPS, [-0.5, 0.5])?;
    let bias = bench.floats(inner, [-0.5, 0.5])?;
    let mut out = bench.room::<B::Activation>(rows * inner)?;
    let mut dxz = bench.room::<B::Activation>(rows * 2 * inner)?;
    let mut dweight = bench.room::<f32>(samples * inner * TAPS)?;
    let mut dbias = bench.room::<f32>(samples * inner)?;
    let inputs = || -> Result<ConvInputs<'_, B>, KernelError> {
        Ok(ConvInputs {
            x: Slice::all(&xz).matrix(rows, 2 * inner)?.columns(0, inner)?,
            weight: Slice::all(&weight),
            bias: Some(Slice::all(&bias)),
            starts: starts.as_ref().map(Slice::all),
        })
    };
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, inner)?;
        backend.causal_conv1d_silu_forward(stream, out, inputs()?, shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let dxz: MatrixMut<'_, B, _> = SliceMut::all(&mut dxz).matrix(rows, 2 * inner)?;
        backend.causal_conv1d_silu_backward(
            stream,
            ConvGradients {
                dx: dxz.columns(0, inner)?,
                dweight: SliceMut::all(&mut dweight),
                dbias: Some(SliceMut::all(&mut dbias)),
            },
            Slice::all(&dout).matrix(rows, inner)?,
            inputs()?,
            shape,
        )
    })?;
    let elements = bench.activation_bytes() * (rows * inner) as f64;
    let starts = documents.bytes(size);
    let name = documents.shape(format!("({samples}, {positions}, {inner}), x inside xz"));
    Ok(vec![
        line(kernel, "forward", name.clone(), 2.0 * elements + starts, forward),
        line(kernel, "backward", name, 3.0 * elements + starts, backward),
    ])
}
