//! Inputs of scans of heads, on the host and placed as a Mamba-2 block places them.

use std::ops::Range;

use tidemill_kernels::backend::{DeltaLimits, HeadScanGradients, HeadScanInputs};
use tidemill_kernels::reference::head_scan;
use tidemill_kernels::shape::{HeadScanShape, HeadScanSizes, SequenceShape};
use tidemill_kernels::{Backend, Slice};

use super::device::{Device, Layout, Placed};
use super::documents::rows_of;
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::scan_case::Regime;

/// A scan of h heads of p channels, g groups and n states.
pub fn shape_of(
    [samples, positions]: [usize; 2],
    samples_per_grain: usize,
    [heads, head_width, groups, states]: [usize; 4],
) -> HeadScanShape {
    let sequences = SequenceShape::new(samples, positions).unwrap();
    let sizes = HeadScanSizes { heads, head_width, groups, states };
    HeadScanShape::new(sequences, samples_per_grain, sizes).unwrap()
}

/// The same heads over other sequences.
pub fn with_sequences(shape: HeadScanShape, sequences: [usize; 2], grain: usize) -> HeadScanShape {
    let sizes = [shape.heads(), shape.head_width(), shape.groups(), shape.states()];
    shape_of(sequences, grain, sizes)
}

/// Inputs of a scan, forward and backward, row-major.
#[derive(Clone)]
pub struct HeadScanCase {
    /// delta_raw, x, bc, z and dout: an array of columns for each row.
    pub of_rows: [Vec<f32>; 5],
    pub delta_bias: Vec<f32>,
    pub a_log: Vec<f32>,
    pub d: Vec<f32>,
    pub limits: [f32; 2],
    /// `starts[b t]`
    pub starts: Option<Vec<u32>>,
}

impl HeadScanCase {
    pub fn new<T: Number>(inputs: &mut Inputs, shape: HeadScanShape, regime: Regime) -> Self {
        let rows = shape.sequences().rows();
        let (heads, width) = (shape.heads(), shape.width());
        let (delta, gate, [low, high]) = match regime {
            Regime::Mild => (1.0, 2.0, [-4.0, -1.0]),
            Regime::Saturated => (30.0, 20.0, [-1.0, 1.0]),
        };
        Self {
            of_rows: [
                inputs.uniform_of::<T>(rows * heads, -delta, delta),
                inputs.uniform_of::<T>(rows * width, -1.0, 1.0),
                inputs.uniform_of::<T>(rows * shape.bc_width(), -1.0, 1.0),
                inputs.uniform_of::<T>(rows * width, -gate, gate),
                inputs.uniform(rows * width, -1.0, 1.0),
            ],
            delta_bias: inputs.uniform(heads, low, high),
            a_log: inputs.uniform(heads, -1.0, 2.8),
            d: inputs.uniform(heads, 0.5, 1.5),
            limits: [[0.0, f32::INFINITY], [0.05, 0.5]][inputs.pick(2)],
            starts: None,
        }
    }

    /// Columns of delta_raw, x, bc, z and dout.
    pub fn columns(shape: HeadScanShape) -> [usize; 5] {
        [shape.heads(), shape.width(), shape.bc_width(), shape.width(), shape.width()]
    }

    /// The case of some rows, as one document.
    pub fn rows(&self, rows: &Range<usize>, shape: HeadScanShape) -> Self {
        let columns = Self::columns(shape);
        let of_rows = std::array::from_fn(|i| rows_of(&self.of_rows[i], rows, columns[i]));
        Self { of_rows, starts: None, ..self.clone() }
    }

    /// The inputs in `f64`.
    pub fn wide(&self) -> WideInputs {
        WideInputs {
            of_rows: self.of_rows.each_ref().map(|values| wide(values)),
            of_heads: [&self.delta_bias, &self.a_log, &self.d].map(|values| wide(values)),
            limits: self.limits.map(f64::from),
            starts: self.starts.clone(),
        }
    }
}

/// Inputs of the reference scan.
pub struct WideInputs {
    pub of_rows: [Vec<f64>; 5],
    of_heads: [Vec<f64>; 3],
    limits: [f64; 2],
    starts: Option<Vec<u32>>,
}

impl WideInputs {
    pub fn view(&self) -> head_scan::HeadScanInputs<'_> {
        let [delta_raw, x, bc, z, _] = &self.of_rows;
        let [delta_bias, a_log, d] = &self.of_heads;
        let (delta_limits, starts) = (self.limits, self.starts.as_deref());
        head_scan::HeadScanInputs {
            delta_raw,
            delta_bias,
            x,
            bc,
            z,
            a_log,
            d,
            delta_limits,
            starts,
        }
    }
}

/// Rows of `parts` side by side.
fn beside(rows: usize, parts: &[(&[f32], usize)]) -> Vec<f32> {
    let of_row = |row: usize| {
        parts.iter().flat_map(move |(values, columns)| &values[row * columns..(row + 1) * columns])
    };
    (0..rows).flat_map(of_row).copied().collect()
}

/// `columns` columns from `first` on of rows of `width`.
fn columns_of(values: &[f32], width: usize, first: usize, columns: usize) -> Vec<f32> {
    values.chunks(width).flat_map(|row| &row[first..first + columns]).copied().collect()
}

