//! Rotary positions.

use tidemill_kernels::backend::RotaryInputs;
use tidemill_kernels::reference::rotary as defined;
use tidemill_kernels::shape::AttentionShape;
use tidemill_kernels::{Backend, Slice};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::attention_case::attention_shape;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::refusal_case::{Bench, assert_answer, matrix_mut, slice, wrong_by_one};

/// The inputs of the rotation, and the gradients to rotate back.
#[derive(Clone)]
struct Case {
    qk: Vec<f32>,
    dqkv: Vec<f32>,
    table: Vec<f32>,
    starts: Option<Vec<u32>>,
    past: Option<Vec<u32>>,
}

impl Case {
    fn new<T: Number>(seed: u64, shape: AttentionShape) -> Self {
        let inputs = &mut Inputs::new(seed);
        let (sequences, p) = (shape.sequences(), shape.head_width());
        let (rows, t) = (sequences.rows(), sequences.positions());
        let past: Vec<u32> = (0..sequences.samples()).map(|_| inputs.pick(6) as u32).collect();
        let angle = |position: usize, i: usize| position as f64 * 10.0_f64.powi(-(i as i32 % 5));
        let row = |position: usize| {
            let of =
                move |of: fn(f64) -> f64| (0..p / 2).map(move |i| of(angle(position, i)) as f32);
            of(f64::cos).chain(of(f64::sin))
        };
        let mut start = 0;
        let starts = (0..rows).map(|row| {
            if row % t == 0 || inputs.pick(4) == 0 {
                start = row as u32 % t as u32;
            }
            start
        });
        let starts = starts.collect();
        let columns = shape.width() + shape.key_value_width();
        Self {
            qk: inputs.uniform_of::<T>(rows * columns, -2.0, 2.0),
            dqkv: inputs.uniform_of::<T>(rows * 3 * shape.width(), -1.0, 1.0),
            table: (0..t + 6).flat_map(row).collect(),
            starts: (seed % 3 != 1).then_some(starts),
            past: (seed % 2 == 1).then_some(past),
        }
    }

    /// One sample alone.
    fn sample(&self, sample: usize, shape: AttentionShape) -> Self {
        let t = shape.sequences().positions();
        let of = |values: &[f32]| -> Vec<f32> {
            let elements = values.len() / shape.sequences().samples();
            values[sample * elements..(sample + 1) * elements].to_vec()
        };
        Self {
            qk: of(&self.qk),
            dqkv: of(&self.dqkv),
            table: self.table.clone(),
            starts: self.starts.as_ref().map(|all| all[sample * t..(sample + 1) * t].to_vec()),
            past: self.past.as_ref().map(|past| vec![past[sample]]),
        }
    }
}

/// The rotated queries and keys, and the gradients of the projections.
fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    case: &Case,
    shape: AttentionShape,
) -> [Vec<f32>; 2] {
    let (rows, width, shared) = (shape.sequences().rows(), shape.width(), shape.key_value_width());
    let layout = Layout::inside_wider(rows, width + shared);
    let mut qk = Placed::<B, B::Activation>::new(device, layout, &case.qk);
    let layout = Layout::inside_wider(rows, 3 * width);
    let mut dqkv = Placed::<B, B::Activation>::new(device, layout, &case.dqkv);
    let table = Placed::<B>::new(device, Layout::range(case.table.len()), &case.table);
    let starts = case.starts.as_ref().map(|starts| device.upload(starts));
    let past = case.past.as_ref().map(|past| device.upload(past));
    let inputs = RotaryInputs {
        table: table.slice(),
        starts: starts.as_ref().map(Slice::all),
        past: past.as_ref().map(Slice::all),
    };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.rotary_forward(stream, qk.matrix_mut(), inputs, shape).unwrap();
    backend.rotary_backward(stream, dqkv.matrix_mut(), inputs, shape).unwrap();
    let all = dqkv.read(device);
    let gradient = all.chunks(3 * width).flat_map(|row| row[..width + 2 * shared].to_vec());
    [qk.read(device), gradient.collect()]
}

