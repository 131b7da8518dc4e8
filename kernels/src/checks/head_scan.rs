//! The scan of heads, whole and in pieces.

use super::checker::{Checker, Numbers};
use crate::backend::{Backend, DeltaLimits, HeadScanGradients, HeadScanInputs, PieceState};
use crate::error::Result;
use crate::reference::head_scan as scan;
use crate::shape::{HeadScanShape, HeadScanSizes, SequenceShape};

/// Samples and positions: less than a chunk, and several; the latter of the sizes that models have.
const SIZES: [([usize; 2], HeadScanSizes); 2] = [
    ([2, 7], HeadScanSizes { heads: 2, head_width: 3, groups: 1, states: 5 }),
    ([1, 131], HeadScanSizes { heads: 2, head_width: 64, groups: 2, states: 128 }),
];

pub(super) fn head_scan<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for ([samples, positions], sizes) in SIZES {
        whole(checker, HeadScanShape::new(SequenceShape::new(samples, positions)?, 1, sizes)?)?;
        step(checker, HeadScanShape::new(SequenceShape::new(samples, 1)?, 1, sizes)?)?;
    }
    Ok(())
}

/// The inputs of a scan of heads: on the device, and in `f64` as its definition reads them.
struct Read<B: Backend> {
    projected: Numbers<B, B::Activation>,
    xbc: Numbers<B, B::Activation>,
    delta_bias: Numbers<B, f32>,
    a_log: Numbers<B, f32>,
    d: Numbers<B, f32>,
    shape: HeadScanShape,
    /// delta_raw, x, B and C, z.
    wide: [Vec<f64>; 4],
}

/// `columns` columns from `first` on of rows of `width`.
fn columns(values: &[f64], width: usize, first: usize, columns: usize) -> Vec<f64> {
    values.chunks(width).flat_map(|row| &row[first..first + columns]).copied().collect()
}

impl<B: Backend> Read<B> {
    fn new(checker: &mut Checker<'_, B>, shape: HeadScanShape) -> Result<Self> {
        let (rows, heads) = (shape.sequences().rows(), shape.heads());
        let [projected_width, xbc_width] = [shape.projected_width(), shape.xbc_width()];
        let projected = checker.activations(rows * projected_width)?;
        let xbc = checker.activations(rows * xbc_width)?;
        let of_projected = |first, count| columns(&projected.wide, projected_width, first, count);
        let of_xbc = |first, count| columns(&xbc.wide, xbc_width, first, count);
        let wide = [
            of_projected(projected_width - heads, heads),
            of_xbc(0, shape.width()),
            of_xbc(shape.width(), shape.bc_width()),
            of_projected(0, shape.width()),
        ];
        Ok(Self {
            delta_bias: checker.numbers(heads, [-2.0, 0.0])?,
            a_log: checker.numbers(heads, [0.0, 1.0])?,
            d: checker.numbers(heads, [0.5, 1.5])?,
            projected,
            xbc,
            shape,
            wide,
        })
    }

    fn inputs(&self) -> Result<HeadScanInputs<'_, B>> {
        Ok(HeadScanInputs {
            projected: self.projected.matrix(self.shape.projected_width())?,
            xbc: self.xbc.matrix(self.shape.xbc_width())?,
            delta_bias: self.delta_bias.slice(),
            a_log: self.a_log.slice(),
            d: self.d.slice(),
            delta_limits: DeltaLimits::NONE,
            starts: None,
        })
    }

    fn wide(&self) -> scan::HeadScanInputs<'_> {
        let [delta_raw, x, bc, z] = &self.wide;
        scan::HeadScanInputs {
            delta_raw,
            delta_bias: &self.delta_bias.wide,
            x,
            bc,
            z,
            a_log: &self.a_log.wide,
            d: &self.d.wide,
            delta_limits: [0.0, f64::INFINITY],
            starts: None,
        }
    }
}

fn whole<B: Backend>(checker: &mut Checker<'_, B>, shape: HeadScanShape) -> Result<()> {
    let (rows, samples) = (shape.sequences().rows(), shape.sequences().samples());
    let [projected_width, xbc_width, width] =
        [shape.projected_width(), shape.xbc_width(), shape.width()];
    let read = Read::new(checker, shape)?;
    let dout = checker.numbers::<f32>(rows * width, [-1.0, 1.0])?;
    let mut out = checker.room::<f32>(rows * width)?;
    // Its middle columns stay as they are.
    let mut dprojected = checker.activations(rows * projected_width)?;
    let mut dxbc = checker.room::<B::Activation>(rows * xbc_width)?;
    let [da_log, dd, ddelta_bias] = [(); 3].map(|()| checker.room::<f32>(samples * shape.heads()));
    let (mut da_log, mut dd, mut ddelta_bias) = (da_log?, dd?, ddelta_bias?);
    let (backend, stream) = (checker.backend, &mut checker.stream);
    backend.head_scan_forward(stream, out.matrix_mut(width)?, read.inputs()?, shape)?;
    let gradients = HeadScanGradients {
        dprojected: dprojected.matrix_mut(projected_width)?,
        dxbc: dxbc.matrix_mut(xbc_width)?,
        da_log: da_log.slice_mut(),
        dd: dd.slice_mut(),
        ddelta_bias: ddelta_bias.slice_mut(),
    };
    backend.head_scan_backward(stream, gradients, dout.matrix(width)?, read.inputs()?, shape)?;
    let expected = scan::backward(&dout.wide, &read.wide(), shape);
    checker.compare("head_scan_forward", &out, &scan::forward(&read.wide(), shape))?;
    let beside = |parts: &[(&[f64], usize)]| -> Vec<f64> {
        let of_row = |row: usize| {
            parts.iter().flat_map(move |(values, columns)| &values[row * columns..][..*columns])
        };
        (0..rows).flat_map(of_row).copied().collect()
    };
    let middle = columns(&dprojected.wide, projected_width, width, xbc_width);
    let expected_projected = beside(&[
        (&expected.dz, width),
        (&middle, xbc_width),
        (&expected.ddelta_raw, shape.heads()),
    ]);
    let expected_xbc = beside(&[(&expected.dx, width), (&expected.dbc, shape.bc_width())]);
    checker.compare("head_scan_backward, dprojected", &dprojected, &expected_projected)?;
    checker.compare("head_scan_backward, dxbc", &dxbc, &expected_xbc)?;
    checker.compare("head_scan_backward, da_log", &da_log, &expected.da_log)?;
    checker.compare("head_scan_backward, dd", &dd, &expected.dd)?;
    checker.compare("head_scan_backward, ddelta_bias", &ddelta_bias, &expected.ddelta_bias)
}

fn step<B: Backend>(checker: &mut Checker<'_, B>, shape: HeadScanShape) -> Result<()> {
    let (samples, width) = (shape.sequences().samples(), shape.width());
    let read = Read::new(checker, shape)?;
    let mut state = checker.numbers::<f32>(samples * width * shape.states(), [-1.0, 1.0])?;
    let mut out = checker.room::<f32>(samples * width)?;
    let mut moved = state.wide.clone();
    let expected = scan::piece(&mut moved, &read.wide(), shape);
    let (backend, stream) = (checker.backend, &mut checker.stream);
    let piece = PieceState { state: state.slice_mut(), lengths: None };
    backend.head_scan_piece(stream, out.matrix_mut(width)?, piece, read.inputs()?, shape)?;
    checker.compare("head_scan_piece", &out, &expected)?;
    checker.compare("head_scan_piece, state", &state, &moved)
}
