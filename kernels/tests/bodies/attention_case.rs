//! Inputs of attention, on the host and placed as a transformer block places them.

use std::num::NonZeroUsize;
use std::ops::Range;

use tidemill_kernels::backend::{AttentionInputs, AttentionSaved};
use tidemill_kernels::reference::attention;
use tidemill_kernels::shape::{AttentionShape, SequenceShape};
use tidemill_kernels::{Backend, Slice};

use super::agreement::assert_same_bits;
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// A shape by its numbers.
pub fn attention_shape(
    [samples, positions]: [usize; 2],
    [heads, head_width]: [usize; 2],
    scale: f32,
    window: Option<usize>,
) -> AttentionShape {
    let sequences = SequenceShape::new(samples, positions).unwrap();
    let window = window.map(|window| NonZeroUsize::new(window).unwrap());
    AttentionShape::new(sequences, heads, head_width, scale, window).unwrap()
}

/// Inputs of attention, forward and backward, row-major.
#[derive(Clone)]
pub struct AttentionCase {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    pub slopes: Option<Vec<f32>>,
    pub starts: Option<Vec<u32>>,
}

impl AttentionCase {
    /// A case without biases or documents.
    pub fn new<T: Number>(inputs: &mut Inputs, shape: AttentionShape) -> Self {
        let elements = shape.sequences().rows() * shape.width();
        let mut matrix = || inputs.uniform_of::<T>(elements, -1.0, 1.0);
        let (q, k, v, dout) = (matrix(), matrix(), matrix(), matrix());
        Self { q, k, v, dout, slopes: None, starts: None }
    }

    /// The case with the slopes of ALiBi.
    pub fn with_slopes(self, shape: AttentionShape) -> Self {
        let heads = shape.heads();
        let slope = |head: usize| (-8.0 * (head + 1) as f32 / heads as f32).exp2();
        Self { slopes: Some((0..heads).map(slope).collect()), ..self }
    }

    /// The case with documents that end after one position of `every`, on average.
    pub fn with_documents(self, inputs: &mut Inputs, shape: AttentionShape, every: usize) -> Self {
        let mut starts = Vec::new();
        for _ in 0..shape.sequences().samples() {
            let mut start = 0;
            for position in 0..shape.sequences().positions() {
                if inputs.pick(every) == 0 {
                    start = position as u32;
                }
                starts.push(start);
            }
        }
        Self { starts: Some(starts), ..self }
    }

    /// The positions of its sample that the query of a row attends to.
    pub fn seen(&self, row: usize, shape: AttentionShape) -> Range<usize> {
        let position = row % shape.sequences().positions();
        let start = self.starts.as_ref().map_or(0, |starts| starts[row] as usize);
        let oldest = shape.window().map_or(0, |window| (position + 1).saturating_sub(window.get()));
        start.max(oldest)..position + 1
    }

    /// The case restricted to some samples, positions and heads.
    pub fn part(
        &self,
        samples: Range<usize>,
        positions: Range<usize>,
        heads: Range<usize>,
        shape: AttentionShape,
    ) -> (Self, AttentionShape) {
        assert_eq!(positions.start, 0, "starts are counted from a sample's first position");
        let t = shape.sequences().positions();
        let rows = || samples.clone().flat_map(|b| positions.clone().map(move |i| b * t + i));
        let p = shape.head_width();
        let columns = heads.start * p..heads.end * p;
        let of = |values: &[f32]| -> Vec<f32> {
            let row = |row: usize| &values[row * shape.width()..][columns.clone()];
            rows().flat_map(row).copied().collect()
        };
        let case = Self {
            q: of(&self.q),
            k: of(&self.k),
            v: of(&self.v),
            dout: of(&self.dout),
            slopes: self.slopes.as_ref().map(|slopes| slopes[heads.clone()].to_vec()),
            starts: self.starts.as_ref().map(|starts| rows().map(|row| starts[row]).collect()),
        };
        let sizes = [[samples.len(), positions.len()], [heads.len(), p]];
        let window = shape.window().map(NonZeroUsize::get);
        (case, attention_shape(sizes[0], sizes[1], shape.scale(), window))
    }

    /// The case whose outputs and gradients of values are the sums of the sizes of this case's terms.
    pub fn of_sizes(&self) -> Self {
        let sizes = |values: &[f32]| values.iter().map(|x| x.abs()).collect();
        Self { v: sizes(&self.v), dout: sizes(&self.dout), ..self.clone() }
    }