/// Samples and positions, heads of queries, heads of keys and values, and the width of a head.
const SHAPES: [([usize; 2], [usize; 2], usize); 7] = [
    ([1, 1], [1, 1], 2),
    ([2, 5], [3, 3], 6),
    ([3, 7], [4, 2], 10),
    ([2, 9], [6, 2], 34),
    ([2, 3], [5, 1], 64),
    ([2, 3], [7, 1], 16),
    ([1, 66], [8, 2], 128),
];

/// Both directions agree with the definition, and a sample's bits do not depend on other samples.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, (rows, [heads, shared], p)) in SHAPES.into_iter().enumerate() {
        let shape = attention_shape(rows, [heads, p], 1.0, None);
        let shape = shape.with_key_value_heads(shared).unwrap();
        let case = Case::new::<B::Activation>(seed as u64, shape);
        let label = format!("rotary {shape:?} seed {seed}");
        device.margin = MARGINS[seed % 2];
        let found = run(&mut device, &case, shape);
        let table = wide(&case.table);
        let inputs = defined::RotaryInputs {
            table: &table,
            starts: case.starts.as_deref(),
            past: case.past.as_deref(),
        };
        let forward = defined::forward(&wide(&case.qk), &inputs, shape);
        let backward = defined::backward(&wide(&case.dqkv), &inputs, shape);
        let allowed = tolerance::<B::Activation>(shape.group());
        assert_close_beside(&format!("{label} forward"), &found[0], &forward, allowed, 1.0);
        assert_close_beside(&format!("{label} backward"), &found[1], &backward, allowed, 1.0);
        transcript.record(&label, &found[0]);
        transcript.record(&label, &found[1]);
        device.margin = MARGINS[1 - seed % 2];
        let last = rows[0] - 1;
        let one = attention_shape([1, rows[1]], [heads, p], 1.0, None);
        let one = one.with_key_value_heads(shared).unwrap();
        let alone = run(&mut device, &case.sample(last, shape), one);
        for (alone, found) in alone.iter().zip(&found) {
            assert_same_bits(&label, alone, &found[found.len() - alone.len()..]);
        }
    }
    transcript
}

/// Shapes that do not fit 2 samples of 3 positions, 4 heads of queries, 2 of keys and values, of 6 columns each.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = attention_shape([2, 3], [4, 6], 1.0, None).with_key_value_heads(2).unwrap();
    // One more row of the table changes nothing; one more element is an error.
    for (wrong, sizes) in wrong_by_one([6, 36, 6, 72, 18, 6, 2]) {
        let [rows, columns, d_rows, d_columns, table, starts, past] = sizes;
        let (stream, outs) = (&mut bench.device.stream, &mut bench.activation_outs);
        let inputs = RotaryInputs {
            table: slice(&bench.zeros, table),
            starts: Some(slice(&bench.tokens, starts)),
            past: Some(slice(&bench.tokens, past)),
        };
        let qk = matrix_mut(&mut outs[0], [rows, columns]);
        let result = backend.rotary_forward(stream, qk, inputs, shape);
        assert_answer("rotary_forward", wrong.filter(|size| ![2, 3].contains(size)), result);
        let dqkv = matrix_mut(&mut outs[1], [d_rows, d_columns]);
        let result = backend.rotary_backward(stream, dqkv, inputs, shape);
        assert_answer("rotary_backward", wrong.filter(|&size| size > 1), result);
    }
    let odd = attention_shape([2, 3], [4, 5], 1.0, None);
    let inputs = RotaryInputs { table: slice(&bench.zeros, 15), starts: None, past: None };
    let (stream, outs) = (&mut bench.device.stream, &mut bench.activation_outs);
    let qk = matrix_mut(&mut outs[0], [6, 40]);
    assert_shape_error("odd heads", backend.rotary_forward(stream, qk, inputs, odd));
    for heads in [0, 3, 8] {
        assert!(shape.with_key_value_heads(heads).is_err(), "{heads} heads");
    }
    bench.finish();
}
