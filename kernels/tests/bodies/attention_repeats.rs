//! Repeated attention calls.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::AttentionSaved;
use tidemill_kernels::shape::AttentionShape;

use super::agreement::Transcript;
use super::arm::{Arm, Sizes};
use super::attention_case::{AttentionCase, PlacedInputs, attention_shape};
use super::device::{Device, Layout, Placed};
use super::inputs::Inputs;
use super::number::Number;

/// The variable that sets the number of runs, and chooses sizes of real models.
const REPEATS_VARIABLE: &str = "TIDEMILL_TEST_REPEATS";

/// The number of runs, and the sizes: samples and positions, heads and their width.
fn runs(sizes: Sizes) -> (usize, Vec<[[usize; 2]; 2]>) {
    match std::env::var(REPEATS_VARIABLE) {
        Ok(repeats) => {
            let repeats = repeats.parse().expect("TIDEMILL_TEST_REPEATS: expected a number");
            (repeats, vec![[[4, 2048], [16, 128]], [[1, 8192], [32, 128]], [[8, 2048], [16, 64]]])
        }
        Err(_) => (3, sizes.choose(vec![[[2, 300], [2, 128]]], vec![[[1, 150], [1, 128]]])),
    }
}

/// Where the forward and backward kernels write.
struct Outputs<B: Backend<Activation: Number>> {
    out: Placed<B, B::Activation>,
    log_sum_exp: Placed<B>,
    dqkv: Placed<B, B::Activation>,
}

/// The outputs' memory, as stored.
struct Memory<T> {
    out: Vec<T>,
    log_sum_exp: Vec<f32>,
    dqkv: Vec<T>,
}

impl<B: Backend<Activation: Number>> Outputs<B> {
    fn poisoned(device: &mut Device<'_, B>, shape: AttentionShape) -> Self {
        let (rows, width) = (shape.sequences().rows(), shape.width());
        Self {
            out: Placed::poisoned(device, Layout::packed(rows, width)),
            log_sum_exp: Placed::poisoned(device, Layout::range(rows * shape.heads())),
            dqkv: Placed::poisoned(device, Layout::packed(rows, 3 * width)),
        }
    }

    fn of_a_run(
        &mut self,
        device: &mut Device<'_, B>,
        inputs: &PlacedInputs<B>,
        dout: &Placed<B, B::Activation>,
        shape: AttentionShape,
    ) -> Memory<B::Activation> {
        let Self { out, log_sum_exp, dqkv } = self;
        let (backend, stream, inputs) = (device.backend, &mut device.stream, inputs.view());
        let (rows, sums) = (out.matrix_mut(), log_sum_exp.slice_mut());
        backend.attention_forward(stream, rows, sums, inputs, shape).unwrap();
        let (out, log_sum_exp) = (out.matrix(), log_sum_exp.slice());
        let saved = AttentionSaved { dout: dout.matrix(), inputs, out, log_sum_exp };
        backend.attention_backward(stream, dqkv.matrix_mut(), saved, shape).unwrap();
        Memory {
            out: self.out.memory(device),
            log_sum_exp: self.log_sum_exp.memory(device),
            dqkv: self.dqkv.memory(device),
        }
    }
}

impl<T: Number> Memory<T> {
    fn assert_same(&self, label: &str, first: &Self) {
        for (what, found, first) in [
            ("out", bytes_of(&self.out), bytes_of(&first.out)),
            ("log_sum_exp", bytes_of(&self.log_sum_exp), bytes_of(&first.log_sum_exp)),
            ("dq, dk and dv", bytes_of(&self.dqkv), bytes_of(&first.dqkv)),
        ] {
            assert!(found == first, "{label}: {what} of two runs differ");
        }
    }
}

fn bytes_of<T: Number>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Runs of the same inputs have the same bits, forward and backward.
pub fn agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (repeats, shapes) = runs(device.sizes);
    let cases = shapes.into_iter().enumerate().flat_map(|case| [(case, true), (case, false)]);
    for ((seed, [rows, heads]), has_slopes) in cases {
        let shape = attention_shape(rows, heads, 1.0 / (heads[1] as f32).sqrt(), None);
        let label = format!("{shape:?} biases {has_slopes}");
        let mut case = AttentionCase::new::<B::Activation>(&mut Inputs::new(seed as u64), shape);
        if has_slopes {
            case = case.with_slopes(shape);
        }
        let inputs = PlacedInputs::new(&mut device, &case, shape);
        let packed = Layout::packed(shape.sequences().rows(), shape.width());
        let dout = Placed::new(&mut device, packed, &case.dout);
        let mut outputs = Outputs::poisoned(&mut device, shape);
        let first = outputs.of_a_run(&mut device, &inputs, &dout, shape);
        for _ in 1..repeats {
            let again = outputs.of_a_run(&mut device, &inputs, &dout, shape);
            again.assert_same(&label, &first);
        }
        transcript.record(&label, &first.log_sum_exp);
    }
    transcript
}
