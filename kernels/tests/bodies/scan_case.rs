//! Inputs of selective scans, on the host and placed as a Mamba block places them.

use tidemill_kernels::backend::ScanInputs;
use tidemill_kernels::reference::selective_scan;
use tidemill_kernels::shape::{ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Slice};

use super::device::{Device, Layout, Placed};
use super::documents::rows_of;
use super::inputs::{Inputs, wide};
use super::number::Number;

/// How large the inputs are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Regime {
    /// As in a model that trains: delta around 0.1, decays of every size.
    Mild,
    /// Softplus and gate in both tails, decays that underflow and decays of almost one.
    Saturated,
}

/// Inputs of a scan, forward and backward, row-major.
#[derive(Clone)]
pub struct ScanCase {
    pub delta_raw: Vec<f32>,
    pub delta_bias: Vec<f32>,
    pub x: Vec<f32>,
    pub bc: Vec<f32>,
    pub z: Vec<f32>,
    pub a_log: Vec<f32>,
    pub d: Vec<f32>,
    pub dout: Vec<f32>,
    /// `starts[b t]`
    pub starts: Option<Vec<u32>>,
}

impl ScanCase {
    pub fn new<T: Number>(inputs: &mut Inputs, shape: ScanShape, regime: Regime) -> Self {
        let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
        let (rows, inner) = (sequences.rows(), sequences.rows() * channels);
        let (delta, gate) = match regime {
            Regime::Mild => (1.0, 2.0),
            Regime::Saturated => (30.0, 20.0),
        };
        let (low, high) = match regime {
            Regime::Mild => (-4.0, -1.0),
            Regime::Saturated => (-1.0, 1.0),
        };
        Self {
            delta_raw: inputs.uniform_of::<T>(inner, -delta, delta),
            delta_bias: inputs.uniform(channels, low, high),
            x: inputs.uniform_of::<T>(inner, -1.0, 1.0),
            bc: inputs.uniform_of::<T>(rows * 2 * states, -1.0, 1.0),
            z: inputs.uniform_of::<T>(inner, -gate, gate),
            a_log: inputs.uniform(channels * states, -1.0, 2.8),
            d: inputs.uniform(channels, 0.5, 1.5),
            dout: inputs.uniform_of::<T>(inner, -1.0, 1.0),
            starts: None,
        }
    }

    /// The case of some samples alone.
    pub fn samples(&self, samples: std::ops::Range<usize>, shape: ScanShape) -> (Self, ScanShape) {
        let of_samples = |values: &[f32]| -> Vec<f32> {
            let elements = values.len() / shape.sequences().samples();
            values[samples.start * elements..samples.end * elements].to_vec()
        };
        let case = Self {
            delta_raw: of_samples(&self.delta_raw),
            x: of_samples(&self.x),
            bc: of_samples(&self.bc),
            z: of_samples(&self.z),
            dout: of_samples(&self.dout),
            starts: self.starts.as_ref().map(|starts| {
                let positions = shape.sequences().positions();
                starts[samples.start * positions..samples.end * positions].to_vec()
            }),
            ..self.clone()
        };
        let sequences = SequenceShape::new(samples.len(), shape.sequences().positions()).unwrap();
        let (grain, channels) = (shape.samples_per_grain(), shape.channels());
        (case, ScanShape::new(sequences, grain, channels, shape.states()).unwrap())
    }

    /// The case of some rows, as one document.
    pub fn rows(&self, rows: &std::ops::Range<usize>, shape: ScanShape) -> Self {
        let (channels, states) = (shape.channels(), shape.states());
        Self {
            delta_raw: rows_of(&self.delta_raw, rows, channels),
            x: rows_of(&self.x, rows, channels),
            bc: rows_of(&self.bc, rows, 2 * states),
            z: rows_of(&self.z, rows, channels),
            dout: rows_of(&self.dout, rows, channels),
            starts: None,
            ..self.clone()
        }
    }

    /// The inputs in `f64`.
    pub fn wide(&self) -> WideInputs {
        WideInputs {
            delta_raw: wide(&self.delta_raw),
            delta_bias: wide(&self.delta_bias),
            x: wide(&self.x),
            bc: wide(&self.bc),
            z: wide(&self.z),
            a_log: wide(&self.a_log),
            d: wide(&self.d),
            starts: self.starts.clone(),
        }
    }
}

/// Inputs of the reference scan.
pub struct WideInputs {
    delta_raw: Vec<f64>,
    delta_bias: Vec<f64>,
    x: Vec<f64>,
    bc: Vec<f64>,
    z: Vec<f64>,
    a_log: Vec<f64>,
    d: Vec<f64>,
    starts: Option<Vec<u32>>,
}

impl WideInputs {
    pub fn view(&self) -> selective_scan::ScanInputs<'_> {
        selective_scan::ScanInputs {
            delta_raw: &self.delta_raw,
            delta_bias: &self.delta_bias,
            x: &self.x,
            bc: &self.bc,
            z: &self.z,
            a_log: &self.a_log,
            d: &self.d,
            starts: self.starts.as_deref(),
        }
    }
}

/// The layout of B and C, or of their gradients: after the columns of dt, with and without alignment.
pub fn after_rank(shape: ScanShape) -> Layout {
    let rank = if shape.channels().is_multiple_of(16) { 16 } else { 3 };
    let columns = 2 * shape.states();
    Layout::columns_of(shape.sequences().rows(), rank + columns, rank, columns)
}

/// Inputs in device memory: `bc` are the last columns of x_proj's output, `z` the right half of
/// `xz[b t, 2 e]`.
pub struct PlacedInputs<B: Backend<Activation: Number>> {
    delta_raw: Placed<B, B::Activation>,
    delta_bias: Placed<B>,
    x: Placed<B, B::Activation>,
    bc: Placed<B, B::Activation>,
    z: Placed<B, B::Activation>,
    a_log: Placed<B>,
    d: Placed<B>,
    starts: Option<B::Buffer<u32>>,
}

impl<B: Backend<Activation: Number>> PlacedInputs<B> {
    pub fn new(device: &mut Device<'_, B>, case: &ScanCase, shape: ScanShape) -> Self {
        let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
        let rows = sequences.rows();
        let packed = Layout::packed(rows, channels);
        let after_rank = after_rank(shape);
        let right_half = Layout::columns_of(rows, 2 * channels, channels, channels);
        let parameters = Layout::range(channels);
        Self {
            delta_raw: Placed::new(device, packed, &case.delta_raw),
            delta_bias: Placed::new(device, parameters, &case.delta_bias),
            x: Placed::new(device, packed, &case.x),
            bc: Placed::new(device, after_rank, &case.bc),
            z: Placed::new(device, right_half, &case.z),
            a_log: Placed::new(device, Layout::range(channels * states), &case.a_log),
            d: Placed::new(device, parameters, &case.d),
            starts: case.starts.as_ref().map(|starts| device.upload(starts)),
        }
    }

    pub fn view(&self) -> ScanInputs<'_, B> {
        ScanInputs {
            delta_raw: self.delta_raw.matrix(),
            delta_bias: self.delta_bias.slice(),
            x: self.x.matrix(),
            bc: self.bc.matrix(),
            z: self.z.matrix(),
            a_log: self.a_log.slice(),
            d: self.d.slice(),
            starts: self.starts.as_ref().map(Slice::all),
        }
    }
}