/// The layouts of projected and xbc, or of their gradients.
fn layouts(shape: HeadScanShape) -> [Layout; 2] {
    let rows = shape.sequences().rows();
    [shape.projected_width(), shape.xbc_width()].map(|columns| Layout::inside_wider(rows, columns))
}

/// Inputs in device memory.
pub struct PlacedInputs<B: Backend<Activation: Number>> {
    of_rows: [Placed<B, B::Activation>; 2],
    of_heads: [Placed<B>; 3],
    limits: [f32; 2],
    starts: Option<B::Buffer<u32>>,
}

impl<B: Backend<Activation: Number>> PlacedInputs<B> {
    pub fn new(device: &mut Device<'_, B>, case: &HeadScanCase, shape: HeadScanShape) -> Self {
        let layouts = layouts(shape);
        let rows = shape.sequences().rows();
        let [h, e, bc, ..] = HeadScanCase::columns(shape);
        let [delta_raw, x, b_and_c, z, _] = &case.of_rows;
        // The input of the convolution lies between these columns, and is poison here.
        let between = vec![<B::Activation as Number>::POISON.widened(); rows * (e + bc)];
        let of_rows = [
            beside(rows, &[(z, e), (&between, e + bc), (delta_raw, h)]),
            beside(rows, &[(x, e), (b_and_c, bc)]),
        ];
        let of_heads = [&case.delta_bias, &case.a_log, &case.d];
        Self {
            of_rows: std::array::from_fn(|i| Placed::new(device, layouts[i], &of_rows[i])),
            of_heads: of_heads.map(|x| Placed::new(device, Layout::range(shape.heads()), x)),
            limits: case.limits,
            starts: case.starts.as_ref().map(|starts| device.upload(starts)),
        }
    }

    pub fn view(&self) -> HeadScanInputs<'_, B> {
        let [projected, xbc] = self.of_rows.each_ref().map(Placed::matrix);
        let [delta_bias, a_log, d] = self.of_heads.each_ref().map(Placed::slice);
        let delta_limits = DeltaLimits::new(self.limits[0], self.limits[1]).unwrap();
        let starts = self.starts.as_ref().map(Slice::all);
        HeadScanInputs { projected, xbc, delta_bias, a_log, d, delta_limits, starts }
    }
}

/// The results of a scan, forward and backward, each with its name.
pub struct Results {
    pub out: Vec<f32>,
    /// Gradients with an element for each row and column.
    pub of_rows: [(&'static str, Vec<f32>); 4],
    /// Gradients with an element for each grain and head.
    pub of_grains: [(&'static str, Vec<f32>); 3],
}

impl Results {
    /// All gradients.
    pub fn gradients(&self) -> impl Iterator<Item = &(&'static str, Vec<f32>)> {
        self.of_rows.iter().chain(&self.of_grains)
    }
}

/// Runs the scan forward and backward into poisoned outputs.
pub fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &HeadScanCase,
    shape: HeadScanShape,
) -> Results {
    let packed = Layout::packed(shape.sequences().rows(), shape.width());
    let of_grains = Layout::range(shape.grains().grains() * shape.heads());
    let inputs = PlacedInputs::new(device, case, shape);
    let dout: Placed<B> = Placed::new(device, packed, &case.of_rows[4]);
    let mut out: Placed<B> = Placed::poisoned(device, packed);
    let mut row_gradients = layouts(shape).map(|layout| Placed::poisoned(device, layout));
    let mut grain_gradients = [of_grains; 3].map(|layout| Placed::poisoned(device, layout));
    let [dprojected, dxbc] = row_gradients.each_mut().map(Placed::matrix_mut);
    let [da_log, dd, ddelta_bias] = grain_gradients.each_mut().map(Placed::slice_mut);
    let gradients = HeadScanGradients { dprojected, dxbc, da_log, dd, ddelta_bias };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.head_scan_forward(stream, out.matrix_mut(), inputs.view(), shape).expect(label);
    backend
        .head_scan_backward(stream, gradients, dout.matrix(), inputs.view(), shape)
        .expect(label);
    let [dprojected, dxbc] = row_gradients.map(|gradient| gradient.read(device));
    let [h, e, bc, ..] = HeadScanCase::columns(shape);
    let (projected, xbc) = (shape.projected_width(), shape.xbc_width());
    let between = columns_of(&dprojected, projected, e, xbc);
    let poison = <B::Activation as Number>::POISON.widened().to_bits();
    assert!(
        between.iter().all(|x| x.to_bits() == poison),
        "{label}: what lies between was written"
    );
    let ddelta_raw = columns_of(&dprojected, projected, e + xbc, h);
    let dz = columns_of(&dprojected, projected, 0, e);
    let [dx, dbc] =
        [(0, e), (e, bc)].map(|(first, columns)| columns_of(&dxbc, xbc, first, columns));
    let [da_log, dd, ddelta_bias] = grain_gradients.map(|gradient| gradient.read(device));
    Results {
        out: out.read(device),
        of_rows: [("ddelta_raw", ddelta_raw), ("dx", dx), ("dbc", dbc), ("dz", dz)],
        of_grains: [("da_log", da_log), ("dd", dd), ("ddelta_bias", ddelta_bias)],
    }
}