    /// The inputs in `f64`.
    pub fn wide(&self) -> WideInputs<'_> {
        WideInputs {
            q: wide(&self.q),
            k: wide(&self.k),
            v: wide(&self.v),
            slopes: self.slopes.as_deref().map(wide),
            starts: self.starts.as_deref(),
        }
    }
}

/// Inputs of the reference.
pub struct WideInputs<'a> {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    slopes: Option<Vec<f64>>,
    starts: Option<&'a [u32]>,
}

impl WideInputs<'_> {
    pub fn view(&self) -> attention::AttentionInputs<'_> {
        attention::AttentionInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            slopes: self.slopes.as_deref(),
            starts: self.starts,
        }
    }
}

/// Inputs in device memory: q, k and v are the thirds of the rows of a matrix `[b t, 3 h p]`.
pub struct PlacedInputs<B: Backend<Activation: Number>> {
    qkv: [Placed<B, B::Activation>; 3],
    slopes: Option<Placed<B>>,
    starts: Option<B::Buffer<u32>>,
}

impl<B: Backend<Activation: Number>> PlacedInputs<B> {
    pub fn new(device: &mut Device<'_, B>, case: &AttentionCase, shape: AttentionShape) -> Self {
        let (rows, width) = (shape.sequences().rows(), shape.width());
        let mut third = |i: usize, values: &[f32]| {
            let layout = Layout::columns_of(rows, 3 * width, i * width, width);
            Placed::new(device, layout, values)
        };
        let qkv = [third(0, &case.q), third(1, &case.k), third(2, &case.v)];
        let slopes = case.slopes.as_ref();
        let starts = case.starts.as_ref();
        Self {
            qkv,
            slopes: slopes.map(|slopes| Placed::new(device, Layout::range(slopes.len()), slopes)),
            starts: starts.map(|starts| device.upload(starts)),
        }
    }

    pub fn view(&self) -> AttentionInputs<'_, B> {
        let [q, k, v] = self.qkv.each_ref().map(Placed::matrix);
        let slopes = self.slopes.as_ref().map(Placed::slice);
        AttentionInputs { q, k, v, slopes, starts: self.starts.as_ref().map(Slice::all) }
    }
}

/// The results of attention, forward and backward.
pub struct Results {
    /// `out[b t, h p]`; the gradients of q, k and v have the same shape.
    pub out: Vec<f32>,
    /// `log_sum_exp[b, h, t]`
    pub log_sum_exp: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
}

impl Results {
    /// All results of shape `[b t, h p]`: all but `log_sum_exp`.
    pub fn of_rows(&self) -> [(&'static str, &[f32]); 4] {
        [("out", &self.out), ("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
    }

    pub fn all(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        self.of_rows().into_iter().chain([("log_sum_exp", self.log_sum_exp.as_slice())])
    }

    /// Asserts that every result equals `expected`, to the bit.
    #[track_caller]
    pub fn assert_same_bits(&self, label: &str, expected: &Self) {
        for ((what, found), (_, expected)) in self.all().zip(expected.all()) {
            assert_same_bits(&format!("{label} {what}"), found, expected);
        }
    }
}

/// The three thirds of the rows of `dqkv[b t, 3 h p]`.
fn thirds(dqkv: &[f32], width: usize) -> [Vec<f32>; 3] {
    [0, 1, 2].map(|third| {
        let rows = dqkv.chunks(3 * width);
        rows.flat_map(|row| &row[third * width..(third + 1) * width]).copied().collect()
    })
}

/// Runs attention forward, then backward from its results.
pub fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &AttentionCase,
    shape: AttentionShape,
) -> Results {
    let (rows, width) = (shape.sequences().rows(), shape.width());
    let inputs = PlacedInputs::new(device, case, shape);
    let dout = Placed::new(device, Layout::packed(rows, width), &case.dout);
    let mut out = Placed::poisoned(device, Layout::inside_wider(rows, width));
    let mut sums: Placed<B> = Placed::poisoned(device, Layout::range(rows * shape.heads()));
    let mut dqkv = Placed::poisoned(device, Layout::inside_wider(rows, 3 * width));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .attention_forward(stream, out.matrix_mut(), sums.slice_mut(), inputs.view(), shape)
        .expect(label);
    backend
        .attention_backward(
            stream,
            dqkv.matrix_mut(),
            AttentionSaved {
                dout: dout.matrix(),
                inputs: inputs.view(),
                out: out.matrix(),
                log_sum_exp: sums.slice(),
            },
            shape,
        )
        .expect(label);
    let [dq, dk, dv] = thirds(&dqkv.read(device), width);
    Results { out: out.read(device), log_sum_exp: sums.read(device), dq, dk, dv }
}
